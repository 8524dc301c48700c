"""A headless Chromium for tests, controlled over a pipe with the DevTools protocol; needs no package, port or network."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

MAX_POLLS = 3000
"""Number of checks of a condition, 0.1 s apart, before a test fails. A busy browser answers each check more slowly, so the
wait grows with the load of the machine."""


class Browser:
    """One page of a browser, its console messages and its network requests."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._read = commands, answers, b""
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.complaints: list[str] = []
        """Errors and warnings of the console, and exceptions."""
        self.requests: list[str] = []
        """Requested addresses, except those of files."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: object) -> Any:
        """Sends a command of the DevTools protocol and returns its result."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": arguments, **self._session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next(None)
            if message is not None and message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def show(self, width: int, dark: bool, height: int = 900) -> None:
        """Sets the size of the window in pixels and the preferred color scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self.complaints.clear()
        self.requests.clear()
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        self.wait_until(lambda: self.evaluate(condition), condition)

    def wait_until(self, condition: Callable[[], bool], words: str) -> None:
        for _ in range(MAX_POLLS):
            if condition():
                return
            if self._next(0) is None:
                time.sleep(0.1)
        raise AssertionError(f"never happened: {words}\n{self.text()[:3000]}")

    def text(self) -> str:
        """The visible text."""
        return str(self.evaluate("document.body.innerText"))

    def screenshot(self, path: Path) -> None:
        """Saves the whole page as PNG, including the parts outside of the window."""
        metrics = self.call("Page.getLayoutMetrics")
        size, window = metrics["cssContentSize"], metrics["cssLayoutViewport"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        is_larger = size["width"] > window["clientWidth"] or size["height"] > window["clientHeight"]
        beyond: dict[str, object] = {"clip": clip, "captureBeyondViewport": True} if is_larger else {}
        picture = self.call("Page.captureScreenshot", format="png", **beyond)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _next(self, seconds: float | None) -> dict[str, Any] | None:
        """Records and returns the next message, or None after `seconds`; waits until the browser ends if `seconds` is None."""
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], seconds)
            if not ready:
                return None
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._read += part
        text, self._read = self._read.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        what = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(what["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if what["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(what["args"]))
            case "Log.entryAdded" if what["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
            case "Network.requestWillBeSent" if not what["request"]["url"].startswith(("file:", "data:")):
                self.requests.append(what["request"]["url"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with its files in `folder`. Skips the test if no browser is installed."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("a browser is missing: no chromium on PATH (Debian's package chromium)")
    from_us, commands = os.pipe()
    answers, to_us = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"]
    # The browser reads commands from file descriptor 3 and writes answers to 4.
    shell = [
        "bash",
        "-c",
        f'exec "$@" 3<&{from_us} 4>&{to_us}',
        "bash",
        program,
        *options,
        f"--user-data-dir={folder / 'browser'}",
    ]
    with open(folder / "browser.log", "w") as log:
        process = subprocess.Popen(
            shell,
            stdout=log,
            stderr=log,
            pass_fds=(from_us, to_us),
            start_new_session=True,
            env={**os.environ, "HOME": str(folder)},
        )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
