"""Markdown to HTML for the chat page. `page_routes.py` runs this file as a script.

It is a process of its own because rendering takes up to a second of Python for a long text. In the
server's process that would hold the interpreter lock, which the engine needs for every token. A
text that takes too long can also be ended with its process.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from html import escape
from typing import Any, TypedDict

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

_HIGHLIGHT_SECONDS = 0.5  # of CPU time for a code block; some lexers take forever for some texts
_LINK = re.compile(r"(https?://|mailto:)", re.IGNORECASE)
_NEW_TAB = 'target="_blank" rel="noopener noreferrer nofollow"'
_FORMATTER = HtmlFormatter(nowrap=True)


class _Markdown(MarkdownIt):
    def validateLink(self, url: str) -> bool:  # noqa: N802
        """Only links to other sites. A text can name neither scripts nor routes of this server."""
        return _LINK.match(url) is not None


class _Renderer(RendererHTML):
    """Each public method writes the tokens of its name."""

    def fence(self, tokens: Sequence[Token], idx: int, *_: Any) -> str:
        token = tokens[idx]
        language = token.info.split(maxsplit=1)[0].lower() if token.info.strip() else ""
        content = _highlight(token.content, language) or escape(token.content)
        return f'<pre data-language="{escape(language[:40])}"><code>{content}</code></pre>\n'

    def code_block(self, tokens: Sequence[Token], idx: int, *_: Any) -> str:
        return self.fence(tokens, idx)

    def link_open(self, tokens: Sequence[Token], idx: int, *_: Any) -> str:
        return f'<a href="{escape(str(tokens[idx].attrs["href"]))}" {_NEW_TAB}>'

    def image(self, tokens: Sequence[Token], idx: int, *_: Any) -> str:
        """A link: nothing is loaded from other sites."""
        source, text = str(tokens[idx].attrs["src"]), tokens[idx].content
        return f'<a href="{escape(source)}" {_NEW_TAB}>{escape(text or source)}</a>'

    def td_open(self, tokens: Sequence[Token], idx: int, *_: Any) -> str:
        """The page's content security policy does not allow the `style` that markdown-it writes."""
        token = tokens[idx]
        align = str(token.attrs.get("style", "text-align:left")).removeprefix("text-align:")
        return f'<{token.tag} data-align="{align}">'

    th_open = td_open


def _highlight(code: str, language: str) -> str | None:
    """None if the language is unknown, or if it takes too long."""
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
        signal.signal(signal.SIGVTALRM, _stop_highlighting)
        signal.setitimer(signal.ITIMER_VIRTUAL, _HIGHLIGHT_SECONDS)
        return str(highlight(code, lexer, _FORMATTER))
    except (ClassNotFound, TimeoutError):
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _stop_highlighting(*_: Any) -> None:
    raise TimeoutError


_MARKDOWN = _Markdown("commonmark", {"html": False, "breaks": True}, renderer_cls=_Renderer)
_MARKDOWN.enable(["table", "strikethrough"])


class Block(TypedDict):
    """A paragraph, a list, a code block or another part of a text."""

    line: int  # where it begins, from 0
    html: str


def to_blocks(text: str) -> list[Block]:
    """The text as HTML, block by block. HTML in the text is escaped.

    Only for the main thread: it sets a timer.
    """
    environment: dict[str, Any] = {}
    blocks, tokens, depth = list[Block](), list[Token](), 0
    for token in _MARKDOWN.parse(text, environment):
        tokens.append(token)
        depth += token.nesting
        if depth == 0:
            html = str(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, environment))
            assert tokens[0].map is not None
            blocks.append({"line": tokens[0].map[0], "html": html})
            tokens = []
    return blocks


def main() -> None:
    """Reads lines of JSON, [seconds, texts], and writes lines with the blocks of each text.

    Texts that take more than these seconds of CPU time end the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input, when the server does
    os.nice(10)  # after the model, where both use the CPU
    for line in sys.stdin:
        seconds, texts = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        print(json.dumps([to_blocks(text) for text in texts]), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
