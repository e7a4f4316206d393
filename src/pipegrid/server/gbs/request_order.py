"""Order of requests and responses on a connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from pipegrid.errors import PipegridError
from pipegrid.server.fair_scheduler import FairTurns, M
from pipegrid.server.gbs import responses
from pipegrid.server.gbs.bundles import Bundle
from pipegrid.server.gbs.receivers import InSteps
from pipegrid.server.gbs.request_check import Request
from pipegrid.server.gbs.responses import Answer, AnswerBody
from pipegrid.state_table import Named, Table
from pipegrid.storage.storage_paths import ShareKey
from pipegrid.storage.uploads.eviction import NOBODY
from pipegrid.wire.gbs_bundles import MAX_SHARES
from pipegrid.wire.gbs_messages import Resource

if TYPE_CHECKING:
    from pipegrid.server.gbs.receivers import Receiver
    from pipegrid.server.gbs.service import GbsService


# What a connection to the GBS server can be, what can happen to it, and what it is then; None: it cannot be.
#
# **Its life**, changed by ``RequestOrder.move`` alone. OPEN, it begins requests. DRAINING, it begins none any
# more, answers what it has begun, and closes: the server is stopping, or a request was the last, or what came
# is no HTTP. CLOSING, the transport was told to go, and nothing is carried out any more. GONE, there is
# nobody left to answer.
#
# **Its turn** (see ``server.fair_scheduler``), changed by ``TurnTaking._move`` alone. It is in nobody's
# line, or WAITS for its turn, or HAS it; who has it and has used it up WAITS_AGAIN, until what it was
# about to do is over.


class Life(Named):
    """Where a client's connection is in its life; see the module."""

    OPEN = "is open"
    DRAINING = "is draining"
    CLOSING = "is closing"
    GONE = "is gone"


class ServerEvent(Named):
    """What moves a client's connection on in its life."""

    DRAINS = "it begins no more requests"
    CLOSES = "it closes"
    LOST = "its transport is lost"


class TurnState(Named):
    """Whether it is a connection's."""

    NOT_WANTED = "wants no turn"
    WAITS = "waits for its turn"
    HAS = "has its turn"
    WAITS_AGAIN = "has had its turn and waits for the next"


class Taking(Named):
    """What happens to a connection that may want a turn."""

    IS_GIVEN = "it is its turn"
    STANDS_IN_LINE = "it is queued"
    IS_OVER = "its turn is over"


def _life() -> Table[Life, ServerEvent]:
    (open_, draining, closing, gone) = Life
    # fmt: off
    return Table("a client's connection", tuple(ServerEvent), {
        #           DRAINS    CLOSES   LOST
        open_:     (draining, closing, gone),
        draining:  (draining, closing, gone),
        closing:   (closing,  None,    gone),
        gone:      (None,     None,    None),
    })
    # fmt: on


def _turn() -> Table[TurnState, Taking]:
    (not_wanted, waits, has, waits_again) = TurnState
    # fmt: off
    return Table("a client's connection", tuple(Taking), {
        #             IS_GIVEN  STANDS_IN_LINE  IS_OVER
        not_wanted:  (has,      waits,          None),
        waits:       (has,      waits,          None),
        has:         (None,     waits_again,    not_wanted),
        waits_again: (None,     waits_again,    waits),
    })
    # fmt: on


LIFE = _life()
TURN = _turn()


# The requests of one connection, carried out in order and answered in order, all of it bounded.
#
# **Order.** Requests are begun in the order in which they came, each after the one before has been *carried
# out*, and answered in that order. There is one thing that is not waited for: a share's becoming durable.
# While that is pending, later requests are begun, so that many shares of one connection become durable
# together; but not a request for the same storage index, which might see that the share is not there yet.
# Only writing (or aborting) *another* share of that index goes on: nothing about it depends on the first.
#
# **Back-pressure.** A request is not begun while
#
# * the transport is full, that is, the client does not read its answers;
# * a long answer is being streamed, or waits for its turn: one open share per connection;
# * 128 requests are unanswered, or 256 KiB of answers wait behind one that is not ready;
# * the server has too many shares waiting to become durable;
# * this connection's turn is over (see ``server.fair_scheduler``), and others have not had theirs since.
# What takes long
#   by itself, a bundle or an allocation of many shares, is carried out in several turns.
#
# What is done with requests that must wait, and when to send, is the business of ``connection``; there is
# no clock here, and of the transport only what is written to it.

MAX_UNANSWERED = 128
MAX_WAITING_ANSWER_BYTES = 256 * 1024
MAX_STRANGERS_REQUESTS = 32
"""On a connection that has not shown the secret; behind the last one's answer it ends."""

log = Logger()


@attrs.define(eq=False)
class ResponseSlot:
    """
    The place of one answer in the order of answers.

    Attributes:
        with_body: not after HEAD.
        connection: a whole header line to add, or nothing.
        last: the connection ends behind this answer.
        shares: those that become durable before there is an answer.
        data: the answer, or the head of a long one; None as long as there is none.
        stream: the body of a long answer.
    """

    with_body: bool = True
    connection: bytes = b""
    last: bool = False
    shares: Sequence[ShareKey] = ()
    data: bytes | None = None
    stream: AnswerBody | None = None


class RequestOrder:
    """
    What one connection is carrying out, and what it owes. The reactor's thread only.

    Args:
        on_ready: called when an answer has become ready, or when there may be room for the next request.
        turns: tells when others are to have their turn.

    Attributes:
        request, receiver: the request whose body is coming, and what takes that; None between requests.
        body_left: bytes of that body which have been announced and are still to come.
        unanswered: the places of the answers that are owed, in order.
        waiting_bytes: of answers that are ready and not sent.
        streams: long answers among them.
        committing: shares that are becoming durable, as numbers by storage index.
        can_write: whether the transport has room.
        attended: whether somebody is about to call ``send`` anyway, and ``on_ready`` need not be called for
            an answer.
        life: what the connection is; see ``states``.
        begun: how many requests have been begun.
        known: whether one of them has shown the server's secret.
        ended: CLOSING or GONE: nothing is begun any more, although what is owed may still become ready.
        lost: GONE: there is nobody left to answer.
        client: who is at the other end.
    """

    def __init__(
        self, service: GbsService, on_ready: Callable[[], None], turns: FairTurns[Any]
    ) -> None:
        self._service = service
        self._on_ready = on_ready
        self._turns = turns
        self._waits_for_room = False
        # What is being carried out.
        self.request: Request | None = None
        self.receiver: Receiver | None = None
        self.body_left = 0
        # What goes out.
        self.unanswered: deque[ResponseSlot] = deque()
        self.waiting_bytes = 0
        self.streams = 0
        self.committing: dict[bytes, list[int]] = {}
        self.can_write = True
        self.attended = False
        self.life = Life.OPEN
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
        """What happens to the connection, and what it is from now on."""
        self.life = life = LIFE.after(self.life, happening)
        self.lost = life is Life.GONE
        self.ended = self.lost or life is Life.CLOSING

    @property
    def receives_message(self) -> bool:
        """Whether a body is coming that is a message; share data is none."""
        request = self.request
        return self.receiver is not None and request is not None and request.method != b"PATCH"

    @property
    def message_bytes(self) -> int:
        """What has come of the body that is coming, if its length was announced."""
        length = 0 if self.request is None else self.request.content_length or 0
        return max(0, length - self.body_left)

    # One request.

    def may_begin(self, request: Request) -> bool:
        """Return whether its turn has come; if not, ask again when something has moved."""
        if not self.can_write or self.streams or len(self.unanswered) >= MAX_UNANSWERED:
            return False
        if self._turns.over:
            return False
        if self.waiting_bytes >= MAX_WAITING_ANSWER_BYTES:
            return False
        target = request.target
        if target is None:
            return True
        if target.resource is Resource.SHARE and not self._service.has_room:
            self._wait_for_room()
            return False
        pending = self.committing.get(target.storage_index)
        if pending is None:
            return True
        changes = request.method == b"PATCH" or target.resource is Resource.ABORT
        return changes and target.share_number not in pending

    def begin(self, request: Request) -> None:
        """Begin with it: its body may come. It is judged already, and a refusal waits for its place."""
        self.begun += 1
        if not self.known:
            self.known = self._service.knows_secret(request)
            if not self.known and self.begun >= MAX_STRANGERS_REQUESTS:
                request.keep_alive = False
        self.request = request
        request.client = self.client
        self.receiver = self._service.begin(request)
        self.body_left = request.content_length or 0
        if request.expects_continue:
            self.unanswered.append(ResponseSlot(data=responses.CONTINUE))
            self.waiting_bytes += len(responses.CONTINUE)

    def receive(self, data: bytes) -> None:
        """Take part of its body."""
        if self.receiver is not None:
            self.body_left -= len(data)
            self.receiver.write(data)

    def finish(self) -> bool:
        """
        Carry out the request, whose body is complete.

        Returns:
            whether that could be done now. If not, ask again when something has moved, or in the next
            turn; only what is carried out in steps waits.
        """
        receiver = self.receiver
        if isinstance(receiver, InSteps):
            if isinstance(receiver, Bundle) and not receiver.unpack(self._turns):
                return False
            if isinstance(receiver, Bundle) and not receiver.may_begin(self.committing):
                if not self._service.has_room_for(MAX_SHARES):
                    self._wait_for_room()
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
        """Answer what was no request, behind all that came before it, and end there."""
        self.abandon()
        place = ResponseSlot(connection=b"Connection: close\r\n", last=True)
        self.unanswered.append(place)
        self._fill(place, answer)
        self.move(ServerEvent.DRAINS)

    def abandon(self) -> None:
        """Give up the request whose body is not complete; what has come of share data is kept."""
        self.request = None
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.abandon()

    def lose(self) -> None:
        """Forget what is not answered: the client has gone."""
        self.move(ServerEvent.LOST)
        self.abandon()
        for place in self.unanswered:
            if place.stream is not None:
                place.stream.close()
        self.unanswered.clear()

    # Its answer.

    def send(self, transport: Any) -> bool:
        """
        Send what is ready, in order, as far as the transport takes it.

        Returns:
            whether nothing will follow, so that the connection may be closed.
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
        return last or (self.life is Life.DRAINING and not places and self.receiver is None)

    def _write(self, out: list[bytes], place: ResponseSlot, transport: Any) -> None:
        """Write what stands before a stream, and its head, once."""
        if place.data:
            out.append(place.data)
            self.waiting_bytes -= len(place.data)
            place.data = b""
        if out:
            transport.write(b"".join(out))
            out.clear()

    def _pump(self, stream: AnswerBody, transport: Any) -> bool:
        """Send from a stream until the transport is full; returns whether the stream is at its end."""
        while self.can_write:
            try:
                data = stream.read()
            except Exception as error:
                if isinstance(error, PipegridError):
                    log.error("{error}", error=str(error))
                else:
                    log.failure("a share could not be read while it was sent")
                transport.abortConnection()  # the length has been announced
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

    # Room for what waits for the disk.

    def _wait_for_room(self) -> None:
        if not self._waits_for_room:
            self._waits_for_room = True
            self._service.call_when_room(self._room)

    def _room(self) -> None:
        self._waits_for_room = False
        if not self.lost:
            self._on_ready()

    def _check_invariants(self) -> None:
        assert self.lost == (self.life is Life.GONE), self
        assert self.ended == (self.life in (Life.CLOSING, Life.GONE)), self
        assert not self.lost or not self.unanswered, "a client that has gone gets no answers"
        assert not self.ended or self.receiver is None, "what has ended receives nothing"
        assert len(self.unanswered) <= 2 * MAX_UNANSWERED, self
        if not self.lost:
            ready = sum(len(place.data) for place in self.unanswered if place.data)
            assert self.waiting_bytes == ready, (self.waiting_bytes, ready)
            streams = sum(place.stream is not None for place in self.unanswered)
            assert self.streams == streams <= 1, self


# One connection's turn: whether it may carry out requests now, or stands in line for that.


class TurnTaking(Generic[M]):
    """
    Of one connection.

    Args:
        turns: whose turn it is, of all connections.
        member: the connection.
    """

    __slots__ = ("_member", "_turns", "state")

    def __init__(self, turns: FairTurns[M], member: M) -> None:
        self._turns = turns
        self._member = member
        self.state = TurnState.NOT_WANTED

    def _move(self, taking: Taking) -> None:
        self.state = TURN.after(self.state, taking)

    def may_go_on(self) -> bool:
        """Whether it may carry out requests now; else it is in line, and has its turn later."""
        if self.state is TurnState.HAS:
            if not self._turns.over:
                return True
        elif self.state is not TurnState.NOT_WANTED:
            return False
        elif self._turns.may_have(self._member):
            self._move(Taking.IS_GIVEN)
            return True
        self.stand_in_line()
        return False

    def stand_in_line(self) -> None:
        """Have a turn later, if it does not wait for one already."""
        before = self.state
        self._move(Taking.STANDS_IN_LINE)
        if before is not self.state:
            self._turns.wait(self._member)

    def is_given(self) -> None:
        """It has come to the head of the line."""
        self._move(Taking.IS_GIVEN)

    def is_over(self) -> None:
        """It does nothing any more for now; of what it did, if it was its turn, account is kept."""
        if self.state is TurnState.HAS or self.state is TurnState.WAITS_AGAIN:
            self._move(Taking.IS_OVER)
            self._turns.end(self._member)
