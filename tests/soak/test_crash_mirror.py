"""The mirror's crash test runs, and would notice what it is there to notice."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from unittest import mock

from misc.soak import crash_mirror
from misc.soak.crash import PROMISING
from misc.soak.crash_mirror import Outcome
from twisted.trial.unittest import SynchronousTestCase

from tests.soak.support import soak

OPTIONS = ("--rounds", "1", "--files", "400", "--durability", "batch")


class CrashMirrorTests(SynchronousTestCase):
    """``misc/soak/crash_mirror.py``."""

    def test_one_cut(self) -> None:
        """Nothing wrong has a name under ``batch``; without the right to mount, one sentence says so."""
        done = soak("crash_mirror", *OPTIONS)
        if done.returncode == 2:
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertRegex(done.stderr, r"run it as root|needs |mount .* failed|mkfs.* failed")
            return
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"(?m)^\| batch \| [1-9]\d* \| 0 \| 0 \| \d+ \|$")

    def test_a_cut_too_early_shows_nothing(self) -> None:
        """It is made once more, a few times, if no name was on the disk yet."""
        options = argparse.Namespace(rounds=1, files=1, seed=1, durability=["none", "batch"])
        for outcomes, status, played in (
            ([Outcome(0), Outcome(0), Outcome(5)], 0, 4),
            ([Outcome(0)] * (1 + crash_mirror.MORE_ROUNDS), 1, 2 + crash_mirror.MORE_ROUNDS),
        ):
            play = mock.Mock(side_effect=[Outcome(5, wrong=1), *outcomes])
            with mock.patch.multiple(
                crash_mirror, play=play, Image=mock.MagicMock(), WebServer=mock.MagicMock()
            ):
                found = crash_mirror.run(Path(self.mktemp()), options, io.StringIO())
            self.assertEqual((found, play.call_count), (status, played))

    def test_what_breaks_a_promise_is_said(self) -> None:
        """Wrong files and reruns that fail are counted; so is a round that shows nothing."""
        good = {"none": Outcome(5, wrong=1), "batch": Outcome(5), "strict": Outcome(5)}
        self.assertEqual(crash_mirror.verdict(good), [])
        for bad in (Outcome(5, wrong=1), Outcome(5, unfinished=1), Outcome(0)):
            for policy in PROMISING:
                self.assertEqual(len(crash_mirror.verdict(good | {policy: bad})), 1, bad)

    def test_a_test_that_cannot_fail_fails(self) -> None:
        """If not even ``none`` leaves anything wrong, the cut has cut nothing."""
        self.assertIn("cannot tell", crash_mirror.verdict({"none": Outcome(5)})[0])
