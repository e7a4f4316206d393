"""
Gets whose readers pause end, whatever else is slow: see ``paused_gets``.

A failure names its seed; ``paused_gets.Case(seed).play()`` does it again.
"""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.paused_gets import Case

FIRST_SEED = 5000
CASES = 25


class PausedGetsTests(SynchronousTestCase):
    """As they come."""

    def test_each_ends_with_the_right_bytes(self) -> None:
        """No pause, slow server, busy thread or want of connections makes a get stand still."""
        for seed in range(FIRST_SEED, FIRST_SEED + CASES):
            case = Case(seed)
            try:
                case.play()
            except BaseException:
                print(f"\n{case}")
                raise
