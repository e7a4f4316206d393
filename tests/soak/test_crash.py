"""The crash test runs, and would notice what it is there to notice."""

from __future__ import annotations

import random

from misc.soak import crash
from misc.soak.crash import Case, Outcome
from twisted.trial.unittest import SynchronousTestCase

from tests.soak.support import soak


class CrashTests(SynchronousTestCase):
    """``misc/soak/crash.py``."""

    def test_one_cut(self) -> None:
        """A cut under ``batch`` loses nothing; without the right to mount, one sentence says so."""
        done = soak("crash", "--rounds", "1", "--durability", "batch")
        if done.returncode == 2:
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertRegex(done.stderr, r"run it as root|needs |mount .* failed|mkfs.* failed")
            return
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"(?m)^\| batch \| [1-9]\d* \| 0 \| \d+ \| 0 \|$")

    def test_what_breaks_a_promise_is_said(self) -> None:
        """Files lost, or stuck, are counted against ``batch`` and ``strict``; so is having stored none."""
        good = {"none": Outcome(5, 0, 3, 0, 2, 1), "batch": Outcome(5), "strict": Outcome(5)}
        self.assertEqual(crash.verdict(good), [])
        for wrong in (Outcome(5, lost=1), Outcome(5, unacknowledged=2, stuck=1), Outcome(0)):
            for policy in crash.PROMISING:
                self.assertEqual(len(crash.verdict(good | {policy: wrong})), 1, wrong)

    def test_a_test_that_cannot_fail_fails(self) -> None:
        """If not even ``none`` loses anything, the cut has cut nothing."""
        self.assertIn("cannot tell", crash.verdict({"none": Outcome(5, unacknowledged=1)})[0])

    def test_late_acknowledgements_have_a_line_of_their_own(self) -> None:
        """What cannot be judged is shown apart, and does not count."""
        outcome = Outcome(3, stored_late=2, lost_late=1)
        self.assertIn("after the cut (not judged) | 2 | 1 |", crash.table({"batch": outcome}))
        self.assertEqual(crash.verdict({"batch": outcome}), [])

    def test_outcomes_add_up(self) -> None:
        """Rounds are counted together."""
        total = Outcome(1, 2, 3, 4, 5, 6, ("a",)) + Outcome(10, 20, 30, 40, 50, 60, ("b",))
        self.assertEqual(total, Outcome(11, 22, 33, 44, 55, 66, ("a", "b")))

    def test_a_case_says_all(self) -> None:
        """The same case has the same files, of many sizes, in any order of asking."""
        case = crash.random_case(random.Random(1), "batch")
        again = Case(case.durability, case.at_once, case.commit_s, case.delay_s, case.seed)
        sizes = [len(case.content(number)) for number in range(20)]
        self.assertEqual(
            sizes, [len(again.content(number)) for number in reversed(range(20))][::-1]
        )
        self.assertGreater(len(set(sizes)), 1)
        self.assertNotEqual(case.content(0), case.content(1))
