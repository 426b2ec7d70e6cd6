"""The chat page in Chromium, used as a person would use it."""

import shutil
from collections.abc import Iterator

import pytest
from chat_page import Page
from live_server import GREEDY, LiveServer, serving, spelling_model, wait_for
from selenium import webdriver
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from xlstm7b.generate import Generator
from xlstm7b.tokenizer import ByteTokenizer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium and chromedriver here"
)
KEY = "a-key"


@pytest.fixture(scope="module")
def generator() -> Generator:
    """A model that writes something like words."""
    return Generator(spelling_model("abcdefghijklmnopqrstuvwxyz  "), ByteTokenizer())


@pytest.fixture(scope="module")
def live(generator: Generator) -> Iterator[LiveServer]:
    with serving(generator, keys=(KEY,)) as server:
        yield server


@pytest.fixture
def page(live: LiveServer) -> Iterator[Page]:
    """The open page. The browser sends the key as a password, with any user name."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    options.add_argument("--headless=new")
    options.add_argument("--no-sandbox")
    options.add_argument("--disable-dev-shm-usage")
    options.add_argument("--window-size=1000,800")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        driver.get(with_key(live))
        opened = Page(driver)
        wait_for(lambda: opened.element("h1").text == "tiny")
        opened.set("temperature", 0)
        opened.set("max_tokens", 40)
        yield opened
        assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []
    finally:
        driver.quit()


def with_key(live: LiveServer) -> str:
    return live.url.replace("http://", f"http://me:{KEY}@")


def answer_to(generator: Generator, prompt: str, tokens: int = 40) -> str:
    (done,) = generator.generate(prompt, max_new_tokens=tokens, stop_strings="\nUser:", **GREEDY)
    return done.text.lstrip()


def test_a_conversation(page: Page, live: LiveServer, generator: Generator) -> None:
    first = answer_to(generator, "User: Hello\nAssistant:")
    assert page.driver.switch_to.active_element == page.element("#input")
    page.say("Hello")
    page.wait()
    assert page.texts() == [("user", "Hello"), ("assistant", first)]
    status = page.element("#status").text
    assert status.startswith("40 tokens · ")
    assert "tok/s" in status
    assert f"state {live.service.state_bytes / 1e3:.0f} kB" in status
    assert "0 of 23 prompt tokens cached" in status

    page.set("system", "Be brief.")
    page.press("Regenerate")
    page.wait()
    brief = answer_to(generator, "Be brief.\n\nUser: Hello\nAssistant:")
    assert page.texts() == [("user", "Hello"), ("assistant", brief)]
    page.set("system", "")
    page.press("Regenerate")
    page.wait()

    # It streams, and Esc stops it.
    page.set("max_tokens", 60000)
    page.say("A story")
    wait_for(lambda: len(page.texts()[-1][1]) > 20)
    seen = page.texts()[-1][1]
    wait_for(lambda: len(page.texts()[-1][1]) > len(seen))
    assert page.texts()[-1][1].startswith(seen)
    page.picture("streaming")
    page.element("body").send_keys(Keys.ESCAPE)
    page.wait()
    wait_for(lambda: live.service.engine.stats().running == 0)
    story = page.texts()
    assert story[:3] == [("user", "Hello"), ("assistant", first), ("user", "A story")]
    page.set("max_tokens", 40)

    # A fork does not change the conversation that it comes from.
    page.press("Fork")
    assert page.conversations() == ["Hello", "Hello / 1"]
    assert page.texts() == story[:2]
    page.say("Again")
    page.wait()
    prompt = f"User: Hello\nAssistant: {first.strip()}\nUser: Again\nAssistant:"
    fork = [*story[:2], ("user", "Again"), ("assistant", answer_to(generator, prompt))]
    assert page.texts() == fork
    assert "prompt tokens cached" in page.element("#status").text
    assert "· 0 of" not in page.element("#status").text
    page.picture("forked")
    Select(page.element("#conversations")).select_by_index(0)
    assert page.texts() == story

    # The browser stores everything for a reload.
    page.driver.refresh()
    wait_for(lambda: page.element("h1").text == "tiny")
    assert page.texts() == story
    Select(page.element("#conversations")).select_by_index(1)
    assert page.texts() == fork
    page.press("Delete")
    page.driver.switch_to.alert.dismiss()
    assert page.conversations() == ["Hello", "Hello / 1"]
    page.press("Delete")
    page.driver.switch_to.alert.accept()
    assert page.conversations() == ["Hello"]
    page.press("New")
    assert (page.texts(), len(page.conversations())) == ([], 2)


def test_errors_are_shown(page: Page) -> None:
    page.set("top_p", 2)
    page.say("Hello")
    page.wait()
    assert page.element("#error").text == "top_p must be above 0 and at most 1, not 2.0"
    assert page.texts() == [("user", "Hello")]
    page.driver.get_log("browser")  # the browser logs it as well
    page.set("top_p", 1)
    page.say("<b>Hello</b>")
    page.wait()
    assert not page.element("#error").is_displayed()
    assert page.texts()[1] == ("user", "<b>Hello</b>")

    # A message without an answer can be sent again, with the keyboard only.
    page.set("top_p", 2)
    page.say("Once more")
    page.wait()
    page.driver.get_log("browser")
    page.set("top_p", 1)
    page.element("article:last-child button").send_keys(Keys.ENTER)
    wait_for(lambda: len(page.texts()) == 5)
    page.wait()
    assert [who for who, _ in page.texts()] == ["user", "user", "assistant", "user", "assistant"]
    # If a new answer fails, the old one stays.
    before = page.texts()
    page.set("top_p", 2)
    page.press("Regenerate", 1)
    page.wait()
    page.driver.get_log("browser")
    assert page.texts() == before


def test_regenerating_an_earlier_answer_makes_a_fork(page: Page) -> None:
    for text in ("One", "Two"):
        page.say(text)
        page.wait()
    before = page.texts()
    page.set("temperature", 2)
    page.press("Regenerate", 0)
    page.wait()
    assert page.conversations() == ["One", "One / 1"]
    assert [page.texts()[0], len(page.texts())] == [("user", "One"), 2]
    Select(page.element("#conversations")).select_by_index(0)
    assert page.texts() == before


def test_nothing_is_lost_on_reload(page: Page, live: LiveServer) -> None:
    page.set("max_tokens", 60000)
    page.say("A story")
    wait_for(lambda: len(page.texts()[-1][1]) > 20)
    page.element("#input").send_keys("A draft")
    seen = page.texts()[-1][1]
    page.driver.refresh()
    wait_for(lambda: page.element("h1").text == "tiny")
    assert page.texts()[0] == ("user", "A story")
    assert page.texts()[1][1].startswith(seen)
    assert page.element("#input").get_property("value") == "A draft"
    wait_for(lambda: live.service.engine.stats().running == 0)
    # Another tab has its own conversation and overwrites nothing.
    page.set("max_tokens", 5)
    first, driver = page.driver.current_window_handle, page.driver
    driver.switch_to.new_window("tab")
    driver.get(with_key(live))
    wait_for(lambda: page.element("h1").text == "tiny")
    page.press("New")
    page.say("Elsewhere")
    page.wait()
    driver.switch_to.window(first)
    wait_for(lambda: page.conversations() == ["A story", "Elsewhere"])
    assert len(page.texts()) == 2
    page.element("#input").send_keys(Keys.ENTER)
    wait_for(lambda: len(page.texts()) == 4)
    page.wait()
    driver.refresh()
    wait_for(lambda: page.conversations() == ["A story", "Elsewhere"])
    assert page.texts()[2] == ("user", "A draft")


def test_failures_of_the_server_are_explained(page: Page, live: LiveServer) -> None:
    """Gone, full, or with another key: the page says so, and has a field for the key."""
    fail = "window.fetch = async () => {{ {} }}"
    answers = {
        "throw new TypeError('Failed to fetch')": "The server does not answer.",
        "return new Response('<h1>', {status: 502})": "The server answered with error 502",
        "return new Response(JSON.stringify({error: {message: 'it is full'}}),"
        "{status: 429, headers: {'retry-after': '7'}})": "it is full: try again in 7 s",
        "return new Response('data: {')": "The connection was lost.",
        "return new Response('data: [DONE]\\n\\n')": "The answer was empty.",
    }
    page.say("Hello")
    page.wait()
    (_, before) = page.texts()
    page.driver.execute_script("window.kept = window.fetch")
    for failure, message in answers.items():
        page.driver.execute_script(fail.format(failure))
        page.press("Regenerate")
        wait_for(lambda m=message: page.element("#error").text == m)
        page.wait()
        assert page.texts()[1] == before
    page.driver.execute_script(
        "history.replaceState(null, '', '/behind/a/proxy/');"
        "window.fetch = async (url) => { window.requested = url.pathname; throw new TypeError() }"
    )
    page.press("Regenerate")
    wait_for(lambda: page.element("#error").text == "The server does not answer.")
    requested = page.driver.execute_script(
        "history.replaceState(null, '', '/'); return window.requested"
    )
    assert requested == "/behind/a/proxy/v1/chat/completions"
    assert not page.element("#key").is_displayed()
    page.driver.execute_script("document.querySelector('#key').value = 'wrong'")
    page.driver.execute_script("window.fetch = window.kept")
    page.press("Regenerate")
    wait_for(lambda: page.element("#error").text == "this server needs an API key")
    page.picture("key")
    page.driver.get_log("browser")
    key = page.element("#key")
    assert page.driver.switch_to.active_element == key
    key.send_keys(Keys.CONTROL, "a")
    key.send_keys(KEY, Keys.TAB)
    wait_for(lambda: not page.element("#error").is_displayed())
    page.press("Regenerate")
    page.wait()
    assert page.texts()[1] == before
    page.driver.refresh()
    wait_for(lambda: page.element("h1").text == "tiny")
    assert page.element("#key").get_property("value") == KEY


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(page: Page, scheme: str) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True},
    )
    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    page.say("A word without end: " + "a" * 200)
    page.wait()
    page.element("summary").send_keys(Keys.ENTER)  # with the keyboard only
    assert page.element("[name=temperature]").is_displayed()
    width = "return [document.documentElement.scrollWidth, innerWidth]"
    assert page.driver.execute_script(width) == [360, 360]
    assert page.element("#send").rect["y"] + page.element("#send").rect["height"] < 740
    page.picture(f"phone-{scheme}")
    back = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(23, 24, 26)") == (scheme == "dark")
