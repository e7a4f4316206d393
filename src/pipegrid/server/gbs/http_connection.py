"""
Clients' HTTP connections to the GBS server: input, turns and timeouts; and the factory of these connections.
"""

from __future__ import annotations

import gc
import itertools
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import attrs
import httptools
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IPushProducer, IReactorTime
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.reactor import process_settings
from pipegrid.reactor.deferreds import Timer, Waiters
from pipegrid.reactor.tcp_transport import set_bulk_buffers
from pipegrid.server.connection_turns import CpuUsage, FairTurns
from pipegrid.server.gbs.request_check import Request
from pipegrid.server.gbs.request_order import (
    ConnectionLife,
    RequestOrder,
    ServerEvent,
    TurnState,
    TurnTaking,
)
from pipegrid.server.gbs.request_parser import RequestParser
from pipegrid.server.gbs.responses import Answer
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.storage.uploads.eviction import Client, address_of

# httptools cannot be stopped while it parses. So it gets at most 16 KiB at a time, or what is left of a body
# if that is more. The rest of the input, at most what the transport had already read, waits in
# ``ReadBuffer``.

FEED_BYTES = 16384
UNAUTHENTICATED_FEED_BYTES = 1024
"""
How many bytes are parsed at once before the client has shown the secret: a request of 18 bytes takes a
kilobyte of memory, and an unauthenticated client can have only a few.
"""
UNAUTHENTICATED_RECEIVE_BYTES = 4 * 1024
RECEIVE_BYTES = 64 * 1024
"""Maximum bytes read at once from the socket; this many may wait for each client that reads no answers."""
BULK_RECEIVE_BYTES = 128 * 1024
"""
The most bytes read from the socket at once within a long body, which is written to the disk as it arrives.
With 512 KiB, which do not stay in the processor's cache between two steps, a megabyte took one and a half
times as long.
"""


class ReadBuffer:
    """
    The input buffer of one connection.

    Attributes:
        waiting: the bytes that were read and not parsed.
        least_bytes: the most bytes that are parsed at once outside a body; within a body there may be more.
        paused: whether reading is paused.
    """

    __slots__ = ("_bulk", "_order", "_transport", "least_bytes", "paused", "waiting")

    def __init__(self, order: RequestOrder) -> None:
        self._order = order
        self._transport: Any = None
        self._bulk = False
        self.waiting: deque[bytes] = deque()
        self.least_bytes = UNAUTHENTICATED_FEED_BYTES
        self.paused = False

    def attach(self, transport: Any) -> None:
        """Set the transport to read from; its client is not authenticated yet."""
        self._transport = transport
        set_bulk_buffers(transport, UNAUTHENTICATED_RECEIVE_BYTES)

    def become_known(self) -> bool:
        """Record that the client has shown the secret; returns whether this is the first time."""
        if self.least_bytes == FEED_BYTES:
            return False
        self.least_bytes = FEED_BYTES
        set_bulk_buffers(self._transport, RECEIVE_BYTES)
        return True

    def body_begins(self) -> None:
        """Adapt the size of reads to the length of the body."""
        if (self._order.body_left > RECEIVE_BYTES) != self._bulk:
            self._bulk = not self._bulk
            set_bulk_buffers(self._transport, BULK_RECEIVE_BYTES if self._bulk else RECEIVE_BYTES)

    def next_piece(self) -> bytes:
        """
        Remove and return the bytes to parse next: at most ``least_bytes``, or the rest of the body if that is
        longer.
        """
        data, limit = self.waiting.popleft(), self.least_bytes
        if self._order.receiver is not None:
            limit = max(limit, self._order.body_left)
        if len(data) > limit:
            self.waiting.appendleft(data[limit:])
            data = data[:limit]
        return data

    def read_on(self, wanted: bool) -> None:
        """Start or stop reading from the transport."""
        if wanted == self.paused:
            self.paused = not wanted
            if wanted:
                self._transport.resumeProducing()
            else:
                self._transport.pauseProducing()


# The server closes these connections: those that were silent for 60 s and have no unanswered request; those
# whose heads take longer than 30 s, or whose messages take longer than 60 s; and those whose clients have
# read nothing of their answers for ten minutes. An unauthenticated client has 30 s each for the TLS handshake
# and a first request, for a head, and for the body of a rejected request.

IDLE_TIMEOUT_S = 60.0
HEAD_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 60.0  # for messages; share data must only keep arriving
BODY_BYTES_PER_S = 1000
"""A message that arrives at least at this rate does not exceed its time limit: it may contain share data."""
STUCK_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 30.0


class CloseReason(Enum):
    """Why a connection is closed; the value is a clause for the log, or empty if the reason is not logged."""

    STUCK = "it does not read its answers"
    REQUEST = "its request makes no progress"
    REFUSED = "its request was refused, but its body does not end"
    IDLE = ""


@attrs.define
class ActivityTimes:
    """
    Times of the last events, by the clock of ``turns``.

    Attributes:
        heard_s: when bytes arrived.
        began_s: when the last request began; before the first request, when the connection began.
        moved_s: when the transport became full, or writable again.
    """

    heard_s: float
    began_s: float
    moved_s: float


def overdue(
    now_s: float, moments: ActivityTimes, order: RequestOrder, in_head: bool, queued: bool
) -> CloseReason | None:
    """
    Return why a connection must be closed, or None if it has exceeded no time limit. The connection must not
    be closing already.

    Args:
        in_head: whether a head has begun and is not complete.
        queued: whether parsed input waits to be processed.
    """
    if not order.can_write:
        return CloseReason.STUCK if now_s - moments.moved_s > STUCK_TIMEOUT_S else None
    since_s = now_s - moments.began_s
    if in_head and not queued:
        return CloseReason.REQUEST if since_s > HEAD_TIMEOUT_S else None
    if order.unanswered or queued:
        return None  # the client waits for the server's answer
    if order.receives_message:
        more_s = order.message_bytes / BODY_BYTES_PER_S
        return CloseReason.REQUEST if since_s > BODY_TIMEOUT_S + more_s else None
    if not order.known and order.receiver is not None:
        return CloseReason.REFUSED if since_s > HEAD_TIMEOUT_S else None
    time_limit_s = IDLE_TIMEOUT_S if order.known else HEAD_TIMEOUT_S
    return CloseReason.IDLE if now_s - moments.heard_s > time_limit_s else None


# ``RequestOrder`` carries out and answers the requests; ``request_order`` has the tables of states.
#
# While a request must wait for its turn, nothing more is read, and later events of the parser are queued
# (``_events``). The connection is its transport's producer for its whole life, since registering a producer
# for each answer fails if a long answer begins while the transport is full. ``tick`` is called every few
# seconds to check the time limits. If there are too many connections, the one that has been useless longest
# (``quiet_s``) is closed (``ConnectionLimits``).

USEFUL_BYTES = 4096
"""How many bytes of a body make a connection useful again."""
log = Logger()

_CONNECTIONS = itertools.count(1)
_END = b""  # an event: the body of the request is complete


@attrs.frozen
class _Broken:
    """An event: the input from here on is not HTTP, or exceeds a limit."""

    answer: Answer
    reason: str


@implementer(IPushProducer)
class GbsConnection(Protocol):
    """
    One client's connection; used only in the reactor's thread.

    Attributes:
        place: the client's address, as ``turns`` counts it.
        spending: the time that the server has spent on the connection.
    """

    transport: Any

    def __init__(self, site: GbsSite, service: GbsService, now_s: float) -> None:
        self._site = site
        self._turns = turns = site.turns
        self._order = RequestOrder(service, partial(site.has_ready, self), turns)
        # Scheduling.
        self.spending = CpuUsage(now_s)
        self.place = ""
        self._turn = TurnTaking(turns, self)
        # Input.
        self._parser = RequestParser(self)
        self._intake = ReadBuffer(self._order)
        self._events: deque[Request | bytes | _Broken] = deque()
        # Times of the last events.
        self._closing_since_s = now_s
        self._moments = ActivityTimes(now_s, now_s, now_s)
        self._useful_s = now_s
        self._useful_left = 0  # bytes of the body that had not arrived at ``_useful_s``
        self.on_known: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<GbsConnection, {len(self._events)} queued, {self._order!r}>"

    # Methods that Twisted calls.

    def connectionMade(self) -> None:
        """Become the transport's producer for the life of the connection."""
        transport = self.transport
        if hasattr(transport, "setTcpNoDelay"):
            transport.setTcpNoDelay(True)
        self._intake.attach(transport)
        host = str(getattr(transport.getPeer(), "host", "unknown"))
        self.place = address_of(host)
        self._order.client = Client(self.place, next(_CONNECTIONS))
        transport.registerProducer(self, True)
        self._site.connected(self)

    def dataReceived(self, data: bytes) -> None:
        """Accept bytes, however the input is split."""
        self._moments.heard_s = self._turns.start()
        if self._order.ended or self._parser.broken:
            return
        order, intake = self._order, self._intake
        in_body = order.receiver is not None and not (
            intake.waiting or self._events or order.unanswered
        )
        if in_body and not order.attended and len(data) <= max(intake.least_bytes, order.body_left):
            # Most bytes arrive in the middle of a body, where they need no decision.
            self._feed(data)
            if order.receiver is not None and not (self._events or order.unanswered):
                if self._useful_left - order.body_left >= USEFUL_BYTES:
                    self._note_use()
                return
            data = b""
        if data:
            intake.waiting.append(data)
        self._work()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Keep the share data that was received, and drop the answers that were not sent."""
        self._order.lose()
        self._events.clear()
        self._intake.waiting.clear()
        self._turns.leave(self)
        self._site.disconnected(self)

    def pauseProducing(self) -> None:
        self._order.can_write = False
        self._moments.moved_s = self._site.seconds()

    def resumeProducing(self) -> None:
        self._order.can_write = True
        self._moments.moved_s = self._turns.start()
        self._work()

    def stopProducing(self) -> None:
        """Do nothing, since the connection is lost and ``connectionLost`` follows."""

    # Methods that the site calls.

    def tick(self, now_s: float) -> None:
        """Close the connection if it has exceeded a time limit."""
        order = self._order
        if order.ended:
            if now_s - self._closing_since_s > CLOSE_TIMEOUT_S and not order.lost:
                self.transport.abortConnection()
            return
        queued = bool(self._events)
        why = overdue(now_s, self._moments, order, self._parser.in_head, queued)
        if why is not None:
            if why.value:
                self._site.note_hostile(self._peer(), why.value)
            if why is CloseReason.STUCK:
                self.transport.abortConnection()
            else:
                self._close()

    def quiet_s(self) -> float:
        """
        Return for how long nothing useful has been received or sent, in seconds; 0 while a request is
        unanswered, unless the client does not read.
        """
        order = self._order
        if (order.unanswered or self._events) and order.can_write:
            return 0.0
        return self._site.seconds() - max(self._useful_s, self._moments.moved_s)

    def _note_use(self) -> None:
        """
        Record that the connection is useful: a request has begun, or enough of a body has arrived.

        The use must be recorded when it happens. An earlier version computed the time of the last use only
        when there were too many connections: all connections that it had never examined then counted as just
        used, and a new connection was rejected instead.
        """
        self._useful_s = self._moments.heard_s
        self._useful_left = self._order.body_left

    def drain(self) -> None:
        """Answer the requests that have begun, then close the connection."""
        order = self._order
        order.move(ServerEvent.DRAINS)
        if not order.unanswered and order.receiver is None:
            self._close()

    def abort(self) -> None:
        """Close the connection at once, without sending the remaining answers."""
        if not self._order.lost:
            self.transport.abortConnection()

    def send_ready(self) -> None:
        """Send the answers that have become ready; the site calls this once for several answers."""
        self._turns.start()
        self._work()

    def take_turn(self) -> None:
        """Continue after waiting in the queue."""
        self._turn.is_given()
        self._turns.start()
        self._work()

    # Methods that the parser calls.

    def request_began(self) -> None:
        """Start the time limit of a request's head."""
        self._moments.began_s = self._moments.heard_s

    def head_found(self, request: Request) -> None:
        """Begin a request, or queue it."""
        if self._events or not self._order.may_begin(request):
            self._events.append(request)
        else:
            self._begin(request)

    def body_found(self, data: bytes) -> None:
        if self._events:
            self._events.append(data)
        else:
            self._order.receive(data)

    def end_found(self) -> None:
        if self._events or not self._order.finish():
            self._events.append(_END)

    def nonsense_found(self, answer: Answer, reason: str) -> None:
        """
        Queue an error answer, which is sent after the answers to previous requests; then the connection is
        closed.
        """
        self._intake.waiting.clear()
        self._events.append(_Broken(answer, reason))

    # Work.

    def _work(self) -> None:
        """
        Do all work that is possible now: send, begin requests, parse. Read more only if nothing is left to
        do.

        Ready answers are sent at once; the rest is done only if the connection has a turn.
        """
        order, intake = self._order, self._intake
        if order.attended or order.lost:
            return
        order.attended = True
        try:
            while True:
                if order.send(self.transport):
                    self._close()
                if order.ended:
                    return
                if not (self._events or intake.waiting):
                    break
                if not self._turn.may_go_on():
                    intake.read_on(False)
                    return
                if self._handle_events():
                    continue
                if self._events or not intake.waiting:
                    break
                self._feed(intake.next_piece())
            intake.read_on(not self._events)
            if self._events and self._turns.over:
                self._turn.wait_in_queue()
        except Exception:
            self._fail()
        finally:
            self._turn.is_over()
            order.attended = False

    def _handle_events(self) -> bool:
        """Handle queued events until one must wait; returns whether at least one was handled."""
        events = self._events
        order = self._order
        handled = False
        while events:
            event = events[0]
            if isinstance(event, Request):
                if not order.may_begin(event):
                    break
                self._begin(event)
            elif isinstance(event, _Broken):
                self._refuse(event)
            elif event:
                order.receive(event)
            elif not order.finish():
                break
            if events:
                events.popleft()
            handled = True
        return handled

    def _begin(self, request: Request) -> None:
        order = self._order
        if order.life is not ConnectionLife.OPEN:
            return
        order.begin(request)
        self._note_use()
        if order.known and self._intake.become_known() and self.on_known is not None:
            self.on_known()
        self._intake.body_begins()

    def _refuse(self, broken: _Broken) -> None:
        if self._order.life is not ConnectionLife.OPEN:
            return  # input after a connection's last request is ignored
        self._site.note_hostile(self._peer(), broken.reason)
        self._order.refuse(broken.answer)

    def _fail(self) -> None:
        log.failure("a connection failed within the server")
        self.transport.abortConnection()

    def _feed(self, data: bytes) -> None:
        """
        Parse data, at most as much as ``ReadBuffer`` allows; the parser's calls handle or queue the events.
        """
        try:
            self._parser.feed(data)
        except httptools.HttpParserCallbackError:
            self._fail()

    # The end.

    def _close(self) -> None:
        if self._order.ended:
            return
        self._closing_since_s = self._site.seconds()
        self._events.clear()
        self._intake.waiting.clear()
        self._order.move(ServerEvent.CLOSES)
        self._order.abandon()
        self._intake.read_on(True)  # TLS must receive close_notify
        self.transport.unregisterProducer()
        self.transport.loseConnection()

    def _peer(self) -> str:
        return str(getattr(self.transport.getPeer(), "host", "somebody"))

    def _check_invariants(self) -> None:
        """Check in tests that the invariants hold between two calls."""
        order = self._order
        order._check_invariants()
        assert not order.attended, "it works only while it is called"
        assert self._turn.state in (TurnState.NOT_WANTED, TurnState.WAITS), (
            "a turn is over when it returns"
        )
        waiting = bool(self._events or self._intake.waiting)
        if order.ended:
            assert not waiting, "what has ended carries nothing out"
        elif waiting:
            assert self._intake.paused, "it reads on only if nothing is left to do"


# The site has the GBS connections of a server, with one clock, log and shutdown. ``PortListener`` accepts a
# limited number of connections, and distinguishes TLS from Foolscap by the first bytes.

TICK_S = 5.0
GRACE_S = 10.0
_LINES_PER_TICK = 20
MANY = 128
"""
If at least this many connections were open, memory is given back to the system when at most a quarter of them
are left. Each may have held 128 KiB of share data.
"""


class GbsSite(Factory):
    """
    Makes a ``GbsConnection`` for every client.

    Args:
        clock: for timeouts.

    Attributes:
        connections: the open connections.
        accepted: the number of connections accepted so far.
        refused: how many connections on the whole port were rejected, or closed to make space for others.
        turns: the scheduler of all connections.
    """

    noisy = False

    def __init__(self, service: GbsService, clock: IReactorTime) -> None:
        self.service = service
        self.connections: set[GbsConnection] = set()
        self.accepted = 0
        self.refused = 0
        self.turns: FairTurns[GbsConnection] = FairTurns(clock)
        self._most = 0  # the most connections since memory was given back
        self._clock = clock
        self._ready: list[GbsConnection] = []
        self._timer = Timer(clock, self._tick)
        self._sending = Timer(clock, self._send_ready)
        self._aborting = Timer(clock, self._abort_all)
        self._lines_left = _LINES_PER_TICK
        self._lines_dropped = 0
        self._stopping: Waiters[None] | None = None

    def __repr__(self) -> str:
        return f"<GbsSite with {len(self.connections)} connections>"

    def buildProtocol(self, addr: IAddress | None) -> GbsConnection | None:
        """Return a connection, or None if the server is stopping."""
        if self._stopping is not None:
            return None
        self.accepted += 1
        return GbsConnection(self, self.service, self.seconds())

    def seconds(self) -> float:
        """Return the time in seconds, by the clock that all connections share."""
        return self._clock.seconds()

    def stop(self) -> Deferred[None]:
        """
        Let every connection answer the requests that it has begun, and close those that take longer than 10
        s; fires when all connections are closed.
        """
        if self._stopping is None:
            self._stopping = Waiters()
            for connection in list(self.connections):
                connection.drain()
            if self.connections:
                self._aborting.set(GRACE_S)
        stopped = self._stopping.wait()
        self._look_stopped()
        return stopped

    # Methods that connections call.

    def connected(self, connection: GbsConnection) -> None:
        """Add a connection, and call its ``tick`` regularly from now on."""
        self.connections.add(connection)
        self._most = max(self._most, len(self.connections))
        self._timer.set(TICK_S)

    def disconnected(self, connection: GbsConnection) -> None:
        """Remove a connection whose transport is lost."""
        self.connections.discard(connection)
        if not self.connections and self._timer.is_set:
            self._timer.stop()
            self._tidy()
        self._look_stopped()

    def has_ready(self, connection: GbsConnection) -> None:
        """
        Call the ``send_ready`` of a connection soon, and once for several answers, since shares become
        durable in groups.
        """
        self._ready.append(connection)
        self._sending.set(0)

    def note_hostile(self, peer: str, reason: str) -> None:
        """Log why a client was rejected; the number of lines is limited."""
        if self._lines_left:
            self._lines_left -= 1
            log.info("turned {peer} away: {reason}", peer=peer, reason=reason)
        else:
            self._lines_dropped += 1

    # Timers.

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
            gc.collect()  # connections and their TLS are reference cycles
            process_settings.trim_heap()

    def _abort_all(self) -> None:
        for connection in list(self.connections):
            connection.abort()

    def _look_stopped(self) -> None:
        if self._stopping is not None and not self.connections:
            self._aborting.stop()
            self._stopping.fire(None)
