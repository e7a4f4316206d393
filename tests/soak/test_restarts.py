"""
The test of restarted servers would notice what it is there to notice.

That it runs with Tahoe-LAFS's own processes, ``make interop`` shows.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
from misc.soak import restarts
from misc.soak.restarts import GET, PUT, Case, Transfer, Unseen, Violation, judge
from misc.speedtest.peers.nodes import FOOLSCAP, HTTPS, PROTOCOLS
from twisted.internet.defer import TimeoutError as TooLong
from twisted.internet.task import Clock
from twisted.logger import Logger, globalLogPublisher
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import NotEnoughSharesError, SourceError, UnhappyError
from pipegrid.speedtest.benchmark_clients import Comparing

CASE = Case(HTTPS, PUT, 200, 0.5, 0.1, {0: "killed", 1: "stopped"}, None, False)
UNHAPPY = UnhappyError("cannot store it; try again", 3, 4)


class JudgeTests(SynchronousTestCase):
    """What may become of a transfer, and what may not."""

    def violates(self, case: Case, error: Exception) -> str:
        """Expect a violation; returns what it says."""
        return str(self.assertRaises(Violation, judge, case, Failure(error)))

    def test_ends_that_are_right(self) -> None:
        """A transfer completes, or fails as it may when too few servers were left alone."""
        self.assertEqual(judge(CASE, object()), "completed")
        self.assertEqual(judge(CASE, Failure(UNHAPPY)), "failed: UnhappyError")

    def test_ends_that_are_wrong(self) -> None:
        """Hanging, another kind of error, no sentence, and failing without need break a promise."""
        self.assertIn("did not end", self.violates(CASE, TooLong()))
        self.assertIn("KeyError", self.violates(CASE, KeyError("x")))
        self.assertIn("failed", self.violates(CASE, SourceError("cannot read it; look at it")))
        for text in ("", "two\nlines", "x" * 2000, "Traceback (most recent call last)"):
            self.assertIn("no sentence", self.violates(CASE, UnhappyError(text, 3, 4)))

    def test_when_success_is_due(self) -> None:
        """A put needs four servers that were left alone, a get two."""
        one = attrs.evolve(CASE, victims={3: "killed"})
        self.assertIn("left alone", self.violates(one, UNHAPPY))
        for count, right in ((3, False), (4, True)):
            case = attrs.evolve(CASE, operation=GET, victims=dict.fromkeys(range(count), "killed"))
            self.assertIs(case.must_succeed, not right)
            error = NotEnoughSharesError("cannot fetch it; try again", 1, 2)
            if right:
                self.assertIn("failed", judge(case, Failure(error)))
            else:
                self.violates(case, error)

    def test_wrong_bytes(self) -> None:
        """A get that ends well with other bytes breaks a promise."""
        sink = Comparing(b"right")
        sink.write(b"wrong")
        self.assertRaises(Violation, restarts.check_bytes, sink)
        sink = Comparing(b"right")
        sink.write(b"right")
        restarts.check_bytes(sink)


class PartsTests(SynchronousTestCase):
    """The moments, the cases, and what is left behind."""

    def test_moments(self) -> None:
        """Servers go away after a while, at a fraction of the transfer, or else at its end."""
        clock: Any = Clock()
        at_once = Transfer(clock, attrs.evolve(CASE, fraction=None, delay_s=3.0))
        self.assertNoResult(at_once.moment)
        clock.advance(3)
        self.successResultOf(at_once.moment)
        half = Transfer(clock, CASE)
        half.progress(49, 100)
        self.assertNoResult(half.moment)
        half.progress(50, 100)
        self.successResultOf(half.moment)
        half.progress(51, 100)
        self.assertFalse(half.ended)
        late = Transfer(clock, CASE)
        self.assertEqual(late.end("result"), "result")
        self.successResultOf(late.moment)
        self.assertTrue(late.ended)

    def test_cases(self) -> None:
        """A seed decides them; all protocols, operations, sizes and ends come up."""
        cases = [restarts.random_case(random.Random(seed), PROTOCOLS) for seed in range(200)]
        self.assertEqual(cases[7], restarts.random_case(random.Random(7), PROTOCOLS))
        for name, values in (
            ("protocol", {HTTPS, FOOLSCAP}),
            ("operation", {PUT, GET}),
            ("size", set(restarts.SIZES)),
            ("down_s", set(restarts.DOWN_S)),
            ("must_succeed", {True, False}),
        ):
            self.assertEqual({getattr(case, name) for case in cases}, values, name)
        ends = {end for case in cases for end in case.victims.values()}
        self.assertEqual(ends, set(restarts.SIGNALS))

    def test_unseen_failures(self) -> None:
        """A failure that only the log hears of is noticed; other events are not."""
        unseen = Unseen()
        globalLogPublisher.addObserver(unseen)
        self.addCleanup(globalLogPublisher.removeObserver, unseen)
        Logger().info("nothing")
        self.assertEqual(unseen.failures, [])
        Logger().failure("something", Failure(KeyError("hidden")))
        self.assertEqual(unseen.failures, ["KeyError: 'hidden'"])
        self.flushLoggedErrors(KeyError)

    def test_unfinished_shares(self) -> None:
        """What lies in ``incoming`` is unfinished; empty directories and whole shares are not."""
        node: Any = type("Node", (), {"shares": Path(self.mktemp())})
        self.assertEqual(restarts.unfinished(node), [])
        (node.shares / "incoming" / "aa" / "index").mkdir(parents=True)
        (node.shares / "aa").mkdir()
        (node.shares / "aa" / "1").touch()
        self.assertEqual(restarts.unfinished(node), [])
        share = node.shares / "incoming" / "aa" / "index" / "1"
        share.touch()
        self.assertEqual(restarts.unfinished(node), [share])
