"""
One client's connection to the GBS server: bytes in, bytes out, and for how long.

Its requests are carried out, and answered, by ``order``. Here is what surrounds that: the transport, the
parser, what waits between the two, timeouts, and the end.

**Back-pressure.** While a request must wait for its turn, nothing more is read. httptools cannot be stopped
in the middle of what it was fed. So it is fed 16 KiB at most, or as much of a body as is sure to come, and
what it finds behind a request that must wait is queued (``_events``); what it was not fed waits as it is
(``_unparsed``), at most what the transport had read already.

**Turns.** What takes long is done in turns with other connections (see ``server.turns``). While it waits for
its turn, nothing more is read.

The connection is its transport's producer for as long as it lives. Registering one for each answer is what
goes wrong elsewhere, when a long answer begins while the transport is full.

**Time.** ``tick`` is called every few seconds, and closes what has been silent for 60 s without being owed an
answer, heads and small bodies that dribble in for longer than that, and clients that for ten minutes
took nothing of what they asked for. Who has not shown the secret has 30 s for everything: for TLS's
handshake and a first request, for a head, and for the body of a request that is refused already; and less
of what was sent is looked at in advance. How long a connection has been of no use, ``quiet_s``, decides who
makes room when there are too many (see ``crowd``).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from typing import Protocol as Interface

import attrs
import httptools
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.reactor.sockets import move_much
from pipegrid.server.gbs.answers import Answer
from pipegrid.server.gbs.order import RequestOrder
from pipegrid.server.gbs.parser import RequestParser
from pipegrid.server.gbs.requests import Request
from pipegrid.server.turns import Spending, Turns
from pipegrid.storage.uploads.standing import Client, address_of

if TYPE_CHECKING:
    from pipegrid.server.gbs.service import GbsService

FEED_BYTES = 16384
STRANGER_FEED_BYTES = 1024
"""
The same before the secret was shown: a request of 18 bytes becomes a kilobyte of memory, and few are
answered.
"""
STRANGER_RECEIVE_BYTES = 4 * 1024
USEFUL_BYTES = 4096
"""Of a body: with less since it last was of use, the connection is of none."""
RECEIVE_BYTES = 64 * 1024
"""Read from the socket at a time; a thousand clients that take no answers may each have as much waiting."""
BULK_RECEIVE_BYTES = 128 * 1024
"""
The same in the middle of a long body, which goes to the disk as it comes. With 512 KiB, which leaves the
processor's cache between two steps, a megabyte cost half as much time again.
"""

IDLE_TIMEOUT_S = 60.0
HEAD_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 60.0  # of bodies that are messages; share data only has to keep coming
BODY_BYTES_PER_S = 1000
"""A message that comes at least that fast may take longer: changes of mutable files have share data in it."""
STUCK_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 30.0

log = Logger()

_CONNECTIONS = itertools.count(1)
_END = b""  # among the events: the request's body is complete


@attrs.frozen
class _Broken:
    """Among the events: what follows is not HTTP, or too much of it."""

    answer: Answer
    reason: str


class Site(Interface):
    """
    What a connection tells of itself.

    Attributes:
        turns: whose turn it is.
    """

    turns: Turns[GbsConnection]

    def seconds(self) -> float:
        """Return the time."""

    def connected(self, connection: GbsConnection) -> None:
        """One more."""

    def disconnected(self, connection: GbsConnection) -> None:
        """One less."""

    def has_ready(self, connection: GbsConnection) -> None:
        """Have ``send_ready`` called once, soon."""

    def note_hostile(self, peer: str, reason: str) -> None:
        """Write to the log why a client was turned away."""


@implementer(IPushProducer)
class GbsConnection(Protocol):
    """
    See above. The reactor's thread only.

    Attributes:
        place: its address, as ``turns`` counts them.
        spending: how long the server has worked for it.
    """

    def __init__(self, site: Site, service: GbsService, now_s: float) -> None:
        self._site = site
        self._turns = turns = site.turns
        self._order = RequestOrder(service, partial(site.has_ready, self), turns)
        # Whose turn it is.
        self.spending = Spending(now_s)
        self.place = ""
        self._in_line = False
        self._has_turn = False
        # What comes in.
        self._parser = RequestParser(self)
        self._unparsed: deque[bytes] = deque()
        self._events: deque[Request | bytes | _Broken] = deque()
        self._paused_reading = False
        self._reads_bulk = False
        self._feed_least = STRANGER_FEED_BYTES
        # When what happened last.
        self._closing_since_s: float | None = None
        self._heard_s = now_s
        self._began_s = now_s
        self._moved_s = now_s
        self._useful_s = now_s
        self._useful_left = 0  # of the body, then
        self.on_known: Callable[[], None] | None = None

    def __repr__(self) -> str:
        state = "closing" if self._closing_since_s is not None else "open"
        return f"<GbsConnection {state}, {len(self._events)} queued, {self._order!r}>"

    # Twisted's side.

    def connectionMade(self) -> None:
        """Become the transport's producer for good."""
        transport = self._transport
        if hasattr(transport, "setTcpNoDelay"):
            transport.setTcpNoDelay(True)
        move_much(transport, STRANGER_RECEIVE_BYTES)
        host = str(getattr(transport.getPeer(), "host", "unknown"))
        self.place = address_of(host)
        self._order.client = Client(self.place, next(_CONNECTIONS))
        transport.registerProducer(self, True)
        self._site.connected(self)

    def dataReceived(self, data: bytes) -> None:
        """Take bytes in any split."""
        self._heard_s = self._turns.start()
        if self._closing_since_s is not None or self._parser.broken:
            return
        order = self._order
        in_body = order.receiver is not None and not (
            self._unparsed or self._events or order.unanswered
        )
        if in_body and not order.attended and len(data) <= max(self._feed_least, order.body_left):
            # In the middle of a body there is nothing to consider, and most bytes come there.
            self._feed(data)
            if order.receiver is not None and not (self._events or order.unanswered):
                if self._useful_left - order.body_left >= USEFUL_BYTES:
                    self._note_use()
                return
            data = b""
        if data:
            self._unparsed.append(data)
        self._work()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Keep what was received; forget what was not answered."""
        if self._closing_since_s is None:
            self._closing_since_s = self._site.seconds()
        self._order.lose()
        self._events.clear()
        self._unparsed.clear()
        self._turns.leave(self)
        self._site.disconnected(self)

    def pauseProducing(self) -> None:
        """The transport is full."""
        self._order.can_write = False
        self._moved_s = self._site.seconds()

    def resumeProducing(self) -> None:
        """The transport has room."""
        self._order.can_write = True
        self._moved_s = self._turns.start()
        self._work()

    def stopProducing(self) -> None:
        """The connection is lost; ``connectionLost`` follows."""

    # The server's side.

    def tick(self, now_s: float) -> None:
        """Close the connection if its time is up."""
        order = self._order
        if self._closing_since_s is not None:
            if now_s - self._closing_since_s > CLOSE_TIMEOUT_S and not order.lost:
                self._transport.abortConnection()
        elif not order.can_write:
            if now_s - self._moved_s > STUCK_TIMEOUT_S:
                self._give_up("it takes nothing of what it asked for", now=True)
        elif self._parser.in_head and not self._events:
            if now_s - self._began_s > HEAD_TIMEOUT_S:
                self._give_up("its request does not get on")
        elif order.unanswered or self._events:
            pass  # we owe it an answer
        elif order.receives_message:
            more_s = order.message_bytes / BODY_BYTES_PER_S
            if now_s - self._began_s > BODY_TIMEOUT_S + more_s:
                self._give_up("its request does not get on")
        elif not order.known and order.receiver is not None:
            if now_s - self._began_s > HEAD_TIMEOUT_S:
                self._give_up("its request was refused, and does not end")
        elif now_s - self._heard_s > (IDLE_TIMEOUT_S if order.known else HEAD_TIMEOUT_S):
            self._give_up("")

    def quiet_s(self) -> float:
        """Return for how long nothing of use has come or gone; 0 while we owe an answer."""
        order = self._order
        if (order.unanswered or self._events) and order.can_write:
            return 0.0
        return self._site.seconds() - max(self._useful_s, self._moved_s)

    def _note_use(self) -> None:
        """
        A request has begun, or enough of a body has come.

        It is noted when it happens. Found out when somebody had to make room, it made all of a crowd that
        had never been looked at useful at that very moment, and a newcomer went instead.
        """
        self._useful_s = self._heard_s
        self._useful_left = self._order.body_left

    def drain(self) -> None:
        """Answer what has been begun, then close."""
        order = self._order
        order.draining = True
        if not order.unanswered and order.receiver is None:
            self._close()

    def abort(self) -> None:
        """Close it now."""
        if not self._order.lost:
            self._transport.abortConnection()

    def send_ready(self) -> None:
        """Send the answers that have become ready since; the server calls it once for many."""
        self._turns.start()
        self._work()

    def take_turn(self) -> None:
        """Go on with what had to wait for others."""
        self._in_line = False
        self._has_turn = True
        self._turns.start()
        self._work()

    # The parser's side.

    def request_began(self) -> None:
        """Its head may take so long, from now on."""
        self._began_s = self._heard_s

    def head_found(self, request: Request) -> None:
        """Begin with it, or let it wait."""
        if self._events or not self._order.may_begin(request):
            self._events.append(request)
        else:
            self._begin(request)

    def body_found(self, data: bytes) -> None:
        """Part of a body."""
        if self._events:
            self._events.append(data)
        else:
            self._order.receive(data)

    def end_found(self) -> None:
        """The request is complete."""
        if self._events or not self._order.finish():
            self._events.append(_END)

    def nonsense_found(self, answer: Answer, reason: str) -> None:
        """Answer what came before, then this, then close."""
        self._unparsed.clear()
        self._events.append(_Broken(answer, reason))

    # Keeping it all moving.

    def _work(self) -> None:
        """
        Do whatever can be done now: send, begin, parse; and read only if nothing is left to do.

        Answers that are ready are sent in any case; the rest when it is this connection's turn.
        """
        order = self._order
        if order.attended or order.lost:
            return
        order.attended = True
        try:
            while True:
                if order.send(self.transport):
                    self._close()
                if self._closing_since_s is not None:
                    return
                if not (self._events or self._unparsed):
                    break
                if not self._may_go_on():
                    self._read_on(False)
                    return
                if self._handle_events():
                    continue
                if self._events or not self._unparsed:
                    break
                self._feed(self._next_piece())
            self._read_on(not self._events)
            if self._events and self._turns.over:
                self._stand_in_line()
        except Exception:
            self._fail()
        finally:
            if self._has_turn:
                self._has_turn = False
                self._turns.end(self)
            order.attended = False

    def _may_go_on(self) -> bool:
        """Whether it may carry out requests now; else it is in line, and has its turn later."""
        if self._in_line:
            return False
        if self._has_turn:
            if not self._turns.over:
                return True
        elif self._turns.may_have(self):
            self._has_turn = True  # which has just begun
            return True
        self._stand_in_line()
        return False

    def _stand_in_line(self) -> None:
        if not self._in_line:
            self._in_line = True
            self._turns.wait(self)

    def _handle_events(self) -> bool:
        """Handle queued events until one must wait; returns whether any was handled."""
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
        if order.ended or order.draining:
            return
        order.begin(request)
        self._note_use()
        if order.known and self._feed_least != FEED_BYTES:
            self._become_known()
        if (order.body_left > RECEIVE_BYTES) != self._reads_bulk:
            self._reads_bulk = not self._reads_bulk
            move_much(self._transport, BULK_RECEIVE_BYTES if self._reads_bulk else RECEIVE_BYTES)

    def _become_known(self) -> None:
        self._feed_least = FEED_BYTES
        move_much(self._transport, RECEIVE_BYTES)
        if self.on_known is not None:
            self.on_known()

    def _refuse(self, broken: _Broken) -> None:
        if self._order.draining:
            return  # behind the last request of a connection anything may follow
        self._site.note_hostile(self._peer(), broken.reason)
        self._order.refuse(broken.answer)

    def _fail(self) -> None:
        log.failure("a connection failed within the server")
        self._transport.abortConnection()

    def _next_piece(self) -> bytes:
        data, limit = self._unparsed.popleft(), self._feed_bytes
        if len(data) > limit:
            self._unparsed.appendleft(data[limit:])
            data = data[:limit]
        return data

    @property
    def _feed_bytes(self) -> int:
        """How much the parser may have at once: a body, however long, is one event."""
        order = self._order
        least = self._feed_least
        return max(least, order.body_left) if order.receiver is not None else least

    def _feed(self, data: bytes) -> None:
        """Let the parser have data, at most ``_feed_bytes``; what it finds is handled, or queued."""
        try:
            self._parser.feed(data)
        except httptools.HttpParserCallbackError:
            self._fail()

    def _read_on(self, wanted: bool) -> None:
        if wanted == self._paused_reading:
            self._paused_reading = not wanted
            if wanted:
                self._transport.resumeProducing()
            else:
                self._transport.pauseProducing()

    # The end.

    def _give_up(self, reason: str, now: bool = False) -> None:
        if reason:
            self._site.note_hostile(self._peer(), reason)
        if now:
            self._transport.abortConnection()
        else:
            self._close()

    def _close(self) -> None:
        if self._closing_since_s is not None:
            return
        self._closing_since_s = self._site.seconds()
        self._events.clear()
        self._unparsed.clear()
        self._order.ended = True
        self._order.abandon()
        self._read_on(True)  # TLS has a last word to hear
        self._transport.unregisterProducer()
        self._transport.loseConnection()

    def _peer(self) -> str:
        return str(getattr(self._transport.getPeer(), "host", "somebody"))

    @property
    def _transport(self) -> Any:
        return self.transport
