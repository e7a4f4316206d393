"""Port: protocol detection, connection limits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.internet.protocol import Factory, connectionDone
from twisted.internet.protocol import Protocol as TwistedProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.reactor import process_settings
from pipegrid.reactor.deferreds import Timer, Waiters
from pipegrid.reactor.server_tls import tls_factory
from pipegrid.server.fair_scheduler import FairQueue
from pipegrid.storage.uploads.eviction import address_of

if TYPE_CHECKING:
    from twisted.internet.interfaces import IOpenSSLServerConnectionCreator

    from pipegrid.server.gbs.http_connection import GbsConnection, GbsSite


# Who is connected to a storage server, and who makes room for whom.
#
# A connection is a *stranger* until it has shown the server's secret, and *known* from then on. There may be
# so many in all, and half of them from one address (an IPv6 address is one of a network's 2^64, which
# counts as one). Whoever comes when that is reached is let in all the same, and another one goes:
#
# * the oldest stranger of the address that has most strangers. So who comes from elsewhere than a flood does
#   is not its victim, and who comes from the same address has as much time to show the secret as it takes
#   the flood to fill all places anew;
# * where strangers have no more than an eighth of the places, the known connection of which nothing of use
#   has come or gone for longest, if that is at least two seconds. Its client connects again when it needs to.
#   So those who know the secret cannot shut out others who do, neither by silence nor by a byte now and then;
# * if there is neither, the newcomer goes.
#
# A connection that is cut keeps its descriptor until the reactor's next turn, and in one turn of a burst
# hundreds may come. So where many are being closed already (``MAX_CLOSING``), the newcomer goes.
#
# Behind one address there may be a network's worth of clients (NAT), or all of them (Tor, a proxy): each
# client of ours has one to three connections to a server, so that half of the thousand serves more than
# 150 at work at the same moment, and idle ones do not count. An operator whose clients all come from one
# address says so (``--max-per-address``).
#
# Pure: no clock and no transport. What has no use is asked of the guests, and only when somebody must go.

MAX_CONNECTIONS = 1000
MAX_CLOSING = 128
"""Connections that have been cut, and whose descriptors are not free yet."""
QUIET_S = 2.0
_RESERVE = 8  # one place of so many is for strangers, however many known connections there are


class LimitedConnection(Protocol):
    """A connection, as far as it matters who makes room for others."""

    def quiet_s(self) -> float:
        """Return for how long nothing of use has come from it or gone to it, in seconds."""


G = TypeVar("G", bound=LimitedConnection)


class ConnectionLimits(Generic[G]):
    """
    See above.

    Args:
        max_connections: in all.
        max_per_address: from one address; None for half of all.
        max_closing: beyond ``max_connections``, those that were cut and of which ``leave`` was not said yet.
    """

    def __init__(
        self,
        max_connections: int = MAX_CONNECTIONS,
        max_per_address: int | None = None,
        max_closing: int | None = None,
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
        self.strangers = 0  # how many have not shown the secret

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<ConnectionLimits of {len(self)}, {self.strangers} of them unauthenticated>"

    def enter(self, guest: G, host: str) -> G | None:
        """
        Let a connection in, as a stranger, or not.

        Returns:
            None: there is room. A guest: it has been taken off the list and is to be cut, and it may be
            the newcomer itself.
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
        if victim is None or self._closes_enough():
            return guest
        self.leave(victim)
        if self._max_closing is not None:
            self._closing.add(victim)
        self._add(guest, place)
        return victim

    def mark_known(self, guest: G) -> None:
        """It has shown the secret."""
        place = self._places.get(guest)
        if place is not None and guest in self._strangers.get(place, ()):
            _take(self._strangers, place, guest)
            self.strangers -= 1
            self._known.setdefault(place, {})[guest] = None

    def leave(self, guest: G) -> None:
        """It has gone; that may be said twice."""
        self._closing.discard(guest)
        place = self._places.pop(guest, None)
        if place is None:
            return
        if guest in self._strangers.get(place, ()):
            _take(self._strangers, place, guest)
            self.strangers -= 1
        else:
            _take(self._known, place, guest)

    def _closes_enough(self) -> bool:
        return self._max_closing is not None and len(self._closing) >= self._max_closing

    def _add(self, guest: G, place: str) -> None:
        self._places[guest] = place
        self._strangers.setdefault(place, {})[guest] = None
        self.strangers += 1

    def _count(self, place: str) -> int:
        return len(self._strangers.get(place, ())) + len(self._known.get(place, ()))

    def _least(self, places: Iterable[str] | None, limit: int) -> G | None:
        """Return who can be spared best, of some addresses or of all; None: nobody."""
        strangers = (
            self._strangers
            if places is None
            else {place: self._strangers.get(place, {}) for place in places}
        )
        most = max(strangers.values(), key=len, default={})
        count = self.strangers if places is None else len(most)
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


# What a port listens with: the first bytes of a connection tell Foolscap from TLS.
#
#     GET /id/            Foolscap, which begins in the clear and goes over to TLS later
#     anything else       TLS, and GBS inside
#
# Fewer than 8 bytes within 30 seconds are neither. Whatever was looked at is handed on. How many connections
# there may be, and who makes room for whom, decides ``crowd``; here it is done.
#
# What strangers say costs the server more than them: a millisecond for TLS's handshake, as much for a
# kilobyte of small requests. So they are heard in turn: one piece in each turn of the reactor, in which
# everybody who has shown the secret is heard as well, and the address first that has fewest waiting. Who
# comes from elsewhere than a flood waits for one piece of it. Where nobody else waits, nobody does.
#
# Source: the format reference, storage protocols, section 3.

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


class PortListener(Factory):
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
        self._ended = 0  # connections, since their memory was given back

    def buildProtocol(self, addr: IAddress | None) -> ProtocolDetector | None:
        """Return what will look at the first bytes, unless there is no room and nobody who can make any."""
        front = ProtocolDetector(self, addr)
        victim = self._crowd.enter(front, str(getattr(addr, "host", "")))
        if victim is None:
            return front
        self._server.refused += 1
        if victim is front:
            self.note_hostile(addr, "there are too many connections, all busy or just being closed")
            return None
        self.note_hostile(victim.addr, "other clients needed its place")
        victim.abort()
        return front

    def choose(self, first_bytes: bytes, front: ProtocolDetector) -> TwistedProtocol | None:
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

    def hear_in_turn(self, connection: ProtocolDetector) -> None:
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

    def mark_known(self, connection: ProtocolDetector) -> None:
        """A connection has shown the secret."""
        self._crowd.mark_known(connection)

    def opened(self, connection: ProtocolDetector) -> None:
        """A connection has begun: from now on its quiet is looked at."""
        self.connections.add(connection)
        self._timer.set(TICK_S)

    def note_hostile(self, addr: IAddress | None, reason: str) -> None:
        """Write to the log why a client was turned away."""
        self._server.note_hostile(str(getattr(addr, "host", addr)), reason)

    def closed(self, connection: ProtocolDetector) -> None:
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
            process_settings.trim_heap()

    def _tick(self) -> None:
        self._timer.set(TICK_S)
        now_s = self.clock.seconds()
        for connection in self.connections:
            connection.tick(now_s)


class ProtocolDetector(TwistedProtocol):
    """
    Looks at the first bytes of one connection, then hands everything on.

    Attributes:
        addr: of the client.
        place: what its address counts as.
        gbs: what speaks HTTP on it, if that is what it came for.
    """

    def __init__(self, factory: PortListener, addr: IAddress | None) -> None:
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
        self._front.mark_known(self)
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
        self._front.note_hostile(self.addr, "it sent nothing for half a minute")
        self._turn_away()

    def _turn_away(self) -> None:
        self._turned_away = True
        self.abort()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
