"""Servers that lie, shares that are damaged, writers that die: what is said then, and what is never done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.core.caps import MutableCap
from pipegrid.core.mutable.mutable_share import parse_header
from pipegrid.core.mutable.versions import Format
from pipegrid.errors import (
    CorruptionError,
    NotEnoughSharesError,
    RollbackError,
    ServerError,
    UncoordinatedWriteError,
    UnhappyError,
)
from pipegrid.transfer.mutable import version_cache as remembered
from pipegrid.transfer.mutable.version_cache import (
    MAX_FILES,
    CachedVersion,
    VersionCache,
    pack,
    unpack,
)
from tests.pipes import pipe_in_place
from tests.transfer.mutable_world import MutableWorld
from tests.transfer.world import content


class DamageTests(SynchronousTestCase):
    """One server's share is damaged, at any place."""

    def shares(self, world: MutableWorld, cap: MutableCap) -> list[dict[int, bytes]]:
        """Return what the servers hold."""
        return [line.storage.slots[cap.storage_index] for line in world.lines]

    def test_any_flipped_bit(self) -> None:
        """A bit anywhere: reading is right all the same, checking finds it or it is of no consequence."""
        for format in (Format.SDMF, Format.MDMF):
            world = MutableWorld(4, 2, 4, happy=4)
            cap = world.create(content(300), format)
            first = self.shares(world, cap)[0]
            ((number, good),) = first.items()
            header = parse_header(good)
            assert header is not None
            sections = header.sections
            proven = [sections.public_key, sections.signature, sections.chain, sections.tree]
            proven += [sections.data, (0, len(header.version.signed_prefix))]
            for at in range(0, len(good), 37 if len(good) < 3000 else 61):
                first[number] = good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]
                self.assertEqual(world.read(cap.readonly()), content(300), f"{format}, byte {at}")
                found = world.run(world.client().check(cap.verifier(), verify=True))
                self.assertTrue(found.recoverable)
                if (
                    found.healthy
                ):  # the private key, which only its owner can prove, or where it ends
                    self.assertFalse(any(a <= at < b for a, b in proven), f"{format}, byte {at}")
                else:
                    self.assertIn("server-", str(found.corrupt[0].server))
                first[number] = good

    def test_writers_put_it_right(self) -> None:
        """A share that is garbage, or cut off, or empty, is written over by whoever writes next."""
        for garbage in (b"", b"\0" * 10, b"\xff" * 3000, b"\1" + b"\xff" * 200):
            world = MutableWorld()
            cap = world.create(b"zero")
            first = self.shares(world, cap)[0]
            (number,) = first
            first[number] = garbage
            world.run(world.client().modify(cap, lambda old: old + b"!"))
            self.assertEqual(world.read(cap), b"zero!")
            future = garbage[:1] == b"\xff"  # of a format to come: left alone
            found = world.run(world.client().check(cap, verify=True))
            self.assertEqual(found.healthy, not future)
            self.assertEqual(len(found.good_shares), 10, garbage[:1])

    def test_too_much_damage(self) -> None:
        """If too few good shares are left, that is what is said, and nothing wrong is handed on."""
        world = MutableWorld()
        cap = world.create(content(5000))
        for shares in self.shares(world, cap)[:8]:
            for number, share in shares.items():
                shares[number] = share[:1000] + bytes(b ^ 1 for b in share[1000:])
        pieces: list[Any] = []
        with self.assertRaises(NotEnoughSharesError):
            world.run(world.client().read(cap, pieces.extend))
        self.assertEqual(pieces, [])
        with self.assertRaises((NotEnoughSharesError, CorruptionError)):
            world.run(world.client().repair(cap))

    def test_shares_of_another_file(self) -> None:
        """Valid shares of another file, signed by its owner, are nobody's here."""
        world = MutableWorld()
        cap, other = world.create(b"this"), world.create(b"that")
        for line in world.lines[:8]:
            line.storage.slots[cap.storage_index] = dict(line.storage.slots[other.storage_index])
        with self.assertRaises(NotEnoughSharesError):
            world.read(cap)
        for line in world.lines[:7]:
            del line.storage.slots[cap.storage_index]
        with self.assertRaises(NotEnoughSharesError):
            world.run(world.client().overwrite(cap, b"new"))

    def test_old_shares_come_back(self) -> None:
        """Some servers were away during a write: the newer version is read, and repair makes all new."""
        world = MutableWorld()
        cap = world.create(b"old")
        old = [dict(shares) for shares in self.shares(world, cap)]
        world.run(world.client().overwrite(cap, b"new"))
        for line, shares in zip(world.lines[:5], old[:5], strict=True):
            line.storage.slots[cap.storage_index] = shares
        self.assertEqual(world.read(cap), b"new")
        before = world.run(world.client().check(cap))
        self.assertEqual((before.healthy, before.other_versions), (False, [(1, 5)]))
        self.assertTrue(world.run(world.client().repair(cap)).whole)
        self.assertTrue(world.run(world.client().check(cap, verify=True)).healthy)
        self.assertEqual(world.read(cap), b"new")

    def test_repair_finds_old_shares_beside_a_whole_version(self) -> None:
        """All shares of a version are on some servers; the others, with older ones, are not forgotten."""
        world = MutableWorld(4, 1, 3, happy=3)
        cap = world.create(b"old")
        holders = [line for line in world.lines if cap.storage_index in line.storage.slots]
        ((number, old),) = self.shares_of(holders[0], cap).items()
        files = world.client()
        holders[0].down = True
        world.run(files.overwrite(cap, b"new"))
        holders[0].down = False
        self.assertEqual(self.shares_of(holders[0], cap), {number: old})
        self.assertEqual(len(world.versions(cap)[2]), 3)
        for each in world.lines:
            each.rtt_s = 1.0 if each is holders[0] else 0.1
        self.assertTrue(world.run(world.client().repair(cap)).whole)
        found = world.run(world.client().check(cap, verify=True))
        self.assertTrue(found.healthy, found)

    def shares_of(self, line: Any, cap: MutableCap) -> dict[int, bytes]:
        """Return what one server holds."""
        return dict(line.storage.slots[cap.storage_index])

    def test_repair_asks_before_it_loses_something(self) -> None:
        """A newer version that cannot be read, its servers being away: only force writes over it."""
        world = MutableWorld()
        cap = world.create(b"old")
        old = [dict(shares) for shares in self.shares(world, cap)]
        world.run(world.client().overwrite(cap, b"new"))
        for line, shares in zip(world.lines[:8], old[:8], strict=True):
            line.storage.slots[cap.storage_index] = shares
        with self.assertRaises(UncoordinatedWriteError) as caught:
            world.run(world.client().repair(cap))
        self.assertEqual(caught.exception.theirs, 2)
        world.run(world.client().repair(cap, force=True))
        self.assertEqual(world.read(cap), b"old")
        self.assertEqual(world.versions(cap), {3: set(range(10))})


class ServerTests(SynchronousTestCase):
    """Servers that fail, or take their time."""

    def test_killed_in_mid_publish(self) -> None:
        """Servers die while a version is written, and half of them return with old shares: 40 times."""
        for seed in range(40):
            world = MutableWorld(happy=5)
            cap = world.create(b"old")
            files = world.client()
            dead = [line for number, line in enumerate(world.lines) if (seed >> number % 6) & 1][:5]
            outcome = world.begin(files.overwrite(cap, b"new"))
            world.clock.advance(0.125 + 0.06 + seed / 1000)
            for line in dead:
                line.silent.add("*")
                line.down = True
            world.run_until(lambda: bool(outcome))  # noqa: B023
            acknowledged = not hasattr(outcome[0], "value")
            for line in dead:
                line.silent.clear()
                line.down = False
            found = world.read(cap)
            if acknowledged:
                self.assertEqual(found, b"new", f"seed {seed}")
            self.assertIn(found, (b"old", b"new"))
            world.run(world.client().repair(cap, force=True))
            self.assertTrue(world.run(world.client().check(cap, verify=True)).healthy)

    def test_nothing_is_written_to_a_few(self) -> None:
        """Who can reach only servers that have missed a version makes none from what they have."""
        for edit in ("modify", "overwrite"):
            world = MutableWorld(happy=7)
            cap = world.create(b"zero")
            for line in world.lines[:3]:
                line.down = True
            world.run(world.client().modify(cap, lambda old: old + b" one"))
            for line in world.lines:
                line.down = not line.down
            before = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
            files = world.client()
            work: Any = (
                files.modify(cap, lambda old: old + b" two")
                if edit == "modify"
                else files.overwrite(cap, b"two")
            )
            with self.assertRaises(UnhappyError) as caught:
                world.run(work)
            self.assertIn("nothing was written", str(caught.exception))
            self.assertEqual((caught.exception.reached, caught.exception.wanted), (3, 7))
            after = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
            self.assertEqual(before, after)
            for line in world.lines:
                line.down = False
            self.assertEqual(world.read(cap), b"zero one")

    def test_what_was_acknowledged_outlives_its_rival(self) -> None:
        """Seven have a version, three another one with its number, whose writer failed: read is the first."""
        for seed in range(6):
            world = MutableWorld(happy=7)
            cap = world.create(b"zero")
            old = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
            world.run(world.client().overwrite(cap, b"failed %d" % seed))
            other = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
            for line, shares in zip(world.lines, old, strict=True):
                line.storage.slots[cap.storage_index] = shares
            world.run(world.client().overwrite(cap, b"acknowledged"))
            for line, shares in zip(world.lines[:3], other[:3], strict=True):
                line.storage.slots[cap.storage_index] = shares
            self.assertEqual(sorted(world.versions(cap)), [2])
            self.assertEqual(world.read(cap), b"acknowledged")
            world.run(world.client().modify(cap, lambda old: old + b"!"))
            self.assertEqual(world.read(cap), b"acknowledged!")

    def test_lost_answers(self) -> None:
        """A change that was made though its answer was lost is known for one's own: it is made once."""
        world = MutableWorld(happy=4)
        cap = world.create(b"")
        files = world.client()
        world.run(files.modify(cap, lambda old: old + b"a"))
        for line in world.lines[:3]:
            line.answers_lost.add("read_test_write")
        outcome = world.begin(files.modify(cap, lambda old: old + b"b"))
        world.clock.advance(0.2)
        for line in world.lines[:3]:
            line.answers_lost.clear()
        world.run_until(lambda: bool(outcome))
        self.assertEqual(outcome[0].attempts, 1)
        self.assertEqual(world.read(cap), b"ab")

    def test_slow_servers_are_not_waited_for(self) -> None:
        """One that hangs costs its grace, and no more, of reading and of writing."""
        world = MutableWorld(happy=7)
        cap = world.create(b"zero")
        world.lines[4].silent.add("*")
        began_s = world.clock.seconds()
        self.assertEqual(world.read(cap), b"zero")
        self.assertLess(world.clock.seconds() - began_s, 1.0)
        world.run(world.client().overwrite(cap, b"one"))
        self.assertLess(world.clock.seconds() - began_s, 6.0)
        self.assertEqual(world.read(cap), b"one")

    def test_cancelling(self) -> None:
        """Whatever is cancelled, whenever, leaves nothing behind."""
        for operation in ("create", "read", "overwrite", "modify", "update", "check", "repair"):
            for when_s in (0.0, 0.1, 0.2, 0.3):
                world = MutableWorld(time_limit_s=5)
                cap = world.create(content(50_000), Format.MDMF)
                files = world.client()
                arguments: dict[str, tuple[Any, ...]] = {
                    "create": (b"", Format.SDMF),
                    "read": (cap, lambda _: None),
                    "overwrite": (cap, b"x"),
                    "modify": (cap, lambda old: old + b"x"),
                    "update": (cap, 5, b"x"),
                }
                work = getattr(files, operation)(*arguments.get(operation, (cap,)))
                running = work if isinstance(work, Deferred) else Deferred.fromCoroutine(work)
                running.addErrback(lambda _: None)
                world.clock.advance(when_s)
                running.cancel()
                files.close()
                world.clock.advance(1)
                world.clock.advance(1)
                self.assertEqual(world.leftovers(), [], f"{operation} at {when_s}")
                self.assertEqual(world.read(cap)[:1] in (content(1), b"x"), True)

    def test_errors_of_servers_are_named(self) -> None:
        """If nobody can be reached the error says so."""
        world = MutableWorld()
        cap = world.create()
        for line in world.lines:
            line.down = True
        with self.assertRaises(NotEnoughSharesError) as caught:
            world.read(cap)
        self.assertIn("10 servers did not answer", str(caught.exception))
        world.lines[0].down = False
        with self.assertRaises(NotEnoughSharesError) as caught:
            world.read(cap)
        self.assertIn("of one, 1 share was found, and 3 are needed", str(caught.exception))
        self.assertIn("9 servers did not answer", str(caught.exception))


class KnownTests(SynchronousTestCase):
    """What is remembered is a hint, whatever stands in its file."""

    def test_damaged_files(self) -> None:
        """Garbage, or what somebody else wrote there, costs a round trip, and is replaced."""
        for garbage in (b"", b"{}", b"[1]", b"\xff" * 99, b'{"format": 1}', b"[" * 100_000):
            directory = Path(self.mktemp())
            world = MutableWorld()
            cap = world.create()
            world.run(world.client(directory).overwrite(cap, b"second"))
            (path,) = directory.iterdir()
            self.assertEqual(path.stat().st_mode & 0o777, 0o600)
            path.write_bytes(garbage)
            trips, _ = world.round_trips(world.client(directory).overwrite(cap, b"third"))
            self.assertEqual(trips, 2)
            trips, _ = world.round_trips(world.client(directory).overwrite(cap, b"fourth"))
            self.assertEqual(trips, 1)
            self.assertNotIn(str(cap).encode(), path.read_bytes())

    def test_a_changed_digit(self) -> None:
        """A number that was damaged on the disk is not taken for that of a version that was seen."""
        directory = Path(self.mktemp())
        world = MutableWorld()
        cap = world.create(b"first")
        self.assertEqual(world.read(cap, world.client(directory)), b"first")
        (path,) = directory.iterdir()
        data = path.read_bytes()
        for old, new in ((b'number": 1,', b'number": 9,'), (b'"begun": 0', b'"begun": 7')):
            self.assertIn(old, data)
            path.write_bytes(data.replace(old, new))
            self.assertEqual(world.read(cap, world.client(directory)), b"first")
            self.assertEqual(VersionCache(directory).of(cap.storage_index).newest[0], 1)
        # One of a version before hashes is believed.
        path.write_bytes(data[: data.index(b', "hash"')] + b"}")
        self.assertEqual(VersionCache(directory).of(cap.storage_index).sequence_number, 1)

    def test_a_named_pipe(self) -> None:
        """In the place of what is remembered holds up nobody, and is replaced."""
        directory, index = Path(self.mktemp()), bytes(16)
        with pipe_in_place(directory / f"{base32.encode(index)}.json"):
            files = VersionCache(directory)
            self.assertEqual(files.of(index).newest, (0, b""))
            files.save(index, CachedVersion(5, b"r" * 32))
            self.assertEqual(VersionCache(directory).of(index).sequence_number, 5)

    def test_servers_that_claim_everything(self) -> None:
        """Where shares are is forgotten if that is too much, never the newest version that was seen."""
        claims: tuple[tuple[int, ...], ...] = (tuple(range(255)), (0,))
        for held, servers in zip(claims, (10, 1000), strict=True):
            copies = {f"v0-{number}": held for number in range(servers)}
            again = unpack(pack(CachedVersion(5, b"r" * 32, copies=copies)))
            self.assertEqual((again.newest, again.copies), ((5, b"r" * 32), {}))

    def test_what_is_used_is_kept(self) -> None:
        """Of too many files those go that were not used for longest; reading what never changes is use."""
        directory = Path(self.mktemp())
        self.patch(remembered, "MAX_FILES", 2)
        for number in range(2):
            index = bytes([number] * 16)
            VersionCache(directory).save(index, CachedVersion(5, b"r" * 32))
            os.utime(directory / f"{base32.encode(index)}.json", (number, number))
        VersionCache(directory).of(bytes(16))
        VersionCache(directory).save(bytes([2] * 16), CachedVersion(5, b"r" * 32))
        numbers = [VersionCache(directory).of(bytes([n] * 16)).sequence_number for n in range(3)]
        self.assertEqual(numbers, [5, 0, 5])

    def test_packing(self) -> None:
        """What is written is read again; a key without its cap is of no use."""
        world = MutableWorld()
        cap = world.create(b"zero")
        files = world.client()
        world.run(files.overwrite(cap, b"one"))
        known = files.known.of(cap.storage_index)
        again = unpack(pack(known))
        self.assertEqual(
            (again.newest, again.version, again.copies, again.encrypted_key),
            (known.newest, known.version, known.copies, known.encrypted_key),
        )
        assert known.signing_key is not None
        self.assertNotIn(known.signing_key.der, pack(known))
        for broken in (b'{"format": 1, "sequence-number": -1, "copies": {}}', b"null"):
            with self.assertRaises(ValueError):
                unpack(broken)

    def test_a_lower_number_does_not_replace_a_higher(self) -> None:
        """Of two processes the one that has seen more is believed."""
        directory = Path(self.mktemp())
        index = bytes(16)
        VersionCache(directory).save(index, CachedVersion(5, b"r" * 32))
        VersionCache(directory).save(index, CachedVersion(4, b"r" * 32))
        self.assertEqual(VersionCache(directory).of(index).sequence_number, 5)
        self.assertGreater(MAX_FILES, 1000)

    def test_a_signed_lie(self) -> None:
        """Servers go back; who reads remembers, and asks all of them before it says so."""
        world = MutableWorld(12)
        cap = world.create(b"first")
        old = [dict(line.storage.slots.get(cap.storage_index, {})) for line in world.lines]
        files = world.client()
        world.run(files.overwrite(cap, b"second"))
        for line, shares in zip(world.lines, old, strict=True):
            line.storage.slots[cap.storage_index] = shares
        with self.assertRaises(RollbackError):
            world.read(cap, files)
        self.assertTrue(all(line.calls for line in world.lines))
        self.assertTrue(issubclass(RollbackError, Exception))
        self.assertFalse(issubclass(RollbackError, ServerError))

    def test_going_on_from_an_older_version(self) -> None:
        """All servers were restored from an old copy: it is called so, and becomes the newest with force."""
        world = MutableWorld()
        cap = world.create(b"first")
        old = [dict(line.storage.slots[cap.storage_index]) for line in world.lines]
        files, reader = world.client(), world.client()
        world.run(files.overwrite(cap, b"second"))
        self.assertEqual(world.read(cap, reader), b"second")
        for line, shares in zip(world.lines, old, strict=True):
            line.storage.slots[cap.storage_index] = dict(shares)
        for verify in (False, True):
            found = world.run(files.check(cap, verify))
            self.assertEqual((found.healthy, found.recoverable, found.seen), (False, True, 2))
            self.assertIn("version 2 was seen before", found.remarks[0])
        self.assertTrue(world.run(world.client().check(cap)).healthy)  # who has not seen it
        for change in (
            lambda: files.repair(cap),
            lambda: files.modify(cap, lambda content: content + b" and more"),
        ):
            with self.assertRaises(RollbackError) as caught:
                world.run(change())
            self.assertIn("repair -f", str(caught.exception))
        self.assertEqual(set(world.versions(cap)), {1})
        result = world.run(files.repair(cap, force=True))
        self.assertTrue(result.whole)
        self.assertEqual((result.after.seen, result.after.remarks), (0, []))
        self.assertEqual(world.versions(cap), {3: set(range(10))})
        self.assertEqual(world.read(cap, reader), b"first")
        self.assertTrue(world.run(files.check(cap)).healthy)

    def test_what_shares_do_not_tell(self) -> None:
        """All shares are there, and others of another version beside them: a check says what that is."""
        world = MutableWorld(11)
        cap = world.create(b"first")
        one = next(line for line in world.lines if cap.storage_index in line.storage.slots)
        old = dict(one.storage.slots[cap.storage_index])
        world.run(world.client().overwrite(cap, b"second"))
        server_for_share = next(
            line for line in world.lines if cap.storage_index not in line.storage.slots
        )
        server_for_share.storage.slots[cap.storage_index] = old
        found = world.run(world.client().check(cap))
        self.assertEqual((found.healthy, len(found.good_shares)), (False, 10))
        self.assertIn("shares of older versions", found.remarks[0])
