"""
Seven small writes over Perspective Broker: one round trip instead of seven.

Run it: ``python docs/examples/pipeline_callremote.py``. The same ``store`` works with a Foolscap
reference, for that has the same ``callRemote``. The connection here lives in memory and takes 100 ms
there and back on a clock that the program turns, so the figures are exact and the run takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.spread import pb

from pipegrid import Pipeline

ROUND_TRIP_S = 0.1
PIECES = [b"header", b"block" * 14, b"tree 1", b"tree 2", b"chain", b"UEB" * 100, b"close"]


class Share(pb.Root):
    """What the server offers: a place to write to."""

    def __init__(self) -> None:
        self.data = bytearray()

    def remote_write(self, offset: int, piece: bytes) -> None:
        """Refuse to leave holes, so that the order of writes matters."""
        if offset > len(self.data):
            raise pb.Error(f"there is nothing before {offset} yet")
        self.data[offset:] = piece


async def store_one_by_one(share: Any, pieces: Sequence[bytes]) -> None:
    """Wait for each answer before the next write: a round trip each."""
    offset = 0
    for piece in pieces:
        await share.callRemote("write", offset, piece)
        offset += len(piece)


async def store_pipelined(share: Any, pieces: Sequence[bytes]) -> None:
    """Wait only while 50 kB are unanswered, and once at the end."""
    pipeline = Pipeline(50_000)
    offset = 0
    try:
        for piece in pieces:
            await pipeline.add(len(piece), share.callRemote, "write", offset, piece)
            offset += len(piece)
        await pipeline.flush()
    except BaseException:
        await pipeline.abort()  # a write failed, or we were cancelled: leave nothing in flight
        raise


class Wire(StringTransport):
    """One direction of a connection: bytes arrive at the other end half a round trip later."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.receiver = Protocol()

    def write(self, data: bytes) -> None:
        """Send."""
        self.clock.callLater(ROUND_TRIP_S / 2, self.receiver.dataReceived, data)


def connect(clock: Clock, root: pb.Root) -> Deferred[Any]:
    """Join a client to a server that offers root; fires with the client's reference to it."""
    client_factory = pb.PBClientFactory()
    client = client_factory.buildProtocol(None)
    server = pb.PBServerFactory(root).buildProtocol(None)
    to_server, to_client = Wire(clock), Wire(clock)
    to_server.receiver, to_client.receiver = server, client
    client.makeConnection(to_server)
    server.makeConnection(to_client)
    reference: Deferred[Any] = client_factory.getRootObject()
    return reference


def round_trips(
    store: Callable[[Any, Sequence[bytes]], Coroutine[Deferred[Any], Any, None]],
) -> tuple[float, bytes]:
    """Store all pieces; return how many round trips that took, and what the server has then."""
    clock, share = Clock(), Share()
    references: list[Any] = []
    connect(clock, share).addCallback(references.append)
    while not references:
        clock.advance(ROUND_TRIP_S / 2)

    began = clock.seconds()
    stored = Deferred.fromCoroutine(store(references[0], PIECES))
    failures: list[Any] = []
    stored.addErrback(failures.append)
    while not stored.called:
        clock.advance(ROUND_TRIP_S / 2)
    if failures:
        failures[0].raiseException()
    return (clock.seconds() - began) / ROUND_TRIP_S, bytes(share.data)


def main() -> None:
    """Compare."""
    for store in (store_one_by_one, store_pipelined):
        trips, data = round_trips(store)
        print(f"{store.__name__}: {trips:.1f} round trips for {len(data)} bytes")


if __name__ == "__main__":
    main()
