"""Markdown as HTML: what is in the text stays text, and a slow text holds up nothing."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import LiveServer, error_of

from xlstm7b.serve import page_routes
from xlstm7b.serve.markdown import _MARKDOWN, to_blocks

TAGS = {"a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li"}
TAGS |= {"ol", "p", "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"}
ATTRIBUTES = {"class", "data-align", "data-language", "href", "rel", "start", "target"}
PIECES = ["<b>", "<script>", "</p>", "&lt;", '"', "'", ">", "](", "![", "[", "*", "_", "`", "```"]
PIECES += ["\n", "\n\n", "    ", "- ", "1. ", "# ", "| a | b |\n|--:|:-:|\n", "<http://a>", "~~"]
PIECES += ["javascript:", "data:text/html,x", "https://a.b/", "/v1", "onclick=x", "a", "```html\n"]


def to_html(text: str) -> str:
    return "".join(block["html"] for block in to_blocks(text))


class Reader(HTMLParser):
    """Collects what is in a piece of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.links, self.text = set[str](), set[str](), list[str](), ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5)).map("".join))
def test_texts_make_no_tags_of_their_own(text: str) -> None:
    read = Reader(to_html(text))
    assert read.tags <= TAGS
    assert read.attributes <= ATTRIBUTES
    assert all(re.match(r"(https?://|mailto:)", link, re.IGNORECASE) for link in read.links)


def test_blocks_begin_at_their_lines() -> None:
    text = "# A\n\nb\nc\n\n- d\n\n  e\n- f\n\n\n```\ng\n\n```\n> h\n\n***\n| i |\n|-|\n"
    text += "\n[j]: https://k\n"
    blocks = to_blocks(text)
    assert [block["line"] for block in blocks] == [0, 2, 5, 11, 15, 17, 18]
    assert to_html(text) == _MARKDOWN.render(text)


# A growing answer is rendered from its last two blocks on.
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5)).map("".join), st.data())
def test_earlier_blocks_do_not_change(text: str, data: st.DataObject) -> None:
    grown = text[: data.draw(st.integers(0, len(text)))]
    before, after = to_blocks(grown), to_blocks(text)
    if "]:" not in text:  # a link's address can come later
        same = max(0, len(before) - 2)
        assert after[:same] == before[:same]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\0`\t")), st.booleans())
def test_code_is_shown_as_it_is(code: str, is_python: bool) -> None:
    html = to_html(f"```{'python' if is_python else 'unknown'}\n{code}\n```")
    assert Reader(html).text.rstrip("\n") == code.rstrip("\n")


def test_markdown_is_rendered(live: LiveServer) -> None:
    texts = ["*a* <b>", "```python\nx = 1\n```", "|a|\n|-:|\n|1|", ""]
    parts = live.post("/markdown", texts=texts)["texts"]
    html = ["".join(block["html"] for block in blocks) for blocks in parts]
    assert html[0] == "<p><em>a</em> &lt;b&gt;</p>\n"
    assert '<pre data-language="python"><code><span class="n">x</span>' in html[1]
    assert '<td data-align="right">1</td>' in html[2]
    assert html[3] == ""
    longest = ["a" * page_routes.MAX_MARKDOWN, "b"]
    message = live.refused("/markdown", 400, texts=longest)
    assert message == ("the texts have 262145 characters together; at most 262144 are allowed")


def test_a_text_that_takes_too_long_is_ended(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_routes, "MARKDOWN_SECONDS", 0.2)
    slow = live.client.post("/markdown", json={"texts": ["[" * 200_000]})
    assert slow.status_code == 400
    assert error_of(slow)["message"] == "the texts cannot be rendered: they take too long"
    monkeypatch.undo()
    assert live.post("/markdown", texts=["a"]) == {"texts": [[{"line": 0, "html": "<p>a</p>\n"}]]}
    # Code that a lexer is slow for has one colour.
    code = "```console\n" + "a" * 20_000 + "\n```"
    ((block,),) = live.post("/markdown", texts=[code])["texts"]
    assert block["html"].count("<span") <= 2
