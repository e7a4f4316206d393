"""Whoever gives up at any moment leaves nothing behind, and whoever does it again has it done."""

from __future__ import annotations

import gc
from collections import Counter

from twisted.trial.unittest import SynchronousTestCase

from tests.simulation.cancelled_work import CancelledWork, written_soon

SEEDS = range(36)


class CancelledWorkTests(SynchronousTestCase):
    """Trees, backups, upkeep and mutable files; see ``cancelled_work``."""

    def test_seeds(self) -> None:
        """No file stays open, no call scheduled, no part lies about; what was done is true."""
        written_soon(self.patch)
        gc.freeze()  # each seed is collected; the modules of all other tests need not be looked at
        self.addCleanup(gc.unfreeze)
        met: Counter[str] = Counter()
        for seed in SEEDS:
            work = CancelledWork(seed)
            try:
                work.check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {work.done}: {error}") from error
            finally:
                work.close()
            met[work.done.split()[-1]] += 1
        self.assertGreater(met["cancelled"], len(SEEDS) / 3)
