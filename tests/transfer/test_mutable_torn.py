"""Writers who come between one another's steps: what is written over while it is read, or half and half."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.mutable.versions import Format
from pipegrid.errors import NotEnoughSharesError, RollbackError, UncoordinatedWriteError
from tests.transfer.mutable_world import MutableWorld
from tests.transfer.world import RTT, Line, content

SIZE = 150_000


class RangeTests(SynchronousTestCase):
    """Ranges of one MDMF file that are changed in place at the same moment."""

    def clients(self, world: MutableWorld) -> list[Any]:
        """Return two, each near to its half of the servers, so that each is first at five of ten."""
        distances = [[RTT / 4 if (n < 5) == first else RTT for n in range(10)] for first in (1, 0)]
        return [
            world.client(lines=[world.line_of(n, rtt) for n, rtt in enumerate(each)])
            for each in distances
        ]

    def both_update(self, world: MutableWorld, first: bytes) -> list[Any]:
        """Return what becomes of two, and look that what was acknowledged is there."""
        cap = world.create(first, Format.MDMF)
        clients = self.clients(world)
        outcomes = [
            world.begin(files.update(cap, at, word))
            for files, at, word in zip(clients, (10, 140_000), (b"one", b"two"), strict=True)
        ]
        world.run_until(lambda: all(outcomes))
        expected = bytearray(first)
        found = world.read(cap)
        for outcome, at, word in zip(outcomes, (10, 140_000), (b"one", b"two"), strict=True):
            if not hasattr(outcome[0], "value"):
                expected[at : at + 3] = word
        self.assertTrue(found == bytes(expected))
        return [getattr(outcome[0], "value", None) for outcome in outcomes]

    def test_half_of_the_shares_are_too_few(self) -> None:
        """The file outlives it, and both are done."""
        for k, happy in ((7, 9), (6, 8)):
            world = MutableWorld(10, k, 10, happy=happy)
            self.assertEqual(self.both_update(world, content(SIZE)), [None, None])

    def test_half_of_the_shares_suffice(self) -> None:
        """Both are done, at no round trip more for who is alone."""
        self.assertEqual(self.both_update(MutableWorld(), content(SIZE)), [None, None])

    def test_too_long_to_be_written_whole(self) -> None:
        """The file can be changed afterwards: it is never left in versions that nobody can make one."""
        world = MutableWorld(max_content_bytes=SIZE)
        first = content(SIZE)
        cap = world.create(first, Format.MDMF)
        world.run(world.client().update(cap, SIZE, b"more"))
        clients = self.clients(world)
        outcomes = [
            world.begin(files.update(cap, at, b"new"))
            for files, at in zip(clients, (10, 140_000), strict=True)
        ]
        world.run_until(lambda: all(outcomes))
        self.assertEqual([getattr(each[0], "value", None) for each in outcomes], [None, None])
        expected = bytearray(first + b"more")
        expected[10:13] = expected[140_000:140_003] = b"new"
        self.assertTrue(world.read(cap) == bytes(expected))
        self.assertEqual(world.versions(cap), {4: set(range(10))})

    def test_too_long_and_a_share_is_lost(self) -> None:
        """It is said that all shares are needed, not that ranges should be changed."""
        world = MutableWorld(max_content_bytes=SIZE)
        cap = world.create(content(SIZE), Format.MDMF)
        world.run(world.client().update(cap, SIZE, b"more"))
        world.lines[3].storage.slots[cap.storage_index].clear()
        with self.assertRaises(NotEnoughSharesError) as caught:
            world.run(world.client().update(cap, 10, b"new"))
        self.assertIn("only where all 10 shares of one version", str(caught.exception))
        self.assertEqual((caught.exception.found, caught.exception.needed), (9, 10))


class Telling(Line):
    """A line that tells when shares are read, before they are."""

    told: Any = None

    def read_slot_share(self, *arguments: Any) -> Any:
        """Tell, and read."""
        self.told()
        return super().read_slot_share(*arguments)


class ReadToBeChangedTests(SynchronousTestCase):
    """A version that is written over while it is read to be changed."""

    def test_it_is_looked_again(self) -> None:
        """The change is applied to what is there then, however often that happens."""
        world = MutableWorld()
        cap = world.create(b"0" * 400_000)
        near: list[Any] = [world.line_of(n, RTT / 64) for n in range(10)]
        lines: list[Any] = [world.special_line(Telling, n) for n in range(10)]
        other, mine = world.client(lines=near), world.client(lines=lines)
        writes: list[list[Any]] = []

        def write_over() -> None:
            if len(writes) < 6 and all(writes):
                data = b"%d" % (len(writes) + 1) * 400_000
                writes.append(world.begin(other.overwrite(cap, data)))

        for line in lines:
            line.told = write_over
        world.run(mine.modify(cap, lambda old: old + b"mine"))
        self.assertEqual(len(writes), 6)
        self.assertEqual(world.read(cap), b"6" * 400_000 + b"mine")

    def test_a_range_of_a_file_too_long_to_be_written_whole(self) -> None:
        """Who finds it written over each time tries again some times, and is told so."""
        world = MutableWorld(max_content_bytes=SIZE)
        cap = world.create(content(SIZE), Format.MDMF)
        near: list[Any] = [world.line_of(n, RTT / 64) for n in range(10)]
        lines: list[Any] = [world.special_line(Telling, n) for n in range(10)]
        other, mine = world.client(lines=near), world.client(lines=lines)
        world.run(other.update(cap, SIZE, b"more"))
        writes: list[list[Any]] = []

        def write_over() -> None:
            if all(writes):
                writes.append(world.begin(other.update(cap, 0, b"%d" % len(writes))))

        for line in lines:
            line.told = write_over
        with self.assertRaises(UncoordinatedWriteError) as caught:
            world.run(mine.update(cap, 140_000, b"mine"))
        self.assertIn("and no other client writes", str(caught.exception))
        self.assertEqual(len(writes), 5)
        self.assertEqual(world.read(cap)[:1], b"4")

    def test_what_stays_damaged_is_said_at_once(self) -> None:
        """A version that nobody replaces, and that cannot be read, costs two looks."""
        world = MutableWorld()
        cap = world.create(b"0" * 400_000)
        for line in world.lines:
            shares = line.storage.slots[cap.storage_index]
            for number, share in list(shares.items()):
                shares[number] = share[:100_000] + b"\xff" + share[100_001:]
        began_s = world.clock.seconds()
        with self.assertRaises(NotEnoughSharesError):
            world.run(world.client().modify(cap, lambda old: old + b"mine"))
        self.assertLess(world.clock.seconds() - began_s, 2.0)


class SpoiltVersionTests(SynchronousTestCase):
    """A newer version of whose shares too few are more than a beginning: disks were full."""

    def torn(self, good: int, torn: int, kind: Format = Format.MDMF) -> tuple[MutableWorld, Any]:
        """Return servers: first those that have all of version 2, then its beginning, then version 1."""
        world = MutableWorld()
        cap = world.create(b"old" * 100_000, kind)
        slots = [line.storage.slots[cap.storage_index] for line in world.lines]
        old = [dict(shares) for shares in slots]
        world.run(world.client().overwrite(cap, b"new" * 150_000))
        for at, shares in enumerate(slots):
            if good <= at < good + torn:
                for number, share in shares.items():
                    shares[number] = share[:40_000]
            elif at >= good + torn:
                shares.clear()
                shares.update(old[at])
        return world, cap

    def test_the_one_before_it_counts(self) -> None:
        """It is read, with a word that there was a newer one, by everybody who has not read that."""
        for good, torn in ((2, 1), (2, 5), (0, 7)):
            for kind in Format:
                world, cap = self.torn(good, torn, kind)
                files = world.client()
                pieces: list[Any] = []
                for _ in range(2):
                    pieces.clear()
                    result = world.run(files.read(cap.readonly(), pieces.extend))
                    self.assertEqual(b"".join(pieces), b"old" * 100_000)
                    self.assertTrue(result.newer_unrecoverable)
                    self.assertTrue(result.corrupt)
                    self.assertTrue(all("damaged" in str(each) for each in result.corrupt))

    def test_who_has_read_it_is_told(self) -> None:
        """Nobody is given an older version than before without a word."""
        world, cap = self.torn(9, 0)
        files = world.client()
        self.assertEqual(world.read(cap, files), b"new" * 150_000)
        for line in world.lines[2:9]:
            shares = line.storage.slots[cap.storage_index]
            shares.update({number: share[:40_000] for number, share in shares.items()})
        with self.assertRaises(NotEnoughSharesError) as caught:  # of the old one there is one share
            world.read(cap, files)
        self.assertIn("only 2 good shares of version 2", str(caught.exception))
        first, cap = self.torn(3, 4)
        files = first.client()
        self.assertEqual(first.read(cap, files), b"new" * 150_000)
        shares = first.lines[0].storage.slots[cap.storage_index]
        shares.update({number: share[:40_000] for number, share in shares.items()})
        with self.assertRaises(RollbackError):
            first.read(cap, files)

    def test_check_and_repair(self) -> None:
        """A check tells of both; repair makes the older one the newest if it is forced; no change does."""
        for good, torn in ((2, 5), (0, 7)):
            world, cap = self.torn(good, torn)
            found = world.run(world.client().check(cap, verify=True))
            self.assertEqual((found.recoverable, found.healthy), (True, False))
            assert found.version is not None
            self.assertEqual((found.version.sequence_number, len(found.good_shares)), (1, 3))
            self.assertEqual(found.other_versions, [(2, good)])
            with self.assertRaises(NotEnoughSharesError):
                world.run(world.client().modify(cap, lambda old: old + b"more"))
            with self.assertRaises(UncoordinatedWriteError):
                world.run(world.client().repair(cap))
            world.run(world.client().repair(cap, force=True))
            self.assertEqual(world.versions(cap), {3: set(range(10))})
            self.assertEqual(world.read(cap), b"old" * 100_000)

    def test_nothing_older(self) -> None:
        """What is wrong with the only version there is, is said as ever."""
        world, cap = self.torn(2, 8)
        with self.assertRaises(NotEnoughSharesError) as caught:
            world.read(cap)
        self.assertIn("only 2 good shares of version 2", str(caught.exception))
        found = world.run(world.client().check(cap, verify=True))
        self.assertEqual((found.recoverable, len(found.good_shares)), (False, 2))


class SlowServerTests(SynchronousTestCase):
    """Servers that take much longer than others to answer."""

    def test_a_check_waits_for_them(self) -> None:
        """Their shares are not said to be missing; those that do not answer at all are named."""
        world = MutableWorld(happy=7)
        cap = world.create(b"zero")
        for line in world.lines[:4]:
            line.late["read_test_write"] = 9.0
        found = world.run(world.client().check(cap))
        self.assertTrue(found.healthy)
        self.assertEqual(len(found.good_shares), 10)
        world.lines[0].silent.add("*")
        found = world.run(world.client().check(cap))
        self.assertEqual((found.healthy, found.unreachable), (False, ["server-0"]))

    def test_a_write_waits_for_those_it_needs(self) -> None:
        """Who has to have a share is not given up because others were quicker; who need not is."""
        for happy, takes_s in ((10, 9), (7, 2)):
            world = MutableWorld(happy=happy)
            cap = world.create(b"zero")
            files = world.client()
            world.run(files.overwrite(cap, b"one"))
            for line in world.lines[:2]:
                line.late["read_test_write"] = 9.0
            began_s = world.clock.seconds()
            result = world.run(files.overwrite(cap, b"two"))
            self.assertEqual(len(result.placed), 10 if happy == 10 else 8)
            self.assertEqual(round(world.clock.seconds() - began_s), takes_s)


class HonestWritersTests(SynchronousTestCase):
    """Shares that are written while they are read look damaged, and are not."""

    def test_nobody_is_accused(self) -> None:
        """Writers and readers of one file at the same time: not one server is told of a damaged share."""
        for seed in range(12):
            for format in (Format.SDMF, Format.MDMF):
                random = Random(seed)
                world = MutableWorld(time_limit_s=600)
                start = b" ".join(b"%09d" % number for number in range(4000))
                cap = world.create(start, format)
                lines: list[Line] = list(world.lines)
                running: list[list[Any]] = []
                corrupt: list[Any] = []

                async def write(files: Any, word: bytes, cap: Any) -> None:
                    await files.modify(cap, lambda old: old + b" " + word)

                async def read(files: Any, cap: Any, corrupt: list[Any]) -> None:
                    with contextlib.suppress(
                        NotEnoughSharesError
                    ):  # written over each time it was tried
                        corrupt += (await files.read(cap, lambda pieces: None)).corrupt

                for number in range(4):
                    ours = world.far_lines(random)
                    lines += ours
                    files = world.client(lines=ours)
                    running.append(world.begin(write(files, b"w%d" % number, cap)))
                for _ in range(6):
                    ours = world.far_lines(random)
                    lines += ours
                    world.clock.advance(random.random() * RTT)
                    running.append(world.begin(read(world.client(lines=ours), cap, corrupt)))
                world.run_until(lambda: all(running), 3600)  # noqa: B023
                world.clock.advance(200)
                told = sum(line.count("advise_corrupt_slot_share") for line in lines)
                self.assertEqual((told, corrupt), (0, []), f"seed {seed}, {format.name}")
                self.assertEqual([each for each in running if each[0] is not None], [])

    def test_what_is_damaged_is_told(self) -> None:
        """A share whose version is as it was, but not its blocks."""
        for format in (Format.SDMF, Format.MDMF):
            world = MutableWorld()
            cap = world.create(content(50_000), format)
            for line in world.lines:
                slot = line.storage.slots.get(cap.storage_index, {})
                for number, share in slot.items():
                    if number < 7:  # these are read first
                        slot[number] = share[:6000] + bytes([share[6000] ^ 1]) + share[6001:]
            files = world.client()
            result = world.run(files.read(cap, lambda pieces: None))
            world.clock.advance(100)
            told = sum(line.count("advise_corrupt_slot_share") for line in world.lines)
            self.assertEqual(told, len(result.corrupt))
            self.assertGreater(told, 0)
