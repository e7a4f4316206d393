"""Storage of the files that the epoll driver receives."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import new as new_hash
from hashlib import sha256
from queue import SimpleQueue
from threading import Thread
from typing import Any

from pipegrid.disk.durability import Commit, Disk, Policy
from pipegrid.disk.file_system_calls import write_all, write_all_pieces
from pipegrid.errors import PipegridError
from pipegrid.mirror.archive_file import BadEntry
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.epoll_socket_cache import PAGE_BYTES, Page
from pipegrid.mirror.file_scheduler import FetchJob
from pipegrid.reactor.process_settings import start_thread

# Groups of files of the epoll driver that become durable, and get their final names, together.


class SyncBatch:
    """
    Files that become durable together; a ``disk.durability.Committable``.

    Args:
        keeps_open: whether all files stay open until they are durable, so that ``sync`` can sync each.
            Otherwise only the first stays open: the whole file system is synced through its descriptor, which
            reports all errors since it was opened.

    Attributes:
        files: job, mirror, name in ``incoming`` and size of each file.
        refused: the files that could not get their final names, by index in ``files``, each with a sentence.
    """

    share_bytes = 0
    opened = 0
    resumed = False
    gone = False

    def __init__(self, destination: Destination, staged: bool, keeps_open: bool) -> None:
        self._destination = destination
        self._staged = staged
        self._keeps_open = keeps_open
        self._open: list[int] = []
        self._named = False
        self.files: list[tuple[FetchJob, int, str, int]] = []
        self.size_bytes = 0
        self.refused: dict[int, str] = {}

    def add(self, job: FetchJob, mirror: int, fd: int, name: str, size: int) -> None:
        """Add a written file, whose descriptor the group closes."""
        self.files.append((job, mirror, name, size))
        self.size_bytes += size
        if self._keeps_open or not self._open:
            self._open.append(fd)
        else:
            os.close(fd)

    @property
    def device(self) -> int:
        return self._destination.device

    @property
    def descriptor(self) -> int:
        return self._open[0]  # of the file that was opened first

    def sync(self) -> None:
        for fd in self._open:
            os.fsync(fd)

    def publish(self) -> tuple[str, ...]:
        changed: dict[str, None] = {}
        for number, (job, _, name, _) in enumerate(self.files):
            directory = self._name(number, name, job.wanted.path)
            if directory is not None:
                changed[directory] = None
        self._named = True
        self.close()
        return tuple(changed)

    def _name(self, number: int, name: str, path: str) -> str | None:
        try:
            return self._destination.publish(name, path, self._staged)
        except BadEntry as error:
            self._destination.discard(name)
            self.refused[number] = str(error)
        except OSError as error:
            raise self._destination.error(error, "hold the files") from error
        return None

    def close(self) -> None:
        open_, self._open = self._open, []
        for fd in open_:
            os.close(fd)

    def discard(self) -> None:
        """Remove the files that have not got their final names."""
        if not self._named:
            for _, _, name, _ in self.files:
                with suppress(OSError):
                    self._destination.discard(name)
        self.close()


# Jobs that the caller must not wait for: they run in a thread, and the caller polls for their results.


class WorkerThread:
    """
    Runs jobs in order in a thread, and delivers their results in the caller's thread; if no thread can be
    started, jobs run in the caller's thread.
    """

    def __init__(self, done: SimpleQueue[Callable[[], None]], wake: Callable[[], None]) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None], bool] | None]
        self._jobs = SimpleQueue()
        self._done = done
        self._wake = wake
        self._thread: Thread | None = None

    def run(self, job: Callable[[], Any], ended: Callable[[Any], None], wakes: bool = True) -> None:
        """
        Run a job; ``ended`` is called in the caller's thread with the result or exception of the job.

        Args:
            wakes: whether to wake the caller when there is a result.
        """
        if self._thread is None:
            thread = Thread(target=self._work, name="mirror", daemon=True)
            if not start_thread(thread):
                self._do(job, ended, wakes)
                return
            self._thread = thread
        self._jobs.put((job, ended, wakes))

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            self._do(*entry)
            del entry

    def _do(self, job: Callable[[], Any], ended: Callable[[Any], None], wakes: bool) -> None:
        self._done.put(partial(ended, _outcome(job)))
        del job, ended
        if wakes:
            self._wake()

    def stop(self) -> None:
        """Wait until all jobs are done."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


class AtOnce:
    """Runs jobs in the caller's thread, for cases in which another thread would cost more than it saves."""

    def run(self, job: Callable[[], Any], ended: Callable[[Any], None], wakes: bool = True) -> None:
        """Run a job, and call ``ended`` with its result or exception."""
        ended(_outcome(job))

    def stop(self) -> None:
        """Do nothing: no job is pending."""


def _outcome(job: Callable[[], Any]) -> Any:
    try:
        return job()
    except BaseException as error:
        return error


# From pages of received bytes to verified files under their final names, without a reactor.
#
# Small files are hashed and written in the thread that receives them: passing them to another thread takes
# longer. Of large files, a few pages at a time go to a thread, which hashes and writes them while the next
# pages are received; with few processors, there is no such thread. For durability, another thread syncs a
# whole group of files while the next group collects. One sync makes durable the data of a group and the names
# of the group before it. Only the caller's thread renames files and uses the destination.
#
# **Order.** As in ``ArchiveSink``: the hash is checked, the bytes become as durable as the policy demands,
# the file gets its final name, and then it counts as present.
#
# **Bounds.** There are at most ``MAX_PAGES`` pages of received bytes, and three groups of files: one that
# collects at most ``MAX_GROUP_FILES``, one that is being synced, and one whose names are not durable yet. A
# caller that needs a page, or stores a file, waits for space.

MAX_PAGES = 32
SPARE_PROCESSORS = 3
"""Minimum number of processors for a further thread: this thread and the network's work need one each."""

HANDED_BYTES = 4 * PAGE_BYTES
"""How much of a long file is passed to the worker thread at once; less if no page is free."""

MAX_GROUP_FILES = 2048

MAX_OPEN_FILES = 256
"""The maximum number of files in a group if each is synced alone: all stay open until they are synced."""

GROUP_BYTES = 32 << 20
GROUP_FILES = 1024
"""
While more files are expected, a group is synced when it has this many files, or ``GROUP_BYTES``.

A sync costs more than the wait for it: the kernel searches all its pages, and writes the journal. A clone of
620 MB took 1.12 times as long as without syncs (median of seven), and 1.16 times with a quarter of these
limits; limits three times as large saved nothing.
"""


class IncomingFile:
    """
    A long file that is being received and stored page by page.

    Attributes:
        held: parts of pages that have not been passed to the worker thread.
    """

    def __init__(self, store: FileStore, job: FetchJob, mirror: int) -> None:
        self._store = store
        self.job = job
        self.mirror = mirror
        wanted = job.wanted
        self._hasher = sha256() if wanted.algorithm == "sha256" else new_hash(wanted.algorithm)
        self.fd, self.name = store.open(job)
        self.size = 0
        self.held: list[tuple[Page, int, int]] = []
        self._held_bytes = 0

    def add(self, page: Page, start: int, end: int) -> None:
        """Add a part of a page; the page stays in use until the part is written."""
        page.users += 1
        held = self.held
        if not held:
            self._store.holding[self] = None
        held.append((page, start, end))
        self._held_bytes += end - start
        if self._held_bytes >= self._store.handed_bytes:
            self.hand_over()

    def hand_over(self) -> None:
        """
        Pass the held pages to the worker thread; several at a time, since waking it costs as much as hashing
        a small file.
        """
        if self.held:
            pieces, ended = self._take_held()
            self._store.hasher.run(lambda: self._write(pieces), ended, wakes=False)

    def _take_held(self) -> tuple[list[memoryview], Callable[[object], None]]:
        store, held = self._store, self.held
        self.held, self._held_bytes = [], 0
        store.holding.pop(self, None)

        def ended(result: object) -> None:
            for page, _, _ in held:
                store.give_page(page)
            store.check(result)

        return [page.view[start:end] for page, start, end in held], ended

    def _write(self, pieces: list[memoryview]) -> None:
        """Hash pieces, and append them to the file. Runs in the worker thread."""
        for piece in pieces:
            self._hasher.update(piece)
        if pieces:
            write_all_pieces(self.fd, pieces, self.size)
            self.size += sum(map(len, pieces))

    def end(self) -> None:
        """Store the file, which is complete now."""
        store = self._store
        store.parts.add(self)
        pieces, given = self._take_held()

        def last() -> bytes:
            self._write(pieces)
            return self._hasher.digest()

        def ended(result: Any) -> None:
            given(None)
            self._digested(result)

        store.hasher.run(last, ended)

    def _digested(self, digest: Any) -> None:
        store, job = self._store, self.job
        store.parts.discard(self)
        if isinstance(digest, BaseException):
            self._discard()
        store.check(digest)
        if digest != job.wanted.digest:
            self._discard()
            store.wrong(job, self.mirror, f"its {job.wanted.algorithm} is another one")
            return
        store.destination.note(self.fd, job.wanted)
        store.complete(job, self.mirror, self.fd, self.name, self.size)

    def drop(self) -> None:
        """Remove the file, which will not be complete."""
        self._store.parts.add(self)
        _, given = self._take_held()

        def ended(_: object) -> None:
            given(None)
            self._store.parts.discard(self)
            self._discard()

        self._store.hasher.run(lambda: None, ended)

    def _discard(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._store.destination.discard(self.name)


class FileStore:
    """
    Stores the files that mirrors send, without a reactor.

    Args:
        stored: called with job, mirror and size of each file that is stored under its final name.
        wrong: called with job, mirror and reason for each wrong file.
        wake: makes the caller call ``work``; may be called in any thread.

    Attributes:
        parts: long files that are complete or dropped, and that the worker thread has not finished.
        holding: long files with pages that have not been passed to the worker thread.
        handed_bytes: how much of a long file is passed to the worker thread at once.
    """

    def __init__(
        self,
        destination: Destination,
        policy: Policy,
        staged: bool,
        stored: Callable[[FetchJob, int, int], None],
        wrong: Callable[[FetchJob, int, str], object],
        wake: Callable[[], None],
    ) -> None:
        self.destination = destination
        self.wrong = wrong
        self.parts: set[IncomingFile] = set()
        self.holding: dict[IncomingFile, None] = {}
        self._policy = policy
        self._staged = staged
        self._stored = stored
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        spare = len(os.sched_getaffinity(0)) >= SPARE_PROCESSORS
        self.hasher: WorkerThread | AtOnce = WorkerThread(self._done, wake) if spare else AtOnce()
        self.handed_bytes = HANDED_BYTES if spare else 1
        self._syncer = WorkerThread(self._done, wake)
        self._disk = Disk()
        self._keeps_open = policy != "batch" or not self._disk.has_one_call
        self._most_files = MAX_OPEN_FILES if self._keeps_open else MAX_GROUP_FILES
        self._free: list[Page] = []
        self._pages = 0
        self._next = self._group()
        self._syncing: SyncBatch | None = None
        # The files of this group are renamed, but the names are not durable yet.
        self._named: tuple[SyncBatch, Commit] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether any complete file has not been reported as stored yet."""
        return bool(self.parts or self._next.files or self._syncing or self._named)

    def _group(self) -> SyncBatch:
        return SyncBatch(self.destination, self._staged, self._keeps_open)

    def take_page(self) -> Page:
        """Return a page to read into; wait for the threads if they use all pages."""
        while not self._free and self._pages >= MAX_PAGES:
            for part in list(self.holding):
                part.hand_over()
            self._done.get()()
        if self._free:
            page = self._free.pop()
        else:
            self._pages += 1
            page = Page()
        page.users = 1
        return page

    def give_page(self, page: Page) -> None:
        """Release a page for one user; without users, the page is free."""
        page.users -= 1
        if not page.users:
            self._free.append(page)

    def work(self, idle: bool) -> None:
        """
        Process the results of the threads, and give the threads more work.

        Args:
            idle: nothing has arrived, so groups do not wait to become larger.
        """
        while not self._done.empty():
            self._done.get()()
        if self._syncing is None:
            if idle and self._named is not None and not self._next.files:
                self._sync_names(*self._named)
            elif self._next.files and (idle or self._is_large(self._next)):
                self._sync()

    def _is_large(self, group: SyncBatch) -> bool:
        return group.size_bytes >= GROUP_BYTES or len(group.files) >= min(
            GROUP_FILES, self._most_files
        )

    def whole(self, job: FetchJob, mirror: int, data: memoryview) -> str | None:
        """Store a complete file; return a clause that says why it is wrong, None if it is right."""
        wanted = job.wanted
        if wanted.algorithm == "sha256":
            digest = sha256(data).digest()
        else:
            digest = new_hash(wanted.algorithm, data).digest()
        if digest != wanted.digest:
            return f"its {wanted.algorithm} is another one"
        destination = self.destination
        fd, name = self.open(job)
        try:
            if os.write(fd, data) < len(data):
                write_all(fd, data, 0)
            destination.note(fd, wanted)
        except OSError as error:
            os.close(fd)
            destination.discard(name)
            raise destination.error(error, "hold the files") from error
        self.complete(job, mirror, fd, name, len(data))
        return None

    def begin(self, job: FetchJob, mirror: int) -> IncomingFile:
        """Begin to store a long file, to which the caller adds parts."""
        return IncomingFile(self, job, mirror)

    def open(self, job: FetchJob) -> tuple[int, str]:
        """Make the file for a job in ``incoming``; return its descriptor and name."""
        try:
            return self.destination.open_incoming(job.wanted)
        except OSError as error:
            raise self.destination.error(error, "hold the files") from error

    def complete(self, job: FetchJob, mirror: int, fd: int, name: str, size: int) -> None:
        """Add a file, whose content is written and right, to the group that is being collected."""
        if job.is_over:  # another mirror was faster
            os.close(fd)
            self.destination.discard(name)
            self._stored(job, mirror, size)
            return
        self._next.add(job, mirror, fd, name, size)
        if self._policy == "none":
            group, self._next = self._next, self._group()
            group.publish()
            self._report_outcomes(group)
            return
        while len(self._next.files) >= self._most_files and self._syncing is not None:
            self._done.get()()  # this call can store more files, or begin another group
        if self._syncing is None and self._is_large(self._next):
            self._sync()

    def _sync(self) -> None:
        """Sync the collected files, and the names of the group before them."""
        group, self._next = self._next, self._group()
        self._syncing = group
        before, self._named = self._named, None
        commit = Commit([group], self._policy, self._disk)

        def synced(result: object) -> None:
            self._syncing = None
            try:
                self.check(result)
                if before is not None:
                    self._end(*before)
                commit.publish()
                if commit.outcomes[0] is not None:
                    self._end(group, commit)
            except BaseException:
                group.discard()
                raise
            self._named = group, commit

        self._syncer.run(lambda: commit.sync_data(before and before[1]), synced)

    def _sync_names(self, group: SyncBatch, commit: Commit) -> None:
        self._syncing, self._named = group, None

        def named(result: object) -> None:
            self._syncing = None
            self.check(result)
            self._end(group, commit)

        self._syncer.run(commit.sync_names, named)

    def _end(self, group: SyncBatch, commit: Commit) -> None:
        """
        Report the outcomes of a group whose sync has ended; raise the error if the group could not be made
        durable.
        """
        outcome = commit.outcomes[0]
        if outcome is not None:
            raise self.destination.error(outcome, "keep files")
        self._report_outcomes(group)

    def _report_outcomes(self, group: SyncBatch) -> None:
        for number, (job, mirror, _, size) in enumerate(group.files):
            reason = group.refused.get(number)
            if reason is None:
                self._stored(job, mirror, size)
            else:
                self.wrong(job, mirror, reason)

    def check(self, result: object) -> None:
        """Raise the result of a thread's job if it is an error."""
        if isinstance(result, OSError):
            raise self.destination.error(result, "hold the files") from result
        if isinstance(result, BaseException):
            raise result

    def close(self) -> None:
        """Stop the threads; files that have no final name yet are removed."""
        self.hasher.stop()
        self._syncer.stop()
        while not self._done.empty():
            with suppress(OSError, PipegridError):
                self._done.get()()
        self._syncer.stop()
        for part in list(self.parts):
            part._discard()
        for group in (self._next, self._syncing):
            if group is not None:
                group.discard()
