"""Mutable files: what operations cost in round trips, and what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.mutable import keys
from pipegrid.core.mutable import mutable_share as verified
from pipegrid.core.mutable.keys import SigningKey
from pipegrid.core.mutable.versions import Format
from pipegrid.errors import CapError, NotEnoughSharesError, RollbackError, UnhappyError, UsageError
from pipegrid.transfer.mutable.version_cache import CachedVersion, VersionCache
from tests.transfer.mutable_world import Full, MutableWorld
from tests.transfer.world import RTT, Line, content

FORMATS = (Format.SDMF, Format.MDMF)


class RoundTripTests(SynchronousTestCase):
    """The budgets, with connections up."""

    def setUp(self) -> None:
        self.world = MutableWorld()

    def test_create_is_one(self) -> None:
        """A new file of any size: all shares are written at once, where nothing may be."""
        for format in FORMATS:
            for size in (0, 200, 300_000):
                trips, result = self.world.round_trips(
                    self.world.client().create(content(size), format)
                )
                self.assertEqual(trips, 1, f"{size} bytes, {format}")
                self.assertEqual(len(result.written.placed), 10)
                self.assertEqual(self.world.read(result.cap), content(size))

    def test_get_is_one(self) -> None:
        """A small file is read in the round trip that finds its versions, with either cap."""
        for format in FORMATS:
            cap = self.world.create(content(200), format)
            for given in (cap, cap.readonly()):
                trips, _ = self.world.round_trips(self.world.client().read(given, lambda _: None))
                self.assertEqual(trips, 1)

    def test_get_of_a_large_one_is_two(self) -> None:
        """Ten megabytes of MDMF, 77 segments, all on their way at once."""
        cap = self.world.create(content(10_000_000), Format.MDMF)
        pieces: list[Any] = []
        trips, _ = self.world.round_trips(self.world.client().read(cap.readonly(), pieces.extend))
        self.assertEqual(trips, 2)
        self.assertEqual(b"".join(pieces), content(10_000_000))

    def test_overwrite_is_two_and_one_when_known(self) -> None:
        """Look and write; whoever wrote before knows, also in another process."""
        directory = Path(self.mktemp())
        for format in FORMATS:
            cap = self.world.create(content(200), format)
            files = self.world.client(directory)
            trips, _ = self.world.round_trips(files.overwrite(cap, b"second"))
            self.assertEqual(trips, 2)
            trips, _ = self.world.round_trips(files.overwrite(cap, content(5000)))
            self.assertEqual(trips, 1)
            trips, _ = self.world.round_trips(
                self.world.client(directory).overwrite(cap, b"fourth")
            )
            self.assertEqual(trips, 1)
            self.assertEqual(self.world.read(cap), b"fourth")
            self.assertEqual(self.world.versions(cap), {4: set(range(10))})

    def test_the_key_is_opened_while_others_are_waited_for(self) -> None:
        """That takes milliseconds: so it begins with the first answer, with the next if its key is bad."""
        for damaged in (0, 1):
            cap = self.world.create(content(200))
            lines = list(self.world.lines)
            lines[9] = self.world.line_of(9, 3 * RTT)
            files = self.world.client(lines=lines)
            near = [peer.server for peer in files.slot(cap).peers if peer.server is not lines[9]]
            for line in near[:damaged]:
                assert isinstance(line, Line)
                shares = line.storage.slots[cap.storage_index]
                for number, share in shares.items():
                    shares[number] = share[:-1] + bytes([share[-1] ^ 1])
            opened_s: list[float] = []

            def note(*args: Any, opened_s: list[float] = opened_s) -> SigningKey:
                opened_s.append(self.world.clock.seconds())
                return keys.open_signing_key(*args)

            began_s = self.world.clock.seconds()
            with mock.patch.object(verified, "open_signing_key", note):
                trips, _ = self.world.round_trips(files.overwrite(cap, b"second"))
            self.assertEqual(opened_s, [began_s + RTT] * (1 + damaged))
            self.assertEqual(trips, 6)
            self.assertEqual(self.world.read(cap), b"second")

    def test_overwrite_of_what_was_thought_known(self) -> None:
        """Who is refused learns the real version from the same answer: one more, and no more."""
        cap = self.world.create()
        files = self.world.client()
        self.world.run(files.overwrite(cap, b"second"))
        self.world.run(self.world.client().overwrite(cap, b"third"))
        trips, _ = self.world.round_trips(files.overwrite(cap, b"fourth"))
        self.assertEqual(trips, 2)
        self.assertEqual(self.world.versions(cap), {4: set(range(10))})

    def test_modify_is_two_and_one_when_known(self) -> None:
        """Read, change, write; in one process the content is known after that."""
        cap = self.world.create(content(8000))
        files = self.world.client()
        for expected in (2, 1, 1):
            trips, _ = self.world.round_trips(files.modify(cap, lambda old: old + b"+"))
            self.assertEqual(trips, expected)
        self.assertEqual(self.world.read(cap), content(8000) + b"+++")

    def test_partial_update_is_three_and_two_when_known(self) -> None:
        """Look, read the segment's blocks and hashes, write; only these travel."""
        size = 3_000_000
        cap = self.world.create(content(size), Format.MDMF)
        files = self.world.client()
        sent = sum(line.sent_bytes for line in self.world.lines)
        for offset, expected in ((1_000_000, 3), (2_000_000, 2), (0, 2)):
            trips, result = self.world.round_trips(files.update(cap, offset, b"x" * 1000))
            self.assertEqual((trips, result.attempts), (expected, 1))
        sent = sum(line.sent_bytes for line in self.world.lines) - sent
        self.assertLess(sent, 3 * (131072 * 10 / 3 + 30_000))
        expected_content = bytearray(content(size))
        for offset in (1_000_000, 2_000_000, 0):
            expected_content[offset : offset + 1000] = b"x" * 1000
        self.assertEqual(self.world.read(cap), bytes(expected_content))

    def test_append(self) -> None:
        """Bytes at the end make the file longer, across segments, and again."""
        expected = content(100_000)
        cap = self.world.create(expected, Format.MDMF)
        files = self.world.client()
        for size in (10, 40_000, 400_000, 1):
            self.world.run(files.update(cap, len(expected), content(size)))
            expected += content(size)
            self.assertEqual(self.world.read(cap), expected)

    def test_the_end_is_where_servers_have_it(self) -> None:
        """A range behind the end that is remembered is refused only if it lies behind the real one."""
        for format in (Format.SDMF, Format.MDMF):
            cap = self.world.create(b"0" * 10, format)
            files = self.world.client()
            self.world.run(files.update(cap, 0, b"1"))
            self.world.run(self.world.client().update(cap, 10, b"2" * 10))
            self.world.run(files.update(cap, 20, b"3"))
            self.assertEqual(self.world.read(cap), b"1" + b"0" * 9 + b"2" * 10 + b"3")
            with self.assertRaises(UsageError):
                self.world.run(files.update(cap, 22, b"4"))

    def test_a_thousand_changes_at_once_are_few_versions(self) -> None:
        """What is asked for while the file is being written is joined."""
        cap = self.world.create(b"")
        files = self.world.client()
        waiting = [
            self.world.begin(files.modify(cap, lambda old, n=n: old + b"%d\n" % n))  # type: ignore[misc]
            for n in range(1000)
        ]
        self.world.run_until(lambda: all(waiting))
        self.assertEqual(self.world.versions(cap), {2: set(range(10))})
        self.assertEqual(len(self.world.read(cap).split()), 1000)


class ContentTests(SynchronousTestCase):
    """What is stored comes back."""

    def test_sizes_and_codings(self) -> None:
        """Any size around the bounds of segments, any k of n, on few and many servers."""
        for k, n, servers in ((1, 1, 1), (1, 3, 10), (3, 10, 4), (7, 10, 12), (3, 10, 1)):
            world = MutableWorld(servers, k, n, happy=1)
            for format in FORMATS:
                for size in (0, 1, k, 3999, 131072, 131073, 400_000):
                    cap = world.create(content(size), format)
                    self.assertEqual(world.read(cap.readonly()), content(size))
                    files = world.client()
                    world.run(files.overwrite(cap, content(size // 2)))
                    self.assertEqual(world.read(cap, files), content(size // 2))

    def test_ranges(self) -> None:
        """Any range of a file, to its end at most."""
        world = MutableWorld()
        data = content(500_000)
        for format in FORMATS:
            cap = world.create(data, format)
            for start, length in ((0, 10), (131_070, 10), (0, None), (499_999, 9), (500_000, 1)):
                end = None if length is None else start + length
                self.assertEqual(
                    world.read(cap, range_of=lambda size, wanted=(start, length): wanted),
                    data[start:end],
                )
            with self.assertRaises(UsageError):
                world.read(cap, range_of=lambda size: (500_001, None))

    def test_wrong_caps(self) -> None:
        """A read cap does not write, a verifier cap does not read, and each error says so."""
        world = MutableWorld()
        cap = world.create()
        works: tuple[Any, ...] = (
            world.client().overwrite(cap.readonly(), b""),
            world.client().modify(cap.readonly(), bytes),
            world.client().repair(cap.readonly()),
            world.client().read(cap.verifier(), lambda _: None),
        )
        for work in works:
            with self.assertRaises(CapError):
                world.run(work)

    def test_an_edit_that_raises(self) -> None:
        """It fails for its caller, nothing is written for it, and the others are done."""
        world = MutableWorld()
        cap = world.create(b"")
        files = world.client()
        outcomes = [
            world.begin(files.modify(cap, lambda old: old + b"a")),
            world.begin(files.modify(cap, lambda old: old[b"no"])),  # type: ignore[call-overload]
            world.begin(files.modify(cap, lambda old: old + b"b")),
        ]
        world.run_until(lambda: all(outcomes))
        self.assertIsInstance(outcomes[1][0].value, TypeError)
        self.assertEqual(world.read(cap), b"ab")
        before = world.versions(cap)
        self.assertFalse(world.run(files.modify(cap, lambda old: old)).written)
        self.assertEqual(world.versions(cap), before)

    def test_no_room(self) -> None:
        """What there is to be done is said once, and is to make room."""
        world = MutableWorld(happy=7)
        cap = world.create(b"old")
        full: list[Line] = [world.special_line(Full, number) for number in range(10)]
        with self.assertRaises(UnhappyError) as caught:
            world.run(world.client(lines=full).overwrite(cap, b"new"))
        self.assertRegex(
            str(caught.exception),
            "only 0 servers of happiness, and 7 are wanted: "
            "[^;]* no space[^;]*; free space there, or add servers$",
        )
        self.assertEqual(world.read(cap), b"old")

    def test_room_on_one(self) -> None:
        """One server is one, in what is said."""
        world = MutableWorld(happy=7)
        cap = world.create(b"old")
        lines: list[Line] = [world.special_line(Full, number) for number in range(9)]
        lines.append(world.lines[9])
        with self.assertRaises(UnhappyError) as caught:
            world.run(world.client(lines=lines).overwrite(cap, b"new"))
        self.assertIn("only 1 server of happiness, and 7 are wanted", str(caught.exception))

    def test_nothing_there(self) -> None:
        """A file of which nobody has a share."""
        world = MutableWorld()
        cap = keys.generate().cap(Format.SDMF)
        works: tuple[Any, ...] = (
            world.client().read(cap, lambda _: None),
            world.client().overwrite(cap, b""),
            world.client().modify(cap, bytes),
        )
        for work in works:
            with self.assertRaises(NotEnoughSharesError):
                world.run(work)
        self.assertEqual(world.leftovers(), [])


class RollbackTests(SynchronousTestCase):
    """An older version than was seen before is said to be older."""

    def test_it_is_remembered(self) -> None:
        """Servers go back; who saw the newer version says so, also in another process; others cannot know."""
        directory = Path(self.mktemp())
        world = MutableWorld()
        cap = world.create()
        old = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
        world.run(world.client().overwrite(cap, b"second"))
        self.assertEqual(world.read(cap.readonly(), world.client(directory)), b"second")
        for line, shares in zip(world.lines, old, strict=True):
            line.storage.slots[cap.storage_index] = shares
        self.assertEqual(world.read(cap), b"first")
        for files in (world.client(directory), world.client(directory)):
            with self.assertRaises(RollbackError) as caught:
                world.read(cap.readonly(), files)
            self.assertEqual((caught.exception.offered, caught.exception.seen), (1, 2))
            with self.assertRaises(RollbackError):
                world.run(files.modify(cap, lambda old: old + b"!"))
        world.run(world.client(directory).overwrite(cap, b"third"))
        self.assertEqual(world.read(cap, world.client(directory)), b"third")

    def test_what_another_process_has_seen(self) -> None:
        """A program that runs for long counts what others of the same client have seen meanwhile."""
        directory = Path(self.mktemp())
        world = MutableWorld()
        cap = world.create()
        long = world.client(directory)
        self.assertEqual(world.read(cap.readonly(), long), b"first")
        old = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
        world.run(world.client().overwrite(cap, b"second"))
        self.assertEqual(world.read(cap.readonly(), world.client(directory)), b"second")
        new = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
        for line, shares in zip(world.lines, old, strict=True):
            line.storage.slots[cap.storage_index] = dict(shares)
        with self.assertRaises(RollbackError) as caught:
            world.read(cap.readonly(), long)
        self.assertEqual((caught.exception.offered, caught.exception.seen), (1, 2))
        for work in (long.modify(cap, lambda old: old + b"!"), long.repair(cap)):
            with self.assertRaises(RollbackError):
                world.run(work)
        self.assertEqual(world.run(long.check(cap)).seen, 2)
        for line, shares in zip(world.lines, new, strict=True):
            line.storage.slots[cap.storage_index] = shares
        self.assertEqual(world.read(cap, long), b"second")
        world.run(long.modify(cap, lambda old: old + b"!"))
        self.assertEqual(world.read(cap, world.client(directory)), b"second!")

    def test_it_is_read_again_once(self) -> None:
        """What others remember is read when it has changed, and not each time."""
        directory, index = Path(self.mktemp()), bytes(16)
        long, other = VersionCache(directory), VersionCache(directory)
        self.assertEqual(long.of(index).sequence_number, 0)
        other.save(index, CachedVersion(5, b"r" * 32, encrypted_key=b"key"))
        long.save(index, CachedVersion(4, b"s" * 32))
        with mock.patch.object(long, "_load", wraps=long._load) as load:
            for _ in range(3):
                known = long.of(index)
                self.assertEqual((known.newest, known.encrypted_key), ((5, b"r" * 32), b"key"))
            self.assertEqual(load.call_count, 1)
            other.save(index, CachedVersion(6, b"r" * 32, begun_number=7))
            self.assertEqual((long.of(index).sequence_number, known.begun_number), (6, 7))
            (path,) = directory.iterdir()
            path.write_bytes(b"damaged")
            self.assertEqual(long.of(index).sequence_number, 6)
            path.unlink()
            self.assertEqual(long.of(index).sequence_number, 6)
            self.assertEqual(load.call_count, 3)
