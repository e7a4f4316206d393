"""Shares that come whole: what is seen of them, and what else may happen to the same share meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from pipegrid.errors import ConflictingWrite, NoSuchShare, ServerRefused, WrongSecret
from pipegrid.storage import share_file
from pipegrid.storage.share_store import ShareStore
from pipegrid.storage.uploads import incoming_share
from pipegrid.storage.uploads.incoming_share import IncomingShare, WholeShare
from pipegrid.testing.grid import abandon_store
from pipegrid.wire.storage_messages import Allocation, UploadSecrets
from tests.descriptors import open_files
from tests.storage.support import OTHERS_SECRETS, SECRETS, SI, StoreTestCase

OTHER_SI = bytes(16)


class WholeTestCase(StoreTestCase):
    """A store that has had a share of another index, so that its directories are there."""

    def setUp(self) -> None:
        super().setUp()
        self.store.allocate(OTHER_SI, {0}, 1, SECRETS)
        upload = self.store.upload(OTHER_SI, 0, SECRETS.upload)
        upload.write(0, [b"x"])
        upload.publish()
        self.before = self.names()
        self.open_before = open_files()

    def names(self) -> set[str]:
        """Return all names below the storage directory."""
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*")}

    def take(
        self,
        data: bytes = b"whole",
        number: int = 3,
        secrets: UploadSecrets = SECRETS,
        store: ShareStore | None = None,
    ) -> IncomingShare:
        """Bring a share whole; it must be taken so."""
        share = (store or self.store).take_whole(SI, number, data, secrets)
        assert isinstance(share, WholeShare)
        return share

    def take_or_not(self, number: int) -> IncomingShare | None:
        """Bring a share whole, which need not be taken so."""
        return self.store.take_whole(SI, number, b"whole", SECRETS)

    def check_nothing_left(self) -> None:
        """Check that no name and no open file has come, and that the store counts no upload."""
        self.assertEqual(self.names(), self.before)
        self.assertEqual(open_files(), self.open_before)
        self.assertEqual(self.store.upload_count, 0)

    def check_long_way(self, take: Callable[[], IncomingShare | None]) -> None:
        """Check that a share is not taken in one move, and that nothing is done about it."""
        before, opened, count = self.names(), open_files(), self.store.upload_count
        self.assertIsNone(take())
        self.assertEqual((self.names(), open_files()), (before, opened))
        self.assertEqual(self.store.upload_count, count)


class LifeTests(WholeTestCase):
    """From its coming to its name."""

    def test_no_name_before_it_is_published(self) -> None:
        """Not even in ``incoming``; then it is the container that an upload in steps makes."""
        share = self.take()
        self.assertTrue(share.complete)
        self.assertEqual(share.required(), ())
        self.assertEqual(self.names(), self.before)
        self.assertEqual(self.store.list_shares(SI), frozenset())
        changed = share.publish()
        self.assertEqual(len(changed), 3)
        self.assertEqual(self.get(3), b"whole")
        lease = share_file.make_lease(2, share_file.OWNER_ALLOCATE, SECRETS.lease, self.now)
        stored = self.final(3).read_bytes()
        self.assertEqual(stored, share_file.pack_header(5, 1) + b"whole" + lease.pack())
        self.assertEqual((open_files(), self.store.upload_count), (self.open_before, 0))

    def test_nothing_is_left_of_what_is_given_up(self) -> None:
        """Discarded, let go of by a store that is closed, or held by a process that is killed."""
        ends: list[Callable[[IncomingShare], object]] = [
            lambda share: share.discard(),
            lambda _: self.store.close(),
            lambda _: abandon_store(self.store),
        ]
        for end in ends:
            share = self.take()
            end(share)
            self.assertEqual((self.names(), open_files()), (self.before, self.open_before))
            self.store = self.make_store()
        share = self.take()
        share.discard()
        self.assertRaises(NoSuchShare, share.publish)
        self.check_nothing_left()

    def test_its_device_is_known(self) -> None:
        """The thread that syncs asks the system for nothing: each call competes for the GIL there."""
        share = self.take()
        with mock.patch.object(os, "fstat", side_effect=AssertionError):
            self.assertEqual(share.device, self.root.stat().st_dev)
        share.discard()

    def test_it_stays_open(self) -> None:
        """Closed it would be gone; nobody is to go on with it, so there is nothing to note."""
        share = self.take()
        self.assertFalse(share.suspend())
        self.assertFalse(share.suspend(unpublished=True))
        share.checkpoint()
        self.store.release()
        self.assertTrue(share.is_open)
        self.assertEqual(self.names(), self.before)
        share.publish()

    def test_a_disk_that_cannot_name_it(self) -> None:
        """The client is told, and nothing is left."""
        share = self.take()
        with mock.patch("os.link", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
            error = self.assertRaises(ServerRefused, share.publish)
        another = self.store.take_whole(b"another index..."[:16], 3, b"whole", SECRETS)
        assert another is not None, "the disk may be well again"
        another.discard()
        self.assertIn("cannot finish share 3", str(error))
        self.assertEqual((open_files(), self.store.upload_count), (self.open_before, 0))
        self.assertFalse(self.final(3).exists())

    def test_a_directory_that_vanishes(self) -> None:
        """A collector of garbage may remove it before the share is in it."""
        share = self.take()
        real = os.link
        removed: list[str] = []

        def link(source: str, path: str, **options: Any) -> None:
            if not removed:
                removed.append(os.path.dirname(path))
                os.rmdir(removed[0])
            real(source, path, **options)

        with mock.patch("os.link", link):
            share.publish()
        self.assertEqual(self.get(3), b"whole")


class OthersTests(WholeTestCase):
    """The same share, of somebody else or once more."""

    def test_once_more_under_the_same_secret(self) -> None:
        """Who has lost an answer asks again, and finds an upload that is complete."""
        share = self.take()
        self.check_long_way(partial(self.take_or_not, 3))
        allocation = self.store.allocate(SI, {3}, 5, SECRETS)
        self.assertEqual(allocation, Allocation(frozenset(), frozenset({3})))
        again = self.store.upload(SI, 3, SECRETS.upload)
        self.assertIs(again, share)
        again.write(0, [b"wh", b"ole"])
        self.assertTrue(again.complete)
        self.assertRaises(ConflictingWrite, again.write, 0, [b"wrong"])
        self.assertRaises(ServerRefused, again.write, 0, [b"too long"])
        share.publish()
        self.assertEqual(self.get(3), b"whole")

    def test_under_another_secret(self) -> None:
        """It is refused until the share is there, and does not disturb it."""
        share = self.take()
        self.check_long_way(lambda: self.store.take_whole(SI, 3, b"other", OTHERS_SECRETS))
        allocation = self.store.allocate(SI, {3}, 5, OTHERS_SECRETS)
        self.assertEqual(allocation, Allocation(frozenset(), frozenset()))
        self.assertRaises(WrongSecret, self.store.upload, SI, 3, OTHERS_SECRETS.upload)
        self.assertRaises(NoSuchShare, self.store.abort, SI, 3, SECRETS.upload)
        share.publish()
        allocation = self.store.allocate(SI, {3}, 5, OTHERS_SECRETS)
        self.assertEqual(allocation.already_have, {3})

    def test_another_number_of_the_index(self) -> None:
        """Two of one index, both taken before the first is published."""
        first, second = self.take(b"third", 3), self.take(b"fourth", 4)
        first.publish()
        second.publish()
        self.assertEqual((self.get(3), self.get(4)), (b"third", b"fourth"))
        self.check_long_way(lambda: self.store.take_whole(SI, 5, b"fifth", SECRETS))

    def test_two_processes_both_whole(self) -> None:
        """The first one's share and lease stay; the other is told that its upload is gone."""
        other = self.make_store()
        mine, theirs = self.take(), self.take(secrets=OTHERS_SECRETS, store=other)
        mine.publish()
        stored = self.final(3).read_bytes()
        self.assertRaises(NoSuchShare, theirs.publish)
        self.assertEqual(self.final(3).read_bytes(), stored)
        self.assertEqual((open_files(), other.upload_count), (self.open_before, 0))

    def test_two_processes_one_in_steps(self) -> None:
        """Whichever number of an allocation it is: a share that has come is never replaced."""
        self.take(number=9).discard()  # what is unfinished was looked at
        other = self.make_store()
        other.allocate(SI, {3, 4}, 5, OTHERS_SECRETS)
        uploads = [other.upload(SI, number, OTHERS_SECRETS.upload) for number in (3, 4)]
        for upload in uploads:
            upload.write(0, [b"theirs"[:5]])
        for share in [self.take(number=number) for number in (3, 4)]:
            share.publish()
        stored = [self.final(number).read_bytes() for number in (3, 4)]
        for upload in uploads:
            self.assertRaises(NoSuchShare, upload.publish)
        self.assertEqual([self.final(number).read_bytes() for number in (3, 4)], stored)
        self.assertEqual(open_files(), self.open_before)


class LongWayTests(WholeTestCase):
    """When it has to be uploaded in steps."""

    def test_shares_that_are_there(self) -> None:
        """Their leases are to be renewed, and the client is told of them."""
        self.put(1, b"first")
        self.check_long_way(lambda: self.store.take_whole(SI, 1, b"first", SECRETS))
        self.check_long_way(partial(self.take_or_not, 3))

    def test_an_upload_that_goes_on(self) -> None:
        """Begun before, in steps."""
        self.store.allocate(SI, {3}, 5, SECRETS)
        self.check_long_way(partial(self.take_or_not, 3))

    def test_what_others_have_left(self) -> None:
        """It is gone on with, and so goes away; however much there is of it."""
        for number, most in ((3, 4096), (4, 0)):
            dead = self.make_store()
            dead.allocate(SI, {number}, 5, SECRETS)
            upload = dead.upload(SI, number, SECRETS.upload)
            upload.write(0, [b"wh"])
            upload.checkpoint()
            abandon_store(dead)
            self.patch(incoming_share, "MAX_LEFT", most)
            self.store = self.make_store()
            self.check_long_way(partial(self.take_or_not, number))
            self.take(number=9).discard()  # which nobody has left
            self.put(number, b"whole")
            self.final(number).unlink()
            self.final(number).parent.rmdir()
            self.assertEqual(os.listdir(self.root / "shares/incoming"), [])

    def test_no_room(self) -> None:
        """Others may have to make some; and a server that takes no shares takes these neither."""
        self.free = 4
        self.now += 1  # where there is plenty of room, it is looked at once a second
        self.check_long_way(partial(self.take_or_not, 3))
        self.free = None
        for store in (self.make_store(max_uploads=0), self.make_store(read_only=True)):
            self.check_long_way(partial(store.take_whole, SI, 3, b"whole", SECRETS))

    def test_a_disk_that_fails(self) -> None:
        """It is tried once more in steps, which say what is wrong."""
        self.take(number=9).discard()
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for name in ("open", "pwritev", "fstat"):
            with mock.patch(f"os.{name}", side_effect=full):
                self.check_long_way(partial(self.take_or_not, 3))

    def test_a_disk_that_fails_at_first(self) -> None:
        """What the very first share meets says nothing of the others."""
        for number in (errno.ENOSPC, errno.EMFILE):
            for name in ("open", "link"):
                with mock.patch(f"os.{name}", side_effect=OSError(number, os.strerror(number))):
                    self.check_long_way(lambda: self.store.take_whole(SI, 3, b"whole", SECRETS))
        self.take().discard()
        self.check_nothing_left()

    def test_a_file_system_without_such_files(self) -> None:
        """It is asked once."""
        asked: list[str] = []

        def can_name(directory: str) -> bool:
            asked.append(directory)
            return False

        with mock.patch("pipegrid.storage.uploads.incoming_share.can_name", can_name):
            for _ in range(2):
                self.check_long_way(partial(self.take_or_not, 3))
        self.assertEqual(len(asked), 1)
        self.check_long_way(partial(self.take_or_not, 3))

    def test_names_that_are_forbidden(self) -> None:
        """One share is lost, and its client told; from then on all go the long way."""
        share = self.take()
        forbidden = OSError(errno.EPERM, os.strerror(errno.EPERM))
        with mock.patch("os.link", side_effect=forbidden):
            self.assertRaises(ServerRefused, share.publish)
        self.check_long_way(partial(self.take_or_not, 3))
        self.put(3, b"whole")
        self.assertEqual(self.get(3), b"whole")

    def test_a_new_directory(self) -> None:
        """The first share of all makes ``incoming`` in steps; the second need not."""
        self.root = self.root / "new"
        store = self.make_store()
        self.assertIsNone(store.take_whole(SI, 3, b"whole", SECRETS))
        store.allocate(OTHER_SI, {0}, 1, SECRETS)
        self.assertIsNotNone(store.take_whole(SI, 3, b"whole", SECRETS))
