"""What hostile pages and stored files try in the same Chromium against a gateway: all of it is refused."""

from __future__ import annotations

import json
from typing import Any

from pipegrid.core.caps import DirectoryCap, LitCap
from tests.browser import Browser, Page, running_browser
from tests.gateway.web_ui.browser_world import DESK, BrowserTestCase, HostileSite, reactor

# The attacker knows the capability, which pages never learn; so only the gateway's checks protect it.

ATTACK = """
<!doctype html><title>hostile</title><body><script>
const gateway = %(gateway)s, directory = %(directory)s, results = {};
const tried = (name, promise) => promise.then(
  (value) => { results[name] = value; }, (error) => { results[name] = "refused"; });
const readable = (response) => response.type === "opaque" ? "refused" : response.text();
const load = (tag, url, attribute = "src") => new Promise((good, bad) => {
  const element = document.createElement(tag);
  element[attribute] = url;
  if (tag === "link") element.rel = "stylesheet";
  element.onload = () => good("loaded");
  element.onerror = bad;
  document.body.append(element);
});
const framed = (url) => new Promise((good, bad) => {
  const frame = document.createElement("iframe");
  frame.src = url;
  frame.onload = () => {
    try { good(frame.contentDocument ? "refused" : "refused"); } catch { bad(); }
  };
  document.body.append(frame);
});
const socket = (path) => new Promise((good, bad) => {
  const one = new WebSocket(gateway.replace("http", "ws") + path);
  one.onopen = () => good("opened");
  one.onerror = bad;
});
const all = Promise.all([
  tried("fetch", fetch(directory + "?t=json").then(readable)),
  tried("fetch without cors", fetch(directory + "?t=json", {mode: "no-cors"}).then(readable)),
  tried("overview", fetch(gateway + "?t=json").then(readable)),
  tried("metrics", fetch(gateway + "metrics").then(readable)),
  tried("put", fetch(directory + "put.txt", {method: "PUT", body: "x"}).then(readable)),
  tried("delete", fetch(directory + "kept.txt", {method: "DELETE"}).then(readable)),
  tried("simple post", fetch(directory, {
    method: "POST", mode: "no-cors", body: new URLSearchParams({t: "unlink", name: "kept.txt"}),
  }).then(readable)),
  tried("upload", (() => {
    const form = new FormData();
    form.append("t", "upload");
    form.append("file", new Blob(["x"]), "posted.txt");
    return fetch(directory, {method: "POST", mode: "no-cors", body: form}).then(readable);
  })()),
  tried("text post", fetch(directory + "?t=mkdir&name=made", {
    method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"}, body: "x",
  }).then(readable)),
  tried("beacon", Promise.resolve(navigator.sendBeacon(
    directory + "?t=mkdir&name=beacon", "x") && "refused")),
  tried("image", load("img", directory + "picture.png")),
  tried("script", load("script", directory + "script.js")),
  tried("style", load("link", gateway + "interface/interface.css", "href")),
  tried("frame", framed(directory)),
  tried("log socket", socket("private/logs/v1")),
  tried("socket", socket("uri")),
]);
all.then(() => { window.results = results; });
</script>
"""

FORM = """
<!doctype html><title>hostile</title>
<form action="%(directory)s" method="post" enctype="%(kind)s">
<input name="t" value="unlink"><input name="name" value="kept.txt"><button id="go">go</button></form>
<script>document.forms[0].submit()</script>
"""

STORED = """
<html xmlns="http://www.w3.org/1999/xhtml"><head><title>stored</title></head><body>
<p id="ran">still</p><img src="x" onerror="document.getElementById('ran').textContent = 'ran'"/>
<form id="form" action="%(directory)s" method="post"><input name="t" value="unlink"/>
<input name="name" value="kept.txt"/><button id="send">send</button></form>
<script>
document.getElementById("ran").textContent = "ran";
try { opener.document.title = "owned"; } catch (error) {}
fetch("%(directory)s?t=unlink&amp;name=kept.txt", {method: "POST"});
</script></body></html>
"""

SVG = """
<svg xmlns="http://www.w3.org/2000/svg" onload="document.documentElement.setAttribute('class', 'ran')">
<script>fetch("%(directory)s?t=unlink&amp;name=kept.txt", {method: "POST"})</script>
<text y="20">picture</text></svg>
"""


class HostileTestCase(BrowserTestCase):
    """Has a directory that must stay as it is."""

    async def setUp(self) -> None:  # type: ignore[override]
        await super().setUp()
        self.root = await self.make_directory(
            **{"kept.txt": LitCap(b"kept"), "script.js": LitCap(b"window.stolen = 1")}
        )
        self.hostile = HostileSite()
        self.addCleanup(self.hostile.stop)

    @property
    def place(self) -> str:
        return self.page_of(self.root)

    async def check_untouched(self, root: DirectoryCap) -> None:
        """Fail if anything was changed."""
        names = sorted(await self.grid.directory(root).list())
        self.assertEqual(names, sorted(self.names))

    names: tuple[str, ...] = ("kept.txt", "script.js")


class OtherSiteTests(HostileTestCase):
    """Pages of another site."""

    def serve(self, path: str, text: str, **values: str) -> str:
        known = {"gateway": json.dumps(self.url), "directory": json.dumps(self.place)}
        self.hostile.pages[path.encode()] = (text % {**known, **values}).encode()
        return f"{self.hostile.url}{path.removeprefix('/')}"

    async def test_all_that_a_script_can_try(self) -> None:
        """Reads, writes, embedded contents, frames and sockets: none of them works."""
        url = self.serve("/", ATTACK)
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.show(url, DESK)
            await page.until("window.results")
            results: dict[str, str] = await page.evaluate("results")
            self.assertEqual(set(results.values()), {"refused"}, results)
            self.assertGreater(len(results), 14)
            self.assertEqual(await page.evaluate("window.stolen ?? null"), None)
            framed = await page.call("Page.getFrameTree")
            frames = framed["frameTree"].get("childFrames", [])
            self.assertFalse(
                any(each["frame"]["url"].startswith(self.url) for each in frames), frames
            )
        await self.check_untouched(self.root)

    async def test_forms(self) -> None:
        """A form of each encoding that submits itself is answered with 403."""
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            for kind in ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain"):
                url = self.serve("/form", FORM, directory=self.place, kind=kind)
                await page.show(url, DESK)
                await page.until(f"location.href.startsWith({json.dumps(self.url)})")
                await page.until("document.readyState == 'complete'")
                self.assertIn("another site", await page.evaluate("document.body.innerText"))
        await self.check_untouched(self.root)

    async def test_name_that_is_pointed_here(self) -> None:
        """DNS rebinding: under another name the gateway answers nothing but a refusal, to reads too."""
        port = self.port.getHost().port
        switch = "--host-resolver-rules=MAP rebound.example 127.0.0.1"
        async with running_browser(reactor, switch) as browser:
            page = await browser.open_page()
            await page.show(f"http://rebound.example:{port}/uri/{self.root}/", DESK)
            self.assertIn("Host", await page.evaluate("document.body.innerText"))
            status, text = await page.evaluate(
                f"fetch('/uri/{self.root}/?t=json').then(async (r) => [r.status, await r.text()])"
            )
            self.assertEqual(status, 403)
            self.assertNotIn("kept", text)
            status = await page.evaluate(
                f"fetch('/uri/{self.root}/?t=unlink&name=kept.txt', {{method: 'POST'}}).then((r) => r.status)"
            )
            self.assertEqual(status, 403)
        await self.check_untouched(self.root)

    async def test_window_that_it_opens(self) -> None:
        """A link that is followed is answered; the page that opened it sees and reaches nothing of it."""
        text = "<a id=a target=_blank rel=opener href=%(directory)s>photos</a>"
        url = self.serve("/link", text)
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.show(url, DESK)
            opened = await self.opened(browser, page, "#a")
            await opened.until("document.querySelector('#listing')")
            self.assertIsNone(await opened.evaluate("window.opener"))
        await self.check_untouched(self.root)

    async def opened(self, browser: Browser, page: Page, selector: str) -> Page:
        """Click, and return the page that is opened by that."""
        before = set(await browser.pages())
        await page.click(selector)
        while not (found := set(await browser.pages()) - before):
            await page.evaluate("1")
        return await browser.attach(found.pop())


class StoredFileTests(HostileTestCase):
    """Files of a grid that attack the page that shows them."""

    names = ("kept.txt", "script.js", "page.html", "page.xhtml", "picture.svg", "paper.pdf")

    async def setUp(self) -> None:  # type: ignore[override]
        await super().setUp()
        values = {"directory": self.place}
        directory = self.grid.directory(self.root)
        for name, text in (
            ("page.html", STORED % values),
            ("page.xhtml", STORED % values),
            ("picture.svg", SVG % values),
            (
                "paper.pdf",
                "%PDF-1.4\n1 0 obj<</Type/Catalog/OpenAction<</S/JavaScript/JS(app.alert(1))>>>>endobj",
            ),
        ):
            await directory.link(name, await self.put(text.encode()))

    async def test_opened_by_itself(self) -> None:
        """Nothing in it runs, loads or sends; it has an origin of its own, and no storage."""
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.listen()
            for name in ("page.html", "page.xhtml", "picture.svg"):
                await page.show(f"{self.place}{name}", DESK)
                text = await page.evaluate("document.documentElement.outerHTML")
                self.assertNotIn("ran", text.replace("'ran'", "").replace('"ran"', ""), name)
                # What the inspector runs there has the origin of the document.
                self.assertEqual(await page.evaluate("self.origin"), "null")
                self.assertIn(
                    "kept.txt", await self.grid.directory(self.root).list(), (name, self.lines)
                )
            await page.show(f"{self.place}page.html", DESK)
            await page.click("#send")
            self.assertEqual(await page.evaluate("location.pathname.split('/').pop()"), "page.html")
        await self.check_untouched(self.root)

    async def test_previews(self) -> None:
        """Their pages show them as text or as a picture, and run none of it."""
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.listen()
            for name in ("page.html", "picture.svg", "paper.pdf"):
                await page.show(f"{self.place}{name}?t=info", DESK)
                self.assertEqual(
                    await page.evaluate("document.querySelectorAll('main script').length"), 0
                )
                self.assertNotIn("owned", await page.evaluate("document.title"))
            self.assertEqual([each for each in page.problems if "dialog" in each], [])
        await self.check_untouched(self.root)

    async def test_names_that_are_html(self) -> None:
        """Names of children are text wherever they are shown, also in errors."""
        name = "<img src=x onerror=document.title='owned'>\"'&"
        root = await self.make_directory(**{name: LitCap(b"x")})
        async with running_browser(reactor) as browser:
            page = await browser.open_page()
            await page.listen()
            quoted = await page.evaluate(f"encodeURIComponent({json.dumps(name)})")
            base = f"{self.url}uri/{root}/"
            for place in (
                base,
                f"{base}?t=rename-form&name={quoted}",
                f"{base}{quoted}?t=info",
                f"{base}{quoted}?t=check-form",
                f"{base}missing{quoted}",
                f"{base}{quoted}/below",
            ):
                await page.show(place, DESK)
                self.assertEqual(
                    await page.evaluate("document.querySelectorAll('main img[onerror]').length"),
                    0,
                    place,
                )
                self.assertNotIn("owned", [await page.evaluate("document.title")])
            refused: list[Any] = [each for each in page.problems if "inline" in each]
            self.assertEqual(refused, [], "nothing inline was there to be refused")
