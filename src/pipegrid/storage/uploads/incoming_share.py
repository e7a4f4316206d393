"""One share that a client is uploading: the bytes received, its file, and its publication."""

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
# The file of a small share is empty until the first write, which usually brings all its data. A write fills a
# part of the hole; bytes that were written before are compared with it first. At most 4096 separate ranges
# are recorded.

MAX_RANGES = 4096
_COMPARE_BYTES = 256 * 1024


def _empty(fd: int) -> None:
    with suppress(OSError):  # leftover bytes are overwritten later
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


# While the file of an upload is open, the upload holds the file's lock (``flock``). The kernel releases locks
# when the process ends, so uploads left by dead processes are recognised reliably.
#
# Bytes are written into the file that becomes the share. When nothing is missing, ``publish`` renames the
# file to its place. ``disk.group_commit`` makes the data durable before the rename, and makes the rename
# durable after it. Between writes the file may be closed (``suspend``); then the next write resumes the
# upload by its note, as another process would.


class UploadKeeper(Protocol):
    """
    The registry of all uploads of a store.

    Attributes:
        usage: counts complete shares; None if there is no quota.
        clients: counts the shares of named clients.
    """

    usage: SpaceUsage | None
    clients: ClientUsage

    def used(self, upload: IncomingShare) -> None:
        """Record that an upload was written to, or its file opened."""

    def forget(self, upload: IncomingShare) -> None:
        """Remove an upload that has ended, successfully or not."""


class IncomingShare:
    """
    A share that is being uploaded; created only by ``UnfinishedUploads``, its keeper. Methods may be called
    from any thread.

    Attributes:
        storage_index, share_number: which share this is.
        share_bytes: the length of the share data.
        secret_hash: see ``hash_secret``.
        last_write: when the upload was last written to, in seconds since 1970.
        client, began: the client that the upload belongs to, and since when; see ``eviction``.
        owner: the number of the named client whose quota the upload counts against; 0 for none.
        left_behind: whether an earlier process left the upload, and no client has resumed it yet.
        unsent_bytes: how many bytes were written since the disk was last asked to start writing
            (``begin_writing``).
        opened: a number that rises with every opening of an upload's file in this process.
        gone: whether the upload has ended: published, discarded, or closed for another process.
        stored: whether the share is stored, as durable as required.
        new_index: whether there was no directory for shares of this storage index when the upload began; a
            hint that saves a failing call.
        resumed: whether some bytes were written through an earlier descriptor.
        promised_bytes: how many bytes the registry counts as still to arrive.
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
        self._fresh_lease = begun.lease  # while the file is empty: its lease
        self._file: tuple[int, int] | None = None  # device and inode, once needed
        self._incoming, self._final = begun.path, begun.final_path
        self._boot_id, self._clock = boot_id, clock
        self._keeper = keeper
        self._received = Spans(received)
        self._noted: tuple[Range, ...] | None = tuple(received) or None
        self._came_before = self._received.total
        self._beginning = False  # whether begin_writing is running
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        state = "gone" if self.gone else "closed" if self._fd is None else "open"
        where = self._incoming or self._final
        return (
            f"<IncomingShare {where!r} {state}, {self._received.total} of {self.share_bytes} bytes>"
        )

    @property
    def came_bytes(self) -> int:
        """How many bytes were received since the upload was begun or resumed."""
        return self._received.total - self._came_before

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived; False for an empty share. ``publish`` makes the share visible."""
        return self._received.total == self.share_bytes > 0

    @property
    def remaining_bytes(self) -> int:
        """How many bytes of disk space the upload still needs."""
        return self.share_bytes - self._received.total

    @property
    def descriptor(self) -> int:
        """The file descriptor of a complete share."""
        assert self._fd is not None, f"{self!r} has no file open"
        return self._fd

    @property
    def device(self) -> int:
        """The number of the file system of a complete share."""
        with self._lock:
            return (self._file or self._inode())[0]

    def take_up(self, client: Client) -> None:
        """Make the upload belong to a client, which has proved that it knows the upload secret."""
        now = self._clock()
        self.client = client
        if self.left_behind or now - self.last_write >= WRITTEN_S:
            # Bytes that arrived before this client resumed the upload say nothing about its pace.
            self.left_behind = False
            self.began = now
            self._came_before = self._received.total
        self.last_write = now

    @property
    def is_open(self) -> bool:
        """Whether the upload's file is open, and so locked."""
        return self._fd is not None

    def required(self) -> tuple[Range, ...]:
        """Return the ranges of the share data that have not arrived."""
        with self._lock:
            return tuple(self._received.gaps(0, self.share_bytes))

    def write(
        self, offset: int, pieces: Sequence[Buffer], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """
        Write bytes, given in pieces, at an offset of the share data.

        Before acknowledging the write, call ``checkpoint``; or if the share is ``complete`` now, make it
        durable.

        Args:
            wanted: called after each call to the disk. If it returns False, the buffers may have been reused;
                then what was just written is not counted, and ``ServerRefused`` ends the write.

        Raises:
            NoSuchShare: the upload was finished, aborted or given up meanwhile.
            ServerRefused: the range does not lie in the share, the disk failed, or there are too many
                separate ranges.
            ConflictingWrite: different bytes were written there before; nothing was written.
            NoSpace: the disk is full. Some bytes may have been written, and the upload continues.
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
                self._inode()  # here: in the sync thread each call would compete for the GIL
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
                # The registry must learn that fewer bytes are missing, and that a complete share has to stay
                # open.
                self._keeper.used(self)
            self.unsent_bytes += end - offset
            self.last_write = self._clock()

    def fill_rest(self) -> None:
        """
        Treat bytes that never arrived as zeros, since holes of the file read as zeros. The share is then
        complete.

        Raises:
            NoSuchShare: the upload was finished, aborted or given up meanwhile.
        """
        with self._lock:
            self._require_open()
            self._received.add(0, self.share_bytes)
            self._keeper.used(self)  # a complete share has to stay open

    def checkpoint(self) -> None:
        """
        Record what has arrived, so that it need not be sent again if this process dies.

        Nothing is synced. So this helps after ``kill -9``, but not after a power cut, since the note is not
        used then.
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
        Close the file, unless it is in use or the complete share waits to be published. Return whether it was
        closed.

        Another process may then resume the upload, or discard it to upload the share itself.

        Args:
            unpublished: publishing has failed, so close the file even if the share is complete.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._fd is None or (self.complete and not unpublished) or self._beginning:
                return False
            if self._fresh_lease is None:
                self.checkpoint()  # an empty file needs no note
        except ServerRefused:
            return False  # without a note, the upload could not be resumed
        else:
            self._close()
            return True
        finally:
            self._lock.release()

    def begin_writing(self) -> None:
        """
        Ask the disk to start writing what has arrived, so that ``sync`` takes less time.

        The call does not hold the lock, since the next write may need it meanwhile. But ``suspend`` must not
        close the file during the call: until a busy disk has finished, the kernel would keep the file and its
        lock, and not even this process could resume the upload.
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
        """Make the file's data durable (``fsync``), but not its name."""
        with self._lock:
            if self._fd is not None:
                os.fsync(self._fd)

    def publish(self) -> tuple[str, ...]:
        """
        Make the complete share visible, by one rename.

        Returns:
            the directories that have changed, which must be synced if the policy requires it.

        Raises:
            NoSuchShare: the upload has ended.
            ServerRefused: the disk failed; the upload is closed with a note, or discarded.
        """
        clients = self._keeper.clients
        if not clients.active:
            return self._publish()
        size = share_file.container_bytes(self.share_bytes)
        clients.hold(self.owner, size)  # until the share counts as used
        try:
            with clients.changing(self.storage_index, (self._final,)):
                return self._publish()
        finally:
            clients.hold(self.owner, -size)

    def _publish(self) -> tuple[str, ...]:
        with self._lock:
            if self.gone:
                raise self._no_such_upload()
            if self._fd is None:  # an earlier attempt to publish failed
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
                # Another process has finished the share meanwhile. That share is kept, so that its leases are
                # not lost.
                self._leave()
                raise self._no_such_upload() from None
            except OSError as error:
                if self.suspend(unpublished=True):
                    # Until the upload is resumed by its note, it may be evicted like others, so it must not
                    # count as complete.
                    self._received = Spans()
                else:
                    self.discard()  # the upload could not be resumed
                raise disk.disk_error(error, f"finish {self._name()}") from error
            if self._noted is not None:
                with suppress(OSError):  # an orphaned note is never used
                    disk.remove(self._incoming + incoming_files.SUFFIX)
            self._leave()
            return changed

    def discard(self) -> None:
        """
        Remove the unfinished share. Its file is removed only if the path still names the file of this upload.
        """
        with self._lock:
            if self.gone:
                return
            try:
                with suppress(PipegridError, OSError):
                    # An empty file is opened as it is, so that it is removed without writing a container
                    # first.
                    self._reopen_empty()
                    fd = self._require_open() if self._fd is None else self._fd
                    self._remove(fd)
            finally:
                self._leave()

    def close(self) -> None:
        """End the upload in this process, and leave a note for a process that resumes it."""
        with self._lock:
            if not self.gone:
                with suppress(ServerRefused):
                    self.checkpoint()
                self.gone = True
                self._close()

    # The methods below are called while ``_lock`` is held.

    def _compare(self, fd: int, begin: int, views: Iterator[memoryview]) -> None:
        """Check that the bytes stored from ``begin`` on are the same as those of the views."""
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
        """Raise an error if a write would make one separate range too many."""
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
        Write the whole container into the empty file. If the write fails, empty the file again.

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
        """Return device and inode number of the open file, which are determined once for each opening."""
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
        """Give the file its final name; return the directories that changed."""
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
        """If the file is still empty, write a container whose data are zeros."""
        if self._fresh_lease is not None:
            # A note that exists already is about an earlier file, so it is removed.
            try:
                disk.remove(self._incoming + incoming_files.SUFFIX)
            except OSError as error:
                raise self._cannot_go_on(error) from error
            self._lay_out(self._fresh_lease, [bytes(self.share_bytes)])

    def _reopen_empty(self) -> None:
        """
        Open again a file that was closed before anything was written to it. The upload has ended if the path
        names another file.
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


# A share that arrived as a whole, in one request along with its allocation. Most small shares arrive like
# this (``wire.gbs_bundles``). A name in ``incoming``, a lock, and a check of the name would take half of the
# time. So such a share has no name before it is published (``disk.atomic_write``). Its upload cannot be
# resumed: if this process dies, nothing is left.
#
# Another process may upload the same share at the same time, without seeing this upload. The process that
# publishes later finds that the name exists, leaves the published share and its leases unchanged, and reports
# to its client that the upload is gone.

_FORBIDDEN = frozenset(
    {
        *(errno.EACCES, errno.EINVAL, errno.EMLINK, errno.ENOENT, errno.ENOSYS, errno.EOPNOTSUPP),
        *(errno.EPERM, errno.EXDEV),
    }
)
"""Errors which mean that unnamed files cannot be used at all. Other errors mean that the disk fails now."""

MAX_LEFT = 4096
"""Maximum number of names of unfinished uploads in memory. With more, each name is looked up on disk."""


class WholeShare(IncomingShare):
    """
    A complete share without a name; created only by ``UnfinishedUploads``.

    Args:
        fd: the descriptor of the share's file.
        maker: is notified if the file cannot get a name, for a reason that applies to all files.
    """

    # The values for an upload that no client has resumed. They are class attributes, since assigning them
    # would take measurable time.
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
        self._inode()  # here: in the sync thread each call would compete for the GIL

    def checkpoint(self) -> None:
        """Record nothing: a file without a name cannot be resumed."""

    def suspend(self, unpublished: bool = False) -> bool:
        """Do nothing and return False: a closed file without a name would be lost."""
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
        """Do nothing: a file without a name disappears when it is closed."""


class WholeShares:
    """
    Creates complete shares without names, for storage indexes that have no share yet.

    Args:
        paths: the paths of shares.
        clock: seconds since 1970.
        keeper: the registry, which is notified of each share's end.
    """

    def __init__(self, paths: Paths, clock: Callable[[], float], keeper: UploadKeeper) -> None:
        self.clock = clock
        self.keeper = keeper
        self._paths = paths
        # Whether unnamed files can be used; None: not tried yet.
        self._possible: bool | None = None
        # Paths of the unfinished uploads of other processes; None: there are too many to keep in memory.
        self._left: frozenset[str] | None = frozenset()

    def make(
        self, key: ShareKey, data: bytes, upload_secret: bytes, make_lease: Callable[[], bytes]
    ) -> WholeShare | None:
        """
        Write a share to a new file without a name. Return None if the share has to be uploaded step by step.

        A share has to be uploaded step by step if unnamed files cannot be used, if its storage index has a
        directory, which may contain the share, if another process has begun to upload the share, or if the
        disk fails; then the first step reports the error.
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
        """Make every share be uploaded step by step from now on."""
        self._possible = False

    def _look_around(self) -> None:
        """
        Find out whether unnamed files can be used, and which uploads are unfinished. Those uploads continue
        in their files.

        If another process leaves uploads after this, they are kept until the next process or housekeeping
        handles them.
        """
        directory = self._paths.incoming
        self._possible = can_name(directory)
        with os.scandir(directory) as entries:
            names = [entry.path for entry in islice(entries, MAX_LEFT + 1)]
        self._left = None if len(names) > MAX_LEFT else frozenset(names)
