"""``pipegrid serve``: options in, a NURL out, status 0 when told to end."""

from __future__ import annotations

import io
import json
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from pipegrid.cli.app import start
from pipegrid.cli.console import Console
from pipegrid.wire import nurl

LOOPBACK = "tcp:0:interface=127.0.0.1"


class ServeTests(TestCase):
    """The command, on the real reactor."""

    timeout = 30

    def setUp(self) -> None:
        self.out = io.BytesIO()
        self.err = io.StringIO()
        self.directory = self.mktemp()

    def serve(self, *arguments: str) -> Deferred[int]:
        """Start the command."""
        console = Console(None, self.out, self.err)
        return start(["-d", self.directory, *arguments], console, reactor)

    async def until_output(self) -> None:
        """Wait for the first result."""
        while not self.out.getvalue():
            await deferLater(reactor, 0.005)

    def test_until_told_to_end(self) -> Deferred[None]:
        """It prints its NURL, logs in both forms, and ends with 0 when cancelled."""
        return Deferred.fromCoroutine(self._test_until_told())

    async def _test_until_told(self) -> None:
        log = Path(self.mktemp())
        arguments = ["--port", LOOPBACK, "--location", "example.org:80", "--reserved-space", "1G"]
        serving = self.serve("--json", "serve", *arguments, "--log", str(log))
        await self.until_output()
        result = json.loads(self.out.getvalue())
        address = nurl.parse(result["nurl"])
        self.assertEqual((address.host, address.port), ("example.org", 80))
        furl = result["furl"]
        self.assertTrue(furl.endswith(f"@tcp:example.org:80/{address.swissnum}"), furl)
        self.assertEqual(result["storage"], f"{self.directory}/storage")
        serving.cancel()
        self.assertEqual(await serving, 0)
        self.assertIn("stopped serving", self.err.getvalue())
        formats = [json.loads(line)["log_format"] for line in log.read_text().splitlines()]
        self.assertIn("stopped serving {storage}", formats)
        self.assertNotIn(address.swissnum, log.read_text() + self.err.getvalue())

    def test_refusals(self) -> Deferred[None]:
        """What cannot be served is a sentence and status 2."""
        return Deferred.fromCoroutine(self._test_refusals())

    async def _test_refusals(self) -> None:
        for arguments in (
            ["--port", "nonsense:1"],
            ["--port", LOOPBACK, "--log", "/nowhere/x"],
            ["--port", LOOPBACK, "--location", "x"],
            ["--port", LOOPBACK, "--durability", "perhaps"],
        ):
            self.assertEqual(await self.serve("serve", *arguments), 2, arguments)
        self.assertEqual(self.out.getvalue(), b"")
        self.assertNotIn("Traceback", self.err.getvalue())
