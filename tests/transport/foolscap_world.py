"""
A real Foolscap server and clients of it, joined by wires in memory that take their time.

Foolscap itself runs on a clock here, its queue of calls included: nothing happens until time passes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from foolscap import eventual, negotiate
from foolscap.referenceable import SturdyRef
from twisted.internet.base import DelayedCall
from twisted.internet.defer import Deferred, maybeDeferred, succeed
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.group_commit import GroupCommit
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from pipegrid.server.foolscap.broker import Governor, HeldMemory, MessageLimits, ServerBroker
from pipegrid.server.foolscap.remote_objects import FoolscapStorage
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.storage.share_store import ShareStore
from pipegrid.testing.clock import HeapClock
from pipegrid.testing.grid import InlineWorkers
from pipegrid.transport.foolscap.client import FoolscapServer, FoolscapSettings
from pipegrid.transport.foolscap.link import BOUNDS, LOST_AFTER_S
from pipegrid.wire.foolscap_broker import make_tub
from tests.storage.support import NOW
from tests.transport.contract import IDENTITY

SWISSNUM = "yergyyx6ik6krfzxcgaic6oyibvvo6t2"


class UncollectedClock(HeapClock):
    """
    A clock that is not disturbed while it puts its calls in order.

    Foolscap's references say goodbye when the collector finds them, and that takes a ``callLater``; while
    the heap is looked through, which is where the collector may come, it must not change.
    """

    def _next(self) -> DelayedCall | None:
        with _uncollected():
            return super()._next()

    def _forget(self, call: DelayedCall) -> None:
        with _uncollected():
            super()._forget(call)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the collector away for a moment."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Wire:
    """One end of a connection in memory; what is written arrives at the other end's protocol later."""

    def __init__(self, clock: Clock, latency_s: float) -> None:
        self.other: Wire
        self.protocol: Any = None
        self.cut = False
        self.silent = False
        self.sent_bytes = 0
        self._clock = clock
        self._latency_s = latency_s

    def write(self, data: bytes) -> None:
        """Send."""
        if not self.cut and not self.silent:
            self.sent_bytes += len(data)
            self._clock.callLater(self._latency_s, self.other.arrive, bytes(data))

    def arrive(self, data: bytes) -> None:
        """Receive."""
        if not self.cut:
            self.protocol.dataReceived(data)

    def loseConnection(self, reason: Any = None) -> None:
        """End the connection, at the other end too, a little later."""
        if not self.cut:
            self.cut = True
            self._clock.callLater(0, self._lost)
            self._clock.callLater(self._latency_s, self.other.loseConnection)

    def _lost(self) -> None:
        self.protocol.connectionLost(Failure(ConnectionDone()))


class MemoryConnector:
    """
    Implements ``link_model.Connector``: each connection is a pair of brokers.

    Attributes:
        wires: the clients' ends of all connections that were made.
        connecting: what the next connections are, instead of successes.
    """

    def __init__(self, world: FoolscapWorld) -> None:
        self.wires: list[Wire] = []
        self.results: list[Deferred[Any]] = []
        self._world = world
        self._tub = make_tub(LOST_AFTER_S, DIRECT_CONNECTIONS, BOUNDS)
        self._closing = False

    def connect(self) -> Deferred[Any]:
        """Connect; asking for the server by its name takes a round trip."""
        if self.results:
            return self.results.pop(0)
        world = self._world
        ours, theirs = (Wire(world.clock, world.latency_s) for _ in range(2))
        ours.other, theirs.other = theirs, ours
        reference = SturdyRef(world.furl).getTubRef()
        decision = negotiate.Negotiation().loopbackDecision()
        for wire, tub in ((ours, self._tub), (theirs, world.tub)):
            make = self._tub.brokerClass if wire is ours else world.make_broker
            wire.protocol = make(reference, decision)
            wire.protocol.setTub(tub)
        for wire in (ours, theirs):
            wire.protocol.makeConnection(wire)
        self.wires.append(ours)
        found: Deferred[Any] = ours.protocol.getYourReferenceByName(SWISSNUM)
        return found

    def close(self) -> Deferred[Any]:
        """Cut the last connection."""
        for wire in self.wires:
            wire.loseConnection()
        return succeed(None)


class FoolscapWorld:
    """
    A server on a storage directory.

    Args:
        test: whose end is the world's, and whose clock Foolscap runs on.
    """

    def __init__(self, test: SynchronousTestCase, root: Path, latency_s: float = 0.0) -> None:
        self.clock = UncollectedClock()
        self.root = root
        self.latency_s = latency_s
        self.free_bytes: int | None = 1 << 40
        self.settings = FoolscapSettings(stream_piece_bytes=64 * 1024)
        test.patch(eventual, "reactor", self.clock)
        test.patch(eventual, "_theSimpleQueue", eventual._SimpleCallQueue())
        self.store = ShareStore(
            root, clock=lambda: NOW + self.clock.seconds(), free_bytes=lambda path: self.free_bytes
        )
        test.addCleanup(self.store.close)
        durability = GroupCommit(InlineWorkers(), self.clock, "none")
        self.service = GbsService(self.store, durability, SWISSNUM)
        self.storage = FoolscapStorage(self.service)
        self.tub = make_tub(LOST_AFTER_S, DIRECT_CONNECTIONS)
        self.tub.setLocation("tcp:localhost:1")
        self.furl = self.tub.registerReference(self.storage, name=SWISSNUM)
        self.refusals: list[str] = []
        self.make_broker = partial(
            ServerBroker,
            limits=MessageLimits(HeldMemory(self.service.hold)),
            governor=Governor(self.clock, lambda: 0),
            refused=self.refusals.append,
            known=lambda: None,
        )
        self.connector: MemoryConnector

    def connect(self) -> FoolscapServer:
        """Return a new client."""
        self.connector = MemoryConnector(self)
        return FoolscapServer(IDENTITY, self.connector, self.clock, self.settings)

    def settle(self) -> None:
        """Let everything go on until nothing more happens now, or soon."""
        for _ in range(10_000):
            soon = [
                call
                for call in self.clock.getDelayedCalls()
                if call.getTime() <= self.clock.seconds() + 1.0
            ]
            if not soon:
                return
            self.clock.advance(max(0.0, soon[0].getTime() - self.clock.seconds()))
        raise AssertionError("it never comes to rest")

    def time_of(self, call: Any, *arguments: Any) -> float:
        """Return how many seconds pass until what a function returns has fired."""
        began_s = self.clock.seconds()
        ended: list[float] = []
        maybeDeferred(call, *arguments).addCallback(lambda _: ended.append(self.clock.seconds()))
        self.settle()
        return ended[0] - began_s
