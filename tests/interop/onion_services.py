"""A private Tor network: servers that are onion services, and a client that reaches nothing but Tor."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from misc.speedtest.peers.nodes import free_port
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

import pipegrid
from pipegrid.core.encoding_parameters import Params
from pipegrid.grid import Grid
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import CONFIG_NAME, SERVERS_NAME
from pipegrid.grid.servers_and_introducers_yaml import servers_of
from tests.interop.round_trips import LOOPBACK, RoundTrips
from tests.interop.tor_network import TorNetwork, is_installed
from tests.no_network import run_without_network, unshare

reactor: Any = installed_reactor

SERVERS = 3
START_S = 180.0
QUIET_S = 1.5
"""How long Tor may take to pass something on; what takes longer counts as a further round trip."""
ATTEMPTS = 3
FIRST = "first put"
SOCKS_TRIPS = 3

Counts = dict[str, int]


class TorTests(TestCase):
    """``serve --tor``, and commands that can reach Tor's socket file and nothing else."""

    timeout = 900

    def setUp(self) -> None:
        self.assertTrue(is_installed(), "Tor is not installed")
        self.assertTrue(unshare(), "this system gives no network namespaces")
        self.small = ""
        self.ports: list[int] = []
        self.home = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(shutil.rmtree, self.home, ignore_errors=True)
        self.environment = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(pipegrid.__file__).parent.parent),
        }
        self.network = TorNetwork(self.home / "tor")
        self.addCleanup(self.network.stop)
        self.network.start()

    def serve(self, number: int) -> str:
        """Start a server; returns what it prints: its addresses."""
        self.ports.append(free_port())
        options = ["serve", "--tor", "--tor-control-port", f"127.0.0.1:{self.network.control_port}"]
        options += ["--port", f"tcp:{self.ports[-1]}:interface={LOOPBACK}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pipegrid.cli", "-q", "-d", f"server{number}", *options],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.addCleanup(process.wait, 30)
        self.addCleanup(process.terminate)
        assert process.stdout is not None
        self.addCleanup(process.stdout.close)
        return process.stdout.readline() + process.stdout.readline()

    def client(self, name: str, addresses: list[str], socks_port: str | None) -> Path:
        """Make a client's directory; without a port of Tor it connects to its servers directly."""
        place = self.home / name
        content = json.dumps(servers_of([(name, each) for each in addresses]))
        create_client(place, params=Params(2, 3), happy=3, files={SERVERS_NAME: content})
        path = place / CONFIG_NAME
        if socks_port is not None:
            path.write_text(
                f"{path.read_text()}\n[node]\nreveal-IP-address = false\n[connections]\ntcp = tor\n"
                f"[tor]\nsocks.port = {socks_port}\n"
            )
        return place

    def run_in(self, name: str, *arguments: str) -> tuple[int, bytes, str]:
        """Run a client's command; nothing may be sent but through Tor."""
        status, out, err, attempts = run_without_network(
            *(sys.executable, "-m", "pipegrid.cli", "-q", "-d", name, *arguments),
            cwd=self.home,
            env=self.environment,
            timeout=240,
        )
        self.assertEqual(attempts, 0, err)
        return status, out, err

    def launched(self, host: str) -> None:
        """A server and clients with ``launch = true``: each has a Tor of its own, which ends with it."""
        program = self.network.program(self.home / "launched")
        settings = f"\n[connections]\ntcp = tor\n[tor]\nlaunch = true\ntor.executable = {program}\n"
        path = self.home / "https" / CONFIG_NAME
        path.write_text(path.read_text().partition("\n[node]")[0] + settings)
        process = subprocess.Popen(
            [sys.executable, "-m", "pipegrid.cli", "-q", "-d", "https", "serve", "--tor"],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            nurl = process.stdout.readline()
            self.assertRegex(nurl, r"^pb\+tor://[^@]+@[a-z2-7]{56}\.onion:3457/")
            self.assertNotIn(host, nurl)
            both = [self.start("-d", "https", "get", self.small) for _ in range(2)]
            for each in both:
                out, err = each.communicate(timeout=240)
                self.assertEqual((each.returncode, out), (0, b"x" * 200), err)
                self.assertIn(b"Tor is starting: ", err)
            self.assertEqual(
                sorted(each.name for each in (self.home / "https/private").glob("tor-*")),
                ["tor-1", "tor-2", "tor-3"],
            )
        finally:
            process.kill()  # also then Tor ends
            process.communicate()
        until_s = time.monotonic() + 30
        while self.tors():
            self.assertLess(time.monotonic(), until_s)
            time.sleep(0.2)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "pipegrid.cli", *arguments],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def tors(self) -> list[str]:
        """Return the processes of Tor that commands have started, and that run."""
        found = []
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                text = each.read_bytes().decode("utf-8", "replace")
                found += [text] if f"{self.home}/https/private/tor-" in text else []
        return found

    async def same_round_trips(self, addresses: list[list[str]]) -> None:
        """
        Count, for both protocols, over TCP and through Tor to the same servers, and compare.

        Answers are held between the client and the servers, or Tor's SOCKS port.
        """
        for number, protocol in enumerate(("https", "foolscap")):
            onions = [each[number] for each in addresses]
            over_tcp = await self.count_over_tcp(protocol, onions)
            over_tor, connecting = await self.count_through_tor(protocol, onions, over_tcp)
            print(
                f"\n{protocol}: round trips over TCP {over_tcp}, through Tor {over_tor}; "
                f"the first put in addition {connecting}",
                flush=True,
            )
            self.assertEqual(over_tor, {**over_tcp, FIRST: over_tcp[FIRST] + connecting})
            # SOCKS5 takes three (method, user name, host), to Tor's port on the same machine.
            self.assertEqual(connecting, SOCKS_TRIPS)

    async def count_over_tcp(self, protocol: str, onions: list[str]) -> Counts:
        """Return the round trips over TCP to the ports behind onion services."""
        trips = RoundTrips(reactor)
        direct = [
            re.sub(
                r"@(tor:)?[a-z2-7]+\.onion:\d+",
                rf"@\g<1>{LOOPBACK}:{trips.listen(LOOPBACK, port)}",
                onion,
            )
            .replace("pb+tor:", "pb:")
            .replace("@tor:", "@tcp:")
            for onion, port in zip(onions, self.ports, strict=True)
        ]
        try:
            return await self.count(trips, self.client(f"{protocol}-tcp", direct, None))
        finally:
            await trips.close()

    async def count_through_tor(
        self, protocol: str, onions: list[str], wanted: Counts
    ) -> tuple[Counts, int]:
        """
        Return the round trips through Tor, and how many more the first put takes, with its connections.

        It is the fewest of a few attempts: what Tor delays longer than ``QUIET_S`` counts as one more.
        """
        trips = RoundTrips(reactor, QUIET_S)
        try:
            socks_port = f"tcp:{LOOPBACK}:{trips.listen(LOOPBACK, self.network.socks_port)}"
            place = self.client(f"{protocol}-tor", onions, socks_port)
            fewest: Counts = {}
            for _ in range(ATTEMPTS):
                counts = await self.count(trips, place)
                fewest = {name: min(each, fewest.get(name, each)) for name, each in counts.items()}
                if fewest == {**wanted, FIRST: wanted[FIRST] + SOCKS_TRIPS}:
                    break
            return fewest, fewest[FIRST] - wanted[FIRST]
        finally:
            await trips.close()

    async def count(self, trips: RoundTrips, place: Path) -> Counts:
        """Return the round trips of operations, the first with its connections."""
        grid = await Grid.open(reactor, place, window_bytes=1 << 20)
        try:
            counts: Counts = {}
            first, counts[FIRST] = await trips.count(
                lambda: grid.put(os.urandom(200), happy=SERVERS)
            )
            await grid.read(first.cap)  # over connections of their own
            for size in (200, 10_000_000):
                data = os.urandom(size)
                stored, counts[f"put {size}"] = await trips.count(
                    partial(grid.put, data, happy=SERVERS)
                )
                got, counts[f"get {size}"] = await trips.count(partial(grid.read, stored.cap))
                self.assertEqual((got == data, len(stored.shares_placed)), (True, SERVERS))
            return counts
        finally:
            await grid.close()

    def test_onion_services(self) -> Deferred[None]:
        """
        Put, get and backup, of 200 B and 10 MB, over both protocols; 0 packets outside Tor; no round trip
        more than over TCP, except for the proxy, once for a connection.
        """
        return Deferred.fromCoroutine(self._test_onion_services())

    async def _test_onion_services(self) -> None:
        printed = [self.serve(number) for number in range(SERVERS)]
        for each in printed:
            self.assertRegex(
                each, r"^pb\+tor://[^@]+@[a-z2-7]{56}\.onion:3457/\S+#v=1\npb://[^@]+@tor:"
            )
        addresses = [each.splitlines() for each in printed]
        socks_port = f"unix:{self.network.socks_path}"
        self.client("https", [nurl for nurl, _ in addresses], socks_port)
        self.client("foolscap", [furl for _, furl in addresses], socks_port)
        until_s = time.monotonic() + START_S
        while self.run_in("https", "status")[0] != 0:  # Tor publishes the services
            self.assertLess(time.monotonic(), until_s)
        (self.home / "small").write_bytes(b"x" * 200)
        (self.home / "large").write_bytes(os.urandom(10_000_000))
        (self.home / "tree").mkdir()
        (self.home / "tree/a").write_bytes(b"a" * 5000)
        for name in ("https", "foolscap"):
            for file in ("small", "large"):
                status, cap, err = self.run_in(name, "put", file)
                self.assertEqual(status, 0, err)
                self.small = cap.decode().strip() if file == "small" else self.small
                status, data, err = self.run_in(name, "get", cap.decode().strip())
                self.assertEqual((status, data == (self.home / file).read_bytes()), (0, True), err)
        status, _, err = self.run_in("https", "backup", "tree")
        self.assertEqual(status, 0, err)
        await self.same_round_trips(addresses)
        self.launched(addresses[0][0].partition("@")[2])
        names = {re.findall(r"@([a-z2-7]+)\.onion", nurl)[0] for nurl, _ in addresses}
        self.assertEqual(len(names), SERVERS)
