"""Releasing leases: whose go, when a share is removed, and what a crash leaves."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

from pipegrid.errors import NoSuchShare, ServerRefused
from pipegrid.storage import share_file
from pipegrid.storage.share_file import LEASE_BYTES, LEASE_DURATION_S, RELEASED_S
from pipegrid.storage.share_store import ShareStore
from pipegrid.wire.storage_messages import (
    LeaseSecrets,
    Released,
    ShareChange,
    SlotSecrets,
    UploadSecrets,
)
from tests.storage.support import NOW, OTHERS_SECRETS, SECRETS, SI, StoreTestCase

OURS, THEIRS = SECRETS.lease, OTHERS_SECRETS.lease
DATA = b"the bytes of a share"


def lease(number: int) -> LeaseSecrets:
    """Return the secrets of one of many clients."""
    return LeaseSecrets(b"%032d" % number, b"%032d" % (number + 1_000_000))


class ReleaseTests(StoreTestCase):
    """Shares with one lease, later with more."""

    def setUp(self) -> None:
        super().setUp()
        self.put(0, DATA)
        self.now += 100

    def release(self, secrets: LeaseSecrets = OURS, since: float | None = None) -> Released:
        """Release a client's lease; by default one that was made before now."""
        since = self.now if since is None else since
        return self.store.release_lease(SI, secrets.cancel, int(since))

    def expiries(self, number: int = 0) -> list[int]:
        """Return the expiry of each lease."""
        file = self.final(number).read_bytes()
        header = share_file.parse_header(file)
        records = share_file.parse_leases(file[share_file.leases_offset(header, len(file)) :])
        return [each.expires for each in records]

    def test_the_last_lease(self) -> None:
        """Its share is removed with its directory; again does no harm."""
        size = self.final(0).stat().st_size
        self.assertEqual(self.release(), Released(1, 0, size))
        self.assertFalse(self.final(0).parent.exists())
        self.assertEqual(self.release(), Released())
        self.put(0, DATA)
        self.assertEqual(self.get(0), DATA)

    def test_another_clients_lease(self) -> None:
        """It stays as it is, and so does the share, until that is released as well."""
        self.store.add_lease(SI, THEIRS)
        before = self.expiries()
        self.assertEqual(self.release(), Released(1))
        self.assertEqual(self.expiries(), [RELEASED_S, before[1]])
        self.assertEqual(self.get(0), DATA)
        self.assertEqual(self.release(), Released(1))
        self.now += 1
        self.assertGreater(self.release(THEIRS).freed_bytes, 0)
        self.assertEqual(self.store.list_shares(SI), frozenset())

    def test_without_the_secret(self) -> None:
        """Neither another secret nor the renew secret releases anything; nor does half of a record."""
        for secret in (THEIRS.cancel, OURS.renew, bytes(32), OURS.renew[16:] + OURS.cancel[:16]):
            self.assertEqual(self.store.release_lease(SI, secret, int(self.now)), Released())
        self.assertEqual(self.get(0), DATA)

    def test_what_was_renewed(self) -> None:
        """At the time that is given, or later."""
        self.store.add_lease(SI, OURS)
        self.assertEqual(self.release(), Released(kept=1))
        self.assertEqual(self.release(since=self.now - 50), Released(kept=1))
        self.assertEqual(self.release(since=0), Released(kept=1))
        self.assertEqual(self.release(since=self.now + 1).leases, 1)

    def test_a_clock_that_jumped(self) -> None:
        """A lease of the future counts as renewed; at worst it ends by itself."""
        self.now += 10**9
        self.store.add_lease(SI, OURS)
        self.now -= 10**9
        self.assertEqual(self.release(since=self.now + 1), Released(kept=1))

    def test_renewed_after_its_release(self) -> None:
        """The client has a lease again, with the usual end."""
        self.store.add_lease(SI, THEIRS)
        self.release()
        self.store.add_lease(SI, OURS)
        self.assertEqual(self.expiries()[0], int(self.now) + LEASE_DURATION_S)
        self.now += 1
        self.release(THEIRS)
        self.assertEqual(self.get(0), DATA)

    def test_an_expired_lease_of_another_client(self) -> None:
        """Counts: whether such a share is removed is the operator's choice."""
        self.store.add_lease(SI, THEIRS)
        self.now += 10 * LEASE_DURATION_S
        self.assertEqual(self.release(), Released(1))
        self.assertEqual(self.get(0), DATA)
        self.assertEqual(self.store.collect_garbage(), 1)

    def test_leases_that_may_be_lost(self) -> None:
        """A power cut may have taken another client's: the share stays."""
        for damage in ("zeros", "cut", "part"):
            self.put(1, DATA)
            self.store.add_lease(SI, THEIRS)
            self.now += 1
            size = self.final(1).stat().st_size
            if damage == "zeros":
                with self.final(1).open("r+b") as file:
                    file.seek(size - LEASE_BYTES)
                    file.write(bytes(LEASE_BYTES))
            else:
                os.truncate(self.final(1), size - (LEASE_BYTES if damage == "cut" else 10))
            with contextlib.suppress(ServerRefused):
                self.release()
            self.assertIn(1, self.store.list_shares(SI), damage)
            self.final(1).unlink()

    def test_killed_before_the_share_was_removed(self) -> None:
        """The next release removes it."""
        self.store.add_lease(SI, THEIRS)
        self.now += 1
        self.release()
        with mock.patch.object(os, "unlink", side_effect=OSError), self.assertRaises(ServerRefused):
            self.release(THEIRS)
        self.assertEqual(self.get(0), DATA)
        self.assertEqual(self.release(THEIRS).leases, 1)
        self.assertEqual(self.store.list_shares(SI), frozenset())

    def test_secrets_of_the_first_version(self) -> None:
        """Old containers have the secrets themselves."""
        lines = share_file.pack_header(len(DATA), 1, 1)
        lines += DATA + share_file.make_lease(1, 0, OURS, NOW).pack()
        self.final(0).write_bytes(lines)
        self.assertEqual(self.release(THEIRS), Released())
        self.assertEqual(self.release().leases, 1)
        self.assertFalse(self.final(0).exists())

    def test_a_reader(self) -> None:
        """Reads to the end what was removed meanwhile."""
        with self.store.open_share(SI, 0) as reader:
            self.release()
            self.assertEqual(reader.read(0, 100), DATA)
        self.assertRaises(NoSuchShare, self.store.open_share, SI, 0)

    def test_an_upload(self) -> None:
        """Of another share of the index, which goes on."""
        self.store.allocate(SI, {1}, 4, OTHERS_SECRETS)
        self.release()
        upload = self.store.upload(SI, 1, OTHERS_SECRETS.upload)
        upload.write(0, [b"more"])
        upload.publish()
        self.assertEqual(self.get(1), b"more")

    def test_an_allocation_at_the_same_time(self) -> None:
        """Does not report a share that is removed before its lease is renewed: it is stored again."""
        real = ShareStore._renew

        def late(store: ShareStore, *arguments: object) -> bool:
            self.release()
            return real(store, *arguments)  # type: ignore[arg-type]

        with mock.patch.object(ShareStore, "_renew", late):
            answer = self.store.allocate(SI, {0}, len(DATA), OTHERS_SECRETS)
        self.assertEqual(answer.already_have, frozenset())
        self.assertEqual(answer.allocated, frozenset({0}))

    def test_an_allocation_before(self) -> None:
        """Another client that found the share has its own lease."""
        self.store.allocate(SI, {0}, len(DATA), OTHERS_SECRETS)
        self.now += 1
        self.release()
        self.assertEqual(self.get(0), DATA)

    def test_one_damaged_share(self) -> None:
        """Does not keep the others; it is reported, and stays."""
        self.put(1, DATA)
        self.now += 1
        self.final(0).write_bytes(b"garbage")
        with self.assertRaisesRegex(ServerRefused, "cannot release the lease"):
            self.release()
        self.assertEqual(self.store.list_shares(SI), frozenset({0}))

    def test_the_quota(self) -> None:
        """What is removed is free at once."""
        store = self.make_store(quota_bytes=100_000)
        assert store.usage is not None
        store.usage.open()
        store.usage.count()
        used = store.usage.used_bytes
        freed = store.release_lease(SI, OURS.cancel, int(self.now)).freed_bytes
        self.assertEqual(store.usage.used_bytes, used - freed)
        self.assertGreater(freed, 0)


class SlotReleaseTests(StoreTestCase):
    """A mutable share, with leases in and beyond the slots of its container."""

    def setUp(self) -> None:
        super().setUp()
        self.change(b"content")
        self.now += 100

    def change(self, data: bytes, secrets: UploadSecrets = SECRETS) -> None:
        """Write the share."""
        writer = SlotSecrets(secrets.lease, b"w" * 32)
        change = {3: ShareChange((), ((0, data),))}
        self.store.slots.testv_and_readv_and_writev(SI, writer, change, ())

    def release(self, secrets: LeaseSecrets = OURS) -> Released:
        """Release a client's lease."""
        return self.store.release_lease(SI, secrets.cancel, int(self.now))

    def content(self) -> dict[int, tuple[bytes, ...]]:
        """Read the share."""
        return self.store.slots.readv(SI, (), [(0, 100)])

    def test_the_last_lease(self) -> None:
        """The share is removed."""
        self.assertEqual(self.release(THEIRS), Released())
        done = self.release()
        self.assertEqual(done.leases, 1)
        self.assertGreater(done.freed_bytes, 0)
        self.assertEqual(self.content(), {})
        self.assertFalse(self.final(3).parent.exists())

    def test_many_leases(self) -> None:
        """Each goes alone, in any order; the content stays until the last one."""
        for number in range(7):
            self.store.add_lease(SI, lease(number))
        self.now += 1
        for number in (6, 0, 3, 5, 1, 4):
            self.assertEqual(self.release(lease(number)), Released(1))
            self.assertEqual(self.release(lease(number)), Released(0))
        self.assertEqual(self.release(), Released(1))
        self.assertEqual(self.content(), {3: (b"content",)})
        self.assertGreater(self.release(lease(2)).freed_bytes, 0)
        self.assertEqual(self.content(), {})

    def test_a_place_is_used_again(self) -> None:
        """A lease takes the place of a released one, and a change of the content keeps all."""
        self.store.add_lease(SI, THEIRS)
        self.now += 1
        self.release()
        size = self.final(3).stat().st_size
        self.store.add_lease(SI, lease(1))
        self.assertEqual(self.final(3).stat().st_size, size)
        self.change(b"changed", OTHERS_SECRETS)
        self.now += 1
        self.assertEqual(self.release(lease(1)), Released(1))
        self.assertEqual(self.content(), {3: (b"changed",)})

    def test_what_was_renewed(self) -> None:
        """By a write, too."""
        self.change(b"changed")
        self.assertEqual(self.release(), Released(kept=1))
