"""What is tried a second time for want of servers, and when."""

from __future__ import annotations

from random import Random

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import NotEnoughSharesError, SourceError, UnhappyError
from pipegrid.tree.retry_queue import (
    FIRST_WAIT_S,
    PAUSES_S,
    STRAGGLERS_S,
    WAIT_S,
    RetryPolicy,
    wants_servers,
)


class WorthTests(SynchronousTestCase):
    """Which failures are worth it."""

    def test_what_servers_out_of_reach_would_have_made_good(self) -> None:
        """It is tried again; what servers refuse, or nobody has, is not."""
        self.assertTrue(wants_servers(UnhappyError("", 4, 7, absent=3)))
        self.assertFalse(wants_servers(UnhappyError("", 3, 7, absent=3)))  # others are full
        self.assertFalse(wants_servers(UnhappyError("", 7, 7)))
        self.assertTrue(wants_servers(NotEnoughSharesError("", 2, 3, absent=1)))
        self.assertFalse(wants_servers(NotEnoughSharesError("", 2, 3)))
        self.assertFalse(
            wants_servers(NotEnoughSharesError("", 0, 3, absent=2))
        )  # not with these either
        self.assertTrue(wants_servers(NotEnoughSharesError("", 0, 3, absent=2, absent_shares=4)))
        self.assertFalse(wants_servers(SourceError()))


class SecondTriesTests(SynchronousTestCase):
    """The order of things."""

    def setUp(self) -> None:
        self.tries: RetryPolicy[str] = RetryPolicy()

    def test_bad_luck(self) -> None:
        """If others came through meanwhile, it is tried once more at the end, and then lost."""
        self.tries.succeeded("other", 5.0)
        self.assertTrue(self.tries.failed("a", 1.0, 9.0))
        self.assertFalse(self.tries.waiting)
        self.assertIsNone(self.tries.next(10.0))
        self.assertEqual(
            self.tries.next(10.0, at_end=True), "a"
        )  # alone: nobody knows how servers are
        self.assertTrue(self.tries.succeeded("a", 11.0))

    def test_once_more_and_no_more(self) -> None:
        """What fails again while others come through is lost."""
        self.tries.succeeded("other", 5.0)
        for each in "ab":
            self.assertTrue(self.tries.failed(each, 1.0, 9.0))
        self.assertEqual(self.tries.next(10.0, at_end=True), "a")
        self.assertTrue(self.tries.succeeded("a", 11.0))
        self.assertEqual(self.tries.next(11.0), "b")
        self.tries.succeeded("c", 12.0)
        self.assertFalse(self.tries.failed("b", 11.0, 13.0))
        self.assertIsNone(self.tries.next(14.0, at_end=True))

    def test_nothing_comes_through(self) -> None:
        """Nothing new begins; one after the other is tried after pauses, until one comes through."""
        self.tries.succeeded("other", 1.0)
        for each in "abc":
            self.assertTrue(self.tries.failed(each, 2.0, 10.0))
        self.assertTrue(self.tries.waiting)
        now_s, tried = 10.0, ""
        for pause_s in (*PAUSES_S, PAUSES_S[-1]):
            self.assertIsNone(self.tries.next(now_s + pause_s - 0.1))
            self.assertEqual(self.tries.next_s, now_s + pause_s)
            now_s += pause_s
            probe = self.tries.next(now_s)
            assert probe is not None
            self.assertTrue(self.tries.is_asking)
            self.assertIsNone(self.tries.next(now_s))
            self.assertTrue(self.tries.failed(probe, now_s, now_s + 1))
            now_s += 1
            tried += probe
        self.assertEqual(tried, "abcab")
        now_s = self.tries.next_s
        self.assertEqual(self.tries.next(now_s), "c")
        self.assertTrue(self.tries.succeeded("c", now_s + 1))
        self.assertFalse(self.tries.waiting)
        self.assertEqual({self.tries.next(now_s + 1), self.tries.next(now_s + 1)}, {"a", "b"})
        self.assertIsNone(self.tries.next(now_s + 1))

    def test_stragglers(self) -> None:
        """What was on its way when servers went ends no wait, and uses nobody's second try up."""
        self.tries.succeeded("other", 1.0)
        for each in "ab":
            self.assertTrue(self.tries.failed(each, 2.0, 10.0))
        self.tries.succeeded("straggler", 10.0 + STRAGGLERS_S - 0.1)
        self.assertTrue(self.tries.waiting)
        self.assertEqual(self.tries.next(15.0), "a")
        self.assertTrue(self.tries.failed("a", 15.0, 15.2))
        self.tries.succeeded("one that took long", 16.0)  # servers are there, it says
        self.assertFalse(self.tries.waiting)
        self.assertEqual([self.tries.next(16.0), self.tries.next(16.0)], ["b", "a"])
        self.assertTrue(self.tries.failed("b", 16.0, 17.0))  # and were not: nothing has come since
        self.assertTrue(self.tries.waiting)

    def test_patience_ends(self) -> None:
        """Then all is given up, and nothing is kept before something comes through again."""
        for good, time_limit_s in ((False, FIRST_WAIT_S), (True, WAIT_S)):
            tries: RetryPolicy[str] = RetryPolicy()
            if good:
                tries.succeeded("other", 1.0)
            for each in "ab":
                self.assertTrue(tries.failed(each, 2.0, 10.0))
            now_s = 10.0
            while tries.waiting:
                probe = tries.next(now_s)
                if probe is not None:
                    self.assertTrue(tries.failed(probe, now_s, now_s))
                now_s += 1
            self.assertLessEqual(abs(now_s - 10 - time_limit_s), 2)
            self.assertEqual(sorted(tries.take_lost()), ["a", "b"])
            self.assertTrue(tries.given_up)
            self.assertFalse(tries.failed("c", now_s, now_s + 1))
            tries.succeeded("d", now_s + 1)
            self.assertFalse(tries.given_up)

    def test_an_end_that_says_nothing(self) -> None:
        """A probe that turns out to be unreadable has the next one tried; without any it goes on."""
        for each in "ab":
            self.tries.failed(each, 2.0, 10.0)
        for each in "ab":
            self.assertEqual(self.tries.next(20.0), each)
            self.tries.ended(each)
        self.assertIsNone(self.tries.next(20.0))
        self.assertFalse(self.tries.waiting)

    def test_bounds(self) -> None:
        """No more than so many are kept."""
        tries: RetryPolicy[int] = RetryPolicy(most=3)
        self.assertEqual(
            [tries.failed(each, 0.0, 1.0) for each in range(5)], [True] * 3 + [False] * 2
        )

    def test_any_weather(self) -> None:
        """Whatever happens, each run ends, all that began is accounted for once, and pauses are bounded."""
        for seed in range(200):
            random = Random(seed)
            tries: RetryPolicy[int] = RetryPolicy(most=20)
            left, running = list(range(100)), dict[int, float]()
            ends: dict[int, str] = {}
            now_s = waited_s = 0.0
            fair_until_s = random.uniform(0, 50)
            while left or running or len(ends) < 100:
                began_s, now_s = now_s, now_s + random.uniform(0.1, 3)
                waited_s += (now_s - began_s) * tries.waiting
                self.assertLess(now_s, 5000, seed)
                up = (now_s // 100) % 2 == 0 if seed % 2 else now_s < fair_until_s
                while (
                    len(running) < 8
                    and (again := tries.next(now_s, at_end=not left and not running)) is not None
                ):
                    running[again] = now_s
                for each in tries.take_lost():
                    self.assertNotIn(each, ends)
                    ends[each] = "lost"
                while left and len(running) < 8 and not tries.waiting:
                    running[left.pop()] = now_s
                for each in random.sample(sorted(running), len(running) // 2 or len(running)):
                    began = running.pop(each)
                    self.assertNotIn(each, ends)
                    if up and random.random() < 0.9:
                        tries.succeeded(each, now_s)
                        ends[each] = "stored"
                    elif not tries.failed(each, began, now_s):
                        ends[each] = "lost"
            self.assertLess(waited_s, WAIT_S + 100, seed)
            self.assertEqual(len(ends), 100)
