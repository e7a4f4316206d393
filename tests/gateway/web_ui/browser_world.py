"""A gateway with its pages on an embedded grid, used by a real Chromium; and a hostile site next to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from pipegrid import Grid, create_local
from pipegrid.core import base32
from pipegrid.core.caps import Cap, DirectoryCap
from pipegrid.core.mutable import keys
from pipegrid.gateway.gateway_settings import GatewayLimits, GatewaySettings
from pipegrid.gateway.http_site import GatewayRequest, GatewaySite
from pipegrid.gateway.root_resource import Monitoring, root_resource
from pipegrid.gateway.transfer_records import RecordedGrid
from pipegrid.gateway.web_api.check_json import storage_index_text
from tests.browser import Browser, Page, running_browser
from tests.gateway.test_restic_repository import SpareKeys

reactor: Any = installed_reactor

PHONE, DESK = 360, 1280
AXE = Path(__file__).parent / "axe" / "axe.min.js"
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


class BrowserTestCase(TestCase):
    """
    Has a gateway, and runs a browser.

    Attributes:
        url: of the gateway, with a final slash.
        lines: of its log.
        referrers: that browsers have sent to it.
    """

    timeout = 60

    async def setUp(self) -> None:  # type: ignore[override]
        self.patch(keys, "generate", SpareKeys().generate)
        self.directory = Path(self.mktemp()).resolve()
        create_local(self.directory, durability="none")
        grid = await Grid.open(reactor, self.directory)
        self.grid = RecordedGrid.of(grid)
        self.settings = GatewaySettings(self.directory, limits=GatewayLimits(spare_bytes=0))
        self.monitoring = Monitoring(self.grid, self.settings, lambda: "token")
        resources = self.monitoring.resources(dict, lambda: 0)
        self.lines: list[str] = []
        self.referrers: list[str] = []
        process = GatewayRequest.process

        def note(request: GatewayRequest) -> None:
            self.referrers += request.requestHeaders.getRawHeaders("referer") or []
            process(request)

        self.patch(GatewayRequest, "process", note)
        self.site = GatewaySite(
            root_resource(self.grid, self.settings, self.monitoring.handles, resources),
            self.settings,
            reactor,
            self._log,
        )
        self.port = reactor.listenTCP(0, self.site, interface="127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port.getHost().port}/"

    def _log(self, text: str, **fields: Any) -> None:
        self.lines.append(text.format(**fields))

    def tearDown(self) -> Deferred[None]:  # type: ignore[override]
        async def stop() -> None:
            self.site.close_all()
            await self.port.stopListening()
            self.monitoring.close()
            await deferLater(reactor, 0, lambda: None)
            await self.grid.close()

        return ensureDeferred(stop())

    async def put(self, data: bytes) -> Cap:
        """Store an immutable file."""
        return (await self.grid.put(data)).cap

    async def make_directory(self, **children: Cap) -> DirectoryCap:
        """Store a mutable directory with these children."""
        directory = await self.grid.create_directory()
        for name, cap in children.items():
            await directory.link(name, cap)
        return directory.cap

    def page_of(self, cap: Cap, *names: str) -> str:
        """Return the URL of the page of a directory, or of what is below it."""
        return f"{self.url}uri/{'/'.join((str(cap), *names))}/"

    def delete_shares(self, cap: Cap, keep: int) -> None:
        """Delete the shares of an object but the ``keep`` with the lowest numbers."""
        index = storage_index_text(cap)
        base32.decode(index)
        for place in self.directory.glob(f"storage/*/shares/*/{index}"):
            for share in place.iterdir():
                if int(share.name) >= keep:
                    share.unlink()
            if not list(place.iterdir()):
                shutil.rmtree(place)

    async def broken_rules(self, page: Page) -> list[list[object]]:
        """Return the rules of axe-core that the page breaks: name, explanation, and the elements."""
        if await page.evaluate("typeof axe") == "undefined":
            await page.evaluate(AXE.read_text())
        options = json.dumps({"runOnly": {"type": "tag", "values": RULES}})
        found: list[list[object]] = await page.evaluate(
            f"axe.run(document, {options}).then(({{violations}}) => violations.map((each) => "
            "[each.id, each.help, each.nodes.map((node) => [node.html, node.failureSummary])]))"
        )
        return found

    async def check_rules(self, page: Page) -> None:
        """Fail if the page that is shown breaks a rule of axe-core."""
        self.assertEqual(await self.broken_rules(page), [])

    async def check_secrets(self, *pages: Page) -> None:
        """Fail if a capability was in a title, a referrer or the log, or anything came from elsewhere."""
        for page in pages:
            self.assertNotIn("URI:", await page.evaluate("document.title + document.referrer"))
            for sent in page.sent:
                if not sent.url.startswith(("data:", "blob:", "about:")):
                    self.assertTrue(sent.url.startswith(self.url), sent.url)
        self.assertEqual(self.referrers, [])
        self.assertNotIn("URI", "".join(self.lines))
        self.assertNotIn("URI%3A", "".join(self.lines).upper())


class HostileSite:
    """
    Another origin on loopback, whose pages attack.

    Attributes:
        url: with a final slash.
        received: paths that it was asked for.
    """

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.received: list[bytes] = []
        hostile = self

        class Answer(Resource):
            isLeaf = True

            def render(self, request: Any) -> bytes:
                hostile.received.append(request.uri)
                request.setHeader(b"content-type", b"text/html")
                return hostile.pages.get(request.path, b"")

        self.port = reactor.listenTCP(0, Site(Answer()), interface="127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port.getHost().port}/"

    async def stop(self) -> None:
        """Stop listening."""
        await self.port.stopListening()


__all__ = ["Browser", "BrowserTestCase", "HostileSite", "running_browser"]
