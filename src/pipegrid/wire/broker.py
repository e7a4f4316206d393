# mypy: disable-error-code="misc"
"""
Foolscap's connections with bounds: on negotiation, tokens, messages, references, and on what one turn may
take.

A ``BoundedBroker`` does with each token what Foolscap does, out of ``wire.banana``'s hands instead of its
own. What it adds, for clients and servers alike:

* **A message has an allowance**, counted as what it becomes in memory (``TOKEN_COST`` a token, and its
  bodies) before any of it is there. It begins with a few KiB, and grows when it is known what the message
  is: an answer to a call of ours, as much as that call may bring; a call of an object of ours,
  ``Bounds.call_cost``. A reference to something in the same message costs as much as all before it: it can
  be used as often.
* **Answers to nothing** end the connection. Objects that nobody needs are refused: gifts (references to
  third parties, for which a tub would connect to where it is told), copies of objects other than failures,
  our own objects coming back.
* **Turns.** After ``Bounds.turn_tokens`` tokens or ``TURN_CALLS`` calls the others have their turn.
  Meanwhile nothing is read from the socket; neither is it while ``MAX_CALLS`` calls are under way.
* **Ends.** Whoever breaks a bound is told so, and is gone ``GRACE_S`` later, whether it listens or not. All
  time is monotonic.

Not all methods of Foolscap's that are overridden here are documented; ``tests/wire/test_broker.py`` would
say if they were gone, and the fuzz target ``banana`` compares what both make of the same bytes.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

from foolscap import eventual
from foolscap.broker import Broker, PBOpenRegistry, PBRootUnslicer
from foolscap.call import CallSlicer, FailureSlicer
from foolscap.slicer import UnslicerRegistry
from foolscap.tokens import SIZE_LIMIT, BananaError, BananaFailure, Violation
from twisted.internet.interfaces import IDelayedCall
from twisted.python.failure import Failure

from pipegrid.wire import banana
from pipegrid.wire.allowance import ANSWER_COST, TOKEN_COST, Allowance, Bounds, TooMuch
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
from pipegrid.wire.negotiation import GRACE_S

MAX_DEPTH = 10
"""A call, its arguments, a dictionary, a triple, a list, a quadruple: six."""

MAX_INTEGER_BYTES = 9
"""What Tahoe-LAFS says of unknown free space, 2^64, has nine."""

MAX_REFERENCES = 16_384
"""To objects at the other end: some 16 MB."""

MAX_CALLS = 128
"""Calls from the other end that are under way or wait; Tahoe-LAFS sends a hundred writes at once."""

TURN_CALLS = 8


_TYPES = {code: bytes((code,)) for code in range(0x81, 0x90)}
_ALWAYS_LEGAL = frozenset((PING, PONG, ABORT, CLOSE, ERROR))
_WITH_BODY = frozenset((STRING, LONGINT, LONGNEG))
_VALUES = ("none", "boolean", "unicode", "list", "tuple", "dict", "set", "immutable-set")
_OPEN_TYPES = (*_VALUES, "reference", "arguments", "my-reference")
_KNOWN: dict[tuple[str, ...], Any] = {**UnslicerRegistry, **PBOpenRegistry}


class BoundedRoot(PBRootUnslicer):
    """Knows the objects that storage and introducers speak of, and no others."""

    openRegistries = [{(name,): _KNOWN[name,] for name in _OPEN_TYPES}]

    def open(self, opentype: tuple[str, ...]) -> Any:
        """Return what takes such an object's tokens; of copies only a failure's."""
        if opentype[0] == "copyable" and opentype[1:] not in ((), (FailureSlicer.classname,)):
            raise Violation("copies of objects are not taken")
        return super().open(opentype)


class BoundedBroker(Broker):
    """
    One connection, after its negotiation; see above.

    Args:
        bounds: what differs between connections; the other arguments are Foolscap's.
    """

    unslicerClass = BoundedRoot
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
        self._body: tuple[int, int, bool] | None = (
            None  # type and size of what is gathered; whether in vain
        )
        self._reading = True
        self._yielded = False
        self._turn_calls = 0
        self._aborting: IDelayedCall | None = None

    @staticmethod
    def seconds() -> float:
        """Return the time by which silence is measured; no clock that may be set."""
        return time.monotonic()

    # Receiving.

    def connectionMade(self) -> None:
        """Begin."""
        super().connectionMade()
        self.dataLastReceivedAt = self.seconds()

    def dataReceived(self, chunk: bytes) -> None:
        """Take what arrived."""
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

    # What Foolscap asks its broker for.

    def getObject(self, count: int) -> Any:
        """Return something in the same message; all of it is there once more."""
        self.charge(self.held_cost)
        return super().getObject(count)

    def getRequest(self, reqID: int) -> Any:
        """Return the call of ours that an answer is for."""
        request = self.waitingForAnswers.get(reqID)
        if request is None:
            raise TooMuch("it answered what nobody had asked")
        self._allowance.allow(getattr(request, "answer_cost", ANSWER_COST))
        return request

    def getMyReferenceByCLID(self, clid: int) -> Any:
        """Return the object of ours that a call is for; KeyError if there is none."""
        found = super().getMyReferenceByCLID(clid)
        if clid:
            self._allowance.allow(self.bounds.call_cost)
        return found

    def getTrackerForYourReference(self, clid: int, *args: Any, **kwargs: Any) -> Any:
        """Return what stands for an object of the other end's."""
        if len(self.yourReferenceByCLID) >= MAX_REFERENCES and clid not in self.yourReferenceByCLID:
            raise TooMuch(f"it gave us more than {MAX_REFERENCES} objects")
        return super().getTrackerForYourReference(clid, *args, **kwargs)

    def send(self, obj: Any) -> Any:
        """Send a call or an answer; of a call, remember how large its answer may be."""
        if isinstance(obj, CallSlicer) and obj.reqID:
            request = self.waitingForAnswers.get(obj.reqID)
            if request is not None:
                request.answer_cost = self.bounds.answer_cost(obj.methodname, tuple(obj.args))
        return super().send(obj)

    def scheduleCall(self, delivery: Any, ready_deferred: Any) -> None:
        """Have a call of the other end carried out, in its turn."""
        self._turn_calls += 1
        super().scheduleCall(delivery, ready_deferred)

    def doNextCall(self) -> None:
        """Carry out the next call."""
        super().doNextCall()
        self.wake()

    def _callFinished(self, res: Any, delivery: Any) -> None:
        super()._callFinished(res, delivery)
        self.call_ended(delivery)

    def callFailed(self, f: Any, reqID: int, delivery: Any = None) -> None:
        """Tell the other end that a call failed."""
        super().callFailed(f, reqID, delivery)
        f.value.__traceback__ = None  # its frames hold what the call was given
        f.cleanFailure()
        if delivery is not None:
            self.call_ended(delivery)

    def call_ended(self, delivery: Any) -> None:
        """A call was carried out."""
        delivery.allargs.args, delivery.allargs.kwargs = [], {}
        self.wake()

    # Time, and the end.

    def keepaliveTimerFired(self) -> None:
        """Ask the other end whether it is there, after a long silence."""
        self.keepaliveTimer = None
        if self.seconds() - self.dataLastReceivedAt > self.keepaliveTimeout:
            self.sendPING()
        self.keepaliveTimer = eventual.reactor.callLater(
            self.keepaliveTimeout + 1, self.keepaliveTimerFired
        )

    def disconnectTimerFired(self) -> None:
        """Give the connection up, after a longer one."""
        self.disconnectTimer = None
        if self.seconds() - self.dataLastReceivedAt > self.disconnectTimeout:
            self.connectionTimedOut()
            return
        self.disconnectTimer = eventual.reactor.callLater(
            self.disconnectTimeout + 1, self.disconnectTimerFired
        )

    def refuse(self, reason: str, tell: bool = True) -> None:
        """End the connection, as the other end broke a bound; what is unanswered fails for that reason."""
        if self.connectionAbandoned:
            return
        self.connectionAbandoned = True
        self.refused(reason)
        if tell:
            self.sendError(reason)
        self.shutdown(Failure(TooMuch(reason)))

    def refused(self, reason: str) -> None:
        """It is known why the connection ends."""

    def shutdown(self, why: Failure, fireDisconnectWatchers: bool = True) -> None:
        """End the connection, soon, and whether or not the other end takes what was sent."""
        self._tokens.clear()
        self._read(not self.connectionAbandoned)  # of those who were refused nothing more is read
        self.connectionAbandoned = True
        if self._aborting is None and not self.disconnected:
            self._aborting = eventual.reactor.callLater(GRACE_S, self._abort)
        super().shutdown(why, fireDisconnectWatchers)

    def _abort(self) -> None:
        self._aborting = None
        abort = getattr(self.transport, "abortConnection", None)
        if abort is not None:
            abort()

    def connectionLost(self, why: Failure) -> None:
        """All is over: keep nothing that was large."""
        self.connectionAbandoned = True
        if self._aborting is not None:
            self._aborting.cancel()
            self._aborting = None
        super().connectionLost(why)
        self._tokens.clear()
        self._body = None
        del self.receiveStack[1:]
        self.inboundDeliveryQueue = []


_HANDLERS: dict[int, Callable[[Any, int, bool], None]] = {
    OPEN: BoundedBroker._opened,
    CLOSE: BoundedBroker._closed,
    ABORT: BoundedBroker._aborted,
    ERROR: BoundedBroker._failed,
    INT: BoundedBroker._integer,
    NEG: BoundedBroker._negative,
    VOCAB: BoundedBroker._word,
    STRING: BoundedBroker._integer,  # these three have bodies, which come first
    LONGINT: BoundedBroker._integer,
    LONGNEG: BoundedBroker._integer,
    FLOAT: BoundedBroker._integer,
}
