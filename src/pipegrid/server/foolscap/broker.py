"""One client's Foolscap connection within limits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from foolscap import eventual
from foolscap.banana import int2b128
from foolscap.call import AnswerSlicer
from foolscap.tokens import STRING
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from pipegrid.reactor.sockets import Backpressure, unsent_bytes
from pipegrid.server.fair_scheduler import CpuUsage
from pipegrid.wire.foolscap_broker import BoundedBroker, BoundedNegotiation
from pipegrid.wire.foolscap_interfaces import MAX_SHARE_DATA_BYTES
from pipegrid.wire.foolscap_receiver import MAX_TOKENS, TOKEN_COST, Bounds, LimitExceeded

# What goes out to a Foolscap client: how large it will be.


def asked_bytes(delivery: Any) -> int:
    """Return how many bytes a call asks for at most, if it is one that may ask for many."""
    arguments = delivery.allargs.args
    if delivery.methodname == "read" and len(arguments) == 2:
        return int(arguments[1])
    if delivery.methodname == "slot_readv" and len(arguments) == 3:
        return sum(int(size) for _, size in arguments[2]) * (len(arguments[1]) or 1)
    return 0


def answer_bytes(results: Any) -> int:
    """Return how many bytes of share data are in an answer."""
    if isinstance(results, bytes):
        return len(results)
    if isinstance(results, (tuple, list)):
        return sum(map(answer_bytes, results))
    if isinstance(results, dict):
        return sum(map(answer_bytes, results.values()))
    return 0


# Who has to wait: connections that have kept the server busy take turns, and rest while others are at work.
#
# How long the server works for a connection is measured (``server.fair_scheduler.CpuUsage``). Up to a
# burst, and a share of all time for good, it has its turn as soon as something comes. Beyond, it waits in
# line with its like: one of them has a turn at a time, and behind each all of them rest ``REST`` times as
# long as the turn took; but only while anybody else asks for something. So floods, however many, get a
# fifth of the server at most, and bulk work loses nothing while it is alone, or among its like.

REST = 4.0
ACTIVE_S = 0.25
"""For so long after somebody has asked for something they may ask for more."""


class Governor:
    """
    The line, of all connections that have to wait.

    Args:
        clock: for rests.
        others: how much was asked for by other ways so far; any number that grows with it.
    """

    def __init__(self, clock: IReactorTime, others: Callable[[], int]) -> None:
        self._clock = clock
        self._others = others
        self._seen = others()
        self._active_s = float("-inf")
        self._line: deque[Callable[[], None]] = deque()
        self._waiting = False
        self._spent_s = 0.0
        self._rests_until_s = 0.0

    def __repr__(self) -> str:
        return f"<Governor, {len(self._line)} in line>"

    @property
    def now_s(self) -> float:
        """The time that spending is told in."""
        return self._clock.seconds()

    @property
    def others_ask(self) -> bool:
        """Whether anybody has asked for something lately who need not wait."""
        self._look_for_others()
        return self.now_s - self._active_s < ACTIVE_S

    def light_work(self) -> None:
        """Somebody who need not wait has asked for something."""
        self._active_s = self.now_s

    def heavy_work(self, work_s: float) -> None:
        """The server has worked for one of those who wait, in its turn or for a call that it brought."""
        self._spent_s += work_s

    def enter(self, turn: Callable[[], None]) -> None:
        """Have a turn in line."""
        self._line.append(turn)
        self._wait()

    def _wait(self) -> None:
        if not self._waiting:
            self._waiting = True
            rest_s = max(0.0, self._rests_until_s - self._clock.seconds())
            self._clock.callLater(rest_s, self._next)

    def _look_for_others(self) -> None:
        others = self._others()
        if others != self._seen:
            self._seen, self._active_s = others, self._clock.seconds()

    def _next(self) -> None:
        self._waiting = False
        if not self._line:
            return
        now_s = self._clock.seconds()
        owed_s, self._spent_s = self._spent_s, 0.0
        if self.others_ask and owed_s:
            # Behind what the last turn brought, its calls included.
            self._rests_until_s = now_s + owed_s * REST
            self._wait()
            return
        self._line.popleft()()
        if self._line:
            self._wait()


# What Foolscap's connections hold in memory, and who goes when it is too much.
#
# Messages that are being received or carried out, answers that are being sent, references: a connection that
# has more than a little of them asks here first. All together have what the server's other protocol has left
# them. When that is used up, the connection that holds most is cut off, if it holds at least as much as the
# one that asks would; else the one that asks. So whoever declares much and sends it slowly, or asks for much
# and does not read it, is the first to go, and a client with one usual message is never in its way.
#
# Pure: who is told, and how, is the holders' business.

MAX_HELD_BYTES = 192 << 20
"""The largest message has 128 MiB, and its tokens become 52 MiB more."""


class Holder(Protocol):
    """Whoever holds memory that is counted here: a connection."""

    def crowd_out(self) -> None:
        """Let go of all, and end: others need the room."""


class HeldMemory:
    """
    The books.

    Args:
        ask: takes note that so many bytes more are held, or fewer; returns whether that may be.
        limit_bytes: for all these connections, whatever there is besides.
    """

    def __init__(self, ask: Callable[[int], bool], limit_bytes: int = MAX_HELD_BYTES) -> None:
        self._ask = ask
        self._limit_bytes = limit_bytes
        self.total_bytes = 0  # held by all of them
        self._held: dict[Holder, int] = {}

    def __repr__(self) -> str:
        return f"<HeldMemory, {self.total_bytes} bytes by {len(self._held)}>"

    def hold(self, holder: Holder, more_bytes: int) -> bool:
        """Have somebody hold more; returns whether that may be: if not, they are the one to go."""
        would_hold = self._held.get(holder, 0) + more_bytes
        while not self._take(more_bytes):
            victim = max(self._held, key=lambda each: self._held[each], default=holder)
            if victim is holder or self._held[victim] < would_hold:
                return False
            self.let_go_all(victim)
            victim.crowd_out()
        self._held[holder] = would_hold
        return True

    def let_go(self, holder: Holder, fewer_bytes: int) -> None:
        """Somebody holds less; it does not matter if they were cut off before."""
        held = self._held.get(holder, 0)
        fewer_bytes = min(fewer_bytes, held)
        if fewer_bytes:
            self._take(-fewer_bytes)
            self._held[holder] = held - fewer_bytes

    def let_go_all(self, holder: Holder) -> None:
        """Count nothing any more for a holder who is gone."""
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


# A client's Foolscap connection, as a server bounds it; what client and server have in common is in
# ``wire.foolscap_broker``.
#
# **Strangers.** Until a client has named something that is here (which takes the fURL's secret) it may send
# ``STRANGER_BYTES`` in all, PINGs and nonsense included, and take ``STRANGER_S``.
#
# **Memory** of messages, answers and references is held against one bound for all connections
# (``memory``), as soon as it is known how large they will be, until they are gone.
#
# **Answers are sent as fast as they are read.** Foolscap makes an answer's tokens when the call has
# ended, and writes them at once: a read of 64 MiB was 192 MiB until it was sent. Here no token is made
# while the socket is full, large strings are written ``PIECE_BYTES`` at a time, and the next call begins
# when the answers before it have been made.
#
# **Floods** take turns, see ``governor``.

# mypy: disable-error-code="misc"


STRANGER_BYTES = 8 * 1024
RECEIVE_BYTE_S = 2.5e-9
"""
What receiving a byte costs, decrypting included: 64 KiB took 0.16 ms. It happens below, where nobody
measures it.
"""
STRANGER_S = 30.0

FREE_BYTES = 64 * 1024
"""Of a message, or an answer, that nobody needs to know of."""

REFERENCE_COST = 2048
"""Of an object that a client may call, with its name and all that is kept of it."""

PIECE_BYTES = 256 * 1024
_LONGEST_WORD_BYTES = 1024  # none that is abbreviated is nearly as long

BOUNDS = Bounds(call_cost=MAX_SHARE_DATA_BYTES + MAX_TOKENS * TOKEN_COST, turn_tokens=256)
"""A read-test-write with as many bytes, in as many tests and writes, as HTTPS takes."""


class ServerBroker(BoundedBroker):
    """
    One connection; see above.

    Args:
        memory, governor: of all connections.
        refused: told why, when the connection ends for what it did.
        known: called when the client has named something that is here.
    """

    slicerStack: list[Any]

    def __init__(
        self,
        *args: Any,
        memory: HeldMemory,
        governor: Governor,
        refused: Callable[[str], None],
        known: Callable[[], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, bounds=BOUNDS, **kwargs)
        self._memory = memory
        self._governor = governor
        self._tell_refused = refused
        self._tell_known = known
        self._spending = CpuUsage(governor.now_s)
        self._strange_bytes: int | None = 0  # None: no stranger
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

    # Strangers.

    def connectionMade(self) -> None:
        super().connectionMade()
        self._strange_timer = eventual.reactor.callLater(STRANGER_S, self._stayed_strange)
        register = getattr(self.transport, "registerProducer", None)
        if register is not None:
            self._registered = True
            register(Backpressure(self), True)

    def remote_getReferenceByName(self, name: bytes) -> Any:
        """Give what has a name; whoever knows one is no stranger."""
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
        Take note of what receiving has cost, and let others have their turn before there is more.

        A long body is only gathered, and nobody looks at it before its end; but it has been received and
        decrypted. While nobody else asks for anything, that needs no turns.
        """
        governor = self._governor
        cost_s, now_s = received_bytes * RECEIVE_BYTE_S, governor.now_s
        self._spending.spend(cost_s, now_s)
        if self._yielded or self.connectionAbandoned or not self._tokens.missing_bytes:
            return
        if governor.others_ask and self._spending.is_heavy(now_s):
            governor.heavy_work(cost_s)
            self.leave_it()
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
        """Whether more can be taken now."""
        return not self.paused and super().may_go_on

    def arrived(self) -> None:
        """Look at what has arrived, at once or in line."""
        if self._spending.is_heavy(self._governor.now_s):
            self.leave_it()
            self._governor.enter(self.go_on)
        else:
            self.go_on()

    def turn_ended(self) -> None:
        """There is more to look at: let the others have their turn."""
        if self._spending.is_heavy(self._governor.now_s):
            self._governor.enter(self.go_on)
        else:
            eventual.eventually(self.go_on)

    def go_on(self) -> None:
        """Look at what has arrived, and take note of how long that takes."""
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
        """Others need the room, now."""
        self.refuse("it held the most memory when others needed some", tell=False)
        abort = getattr(self.transport, "abortConnection", None)
        if abort is not None:
            abort()

    def charge(self, cost: int) -> None:
        """A message becomes larger; raises TooMuch if it must not."""
        super().charge(cost)
        more = self.held_cost - self._message_held
        if more > FREE_BYTES:
            if not self._memory.hold(self, more):
                raise LimitExceeded(
                    "the server has no memory for a message of this size now; try again"
                )
            self._message_held += more

    def message_begins(self) -> None:
        """What comes now belongs to another message; of the one before nothing is left."""
        super().message_begins()
        self._memory.let_go(self, self._message_held)
        self._message_held = 0

    def scheduleCall(self, delivery: Any, ready_deferred: Any) -> None:
        """Have a call carried out; its arguments are held until then."""
        delivery.held_bytes, self._message_held = self._message_held, 0
        super().scheduleCall(delivery, ready_deferred)

    def call_ended(self, delivery: Any) -> None:
        """A call was carried out."""
        super().call_ended(delivery)
        self._memory.let_go(self, delivery.held_bytes)

    def getTrackerForMyReference(self, puid: int, obj: Any) -> Any:
        """Note that the client has a reference to an object of ours."""
        if puid not in self.myReferenceByPUID:
            self._hold_answer(REFERENCE_COST)
        return super().getTrackerForMyReference(puid, obj)

    def remote_decref(self, clid: int, count: int) -> None:
        """Note that it has one less."""
        before = len(self.myReferenceByCLID)
        super().remote_decref(clid, count)
        self._memory.let_go(self, (before - len(self.myReferenceByCLID)) * REFERENCE_COST)

    def _hold_answer(self, size: int) -> bool:
        if self._memory.hold(self, size):
            return True
        # Tokens are being made, which must not be disturbed.
        eventual.eventually(self.refuse, "the server has no memory for more answers now; try again")
        return False

    # Answers.

    def send(self, obj: Any) -> Any:
        """Send an answer, or a call."""
        size = answer_bytes(obj.results) if isinstance(obj, AnswerSlicer) else 0
        if size > FREE_BYTES and self._hold_answer(size):
            return super().send(obj).addBoth(self._sent, size)
        return super().send(obj)

    def _sent(self, result: Any, size: int) -> Any:
        self._memory.let_go(self, size)
        return result

    def sendToken(self, obj: Any) -> None:
        """Write a token; or its beginning, if it is large."""
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
        """The socket takes no more."""
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
        """Carry out the next call, if the answers before it are on their way; a long one in its turn."""
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
        """Make tokens to be sent, unless the connection is gone; called by Foolscap."""
        if not self.disconnected:
            super().produce(dummy)

    def sendPING(self, number: int = 0) -> None:
        """Ask whether the client is there, unless it is reading."""
        if self._unsent is None:
            super().sendPING(number)

    def sendPONG(self, number: int) -> None:
        """Answer such a question, unless it would be in the middle of another answer, which says as much."""
        if self._unsent is None:
            super().sendPONG(number)

    def sendError(self, msg: str) -> None:
        """Tell the client why the connection ends, if there is a place for it."""
        self._unregister()
        if self._unsent is None:
            super().sendError(msg)

    # The end.

    def disconnectTimerFired(self) -> None:
        """Give up a client that neither sends nor reads anything."""
        unsent = unsent_bytes(self.transport) + len(self._unsent or b"")
        if unsent != self._was_unsent:  # it reads
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
        self._registered = False  # the transport has no layers any more
        super().connectionLost(why)
        self._gone()

    def _gone(self) -> None:
        self._stop_waiting()
        self._unregister()
        self._unsent = None
        # Answers that were not sent; they hold what was read.
        self.slicerStack, self.rootSlicer.sendQueue = [], []
        self._message_held = 0
        self._memory.let_go_all(self)

    def _unregister(self) -> None:
        # TLS does not end while somebody may still write.
        if self._registered:
            self._registered = False
            self.transport.unregisterProducer()


# What a client's Foolscap connection is before both sides have agreed on what they speak.


class ServerNegotiation(BoundedNegotiation):
    """
    What comes before.

    Attributes:
        make_broker: called with what Foolscap gives a broker, makes one.
    """

    make_broker: Callable[..., ServerBroker]

    def switchToBanana(self, params: dict[str, Any]) -> None:
        """Go over to a broker of ``make_broker``: both sides have agreed on ``params``."""
        self.brokerClass = self.make_broker
        super().switchToBanana(params)
