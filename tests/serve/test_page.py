"""The chat page in Chromium, with a person's hands.

XLSTM7B_SCREENSHOTS names a folder to keep pictures in.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select
from serve.live import GREEDY, Live, serving, speller, wait_for

from xlstm7b.generate import Generator
from xlstm7b.tokenizer import ByteTokenizer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium and chromedriver here"
)
KEY = "a-key"


class Page:
    """What a person sees, and does."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def element(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self) -> list[tuple[str, str]]:
        """(who, what) of the conversation."""
        script = (
            "return [...document.querySelectorAll('article')]"
            ".map(a => [a.classList[0], a.querySelector('p').textContent])"
        )
        return [tuple(pair) for pair in self.driver.execute_script(script)]

    def set(self, name: str, value: object) -> None:
        self.driver.execute_script(
            "const f = document.querySelector(`[name=${arguments[0]}]`); f.value = arguments[1];"
            "f.dispatchEvent(new Event('change', {bubbles: true}))",
            name,
            str(value),
        )

    def say(self, text: str) -> None:
        self.element("#input").send_keys(text, Keys.ENTER)

    def is_answering(self) -> bool:
        return self.element("#stop").is_displayed()

    def wait(self) -> None:
        wait_for(lambda: not self.is_answering())

    def press(self, name: str, number: int = 0) -> None:
        self.driver.find_elements(By.XPATH, f"//button[text()='{name}']")[number].click()

    def conversations(self) -> list[str]:
        return [option.text for option in Select(self.element("#conversations")).options]

    def picture(self, name: str) -> None:
        if folder := os.environ.get("XLSTM7B_SCREENSHOTS"):
            assert self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))


@pytest.fixture(scope="module")
def generator() -> Generator:
    """It writes something like words."""
    return Generator(speller("abcdefghijklmnopqrstuvwxyz  "), ByteTokenizer())


@pytest.fixture(scope="module")
def live(generator: Generator) -> Iterator[Live]:
    with serving(generator, keys=(KEY,)) as server:
        yield server


@pytest.fixture
def page(live: Live) -> Iterator[Page]:
    """The page, open; the browser gives the key as the password of whoever it is."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage",
                     "--window-size=1000,800"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        driver.get(live.url.replace("http://", f"http://me:{KEY}@"))
        opened = Page(driver)
        wait_for(lambda: opened.element("h1").text == "tiny")
        opened.set("temperature", 0)
        opened.set("max_tokens", 40)
        yield opened
        wrong = [line for line in driver.get_log("browser") if line["level"] == "SEVERE"]
        assert [line for line in wrong if "favicon" not in line["message"]] == []
    finally:
        driver.quit()


def answer_to(generator: Generator, written: str, tokens: int = 40) -> str:
    (done,) = generator.generate(written, max_new_tokens=tokens, stop_strings="\nUser:", **GREEDY)
    return done.text.lstrip()


def test_a_conversation(page: Page, live: Live, generator: Generator) -> None:
    first = answer_to(generator, "User: Hello\nAssistant:")
    assert page.driver.switch_to.active_element == page.element("#input")
    page.say("Hello")
    page.wait()
    assert page.texts() == [("user", "Hello"), ("assistant", first)]
    status = page.element("#status").text
    assert status.startswith("40 tokens · ")
    assert "tok/s" in status
    assert f"state {live.service.state_bytes / 1e3:.0f} kB" in status
    assert "0 of 23 prompt tokens from a kept state" in status

    page.set("system", "Be brief.")
    page.press("Regenerate")
    page.wait()
    told = answer_to(generator, "Be brief.\n\nUser: Hello\nAssistant:")
    assert page.texts() == [("user", "Hello"), ("assistant", told)]
    page.set("system", "")
    page.press("Regenerate")
    page.wait()

    # It streams, and stops where it is told to.
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

    # A fork goes its own way; what it was forked from stays.
    page.press("Fork")
    assert page.conversations() == ["Hello", "Hello / 1"]
    assert page.texts() == story[:2]
    page.say("Again")
    page.wait()
    written = f"User: Hello\nAssistant: {first.strip()}\nUser: Again\nAssistant:"
    fork = [*story[:2], ("user", "Again"), ("assistant", answer_to(generator, written))]
    assert page.texts() == fork
    assert "prompt tokens from a kept state" in page.element("#status").text
    assert "· 0 of" not in page.element("#status").text
    page.picture("forked")
    Select(page.element("#conversations")).select_by_index(0)
    assert page.texts() == story

    # All is there after a reload, in this browser alone.
    page.driver.refresh()
    wait_for(lambda: page.element("h1").text == "tiny")
    assert page.texts() == story
    Select(page.element("#conversations")).select_by_index(1)
    assert page.texts() == fork
    page.press("Delete")
    assert page.conversations() == ["Hello"]
    page.press("New")
    assert (page.texts(), len(page.conversations())) == ([], 2)


def test_what_goes_wrong_is_told(page: Page) -> None:
    page.set("top_p", 2)
    page.say("Hello")
    page.wait()
    assert page.element("#error").text == "top_p must be above 0 and at most 1, not 2.0"
    assert page.texts() == [("user", "Hello")]
    page.driver.get_log("browser")  # it says so, too
    page.set("top_p", 1)
    page.say("<b>Hello</b>")
    page.wait()
    assert not page.element("#error").is_displayed()
    assert page.texts()[1] == ("user", "<b>Hello</b>")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(page: Page, scheme: str) -> None:
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
    page.element("summary").send_keys(Keys.ENTER)  # by the keyboard alone
    assert page.element("[name=temperature]").is_displayed()
    width = "return [document.documentElement.scrollWidth, innerWidth]"
    assert page.driver.execute_script(width) == [360, 360]
    assert page.element("#send").rect["y"] + page.element("#send").rect["height"] < 740
    page.picture(f"phone-{scheme}")
    back = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(23, 24, 26)") == (scheme == "dark")
