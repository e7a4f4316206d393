"""
What a port listens with: the first bytes of a connection tell Foolscap from TLS.

    GET /id/            Foolscap, which begins in the clear and goes over to TLS later
    anything else       TLS, and GBS inside

Fewer than 8 bytes within 30 seconds are neither. Whatever was looked at is handed on. How many connections
there may be, and who makes room for whom, decides ``crowd``; here it is done.

What strangers say costs the server more than them: a millisecond for TLS's handshake, as much for a
kilobyte of small requests. So they are heard in turn: one piece in each turn of the reactor, in which
everybody who has shown the secret is heard as well, and the address first that has fewest waiting. Who
comes from elsewhere than a flood waits for one piece of it. Where nobody else waits, nobody does.

Source: the format reference, storage protocols, section 3.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.internet.protocol import Factory, connectionDone
from twisted.internet.protocol import Protocol as TwistedProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.reactor import memory
from pipegrid.reactor.alarm import Alarm
from pipegrid.reactor.together import Waiters
from pipegrid.server.crowd import Crowd
from pipegrid.server.turns import FairQueue
from pipegrid.storage.uploads.standing import address_of

if TYPE_CHECKING:
    from twisted.internet.interfaces import IOpenSSLServerConnectionCreator

    from pipegrid.server.gbs.connection import GbsConnection
    from pipegrid.server.gbs.site import GbsSite

log = Logger()

FOOLSCAP_BEGINS = b"GET /id/"
PATIENCE_S = 30.0
TICK_S = 5.0
MANY_ENDED = 256
"""Connections. What each leaves behind refers to itself, 20 KB with its TLS, until cycles are looked for."""


class FoolscapFactory(Protocol):
    """What makes protocols for Foolscap; ``foolscap.port.FoolscapPort`` is one."""

    def buildProtocol(self, addr: IAddress | None, on_known: Callable[[], None]) -> Any:
        """Return a protocol for a connection that asks for Foolscap, or None; see there."""


class FrontFactory(Factory):
    """
    Makes a protocol for each connection that looks at its first bytes.

    Args:
        server: what speaks GBS, inside TLS.
        contexts: for TLS.
        clock: for patience.
        foolscap: what speaks Foolscap; None: nobody does.
        crowd: how many connections there may be.
    """

    noisy = False

    def __init__(
        self,
        server: GbsSite,
        contexts: IOpenSSLServerConnectionCreator,
        clock: Any,
        foolscap: FoolscapFactory | None = None,
        crowd: Crowd[Front] | None = None,
    ) -> None:
        from pipegrid.reactor.bulktls import tls_factory

        self.clock: IReactorTime = clock
        self.connections: set[Front] = set()
        self._server = server
        self._tls = tls_factory(contexts, False, server, clock)
        self._foolscap = foolscap
        self._empty: Waiters[None] = Waiters()
        self._crowd: Crowd[Front] = Crowd() if crowd is None else crowd
        self._timer = Alarm(clock, self._tick)
        self._queue: FairQueue[Front] = FairQueue()
        self._turn = Alarm(clock, self._next_turn)
        self._ended = 0  # connections, since their memory was given back

    def buildProtocol(self, addr: IAddress | None) -> Front | None:
        """Return what will look at the first bytes, unless there is no room and nobody who can make any."""
        front = Front(self, addr)
        victim = self._crowd.enter(front, str(getattr(addr, "host", "")))
        if victim is None:
            return front
        self._server.refused += 1
        if victim is front:
            self.note_hostile(addr, "there are too many connections, all busy or just being closed")
            return None
        self.note_hostile(victim.addr, "others needed its place")
        victim.abort()
        return front

    def choose(self, first_bytes: bytes, front: Front) -> TwistedProtocol | None:
        """Return who goes on with a connection that begins like this; None: nobody."""
        if first_bytes.startswith(FOOLSCAP_BEGINS):
            if self._foolscap is None:
                return None
            chosen: TwistedProtocol | None = self._foolscap.buildProtocol(
                front.addr, front.has_shown_secret
            )
            return chosen
        inner = self._server.buildProtocol(front.addr)
        if inner is None:
            return None
        inner.on_known = front.has_shown_secret
        front.gbs = inner
        tls: TwistedProtocol = self._tls.protocol(self._tls, inner)
        return tls

    def hear_in_turn(self, connection: Front) -> None:
        """Have a connection heard: now, or when it is its turn."""
        self._server.turns.asked()
        if self._turn.is_set:
            connection.pause()
            self._queue.join(connection)
        else:
            self._turn.set(0)
            connection.hear()

    def _next_turn(self) -> None:
        if self._queue:
            connection = self._queue.next()
            self._turn.set(0)
            connection.resume()
            try:
                connection.hear()
            except Exception:
                # As the reactor does with what it hands on itself. Else the client would wait for nothing.
                log.failure("a connection failed within the server")
                connection.abort()

    def vouch(self, connection: Front) -> None:
        """A connection has shown the secret."""
        self._crowd.vouch(connection)

    def opened(self, connection: Front) -> None:
        """A connection has begun: from now on its quiet is looked at."""
        self.connections.add(connection)
        self._timer.set(TICK_S)

    def note_hostile(self, addr: IAddress | None, reason: str) -> None:
        """Write to the log why a client was turned away."""
        self._server.note_hostile(str(getattr(addr, "host", addr)), reason)

    def closed(self, connection: Front) -> None:
        """A connection is gone, and its place is free; the last one ends the wait of who stops."""
        self.connections.discard(connection)
        self._crowd.leave(connection)
        self._queue.leave(connection)
        self._give_back()
        if not self.connections:
            self._timer.stop()
            self._turn.stop()
            self._empty.fire(None)

    def stop(self) -> Deferred[None]:
        """Cut whatever is still there; fires when all is gone."""
        if not self.connections:
            return succeed(None)
        waiting = self._empty.wait()
        for connection in list(self.connections):
            connection.abort()
        return waiting

    def _give_back(self) -> None:
        """
        Have what ended connections have had go back to the system, when there were many.

        Python looks for cycles among all objects after millions of new ones, and does not count OpenSSL's
        memory, which hangs on few of them: a hundred thousand handshakes would be a gigabyte by then.
        """
        self._ended += 1
        if self._ended >= MANY_ENDED:
            self._ended = 0
            gc.collect()
            memory.give_back()

    def _tick(self) -> None:
        self._timer.set(TICK_S)
        now_s = self.clock.seconds()
        for connection in self.connections:
            connection.tick(now_s)


class Front(TwistedProtocol):
    """
    Looks at the first bytes of one connection, then hands everything on.

    Attributes:
        addr: of the client.
        place: what its address counts as.
        gbs: what speaks HTTP on it, if that is what it came for.
    """

    def __init__(self, factory: FrontFactory, addr: IAddress | None) -> None:
        self.addr = addr
        self.place = address_of(str(getattr(addr, "host", "")))
        self.gbs: GbsConnection | None = None
        self._front = factory
        self._heard = False  # since the last tick
        self._heard_s = factory.clock.seconds()
        self._seen = b""
        self._inner: TwistedProtocol | None = None
        self._timer: IDelayedCall | None = None
        self._turned_away = False
        self._waits = False  # for its turn
        self._direct: TwistedProtocol | None = None  # who is told at once, and always

    def connectionMade(self) -> None:
        """Begin to wait for the first bytes."""
        self._front.opened(self)
        self._timer = self._front.clock.callLater(PATIENCE_S, self._waited_too_long)

    def dataReceived(self, data: bytes) -> None:
        """Hand on, once it is known to whom."""
        if self._direct is not None:
            self._heard = True
            self._direct.dataReceived(data)
            return
        if self._turned_away:
            return
        self._seen += data
        if self._waits or (self._inner is None and len(self._seen) < len(FOOLSCAP_BEGINS)):
            return
        self._stop_waiting()
        self._waits = True
        self._front.hear_in_turn(self)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Tell whoever it was handed to."""
        self._stop_waiting()
        self._front.closed(self)
        inner, self._inner = self._inner, None
        self._direct = None
        if inner is not None:
            inner.connectionLost(reason)

    def has_shown_secret(self) -> None:
        """Whoever it was handed to has seen the server's secret."""
        self._front.vouch(self)
        if self._inner is not None and not self._waits:
            self._direct = self._inner

    def tick(self, now_s: float) -> None:
        """Note whether something has come."""
        if self._heard:
            self._heard = False
            self._heard_s = now_s

    def quiet_s(self) -> float:
        """Return for how long it was of no use; HTTP knows exactly."""
        if self.gbs is not None:
            return self.gbs.quiet_s()
        return 0.0 if self._heard else self._front.clock.seconds() - self._heard_s

    def abort(self) -> None:
        """Cut the connection, without sending what waits to be sent."""
        transport: Any = self.transport
        transport.abortConnection()

    def pause(self) -> None:
        """Read nothing until it is its turn."""
        transport: Any = self.transport
        transport.pauseProducing()

    def resume(self) -> None:
        """Read on: its turn has come, after ``pause``."""
        transport: Any = self.transport
        transport.resumeProducing()

    def hear(self) -> None:
        """Hand on what was said."""
        self._waits = False
        if self._inner is None:
            self._begin()
        if self._inner is not None:
            seen, self._seen = self._seen, b""
            self._inner.dataReceived(seen)

    def _begin(self) -> None:
        inner = self._front.choose(self._seen, self)
        if inner is None:
            self._turn_away()
            return
        transport: Any = self.transport
        with suppress(AttributeError, OSError):
            # Answers are short and many, and none should wait for the acknowledgement of the one before.
            transport.setTcpNoDelay(True)
        self._inner = inner
        inner.makeConnection(transport)
        if self.gbs is None:
            self._direct = inner

    def _waited_too_long(self) -> None:
        self._timer = None
        self._front.note_hostile(self.addr, "it said nothing for half a minute")
        self._turn_away()

    def _turn_away(self) -> None:
        self._turned_away = True
        self.abort()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
