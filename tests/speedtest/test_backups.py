"""The comparison of backups with restic: that it reports what it measured."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

from misc.speedtest.backups import FIRST, RESTORE, TARGETS, Turns
from twisted.trial.unittest import SynchronousTestCase


class ReportTests(SynchronousTestCase):
    """From seconds to a line."""

    def test_ratio_of_medians(self) -> None:
        """The first turn does not count, and a target that is missed is no success."""
        turns = Turns(cast(Any, None), cast(Any, None), Path(), random.Random(1))
        target = TARGETS[20.0][FIRST]
        turns.ours_s = {FIRST: [90.0, target, target + 0.2, target + 0.1], RESTORE: [9.0, 1.0]}
        turns.ours_cpu_s = {FIRST: [9.0, 1.0, 3.0, 2.0], RESTORE: [9.0, 1.0]}
        turns.theirs_s = {FIRST: [1.0, 1.0, 1.0, 1.0], RESTORE: [1.0, 1.0]}
        first, restore = turns.report(20.0)
        self.assertEqual(
            (first["rounds"], first["ratio"], first["met"], first["pipegrid_cpu_s"]),
            (3, round(target + 0.1, 2), False, 2.0),
        )
        self.assertEqual((restore["ratio"], restore["met"]), (1.0, True))

    def test_another_distance_has_no_targets(self) -> None:
        """Nothing is judged there."""
        turns = Turns(cast(Any, None), cast(Any, None), Path(), random.Random(1))
        turns.ours_s = turns.ours_cpu_s = {FIRST: [1.0, 9.0]}
        turns.theirs_s = {FIRST: [1.0, 1.0]}
        (line,) = turns.report(50.0)
        self.assertEqual((line["target"], line["met"]), (None, True))
