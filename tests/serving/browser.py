"""A headless Chromium, driven over WebDriver with the standard library. Not a test itself.

Debian: apt install chromium chromium-driver.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

SECONDS = 60.0
ENTER, CONTROL, RIGHT, TAB = "\ue007", "\ue009", "\ue014", "\ue004"


def is_installed() -> bool:
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


@contextmanager
def open_browser() -> Iterator[Browser]:
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert driver.stdout is not None
        port = next(int(found[1]) for line in driver.stdout if (found := re.search(r"started successfully on port (\d+)", line)))
        browser = Browser(port)
        try:
            yield browser
        finally:
            with suppress(OSError):
                browser.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait()
        assert driver.stdout is not None
        driver.stdout.close()


class Browser:
    def __init__(self, port: int) -> None:
        self._port, self._session = port, ""
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1000"]
        options = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = "/" + self.call("POST", "", {"capabilities": {"alwaysMatch": options}})["sessionId"]

    def call(self, method: str, path: str, body: Any = None) -> Any:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)) as connection:
            connection.request(method, f"/session{self._session}{path}", json.dumps(body or {}) if method == "POST" else None)
            value = json.loads(connection.getresponse().read())["value"]
        assert not (isinstance(value, dict) and "error" in value), value
        return value

    def open(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.call("POST", "/execute/sync", {"script": f"return ({script})", "args": []})

    def wait(self, script: str, is_there: Callable[[Any], Any] = bool) -> Any:
        end = time.monotonic() + SECONDS
        while not is_there(value := self.run(script)):
            assert time.monotonic() < end, f"{script}: {value!r}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({selector!r}).textContent"))

    def keys(self, *keys: str) -> None:
        """Press these one after another, modifiers first, then release them all: to whatever has the focus."""
        held = [{"type": "keyDown", "value": key} for key in keys]
        actions = held + [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def write(self, text: str) -> None:
        actions = [{"type": kind, "value": letter} for letter in text for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def devtools(self, command: str, **params: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def errors(self) -> list[str]:
        """What the console has as an error since the last call."""
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]
