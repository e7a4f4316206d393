"""
A reader of Banana tokens, with limits on the memory and the time that a message takes.

Source: Foolscap 24.9's documentation ("specifications/banana" and "specifications/pb"), and the bytes that it
sends.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any, NamedTuple

import attrs
from foolscap import eventual
from foolscap.broker import Broker
from foolscap.slicers.none import Nothing
from foolscap.tokens import SIZE_LIMIT, BananaError, BananaFailure, Violation

from pipegrid.reactor.process_settings import CLOCK
from pipegrid.wire.storage_messages import MAX_FOOLSCAP_WRITES

INT, STRING, NEG, FLOAT, LONGINT, LONGNEG, VOCAB = range(0x81, 0x88)
OPEN, CLOSE, ABORT = range(0x88, 0x8B)
ERROR, PING, PONG = range(0x8D, 0x90)

FLOAT_BYTES = 8
MAX_NUMBER_BITS = 63
"""Maximum length of a token's number in bits (nine bytes): a length, a count, or an integer below 2^31."""


class LimitExceeded(BananaError):
    """The other end exceeded a limit, or violated the protocol; the text says how."""

    def __str__(self) -> str:
        return str(self.args[0])


class Tokens:
    """
    Splits input into tokens; the input may arrive in pieces of any size.

    A token is a number in base 128, its lowest seven bits first; a byte from 0x80 up, which is the token's
    type; and for some types a body of as many bytes as the number says. After each header the caller calls
    ``body``, ``skip``, or neither. Invariant: of an incomplete body, only the bytes that have arrived are in
    memory, in one buffer.

    Foolscap's own ``Banana.handleData`` checks whether a string is expected before it accepts one, but many
    of these checks have no limit (a name, a string to write, any answer of a tub). Foolscap has no limit for
    a whole message, for depth, or for the time that one piece of input takes. It also copies all input for
    every token, so that 64 KiB of PINGs take a second. A filter before Foolscap's parser would read all
    headers twice, and could not know to which call a string belongs. So ``wire.foolscap_broker`` checks the
    limits, and passes each token to Foolscap's code.
    """

    __slots__ = ("_at", "_chunk", "_chunks", "_gathered", "_missing", "_shift", "_skip", "_value")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()  # the chunks after the current one
        self._chunk = b""
        self._at = 0
        self._value = self._shift = 0  # the part of a number that was read, and its length in bits
        self._gathered: BytesIO | None = None
        self._missing = 0  # bytes of the current body that have not arrived
        self._skip = 0

    def __repr__(self) -> str:
        return f"<Tokens, {self.waiting_bytes} bytes to look at, {self.missing_bytes} to come>"

    @property
    def waiting_bytes(self) -> int:
        """How many bytes of input are not consumed yet."""
        return len(self._chunk) - self._at + sum(map(len, self._chunks))

    @property
    def missing_bytes(self) -> int:
        """How many bytes of the current body, or of a skipped body, have not arrived."""
        return self._missing + self._skip

    def feed(self, data: bytes) -> bool:
        """
        Add input; returns whether there may be tokens to read. If not, all of the input belongs to a body.
        """
        if self._at == len(self._chunk) and not self._chunks:
            if self._missing > len(data):
                assert self._gathered is not None
                self._gathered.write(data)
                self._missing -= len(data)
                return False
            if self._skip >= len(data):
                self._skip -= len(data)
                return False
        if data:
            self._chunks.append(data)
        return True

    def clear(self) -> None:
        """Drop all input and state."""
        self.__init__()

    def header(self) -> tuple[int, int] | None:
        """
        Return the type and number of the next token, or None if the token's header has not arrived.

        Raises:
            LimitExceeded: the number has more than ``MAX_NUMBER_BITS``.
        """
        if self._skip and not self._skipped():
            return None
        while True:
            chunk, at, end = self._chunk, self._at, len(self._chunk)
            while at < end:
                byte = chunk[at]
                at += 1
                if byte >= 0x80:
                    value = self._value
                    self._at, self._value, self._shift = at, 0, 0
                    return byte, value
                if self._shift >= MAX_NUMBER_BITS:
                    raise LimitExceeded("a token's number has more than 9 bytes")
                self._value |= byte << self._shift
                self._shift += 7
            self._at = at
            if not self._next():
                return None

    def match_next(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """
        Return the pattern's match for the next tokens; None if they are not all in one piece of input, or a
        token is incomplete.
        """
        if self._skip or self._shift or (self._at == len(self._chunk) and not self._next()):
            return None
        return pattern.match(self._chunk, self._at)

    def skip_match(self, found: re.Match[bytes]) -> None:
        """Skip the tokens that ``match_next`` has just matched."""
        self._at = found.end()

    def body(self, size: int) -> bytes | None:
        """
        Return the body after a header; None if the body is incomplete: then call this again after more input.
        """
        if self._gathered is None:
            at, end = self._at, self._at + size
            if end <= len(self._chunk):
                self._at = end
                return self._chunk[at:end]
            self._gathered = BytesIO()
            self._missing = size
        while self._missing:
            part = memoryview(self._chunk)[self._at : self._at + self._missing]
            self._gathered.write(part)
            self._at += len(part)
            self._missing -= len(part)
            if self._missing and not self._next():
                return None
        gathered, self._gathered = self._gathered, None
        return gathered.getvalue()  # ``getvalue`` returns the buffer without a copy

    def skip(self, size: int) -> None:
        """Skip the body after a header."""
        self._skip = size
        self._skipped()

    def _skipped(self) -> bool:
        while True:
            part = min(self._skip, len(self._chunk) - self._at)
            self._at += part
            self._skip -= part
            if not self._skip:
                return True
            if not self._next():
                return False

    def _next(self) -> bool:
        if not self._chunks:
            self._chunk, self._at = b"", 0  # release the chunk, which may be large
            return False
        self._chunk, self._at = self._chunks.popleft(), 0
        return True


# The empty answer, parsed in one piece. A server sends an empty answer for each write and each ``close``:
# seven tokens, for which Foolscap creates two objects.

NOTHING_OPENED = 2
"""The number of objects that an empty answer opens, including itself."""

NOTHING_TOKENS = 7

NUMBER = rb"[\x00-\x7f]{1,5}"
"""The pattern of a token's number, in base 128."""


def nothing_pattern(words: Mapping[int, bytes]) -> re.Pattern[bytes] | None:
    """
    Return a pattern for an empty answer; the group ``request`` is the number of the call, in base 128.

    Args:
        words: the vocabulary of this connection: numbers to words.

    Returns:
        None: empty answers cannot be recognized on this connection.
    """
    numbers = {word: number for number, word in words.items()}
    answer, none = numbers.get(b"answer"), numbers.get(b"none")
    if answer is None or none is None or max(answer, none) > 0x7F:
        return None
    outer, inner = _opened(0, answer), _opened(1, none)
    return re.compile(outer + _integer(b"request", NUMBER) + inner + _closed(1) + _closed(0))


def number_of(digits: bytes) -> int:
    """Return the number that digits in base 128 encode, with the lowest digit first."""
    value = 0
    for digit in reversed(digits):
        value = value << 7 | digit
    return value


def byte_pattern(value: int) -> bytes:
    """Return a pattern that matches this byte."""
    return re.escape(bytes((value,)))


def _integer(name: bytes, digits: bytes) -> bytes:
    """Return a pattern for an integer; ``digits`` matches its number, which becomes the group ``name``."""
    return b"(?P<%b>%b)" % (name, digits) + byte_pattern(INT)


def _opened(place: int, kind: int) -> bytes:
    """
    Return a pattern for the token that opens an object; ``place`` is the object's number in the whole answer.
    """
    parts = b"(?P<open%d>" % place, NUMBER, b")", byte_pattern(OPEN), byte_pattern(kind)
    return b"".join((*parts, byte_pattern(VOCAB)))


def _closed(place: int) -> bytes:
    return b"(?P=open%d)" % place + byte_pattern(CLOSE)


# The answer that allocates one share, parsed in one piece. It has no existing shares and one writer, as for
# most small files. For its twenty tokens Foolscap creates five objects, which took a quarter of a client's
# time for such a share. Foolscap parses answers of any other form.

ALLOCATED_OPENED = 5
"""The number of objects that an answer which allocates one share opens, including itself."""

ALLOCATED_TOKENS = 20

MAX_FURL_BYTES = 512
"""The maximum length of the writer's fURL; enough for a server with ten addresses."""

_SHARE_NUMBER = rb"[\x00-\x7f]{1,2}"


@attrs.frozen(eq=False)
class AllocatedAnswers:
    """
    Which answers can be parsed as allocations in one piece.

    Attributes:
        constraint: Foolscap's constraint of the calls with such answers; Foolscap parses the answers to other
            calls.
        interface_name: the name of a writer's remote interface.
    """

    constraint: Any
    interface_name: str

    def pattern(self, words: Mapping[int, bytes]) -> re.Pattern[bytes] | None:
        """
        Return a pattern for an answer that allocates one share; ``parsed`` checks its match.

        Args:
            words: the vocabulary of this connection: numbers to words.

        Returns:
            None: such answers cannot be recognized on this connection.
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
                    *(answer, _integer(b"request", NUMBER), pair, there, _closed(2), writers),
                    *(_integer(b"share", _SHARE_NUMBER), _opened(4, reference)),
                    _integer(b"clid", NUMBER),
                    *(byte_pattern(len(name)), byte_pattern(STRING), re.escape(name)),
                    *(b"(?P<size>", _SHARE_NUMBER, b")", byte_pattern(STRING)),
                    *(b"(?P<furl>[!-~]{1,%d})" % MAX_FURL_BYTES, _closed(4)),
                    *(_closed(3), _closed(1), _closed(0)),
                )
            )
        )


class Allocated(NamedTuple):
    """
    The content of an answer that allocates one share.

    Attributes:
        request: number of the call.
        share: number of the share that may be written.
        clid: number of the share's writer at the other end.
        furl: fURL of the share's writer.
    """

    request: int
    share: int
    clid: int
    furl: str


def parsed(found: re.Match[bytes]) -> Allocated | None:
    """
    Parse a match of ``AllocatedAnswers.pattern``; None if the matched tokens are not such an answer after
    all.
    """
    furl = found["furl"]
    if number_of(found["size"]) != len(furl):
        return None
    request, share, clid = (number_of(found[name]) for name in ("request", "share", "clid"))
    return Allocated(request, share, clid, furl.decode("ascii"))


# The memory of a message is counted before it is allocated. Every message starts with an allowance of a few
# KiB, and gets a larger one when its kind is known. Each token and its body are charged.

TOKEN_COST = 128
"""Bytes of memory that a token takes without its body; a tuple of a number and a string has four tokens."""

FIRST_COST = 4096
"""Allowance of a message of a kind not yet known. Calls of the tub, such as getReference, take some 2000."""

CALL_COST = 64 * 1024
"""The default allowance of a call by the other end to an object of ours."""

ANSWER_COST = 32 * 1024
"""Allowance of an answer, unless the call sets another; a failure has up to 5 KB of text in 60 tokens."""

MAX_SMALL_TOKENS = 100_000
"""
The maximum number of tokens of a message without blocks; they take a second of CPU time. 256 shares, each
with 30 tests of seven tokens, 30 small writes of five tokens and twelve more tokens, have 95,232. 4096
announcements have 25,000.
"""

TOKEN_BYTES = 100
"""Each token beyond ``MAX_SMALL_TOKENS`` needs this many bytes; an MDMF block has five in over 530."""

MAX_TOKENS = MAX_SMALL_TOKENS + 5 * MAX_FOOLSCAP_WRITES


@attrs.frozen
class Bounds:
    """
    Limits that differ between connections.

    Attributes:
        call_cost: allowance of a call by the other end to an object of ours.
        answer_cost: returns the allowance of an answer, given the called method and its arguments.
        turn_tokens: maximum number of tokens that are read before other connections are served.
        allocated: answers that are parsed in one piece, if any.
    """

    call_cost: int = CALL_COST
    answer_cost: Callable[[str, tuple[Any, ...]], int] = lambda method, arguments: ANSWER_COST
    turn_tokens: int = 512
    allocated: AllocatedAnswers | None = None


# mypy: disable-error-code="misc"


MAX_DEPTH = 10
"""Maximum depth of nested objects. The deepest message has six, from its call to a quadruple in a list."""

MAX_INTEGER_BYTES = 9
"""The maximum length of an integer: Tahoe-LAFS sends 2^64 for unknown free space, which has nine bytes."""

MAX_CALLS = 128
"""Maximum number of the other end's calls that are running or queued; Tahoe-LAFS sends 100 writes at once."""

TURN_CALLS = 8
_TYPES = {code: bytes((code,)) for code in range(0x81, 0x90)}
_ALWAYS_LEGAL = frozenset((PING, PONG, ABORT, CLOSE, ERROR))
_MAY_BE_NOTHING = (type(None), Nothing)
_WITH_BODY = frozenset((STRING, LONGINT, LONGNEG))


class BoundedReceiver(Broker):
    """
    Receives tokens on one connection, in turns with other connections, and charges each message for its
    tokens.

    Args:
        bounds: limits that differ between connections; the other arguments are Foolscap's.

    Attributes:
        held_cost: the memory that the current message has taken so far.
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
        self.held_cost = self._cost_left = 0
        self._tokens_left = self._tokens_earned = 0
        self._tokens = Tokens()
        words, answers = self.incomingVocabulary, self.bounds.allocated
        self._nothing = nothing_pattern(words)
        self._allocated = None if answers is None else answers.pattern(words)
        # Type and size of the body that is being read, and whether the body will be dropped.
        self._body: tuple[int, int, bool] | None = None
        self._reading = True
        self._yielded = False
        self._turn_calls = 0

    @staticmethod
    def seconds() -> float:
        """Return the time of a clock that no program can set, for timeouts."""
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
        """Process the input that has arrived."""
        self.go_on()

    def pause(self) -> None:
        """Process nothing more until ``go_on`` is called."""
        self._yielded = True
        self._read(False)

    def go_on(self) -> None:
        """Process the input that has arrived, as far as this turn allows."""
        self._yielded = False
        if self.connectionAbandoned:
            return
        try:
            turn_ended = self._take_tokens()
        except BananaError as error:
            self.refuse(str(error.args[0]) if error.args else "it broke the protocol")
            return
        except Exception as error:
            # Foolscap's code asserts on untrusted input and decodes it, so it may raise any error.
            self.refuse(f"what it sent makes no sense ({type(error).__name__})")
            return
        if self.is_over():
            return
        if turn_ended:
            self.pause()
            self.turn_ended()
        else:
            self._read(self.may_go_on)

    @property
    def may_go_on(self) -> bool:
        """Whether more can be processed now. Call ``wake`` when this becomes true."""
        return len(self.activeLocalCalls) + len(self.inboundDeliveryQueue) < MAX_CALLS

    def is_over(self) -> bool:
        """Return whether nothing will be processed any more."""
        return self.connectionAbandoned

    def wake(self) -> None:
        """Continue processing if ``may_go_on`` permits it."""
        if not self._reading and not self._yielded and self.may_go_on:
            self._yielded = True
            eventual.eventually(self.go_on)

    def turn_ended(self) -> None:
        """Schedule ``go_on`` for after other connections are served."""
        eventual.eventually(self.go_on)

    # The allowance of the message that is being received.

    def message_begins(self) -> None:
        """Start the allowance of a new message."""
        self.held_cost = 0
        self._cost_left = FIRST_COST
        self._tokens_left = MAX_SMALL_TOKENS
        self._tokens_earned = MAX_TOKENS - MAX_SMALL_TOKENS

    def charge(self, cost: int) -> None:
        """Charge the current message for memory; raises LimitExceeded beyond the message's allowance."""
        self._cost_left -= cost
        self.held_cost += cost
        if self._cost_left < 0:
            raise LimitExceeded(
                f"a message became larger than its kind may be, at {self.held_cost} bytes"
            )

    def allow(self, cost: int) -> None:
        """Raise the allowance of the current message to ``cost`` in total, since its kind is known now."""
        self._cost_left = max(self._cost_left, cost - self.held_cost)

    def _count_body(self, size: int) -> None:
        """Count a body: its bytes allow the message more tokens."""
        more = min(size // TOKEN_BYTES, self._tokens_earned)
        self._tokens_earned -= more
        self._tokens_left += more

    def _read(self, reading: bool) -> None:
        if reading is not self._reading:
            self._reading = reading
            name = "resumeProducing" if reading else "pauseProducing"
            act = getattr(self.transport, name, None)  # absent in tests
            if act is not None:
                act()

    def _take_tokens(self) -> bool:
        """Process tokens; return whether the turn has ended while tokens are left."""
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
        """
        Process the next tokens if they are an answer that is parsed in one piece; returns the number of
        tokens, or 0.
        """
        if len(self.receiveStack) > 1 or self.inOpen or self.discardCount:
            return 0
        if self._took_nothing():
            return NOTHING_TOKENS
        return ALLOCATED_TOKENS if self._took_allocated() else 0

    def _took_nothing(self) -> bool:
        """
        Process the next tokens if they are an empty answer and the call permits one; returns whether they
        are.
        """
        found = None if self._nothing is None else self._tokens.match_next(self._nothing)
        if found is None:
            return False
        request = self.waitingForAnswers.get(number_of(found["request"]))
        if request is None or type(request.constraint) not in _MAY_BE_NOTHING:
            return False
        self._tokens.skip_match(found)
        self.message_begins()
        self.objectCounter += NOTHING_OPENED
        request.complete(None)
        return True

    def _took_allocated(self) -> bool:
        """
        Process the next tokens if they are an answer that allocates one share and the call permits one;
        returns whether they are.
        """
        kind = self.bounds.allocated
        found = None if self._allocated is None else self._tokens.match_next(self._allocated)
        said = None if found is None else parsed(found)
        if kind is None or found is None or said is None:
            return False
        request = self.waitingForAnswers.get(said.request)
        if request is None or request.constraint is not kind.constraint:
            return False
        self._tokens.skip_match(found)
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
        if kind != ERROR:  # ERROR is outside of messages and has its own limit
            self._tokens_left -= 1
            if self._tokens_left < 0:
                raise LimitExceeded("a message had more tokens than one of its size may have")
            self.charge(TOKEN_COST)
        if not rejected and kind not in _ALWAYS_LEGAL:
            rejected = not self._is_welcome(typebyte, number, was_in_open)
        if kind in _WITH_BODY:
            if rejected:
                self._tokens.skip(number)
                return
            self.charge(number)
            self._count_body(number)
            self._body = kind, number, False
        elif kind == FLOAT:
            self._body = kind, FLOAT_BYTES, rejected
        else:
            _HANDLERS[kind](self, number, rejected)

    def _is_welcome(self, typebyte: bytes, number: int, was_in_open: bool) -> bool:
        """
        Return whether the object being decoded accepts a token of this type and size; if not, report a
        violation to the object.
        """
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
        elif self.inOpen:  # within a discarded object, whose own OPEN was counted before
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
                raise Violation("ABORT received")  # the text that Foolscap expects here
            except Violation:
                self.handleViolation(BananaFailure(), "receive-abort")

    def _failed(self, number: int, rejected: bool) -> None:
        if number > SIZE_LIMIT:
            raise LimitExceeded(f"its error message has {number} bytes")
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
        """End the connection, since the other end exceeded a limit or broke the protocol."""
        raise NotImplementedError


_HANDLERS: dict[int, Callable[[Any, int, bool], None]] = {
    OPEN: BoundedReceiver._opened,
    CLOSE: BoundedReceiver._closed,
    ABORT: BoundedReceiver._aborted,
    ERROR: BoundedReceiver._failed,
    INT: BoundedReceiver._integer,
    NEG: BoundedReceiver._negative,
    VOCAB: BoundedReceiver._word,
    STRING: BoundedReceiver._integer,  # these four types have bodies, and never reach their handler
    LONGINT: BoundedReceiver._integer,
    LONGNEG: BoundedReceiver._integer,
    FLOAT: BoundedReceiver._integer,
}
