"""The chat page in Chromium, used as a person would use it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chat_page import CHROMIUM, DRIVER, Page, browser
from live_server import GREEDY, LiveServer, serving, spelling_model, wait_for
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from xlstm7b.chat_format import ChatFormat, ChatTemplate
from xlstm7b.generate import Generator
from xlstm7b.tokenizer import ByteTokenizer

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium and chromedriver here"
)
KEY = "a-key"
# It refuses turns that do not alternate, as those of many models do.
STRICT = (
    "{% for message in messages %}{% if message.role != 'system' and (message.role == 'user') != "
    "(loop.previtem is undefined or loop.previtem.role != 'user') %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "{{ message.role[0] + ':' + message.content + ';\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
MARKDOWN = """# A title

Some **bold** text and `code`, <b>HTML</b> <script>window.harmed = true</script>
<img src=x onerror="window.harmed = true"> ![picture](https://example.com/a.png)
[link](https://example.com/) [bad](javascript:window.harmed=true)

```python
def f(x: int) -> int:
    return x + 1  # one more
```

| a | b |
|---|--:|
| 1 | 2 |
"""


@pytest.fixture(scope="module")
def generator() -> Generator:
    """A model that writes something like words."""
    return Generator(spelling_model("abcdefghijklmnopqrstuvwxyz  "), ByteTokenizer())


@pytest.fixture(scope="module")
def chat_format() -> ChatFormat:
    return ChatFormat(ChatTemplate(STRICT, {}))


@pytest.fixture(scope="module")
def live(
    generator: Generator, chat_format: ChatFormat, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    states = tmp_path_factory.mktemp("states")
    with serving(generator, keys=(KEY,), states=states, chat_format=chat_format) as server:
        yield server


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def driver(downloads: Path) -> Iterator[webdriver.Chrome]:
    with browser(downloads) as driver:
        yield driver


@pytest.fixture
def page(driver: webdriver.Chrome, live: LiveServer) -> Iterator[Page]:
    """The page as at the first visit. The browser sends the key as a password, with any user."""
    page = Page(driver)
    page.emulate()
    for state in live.client.get("/v1/states").json()["data"]:
        live.client.delete(f"/v1/states/{state['id']}")
    driver.get(f"{with_key(live)}/icon.svg")  # without scripts that would store something again
    page.run("localStorage.clear(); sessionStorage.clear()")
    open_page(page, live)
    page.errors_logged()
    page.set("temperature", 0)
    page.set("max_tokens", 40)
    yield page
    assert page.errors_logged() == []
    wait_for(live.is_idle)


def with_key(live: LiveServer) -> str:
    return live.url.replace("http://", f"http://me:{KEY}@")


def open_page(page: Page, live: LiveServer) -> None:
    page.driver.get(with_key(live))
    wait_for(lambda: page.text("#model") == "tiny")


def answer_to(
    generator: Generator, chat_format: ChatFormat, *texts: str, system: str = "", tokens: int = 40
) -> str:
    """What the model writes to a user's text, an answer, a user's text …"""
    messages = [{"role": "system", "content": system}] if system else []
    for number, text in enumerate(texts):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    prompt = chat_format.render(messages)
    (done,) = generator.generate(prompt, max_new_tokens=tokens, **GREEDY)
    return done.text.strip()


def branch(page: Page, number: int = -1) -> str:
    """‹1/2› of a message; empty without branches."""
    script = "return [...document.querySelectorAll('article')].at(arguments[0])"
    script += ".querySelector('.branches')?.textContent ?? ''"
    return str(page.run(script, number))


def test_a_conversation(
    page: Page, live: LiveServer, generator: Generator, chat_format: ChatFormat
) -> None:
    first = answer_to(generator, chat_format, "Hello")
    assert page.driver.switch_to.active_element == page.element("#input")
    page.say("Hello")
    page.wait()
    assert page.texts() == [("user", "Hello"), ("assistant", first)]
    status = page.element("#status").text
    assert status.startswith("40 tokens · ")
    assert "tok/s" in status
    assert f"memory {live.service.state_bytes / 1e3:.0f} kB" in status
    assert "0 of 12 prompt tokens cached" in status
    assert page.conversations() == ["Hello"]

    # It was cut, and goes on where it ended.
    notice = page.element(".notice")
    assert notice.text == "Cut at 40 tokens · Continue"
    page.press("Continue")
    page.wait()
    longer = answer_to(generator, chat_format, "Hello", tokens=80)
    assert page.texts()[-1] == ("assistant", longer)
    assert page.element(".notice").text == "Cut at 80 tokens · Continue"

    # Another system message gives another answer, as a branch.
    page.set("system", "Be brief.")
    page.press("Regenerate")
    page.wait()
    brief = answer_to(generator, chat_format, "Hello", system="Be brief.")
    assert page.texts() == [("user", "Hello"), ("assistant", brief)]
    assert branch(page) == "‹2/2›"
    page.press("‹")
    assert page.texts()[-1] == ("assistant", longer)
    page.set("system", "")

    # It streams, and Esc stops it.
    page.set("max_tokens", 60000)
    page.say("A story")
    wait_for(lambda: len(page.texts()[-1][1]) > 20)
    seen = page.texts()[-1][1]
    wait_for(lambda: len(page.texts()[-1][1]) > len(seen))
    assert page.texts()[-1][1].startswith(seen[:-1])
    page.element("body").send_keys(Keys.ESCAPE)
    page.wait()
    wait_for(live.is_idle)
    assert page.element("article:last-child .notice").text == "Stopped · Continue"
    assert "· 0 of" not in page.element("#status").text
    assert page.run("return document.activeElement.id") == "input"


def test_edits_are_branches(page: Page, generator: Generator, chat_format: ChatFormat) -> None:
    page.say("One")
    page.wait()
    page.say("Two")
    page.wait()
    before = page.texts()
    page.press("Edit", 0)
    page.element(".edit textarea").send_keys(" more")
    page.press("Send", within=".edit")
    page.wait()
    edited = [("user", "One more"), ("assistant", answer_to(generator, chat_format, "One more"))]
    assert page.texts() == edited
    assert branch(page, 0) == "‹2/2›"
    # The other branch is whole, and the keyboard's place stays.
    previous = page.element("[data-action='Previous branch']")
    previous.send_keys(Keys.ENTER)
    assert page.texts() == before
    assert page.run("return document.activeElement.ariaLabel") == "Next branch"
    # An edited answer is a branch too, and the model goes on from it.
    page.press("Edit", 1)
    page.run("document.querySelector('.edit textarea').value = 'My answer'")
    page.press("Save", within=".edit")
    assert page.texts() == [before[0], ("assistant", "My answer")]
    page.say("And?")
    page.wait()
    wanted = answer_to(generator, chat_format, "One", "My answer", "And?")
    assert page.texts()[-1] == ("assistant", wanted)
    # Esc leaves an edit without a change.
    page.press("Edit", 0)
    page.element(".edit textarea").send_keys("nothing", Keys.ESCAPE)
    assert page.texts()[0] == ("user", "One")
    # Deleting takes what follows, and shows the branch beside it.
    page.press("Delete", 1, within="#messages")
    assert page.element("#question-text").text == "2 later messages go with it."
    page.press("Cancel", within="#question")
    assert len(page.texts()) == 4
    page.press("Delete", 1, within="#messages")
    page.answer_question()
    assert page.texts() == before
    page.driver.refresh()
    wait_for(lambda: page.texts() == before)
    assert branch(page, 0) == "‹1/2›"


def test_conversations(page: Page, downloads: Path, tmp_path: Path) -> None:
    page.say("Hello")
    page.wait()
    page.say("Again")
    page.wait()
    first = page.texts()
    page.press("Fork", 0)
    assert page.conversations() == ["Hello (fork)", "Hello"]
    assert page.texts() == first[:2]
    page.say("Elsewhere")
    page.wait()
    fork = page.texts()
    page.open("Hello")
    assert page.texts() == first
    page.choose("Hello", "Rename")
    page.answer_question("<b>Greetings</b>")
    assert page.conversations() == ["Hello (fork)", "<b>Greetings</b>"]
    assert page.element("#title").text == "<b>Greetings</b>"
    search = page.element("#search")
    search.send_keys("elsewhere")  # in a message
    assert page.conversations() == ["Hello (fork)"]
    search.clear()
    search.send_keys(Keys.SPACE, Keys.BACKSPACE)
    assert len(page.conversations()) == 2

    page.press("Export all")
    wait_for(lambda: (downloads / "xlstm7b-conversations.json").exists())
    for title in ("<b>Greetings</b>", "Hello (fork)"):
        page.choose(title, "Delete")
        page.answer_question()
    assert page.texts() == []
    page.element("#import-file").send_keys(str(downloads / "xlstm7b-conversations.json"))
    wait_for(lambda: len(page.conversations()) == 2)
    page.open("<b>Greetings</b>")
    assert page.texts() == first
    page.open("Hello (fork)")
    assert page.texts() == fork
    page.choose("Hello (fork)", "Export")
    wait_for(lambda: (downloads / "Hello-fork.json").exists())
    saved = json.loads((downloads / "Hello-fork.json").read_text())
    assert [one["title"] for one in saved["conversations"]] == ["Hello (fork)"]
    # What is here already is not imported again, and what was written since stays.
    page.say("Later")
    page.wait()
    page.element("#import-file").send_keys(str(downloads / "xlstm7b-conversations.json"))
    wait_for(lambda: page.text("#status") == "Imported: 0 new messages")
    assert sorted(page.conversations()) == ["<b>Greetings</b>", "Hello (fork)"]
    page.open("Hello (fork)")
    assert page.texts()[:-2] == fork
    assert page.texts()[-2] == ("user", "Later")
    # A message that was deleted comes back.
    page.press("Delete", -1, within="#messages")
    page.answer_question()
    page.press("Delete", 2, within="#messages")
    page.answer_question()
    assert page.texts() == fork[:2]
    page.element("#import-file").send_keys(str(downloads / "xlstm7b-conversations.json"))
    wait_for(lambda: page.text("#status") == "Imported: 2 new messages")
    page.open("Hello (fork)")
    assert page.texts() == fork
    # OpenAI's list of messages is a conversation as well; anything else is refused.
    plain = tmp_path / "plain.json"
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}, {"type": "image_url"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Ho"},
    ]
    plain.write_text(json.dumps(messages))
    texts = [("user", "Hi[image_url]"), ("assistant", "Ho")]
    for count in ("2 new messages", "0 new messages"):
        page.element("#import-file").send_keys(str(plain))
        wait_for(lambda c=count: page.text("#status") == f"Imported: {c}")
        assert page.texts() == texts
        assert len(page.conversations()) == 3
    faults = {
        "{": "it is not a JSON file.",
        "{}": "it holds no conversation.",
        "7": "it holds no conversation.",
        '[{"role": "user"}]': "it has a message without a text, or of neither a user nor an "
        "assistant.",
        '{"messages": {"a": {"parent": "b"}}}': "its messages are not in order.",
    }
    for content, fault in faults.items():
        plain.write_text(content)
        page.element("#import-file").send_keys(str(plain))
        wait_for(lambda f=fault: page.error() == f"“plain.json” was not imported: {f}")
        page.element("#error-close").click()
    page.driver.refresh()
    wait_for(lambda: page.texts() == texts)


def test_titles_use_their_room_and_forks_have_names(page: Page) -> None:
    page.recite("Hi")
    title = "What the sea was like when it was calm"
    page.say(title)
    page.wait()
    page.run("document.activeElement.blur()")
    edges = (
        "const li = document.querySelector('#conversations li'), more = li.querySelector('.more');"
        "const right = (e) => e.getBoundingClientRect().right, isHidden = +getComputedStyle(more)"
        ".opacity === 0; return [...[...li.querySelectorAll('.open span')].map(right),"
        " right(li) - (isHidden ? 0 : more.offsetWidth)]"
    )
    name, _, room = page.run(edges)
    assert room - 12 < name < room
    for _ in range(3):
        page.press("Fork", 0)
    assert page.conversations()[0] == f"{title} (fork 3)"
    assert set(page.conversations()[1:]) == {title, f"{title} (fork)", f"{title} (fork 2)"}
    for phone in (False, True):
        page.emulate(phone=phone)
        ends = "return [...document.querySelectorAll('#conversations .open span:nth-child(2)')]"
        ends += ".map(e => [e.textContent, e.scrollWidth <= e.parentElement.clientWidth])"
        assert page.run(ends)[0] == [" (fork 3)", True]
        heading = (
            "const [name, end] = document.querySelector('#title').children, box = (e) =>"
            " e.getBoundingClientRect(); return [end.textContent,"
            " box(end).right <= box(end.parentElement).right, name.clientWidth > 100]"
        )
        assert page.run(heading) == [" (fork 3)", True, True]
    page.emulate()
    name, end, room = page.run(edges)
    assert name < end < room
    page.picture("forks")


def test_a_stop_before_the_first_word_is_no_error(page: Page) -> None:
    hint = "Enter sends, Shift+Enter starts a new line, Esc stops."
    page.recite("Hi")
    page.say("Hello")
    page.wait()
    assert page.text("#status").startswith("1 token · ")
    page.run("window.isHeld = true")
    page.say("Again")
    wait_for(page.is_answering)
    page.element("body").send_keys(Keys.ESCAPE)
    page.wait()
    assert page.error() == ""
    assert page.texts()[-1] == ("user", "Again")
    assert page.text("#status") == hint  # no figures of the answer before
    page.run("window.isHeld = false")
    page.press("Try again")
    page.wait()
    assert page.text("#status").startswith("1 token · ")
    page.run(CHATS_ONLY, "data: [DONE]\n\n")
    page.press("Regenerate", -1)
    wait_for(lambda: page.error() == "The answer was empty.")
    assert page.text("#status") == hint
    page.run("window.fetch = window.kept")


def test_errors_are_sentences_for_the_reader(page: Page, live: LiveServer, tmp_path: Path) -> None:
    """Neither the server's words for programs, nor those of JavaScript."""
    page.say("Hello")
    page.wait()
    page.set("max_tokens", 1 << 20)
    page.press("Regenerate")
    expected = "The server does not allow this “Max tokens”: change it in Settings."
    wait_for(lambda: page.error() == expected)
    page.set("max_tokens", 5)
    page.element("#save-memory").click()
    page.answer_question("Gone")
    wait_for(lambda: page.text("#status").startswith("Memory saved: "))
    page.press("Memories")
    wait_for(lambda: page.is_shown("#memory-list li"))
    page.press("Start")
    (state,) = live.client.get("/v1/states").json()["data"]
    live.client.delete(f"/v1/states/{state['id']}")
    page.say("Hello?")
    wait_for(lambda: page.error() == "This memory is no longer on the server.")
    page.press("Memories")
    document = tmp_path / "long.txt"
    document.write_text("The sea was calm. " * 300_000)
    page.element("#document-file").send_keys(str(document))
    expected = "This is too long for the server: it takes at most 4.2 MB."
    wait_for(lambda: page.text("#memory-error") == f"long.txt was not read: {expected}")
    page.element("#memories .close").click()
    page.press("New conversation")
    errors = [
        (400, {"message": "too many", "code": "context_length_exceeded"}, "This is too long for"),
        (400, {"message": "no", "param": "messages"}, "The model's chat template does not allow"),
        (400, {"message": "no"}, "The server does not allow this (error 400)."),
        (404, {"message": "no", "code": "model_not_found"}, "This model is no longer on the serv"),
        (408, {"message": "no"}, "Sending took too long. Try again."),
        (409, {"message": "no"}, "This memory is damaged, or belongs to another model."),
        (409, {"message": "no", "code": "states_full"}, "The server has no room for another mem"),
        (413, None, "This is too long for the server."),
        (500, {"message": "no"}, "The server has failed (error 500)."),
        (503, {"message": "no"}, "The server is starting or stopping."),
        (507, {"message": "no"}, "The server could not save the memory. Its disk may be full."),
    ]
    page.run(
        "window.kept = window.fetch; window.fetch = async () =>"
        " new Response(JSON.stringify({ error: window.failure[1] }), { status: failure[0] })"
    )
    for number, (status, error, sentence) in enumerate(errors):
        page.run("window.failure = arguments[0]", [status, error])
        if number:
            page.press("Try again")
        else:
            page.say("Hello")
        wait_for(lambda s=sentence: page.error().startswith(s))
    page.run("window.fetch = async () => new Response('<h1>')")
    page.press("Memories")
    wait_for(lambda: page.text("#memory-error") == "The server's answer cannot be read.")
    page.element("#memories .close").click()
    page.run("window.fetch = window.kept")
    page.errors_logged()


def test_right_to_left_texts(page: Page) -> None:
    answer = "مرحبا **بك**\n\n- واحد\n- two\n\n> اقتباس\n\nEnglish\n\n```\ncode\n```\n"
    page.recite(answer)
    field = page.element("#input")
    direction = "return getComputedStyle(document.querySelector(arguments[0])).direction"
    field.send_keys("السلام عليكم")
    assert page.run(direction, "#input") == "rtl"
    field.send_keys(Keys.ENTER)
    page.wait()
    body = "article.assistant .body"
    wanted = {
        **{"article.user .body": "rtl", "#title .name": "rtl", ".open .name": "rtl"},
        **{f"{body} > p": "rtl", f"{body} li": "rtl", f"{body} blockquote": "rtl"},
        **{f"{body} > p:nth-of-type(2)": "ltr", f"{body} pre": "ltr", f"{body} .code-head": "ltr"},
    }
    assert {selector: page.run(direction, selector) for selector in wanted} == wanted
    page.press("Edit", 0)
    assert page.run(direction, ".edit textarea") == "rtl"
    page.press("Cancel", within=".edit")
    page.picture("right-to-left")


def test_enter_does_the_same_in_both_editors(page: Page) -> None:
    page.recite("Hi")
    page.element("#input").send_keys("a", Keys.SHIFT, Keys.ENTER, Keys.NULL, "b", Keys.ENTER)
    page.wait()
    assert page.texts()[0] == ("user", "a\nb")
    page.press("Edit", 0)
    page.element(".edit textarea").send_keys(Keys.SHIFT, Keys.ENTER, Keys.NULL, "c", Keys.ENTER)
    page.wait()
    assert page.texts() == [("user", "a\nb\nc"), ("assistant", "Hi")]
    page.press("Edit", 1)
    page.element(".edit textarea").send_keys("!", Keys.ENTER)
    assert page.texts()[1] == ("assistant", "Hi!")
    # A key that ends the input of a Japanese word, say, sends nothing.
    for selector in ("#input", ".edit textarea"):
        if selector.startswith(".edit"):
            page.press("Edit", 0)
        page.run(
            "const field = document.querySelector(arguments[0]); field.value = 'あ';"
            "field.dispatchEvent(new KeyboardEvent('keydown',"
            " {key: 'Enter', isComposing: true, bubbles: true}))",
            selector,
        )
        assert page.run("return document.querySelector(arguments[0]).value", selector) == "あ"
    page.emulate(phone=True)
    field = page.element(".edit textarea")
    field.send_keys(Keys.ENTER)
    assert "\n" in page.run("return document.querySelector('.edit textarea').value")
    page.press("Cancel", within=".edit")


# Chats are answered with a text. Other requests fail.
CHATS_ONLY = """
const text = arguments[0];
window.kept ??= window.fetch;
window.fetch = async (url) => {
  if (!url.pathname.endsWith('/v1/chat/completions')) throw new TypeError();
  return new Response(text);
};
"""


def reconnect(page: Page) -> None:
    """Ends CHATS_ONLY after a lost connection, and waits until the page has seen it."""
    page.run("document.querySelector('#announcer').textContent = ''; window.fetch = window.kept")
    wait_for(lambda: page.text("#announcer") == "The server answers again.")


def test_a_failed_answer_locks_nothing(page: Page, live: LiveServer) -> None:
    """The server's chat template refuses two messages of the user in a row."""
    page.run(CHATS_ONLY, "data: {")
    page.say("Hello")
    wait_for(lambda: page.error() == "The connection was lost.")
    page.wait()
    assert page.texts() == [("user", "Hello")]
    reconnect(page)
    assert not page.is_shown("#error")
    # It can be sent again, with the keyboard only …
    page.element("article:last-child [data-action='Try again']").send_keys(Keys.ENTER)
    wait_for(lambda: len(page.texts()) == 2)
    page.wait()
    assert not page.is_shown("#error")
    # … or another message takes its place.
    page.run(CHATS_ONLY, "data: {")
    page.say("Lost")
    wait_for(lambda: page.error() == "The connection was lost.")
    page.wait()
    reconnect(page)
    page.say("Instead")
    page.wait()
    assert page.error() == ""
    assert [who for who, _ in page.texts()] == ["user", "assistant"] * 2
    assert (page.texts()[2], branch(page, 2)) == (("user", "Instead"), "‹2/2›")
    # If a new answer fails, the old one stays.
    before = page.texts()
    page.run(CHATS_ONLY, "data: [DONE]\n\n")
    page.press("Regenerate", 1)
    wait_for(lambda: page.error() == "The answer was empty.")
    page.wait()
    assert page.texts() == before
    page.run("window.fetch = window.kept")
    with live.client.stream("GET", "/health"):  # the server is well
        pass


def test_an_error_of_an_answer_stays_when_the_connection_is_back(page: Page) -> None:
    page.run(CHATS_ONLY, "data: {")
    page.say("Hello")
    wait_for(lambda: page.error() == "The connection was lost.")
    page.run(CHATS_ONLY, "data: [DONE]\n\n")
    page.press("Try again")
    wait_for(lambda: page.error() == "The answer was empty.")
    reconnect(page)
    assert page.error() == "The answer was empty."


def test_failures_of_the_server_are_explained(page: Page) -> None:
    answers = {
        "return new Response('<h1>', {status: 502})": "The server does not answer.",
        "return new Response(JSON.stringify({error: {message: 'it is full'}}),"
        "{status: 429, headers: {'retry-after': '7'}})": "The server is busy. Try again in 7 s.",
        'return new Response(\'data: {"error": {"message": "it failed"}}\\n\\n\')': (
            "The server has failed (error 500)."
        ),
        "return new Response('data: <h1>\\n\\n')": "The server's answer cannot be read.",
    }
    page.say("Hello")
    page.wait()
    before = page.texts()
    page.run("window.kept = window.fetch")
    for failure, message in answers.items():
        page.run(f"window.fetch = async () => {{ {failure} }}")
        page.press("Regenerate")
        wait_for(lambda m=message: page.error() == m)
        page.wait()
        assert page.texts() == before
    # Behind a proxy, requests go to the page's own path.
    page.run(
        "history.replaceState(null, '', '/behind/a/proxy/');"
        "window.fetch = async (url) => { window.requested ??= url.pathname; throw new TypeError() }"
    )
    page.press("Regenerate")
    wait_for(lambda: page.error() == "The server does not answer.")
    page.run("history.replaceState(null, '', '/'); window.fetch = window.kept")
    assert page.run("return window.requested") == "/behind/a/proxy/v1/chat/completions"
    # When the server is back, the message goes away.
    wait_for(lambda: page.error() == "")
    page.press("Regenerate")
    page.wait()
    assert branch(page) == "‹2/2›"
    page.errors_logged()  # the browser looks for the icon at the proxy's path


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_form_of_server_sent_events(page: Page, end: str, size: int) -> None:
    """Comments, other fields, data in several lines or without a space, and pieces of any size."""
    lines = [
        ": keep-alive",
        "",
        ":",
        "id: 1",
        "retry: 10",
        'data: {"choices": [{"delta": {"content": "o: né "}}]}',
        "",
        "",
        'data:{"choices":',
        "data",
        "event: message",
        "a\u2028b: c",
        'data: [{"delta": {"content": "two"}}]}',
        "",
        "event: ping",
        "data: {}",
        "",
        ": comment",
        'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}',
        "",
        "data:[DONE]",
        "",
        "",
    ]
    page.run(
        "const [text, size] = arguments, bytes = new TextEncoder().encode('\\ufeff' + text);"
        "window.kept = window.fetch; window.fetch = async (url, options) => {"
        " if (!url.pathname.endsWith('/v1/chat/completions')) return kept(url, options);"
        " return new Response(new ReadableStream({ start(controller) {"
        "  for (let at = 0; at < bytes.length; at += size)"
        "   controller.enqueue(bytes.slice(at, at + size));"
        "  controller.close(); } })) }",
        end.join(lines),
        size,
    )
    page.say("Hello")
    wait_for(lambda: len(page.texts()) == 2)
    page.wait()
    assert page.error() == ""
    assert page.texts()[1] == ("assistant", "o: né two")
    assert not page.is_shown(".notice")


def test_a_wrong_key_is_asked_for_again(page: Page, live: LiveServer) -> None:
    page.run("sessionStorage.setItem('xlstm7b-key', 'wrong')")
    page.driver.get(with_key(live))
    wait_for(lambda: page.is_shown("#question"))
    assert page.error() == "This API key is wrong."
    assert page.run("return document.activeElement.id") == "question-field"
    assert page.run("return document.activeElement.type") == "password"
    page.element("#question-field").send_keys("also wrong", Keys.ENTER)
    wait_for(lambda: page.element("#question-field").get_property("value") == "")
    wait_for(lambda: page.is_shown("#question"))
    page.errors_logged()  # the browser logs the refusals
    page.answer_question(KEY)
    wait_for(lambda: page.text("#model") == "tiny")
    assert page.error() == ""
    page.say("Hello")
    wait_for(lambda: len(page.texts()) == 2)
    page.wait()
    page.driver.refresh()  # the key is kept for this tab
    wait_for(lambda: page.text("#model") == "tiny")
    assert len(page.texts()) == 2


def test_nothing_is_lost_on_reload_or_in_another_tab(page: Page, live: LiveServer) -> None:
    page.set("max_tokens", 60000)
    page.say("A story")
    wait_for(lambda: len(page.texts()[-1][1]) > 20)
    page.element("#input").send_keys("A draft")
    seen = page.texts()[-1][1]
    page.driver.refresh()
    wait_for(lambda: page.text("#model") == "tiny")
    assert page.texts()[0] == ("user", "A story")
    assert page.texts()[1][1].startswith(seen)
    assert page.element("#input").get_property("value") == "A draft"
    assert page.element(".notice").text == "Stopped · Continue"
    wait_for(live.is_idle)
    page.set("max_tokens", 5)
    first, driver = page.driver.current_window_handle, page.driver
    driver.switch_to.new_window("tab")
    open_page(page, live)
    page.press("New conversation")
    page.say("Elsewhere")
    page.wait()
    driver.close()
    driver.switch_to.window(first)
    wait_for(lambda: page.conversations() == ["Elsewhere", "A story"])
    assert len(page.texts()) == 2
    page.element("#input").send_keys(Keys.ENTER)
    wait_for(lambda: len(page.texts()) == 4)
    page.wait()
    driver.refresh()
    wait_for(lambda: page.conversations() == ["A story", "Elsewhere"])
    assert page.texts()[2] == ("user", "A draft")


@contextmanager
def other_tab(page: Page, live: LiveServer) -> Iterator[None]:
    """A second tab of the same browser, which shows the conversation that changed last."""
    driver = page.driver
    first = driver.current_window_handle
    driver.switch_to.new_window("tab")
    try:
        open_page(page, live)
        yield
    finally:
        driver.close()
        driver.switch_to.window(first)


def test_two_tabs_on_one_conversation_lose_nothing(page: Page, live: LiveServer) -> None:
    page.recite("one two three")
    page.run("window.isHeld = true")
    page.say("First")
    wait_for(lambda: page.texts()[-1] == ("assistant", "one two thre"))
    with other_tab(page, live):
        first, second = page.driver.window_handles
        wait_for(lambda: page.texts() == [("user", "First"), ("assistant", "one two thre")])
        assert page.text(".notice") == "Another tab is writing this answer."
        page.press("Edit", 0)
        page.element(".edit textarea").send_keys(" more")
        page.driver.switch_to.window(first)
        page.recite("one two three", size=3)
        page.run("window.isHeld = false")
        page.wait()
        page.driver.switch_to.window(second)
        # The answer is whole here as well, and the edit goes on.
        wait_for(lambda: not page.is_shown(".notice"))
        assert page.run("return document.activeElement.value") == "First more"
        page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
        assert page.texts() == [("user", "First"), ("assistant", "one two three")]

        # The first tab writes another answer while this one goes on.
        page.driver.switch_to.window(first)
        page.recite("four five six")
        page.run("window.isHeld = true")
        page.say("Second")
        wait_for(lambda: page.texts()[-1] == ("assistant", "four five si"))
        page.driver.switch_to.window(second)
        wait_for(lambda: page.texts()[-1] == ("assistant", "four five si"))
        page.recite("seven")
        page.say("Third")
        page.wait()
        page.choose("First", "Rename")
        page.answer_question("Numbers")
        page.driver.switch_to.window(first)
        wait_for(lambda: len(page.texts()) == 6)
        page.run("window.isHeld = false")
        page.wait()
        texts = [
            *(("user", "First"), ("assistant", "one two three")),
            *(("user", "Second"), ("assistant", "four five six")),
            *(("user", "Third"), ("assistant", "seven")),
        ]
        for window in (first, second):
            page.driver.switch_to.window(window)
            wait_for(lambda: page.texts() == texts)
            assert page.conversations() == ["Numbers"]
        # A branch that one tab makes does not take the view of the other.
        page.recite("eight")
        page.press("Regenerate", -1)
        page.wait()
        page.driver.switch_to.window(first)
        wait_for(lambda: branch(page) == "‹1/2›")
        assert page.texts() == texts
        page.driver.switch_to.window(second)
    page.driver.refresh()
    wait_for(lambda: [text for _, text in page.texts()][:5] == [text for _, text in texts][:5])
    assert branch(page) in ("‹1/2›", "‹2/2›")


def test_what_another_tab_deletes_stays_deleted(page: Page, live: LiveServer) -> None:
    stored = "return Object.keys(localStorage).filter(key => key.startsWith('xlstm7b/'))"
    page.recite("one two three")
    page.say("Kept")
    page.wait()
    page.run("window.isHeld = true")
    page.say("Again")
    page.press("New conversation")
    page.say("Gone")
    wait_for(lambda: page.texts()[-1] == ("assistant", "one two thre"))
    page.element("#input").send_keys("A draft")
    with other_tab(page, live):
        first, second = page.driver.window_handles
        wait_for(lambda: page.text("#conversations .dot") == "answering")
        page.choose("Gone", "Delete")
        page.answer_question()
        assert page.texts()[2:] == [("user", "Again"), ("assistant", "one two thre")]
        page.driver.switch_to.window(first)
        wait_for(lambda: page.error() == "This conversation was deleted in another tab.")
        assert page.texts() == []
        assert page.element("#input").get_property("value") == "A draft"
        page.open("Keptanswering")
        # A message is deleted while its answer grows.
        page.driver.switch_to.window(second)
        page.press("Delete", 2, within="#messages")
        page.answer_question()
        page.driver.switch_to.window(first)
        wait_for(lambda: not page.is_answering())
        page.run("window.isHeld = false")
        texts = [("user", "Kept"), ("assistant", "one two three")]
        assert page.texts() == texts
        page.driver.switch_to.window(second)
    page.driver.refresh()
    wait_for(lambda: page.texts() == texts)
    assert page.conversations() == ["Kept", "New conversation"]
    assert len(page.run(stored)) == 4  # two heads, a question and its answer


def test_conversations_of_earlier_versions_are_kept(page: Page, live: LiveServer) -> None:
    def message(number: int, parent: int | None, shown: int | None) -> dict[str, object]:
        name = f"m{number}"
        role = "user" if parent is None else "assistant"
        ends = {"parent": parent and f"m{parent}", "shown": shown and f"m{shown}"}
        return {"id": name, "role": role, "content": name, "finish": "stop", "tokens": 3, **ends}

    messages = [message(1, None, 3), message(2, 1, None), message(3, 1, None), message(4, 1, None)]
    old = {
        **{"id": "mabc-def", "title": "Old", "updated": 5, "draft": "", "state": None},
        **{"shown": "m1", "messages": {one["id"]: one for one in messages}},
    }
    page.run("localStorage.setItem('xlstm7b/mabc-def', arguments[0])", json.dumps(old))
    page.driver.refresh()
    for _ in range(2):
        wait_for(lambda: page.texts() == [("user", "m1"), ("assistant", "m3")])
        assert branch(page) == "‹2/3›"
        assert page.conversations() == ["Old"]
        page.driver.refresh()
    assert page.run("return Object.keys(localStorage).filter(k => k.includes('/')).length") == 5


def test_a_full_storage_is_told_once_and_loses_nothing_that_fits_later(page: Page) -> None:
    page.recite("Hi")
    page.say("First")
    page.wait()
    page.run(
        "for (let size = 1 << 22; size; size >>= 1) try {"
        " localStorage.setItem(`junk${size}`, 'a'.repeat(size)) } catch {}"
    )
    page.run("window.isHeld = true")
    page.recite("one two three")
    page.say("Second")
    wait_for(lambda: page.error().startswith("The browser's storage is full"))
    page.element("#error-close").click()
    pause = "setTimeout(arguments[0], 2500)"  # it is saved every second
    page.driver.execute_async_script(pause)
    assert page.error() == ""
    page.run(
        "Object.keys(localStorage).filter(k => k.startsWith('junk'))"
        ".forEach(k => localStorage.removeItem(k)); window.isHeld = false"
    )
    page.wait()
    texts = page.texts()
    assert texts[2:] == [("user", "Second"), ("assistant", "one two three")]
    page.driver.refresh()
    wait_for(lambda: page.texts() == texts)


def test_any_order_of_changes_in_two_tabs_gives_one_tree(page: Page) -> None:
    """Two copies of the store are two tabs. Nothing that was not deleted is lost."""
    problem = page.driver.execute_async_script(
        """
        const done = arguments[0];
        Promise.all(['/tree.js', '/store.js?1', '/store.js?2', '/store.js?3'].map((f) => import(f)))
        .then(([tree, ...stores]) => {
          let seed = 7;
          const random = (n) => (seed = seed * 48271 % 2147483647) % n;
          for (let round = 0; round < 40; round++) {
            const c = tree.createConversation();
            tree.add(c, null, 'user', 'start');
            stores[0].saveConversation(c);
            const tabs = [c, stores[1].readConversation(c.id)], wanted = new Map();
            for (let step = 0; step < 60; step++) {
              const tab = random(2), mine = tabs[tab], all = Object.values(mine.messages);
              const one = all[random(all.length)], kind = random(10);
              if (kind < 5) {
                const added = tree.add(mine, one?.id ?? null, 'user', `${round} ${step}`);
                wanted.set(added.id, added.content);
              } else if (kind === 5 && one) {
                one.content += ' and more';
                if (wanted.has(one.id)) wanted.set(one.id, one.content);
              } else if (kind === 6 && one?.parent && all.length > 20) {
                tree.remove(mine, one);
              } else if (kind === 7) {
                mine.title = `title ${step}`;
              } else {
                stores[tab].saveConversation(mine);
              }
              // What one tab changes is known to the other before it changes the same.
              if (kind >= 5) for (const one of [0, 1, 0]) stores[one].saveConversation(tabs[one]);
            }
            for (const one of [0, 1, 0]) stores[one].saveConversation(tabs[one]);
            const texts = (x) => JSON.stringify(Object.values(x.messages)
              .map((m) => [m.id, m.parent, m.content]).sort());
            if (texts(tabs[0]) !== texts(tabs[1])) return done(`messages in round ${round}`);
            if (tabs[0].title !== tabs[1].title) return done('title');
            for (const { id, content } of Object.values(tabs[0].messages)) {
              if (wanted.has(id) && wanted.get(id) !== content) return done('content');
            }
            const read = stores[2].readConversation(c.id);
            if (texts(read) !== texts(tabs[0])) return done(`storage in round ${round}`);
            const path = (x) => JSON.stringify(tree.path(x).map((m) => m.id));
            if (path(read) !== path(tabs[0])) return done(`view in round ${round}`);
            stores[1].removeConversation(tabs[1]);
            tree.add(tabs[0], null, 'user', 'late');
            stores[0].saveConversation(tabs[0]);
            stores[0].saveConversation(tabs[0]);
            if (Object.keys(localStorage).some((k) => k.includes(c.id))) return done('deleted');
          }
          done('');
        }).catch((error) => done(error.stack));
        """
    )
    assert problem == ""


def test_answers_are_markdown_and_their_html_is_text(page: Page) -> None:
    page.recite(MARKDOWN)
    page.say("<i>Hello</i><script>window.harmed = true</script>")
    page.wait()
    body = "article.assistant .body"
    assert page.element(f"{body} h1").text == "A title"
    assert page.element(f"{body} strong").text == "bold"
    assert "<b>HTML</b> <script>window.harmed = true</script>" in page.element(f"{body} p").text
    assert "[bad](javascript:window.harmed=true)" in page.element(f"{body} p").text
    assert page.element(f"{body} td[data-align=right]").text == "2"
    assert page.element(f"{body} pre .k").text == "def"
    assert page.element(".code-head span").text == "python"
    assert page.texts()[0][1] == "<i>Hello</i><script>window.harmed = true</script>"
    assert page.conversations() == ["<i>Hello</i><script>window.harmed = true</script>"]
    selectors = "article script, article img, article b, article i, [onerror], [href^=javascript]"
    assert page.run("return document.querySelectorAll(arguments[0]).length", selectors) == 0
    assert page.run("return window.harmed ?? null") is None
    links = page.run("return [...document.querySelectorAll('.body a')].map(a => a.href + a.rel)")
    assert links == [
        f"https://example.com/{end}noopener noreferrer nofollow" for end in ("a.png", "")
    ]
    # Copy buttons copy Markdown and code.
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    page.press("Copy", within="article.assistant .actions")
    assert page.run("return window.copied") == MARKDOWN
    page.press("Copy", within=".code-head")
    assert page.run("return window.copied").startswith("def f(x: int) -> int:\n    return")
    assert page.element(".code-head button").text == "Copied"
    # Nothing was loaded from elsewhere, and inline scripts and styles do not work.
    origins = "return [...new Set(performance.getEntriesByType('resource')"
    origins += ".map(e => new URL(e.name).origin))]"
    assert page.run(origins) == [page.run("return location.origin")]
    page.run(
        "document.addEventListener('securitypolicyviolation',"
        " (event) => { window.refused = event.violatedDirective });"
        "const s = document.createElement('style'); s.textContent = 'b{}'; document.head.append(s)"
    )
    wait_for(lambda: page.run("return window.refused ?? null") == "style-src-elem")
    page.errors_logged()


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("word " * 30, ".body"),
        ("line\nagain\n" * 12, ".body"),
        ("```\n" + "co de \n" * 20, "pre code"),
    ],
    ids=["spaces", "lines", "code"],
)
def test_white_space_is_not_lost_while_an_answer_grows(
    page: Page, text: str, selector: str
) -> None:
    """Markdown drops it at the end of a text, but more text follows."""
    page.recite(text, per_frame=2, size=1)
    page.run(
        "const selector = `article.assistant ${arguments[0]}`; window.shown = [];"
        "new MutationObserver(() => { const end = document.querySelector(selector);"
        " if (end) shown.push(end.textContent) })"
        ".observe(document.body, {subtree: true, childList: true, characterData: true})",
        selector,
    )
    page.say("Hello")
    wait_for(lambda: len(page.texts()) == 2)
    page.wait()
    shown, words = page.run("return shown"), text.removeprefix("```").split()
    assert len(shown) > 50
    for seen in shown:
        *whole, last = seen.split() or [""]
        assert [*whole, last] == [*words[: len(whole)], words[len(whole)][: len(last)]]


def test_a_fast_stream_is_cheap_to_show(page: Page) -> None:
    """At 300 tokens a second only the end of the answer changes, at most once per frame."""
    text = "".join(f"Paragraph {n} has *some* words, and `code`.\n\n" for n in range(1000))
    page.run(
        "window.frames = window.draws = window.renders = 0;"
        "const count = () => { window.frames++; requestAnimationFrame(count); }; count();"
        "new MutationObserver((list) => { if (list.some(m => m.type === 'characterData'))"
        " window.draws++; }).observe(document.querySelector('#messages'),"
        " {subtree: true, characterData: true});"
    )
    page.recite(text, per_frame=5)
    page.run(
        "const f = window.fetch; window.fetch = (url, o) => {"
        " window.renders += url.pathname.endsWith('/markdown'); return f(url, o); }"
    )
    page.say("Go")
    wait_for(lambda: page.run("return document.querySelectorAll('.body p').length") > 3)
    began = page.run(
        "window.kept = document.querySelector('.body p');"
        "window.frames = window.draws = window.renders = 0; return performance.now()"
    )
    # The page follows the end until the reader scrolls up.
    wait_for(lambda: page.run("return document.querySelectorAll('.body p').length") > 25)
    gap = "const m = document.querySelector('#messages');"
    gap += "return m.scrollHeight - m.scrollTop - m.clientHeight"
    assert page.run(gap) < 100
    assert not page.is_shown("#jump")
    frames, draws, renders, now, same = page.run(
        "return [window.frames, window.draws, window.renders, performance.now(),"
        " window.kept.isConnected]"
    )
    assert same  # finished paragraphs are left alone
    assert draws <= frames + 1
    assert renders <= (now - began) / 250 + 2
    page.run("document.querySelector('#messages').scrollTop = 0")
    wait_for(lambda: page.is_shown("#jump"))
    shown = page.run("return document.querySelectorAll('.body p').length")
    wait_for(lambda: page.run("return document.querySelectorAll('.body p').length") > shown)
    assert page.run("return document.querySelector('#messages').scrollTop") == 0
    page.element("#jump").click()
    wait_for(lambda: page.run(gap) < 100)
    assert not page.is_shown("#jump")
    page.element("#stop").click()
    page.wait()


def test_conversations_do_not_disturb_each_other(page: Page) -> None:
    page.recite("Hi")
    page.say("First")
    page.wait()
    page.press("New conversation")
    page.recite("word " * 60, per_frame=1)
    with page.holding():
        page.say("Second")
        page.open("First")
        assert not page.is_answering()
        page.press("Edit", 0)
        page.element(".edit textarea").send_keys(" more")
        assert page.element(".dot").text == "answering"
    wait_for(lambda: page.run("return document.querySelector('.dot') === null"))
    assert page.run("return document.querySelector('.edit textarea').value") == "First more"
    page.press("Cancel", within=".edit")
    page.open("Second")
    assert page.texts()[1] == ("assistant", ("word " * 60).strip())
    # One that is deleted while it is answered does not come back.
    with page.holding():
        page.press("Regenerate")
        page.choose("Second", "Delete")
        page.answer_question()
    wait_for(lambda: page.conversations() == ["First"])
    page.driver.refresh()
    wait_for(lambda: page.text("#model") == "tiny")
    assert page.conversations() == ["First"]


def test_memories(
    page: Page,
    live: LiveServer,
    generator: Generator,
    chat_format: ChatFormat,
    downloads: Path,
    tmp_path: Path,
) -> None:
    page.say("Hello")
    page.wait()
    first = page.texts()[1][1]
    page.element("#save-memory").click()
    page.answer_question("A <b>talk</b>")
    wait_for(lambda: page.text("#status").startswith("Memory saved: "))
    (saved,) = live.client.get("/v1/states").json()["data"]
    assert saved["name"] == "A <b>talk</b>"

    # A new conversation starts from it, and goes on from its own messages.
    page.press("Memories")
    wait_for(lambda: page.is_shown("#memory-list li"))
    facts = page.element("#memory-list .facts span").text
    assert facts.startswith(f"{saved['tokens']} tokens · {saved['bytes'] / 1e3:.0f} kB · ")
    page.press("Start")
    assert page.element("#origin").text == (
        f"Starts from the memory “A <b>talk</b>” ({saved['tokens']} tokens)"
    )
    page.say("Go on")
    page.wait()
    second = answer_to(generator, chat_format, "Hello", first, "Go on")
    assert page.texts() == [("user", "Go on"), ("assistant", second)]
    page.say("And on")
    page.wait()
    third = answer_to(generator, chat_format, "Hello", first, "Go on", second, "And on")
    assert page.texts()[-1] == ("assistant", third)
    page.press("Continue")
    page.wait()
    longer = answer_to(generator, chat_format, "Hello", first, "Go on", second, "And on", tokens=80)
    assert page.texts()[-1] == ("assistant", longer)

    # A document becomes a memory that several conversations ask at the same time.
    text = "The sea was calm. " * 500
    document = tmp_path / "sea.txt"
    document.write_text(text)
    page.press("Memories")
    page.run(
        "window.seen = []; new MutationObserver(() => window.seen.push("
        "document.querySelector('#reading-text').textContent))"
        ".observe(document.querySelector('#reading-text'), {childList: true})"
    )
    page.element("#document-file").send_keys(str(document))
    wait_for(lambda: page.text("#title") == "sea.txt")
    tokens = live.client.get("/v1/states").json()["data"][0]["tokens"]
    assert tokens > len(text)
    sending, *progress = page.run("return window.seen")
    assert sending == "Sending sea.txt …"
    assert progress[0].startswith("Reading sea.txt: 0 of 9,")
    assert page.element("#origin").text.endswith(f"“sea.txt” ({tokens:,} tokens)")
    page.set("max_tokens", 60000)
    page.say("Who was calm?")
    wait_for(page.is_answering)
    page.press("Memories")
    wait_for(lambda: page.is_shown("#memory-list li"))
    page.press("Start", 0)
    page.set("max_tokens", 40)
    page.say("What was the sea?")
    wait_for(lambda: len(page.texts()) == 2)
    page.wait()
    wanted = answer_to(generator, chat_format, "What was the sea?", system=text)
    assert page.texts()[-1] == ("assistant", wanted)
    page.open("Who was calm?answering")
    assert page.is_answering()
    page.element("#stop").click()
    page.wait()
    assert len(page.texts()[-1][1]) > 40

    # Memories have other names, are downloaded, deleted and uploaded.
    page.press("Memories")
    wait_for(lambda: page.is_shown("#memory-list li"))
    page.press("Rename", 0, within="#memory-list")
    page.answer_question("The sea")
    wait_for(lambda: page.text("#memory-list strong") == "The sea")
    page.press("Download", 0, within="#memory-list")
    wait_for(lambda: (downloads / "The-sea.safetensors").exists())
    page.press("Delete", 0, within="#memory-list")
    page.answer_question()
    wait_for(lambda: page.text("#memory-list strong") == "A <b>talk</b>")
    page.element("#memory-file").send_keys(str(downloads / "The-sea.safetensors"))
    wait_for(lambda: page.text("#memory-list strong") == "The-sea")
    # What is no text, or no memory, is refused.
    document.write_bytes(b"%PDF\xff\x00")
    page.element("#document-file").send_keys(str(document))
    wait_for(lambda: "“sea.txt” is not a text file" in page.text("#memory-error"))
    page.element("#memory-file").send_keys(str(document))
    wait_for(lambda: page.text("#memory-error").startswith("This file is not a memory"))
    page.errors_logged()
    page.element("#memories .close").click()


def test_reading_a_document_can_be_cancelled(page: Page, live: LiveServer, tmp_path: Path) -> None:
    document = tmp_path / "long.txt"
    document.write_text("The sea was calm. " * 40_000)
    page.press("Start from a document or a memory")
    page.element("#document-file").send_keys(str(document))
    wait_for(lambda: page.text("#reading-text").startswith("Reading long.txt: "))
    page.press("Cancel", within="#reading")
    wait_for(lambda: not page.is_shown("#reading"))
    wait_for(live.is_idle)
    assert live.client.get("/v1/states").json()["data"] == []
    assert page.text("#memory-error") == "long.txt was not read: you cancelled it."
    page.element("#memories .close").click()
    assert not page.is_shown("#document")


# Reads documents as far as half, and the rest when `window.release()` is called.
SLOW_READING = """
const encode = (event, end = '') =>
  new TextEncoder().encode(`data: ${JSON.stringify(event)}\\n\\n${end}`);
const f = window.fetch;
window.fetch = async (url, options) => {
  if (options?.method !== 'POST' || !url.pathname.endsWith('/v1/states')) return f(url, options);
  return new Response(new ReadableStream({ start(controller) {
    controller.enqueue(encode({ object: 'state.progress', tokens_read: 5, tokens_total: 10 }));
    window.release = (event) => controller.enqueue(encode(event, 'data: [DONE]\\n\\n'));
    options.signal.onabort = () => controller.error(new DOMException('', 'AbortError'));
  } }));
};
"""


def test_a_document_is_read_in_the_background(page: Page, tmp_path: Path) -> None:
    """Esc and × close the dialog. The reading is in view, and its end does not take the view."""
    document = tmp_path / "sea.txt"
    document.write_text("The sea was calm.")
    page.run(SLOW_READING)
    ends = {
        "release({object: 'state', id: 'state-1', name: 'sea.txt', tokens: 10, model: 'tiny'})": (
            "sea.txt was read. Start a conversation from it"
        ),
        "release({error: {type: 'server_error', message: 'it failed'}})": (
            "sea.txt was not read: "
        ),
    }
    for end, note in ends.items():
        page.press("Memories")
        page.element("#document-file").send_keys(str(document))
        wait_for(lambda: page.text("#reading-text") == "Reading sea.txt: 5 of 10 tokens")
        page.element("#document-file").send_keys(str(document))
        wait_for(lambda: page.text("#memory-error").startswith("Only one document is read at a"))
        for close in (Keys.ESCAPE, Keys.ENTER):
            assert not page.is_shown("#document")
            page.element("#memories .close").send_keys(close)
            wait_for(lambda: not page.is_shown("#memories"))
            wait_for(lambda: page.is_shown("#document"))
            assert page.text("#document") == "Reading sea.txt: 5 of 10 tokens"
            page.element("#document").click()
            assert page.is_shown("#reading-bar")
        page.element("#memories .close").click()
        page.element("#input").send_keys("I write")
        page.run(end)
        wait_for(lambda n=note: page.text("#document").startswith(n))
        assert page.text("#title") == "New conversation"
        assert page.run("return document.activeElement.id") == "input"
        page.element("#input").clear()
        page.element("#document").click()
        assert not page.is_shown("#document")
        if end.startswith("release({object"):
            assert page.text("#title") == "sea.txt"
            page.press("New conversation")


def test_a_document_for_a_template_without_system_messages(page: Page, tmp_path: Path) -> None:
    document = tmp_path / "note.txt"
    document.write_text("The sea was calm.")
    page.run(
        "const f = window.fetch; window.roles = []; window.fetch = async (url, options) => {"
        " if (options.method !== 'POST') return f(url, options);"
        " const { role } = JSON.parse(options.body).messages[0]; window.roles.push(role);"
        " if (role === 'user') return f(url, options);"
        " const error = { message: 'no system messages', param: 'messages' };"
        " return new Response(JSON.stringify({ error }), { status: 400 }) }"
    )
    page.press("Start from a document or a memory")
    page.element("#document-file").send_keys(str(document))
    wait_for(lambda: page.text("#title") == "note.txt")
    assert page.run("return window.roles") == ["system", "user"]


def test_settings_are_checked_explained_and_reset(page: Page) -> None:
    page.element("#settings-open").click()
    field = page.element("[name=top_p]")
    field.clear()
    field.send_keys("2")
    assert page.element("#setting-top_p-error").text == "This must be at most 1."
    assert field.get_attribute("aria-invalid") == "true"
    described = field.get_attribute("aria-describedby").split()
    assert "1 turns it off" in page.element(f"#{described[0]}").text
    faults = {"": "This must be a number.", "-1": "This must be at least 0.01.", "0.5": ""}
    for text, fault in faults.items():
        page.set("top_p", text)
        assert page.element("#setting-top_p-error").text == fault
    page.set("max_tokens", "2.5")
    assert page.element("#setting-max_tokens-error").text == "This must be a whole number."
    page.element("#settings").send_keys(Keys.ESCAPE)
    # The last good values are used, and kept.
    page.recite("Hi")
    page.say("Hello")
    page.wait()
    body = page.run("return window.lastBody")
    assert (body["top_p"], body["max_tokens"], "seed" in body) == (0.5, 40, False)
    page.driver.refresh()
    wait_for(lambda: page.text("#model") == "tiny")
    assert page.run("return document.querySelector('[name=top_p]').value") == "0.5"
    page.element("#settings-open").click()
    page.press("Reset to defaults")
    values = "return ['temperature', 'top_p', 'max_tokens', 'seed']"
    values += ".map(name => document.querySelector(`[name=${name}]`).value)"
    assert page.run(values) == ["0.8", "0.95", "1024", ""]
    page.element("#settings .close").click()
    # Answers are cut after `max_tokens` of the page, whatever the server's default is.
    page.recite("Hi", finish="length")
    page.say("Hello")
    page.wait()
    for action in ("Continue", "Regenerate"):
        assert page.run("return window.lastBody.max_tokens") == 1024
        page.run("window.lastBody = null")
        page.press(action, -1)
        page.wait()
    assert page.run("return window.lastBody.max_tokens") == 1024


def test_the_model_and_its_chat_template_are_named(page: Page, live: LiveServer) -> None:
    assert not page.is_shown("#no-template")
    assert not page.element("#model").is_enabled()  # there is only one
    facts = {"state_bytes": 1, "has_chat_template": False, "saves_states": False}
    models = json.dumps({"data": [{"id": "base", **facts}, {"id": "base:law", **facts}]})
    source = (
        "const f = window.fetch; window.fetch = async (url, o) =>"
        f" String(url).endsWith('/v1/models') ? new Response({models!r}) : f(url, o)"
    )
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    try:
        page.driver.get(with_key(live))
        wait_for(lambda: page.is_shown("#no-template"))
        assert "has no chat template" in page.element("#welcome").text
        assert not page.is_shown("#open-memories")
        assert not page.is_shown("#welcome-documents")
        page.recite("Hi")
        page.element("#model").send_keys("base:law")
        page.say("Hello")
        page.wait()
        assert page.run("return window.lastBody.model") == "base:law"
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_on_a_phone(page: Page, scheme: str) -> None:
    page.emulate(phone=True, scheme=scheme)
    page.recite(MARKDOWN)
    page.element("#input").send_keys("A word without end: " + "a" * 200, Keys.ENTER, "b")
    assert page.texts() == []  # Enter breaks the line
    page.element("#send").click()
    page.wait()
    assert page.texts()[0][1].endswith("a\nb")
    assert page.run("return [document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    assert page.element("#send").rect["y"] + page.element("#send").rect["height"] < 740
    page.picture(f"phone-{scheme}")
    # The conversations are in a drawer.
    assert not page.is_shown("#sidebar")
    assert page.run("return document.querySelector('#sidebar').inert")
    page.element("#drawer-open").click()
    wait_for(lambda: page.element("#sidebar").rect["x"] == 0)
    assert page.run("return document.querySelector('#content').inert")
    page.picture(f"drawer-{scheme}")
    page.element("body").send_keys(Keys.ESCAPE)
    wait_for(lambda: not page.is_shown("#sidebar"))
    assert page.run("return document.activeElement.id") == "drawer-open"
    for button, dialog in (("#settings-open", "#settings"), ("#open-memories", "#memories")):
        page.run("document.querySelector(arguments[0]).click()", button)
        box = page.element(dialog).rect
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 740
        page.element(f"{dialog} .close").click()
    assert page.run("return [document.documentElement.scrollWidth, innerWidth]") == [360, 360]


def test_themes(page: Page) -> None:
    """Of the system, light or dark. Text and its background differ enough in each."""
    colours = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    dark, light = "rgb(23, 24, 26)", "rgb(253, 253, 252)"
    theme = page.element("#theme")
    seen = {}
    for scheme in ("light", "dark"):
        page.emulate(scheme=scheme)
        seen[scheme] = page.run(colours)[0]
    assert seen == {"light": light, "dark": dark}
    assert theme.get_attribute("aria-label") == "Theme: system"
    theme.click()
    assert (page.run(colours)[0], theme.get_attribute("aria-label")) == (light, "Theme: light")
    page.emulate(scheme="light")
    theme.click()
    assert (page.run(colours)[0], theme.get_attribute("aria-label")) == (dark, "Theme: dark")
    page.driver.refresh()
    assert page.run(colours)[0] == dark
    backs = ["back", "side", "panel", "code"]
    inks = ["ink", "faint", "accent", "wrong", "keyword", "string", "number", "name"]
    names = [*backs, *inks, "on-accent"]
    for _ in range(2):
        found = page.run(
            "const probe = document.createElement('i'); document.body.append(probe);"
            "const all = arguments[0].map(n => { probe.style.color = `var(--${n})`;"
            " return getComputedStyle(probe).color.match(/[0-9]+/g).map(Number) });"
            "probe.remove(); return all",
            names,
        )
        colour = dict(zip(names, map(luminance, found), strict=True))
        for ink in inks[:4]:
            for back in backs:
                assert contrast(colour[ink], colour[back]) >= 4.5, (ink, back)
        for ink in inks[4:]:
            assert contrast(colour[ink], colour["code"]) >= 4.5, ink
        assert contrast(colour["accent"], colour["on-accent"]) >= 4.5
        page.run("document.documentElement.dataset.theme = 'light'")


def luminance(colour: list[int]) -> float:
    """As WCAG defines it."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_keyboard_and_screen_reader(page: Page) -> None:
    """Every control has a name and is reached with Tab. Complete answers are read out."""
    page.recite("An *answer*.")
    page.say("Hello")
    page.wait()
    assert page.element("#announcer").get_property("textContent") == (
        "The model answered: An *answer*."
    )
    assert page.element("#announcer").get_attribute("role") == "status"
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    controls = {"button", "textbox", "searchbox", "combobox", "link", "log", "navigation"}
    for node in tree:
        if not node.get("ignored") and node["role"]["value"] in controls:
            assert node["name"]["value"], node
    page.run("document.activeElement.blur()")
    reached = set()
    for _ in range(40):
        page.element("body").send_keys(Keys.TAB)
        reached.add(
            page.run("return document.activeElement.id || document.activeElement.textContent")
        )
    assert {"new", "theme", "search", "settings-open", "messages", "Edit", "input"} <= reached
    # The menu of a conversation, with keys only.
    page.element("#conversations .more").send_keys(Keys.ENTER)
    assert page.run("return document.activeElement.textContent") == "Rename"
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.element("#question-title").text == "Delete “Hello”?"
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert page.conversations() == ["Hello"]
    page.element("body").send_keys(Keys.CONTROL, "k")
    assert page.run("return document.activeElement.id") == "search"


def test_trees(page: Page) -> None:
    """Random changes leave a tree whose shown messages are a path, and files keep all of it."""
    problem = page.driver.execute_async_script(
        """
        const done = arguments[0];
        Promise.all([import('/tree.js'), import('/store.js')]).then(([tree, store]) => {
          let seed = 1;
          const random = (n) => (seed = seed * 48271 % 2147483647) % n;
          const c = tree.createConversation();
          for (let step = 0; step < 2000; step++) {
            const all = Object.values(c.messages), one = all[random(all.length || 1)];
            const kind = random(12) % 9;
            if (kind < 7 || !one) {
              const role = one?.role === 'user' ? 'assistant' : 'user';
              const added = tree.add(c, one?.id ?? null, role, `text ${step}`);
              if (!tree.branches(c, added).includes(added)) return done('no branch');
            } else if (kind === 7) {
              tree.show(c, one);
            } else {
              const count = tree.countFrom(c, one), before = all.length;
              tree.remove(c, one);
              if (Object.keys(c.messages).length !== before - count) return done('count');
            }
            let parent = null;
            for (const message of tree.path(c)) {
              if (message.parent !== parent) return done('not a path');
              parent = message.id;
            }
            const last = c.messages[parent];
            if (last && tree.lineage(c, last).length !== tree.path(c).length) return done('line');
            const has = Object.values(c.messages).some((m) => m.parent === parent);
            if (has) return done('a message is hidden');
          }
          const [copy] = store.importConversations(store.exportConversations([c]));
          const texts = (x) => JSON.stringify(Object.values(x.messages).map((m) => m.content));
          const path = (x) => JSON.stringify(tree.path(x).map((m) => m.content));
          if (texts(copy) !== texts(c) || path(copy) !== path(c)) return done('copy');
          done(Object.keys(c.messages).length > 20 ? '' : 'too small');
        });
        """
    )
    assert problem == ""
