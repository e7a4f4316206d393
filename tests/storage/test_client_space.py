"""Quotas of named clients: what counts for whom, what is refused, and what the next process knows."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
from twisted.logger import capturedLogs, formatEvent

from pipegrid.errors import NoSuchShare, QuotaReached, ServerRefused
from pipegrid.storage import client_space, space_quota
from pipegrid.storage.client_space import FIRST_NUMBER, ClientQuota
from pipegrid.storage.share_file import LEASE_DURATION_S, MAX_LEASES, container_bytes
from pipegrid.storage.share_store import ShareStore
from pipegrid.storage.space_quota import RECOUNT_S
from pipegrid.wire.storage_messages import LeaseSecrets, ShareChange, SlotSecrets, UploadSecrets
from tests.storage.support import SI, StoreTestCase

ALICE, BOB = FIRST_NUMBER, (1 << 32) - 1
QUOTA = 10_000
FULL_SHARE = 2416  # four of these fill the quota
CLIENTS = (ClientQuota(ALICE, "alice", QUOTA), ClientQuota(BOB, "bob", 0))


def secrets_of(owner: int, letter: str = "") -> UploadSecrets:
    """Return the secrets of a client."""
    low = (letter or {ALICE: "a", BOB: "b", 0: "o"}[owner]).encode() * 32
    return UploadSecrets(LeaseSecrets(low, low.swapcase(), owner), low)


class ClientTestCase(StoreTestCase):
    """A store with two named clients, of whom Alice has a quota."""

    def make_store(self, **options: Any) -> ShareStore:
        store = super().make_store(**options)
        store.clients.set_clients(CLIENTS)
        store.count_usage()
        return store

    def used(self, owner: int) -> int | None:
        """Return what a client's shares take."""
        return {client.number: used for client, used, _ in self.store.clients.report()}[owner]

    def allocated(self, owner: int) -> int:
        return {client.number: held for client, _, held in self.store.clients.report()}[owner]

    def assert_used(self, alice: int, bob: int) -> None:
        """The numbers are these, and a new count finds the same."""
        self.assertEqual((self.used(ALICE), self.used(BOB)), (alice, bob))
        self.assertTrue(self.store.clients.count())
        self.assertEqual((self.used(ALICE), self.used(BOB)), (alice, bob))
        self.assertEqual((self.allocated(ALICE), self.allocated(BOB)), (0, 0))

    def slot(self, owner: int, *writes: tuple[int, bytes], new_length: int | None = None) -> None:
        """Change share 0 of a mutable file, whose write enabler all know."""
        self.store.slots.testv_and_readv_and_writev(
            SI[::-1],
            SlotSecrets(secrets_of(owner).lease, b"w" * 32),
            {0: ShareChange((), writes, new_length)},
            (),
        )

    def fill(self, owner: int = ALICE, shares: int = 4) -> None:
        """Store that many shares, which fill the quota."""
        for number in range(shares):
            self.put(number, b"x" * FULL_SHARE, secrets_of(owner))


class CountTests(ClientTestCase):
    """A share counts for each client that has a lease on it."""

    def test_one_share_of_two_clients(self) -> None:
        """It counts for both, and for one when the other has released its lease."""
        self.put(0, b"x" * 1000, secrets_of(ALICE))
        self.assert_used(container_bytes(1000), 0)
        allocation = self.store.allocate(SI, {0}, 1000, secrets_of(BOB))
        self.assertEqual(allocation.already_have, {0})
        self.assert_used(container_bytes(1000), container_bytes(1000))
        self.store.add_lease(SI, secrets_of(0).lease)
        self.assert_used(container_bytes(1000), container_bytes(1000))
        later = int(self.now) + 1
        self.assertEqual(self.store.release_lease(SI, b"A" * 32, later).leases, 1)
        self.assert_used(0, container_bytes(1000))
        self.assertEqual(self.get(0), b"x" * 1000)
        self.store.release_lease(SI, b"B" * 32, later)
        self.store.release_lease(SI, b"O" * 32, later)
        self.assert_used(0, 0)
        self.assertFalse(self.final(0).exists())

    def test_a_lease_stays_whose_it_is(self) -> None:
        """Renewing it at another address changes nothing, and needs no space."""
        self.put(0, b"x" * 1000, secrets_of(0))
        self.fill_elsewhere()
        self.now += 1000
        lease = secrets_of(0).lease._replace(owner=ALICE)
        self.store.add_lease(SI, lease)
        self.assertEqual(self.used(ALICE), 4 * container_bytes(FULL_SHARE))

    def fill_elsewhere(self) -> None:
        """Fill Alice's quota with shares of another index."""
        for number in range(4):
            self.assertIsNotNone(self.take_whole(bytes([number]) * 16, FULL_SHARE))

    def take_whole(self, storage_index: bytes, size: int, owner: int = ALICE) -> object:
        """Store a share as of a bundle; None if that is refused."""
        share = self.store.take_whole(storage_index, 0, b"x" * size, secrets_of(owner))
        if share is not None:
            self.assertEqual(self.allocated(owner), container_bytes(size))
            share.publish()
            self.assertEqual(self.allocated(owner), 0)
        return share

    def test_shares_of_bundles(self) -> None:
        """They count, and are refused beyond the quota."""
        self.put(0, b"x", secrets_of(0))  # makes the directories
        self.fill_elsewhere()
        self.assert_used(4 * container_bytes(FULL_SHARE), 0)
        self.assertIsNone(self.take_whole(b"t" * 16, 1))
        self.assertIsNotNone(self.take_whole(b"t" * 16, 1, BOB))

    def test_mutable_shares(self) -> None:
        """Growth, leases and deletion count, for all that have a lease."""
        self.slot(ALICE, (0, b"y" * 500))
        size = self.used(ALICE)
        assert size is not None
        self.assert_used(size, 0)
        self.slot(BOB, (500, b"y" * 100))
        self.assert_used(size + 100, size + 100)
        for letter in "cdefg":  # nobody pays for the leases of others
            self.store.add_lease(SI[::-1], secrets_of(0, letter).lease)
        self.assert_used(size + 100, size + 100)
        self.store.add_lease(SI[::-1], secrets_of(BOB, "h").lease)
        self.assert_used(size + 100, size + 192)
        self.store.release_lease(SI[::-1], b"A" * 32, int(self.now) + 1)
        self.assert_used(0, size + 192)
        self.slot(BOB, (0, b""), new_length=0)
        self.assert_used(0, 0)

    def test_leases_that_have_expired(self) -> None:
        """They count until the share is removed, or, where shares are removed, until the next count."""
        self.put(0, b"x" * 1000, secrets_of(ALICE))
        self.now += LEASE_DURATION_S
        self.store.add_lease(SI, secrets_of(BOB).lease)
        self.now += 1
        self.assert_used(container_bytes(1000), container_bytes(1000))
        self.store.clients.expired_before = lambda: self.now
        self.store.clients.count()
        self.assert_used(0, container_bytes(1000))
        self.now += 2 * LEASE_DURATION_S
        self.assertEqual(self.store.collect_garbage(), 1)
        self.assert_used(0, 0)

    def test_damage(self) -> None:
        """A damaged share counts for nobody, and does not prevent counting the others."""
        self.fill(shares=2)
        self.final(0).write_bytes(b"")
        self.store.clients.count()
        self.assert_used(container_bytes(FULL_SHARE), 0)

    def test_changes_while_all_are_counted(self) -> None:
        """Whatever changes before, between and after what is counted, the number is exact."""
        rng = random.Random(48)
        indexes = [rng.randbytes(16) for _ in range(20)] + [bytes([8]) * 16, bytes([8]) * 15 + b"9"]
        listed = space_quota.storage_indexes
        count_one = client_space.ClientUsage._count_one

        def change() -> None:
            index, owner = rng.choice(indexes), rng.choice((ALICE, BOB, 0))
            with contextlib.suppress(ServerRefused, NoSuchShare):
                if rng.random() < 0.3:
                    self.store.release_lease(
                        index, secrets_of(owner).lease.cancel, int(self.now) + 1
                    )
                elif rng.random() < 0.5:
                    self.store.add_lease(index, secrets_of(owner).lease)
                else:
                    share = self.store.take_whole(index, 0, b"x" * 100, secrets_of(owner))
                    if share is not None:
                        share.publish()

        def count_with_changes(usage: Any, index: bytes) -> None:
            change()
            count_one(usage, index)
            change()

        def list_with_changes(shares: str, prefix: str) -> list[str]:
            found = listed(shares, prefix)
            if rng.random() < 0.2:
                change()
            return found

        self.store.clients.set_clients([attrs.evolve(each, quota_bytes=0) for each in CLIENTS])
        self.put(0, b"x", secrets_of(0))  # makes the directories
        self.patch(time, "sleep", lambda _: None)
        for _ in range(8):
            with (
                mock.patch.object(client_space, "storage_indexes", list_with_changes),
                mock.patch.object(client_space.ClientUsage, "_count_one", count_with_changes),
            ):
                self.assertTrue(self.store.clients.count())
            counted = self.used(ALICE), self.used(BOB)
            self.assertGreater(sum(each or 0 for each in counted), 0)
            self.store.clients.count()
            self.assertEqual((self.used(ALICE), self.used(BOB)), counted)


class RefusalTests(ClientTestCase):
    """What exceeds a client's quota is refused, for that client alone."""

    def test_exactly(self) -> None:
        """The last byte fits, and one more does not; others store on."""
        self.fill(shares=3)
        left = QUOTA - 3 * container_bytes(FULL_SHARE)
        self.assertEqual(self.store.available_bytes(ALICE), left)
        self.assertGreater(self.store.available_bytes(BOB) or 0, 1 << 30)
        self.assertGreater(self.store.available_bytes() or 0, 1 << 30)
        fits = left - container_bytes(0)
        with capturedLogs() as logged:
            for _ in range(2):
                self.assertEqual(
                    self.store.allocate(SI, {9}, fits + 1, secrets_of(ALICE)).allocated, set()
                )
        (line,) = map(formatEvent, logged)
        self.assertEqual(
            line, "the quota of 10 kB of the client alice is used up: its new shares are refused"
        )
        self.assertTrue(self.store.quota_refuses(fits + 1, ALICE))
        self.assertFalse(self.store.quota_refuses(fits + 1, BOB))
        self.assertFalse(self.store.quota_refuses(fits + 1))
        self.put(9, b"z" * fits, secrets_of(ALICE))
        self.assert_used(QUOTA, 0)
        self.put(10, b"z" * 100_000, secrets_of(BOB))

    def test_two_uploads_at_once(self) -> None:
        """What is allocated is taken, however much of it has come."""
        half = QUOTA // 2
        self.assertTrue(self.store.allocate(SI, {0}, half, secrets_of(ALICE)).allocated)
        self.assertFalse(self.store.allocate(SI, {1}, half, secrets_of(ALICE, "A")).allocated)
        self.assertEqual(self.allocated(ALICE), container_bytes(half))
        self.store.abort(SI, 0, secrets_of(ALICE).upload)
        self.assertTrue(self.store.allocate(SI, {1}, half, secrets_of(ALICE, "A")).allocated)

    def test_in_the_middle_of_an_allocation(self) -> None:
        """As many shares are allocated as fit."""
        found = self.store.allocate(SI, set(range(9)), FULL_SHARE, secrets_of(ALICE))
        self.assertEqual(found.allocated, {0, 1, 2, 3})

    def test_idle_uploads_give_way(self) -> None:
        """Those of the client itself, after five minutes, and no other's."""
        self.store.allocate(SI, {8}, QUOTA, secrets_of(BOB))
        self.store.allocate(SI, {0, 1, 2, 3}, FULL_SHARE, secrets_of(ALICE))
        self.now += 299
        asked = bytes(16), {0}, FULL_SHARE, secrets_of(ALICE)
        self.assertFalse(self.store.allocate(*asked).allocated)
        self.store.upload(SI, 0, secrets_of(ALICE).upload).write(0, [b"x"])
        self.now += 1
        self.assertTrue(self.store.allocate(*asked).allocated)
        self.assertEqual(self.store.upload_count, 5)
        self.assertEqual(self.allocated(ALICE), 4 * container_bytes(FULL_SHARE))
        self.store.upload(SI, 8, secrets_of(BOB).upload)

    def test_what_another_has_stored(self) -> None:
        """With a full quota it is not taken for one's own: another server takes the share."""
        self.fill(BOB, 5)
        self.store.allocate(SI, {0}, FULL_SHARE, secrets_of(ALICE))
        self.assertEqual(self.used(ALICE), QUOTA)
        before = self.final(4).read_bytes()
        found = self.store.allocate(SI, {4}, FULL_SHARE, secrets_of(ALICE))
        self.assertEqual((found.already_have, found.allocated), ({0, 1, 2, 3}, set()))
        self.assertEqual(self.final(4).read_bytes(), before)
        with self.assertRaises(QuotaReached):
            self.store.add_lease(SI, secrets_of(ALICE).lease)
        self.now += 1000  # those that are there were renewed, and are now, in spite of the error
        with self.assertRaises(QuotaReached):
            self.store.add_lease(SI, secrets_of(ALICE).lease)
        self.assertEqual(self.final(4).read_bytes(), before)
        self.assertGreater(self.final(0).read_bytes()[-4:], before[-4:])

    def test_mutable_shares(self) -> None:
        """Growth is refused, and a first lease on another's; the share stays as it was."""
        self.slot(BOB, (0, b"b" * 3000))
        self.fill(shares=3)
        path = Path(self.store.slots._directory_of(SI[::-1])) / "0"
        before = path.read_bytes()
        for refused in (
            lambda: self.store.add_lease(SI[::-1], secrets_of(ALICE).lease),
            lambda: self.slot(ALICE, (0, b"a")),
            lambda: self.slot(ALICE, (3000, b"a")),
        ):
            with self.assertRaises(QuotaReached):
                refused()
            self.assertEqual(path.read_bytes(), before)
        self.slot(BOB, (3000, b"b" * 100_000))
        self.store.slots.testv_and_readv_and_writev(
            b"m" * 16,
            SlotSecrets(secrets_of(ALICE).lease, b"w" * 32),
            {0: ShareChange((), ((0, b"a" * 1000),), None)},
            (),
        )
        with self.assertRaises(QuotaReached):
            self.store.slots.testv_and_readv_and_writev(
                b"m" * 16,
                SlotSecrets(secrets_of(ALICE).lease, b"w" * 32),
                {0: ShareChange((), ((1000, b"a" * 5000),), None)},
                (),
            )

    def test_a_lease_that_was_released(self) -> None:
        """Renewing it is asking for a lease anew: otherwise each could be released, and all renewed."""
        others = [bytes([number]) * 16 for number in range(3)]
        for index in others:
            self.put_at(index, BOB, QUOTA // 2)
        for index in others:
            self.store.add_lease(index, secrets_of(ALICE).lease)
            self.store.release_lease(index, b"A" * 32, int(self.now) + 1)
        self.assert_used(0, 3 * container_bytes(QUOTA // 2))
        self.store.add_lease(others[0], secrets_of(ALICE).lease)
        for index in others[1:]:
            with self.assertRaises(QuotaReached):
                self.store.add_lease(index, secrets_of(ALICE).lease)
            asked = self.store.allocate(index, {0}, QUOTA // 2, secrets_of(ALICE))
            self.assertEqual((asked.already_have, asked.allocated), (set(), set()))
        self.store.add_lease(others[1], secrets_of(BOB).lease)
        self.assert_used(container_bytes(QUOTA // 2), 3 * container_bytes(QUOTA // 2))

    def put_at(self, storage_index: bytes, owner: int, size: int) -> None:
        """Store share 0 of an index."""
        secrets = secrets_of(owner)
        self.store.allocate(storage_index, {0}, size, secrets)
        upload = self.store.upload(storage_index, 0, secrets.upload)
        upload.write(0, [b"x" * size])
        upload.publish()

    def test_a_share_with_all_the_leases_it_may_have(self) -> None:
        """A lease in the place of an expired one counts like any other."""
        self.put_at(SI, BOB, QUOTA)
        for number in range(MAX_LEASES - 1):
            one = bytes([number]) * 32
            self.store.add_lease(SI, LeaseSecrets(one, one))
        self.now += LEASE_DURATION_S + 1
        with self.assertRaises(QuotaReached):
            self.store.add_lease(SI, secrets_of(ALICE).lease)
        self.assert_used(0, container_bytes(QUOTA))

    def test_leases_that_have_expired(self) -> None:
        """Where they do not count, they are new ones; elsewhere they are renewed, whatever the quota."""
        self.put(0, b"x" * FULL_SHARE, secrets_of(ALICE))
        self.slot(ALICE, (0, b"y" * 1000))
        for index in (SI, SI[::-1]):
            self.store.add_lease(index, secrets_of(BOB).lease)
        self.now += LEASE_DURATION_S + 1
        full = QUOTA - (self.used(ALICE) or 0) - container_bytes(0)
        self.put_at(b"f" * 16, ALICE, full)
        self.assertEqual(self.used(ALICE), QUOTA)
        for index in (SI, SI[::-1]):
            self.store.add_lease(index, secrets_of(ALICE).lease)
        self.now += LEASE_DURATION_S + 1
        self.store.clients.expired_before = lambda: self.now
        self.store.clients.count()
        self.assertEqual(self.used(ALICE), 0)
        self.put_at(b"g" * 16, ALICE, QUOTA - container_bytes(0))
        for index in (SI, SI[::-1]):
            with self.assertRaises(QuotaReached):
                self.store.add_lease(index, secrets_of(ALICE).lease)
        with self.assertRaises(QuotaReached):
            self.slot(ALICE, (0, b"z"))
        self.assert_used(QUOTA, 0)

    def test_a_client_that_is_removed(self) -> None:
        """Nothing more is accepted from it, even if a request is under way."""
        self.fill(shares=1)
        self.store.clients.set_clients(CLIENTS[1:])
        self.assertFalse(self.store.allocate(SI, {1}, 1, secrets_of(ALICE)).allocated)
        self.assertEqual(self.store.available_bytes(ALICE), 0)
        self.assertEqual(self.get(0), b"x" * FULL_SHARE)


class NextProcessTests(ClientTestCase):
    """Nothing is recorded but the leases, so nothing can be wrong after a crash."""

    def test_after_a_restart_or_kill(self) -> None:
        """The next process counts the same; what was in flight counts as allocated."""
        self.fill(shares=2)
        self.store.allocate(SI, {2}, FULL_SHARE, secrets_of(ALICE))
        upload = self.store.upload(SI, 2, secrets_of(ALICE).upload)
        upload.write(0, [b"x" * 1000])
        upload.checkpoint()
        for ends in (lambda: self.store.release(), self.store.close):  # as if it was killed
            ends()
            self.store = self.make_store()
            self.assertEqual(self.store.adopt_leftovers(), 1)
            self.assertEqual(self.used(ALICE), 2 * container_bytes(FULL_SHARE))
            self.assertEqual(self.allocated(ALICE), container_bytes(FULL_SHARE))
            refused = self.store.allocate(bytes(16), {0}, 2 * FULL_SHARE, secrets_of(ALICE))
            self.assertFalse(refused.allocated)
        self.assertTrue(self.store.allocate(SI, {2}, FULL_SHARE, secrets_of(ALICE)).allocated)
        upload = self.store.upload(SI, 2, secrets_of(ALICE).upload)
        self.assertEqual(upload.required(), ((1000, FULL_SHARE),))
        upload.write(1000, [b"x" * (FULL_SHARE - 1000)])
        upload.publish()
        self.assert_used(3 * container_bytes(FULL_SHARE), 0)

    def test_an_upload_that_was_complete(self) -> None:
        """It has space only if it still fits: nothing was kept for it."""
        self.store.allocate(SI, {0}, QUOTA // 2, secrets_of(ALICE))
        upload = self.store.upload(SI, 0, secrets_of(ALICE).upload)
        upload.write(0, [b"x" * (QUOTA // 2)])
        upload.checkpoint()
        self.store.close()
        self.store = self.make_store()
        self.assertEqual(self.store.adopt_leftovers(), 0)
        self.store.allocate(bytes(16), {0}, QUOTA // 2, secrets_of(ALICE, "A"))
        with self.assertRaises(QuotaReached):
            self.store.upload(SI, 0, secrets_of(ALICE).upload)
        self.store.abort(bytes(16), 0, secrets_of(ALICE, "A").upload)
        self.store.upload(SI, 0, secrets_of(ALICE).upload).publish()
        self.assert_used(container_bytes(QUOTA // 2), 0)

    def test_abort_without_space(self) -> None:
        """What another process has left can be aborted although there is no space to resume it."""
        self.store.allocate(SI, {0}, QUOTA // 2, secrets_of(ALICE))
        upload = self.store.upload(SI, 0, secrets_of(ALICE).upload)
        upload.write(0, [b"x" * 1000])
        upload.checkpoint()
        self.store.release()
        self.store = self.make_store()  # one of two processes: it counts no leftovers
        self.store.allocate(bytes(16), {0}, QUOTA // 2, secrets_of(ALICE, "A"))
        with self.assertRaises(QuotaReached):
            self.store.upload(SI, 0, secrets_of(ALICE).upload)
        self.store.abort(SI, 0, secrets_of(ALICE).upload)
        with self.assertRaises(NoSuchShare):
            self.store.abort(SI, 0, secrets_of(ALICE).upload)
        self.assertEqual(self.allocated(ALICE), container_bytes(QUOTA // 2))

    def test_before_it_has_counted(self) -> None:
        """Clients with a quota store nothing, and others do; a new client is counted first, too."""
        store = StoreTestCase.make_store(self)
        store.clients.set_clients(CLIENTS)
        self.assertFalse(store.allocate(SI, {0}, 1, secrets_of(ALICE)).allocated)
        self.assertTrue(store.quota_refuses(1, ALICE))
        self.assertEqual(store.available_bytes(ALICE), 0)
        self.assertTrue(store.allocate(SI, {1}, 1, secrets_of(0)).allocated)
        store.count_usage()
        self.assertTrue(store.allocate(SI, {0}, 1, secrets_of(ALICE)).allocated)
        self.assertFalse(store.clients.is_due())
        more = ClientQuota(FIRST_NUMBER + 7, "carol", QUOTA)
        store.clients.set_clients((*CLIENTS, more))
        self.assertTrue(store.clients.is_due())
        self.assertEqual(store.clients.left_bytes(more.number), 0)
        store.count_usage()
        self.assertEqual(store.clients.left_bytes(more.number), QUOTA)

    def test_what_is_removed_by_hand(self) -> None:
        """It is found by the next count."""
        self.fill()
        self.final(0).unlink()
        self.store.count_usage()
        self.assertEqual(self.used(ALICE), 4 * container_bytes(FULL_SHARE))
        self.now += RECOUNT_S
        self.store.count_usage()
        self.assertEqual(self.used(ALICE), 3 * container_bytes(FULL_SHARE))
