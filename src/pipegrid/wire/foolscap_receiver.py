"""The receiver of Banana tokens with bounds on what it allocates."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs
from foolscap import eventual
from foolscap.broker import Broker
from foolscap.slicers.none import Nothing
from foolscap.tokens import SIZE_LIMIT, BananaError, BananaFailure, Violation

from pipegrid.reactor.process_settings import CLOCK
from pipegrid.wire import banana
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
from pipegrid.wire.messages import MAX_BLOCK_WRITES

# The answer that says nothing, recognized as a whole.
#
# It is what a server answers to each write and each ``close``: seven tokens, for which Foolscap makes,
# asks and ends two objects, always to the same effect.
#
# Source: Foolscap 24.9's documentation ("specifications/pb"), and what it sends.

NOTHING_OPENED = 2
"""Objects in such an answer, itself included."""

NOTHING_TOKENS = 7

NUMBER = rb"[\x00-\x7f]{1,5}"
"""What matches a number of a token, in base 128."""


def nothing_pattern(words: Mapping[int, bytes]) -> re.Pattern[bytes] | None:
    """
    Return what matches such an answer; its group ``request`` is the number of the call, in base 128.

    Args:
        words: what numbers abbreviate on this connection.

    Returns:
        None: it cannot be recognized here.
    """
    numbers = {word: number for number, word in words.items()}
    answer, none = numbers.get(b"answer"), numbers.get(b"none")
    if answer is None or none is None or max(answer, none) > 0x7F:
        return None
    return re.compile(
        b"".join(
            (
                *(
                    b"(?P<outer>",
                    NUMBER,
                    b")",
                    byte_pattern(OPEN),
                    byte_pattern(answer),
                    byte_pattern(VOCAB),
                ),
                *(b"(?P<request>", NUMBER, b")", byte_pattern(INT)),
                *(
                    b"(?P<inner>",
                    NUMBER,
                    b")",
                    byte_pattern(OPEN),
                    byte_pattern(none),
                    byte_pattern(VOCAB),
                ),
                *(b"(?P=inner)", byte_pattern(CLOSE), b"(?P=outer)", byte_pattern(CLOSE)),
            )
        )
    )


def number_of(digits: bytes) -> int:
    """Return a token's number, given its digits in base 128, the lowest first."""
    value = 0
    for digit in reversed(digits):
        value = value << 7 | digit
    return value


def byte_pattern(value: int) -> bytes:
    """Return what matches this byte."""
    return re.escape(bytes((value,)))


# The answer that has allocated one share, recognized as a whole.
#
# It is what a server answers where a small file has one share for it: no shares that are there, and one
# writer. For its twenty tokens Foolscap makes, asks and ends five objects, always to the same effect, which
# took a quarter of the time that a client has for such a share. Answers of any other form are Foolscap's.
#
# Source: Foolscap 24.9's documentation ("specifications/pb"), and what it sends.

ALLOCATED_OPENED = 5
"""Objects in such an answer, itself included."""

ALLOCATED_TOKENS = 20

MAX_FURL_BYTES = 512
"""Of the writer's; that of a server with ten addresses."""

_SHARE_NUMBER = rb"[\x00-\x7f]{1,2}"


@attrs.frozen(eq=False)
class AllocatedAnswers:
    """
    Which answers may be taken for one.

    Attributes:
        constraint: of the calls that are answered so; of all others answers are left alone.
        interface_name: of a writer.
    """

    constraint: Any
    interface_name: str

    def pattern(self, words: Mapping[int, bytes]) -> re.Pattern[bytes] | None:
        """
        Return what matches such an answer; see ``parsed``, which judges it.

        Args:
            words: what numbers abbreviate on this connection.

        Returns:
            None: it cannot be recognized here.
        """
        numbers = {word: number for number, word in words.items()}
        name = self.interface_name.encode("ascii")
        kinds = [numbers.get(kind, 0x80) for kind in (b"answer", b"tuple", b"set", b"dict")]
        reference = numbers.get(b"my-reference", 0x80)
        if max(*kinds, reference, len(name)) > 0x7F or name in numbers:
            return None
        answer, pair, there, writers = (_opened(place, kind) for place, kind in enumerate(kinds))
        return re.compile(
            b"".join(
                (
                    *(answer, b"(?P<request>", NUMBER, b")", byte_pattern(INT)),
                    *(pair, there, _closed(2), writers),
                    *(b"(?P<share>", _SHARE_NUMBER, b")", byte_pattern(INT)),
                    *(_opened(4, reference), b"(?P<clid>", NUMBER, b")", byte_pattern(INT)),
                    *(byte_pattern(len(name)), byte_pattern(STRING), re.escape(name)),
                    *(b"(?P<size>", _SHARE_NUMBER, b")", byte_pattern(STRING)),
                    *(b"(?P<furl>[!-~]{1,%d})" % MAX_FURL_BYTES, _closed(4)),
                    *(_closed(3), _closed(1), _closed(0)),
                )
            )
        )


class Allocated(NamedTuple):
    """
    What such an answer says.

    Attributes:
        request: number of the call.
        share: number of the share that may be written.
        clid: number of its writer at the other end.
        furl: the writer's.
    """

    request: int
    share: int
    clid: int
    furl: str


def parsed(found: re.Match[bytes]) -> Allocated | None:
    """Return what an answer says that a ``pattern`` has matched; None: it is another after all."""
    furl = found["furl"]
    if number_of(found["size"]) != len(furl):
        return None
    request, share, clid = (number_of(found[name]) for name in ("request", "share", "clid"))
    return Allocated(request, share, clid, furl.decode("ascii"))


def _opened(place: int, kind: int) -> bytes:
    parts = b"(?P<open%d>" % place, NUMBER, b")", byte_pattern(OPEN), byte_pattern(kind)
    return b"".join((*parts, byte_pattern(VOCAB)))


def _closed(place: int) -> bytes:
    return b"(?P=open%d)" % place + byte_pattern(CLOSE)


# What a Foolscap message may become in memory, counted before any of it is there.
#
# Every message begins with a few KiB, and is allowed more when it is known what it is. ``broker`` charges for
# each token, and for its body, what they become.

TOKEN_COST = 128
"""Bytes of memory that a token becomes, besides its body; a tuple of a number and a string are four."""

FIRST_COST = 4096
"""Of a message before it is known what it is. Calls of the tub itself, as for a name, become some 2000."""

CALL_COST = 64 * 1024
"""Of a call of an object of ours, where nothing else is said."""

ANSWER_COST = 32 * 1024
"""Of an answer where its call says nothing else. A failure has up to 5 KB of text, in some 60 tokens."""

MAX_SMALL_TOKENS = 100_000
"""
Of a message without blocks, a second's work: 256 shares, each with 30 tests of seven tokens, 30 small writes
of five, and twelve around them, are 95,232; 4096 announcements 25,000.
"""

TOKEN_BYTES = 100
"""
A message may have one token more for so many bytes in it: the five of a block of an MDMF share have 531 and
more.
"""

MAX_TOKENS = MAX_SMALL_TOKENS + 5 * MAX_BLOCK_WRITES


class LimitExceeded(BananaError):
    """The other end broke a bound, or the protocol. Why is in the text."""

    def __str__(self) -> str:
        return str(self.args[0])


@attrs.frozen
class Bounds:
    """
    What differs between connections.

    Attributes:
        call_cost: allowance of a call that the other end makes of an object of ours.
        answer_cost: the same for an answer, given the method that was called and its arguments.
        turn_tokens: looked at before others have their turn.
        allocated: answers that are recognized as a whole, if any are.
    """

    call_cost: int = CALL_COST
    answer_cost: Callable[[str, tuple[Any, ...]], int] = lambda method, arguments: ANSWER_COST
    turn_tokens: int = 512
    allocated: AllocatedAnswers | None = None


class Allowance:
    """
    Of the message that is being received.

    Attributes:
        held_cost: what it is so far.
    """

    __slots__ = ("_cost_left", "_tokens_earned", "_tokens_left", "held_cost")

    def __init__(self) -> None:
        self.held_cost = 0
        self._cost_left = 0
        self._tokens_left = self._tokens_earned = 0

    def begin(self) -> None:
        """What comes now belongs to another message."""
        self.held_cost = 0
        self._cost_left = FIRST_COST
        self._tokens_left = MAX_SMALL_TOKENS
        self._tokens_earned = MAX_TOKENS - MAX_SMALL_TOKENS

    def count_body(self, size: int) -> None:
        """A token brings so many bytes, which allow for more tokens."""
        more = min(size // TOKEN_BYTES, self._tokens_earned)
        self._tokens_earned -= more
        self._tokens_left += more

    def count_token(self) -> None:
        """One more token; raises TooMuch if it must not be."""
        self._tokens_left -= 1
        if self._tokens_left < 0:
            raise LimitExceeded("a message had more tokens than one of its size may have")

    def charge(self, cost: int) -> None:
        """It becomes larger by so much; raises TooMuch if it must not."""
        self._cost_left -= cost
        self.held_cost += cost
        if self._cost_left < 0:
            raise LimitExceeded(
                f"a message became larger than its kind may be, at {self.held_cost} bytes"
            )

    def allow(self, cost: int) -> None:
        """It has turned out what it is, and that it may have so much in all."""
        self._cost_left = max(self._cost_left, cost - self.held_cost)


# The tokens of a Foolscap connection, taken out of ``banana``'s hands and held to bounds, in turns.
#
# What a message may cost is ``allowance``'s to say; what the bounds are for, ``broker``'s.

# mypy: disable-error-code="misc"


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
        self._nothing = nothing_pattern(words)
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
            return NOTHING_TOKENS
        return ALLOCATED_TOKENS if self._took_allocated() else 0

    def _took_nothing(self) -> bool:
        """Take an answer that says nothing, if that comes next, and is welcome."""
        found = None if self._nothing is None else self._tokens.ahead(self._nothing)
        if found is None:
            return False
        request = self.waitingForAnswers.get(number_of(found["request"]))
        if request is None or type(request.constraint) not in _MAY_BE_NOTHING:
            return False
        self._tokens.pass_over(found)
        self.message_begins()
        self.objectCounter += NOTHING_OPENED
        request.complete(None)
        return True

    def _took_allocated(self) -> bool:
        """Take the answer that has allocated one share, if that comes next, and is welcome."""
        kind = self.bounds.allocated
        found = None if self._allocated is None else self._tokens.ahead(self._allocated)
        said = None if found is None else parsed(found)
        if kind is None or found is None or said is None:
            return False
        request = self.waitingForAnswers.get(said.request)
        if request is None or request.constraint is not kind.constraint:
            return False
        self._tokens.pass_over(found)
        self.message_begins()
        self.objectCounter += ALLOCATED_OPENED
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
            raise LimitExceeded(f"it sent a token of unknown type {kind:#x}")
        if kind in (LONGINT, LONGNEG) and number > MAX_INTEGER_BYTES:
            raise LimitExceeded(f"it sent an integer of {number} bytes")
        rejected, was_in_open = self.discardCount > 0, self.inOpen
        if kind == OPEN:
            if was_in_open:
                raise LimitExceeded("it opened something within the name of what it opens")
            if len(self.receiveStack) == 1 and not rejected:
                self.message_begins()
            if len(self.receiveStack) + self.discardCount > MAX_DEPTH:
                raise LimitExceeded(f"it sent something within more than {MAX_DEPTH} others")
            self.inboundObjectCount = self.objectCounter
            self.objectCounter += 1
            self.inOpen = True
        elif was_in_open and kind in (CLOSE, ABORT):
            raise LimitExceeded("it ended something before its name")
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
            raise LimitExceeded(f"it complained in {number} bytes")
        self._body = ERROR, number, False

    def _integer(self, number: int, rejected: bool) -> None:
        self._deliver(number, rejected)

    def _negative(self, number: int, rejected: bool) -> None:
        self._deliver(-number, rejected)

    def _word(self, number: int, rejected: bool) -> None:
        word = self.incomingVocabulary.get(number)
        if word is None:
            raise LimitExceeded(f"it used abbreviation {number}, which is unknown")
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
