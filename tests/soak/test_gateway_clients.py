"""The measure of a gateway with many clients, in small: it works, and the promises hold."""

from __future__ import annotations

import json
import tempfile
import zlib

from misc.soak.gateway_clients import PARTS, Stream
from misc.speedtest.processes import run_module
from twisted.trial.unittest import SynchronousTestCase


class GatewayClientsTests(SynchronousTestCase):
    """Few clients, and a body of 5 MB."""

    def test_it_works(self) -> None:
        """Each part gives a figure; nothing is left behind."""
        with tempfile.TemporaryDirectory() as scratch:
            said = run_module("misc.soak.gateway_clients", "--tiny", "--scratch", scratch)
        figures = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        self.assertEqual([each["part"] for each in figures], list(PARTS))
        for each in figures:
            self.assertTrue(each["kept"], each)

    def test_a_body_that_is_made_while_it_is_read(self) -> None:
        """It has its size, and its checksum is that of its bytes."""
        body = Stream(2_500_000, 1)
        data = b"".join(iter(body.read, b""))
        self.assertEqual((len(data), body.checksum), (2_500_000, zlib.crc32(data)))
        self.assertNotEqual(data[: 1 << 20], data[1 << 20 : 2 << 20])
