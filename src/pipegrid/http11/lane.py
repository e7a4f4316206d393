"""
Which requests are on a connection, and whether another may be written: decisions without I/O.

**Goal.** Requests leave without waiting for answers, as many as the server can take.

**Hazard.** A server built on Twisted that starts to answer a GET while its transport is full drops the
connection, with all that was asked on it; others just fill their memory. Its transport is full
when it holds 64 KiB that we have not yet taken.

**Rule.** A request may be written when all that is to be answered *before* it comes to at most
``response_budget_bytes``. Then the server has finished those answers and still has room when it
comes to this one. A large answer can thus stand behind small ones, is always the last,
and is alone as soon as they are read. What an unpredictable answer is charged is a guess, which the
pool learns from what the host has answered lately.

**Invariant.** ``written`` is in the order in which answers must come, and the sums are theirs.

Set aside: counting only requests (says nothing about sizes); waiting until the budget also
holds the new request (then a list of shares and the share behind it would take two round trips).
"""

from __future__ import annotations

from collections import deque

from pipegrid.http11.exchange import Exchange
from pipegrid.http11.limits import Limits


class Lane:
    """
    The requests of one connection.

    Attributes:
        queued: accepted, nothing written yet; the order in which they will be.
        written: begun or wholly written and not answered; the order of answers.
        serial: one at a time.
        assumed_response_bytes: what answers of unknown size are charged.
    """

    __slots__ = (
        "_charged_queued",
        "_charged_written",
        "_request_bytes_queued",
        "_request_bytes_written",
        "assumed_response_bytes",
        "limits",
        "queued",
        "serial",
        "written",
    )

    def __init__(self, limits: Limits, serial: bool = False) -> None:
        self.limits = limits
        self.serial = serial
        self.assumed_response_bytes = limits.assumed_response_bytes
        self.queued: deque[Exchange] = deque()
        self.written: deque[Exchange] = deque()
        self._charged_written = 0
        self._charged_queued = 0
        self._request_bytes_written = 0
        self._request_bytes_queued = 0

    def __repr__(self) -> str:
        return (
            f"<Lane {len(self.queued)} queued, {len(self.written)} written:"
            f" {self._request_bytes_written} bytes for {self._charged_written}"
            f"{', serial' if self.serial else ''}>"
        )

    def __len__(self) -> int:
        return len(self.queued) + len(self.written)

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

    def answered(self) -> Exchange:
        """The first of the written ones is done."""
        exchange = self.written.popleft()
        self._charged_written -= exchange.charged_bytes
        self._request_bytes_written -= exchange.request_bytes
        return exchange

    def withdraw(self, exchange: Exchange) -> bool:
        """Remove a request if nothing of it was written; False if it was."""
        try:
            self.queued.remove(exchange)
        except ValueError:
            return False
        self._charged_queued -= exchange.charged_bytes
        self._request_bytes_queued -= exchange.request_bytes
        return True

    def take_followers(self) -> list[Exchange]:
        """
        Give up the requests behind the first written one that may be asked anew, and all queued ones.

        In place of each written one stays an abandoned double, for the answer that will come.
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
                kept.append(exchange.make_double())
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
            and charged_bytes <= limits.response_budget_bytes
            and request_bytes + exchange.request_bytes <= limits.max_request_bytes_in_flight
            and not predecessors[-1].closes
        )

    def _check_invariants(self) -> None:
        """For tests."""
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
            before_last = sum(e.charged_bytes for e in list(self.written)[:-1])
            assert before_last <= limits.response_budget_bytes, self
            assert self._request_bytes_written <= limits.max_request_bytes_in_flight, self
            assert len(self.written) <= limits.max_requests_in_flight, self
