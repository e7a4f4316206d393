"""
The order of requests and answers on a connection of the GBS server, with limits; and the states of the
connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from pipegrid.errors import PipegridError
from pipegrid.server.connection_turns import FairTurns, M
from pipegrid.server.gbs import responses
from pipegrid.server.gbs.body_receivers import InSteps, Receiver
from pipegrid.server.gbs.bundles import Bundle
from pipegrid.server.gbs.request_check import Request
from pipegrid.server.gbs.responses import Answer, ResponseBody
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.state_table import Named, Table
from pipegrid.storage.storage_paths import ShareKey
from pipegrid.storage.uploads.eviction import NOBODY
from pipegrid.wire.gbs_bundles import MAX_SHARES
from pipegrid.wire.gbs_paths_headers import Resource

# In the tables of states, None means that the event cannot happen.
#
# ``ConnectionLife``, changed only by ``RequestOrder.move``: OPEN begins requests. DRAINING begins no
# requests, answers those that have begun, and closes; the reason is that the server is stopping, that a
# request was the last one, or that the input is not HTTP. CLOSING has closed the transport, and carries out
# nothing. GONE has lost the transport.
#
# ``TurnState``, changed only by ``TurnTaking._move``: a connection with nothing to do is NOT_WANTED. It WAITS
# for its turn, and then HAS it. If it has used up its turn, it WAITS_AGAIN until its current work ends.


class ConnectionLife(Named):
    """The state of a client's connection; the comment above describes the states."""

    OPEN = "is open"
    DRAINING = "is draining"
    CLOSING = "is closing"
    GONE = "is gone"


class ServerEvent(Named):
    """Events in the life of a client's connection."""

    DRAINS = "it begins no more requests"
    CLOSES = "it closes"
    LOST = "its transport is lost"


class TurnState(Named):
    """Whether a connection wants, waits for, or has its turn."""

    NOT_WANTED = "wants no turn"
    WAITS = "waits for its turn"
    HAS = "has its turn"
    WAITS_AGAIN = "has had its turn and waits for the next"


class TurnEvent(Named):
    """Events that change the ``TurnState`` of a connection."""

    IS_GIVEN = "it is its turn"
    STANDS_IN_LINE = "it is queued"
    IS_OVER = "its turn is over"


def _life() -> Table[ConnectionLife, ServerEvent]:
    (open_, draining, closing, gone) = ConnectionLife
    # fmt: off
    return Table("a client's connection", tuple(ServerEvent), {
        #           DRAINS    CLOSES   LOST
        open_:     (draining, closing, gone),
        draining:  (draining, closing, gone),
        closing:   (closing,  None,    gone),
        gone:      (None,     None,    None),
    })
    # fmt: on


def _turn() -> Table[TurnState, TurnEvent]:
    (not_wanted, waits, has, waits_again) = TurnState
    # fmt: off
    return Table("a client's connection", tuple(TurnEvent), {
        #             IS_GIVEN  STANDS_IN_LINE  IS_OVER
        not_wanted:  (has,      waits,          None),
        waits:       (has,      waits,          None),
        has:         (None,     waits_again,    not_wanted),
        waits_again: (None,     waits_again,    waits),
    })
    # fmt: on


LIFE = _life()
TURN = _turn()


# Requests begin in the order of arrival, each after the previous one was carried out, and are answered in
# that order. A request does not wait until earlier shares are durable, so that many shares of one connection
# become durable together. The exception is a request for the same storage index as such a share, since it
# might not see the share yet. Writing or aborting another share of that index is allowed, since it does not
# depend on the first share.
#
# A request does not begin while
#
# * the transport is full, that is, the client does not read its answers;
# * a long answer is being streamed, or waits: a connection has at most one open share;
# * 128 requests are unanswered, or 256 KiB of answers wait for one that is not ready;
# * the server has too many shares waiting to become durable;
# * this connection's turn is over (``server.connection_turns``). Long work, such as a bundle or an allocation
#   of many shares, takes several turns.

MAX_UNANSWERED = 128
MAX_WAITING_ANSWER_BYTES = 256 * 1024
MAX_UNAUTHENTICATED_REQUESTS = 32
"""The most requests on a connection that has not shown the secret; the answer to the last one closes it."""

log = Logger()


@attrs.define(eq=False)
class ResponseSlot:
    """
    The place of one answer in the order of answers.

    Attributes:
        with_body: False for the answer to a HEAD request.
        connection: a whole header line to add, or nothing.
        last: whether the connection is closed after this answer.
        shares: the shares that must become durable before the answer is ready.
        data: the answer, or the head of a long one; None until the answer is ready.
        stream: the body of a long answer; None for a short one.
    """

    with_body: bool = True
    connection: bytes = b""
    last: bool = False
    shares: Sequence[ShareKey] = ()
    data: bytes | None = None
    stream: ResponseBody | None = None


class RequestOrder:
    """
    The requests and answers of one connection; used only in the reactor's thread.

    Args:
        on_ready: called when an answer has become ready, or when the next request may be able to begin.
        turns: the scheduler.

    Attributes:
        request, receiver: the request whose body is arriving, and its receiver; None between requests.
        body_left: how many announced bytes of the current body have not arrived.
        unanswered: the slots of the outstanding answers, in order.
        waiting_bytes: bytes of answers that are ready and not sent, without streams.
        streams: how many of the unsent answers are streams.
        committing: shares that are becoming durable, as share numbers by storage index.
        can_write: whether the transport is writable.
        attended: whether the caller is about to call ``send``, so that ``on_ready`` need not be called for an
            answer.
        life: the state of the connection.
        begun: how many requests have begun.
        known: whether a request has shown one of the server's secrets.
        ended: whether ``life`` is CLOSING or GONE: no further request begins, although answers can become
            ready.
        lost: whether ``life`` is GONE: the transport is lost.
        client: the client of this connection.
    """

    def __init__(
        self, service: GbsService, on_ready: Callable[[], None], turns: FairTurns[Any]
    ) -> None:
        self._service = service
        self._on_ready = on_ready
        self._turns = turns
        self._waits_for_space = False
        # The request whose body is arriving.
        self.request: Request | None = None
        self.receiver: Receiver | None = None
        self.body_left = 0
        # Output.
        self.unanswered: deque[ResponseSlot] = deque()
        self.waiting_bytes = 0
        self.streams = 0
        self.committing: dict[bytes, list[int]] = {}
        self.can_write = True
        self.attended = False
        self.life = ConnectionLife.OPEN
        self.begun = 0
        self.known = False
        self.ended = False
        self.lost = False
        self.client = NOBODY

    def __repr__(self) -> str:
        return (
            f"<RequestOrder that {self.life.value}, {len(self.unanswered)} unanswered, "
            f"{'' if self.can_write else 'not '}writable>"
        )

    def move(self, happening: ServerEvent) -> None:
        """Change the state of the connection because of an event."""
        self.life = life = LIFE.after(self.life, happening)
        self.lost = life is ConnectionLife.GONE
        self.ended = self.lost or life is ConnectionLife.CLOSING

    @property
    def receives_message(self) -> bool:
        """Whether the arriving body is a message, not share data."""
        request = self.request
        return self.receiver is not None and request is not None and request.method != b"PATCH"

    @property
    def message_bytes(self) -> int:
        """How many bytes of the current body have arrived; 0 if its length was not announced."""
        length = 0 if self.request is None else self.request.content_length or 0
        return max(0, length - self.body_left)

    # One request.

    def may_begin(self, request: Request) -> bool:
        """Return whether a request may begin; if not, ask again when something has changed."""
        if not self.can_write or self.streams or len(self.unanswered) >= MAX_UNANSWERED:
            return False
        if self._turns.over:
            return False
        if self.waiting_bytes >= MAX_WAITING_ANSWER_BYTES:
            return False
        target = request.target
        if target is None:
            return True
        if target.resource is Resource.SHARE and not self._service.has_space:
            self._wait_for_space()
            return False
        pending = self.committing.get(target.storage_index)
        if pending is None:
            return True
        changes = request.method == b"PATCH" or target.resource is Resource.ABORT
        return changes and target.share_number not in pending

    def begin(self, request: Request) -> None:
        """
        Begin a request, whose body arrives next. If its head is rejected, the answer is sent in its turn.
        """
        self.begun += 1
        if not self.known:
            self.known = self._service.knows_secret(request)
            if not self.known and self.begun >= MAX_UNAUTHENTICATED_REQUESTS:
                request.keep_alive = False
        self.request = request
        request.client = self.client
        self.receiver = self._service.begin(request)
        self.body_left = request.content_length or 0
        if request.expects_continue:
            self.unanswered.append(ResponseSlot(data=responses.CONTINUE))
            self.waiting_bytes += len(responses.CONTINUE)

    def receive(self, data: bytes) -> None:
        """Accept part of the request's body."""
        if self.receiver is not None:
            self.body_left -= len(data)
            self.receiver.write(data)

    def finish(self) -> bool:
        """
        Carry out the request, whose body is complete.

        Returns:
            whether that was possible now. If not, ask again when something has changed, or in the next turn;
                only requests that are carried out in steps must wait.
        """
        receiver = self.receiver
        if isinstance(receiver, InSteps):
            if isinstance(receiver, Bundle) and not receiver.unpack(self._turns):
                return False
            if isinstance(receiver, Bundle) and not receiver.may_begin(self.committing):
                if not self._service.has_space_for(MAX_SHARES):
                    self._wait_for_space()
                return False
            if not receiver.advance(self._turns):
                return False
        request, self.request = self.request, None
        self.receiver = None
        if request is None or receiver is None:
            return True
        place = ResponseSlot(request.method != b"HEAD")
        if not request.keep_alive:
            place.connection, place.last = b"Connection: close\r\n", True
        elif request.http10:
            place.connection = b"Connection: keep-alive\r\n"
        self.unanswered.append(place)
        outcome = receiver.finish()
        if isinstance(outcome, Deferred):
            place.shares = receiver.shares
            for storage_index, number in place.shares:
                self.committing.setdefault(storage_index, []).append(number)
            outcome.addCallback(self._committed, place)
        else:
            self._fill(place, outcome)
        if place.last:
            self.move(ServerEvent.DRAINS)
        return True

    def refuse(self, answer: Answer) -> None:
        """Answer invalid input, after all earlier requests are answered; then the connection is closed."""
        self.abandon()
        place = ResponseSlot(connection=b"Connection: close\r\n", last=True)
        self.unanswered.append(place)
        self._fill(place, answer)
        self.move(ServerEvent.DRAINS)

    def abandon(self) -> None:
        """Give up the request whose body is incomplete; arrived share data is kept."""
        self.request = None
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.abandon()

    def lose(self) -> None:
        """Give up the request that is arriving, and drop the unsent answers, since the connection is lost."""
        self.move(ServerEvent.LOST)
        self.abandon()
        for place in self.unanswered:
            if place.stream is not None:
                place.stream.close()
        self.unanswered.clear()

    # Its answer.

    def send(self, transport: Any) -> bool:
        """
        Send the ready answers, in order, until the transport is full.

        Returns:
            whether the last answer of the connection was sent, so that the connection can be closed.
        """
        places = self.unanswered
        out: list[bytes] = []
        last = False
        while places and places[0].data is not None and not last:
            place = places[0]
            if place.stream is not None:
                self._write(out, place, transport)
                if not self.can_write or self.ended:
                    return False
                if not self._pump(place.stream, transport):
                    return False
                place.stream.close()
                self.streams -= 1
            else:
                assert place.data is not None
                out.append(place.data)
                self.waiting_bytes -= len(place.data)
            last = place.last
            places.popleft()
        if out:
            transport.write(b"".join(out))
        return last or (
            self.life is ConnectionLife.DRAINING and not places and self.receiver is None
        )

    def _write(self, out: list[bytes], place: ResponseSlot, transport: Any) -> None:
        """Write the answers that precede a stream, and the stream's head."""
        if place.data:
            out.append(place.data)
            self.waiting_bytes -= len(place.data)
            place.data = b""
        if out:
            transport.write(b"".join(out))
            out.clear()

    def _pump(self, stream: ResponseBody, transport: Any) -> bool:
        """Send from a stream until the transport is full; returns whether the stream has ended."""
        while self.can_write:
            try:
                data = stream.read()
            except Exception as error:
                if isinstance(error, PipegridError):
                    log.error("{error}", error=str(error))
                else:
                    log.failure("a share could not be read completely while it was sent")
                transport.abortConnection()  # the client expects the announced length
                return False
            if not data:
                return True
            transport.write(data)
        return False

    def _fill(self, place: ResponseSlot, answer: Answer) -> None:
        place.data = answer.render(place.with_body, place.connection)
        self.waiting_bytes += len(place.data)
        if answer.stream is not None:
            if place.with_body:
                place.stream = answer.stream
                self.streams += 1
            else:
                answer.stream.close()

    def _committed(self, answer: Answer, place: ResponseSlot) -> None:
        for storage_index, number in place.shares:
            pending = self.committing[storage_index]
            pending.remove(number)
            if not pending:
                del self.committing[storage_index]
        if self.lost:
            if answer.stream is not None:
                answer.stream.close()
            return
        self._fill(place, answer)
        if not self.attended:
            self._on_ready()

    # Limits of the shares that wait to become durable.

    def _wait_for_space(self) -> None:
        if not self._waits_for_space:
            self._waits_for_space = True
            self._service.call_when_space(self._space_freed)

    def _space_freed(self) -> None:
        self._waits_for_space = False
        if not self.lost:
            self._on_ready()

    def _check_invariants(self) -> None:
        assert self.lost == (self.life is ConnectionLife.GONE), self
        assert self.ended == (self.life in (ConnectionLife.CLOSING, ConnectionLife.GONE)), self
        assert not self.lost or not self.unanswered, "a client that has gone gets no answers"
        assert not self.ended or self.receiver is None, "what has ended receives nothing"
        assert len(self.unanswered) <= 2 * MAX_UNANSWERED, self
        if not self.lost:
            ready = sum(len(place.data) for place in self.unanswered if place.data)
            assert self.waiting_bytes == ready, (self.waiting_bytes, ready)
            streams = sum(place.stream is not None for place in self.unanswered)
            assert self.streams == streams <= 1, self


class TurnTaking(Generic[M]):
    """
    The state of a connection in taking turns: whether it may carry out requests now, or waits.

    Args:
        turns: the scheduler of all connections.
        member: the connection.
    """

    __slots__ = ("_member", "_turns", "state")

    def __init__(self, turns: FairTurns[M], member: M) -> None:
        self._turns = turns
        self._member = member
        self.state = TurnState.NOT_WANTED

    def _move(self, taking: TurnEvent) -> None:
        self.state = TURN.after(self.state, taking)

    def may_go_on(self) -> bool:
        """
        Return whether the connection may carry out requests now; if not, it is queued, and continues in its
        turn.
        """
        if self.state is TurnState.HAS:
            if not self._turns.over:
                return True
        elif self.state is not TurnState.NOT_WANTED:
            return False
        elif self._turns.may_have(self._member):
            self._move(TurnEvent.IS_GIVEN)
            return True
        self.wait_in_queue()
        return False

    def wait_in_queue(self) -> None:
        """Queue the connection, unless it is queued already."""
        before = self.state
        self._move(TurnEvent.STANDS_IN_LINE)
        if before is not self.state:
            self._turns.wait(self._member)

    def is_given(self) -> None:
        """Record that the connection's turn has come."""
        self._move(TurnEvent.IS_GIVEN)

    def is_over(self) -> None:
        """Record that the connection has stopped working, and count the time that it has used in its turn."""
        if self.state is TurnState.HAS or self.state is TurnState.WAITS_AGAIN:
            self._move(TurnEvent.IS_OVER)
            self._turns.end(self._member)
