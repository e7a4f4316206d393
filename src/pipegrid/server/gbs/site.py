"""
The GBS server's connections together: their common clock, what is logged of them, and their end.

They come from ``front``, which lets in only so many, and has told TLS from Foolscap by their first bytes.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory
from twisted.logger import Logger

from pipegrid.reactor import memory
from pipegrid.reactor.alarm import Alarm
from pipegrid.reactor.together import Waiters
from pipegrid.server.gbs.connection import GbsConnection
from pipegrid.server.turns import FairTurns

if TYPE_CHECKING:
    from pipegrid.server.gbs.service import GbsService

TICK_S = 5.0
GRACE_S = 10.0
_LINES_PER_TICK = 20
MANY = 128
"""Connections. Each may hold 128 KiB of share data; what many have let go of is given back to the system."""

log = Logger()


class GbsSite(Factory):
    """
    Makes a GbsConnection for every client.

    Args:
        clock: for timeouts.

    Attributes:
        connections: those that are open.
        accepted: how many there have been.
        refused: how many, on the whole port, were turned away or had to make room.
        turns: whose turn it is.
    """

    noisy = False

    def __init__(self, service: GbsService, clock: IReactorTime) -> None:
        self.service = service
        self.connections: set[GbsConnection] = set()
        self.accepted = 0
        self.refused = 0
        self.turns: FairTurns[GbsConnection] = FairTurns(clock)
        self._most = 0  # connections, since memory was given back
        self._clock = clock
        self._ready: list[GbsConnection] = []
        self._timer = Alarm(clock, self._tick)
        self._sending = Alarm(clock, self._send_ready)
        self._aborting = Alarm(clock, self._abort_all)
        self._lines_left = _LINES_PER_TICK
        self._lines_dropped = 0
        self._stopping: Waiters[None] | None = None

    def __repr__(self) -> str:
        return f"<GbsSite with {len(self.connections)} connections>"

    def buildProtocol(self, addr: IAddress | None) -> GbsConnection | None:
        """Return a connection, unless this is the end."""
        if self._stopping is not None:
            return None
        self.accepted += 1
        return GbsConnection(self, self.service, self.seconds())

    def seconds(self) -> float:
        return self._clock.seconds()

    def stop(self) -> Deferred[None]:
        """Let every connection finish what it has begun, for 10 s at most; fires when all are gone."""
        if self._stopping is None:
            self._stopping = Waiters()
            for connection in list(self.connections):
                connection.drain()
            if self.connections:
                self._aborting.set(GRACE_S)
        stopped = self._stopping.wait()
        self._look_stopped()
        return stopped

    # For connections.

    def connected(self, connection: GbsConnection) -> None:
        self.connections.add(connection)
        self._most = max(self._most, len(self.connections))
        self._timer.set(TICK_S)

    def disconnected(self, connection: GbsConnection) -> None:
        self.connections.discard(connection)
        if not self.connections and self._timer.is_set:
            self._timer.stop()
            self._tidy()
        self._look_stopped()

    def has_ready(self, connection: GbsConnection) -> None:
        """Have ``send_ready`` called once, soon: shares become durable by the dozen."""
        self._ready.append(connection)
        self._sending.set(0)

    def note_hostile(self, peer: str, reason: str) -> None:
        """Write to the log why a client was turned away, but not without end."""
        if self._lines_left:
            self._lines_left -= 1
            log.info("turned {peer} away: {reason}", peer=peer, reason=reason)
        else:
            self._lines_dropped += 1

    # Time.

    def _send_ready(self) -> None:
        ready, self._ready = self._ready, []
        for connection in dict.fromkeys(ready):
            connection.send_ready()

    def _tick(self) -> None:
        self._lines_left = _LINES_PER_TICK
        if self._lines_dropped:
            log.info("turned away {count} more", count=self._lines_dropped)
            self._lines_dropped = 0
        self._tidy()
        now_s = self.seconds()
        for connection in list(self.connections):
            connection.tick(now_s)
        if self.connections:
            self._timer.set(TICK_S)

    def _tidy(self) -> None:
        self.service.tidy()
        if self._most >= MANY and len(self.connections) <= self._most // 4:
            self._most = len(self.connections)
            gc.collect()  # connections and their TLS refer to each other
            memory.give_back()

    def _abort_all(self) -> None:
        for connection in list(self.connections):
            connection.abort()

    def _look_stopped(self) -> None:
        if self._stopping is not None and not self.connections:
            self._aborting.stop()
            self._stopping.fire(None)
