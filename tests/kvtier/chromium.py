"""A headless Chromium, driven over the DevTools protocol through a pair of pipes.

Messages are JSON that ends with a zero byte; the browser reads them from descriptor 3 and answers
on descriptor 4 (``--remote-debugging-pipe``). No port is opened.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Chromium", "find_chromium"]

_NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome-headless-shell",
)
# Puts the pipes where the browser looks for them, and becomes the browser.
_LAUNCH = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 5) for fd in sys.argv[1:3])
os.dup2(reads, 3); os.dup2(writes, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> tuple[str, str]:
    """Return the path of a browser that starts, or an empty one; and why there is none."""
    named = os.environ.get("CHROMIUM")
    found = next(filter(None, map(shutil.which, [named] if named else _NAMES)), None)
    if found is None:
        return "", f"no Chromium: {named or ', '.join(_NAMES)} not found"
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{found} does not start: {error}"
    if done.returncode:
        return "", f"{found} does not start: {done.stderr.strip()[-200:]}"
    return found, ""


class Chromium:
    """One browser with one page. A context manager: at its end the browser is gone.

    Parameters
    ----------
    program : str
        What `find_chromium` found.
    folder : Path
        An empty folder for its profile.
    """

    def __init__(self, program: str, folder: Path) -> None:
        command = [
            program,
            "--headless",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # it refuses root otherwise
            "about:blank",
        ]
        there, self._out = os.pipe()
        self._in, here = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(there), str(here), *command],
                pass_fds=(there, here),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(there)
            os.close(here)
        self._unread = b""
        self._calls = 0
        self._session: str | None = None
        self.events: deque[dict[str, Any]] = deque()
        """What the browser told since the page was opened."""

    def __enter__(self) -> Self:
        try:
            pages = self.call("Target.getTargets")["targetInfos"]
            (page,) = [one["targetId"] for one in pages if one["type"] == "page"]
            attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        os.close(self._out)
        os.close(self._in)
        os.killpg(self._process.pid, signal.SIGKILL)  # the browser and its helpers
        self._process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Have something done and return what came of it."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while (answer := self._read()).get("id") != self._calls:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            data = os.read(self._in, 1 << 16)
            if not data:
                raise RuntimeError("the browser went away")
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Show a page on a screen of that size, in one of the two colour schemes."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def told(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of the events of one kind since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
