"""
Which requests are on a connection, and whether another may be written: decisions without I/O.

**Goal.** Requests leave without waiting for answers, as many as the server can take.

**Hazard.** A server built on Twisted that starts to answer a GET while its transport is full drops the
connection, with all that was asked on it; others just fill their memory. Its transport is full
when it holds 64 KiB that we have not yet taken.

**Rule.** A request may be written when all that is to be answered *before* it comes to at most
``response_budget_bytes``. Then the server has finished those answers and still has room when it
comes to this one. A large answer can thus stand behind small ones, is always the last,
and is alone as soon as they are read. What of an answer has arrived is no longer to come: with the last
budget of it the next request leaves. What an unpredictable answer is charged is a guess, which the
pool learns from what the host has answered lately, and the truth once its head has told its length.

**Crowds.** A server built on Twisted that has many requests at once copies all of them for each line of a
head, and for each body: with a megabyte of small shares before it that was a third of its time. So where a
lane is told ``crowd_bytes``, no more than so many wait there for their turn, unless they are few.

Where a host is known to take it, ``budget_bytes`` is more than the limit's: a measured window, bandwidth
times delay, so that the line is never idle for want of requests.

**Invariant.** ``written`` is in the order in which answers must come, and the sums are theirs.

Set aside: counting only requests (says nothing about sizes); waiting until the budget also
holds the new request (then a list of shares and the share behind it would take two round trips).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pipegrid.flow.window import AutoWindow
from pipegrid.http11.exchange import Exchange
from pipegrid.http11.limits import Limits

FIRST_WINDOW_BYTES = 1 << 20
"""What a measured window begins with: 80 Mbit/s at 100 ms, from the first round trip on."""


GROUP_BYTES = 32 << 10
"""
Requests that are written together, and whose answers come to no more, are one message to the window: it
was an eighth of what small answers cost.
"""

CROWD_REQUESTS = 16
"""Fewer are no crowd: large bodies pass a server in pieces, and fill the line."""


class RequestQueue:
    """
    The requests of one connection.

    Attributes:
        queued: accepted, nothing written yet; the order in which they will be.
        written: begun or wholly written and not answered; the order of answers.
        accepted: how many requests it has had in all.
        quota: how many the host is expected to answer on one connection; ``takes_more`` heeds it.
        serial: one at a time.
        budget_bytes: what may be owed before another request is written.
        window: measures what that should be; None: it stays.
        assumed_response_bytes: what answers of unknown size are charged.
        crowd_bytes: of requests that are written and unanswered, where the server copies them; None: of any
            number.
    """

    __slots__ = (
        "_charged_queued",
        "_charged_written",
        "_group_bytes",
        "_request_bytes_queued",
        "_request_bytes_written",
        "accepted",
        "assumed_response_bytes",
        "budget_bytes",
        "crowd_bytes",
        "limits",
        "queued",
        "quota",
        "serial",
        "window",
        "written",
    )

    def __init__(self, limits: Limits, serial: bool = False) -> None:
        self.limits = limits
        self.serial = serial
        self.assumed_response_bytes = limits.assumed_response_bytes
        self.budget_bytes = limits.response_budget_bytes
        self.window: AutoWindow | None = None
        self.crowd_bytes: Callable[[], float] | None = None
        self.queued: deque[Exchange] = deque()
        self.written: deque[Exchange] = deque()
        self.accepted = 0
        self.quota = float("inf")
        self._charged_written = 0
        self._charged_queued = 0
        self._request_bytes_written = 0
        self._request_bytes_queued = 0
        self._group_bytes = 0  # received of the message that is being answered

    def __repr__(self) -> str:
        return (
            f"<RequestQueue {len(self.queued)} queued, {len(self.written)} written:"
            f" {self._request_bytes_written} bytes for {self._charged_written}"
            f"{', serial' if self.serial else ''}>"
        )

    def __len__(self) -> int:
        return len(self.queued) + len(self.written)

    @property
    def owed_bytes(self) -> int:
        """What is still to come of all answers, as far as that is known."""
        return self._charged_written + self._charged_queued

    @property
    def is_spent(self) -> bool:
        """Whether it has had as many requests as the host is expected to answer on one connection."""
        return self.accepted >= self.quota

    @property
    def takes_more(self) -> bool:
        """Whether a request without a body, put behind all the others, could be written at once."""
        count = len(self.written) + len(self.queued)
        if not count:
            return self.accepted < self.quota
        limits = self.limits
        return (
            not self.serial
            and count < limits.max_requests_in_flight
            and self.accepted < self.quota
            and self._charged_written + self._charged_queued <= self.budget_bytes
            and self._request_bytes_written + self._request_bytes_queued
            < limits.max_request_bytes_in_flight
        )

    def has_room(self, exchange: Exchange) -> bool:
        """Whether the request, put behind all the others, could be written at once."""
        return self._may_follow(
            exchange,
            len(self.written) + len(self.queued),
            self._charged_written + self._charged_queued,
            self._request_bytes_written + self._request_bytes_queued,
            (self.queued or self.written),
        )

    def add(self, exchange: Exchange) -> None:
        """Accept a request; bounding how many is the caller's business."""
        expected = exchange.expected_response_bytes
        exchange.charged_bytes = self.assumed_response_bytes if expected is None else expected
        exchange.sent = False
        self.accepted += 1
        self._charged_queued += exchange.charged_bytes
        self._request_bytes_queued += exchange.request_bytes
        self.queued.append(exchange)

    def start_next(self) -> Exchange | None:
        """Move the next request to the written ones, if it may be written now."""
        if not self.queued:
            return None
        exchange = self.queued[0]
        if not self._may_follow(
            exchange,
            len(self.written),
            self._charged_written,
            self._request_bytes_written,
            self.written,
        ):
            return None
        self.queued.popleft()
        self._charged_queued -= exchange.charged_bytes
        self._request_bytes_queued -= exchange.request_bytes
        self._charged_written += exchange.charged_bytes
        self._request_bytes_written += exchange.request_bytes
        self.written.append(exchange)
        return exchange

    def measure(self) -> None:
        """From now on measure how much should be owed, up to the limits' maximum."""
        limits = self.limits
        if self.window is None:
            least_bytes = max(1, limits.response_budget_bytes)
            self.window = AutoWindow(
                minimum_bytes=least_bytes,
                maximum_bytes=max(least_bytes, limits.max_response_budget_bytes),
                initial_bytes=FIRST_WINDOW_BYTES,
            )
            self.budget_bytes = self.window.limit_bytes

    def asked(self, exchange: Exchange, now: float) -> None:
        """A request begins to be written: the window has to know."""
        window = self.window
        if window is None:
            return
        size = exchange.charged_bytes
        token = self.written[-2].token if len(self.written) > 1 else None
        if token is not None and token.time == now and token.size + size <= GROUP_BYTES:
            window.joined(token, size)
        else:
            token = window.sent(now, size)
        exchange.token = token

    def answered(self, now: float) -> Exchange:
        """The first of the written ones is done."""
        exchange = self.written.popleft()
        self._charged_written -= exchange.charged_bytes
        self._request_bytes_written -= exchange.request_bytes
        token, window = exchange.token, self.window
        if token is not None and window is not None:
            exchange.token = None
            self._group_bytes += exchange.received_bytes
            if not self.written or self.written[0].token is not token:
                # They were charged what they were guessed to be.
                window.in_flight_bytes += self._group_bytes - token.size
                token.size, self._group_bytes = self._group_bytes, 0
                window.acknowledged(now, token)
                self.budget_bytes = window.limit_bytes
        return exchange

    def received(self) -> None:
        """Some of the first answer is here: charge what is still to come, if that is known."""
        exchange = self.written[0]
        head = exchange.response
        if head is not None and head.length is not None:
            left_bytes = max(0, head.head_bytes + head.length - exchange.received_bytes)
            self._charged_written += left_bytes - exchange.charged_bytes
            exchange.charged_bytes = left_bytes

    def withdraw(self, exchange: Exchange) -> bool:
        """Remove a request if nothing of it was written; False if it was."""
        try:
            self.queued.remove(exchange)
        except ValueError:
            return False
        self.accepted -= 1
        self._charged_queued -= exchange.charged_bytes
        self._request_bytes_queued -= exchange.request_bytes
        return True

    def take_followers(self) -> list[Exchange]:
        """
        Give up the requests behind the first written one that may be asked anew, and all queued ones.

        In place of each written one stays an abandoned placeholder, for the answer that will come.
        """
        taken: list[Exchange] = []
        kept: deque[Exchange] = deque()
        for exchange in self.written:
            if (
                kept
                and exchange.sent
                and exchange.idempotent
                and exchange.can_be_repeated
                and not exchange.abandoned
            ):
                taken.append(exchange)
                kept.append(exchange.make_placeholder())
            else:
                kept.append(exchange)
        self.written.clear()
        self.written.extend(kept)
        return taken + self.take_queued()

    def take_queued(self) -> list[Exchange]:
        """Give up all of which nothing was written."""
        given, self.queued = list(self.queued), deque()
        self._charged_queued = self._request_bytes_queued = 0
        return given

    def take_all(self) -> tuple[list[Exchange], list[Exchange]]:
        """Give up everything: (written, queued), each in order."""
        written, self.written = list(self.written), deque()
        self._charged_written = self._request_bytes_written = 0
        return written, self.take_queued()

    def _may_follow(
        self,
        exchange: Exchange,
        count: int,
        charged_bytes: int,
        request_bytes: int,
        predecessors: deque[Exchange],
    ) -> bool:
        if not count:
            return True
        limits = self.limits
        return (
            not self.serial
            and count < limits.max_requests_in_flight
            and charged_bytes <= self.budget_bytes
            and request_bytes + exchange.request_bytes <= limits.max_request_bytes_in_flight
            and (
                count < CROWD_REQUESTS
                or self.crowd_bytes is None
                or request_bytes < self.crowd_bytes()
            )
            and not predecessors[-1].closes
        )

    def _check_invariants(self) -> None:
        for exchanges, charged, request_bytes in (
            (self.written, self._charged_written, self._request_bytes_written),
            (self.queued, self._charged_queued, self._request_bytes_queued),
        ):
            assert charged == sum(e.charged_bytes for e in exchanges), self
            assert request_bytes == sum(e.request_bytes for e in exchanges), self
        assert all(e.sent for e in list(self.written)[:-1]), "only the last may be half written"
        assert not any(e.sent for e in self.queued), self
        assert not set(map(id, self.written)) & set(map(id, self.queued)), self
        limits = self.limits
        if len(self.written) > 1:
            # Of the first the true length may have come after the others were written.
            guessed = [e for e in list(self.written)[:-1] if e.response is None]
            most_bytes = max(limits.response_budget_bytes, limits.max_response_budget_bytes)
            assert sum(e.charged_bytes for e in guessed) <= most_bytes, self
            assert self._request_bytes_written <= limits.max_request_bytes_in_flight, self
            assert len(self.written) <= limits.max_requests_in_flight, self
