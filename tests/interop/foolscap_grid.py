"""
Tahoe-LAFS and PipeGrid on one grid over Foolscap: half the servers are of each kind, and so are the clients.

Run it with ``make interop``; it starts five processes, and takes half a minute.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.interop.processes import (
    pipegrid,
    start_gateway,
    start_pipegrid_server,
    start_tahoe_server,
    write_servers,
)

SHARES = (2, 4, 4)  # needed, happy, total
SIZES = (0, 1, 55, 56, 1000, 131073, (1 << 20) - 1, (1 << 20) + 1, (3 << 20) + 7)


class MixedGridTests(SynchronousTestCase):
    """Two servers of each kind, each holding one share of every file."""

    def setUp(self) -> None:
        root = Path(self.mktemp()).absolute()
        root.mkdir()
        furls = {}
        for name, start in (
            ("tahoe0", start_tahoe_server),
            ("tahoe1", start_tahoe_server),
            ("pipegrid0", start_pipegrid_server),
            ("pipegrid1", start_pipegrid_server),
        ):
            process, furls[name] = start(root / name)
            self.addCleanup(process.stop)
        self.gateway = start_gateway(root / "gateway", furls, SHARES)
        self.addCleanup(self.gateway.stop)
        self.client = root / "client"
        write_servers(self.client, furls)
        needed, happy, total = map(str, SHARES)
        pipegrid("-d", str(self.client), "init", "-k", needed, "--happy", happy, "-n", total)

    def test_together(self) -> None:
        """They notice no difference. One test, since five processes take their time to start."""
        self.check_status()
        self.check_every_server_has_its_share()
        self.check_what_pipegrid_puts()
        self.check_what_tahoe_puts()
        self.check_mutable_files()
        self.check_directories()

    def pipegrid_put(self, data: bytes) -> str:
        """Store a file with PipeGrid; returns its cap."""
        return pipegrid("-d", str(self.client), "put", "-", data=data).decode().strip()

    def check_status(self) -> None:
        """PipeGrid reaches all servers over Foolscap, and knows what software they are."""
        lines = pipegrid("-d", str(self.client), "--json", "status").splitlines()
        servers = [json.loads(line) for line in lines]
        servers = [each for each in servers if "protocol" in each]
        self.assertEqual({each["protocol"] for each in servers}, {"foolscap"})
        self.assertEqual(len(servers), 4)

    def check_what_pipegrid_puts(self) -> None:
        """What PipeGrid has put Tahoe-LAFS gets, and finds healthy."""
        for size in SIZES:
            data = random.Random(size).randbytes(size)
            cap = self.pipegrid_put(data)
            self.assertEqual(self.gateway.get(cap), data, f"{size} bytes")
            if cap.startswith("URI:CHK:"):
                self.assertHealthy(self.gateway.check(cap)["results"], size)

    def check_what_tahoe_puts(self) -> None:
        """What Tahoe-LAFS has put PipeGrid gets, and finds healthy."""
        for size in SIZES:
            data = random.Random(-1 - size).randbytes(size)
            cap = self.gateway.put(data)
            got = pipegrid("-d", str(self.client), "get", cap)
            self.assertEqual(got, data, f"{size} bytes")
            if cap.startswith("URI:CHK:"):
                pipegrid("-d", str(self.client), "check", "--verify", cap)

    def check_every_server_has_its_share(self) -> None:
        """A file's four shares are on four servers, two of each kind, and either client finds all of them."""
        cap = self.pipegrid_put(random.Random(7).randbytes(5000))
        results = self.gateway.check(cap)["results"]
        self.assertEqual(results["count-good-share-hosts"], 4)
        self.assertEqual(results["count-corrupt-shares"], 0)

    def check_mutable_files(self) -> None:
        """Tahoe-LAFS makes, changes and verifies mutable files of both formats on all servers."""
        for mutable_format in ("SDMF", "MDMF"):
            cap = self.gateway.put(b"first" * 1000, f"?format={mutable_format}")
            for data in (b"second" * 100_000, b"", b"third"):
                self.gateway.request("PUT", f"uri/{cap}", data)
                self.assertEqual(self.gateway.get(cap), data, mutable_format)
            results = self.gateway.check(cap)["results"]
            self.assertTrue(results["healthy"], f"{mutable_format}: {results}")
            self.assertEqual(results["count-good-share-hosts"], SHARES[2])

    def check_directories(self) -> None:
        """Files are linked into a directory of Tahoe-LAFS's, and found there."""
        directory = self.gateway.request("POST", "uri?t=mkdir", b"").decode().strip()
        for number in range(3):
            self.gateway.request("PUT", f"uri/{directory}/file{number}", b"%d" % number * 1000)
        self.assertEqual(self.gateway.get(f"{directory}/file2"), b"2" * 1000)
        listing = json.loads(self.gateway.request("GET", f"uri/{directory}?t=json"))
        self.assertEqual(set(listing[1]["children"]), {"file0", "file1", "file2"})

    def assertHealthy(self, results: dict[str, Any], size: int) -> None:
        """Every share is where it should be, and good."""
        self.assertTrue(results["healthy"], f"{size} bytes: {results}")
        self.assertEqual(results["count-shares-good"], SHARES[2])
