"""The proxy counts round trips, and PipeGrid's own servers cost as many as they should."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
from misc.command import command, environment
from misc.speedtest.processes import LOOPBACK, Servers
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.error import ProcessDone
from twisted.internet.protocol import Factory, ProcessProtocol, Protocol
from twisted.protocols.wire import Echo
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from pipegrid import Grid
from pipegrid.core.encoding_parameters import Params
from pipegrid.speedtest.child_processes import make_client
from pipegrid.wire.server_address import Furl, Nurl
from tests.interop.round_trips import Counting, RoundTrips

SERVERS = 3
ATTEMPTS = 4
PARAMS = Params(2, SERVERS)


class Talker(Protocol):
    """Says words, so many at a time, and waits for the echo before the next."""

    def __init__(self, words: int, at_a_time: int) -> None:
        self.done: Deferred[None] = Deferred()
        self._words = words
        self._at_a_time = at_a_time
        self._owed = 0

    def talk(self) -> Deferred[None]:
        """Begin."""
        self._owed = min(self._at_a_time, self._words)
        for _ in range(self._owed):
            cast(Any, self.transport).write(b"w")
        return self.done

    def dataReceived(self, data: bytes) -> None:
        self._owed -= len(data)
        self._words -= len(data)
        if not self._words:
            self.done.callback(None)
        elif not self._owed:
            self.talk()


class CounterTests(TestCase):
    """``RoundTrips``."""

    async def test_what_waits_costs_round_trips(self) -> None:
        """Six words said at once cost one, two by two three, and one after the other six."""
        from twisted.internet import reactor as installed_reactor

        reactor: Any = installed_reactor
        trips = RoundTrips(reactor)
        echo = reactor.listenTCP(0, Factory.forProtocol(Echo), interface=LOOPBACK)
        port = trips.listen(LOOPBACK, echo.getHost().port)
        for at_a_time, expected in ((6, 1), (2, 3), (1, 6)):
            endpoint = TCP4ClientEndpoint(reactor, LOOPBACK, port)
            talker = await connectProtocol(endpoint, Talker(6, at_a_time))
            _, counted = await trips.count(talker.talk)
            self.assertEqual(counted, expected)
            cast(Any, talker.transport).abortConnection()
        await trips.close()
        await echo.stopListening()


class CommandProcess(ProcessProtocol):
    """
    A command, and how deep it was when it printed its result and when it ended.

    Attributes:
        printed: what, and at which depth the first of it.
    """

    def __init__(self, trips: RoundTrips) -> None:
        self.ended: Deferred[tuple[int, int]] = Deferred()
        self.printed = b""
        self.told = b""
        self._trips = trips
        self._printed_at = -1

    def outReceived(self, data: bytes) -> None:
        if not self.printed:
            self._printed_at = self._trips.depth
        self.printed += data

    def errReceived(self, data: bytes) -> None:
        self.told += data

    def processEnded(self, reason: Failure) -> None:
        if reason.check(ProcessDone):
            self.ended.callback((self._printed_at, self._trips.depth))
        else:
            self.ended.errback(AssertionError(f"{reason.value}: {self.told!r}"))


class ColdCommandTests(TestCase):
    """A ``pipegrid put`` as a process of its own, which knows nobody when it begins."""

    timeout = 300

    async def test_https(self) -> None:
        """TCP, TLS, and the shares with their answers: three round trips, and the process ends."""
        # The proxy accepts connections at once: that round trip is never counted.
        await self.check(lambda servers: servers.addresses, 2)

    async def test_foolscap(self) -> None:
        """There are more before the shares are stored, and none behind."""
        await self.check(lambda servers: servers.furls)

    async def check(
        self, addresses_of: Callable[[Servers], Sequence[Nurl | Furl]], budget: int | None = None
    ) -> None:
        """Run the command behind the proxy; at its end it must be as deep as when it printed the cap."""
        from twisted.internet import reactor as installed_reactor

        reactor: Any = installed_reactor
        directory = Path(self.mktemp()).absolute()
        trips = RoundTrips(reactor)
        scratch = directory / "servers"
        scratch.mkdir(parents=True)
        try:
            with Servers(SERVERS, durability="none", scratch=scratch) as servers:
                behind = [self.behind(trips, each) for each in addresses_of(servers)]
                make_client(directory / "client", behind, PARAMS, SERVERS)
                # A standstill of the machine may make a timer fire between two answers; never fewer.
                seen = [await self.put(reactor, trips, directory)]
                while len(seen) < ATTEMPTS and min(seen) != (budget, budget):
                    seen.append(await self.put(reactor, trips, directory))
        finally:
            await trips.close()
        printed_at, ended_at = min(seen)
        self.assertEqual(ended_at, printed_at, seen)
        if budget is not None:
            self.assertEqual(printed_at, budget, seen)

    def behind(self, trips: RoundTrips, address: Nurl | Furl) -> Nurl | Furl:
        """Return where the proxy relays to a server."""
        if isinstance(address, Nurl):
            return attrs.evolve(address, port=trips.listen(address.host, address.port))
        host, _, port = address.address.rpartition(":")
        return attrs.evolve(address, hints=(f"tcp:{LOOPBACK}:{trips.listen(host, int(port))}",))

    async def put(self, reactor: Any, trips: RoundTrips, directory: Path) -> tuple[int, int]:
        """Return the depth at which a put of fresh bytes printed the cap, and that at which it ended."""
        file = directory / "file"
        file.write_bytes(os.urandom(200))
        line = command(directory / "client", "-q", "put", str(file))

        def run() -> Deferred[tuple[int, int]]:
            process = CommandProcess(trips)
            reactor.spawnProcess(process, line[0], line, env=environment())
            return process.ended

        depths, _ = await trips.count(run)
        return cast(tuple[int, int], depths)


class PipegridTests(TestCase):
    """Three ``pipegrid serve`` processes, behind the proxy."""

    timeout = 300

    async def test_https(self) -> None:
        """A put is one round trip, a get one, or two when the shares are not where they should be."""
        from twisted.internet import reactor as installed_reactor

        reactor: Any = installed_reactor
        directory = Path(self.mktemp()).absolute()
        trips = RoundTrips(reactor)
        scratch = directory / "servers"
        scratch.mkdir(parents=True)
        with Servers(SERVERS, durability="none", scratch=scratch) as servers:
            addresses = [
                attrs.evolve(each, port=trips.listen(each.host, each.port))
                for each in servers.addresses
            ]
            make_client(directory / "client", addresses, PARAMS, SERVERS)
            grid = await Grid.open(reactor, directory / "client")
            try:
                shares = [directory / "storage" / "shares" for directory in servers.directories]
                counting = Counting(trips, grid, shares)
                for operation, budget in (
                    (counting.put, 1),
                    (counting.get, 1),
                    (counting.get_elsewhere, 2),
                ):
                    found = await counting.fewest(operation, budget)
                    self.assertEqual(found, budget, operation.__name__)
            finally:
                await grid.close()
                await trips.close()
