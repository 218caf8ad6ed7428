"""Drives a headless Chromium over its debugging pipe, with nothing but the standard library."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser", "chrome"))),
    None,
)
# As root there is no sandbox; the pages are ours.
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
# The debugging pipe is descriptors 3 and 4; a shell makes them of stdin and stdout.
_WITH_PIPE = 'exec "$0" "$@" 3<&0 4>&1 1>&2'


class Browser:
    """One page in a browser of its own; a context manager.

    profile: an empty directory. console: what the page said there, errors and violations of its
    content security policy included.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        command = [CHROMIUM, *_OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WITH_PIPE, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived = threading.Condition()
        self.console: deque[str] = deque()
        self._session: str | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Browser:
        self._reader.start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._reader.join(20)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol; its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        with self._arrived:
            assert self._arrived.wait_for(lambda: number in self._answers, 60), f"{method}: silence"
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer}"
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        buffer = b""
        while data := stdout.read1(1 << 16):  # type: ignore[attr-defined]
            *messages, buffer = (buffer + data).split(b"\0")
            for message in map(json.loads, messages):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            with self._arrived:
                self._answers[message["id"]] = message
                self._arrived.notify_all()
        elif message["method"] == "Runtime.exceptionThrown":
            self.console.append(str(message["params"]["exceptionDetails"]))
        elif message["method"] == "Runtime.consoleAPICalled":
            self.console.append(str(message["params"]["args"]))
        elif message["method"] == "Log.entryAdded":
            self.console.append(message["params"]["entry"]["text"])

    # ---- what tests do with a page ---------------------------------------------------------------

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def size(self, width: int, height: int, scale: float = 1) -> None:
        """Of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """The system's colours: "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, as far as JSON has it."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 15.0) -> None:
        """Until an expression holds."""
        end = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < end, f"not within {seconds} s: {script}"
            time.sleep(0.05)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
