"""Servers that come back with the shares that they had before: what was acknowledged stays, and writers go on."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import MutableCap
from pipegrid.core.mutable.geometry import Format
from pipegrid.errors import RollbackError
from pipegrid.transfer.mutable.files import MutableFiles
from tests.transfer.mutable_world import MutableWorld
from tests.transfer.world import RTT

SIZE = 1000


class RangeTests(SynchronousTestCase):
    """A range is changed in place, from a version that only some servers still have."""

    def setUp(self) -> None:
        self.world = MutableWorld()

    def saved(self, cap: MutableCap) -> list[dict[int, Any]]:
        """Return what servers have."""
        return [dict(line.storage.slots[cap.storage_index]) for line in self.world.lines]

    def bring(self, cap: MutableCap, saved: list[dict[int, Any]], first: int, end: int) -> None:
        """Let some servers have what they had."""
        for line, shares in list(zip(self.world.lines, saved, strict=True))[first:end]:
            line.storage.slots[cap.storage_index] = dict(shares)

    def update_while(self, files: MutableFiles, cap: MutableCap, data: bytes, *change: Any) -> Any:
        """Update where the version is known, and bring servers something else between read and write."""
        self.world.clock.callLater(1.25 * RTT, self.bring, cap, *change)
        return self.world.run(files.update(cap, 500, data))

    def test_somebody_elses_range_with_the_same_number(self) -> None:
        """Of two versions with one number the other's is gone on from, though fewer servers have it."""
        world = self.world
        mine = world.client()
        cap = world.run(mine.create(b"x" * SIZE, Format.MDMF)).cap
        first = self.saved(cap)
        world.run(world.client().update(cap, 0, b"other's"))
        second = self.saved(cap)
        self.bring(cap, first, 0, 10)
        self.update_while(mine, cap, b"mine", second, 6, 10)
        found = world.read(cap)
        self.assertEqual((found[:7], found[500:504]), (b"other's", b"mine"))
        self.assertEqual(world.versions(cap), {3: set(range(10))})

    def test_a_change_that_few_took_is_completed(self) -> None:
        """It is not said to be done because the few have it: all of them get it."""
        world = self.world
        mine = world.client()
        cap = world.run(mine.create(b"x" * SIZE, Format.MDMF)).cap
        first = self.saved(cap)
        world.run(mine.update(cap, 0, b"once"))
        result = self.update_while(mine, cap, b"twice", first, 0, 6)
        self.assertTrue(result.written)
        self.assertEqual(world.versions(cap), {4: set(range(10))})
        found = world.read(cap)
        self.assertEqual((found[:4], found[500:505]), (b"once", b"twice"))

    def test_all_have_gone_back(self) -> None:
        """Who has seen a newer version makes none from the older one, but says so."""
        world = self.world
        mine = world.client()
        cap = world.run(mine.create(b"x" * SIZE, Format.MDMF)).cap
        old = self.saved(cap)
        world.run(mine.update(cap, 0, b"newer"))
        self.bring(cap, old, 0, 10)
        mine.known.of(cap.storage_index).forget_version()
        failing = world.begin(mine.update(cap, 500, b"mine"))
        world.run_until(lambda: bool(failing))
        self.assertIsInstance(failing[0].value, RollbackError)
        self.assertEqual(self.saved(cap), old)
