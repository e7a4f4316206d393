"""The proxy counts round trips, and PipeGrid's own servers cost as many as they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import attrs
from misc.speedtest.processes import LOOPBACK, Servers
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.protocols.wire import Echo
from twisted.trial.unittest import TestCase

from pipegrid import Grid
from pipegrid.core.params import Params
from pipegrid.speedtest.processes import make_client
from tests.interop.round_trips import Counting, RoundTrips

SERVERS = 3
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
