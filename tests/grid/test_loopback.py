"""A real introducer on the loopback interface: servers announce themselves, a client finds them."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from foolscap.api import flushEventualQueue
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import UnhappyError
from pipegrid.grid import Grid
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import INTRODUCERS_NAME
from pipegrid.grid.introducer_discovery import cache_name, write_cache
from pipegrid.grid.servers_and_introducers_yaml import IntroducerAddress, Introducers
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from pipegrid.server.serve import ServeSettings, StorageNode
from pipegrid.wire import server_address
from pipegrid.wire.announcements import Announcement
from pipegrid.wire.foolscap_broker import make_tub
from pipegrid.wire.introducer_protocol import LOST_AFTER_S
from pipegrid.wire.server_address import Furl
from tests.grid.introducer_support import RealIntroducer

reactor: Any = installed_reactor


class LoopbackTests(TestCase):
    """Foolscap, TLS and HTTPS for real."""

    timeout = 60

    def setUp(self) -> Deferred[None]:  # type: ignore[override]
        return Deferred.fromCoroutine(self._set_up())

    async def _set_up(self) -> None:
        self.directory = Path(self.mktemp())
        self.introducer = RealIntroducer()
        self.tub = make_tub(LOST_AFTER_S, DIRECT_CONNECTIONS)
        self.tub.startService()
        port = self.listen("tcp:0:interface=127.0.0.1")
        self.port = port
        self.tub.setLocation(f"tcp:127.0.0.1:{port}")
        self.furl = server_address.parse_furl(
            self.tub.registerReference(self.introducer, "introducer")
        )
        self.nodes = [self.node(n) for n in range(3)]
        self.grids: list[Grid] = []

    def listen(self, endpoint: str) -> int:
        """Have the introducer's tub listen; returns the port."""
        self.listener = self.tub.listenOn(endpoint)
        return int(self.listener.getPortnum())

    def node(self, number: int) -> StorageNode:
        """Make a storage server that will announce itself."""
        return StorageNode(
            reactor,
            ServeSettings(
                directory=self.directory / f"node{number}",
                port="tcp:0:interface=127.0.0.1",
                durability="none",
                introducers={"test": self.furl},
                nickname=f"node {number}",
            ),
        )

    def tearDown(self) -> Deferred[Any]:  # type: ignore[override]
        return Deferred.fromCoroutine(self._tear_down())

    async def _tear_down(self) -> None:
        await gatherResults([grid.close() for grid in self.grids])
        await gatherResults([node.stop() for node in self.nodes])
        await self.tub.stopService()
        await flushEventualQueue()

    def client(self, *furls: Furl) -> Path:
        """Make a client's directory."""
        addresses = tuple(IntroducerAddress(f"i{n}", each) for n, each in enumerate(furls))
        create_client(
            self.directory / "client",
            params=Params(2, 3),
            happy=3,
            files={INTRODUCERS_NAME: Introducers(addresses).as_text()},
        )
        return self.directory / "client"

    async def open(self, client: Path, **options: Any) -> Grid:
        """Open the client's grid."""
        grid = await Grid.open(reactor, client, **options)
        self.grids.append(grid)
        return grid

    async def announced(self, count: int) -> None:
        """Wait until the introducer has heard of so many."""
        while len(self.introducer.known) < count:
            await deferLater(reactor, 0.01)

    def test_servers_are_found_and_remembered(self) -> Deferred[None]:
        """
        A put waits for the servers it needs, and begins when they appear; with the introducer gone, and
        another that has the wrong key, the next client finds the file all the same.
        """
        return Deferred.fromCoroutine(self._test_found_and_remembered())

    async def _test_found_and_remembered(self) -> None:
        client = self.client(self.furl, Furl(b"w" * 20, self.furl.hints, "introducer"))
        grid = await self.open(client)
        putting = grid.put(b"some bytes " * 1000)
        await gatherResults([node.start() for node in self.nodes])
        result = await putting
        self.assertEqual(sorted(result.shares_placed.values()), ["node 0", "node 1", "node 2"])
        self.assertEqual(
            {status.server_id for status in await grid.status()},
            {node.server_id for node in self.nodes},
        )
        first, second = grid.introducers
        self.assertEqual((first.connected, first.servers), (True, 3))
        self.assertFalse(second.connected)
        self.assertIn("does not have its key", second.reason or "")
        self.assertIn(second.reason or "", grid.warnings[0])
        await grid.close()

        await self.tub.stopListeningOn(self.listener)
        grid = await self.open(client)
        into = BytesIO()
        await grid.get(result.cap, into)
        self.assertEqual(into.getvalue(), b"some bytes " * 1000)
        checked = await grid.check(result.cap)
        self.assertTrue(checked.healthy)
        self.assertIn(
            "is unreachable: no server listens there; the 3 servers", "\n".join(grid.warnings)
        )

    def test_a_stale_memory(self) -> Deferred[None]:
        """
        A get that begins with remembered servers, none of which has the file, asks those that the
        introducer names in the end.
        """
        return Deferred.fromCoroutine(self._test_stale_memory())

    async def _test_stale_memory(self) -> None:
        await gatherResults([node.start() for node in self.nodes])
        await self.announced(3)
        client = self.client(self.furl)
        grid = await self.open(client)
        stored = await grid.put(b"z" * 3000)
        await grid.close()
        dead = {
            "service-name": "storage",
            "anonymous-storage-NURLs": [f"pb://{'A' * 43}@127.0.0.1:1/x#v=1"],
        }
        gone = [Announcement(f"gone{n}", dead) for n in range(2)]
        write_cache(client / "private" / cache_name("i0"), gone)

        self.introducer.hesitates = True
        grid = await self.open(client)
        more_servers = grid._readiness.more_servers

        def asked_for_more() -> Any:
            self.introducer.tell()
            return more_servers()

        self.patch(grid._readiness, "more_servers", asked_for_more)
        self.assertEqual(await grid.read(stored.cap), b"z" * 3000)
        self.assertFalse(self.introducer.hesitates)

    def test_wrong_names(self) -> Deferred[None]:
        """A fURL of something else at that address is said to be none, and there are no servers."""
        return Deferred.fromCoroutine(self._test_wrong_names())

    async def _test_wrong_names(self) -> None:
        other = server_address.parse_furl(self.tub.registerReference(_Other(), "other"))
        client = self.client(Furl(self.furl.tub_id, self.furl.hints, "nonsense"), other)
        grid = await self.open(client)
        with self.assertRaises(UnhappyError) as caught:
            await grid.put(b"x" * 1000)
        self.assertIn("knows nothing under the fURL's last part", str(caught.exception))
        self.assertIn("the server there is not an introducer", str(caught.exception))
        self.flushLoggedErrors()

    def test_announced_again(self) -> Deferred[None]:
        """A server that comes back has a greater number, the same id and seed, and a new address."""
        return Deferred.fromCoroutine(self._test_announced_again())

    async def _test_announced_again(self) -> None:
        client = self.client(self.furl)
        grid = await self.open(client, wait_for=1)
        await self.nodes[0].start()
        (before,) = await self.statuses(grid, 1)
        await self.nodes[0].stop()
        self.nodes[0] = self.node(0)
        await self.nodes[0].start()
        await self.announced(2)
        while True:
            (after,) = await grid.status()
            if after.address != before.address:
                break
        self.assertEqual(after.server_id, before.server_id)
        self.assertTrue(after.reachable)

    async def statuses(self, grid: Grid, count: int) -> Any:
        """Wait until so many servers are known."""
        while len(found := await grid.status()) < count:
            await deferLater(reactor, 0.01)
        return found


class _Other(RealIntroducer):
    """Something that has other methods."""

    def remote_get_version(self) -> dict[bytes, Any]:
        """Fail."""
        raise AttributeError("no such method")
