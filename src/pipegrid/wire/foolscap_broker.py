"""Bounded broker, negotiation, client tub, fast calls."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from foolscap import crypto, eventual
from foolscap.api import Tub
from foolscap.broker import PBOpenRegistry, PBRootUnslicer
from foolscap.call import CallSlicer, FailureSlicer, PendingRequest
from foolscap.negotiate import Negotiation
from foolscap.referenceable import Referenceable, RemoteReference
from foolscap.slicer import UnslicerRegistry
from foolscap.slicers.tuple import TupleUnslicer
from foolscap.tokens import NegotiationError, Violation
from twisted.internet.abstract import FileDescriptor
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.python.failure import Failure

from pipegrid.reactor.deferreds import Waiters
from pipegrid.reactor.sockets import StallWatch, unsent_bytes
from pipegrid.reactor.tls_context import bound_handshakes, only_forward_secret, self_signed_pem
from pipegrid.wire.banana import CLOSE, INT, LONGINT, OPEN, STRING, VOCAB
from pipegrid.wire.foolscap_receiver import ANSWER_COST, BoundedReceiver, Bounds, LimitExceeded

# Objects at the other end of a Foolscap connection that nobody here needs any more: given back at leisure.
#
# Foolscap says so of each at once, by a call that is answered. The writer of a small share is needed for two
# calls, so that every fourth call of many small puts was of this kind, and the server had to take it in
# between what somebody waits for. Here they wait until nothing is asked, or are given back by the
# connection's end. What the other end keeps for them meanwhile is bounded by ``MAX_UNNEEDED``.

MAX_UNNEEDED = 1024
"""Some 2 kB each at a server of ours; of more the oldest are given back at once."""

LOOK_S = 1.0
"""How often it is looked whether there is time."""

AT_A_TIME = 128
"""Given back at one look: a tenth of a second's work for a server."""


class DeferredRefRelease:
    """
    What is to be given back on one connection.

    Args:
        give_back: tells the other end; its arguments are those of ``later``.
        busy: whether somebody waits for the other end.
    """

    def __init__(self, give_back: Callable[[Any, int], None], busy: Callable[[], bool]) -> None:
        self._give_back = give_back
        self._busy = busy
        self._unneeded: deque[tuple[Any, int]] = deque()
        self._timer: IDelayedCall | None = None

    def later(self, tracker: Any, count: int) -> None:
        """An object is not needed any more, which the other end has given us so often."""
        self._unneeded.append((tracker, count))
        if len(self._unneeded) > MAX_UNNEEDED:
            self._give_back(*self._unneeded.popleft())
        self._look_later()

    def stop(self) -> None:
        """The connection is gone, and with it all that was referred to."""
        self._unneeded.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        if self._timer is None and self._unneeded:
            self._timer = eventual.reactor.callLater(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._busy():
            for _ in range(min(AT_A_TIME, len(self._unneeded))):
                self._give_back(*self._unneeded.popleft())
        self._look_later()


# How our Foolscap connections begin: as Foolscap's do, but with good ciphers only, and within bounds.

NEGOTIATION_S = 30
NEGOTIATION_BYTES = 4096
"""Foolscap's own bound on what is negotiated."""
GRACE_S = 5.0
"""Whoever failed is told why, and cut off after that."""


class StrictNegotiation(Negotiation):
    """Set as a tub's ``negotiationClass``, or as the class of a negotiation that has not begun."""

    def startTLS(self, cert: Any) -> None:
        """Begin TLS with ``cert``, with forward-secret ciphers only, and a bound on handshakes."""
        options = crypto.FoolscapContextFactory(
            privateKey=cert.privateKey.original, certificate=cert.original
        )
        only_forward_secret(options.getContext())
        bound_handshakes(options.getContext())
        self.transport.startTLS(options)


class BoundedNegotiation(StrictNegotiation):
    """
    What comes before: ``NEGOTIATION_BYTES`` at most, in ``NEGOTIATION_S``; none of it goes to Foolscap's
    log.
    """

    SERVER_TIMEOUT = NEGOTIATION_S
    _aborting: IDelayedCall | None = None
    failureReason: Failure | None

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Foolscap keeps its last messages, with all that strangers sent."""

    def dataReceived(self, chunk: bytes) -> None:
        """Take what arrived, unless it has failed already."""
        if not self._has_failed():
            super().dataReceived(chunk)
            if self._has_failed():
                self._end()

    def negotiationFailed(self) -> None:
        """It has failed, perhaps in code of Foolscap's that took apart what a stranger said."""
        why = self.failureReason
        if why is not None and why.check(
            LookupError, ValueError, TypeError, AttributeError, AssertionError
        ):
            self.failureReason = Failure(NegotiationError("what it said first makes no sense"))
        super().negotiationFailed()

    def negotiationTimedOut(self) -> None:
        super().negotiationTimedOut()
        self._end()

    def connectionLost(self, reason: Failure) -> None:
        """It failed, or somebody hung up."""
        if self._aborting is not None:
            self._aborting.cancel()
            self._aborting = None
        super().connectionLost(reason)

    def _has_failed(self) -> bool:
        return self.failureReason is not None

    def _end(self) -> None:
        # What it failed for is being sent; who does not take it, or goes on, is cut off.
        self.buffer = b""
        transport: Any = self.transport
        if self._aborting is None and transport.connected:
            transport.pauseProducing()
            self._aborting = eventual.reactor.callLater(GRACE_S, self._abort)

    def _abort(self) -> None:
        self._aborting = None
        transport: Any = self.transport
        transport.abortConnection()


# Foolscap's connections with bounds: on negotiation, tokens, messages, references, and on what one turn may
# take.
#
# A ``BoundedBroker`` does with each token what Foolscap does, out of ``wire.banana``'s hands instead of its
# own. What it adds, for clients and servers alike:
#
# * **A message has an allowance**, counted as what it becomes in memory (``TOKEN_COST`` a token, and its
#   bodies) before any of it is there. It begins with a few KiB, and grows when it is known what the message
#   is: an answer to a call of ours, as much as that call may bring; a call of an object of ours,
#   ``Bounds.call_cost``. A reference to something in the same message costs as much as all before it: it can
#   be used as often.
# * **Answers to nothing** end the connection. Objects that nobody needs are refused: gifts (references to
#   third parties, for which a tub would connect to where it is told), copies of objects other than failures,
#   our own objects coming back, methods.
# * **Turns.** After ``Bounds.turn_tokens`` tokens or ``TURN_CALLS`` calls the others have their turn.
#   Meanwhile nothing is read from the socket; neither is it while ``MAX_CALLS`` calls are under way.
# * **References** are given back when there is time, see ``givingback``.
# * **Ends.** Whoever breaks a bound is told so, and is gone ``GRACE_S`` later, whether it listens or not. All
#   time is monotonic.
#
# Not all methods of Foolscap's that are overridden here are documented; ``tests/wire/test_broker.py`` would
# say if they were gone, and the fuzz target ``banana`` compares what both make of the same bytes.

# mypy: disable-error-code="misc"


MAX_REFERENCES = 16_384
"""To objects at the other end: some 16 MB."""

_VALUES = ("none", "boolean", "unicode", "list", "tuple", "dict", "set", "immutable-set")
_OPEN_TYPES = (*_VALUES, "reference", "arguments", "my-reference")


class WholeTuple(TupleUnslicer):
    """
    Takes a tuple that has all the parts that are declared.

    Foolscap's own takes one that ends early. Where it is an argument Foolscap looks at it once more before
    the call; nobody looks at an answer again.
    """

    def receiveClose(self) -> Any:
        if self.constraints is not None and len(self.list) < len(self.constraints):
            raise Violation(
                f"the tuple ends after {len(self.list)} of {len(self.constraints)} parts"
            )
        return super().receiveClose()


_KNOWN: dict[tuple[str, ...], Any] = {**UnslicerRegistry, **PBOpenRegistry, ("tuple",): WholeTuple}


class BoundedRoot(PBRootUnslicer):
    """Knows the objects that storage and introducers speak of, and no others."""

    openRegistries = [{(name,): _KNOWN[name,] for name in _OPEN_TYPES}]

    def open(self, opentype: tuple[str, ...]) -> Any:
        """Return what takes such an object's tokens; of copies only a failure's."""
        if opentype[0] == "copyable" and opentype[1:] not in ((), (FailureSlicer.classname,)):
            raise Violation("copies of objects are not taken")
        return super().open(opentype)


class BoundedBroker(BoundedReceiver):
    """
    One connection, after its negotiation; see above.

    Args:
        bounds: what differs between connections; the other arguments are Foolscap's.

    Attributes:
        stalls: what is to be stopped at its end, if the connection is watched.
    """

    unslicerClass = BoundedRoot
    stalls: StallWatch | None = None

    def __init__(self, *args: Any, bounds: Bounds | None = None, **kwargs: Any) -> None:
        super().__init__(*args, bounds=bounds, **kwargs)
        self._aborting: IDelayedCall | None = None
        self._unneeded = DeferredRefRelease(
            super().freeYourReference, lambda: bool(self.waitingForAnswers)
        )

    # What Foolscap asks its broker for.

    def getObject(self, count: int) -> Any:
        """Return something in the same message; all of it is there once more."""
        self.charge(self.held_cost)
        return super().getObject(count)

    def getRequest(self, reqID: int) -> Any:
        """Return the call of ours that an answer is for."""
        request = self.waitingForAnswers.get(reqID)
        if request is None:
            raise LimitExceeded("it answered a call that was not made")
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
        # Foolscap's way to say so; what is called by a name would be an assertion of its own.
        if clid < 0:
            raise LimitExceeded("it gave a method in the place of an object")
        if len(self.yourReferenceByCLID) >= MAX_REFERENCES and clid not in self.yourReferenceByCLID:
            raise LimitExceeded(f"it gave more than {MAX_REFERENCES} objects")
        return super().getTrackerForYourReference(clid, *args, **kwargs)

    def freeYourReference(self, tracker: Any, count: int) -> None:
        """An object of the other end's is not needed any more; it learns so when there is time."""
        if not self.disconnected:
            self._unneeded.later(tracker, count)

    def is_idle(self) -> bool:
        """Whether what is written to the transport now comes behind all that was asked to be sent."""
        root = self.rootSlicer
        return root.producingDeferred is not None and not root.sendQueue and not self.paused

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
        self.shutdown(Failure(LimitExceeded(reason)))

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

    def finish(self, why: Failure) -> None:
        """Nothing is asked any more, though the connection may not be gone yet."""
        self._unneeded.stop()
        super().finish(why)

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
        if self.stalls is not None:
            self.stalls.stop()
        super().connectionLost(why)
        self._tokens.clear()
        self._body = None
        del self.receiveStack[1:]
        self.inboundDeliveryQueue = []


# Foolscap tubs that only call others: each of a new identity, which need not be known again.
#
# Foolscap keeps at most one connection between two identities. So that two objects of ours do not push each
# other out of one server, each has its own; and an identity that is in use elsewhere, such as that of a
# Tahoe-LAFS node whose directory is read, would end the other's connections.

KEEPALIVE_S = 60
"""After so much silence the other side is asked whether it is still there."""

PONGS_APART_S = 1.0
GOODBYE_S = 1.0
"""So long a stopped tub waits for the kernel to take what was written."""

MAX_UNREAD = 1000
"""Answers to the other side in a row that it has left unread; one that gives references back has few."""
MAX_UNSENT_BYTES = 16 << 20
"""Of which so many wait by then; a window of what we send ourselves is far smaller."""

_VALID = timedelta(days=3650)


class CallersBroker(BoundedBroker):
    """
    The connection of somebody who calls, and is seldom called himself.

    What the other side has to be answered waits in memory until it reads: a flood of questions must not fill
    that.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ponged_s = -math.inf
        self._unread = 0

    def sendPONG(self, number: int) -> None:
        """Show that we are there, once in a while: of many who ask at once, one answer says as much."""
        now_s = self.seconds()
        if now_s - self._ponged_s >= PONGS_APART_S:
            self._ponged_s = now_s
            super().sendPONG(number)
            self._answered()

    def call_ended(self, delivery: Any) -> None:
        """A call of the other side was carried out, and answered."""
        super().call_ended(delivery)
        self._answered()

    def callFailed(self, f: Any, reqID: int, delivery: Any = None) -> None:
        """Tell the other side that a call failed."""
        super().callFailed(f, reqID, delivery)
        if delivery is None:  # it was no call even; else that was counted as its end
            self._answered()

    def connectionLost(self, why: Failure) -> None:
        """All is over, and its tub may be waiting for that."""
        super().connectionLost(why)
        if self.tub is not None:
            self.tub.forget(self.transport)

    def _answered(self) -> None:
        unsent = unsent_bytes(self.transport)
        self._unread = self._unread + 1 if unsent else 0
        if self._unread > MAX_UNREAD and unsent > MAX_UNSENT_BYTES:
            self.refuse("it asks again and again, and reads none of the answers")


class CallersNegotiation(BoundedNegotiation):
    """One whose tub knows of its connection until that is gone."""

    def connectionMade(self) -> None:
        if self.tub is not None:  # it is the side that connects
            self.tub.open_transports.add(self.transport)
        super().connectionMade()

    def connectionLost(self, reason: Failure) -> None:
        super().connectionLost(reason)
        if self.tub is not None:
            self.tub.forget(self.transport)


class CallersTub(Tub):
    """
    A tub that leaves the reactor clean: it has stopped when no connection is left, and nothing to be done.

    Foolscap's waits neither for connections that were ended before, nor for those whose negotiation goes on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.open_transports: set[Any] = set()
        self._all_gone: Waiters[None] = Waiters()

    def forget(self, transport: Any) -> None:
        """Take note that a connection is gone, and tell who waits for the last."""
        self.open_transports.discard(transport)
        if not self.open_transports:
            self._all_gone.fire(None)

    def stopService(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._stop(super().stopService()))

    async def _stop(self, stopped: Deferred[Any]) -> None:
        if self.open_transports:
            gone = self._all_gone.wait()
            cut = eventual.reactor.callLater(GOODBYE_S, self._cut)
            for transport in list(self.open_transports):
                # What was written goes out, TLS's goodbye included; that of the other side is not waited for.
                if isinstance(transport, FileDescriptor):
                    FileDescriptor.loseConnection(transport)
                else:
                    transport.loseConnection()
            await gone
            if cut.active():
                cut.cancel()
        await stopped
        await eventual.fireEventually()
        await eventual.flushEventualQueue()

    def _cut(self) -> None:
        for transport in list(self.open_transports):
            transport.abortConnection()


def make_tub(lost_after_s: int, bounds: Bounds | None = None) -> Any:
    """
    Return a tub, not started.

    Args:
        lost_after_s: silence after which the other side is taken to be gone; more than ``KEEPALIVE_S``.
        bounds: on what it may send.
    """
    tub = CallersTub(certData=_make_pem())
    tub.negotiationClass = CallersNegotiation
    tub.brokerClass = partial(CallersBroker, bounds=bounds)
    tub.unsafeTracebacks = False
    tub.setOption("accept-gifts", False)
    tub.setOption("keepaliveTimeout", KEEPALIVE_S)
    tub.setOption("disconnectTimeout", lost_after_s)
    tub.setOption("logLocalFailures", False)
    tub.setOption("logRemoteFailures", False)
    return tub


def _make_pem() -> bytes:
    """Return a key and a certificate; on an elliptic curve, since an RSA key takes a tenth of a second."""
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    return self_signed_pem(key, "newpb_thingy", _VALID)  # as all tubs call themselves


# Calls over Foolscap that are put together at once: small ones, of numbers and strings.
#
# Foolscap asks an object's adapter for each argument, a generator for each token, and hands the transport
# each byte of a token's number: 39 writes for four calls, which are a small share, and with the checking
# of what we ourselves are about to send nearly half of what such a share costs a client. A call of the
# kinds of arguments below is one string here, the same bytes; everything else, and whatever comes while
# Foolscap is sending, goes Foolscap's way, so that the order is that of the calls.
#
# Source: Foolscap 24.9's documentation ("specifications/banana" and "specifications/pb"), and what it sends.

MAX_CALL_BYTES = 128 * 1024
"""Of a call's strings; the time that longer ones take is spent on their bytes."""

_END_OF_SMALL = 1 << 31


class KnownReference:
    """An object of ours that the other end knows already, as an argument of a call."""

    __slots__ = ("clid",)

    def __init__(self, clid: int) -> None:
        self.clid = clid


def can_pack(arguments: tuple[Any, ...]) -> bool:
    """
    Return whether a call with these arguments can be packed.

    Args:
        arguments: ``bytes``, ``int`` from 0, a ``set`` of such, or ``KnownReference``; ``MAX_CALL_BYTES``
        in all.
    """
    size = 0
    for each in arguments:
        kind = type(each)
        if kind is bytes:
            size += len(each)
        elif kind is set:
            if not all(type(item) is int and item >= 0 for item in each):
                return False
        elif kind is not KnownReference and (kind is not int or each < 0):
            return False
    return size <= MAX_CALL_BYTES


def pack_call(
    words: Mapping[bytes, int],
    opened: int,
    request_id: int,
    clid: int,
    method: bytes,
    arguments: tuple[Any, ...],
) -> tuple[bytes, int]:
    """
    Return a call as it is sent, and how many objects are opened after it.

    Args:
        words: what is abbreviated on this connection, and by which number.
        opened: how many objects were opened on the connection before.
        request_id: by which the answer will name it.
        clid: of the object that is called, at the other end.
        arguments: such that they ``can_pack``.
    """
    out = bytearray()
    call = opened
    _open(out, words, opened, b"call")
    _integer(out, request_id)
    _integer(out, clid)
    _string(out, words, method)
    _open(out, words, opened + 1, b"arguments")
    _integer(out, len(arguments))
    opened += 2
    for each in arguments:
        if type(each) is bytes:
            _string(out, words, each)
        elif type(each) is int:
            _integer(out, each)
        else:
            named = type(each) is KnownReference
            _open(out, words, opened, b"my-reference" if named else b"set")
            for item in (each.clid,) if named else each:
                _integer(out, item)
            _token(out, opened, CLOSE)
            opened += 1
    _token(out, call + 1, CLOSE)
    _token(out, call, CLOSE)
    return bytes(out), opened


def _token(out: bytearray, number: int, kind: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F)
        number >>= 7
    out.append(number)
    out.append(kind)


def _integer(out: bytearray, value: int) -> None:
    if value < _END_OF_SMALL:
        _token(out, value, INT)
    else:
        data = value.to_bytes((value.bit_length() + 7) // 8, "big")
        _token(out, len(data), LONGINT)
        out += data


def _string(out: bytearray, words: Mapping[bytes, int], value: bytes) -> None:
    if value in words:
        _token(out, words[value], VOCAB)
    else:
        _token(out, len(value), STRING)
        out += value


def _open(out: bytearray, words: Mapping[bytes, int], number: int, name: bytes) -> None:
    _token(out, number, OPEN)
    _string(out, words, name)


# How a client calls what is at the other end of a ``BoundedBroker``: with ``calls`` where that can be.


def call_remote(reference: Any, method: str, *arguments: Any) -> Deferred[Any]:
    """
    Call a method of an object at the other end; what fires, or fails, is what its ``callRemote`` gives.

    What is sent in one piece was not held to the interface's constraints before: it is ours. Answers are.
    """
    answer: Deferred[Any] | None = None
    if type(reference) is RemoteReference and isinstance(reference.tracker.broker, BoundedBroker):
        answer = _call_at_once(reference, reference.tracker.broker, method, arguments)
    return reference.callRemote(method, *arguments) if answer is None else answer


def _call_at_once(
    reference: Any, broker: BoundedBroker, method: str, arguments: tuple[Any, ...]
) -> Deferred[Any] | None:
    if broker.disconnected or not broker.is_idle():
        return None
    method_info = getattr(reference, "_getMethodInfo", None)
    if method_info is None:  # of another release
        return None
    try:
        interface_name, _, schema = method_info(method)
    except Violation:
        return None
    trackers = [_tracker_of(broker, each) for each in arguments]
    to_send = tuple(
        each if tracker is None else KnownReference(tracker.clid)
        for each, tracker in zip(arguments, trackers, strict=True)
    )
    if not can_pack(to_send):
        return None
    for tracker in filter(None, trackers):
        tracker.send()
    request_id = broker.newRequestID()
    request = PendingRequest(request_id, reference, interface_name, method)
    request.interfaceName, request.methodName = interface_name, method
    request.answer_cost = broker.bounds.answer_cost(method, arguments)
    if schema:
        request.setConstraint(schema.getResponseConstraint())
    broker.addRequest(request)
    message, broker.openCount = pack_call(
        broker.outgoingVocabulary,
        broker.openCount,
        request_id,
        reference.tracker.clid,
        method.encode("ascii"),
        to_send,
    )
    broker.transport.write(message)
    answer: Deferred[Any] = request.deferred
    return answer


def _tracker_of(broker: BoundedBroker, argument: Any) -> Any:
    """Return what counts how often the other end was sent an object of ours, if it knows it; or None."""
    if not isinstance(argument, Referenceable):
        return None
    return broker.myReferenceByPUID.get(argument.processUniqueID())
