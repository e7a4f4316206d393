"""How many small objects are under way: a queue of each server's own, in numbers."""

from __future__ import annotations

from heapq import heappop, heappush

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.flow.concurrency_limits import (
    INITIAL_LIMIT,
    MINIMUM_LIMIT,
    QUEUED_FACTOR,
    QUEUED_S,
    ConcurrencyLimit,
)

MOST = 256


def played(
    depth: ConcurrencyLimit, objects: int, round_trip_s: float, rate: float
) -> tuple[float, float, list[int]]:
    """
    Store objects on a server that takes so many a second, one after the other.

    Returns:
        the time, the longest that one of the last half took, and the limits.
    """
    ends: list[tuple[float, float]] = []
    now_s = free_s = longest_s = 0.0
    begun, limits = 0, []
    for number in range(objects):
        while begun < objects and len(ends) < depth.limit:
            free_s = max(free_s, now_s + round_trip_s / 2) + 1 / rate
            heappush(ends, (free_s + round_trip_s / 2, now_s))
            begun += 1
        now_s, began_s = heappop(ends)
        depth.ended(began_s, now_s, len(ends) + 1)
        limits.append(depth.limit)
        if number > objects // 2:
            longest_s = max(longest_s, now_s - began_s)
    return now_s, longest_s, limits


class DepthTests(SynchronousTestCase):
    """No queue, and nobody idle."""

    def test_a_slow_server(self) -> None:
        """It is never idle, and what is sent to it does not stand in a long queue."""
        took_s, longest_s, _ = played(ConcurrencyLimit(MOST), 1000, 0.1, 40)
        self.assertLess(took_s, 1.02 * 1000 / 40)
        self.assertLess(longest_s, 1.3 * max(QUEUED_S, QUEUED_FACTOR * 0.125))

    def test_a_quick_server(self) -> None:
        """The number doubles each round trip, up to its bound."""
        took_s, _, limits = played(ConcurrencyLimit(MOST), 4000, 0.1, 1e6)
        self.assertEqual(limits[-1], MOST)
        self.assertLess(took_s, 0.1 * (4 + 4000 / MOST))

    def test_a_far_server(self) -> None:
        """A long round trip is no queue."""
        took_s, _, limits = played(ConcurrencyLimit(MOST), 4000, 2.0, 1e6)
        self.assertEqual(limits[-1], MOST)
        self.assertLess(took_s, 2.0 * (4 + 4000 / MOST))

    def test_a_server_that_becomes_slow(self) -> None:
        """The number follows, within a queue or two, and never falls below the least."""
        depth = ConcurrencyLimit(MOST)
        played(depth, 2000, 0.01, 1e4)
        self.assertEqual(depth.limit, MOST)
        _, _, limits = played(depth, 3000, 0.01, 1)
        self.assertEqual(limits[-1], MINIMUM_LIMIT)
        self.assertGreaterEqual(min(limits), MINIMUM_LIMIT)

    def test_one_queue_is_cut_once(self) -> None:
        """All that stood in it took long; what began before the cut says nothing more."""
        depth = ConcurrencyLimit(MOST)
        depth.ended(0.0, 1.0, INITIAL_LIMIT - 1)  # the quickest so far
        limits = []
        for number in range(100):
            depth.ended(0.0, 4.0 + number / 100, INITIAL_LIMIT - 1)
            limits.append(depth.limit)
        self.assertEqual(len(set(limits)), 2)
        self.assertLess(depth.limit, INITIAL_LIMIT)
        self.assertGreaterEqual(depth.limit, INITIAL_LIMIT // 2)

    def test_one_that_is_slow(self) -> None:
        """A large file before it, or a server that paused, is no queue of ours."""
        depth = ConcurrencyLimit(MOST)
        for number in range(200):
            depth.ended(number, number + (5.0 if number % 10 == 9 else 0.2), depth.limit)
        self.assertGreater(depth.limit, INITIAL_LIMIT)

    def test_a_limit_that_nobody_reaches(self) -> None:
        """It says nothing that few were quick."""
        depth = ConcurrencyLimit(MOST)
        for _ in range(100):
            depth.ended(0.0, 0.1, INITIAL_LIMIT - 1)
        self.assertEqual(depth.limit, INITIAL_LIMIT)

    def test_few(self) -> None:
        """A bound below the least is kept."""
        self.assertEqual(ConcurrencyLimit(3).limit, 3)
        _, _, limits = played(ConcurrencyLimit(3), 50, 0.1, 1)
        self.assertEqual(set(limits), {3})
        self.assertRaises(UsageError, ConcurrencyLimit, 0)
