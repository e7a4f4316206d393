"""
Random faults under writers of one mutable file; ``python misc/soak/mutables.py`` tries thousands.

A failure names its seed; ``python misc/soak/mutables.py --one SEED`` replays it.
"""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.mutable_schedules import Schedule, perform

SEEDS = range(12)
MADE_TWICE = (930000529, 930100206, 930300070)
"""
In the first a child renamed twice was there, and its writer was told that it was not. In the second a child
that was linked where another had been renamed took that one's name as well, and the other was gone. In
the third a name linked twice in one change was there, and its writer was told that it had been before.
"""

JOINED = (970000460, 970000873)
"""
Changes that were joined. In the first one was given up, and made with the other. In the second a link that
must not replace anything was told that there was a child of that name, by a link that was not stored.
"""


class MutableFaultTests(SynchronousTestCase):
    """What was acknowledged is there, whatever went wrong."""

    def test_schedules(self) -> None:
        """Some, of all kinds of faults."""
        acknowledged = sum(self.attempt(seed) for seed in SEEDS)
        self.assertGreater(acknowledged, 3 * len(SEEDS))

    def test_changes_made_twice(self) -> None:
        """A change that is stored and unknown to its writer is not made again on what others made of it."""
        for seed in MADE_TWICE:
            self.attempt(seed)

    def test_joined_changes(self) -> None:
        """What each is told is true of what can be there then."""
        for seed in JOINED:
            self.attempt(seed)

    def test_a_seed_is_one_history(self) -> None:
        """So that what a soak finds can be looked at again."""
        for seed in (3, 4):
            schedule = Schedule.random(seed)
            self.assertEqual(perform(schedule), perform(schedule))

    def attempt(self, seed: int) -> int:
        """Return how many changes were acknowledged."""
        try:
            return perform(Schedule.random(seed)).acknowledged
        except Exception as error:
            raise self.failureException(f"seed {seed}: {error}") from error
