"""
Unfinished uploads across the death of a process, and between processes on one directory.

``kill`` closes a store's files and does nothing else, as the kernel does for a process that is
killed; another store on the same directory is another process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from typing import Any

from pipegrid.disk import file_system_calls as disk
from pipegrid.errors import NoSuchShare, WrongSecret
from pipegrid.storage.share_store import ShareStore
from pipegrid.testing.grid import abandon_store
from pipegrid.wire.storage_messages import Allocation
from tests.pipes import pipe_in_place
from tests.storage.support import OTHERS_SECRETS, SECRETS, SI, StoreTestCase

DATA = bytes(range(100))


class Killed(BaseException):
    """Where the process of a test dies; no handler of errors sees to anything any more."""


class ResumeTests(StoreTestCase):
    """A later process goes on where an earlier one was killed."""

    def begin(self) -> None:
        """Write the first half and have it acknowledged; then be killed."""
        self.store.allocate(SI, {0}, 100, SECRETS)
        upload = self.store.upload(SI, 0, SECRETS.upload)
        upload.write(0, [DATA[:50]])
        upload.checkpoint()
        upload.write(50, [DATA[50:60]])
        abandon_store(self.store)
        self.store = self.make_store()

    def test_a_write_resumes(self) -> None:
        """With the same secret the next write goes on; all that was acknowledged is there."""
        self.begin()
        upload = self.store.upload(SI, 0, SECRETS.upload)
        self.assertEqual(upload.required(), ((50, 100),))
        upload.write(50, [DATA[50:]])
        upload.publish()
        self.assertEqual(self.get(0), DATA)

    def test_an_allocation_resumes(self) -> None:
        """With the same secret and size the share is allocated again, with what had arrived."""
        self.begin()
        self.assertEqual(self.store.allocate(SI, {0}, 100, SECRETS).allocated, {0})
        upload = self.store.upload(SI, 0, SECRETS.upload)
        self.assertEqual(upload.required(), ((50, 100),))

    def test_another_secret_may_not_resume_but_may_begin(self) -> None:
        """A stranger's write is refused; a stranger's allocation takes the place of the dead."""
        self.begin()
        self.assertRaises(WrongSecret, self.store.upload, SI, 0, OTHERS_SECRETS.upload)
        self.assertEqual(self.store.allocate(SI, {0}, 70, OTHERS_SECRETS).allocated, {0})
        upload = self.store.upload(SI, 0, OTHERS_SECRETS.upload)
        self.assertEqual(upload.required(), ((0, 70),))
        upload.write(0, [b"X" * 70])
        upload.publish()
        self.assertEqual(self.get(0), b"X" * 70)

    def test_another_size_begins_anew(self) -> None:
        """The same secret with another size is another upload."""
        self.begin()
        self.assertEqual(self.store.allocate(SI, {0}, 90, SECRETS).allocated, {0})
        self.assertEqual(self.store.upload(SI, 0, SECRETS.upload).required(), ((0, 90),))

    def test_nothing_is_trusted_after_a_reboot(self) -> None:
        """When the machine was started anew, what had arrived may not have reached the disk."""
        self.begin()
        self.boot = b"B" * 16
        store = self.make_store()
        self.assertRaises(NoSuchShare, store.upload, SI, 0, SECRETS.upload)
        self.assertEqual(store.allocate(SI, {0}, 100, SECRETS).allocated, {0})
        self.assertEqual(store.upload(SI, 0, SECRETS.upload).required(), ((0, 100),))
        self.assertFalse(self.incoming(0, ".upload").exists())

    def test_leftovers_without_a_note_block_nobody(self) -> None:
        """Files in incoming that Tahoe-LAFS, or a killed allocation, left are emptied and used."""
        self.incoming(0).parent.mkdir(parents=True)
        for leftover in (b"", b"\0\0\0\2" + bytes(200)):
            self.incoming(0).write_bytes(leftover)
            self.assertRaises(NoSuchShare, self.store.upload, SI, 0, SECRETS.upload)
            self.assertEqual(self.store.allocate(SI, {0}, 100, SECRETS).allocated, {0})
            upload = self.store.upload(SI, 0, SECRETS.upload)
            self.assertEqual(upload.required(), ((0, 100),))
            abandon_store(self.store)

    def test_an_orphaned_note_vouches_for_nothing(self) -> None:
        """A note about a file that is gone says nothing about a new file of the same name."""
        self.begin()
        note = self.incoming(0, ".upload").read_bytes()
        self.incoming(0).unlink()
        self.assertEqual(self.store.allocate(SI, {0}, 100, SECRETS).allocated, {0})
        self.assertEqual(self.store.upload(SI, 0, SECRETS.upload).required(), ((0, 100),))
        abandon_store(self.store)
        self.incoming(0).write_bytes(b"short")
        self.incoming(0, ".upload").write_bytes(note)
        self.assertRaises(NoSuchShare, self.make_store().upload, SI, 0, SECRETS.upload)

    def test_a_named_pipe(self) -> None:
        """In the place of a note says nothing; the share is sent anew."""
        self.begin()
        abandon_store(self.store)
        with pipe_in_place(self.incoming(0, ".upload")):
            store = self.make_store()
            self.assertRaises(NoSuchShare, store.upload, SI, 0, SECRETS.upload)
            self.assertEqual(store.allocate(SI, {0}, 100, SECRETS).allocated, {0})
            store.upload(SI, 0, SECRETS.upload).write(0, [b"x" * 50])
            abandon_store(store)

    def test_closing_leaves_a_note(self) -> None:
        """An orderly end keeps even what was not yet acknowledged."""
        self.store.allocate(SI, {0}, 100, SECRETS)
        self.store.upload(SI, 0, SECRETS.upload).write(0, [DATA[:33]])
        self.store.close()
        upload = self.make_store().upload(SI, 0, SECRETS.upload)
        self.assertEqual(upload.required(), ((33, 100),))


class TwoProcessesTests(StoreTestCase):
    """Two living processes on one directory."""

    def setUp(self) -> None:
        super().setUp()
        self.other = self.make_store()

    def test_the_first_excludes_the_second(self) -> None:
        """While one uploads a share the other is refused it, even with the same secret."""
        self.store.allocate(SI, {0}, 100, SECRETS)
        answer = self.other.allocate(SI, {0, 1}, 100, SECRETS)
        self.assertEqual(answer, Allocation(frozenset(), frozenset({1})))
        self.assertRaises(WrongSecret, self.other.upload, SI, 0, SECRETS.upload)
        upload = self.store.upload(SI, 0, SECRETS.upload)
        upload.write(0, [DATA])
        upload.publish()
        self.assertEqual(self.other.list_shares(SI), {0})

    def test_released_uploads_may_be_taken_over_and_back(self) -> None:
        """After release another process goes on, and after its release the first one does."""
        self.store.allocate(SI, {0}, 100, SECRETS)
        upload = self.store.upload(SI, 0, SECRETS.upload)
        upload.write(0, [DATA[:10]])
        self.store.release()
        theirs = self.other.upload(SI, 0, SECRETS.upload)
        self.assertRaises(NoSuchShare, upload.write, 10, [DATA[10:20]])
        theirs.write(10, [DATA[10:20]])
        self.other.release()
        upload = self.store.upload(SI, 0, SECRETS.upload)
        self.assertEqual(upload.required(), ((20, 100),))
        upload.write(0, [DATA])
        upload.publish()
        self.assertEqual(self.get(0), DATA)
        self.assertRaises(NoSuchShare, theirs.write, 20, [DATA[20:]])

    def test_an_upload_without_data_that_was_closed(self) -> None:
        """It is made again by its first write, unless another process has taken its place or finished it."""
        for number in range(4):
            self.store.allocate(SI, {number}, 3, SECRETS)
        uploads = [self.store.upload(SI, number, SECRETS.upload) for number in range(4)]
        self.store.release()
        self.assertFalse(any(upload.is_open for upload in uploads))
        self.assertFalse(any(self.incoming(number, ".upload").exists() for number in range(4)))
        self.incoming(0).unlink()  # as housekeeping does, some day
        for number in (1, 2):
            self.assertEqual(
                self.other.allocate(SI, {number}, 3, OTHERS_SECRETS).allocated, {number}
            )
        theirs = self.other.upload(SI, 1, OTHERS_SECRETS.upload)
        theirs.write(0, [b"two"])
        theirs.publish()
        uploads[0].write(0, [b"one"])
        uploads[0].publish()
        uploads[3].write(1, [b"w"])
        uploads[3].write(0, [b"t"])
        for upload in uploads[1:3]:
            self.assertRaises(NoSuchShare, upload.write, 0, [b"no!"])
        self.assertEqual((self.get(0), self.get(1)), (b"one", b"two"))
        self.assertEqual(uploads[3].required(), ((2, 3),))
        self.assertTrue(self.incoming(2).exists(), "the other process has it")

    def test_a_released_upload_may_be_lost_to_another_secret(self) -> None:
        """Whoever was displaced is told so, and does no harm to the successor."""
        self.store.allocate(SI, {0}, 100, SECRETS)
        mine = self.store.upload(SI, 0, SECRETS.upload)
        self.store.release()
        self.assertEqual(self.other.allocate(SI, {0}, 50, OTHERS_SECRETS).allocated, {0})
        theirs = self.other.upload(SI, 0, OTHERS_SECRETS.upload)
        mine.discard()
        theirs.write(0, [b"X" * 50])
        theirs.publish()
        self.assertEqual(self.get(0), b"X" * 50)

    def test_a_name_that_changed_between_open_and_lock(self) -> None:
        """
        If the file is finished by another process between our opening and our locking it,
        nothing of ours touches the finished share.
        """
        self.store.allocate(SI, {0}, 100, SECRETS)
        upload = self.store.upload(SI, 0, SECRETS.upload)
        upload.write(0, [DATA])
        real: Callable[..., int] = os.open
        meddled: list[str] = []

        def meddle(path: str, flags: int, *args: Any, **named: Any) -> int:
            fd = real(path, flags, *args, **named)
            if str(path) == str(self.incoming(0)) and not meddled:
                meddled.append(path)
                upload.publish()
            return fd

        self.patch(os, "open", meddle)
        self.assertEqual(self.other.allocate(SI, {0}, 100, OTHERS_SECRETS).allocated, frozenset())
        self.assertTrue(meddled)
        self.assertEqual(self.get(0), DATA)
        self.assertFalse(self.incoming(0).exists())

    def test_a_share_that_another_finished_meanwhile(self) -> None:
        """It stays as it is, leases and all; ours is gone, and its writer is told to look."""
        self.store.allocate(SI, {0}, 100, SECRETS)
        upload = self.store.upload(SI, 0, SECRETS.upload)
        upload.write(0, [DATA])
        aside = self.incoming(0).with_name("aside")
        self.incoming(0).rename(aside)
        self.other.allocate(SI, {0}, 100, OTHERS_SECRETS)
        other = self.other.upload(SI, 0, OTHERS_SECRETS.upload)
        other.write(0, [DATA])
        other.publish()
        [final] = self.store.root.glob("shares/*/*/0")
        there = final.read_bytes()
        aside.rename(self.incoming(0))
        self.assertRaises(NoSuchShare, upload.publish)
        self.assertEqual(final.read_bytes(), there)
        self.assertFalse(self.incoming(0).exists())

    def test_a_name_that_was_removed_between_open_and_lock(self) -> None:
        """If the file is removed by its owner at that moment, we make another and upload into that."""
        self.store.allocate(SI, {0}, 100, SECRETS)
        real: Callable[..., int] = os.open
        meddled: list[str] = []

        def meddle(path: str, flags: int, *args: Any, **named: Any) -> int:
            fd = real(path, flags, *args, **named)
            if str(path) == str(self.incoming(0)) and not meddled:
                meddled.append(path)
                self.store.abort(SI, 0, SECRETS.upload)
            return fd

        self.patch(os, "open", meddle)
        self.assertEqual(self.other.allocate(SI, {0}, 100, OTHERS_SECRETS).allocated, {0})
        self.assertTrue(meddled)
        upload = self.other.upload(SI, 0, OTHERS_SECRETS.upload)
        upload.write(0, [DATA])
        upload.publish()
        self.assertEqual(self.get(0), DATA)

    def test_a_file_that_was_taken_away_is_not_published(self) -> None:
        """A Tahoe-LAFS server that starts deletes incoming; a share in it is lost, and we say so."""
        self.store.allocate(SI, {0}, 100, SECRETS)
        upload = self.store.upload(SI, 0, SECRETS.upload)
        upload.write(0, [DATA])
        shutil.rmtree(self.root / "shares/incoming")
        self.assertRaises(NoSuchShare, upload.publish)
        self.assertEqual(self.store.list_shares(SI), frozenset())
        self.assertEqual(self.store.allocate(SI, {0}, 100, SECRETS).allocated, {0})

    def test_leases_of_both_are_kept(self) -> None:
        """Leases added by two processes do not overwrite each other."""
        self.put(0, DATA)
        self.other.add_lease(SI, OTHERS_SECRETS.lease)
        self.store.add_lease(SI, SECRETS.lease)
        self.assertEqual(self.final(0).stat().st_size, 12 + 100 + 2 * 72)


class CrashTests(StoreTestCase):
    """Killed at any call to the operating system, a rerun completes."""

    CALLS = ("open", "pwritev", "ftruncate", "rename", "unlink", "makedirs", "rmdir")

    def upload_all(self, store: ShareStore) -> None:
        """What a client does: allocate, write in two pieces, unless it is there already."""
        answer = store.allocate(SI, {0}, 100, SECRETS)
        if 0 not in answer.already_have:
            upload = store.upload(SI, 0, SECRETS.upload)
            upload.write(0, [DATA[:50]])
            upload.checkpoint()
            upload.write(50, [DATA[50:]])
            upload.publish()

    def test_a_rerun_completes(self) -> None:
        """Before and after every call that changes something: no partial share, then a whole one."""
        step = 0
        while self.killed_at(step):
            step += 1
        self.assertGreater(step, 15)

    def killed_at(self, step: int) -> bool:
        self.root = self.root.parent / f"root-{step}"
        store = self.make_store()
        countdown = [step]
        opened: set[int] = set()

        def mortal(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                countdown[0] -= 1
                if countdown[0] == -1:
                    raise Killed
                result = real(*args, **named)
                if real is real_open:
                    opened.add(result)
                countdown[0] -= 1
                if countdown[0] == -1:
                    raise Killed
                return result

            return call

        real_open = os.open
        patches = [self.patch(os, name, mortal(getattr(os, name))) for name in self.CALLS]
        try:
            self.upload_all(store)
            killed = False
        except Killed:
            killed = True
        finally:
            for patch in patches:
                patch.restore()
        abandon_store(store)
        for fd in opened:
            with contextlib.suppress(OSError):
                os.close(fd)
        survivor = self.make_store()
        if survivor.list_shares(SI):
            self.assertEqual(self.get(0), DATA, f"killed at step {step}")
        self.upload_all(survivor)
        self.assertEqual(self.get(0), DATA, f"killed at step {step}")
        self.assertEqual(survivor.expire_uploads(), 0)
        return killed

    def test_a_killed_lease_leaves_the_share_readable(self) -> None:
        """Killed while a lease is added, the share data is all there."""
        self.put(0, DATA)
        real = disk.write_all
        calls: list[int] = []

        def mortal(fd: int, data: bytes, offset: int) -> None:
            if calls:
                raise Killed
            calls.append(offset)
            real(fd, data, offset)

        self.patch(disk, "write_all", mortal)
        self.assertRaises(Killed, self.store.add_lease, SI, OTHERS_SECRETS.lease)
        self.assertEqual(self.get(0)[:100], DATA)
