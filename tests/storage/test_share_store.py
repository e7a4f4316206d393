"""A storage directory: allocation, reading, leases, complaints, room."""

from __future__ import annotations

import base64
import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.logger import capturedLogs, formatEvent

from pipegrid.core import base32
from pipegrid.disk import file_system_calls as disk
from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    NoSuchShare,
    ServerRefused,
    UsageError,
    WrongSecret,
)
from pipegrid.storage import share_file, share_store
from pipegrid.storage.share_file import Expiry
from pipegrid.storage.share_store import MAX_ADVISORIES, MAX_REASON_BYTES
from pipegrid.storage.uploads import incoming_files as incoming
from pipegrid.storage.uploads.incoming_files import ONE_CALL_BYTES
from pipegrid.storage.uploads.incoming_share import MAX_RANGES
from pipegrid.testing.grid import abandon_store
from pipegrid.wire.storage_messages import Allocation, LeaseSecrets, UploadSecrets
from tests import vectors
from tests.locks import failing_locks
from tests.pipes import pipe_in_place
from tests.storage.support import NOW, OTHERS_SECRETS, SECRETS, SI, SI_TEXT, StoreTestCase

LARGE = ONE_CALL_BYTES + 1
"""So large that its container is made when it is allocated."""


def _refuse(*_: object) -> None:
    """Do what a disk does that lets nobody change anything."""
    raise OSError(errno.EACCES, "no")


class RecordedFileTests(StoreTestCase):
    """The files that result are those of the reference."""

    def test_files_are_as_recorded(self) -> None:
        """One lease, a second one, and the first renewed: each time the recorded file."""
        cases = {c["name"]: c for c in vectors.load("containers")["cases"]}
        first = cases["immutable, v2 container, one lease"]
        second = cases["immutable, v2 container, second lease via add_lease"]
        renewed = cases["immutable, v2 container, first lease renewed"]
        index = base32.decode(first["relative_path"].split("/")[2])
        lease, other = (
            LeaseSecrets(bytes.fromhex(x["renew"]), bytes.fromhex(x["cancel"]))
            for x in second["leases"]
        )
        for case in (first, second):
            number = int(case["relative_path"].rsplit("/", 1)[1])
            share = bytes.fromhex(case["share_hex"])
            self.now = case["leases"][0]["expires"] - share_file.LEASE_DURATION_S
            self.store.allocate(index, {number}, len(share), UploadSecrets(lease, b"u"))
            upload = self.store.upload(index, number, b"u")
            upload.write(0, [share])
            upload.publish()
        self.assertEqual(self.content(first), base64.b64decode(first["file_base64"]))
        self.now = second["leases"][1]["expires"] - share_file.LEASE_DURATION_S
        self.store.add_lease(index, other)
        self.assertEqual(self.content(second), base64.b64decode(second["file_base64"]))
        self.now = renewed["leases"][0]["expires"] - share_file.LEASE_DURATION_S
        self.store.add_lease(index, lease)
        self.assertEqual(self.content(renewed), base64.b64decode(renewed["file_base64"]))

    def content(self, case: dict[str, str]) -> bytes:
        return (self.root / case["relative_path"]).read_bytes()

    def test_version_1_stays_version_1(self) -> None:
        """A lease added to a container with clear secrets is stored in clear."""
        case = next(c for c in vectors.load("containers")["cases"] if c.get("version") == 1)
        self.final(3).parent.mkdir(parents=True)
        self.final(3).write_bytes(base64.b64decode(case["file_base64"]))
        self.store.add_lease(SI, SECRETS.lease)
        file = self.final(3).read_bytes()
        header = share_file.parse_header(file)
        self.assertEqual(header, share_file.ContainerHeader(1, 2, 50))
        added = share_file.parse_leases(file[-72:])[0]
        self.assertEqual((added.owner, added.renew), (1, SECRETS.lease.renew))
        with self.store.open_share(SI, 3) as reader:
            self.assertEqual(reader.read(0, 1000), bytes.fromhex(case["share_hex"]))


class AllocateTests(StoreTestCase):
    """Who may write what."""

    def test_allocated_shares_are_invisible_until_published(self) -> None:
        """Neither allocation nor a write, even of every byte, makes a share visible."""
        answer = self.store.allocate(SI, {3, 0}, 5, SECRETS)
        self.assertEqual(answer, Allocation(frozenset(), frozenset({0, 3})))
        upload = self.store.upload(SI, 3, SECRETS.upload)
        upload.write(0, [b"hello"])
        self.assertTrue(upload.complete)
        self.assertEqual(self.store.list_shares(SI), frozenset())
        self.assertRaises(NoSuchShare, self.store.open_share, SI, 3)
        upload.publish()
        self.assertEqual(self.store.list_shares(SI), frozenset({3}))
        self.assertEqual(self.get(3), b"hello")

    def test_a_file_system_without_locks(self) -> None:
        """Takes no shares, and nothing is left there that nobody could ever remove."""
        with failing_locks(errno.ENOLCK):
            error = self.assertRaises(ServerRefused, self.store.allocate, SI, {0}, 5, SECRETS)
        self.assertIn("No locks available", str(error))
        self.assertFalse(self.incoming(0).exists())

    def test_existing_shares_are_reported_and_renewed(self) -> None:
        """Shares not asked for are reported too, and all get the caller's lease."""
        self.put(1, b"one")
        self.put(2, b"two")
        self.now += 1000
        answer = self.store.allocate(SI, {2, 4}, 3, OTHERS_SECRETS)
        self.assertEqual(answer, Allocation(frozenset({1, 2}), frozenset({4})))
        self.store.allocate(SI, set(), 0, SECRETS)
        for number in (1, 2):
            found = share_file.parse_leases(self.final(number).read_bytes()[-144:])
            self.assertEqual([lease.owner for lease in found], [0, 0])
            self.assertEqual({x.expires for x in found}, {NOW + 1000 + share_file.LEASE_DURATION_S})

    def test_a_lease_never_gets_shorter(self) -> None:
        """Renewing with a clock that went back leaves the later expiry."""
        self.put(1, b"one")
        before = self.final(1).read_bytes()
        self.now -= 5000
        self.store.add_lease(SI, SECRETS.lease)
        self.assertEqual(self.final(1).read_bytes(), before)

    def test_an_upload_excludes_others(self) -> None:
        """A number that is being uploaded is refused to other secrets, and granted again to its own."""
        self.store.allocate(SI, {0}, 5, SECRETS)
        self.assertEqual(self.store.allocate(SI, {0}, 5, OTHERS_SECRETS).allocated, frozenset())
        self.assertEqual(self.store.allocate(SI, {0}, 6, SECRETS).allocated, frozenset())
        self.assertEqual(self.store.allocate(SI, {0}, 5, SECRETS).allocated, frozenset({0}))
        self.assertRaises(WrongSecret, self.store.upload, SI, 0, OTHERS_SECRETS.upload)
        self.assertRaises(NoSuchShare, self.store.upload, SI, 1, SECRETS.upload)

    def test_room_is_promised_once(self) -> None:
        """What is still to come of unfinished uploads, and the reserve, is not given away again."""
        self.store = self.make_store(reserved_bytes=1000)
        self.free = 3500
        self.assertEqual(self.store.version().max_share_bytes, 2500)
        self.assertEqual(len(self.store.allocate(SI, {0, 1, 2}, 1000, SECRETS).allocated), 2)
        self.assertEqual(self.store.version().available_bytes, 500)
        self.store.abort(SI, 0, SECRETS.upload)
        self.assertEqual(self.store.version().available_bytes, 1500)
        self.store.upload(SI, 1, SECRETS.upload).write(0, [bytes(400)])
        self.assertEqual(self.store.available_bytes(), 1900)

    def test_unknown_room_is_room(self) -> None:
        """Where the disk does not tell, shares are accepted and the version says nothing."""
        self.free = None
        self.assertIsNone(self.store.version().available_bytes)
        self.assertEqual(len(self.store.allocate(SI, {0}, 1000, SECRETS).allocated), 1)

    def test_read_only(self) -> None:
        """A read-only store accepts nothing, says so, and renews leases all the same."""
        self.put(1, b"one")
        store = self.make_store(read_only=True)
        answer = store.allocate(SI, {0, 1}, 3, OTHERS_SECRETS)
        self.assertEqual(answer, Allocation(frozenset({1}), frozenset()))
        self.assertEqual(store.version().max_share_bytes, 0)
        self.assertEqual(len(self.final(1).read_bytes()), share_file.container_bytes(3, 2))

    def test_a_bounded_number_of_uploads(self) -> None:
        """Beyond its bound a store refuses further uploads."""
        store = self.make_store(max_uploads=3)
        self.assertEqual(store.allocate(SI, set(range(5)), 1, SECRETS).allocated, {0, 1, 2})

    def test_wrong_names_touch_nothing(self) -> None:
        """Indexes that are not 16 bytes, and numbers out of range, are refused before any file is."""
        for index, numbers in ((b"short", {1}), (SI, {256}), (SI, {-1}), (b"/" * 17, {0})):
            self.assertRaises(UsageError, self.store.allocate, index, numbers, 5, SECRETS)
        self.assertRaises(UsageError, self.store.open_share, SI, 256)
        self.assertRaises(UsageError, self.store.upload, SI, "0", b"u")
        self.assertFalse(self.root.exists())

    def test_an_unwritable_directory_says_so(self) -> None:
        """A storage directory that cannot be written fails with the place and the reason."""
        self.root.write_bytes(b"a file in the way")
        error = self.assertRaises(ServerRefused, self.store.allocate, SI, {0}, 5, SECRETS)
        self.assertIn(str(self.root), str(error))

    def test_a_share_on_a_read_only_disk_is_still_reported(self) -> None:
        """A lease that cannot be renewed hides nothing in an allocation, and fails add_lease."""
        self.put(1, b"one")

        def refuse(*_: object) -> bool:
            raise OSError(errno.EROFS, "read-only")

        self.patch(share_file, "renew_lease", refuse)
        self.assertEqual(self.store.allocate(SI, set(), 0, SECRETS).already_have, {1})
        self.assertRaises(ServerRefused, self.store.add_lease, SI, SECRETS.lease)


class WriteTests(StoreTestCase):
    """Bytes into unfinished shares."""

    def setUp(self) -> None:
        super().setUp()
        self.store.allocate(SI, {0}, 10, SECRETS)
        self.upload = self.store.upload(SI, 0, SECRETS.upload)

    def test_any_order_and_repetition(self) -> None:
        """Pieces may come in any order, overlap with equal content, and be repeated."""
        self.upload.write(6, [b"g", memoryview(b"hij")])
        self.assertEqual(self.upload.required(), ((0, 6),))
        self.upload.write(2, [b"", bytearray(b"cd")])
        self.upload.write(2, [b"cd"])
        self.assertEqual(self.upload.required(), ((0, 2), (4, 6)))
        self.upload.write(0, [b"abc", b"def", b"gh"])
        self.assertEqual(self.upload.required(), ())
        self.upload.publish()
        self.assertEqual(self.get(0), b"abcdefghij")

    def test_other_bytes_conflict_and_nothing_is_written(self) -> None:
        """A conflict changes nothing, not even where there was no conflict, and the upload stays."""
        self.upload.write(4, [b"ef"])
        self.assertRaises(ConflictingWrite, self.upload.write, 3, [b"deX"])
        self.assertEqual(self.upload.required(), ((0, 4), (6, 10)))
        self.upload.write(0, [b"abcdefghij"])
        self.assertTrue(self.upload.complete)

    def test_ranges_outside_are_refused(self) -> None:
        """Nothing may be written before the begin or past the end of the share."""
        for offset, data in ((-1, b"a"), (10, b"a"), (5, b"abcdef"), (1 << 70, b"a")):
            self.assertRaises(ServerRefused, self.upload.write, offset, [data])
        self.assertEqual(self.upload.required(), ((0, 10),))
        self.assertEqual(self.incoming(0).read_bytes(), b"")

    def test_a_large_range_outside_is_refused(self) -> None:
        """The same where the container is there from the beginning."""
        self.store.allocate(SI, {1}, LARGE, SECRETS)
        upload = self.store.upload(SI, 1, SECRETS.upload)
        self.assertRaises(ServerRefused, upload.write, LARGE, [b"a"])
        self.assertEqual(self.incoming(1).stat().st_size, share_file.container_bytes(LARGE))

    def test_a_small_share_comes_whole_or_not_at_all(self) -> None:
        """ENOSPC in the middle of a small share's only call leaves an empty file, and it may come again."""
        real = os.pwritev
        calls = []

        def full(fd: int, pieces: list[Any], offset: int) -> int:
            calls.append(offset)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "full")
            return real(fd, pieces[:1], offset) if len(calls) == 1 else real(fd, pieces, offset)

        self.patch(os, "pwritev", full)
        self.assertRaises(NoSpace, self.upload.write, 0, [b"abcde", b"fghij"])
        self.assertEqual(self.upload.required(), ((0, 10),))
        self.assertEqual(self.incoming(0).read_bytes(), b"")
        self.upload.write(0, [b"abcdefghij"])
        self.upload.publish()
        self.assertEqual(self.get(0), b"abcdefghij")

    def test_a_small_share_in_pieces(self) -> None:
        """The first of several writes makes the container; an old note of its name is removed before."""
        note = self.incoming(0).with_name(self.incoming(0).name + ".upload")
        note.write_bytes(b"an old one")
        self.upload.write(3, [b"defghij"])
        self.assertFalse(note.exists())
        self.assertEqual(self.incoming(0).stat().st_size, share_file.container_bytes(10))
        self.upload.write(0, [b"abc"])
        self.upload.publish()
        self.assertEqual(self.get(0), b"abcdefghij")

    def test_unwanted_bytes_of_a_small_share(self) -> None:
        """Bytes that may have changed while they were written are not kept."""
        self.assertRaises(
            ServerRefused, self.upload.write, 0, [b"0123456789"], wanted=lambda: False
        )
        self.assertEqual(self.incoming(0).read_bytes(), b"")
        self.upload.write(0, [b"abcdefghij"])
        self.upload.publish()
        self.assertEqual(self.get(0), b"abcdefghij")

    def test_a_full_disk_interrupts_an_upload(self) -> None:
        """ENOSPC is NoSpace; what the disk took counts, and the upload goes on later."""
        self.upload.write(9, [b"j"])
        real = os.pwritev
        calls = []

        def full(fd: int, pieces: list[memoryview], offset: int) -> int:
            calls.append(offset)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "full")
            return (
                real(fd, [pieces[0][:4]], offset) if len(calls) == 1 else real(fd, pieces, offset)
            )

        self.patch(os, "pwritev", full)
        self.assertRaises(NoSpace, self.upload.write, 0, [b"abcdefghij"])
        self.assertEqual(self.upload.required(), ((4, 9),))
        self.upload.write(0, [b"abcdefghij"])
        self.upload.publish()
        self.assertEqual(self.get(0), b"abcdefghij")

    def test_a_failing_disk_is_reported(self) -> None:
        """EIO names the share and what to do; nothing is taken for written."""

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "broken")

        self.patch(os, "pwritev", broken)
        error = self.assertRaises(ServerRefused, self.upload.write, 0, [b"abc"])
        self.assertNotIsInstance(error, NoSpace)
        self.assertIn("share 0", str(error))
        self.assertEqual(self.upload.required(), ((0, 10),))

    def test_a_disk_that_cannot_compare(self) -> None:
        """EIO while comparing with what is there is reported; the upload stays."""
        self.upload.write(0, [b"abc"])

        def broken(*_: object) -> bytes:
            raise OSError(errno.EIO, "broken")

        patch = self.patch(os, "pread", broken)
        self.assertRaises(ServerRefused, self.upload.write, 0, [b"abc"])
        patch.restore()
        self.upload.write(0, [b"abcdefghij"])
        self.assertTrue(self.upload.complete)

    def test_a_share_that_cannot_be_renamed(self) -> None:
        """If the last step fails the upload stays, and may be published later."""
        self.upload.write(0, [b"abcdefghij"])

        def refuse(*_: object) -> None:
            raise OSError(errno.EACCES, "no")

        patch = self.patch(os, "rename", refuse)
        self.assertRaises(ServerRefused, self.upload.publish)
        patch.restore()
        self.upload.publish()
        self.assertEqual(self.get(0), b"abcdefghij")
        self.assertRaises(NoSuchShare, self.upload.publish)

    def test_many_shares_that_cannot_be_renamed(self) -> None:
        """None of them keeps a descriptor; whoever writes to one again, also later, may publish it."""
        self.upload.write(0, [b"abcdefghij"])
        patch = self.patch(os, "rename", _refuse)
        self.assertRaises(ServerRefused, self.upload.publish)
        patch.restore()
        self.assertFalse(self.upload.is_open)
        abandon_store(self.store)
        other = self.make_store()
        self.assertEqual(other.allocate(SI, {0}, 10, SECRETS).allocated, {0})
        upload = other.upload(SI, 0, SECRETS.upload)
        upload.write(9, [b"j"])
        upload.publish()
        self.assertEqual(self.get(0), b"abcdefghij")
        self.assertEqual(os.listdir(self.incoming(0).parent), [])

    def test_what_could_not_be_renamed_gives_way(self) -> None:
        """Nobody may come back for it: others get its place, and whoever had it may abort it."""
        for end in ("abort", "stale", "places"):
            store = self.make_store(max_uploads=1)
            store.allocate(SI, {4}, 10, SECRETS)
            upload = store.upload(SI, 4, SECRETS.upload)
            upload.write(0, [b"abcdefghij"])
            patch = self.patch(os, "rename", _refuse)
            self.assertRaises(ServerRefused, upload.publish)
            patch.restore()
            self.assertEqual(store.allocate(SI, {4}, 10, OTHERS_SECRETS).allocated, set())
            if end == "abort":
                store.abort(SI, 4, SECRETS.upload)
                self.assertEqual(store.upload_count, 0)
                continue
            self.now += 1800
            number = 4 if end == "stale" else 5
            self.assertEqual(store.allocate(SI, {number}, 10, OTHERS_SECRETS).allocated, {number})
            self.assertTrue(upload.gone)
            store.abort(SI, number, OTHERS_SECRETS.upload)

    def test_a_share_that_can_neither_be_renamed_nor_noted(self) -> None:
        """Then it goes, and with it its descriptor and its room."""
        self.upload.write(0, [b"abcdefghij"])
        self.patch(os, "rename", _refuse)
        self.patch(incoming, "write_note", _refuse)
        self.assertRaises(ServerRefused, self.upload.publish)
        self.assertFalse(self.upload.is_open)
        self.assertEqual(self.store.upload_count, 0)
        self.assertEqual(os.listdir(self.incoming(0).parent), [])

    def test_a_file_that_can_neither_be_filled_nor_removed(self) -> None:
        """It is not kept open, so that the number is not refused to others until the server ends."""
        for name in ("pwritev", "unlink"):
            self.patch(os, name, _refuse)
        for _ in range(2):
            self.assertRaises(ServerRefused, self.store.allocate, SI, {1}, LARGE, SECRETS)
            fd = disk.lock_if_free(str(self.incoming(1)))
            assert fd is not None, "somebody has it"
            os.close(fd)

    def test_uploads_that_cannot_be_opened_again(self) -> None:
        """They are given up all the same, as are those behind them."""
        store = self.make_store(max_open_uploads=1)
        store.allocate(SI, {4, 5, 6}, 10, SECRETS)
        self.patch(incoming, "open_empty", _refuse)
        self.now += 8 * 86400
        self.assertEqual(store.expire_uploads(), 3)
        self.assertEqual(store.upload_count, 0)

    def test_a_disk_that_opens_nothing_interrupts_an_upload(self) -> None:
        """Who writes is told, a full disk by its name; what had come is there when it opens files again."""
        store = self.make_store(max_open_uploads=1)
        store.allocate(SI, {4, 5}, 10, SECRETS)
        closed, _ = uploads = [store.upload(SI, number, SECRETS.upload) for number in (4, 5)]
        for upload in uploads:
            upload.write(0, [b"01234"])
        self.assertFalse(closed.is_open)
        for number, refusal in (
            (errno.EMFILE, ServerRefused),
            (errno.EACCES, ServerRefused),
            (errno.EDQUOT, NoSpace),
            (errno.ENOSPC, NoSpace),
        ):
            with mock.patch("os.open", side_effect=OSError(number, os.strerror(number))):
                error = self.assertRaises(ServerRefused, closed.write, 5, [b"56789"])
            self.assertIs(type(error), refusal)
            self.assertIn("cannot resume share 4", str(error))
        closed.write(5, [b"56789"])
        closed.publish()
        self.assertEqual(self.get(4), b"0123456789")

    def test_a_note_that_cannot_be_removed(self) -> None:
        """It would vouch for bytes that are not there, so nothing is written before it is gone."""
        self.store.allocate(SI, {4}, 10, SECRETS)
        upload = self.store.upload(SI, 4, SECRETS.upload)
        with mock.patch("os.unlink", side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))):
            error = self.assertRaises(ServerRefused, upload.write, 0, [b"01234"])
        self.assertIn("cannot resume share 4", str(error))
        upload.write(0, [b"0123456789"])
        upload.publish()
        self.assertEqual(self.get(4), b"0123456789")

    def test_an_upload_shows_its_state(self) -> None:
        """The repr says where it is, what has arrived, and never the secret."""
        self.upload.write(0, [b"abc"])
        self.assertIn("open, 3 of 10 bytes", repr(self.upload))
        self.assertNotIn("uuu", repr(self.upload))
        self.assertIn("1 unfinished", repr(self.store))

    def test_a_full_disk_refuses_an_allocation(self) -> None:
        """ENOSPC while making the container is a refusal of that share, and leaves no file."""

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "full")

        self.patch(os, "pwritev", full)
        with capturedLogs() as logged:
            for number in (1, 2):
                allocated = self.store.allocate(SI, {number}, LARGE, SECRETS).allocated
                self.assertEqual(allocated, frozenset())
        self.assertFalse(self.incoming(1).exists())
        # The client is not told, and there may seem to be room: so the operator is, once a minute.
        self.assertEqual(len(logged), 1)
        self.assertIn("the disk is full", formatEvent(logged[0]))

    def test_abort_removes_everything(self) -> None:
        """After abort the upload is gone, also its files, and the number is free again."""
        self.upload.write(0, [b"abc"])
        self.upload.checkpoint()
        self.assertRaises(WrongSecret, self.store.abort, SI, 0, OTHERS_SECRETS.upload)
        self.store.abort(SI, 0, SECRETS.upload)
        self.assertEqual(os.listdir(self.incoming(0).parent), [])
        self.assertRaises(NoSuchShare, self.upload.write, 0, [b"abc"])
        self.assertRaises(NoSuchShare, self.store.abort, SI, 0, SECRETS.upload)
        self.assertEqual(self.store.allocate(SI, {0}, 5, OTHERS_SECRETS).allocated, {0})

    def test_a_complete_upload_cannot_be_aborted(self) -> None:
        """Once all bytes are there, abort comes too late, before and after publication."""
        self.upload.write(0, [b"abcdefghij"])
        self.assertRaises(NoSuchShare, self.store.abort, SI, 0, SECRETS.upload)
        self.upload.publish()
        self.assertRaises(NoSuchShare, self.store.abort, SI, 0, SECRETS.upload)
        self.assertEqual(self.get(0), b"abcdefghij")

    def test_nothing_stays_behind_a_finished_upload(self) -> None:
        """Publication leaves nothing in incoming."""
        self.upload.write(0, [b"abc"])
        self.upload.checkpoint()
        self.assertTrue(self.incoming(0, ".upload").exists())
        self.upload.write(3, [b"defghij"])
        self.upload.publish()
        self.assertEqual(os.listdir(self.incoming(0).parent), [])
        self.assertNotIn("gone", repr(self.store))

    def test_small_shares_need_no_note(self) -> None:
        """A share that comes whole makes one file and no other."""
        self.upload.write(0, [b"abcdefghij"])
        self.assertEqual(os.listdir(self.incoming(0).parent), [f"{SI_TEXT}.0"])

    def test_scattered_writes_are_bounded(self) -> None:
        """So many separate pieces are kept account of, no more; filling gaps still works."""
        self.store.allocate(SI, {1}, 3 * MAX_RANGES, SECRETS)
        upload = self.store.upload(SI, 1, SECRETS.upload)
        for number in range(MAX_RANGES):
            upload.write(2 * number, [b"x"])
        self.assertRaises(ServerRefused, upload.write, 2 * MAX_RANGES, [b"x"])
        upload.write(1, [b"x"])
        upload.write(2 * MAX_RANGES, [b"x"])

    def test_open_files_are_bounded(self) -> None:
        """More uploads than open files: the longest unused are closed and go on when written to."""
        store = self.make_store(max_open_uploads=2)
        numbers = range(20, 30)
        store.allocate(SI, set(numbers), 4, SECRETS)
        uploads = [store.upload(SI, number, SECRETS.upload) for number in numbers]
        for offset in range(4):
            for upload in uploads:
                upload.write(offset, [b"%d" % offset])
                if upload.complete:
                    upload.publish()
                self.assertLessEqual(sum(u.is_open for u in uploads), 2)
                self.assertEqual(store.allocate(SI, {29}, 4, OTHERS_SECRETS).allocated, set())
        self.assertEqual(store.list_shares(SI), set(numbers))
        for number in numbers:
            self.assertEqual(self.get(number), b"0123")


class ReadTests(StoreTestCase):
    """Bytes out of complete shares."""

    def test_reads_are_cut_at_the_end(self) -> None:
        """Fewer bytes, or none, past the end; never a lease."""
        self.put(0, b"0123456789")
        with self.store.open_share(SI, 0) as reader:
            self.assertEqual(reader.share_bytes, 10)
            self.assertEqual(reader.read(0, 4), b"0123")
            self.assertEqual(reader.read(8, 100), b"89")
            self.assertEqual(reader.read(10, 1), b"")
            self.assertEqual(reader.read(1 << 70, 1), b"")
            self.assertEqual(reader.read(0, 0), b"")
        reader.close()

    def test_a_reader_may_be_closed_while_it_reads(self) -> None:
        """The file is closed when the read ends, so its descriptor cannot mean another file before."""
        self.put(0, b"0123456789")
        reader = self.store.open_share(SI, 0)
        real = os.pread

        def close_meanwhile(fd: int, length: int, offset: int) -> bytes:
            reader.close()
            return real(fd, length, offset)

        self.patch(os, "pread", close_meanwhile)
        self.assertEqual(reader.read(0, 10), b"0123456789")
        self.assertRaises(ServerRefused, reader.read, 0, 10)

    def test_long_reads_are_put_together(self) -> None:
        """Where one call gives less than asked for, others follow."""
        self.put(0, b"0123456789")
        real = os.pread
        with self.store.open_share(SI, 0) as reader:
            self.patch(os, "pread", lambda fd, n, at: real(fd, min(n, 3), at))
            self.assertEqual(reader.read(1, 8), b"12345678")

    def test_foreign_names_are_ignored(self) -> None:
        """Only plain files named by a canonical number from 0 to 255 are shares."""
        self.put(7, b"seven")
        home = self.final(7).parent
        for name in ("07", "256", "-1", "7.tmp", "x", "٣", "1e1"):
            (home / name).write_bytes(b"?")
        (home / "8").mkdir()
        (home / "9").symlink_to("/etc/passwd")
        self.assertEqual(self.store.list_shares(SI), {7})
        self.assertRaises(ServerRefused, self.store.open_share, SI, 8)
        self.assertRaises(ServerRefused, self.store.open_share, SI, 9)

    def test_a_file_that_is_no_share_is_refused(self) -> None:
        """A mutable container or a damaged file is not read as an immutable share."""
        self.put(0, b"x")
        for content in (b"", b"Tahoe mutable container v2\n" + bytes(500), b"\0\0\0\2" * 3):
            self.final(0).write_bytes(content)
            error = self.assertRaises(ServerRefused, self.store.open_share, SI, 0)
            self.assertIn(str(self.final(0)), str(error))
            self.assertRaises(ServerRefused, self.store.add_lease, SI, SECRETS.lease)

    def test_nobody_is_to_count_on_what_cannot_be_a_share(self) -> None:
        """
        What a power cut, or another user, left in a share's place is listed, as damaged, and not replaced.

        As one that "is there", it would keep its client from storing the share on another server.
        """
        self.put(0, b"x")
        self.put(1, b"y")
        for content in (b"", bytes(500), b"\0\0\0\2"):
            self.final(0).write_bytes(content)
            self.assertEqual(self.store.list_shares(SI), {0, 1})
            answer = self.store.allocate(SI, {0, 1}, 1, SECRETS)
            self.assertEqual(answer, Allocation(frozenset({1}), frozenset()))
            self.assertEqual(self.final(0).read_bytes(), content)
            self.assertFalse(self.incoming(0).exists())

    def test_too_many_open_files_are_no_missing_share(self) -> None:
        """What cannot be told now is not told; a share that may not be opened is none."""
        self.put(0, b"x")
        real = os.open
        number = errno.EMFILE

        def refuse(path: str, *args: int) -> int:
            if path == str(self.final(0)):
                raise OSError(number, os.strerror(number))
            return real(path, *args)

        self.patch(os, "open", refuse)
        self.assertRaises(ServerRefused, self.store.allocate, SI, {0}, 1, SECRETS)
        number = errno.EACCES
        answer = self.store.allocate(SI, {0}, 1, SECRETS)
        self.assertEqual(answer, Allocation(frozenset(), frozenset()))

    def test_a_failing_disk_is_reported(self) -> None:
        """EIO while reading names the share."""
        self.put(0, b"x")
        with self.store.open_share(SI, 0) as reader:

            def broken(*_: object) -> bytes:
                raise OSError(errno.EIO, "broken")

            self.patch(os, "pread", broken)
            error = self.assertRaises(ServerRefused, reader.read, 0, 1)
            self.assertIn(SI_TEXT, str(error))


class HousekeepingTests(StoreTestCase):
    """Complaints, abandonment, garbage."""

    def test_complaints_are_kept_and_bounded(self) -> None:
        """A complaint becomes a file; there are so many at most, each so long at most."""
        self.put(0, b"x")
        self.assertRaises(NoSuchShare, self.store.advise_corrupt_share, SI, 1, "bad")
        self.store.advise_corrupt_share(SI, 0, "../../é " * MAX_REASON_BYTES)
        directory = self.root / "corruption-advisories"
        [name] = os.listdir(directory)
        self.assertEqual(name, f"2023-11-14T221320.000000--{SI_TEXT}-0")
        self.assertLess((directory / name).stat().st_size, MAX_REASON_BYTES + 500)
        self.store.advise_corrupt_share(SI, 0, "in the same instant")
        for number in range(MAX_ADVISORIES - 1):
            (directory / str(number)).touch()
        self.now += 1
        self.assertFalse(self.store.advise_corrupt_share(SI, 0, "one too many"))
        self.assertEqual(len(os.listdir(directory)), MAX_ADVISORIES)
        with mock.patch.object(os, "listdir", side_effect=AssertionError("looked at again")):
            self.assertFalse(self.store.advise_corrupt_share(SI, 0, "another one"))
        (directory / "0").unlink()
        self.now += 60
        self.assertTrue(self.store.advise_corrupt_share(SI, 0, "there is room again"))

    def test_complaints_on_a_full_disk(self) -> None:
        """Nothing stays of one that could not be written down, and it can be made again."""
        self.put(0, b"x")

        def full(*args: Any, **keywords: Any) -> Any:
            file = open(*args, **keywords)  # noqa: SIM115
            self.patch(file, "flush", _refuse)
            return file

        with mock.patch.object(share_store, "open", full, create=True):
            self.assertRaises(ServerRefused, self.store.advise_corrupt_share, SI, 0, "bad")
        self.assertEqual(os.listdir(self.root / "corruption-advisories"), [])
        self.assertTrue(self.store.advise_corrupt_share(SI, 0, "bad"))

    def test_abandoned_uploads_are_given_up(self) -> None:
        """So long without a write ends an upload; a write starts that anew."""
        self.store = self.make_store(keep_unfinished_s=1800)
        self.store.allocate(SI, {0, 1}, 5, SECRETS)
        self.now += 1799
        self.store.upload(SI, 1, SECRETS.upload).write(0, [b"x"])
        self.assertEqual(self.store.expire_uploads(), 0)
        self.now += 2
        self.assertEqual(self.store.expire_uploads(), 1)
        self.assertRaises(NoSuchShare, self.store.upload, SI, 0, SECRETS.upload)
        self.assertFalse(self.incoming(0).exists())
        self.store.upload(SI, 1, SECRETS.upload).write(1, [b"x"])

    def test_leftovers_of_the_dead_are_given_up(self) -> None:
        """Old files that nobody holds are removed, with notes; held and young ones stay."""
        self.store.allocate(SI, {0, 1, 2}, 5, SECRETS)
        other = self.make_store()
        for number in (0, 1, 2):
            self.store.upload(SI, number, SECRETS.upload).checkpoint()
        self.store.close()
        other.upload(SI, 1, SECRETS.upload)
        self.incoming(9, ".upload").write_bytes(b"an orphan")
        for number, age in ((0, 1801), (1, 1801), (2, 1700)):
            os.utime(self.incoming(number), (NOW - age, NOW - age))
        self.assertEqual(self.make_store(keep_unfinished_s=1800).expire_uploads(), 1)
        self.assertEqual(
            sorted(os.listdir(self.incoming(0).parent)),
            [f"{SI_TEXT}.{name}" for name in ("1", "1.upload", "2", "2.upload")],
        )

    def test_garbage_is_what_nobody_leases(self) -> None:
        """A share goes when all of its leases have run out; strangers' files stay."""
        self.put(0, b"old")
        self.now += 1000
        self.put(1, b"two leases", OTHERS_SECRETS)  # renews share 0 for the others, too
        stranger = self.final(0).parent / "5"
        stranger.write_bytes(b"Tahoe mutable container v2\n" + bytes(500))
        self.now = NOW + share_file.LEASE_DURATION_S + 500
        self.assertEqual(self.store.collect_garbage(), 0)
        self.now += 501
        self.assertEqual(self.store.collect_garbage(), 2)
        self.assertEqual(os.listdir(self.final(0).parent), ["5"])
        stranger.unlink()
        self.assertEqual(self.store.list_shares(SI), frozenset())

    def test_a_store_without_a_directory_is_empty(self) -> None:
        """Looking into a storage directory that is not there finds nothing and makes nothing."""
        self.assertEqual(self.store.list_shares(SI), frozenset())
        self.assertEqual(self.store.expire_uploads() + self.store.collect_garbage(), 0)
        self.assertRaises(NoSuchShare, self.store.add_lease, SI, SECRETS.lease)
        self.assertRaises(NoSuchShare, self.store.open_share, SI, 0)
        self.assertFalse(self.root.exists())


class DiskTests(StoreTestCase):
    """The small calls below."""

    def test_a_named_pipe(self) -> None:
        """In the place of a share holds up no thread: it is damage, or nothing."""
        with pipe_in_place(self.final(0)):
            self.assertRaises(ServerRefused, self.store.open_share, SI, 0)
            self.assertEqual(self.store.slots.readv(SI, (0,), [(0, 10)]), {})
            self.assertRaises(NoSuchShare, self.store.add_lease, SI, SECRETS.lease)
            self.assertEqual(self.store.collect_garbage(Expiry()), 0)

    def test_room_of_a_directory_to_come(self) -> None:
        """The room for a directory that is not there yet is that of its disk."""
        here = disk.free_bytes(str(Path.cwd()))
        assert here is not None
        self.assertGreater(here, 0)
        self.assertIsNotNone(disk.free_bytes(str(self.root / "a" / "b")))

    def test_a_disk_without_files_to_make_is_full(self) -> None:
        """Where almost all of its files are used up there is no room, however many bytes are free."""
        real = os.statvfs(".")
        for total, left, full in ((1000, 9, True), (1000, 10, False), (0, 0, False)):
            there = [*real[:5], total, left, left, *real[8:]]
            with mock.patch.object(os, "statvfs", return_value=os.statvfs_result(there)):
                room = real.f_bavail * real.f_frsize
                self.assertEqual(disk.free_bytes("."), 0 if full else room)

    def test_the_boot_id_is_stable(self) -> None:
        """Two questions in one boot have one answer of 16 bytes, where the system has one."""
        self.assertEqual(len(disk.read_boot_id()), 16)
        if Path("/proc/sys/kernel/random/boot_id").exists():
            self.assertEqual(disk.read_boot_id(), disk.read_boot_id())
