"""The Foolscap server's remote calls, without Foolscap between."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.core import base32
from pipegrid.disk.group_commit import GroupCommit
from pipegrid.errors import ConflictingWrite, NoSuchShare, ServerRefused, UsageError, WrongSecret
from pipegrid.server.foolscap.remote_objects import MAX_READ_BYTES, BucketWriter, FoolscapStorage
from pipegrid.server.gbs.storage_operations import MAX_COMMITS, GbsService
from pipegrid.storage.uploads import incoming_files as incoming
from pipegrid.testing.grid import InlineWorkers
from pipegrid.wire.foolscap_interfaces import PROTOCOL, unpack_version
from pipegrid.wire.gbs_cbor_bodies import MAX_MUTABLE_SHARE_BYTES
from tests.storage.support import SI, StoreTestCase
from tests.transport.foolscap_world import UncollectedClock

RENEW, CANCEL = b"r" * 32, b"c" * 32


class Canary:
    """As much of a reference to a client as the server needs."""

    def __init__(self) -> None:
        self.watchers: dict[object, Callable[[], None]] = {}

    def notifyOnDisconnect(self, call: Callable[[], None]) -> object:
        """Remember it."""
        marker = object()
        self.watchers[marker] = call
        return marker

    def dontNotifyOnDisconnect(self, marker: object) -> None:
        """Forget it."""
        del self.watchers[marker]

    def lose(self) -> None:
        """The connection is gone."""
        for call in list(self.watchers.values()):
            call()


class FoolscapStorageTests(StoreTestCase):
    """What each call does to the store."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = UncollectedClock()
        durability = GroupCommit(InlineWorkers(), self.clock, "none")
        self.service = GbsService(self.store, durability, "swissnum")
        self.storage = FoolscapStorage(self.service)
        self.canary = Canary()

    def allocate(self, numbers: set[int], share_bytes: int = 6) -> dict[int, BucketWriter]:
        """Return the writers that a client gets."""
        _, writers = self.storage.remote_allocate_buckets(
            SI, RENEW, CANCEL, numbers, share_bytes, self.canary
        )
        return writers

    def read(self, number: int) -> bytes:
        """Return a share."""
        return self.storage.remote_get_buckets(SI)[number].remote_read(0, 1000)

    def test_the_version(self) -> None:
        """It says what clients look for; mutable files are welcome."""
        answer = self.storage.remote_get_version()
        self.assertEqual(unpack_version(answer), self.store.version())
        size = answer[PROTOCOL][b"maximum-mutable-share-size"]
        self.assertEqual(size, MAX_MUTABLE_SHARE_BYTES)

    def test_holes_are_zeros(self) -> None:
        """A share is visible when it is closed, however little was written."""
        writer = self.allocate({3})[3]
        writer.remote_write(2, b"cd")
        self.assertEqual(self.storage.remote_get_buckets(SI), {})
        self.assertIsNone(self.successResultOf(writer.remote_close()))
        self.assertEqual(self.read(3), b"\0\0cd\0\0")
        self.assertEqual(self.canary.watchers, {})

    def test_numbers_that_cannot_be(self) -> None:
        """Impossible share numbers are refused in silence, like those without room."""
        self.assertEqual(set(self.allocate({-1, 0, 255, 256})), {0, 255})

    def test_the_connection_is_lost(self) -> None:
        """What was closed stays, what was not is gone, and the numbers are free again."""
        writers = self.allocate({0, 1, 2})
        writers[0].remote_write(0, b"abcdef")
        self.successResultOf(writers[0].remote_close())
        writers[1].remote_write(0, b"abcdef")
        self.canary.lose()
        self.assertEqual(set(self.storage.remote_get_buckets(SI)), {0})
        self.assertEqual(self.store.upload_count, 0)
        with self.assertRaises(NoSuchShare):
            writers[1].remote_write(0, b"abcdef")
        self.failureResultOf(writers[1].remote_close(), NoSuchShare)
        self.assertEqual(set(self.allocate({0, 1, 2})), {1, 2})

    def test_others_are_uploading(self) -> None:
        """A number that another client is uploading is not given out; when it aborts, it is."""
        first = self.allocate({0})[0]
        self.assertEqual(self.allocate({0}), {})
        first.remote_abort()
        self.assertEqual(set(self.allocate({0})), {0})
        with self.assertRaises(NoSuchShare):
            first.remote_abort()

    def test_refused_writes(self) -> None:
        """Bytes that lie outside, or conflict, are refused; with a hole in it the share is not closed."""
        writer = self.allocate({0})[0]
        writer.remote_write(0, b"ab")
        with self.assertRaises(UsageError):
            writer.remote_write(4, b"efg")
        with self.assertRaises(ConflictingWrite):
            writer.remote_write(0, b"xbcdef")
        self.failureResultOf(writer.remote_close(), UsageError)
        self.assertEqual(self.storage.remote_get_buckets(SI), {})
        self.assertEqual(self.store.upload_count, 0)

    def test_a_disk_that_fails_at_the_end(self) -> None:
        """Nobody could go on with what cannot get its name: room and number are given back."""

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "broken")

        writer = self.allocate({0})[0]
        writer.remote_write(0, b"abcdef")
        patch = self.patch(os, "rename", fail)
        self.failureResultOf(writer.remote_close(), ServerRefused)
        patch.restore()
        self.assertEqual(self.store.upload_count, 0)
        self.assertFalse(self.incoming(0).exists())
        self.assertEqual(set(self.allocate({0})), {0})

    def test_a_disk_that_fails_between_two_shares(self) -> None:
        """Of an allocation that failed nothing stays, since nobody was given a writer."""
        create = incoming.create

        def fail(path: str) -> int | None:
            if path.endswith(".1"):
                raise OSError(errno.EIO, "broken")
            return create(path)

        patch = self.patch(incoming, "create", fail)
        with self.assertRaises(ServerRefused):
            self.allocate({0, 1, 2})
        patch.restore()
        self.assertEqual(self.store.upload_count, 0)
        self.assertEqual(set(self.allocate({0, 1, 2})), {0, 1, 2})

    def test_many_commits(self) -> None:
        """A close waits while too many shares wait for the disk."""
        writer = self.allocate({0})[0]
        writer.remote_write(0, b"abcdef")
        self.service.commits = MAX_COMMITS
        closing: Deferred[None] = writer.remote_close()
        self.assertNoResult(closing)
        self.service._committed(None)
        self.successResultOf(closing)
        self.assertEqual(self.read(0), b"abcdef")

    def test_stopping(self) -> None:
        """A server that stops forgets what was not closed."""
        self.allocate({0, 1})
        self.storage.stop()
        self.assertEqual(self.store.upload_count, 0)
        self.assertEqual(self.canary.watchers, {})

    def test_reading(self) -> None:
        """Reads are cut at the end; an answer that no memory should hold is refused."""
        self.put(0, b"abcdef")
        reader = self.storage.remote_get_buckets(SI)[0]
        self.assertEqual(reader.remote_read(4, 100), b"ef")
        self.assertEqual(reader.remote_read(6, 100), b"")
        with self.assertRaises(UsageError):
            reader.remote_read(0, MAX_READ_BYTES + 1)
        self.final(0).unlink()
        with self.assertRaises(NoSuchShare) as caught:
            reader.remote_read(0, 1)
        self.assertNotIn(str(self.root), str(caught.exception))

    def test_leases_and_complaints(self) -> None:
        """Both are for shares that are there, and nothing happens where there are none."""
        self.successResultOf(self.storage.remote_add_lease(SI, RENEW, CANCEL))
        self.storage.remote_advise_corrupt_share(b"immutable", SI, 0, b"bad")
        self.storage.remote_advise_corrupt_share(b"immutable", SI, 300, b"bad")
        self.put(0, b"abcdef")
        self.successResultOf(self.storage.remote_add_lease(SI, b"R" * 32, CANCEL))
        self.assertEqual(self.final(0).stat().st_size, 12 + 6 + 2 * 72)
        self.storage.remote_get_buckets(SI)[0].remote_advise_corrupt_share(b"bad \xff")
        self.assertEqual(len(list((self.root / "corruption-advisories").iterdir())), 1)

    def test_what_clients_are_not_told(self) -> None:
        """Errors of the disk are for the log; clients learn that there was one."""
        self.put(0, b"abcdef")
        self.final(0).write_bytes(b"nonsense")
        reader = self.storage.remote_get_buckets(SI)[0]
        with self.assertRaises(ServerRefused) as caught:
            reader.remote_read(0, 1)
        self.assertNotIn("/", str(caught.exception))
        with self.assertRaises(UsageError):
            self.storage.remote_get_buckets(b"short")

    def test_slots(self) -> None:
        """A mutable share is made, tested, read and deleted; its complaints say what it is."""
        self.store.slots.node_id = b"n" * 20
        call = self.storage.remote_slot_testv_and_readv_and_writev
        secrets = (b"w" * 32, RENEW, CANCEL)
        absent = [(0, 1, b"eq", b"")]
        made = call(SI, secrets, {1: (absent, [(0, b"mutable")], None)}, [])
        self.assertEqual(self.successResultOf(made), (True, {}))
        again = call(SI, secrets, {1: (absent, [(0, b"x")], None)}, [(0, 3), (3, 100)])
        self.assertEqual(self.successResultOf(again), (False, {1: [b"mut", b"able"]}))
        for numbers, found in (([], {1: [b"ta"]}), ([1], {1: [b"ta"]}), ([2], {})):
            reading = self.storage.remote_slot_readv(SI, numbers, [(2, 2)])
            self.assertEqual(self.successResultOf(reading), found)
        self.assertEqual(self.storage.remote_get_buckets(SI), {})
        self.storage.remote_advise_corrupt_share(b"mutable", SI, 1, b"bad")
        self.assertEqual(len(list((self.root / "corruption-advisories").iterdir())), 1)
        self.assertEqual(self.successResultOf(call(SI, secrets, {}, [(0, 1)])), (True, {1: [b"m"]}))
        deleted = call(SI, secrets, {1: ([], [], 0)}, [])
        self.assertEqual(self.successResultOf(deleted), (True, {1: []}))
        self.assertEqual(self.successResultOf(self.storage.remote_slot_readv(SI, [], [])), {})

    def test_refused_slots(self) -> None:
        """A wrong write enabler is answered in the words that clients look for; odd tests are refused."""
        self.store.slots.node_id = b"n" * 20
        call = self.storage.remote_slot_testv_and_readv_and_writev
        self.successResultOf(call(SI, (b"w" * 32, RENEW, CANCEL), {1: ([], [(0, b"x")], None)}, []))
        wrong = call(SI, (b"W" * 32, RENEW, CANCEL), {1: ([], [(0, b"y")], None)}, [])
        text = str(self.failureResultOf(wrong, WrongSecret).value)
        nodeid = base32.encode(b"n" * 20)
        self.assertIn(f"The write enabler was recorded by nodeid '{nodeid}'.", text)
        self.assertNotIn(str(self.root), text)
        odd: Any = {1: ([(0, 1, b"lt", b"x")], [], None)}
        self.failureResultOf(call(SI, (b"w" * 32, RENEW, CANCEL), odd, []), UsageError)
