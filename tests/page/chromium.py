"""Headless Chromium of the machine, driven by playwright, for tests and benches of pages; axe-core."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import pytest

FOCUSED = "(each => each.getAttribute('aria-label') || each.id || each.textContent)(document.activeElement)"


def executable() -> str | None:
    """Path of Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def problems() -> list[str]:
    """Return what is missing for tests in a browser."""
    is_missing = importlib.util.find_spec("axe_playwright_python") is None  # it needs playwright
    texts = ["No axe-playwright-python: pip install 'ringweave[dev]'."] if is_missing else []
    return texts if executable() else [*texts, "No Chromium on this machine: apt-get install chromium."]


@contextmanager
def launched() -> Iterator[Any]:
    """Yield a browser. The sandbox needs namespaces, which root in a container may not make."""
    from playwright import sync_api

    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable(), args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


def open_page(browser: Any, address: str, **options: Any) -> tuple[Any, list[str]]:
    """Open a page; its console's errors and dialogs are in the list."""
    page, troubles = browser.new_context(viewport={"width": 1300, "height": 900}, **options).new_page(), []
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: troubles.append("dialog"))
    page.goto(address)
    wait_for(page, "#facts", "workers")
    return page, troubles


def wait_for(page: Any, selector: str, text: str) -> None:
    """Wait until the text is there; the page's policy keeps the browser from evaluating conditions by itself."""
    for _ in range(300):
        if text in page.inner_text(selector):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"{selector}: {page.inner_text(selector)!r}, expected {text}")


def serious_findings(page: Any) -> list[list[str]]:
    """Return what axe-core finds serious or critical; the page must allow other scripts (`bypass_csp`)."""
    page.add_script_tag(path=str(resources.files("axe_playwright_python") / "axe.min.js"))
    found = page.evaluate("axe.run().then(found => found.violations.map(each => [each.impact, each.id]))")
    return [each for each in found if each[0] in ("serious", "critical")]
