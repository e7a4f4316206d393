"""One server, or all of them, do what no honest one would: the others do the work, and that is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import MutableCap
from pipegrid.core.mutable import versions as sizes
from pipegrid.core.mutable.encoder import encode
from pipegrid.core.mutable.mutable_share import Header, new_sections
from pipegrid.core.mutable.versions import (
    MAX_SEQUENCE_NUMBER,
    SALT_BYTES,
    Format,
    MutableGeometry,
    Version,
)
from pipegrid.errors import (
    CorruptionError,
    NotEnoughSharesError,
    RollbackError,
    ServerUnreachable,
    UnhappyError,
    UsageError,
)
from pipegrid.transfer.mutable.mutable_files import MutableFiles
from pipegrid.wire.storage_messages import ShareChange, SlotResult, SlotSecrets
from tests.transfer.mutable_world import MutableWorld
from tests.transfer.world import Line

Answer = Callable[[Mapping[int, ShareChange], SlotResult], SlotResult]


class Enemy(Line):
    """
    A line to a server that answers as it likes.

    Attributes:
        answer: from what is to be changed, and the honest answer, to what it says.
        stores: whether it does what is asked.
    """

    answer: Answer
    stores = True

    def read_test_write(
        self,
        storage_index: bytes,
        secrets: SlotSecrets,
        changes: Mapping[int, ShareChange],
        reads: Sequence[tuple[int, int]] = (),
    ) -> Deferred[SlotResult]:
        """Say something else."""
        made = changes if self.stores else {}
        honest = super().read_test_write(storage_index, secrets, made, reads)
        return honest.addCallback(lambda result: self.answer(changes, result))


def enemy(world: MutableWorld, number: int, answer: Answer, stores: bool = True) -> Enemy:
    """Return a line to one of a world's servers that does this."""
    line = world.special_line(Enemy, number)
    line.answer, line.stores = answer, stores
    return line


def refuses(changes: Mapping[int, ShareChange], honest: SlotResult) -> SlotResult:
    """Say that no test has passed."""
    return SlotResult(False, honest.data) if changes else honest


class MadeUp:
    """Shows other shares each time, of no version."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, changes: Mapping[int, ShareChange], honest: SlotResult) -> SlotResult:
        self.count += 1
        head = b"\0" + self.count.to_bytes(8, "big") * 9
        return SlotResult(not changes, dict.fromkeys(honest.data, (head,)))


class EnemyTests(SynchronousTestCase):
    """One server of ten."""

    def setUp(self) -> None:
        self.world = MutableWorld()

    def among(self, *enemies: Enemy) -> MutableFiles:
        """Return a client for whom some servers are these."""
        lines: list[Any] = list(self.world.lines)
        for each in enemies:
            lines[self.world.lines.index(self.line(each))] = each
        return self.world.client(lines=lines)

    def line(self, each: Enemy) -> Line:
        """Return the honest line to the same server."""
        return next(line for line in self.world.lines if line.storage is each.storage)

    def test_it_refuses_everything(self) -> None:
        """It is left out after some tries; nobody is told of other writers."""
        for answer in (refuses, MadeUp()):
            for what in ("overwrite", "modify", "update"):
                world = self.world = MutableWorld()
                cap = world.create(b"zero", Format.MDMF)
                files = self.among(enemy(world, 3, answer, stores=False))
                began_s = world.clock.seconds()
                change: Any = {
                    "overwrite": lambda f, c: f.overwrite(c, b"zero one"),
                    "modify": lambda f, c: f.modify(c, lambda old: old + b" one"),
                    "update": lambda f, c: f.update(c, 4, b" one"),
                }[what]
                result = world.run(change(files, cap))
                self.assertLess(world.clock.seconds() - began_s, 20, what)
                self.assertIn("server-3", result.reasons)
                self.assertEqual(world.read(cap), b"zero one")

    def test_it_refuses_and_shows_what_it_has_kept(self) -> None:
        """Another old version each time is no sign of other writers either."""
        world = self.world
        cap = world.create(b"zero")
        kept: list[dict[int, bytes]] = []
        theirs = world.client()
        for _ in range(40):
            kept.append(dict(world.lines[3].storage.slots[cap.storage_index]))
            world.run(theirs.modify(cap, lambda old: old + b"."))
        looks = iter(kept)
        shown = next(looks)

        def replays(changes: Mapping[int, ShareChange], honest: SlotResult) -> SlotResult:
            nonlocal shown
            if not changes:
                shown = next(looks)
            most = world.settings.write_read_bytes
            return SlotResult(not changes, {n: (data[:most],) for n, data in shown.items()})

        files = self.among(enemy(world, 3, replays, stores=False))
        began_s = world.clock.seconds()
        result = world.run(files.modify(cap, lambda old: old + b" one"))
        self.assertLess(world.clock.seconds() - began_s, 20)
        self.assertIn("server-3", result.reasons)
        self.assertTrue(world.read(cap).endswith(b". one"))

    def test_it_has_shares_of_what_was_only_just_made(self) -> None:
        """It is not believed: the file is made, on the others."""

        def claims(changes: Mapping[int, ShareChange], honest: SlotResult) -> SlotResult:
            return SlotResult(honest.success, {**honest.data, 9: (bytes(57),), 200: (bytes(57),)})

        for answer in (refuses, claims):
            files = self.among(enemy(self.world, 3, answer))
            made = self.world.run(files.create(b"first", Format.SDMF))
            self.assertIn("server-3", made.written.reasons)
            self.assertEqual(self.world.read(made.cap), b"first")
            self.world.run(files.overwrite(made.cap, b"second"))
            self.assertEqual(self.world.read(made.cap), b"second")

    def test_many_and_large_shares(self) -> None:
        """As many as there are numbers, each as long as the answer may be: they are nobody's."""
        world = self.world
        cap = world.create(b"zero")
        large = bytes(world.settings.write_read_bytes)

        def many(changes: Mapping[int, ShareChange], honest: SlotResult) -> SlotResult:
            return SlotResult(honest.success, dict.fromkeys(range(300), (large,)))

        files = self.among(enemy(world, 3, many))
        self.assertEqual(world.read(cap, files), b"zero")
        world.run(files.modify(cap, lambda old: old + b" one"))
        self.assertEqual(world.read(cap), b"zero one")

    def test_it_says_ok_and_does_nothing(self) -> None:
        """A check finds what it has; where all do so, the next look of the writer does."""
        world = self.world

        def ok(changes: Mapping[int, ShareChange], honest: SlotResult) -> SlotResult:
            return SlotResult(True, honest.data)

        cap = world.create(b"zero")
        files = self.among(enemy(world, 3, ok, stores=False))
        self.assertTrue(world.run(files.overwrite(cap, b"one")).written)
        self.assertEqual(world.read(cap), b"one")
        found = world.run(world.client().check(cap))
        self.assertEqual((found.healthy, found.other_versions), (False, [(1, 1)]))

        files = self.among(*(enemy(world, n, ok, stores=False) for n in range(10)))
        world.run(files.overwrite(cap, b"two"))
        self.assertRaises(RollbackError, world.read, cap, files)


class Down(Line):
    """A line to a server that nobody reaches."""

    def read_test_write(self, *_: Any) -> Deferred[SlotResult]:
        """See ``Line``."""
        why = "could be used (refused); check that it runs and can be reached."
        return fail(ServerUnreachable(f"No connection to {self.identity.nickname} {why}"))


class ShortageTests(SynchronousTestCase):
    """Too few servers."""

    def test_reasons(self) -> None:
        """What is true of many servers is said once, and whom it is about."""
        world = MutableWorld()
        cap = world.create(b"zero")
        down = [world.special_line(Down, number) for number in range(6)]
        files = world.client(lines=[*down, *world.lines[6:]])
        for change in (
            files.modify(cap, lambda old: old + b"!"),
            files.create(b"new", Format.SDMF),
        ):
            with self.assertRaises(UnhappyError) as caught:
                world.run(change)
            said = str(caught.exception)
            self.assertEqual(
                said.count("No connection to server-0 could be used (refused)"), 1, said
            )
            self.assertEqual(said.count("could be used"), 1, said)
            self.assertIn(" (server-1, server-2, server-3 and 2 more too)", said)
            self.assertEqual(said.count("; try again"), 1, said)

    def test_another_write_enabler(self) -> None:
        """What can be done about it is said once, and not with each server."""
        world = MutableWorld()
        cap = world.create(b"zero")
        for line in world.lines[:6]:
            line.storage.write_enablers[cap.storage_index] = b"?" * 32
        with self.assertRaises(UnhappyError) as caught:
            world.run(world.client().overwrite(cap, b"one"))
        said = str(caught.exception)
        self.assertIn("another write enabler (server-", said)
        self.assertEqual(said.count("repair it from another client, or delete it there"), 1, said)


class OwnerTests(SynchronousTestCase):
    """Somebody with the write cap, or with shares, does harm."""

    def setUp(self) -> None:
        self.world = MutableWorld()

    def sign(self, files: MutableFiles, cap: MutableCap, number: int) -> list[bytes]:
        """Return shares of a version with this number."""
        key = files.known.of(cap.storage_index).signing_key
        assert key is not None
        geometry = MutableGeometry(Format.SDMF, 4, 3, 10)
        encoded = encode(b"last", geometry, number, key, [bytes(SALT_BYTES)])
        return [
            b"".join(bytes(piece) for write in writes for piece in write.pieces)
            for _, writes in sorted(encoded.writes.items())
        ]

    def test_the_highest_number_there_is(self) -> None:
        """A sentence, and nothing is written: no number begins anew."""
        world = self.world
        mine = world.client()
        cap = world.run(mine.create(b"zero", Format.SDMF)).cap
        for count in (10, 1):  # a version to be read, and one that was only begun
            shares = self.sign(mine, cap, MAX_SEQUENCE_NUMBER)
            for line in world.lines[:count]:
                held = line.storage.slots[cap.storage_index]
                held.update({number: shares[number] for number in held})
            before = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
            self.assertEqual(world.read(cap), b"last" if count == 10 else b"zero")
            for change in (
                world.client().overwrite(cap, b"new"),
                world.client().modify(cap, lambda old: old + b"!"),
                world.client().update(cap, 0, b"new"),
            ):
                with self.assertRaises(UsageError) as caught:
                    world.run(change)
                self.assertIn("highest possible sequence number", str(caught.exception))
            after = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
            self.assertEqual(before, after)
            cap = world.run(mine.create(b"zero", Format.SDMF)).cap

    def test_a_length_that_nobody_has(self) -> None:
        """Of a file of 2^59 bytes, signed, with shares of some kilobytes: whatever is asked ends at once."""
        world = self.world
        mine = world.client()
        cap = world.run(mine.create(b"zero", Format.MDMF)).cap
        key = mine.known.of(cap.storage_index).signing_key
        assert key is not None
        geometry = MutableGeometry(Format.MDMF, 1 << 59, 3, 10)
        version = Version(Format.MDMF, 9, bytes(32), b"", 3, 10, geometry.segment_bytes, 1 << 59)
        sections = new_sections(geometry, len(key.public_der), len(key.encrypted))
        share = bytearray(4 * world.settings.read_bytes)
        parts = (
            (0, Header(version, sections).pack()),
            (sections.private_key[0], key.encrypted),
            (sections.signature[0], key.sign(version.signed_prefix)),
            (sections.public_key[0], key.public_der),
        )
        for start, part in parts:
            share[start : start + len(part)] = part
        for line in world.lines:
            held = line.storage.slots[cap.storage_index]
            held.update(dict.fromkeys(held, bytes(share)))
        found = world.run(world.client().check(cap, verify=True))
        self.assertEqual((found.recoverable, len(found.corrupt)), (False, 10))
        self.assertRaises(NotEnoughSharesError, world.read, cap)

    def put_in_segments(
        self, files: MutableFiles, content: bytes, segment_bytes: int
    ) -> MutableCap:
        """Have a version of this content, in such segments, on all servers; return its cap."""
        cap: MutableCap = self.world.run(files.create(b"zero", Format.MDMF)).cap
        key = files.known.of(cap.storage_index).signing_key
        assert key is not None
        geometry = MutableGeometry(Format.MDMF, len(content), 3, 10, segment_bytes)
        salts = [bytes(SALT_BYTES)] * geometry.num_salts
        encoded = encode(content, geometry, 9, key, salts)
        for line in self.world.lines:
            held = line.storage.slots[cap.storage_index]
            held.update({number: encoded.share(number) for number in held})
        return cap

    def test_more_small_segments_than_are_read(self) -> None:
        """They cost far more than their bytes: it is said, whoever looks."""
        self.patch(sizes, "MAX_SMALL_SEGMENTS", 8)
        world = self.world
        cap = self.put_in_segments(world.client(), bytes(27), 3)
        said = "27 bytes in 9 segments of 3, and of segments below 4096 at most"
        for change in (
            world.client().modify(cap, lambda old: old + b"!"),
            world.client().update(cap, 0, b"new"),
        ):
            with self.assertRaises(NotEnoughSharesError) as caught:
                world.run(change)
            self.assertIn(said, str(caught.exception))
        with self.assertRaises(NotEnoughSharesError) as caught:
            world.read(cap)
        self.assertIn(
            "10 shares are damaged (share 0 is damaged: it is of a version", str(caught.exception)
        )
        self.assertIn(said, str(caught.exception))
        found = world.run(world.client().check(cap, verify=True))
        self.assertEqual((found.recoverable, len(found.corrupt)), (False, 10))
        self.assertIn(said, str(found.corrupt[0]))

    def test_as_many_small_segments_as_are_read(self) -> None:
        """They are read, and what is added makes no more of them: the file is written anew, in usual ones."""
        self.patch(sizes, "MAX_SMALL_SEGMENTS", 8)
        world = self.world
        mine = world.client()
        cap = self.put_in_segments(mine, bytes(24), 3)
        self.assertEqual(world.read(cap), bytes(24))
        self.assertTrue(world.run(world.client().check(cap, verify=True)).healthy)
        world.run(world.client().update(cap, 24, b"more"))
        self.assertEqual(world.read(cap), bytes(24) + b"more")
        large = self.put_in_segments(mine, bytes(9 * 4098), 4098)
        self.assertEqual(world.read(large), bytes(9 * 4098))

    def test_a_number_that_nobody_signed(self) -> None:
        """It is written over."""
        world = self.world
        cap = world.create(b"zero")
        for line in world.lines[:3]:
            held = line.storage.slots[cap.storage_index]
            for number, share in held.items():
                held[number] = share[:1] + b"\xff" * 8 + share[9:]
        world.run(world.client().overwrite(cap, b"new"))
        self.assertEqual(world.read(cap), b"new")
        self.assertEqual(world.versions(cap), {2: set(range(10))})

    def test_private_keys_that_open_to_nothing(self) -> None:
        """One good one is enough; where there is none it is said, and nothing is written."""
        world = self.world
        cap = world.create(b"zero")
        for line in world.lines[:9]:
            held = line.storage.slots[cap.storage_index]
            for number, share in held.items():
                held[number] = share[:-500] + bytes(b ^ 1 for b in share[-500:])
        world.run(world.client().modify(cap, lambda old: old + b" one"))
        self.assertEqual(world.read(cap), b"zero one")
        for line in world.lines:
            held = line.storage.slots[cap.storage_index]
            for number, share in held.items():
                held[number] = share[:-500] + bytes(b ^ 1 for b in share[-500:])
        with self.assertRaises(CorruptionError) as caught:
            world.run(world.client().modify(cap, lambda old: old + b" two"))
        self.assertIn("private key", str(caught.exception))
        self.assertEqual(world.read(cap), b"zero one")
