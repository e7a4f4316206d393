"""The first page: what servers and transfers are like, and what can be done without a directory."""

from __future__ import annotations

import json

import attrs
from twisted.internet.defer import CancelledError
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import parse_cap
from pipegrid.gateway.server_states import ServerState
from pipegrid.gateway.web_ui.overview_page import grid_health, server_row
from pipegrid.transfer.results import ServerStatus
from pipegrid.wire.storage_messages import ServerIdentity
from tests.gateway.web_ui.test_directory_page import DirectoryTestCase


def server(
    name: str, reachable: bool = True, space: int | None = 1000, no_uploads: str | None = None
) -> ServerState:
    """Return a server that has answered, or has not."""
    reason = None if reachable else "connection refused"
    status = ServerStatus(
        name, name, "https", "", reachable, reason, 0.05, "x/1", space, no_uploads
    )
    return ServerState(ServerIdentity(name, name, b"", b""), status)


class GridHealthTests(SynchronousTestCase):
    def test_tones(self) -> None:
        """An upload has to succeed, or the page says that it cannot."""
        good = [server(f"s{number}") for number in range(3)]
        lost = server("lost", reachable=False)
        full = server("full", space=0)
        for servers, needed, tone in (
            (good, 3, "good"),
            ([*good, lost], 3, "warn"),
            ([*good, full], 3, "good"),
            (good, 4, "bad"),
            ([], 1, "bad"),
        ):
            self.assertEqual(grid_health(servers, needed).tone, tone)
        health = grid_health([*good, lost, full], 2)
        self.assertEqual((health.connected, health.writable, health.total), (4, 3, 5))
        self.assertEqual(health.available_bytes, 3000)

    def test_rows(self) -> None:
        unheard = ServerState(ServerIdentity("new", "", b"", b""))
        rows = [
            server_row(each)
            for each in (
                server("a"),
                server("b", reachable=False),
                server("c", space=0),
                server("d", no_uploads="it has no certificate"),
                unheard,
            )
        ]
        self.assertEqual(
            [(row.state, row.reason) for row in rows],
            [
                ("connected", ""),
                ("not reachable", "connection refused"),
                ("takes no shares", "It has no space left."),
                ("takes no shares", "it has no certificate"),
                ("connecting", ""),
            ],
        )
        self.assertEqual(rows[-1].name, "new")

    def test_certified(self) -> None:
        """A server's row says until when."""
        known = server("a")
        assert known.status is not None
        until = "2027-01-31T12:00:00+00:00"
        status = known.status._replace(certified_by="alice", certified_until=until)
        row = server_row(attrs.evolve(known, status=status))
        self.assertEqual((row.tone, row.reason), ("good", "certified by alice until 2027-01-31"))


class OverviewPageTests(DirectoryTestCase):
    def show_overview(self) -> None:
        self.browser.open("/")
        self.assertEqual(self.browser.answer.status, 200)
        self.check_page()

    def test_servers(self) -> None:
        """All ten, with their round trips; those that do not answer are named."""
        self.show_overview()
        self.assertIn("All servers are connected.", self.browser.text)
        table = self.browser.page.one("table", id="server-table")
        rows = [row.text for row in table.all("tr", role="row")][1:]
        self.assertEqual(len(rows), 10)
        self.assertIn("connected", rows[0])
        self.assertIn(" ms", rows[0])

    def test_transfers(self) -> None:
        """One that runs has its progress; one that failed its reason; no cap is on the page."""
        cap = self.put(b"x" * 100)
        self.delete_shares(cap)
        self.browser.open(f"/uri/{cap}")
        running = self.grid.put(b"x" * 500_000)
        running.addErrback(lambda failure: failure.trap(CancelledError))
        self.show_overview()
        table = self.browser.page.one("table", id="transfer-table")
        self.assertIn("failed", table.text)
        self.assertNotIn(b"URI:CHK", self.browser.answer.body)
        self.assertGreater(len(list(table.all("progress"))), 1)

    def test_open(self) -> None:
        """A cap as people paste it: quoted, broken, as the address of another gateway, with a path."""
        cap = self.directory_of({"in": self.directory_of({"a": parse_cap("URI:LIT:nbswy3dp")})})
        for text in (
            f'"{cap}/in"',
            f"{str(cap)[:30]}\n> {str(cap)[30:]}/in/",
            f"http://other.example:3456/uri/{str(cap).replace(':', '%3A')}/in",
        ):
            self.show_overview()
            self.browser.submit("Open it", uri=text)
            self.assertEqual(self.browser.answer.status, 200, text)
            self.check_page()
            self.assertEqual(self.shown_names(), ["a"])
        self.show_overview()
        self.browser.submit("Open it", uri="URI:LIT:nbswy3dp")
        self.assertEqual(self.browser.page.one("pre").text, "hello")

    def test_open_nonsense(self) -> None:
        for text in (
            "nonsense",
            "https://evil.example/",
            "javascript:alert(1)",
            "URI:DIR2:x",
            "//x",
        ):
            self.show_overview()
            self.browser.submit("Open it", uri=text)
            self.assertEqual(self.browser.answer.status, 400, text)
            self.check_page()
            self.browser.follow("Go back")
            self.assertEqual(self.browser.path, "/")

    def test_upload(self) -> None:
        """The page of the new file shows its cap, and says that nothing else leads to it."""
        self.show_overview()
        self.browser.submit("Upload", ("a.txt", b"some text"))
        self.check_page()
        self.assertIn("The file was stored.", self.browser.message)
        self.assertEqual(self.browser.page.one("pre").text, "some text")

    def test_new_directory(self) -> None:
        for kind in ("sdmf", "mdmf"):
            self.show_overview()
            self.browser.submit("Make a directory", format=kind)
            self.check_page()
            self.assertIn("This directory is empty.", self.browser.text)
            self.assertEqual("DIR2-MDMF" in self.browser.url, kind == "mdmf")

    def test_upload_without_place(self) -> None:
        """A form that names no page to go to gets one with the cap."""
        answer = self.send(
            b"POST /uri?t=upload HTTP/1.0\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            b"Content-Length: 80\r\n\r\n"
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nhello\r\n--b--\r\n'
        )
        self.assertEqual(answer.status, 200)
        self.assertIn(b"URI:LIT:nbswy3dp", answer.body)

    def test_json_stays(self) -> None:
        said = json.loads(self.get("/?t=json").body)
        self.assertEqual(len(said["servers"]), 10)
