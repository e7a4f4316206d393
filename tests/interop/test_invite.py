"""Invitations between PipeGrid and Tahoe-LAFS's own commands, in both directions, over one relay."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from misc.speedtest.peers.nodes import free_port
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.grid.client_config import load
from pipegrid.grid.client_creation import ClientPreferences, create_client
from pipegrid.grid.servers_and_introducers_yaml import (
    IntroducerAddress,
    Introducers,
    load_introducers,
)
from pipegrid.grid.strict_config import read_config
from tests.grid.introducer_support import FURL
from tests.interop.processes import (
    TAHOE,
    Process,
    make_node,
    run_pipegrid,
    start_gateway,
    start_pipegrid_server,
    until,
)

CODE = re.compile(r"\b[0-9]+-[a-z]+-[a-z]+\b")
PATIENCE_S = 90
AFRESH = os.environ.get("TAHOE_AFRESH", TAHOE)
"""A process of its own: its output must not be buffered, which a fork cannot be told."""

RELAY = """\
import sys
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from pipegrid.grid.wormhole_exchange import start_relay
Deferred.fromCoroutine(start_relay(reactor, "127.0.0.1", int(sys.argv[1]), "127.0.0.1"))
reactor.run()
"""


class TahoeCommand(Process):
    """A command of Tahoe-LAFS, which has nothing of ours around it."""

    def __init__(self, directory: Path, relay_url: str, *arguments: str) -> None:
        super().__init__(directory, AFRESH, f"--wormhole-server={relay_url}", *arguments)

    def surroundings(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return {**own, "PYTHONUNBUFFERED": "1"}  # the code is read from a file while it waits

    def status(self) -> int:
        """Wait for its end."""
        return self._process.wait(PATIENCE_S)


class InviteTests(SynchronousTestCase):
    """A relay in a process of its own; an introducer that nobody asks yet."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        port = free_port()
        self.url = f"ws://127.0.0.1:{port}/v1"
        relay = Process(self.root / "relay", sys.executable, "-c", RELAY, str(port))
        self.addCleanup(relay.stop)
        until(lambda: self._answers(port), "the relay listening", relay)

    def _answers(self, port: int) -> bool:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"import socket; socket.create_connection(('127.0.0.1', {port}))",
            ],
            capture_output=True,
        )
        return done.returncode == 0

    def code_of(self, process: Process) -> str:
        """Return the code that an inviter prints."""
        found: re.Match[str] = until(lambda: CODE.search(process.log()), "a code", process)
        return found[0]

    def test_tahoe_invites(self) -> None:
        """``tahoe invite`` -> ``pipegrid join``: numbers, introducer, nickname."""
        node = self.root / "node"
        settings = "[client]\nshares.needed = 2\nshares.happy = 3\nshares.total = 5\n"
        make_node(node, f"[node]\nnickname = theirs\n{settings}")
        (node / "private/introducers.yaml").write_text(
            Introducers((IntroducerAddress("default", FURL),)).as_text()
        )
        inviting = TahoeCommand(self.root / "invite", self.url, "-d", str(node), "invite", "bob")
        self.addCleanup(inviting.stop)
        joined = self.root / "joined"
        done = run_pipegrid(
            "-d", str(joined), "join", self.code_of(inviting), "--relay-url", self.url
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(inviting.status(), 0, inviting.log())
        config = load(joined)
        self.assertEqual([each.furl for each in config.introducers.addresses], [FURL])
        numbers = (config.params.required_shares, config.happy, config.params.total_shares)
        self.assertEqual((numbers, config.nickname), ((2, 3, 5), "bob"))

    def test_tahoe_joins(self) -> None:
        """``pipegrid invite`` -> ``tahoe create-client --join``."""
        status, said = self._tahoe_joins({"private/introducers.yaml": self._introducers()})
        self.assertEqual(status, 0, said)
        self.assertIn("Tahoe-LAFS has joined", said)
        node = self.root / "node"
        self.assertEqual([each.furl for each in load_introducers(node).addresses], [FURL])
        _, parser = read_config(node)
        names = ("shares.needed", "shares.happy", "shares.total")
        self.assertEqual([parser.get("client", name) for name in names], ["3", "7", "10"])

    def test_tahoe_finds_the_first_server(self) -> None:
        """Where a grid begins with ``serve``: by the introducer for members, on the server's own port."""
        server, _ = start_pipegrid_server(self.root / "alice")
        self.addCleanup(server.stop)
        furl = (self.root / "alice/private/members.furl").read_text().strip()
        gateway = start_gateway(
            self.root / "gateway", {}, (1, 1, 1), introducer=furl, servers=1, force_foolscap=True
        )
        self.addCleanup(gateway.stop)
        self.assertEqual(gateway.get(gateway.put(b"x" * 1000)), b"x" * 1000)

    def test_tahoe_joins_without_an_introducer(self) -> None:
        """It could not find the servers; who invites it is told what is left to do."""
        spki = "A" * 43
        ann = f'{{"anonymous-storage-NURLs": ["pb://{spki}@127.0.0.1:1/s#v=1"]}}'
        servers = f'{{"storage": {{"a": {{"ann": {ann}}}}}}}'
        status, said = self._tahoe_joins({"private/servers.yaml": servers})
        self.assertEqual(status, 1, said)
        self.assertIn("finds servers through introducers only, and this grid has none", said)

    def _introducers(self) -> str:
        return Introducers((IntroducerAddress("default", FURL),)).as_text()

    def _tahoe_joins(self, files: dict[str, str]) -> tuple[int, str]:
        """Return the status of ``pipegrid invite``, and what it says."""
        ours, node = self.root / "ours", self.root / "node"
        create_client(ours, files=files, preferences=ClientPreferences())
        inviting = Process(
            self.root / "invite",
            *(sys.executable, "-m", "pipegrid.cli", "-d", str(ours)),
            *("invite", "--relay-url", self.url),
        )
        self.addCleanup(inviting.stop)
        code = self.code_of(inviting)
        joining = TahoeCommand(
            self.root / "join", self.url, "create-client", "--join", code, str(node)
        )
        self.addCleanup(joining.stop)
        self.assertEqual(joining.status(), 0, joining.log())
        status = inviting._process.wait(PATIENCE_S)
        return status, inviting.log()
