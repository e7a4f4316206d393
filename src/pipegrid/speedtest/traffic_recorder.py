"""Records one upload as seen on the wire: how many bytes passed to and from each server, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from zope.interface import directlyProvides, providedBy

from pipegrid.speedtest.run_results import DOWN, UP, Burst

MERGED_S = 0.0005
"""Bytes that follow within this time after a burst's first byte, with equal server and direction, join it."""
MAX_BURSTS = 4000

ANSWER_BYTES = 100
"""The assumed size of a Foolscap answer, since its real size is not reported."""

HostPort = tuple[str, int]


class Recorder:
    """Records bursts between ``start`` and ``stop``; times count from the start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None
        self._bursts: list[Burst] = []

    def start(self) -> None:
        """Drop earlier bursts, and record from now on."""
        self._began, self._bursts = self._clock(), []

    def stop(self) -> tuple[Burst, ...]:
        """Stop recording; return the bursts in the order of time."""
        self._began = None
        return tuple(self._bursts)

    def note(self, server: str, direction: str, size_bytes: int) -> None:
        """
        Record bytes that pass now. They join a burst of the same server and direction that began within
        ``MERGED_S``; bursts beyond ``MAX_BURSTS`` are dropped.
        """
        if self._began is None or not size_bytes:
            return
        at_s = self._clock() - self._began
        for place in range(len(self._bursts) - 1, -1, -1):
            last = self._bursts[place]
            if at_s - last.at_s > MERGED_S:
                break
            if (last.server, last.direction) == (server, direction):
                self._bursts[place] = Burst(
                    server, last.at_s, direction, last.size_bytes + size_bytes
                )
                return
        if len(self._bursts) < MAX_BURSTS:
            self._bursts.append(Burst(server, at_s, direction, size_bytes))


class RecordingReactor:
    """
    A reactor that records its TCP connections; everything else is delegated to the real reactor.

    Connections are recorded below TLS, so that every byte counts, and measured clients are not slowed down.
    Foolscap makes its own connections; for them, the requests in a trace are used instead (``from_spans``).

    Args:
        names: names of servers by the host and port of their connections; other connections are not recorded.
    """

    def __init__(self, reactor: Any, recorder: Recorder, names: Mapping[HostPort, str]) -> None:
        self._reactor = reactor
        self._recorder = recorder
        self._names = names
        directlyProvides(self, providedBy(reactor))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reactor, name)

    def connectTCP(self, host: str, port: int, factory: Any, *more: Any, **named: Any) -> Any:
        """Connect, and record the bytes of the connection."""
        server = self._names.get((host, port))
        if server is not None:
            factory = _NotingFactory(factory, self._recorder, server)
        return self._reactor.connectTCP(host, port, factory, *more, **named)


class _NotingFactory(WrappingFactory):
    """Wraps a factory; records the bytes of each connection that the factory's protocols serve."""

    noisy = False

    def __init__(self, wrapped: Any, recorder: Recorder, server: str) -> None:
        super().__init__(wrapped)
        self.recorder = recorder
        self.server = server

    def buildProtocol(self, addr: Any) -> Any:
        """Wrap the protocol, unless the factory returned none."""
        inner = self.wrappedFactory.buildProtocol(addr)
        wrapper: Any = _Noting
        return None if inner is None else wrapper(self, inner)


class _Noting(ProtocolWrapper):
    """One connection, with all its bytes recorded."""

    factory: _NotingFactory

    def dataReceived(self, data: bytes) -> None:
        self.factory.recorder.note(self.factory.server, DOWN, len(data))
        super().dataReceived(data)

    def write(self, data: bytes) -> None:
        self.factory.recorder.note(self.factory.server, UP, len(data))
        super().write(data)

    def writeSequence(self, data: Iterable[bytes]) -> None:
        """Record the sizes of the pieces."""
        pieces = list(data)
        self.factory.recorder.note(self.factory.server, UP, sum(map(len, pieces)))
        super().writeSequence(pieces)


def from_spans(
    events: Iterable[Mapping[str, Any]], since_us: float, until_us: float = math.inf
) -> tuple[Burst, ...]:
    """
    Return bursts computed from the allocations and writes in a trace.

    Args:
        events: as from ``Tracer.events``.
        since_us, until_us: spans that began outside these times are left out; times in bursts count from
            ``since_us``.
    """
    rows: dict[int, str] = {}
    bursts: list[Burst] = []
    for event in events:
        if event["ph"] == "M":
            rows[event["pid"]] = event["args"]["name"]
        elif event["name"] in ("allocate", "write") and since_us <= event["ts"] <= until_us:
            server = rows[event["pid"]]
            began_s = (event["ts"] - since_us) / 1e6
            size = event["args"]["bytes"] if event["name"] == "write" else ANSWER_BYTES
            bursts.append(Burst(server, began_s, UP, size))
            bursts.append(Burst(server, began_s + event["dur"] / 1e6, DOWN, ANSWER_BYTES))
    return tuple(sorted(bursts, key=lambda burst: burst.at_s)[:MAX_BURSTS])
