"""A gateway with its pages on a grid of ten servers in virtual time, and a browser without scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.testing import StringTransport

from pipegrid.gateway.gateway_settings import GatewayLimits, GatewaySettings
from pipegrid.gateway.http_site import GatewaySite
from pipegrid.gateway.root_resource import Monitoring, root_resource
from pipegrid.gateway.transfer_records import RecordedGrid
from tests.gateway.gateway_world import GatewayTestCase
from tests.gateway.web_ui.page_browser import HttpAnswer, PageBrowser, page_faults, parse_answer


class InterfaceTestCase(GatewayTestCase):
    """
    Has a gateway.

    Attributes:
        browser: looks at it.
        lines: of its log.
    """

    grid: RecordedGrid

    def setUp(self) -> None:
        super().setUp()
        self.grid = RecordedGrid.of(self.grid)
        self.settings = GatewaySettings(
            Path(self.mktemp()), limits=GatewayLimits(spare_bytes=0, stalled_s=1e9)
        )
        self.settings.temporary.mkdir(parents=True)
        self.monitoring = Monitoring(self.grid, self.settings, lambda: "token")
        self.addCleanup(self.monitoring.close)
        resources = self.monitoring.resources(dict, lambda: 0)
        self.lines: list[str] = []
        self._waiting: Deferred[None] = Deferred()
        root = root_resource(self.grid, self.settings, self.monitoring.handles, resources)
        self.site = GatewaySite(root, self.settings, self.grid.clock, self._answered)
        self.browser = PageBrowser(self.send)

    def _answered(self, text: str, **fields: Any) -> None:
        self.lines.append(text.format(**fields))
        self._waiting.callback(None)

    def send(self, data: bytes) -> HttpAnswer:
        """Send a request, and let time pass until it is answered."""
        self._waiting = Deferred()
        channel = self.site.buildProtocol(None)
        transport = StringTransport()
        channel.makeConnection(transport)
        channel.dataReceived(data)
        if not self._waiting.called:
            self.world.run(self._waiting)
        return parse_answer(transport.value())

    def get(self, path: str, **headers: str) -> HttpAnswer:
        """Return what a program gets, which is not a browser."""
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        return self.send(f"GET {path} HTTP/1.0\r\n{lines}\r\n".encode("ascii"))

    def check_page(self) -> None:
        """Fail if the page that the browser shows breaks a rule that all pages keep."""
        answer = self.browser.answer
        self.assertEqual(page_faults(self.browser.page), [])
        policy = answer.headers["content-security-policy"]
        self.assertIn("default-src 'none'; style-src 'self'; script-src 'self'", policy)
        self.assertEqual(answer.headers["referrer-policy"], "no-referrer")
        self.assertEqual(answer.headers["cache-control"], "no-store")
        [title] = self.browser.page.all("title")
        self.assertNotIn("URI:", title.text)
        self.assertNotIn(b"https://", answer.body.replace(b"http://127.0.0.1:3456", b""))
