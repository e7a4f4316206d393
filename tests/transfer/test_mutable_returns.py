"""Servers that come back with old shares, or do not tell what they have: nothing is lost, writers go on."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import MutableCap
from pipegrid.core.mutable.versions import Format
from pipegrid.errors import RollbackError, UncoordinatedWriteError
from pipegrid.transfer.mutable.mutable_files import MutableFiles
from tests.transfer.mutable_world import Moody, MutableWorld
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


class SilentLookTests(SynchronousTestCase):
    """A server that never says in time what it has, but refuses what does not expect that."""

    def files(self, world: MutableWorld) -> MutableFiles:
        """Return a client for whom one server is like that."""
        lines = list(world.lines)
        lines[3] = silent = world.special_line(Moody, 3)
        silent.looks = False
        return world.client(lines=lines)

    def test_a_lone_writer(self) -> None:
        """It learns from the refusal what is there, and needs two tries: no patience ends."""
        for format in (Format.SDMF, Format.MDMF):
            world = MutableWorld()
            cap = world.create(b"zero", format)
            began_s = world.clock.seconds()
            result = world.run(self.files(world).modify(cap, lambda old: old + b" one"))
            self.assertEqual(result.attempts, 2)
            self.assertLess(world.clock.seconds() - began_s, 10)
            self.assertEqual(world.read(cap), b"zero one")
            self.assertEqual(world.versions(cap), {3: set(range(10))})

    def test_what_it_has_was_newer_once(self) -> None:
        """Others have it too, and the change is made from it since: it is expected then."""
        world = MutableWorld()
        cap = world.create(b"zero")
        changing = world.begin(self.files(world).modify(cap, lambda old: old + b" one"))
        world.clock.advance(0)
        world.clock.advance(1.0)  # it waits for an answer, and has all others
        world.run(world.client().modify(cap, lambda old: old + b" other"))
        world.run_until(lambda: bool(changing))
        self.assertFalse(hasattr(changing[0], "value"), changing)
        self.assertLessEqual(changing[0].attempts, 3)
        self.assertEqual(world.read(cap), b"zero other one")

    def test_an_overwrite_and_a_repair(self) -> None:
        """They too."""
        world = MutableWorld()
        cap = world.create(b"zero")
        self.assertEqual(world.run(self.files(world).overwrite(cap, b"one")).attempts, 2)
        self.assertEqual(world.read(cap), b"one")
        del world.lines[5].storage.slots[cap.storage_index]
        result = world.run(self.files(world).repair(cap))
        self.assertTrue(result.after.healthy)
        self.assertEqual(list(world.versions(cap).values()), [set(range(10))])

    def test_what_it_has_is_newer(self) -> None:
        """It is not written over: somebody may have been told that it is there."""
        world = MutableWorld(time_limit_s=30)
        cap = world.create(b"zero")
        old = {n: dict(line.storage.slots[cap.storage_index]) for n, line in enumerate(world.lines)}
        world.run(world.client().overwrite(cap, b"newer"))
        world.run(world.client().overwrite(cap, b"newest"))
        for number, line in enumerate(world.lines):
            if number != 3:
                line.storage.slots[cap.storage_index] = old[number]
        newest = dict(world.lines[3].storage.slots[cap.storage_index])
        failing = world.begin(self.files(world).modify(cap, lambda old: old + b" one"))
        world.run_until(lambda: bool(failing))
        self.assertIsInstance(failing[0].value, UncoordinatedWriteError)
        self.assertEqual(world.lines[3].storage.slots[cap.storage_index], newest)
