"""
A real browser for tests: Chromium without a window, spoken to over a pipe.

The DevTools protocol with ``--remote-debugging-pipe``: JSON messages that end in a zero byte, to the browser
on its descriptor 3 and back on 4. So no port is open, and nothing of it is left when the pipe closes.

    async with browser(reactor) as page:
        await page.show("file:///tmp/page.html", width=390, dark=True)
        title = await page.evaluate("document.title")

A page is used as people use it: with the mouse (``click``), with the keyboard (``press``, ``type``), with
files that are chosen or dropped. Nothing waits for a fixed time.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
from PIL import Image
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.internet.error import ProcessTerminated
from twisted.internet.interfaces import IReactorProcess
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TO_BROWSER, FROM_BROWSER = 3, 4
MOST_NOISE = 4000
LOOK_S = 0.02
"""How often a condition is looked at."""

WAIT_S = 20.0
"""How long one is waited for before a test fails."""

BETWEEN_DOCUMENTS = (
    "Cannot find default execution context",
    "Cannot find context with specified id",
    "Execution context was destroyed",
    "Inspected target navigated or closed",
)
"""What the browser says of a page where scripts cannot run yet, or not any more."""

KEYS: dict[str, tuple[str, int, str]] = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Space": ("Space", 32, " "),
    "Escape": ("Escape", 27, ""),
    "Delete": ("Delete", 46, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
}
"""Code, number and text of keys by name."""

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
        self._events: dict[tuple[str | None, str], list[Deferred[None]]] = {}
        self.listeners: dict[str | None, Callable[[str, dict[str, Any]], None]] = {}
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
            session, method = message.get("sessionId"), message.get("method", "")
            if session in self.listeners:
                self.listeners[session](method, message.get("params", {}))
            for waiting in self._events.pop((session, method), []):
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

    def event(self, method: str, session: str | None) -> Deferred[None]:
        """Fire when a page next says this."""
        waiting: Deferred[None] = Deferred()
        self._events.setdefault((session, method), []).append(waiting)
        return waiting


@attrs.frozen
class Sent:
    """
    A request that a page has sent.

    Attributes:
        headers: as far as the page knows them.
    """

    method: str
    url: str
    headers: dict[str, str]


class Page:
    """
    One page of the browser.

    Attributes:
        sent: the requests that it has sent.
        problems: what it has complained about: exceptions of scripts, refused contents.
        downloads: files that it has saved, by their name.
    """

    def __init__(self, process: _Process, session: str, target: str) -> None:
        self._process = process
        self._session = session
        self.target = target
        self.sent: list[Sent] = []
        self.problems: list[str] = []
        process.listeners[session] = self._listen

    def _listen(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            request = params["request"]
            self.sent.append(Sent(request["method"], request["url"], request["headers"]))
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.problems.append(str(params["entry"].get("text")))
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {params['message']}")
            self.call_soon("Page.handleJavaScriptDialog", accept=True)

    def call_soon(self, method: str, **params: Any) -> None:
        """Call a method without waiting for its answer."""
        self._process.call(method, self._session, **params).addErrback(lambda _: None)

    async def listen(self) -> None:
        """Note from now on what the page sends and complains about."""
        for domain in ("Page", "Network", "Log", "Runtime"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol."""
        return await self._process.call(method, self._session, **params)

    async def show(
        self, url: str, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1
    ) -> None:
        """Load a page in a window of this size, in pixels of CSS, and wait until it is all there."""
        await self.call("Page.enable")
        await self.resize(width, height, dark, scale)
        await self.go(url)

    async def resize(
        self, width: int, height: int = 900, dark: bool = False, scale: float = 1
    ) -> None:
        """Give the window another size, or another colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def go(self, url: str) -> None:
        """Load a page, and wait until it is all there."""
        loaded = self._process.event("Page.loadEventFired", self._session)
        answer = await self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise BrowserError(f"{url} could not be shown: {answer['errorText']}")
        await loaded

    async def loads(self, action: Awaitable[None]) -> None:
        """Do what leads to another page, and wait until that is all there."""
        loaded = self._process.event("Page.loadEventFired", self._session)
        await action
        await loaded

    async def until(self, condition: str) -> None:
        """
        Wait until a JavaScript expression is true.

        Raises:
            BrowserError: it is not true for ``WAIT_S``.
        """
        clock: Any = installed_reactor
        until_s = clock.seconds() + WAIT_S
        while True:
            if await self._holds(condition):
                return
            if clock.seconds() > until_s:
                text = await self.evaluate("document.body.innerText")
                raise BrowserError(f"never true: {condition}; the page says: {text[:2000]}")
            await deferLater(clock, LOOK_S, lambda: None)

    async def _holds(self, condition: str) -> bool:
        """Return whether an expression is true; it is not while one document takes the place of another."""
        try:
            return bool(await self.evaluate(f"!!({condition})"))
        except BrowserError as error:
            if any(text in str(error) for text in BETWEEN_DOCUMENTS):
                return False
            raise

    # As people use it.

    async def allow_scripts(self, allowed: bool) -> None:
        """Let scripts of pages run that are loaded from now on, or not."""
        await self.call("Emulation.setScriptExecutionDisabled", value=not allowed)

    async def click(self, selector: str) -> None:
        """
        Press the mouse button on the element of a selector.

        Raises:
            BrowserError: it is not to be seen, or something is in front of it.
        """
        found = await self.evaluate(_WHERE % json.dumps(selector))
        if not isinstance(found, dict):
            raise BrowserError(f"{selector} cannot be clicked: {found}")
        place = {**found, "button": "left", "clickCount": 1}
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", **found)
        await self.call("Input.dispatchMouseEvent", type="mousePressed", **place)
        await self.call("Input.dispatchMouseEvent", type="mouseReleased", **place)

    async def press(self, key: str, shift: bool = False) -> None:
        """Press a key of ``KEYS``."""
        code, number, text = KEYS[key]
        event = {
            "key": text if key == "Space" else key,
            "code": code,
            "windowsVirtualKeyCode": number,
            "modifiers": 8 if shift else 0,
        }
        kind = "keyDown" if text else "rawKeyDown"
        more = {"text": text} if text else {}
        await self.call("Input.dispatchKeyEvent", type=kind, **event, **more)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def tab_to(self, selector: str, most: int = 150) -> None:
        """
        Press Tab until the element of a selector has the focus.

        Raises:
            BrowserError: it never has, or what has it does not show that.
        """
        for _ in range(most):
            await self.press("Tab")
            if await self.evaluate(f"!!document.activeElement?.matches({json.dumps(selector)})"):
                if not await self.evaluate(_SHOWS_FOCUS):
                    raise BrowserError(f"{selector} does not show that it has the focus")
                return
        raise BrowserError(f"Tab does not lead to {selector}")

    async def type(self, text: str) -> None:
        """Type a text where the focus is, instead of what is selected there."""
        await self.call("Input.insertText", text=text)

    async def fill(self, selector: str, text: str) -> None:
        """Click into a field and type a text, instead of what is there."""
        await self.click(selector)
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        await self.type(text)

    async def choose_files(self, selector: str, paths: Sequence[str]) -> None:
        """Choose files for a field, as its dialog would."""
        document = await self.call("DOM.getDocument")
        node = await self.call(
            "DOM.querySelector", nodeId=document["root"]["nodeId"], selector=selector
        )
        await self.call("DOM.setFileInputFiles", nodeId=node["nodeId"], files=list(paths))

    async def drop(self, selector: str, paths: Sequence[str]) -> None:
        """Drop files and directories onto the element of a selector."""
        found = await self.evaluate(_WHERE % json.dumps(selector))
        data = {"items": [], "files": list(paths), "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            await self.call("Input.dispatchDragEvent", type=kind, **found, data=data)

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


_WHERE = """
(() => {
  const element = document.querySelector(%s);
  if (!element) return "it is not there";
  element.scrollIntoView({block: "center", behavior: "instant"});
  const {left, top, width, height} = element.getBoundingClientRect();
  const [x, y] = [left + width / 2, top + height / 2];
  if (!width || !height) return "it is not to be seen";
  const there = document.elementFromPoint(x, y);
  if (!there || !(element.contains(there) || there.contains(element))) {
    return "in front of it is " + there?.outerHTML?.slice(0, 200);
  }
  return {x, y};
})()
"""

_SHOWS_FOCUS = """
(() => {
  const {outlineStyle, outlineWidth, boxShadow} = getComputedStyle(document.activeElement);
  return (outlineStyle != "none" && outlineWidth != "0px") || boxShadow != "none";
})()
"""


def executable() -> str:
    """Return the browser's path."""
    for name in NAMES:
        path = shutil.which(name)
        if path:
            return path
    raise BrowserError("no Chromium is installed; `make test` installs it, or says how")


class Browser:
    """
    A running browser.

    Attributes:
        profile: its directory, which ends with it.
    """

    def __init__(self, process: _Process, profile: str) -> None:
        self._process = process
        self.profile = profile

    async def open_page(self) -> Page:
        """Open another page."""
        target = await self._process.call("Target.createTarget", None, url="about:blank")
        return await self.attach(target["targetId"])

    async def attach(self, target: str) -> Page:
        """Return a page that is open, by its id."""
        attached = await self._process.call(
            "Target.attachToTarget", None, targetId=target, flatten=True
        )
        return Page(self._process, attached["sessionId"], target)

    async def pages(self) -> list[str]:
        """Return the ids of all pages that are open."""
        found = await self._process.call("Target.getTargets", None)
        return [each["targetId"] for each in found["targetInfos"] if each["type"] == "page"]

    async def save_downloads(self, directory: str) -> None:
        """Save what pages download in a directory, under the names that they give."""
        await self._process.call(
            "Browser.setDownloadBehavior", None, behavior="allow", downloadPath=directory
        )


@asynccontextmanager
async def browser(reactor: IReactorProcess) -> AsyncIterator[Page]:
    """Run a browser with one page; it is gone at the end, and so is its profile."""
    async with running_browser(reactor) as running:
        yield await running.open_page()


@asynccontextmanager
async def running_browser(reactor: IReactorProcess, *switches: str) -> AsyncIterator[Browser]:
    """Run a browser without a page; it is gone at the end, and so is its profile."""
    path = executable()
    profile = tempfile.mkdtemp(prefix="browser-")
    process = _Process()
    environment = {**os.environ, "HOME": profile}  # nothing of a user's reaches the tests
    reactor.spawnProcess(
        process,
        path,
        [path, *SWITCHES, *switches, f"--user-data-dir={profile}"],
        env=environment,
        childFDs={0: "w", 1: "r", 2: "r", TO_BROWSER: "w", FROM_BROWSER: "r"},
    )
    try:
        yield Browser(process, profile)
    finally:
        if process.running:
            # Answered or not: it ends.
            process.call("Browser.close", None).addErrback(lambda _: None)
        await process.ended
        shutil.rmtree(profile, ignore_errors=True)
