"""A writer that is alone meets what it wrote before, and is not told of anybody else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import MutableCap
from pipegrid.core.mutable.versions import Format
from pipegrid.errors import UncoordinatedWriteError, UnhappyError
from pipegrid.transfer.mutable.mutable_files import MutableFiles
from pipegrid.transfer.mutable.version_cache import VersionCache
from pipegrid.wire.storage_messages import SlotResult
from tests.transfer.mutable_world import Moody, MutableWorld
from tests.transfer.world import RTT, Line


class LoneWriterTests(SynchronousTestCase):
    """Nobody else writes at the time."""

    def setUp(self) -> None:
        self.world = MutableWorld()

    def far(self, numbers: Sequence[int]) -> list[Line]:
        """Return lines of which some are four times as long as others."""
        world = self.world
        return [
            world.line_of(n, 4 * RTT) if n in numbers else line
            for n, line in enumerate(world.lines)
        ]

    def give_up(self, files: MutableFiles, cap: MutableCap, change: Any) -> None:
        """Begin a change, and give it up when some servers have it, and others have not."""
        world = self.world
        newest = max(world.versions(cap))
        ended = change if isinstance(change, Deferred) else Deferred.fromCoroutine(change)
        outcome = world.begin(ended)
        world.run_until(lambda: max(world.versions(cap)) > newest)
        self.assertIn(newest, world.versions(cap))
        self.assertFalse(outcome)
        files.close()
        ended.cancel()
        self.assertIsInstance(outcome[0].value, CancelledError)

    def test_servers_die_while_what_was_remembered_is_old(self) -> None:
        """
        Their shares go to others, which take them: what was remembered is as old as all that had it say.
        """
        for format in (Format.SDMF, Format.MDMF):
            for killed in (1, 3):
                world = self.world = MutableWorld()
                mine = world.client()
                cap = world.run(mine.create(b"first", format)).cap
                world.run(world.client().overwrite(cap, b"a repair's"))
                for line in world.lines[:killed]:
                    line.down = True
                for line in world.lines[killed:]:
                    line.late["read_test_write"] = 2 * RTT
                world.run(mine.overwrite(cap, b"second"))
                for line in world.lines:
                    line.down = False
                    line.late.clear()
                self.assertEqual(world.read(cap), b"second")
                world.run(world.client().repair(cap))
                self.assertEqual(list(world.versions(cap).values()), [set(range(10))])

    def test_silence_is_not_somebody_else(self) -> None:
        """What a silent server takes is not taken from the patience that is for other writers."""
        world = self.world = MutableWorld(time_limit_s=30)
        cap = world.create(b"first")
        mine = world.client()
        mine.known.of(cap.storage_index).contended_s = world.clock.seconds()  # so somebody leads
        leader = next(iter(mine.slot(cap).peers)).server
        others = [line for line in world.lines if line is not leader]
        usual = leader.read_test_write

        def silent(
            index: bytes, secrets: Any, changes: Any, reads: Any = ()
        ) -> Deferred[SlotResult]:
            return Deferred() if changes else usual(index, secrets, changes, reads)

        self.patch(leader, "read_test_write", silent)
        outcome = world.begin(mine.modify(cap, lambda old: old + b", mine"))
        world.clock.pump([RTT] * 20)
        world.run(world.client(lines=others).modify(cap, lambda old: old + b", theirs"))
        world.run_until(lambda: outcome)
        self.assertGreater(world.clock.seconds(), 30)
        self.assertTrue(outcome[0].written)
        self.assertEqual(world.read(cap), b"first, theirs, mine")

    def test_a_write_that_was_given_up(self) -> None:
        """The next one finds what there is of it, and needs no more than if it knew nothing."""
        for format in (Format.SDMF, Format.MDMF):
            world = self.world = MutableWorld()
            mine = world.client(lines=self.far(range(6, 10)))
            cap = world.run(mine.create(b"first", format)).cap
            self.give_up(mine, cap, mine.overwrite(cap, b"given up"))
            result = world.run(mine.overwrite(cap, b"second"))
            self.assertEqual(result.attempts, 1)
            self.assertEqual(world.read(cap), b"second")
            self.assertEqual(list(world.versions(cap).values()), [set(range(10))])

    def test_a_range_and_an_edit_that_were_given_up(self) -> None:
        """They too may be there in part when the next content comes."""
        world = self.world
        mine = world.client(lines=self.far(range(6, 10)))
        cap = world.run(mine.create(b"first", Format.MDMF)).cap
        self.give_up(mine, cap, mine.update(cap, 0, b"given up"))
        self.assertEqual(world.run(mine.overwrite(cap, b"second")).attempts, 1)
        self.give_up(mine, cap, mine.modify(cap, lambda old: old + b" given up"))
        self.assertEqual(world.run(mine.overwrite(cap, b"third")).attempts, 1)
        self.assertEqual(world.read(cap), b"third")

    def test_a_command_that_was_killed(self) -> None:
        """The next command of the same client knows from a file that there may be something."""
        world = self.world
        directory = Path(self.mktemp())
        lines = self.far(range(6, 10))
        mine = world.client(VersionCache(directory), lines)
        cap = world.run(mine.create(b"first", Format.SDMF)).cap
        self.give_up(mine, cap, mine.overwrite(cap, b"killed"))
        result = world.run(world.client(VersionCache(directory), lines).overwrite(cap, b"second"))
        self.assertEqual(result.attempts, 1)
        self.assertEqual(world.read(cap), b"second")

    def test_what_was_begun_is_met_and_not_seen_before(self) -> None:
        """
        Servers take a write, die, and return between a look and the write that follows it.
        """
        world = self.world
        lines, mine, cap = self.moody()
        for line in lines[4:]:
            line.writes = False
        self.assertRaises(UnhappyError, world.run, mine.overwrite(cap, b"begun"))
        for line in lines[:3]:
            line.looks = False
        del lines[3].storage.slots[cap.storage_index]
        lines[3].writes = False
        for line in lines[4:6]:
            line.writes = True
        outcome = world.begin(mine.overwrite(cap, b"second"))
        world.run_until(lambda: self.number(lines[4], cap) == 2)
        world.clock.advance(RTT)
        for line in lines:
            line.looks = line.writes = True
        world.run_until(lambda: bool(outcome))
        self.assertFalse(hasattr(outcome[0], "value"), outcome)
        self.assertEqual(outcome[0].attempts, 2)
        self.assertEqual(world.read(cap), b"second")

    def number(self, line: Line, cap: MutableCap) -> int:
        """Return the highest sequence number that a server has."""
        shares = line.storage.slots.get(cap.storage_index, {}).values()
        return max((int.from_bytes(share[1:9], "big") for share in shares), default=0)

    def moody(self) -> tuple[list[Moody], MutableFiles, MutableCap]:
        """Return lines, a client behind them, and its file."""
        world = self.world
        lines = [world.special_line(Moody, n) for n in range(10)]
        mine = world.client(lines=list(lines))
        return lines, mine, world.run(mine.create(b"first", Format.SDMF)).cap

    def test_what_was_begun_is_never_shown(self) -> None:
        """Servers that have it refuse what does not expect it, and never answer when they are asked."""
        world = self.world
        lines, mine, cap = self.moody()
        index = cap.storage_index
        old = [dict(line.storage.slots[index]) for line in lines]
        self.assertTrue(world.run(mine.overwrite(cap, b"begun")).written)
        known = mine.known.of(index)
        assert known.version is not None
        known.begin(known.version)  # as if the answers had been lost
        known.forget_version()
        known.sequence_number = 1
        for line, shares in list(zip(lines, old, strict=True))[3:]:
            line.storage.slots[index] = shares
        for line in lines[:3]:
            line.looks = False
        result = world.run(mine.overwrite(cap, b"second"))
        self.assertLessEqual(result.attempts, 2)
        self.assertEqual(world.read(cap), b"second")

    def test_the_first_to_be_written_dies(self) -> None:
        """Its share goes to another server once, not again with that one's own, which would be refused."""
        world = self.world
        mine = world.client()
        cap = world.run(mine.create(b"first", Format.SDMF)).cap
        mine.known.of(cap.storage_index).contended_s = world.clock.seconds()
        leader: Any = mine.slot(cap).peers[0].server
        leader.down = True
        result = world.run(mine.overwrite(cap, b"second"))
        self.assertEqual(result.attempts, 1)
        self.assertEqual(sorted(result.placed), list(range(10)))
        leader.down = False
        self.assertEqual(world.read(cap), b"second")

    def test_others_are_noticed_still(self) -> None:
        """Who gave up a write is told of what somebody else has written over servers that it expected."""
        world = self.world
        mine = world.client()
        cap = world.run(mine.create(b"first", Format.SDMF)).cap
        old = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
        world.run(world.client().overwrite(cap, b"somebody else's"))
        for line, shares in zip(world.lines[:2], old[:2], strict=True):
            line.storage.slots[cap.storage_index] = shares
        failing = world.begin(mine.overwrite(cap, b"mine"))
        world.run_until(lambda: bool(failing))
        self.assertIsInstance(failing[0].value, UncoordinatedWriteError)
        self.assertIn("another client wrote this mutable file meanwhile", str(failing[0].value))
        self.assertEqual(world.read(cap), b"somebody else's")
