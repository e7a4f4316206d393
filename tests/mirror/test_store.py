"""When the files of a sprint are durable, how often the disk is waited for, and what is told when."""

from __future__ import annotations

import errno
import os
from hashlib import sha256
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.durability import Disk, Policy
from pipegrid.mirror import epoll_file_store as store_module
from pipegrid.mirror.archive_file import ArchiveFile, MirrorError
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.epoll_file_store import FileStore
from pipegrid.mirror.file_scheduler import FetchJob
from pipegrid.mirror.hash_cache import ATTRIBUTE, proof
from tests.descriptors import left_open, open_files


class Recording(Disk):
    """Notes what was in the mirror when it was synced; ``fails`` at the call of that number."""

    def __init__(self, dest: Path, fails: int = -1) -> None:
        self.dest = dest
        self.fails = fails
        self.named: list[set[str]] = []
        self.incoming: list[int] = []
        self.go = Event()
        self.go.set()

    @property
    def _syncfs(self):  # type: ignore[no-untyped-def]
        return self._note

    def _note(self, fd: int) -> None:
        self.go.wait()
        os.fstat(fd)  # it is an open one
        self.named.append({str(path.relative_to(self.dest)) for path in self.dest.glob("*/*.deb")})
        self.incoming.append(len(os.listdir(self.dest / ".pipegrid-mirror/incoming")))
        if len(self.named) - 1 == self.fails:
            raise OSError(errno.EIO, "broken")


class StoreTests(SynchronousTestCase):
    """With a thread that syncs when it is let, and a disk that takes notes."""

    def setUp(self) -> None:
        self.dest = Path(self.mktemp())
        self.told: list[str] = []
        self.data = os.urandom(100)

    def store(self, policy: Policy = "batch", fails: int = -1) -> FileStore:
        """Make one."""
        destination = Destination(str(self.dest))
        self.addCleanup(destination.close)
        self.disk = Recording(self.dest, fails)
        self.patch(store_module, "Disk", lambda: self.disk)

        def stored(job: FetchJob, mirror: int, size: int) -> None:
            self.assertIn(job.wanted.path, set().union(*self.disk.named[1:]))
            self.told.append(job.wanted.path)

        made = FileStore(
            destination, policy, False, stored, lambda *wrong: self.fail(str(wrong)), lambda: None
        )
        self.addCleanup(made.close)
        return made

    def add(self, store: FileStore, *names: str) -> None:
        """Files come in."""
        for name in names:
            wanted = ArchiveFile(f"d/{name}.deb", 100, "sha256", sha256(self.data).digest())
            self.assertIsNone(store.whole(FetchJob(wanted), 0, memoryview(self.data)))

    def finish(self, store: FileStore) -> None:
        """Until nothing is left to do."""
        while store.is_busy:
            store.work(idle=True)
            if store._syncing is not None:
                store._done.get()()

    def test_one_wait_for_two_groups(self) -> None:
        """The names of each group are durable with the data of the next; each file is told of after that."""
        store = self.store()
        for number in range(10):
            self.add(store, f"a{number}", f"b{number}")
            store.work(idle=True)  # which begins a sync
            store._done.get()()
            self.assertEqual(len(self.told), 2 * number)
        self.finish(store)
        self.assertEqual(len(self.disk.named), 11)
        self.assertEqual([len(named) for named in self.disk.named], list(range(0, 21, 2)))
        self.assertEqual(self.disk.incoming, [2] * 10 + [0])
        self.assertEqual(len(self.told), 20)

    def test_many_wait_behind_a_slow_disk(self) -> None:
        """Whatever gathers while the disk is busy is one group, of which one file only is open."""
        store = self.store()
        before = open_files()
        self.disk.go.clear()
        self.add(store, "first")
        store.work(idle=True)
        self.add(store, *(f"a{number}" for number in range(1500)))
        self.assertLess(len(open_files() - before), 10)
        self.disk.go.set()
        self.finish(store)
        self.assertEqual((len(self.told), len(self.disk.named)), (1501, 3))

    def test_it_is_bounded(self) -> None:
        """Who would add to a full group waits for the disk."""
        self.patch(store_module, "MAX_GROUP_FILES", 16)
        store = self.store()
        self.add(store, *(f"a{number}" for number in range(40)))
        self.assertTrue(self.disk.named)
        self.assertLess(len(store._next.files), 17)
        self.finish(store)
        self.assertEqual(len(self.told), 40)

    def test_a_disk_that_fails(self) -> None:
        """Nothing is told of that the failed call was for, whichever of the two; nothing stays open."""
        for fails in range(3):
            self.dest = Path(self.mktemp())
            self.told.clear()
            before = open_files()
            store = self.store(fails=fails)
            with self.assertRaises(MirrorError) as caught:
                for name in "abc":
                    self.add(store, name)
                    store.work(idle=True)
                    store._done.get()()
                self.finish(store)
            said = str(caught.exception)
            self.assertIn("cannot keep files: Input/output error", said)
            self.assertNotIn("server", said)  # of which a mirror has none
            self.assertEqual(len(self.told), max(fails - 1, 0))
            store.close()
            store.destination.close()
            self.assertEqual(left_open(before), [])

    def test_ended_in_the_middle(self) -> None:
        """What has no name yet is removed, what has one stays."""
        store = self.store()
        self.add(store, "a")
        store.work(idle=True)
        store._done.get()()
        self.add(store, "b")
        store.work(idle=True)
        self.add(store, "c")
        store.close()
        names = sorted(path.name for path in (self.dest / "d").iterdir())
        self.assertIn(names, (["a.deb"], ["a.deb", "b.deb"]))
        self.assertEqual(os.listdir(self.dest / ".pipegrid-mirror/incoming"), [])


class ProofTests(SynchronousTestCase):
    """What is noted at each file."""

    def test_it_fits_into_the_inode(self) -> None:
        """
        Of ext4's usual one: 256 bytes, of which 160 are taken, and four before and behind all attributes.

        A name without its "user." and a value each take a multiple of four, and 16 beside.
        """
        status = os.stat(os.devnull)
        value = proof(ArchiveFile("a", 2**40, "sha256", bytes(32)), status)
        name = ATTRIBUTE.partition(".")[2]
        self.assertLessEqual(16 + -(-len(name) // 4) * 4 + -(-len(value) // 4) * 4, 256 - 160 - 8)

    def test_it_tells_files_apart(self) -> None:
        """By hash, size and time; any time that a file system can hold is one."""

        def of(digest: int = 0, size: int = 1, time: int = 1) -> bytes:
            status: Any = SimpleNamespace(st_size=size, st_mtime_ns=time)
            return proof(ArchiveFile("a", size, "sha256", bytes([digest]) * 32), status)

        different = [of(), of(digest=1), of(size=2), of(time=-1), of(time=0), of(time=2**62)]
        self.assertEqual(len(set(different)), len(different))
        self.assertEqual(len(of(time=2**70)), len(of(size=2**60)))
