"""
A client's Foolscap connection to the server, with limits on memory, on time, and for unauthenticated clients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import attrs
from foolscap import eventual
from foolscap.banana import int2b128
from foolscap.call import AnswerSlicer
from foolscap.tokens import STRING
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from pipegrid.reactor.deferreds import Timer
from pipegrid.reactor.tcp_transport import Backpressure, unsent_bytes
from pipegrid.server.connection_turns import CpuUsage
from pipegrid.wire.banana_receiver import MAX_TOKENS, TOKEN_COST, Bounds, LimitExceeded
from pipegrid.wire.foolscap_broker import BoundedBroker, BoundedNegotiation
from pipegrid.wire.foolscap_interfaces import MAX_SHARE_DATA_BYTES

# The size of answers, which is known before they are sent.


def asked_bytes(delivery: Any) -> int:
    """Return the largest size in bytes of a call's answer; 0 for calls with small answers."""
    arguments = delivery.allargs.args
    if delivery.methodname == "read" and len(arguments) == 2:
        return int(arguments[1])
    if delivery.methodname == "slot_readv" and len(arguments) == 3:
        return sum(int(size) for _, size in arguments[2]) * (len(arguments[1]) or 1)
    return 0


def answer_bytes(results: Any) -> int:
    """Return how many bytes of share data an answer contains."""
    if isinstance(results, bytes):
        return len(results)
    if isinstance(results, (tuple, list)):
        return sum(map(answer_bytes, results))
    if isinstance(results, dict):
        return sum(map(answer_bytes, results.values()))
    return 0


# The time that the server works for a connection is measured (``server.connection_turns.CpuUsage``). Up to a
# burst, and a small share of all time, a connection is served as soon as bytes arrive. A connection that has
# used more time waits in a queue. The queue serves one connection at a time. After each turn all queued
# connections pause ``REST`` times as long as the turn took, but only while other clients send requests. So
# floods from any number of connections get at most a fifth of the server's time, and bulk work is not slowed
# down while the server is otherwise idle.

REST = 4.0
ACTIVE_S = 0.25
"""How long other clients count as active after one of them has sent a request."""


class Governor:
    """
    The queue of all connections that must wait.

    Args:
        clock: for pauses.
        others: returns a number that grows with the requests of other protocols.
    """

    def __init__(self, clock: IReactorTime, others: Callable[[], int]) -> None:
        self._clock = clock
        self._others = others
        self._seen = others()
        self._active_s = float("-inf")
        self._line: deque[Callable[[], None]] = deque()
        self._timer = Timer(clock, self._next)
        self._spent_s = 0.0
        self._rests_until_s = 0.0

    def __repr__(self) -> str:
        return f"<Governor, {len(self._line)} waiting>"

    @property
    def now_s(self) -> float:
        """The current time, for ``CpuUsage``."""
        return self._clock.seconds()

    @property
    def others_ask(self) -> bool:
        """
        Whether a client of this or another protocol, which does not have to wait, has sent a request within
        ``ACTIVE_S``.
        """
        others = self._others()
        if others != self._seen:
            self._seen, self._active_s = others, self.now_s
        return self.now_s - self._active_s < ACTIVE_S

    def light_work(self) -> None:
        """Record a request of a connection that does not have to wait."""
        self._active_s = self.now_s

    def heavy_work(self, work_s: float) -> None:
        """Record the time of work for a connection that has to wait: its turn, or a call that it sent."""
        self._spent_s += work_s

    def enter(self, turn: Callable[[], None]) -> None:
        """Add a function to the queue, which calls it when its turn comes."""
        self._line.append(turn)
        self._wait()

    def _wait(self) -> None:
        self._timer.set(max(0.0, self._rests_until_s - self._clock.seconds()))

    def _next(self) -> None:
        if not self._line:
            return
        now_s = self._clock.seconds()
        owed_s, self._spent_s = self._spent_s, 0.0
        if self.others_ask and owed_s:
            # The pause begins after the work of the last turn, which includes the calls that began in this
            # turn.
            self._rests_until_s = now_s + owed_s * REST
            self._wait()
            return
        self._line.popleft()()
        if self._line:
            self._wait()


# These objects take memory: messages that are received or carried out, answers that are sent, and references.
# A connection requests memory before it takes more than a little. All connections together may use the memory
# that the HTTPS protocol leaves. If a connection requests more than is left, the connection that holds most
# memory is closed, provided that it holds at least as much as the requesting connection would; otherwise the
# requesting connection is closed. So the first to be closed are clients that declare large messages and send
# them slowly, or that request much and do not read it. A client with one usual message is not affected.

MAX_HELD_BYTES = 192 << 20
"""The most memory of all Foolscap connections: the largest message has 128 MiB, its tokens 52 MiB more."""


class MemoryHolder(Protocol):
    """A connection whose memory ``HeldMemory`` counts."""

    def crowd_out(self) -> None:
        """Release all memory and close the connection, since other connections need the memory."""


class HeldMemory:
    """
    Counts the memory of all Foolscap connections.

    Args:
        ask: called with a number of bytes, negative for a release, that the server must count; returns
            whether that is allowed.
        limit_bytes: the most bytes for all these connections.
    """

    def __init__(self, ask: Callable[[int], bool], limit_bytes: int = MAX_HELD_BYTES) -> None:
        self._ask = ask
        self._limit_bytes = limit_bytes
        self.total_bytes = 0  # held by all connections
        self._held: dict[MemoryHolder, int] = {}

    def __repr__(self) -> str:
        return f"<HeldMemory, {self.total_bytes} bytes by {len(self._held)}>"

    def hold(self, holder: MemoryHolder, more_bytes: int) -> bool:
        """
        Count more memory for a holder, after closing other holders if necessary; returns whether that is
        allowed. If not, the holder must close its connection.
        """
        would_hold = self._held.get(holder, 0) + more_bytes
        while not self._take(more_bytes):
            victim = max(self._held, key=lambda each: self._held[each], default=holder)
            if victim is holder or self._held[victim] < would_hold:
                return False
            self.release_all(victim)
            victim.crowd_out()
        self._held[holder] = would_hold
        return True

    def release(self, holder: MemoryHolder, fewer_bytes: int) -> None:
        """Release some of a holder's memory; the holder may be closed already."""
        held = self._held.get(holder, 0)
        fewer_bytes = min(fewer_bytes, held)
        if fewer_bytes:
            self._take(-fewer_bytes)
            self._held[holder] = held - fewer_bytes

    def release_all(self, holder: MemoryHolder) -> None:
        """Release all memory of a closed holder."""
        held = self._held.pop(holder, 0)
        if held:
            self._take(-held)

    def _take(self, more_bytes: int) -> bool:
        if more_bytes > 0 and self.total_bytes + more_bytes > self._limit_bytes:
            return False
        taken = self._ask(more_bytes)
        if taken:
            self.total_bytes += more_bytes
        return taken


# ``wire.foolscap_broker`` has the parts that client and server share. In addition, the server limits:
#
# * Unauthenticated clients: until a client has named an existing object (which takes the fURL's secret), it
#   may send at most ``STRANGER_BYTES``, PINGs and errors included, and has ``STRANGER_S`` to do so.
# * Memory: messages, answers and references are counted against one limit for all connections, from when
#   their sizes are known until they are freed.
# * Answers: Foolscap encodes an answer as soon as the call has ended, and writes all of it: a read of 64 MiB
#   took 192 MiB until it was sent. This broker encodes no token while the socket is full, writes large
#   strings ``PIECE_BYTES`` at a time, and begins the next call when the previous answers have been encoded.
# * Floods: connections take turns, see ``Governor``.

# mypy: disable-error-code="misc"


STRANGER_BYTES = 8 * 1024
RECEIVE_BYTE_S = 2.5e-9
"""Seconds to receive and decrypt one byte (64 KiB took 0.16 ms): TLS does it where time is not measured."""
STRANGER_S = 30.0

FREE_BYTES = 64 * 1024
"""Messages and answers up to this size are not counted, unless the port sets another limit."""

REFERENCE_COST = 2048
"""The memory in bytes of an object that a client can call, with its name and tracker."""

PIECE_BYTES = 256 * 1024
_LONGEST_WORD_BYTES = 1024  # longer than any word that Banana abbreviates

BOUNDS = Bounds(call_cost=MAX_SHARE_DATA_BYTES + MAX_TOKENS * TOKEN_COST, turn_tokens=256)
"""Bounds of a message: they allow a read-test-write with as many bytes, tests and writes as over HTTPS."""


@attrs.frozen
class MessageLimits:
    """
    Limits for the messages of clients.

    Attributes:
        memory: counts the memory of all connections.
        bounds: the bounds of each message.
        free_bytes: messages and answers up to this size are not counted.
    """

    memory: HeldMemory
    bounds: Bounds = BOUNDS
    free_bytes: int = FREE_BYTES


class ServerBroker(BoundedBroker):
    """
    One client's connection.

    Args:
        limits, governor: shared by all connections.
        refused: called with the reason when the connection is closed for a violation.
        known: called when the client has named an existing object.
    """

    slicerStack: list[Any]

    def __init__(
        self,
        *args: Any,
        limits: MessageLimits,
        governor: Governor,
        refused: Callable[[str], None],
        known: Callable[[], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, bounds=limits.bounds, **kwargs)
        self._free_bytes = limits.free_bytes
        self._memory = limits.memory
        self._governor = governor
        self._tell_refused = refused
        self._tell_known = known
        self._spending = CpuUsage(governor.now_s)
        self._strange_bytes: int | None = 0  # None if the client is authenticated
        self._strange_timer: IDelayedCall | None = None
        self._message_held = 0
        self._full = False
        self._in_line = False
        self._unsent: memoryview | None = None
        self._registered = False
        self._was_unsent = 0

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    # Unauthenticated clients.

    def connectionMade(self) -> None:
        super().connectionMade()
        self._strange_timer = eventual.reactor.callLater(STRANGER_S, self._stayed_strange)
        register = getattr(self.transport, "registerProducer", None)
        if register is not None:
            self._registered = True
            register(Backpressure(self), True)

    def remote_getReferenceByName(self, name: bytes) -> Any:
        """Return the object with a name; a client that names an existing object is authenticated."""
        found = super().remote_getReferenceByName(name)
        if self._strange_bytes is not None:
            self._strange_bytes = None
            self._stop_waiting()
            self._tell_known()
        return found

    def dataReceived(self, chunk: bytes) -> None:
        if self._strange_bytes is not None and not self.connectionAbandoned:
            self._strange_bytes += len(chunk)
            if self._strange_bytes > STRANGER_BYTES:
                self.refuse(
                    f"it sent more than {STRANGER_BYTES} bytes and named no object of this server"
                )
                return
        super().dataReceived(chunk)
        self._pay_for(len(chunk))

    def _pay_for(self, received_bytes: int) -> None:
        """
        Count the time that receiving has taken. If this connection has used too much time, wait for a turn
        before reading more.

        A long body is only collected until it is complete, but receiving and decrypting it takes time. While
        no other client is active, no turn is needed.
        """
        governor = self._governor
        cost_s, now_s = received_bytes * RECEIVE_BYTE_S, governor.now_s
        self._spending.spend(cost_s, now_s)
        if self._yielded or self.connectionAbandoned or not self._tokens.missing_bytes:
            return
        if governor.others_ask and self._spending.is_heavy(now_s):
            governor.heavy_work(cost_s)
            self.pause()
            governor.enter(self.go_on)

    def _stayed_strange(self) -> None:
        self._strange_timer = None
        self.refuse(f"it has named no object of this server for {STRANGER_S:g} s")

    def _stop_waiting(self) -> None:
        if self._strange_timer is not None:
            self._strange_timer.cancel()
            self._strange_timer = None

    # Turns.

    @property
    def may_go_on(self) -> bool:
        """Whether the next tokens can be processed now."""
        return not self.paused and super().may_go_on

    def arrived(self) -> None:
        """Process the bytes that have arrived, at once or after waiting in the queue."""
        if self._spending.is_heavy(self._governor.now_s):
            self.pause()
            self._governor.enter(self.go_on)
        else:
            self.go_on()

    def turn_ended(self) -> None:
        """Let other connections have their turn before the remaining bytes are processed."""
        if self._spending.is_heavy(self._governor.now_s):
            self._governor.enter(self.go_on)
        else:
            eventual.eventually(self.go_on)

    def go_on(self) -> None:
        """Process the bytes that have arrived, and measure the time."""
        with self._working():
            super().go_on()

    @contextmanager
    def _working(self) -> Iterator[None]:
        began_s = self._governor.now_s
        try:
            yield
        finally:
            now_s = self._governor.now_s
            self._spending.spend(now_s - began_s, now_s)
            if self._spending.is_heavy(now_s):
                self._governor.heavy_work(now_s - began_s)
            else:
                self._governor.light_work()

    # Memory.

    def crowd_out(self) -> None:
        """Close the connection now, to release memory for other connections."""
        self.refuse("it used the most memory when others needed memory", tell=False)
        abort = getattr(self.transport, "abortConnection", None)
        if abort is not None:
            abort()

    def charge(self, cost: int) -> None:
        """
        Count the memory of a message.

        Raises:
            LimitExceeded: the message is too large, or the server has no memory for it.
        """
        super().charge(cost)
        more = self.held_cost - self._message_held
        if more > self._free_bytes:
            if not self._memory.hold(self, more):
                raise LimitExceeded(
                    "the server has no memory for a message of this size now; try again"
                )
            self._message_held += more

    def message_begins(self) -> None:
        """Begin to receive another message, and release the memory of the previous one."""
        super().message_begins()
        self._memory.release(self, self._message_held)
        self._message_held = 0

    def scheduleCall(self, delivery: Any, ready_deferred: Any) -> None:
        """Queue a call; its arguments are counted until it has been carried out."""
        delivery.held_bytes, self._message_held = self._message_held, 0
        super().scheduleCall(delivery, ready_deferred)

    def call_ended(self, delivery: Any) -> None:
        """Release the memory of a call that was carried out."""
        super().call_ended(delivery)
        self._memory.release(self, delivery.held_bytes)

    def getTrackerForMyReference(self, puid: int, obj: Any) -> Any:
        """Count the memory of an object of this server to which the client gets a new reference."""
        if puid not in self.myReferenceByPUID:
            self._hold_answer(REFERENCE_COST)
        return super().getTrackerForMyReference(puid, obj)

    def remote_decref(self, clid: int, count: int) -> None:
        """Release the memory of an object if the client drops its last reference to it."""
        before = len(self.myReferenceByCLID)
        super().remote_decref(clid, count)
        self._memory.release(self, (before - len(self.myReferenceByCLID)) * REFERENCE_COST)

    def _hold_answer(self, size: int) -> bool:
        if self._memory.hold(self, size):
            return True
        # Tokens are being encoded, which must not be interrupted, so close the connection in a later turn.
        eventual.eventually(self.refuse, "the server has no memory for more answers now; try again")
        return False

    # Answers.

    def send(self, obj: Any) -> Any:
        """Send an answer or a call, and count the memory of a large answer."""
        size = answer_bytes(obj.results) if isinstance(obj, AnswerSlicer) else 0
        if size > self._free_bytes and self._hold_answer(size):
            return super().send(obj).addBoth(self._sent, size)
        return super().send(obj)

    def _sent(self, result: Any, size: int) -> Any:
        self._memory.release(self, size)
        return result

    def sendToken(self, obj: Any) -> None:
        """Write a token; of a large one, only the beginning is written now."""
        if type(obj) is not bytes or len(obj) <= _LONGEST_WORD_BYTES:
            super().sendToken(obj)
            return
        write = self.transport.write
        int2b128(len(obj), write)
        write(STRING)
        if len(obj) <= PIECE_BYTES:
            write(obj)
        else:
            self.paused = True
            self._unsent = memoryview(obj)
            self._send_piece()

    def _send_piece(self) -> None:
        unsent = self._unsent
        if unsent is None or self._full or self.disconnected:
            return
        self._unsent = unsent[PIECE_BYTES:] or None
        with self._working():
            self.transport.write(bytes(unsent[:PIECE_BYTES]))
        if not self._full:
            eventual.eventually(self._output_flows)

    def output_full(self) -> None:
        """Stop encoding, since the socket is full."""
        self._full = self.paused = True

    def output_free(self) -> None:
        self._full = False
        self._output_flows()

    def _output_flows(self) -> None:
        if self._unsent is not None:
            self._send_piece()
        elif not self._full and self.paused:
            self.paused = False
            self.produce()
            eventual.eventually(self.doNextCall)
            self.wake()

    def doNextCall(self) -> None:
        """
        Carry out the next call when the previous answers have been encoded; a call with a large answer waits
        for a turn.
        """
        if self.paused or self._in_line or not self.inboundDeliveryQueue:
            return
        if asked_bytes(self.inboundDeliveryQueue[0][0]) <= PIECE_BYTES:
            with self._working():
                super().doNextCall()
            return
        self._in_line = True
        self._governor.enter(self._do_long_call)

    def _do_long_call(self) -> None:
        self._in_line = False
        if not self.paused:
            with self._working():
                super().doNextCall()

    def produce(self, dummy: Any = None) -> None:
        """Encode tokens to send, unless the connection is lost; called by Foolscap."""
        if not self.disconnected:
            super().produce(dummy)

    def sendPING(self, number: int = 0) -> None:
        """Send a PING, unless a large string is being written."""
        if self._unsent is None:
            super().sendPING(number)

    def sendPONG(self, number: int) -> None:
        """
        Answer a PING, unless a large string is being written; the string also shows that the connection is
        alive.
        """
        if self._unsent is None:
            super().sendPONG(number)

    def sendError(self, msg: str) -> None:
        """Send the client the reason why the connection ends, unless a large string is being written."""
        self._unregister()
        if self._unsent is None:
            super().sendError(msg)

    # The end.

    def disconnectTimerFired(self) -> None:
        """Close the connection of a client that neither sends nor reads anything."""
        unsent = unsent_bytes(self.transport) + len(self._unsent or b"")
        if unsent != self._was_unsent:  # the client has read something
            self._was_unsent = unsent
            self.dataLastReceivedAt = self.seconds()
        super().disconnectTimerFired()

    def refused(self, reason: str) -> None:
        self._tell_refused(reason)

    def shutdown(self, why: Failure, fireDisconnectWatchers: bool = True) -> None:
        self._unregister()
        super().shutdown(why, fireDisconnectWatchers)
        self._gone()

    def connectionLost(self, why: Failure) -> None:
        self._registered = False  # the transport has dropped its TLS layer
        super().connectionLost(why)
        self._gone()

    def _gone(self) -> None:
        self._stop_waiting()
        self._unregister()
        self._unsent = None
        # Drop unsent answers, since they hold the data that was read.
        self.slicerStack, self.rootSlicer.sendQueue = [], []
        self._message_held = 0
        self._memory.release_all(self)

    def _unregister(self) -> None:
        # TLS does not close its connection while a producer is registered.
        if self._registered:
            self._registered = False
            self.transport.unregisterProducer()


class ServerNegotiation(BoundedNegotiation):
    """
    The negotiation that precedes a broker.

    Attributes:
        make_broker: makes the broker, with Foolscap's arguments.
    """

    make_broker: Callable[..., ServerBroker]

    def switchToBanana(self, params: dict[str, Any]) -> None:
        """Switch to a broker of ``make_broker``, since both sides have agreed on ``params``."""
        self.brokerClass = self.make_broker
        super().switchToBanana(params)
