"""The live page: what it computes, in Node.js, and how it works in a real browser. Each is skipped where there is none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from serving.browser import CONTROL, ENTER, RIGHT, TAB, Browser, is_installed, open_browser
from serving.server_process import Server

HERE = Path(__file__).resolve().parent
KEY = "a-key-of-letters"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_rates_layouts_and_texts_are_right() -> None:
    done = subprocess.run(["node", str(HERE / "page_state.mjs")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all checks passed"


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    """The page of a real server that wants a key."""
    if not is_installed():
        pytest.skip("needs Chromium and its driver: apt install chromium chromium-driver")
    with closing(Server("--set", "deploy.processes=one", key=KEY)) as server, open_browser() as browser:
        browser.open(f"http://127.0.0.1:{server.port}/")
        yield browser


def test_page_works_by_keyboard_alone(page: Browser) -> None:
    """One test, because a browser and a server take seconds to start."""
    page.wait("document.activeElement.id === 'key'")
    assert page.text("#processes") == "", "the key protects the data"
    page.write(KEY)
    page.keys(ENTER)
    assert page.wait("document.querySelector('#health').textContent", lambda text: text == "healthy")
    assert page.text("#model") == "tiny-moe"
    assert page.run("[...document.querySelectorAll('#processes th')].map(each => each.textContent)").count("experts.0") == 1
    assert page.run("[...document.querySelectorAll('#processes th')].map(each => each.textContent)").count("monitor") == 1
    assert page.wait("[...document.querySelectorAll('.curves path')].map(each => each.getAttribute('d'))", len)
    assert page.wait("[...document.querySelectorAll('#graph g')].map(each => each.querySelector('text').textContent)", len)
    try_prompt(page)
    use_experts(page)
    failures = [error for error in page.errors() if "401" not in error]
    assert failures == [], "also nothing that the content security policy forbids"
    check_widths(page)


def try_prompt(page: Browser) -> None:
    page.run("document.querySelector('#health').focus()")
    for _ in range(20):  # the way of a person without a pointer
        page.keys(TAB)
        if page.run("document.activeElement.id") == "prompt":
            break
    page.keys(CONTROL, "a")
    page.write("What is 1 + 2?")
    page.keys(CONTROL, ENTER)
    assert "tokens in" in page.wait("document.querySelector('#response-figures').textContent")
    assert page.text("#response") == " 3"
    page.wait("document.querySelectorAll('#requests rect').length")


def use_experts(page: Browser) -> None:
    page.wait("document.querySelector('#experts').height > 0 && !document.querySelector('#experts').hidden")
    page.run("document.querySelector('#experts').focus()")
    page.keys(RIGHT)
    page.wait("document.querySelector('#expert-cell').textContent", lambda text: text.startswith("Layer 0, expert 1: "))


def check_widths(page: Browser) -> None:
    """Nothing is wider than the window, in light and dark; a phone shows one column."""
    for width, columns, scheme in ((1280, 2, "dark"), (360, 1, "light"), (360, 1, "dark")):
        page.devtools("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.wait(f"document.querySelector('#graph').viewBox.baseVal.width <= {width}")
        assert page.run("document.scrollingElement.scrollWidth") <= width
        assert len(page.run("getComputedStyle(document.querySelector('main')).gridTemplateColumns").split()) == columns
        assert contrast(page, "body") >= 7
        assert contrast(page, ".legend") >= 4.5
        assert contrast(page, "#send") >= 4.5


def contrast(page: Browser, selector: str) -> float:
    """The contrast ratio of text, as WCAG defines it."""
    script = f"""(() => {{
        const element = document.querySelector({selector!r});
        let below = element;
        while (getComputedStyle(below).backgroundColor === 'rgba(0, 0, 0, 0)') below = below.parentElement;
        return [getComputedStyle(element).color, getComputedStyle(below).backgroundColor].map(each => each.match(/\\d+/g).map(Number));
    }})()"""
    light, dark = sorted((luminance(colour) for colour in page.run(script)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: list[int]) -> float:
    parts = [part / 255 for part in colour[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
