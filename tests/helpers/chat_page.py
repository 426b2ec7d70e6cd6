"""The chat page in a browser. XLSTM7B_SCREENSHOTS names a folder for screenshots."""

import os
from pathlib import Path

from live_server import wait_for
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select


class Page:
    """What a person sees and does."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def element(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self) -> list[tuple[str, str]]:
        """(role, text) of each message."""
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
