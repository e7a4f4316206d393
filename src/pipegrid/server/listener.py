"""
The server's port: recognises Foolscap and TLS by the first bytes of a connection, and limits connections.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import (
    IAddress,
    IDelayedCall,
    IOpenSSLServerConnectionCreator,
    IReactorTime,
)
from twisted.internet.protocol import Factory, connectionDone
from twisted.internet.protocol import Protocol as TwistedProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.reactor import process_settings
from pipegrid.reactor.bulk_tls import tls_factory
from pipegrid.reactor.deferreds import Timer, Waiters
from pipegrid.server.connection_turns import FairQueue, FairTurns
from pipegrid.server.gbs.http_connection import GbsConnection
from pipegrid.storage.uploads.eviction import address_of

# A client is unauthenticated until it has shown the server's secret. The number of connections is limited,
# and by default at most half of them come from one address (an IPv6 address counts as its network of 2^64).
# When a limit is reached, a new connection is accepted, and another one is closed:
#
# * Usually this is the oldest unauthenticated one of the address that has most of them. So a flood does not
#   affect clients at other addresses. A client at the flood's address has as much time to show the secret as
#   the flood takes to fill all slots again.
# * If the unauthenticated ones have no more than an eighth of the slots, it is the authenticated one that has
#   been useless longest, if that is at least two seconds. Its client connects again when needed. So clients
#   that know the secret can lock out others neither by silence nor by single bytes.
# * If there is no such connection, the new one is closed.
#
# A closed connection keeps its descriptor until the reactor's next turn, and hundreds of connections may
# arrive in one turn. So while many are being closed (``MAX_CLOSING``), new ones are rejected.
#
# Many clients may share one address (NAT, Tor, a proxy): each PipeGrid client has one to three connections to
# a server, so half of the thousand are enough for more than 150 active clients. An operator whose clients all
# come from one address sets ``--max-per-address``.

MAX_CONNECTIONS = 1000
MAX_CLOSING = 128
"""The most closed connections whose descriptors are not free yet."""
QUIET_S = 2.0
# One slot in this number is reserved for unauthenticated clients, however many authenticated ones there are.
_RESERVE = 8


class LimitedConnection(Protocol):
    """A connection as ``ConnectionLimits`` uses it."""

    def quiet_s(self) -> float:
        """Return for how many seconds nothing useful was received or sent."""


G = TypeVar("G", bound=LimitedConnection)


class ConnectionLimits(Generic[G]):
    """
    Decides which connections are accepted and closed.

    Args:
        max_connections: the most connections in all.
        max_per_address: the most connections from one address; None for half of all.
        max_closing: the most closed connections, in addition to ``max_connections``, for which ``leave`` was
            not called yet.
    """

    def __init__(
        self,
        max_connections: int = MAX_CONNECTIONS,
        max_per_address: int | None = None,
        max_closing: int = MAX_CLOSING,
    ) -> None:
        assert max_connections > 0
        self.max_connections = max_connections
        if max_per_address is None:
            max_per_address = max(1, max_connections // 2)
        self.max_per_address = min(max_per_address, max_connections)
        self._max_closing = max_closing
        self._closing: set[G] = set()
        self._places: dict[G, str] = {}
        self._strangers: dict[str, dict[G, None]] = {}  # by address, oldest first
        self._known: dict[str, dict[G, None]] = {}
        self.unauthenticated = 0  # how many connections have not shown the secret

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<ConnectionLimits of {len(self)}, {self.unauthenticated} of them unauthenticated>"

    def enter(self, guest: G, host: str) -> G | None:
        """
        Accept a connection as unauthenticated, or reject it.

        Returns:
            None if there was space. Otherwise the connection that must be closed: either an older one that
                was removed, or the new one.
        """
        place = address_of(host)
        victim: G | None = None
        if self._count(place) >= self.max_per_address:
            victim = self._least((place,), self.max_per_address)
        elif len(self._places) >= self.max_connections:
            victim = self._least(None, self.max_connections)
        else:
            self._add(guest, place)
            return None
        if victim is None or len(self._closing) >= self._max_closing:
            return guest
        self.leave(victim)
        self._closing.add(victim)
        self._add(guest, place)
        return victim

    def mark_known(self, guest: G) -> None:
        """Record that a connection has shown the secret."""
        place = self._places.get(guest)
        if place is not None and guest in self._strangers.get(place, ()):
            _take(self._strangers, place, guest)
            self.unauthenticated -= 1
            self._known.setdefault(place, {})[guest] = None

    def leave(self, guest: G) -> None:
        """Remove a connection that is closed; may be called twice."""
        self._closing.discard(guest)
        place = self._places.pop(guest, None)
        if place is None:
            return
        if guest in self._strangers.get(place, ()):
            _take(self._strangers, place, guest)
            self.unauthenticated -= 1
        else:
            _take(self._known, place, guest)

    def _add(self, guest: G, place: str) -> None:
        self._places[guest] = place
        self._strangers.setdefault(place, {})[guest] = None
        self.unauthenticated += 1

    def _count(self, place: str) -> int:
        return len(self._strangers.get(place, ())) + len(self._known.get(place, ()))

    def _least(self, places: Iterable[str] | None, limit: int) -> G | None:
        """
        Return the connection to close for a new one; None if no connection can be closed.

        Args:
            places: the addresses whose connections are considered; None: all addresses.
            limit: the limit that was reached.
        """
        strangers = (
            self._strangers
            if places is None
            else {place: self._strangers.get(place, {}) for place in places}
        )
        most = max(strangers.values(), key=len, default={})
        count = self.unauthenticated if places is None else len(most)
        if count <= limit // _RESERVE:
            known = self._known.keys() if places is None else places
            quiet = _quietest(each for place in known for each in self._known.get(place, ()))
            if quiet is not None:
                return quiet
        return next(iter(most), None)


def _quietest(guests: Iterable[G]) -> G | None:
    best: G | None = None
    longest_s = QUIET_S
    for guest in guests:
        quiet_s = guest.quiet_s()
        if quiet_s >= longest_s:
            best, longest_s = guest, quiet_s
    return best


def _take(groups: dict[str, dict[G, None]], place: str, guest: G) -> None:
    group = groups[place]
    del group[guest]
    if not group:
        del groups[place]


# The protocol of a connection follows from its first bytes:
#
#     GET /id/            Foolscap, which begins in plaintext and switches to TLS later
#     anything else       TLS, with GBS inside
#
# A client that sends fewer than 8 bytes within 30 seconds is rejected. Input of unauthenticated clients costs
# the server more time than the clients: a millisecond for a TLS handshake, and as much for a kilobyte of
# small requests. So these clients take turns: in each turn of the reactor, the server processes one piece of
# such input, and serves authenticated clients as well. The address with the fewest waiting clients is next.
# So a client at another address than a flood waits for only one piece of the flood's input.

log = Logger()

FOOLSCAP_BEGINS = b"GET /id/"
DETECTION_S = 30.0
TICK_S = 5.0
MANY_ENDED = 256
"""
Number of ended connections after which their memory is given back. Each leaves 20 KB in reference cycles,
including its TLS, until the garbage collector runs.
"""


class FoolscapFactory(Protocol):
    """Makes protocols for Foolscap; ``foolscap.port.FoolscapPort`` is one."""

    def buildProtocol(self, addr: IAddress | None, on_known: Callable[[], None]) -> Any:
        """Return a protocol for a connection that begins with Foolscap, or None."""


class TlsSite(Protocol):
    """
    Makes protocols inside TLS; a Twisted factory. ``GbsSite`` is one.

    Attributes:
        refused: how many connections were rejected.
        turns: gets a call of ``asked`` for input of a client that has not shown the secret.
    """

    refused: int
    turns: FairTurns[Any]

    def buildProtocol(self, addr: IAddress | None) -> GbsConnection | None:
        """Return a protocol for a connection, or None if the connection is rejected."""

    def note_hostile(self, peer: str, reason: str) -> None:
        """Log why a client was rejected."""


class PortListener(Factory):
    """
    Makes a ``ProtocolDetector`` for each connection, which examines the connection's first bytes.

    Args:
        server: makes the protocols inside TLS, or rejects them.
        contexts: for TLS.
        clock: for time limits.
        foolscap: speaks Foolscap; None: not supported.
        crowd: limits the connections; None: the usual limits.
    """

    noisy = False

    def __init__(
        self,
        server: TlsSite,
        contexts: IOpenSSLServerConnectionCreator,
        clock: Any,
        foolscap: FoolscapFactory | None = None,
        crowd: ConnectionLimits[ProtocolDetector] | None = None,
    ) -> None:
        self.clock: IReactorTime = clock
        self.connections: set[ProtocolDetector] = set()
        self._server = server
        self._tls = tls_factory(contexts, False, server, clock)
        self._foolscap = foolscap
        self._empty: Waiters[None] = Waiters()
        self._crowd: ConnectionLimits[ProtocolDetector] = (
            ConnectionLimits() if crowd is None else crowd
        )
        self._timer = Timer(clock, self._tick)
        self._queue: FairQueue[ProtocolDetector] = FairQueue()
        self._turn = Timer(clock, self._next_turn)
        self._ended = 0  # connections ended since memory was given back

    def buildProtocol(self, addr: IAddress | None) -> ProtocolDetector | None:
        """Return a detector for a connection, or None if the connection is rejected."""
        front = ProtocolDetector(self, addr)
        victim = self._crowd.enter(front, str(getattr(addr, "host", "")))
        if victim is None:
            return front
        self._server.refused += 1
        if victim is front:
            self.note_hostile(addr, "there are too many connections, and all are busy or closing")
            return None
        self.note_hostile(victim.addr, "its slot was needed for other clients")
        victim.abort()
        return front

    def choose(self, first_bytes: bytes, front: ProtocolDetector) -> TwistedProtocol | None:
        """
        Return the protocol for a connection that begins with the given bytes; None if the connection is
        rejected.
        """
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

    def hear_in_turn(self, connection: ProtocolDetector) -> None:
        """Process a connection's input now, or in its turn."""
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
                # Abort the connection, as the reactor does after an error in a protocol that it calls.
                # Otherwise the client would wait for ever.
                log.failure("a connection failed within the server")
                connection.abort()

    def mark_known(self, connection: ProtocolDetector) -> None:
        """Record that a connection has shown the secret."""
        self._crowd.mark_known(connection)

    def opened(self, connection: ProtocolDetector) -> None:
        """Add a connection, and call its ``tick`` regularly from now on."""
        self.connections.add(connection)
        self._timer.set(TICK_S)

    def note_hostile(self, addr: IAddress | None, reason: str) -> None:
        """Log why a client was rejected."""
        self._server.note_hostile(str(getattr(addr, "host", addr)), reason)

    def closed(self, connection: ProtocolDetector) -> None:
        """Remove a closed connection; after the last one, the Deferred of ``stop`` fires."""
        self.connections.discard(connection)
        self._crowd.leave(connection)
        self._queue.leave(connection)
        self._give_back()
        if not self.connections:
            self._timer.stop()
            self._turn.stop()
            self._empty.fire(None)

    def stop(self) -> Deferred[None]:
        """Close all connections; fires when they are closed."""
        if not self.connections:
            return succeed(None)
        waiting = self._empty.wait()
        for connection in list(self.connections):
            connection.abort()
        return waiting

    def _give_back(self) -> None:
        """
        Give the memory of ended connections back to the system, if many have ended.

        Python looks for reference cycles among all objects only after millions of new ones, and does not
        count OpenSSL's memory. A hundred thousand handshakes would take a gigabyte before that.
        """
        self._ended += 1
        if self._ended >= MANY_ENDED:
            self._ended = 0
            gc.collect()
            process_settings.trim_heap()

    def _tick(self) -> None:
        self._timer.set(TICK_S)
        now_s = self.clock.seconds()
        for connection in self.connections:
            connection.tick(now_s)


class ProtocolDetector(TwistedProtocol):
    """
    Examines the first bytes of one connection, then passes everything to the right protocol.

    Attributes:
        addr: the client's address, as Twisted has it.
        place: the address as ``FairQueue`` counts it.
        gbs: the connection's HTTP protocol, if it uses HTTP.
    """

    transport: Any

    def __init__(self, factory: PortListener, addr: IAddress | None) -> None:
        self.addr = addr
        self.place = address_of(str(getattr(addr, "host", "")))
        self.gbs: GbsConnection | None = None
        self._front = factory
        self._heard = False  # whether input arrived since the last tick
        self._heard_s = factory.clock.seconds()
        self._seen = b""
        self._inner: TwistedProtocol | None = None
        self._timer: IDelayedCall | None = None
        self._turned_away = False
        self._waits = False  # whether the connection waits for its turn
        self._direct: TwistedProtocol | None = None  # if set, gets all input at once, without turns

    def connectionMade(self) -> None:
        """Start to wait for the first bytes."""
        self._front.opened(self)
        self._timer = self._front.clock.callLater(DETECTION_S, self._waited_too_long)

    def dataReceived(self, data: bytes) -> None:
        """Pass input to the protocol, as soon as the protocol is known."""
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
        """Report the lost connection to the inner protocol."""
        self._stop_waiting()
        self._front.closed(self)
        inner, self._inner = self._inner, None
        self._direct = None
        if inner is not None:
            inner.connectionLost(reason)

    def has_shown_secret(self) -> None:
        """Record that the inner protocol has seen the server's secret."""
        self._front.mark_known(self)
        if self._inner is not None and not self._waits:
            self._direct = self._inner

    def tick(self, now_s: float) -> None:
        """Note the time if input has arrived since the last call."""
        if self._heard:
            self._heard = False
            self._heard_s = now_s

    def quiet_s(self) -> float:
        """
        Return for how many seconds the connection has been useless; for HTTP, its protocol knows that
        exactly.
        """
        if self.gbs is not None:
            return self.gbs.quiet_s()
        return 0.0 if self._heard else self._front.clock.seconds() - self._heard_s

    def abort(self) -> None:
        """Close the connection without sending the remaining output."""
        self.transport.abortConnection()

    def pause(self) -> None:
        """Read nothing until the connection's turn."""
        self.transport.pauseProducing()

    def resume(self) -> None:
        self.transport.resumeProducing()

    def hear(self) -> None:
        """Pass the waiting input to the inner protocol, which is chosen first if necessary."""
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
        with suppress(AttributeError, OSError):
            # There are many short answers, which must not wait for earlier acknowledgements (Nagle's
            # algorithm).
            self.transport.setTcpNoDelay(True)
        self._inner = inner
        inner.makeConnection(self.transport)
        if self.gbs is None:
            self._direct = inner

    def _waited_too_long(self) -> None:
        self._timer = None
        self._front.note_hostile(self.addr, "it sent nothing for half a minute")
        self._turn_away()

    def _turn_away(self) -> None:
        self._turned_away = True
        self.abort()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
