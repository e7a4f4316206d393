"""
Ten servers and clients of both kinds with an introducer that is Tahoe-LAFS's, then ours, then killed, then
Tahoe-LAFS's again, in one directory.

Run it with ``make interop``; it starts a dozen processes, and takes two minutes.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from misc.speedtest.peers.nodes import free_port
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.grid.client_creation import ClientPreferences, create_client
from pipegrid.grid.client_paths import INTRODUCERS_NAME
from pipegrid.grid.servers_and_introducers_yaml import IntroducerAddress, Introducers
from pipegrid.wire.server_address import parse_furl
from tests.interop.processes import (
    Gateway,
    Node,
    PipegridGateway,
    Process,
    introducer_furl,
    launch_introducer,
    launch_tahoe_server,
    pipegrid,
    start_gateway,
    until,
)

SHARES = (2, 4, 4)  # needed, happy, total


class IntroducerTurnsTests(SynchronousTestCase):
    """
    The grid stays the same, and so do its gateways, one of each kind.

    Attributes:
        of_each_kind: how many servers of each kind there are.
    """

    of_each_kind = 5

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        self.home = self.root / "introducer"
        self.new_clients = 0

    def test_turns(self) -> None:
        """All find each other, whoever runs the introducer; gateways that run notice nothing."""
        introducer: Process = launch_introducer(self.home)
        self.addCleanup(lambda: introducer.stop())
        self.furl = introducer_furl(introducer)  # type: ignore[arg-type]
        for number in range(self.of_each_kind):
            server: Process = launch_tahoe_server(self.root / f"tahoe{number}", self.furl)
            self.addCleanup(server.stop)
            self.addCleanup(self.launch_server(f"ours{number}").stop)
        self.theirs = self.tahoe_gateway("gateway")
        self.ours = self.pipegrid_gateway("our-gateway")
        self.check_files()
        introducer.stop()
        self.check_files()
        introducer = self.takes_over()
        self.check_files()
        self.new_clients_find_all()
        introducer._process.kill()
        introducer._process.wait()
        self.check_files()
        introducer.stop()
        introducer = self.takes_over()
        self.new_clients_find_all()
        self.check_files()
        introducer.stop()
        introducer = Node(self.home)
        self.assertEqual(introducer_furl(introducer), self.furl)
        self.new_clients_find_all()
        self.check_files()

    def launch_server(self, name: str) -> Process:
        """Start a server of ours; nothing is waited for."""
        directory = self.root / name
        port = f"tcp:{free_port()}:interface=127.0.0.1"
        return Process(
            directory,
            *(sys.executable, "-m", "pipegrid.cli", "-d", str(directory)),
            *("serve", "--port", port, "--introducer", self.furl),
        )

    def takes_over(self) -> Process:
        """Start our introducer in the directory; its fURL is the same."""
        command = sys.executable, "-m", "pipegrid.cli", "-d", str(self.home), "introducer"
        introducer = Process(self.home, *command)
        until(lambda: self.furl in introducer.log(), "the fURL", introducer)
        return introducer

    def tahoe_gateway(self, name: str) -> Gateway:
        """Start a gateway of Tahoe-LAFS's that finds all servers."""
        count = 2 * self.of_each_kind
        gateway = start_gateway(self.root / name, {}, SHARES, introducer=self.furl, servers=count)
        self.addCleanup(gateway.stop)
        return gateway

    def pipegrid_client(self, name: str) -> Path:
        """Make a client's directory of ours."""
        directory = self.root / name
        introducers = Introducers((IntroducerAddress("i", parse_furl(self.furl)),))
        create_client(
            directory,
            files={INTRODUCERS_NAME: introducers.as_text()},
            preferences=ClientPreferences(),
        )
        needed, happy, total = map(str, SHARES)
        pipegrid("-d", str(directory), "init", "-k", needed, "--happy", happy, "-n", total)
        return directory

    def pipegrid_gateway(self, name: str) -> PipegridGateway:
        """Start a gateway of ours that finds all servers."""
        directory = self.pipegrid_client(name)
        with (directory / "pipegrid.cfg").open("a") as config:
            config.write(f"[node]\nweb.port = tcp:{free_port()}:interface=127.0.0.1\n")
        gateway = PipegridGateway(directory)
        self.addCleanup(gateway.stop)
        gateway.wait(2 * self.of_each_kind)
        return gateway

    def new_clients_find_all(self) -> None:
        """A new client of each kind finds all servers, and what was stored before."""
        self.new_clients += 1
        gateway = self.tahoe_gateway(f"gateway{self.new_clients}")
        self.assertEqual(gateway.get(self.cap), self.data)
        gateway.stop()
        directory = self.pipegrid_client(f"client{self.new_clients}")
        until(lambda: self.reached(directory) == 2 * self.of_each_kind, "all servers found")
        self.assertEqual(pipegrid("-d", str(directory), "get", self.cap), self.data)

    def reached(self, directory: Path) -> int:
        """Return how many servers a client of ours reaches."""
        lines = pipegrid("-d", str(directory), "--json", "status").splitlines()
        return sum("protocol" in json.loads(line) for line in lines)

    def check_files(self) -> None:
        """What one gateway stores the other fetches, at once; both have all servers."""
        for source, target in ((self.theirs, self.ours), (self.ours, self.theirs)):
            self.data = random.randbytes(10_000)
            self.cap = source.put(self.data)
            self.assertEqual(target.get(self.cap), self.data)
            self.assertEqual(source.connected(), 2 * self.of_each_kind)
