"""The permutation test of the maximum: what it promises of numbers."""

from __future__ import annotations

import math
import random

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.speedtest.run_comparison import RELABELLINGS, PairedSamples, greater, least_p


def noise(rng: random.Random, count: int, middle: float = 0.0) -> tuple[float, ...]:
    """Return samples with a deviation of 5 %."""
    return tuple(rng.gauss(middle, 0.05) for _ in range(count))


class GreaterTests(SynchronousTestCase):
    """``greater`` and ``least_p``."""

    def test_one_real_difference_is_found_among_many(self) -> None:
        """Five rounds a side are enough, though sixty measurements are looked at."""
        rng = random.Random(1)
        pairs = [PairedSamples(noise(rng, 5), noise(rng, 5), 0.1) for _ in range(59)]
        pairs.insert(20, PairedSamples(noise(rng, 5), noise(rng, 5, 0.7), 0.1))
        found = greater(pairs)
        self.assertEqual(found[20], 1 / math.comb(10, 5))
        self.assertTrue(all(p > 0.05 for index, p in enumerate(found) if index != 20), found)

    def test_level_is_that_of_the_family(self) -> None:
        """Without any difference and margin, at most some 5 % of families hold a p of 5 %, however large."""
        rng = random.Random(2)
        alarms = sum(
            min(greater([PairedSamples(noise(rng, 5), noise(rng, 5), 0.0) for _ in range(12)]))
            <= 0.05
            for _ in range(120)
        )
        # 6 are expected; 15 or more has a chance of one in two thousand, and the seed is fixed.
        self.assertLess(alarms, 15)
        self.assertGreater(alarms, 0)

    def test_the_margin_is_not_a_difference(self) -> None:
        """What differs by the margin and no more is not called greater, however exact the samples."""
        exact = tuple(0.001 * index for index in range(5))
        for step, significant in ((0.09, False), (0.2, True)):
            later = tuple(value + step for value in exact)
            self.assertEqual(
                greater([PairedSamples(exact, later, 0.1)])[0] < 0.01, significant, step
            )

    def test_smaller_is_not_greater(self) -> None:
        """The test looks one way."""
        rng = random.Random(3)
        [p] = greater([PairedSamples(noise(rng, 5, 1.0), noise(rng, 5), 0.0)])
        self.assertGreater(p, 0.9)

    def test_unequal_counts_are_tested_together(self) -> None:
        """Measurements with more or fewer samples share one family; labels are then drawn."""
        rng = random.Random(4)
        pairs = [
            PairedSamples(noise(rng, 25), noise(rng, 5, 0.7), 0.1),
            PairedSamples(noise(rng, 10), noise(rng, 5), 0.1),
            PairedSamples(noise(rng, 10), noise(rng, 6), 0.1),
        ]
        found = greater(pairs)
        self.assertLess(found[0], 0.01)
        self.assertGreater(min(found[1:]), 0.05)
        self.assertEqual(found, greater(pairs))

    def test_equal_samples(self) -> None:
        """Samples without any noise are no division by zero."""
        self.assertEqual(greater([PairedSamples((1.0,) * 5, (1.0,) * 5, 0.0)]), [1.0])
        self.assertEqual(greater([]), [])

    def test_least_p(self) -> None:
        """What so few samples can show at all."""
        self.assertEqual(least_p(3, 3), 1 / 20)
        self.assertEqual(least_p(5, 5), 1 / 252)
        self.assertEqual(least_p(1, 1), 1 / 2)
        self.assertEqual(least_p(25, 25), 1 / (RELABELLINGS + 1))
