"""What passes to a real get before it is cut off: each share has its own allowance, and none stands still."""

from __future__ import annotations

import random

from misc.soak.kill_get import AHEAD_BYTES, PATIENCE_S, SEGMENT_BYTES, Allowance, Counter, Pace
from twisted.trial.unittest import SynchronousTestCase

BLOCK_BYTES = SEGMENT_BYTES // 3
FILE_BYTES = 160 * SEGMENT_BYTES
ENOUGH = FILE_BYTES // 2
CHUNK_BYTES = 1 << 16
TICK_S = 0.01


class Reader:
    """A get of three shares over one connection each, which takes what it can of the first ones first."""

    def __init__(self, waste_bytes: int = 0) -> None:
        self.counter = Counter()
        self.pace = Pace(lambda: self.written, ENOUGH, 0.0)
        self.counter.begin(self.pace)
        self.allowances = [Allowance(), Allowance(), Allowance()]
        self.shares = [-waste_bytes, -waste_bytes, -waste_bytes]
        self.now = 0.0

    @property
    def written(self) -> int:
        """Whole segments of which all blocks are here."""
        return max(0, min(self.shares)) // BLOCK_BYTES * SEGMENT_BYTES

    def tick(self, order: list[int]) -> None:
        """Let some time pass; the connections come in this order, and each has all that it may have."""
        self.now += TICK_S
        self.counter.go_on(self.now)
        for number in order:
            while self.counter.takes(CHUNK_BYTES, self.allowances[number]):
                self.shares[number] += CHUNK_BYTES


class PaceTests(SynchronousTestCase):
    """``StragglerPolicy`` and ``Counter``, in virtual time."""

    def test_who_comes_first_takes_nothing_from_the_others(self) -> None:
        """A share that is always the last gets its blocks at once: the file grows with every look."""
        reader = Reader()
        while reader.written < ENOUGH:
            reader.tick([0, 1, 2])
            self.assertLess(reader.now, 160 * TICK_S, "it crept")
        ahead = reader.counter.passed - reader.written
        self.assertLess(ahead, 3 * (AHEAD_BYTES + CHUNK_BYTES) + 0.01 * FILE_BYTES)

    def test_in_any_order(self) -> None:
        """Nor does any other order make it stand still."""
        for seed in range(20):
            chance, reader = random.Random(seed), Reader()
            while reader.written < ENOUGH:
                reader.tick(chance.sample(range(3), chance.randint(1, 3)))
                self.assertLess(reader.now, 160 * 4 * TICK_S, f"seed {seed}")

    def test_what_was_asked_in_vain_is_forgotten(self) -> None:
        """When nothing grows for a time, what has passed does not count any more."""
        reader = Reader(waste_bytes=5 * AHEAD_BYTES)
        while reader.written < ENOUGH:
            reader.tick([0, 1, 2])
            self.assertLess(reader.now, 6 * PATIENCE_S + 160 * TICK_S)
        self.assertGreater(reader.now, 4 * PATIENCE_S)

    def test_nothing_passes_when_it_is_enough(self) -> None:
        """Then the command is to be ended, however long that takes."""
        reader = Reader()
        while reader.written < ENOUGH:
            reader.tick([0, 1, 2])
        reader.tick([0, 1, 2])
        passed = reader.counter.passed
        for _ in range(500):
            reader.tick([0, 1, 2])
        self.assertEqual(reader.counter.passed, passed)
