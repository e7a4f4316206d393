"""
One client's connection to the GBS server: bytes in, bytes out, and for how long.

Its requests are carried out, and answered, by ``order``. Here is what surrounds that: the transport, the
parser, what waits between the two, timeouts, and the end.

What it can be, and what it becomes with what happens, are the tables in ``states``; how long a client may
take for what stands in ``timeouts``; how much is read at a time, in ``intake``.

**Back-pressure.** While a request must wait for its turn, nothing more is read, and what the parser finds
behind it is queued (``_events``).

**Turns.** What takes long is done in turns with other connections (see ``server.turns``). While it waits for
its turn, nothing more is read.

The connection is its transport's producer for as long as it lives. Registering one for each answer is what
goes wrong elsewhere, when a long answer begins while the transport is full.

**Time.** ``tick`` is called every few seconds. Who has not shown the secret has less time, and less of what
was sent is looked at in advance. How long a connection has been of no use, ``quiet_s``, decides who makes
room when there are too many (see ``crowd``).
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

from pipegrid.server.gbs.answers import Answer
from pipegrid.server.gbs.intake import Intake
from pipegrid.server.gbs.order import RequestOrder
from pipegrid.server.gbs.parser import RequestParser
from pipegrid.server.gbs.requests import Request
from pipegrid.server.gbs.states import Life, ServerEvent, TurnState
from pipegrid.server.gbs.timeouts import CLOSE_TIMEOUT_S, GivenUp, Moments, overdue
from pipegrid.server.gbs.turntaking import TurnTaking
from pipegrid.server.turns import FairTurns, Spending
from pipegrid.storage.uploads.standing import Client, address_of

if TYPE_CHECKING:
    from pipegrid.server.gbs.service import GbsService

USEFUL_BYTES = 4096
"""Of a body: with less since it last was of use, the connection is of none."""
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

    turns: FairTurns[GbsConnection]

    def seconds(self) -> float:
        """Return the seconds of the clock that all connections share."""

    def connected(self, connection: GbsConnection) -> None:
        """Count a connection that was made, and look at it from time to time."""

    def disconnected(self, connection: GbsConnection) -> None:
        """Count a connection no more, as its transport is gone."""

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
        self._turn = TurnTaking(turns, self)
        # What comes in.
        self._parser = RequestParser(self)
        self._intake = Intake(self._order)
        self._events: deque[Request | bytes | _Broken] = deque()
        # When what happened last.
        self._closing_since_s = now_s
        self._moments = Moments(now_s, now_s, now_s)
        self._useful_s = now_s
        self._useful_left = 0  # of the body, then
        self.on_known: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<GbsConnection, {len(self._events)} queued, {self._order!r}>"

    # Twisted's side.

    def connectionMade(self) -> None:
        """Become the transport's producer for good."""
        transport = self._transport
        if hasattr(transport, "setTcpNoDelay"):
            transport.setTcpNoDelay(True)
        self._intake.attach(transport)
        host = str(getattr(transport.getPeer(), "host", "unknown"))
        self.place = address_of(host)
        self._order.client = Client(self.place, next(_CONNECTIONS))
        transport.registerProducer(self, True)
        self._site.connected(self)

    def dataReceived(self, data: bytes) -> None:
        """Take bytes in any split."""
        self._moments.heard_s = self._turns.start()
        if self._order.ended or self._parser.broken:
            return
        order, intake = self._order, self._intake
        in_body = order.receiver is not None and not (
            intake.waiting or self._events or order.unanswered
        )
        if in_body and not order.attended and len(data) <= max(intake.least_bytes, order.body_left):
            # In the middle of a body there is nothing to consider, and most bytes come there.
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
        """Keep what was received; forget what was not answered."""
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
        """The connection is lost; ``connectionLost`` follows."""

    # The server's side.

    def tick(self, now_s: float) -> None:
        """Close the connection if its time is up."""
        order = self._order
        if order.ended:
            if now_s - self._closing_since_s > CLOSE_TIMEOUT_S and not order.lost:
                self._transport.abortConnection()
            return
        queued = bool(self._events)
        why = overdue(now_s, self._moments, order, self._parser.in_head, queued)
        if why is not None:
            if why.value:
                self._site.note_hostile(self._peer(), why.value)
            if why is GivenUp.STUCK:
                self._transport.abortConnection()
            else:
                self._close()

    def quiet_s(self) -> float:
        """Return for how long nothing of use has come or gone; 0 while we owe an answer."""
        order = self._order
        if (order.unanswered or self._events) and order.can_write:
            return 0.0
        return self._site.seconds() - max(self._useful_s, self._moments.moved_s)

    def _note_use(self) -> None:
        """
        A request has begun, or enough of a body has come.

        It is noted when it happens. Found out when somebody had to make room, it made all of a crowd that
        had never been looked at useful at that very moment, and a newcomer went instead.
        """
        self._useful_s = self._moments.heard_s
        self._useful_left = self._order.body_left

    def drain(self) -> None:
        """Answer what has been begun, then close."""
        order = self._order
        order.move(ServerEvent.DRAINS)
        if not order.unanswered and order.receiver is None:
            self._close()

    def abort(self) -> None:
        """Close the connection at once, without what waits to be sent."""
        if not self._order.lost:
            self._transport.abortConnection()

    def send_ready(self) -> None:
        """Send the answers that have become ready since; the server calls it once for many."""
        self._turns.start()
        self._work()

    def take_turn(self) -> None:
        """Go on with what had to wait for others."""
        self._turn.is_given()
        self._turns.start()
        self._work()

    # The parser's side.

    def request_began(self) -> None:
        """Its head may take so long, from now on."""
        self._moments.began_s = self._moments.heard_s

    def head_found(self, request: Request) -> None:
        """Begin with it, or let it wait."""
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
        """Answer what came before, then this, then close."""
        self._intake.waiting.clear()
        self._events.append(_Broken(answer, reason))

    # Keeping it all moving.

    def _work(self) -> None:
        """
        Do whatever can be done now: send, begin, parse; and read only if nothing is left to do.

        Answers that are ready are sent in any case; the rest when it is this connection's turn.
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
                self._turn.stand_in_line()
        except Exception:
            self._fail()
        finally:
            self._turn.is_over()
            order.attended = False

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
        if order.life is not Life.OPEN:
            return
        order.begin(request)
        self._note_use()
        if order.known and self._intake.become_known() and self.on_known is not None:
            self.on_known()
        self._intake.body_begins()

    def _refuse(self, broken: _Broken) -> None:
        if self._order.life is not Life.OPEN:
            return  # behind the last request of a connection anything may follow
        self._site.note_hostile(self._peer(), broken.reason)
        self._order.refuse(broken.answer)

    def _fail(self) -> None:
        log.failure("a connection failed within the server")
        self._transport.abortConnection()

    def _feed(self, data: bytes) -> None:
        """Let the parser have data, at most what ``intake`` says; what it finds is handled, or queued."""
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
        self._intake.read_on(True)  # TLS has a last word to hear
        self._transport.unregisterProducer()
        self._transport.loseConnection()

    def _peer(self) -> str:
        return str(getattr(self._transport.getPeer(), "host", "somebody"))

    @property
    def _transport(self) -> Any:
        return self.transport

    def _check_invariants(self) -> None:
        """For tests, between two calls."""
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
