# mypy: disable-error-code="misc"
"""
The tokens of a Foolscap connection, taken out of ``banana``'s hands and held to bounds, in turns.

What a message may cost is ``allowance``'s to say; what the bounds are for, ``broker``'s.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from foolscap import eventual
from foolscap.broker import Broker
from foolscap.slicers.none import Nothing
from foolscap.tokens import SIZE_LIMIT, BananaError, BananaFailure, Violation

from pipegrid.reactor.standstill import CLOCK
from pipegrid.wire import allocated, banana, nothings
from pipegrid.wire.allowance import TOKEN_COST, Allowance, Bounds, TooMuch
from pipegrid.wire.banana import (
    ABORT,
    CLOSE,
    ERROR,
    FLOAT,
    INT,
    LONGINT,
    LONGNEG,
    NEG,
    OPEN,
    PING,
    PONG,
    STRING,
    VOCAB,
    BananaTooLong,
    Tokens,
)

MAX_DEPTH = 10
"""A call, its arguments, a dictionary, a triple, a list, a quadruple: six."""

MAX_INTEGER_BYTES = 9
"""What Tahoe-LAFS says of unknown free space, 2^64, has nine."""

MAX_CALLS = 128
"""Calls from the other end that are under way or wait; Tahoe-LAFS sends a hundred writes at once."""

TURN_CALLS = 8
_TYPES = {code: bytes((code,)) for code in range(0x81, 0x90)}
_ALWAYS_LEGAL = frozenset((PING, PONG, ABORT, CLOSE, ERROR))
_MAY_BE_NOTHING = (type(None), Nothing)
_WITH_BODY = frozenset((STRING, LONGINT, LONGNEG))


class BoundedReceiver(Broker):
    """
    What receives on one connection.

    Args:
        bounds: what differs between connections; the other arguments are Foolscap's.
    """

    logReceiveErrors = False
    inOpen: bool
    opentype: list[str]
    receiveStack: list[Any]
    inboundDeliveryQueue: list[Any]
    connectionAbandoned: bool

    def __init__(self, *args: Any, bounds: Bounds | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bounds = bounds or Bounds()
        self._allowance = Allowance()
        self._tokens = Tokens()
        words, answers = self.incomingVocabulary, self.bounds.allocated
        self._nothing = nothings.nothing_pattern(words)
        self._allocated = None if answers is None else answers.pattern(words)
        # Type and size of what is gathered; whether in vain.
        self._body: tuple[int, int, bool] | None = None
        self._reading = True
        self._yielded = False
        self._turn_calls = 0

    @staticmethod
    def seconds() -> float:
        """Return the time by which silence is measured: of no clock that may be set, or runs as we stand."""
        return CLOCK.seconds()

    def connectionMade(self) -> None:
        super().connectionMade()
        self.dataLastReceivedAt = self.seconds()

    def dataReceived(self, chunk: bytes) -> None:
        if self.connectionAbandoned:
            return
        self.dataLastReceivedAt = self.seconds()
        if self._tokens.feed(chunk) and not self._yielded:
            self.arrived()

    def arrived(self) -> None:
        """Look at what has arrived."""
        self.go_on()

    def leave_it(self) -> None:
        """Have what has arrived, and all behind it, wait for a call of ``go_on``."""
        self._yielded = True
        self._read(False)

    def go_on(self) -> None:
        """Look at what has arrived, as far as this turn and others allow."""
        self._yielded = False
        if self.connectionAbandoned:
            return
        try:
            turn_ended = self._take_tokens()
        except BananaError as error:
            self.refuse(str(error.args[0]) if error.args else "it broke the protocol")
            return
        except BananaTooLong as error:
            self.refuse(str(error))
            return
        except Exception as error:
            # Foolscap asserts, and decodes, what the other end sent.
            self.refuse(f"what it sent makes no sense ({type(error).__name__})")
            return
        if self.is_over():
            return
        if turn_ended:
            self.leave_it()
            self.turn_ended()
        else:
            self._read(self.may_go_on)

    @property
    def may_go_on(self) -> bool:
        """Whether more can be taken now; when that changes, ``wake`` is to be called."""
        return len(self.activeLocalCalls) + len(self.inboundDeliveryQueue) < MAX_CALLS

    def is_over(self) -> bool:
        """Whether nothing more is taken, for good."""
        return self.connectionAbandoned

    def wake(self) -> None:
        """There may be room again for what was left."""
        if not self._reading and not self._yielded and self.may_go_on:
            self._yielded = True
            eventual.eventually(self.go_on)

    def turn_ended(self) -> None:
        """There is more to look at: see to it that ``go_on`` is called when the others had their turn."""
        eventual.eventually(self.go_on)

    @property
    def held_cost(self) -> int:
        """What the message that is being received is so far."""
        return self._allowance.held_cost

    def charge(self, cost: int) -> None:
        """That message becomes larger by so much; raises TooMuch if it must not."""
        self._allowance.charge(cost)

    def message_begins(self) -> None:
        """What comes now belongs to another message."""
        self._allowance.begin()

    def _read(self, reading: bool) -> None:
        if reading is not self._reading:
            self._reading = reading
            transport = self.transport
            name = "resumeProducing" if reading else "pauseProducing"
            act = getattr(transport, name, None)  # what joins ends in memory has none
            if act is not None:
                act()

    def _take_tokens(self) -> bool:
        """Take tokens, and return whether the turn ended before they did."""
        tokens, left = self._tokens, self.bounds.turn_tokens
        self._turn_calls = 0
        while self.may_go_on and not self.connectionAbandoned:
            if self._body is None:
                if left <= 0 or self._turn_calls >= TURN_CALLS:
                    return tokens.waiting_bytes > 0
                if tokens_taken := self._took_answer():
                    left -= tokens_taken
                    continue
                header = tokens.header()
                if header is None:
                    return False
                left -= 1
                self._take_header(*header)
                continue
            kind, size, rejected = self._body
            body = tokens.body(size)
            if body is None:
                return False
            self._body = None
            self._take_body(kind, body, rejected)
        return False

    def _took_answer(self) -> int:
        """Take an answer that is recognized as a whole, if one comes next; returns its tokens, or 0."""
        if len(self.receiveStack) > 1 or self.inOpen or self.discardCount:
            return 0
        if self._took_nothing():
            return nothings.TOKENS
        return allocated.TOKENS if self._took_allocated() else 0

    def _took_nothing(self) -> bool:
        """Take an answer that says nothing, if that comes next, and is welcome."""
        found = None if self._nothing is None else self._tokens.ahead(self._nothing)
        if found is None:
            return False
        request = self.waitingForAnswers.get(nothings.number_of(found["request"]))
        if request is None or type(request.constraint) not in _MAY_BE_NOTHING:
            return False
        self._tokens.pass_over(found)
        self.message_begins()
        self.objectCounter += nothings.OPENED
        request.complete(None)
        return True

    def _took_allocated(self) -> bool:
        """Take the answer that has allocated one share, if that comes next, and is welcome."""
        kind = self.bounds.allocated
        found = None if self._allocated is None else self._tokens.ahead(self._allocated)
        said = None if found is None else allocated.parsed(found)
        if kind is None or found is None or said is None:
            return False
        request = self.waitingForAnswers.get(said.request)
        if request is None or request.constraint is not kind.constraint:
            return False
        self._tokens.pass_over(found)
        self.message_begins()
        self.objectCounter += allocated.OPENED
        tracker = self.getTrackerForYourReference(said.clid, kind.interface_name, said.furl)
        request.complete((set(), {said.share: tracker.getRef()}))
        return True

    def _take_header(self, kind: int, number: int) -> None:
        if kind == PING:
            self.sendPONG(number)
            return
        if kind == PONG:
            return
        typebyte = _TYPES.get(kind)
        if typebyte is None or kind not in _HANDLERS:
            raise TooMuch(f"it sent a token of unknown type {kind:#x}")
        if kind in (LONGINT, LONGNEG) and number > MAX_INTEGER_BYTES:
            raise TooMuch(f"it sent an integer of {number} bytes")
        rejected, was_in_open = self.discardCount > 0, self.inOpen
        if kind == OPEN:
            if was_in_open:
                raise TooMuch("it opened something within the name of what it opens")
            if len(self.receiveStack) == 1 and not rejected:
                self.message_begins()
            if len(self.receiveStack) + self.discardCount > MAX_DEPTH:
                raise TooMuch(f"it sent something within more than {MAX_DEPTH} others")
            self.inboundObjectCount = self.objectCounter
            self.objectCounter += 1
            self.inOpen = True
        elif was_in_open and kind in (CLOSE, ABORT):
            raise TooMuch("it ended something before its name")
        if kind != ERROR:  # which is outside of messages, and has a bound of its own
            self._allowance.count_token()
            self.charge(TOKEN_COST)
        if not rejected and kind not in _ALWAYS_LEGAL:
            rejected = not self._is_welcome(typebyte, number, was_in_open)
        if kind in _WITH_BODY:
            if rejected:
                self._tokens.skip(number)
                return
            self.charge(number)
            self._allowance.count_body(number)
            self._body = kind, number, False
        elif kind == FLOAT:
            self._body = kind, banana.FLOAT_BYTES, rejected
        else:
            _HANDLERS[kind](self, number, rejected)

    def _is_welcome(self, typebyte: bytes, number: int, was_in_open: bool) -> bool:
        """Ask what is being made whether it takes such a token; tell it if not."""
        top = self.receiveStack[-1]
        try:
            if was_in_open:
                top.openerCheckToken(typebyte, number, self.opentype)
            else:
                top.checkToken(typebyte, number)
        except Violation:
            where = "openerCheckToken" if was_in_open else "checkToken"
            self.handleViolation(BananaFailure(), where, inOpen=self.inOpen)
            self.inOpen = False
            return False
        return True

    def _opened(self, number: int, rejected: bool) -> None:
        self.inboundOpenCount = number
        if not rejected:
            self.opentype = []
        elif self.inOpen:  # within something that is discarded; else discarding it has just begun
            self.discardCount += 1
            self.inOpen = False

    def _closed(self, number: int, rejected: bool) -> None:
        if self.discardCount:
            self.discardCount -= 1
        else:
            self.handleClose(number)

    def _aborted(self, number: int, rejected: bool) -> None:
        if not rejected:
            try:
                raise Violation("ABORT received")  # the words that Foolscap looks for
            except Violation:
                self.handleViolation(BananaFailure(), "receive-abort")

    def _failed(self, number: int, rejected: bool) -> None:
        if number > SIZE_LIMIT:
            raise TooMuch(f"it complained in {number} bytes")
        self._body = ERROR, number, False

    def _integer(self, number: int, rejected: bool) -> None:
        self._deliver(number, rejected)

    def _negative(self, number: int, rejected: bool) -> None:
        self._deliver(-number, rejected)

    def _word(self, number: int, rejected: bool) -> None:
        word = self.incomingVocabulary.get(number)
        if word is None:
            raise TooMuch(f"it used abbreviation {number}, which nobody knows")
        self._deliver(word, rejected)

    def _take_body(self, kind: int, body: bytes, rejected: bool) -> None:
        if kind == STRING:
            self._deliver(body, False)
        elif kind == FLOAT:
            self._deliver(struct.unpack("!d", body)[0], rejected)
        elif kind == ERROR:
            text = body.decode("utf-8", "replace")
            self.refuse(f"the other end gave up: {text}", tell=False)
        else:
            value = int.from_bytes(body, "big")
            self._deliver(value if kind == LONGINT else -value, False)

    def _deliver(self, value: Any, rejected: bool) -> None:
        if rejected:
            return
        if self.inOpen:
            self.handleOpen(self.inboundOpenCount, self.inboundObjectCount, value)
        else:
            self.handleToken(value)

    def refuse(self, reason: str, tell: bool = True) -> None:
        """End the connection, as the other end broke a bound."""
        raise NotImplementedError


_HANDLERS: dict[int, Callable[[Any, int, bool], None]] = {
    OPEN: BoundedReceiver._opened,
    CLOSE: BoundedReceiver._closed,
    ABORT: BoundedReceiver._aborted,
    ERROR: BoundedReceiver._failed,
    INT: BoundedReceiver._integer,
    NEG: BoundedReceiver._negative,
    VOCAB: BoundedReceiver._word,
    STRING: BoundedReceiver._integer,  # these three have bodies, which come first
    LONGINT: BoundedReceiver._integer,
    LONGNEG: BoundedReceiver._integer,
    FLOAT: BoundedReceiver._integer,
}
