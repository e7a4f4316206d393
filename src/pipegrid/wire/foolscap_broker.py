"""
Foolscap connections with limits: negotiation, broker, the client's tub, and calls that are encoded in one
piece.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from foolscap import crypto, eventual
from foolscap.api import Tub
from foolscap.broker import PBOpenRegistry, PBRootUnslicer
from foolscap.call import CallSlicer, FailureSlicer, PendingRequest
from foolscap.ipb import IConnectionHintHandler, InvalidHintError
from foolscap.negotiate import Negotiation
from foolscap.referenceable import Referenceable, RemoteReference
from foolscap.slicer import UnslicerRegistry
from foolscap.slicers.tuple import TupleUnslicer
from foolscap.tokens import NegotiationError, Violation
from twisted.internet.abstract import FileDescriptor
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IStreamClientEndpoint
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.reactor.connection_policy import ConnectionPolicy, RefusedConnection
from pipegrid.reactor.deferreds import Timer, Waiters
from pipegrid.reactor.tcp_socks5_endpoints import endpoint_through
from pipegrid.reactor.tcp_transport import StallWatch, unsent_bytes
from pipegrid.reactor.tls_settings import bound_handshakes, only_forward_secret, self_signed_pem
from pipegrid.wire.banana_receiver import (
    ANSWER_COST,
    CLOSE,
    INT,
    LONGINT,
    OPEN,
    STRING,
    VOCAB,
    BoundedReceiver,
    Bounds,
    LimitExceeded,
)
from pipegrid.wire.server_address import place_of

# Foolscap releases each remote object at once, by a call that is answered. The writer of a small share is
# needed for two calls (write and close), so every fourth call of many small puts was a release, and delayed
# other calls at the server. Here releases wait until the connection is idle or ends. ``MAX_UNNEEDED`` bounds
# how many objects the other end keeps meanwhile.

MAX_UNNEEDED = 1024
"""
The maximum number of objects that wait for their release; beyond this number, the oldest are released at
once. Each takes some 2 kB at a PipeGrid server.
"""

IDLE_CHECK_S = 1.0
"""The time between two checks whether the connection is idle."""

RELEASES_PER_CHECK = 128
"""The maximum number of objects that are released in one check: a tenth of a second's work for a server."""


# Negotiation as in Foolscap, but only with strong ciphers, and with limits.

NEGOTIATION_S = 30
GRACE_S = 5.0
"""The time from an error that was sent to the peer to the abort of the connection."""


class StrictNegotiation(Negotiation):
    """
    A negotiation with strong ciphers only. Set as a tub's ``negotiationClass``, or as the class of a
    negotiation that has not begun.
    """

    def startTLS(self, cert: Any) -> None:
        """
        Start TLS with the certificate ``cert``, only with forward-secret ciphers, and with a limit on
        handshakes.
        """
        options = crypto.FoolscapContextFactory(
            privateKey=cert.privateKey.original, certificate=cert.original
        )
        only_forward_secret(options.getContext())
        bound_handshakes(options.getContext())
        self.transport.startTLS(options)


class BoundedNegotiation(StrictNegotiation):
    """
    A negotiation that may take at most ``NEGOTIATION_S``; Foolscap already limits its bytes. Nothing is
    logged.
    """

    SERVER_TIMEOUT = NEGOTIATION_S
    _aborting: IDelayedCall | None = None
    failureReason: Failure | None

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Drop the message: Foolscap would keep the last messages in memory, with all untrusted input."""

    def dataReceived(self, chunk: bytes) -> None:
        """Process input, unless negotiation has failed already."""
        if not self._has_failed():
            super().dataReceived(chunk)
            if self._has_failed():
                self._end()

    def negotiationFailed(self) -> None:
        """
        End the negotiation. An exception in Foolscap's parser of untrusted input becomes a
        ``NegotiationError``.
        """
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
        """Stop the timer: negotiation has failed, or the peer has closed the connection."""
        if self._aborting is not None:
            self._aborting.cancel()
            self._aborting = None
        super().connectionLost(reason)

    def _has_failed(self) -> bool:
        return self.failureReason is not None

    def _end(self) -> None:
        # The error is being sent, and nothing more is read. After ``GRACE_S`` the connection is aborted.
        self.buffer = b""
        if self._aborting is None and self.transport.connected:
            self.transport.pauseProducing()
            self._aborting = eventual.reactor.callLater(GRACE_S, self._abort)

    def _abort(self) -> None:
        self._aborting = None
        self.transport.abortConnection()


# Limits of a connection. Each token is handled as in Foolscap, but read by ``wire.banana_receiver``. For
# clients and servers alike:
#
# * A message has an allowance for its size in memory (``TOKEN_COST`` per token, and the bodies), which is
#   charged before the memory is allocated. The allowance starts with a few KiB, and grows when the kind of
#   message is known: for an answer, to what the call may return; for a call, to ``Bounds.call_cost``. A
#   reference to an earlier part of the message costs as much as all of the message so far, since references
#   can be repeated.
# * Unexpected answers end the connection. Gifts (references to third parties, to which a tub would
#   connect), copies of objects other than failures, our own objects coming back, and methods are rejected.
# * After ``Bounds.turn_tokens`` tokens or ``TURN_CALLS`` calls, other connections are served. Until the next
#   turn, nothing is read from the socket; nor while ``MAX_CALLS`` calls are running.
# * A peer that exceeds a limit gets the reason and is disconnected ``GRACE_S`` later. All times are
#   monotonic.
#
# ``tests/wire/test_broker.py`` fails if an overridden method of Foolscap no longer exists, and the fuzz
# target ``banana`` compares both implementations.

# mypy: disable-error-code="misc"


MAX_REFERENCES = 16_384
"""The maximum number of references to objects at the other end; they take some 16 MB."""

_VALUES = ("none", "boolean", "unicode", "list", "tuple", "dict", "set", "immutable-set")
_OPEN_TYPES = (*_VALUES, "reference", "arguments", "my-reference")


class WholeTuple(TupleUnslicer):
    """
    Accepts only a tuple that has all declared parts.

    Foolscap's own class accepts a tuple that ends early. Foolscap checks a call's arguments once more before
    the call, but not answers.
    """

    def receiveClose(self) -> Any:
        if self.constraints is not None and len(self.list) < len(self.constraints):
            raise Violation(
                f"the tuple ends after {len(self.list)} of {len(self.constraints)} parts"
            )
        return super().receiveClose()


_KNOWN: dict[tuple[str, ...], Any] = {**UnslicerRegistry, **PBOpenRegistry, ("tuple",): WholeTuple}


class BoundedRoot(PBRootUnslicer):
    """Accepts the object types that storage and introducers use, and no others."""

    openRegistries = [{(name,): _KNOWN[name,] for name in _OPEN_TYPES}]

    def open(self, opentype: tuple[str, ...]) -> Any:
        """
        Return the decoder for an object of this type. Copies of objects other than failures are rejected.
        """
        if opentype[0] == "copyable" and opentype[1:] not in ((), (FailureSlicer.classname,)):
            raise Violation("copies of objects are not taken")
        return super().open(opentype)


class BoundedBroker(BoundedReceiver):
    """
    One connection after its negotiation. The comment before ``MAX_REFERENCES`` lists its limits.

    Args:
        bounds: limits that differ between connections; the other arguments are Foolscap's.

    Attributes:
        stalls: watches the connection for stalls, if set; stopped when the connection ends.
    """

    unslicerClass = BoundedRoot
    stalls: StallWatch | None = None

    def __init__(self, *args: Any, bounds: Bounds | None = None, **kwargs: Any) -> None:
        super().__init__(*args, bounds=bounds, **kwargs)
        self._aborting = Timer(eventual.reactor, self._abort)
        self._unneeded: deque[tuple[Any, int]] = deque()
        self._release_timer = Timer(eventual.reactor, self._release_some)

    # Methods that Foolscap calls on its broker.

    def getObject(self, count: int) -> Any:
        """Return an earlier part of the current message; charge the message's memory once more."""
        self.charge(self.held_cost)
        return super().getObject(count)

    def getRequest(self, reqID: int) -> Any:
        """Return our call to which an answer belongs."""
        request = self.waitingForAnswers.get(reqID)
        if request is None:
            raise LimitExceeded("it answered a call that was not made")
        self.allow(getattr(request, "answer_cost", ANSWER_COST))
        return request

    def getMyReferenceByCLID(self, clid: int) -> Any:
        """Return our object that the other end calls; raises KeyError if the object does not exist."""
        found = super().getMyReferenceByCLID(clid)
        if clid:
            self.allow(self.bounds.call_cost)
        return found

    def getTrackerForYourReference(self, clid: int, *args: Any, **kwargs: Any) -> Any:
        """Return the tracker of an object at the other end."""
        # For a negative number Foolscap makes a reference to a method, unless a constraint rejects it. A call
        # of such a reference with a method's name would fail an assertion in Foolscap.
        if clid < 0:
            raise LimitExceeded("it gave a method in the place of an object")
        if len(self.yourReferenceByCLID) >= MAX_REFERENCES and clid not in self.yourReferenceByCLID:
            raise LimitExceeded(f"it gave more than {MAX_REFERENCES} objects")
        return super().getTrackerForYourReference(clid, *args, **kwargs)

    def freeYourReference(self, tracker: Any, count: int) -> None:
        """
        Release an object at the other end when the connection is idle; release the oldest at once beyond
        ``MAX_UNNEEDED``.

        Args:
            count: how many times the other end has sent the object.
        """
        if not self.disconnected:
            self._unneeded.append((tracker, count))
            if len(self._unneeded) > MAX_UNNEEDED:
                super().freeYourReference(*self._unneeded.popleft())
            self._release_timer.set(IDLE_CHECK_S)

    def _release_some(self) -> None:
        if not self.waitingForAnswers:
            for _ in range(min(RELEASES_PER_CHECK, len(self._unneeded))):
                super().freeYourReference(*self._unneeded.popleft())
        if self._unneeded:
            self._release_timer.set(IDLE_CHECK_S)

    def is_idle(self) -> bool:
        """
        Return whether bytes that are written to the transport now follow everything that was sent before.
        """
        root = self.rootSlicer
        return root.producingDeferred is not None and not root.sendQueue and not self.paused

    def send(self, obj: Any) -> Any:
        """Send a call or an answer; for a call, record the allowance of its answer."""
        if isinstance(obj, CallSlicer) and obj.reqID:
            request = self.waitingForAnswers.get(obj.reqID)
            if request is not None:
                request.answer_cost = self.bounds.answer_cost(obj.methodname, tuple(obj.args))
        return super().send(obj)

    def scheduleCall(self, delivery: Any, ready_deferred: Any) -> None:
        """Queue a call by the other end."""
        self._turn_calls += 1
        super().scheduleCall(delivery, ready_deferred)

    def doNextCall(self) -> None:
        """Carry out the next queued call."""
        super().doNextCall()
        self.wake()

    def _callFinished(self, res: Any, delivery: Any) -> None:
        super()._callFinished(res, delivery)
        self.call_ended(delivery)

    def callFailed(self, f: Any, reqID: int, delivery: Any = None) -> None:
        """Send the failure of a call to the other end, which has made the call."""
        super().callFailed(f, reqID, delivery)
        f.value.__traceback__ = None  # the frames hold the call's arguments
        f.cleanFailure()
        if delivery is not None:
            self.call_ended(delivery)

    def call_ended(self, delivery: Any) -> None:
        """Drop the arguments of a finished call, and continue reading."""
        delivery.allargs.args, delivery.allargs.kwargs = [], {}
        self.wake()

    # Timeouts, and the end of the connection.

    def keepaliveTimerFired(self) -> None:
        """Send a PING after a silence of ``keepaliveTimeout``."""
        self.keepaliveTimer = None
        if self.seconds() - self.dataLastReceivedAt > self.keepaliveTimeout:
            self.sendPING()
        self.keepaliveTimer = eventual.reactor.callLater(
            self.keepaliveTimeout + 1, self.keepaliveTimerFired
        )

    def disconnectTimerFired(self) -> None:
        """End the connection after a silence of ``disconnectTimeout``."""
        self.disconnectTimer = None
        if self.seconds() - self.dataLastReceivedAt > self.disconnectTimeout:
            self.connectionTimedOut()
            return
        self.disconnectTimer = eventual.reactor.callLater(
            self.disconnectTimeout + 1, self.disconnectTimerFired
        )

    def refuse(self, reason: str, tell: bool = True) -> None:
        """
        End the connection, since the other end exceeded a limit; unanswered calls fail with that reason.
        """
        if self.connectionAbandoned:
            return
        self.connectionAbandoned = True
        self.refused(reason)
        if tell:
            self.sendError(reason)
        self.shutdown(Failure(LimitExceeded(reason)))

    def refused(self, reason: str) -> None:
        """Do nothing; subclasses can report the reason why the connection ends."""

    def shutdown(self, why: Failure, fireDisconnectWatchers: bool = True) -> None:
        """End the connection within ``GRACE_S``, whether or not the other end reads what was sent."""
        self._tokens.clear()
        self._read(not self.connectionAbandoned)  # nothing is read from a rejected peer
        self.connectionAbandoned = True
        if not self.disconnected:
            self._aborting.set(GRACE_S)
        super().shutdown(why, fireDisconnectWatchers)

    def finish(self, why: Failure) -> None:
        """Fail all calls; the connection may still be closing."""
        self._unneeded.clear()  # all references are lost with the connection
        self._release_timer.stop()
        super().finish(why)

    def _abort(self) -> None:
        abort = getattr(self.transport, "abortConnection", None)
        if abort is not None:
            abort()

    def connectionLost(self, why: Failure) -> None:
        """Release all resources, since the connection is lost."""
        self.connectionAbandoned = True
        self._aborting.stop()
        if self.stalls is not None:
            self.stalls.stop()
        super().connectionLost(why)
        self._tokens.clear()
        self._body = None
        del self.receiveStack[1:]
        self.inboundDeliveryQueue = []


# Foolscap keeps at most one connection between two identities. So each of our tubs has a new identity. With a
# common one, such as that of a Tahoe-LAFS node whose directory is read, two clients would end each other's
# connections.

KEEPALIVE_S = 60
"""A PING is sent to the other end after a silence of this length."""

PONGS_APART_S = 1.0
FLUSH_S = 1.0
"""The time that a stopped tub waits for the kernel to accept the written bytes."""

MAX_UNREAD = 1000
"""Maximum number of successive answers that are sent while earlier bytes wait; see ``MAX_UNSENT_BYTES``."""
MAX_UNSENT_BYTES = 16 << 20
"""More waiting bytes after ``MAX_UNREAD`` answers end the connection; our own calls have far fewer."""

_VALID = timedelta(days=3650)


class CallersBroker(BoundedBroker):
    """
    A client's connection, on which the other end seldom makes calls.

    Answers to the other end wait in memory until the other end reads them: a flood of calls must not fill the
    memory.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ponged_s = -math.inf
        self._unread = 0

    def sendPONG(self, number: int) -> None:
        """Answer a PING, at most once per ``PONGS_APART_S``: one answer is enough for several PINGs."""
        now_s = self.seconds()
        if now_s - self._ponged_s >= PONGS_APART_S:
            self._ponged_s = now_s
            super().sendPONG(number)
            self._answered()

    def call_ended(self, delivery: Any) -> None:
        """Count an answer to a call by the other end."""
        super().call_ended(delivery)
        self._answered()

    def callFailed(self, f: Any, reqID: int, delivery: Any = None) -> None:
        """Send the failure of a call to the other end, which has made the call."""
        super().callFailed(f, reqID, delivery)
        if delivery is None:  # not a valid call, so ``call_ended`` did not count it
            self._answered()

    def connectionLost(self, why: Failure) -> None:
        """Report the loss to the tub, which may be waiting for the loss."""
        super().connectionLost(why)
        if self.tub is not None:
            self.tub.forget(self.transport)

    def _answered(self) -> None:
        unsent = unsent_bytes(self.transport)
        self._unread = self._unread + 1 if unsent else 0
        if self._unread > MAX_UNREAD and unsent > MAX_UNSENT_BYTES:
            self.refuse("it asks again and again, and reads none of the answers")


class CallersNegotiation(BoundedNegotiation):
    """Registers its transport with the tub until the connection is lost."""

    def connectionMade(self) -> None:
        if self.tub is not None:  # this side has connected
            self.tub.open_transports.add(self.transport)
        super().connectionMade()

    def connectionLost(self, reason: Failure) -> None:
        super().connectionLost(reason)
        if self.tub is not None:
            self.tub.forget(self.transport)


class CallersTub(Tub):
    """
    A tub that leaves the reactor clean: it has stopped when no connection and no timer is left.

    Foolscap's own tub does not wait for connections that were ended earlier, or are still in negotiation.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.open_transports: set[Any] = set()
        self._all_gone: Waiters[None] = Waiters()

    def forget(self, transport: Any) -> None:
        """Record that a connection is lost; after the last one, ``stopService`` fires."""
        self.open_transports.discard(transport)
        if not self.open_transports:
            self._all_gone.fire(None)

    def stopService(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._stop(super().stopService()))

    async def _stop(self, stopped: Deferred[Any]) -> None:
        if self.open_transports:
            gone = self._all_gone.wait()
            cut = eventual.reactor.callLater(FLUSH_S, self._cut)
            for transport in list(self.open_transports):
                # Written data and TLS's close_notify are sent; the other end's close_notify is not awaited.
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


Wrap = Callable[[IStreamClientEndpoint], IStreamClientEndpoint]


def make_tub(
    lost_after_s: int,
    policy: ConnectionPolicy,
    bounds: Bounds | None = None,
    wrap: Wrap | None = None,
) -> Any:
    """
    Return a tub that is not started.

    Args:
        lost_after_s: silence after which the connection counts as lost; more than ``KEEPALIVE_S``.
        policy: decides how each host is connected to.
        bounds: limits for the other end; None: the defaults of ``Bounds``.
        wrap: wraps the endpoints of all connections that the tub makes.
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
    tub.removeAllConnectionHintHandlers()
    handler = _PermittedHints(policy, wrap)
    tub.addConnectionHintHandler("tcp", handler)
    tub.addConnectionHintHandler("tor", handler)
    return tub


@implementer(IConnectionHintHandler)
class _PermittedHints:
    """Connects a tub to an address only by the way that the policy permits."""

    def __init__(self, policy: ConnectionPolicy, wrap: Wrap | None) -> None:
        self._policy = policy
        self._wrap = wrap

    def hint_to_endpoint(self, hint: str, reactor: Any, update_status: Any) -> tuple[Any, str]:
        """Return the endpoint of an address, and the address's host."""
        place = place_of(hint)
        if place is None:
            raise InvalidHintError("it is not an address for TCP or Tor")
        try:
            endpoint = endpoint_through(self._policy, reactor, *place)
        except RefusedConnection as error:
            raise InvalidHintError(str(error)) from None
        return endpoint if self._wrap is None else self._wrap(endpoint), place.host

    def describe(self) -> str:
        """Return the handler's name in Foolscap's reports."""
        return "tcp"


def _make_pem() -> bytes:
    """
    Return a key and a certificate in PEM. The key is on an elliptic curve, since making an RSA key takes a
    tenth of a second.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    return self_signed_pem(key, "newpb_thingy", _VALID)  # the name in all tubs' certificates


# Calls with numbers and strings, encoded in one piece. Foolscap uses an adapter for each argument and a
# generator for each token, and writes each byte of a token's number separately. The four calls that store one
# small share took 39 writes; with the check of our own arguments, that is nearly half of a client's CPU time
# for such a share. A call of the kinds below is encoded as one string, with the same bytes. Foolscap sends
# all other calls, and all calls while it is still sending, so that the order is kept.
#
# Source: Foolscap 24.9's documentation ("specifications/banana" and "specifications/pb"), and the bytes that
# it sends.

MAX_CALL_BYTES = 128 * 1024
"""Maximum total length of a call's strings; for longer strings the cost of the encoding does not matter."""

_END_OF_SMALL = 1 << 31


class KnownReference(NamedTuple):
    """An object of ours that the other end already knows, as an argument of a call."""

    clid: int


def can_pack(arguments: tuple[Any, ...]) -> bool:
    """
    Return whether ``pack_call`` can encode a call with these arguments.

    Args:
        arguments: ``bytes``, ``int`` from 0, a ``set`` of such numbers, or ``KnownReference``; the ``bytes``
            have at most ``MAX_CALL_BYTES`` in total.
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
    Return an encoded call, and how many objects have been opened on the connection after the call.

    Args:
        words: the vocabulary of this connection: words to their numbers.
        opened: how many objects were opened on the connection before the call.
        request_id: the number that the answer will have.
        clid: the number of the called object, at the other end.
        arguments: arguments for which ``can_pack`` is true.
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


# Calls by clients on objects at the other end, encoded by ``pack_call`` where possible.


def call_remote(reference: Any, method: str, *arguments: Any) -> Deferred[Any]:
    """
    Call a method of an object at the other end; the result is that of the reference's ``callRemote``.

    Calls that are encoded in one piece are not checked against the interface; their answers are.
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
    if method_info is None:  # an unknown version of Foolscap
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
    """Return the tracker of our object if the other end knows the object; otherwise None."""
    if not isinstance(argument, Referenceable):
        return None
    return broker.myReferenceByPUID.get(argument.processUniqueID())
