"""The requests on a connection, and the decision whether another may be written. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pipegrid.flow.window import AutoWindow
from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.exchange import Exchange

FIRST_WINDOW_BYTES = 1 << 20
"""The measured window at the beginning: it allows 80 Mbit/s at 100 ms from the first round trip on."""


GROUP_BYTES = 32 << 10
"""
Requests that are written together and have small responses count as one message in the window, up to this
many bytes of responses: counting each request was an eighth of the cost of small responses.
"""

CROWD_REQUESTS = 16
"""Minimum number of requests for ``crowd_bytes`` to apply; large bodies of fewer requests fill the link."""


class RequestQueue:
    """
    The requests of one connection.

    **Goal.** Requests are sent without waiting for responses, as many as the server can take.

    **Hazard.** A server built on Twisted that reads a GET while its transport is full drops the connection
    with all its requests; for other servers, only memory is filled. A server's transport is full when it
    holds 64 KiB that the client has not yet received.

    **Rule.** A request may be written when the outstanding responses *before* it have at most
    ``budget_bytes``. Then the server has finished these responses and has space again when it reads the
    request. So a large response may follow small ones, is always the last one, and blocks further requests
    until most of it is received. Received bytes of a response no longer count: when the rest of it fits into
    the budget, the next request is sent. The size of a response without an estimate is assumed, from the
    host's recent responses, and corrected when its head has arrived.

    **Many small requests.** A server built on Twisted that has received many requests copies all of them for
    each line of a head, and for each body: with a megabyte of small shares, copying was a third of the
    server's time. So if ``crowd_bytes`` is given, at most about this many bytes of requests are unanswered,
    except if there are fewer than ``CROWD_REQUESTS``.

    For a host that supports more outstanding bytes, ``budget_bytes`` is a measured window, bandwidth times
    delay, so that the link never idles.

    **Invariant.** ``written`` is in the order of the responses, and the sums are those of its requests.

    Rejected alternatives: counting only requests (this ignores their sizes); including the new request in the
    budget (a list of shares and the following share would then take two round trips).

    Attributes:
        queued: accepted requests of which nothing is written, in order.
        written: requests that are written at least in part, and not answered, in order.
        accepted: how many requests the connection has accepted in total.
        quota: how many requests the host is expected to answer on one connection; ``takes_more`` respects it.
        serial: whether only one request may be outstanding.
        budget_bytes: the bytes that may be outstanding before another request is written.
        window: measures ``budget_bytes``; None: the budget is fixed.
        assumed_response_bytes: the bytes that a response of unknown size counts.
        crowd_bytes: returns the limit for bytes of unanswered requests, for a server that copies them; None:
            no limit.
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
        self._group_bytes = 0  # received bytes of the window's current message

    def __repr__(self) -> str:
        return (
            f"<RequestQueue {len(self.queued)} queued, {len(self.written)} written:"
            f" {self._request_bytes_written} bytes for {self._charged_written}"
            f"{', serial' if self.serial else ''}>"
        )

    def __len__(self) -> int:
        return len(self.queued) + len(self.written)

    @property
    def outstanding_bytes(self) -> int:
        """The outstanding bytes of all responses, as far as known."""
        return self._charged_written + self._charged_queued

    @property
    def is_spent(self) -> bool:
        """
        Whether the connection has accepted as many requests as the host is expected to answer on one
        connection.
        """
        return self.accepted >= self.quota

    @property
    def takes_more(self) -> bool:
        """Whether a request without a body could be written at once if it was added now."""
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

    def has_space(self, exchange: Exchange) -> bool:
        """Return whether the request could be written at once if it was added now."""
        return self._may_follow(exchange, True)

    def add(self, exchange: Exchange) -> None:
        """Accept a request. The caller limits the number of requests."""
        expected = exchange.expected_response_bytes
        exchange.charged_bytes = self.assumed_response_bytes if expected is None else expected
        exchange.sent = False
        self.accepted += 1
        self._charged_queued += exchange.charged_bytes
        self._request_bytes_queued += exchange.request_bytes
        self.queued.append(exchange)

    def start_next(self) -> Exchange | None:
        """Move the next queued request to the written ones, if it may be written now; return it, or None."""
        if not self.queued:
            return None
        exchange = self.queued[0]
        if not self._may_follow(exchange, False):
            return None
        self.queued.popleft()
        self._charged_queued -= exchange.charged_bytes
        self._request_bytes_queued -= exchange.request_bytes
        self._charged_written += exchange.charged_bytes
        self._request_bytes_written += exchange.request_bytes
        self.written.append(exchange)
        return exchange

    def raise_budget(self, budget_bytes: int) -> None:
        """Use a larger budget than that of the limits, unless the budget is measured."""
        if self.window is None:
            self.budget_bytes = max(self.budget_bytes, budget_bytes)

    def measure(self) -> None:
        """Measure the budget from now on, up to the maximum in the limits."""
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
        """Record in the window that writing a request begins."""
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
        """Remove the first written request, whose response is complete, and return it."""
        exchange = self.written.popleft()
        self._charged_written -= exchange.charged_bytes
        self._request_bytes_written -= exchange.request_bytes
        token, window = exchange.token, self.window
        if token is not None and window is not None:
            exchange.token = None
            self._group_bytes += exchange.received_bytes
            if not self.written or self.written[0].token is not token:
                # Replace the assumed sizes with the received ones.
                window.in_flight_bytes += self._group_bytes - token.size
                token.size, self._group_bytes = self._group_bytes, 0
                window.acknowledged(now, token)
                self.budget_bytes = window.limit_bytes
        return exchange

    def received(self) -> None:
        """Count only the missing bytes of the first response, if its length is known."""
        exchange = self.written[0]
        head = exchange.response
        if head is not None and head.length is not None:
            left_bytes = max(0, head.head_bytes + head.length - exchange.received_bytes)
            self._charged_written += left_bytes - exchange.charged_bytes
            exchange.charged_bytes = left_bytes

    def withdraw(self, exchange: Exchange) -> bool:
        """Remove a request if nothing of it was written; return False if some of it was written."""
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
        Withdraw and return the repeatable, completely written requests after the first written one, and all
        queued ones.

        Each withdrawn request that was written is replaced by an abandoned placeholder, since its response
        will still come.
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
        """Withdraw and return all requests of which nothing was written."""
        given, self.queued = list(self.queued), deque()
        self._charged_queued = self._request_bytes_queued = 0
        return given

    def take_all(self) -> tuple[list[Exchange], list[Exchange]]:
        """Withdraw all requests and return them: (written, queued), each in order."""
        written, self.written = list(self.written), deque()
        self._charged_written = self._request_bytes_written = 0
        return written, self.take_queued()

    def _may_follow(self, exchange: Exchange, behind_queued: bool) -> bool:
        """
        Return whether a request may be written after the written ones, and with ``behind_queued`` also after
        the queued ones.
        """
        before = self.written
        count = len(before)
        charged_bytes = self._charged_written
        request_bytes = self._request_bytes_written
        if behind_queued and self.queued:
            before = self.queued
            count += len(before)
            charged_bytes += self._charged_queued
            request_bytes += self._request_bytes_queued
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
            and not before[-1].closes
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
            # The size of the first response may have become known after the later requests were written.
            guessed = [e for e in list(self.written)[:-1] if e.response is None]
            most_bytes = max(self.budget_bytes, limits.max_response_budget_bytes)
            assert sum(e.charged_bytes for e in guessed) <= most_bytes, self
            assert self._request_bytes_written <= limits.max_request_bytes_in_flight, self
            assert len(self.written) <= limits.max_requests_in_flight, self
