"""One share while a client uploads it: the bytes received, its file, and its publication."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol

from pipegrid.core.hashes import Buffer
from pipegrid.core.spans import Range, Spans
from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.atomic_write import can_name, open_unnamed
from pipegrid.disk.private_files import PRIVATE_FILE
from pipegrid.errors import ConflictingWrite, NoSuchShare, PipegridError, ServerRefused
from pipegrid.storage import share_file
from pipegrid.storage.client_space import ClientUsage
from pipegrid.storage.space_quota import SpaceUsage
from pipegrid.storage.storage_paths import Paths, ShareKey
from pipegrid.storage.uploads import incoming_files
from pipegrid.storage.uploads.eviction import NOBODY, WRITTEN_S, Client
from pipegrid.storage.uploads.incoming_files import OpenedUpload

# The file is the share's whole container from the start: header, a hole of the share's length, first lease.
# The file of a small share is empty until the first write, which usually brings all its data. A write fills
# a part of the hole, after existing bytes were compared with it. At most 4096 separate ranges are recorded.

MAX_RANGES = 4096
_COMPARE_BYTES = 256 * 1024


def _empty(fd: int) -> None:
    with suppress(OSError):  # its bytes are overwritten later
        os.ftruncate(fd, 0)


def slice_pieces(pieces: Sequence[Buffer], begin: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes ``[begin, end)`` of the joined pieces, without joining them."""
    at = 0
    for piece in pieces:
        if at >= end:
            return
        length = len(piece)
        if length and at + length > begin:
            yield memoryview(piece)[max(begin - at, 0) : end - at]
        at += length


# An upload holds the lock (``flock``) of its file in ``incoming`` while that file is open. The kernel
# releases locks with the process, so uploads left by dead processes are recognised reliably.
#
# Bytes are written into the file that becomes the share. When nothing is missing, ``publish`` renames it to
# its place; ``disk.group_commit`` makes the data durable before that, and the rename after it. Between
# writes the file may be closed (``suspend``); then the next write resumes it by its note, as another
# process would.


class UploadKeeper(Protocol):
    """
    The registry of all uploads of a store.

    Attributes:
        usage: counts complete shares; None: there is no quota.
        clients: counts them for named clients.
    """

    usage: SpaceUsage | None
    clients: ClientUsage

    def used(self, upload: IncomingShare) -> None:
        """Record that it was written to, or opened."""

    def forget(self, upload: IncomingShare) -> None:
        """Remove it: it has ended, successfully or not."""


class IncomingShare:
    """
    A share that is being uploaded; created only by ``UnfinishedUploads``, its keeper. Methods may be called
    from any thread.

    Attributes:
        storage_index, share_number, share_bytes: of which share, and the length of its data.
        secret_hash: see ``hash_secret``.
        last_write: when it was last written to, in seconds since 1970.
        client, began: its owner, and since when: see ``eviction``.
        owner: the number of the named client whose quota it counts against; 0: none.
        left_behind: an earlier process left it, and no client has resumed it yet.
        unsent_bytes: written since the disk was last requested to start writing (``begin_writing``).
        opened: rises with every opening of an upload's file in this process.
        gone: whether it has ended: published, discarded, or released.
        stored: whether its share is stored, as durable as required.
        new_index: whether there was no directory for shares of this index when it began; a hint that saves a
            failing call.
        resumed: whether some of it was written through an earlier descriptor.
        promised_bytes: what the registry counts as still to arrive.
    """

    _openings = itertools.count()

    def __init__(
        self,
        key: ShareKey,
        share_bytes: int,
        secret_hash: bytes,
        begun: OpenedUpload,
        boot_id: bytes,
        clock: Callable[[], float],
        keeper: UploadKeeper,
    ) -> None:
        received = () if begun.note is None else begun.note.ranges
        self.storage_index, self.share_number = key
        self.share_bytes, self.secret_hash = share_bytes, secret_hash
        self.last_write = self.began = clock()
        self.client = NOBODY
        self.owner = 0
        self.left_behind = self.new_index = self.gone = self.stored = False
        self.unsent_bytes = self.promised_bytes = 0
        self.opened = next(self._openings)
        self.resumed = bool(received)
        self._fd: int | None = begun.fd
        self._fresh_lease = begun.lease  # while the file is empty: the lease to write at its end
        self._file: tuple[int, int] | None = None  # device and number of the open file, once needed
        self._incoming, self._final = begun.path, begun.final_path
        self._boot_id, self._clock = boot_id, clock
        self._keeper = keeper
        self._received = Spans(received)
        self._noted: tuple[Range, ...] | None = tuple(received) or None
        self._came_before = self._received.total
        self._beginning = False  # the disk is being asked to start writing it
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        state = "gone" if self.gone else "closed" if self._fd is None else "open"
        where = self._incoming or self._final
        return (
            f"<IncomingShare {where!r} {state}, {self._received.total} of {self.share_bytes} bytes>"
        )

    @property
    def came_bytes(self) -> int:
        """Bytes received since it was begun, or resumed."""
        return self._received.total - self._came_before

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived. The share becomes visible only by ``publish``."""
        return self._received.total == self.share_bytes > 0

    @property
    def remaining_bytes(self) -> int:
        """Disk space that it still needs."""
        return self.share_bytes - self._received.total

    @property
    def descriptor(self) -> int:
        """The open file of a complete share."""
        assert self._fd is not None, f"{self!r} has no file open"
        return self._fd

    @property
    def device(self) -> int:
        """The number of the file system of a complete share."""
        with self._lock:
            return (self._file or self._inode())[0]

    def take_up(self, client: Client) -> None:
        """Make it belong to a client that knows its secret, from now on."""
        now = self._clock()
        self.client = client
        if self.left_behind or now - self.last_write >= WRITTEN_S:
            # Bytes that had arrived before do not show its pace.
            self.left_behind = False
            self.began = now
            self._came_before = self._received.total
        self.last_write = now

    @property
    def is_open(self) -> bool:
        """Whether it holds a file descriptor, and with it the lock."""
        return self._fd is not None

    def required(self) -> tuple[Range, ...]:
        """Return the ranges that are still missing."""
        with self._lock:
            return tuple(self._received.gaps(0, self.share_bytes))

    def write(
        self, offset: int, pieces: Sequence[Buffer], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """
        Write bytes at an offset of the share data, in pieces.

        Before acknowledging it, call ``checkpoint``, or make the share durable if it is ``complete`` now.

        Args:
            wanted: called after each call to the disk. If it returns False, the buffers may have been
                reused, so what was just written is not counted, and ``ServerRefused`` ends the write.

        Raises:
            NoSuchShare: the upload was finished, aborted or given up meanwhile.
            ServerRefused: the range does not lie in the share, the disk failed, or there are too many
                separate ranges.
            ConflictingWrite: the bytes there differ; nothing was written.
            NoSpace: the disk is full; some of it may have been written, and the upload continues.
        """
        end = offset + sum(map(len, pieces))
        with self._lock:
            if offset < 0 or end > self.share_bytes:
                raise ServerRefused(
                    f"bytes {offset} to {end} lie outside of {self._name()}, for which "
                    f"{self.share_bytes} bytes were allocated; write within them"
                )
            if self.gone:
                raise self._no_such_upload()
            if self._fd is None:
                self._reopen_empty()
            if self._fresh_lease is not None and end - offset == self.share_bytes:
                self._lay_out(self._fresh_lease, pieces, wanted)
                self._received.add(0, end)
                self._inode()  # not in the thread that syncs, where each call competes for the GIL
                self._keeper.used(self)
                self.last_write = self._clock()
                return
            fd = self._require_open()
            there = self._received.overlap(offset, end)
            for begin, stop in there:
                self._compare(fd, begin, slice_pieces(pieces, begin - offset, stop - offset))
            self._bound_ranges(offset, end)
            try:
                for begin, stop in self._received.gaps(offset, end):
                    views = list(slice_pieces(pieces, begin - offset, stop - offset))
                    self._fill(fd, begin, views, wanted)
            finally:
                # Fewer bytes are missing, and a complete share has to stay open.
                self._keeper.used(self)
            self.unsent_bytes += end - offset
            self.last_write = self._clock()

    def fill_rest(self) -> None:
        """
        Treat what never arrived as zeros, as the holes of the file read: the share is complete.

        Raises:
            NoSuchShare: the upload was finished, aborted or given up meanwhile.
        """
        with self._lock:
            self._require_open()
            self._received.add(0, self.share_bytes)
            self._keeper.used(self)  # it has to stay open now

    def checkpoint(self) -> None:
        """
        Record what has arrived, so that it need not be sent again if this process dies.

        Nothing is synced: this helps after ``kill -9``, not after a power cut, when the note is not used.
        """
        with self._lock:
            if self.gone or self._fd is None:
                return
            self._lay_out_empty()
            ranges = tuple(self._received)
            if ranges == self._noted:
                return
            kept, inode = ranges[: incoming_files.MAX_NOTED_RANGES], os.fstat(self._fd).st_ino
            note = incoming_files.Note(
                self._boot_id, self.secret_hash, inode, self.share_bytes, kept
            )
            try:
                incoming_files.write_note(self._incoming, note)
            except OSError as error:
                raise disk.disk_error(error, f"note the progress of {self._name()}") from error
            self._noted = ranges

    def suspend(self, unpublished: bool = False) -> bool:
        """
        Close the file, unless it is in use or waits to be published (``unpublished``: that has failed).

        Another process may then resume the upload, or discard it to upload the share itself.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._fd is None or (self.complete and not unpublished) or self._beginning:
                return False
            if self._fresh_lease is None:
                self.checkpoint()  # an empty file needs no note
        except ServerRefused:
            return False  # without a note it could not be resumed
        else:
            self._close()
            return True
        finally:
            self._lock.release()

    def begin_writing(self) -> None:
        """
        Make the disk start to write what has arrived, so that ``sync`` takes less time.

        Not under the lock, which the next write needs meanwhile. But ``suspend`` must wait: until a busy disk
        has finished this, the kernel keeps the file and its lock, and not even this process could resume the
        upload.
        """
        with self._lock:
            fd = self._fd
            if fd is None:
                return
            self._beginning = True
        try:
            disk.begin_writing(fd)
        finally:
            self._beginning = False

    def sync(self) -> None:
        """Make the file's own bytes durable (``fsync``), without its name."""
        with self._lock:
            if self._fd is not None:
                os.fsync(self._fd)

    def publish(self) -> tuple[str, ...]:
        """
        Make the complete share visible, by one rename.

        Returns:
            the directories that have changed, to be synced where the policy requires it.

        Raises:
            NoSuchShare: the upload is gone.
            ServerRefused: the disk failed; the upload is closed with a note, or discarded.
        """
        clients = self._keeper.clients
        if not clients.active:
            return self._publish()
        size = share_file.container_bytes(self.share_bytes)
        clients.hold(self.owner, size)  # until it counts as used
        try:
            with clients.changing(self.storage_index, (self._final,)):
                return self._publish()
        finally:
            clients.hold(self.owner, -size)

    def _publish(self) -> tuple[str, ...]:
        with self._lock:
            if self.gone:
                raise self._no_such_upload()
            if self._fd is None:  # a previous attempt failed
                self._require_open()
            assert self.complete, f"{self!r} is published too early"
            try:
                usage = self._keeper.usage
                if usage is None:
                    changed = self._place()
                else:
                    size = share_file.container_bytes(self.share_bytes)
                    changed = usage.placing(self.storage_index, size, self._place)
            except FileExistsError:
                # Another process has finished it meanwhile; its leases must not be lost.
                self._leave()
                raise self._no_such_upload() from None
            except OSError as error:
                if self.suspend(unpublished=True):
                    # Until it is resumed by its note, it may be evicted like others.
                    self._received = Spans()
                else:
                    self.discard()  # it could not be resumed
                raise disk.disk_error(error, f"finish {self._name()}") from error
            if self._noted is not None:
                with suppress(OSError):  # an orphaned note is never used
                    disk.remove(self._incoming + incoming_files.SUFFIX)
            self._leave()
            return changed

    def discard(self) -> None:
        """Remove the unfinished share. Its file is removed only if the name is still that of ours."""
        with self._lock:
            if self.gone:
                return
            try:
                with suppress(PipegridError, OSError):
                    # An empty file is removed without writing the container first.
                    self._reopen_empty()
                    fd = self._require_open() if self._fd is None else self._fd
                    self._remove(fd)
            finally:
                self._leave()

    def close(self) -> None:
        """Close it, and leave a note for a process that resumes it."""
        with self._lock:
            if not self.gone:
                with suppress(ServerRefused):
                    self.checkpoint()
                self.gone = True
                self._close()

    # The methods below run under the lock.

    def _compare(self, fd: int, begin: int, views: Iterator[memoryview]) -> None:
        """Check that the bytes from ``begin`` on are those of the views."""
        for view in views:
            for at in range(0, len(view), _COMPARE_BYTES):
                part = view[at : at + _COMPARE_BYTES]
                try:
                    stored = os.pread(fd, len(part), share_file.HEADER_BYTES + begin + at)
                except OSError as error:
                    raise disk.disk_error(error, f"read {self._name()}") from error
                if stored != part:
                    raise ConflictingWrite(
                        f"other bytes were written to {self._name()} before, near byte "
                        f"{begin + at}; abort the upload and begin it again"
                    )
            begin += len(view)

    def _bound_ranges(self, offset: int, end: int) -> None:
        """Raise if this would be one separate range too many."""
        if len(self._received) < MAX_RANGES or offset == end:
            return
        if not self._received.overlap(offset - 1, end + 1):
            raise ServerRefused(
                f"{self._name()} lies in {MAX_RANGES} separate pieces already; "
                "write the bytes between them first"
            )

    def _fill(
        self, fd: int, begin: int, views: list[memoryview], wanted: Callable[[], bool]
    ) -> None:
        """Write views into a gap, and record every byte that the disk has accepted."""
        while views:
            try:
                written = disk.write_pieces(fd, views, share_file.HEADER_BYTES + begin)
            except OSError as error:
                raise disk.disk_error(error, f"write {self._name()}") from error
            if not wanted():
                raise ServerRefused(f"the write to {self._name()} was given up; write it again")
            self._received.add(begin, begin + written)
            begin += written
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]

    def _lay_out(
        self, lease: bytes, data: Sequence[Buffer], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """
        Write the whole container into the empty file; if that fails, empty the file again.

        Raises:
            ServerRefused: the disk failed, or the data is not wanted any more.
        """
        assert self._fd is not None, "a fresh upload keeps its file open"
        header = share_file.pack_header(self.share_bytes, 1)
        try:
            disk.write_all_pieces(self._fd, [header, *data, lease], 0)
        except OSError as error:
            _empty(self._fd)
            raise disk.disk_error(error, f"write {self._name()}") from error
        if not wanted():
            _empty(self._fd)
            raise ServerRefused(f"the write to {self._name()} was given up; write it again")
        self._fresh_lease = None

    def _inode(self) -> tuple[int, int]:
        """Return the open file's device and number; determined once for each opening."""
        if self._file is None:
            if self._fd is None:
                raise self._no_such_upload()
            status = os.fstat(self._fd)
            self._file = (status.st_dev, status.st_ino)
        return self._file

    def _name(self) -> str:
        return f"share {self.share_number} in {os.path.dirname(self._final)!r}"

    def _no_such_upload(self) -> NoSuchShare:
        return NoSuchShare(
            f"there is no unfinished upload of {self._name()}: it was finished, aborted or given "
            "up; list the shares to see which"
        )

    def _place(self) -> tuple[str, ...]:
        """Give the file its final name; returns the directories that changed."""
        if not disk.names_inode(self._incoming, self._file or self._inode()):
            self._leave()
            raise self._no_such_upload()
        try:
            return incoming_files.rename(self._incoming, self._final, self.new_index)
        except FileExistsError:
            with suppress(OSError):
                disk.remove(self._incoming)
            raise

    def _remove(self, fd: int) -> None:
        incoming_files.remove_own(self._incoming, fd)

    def _lay_out_empty(self) -> None:
        """Write a container without data."""
        if self._fresh_lease is not None:
            # An existing note of that name would apply to bytes of an earlier file.
            try:
                disk.remove(self._incoming + incoming_files.SUFFIX)
            except OSError as error:
                raise self._cannot_go_on(error) from error
            self._lay_out(self._fresh_lease, [bytes(self.share_bytes)])

    def _reopen_empty(self) -> None:
        """
        Open the file again that was closed before anything was written, if the name is still that of ours.
        """
        if self._fresh_lease is None or self._fd is not None or self.gone:
            return
        try:
            fd = incoming_files.open_empty(self._incoming, self._final)
        except OSError as error:
            raise self._cannot_go_on(error) from error
        if fd is None:
            self._leave()
            raise self._no_such_upload()
        self._fd = fd
        self.opened = next(self._openings)

    def _require_open(self) -> int:
        if self.gone:
            raise self._no_such_upload()
        self._reopen_empty()
        self._lay_out_empty()
        if self._fd is None:
            try:
                resumed = incoming_files.resume(self._incoming, self._boot_id, self.secret_hash)
            except OSError as error:
                raise self._cannot_go_on(error) from error
            if resumed is None:
                self._leave()
                raise self._no_such_upload()
            self._fd, note = resumed
            self.opened = next(self._openings)
            self.resumed = True
            self._received = Spans(note.ranges)
            self._noted = tuple(note.ranges)
        self._keeper.used(self)
        return self._fd

    def _cannot_go_on(self, error: OSError) -> ServerRefused:
        return disk.disk_error(error, f"resume {self._name()}")

    def _leave(self) -> None:
        self.gone = True
        self._close()
        self._keeper.forget(self)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = self._file = None


# A share that arrived as a whole, in one request with its allocation: it cannot be resumed. Most small
# shares arrive so (``wire.gbs_bundles``), and a name in ``incoming``, a lock, and a check of that name
# would take half of their time. So such a share has no name before it is published (``disk.atomic_write``).
# If this process dies, nothing of it is left.
#
# Another process may upload the same share meanwhile, unseen. The later one finds that the name exists,
# leaves the share and its leases unchanged, and reports to its client that the upload is gone.

_FORBIDDEN = frozenset(
    {
        *(errno.EACCES, errno.EINVAL, errno.EMLINK, errno.ENOENT, errno.ENOSYS, errno.EOPNOTSUPP),
        *(errno.EPERM, errno.EXDEV),
    }
)
"""Errors that mean that unnamed files cannot be used at all, not that the disk fails now."""

MAX_LEFT = 4096
"""How many names of unfinished uploads are kept in memory; with more, each share's name is looked up."""


class WholeShare(IncomingShare):
    """
    A complete share without a name; created only by ``UnfinishedUploads``.

    Args:
        fd: of its file.
        maker: notified if its file cannot get a name, for a reason that applies to all others.
    """

    # The values of an upload that no client has resumed; class attributes, since assignments would take
    # measurable time.
    client: Client = NOBODY
    owner = 0
    left_behind = False
    unsent_bytes = 0
    resumed = False
    promised_bytes = 0
    gone = False
    stored = False
    new_index = True
    _incoming = ""
    _boot_id = b""
    _fresh_lease = None
    _file: tuple[int, int] | None = None
    _noted: tuple[Range, ...] | None = None
    _came_before = 0
    _beginning = False

    def __init__(
        self,
        key: ShareKey,
        share_bytes: int,
        secret_hash: bytes,
        fd: int,
        final_path: str,
        maker: WholeShares,
    ) -> None:
        self.storage_index, self.share_number = key
        self.share_bytes = share_bytes
        self.secret_hash = secret_hash
        self.last_write = self.began = maker.clock()
        self.opened = next(self._openings)
        self._fd = fd
        self._final = final_path
        self._clock = maker.clock
        self._keeper = maker.keeper
        self._maker = maker
        self._received = Spans.up_to(share_bytes)
        self._lock = threading.RLock()
        self._inode()  # not in the thread that syncs, where each call competes for the GIL

    def checkpoint(self) -> None:
        """Record nothing: a file without a name cannot be resumed."""

    def suspend(self, unpublished: bool = False) -> bool:
        """Stay open: closed, it would be lost."""
        return False

    def _place(self) -> tuple[str, ...]:
        assert self._fd is not None, "its file is open until it is gone"
        try:
            return incoming_files.name(self._fd, self._final, self.new_index)
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno in _FORBIDDEN:
                self._maker.forbid()
            raise

    def _remove(self, fd: int) -> None:
        """Do nothing: it disappears when it is closed."""


class WholeShares:
    """
    Creates complete shares without names, for indexes that have no share yet.

    Args:
        paths: where shares are.
        clock: seconds since 1970.
        keeper: the registry, which is notified of each share's end.
    """

    def __init__(self, paths: Paths, clock: Callable[[], float], keeper: UploadKeeper) -> None:
        self.clock = clock
        self.keeper = keeper
        self._paths = paths
        # Whether unnamed files can be used; None: not tried yet.
        self._possible: bool | None = None
        # Unfinished uploads of other processes; None: too many to keep in memory.
        self._left: frozenset[str] | None = frozenset()

    def make(
        self, key: ShareKey, data: bytes, upload_secret: bytes, make_lease: Callable[[], bytes]
    ) -> WholeShare | None:
        """
        Write a share to its file; None if it has to be uploaded step by step.

        That is the case if its index has a directory, which may contain the share, or if the disk fails;
        then the first step reports the error.
        """
        paths = self._paths
        if self._possible is False or os.access(paths.directory(key[0]), os.F_OK):
            return None
        try:
            if self._possible is None:
                self._look_around()
                if not self._possible:
                    return None
            if self._left is None or self._left:
                name = paths.unfinished(*key)
                if os.path.lexists(name) if self._left is None else name in self._left:
                    return None
            fd = open_unnamed(paths.incoming, PRIVATE_FILE)
        except OSError:
            return None
        try:
            header = share_file.pack_header(len(data), 1)
            disk.write_all_pieces(fd, [header, data, make_lease()], 0)
            return WholeShare(
                key,
                len(data),
                incoming_files.hash_secret(upload_secret),
                fd,
                paths.final(*key),
                self,
            )
        except OSError:
            os.close(fd)
            return None

    def forbid(self) -> None:
        """From now on upload every share step by step."""
        self._possible = False

    def _look_around(self) -> None:
        """
        Find out whether unnamed files can be used, and which uploads are unfinished: those continue in
        their files.

        Uploads that other processes leave later stay until the next process, or housekeeping.
        """
        directory = self._paths.incoming
        self._possible = can_name(directory)
        with os.scandir(directory) as entries:
            names = [entry.path for entry in islice(entries, MAX_LEFT + 1)]
        self._left = None if len(names) > MAX_LEFT else frozenset(names)
