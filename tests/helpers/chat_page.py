"""The chat page in a browser. XLSTM7B_SCREENSHOTS names a folder for screenshots."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from live_server import wait_for
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

# Answers chats with a fixed text, in the place of the server. While `window.isHeld`, the last piece
# does not come.
_RECITE = """
const [text, perFrame, size, finish] = arguments;
window.realFetch ??= window.fetch;
window.fetch = async (url, options) => {
  if (!url.pathname.endsWith('/v1/chat/completions')) return window.realFetch(url, options);
  window.lastBody = JSON.parse(options.body);
  const pieces = text.match(new RegExp(`[^]{1,${size}}`, 'gu')) ?? [];
  let next = 0, due = 0;
  const toEvent = (content, reason = null, usage = null) => `data: ${JSON.stringify({
    choices: usage ? [] : [{ delta: { content }, finish_reason: reason }], usage })}\\n\\n`;
  const body = new ReadableStream({
    start(controller) {
      options.signal.onabort = () => controller.error(new DOMException('', 'AbortError'));
    },
    async pull(controller) {
      await new Promise(perFrame === null ? setTimeout : requestAnimationFrame);
      due += perFrame ?? pieces.length;
      const end = pieces.length - Boolean(window.isHeld);
      let events = '';
      while (next < end && next < due) events += toEvent(pieces[next++]);
      if (next >= pieces.length) {
        const usage = { completion_tokens: pieces.length, prompt_tokens: 9,
          prompt_tokens_details: { cached_tokens: 0 } };
        events += toEvent('', finish) + toEvent('', null, usage) + 'data: [DONE]\\n\\n';
      }
      controller.enqueue(new TextEncoder().encode(events));
      if (next >= pieces.length) controller.close();
    },
  }, { highWaterMark: 0 });
  return new Response(body);
};
"""
# How to ask for what can be seen: neither transparent nor `visibility: hidden`.
_VISIBLE = {"opacityProperty": True, "visibilityProperty": True}


class Page:
    """What a person sees and does."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def element(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def is_shown(self, selector: str) -> bool:
        """False also if it is not there."""
        script = "return document.querySelector(arguments[0])?.checkVisibility(arguments[1])"
        return bool(self.run(script, selector, _VISIBLE))

    def text(self, selector: str) -> str:
        """The text of an element; empty if there is none at this moment."""
        return str(
            self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        )

    def texts(self) -> list[tuple[str, str]]:
        """(role, text) of each message."""
        script = (
            "return [...document.querySelectorAll('article')]"
            ".map(a => [a.classList[0], a.querySelector('.body').textContent.trim()])"
        )
        return [tuple(pair) for pair in self.run(script)]

    def set(self, name: str, value: object) -> None:
        """Types a setting, without opening the dialog."""
        self.run(
            "const f = document.querySelector(`[name=${arguments[0]}]`); f.value = arguments[1];"
            "f.dispatchEvent(new Event('input', {bubbles: true}))",
            name,
            str(value),
        )

    def say(self, text: str) -> None:
        self.element("#input").send_keys(text, Keys.ENTER)

    def is_answering(self) -> bool:
        return self.is_shown("#stop")

    def wait(self) -> None:
        wait_for(lambda: not self.is_answering())

    def press(self, name: str, number: int = 0, within: str = "") -> None:
        """Presses the visible button with this text, with a click as a mouse makes it."""
        script = (
            "return [...document.querySelectorAll(arguments[0])]"
            ".filter(button => button.textContent === arguments[1])"
        )
        named = self.run(script, f"{within} button", name)
        shown = [one for one in named if one.is_displayed()]
        self.run("arguments[0].scrollIntoView({block: 'nearest'})", shown[number])
        shown[number].click()

    def conversations(self) -> list[str]:
        """Their titles, the one that changed last first."""
        script = "return [...document.querySelectorAll('#conversations .open')].map(b => b.title)"
        return list(self.run(script))

    def open(self, title: str) -> None:
        self.press(title, within="#conversations")

    def choose(self, title: str, item: str) -> None:
        """An item of a conversation's menu."""
        self.run(
            "[...document.querySelectorAll('#conversations li')]"
            ".find(li => li.querySelector('.open').title === arguments[0])"
            ".querySelector('.more').click()",
            title,
        )
        self.press(item, within="#menu")

    def answer_question(self, text: str | None = None) -> None:
        """Confirms the open question, with this text in its field."""
        if text is not None:
            field = self.element("#question-field")
            field.clear()
            field.send_keys(text)
        self.element("#question-action").click()
        wait_for(lambda: not self.is_shown("#question"))
        self.driver.execute_async_script("setTimeout(arguments[0], 0)")  # until it is carried out

    def error(self) -> str:
        return self.element("#error-text").text if self.is_shown("#error") else ""

    def recite(
        self, text: str, per_frame: int | None = None, size: int = 4, finish: str = "stop"
    ) -> None:
        """From now on answers are this text, in pieces of `size` characters.

        `per_frame` pieces come in each frame that the browser draws; by default all come at once.
        """
        self.run(_RECITE, text, per_frame, size, finish)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Answers by `recite` do not end within this context."""
        self.run("window.isHeld = true")
        yield
        self.run("window.isHeld = false")

    def emulate(self, *, phone: bool = False, scheme: str = "light") -> None:
        """A phone's screen and finger, or a desktop's; light or dark."""
        size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
        if phone:
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        else:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def errors_logged(self) -> list[dict[str, Any]]:
        """What the browser has complained about since the last call."""
        return [line for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]

    def picture(self, name: str) -> None:
        if folder := os.environ.get("XLSTM7B_SCREENSHOTS"):
            assert self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))


@contextmanager
def browser(downloads: Path) -> Iterator[webdriver.Chrome]:
    """Chromium without a window. Files that pages download are in the folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1000,800")
    settings = {
        "download.default_directory": str(downloads),
        "credentials_enable_service": False,  # it would ask whether to save the key
    }
    options.add_experimental_option("prefs", settings)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()
