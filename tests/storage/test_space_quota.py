"""The quota of a store: what counts, what is refused, and what the next process knows."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from typing import Any
from unittest import mock

from twisted.logger import capturedLogs, formatEvent

from pipegrid.core import base32
from pipegrid.errors import NoSpace, QuotaReached, ServerRefused
from pipegrid.storage import space_quota
from pipegrid.storage.share_file import LEASE_DURATION_S, container_bytes
from pipegrid.storage.share_store import ShareStore
from pipegrid.storage.space_quota import (
    NOTE_NAME,
    PREFIXES,
    RECOUNT_FULL_S,
    RECOUNT_S,
    STEP_BYTES,
    read_note,
    share_files,
    storage_indexes,
)
from pipegrid.wire.storage_messages import LeaseSecrets, ShareChange, SlotSecrets, UploadSecrets
from tests.storage.support import SECRETS, SI, StoreTestCase

QUOTA = 10_000
FULL_SHARE = 2416  # four of these fill the quota
SLOT_SECRETS = SlotSecrets(SECRETS.lease, b"w" * 32)


def secrets_of(letter: str) -> UploadSecrets:
    """Return the secrets of another client."""
    low, other = letter.encode() * 32, letter.swapcase().encode() * 32
    return UploadSecrets(LeaseSecrets(low, other), low)


class UsageTestCase(StoreTestCase):
    """A store with a quota, and the sum of what is on its disk."""

    def make_store(self, **options: Any) -> ShareStore:
        options.setdefault("quota_bytes", QUOTA)
        store = super().make_store(**options)
        if store.usage is not None:
            store.usage.open()
            store.count_usage()
        return store

    @property
    def used(self) -> int:
        assert self.store.usage is not None
        return self.store.usage.used_bytes

    def on_disk(self) -> int:
        """Return the length of all files of complete shares."""
        shares = str(self.root / "shares")
        return sum(
            size
            for prefix in PREFIXES
            for directory in storage_indexes(shares, prefix)
            for _, size in share_files(directory)
        )

    def slot(self, *writes: tuple[int, bytes], new_length: int | None = None) -> None:
        """Change share 0 of a mutable file."""
        change = ShareChange((), writes, new_length)
        self.store.slots.testv_and_readv_and_writev(SI[::-1], SLOT_SECRETS, {0: change}, ())

    def restart(self, **options: Any) -> None:
        """Stop the server in order, and start it again."""
        self.store.close()
        self.store = self.make_store(**options)

    def kill(self, **options: Any) -> None:
        """Start another process, as after ``kill -9``: without ``close``."""
        self.store = self.make_store(**options)


class CountTests(UsageTestCase):
    """Every change of a share changes the number, exactly."""

    def test_everything_counts(self) -> None:
        """Shares of both kinds, their growth, their leases, and their end."""
        self.assertEqual(self.used, 0)
        self.put(0, b"x" * 1000)
        self.assertEqual((self.used, self.on_disk()), (container_bytes(1000),) * 2)
        self.slot((0, b"y" * 500))
        self.slot((400, b"z" * 700))
        for letter in "abcdef":
            self.store.add_lease(SI, secrets_of(letter).lease)
            self.store.add_lease(SI[::-1], secrets_of(letter).lease)
            self.store.add_lease(SI, secrets_of(letter).lease)
        self.assertEqual(self.used, self.on_disk())
        self.slot((0, b""), new_length=0)
        self.assertEqual(self.used, self.on_disk())
        self.now += 2 * LEASE_DURATION_S
        self.assertEqual(self.store.collect_garbage(), 1)
        self.assertEqual((self.used, self.on_disk()), (0, 0))

    def test_a_whole_share_counts(self) -> None:
        """A share of a bundle never has a name before it is published."""
        self.put(0, b"x")
        share = self.store.take_whole(bytes(16), 0, b"x" * 1000, SECRETS)
        assert share is not None
        assert self.store.usage is not None
        self.assertEqual(
            self.store.usage.granted_bytes(), container_bytes(1) + container_bytes(1000)
        )
        share.publish()
        self.assertEqual(self.store.usage.granted_bytes(), self.on_disk())
        self.assertEqual(self.used, self.on_disk())

    def test_what_is_refused_counts_nothing(self) -> None:
        """A change that fails leaves the number as it was."""
        self.slot((0, b"y" * 9000))
        before = self.used
        for bad in ((0, b"y" * 20_000), (50_000, b"")):
            with self.assertRaises(QuotaReached):
                self.slot(bad)
        self.patch(space_quota, "MIN_LEASE_EXCESS_BYTES", 0)
        self.patch(space_quota, "LEASE_EXCESS_PART", 1 << 20)
        with self.assertRaises(NoSpace):
            for letter in "abcdefghijkl":
                self.store.add_lease(SI[::-1], secrets_of(letter).lease)
        self.assertGreater(self.used, before)  # of the leases, some fit
        self.assertLessEqual(self.used, QUOTA)
        self.assertEqual(self.used, self.on_disk())
        assert self.store.usage is not None
        self.assertEqual(self.store.usage.granted_bytes(), self.used)


class RefusalTests(UsageTestCase):
    """What the quota has no space for is not accepted, and all else is."""

    def test_uploads_in_flight_count(self) -> None:
        """Allocated shares count whole, before a byte has arrived."""
        allocation = self.store.allocate(SI, set(range(6)), FULL_SHARE, SECRETS)
        self.assertEqual(allocation.allocated, {0, 1, 2, 3})
        self.assertEqual(self.store.available_bytes(), 0)
        self.assertTrue(self.store.quota_refuses(1))
        for number in range(3):
            self.store.upload(SI, number, SECRETS.upload).write(0, [b"x" * FULL_SHARE])
            self.store.upload(SI, number, SECRETS.upload).publish()
        self.store.abort(SI, 3, SECRETS.upload)
        self.assertEqual(self.used, self.on_disk())
        self.assertEqual(self.store.available_bytes(), FULL_SHARE)

    def test_a_share_of_what_is_reported_fits(self) -> None:
        """The space in the version answer is what a share may take, without the bytes around it."""
        self.put(0, b"x" * 1000)
        room = self.store.version().available_bytes
        assert room is not None
        self.assertFalse(self.store.allocate(SI, {1}, room + 1, SECRETS).allocated)
        self.assertTrue(self.store.allocate(SI, {1}, room, SECRETS).allocated)

    def test_a_small_disk_is_less_than_the_quota(self) -> None:
        """Whichever is less is reported; a huge quota changes nothing."""
        self.free = 5000
        self.assertEqual(self.store.available_bytes(), 5000)
        self.restart(quota_bytes=10**33)
        self.assertEqual(self.store.available_bytes(), 5000)
        self.free = None
        self.restart()
        self.assertEqual(self.store.available_bytes(), QUOTA - container_bytes(0))

    def test_idle_uploads_give_way(self) -> None:
        """An upload that was merely allocated does not keep others out; one that is written does."""
        self.store.allocate(SI, {0}, 9000, SECRETS)
        self.now += 31 * 60
        others = self.store.allocate(bytes(16), {0}, 9000, secrets_of("a"))
        self.assertEqual(others.allocated, {0})
        self.store.upload(bytes(16), 0, b"a" * 32).write(0, [b"x" * 8000])
        self.assertFalse(self.store.allocate(SI, {0}, 9000, SECRETS).allocated)

    def test_leases_are_renewed_when_it_is_full(self) -> None:
        """What exists is kept, read and renewed."""
        self.put(0, b"x" * (QUOTA - container_bytes(0)))
        self.now += 1000
        self.store.add_lease(SI, SECRETS.lease)
        self.assertEqual(self.store.allocate(SI, {0, 1}, 10, SECRETS).already_have, {0})
        self.assertEqual(len(self.get(0)), QUOTA - container_bytes(0))

    def test_leases_may_exceed_it(self) -> None:
        """By a little between two counts, or what other clients keep would expire; also before a count."""
        self.patch(space_quota, "MIN_LEASE_EXCESS_BYTES", 200)
        self.put(0, b"x" * (QUOTA - container_bytes(0)))
        with capturedLogs() as logged:
            for letter in "ab":
                self.store.add_lease(SI, secrets_of(letter).lease)
            self.assertEqual(self.used, QUOTA + 144)
            for letter in "cd":
                with self.assertRaises(QuotaReached):
                    self.store.add_lease(SI, secrets_of(letter).lease)
                self.store.allocate(SI, {0}, 10, secrets_of(letter))
        refusals = [text for text in map(formatEvent, logged) if "leases are refused" in text]
        self.assertEqual(len(refusals), 1)
        self.assertEqual(self.used, self.on_disk())
        self.now += RECOUNT_FULL_S
        self.store.count_usage()
        self.store.add_lease(SI, secrets_of("c").lease)
        self.patch(ShareStore, "count_usage", lambda store: 0)
        self.boot = b"B" * 16
        self.kill()
        self.store.add_lease(SI, secrets_of("d").lease)
        self.assertFalse(self.store.usage is None or self.store.usage.counted)

    def test_a_lease_without_space_ends_nothing(self) -> None:
        """A share after one that cannot get this lease, but has it already, is renewed."""
        self.patch(space_quota, "MIN_LEASE_EXCESS_BYTES", 0)
        self.patch(space_quota, "LEASE_EXCESS_PART", 1 << 20)
        self.put(1, b"x" * 100)
        self.put(0, b"x" * (QUOTA - self.used - 72 - container_bytes(0)), secrets_of("a"))
        self.assertEqual(self.used, QUOTA)
        self.now += 1000
        with self.assertRaises(QuotaReached):
            self.store.add_lease(SI, SECRETS.lease)
        expiry = (int(self.now) + LEASE_DURATION_S).to_bytes(4, "big")
        self.assertEqual(
            [expiry in self.final(each).read_bytes() for each in (0, 1)], [False, True]
        )

    def test_a_refusal_is_logged_once(self) -> None:
        """Until the shares are counted again."""
        with capturedLogs() as logged:
            for _ in range(3):
                self.assertFalse(self.store.allocate(SI, {0}, QUOTA, SECRETS).allocated)
            self.assertFalse(self.store.allocate(SI, {0}, 1 << 70, SECRETS).allocated)
        refusals = [text for text in map(formatEvent, logged) if "new shares are refused" in text]
        self.assertEqual(len(refusals), 1)

    def test_a_change_beside_an_immutable_share(self) -> None:
        """The immutable share of the same number is not counted again."""
        self.put(0, b"x" * 1000)
        for change in (ShareChange((), ((0, b"y"),), None), ShareChange((), (), 0)):
            with contextlib.suppress(ServerRefused):
                self.store.slots.testv_and_readv_and_writev(SI, SLOT_SECRETS, {0: change}, ())
            self.assertEqual(self.used, self.on_disk())
            self.assertGreater(self.used, 1000)

    def test_growth_within_the_space_of_others(self) -> None:
        """Mutable shares may shrink, and be overwritten, when all is used."""
        self.slot((0, b"y" * 5000))
        self.put(0, b"x" * (QUOTA - self.used - container_bytes(0)))
        self.slot((0, b"z" * 5000))
        self.slot((0, b"short"), new_length=5)
        with self.assertRaises(QuotaReached) as refused:
            self.slot((0, b"y" * 5001))
        self.assertIn("the quota of 10 kB leaves no space", str(refused.exception))
        self.assertEqual(self.used, self.on_disk())

    def test_two_threads_never_exceed_it(self) -> None:
        """Growth that is being written is reserved: no other change takes its space meanwhile."""
        indexes = [bytes([number]) * 16 for number in range(16)]

        def grow(storage_index: bytes) -> None:
            for size in range(0, 3000, 100):
                change = ShareChange((), ((0, b"y" * size),), None)
                call = storage_index, SLOT_SECRETS, {0: change}, ()
                try:
                    self.store.slots.testv_and_readv_and_writev(*call, durable=False)
                except QuotaReached:
                    return

        threads = [threading.Thread(target=grow, args=(each,)) for each in indexes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(self.used, self.on_disk())
        self.assertLessEqual(self.used, QUOTA)
        self.assertGreater(self.used, QUOTA - 1000)


class RestartTests(UsageTestCase):
    """The next process knows what the last one knew, and never less."""

    def setUp(self) -> None:
        super().setUp()
        self.put(0, b"x" * 4000)
        self.counts = 0
        self.patch(space_quota.SpaceUsage, "_count_prefix", self._counting())

    def _counting(self) -> Any:
        real = space_quota.SpaceUsage._count_prefix

        def count(usage: space_quota.SpaceUsage, number: int) -> bool:
            self.counts += number == 0
            return real(usage, number)

        return count

    def test_a_stop_in_order(self) -> None:
        """Then nothing is counted at the start."""
        self.restart()
        self.assertEqual((self.used, self.counts), (container_bytes(4000), 0))
        with capturedLogs() as logged:
            self.restart(quota_bytes=1000)
        self.assertEqual((self.used, self.store.available_bytes()), (container_bytes(4000), 0))
        (told,) = map(formatEvent, logged)
        self.assertRegex(
            told, r"the shares in \S+ take 4.08 kB, more than the quota of 1 kB: no new"
        )
        self.restart(quota_bytes=20_000)
        self.assertEqual((self.used, self.counts), (container_bytes(4000), 0))
        self.assertFalse(self.store.quota_refuses(15_000))

    def test_a_killed_process(self) -> None:
        """Its number is taken as the highest that it may be, until the shares are counted."""
        self.patch(ShareStore, "count_usage", lambda store: 0)
        self.kill()
        assert self.store.usage is not None
        self.assertTrue(self.store.usage.counted)
        self.assertFalse(self.store.usage.exact)
        self.assertEqual(self.used, QUOTA)
        self.assertTrue(self.store.quota_refuses(1))
        with capturedLogs() as logged:
            self.store.usage.count()
        self.assertEqual(self.used, self.on_disk())
        self.assertTrue(self.store.usage.exact)
        self.assertEqual(logged, [])

    def test_a_killed_process_of_a_large_store(self) -> None:
        """It is wrong by one step at most."""
        self.restart(quota_bytes=10**15)
        self.patch(ShareStore, "count_usage", lambda store: 0)
        self.put(1, b"x" * 4000)
        self.kill(quota_bytes=10**15)
        self.assertGreaterEqual(self.used, self.on_disk())
        self.assertLessEqual(self.used, self.on_disk() + STEP_BYTES)

    def test_the_highest_number_rises_in_time(self) -> None:
        """The note is written again before its number is exceeded, not for each share."""
        self.patch(space_quota, "STEP_BYTES", 2000)
        self.restart()
        written = []
        for number in range(1, 6):
            self.put(number, b"x" * 900)
            note = read_note(self.root)
            assert note is not None
            self.assertFalse(note.exact)
            self.assertGreaterEqual(note.bytes, self.used)
            written.append(note.bytes)
        self.assertLess(len(set(written)), 4)

    def test_a_power_cut(self) -> None:
        """Without a note of this start of the machine, nothing is accepted before the shares are counted."""
        self.patch(ShareStore, "count_usage", lambda store: 0)
        self.boot = b"B" * 16
        self.kill()
        assert self.store.usage is not None
        self.assertFalse(self.store.usage.counted)
        self.assertFalse(self.store.allocate(SI, {1}, 1, SECRETS).allocated)
        self.assertIsNone(self.store.take_whole(bytes(16), 1, b"x", SECRETS))
        with self.assertRaises(QuotaReached):
            self.slot((0, b"y"))
        self.assertEqual(self.store.available_bytes(), 0)
        self.store.usage.count()
        self.assertEqual(self.used, self.on_disk())
        self.assertTrue(self.store.allocate(SI, {1}, 1, SECRETS).allocated)

    def test_damaged_notes(self) -> None:
        """Whatever the note holds, the number is right in the end."""
        self.store.close()
        path = self.root / NOTE_NAME
        good = path.read_text()
        for text in ("", "[]", "{}", "{", good[:-9], '{"bytes": -1}', "1" * 5000, "[" * 900):
            path.write_text(text)
            self.store = self.make_store()
            self.assertEqual(self.used, self.on_disk(), text)
            self.store.close()
        for before, after in (("4084", '"4084"'), ("4084", "-4084"), ("true", "1")):
            path.write_text(good.replace(before, after))
            self.assertIsNone(read_note(self.root), after)
        path.unlink()
        self.restart()
        self.assertEqual(self.used, self.on_disk())

    def test_another_program_has_used_the_directory(self) -> None:
        """A storage index that was added or removed while no server ran is noticed at the start."""
        self.store.close()
        (self.final(0)).unlink()
        self.final(0).parent.rmdir()
        self.store = self.make_store()
        self.assertEqual((self.used, self.counts), (0, 1))

    def test_a_note_that_does_not_fit(self) -> None:
        """Shares that another program has added may fill the quota: nothing is accepted before they count."""
        self.store.close()
        other = self.make_store(quota_bytes=None)
        other.allocate(bytes(16), {0}, 5900, SECRETS)
        upload = other.upload(bytes(16), 0, SECRETS.upload)
        upload.write(0, [b"x" * 5900])
        upload.publish()
        self.patch(ShareStore, "count_usage", lambda store: 0)
        self.kill()
        self.assertFalse(self.store.usage is None or self.store.usage.counted)

    def test_a_server_without_a_quota_in_between(self) -> None:
        """It removes the note, as it does not count what it changes."""
        self.store.close()
        space_quota.remove_note(self.root)
        self.assertFalse((self.root / NOTE_NAME).exists())
        self.store = self.make_store()
        self.assertEqual((self.used, self.counts), (container_bytes(4000), 1))

    def test_a_disk_that_takes_no_note(self) -> None:
        """The server works; the next one counts."""

        def refuse(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with mock.patch("pipegrid.storage.space_quota.replace_file", refuse):
            self.restart()
            self.assertFalse((self.root / NOTE_NAME).exists())
            self.put(1, b"x" * 100)
        self.kill()
        self.assertEqual((self.used, self.counts), (self.on_disk(), 2))


class RecountTests(UsageTestCase):
    """Shares are counted again, also while they change."""

    def test_shares_removed_by_hand(self) -> None:
        """An hour after something was refused, or after half a day, the space is found."""
        for number in range(4):
            self.put(number, b"x" * FULL_SHARE)
        self.final(1).unlink()
        self.now += RECOUNT_S - 1
        self.store.count_usage()
        self.assertTrue(self.store.quota_refuses(FULL_SHARE))
        self.assertFalse(self.store.allocate(SI, {9}, FULL_SHARE, SECRETS).allocated)
        self.store.count_usage()
        self.assertEqual(self.used, self.on_disk())
        self.assertTrue(self.store.allocate(SI, {9}, FULL_SHARE, SECRETS).allocated)

    def test_a_clock_that_jumps(self) -> None:
        """It causes a count too many, never one too few."""
        self.put(0, b"x" * FULL_SHARE)
        self.final(0).unlink()
        self.now -= RECOUNT_S
        self.store.count_usage()
        self.assertEqual(self.used, 0)
        self.assertFalse(self.store.usage is None or self.store.usage.is_due())
        self.assertLess(RECOUNT_FULL_S, RECOUNT_S)

    def test_shares_that_do_not_stop_to_change(self) -> None:
        """They do not hold up the count: an upper limit is used, and they are counted again."""
        self.patch(space_quota, "_MOST_TRIES", 2)
        self.put(0, b"x" * 100)
        self.store.allocate(bytes(16), {0}, 200, SECRETS)
        upload = self.store.upload(bytes(16), 0, SECRETS.upload)
        upload.write(0, [b"x" * 200])
        upload.publish()
        usage = self.store.usage
        assert usage is not None
        usage.counted, usage.used_bytes = False, 0
        usage.begin(bytes(16))
        with capturedLogs() as logged:
            self.assertTrue(usage.count())
            self.assertTrue(usage.count())
        self.assertEqual((usage.counted, usage.exact, usage.is_due()), (True, False, True))
        self.assertEqual(self.used, self.on_disk())
        warnings = [text for text in map(formatEvent, logged) if "keep changing" in text]
        self.assertEqual(len(warnings), 1)
        usage.end(bytes(16))
        self.assertTrue(usage.count())
        self.assertEqual((usage.exact, self.used), (True, self.on_disk()))

    def test_it_is_exact_while_shares_change(self) -> None:
        """Shares that come, grow and go while all are counted are counted once."""
        self.restart(quota_bytes=10**9)
        usage = self.store.usage
        assert usage is not None
        stop = threading.Event()
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                for turn in itertools.count():
                    if stop.is_set():
                        return
                    index = bytes([chance.randrange(4), 0, seed, turn % 7]) + bytes(12)
                    change = ShareChange((), ((chance.randrange(300), b"yy"),), None)
                    if not chance.randrange(4):
                        change = ShareChange((), (), 0)
                    call = index, SLOT_SECRETS, {0: change}, ()
                    self.store.slots.testv_and_readv_and_writev(*call, durable=False)
            except BaseException as error:  # the test reports it
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        counts = [usage.count() for _ in range(3)]
        stop.set()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertIn(True, counts)
        self.assertEqual(self.used, self.on_disk())

    def test_the_prefix_of_an_index_is_that_of_its_name(self) -> None:
        """Else changes during a count would be counted twice, or never."""
        for _ in range(200):
            index = os.urandom(16)
            self.assertEqual(PREFIXES[space_quota.prefix_number(index)], base32.encode(index)[:2])
