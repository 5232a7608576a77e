"""A real browser for the tests of the page: Debian's chromium, without a window."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PATIENCE = 90.0  # seconds: on a machine that has other things to do


def require_browser() -> tuple[str, str]:
    """Paths of the browser and its driver; the test is skipped where there are none."""
    pytest.importorskip("selenium", reason="the page is tested with selenium, which is not installed")
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if found[0] is None or found[1] is None:
        pytest.skip("the page is tested in a browser: apt-get install chromium chromium-driver")
    return found[0], found[1]


@contextmanager
def browser(width: int = 1280, height: int = 800, dark: bool = False) -> Iterator[Any]:
    chromium, chromedriver = require_browser()
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        driver.set_page_load_timeout(PATIENCE)
        resize(driver, width, height)
        look = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [look]})
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """Makes the window so large, whatever the system thinks is the least."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def until(driver: Any, condition: Callable[[], Any], what: str) -> Any:
    """Waits until something is so on the page, which is drawn anew every second."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(driver, PATIENCE, poll_frequency=0.1, ignored_exceptions=[StaleElementReferenceException])
    return wait.until(lambda _: condition(), f"waited in vain: {what}")


def text(driver: Any, selector: str) -> str:
    """Text of an element, whole, shown or not."""
    return driver.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def texts(driver: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return driver.execute_script(script, selector)


def shown(driver: Any, selector: str) -> bool:
    """Whether an element is there and visible, in one question: the page may draw it anew between two."""
    return driver.execute_script("return Boolean(document.querySelector(arguments[0])?.checkVisibility())", selector)
