"""``access.blacklist``: what a gateway gives to no client."""

from __future__ import annotations

import os
from http.client import HTTPConnection
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.core.caps import ChkCap, LitCap, UnknownCap, parse_cap
from pipegrid.errors import AccessProhibited
from pipegrid.grid.access_blacklist import AccessBlacklist
from tests.gateway.test_webapi_vectors import gateway

CAP = "URI:CHK:lwpxsasmgj4qws7xfyanb3cemi:s3tos7pztfo5lfel2wgkm73gpooqmrxn7lr5g4jeqffefjxen2na:3:10:300"


class AccessBlacklistTests(SynchronousTestCase):
    """The list itself."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "access.blacklist"
        self.blacklist = AccessBlacklist(self.directory)
        self.cap = parse_cap(CAP)
        assert isinstance(self.cap, ChkCap)
        self.index = base32.encode(self.cap.storage_index)

    def blocked(self) -> str | None:
        """Return why it is blocked; None: it is not."""
        try:
            self.blacklist.check(CAP)
        except AccessProhibited as error:
            return str(error)
        return None

    def test_it_is_read_again(self) -> None:
        """When it appears, when it changes and when it goes."""
        self.assertIsNone(self.blocked())
        self.path.write_text(f"# {self.index}\n\nother why\n{self.index} by a court\n")
        self.assertEqual(self.blocked(), "Access Prohibited: by a court")
        self.path.write_text("# nothing is blocked any more\n")
        os.utime(self.path, (1, 1))
        self.assertIsNone(self.blocked())
        self.path.write_text(self.index)
        self.assertEqual(self.blocked(), "Access Prohibited: ")
        self.path.unlink()
        self.assertIsNone(self.blocked())

    def test_what_has_no_storage_index(self) -> None:
        """Nothing of that can be blocked."""
        self.path.write_text(f"{self.index} why\n")
        for cap in (None, LitCap(b"x"), UnknownCap("URI:NEW:x")):
            self.blacklist.check(cap)

    def test_what_cannot_be_read_blocks_all(self) -> None:
        """It may forbid any of it."""
        self.path.mkdir()
        self.assertIn("it may forbid access", self.blocked() or "")
        self.path.rmdir()
        os.mkfifo(self.path)  # nobody writes into it
        self.assertIn("it is a named pipe", self.blocked() or "")


class BlockedObjectsTests(SynchronousTestCase):
    """Through the web API."""

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        """Send one request; returns status and text."""
        url = (gateway() / "node.url").read_text().strip()
        connection = HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=60)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def test_403(self) -> None:
        """The reason is told, for the content and for what is known of it, by cap and by path."""
        _, cap = self.request("PUT", "/uri", b"to be blocked" * 100)
        _, directory = self.request("POST", "/uri?t=mkdir", b"")
        self.request("PUT", f"/uri/{directory}/name?t=uri", cap.encode())
        parsed = parse_cap(cap)
        assert isinstance(parsed, ChkCap)
        index = base32.encode(parsed.storage_index)
        path = gateway() / "access.blacklist"
        path.write_text(f"{index} it is private\n")
        self.addCleanup(path.unlink)
        for where in (
            f"/uri/{cap}",
            f"/uri/{cap}?t=json",
            f"/uri/{directory}/name",
            f"/file/{cap}",
        ):
            self.assertEqual(self.request("GET", where), (403, "Access Prohibited: it is private"))
        self.assertEqual(self.request("GET", f"/uri/{directory}?t=json")[0], 200)
        self.assertEqual(self.request("DELETE", f"/uri/{directory}/name")[0], 403)
