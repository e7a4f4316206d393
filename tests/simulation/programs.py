"""Small programs that the tests of the simulation run on its hosts."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.testing.clock import HeapClock
from pipegrid.testing.network import SimulatedNetwork, run
from pipegrid.testing.simulated_tcp import SimulatedTransport


class Recorder(Protocol):
    """Keeps what it is told, with the time; waits for amounts."""

    transport: SimulatedTransport

    def __init__(self) -> None:
        self.received = bytearray()
        self.pieces: list[tuple[float, int]] = []
        self.made_s: float | None = None
        self.lost: Failure | None = None
        self.lost_s: float | None = None
        self.over: Deferred[None] = Deferred()
        self._waiting: list[tuple[int, Deferred[float]]] = []
        self.busy = False

    def _now(self) -> float:
        return round(self.transport.socket._net.now_ns() / 1e9, 9)

    def connectionMade(self) -> None:
        self.made_s = self._now()

    def dataReceived(self, data: bytes) -> None:
        assert self.lost is None, "data after the end"
        assert not self.busy, "called from within a call of its own"
        self.received += data
        self.pieces.append((self._now(), len(data)))
        while self._waiting and self._waiting[0][0] <= len(self.received):
            self._waiting.pop(0)[1].callback(self._now())

    def connectionLost(self, reason: Failure = Failure(Exception())) -> None:  # noqa: B008
        assert self.lost is None, "lost twice"
        assert not self.busy, "called from within a call of its own"
        self.lost, self.lost_s = reason, self._now()
        self.over.callback(None)

    def when(self, size_bytes: int) -> Deferred[float]:
        """Fires with the time at which so many bytes in all have come."""
        deferred: Deferred[float] = Deferred()
        if len(self.received) >= size_bytes:
            deferred.callback(self._now())
        else:
            self._waiting.append((size_bytes, deferred))
        return deferred


class Echo(Recorder):
    """Sends everything back."""

    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        self.busy = True
        self.transport.write(data)
        self.busy = False


@implementer(IHalfCloseableProtocol)
class HalfClosing(Recorder):
    """Knows what to do when one half of the connection ends."""

    read_lost_s: float | None = None
    write_lost_s: float | None = None

    def readConnectionLost(self) -> None:
        self.read_lost_s = self._now()

    def writeConnectionLost(self) -> None:
        self.write_lost_s = self._now()


class Keeping(Factory):
    """Makes protocols of one class and keeps them."""

    def __init__(self, make: type[Recorder] = Recorder) -> None:
        self.make = make
        self.made: list[Recorder] = []

    def buildProtocol(self, addr: object) -> Recorder:
        self.made.append(self.make())
        return self.made[-1]


def pair(
    network: SimulatedNetwork, make: type[Recorder] = Recorder, server: str = "server"
) -> tuple[Recorder, Recorder]:
    """Return both ends of a connection from ``client`` to a new port of ``server``."""
    assert isinstance(network.clock, HeapClock)
    factory = Keeping(make)
    number = 1000 + len(network.log)
    network.host(server).listen(number, factory)
    near = Recorder() if make is not HalfClosing else HalfClosing()
    connecting = network.endpoint("client", server, number).connect(
        Factory.forProtocol(lambda: near)
    )
    run(network.clock, connecting)
    network.clock.advance(network.rtt_s("client", server) / 2)
    return near, factory.made[0]
