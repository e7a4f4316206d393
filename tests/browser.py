"""
A real browser for tests: Chromium without a window, spoken to over a pipe.

The DevTools protocol with ``--remote-debugging-pipe``: JSON messages that end in a zero byte, to the browser
on its descriptor 3 and back on 4. So no port is open, and nothing of it is left when the pipe closes.

    async with browser(reactor) as page:
        await page.show("file:///tmp/page.html", width=390, dark=True)
        title = await page.evaluate("document.title")
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from PIL import Image
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessTerminated
from twisted.internet.interfaces import IReactorProcess
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TO_BROWSER, FROM_BROWSER = 3, 4
MOST_NOISE = 4000

SWITCHES = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # the pages are our own, and tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
)


class BrowserError(Exception):
    """The browser could not be started, or did not do what was asked."""


class _Process(ProcessProtocol):
    """The pipe to the browser: calls and their answers."""

    def __init__(self) -> None:
        self.ended: Deferred[None] = Deferred()
        self.running = True
        self._numbers = itertools.count(1)
        self._calls: dict[int, Deferred[dict[str, Any]]] = {}
        self._events: dict[str, list[Deferred[None]]] = {}
        self._received: list[
            bytes
        ] = []  # of a message that has not ended, which may be a photograph
        self._noise = b""

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        if childFD != FROM_BROWSER:
            self._noise = (self._noise + data)[-MOST_NOISE:]
            return
        *ends, rest = data.split(b"\0")
        for end in ends:
            message, self._received = b"".join([*self._received, end]), []
            self._message(json.loads(message))
        self._received.append(rest)

    def _message(self, message: dict[str, Any]) -> None:
        call = self._calls.pop(message.get("id", 0), None)
        if call is None:
            for waiting in self._events.pop(message.get("method", ""), []):
                waiting.callback(None)
        elif "error" in message:
            call.errback(BrowserError(message["error"]["message"]))
        else:
            call.callback(message["result"])

    def processEnded(self, reason: Failure) -> None:
        self.running = False
        problem = BrowserError(f"the browser ended: {self._noise.decode('utf-8', 'replace')}")
        for call in self._calls.values():
            call.errback(problem)
        for event in itertools.chain(*self._events.values()):
            event.errback(problem)
        reason.trap(ProcessTerminated, Exception)
        self.ended.callback(None)

    def call(self, method: str, session: str | None, **params: Any) -> Deferred[dict[str, Any]]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        answer: Deferred[dict[str, Any]] = Deferred()
        self._calls[number] = answer
        assert self.transport is not None
        self.transport.writeToChild(TO_BROWSER, json.dumps(message).encode() + b"\0")
        return answer

    def event(self, method: str) -> Deferred[None]:
        """Fire when the browser next says this."""
        waiting: Deferred[None] = Deferred()
        self._events.setdefault(method, []).append(waiting)
        return waiting


class Page:
    """One page of the browser."""

    def __init__(self, process: _Process, session: str) -> None:
        self._process = process
        self._session = session

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol."""
        return await self._process.call(method, self._session, **params)

    async def show(
        self, url: str, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1
    ) -> None:
        """Load a page in a window of this size, in pixels of CSS, and wait until it is all there."""
        await self.call("Page.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        loaded = self._process.event("Page.loadEventFired")
        answer = await self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise BrowserError(f"{url} could not be shown: {answer['errorText']}")
        await loaded

    async def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def screenshot(self, box: dict[str, float] | None = None) -> Image.Image:
        """
        Return a picture of the page, all of it or a part.

        Args:
            box: x, y, width and height in pixels of CSS from the page's upper left corner.
        """
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": True}
        if box is None:
            size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
            box = {"x": 0, "y": 0, "width": size["width"], "height": size["height"]}
        answer = await self.call("Page.captureScreenshot", clip={**box, "scale": 1}, **options)
        return Image.open(io.BytesIO(base64.b64decode(answer["data"]))).convert("RGB")


def executable() -> str:
    """Return the browser's path."""
    for name in NAMES:
        path = shutil.which(name)
        if path:
            return path
    raise BrowserError("no Chromium is installed; `make test` installs it, or says how")


@asynccontextmanager
async def browser(reactor: IReactorProcess) -> AsyncIterator[Page]:
    """Run a browser with one page; it is gone at the end, and so is its profile."""
    path = executable()
    profile = tempfile.mkdtemp(prefix="browser-")
    process = _Process()
    environment = {**os.environ, "HOME": profile}  # nothing of a user's reaches the tests
    reactor.spawnProcess(
        process,
        path,
        [path, *SWITCHES, f"--user-data-dir={profile}"],
        env=environment,
        childFDs={0: "w", 1: "r", 2: "r", TO_BROWSER: "w", FROM_BROWSER: "r"},
    )
    try:
        target = await process.call("Target.createTarget", None, url="about:blank")
        attached = await process.call(
            "Target.attachToTarget", None, targetId=target["targetId"], flatten=True
        )
        yield Page(process, attached["sessionId"])
    finally:
        if process.running:
            # Answered or not: it ends.
            process.call("Browser.close", None).addErrback(lambda _: None)
        await process.ended
        shutil.rmtree(profile, ignore_errors=True)
