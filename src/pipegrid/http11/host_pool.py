"""Connection pool of one host; host statistics."""

from __future__ import annotations

import math
from collections import deque

from twisted.internet.defer import Deferred, DeferredList, fail
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import PipegridError, UsageError
from pipegrid.http11.connection import PipelinedConnection
from pipegrid.http11.connection_loss import Loss, Unanswered
from pipegrid.http11.dialer import Dialer, Endpoints, why_not
from pipegrid.http11.exchange import (
    AgentClosed,
    Exchange,
    RawCall,
    RawRequest,
    RawResponse,
    RequestMaybeProcessed,
    RequestNotSent,
    WrongServerKey,
    no_connection,
    not_connected,
    too_many_waiting,
)
from pipegrid.http11.limits import Limits
from pipegrid.reactor.deferreds import check_own_thread

# What the answers of one host have taught about it: facts in, advice out.
#
# **Size of answers.** Where nobody can say how long an answer will be, the host's habit is the best guess:
# the estimate jumps up to each longer answer at once, and comes down by a sixteenth with each shorter
# one. So a host that mixes both kinds is treated as one of long answers, which is slower, not wrong.
#
# **Pipelining.** Most servers take it, some do not: they close, or forget what they had read ahead, or
# mix up answers. Such a host is spoken to one request at a time for a while, longer each time, up to
# ``serial_memory_s``. A single closed connection proves nothing (servers restart, and close what was
# idle), two in a row without any success in between are enough; garbage or silence behind answers are
# enough at once.
#
# **How many a connection.** Servers close a connection after so many answers: nginx after 1000 (100 before
# 1.19.10), Apache httpd after 100. What was written behind the last of them was written in vain: of 6,200
# files 5,273 were asked for twice. So ``quota`` begins with the most usual number; a host that closes
# sooner is taken at its word, one that goes on has none.
#
# **How much may be owed.** ``response_budget_bytes`` is what every server bears. A host that says it is one
# of those known to bear more, or that has answered many requests with others behind them and says that it
# is not built on Twisted, gets a measured window. If that ends badly once, never again.

MIN_ASSUMED_BYTES = 256

FIRST_QUOTA = 1000.0
LEAST_QUOTA = 10
"""A server that closes sooner does so for reasons of the moment."""

PROOF = 10  # answers with others outstanding behind them: a server that does this can pipeline

BEAR_MORE = (
    b"nginx",
    b"openresty",
    b"apache",
    b"lighttpd",
    b"caddy",
    b"varnish",
    b"h2o",
    b"ats",
    b"litespeed",
)
"""
Products that stop reading, and reading ahead, while they cannot write: how ``Server`` begins, in lower case.
"""

BEAR_LESS = (b"twisted",)
"""Those that drop the connection when a request comes while they cannot write."""

FIRST_SERIAL_SHARE = 1 / 60
"""Of ``serial_memory_s``: how long a host is spoken to one request at a time when that happens first."""


class HostStats:
    """
    The memory of one host.

    Attributes:
        assumed_response_bytes: what to expect of an answer nobody can predict.
        proven: the host speaks HTTP/1.1 and keeps connections open, so even a request that must not
            be repeated may be written behind others.
        takes_larger_budget: more may be owed than ``response_budget_bytes``.
        quota: how many requests a connection to it is good for, as far as is known.
        quota_is_told: it said so itself.

    Args:
        serial: it is spoken to one request at a time whatever it does.
    """

    def __init__(self, limits: Limits, serial: bool = False) -> None:
        self._limits = limits
        self.assumed_response_bytes = limits.assumed_response_bytes
        self.proven = False
        self.takes_larger_budget = False
        self.quota = FIRST_QUOTA
        self.quota_is_told = False
        self._strikes = 0
        self._behind = 0
        self._product: bytes | None = None
        self._burned = limits.max_response_budget_bytes <= limits.response_budget_bytes
        self._serial_until = float("inf") if serial else 0.0
        self._serial_s = limits.serial_memory_s * FIRST_SERIAL_SHARE

    def __repr__(self) -> str:
        return (
            f"<HostStats {'proven' if self.proven else 'unproven'},"
            f" {self._strikes} strikes, serial until {self._serial_until:g},"
            f" answers of {self.assumed_response_bytes} bytes>"
        )

    def is_serial(self, now: float) -> bool:
        """Whether to speak to this host one request at a time."""
        return now < self._serial_until

    def answered(self, exchange: Exchange, now: float, others_behind: bool) -> None:
        """
        Learn from a complete answer.

        Args:
            others_behind: whether other requests stood behind this one.
        """
        size = exchange.received_bytes
        assumed = self.assumed_response_bytes
        if size >= assumed:
            self.assumed_response_bytes = size
        elif assumed > MIN_ASSUMED_BYTES:
            self.assumed_response_bytes = max(
                MIN_ASSUMED_BYTES, assumed - 1 - (assumed - size >> 4)
            )
        if not self.proven:
            head = exchange.response
            assert head is not None
            if head.version == (1, 0):
                self._serial_s = self._limits.serial_memory_s
                self._become_serial(now)
            elif head.keep_alive:
                self.proven = True
        if not (self.takes_larger_budget or self._burned):
            self._judge(exchange, others_behind)

    def outlasted(self, answered: int) -> None:
        """A connection has given so many answers and stays open: if that is its quota, it has none."""
        if answered >= self.quota:
            self.quota = float("inf")

    def _judge(self, exchange: Exchange, others_behind: bool) -> None:
        """See whether more may be owed."""
        product = self._product
        if product is None:
            head = exchange.response
            assert head is not None
            named = [value for name, value in head.headers if name == b"server"]
            product = self._product = named[0].lower() if named else b""
        self._behind += others_behind
        if not product or product.startswith(BEAR_LESS):
            self._burned = True
        elif self.proven:
            self.takes_larger_budget = product.startswith(BEAR_MORE) or self._behind >= PROOF

    def lost(self, loss: Loss, answered_behind: int, now: float) -> bool:
        """
        Learn from the end of a connection.

        Args:
            answered_behind: how many of its answers had others outstanding behind them.

        Returns:
            Whether pipelining was at fault, so that repeating a request alone may go well.
        """
        if loss.said_close and loss.answered >= LEAST_QUOTA:
            self.quota = loss.answered
            self.quota_is_told = True
        if self.takes_larger_budget and loss.in_flight > 1 and not loss.announced:
            self.takes_larger_budget, self._burned = False, True
        if answered_behind >= PROOF:
            self._strikes = 0
            if not loss.garbage:
                return False
        if loss.announced or loss.in_flight < 2 or self.is_serial(now):
            return False
        self._strikes += 2 if loss.garbage or loss.timed_out else 1
        if self._strikes < 2:
            return False
        self._become_serial(now)
        return True

    def _become_serial(self, now: float) -> None:
        self._strikes = 0
        self.proven = False
        self._serial_until = max(self._serial_until, now + self._serial_s)
        self._serial_s = min(2 * self._serial_s, self._limits.serial_memory_s)


# The connections to one host, and the requests that wait for room on them.
#
# **Decide, then act.** ``_assign`` is the one place where requests are given to connections: it is called
# after everything that could change the outcome, moves requests from the front of the queue for as long
# as the first one fits somewhere, and opens connections for what is left. Nothing overtakes, so nothing
# starves; who needs order among answers too uses one ``PipelinedConnection``.
#
# **After a loss.** What the server cannot have processed, and what may be repeated without harm, goes back to
# the front of the queue in its old order; everything else fails with the error that is true of it.
# A loss is charged to the request whose answer was due, and to all of them if the connection never
# answered anything; after ``max_attempts`` a request fails. So every loss brings
# some request nearer to its end, and no server can keep us reconnecting for ever.
#
# **Silence.** A server that accepts connections and never answers would let each of many requests wait for
# its own time of silence. So all that wait, and have no longer time, fail with the first whose time is over;
# after ``SECOND_CHANCE`` times as long if the host has answered before: perhaps it only cannot pipeline.

SECOND_CHANCE = 2


class HostPool:
    """
    Requests to one host, over as many connections as they need and the limits allow.

    Args:
        clock: for every time-out.
        connect: makes the endpoint for one more connection.
        server: the host's name for error messages.
        serial: one request at a time on each connection, always.
        cautious: nothing is written behind another request before the host has given a whole answer.
    """

    def __init__(
        self,
        clock: IReactorTime,
        connect: Endpoints,
        server: str,
        limits: Limits | None = None,
        *,
        serial: bool = False,
        cautious: bool = False,
    ) -> None:
        self._clock = clock
        self._server = server
        self._limits = limits or Limits()
        self._dialer = Dialer(clock, self._limits, server, connect)
        self.record = HostStats(self._limits, serial)
        self._unknown = cautious
        self._waiting: deque[Exchange] = deque()
        self._connections: list[PipelinedConnection] = []  # ready
        self._connecting: set[Deferred[PipelinedConnection]] = set()
        self._may_grow = True  # not after a failed attempt, until something is answered
        self._assigning = False
        self._dropping = False
        self._closed = False
        self._leaving: list[PipelinedConnection] = []
        self._heard = False
        self._silent_since_s: float | None = None

    def __repr__(self) -> str:
        return (
            f"<HostPool {self._server}: {len(self._waiting)} waiting, {self._connections},"
            f" {len(self._connecting)} connecting, {self.record}>"
        )

    @property
    def is_idle(self) -> bool:
        """Whether forgetting it would lose nothing but its memory."""
        return not (self._waiting or self._connections or self._connecting)

    @property
    def last_activity_s(self) -> float:
        """When bytes last came or went, on any of its connections, by the clock."""
        return max((each.last_activity_s for each in self._connections), default=-math.inf)

    def request(self, request: RawRequest) -> Deferred[RawResponse]:
        """
        Send a raw request on whichever connection has room; fires with its answer.

        Cancelling takes it back. Errors are those of ``PipelinedConnection.request``, after
        what can be repeated was repeated; of another thread than the reactor's, UsageError.
        """
        try:
            check_own_thread("A pool of connections")
        except UsageError as error:
            return fail(error)
        exchange = RawCall(request, self._server)
        self.submit(exchange)
        return exchange.result

    def submit(self, exchange: Exchange) -> None:
        """Take charge of a request, or fail it at once."""
        if self._closed:
            exchange.failed(self._refused())
        elif len(self._waiting) >= self._limits.max_waiting:
            exchange.failed(too_many_waiting(len(self._waiting), self._server))
        else:
            self._waiting.append(exchange)
            self._assign()

    def close(self) -> Deferred[None]:
        """
        Fail all requests, those that were sent as well; fires when all connections are gone, which is soon.

        Who wants an answer waits for it before. Closing again waits for the same end.
        """
        self._closed = True
        waiting, self._waiting = self._waiting, deque()
        for exchange in waiting:
            _fail(exchange, self._refused())
        for attempt in list(self._connecting):
            attempt.cancel()
        self._leaving += self._connections
        for connection in list(self._connections):
            if connection.is_wanted:
                connection.abort("the agent was closed")
            else:
                connection.close()
        leaving = [connection.when_lost() for connection in self._leaving]
        leaving.append(self._dialer.when_gone())
        gone: Deferred[None] = DeferredList(leaving).addCallback(lambda _: None)
        return gone

    def drop(self, reason: str) -> None:
        """
        Give up all connections now: what waits, and what was asked, fails and is not repeated.

        What is submitted later, or by whoever hears of a failure, gets new connections.

        Args:
            reason: a clause for the errors.
        """
        waiting, self._waiting = self._waiting, deque()
        assigning, self._assigning = self._assigning, True
        self._dropping = True
        try:
            for attempt in list(self._connecting):
                attempt.cancel()
            for connection in list(self._connections):
                connection.abort(reason)
            for exchange in waiting:
                _fail(exchange, no_connection(self._server, reason))
        finally:
            self._dropping, self._assigning = False, assigning
        self._may_grow = True
        self._assign()

    def _refused(self) -> AgentClosed:
        return AgentClosed(
            f"The agent was closed, so nothing more is sent to {self._server}; make another one.",
            self._server,
        )

    # Deciding.

    def _assign(self) -> None:
        """Give requests to connections with room, and open connections for the rest."""
        if self._assigning:
            return  # what called this is followed by another look
        self._assigning = True
        try:
            while not self._place_waiting() and self._wants_connection():
                self._open_connection()
        finally:
            self._assigning = False

    def _place_waiting(self) -> bool:
        """Give away waiting requests while the first fits somewhere; True if none is left."""
        waiting = self._waiting
        while waiting:
            exchange = waiting[0]
            if not exchange.abandoned:
                connection = self._best_for(exchange)
                if connection is None:
                    return False
                connection.submit(exchange)
            waiting.popleft()
        return True

    def _best_for(self, exchange: Exchange) -> PipelinedConnection | None:
        """The least loaded connection on which the request could be written at once."""
        record = self.record
        serial = record.is_serial(self._clock.seconds())
        needs_proof = self._unknown or (not exchange.idempotent and not record.proven)
        best, best_load = None, 0
        for connection in self._connections:
            if not connection.open or connection.held_up:
                continue
            lane = connection.lane
            lane.serial = serial
            lane.assumed_response_bytes = record.assumed_response_bytes
            load = len(lane)
            if load and (needs_proof or not lane.has_room(exchange)):
                continue
            if best is None or load < best_load:
                best, best_load = connection, load
        return best

    def _wants_connection(self) -> bool:
        """Whether the waiting requests could fill another connection beside those that are coming."""
        limits = self._limits
        coming = len(self._connecting)
        have = len(self._connections) + coming
        if have >= limits.max_connections or not self._may_grow or self._closed:
            return False
        serial = self.record.is_serial(self._clock.seconds())
        assumed = self.record.assumed_response_bytes
        lanes = count = charged = 0
        for exchange in self._waiting:
            if (
                not lanes
                or serial
                or count == limits.max_requests_in_flight
                or charged > limits.response_budget_bytes
            ):
                if lanes == coming:
                    return True
                lanes, count, charged = lanes + 1, 0, 0
            count += 1
            expected = exchange.expected_response_bytes
            charged += assumed if expected is None else expected
        return False

    # Connections come.

    def _open_connection(self) -> None:
        attempt = self._dialer.dial(self)
        self._connecting.add(attempt)
        attempt.addBoth(self._connected, attempt)

    def _connected(
        self, result: PipelinedConnection | Failure, attempt: Deferred[PipelinedConnection]
    ) -> None:
        self._connecting.discard(attempt)
        if isinstance(result, Failure):
            self._no_connection(why_not(result))
        elif self._closed:
            result.abort("the agent was closed")
        else:
            self._connections.append(result)
            self._assign()

    def _no_connection(self, error: BaseException) -> None:
        """An attempt failed. If it was the only hope, everything that waits fails."""
        self._may_grow = self._has_no_hope()
        if not self._may_grow:
            return
        sentence = not_connected(self._server, error)
        waiting, self._waiting = self._waiting, deque()
        for exchange in waiting:
            _fail(exchange, sentence)

    def _has_no_hope(self) -> bool:
        """Whether nothing is answered any more on what there is, or comes."""
        # One that is held up may stay so for as long as its reader likes.
        return not self._connecting and all(each.held_up for each in self._connections)

    # Connections tell.

    def has_room(self, connection: PipelinedConnection) -> None:
        if connection in self._connections:  # else it is being made, and has sent nothing
            self._heard, self._silent_since_s = True, None
        if self._waiting:
            self._assign()

    def answered(self, connection: PipelinedConnection, exchange: Exchange) -> None:
        self._may_grow = True
        self._unknown = False
        record, lane = self.record, connection.lane
        record.answered(exchange, self._clock.seconds(), bool(lane.written))
        if record.takes_larger_budget:
            lane.measure()

    def held_up(self, connection: PipelinedConnection) -> None:
        self._waiting.extendleft(reversed(connection.move_followers()))
        self._may_grow = True  # nothing may be answered here for long: look for another
        self._assign()

    def gave_back(self, unsent: list[Unanswered]) -> None:
        self._repeat_or_fail(unsent)

    def lost(
        self, connection: PipelinedConnection, loss: Loss, unanswered: list[Unanswered]
    ) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        if self._has_no_hope():
            self._may_grow = True  # else nobody would try again, and what waits would wait for ever
        now = self._clock.seconds()
        pipelining_failed = self.record.lost(loss, connection.answered_behind, now)
        if not loss.announced:
            for each in unanswered if not loss.answered else unanswered[:1]:
                each.exchange.attempts += 1
        # Of many connections on a slow line one may get nothing for long: that is not the server's silence.
        starved = loss.timed_out and self.last_activity_s > now - self._limits.timeout_s
        if loss.timed_out:
            unanswered = self._fail_what_waits_too_long(connection, loss, unanswered)
        self._repeat_or_fail(unanswered, pipelining_failed or starved, loss.timed_out)

    def _fail_what_waits_too_long(
        self, connection: PipelinedConnection, loss: Loss, unanswered: list[Unanswered]
    ) -> list[Unanswered]:
        """The host is silent: fail what waits for no longer than that; return what else was unanswered."""
        since_s = self._silent_since_s
        if since_s is None:
            since_s = self._silent_since_s = connection.last_activity_s
        silent_s = self._clock.seconds() - since_s
        chances = SECOND_CHANCE if self._heard else 1

        def is_over(exchange: Exchange) -> bool:
            own_s = exchange.timeout_s
            return chances * (self._limits.timeout_s if own_s is None else own_s) <= silent_s

        late = [each for each in self._waiting if is_over(each)]
        self._waiting = deque(each for each in self._waiting if not is_over(each))
        failed = [each for each in unanswered if is_over(each.exchange)]
        for each in failed:
            _fail(each.exchange, each.error)
        for exchange in late:
            _fail(exchange, no_connection(self._server, loss.reason))
        return [each for each in unanswered if each not in failed]

    def _repeat_or_fail(
        self,
        unanswered: list[Unanswered],
        not_its_fault: bool = False,
        was_silent: bool = False,
    ) -> None:
        again = [
            each
            for each in unanswered
            if self._can_repeat(each, not_its_fault)
            and not (was_silent and not each.exchange.again_after_silence)
        ]
        self._waiting.extendleft(each.exchange for each in reversed(again))
        for each in unanswered:
            if not isinstance(each.error, RequestNotSent):
                each.exchange.maybe_processed = True
            if each not in again:
                _fail(each.exchange, each.error)
        self._assign()

    def _can_repeat(self, each: Unanswered, not_its_fault: bool) -> bool:
        exchange, error = each.exchange, each.error
        if (
            self._closed
            or self._dropping
            or not exchange.can_be_repeated
            or exchange.attempts >= self._limits.max_attempts
        ):
            return False
        if isinstance(error, RequestNotSent):
            return not isinstance(error, WrongServerKey)
        # Garbage and silence are final, unless something else than the server brought them about.
        return exchange.idempotent and (not_its_fault or isinstance(error, RequestMaybeProcessed))

    def _check_invariants(self) -> None:
        assert len(self._connections) + len(self._connecting) <= self._limits.max_connections, self
        for connection in self._connections:
            connection._check_invariants()
        for exchange in self._waiting:
            assert exchange.connection is None, exchange


def _fail(exchange: Exchange, error: PipegridError) -> None:
    """Tell an exchange, with regard to all attempts and not only to the last one."""
    if exchange.abandoned:
        return
    if exchange.maybe_processed and isinstance(error, RequestNotSent):
        error = RequestMaybeProcessed(
            f"{error} It had been sent before, and may have been processed then.", error.server
        )
    exchange.failed(error)
