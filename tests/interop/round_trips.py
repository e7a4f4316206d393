"""
Round trips of real processes, counted at a proxy, exactly and whatever the machine is doing.

The proxy passes on at once what clients send, and *holds* what servers answer until nobody has sent anything
for a while; then it hands over all of it. So a client learns nothing until it has said all that it can say
unasked, as on a line whose round trip is endless. Each hand-over gives it the chance to say more, and what it
says then is one round trip deeper. When an operation ends, the deepest answer that had been handed over is
what it cost. The client runs in the same reactor, so that both wait, or neither does, for a busy machine.

Run this module's tests with ``make interop``: Tahoe-LAFS's own storage servers, and the comparison with its
gateway in small.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, cast

from misc.speedtest import processes
from misc.speedtest.peers.contest import TINY
from misc.speedtest.peers.nodes import FOOLSCAP, HTTPS, StorageNodes, servers_file
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid import Grid
from pipegrid.core import base32
from pipegrid.core.caps import Cap, ChkCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.hashes import storage_index
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME

QUIET_S = 0.3
QUIET_TURNS = 5
SERVERS = 5
PARAMS = Params(2, SERVERS)
ATTEMPTS = 5
LOOPBACK = processes.LOOPBACK


class RoundTrips:
    """
    All connections of a client to its servers, and how many round trips deep it is.

    Args:
        quiet_s: how long nobody has sent anything before answers are handed over.

    Attributes:
        depth: of the deepest answer that the client knows.
        holding: whether answers are held; if not, they pass at once and nothing is counted.
    """

    def __init__(self, reactor: Any, quiet_s: float = QUIET_S) -> None:
        self.depth = 0
        self.holding = False
        self._quiet_s = quiet_s
        self._reactor = reactor
        self._held: list[tuple[Callable[[], None], int]] = []
        self._timer: IDelayedCall | None = None
        self._ports: list[Any] = []
        self.connections: set[Protocol] = set()

    def listen(self, host: str, port: int) -> int:
        """Relay to a server; returns the port to connect to."""
        target = TCP4ClientEndpoint(self._reactor, host, port)

        def near(_address: object) -> Near:
            return Near(self, target)

        factory = Factory()
        factory.noisy = False
        factory.buildProtocol = near  # type: ignore[method-assign,assignment]
        listening = self._reactor.listenTCP(0, factory, interface=LOOPBACK)
        self._ports.append(listening)
        return cast(int, listening.getHost().port)

    async def count(self, operation: Callable[[], Deferred[Any]]) -> tuple[Any, int]:
        """Return what an operation fires with, and how many round trips it took."""
        self.depth, self.holding = 0, True
        for each in self.connections:
            if isinstance(each, Near):
                each.depth = 0
        try:
            result = await operation()
            return result, self.depth
        finally:
            self.holding = False
            self._hand_over()

    async def close(self) -> None:
        """Listen no more, and close all connections."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        for port in self._ports:
            await port.stopListening()
        for each in list(self.connections):
            cast(Any, each.transport).abortConnection()

    # For the connections.

    def sent(self) -> None:
        """A client has sent something: it may have more to say."""
        self._wait()

    def answered(self, hand_over: Callable[[], None], depth: int) -> None:
        """A server has sent something, or closed, which the client could not know before."""
        if not self.holding:
            hand_over()
            return
        self._held.append((hand_over, depth))
        self._wait()

    def _wait(self) -> None:
        if not self.holding:
            return
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = self._reactor.callLater(self._quiet_s, self._quiet, QUIET_TURNS)

    def _quiet(self, turns: int) -> None:
        # After a standstill of the machine a timer is late before sockets are read: look at them first.
        if turns:
            self._timer = self._reactor.callLater(0, self._quiet, turns - 1)
        else:
            self._hand_over()

    def _hand_over(self) -> None:
        held, self._held = self._held, []
        self.depth = max([self.depth, *(depth for _, depth in held)])
        for hand_over, _ in held:
            hand_over()


class Near(Protocol):
    """
    A client's connection.

    Attributes:
        depth: of what the client knew when it last sent something here.
        is_open: whether the client has not closed it.
    """

    def __init__(self, trips: RoundTrips, target: TCP4ClientEndpoint) -> None:
        self.depth = 0
        self._trips = trips
        self._target = target
        self._far: Far | None = None
        self._early: list[bytes] = []
        self.is_open = False

    def connectionMade(self) -> None:
        """Connect to the server, too."""
        self.is_open = True
        self._trips.connections.add(self)
        cast(Any, self.transport).setTcpNoDelay(True)
        connecting = self._target.connect(Factory.forProtocol(lambda: Far(self._trips, self)))
        connecting.addCallbacks(self._connected, lambda _: self.end())

    def _connected(self, far: Any) -> None:
        self._far = far
        for data in self._early:
            far.transport.write(data)
        if not self.is_open:
            far.transport.loseConnection()

    def dataReceived(self, data: bytes) -> None:
        """The client says something, knowing what it knows."""
        self.depth = max(self.depth, self._trips.depth)
        self._trips.sent()
        if self._far is None:
            self._early.append(data)
        else:
            cast(Any, self._far.transport).write(data)

    def hand_over(self, data: bytes) -> None:
        """Let the client know what its server has said."""
        if self.is_open:
            cast(Any, self.transport).write(data)

    def end(self) -> None:
        """The server is gone."""
        if self.is_open:
            cast(Any, self.transport).loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The client is gone."""
        self.is_open = False
        self._trips.connections.discard(self)
        if self._far is not None:
            cast(Any, self._far.transport).loseConnection()


class Far(Protocol):
    """The connection to the server that belongs to it."""

    def __init__(self, trips: RoundTrips, near: Near) -> None:
        self._trips = trips
        self._near = near

    def connectionMade(self) -> None:
        """It is to be closed in the end."""
        self._trips.connections.add(self)
        cast(Any, self.transport).setTcpNoDelay(True)

    def dataReceived(self, data: bytes) -> None:
        """The server answers what it was asked."""
        self._trips.answered(lambda: self._near.hand_over(data), self._near.depth + 1)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The server is gone."""
        self._trips.connections.discard(self)
        if self._near.is_open:
            self._trips.answered(self._near.end, self._near.depth + 1)


class Counting:
    """
    A client whose connections to its servers are up, and lead through the proxy.

    Args:
        shares: directories in which the servers keep their shares.
    """

    def __init__(self, trips: RoundTrips, grid: Grid, shares: Sequence[Path]) -> None:
        self._trips = trips
        self._grid = grid
        self._shares = shares
        self._servers = len(shares)
        self._rng = random.Random(len(shares))

    async def fewest(self, operation: Callable[[], Coroutine[Any, Any, int]], budget: int) -> int:
        """Return the fewest round trips of some attempts; none more is made once there are as few."""
        fewest = await operation()
        for _ in range(ATTEMPTS - 1):
            if fewest <= budget:
                break
            fewest = min(fewest, await operation())
        return fewest

    async def put(self) -> int:
        """Return how many round trips a put takes that is on all servers."""
        await self._warm()
        data = self._rng.randbytes(200)
        stored, trips = await self._trips.count(lambda: self._grid.put(data, happy=self._servers))
        assert len(stored.shares_placed) == self._servers, stored
        return trips

    async def get(self) -> int:
        """Return how many round trips a get takes whose shares are where the uploader puts them."""
        await self._warm()
        data = self._rng.randbytes(200)
        stored = await self._grid.put(data, happy=self._servers)
        return await self._get(data, stored.cap)

    async def get_elsewhere(self) -> int:
        """Return how many it takes when each share is on another server than that."""
        await self._warm()
        data = self._rng.randbytes(200)
        stored = await self._grid.put(data, happy=self._servers)
        self._move(stored.cap)
        return await self._get(data, stored.cap)

    async def _get(self, data: bytes, cap: Cap) -> int:
        got, trips = await self._trips.count(lambda: self._grid.read(cap))
        assert got == data, "wrong bytes came back"
        return trips

    async def _warm(self) -> None:
        """Have all connections up: one that idled is closed by its server."""
        await self._grid.status()
        data = self._rng.randbytes(200)
        stored = await self._grid.put(data, happy=self._servers)
        assert await self._grid.read(stored.cap) == data

    def _move(self, cap: Cap) -> None:
        assert isinstance(cap, ChkCap)
        name = base32.encode(storage_index(cap.key))
        found = [path for shares in self._shares for path in (shares / name[:2] / name).iterdir()]
        contents = [(path, path.read_bytes()) for path in found]
        for path in found:
            path.unlink()
        for (path, content), (other, _) in zip(contents, contents[1:] + contents[:1], strict=True):
            other.with_name(path.name).write_bytes(content)


class TahoeTests(TestCase):
    """Five storage servers of Tahoe-LAFS, behind the proxy."""

    timeout = 300

    async def test_https(self) -> None:
        """A put is one round trip, a get one, or two when the shares are not where they should be."""
        await self.check(HTTPS, put=1, get=1, elsewhere=2)

    async def test_foolscap(self) -> None:
        """A put is two round trips; so is a get, wherever the shares are: references come first."""
        await self.check(FOOLSCAP, put=2, get=2, elsewhere=2)

    async def check(self, protocol: str, put: int, get: int, elsewhere: int) -> None:
        """Count, and compare with the budget."""
        from twisted.internet import reactor

        root = Path(self.mktemp()).absolute()
        trips = RoundTrips(reactor)
        with StorageNodes(root, SERVERS) as servers:
            addresses = [
                each.at(trips.listen(LOOPBACK, each.nurl.port)) for each in servers.addresses()
            ]
            create_client(
                root / "client",
                params=PARAMS,
                happy=SERVERS,
                files={SERVERS_NAME: servers_file(addresses, protocol)},
            )
            grid = await Grid.open(cast(Any, reactor), root / "client")
            try:
                counting = Counting(trips, grid, [node.shares for node in servers.nodes])
                for operation, budget in (
                    (counting.put, put),
                    (counting.get, get),
                    (counting.get_elsewhere, elsewhere),
                ):
                    found = await counting.fewest(operation, budget)
                    self.assertEqual(found, budget, f"{protocol}, {operation.__name__}")
            finally:
                await grid.close()
                await trips.close()


class PeersTests(SynchronousTestCase):
    """``misc/speedtest/peers``, in small."""

    def test_tiny(self) -> None:
        """Both clients store and fetch on the same servers; no figure is judged."""
        done = processes.run_module("misc.speedtest.peers", "--tiny", timeout_s=300.0)
        lines = [json.loads(line) for line in done.splitlines()]
        names = [f"{way} {each.name}" for each in TINY for way in ("put", "get")]
        self.assertEqual([line["scenario"] for line in lines], names)
        for line in lines:
            self.assertGreater(line["ratio"], 0)
