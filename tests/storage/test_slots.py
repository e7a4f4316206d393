"""Mutable slots: what read-test-write does, what it leaves when it is killed, and what it refuses."""

from __future__ import annotations

import base64
import errno
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from pipegrid.disk import file_system_calls as disk
from pipegrid.errors import NoSpace, NoSuchShare, ServerRefused, UsageError, WrongSecret
from pipegrid.storage.mutable import slot_change as slotchange
from pipegrid.storage.mutable import slot_file, slots
from pipegrid.storage.share_file import stored_secret
from pipegrid.storage.share_store import ShareStore
from pipegrid.wire.storage_messages import (
    MAX_CALL_VECTORS,
    LeaseSecrets,
    ShareChange,
    SlotResult,
    SlotSecrets,
)
from tests import vectors
from tests.storage.support import NOW, SECRETS, SI, SI_TEXT, StoreTestCase
from tests.storage.test_mutable_containers import all_leases, mutable_cases, share_data

WRITER = SlotSecrets(SECRETS.lease, b"w" * 32)
STRANGER = SlotSecrets(SECRETS.lease, b"W" * 32)
NODE_ID = bytes.fromhex(vectors.load("containers")["server_nodeid"])
EVERYTHING = [(0, 1 << 40)]


def lease(number: int) -> LeaseSecrets:
    """Return the secrets of one of many clients."""
    return LeaseSecrets(b"r%031d" % number, b"c%031d" % number)


class SlotTestCase(StoreTestCase):
    """A test with slots."""

    durable = False

    def setUp(self) -> None:
        super().setUp()
        self.store.slots.node_id = NODE_ID

    def change(
        self,
        changes: Mapping[int, ShareChange],
        reads: Any = (),
        secrets: SlotSecrets = WRITER,
    ) -> SlotResult:
        """Read, test and write."""
        return self.store.slots.testv_and_readv_and_writev(
            SI, secrets, changes, reads, self.durable
        )

    def write(self, number: int, *writes: tuple[int, bytes], new_length: int | None = None) -> None:
        """Write to one share."""
        result = self.change({number: ShareChange((), writes, new_length)})
        self.assertTrue(result.success)

    def shares(self) -> dict[int, bytes]:
        """Return all shares' data."""
        return {
            number: pieces[0]
            for number, pieces in self.store.slots.readv(SI, (), EVERYTHING).items()
        }

    def file(self, number: int) -> bytes:
        """Return a whole container."""
        return self.final(number).read_bytes()


class RecordedTests(SlotTestCase):
    """What the reference's server wrote, written by ours."""

    def test_recorded_containers_byte_for_byte(self) -> None:
        """Created, leased six times, grown and cut: the same files."""
        for limit in (slotchange.COPY_LIMIT_BYTES, 0):  # anew, and in place
            with mock.patch.object(slotchange, "COPY_LIMIT_BYTES", limit):
                self.change({3: ShareChange(new_length=0)}, secrets=self.recorded_secrets())
                self.replay()

    def recorded_secrets(self) -> SlotSecrets:
        """Return those of the recording."""
        case = mutable_cases()[1]
        first = case["leases"][0]
        renew, cancel = bytes.fromhex(first["renew"]), bytes.fromhex(first["cancel"])
        return SlotSecrets(LeaseSecrets(renew, cancel), bytes.fromhex(case["write_enabler"]))

    def replay(self) -> None:
        """Do what was recorded."""
        self.now = NOW + 2000.0
        secrets = self.recorded_secrets()
        small, leased, grown, cut = (base64.b64decode(c["file_base64"]) for c in mutable_cases())
        self.change({3: ShareChange((), ((0, b"0123456789"),))}, secrets=secrets)
        self.assertEqual(self.file(3), small)
        for each in mutable_cases()[1]["leases"][1:]:
            renew, cancel = bytes.fromhex(each["renew"]), bytes.fromhex(each["cancel"])
            self.store.add_lease(SI, LeaseSecrets(renew, cancel))
        self.assertEqual(self.file(3), leased)
        self.change({3: ShareChange((), ((20, b"tail"),))}, secrets=secrets)
        self.assertEqual(self.file(3), grown)
        self.change({3: ShareChange((), (), 5)}, secrets=secrets)
        self.assertEqual(self.file(3), cut)


class ReadTestWriteTests(SlotTestCase):
    """The semantics."""

    def test_tests_of_all_shares_come_before_any_write(self) -> None:
        """One failing test, and nothing changes in any share, nor any lease; the data comes all the same."""
        self.write(0, (0, b"abc"))
        self.write(1, (0, b"xyz"))
        before = self.file(0), self.file(1)
        self.now += 1000
        changes = {
            0: ShareChange(((0, 3, b"abc"),), ((0, b"!"),)),
            1: ShareChange(((1, 1, b"?"),), ((0, b"!"),)),
            2: ShareChange((), ((0, b"new"),)),
        }
        result = self.change(changes, [(1, 1), (2, 9)])
        self.assertEqual(result, SlotResult(False, {0: (b"b", b"c"), 1: (b"y", b"z")}))
        self.assertEqual((self.file(0), self.file(1)), before)
        self.assertEqual(self.shares().keys(), {0, 1})

    def test_a_missing_share_reads_as_empty(self) -> None:
        """The customary test for absence passes once, and not again."""
        absent = ShareChange(((0, 1, b""),), ((0, b"first"),))
        self.assertTrue(self.change({4: absent}).success)
        self.assertFalse(self.change({4: absent}).success)
        self.assertFalse(self.change({5: ShareChange(((0, 1, b"x"),))}).success)
        self.assertEqual(self.shares(), {4: b"first"})

    def test_reads_see_what_was_before(self) -> None:
        """The read vector is answered from before the writes, and only for shares that were there."""
        self.write(0, (0, b"old"))
        changes = {0: ShareChange((), ((0, b"new"),)), 1: ShareChange((), ((0, b"new"),))}
        self.assertEqual(self.change(changes, [(0, 3)]), SlotResult(True, {0: (b"old",)}))

    def test_specimens_of_another_length_do_not_match(self) -> None:
        """A test compares exactly the bytes that a read of that size gives."""
        self.write(0, (0, b"abcdef"))
        for size, specimen, passes in (
            (6, b"abcdef", True),
            (99, b"abcdef", True),
            (3, b"abcdef", False),
            (6, b"abc", False),
            (0, b"", True),
        ):
            result = self.change({0: ShareChange(((0, size, specimen),))})
            self.assertEqual(result.success, passes, (size, specimen))

    def test_the_write_enabler_comes_first(self) -> None:
        """A stranger learns nothing and changes nothing, not even by a question without changes."""
        self.write(0, (0, b"abc"))
        before = self.file(0)
        for secrets in (
            STRANGER,
            SlotSecrets(SECRETS.lease, b"w"),
            SlotSecrets(SECRETS.lease, b""),
        ):
            for changes in ({}, {0: ShareChange((), (), 0)}, {1: ShareChange(((0, 1, b"z"),))}):
                error = self.assertRaises(WrongSecret, self.change, changes, [(0, 3)], secrets)
                self.assertIn("The write enabler was recorded by nodeid '", str(error))
        self.assertEqual(self.file(0), before)
        self.assertEqual(self.shares().keys(), {0})

    def test_deleting(self) -> None:
        """Length 0 deletes a share whatever is written, and with the last one the directory goes."""
        self.write(0, (0, b"abc"))
        self.write(1, (0, b"abc"))
        self.write(0, (0, b"x"), new_length=0)
        self.assertEqual(self.shares(), {1: b"abc"})
        self.write(7, new_length=0)  # which is not there
        self.write(1, new_length=0)
        self.assertFalse(self.final(0).parent.exists())
        self.assertTrue(self.change({}, [(0, 1)]).success)

    def test_a_failed_test_leaves_no_directory(self) -> None:
        """Where nothing was, nothing is."""
        self.assertFalse(self.change({0: ShareChange(((0, 1, b"x"),))}).success)
        self.assertFalse(self.final(0).parent.exists())

    def test_an_empty_change_makes_a_share_and_leases_it(self) -> None:
        """A share that is mentioned is made, even without writes."""
        self.write(3)
        self.assertEqual(self.shares(), {3: b""})
        self.assertEqual([each.owner for each in all_leases(self.file(3))], [1, 0, 0, 0])

    def test_writing_renews_the_lease(self) -> None:
        """The same secrets keep one lease, whose expiry only grows; others add theirs."""
        self.write(0, (0, b"abc"))
        self.now += 500
        self.write(0, (0, b"abd"))
        self.now -= 900
        self.write(0)
        others = SlotSecrets(lease(1), WRITER.write_enabler)
        self.change({0: ShareChange()}, secrets=others)
        expiries = [each.expires for each in all_leases(self.file(0)) if each.owner]
        self.assertEqual(expiries, [NOW + 500 + 2678400, NOW - 400 + 2678400])

    def test_version_1_containers_stay_so(self) -> None:
        """An old container is written to, and leased, in its own way."""
        self.write(0, (0, b"abc"))
        old = bytearray(self.file(0))
        old[:32] = slot_file.MAGICS[1]
        old[100:192] = bytes(92)
        self.final(0).write_bytes(old)
        self.write(0, (3, b"def"))
        self.store.add_lease(SI, lease(1))
        leases = [each for each in all_leases(self.file(0)) if each.owner]
        self.assertEqual([each.renew for each in leases], [SECRETS.lease.renew, lease(1).renew])
        self.assertEqual(self.file(0)[:32], slot_file.MAGICS[1])
        self.assertEqual(self.shares(), {0: b"abcdef"})


_CHANGES = st.dictionaries(
    st.integers(0, 3),
    st.builds(
        lambda writes, new_length: ShareChange((), tuple(writes), new_length),
        st.lists(st.tuples(st.integers(0, 700), st.binary(max_size=300)), max_size=3),
        st.none() | st.integers(0, 900),
    ),
    max_size=3,
)


class ModelTests(SlotTestCase):
    """Against a dict."""

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        steps=st.lists(
            st.tuples(_CHANGES, st.integers(0, 8), st.integers(0, 700), st.booleans()), max_size=10
        ),
        in_place=st.booleans(),
    )
    def test_slots_are_dicts(
        self, steps: list[tuple[dict[int, ShareChange], int, int, bool]], in_place: bool
    ) -> None:
        """After any changes by any clients the shares are those of a model, and every lease is there."""
        self.root = Path(self.mktemp())
        self.store = self.make_store()
        model: dict[int, bytes] = {}
        owners: dict[int, set[int]] = {}
        limit = 0 if in_place else slotchange.COPY_LIMIT_BYTES
        with mock.patch.object(slotchange, "COPY_LIMIT_BYTES", limit):
            for changes, client, at, guess_right in steps:
                guess = model.get(0, b"")[at : at + 9] if guess_right else b"never so"
                if changes:
                    number, change = next(iter(changes.items()))
                    guess = guess if not guess_right else model.get(number, b"")[at : at + 9]
                    test = ((at, 9, guess),)
                    changes[number] = ShareChange(test, change.writes, change.new_length)
                expected: dict[int, tuple[bytes, ...]]
                expected = {n: (data[at : at + 50], data[:7]) for n, data in model.items()}
                secrets = SlotSecrets(lease(client), WRITER.write_enabler)
                result = self.change(changes, [(at, 50), (0, 7)], secrets)
                success = guess_right or not changes
                self.assertEqual(result, SlotResult(success, expected))
                if success:
                    apply(model, owners, changes, client)
                self.assertEqual(self.shares(), model)
                self.assertEqual(self.store.slots.list_shares(SI), model.keys())
                for n, clients in owners.items():
                    found = {each.renew for each in all_leases(self.file(n)) if each.owner}
                    hashed = {stored_secret(2, lease(c).renew) for c in clients}
                    self.assertEqual(found, hashed)

    def test_growth_with_many_leases(self) -> None:
        """A share with nine leases keeps them all, however little or much it grows."""
        for limit in (slotchange.COPY_LIMIT_BYTES, 0):
            with mock.patch.object(slotchange, "COPY_LIMIT_BYTES", limit):
                self.write(0, new_length=0)
                self.write(0, (0, b"a"))
                for client in range(8):
                    self.store.add_lease(SI, lease(client))
                leases = all_leases(self.file(0))
                self.assertEqual(len(leases), 9)
                expected = b"a"
                for more in (1, 3, 91, 92, 500, 5000):
                    self.write(0, (len(expected), b"b" * more))
                    expected += b"b" * more
                    self.assertEqual(self.shares(), {0: expected})
                    self.assertEqual(all_leases(self.file(0)), leases)


def apply(
    model: dict[int, bytes],
    owners: dict[int, set[int]],
    changes: Mapping[int, ShareChange],
    client: int,
) -> None:
    """Do to a model what is to be done to the slot."""
    for number, change in changes.items():
        if change.new_length == 0:
            model.pop(number, None)
            owners.pop(number, None)
            continue
        data = bytearray(model.get(number, b""))
        for offset, written in change.writes:
            data += bytes(max(0, offset + len(written) - len(data)))
            data[offset : offset + len(written)] = written
        model[number] = bytes(data[: change.new_length])
        owners.setdefault(number, set()).add(client)


class Killed(BaseException):
    """The process ends here."""


class CrashTests(SlotTestCase):
    """A process that is killed, or a disk that fails, at any moment."""

    durable = True

    def each_kill(self, operation: Any) -> list[dict[int, bytes]]:
        """Kill an operation before each of its calls to the disk; returns what files stood then."""
        states: list[dict[int, bytes]] = []
        kept = {path: path.read_bytes() for path in self.final(0).parent.iterdir()}
        for deadline in range(200):
            for path, content in kept.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            if not self.killed_after(deadline, operation):
                self.assertGreater(deadline, 4)
                return states
            states.append(
                {int(path.name): path.read_bytes() for path in self.final(0).parent.iterdir()}
            )
        raise AssertionError("no end")

    def killed_after(self, deadline: int, operation: Any, error: Any = Killed) -> bool:
        """Whether the operation would have made more calls than that."""
        calls = 0

        def counted(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > deadline:
                    raise error()
                return function(*args, **kwargs)

            return call

        with (
            mock.patch.object(disk, "write_all", counted(disk.write_all)),
            mock.patch.object(os, "rename", counted(os.rename)),
            mock.patch.object(os, "fsync", counted(os.fsync)),
            mock.patch.object(os, "ftruncate", counted(os.ftruncate)),
        ):
            try:
                operation()
            except (Killed, ServerRefused):
                return True
        return False

    def test_short_shares_are_old_or_new(self) -> None:
        """Each share is as it was, or as it was to be, and complete with its leases."""
        self.write(0, (0, b"old" * 50))
        self.write(1, (0, b"old" * 50))
        for client in range(6):
            self.store.add_lease(SI, lease(client))
        leases = {n: all_leases(self.file(n)) for n in (0, 1)}

        def operation() -> None:
            changes = {n: ShareChange((), ((10, b"new" * 100),), 290) for n in (0, 1, 2)}
            self.change(changes)

        states = self.each_kill(operation)
        old, new = b"old" * 50, (b"old" * 4)[:10] + b"new" * 93 + b"n"
        for state in states:
            self.assertLessEqual(state.keys(), {0, 1, 2})
            for number, file in state.items():
                if number < 2:
                    self.assertIn(share_data(file), (old, new))
                    self.assertEqual(all_leases(file), leases[number])
                else:
                    self.assertEqual(share_data(file), bytes(10) + new[10:])
        self.assertEqual(list(self.root.rglob("*.slot")), [])

    def test_long_shares_stay_readable(self) -> None:
        """A share that is changed in place has all its leases, and old or new bytes in every place."""
        with mock.patch.object(slotchange, "COPY_LIMIT_BYTES", 0):
            self.write(0, (0, b"o" * 300))
            for client in range(6):
                self.store.add_lease(SI, lease(client))
            leases = all_leases(self.file(0))
            states = self.each_kill(lambda: self.write(0, (10, b"n" * 100), (310, b"n" * 50)))
        for state in states:
            data = share_data(state[0])
            self.assertEqual(all_leases(state[0]), leases)
            self.assertIn(len(data), (300, 360))
            self.assertIn(data[10:110], (b"o" * 100, b"n" * 100))
            self.assertEqual(data[:10] + data[110:300], b"o" * 200)
            self.assertIn(data[300:], (b"", bytes(10) + b"n" * 50))

    def test_a_full_disk_changes_nothing(self) -> None:
        """If the disk turns out to be full, every share is as before, and no copy stays behind."""
        self.write(0, (0, b"old"))
        before = self.file(0)

        def full() -> OSError:
            return OSError(28, "full")

        def operation() -> None:
            self.change({n: ShareChange((), ((0, b"new"),)) for n in (0, 1)})

        for deadline in range(8):  # all writes and syncs come before the first rename
            self.assertTrue(self.killed_after(deadline, operation, full))
            self.assertEqual(self.file(0), before)
            self.assertEqual(self.store.slots.list_shares(SI), {0})
            self.assertEqual(list(self.root.rglob("*.slot")), [])

    def test_a_full_disk_changes_nothing_of_long_shares(self) -> None:
        """Shares that would grow in place are as before if there is no room, whichever of them it is for."""
        with mock.patch.object(slotchange, "COPY_LIMIT_BYTES", 0):
            for number in (0, 1):
                self.write(number, (0, b"o" * 300))
            for client in range(6):
                self.store.add_lease(SI, lease(client))
            before = [self.file(0), self.file(1)]
            changes = {n: ShareChange((), ((0, b"n" * 9000), (20000, b"n"))) for n in (0, 1, 2)}
            for deadline in range(6):  # two writes and the leases, of each that is there
                with self.disk_with_room_for(deadline), self.assertRaises(NoSpace):
                    self.change(changes)
                self.assertEqual([self.file(0), self.file(1)], before)
                self.assertEqual(self.store.slots.list_shares(SI), {0, 1})
            with self.disk_with_room_for(6) as allocated:
                self.change(changes)
        self.assertEqual(share_data(self.file(0))[:9000], b"n" * 9000)
        self.assertLess(sum(length for _, length in allocated), 2 * 10_000)  # the gap is none of it

    def test_disks_that_set_nothing_aside(self) -> None:
        """Where nothing can be set aside, long shares grow as they ever did."""
        for number in (errno.EOPNOTSUPP, errno.EINVAL):
            failing = mock.Mock(side_effect=OSError(number, "no"))
            with (
                mock.patch.object(slotchange, "COPY_LIMIT_BYTES", 0),
                mock.patch.object(os, "posix_fallocate", failing, create=True),
            ):
                self.write(0, (0, b"a" * 300))
                self.write(0, (300, b"b" * number))
            self.assertEqual(self.shares(), {0: b"a" * 300 + b"b" * number})
            self.write(0, new_length=0)

    @contextmanager
    def disk_with_room_for(self, pieces: int) -> Iterator[list[tuple[int, int]]]:
        """Let so many pieces be set aside, and make files longer for one more, as the system's may."""
        allocated: list[tuple[int, int]] = []

        def allocate(fd: int, offset: int, length: int) -> None:
            if os.fstat(fd).st_size < offset + length:
                os.ftruncate(fd, offset + length)
            if len(allocated) == pieces:
                raise OSError(errno.ENOSPC, "full")
            allocated.append((offset, length))

        with mock.patch.object(os, "posix_fallocate", allocate, create=True):
            yield allocated

    def test_leftovers_are_overwritten_and_removed(self) -> None:
        """A copy that a killed process left bothers nobody, and goes after half an hour."""
        left = self.incoming(0, ".slot")
        left.parent.mkdir(parents=True)
        left.write_bytes(b"x" * 5000)
        self.write(0, (0, b"abc"))
        self.assertEqual(self.shares(), {0: b"abc"})
        left.write_bytes(b"x" * 5000)
        os.utime(left, (NOW, NOW))
        self.store.expire_uploads()
        self.assertTrue(left.exists())
        self.now += 1801
        self.store.expire_uploads()
        self.assertFalse(left.exists())

    def test_synced_before_the_answer(self) -> None:
        """Files are synced before their renaming, directories after it; without durability nothing is."""
        events: list[str] = []

        def note(name: str, function: Any) -> Any:
            def call(*args: Any) -> Any:
                events.append(name)
                return function(*args)

            return call

        with (
            mock.patch.object(os, "fsync", note("sync", os.fsync)),
            mock.patch.object(os, "rename", note("rename", os.rename)),
        ):
            self.write(0, (0, b"abc"))
            self.assertEqual(events, ["sync", "rename", "sync", "sync", "sync"])
            events.clear()
            self.write(0, (0, b"abd"))
            self.assertEqual(events, ["sync", "rename", "sync"])
            events.clear()
            self.durable = False
            self.write(0, (0, b"abe"))
            self.assertEqual(events, ["rename"])


class HostileTests(SlotTestCase):
    """What clients should not ask for."""

    def test_impossible_vectors_are_refused(self) -> None:
        """Numbers, offsets and counts out of range are the caller's mistake; nothing is written."""
        for changes in (
            {256: ShareChange()},
            {-1: ShareChange()},
            {0: ShareChange((), ((-1, b"x"),))},
            {0: ShareChange((), ((1 << 63, b"x"),))},
            {0: ShareChange((), ((69105 * 10**12, b"x"),))},
            {0: ShareChange((), (), -1)},
            {0: ShareChange(((-1, 1, b""),))},
            {0: ShareChange(((0, -1, b""),))},
            {0: ShareChange(((0, 1, b""),) * (MAX_CALL_VECTORS + 1))},
        ):
            self.assertRaises(UsageError, self.change, changes)
        for reads in ([(-1, 1)], [(0, -1)], [(0, 1)] * 5000):
            self.assertRaises(UsageError, self.change, {}, reads)
            self.assertRaises(UsageError, self.store.slots.readv, SI, (), reads)
        self.assertRaises(UsageError, self.store.slots.readv, b"short", (), [])
        self.assertFalse(self.root.exists())

    def test_huge_numbers_take_no_memory(self) -> None:
        """Reads, tests and cuts far beyond the end cost nothing; a hole is as large as the disk, at most."""
        self.write(0, (0, b"abc"), new_length=(1 << 64) - 1)
        far = (1 << 64) - 1
        result = self.change({0: ShareChange(((far, far, b""), (0, far, b"abc")))}, [(far, far)])
        self.assertEqual(result, SlotResult(True, {0: (b"",)}))
        self.free = 1 << 20
        self.assertRaises(NoSpace, self.write, 0, (1 << 40, b"x"))
        self.assertRaises(NoSpace, self.write, 1, (1 << 40, b"x"))
        self.assertEqual(self.shares(), {0: b"abc"})

    def test_answers_are_bounded(self) -> None:
        """Reading the same large share many times at once is refused before anything is read."""
        self.write(0, (0, b"x" * 1000))
        with mock.patch.object(slots, "MAX_READ_BYTES", 2999):
            self.assertRaises(ServerRefused, self.change, {}, [(0, 1000)] * 3)
            self.assertRaises(ServerRefused, self.store.slots.readv, SI, (), [(0, 1000)] * 3)
            self.assertTrue(self.change({}, [(0, 1000)] * 2).success)

    def test_write_enablers_of_wrong_length_make_no_share(self) -> None:
        """It would be padded in the container, and then never match again."""
        secrets = SlotSecrets(SECRETS.lease, b"short")
        self.assertRaises(UsageError, self.change, {0: ShareChange()}, (), secrets)
        self.assertFalse(self.final(0).parent.exists())

    def test_damaged_containers_are_refused(self) -> None:
        """A truncated or absurd container is neither read nor written."""
        self.write(0, (0, b"abc"))
        good = self.file(0)
        absurd = good[:92] + b"\xff" * 8 + good[100:]
        many = good[:-4] + b"\xff" * 4
        self.final(0).write_bytes(many)
        self.assertRaises(ServerRefused, self.write, 0, (0, b"x"))
        for wrong in (good[:60], absurd):
            self.final(0).write_bytes(wrong)
            self.assertRaises(ServerRefused, self.write, 0, (0, b"x"))
            self.assertRaises(ServerRefused, self.shares)
            self.assertRaises(ServerRefused, self.store.slots.open_share, SI, 0)
            self.assertEqual(self.final(0).read_bytes(), wrong)


class StoreTests(SlotTestCase):
    """Mutable shares beside the store's other business."""

    def test_kinds_are_kept_apart(self) -> None:
        """Neither kind is listed, read or overwritten as the other."""
        self.put(0, b"immutable")
        self.write(1, (0, b"mutable"))
        slots_, store = self.store.slots, self.store
        self.assertEqual(store.list_shares(SI), {0})
        self.assertEqual(slots_.list_shares(SI), {1})
        self.assertRaises(NoSuchShare, slots_.open_share, SI, 0)
        self.assertRaises(NoSuchShare, store.open_share, SI, 1)
        self.assertRaises(ServerRefused, self.write, 0, (0, b"x"))
        self.assertEqual(store.allocate(SI, {1}, 10, SECRETS).allocated, frozenset())
        self.assertEqual(self.get(0), b"immutable")

    def test_leases_are_added_to_both_kinds(self) -> None:
        """One call leases all shares of an index; without any it fails."""
        self.assertRaises(NoSuchShare, self.store.add_lease, SI, lease(1))
        self.write(1, (0, b"mutable"))
        self.store.add_lease(SI, lease(1))
        self.assertEqual(sum(each.owner for each in all_leases(self.file(1))), 2)

    def test_expired_shares_are_collected(self) -> None:
        """A share goes when its last lease has run out, extra ones counted, and its directory with it."""
        self.write(0, (0, b"abc"))
        for client in range(5):
            self.now += 100
            self.store.add_lease(SI, lease(client))
        self.now += 2678400
        self.assertEqual(self.store.collect_garbage(), 0)
        self.now += 1
        self.assertEqual(self.store.collect_garbage(), 1)
        self.assertFalse(self.final(0).parent.exists())

    def test_shares_without_leases_are_not_collected(self) -> None:
        """Nor are damaged ones."""
        self.write(0, (0, b"abc"))
        file = bytearray(self.file(0))
        file[100:468] = bytes(368)
        self.final(0).write_bytes(file)
        self.write(1, (0, b"abc"))
        self.final(1).write_bytes(self.file(1)[:80])
        self.now += 1 << 30
        self.assertEqual(self.store.collect_garbage(), 0)

    def test_complaints_are_kept(self) -> None:
        """A complaint about a mutable share says so."""
        self.write(0, (0, b"abc"))
        self.store.advise_corrupt_share(SI, 0, "bad hash", mutable=True)
        (advisory,) = (self.root / "corruption-advisories").iterdir()
        self.assertIn("share type: mutable\n", advisory.read_text())
        advise = self.store.advise_corrupt_share
        self.assertRaises(NoSuchShare, advise, SI, 1, "bad hash", mutable=True)

    def test_a_read_only_store_changes_what_it_has(self) -> None:
        """Its shares may be changed and deleted, but no new ones are made."""
        self.write(0, (0, b"abc"))
        self.store = self.make_store(read_only=True)
        self.write(0, (0, b"abcdef"))
        self.assertRaises(NoSpace, self.write, 1, (0, b"abc"))
        self.assertEqual(self.shares(), {0: b"abcdef"})
        self.write(0, new_length=0)
        self.assertEqual(self.shares(), {})

    def test_reserved_room_is_left(self) -> None:
        """Growth needs room beyond the reserve; overwriting and deleting do not."""
        self.store = self.make_store(reserved_bytes=1000)
        self.write(0, (0, b"abc"))
        self.free = 1000
        self.write(0, (0, b"xyz"))
        self.assertRaises(NoSpace, self.write, 0, (3, b"more"))
        self.write(0, new_length=0)

    def test_a_reader_is_not_disturbed(self) -> None:
        """Who has a share open goes on reading it as it was, even if it is replaced or deleted."""
        self.write(0, (0, b"abcdef"))
        with self.store.slots.open_share(SI, 0) as reader:
            self.write(0, (0, b"ABCDEF"), new_length=2)
            self.write(0, new_length=0)
            self.assertEqual(reader.read(1, 99), b"bcdef")

    def test_writers_take_turns(self) -> None:
        """Of many that increase a counter each on what it has read, each does so exactly once."""
        self.write(0, (0, b"\0"))
        stores = [self.make_store() for _ in range(3)]
        threads = [threading.Thread(target=increase, args=(store, 20)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(self.shares(), {0: bytes([60])})
        self.assertEqual([path.name for path in self.final(0).parent.iterdir()], ["0"])
        self.assertEqual(self.final(0).parent.name, SI_TEXT)


def increase(store: ShareStore, times: int) -> None:
    """Increase a one-byte counter, by comparing and writing."""
    while times:
        ((value,),) = store.slots.readv(SI, [0], [(0, 1)]).values()
        change = ShareChange(((0, 1, value),), ((0, bytes([value[0] + 1])),))
        result = store.slots.testv_and_readv_and_writev(SI, WRITER, {0: change}, (), False)
        times -= result.success
