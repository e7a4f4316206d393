"""
One unfinished share: whose it is, and how it becomes the share.

**Whose it is.** An upload holds the lock (``flock``) of its file in ``incoming`` while that file is open.
The kernel drops locks with the process, so a dead process's leftovers are told from a living one's
uploads without any guessing about time.

**Its end.** What is written goes straight into the file that will become the share (see ``writer``). When
nothing is missing, ``publish`` renames it to its final place; making the data durable before, and the rename
after, is for ``durability`` to arrange.

**Between writes** the file may be closed (``suspend``), and then the note beside it (``sidecar``) is all
there is to go by: the next write takes the upload up again as another process would.

Every method may be called from any thread; each upload has a lock of its own.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from pipegrid.core.hashes import Buffer
from pipegrid.core.spans import Range, Spans
from pipegrid.disk import files as disk
from pipegrid.errors import PipegridError, ServerRefused
from pipegrid.storage.paths import ShareKey
from pipegrid.storage.uploads import files as incoming
from pipegrid.storage.uploads import note as sidecar
from pipegrid.storage.uploads.beginning import BegunFile
from pipegrid.storage.uploads.standing import NOBODY, WRITTEN_S, Client
from pipegrid.storage.uploads.writer import ShareWriter, slice_pieces


class UploadKeeper(Protocol):
    """Who knows all uploads of a store."""

    def used(self, upload: ShareUpload) -> None:
        """It was written to, or opened."""

    def forget(self, upload: ShareUpload) -> None:
        """It has ended, well or not."""


class ShareUpload(ShareWriter):
    """
    A share that is being written; made by ``UnfinishedUploads`` alone, its keeper.

    Attributes:
        storage_index: of its share; the rest of that is ``ShareWriter``'s.
        secret_hash: see ``note.hash_secret``.
        last_write: when it was last written to, in seconds since 1970.
        client, began: who has it, and since when: see ``standing``.
        left_behind: an earlier process left it, and nobody has taken it up yet.
        unsent_bytes: written since the disk was last asked to begin with them (``begin_writing``).
        opened: rises with every opening of an upload's file in this process.
        gone: whether it has ended: published, discarded, or let go of.
        stored: whether its share is there, as durable as was asked for.
        new_index: whether there was no directory for shares of this index when it began; a hint that saves a
            vain attempt.
        resumed: whether some of it was written through an earlier descriptor than the present one.
        promised_bytes: what the table counts as still to come.
    """

    _openings = itertools.count()

    def __init__(
        self,
        key: ShareKey,
        share_bytes: int,
        secret_hash: bytes,
        begun: BegunFile,
        boot_id: bytes,
        clock: Callable[[], float],
        keeper: UploadKeeper,
    ) -> None:
        received = () if begun.note is None else begun.note.ranges
        self.storage_index, self.share_number = key
        self.share_bytes, self.secret_hash = share_bytes, secret_hash
        self.last_write = self.began = clock()
        self.client = NOBODY
        self.left_behind = self.new_index = self.gone = self.stored = False
        self.unsent_bytes = self.promised_bytes = 0
        self.opened = next(self._openings)
        self.resumed = bool(received)
        self.resumed = bool(received)
        self._fd = begun.fd
        self._fresh_lease = begun.lease
        self._file: tuple[int, int] | None = None
        self._incoming, self._final = begun.path, begun.final_path
        self._boot_id, self._clock = boot_id, clock
        self._keeper = keeper
        self._received = Spans(received)
        self._noted: tuple[Range, ...] | None = tuple(received) or None
        self._came_before = self._received.total
        self._beginning = False  # the disk is being asked to begin with it
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        state = "gone" if self.gone else "closed" if self._fd is None else "open"
        where = self._incoming or self._final
        return (
            f"<ShareUpload {where!r} {state}, {self._received.total} of {self.share_bytes} bytes>"
        )

    @property
    def came_bytes(self) -> int:
        """What has been received since it was begun, or taken up."""
        return self._received.total - self._came_before

    def take_up(self, client: Client) -> None:
        """Have it belong to a client that knows its secret, and go on with it from now."""
        now = self._clock()
        self.client = client
        if self.left_behind or now - self.last_write >= WRITTEN_S:
            # What had come before says nothing about its pace.
            self.left_behind = False
            self.began = now
            self._came_before = self._received.total
        self.last_write = now

    @property
    def is_open(self) -> bool:
        """Whether it holds a file descriptor, and with it the lock."""
        return self._fd is not None

    def required(self) -> tuple[Range, ...]:
        """Return what is still missing."""
        with self._lock:
            return tuple(self._received.gaps(0, self.share_bytes))

    def write(
        self, offset: int, pieces: Sequence[Buffer], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """
        Write bytes at an offset of the share data; in pieces, so that nobody has to join them.

        Call ``checkpoint`` before acknowledging it, or have the share made durable if it is
        ``complete`` now.

        Args:
            wanted: asked after each call to the disk. Once it says no, somebody may have used the buffers for
                other things, so what was just written is not counted, and ``ServerRefused`` ends the write.

        Raises:
            NoSuchShare: the upload was finished, aborted or given up meanwhile.
            ServerRefused: the range does not lie in the share, the disk failed, or too many separate
                ranges have been written.
            ConflictingWrite: other bytes are there; nothing was written.
            NoSpace: the disk is full; some of it may have been written, and the upload goes on.
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
                self._inode()  # not in the thread that syncs: each call there fights for the interpreter
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
                # Less is to come, and if it is complete it has to stay open now.
                self._keeper.used(self)
            self.unsent_bytes += end - offset
            self.last_write = self._clock()

    def fill_rest(self) -> None:
        """
        Take what never came for zeros, which the hole in the file is made of: the share is complete.

        Raises:
            NoSuchShare: the upload was finished, aborted or given up meanwhile.
        """
        with self._lock:
            self._require_open()
            self._received.add(0, self.share_bytes)
            self._keeper.used(self)  # it has to stay open now

    def checkpoint(self) -> None:
        """
        Note what has arrived, so that it need not be sent again if this process dies.

        Nothing is forced to the disk: that guards against ``kill -9``, not against a power cut,
        after which the note is not believed.
        """
        with self._lock:
            if self.gone or self._fd is None:
                return
            self._lay_out_empty()
            ranges = tuple(self._received)
            if ranges == self._noted:
                return
            kept, inode = ranges[: sidecar.MAX_NOTED_RANGES], os.fstat(self._fd).st_ino
            note = sidecar.Note(self._boot_id, self.secret_hash, inode, self.share_bytes, kept)
            try:
                incoming.write_note(self._incoming, note)
            except OSError as error:
                raise disk.disk_error(error, f"note the progress of {self._name()}") from error
            self._noted = ranges

    def suspend(self, unpublished: bool = False) -> bool:
        """
        Close the file, if nobody uses it and it is not about to be published (``unpublished``: was, in vain).

        Another process may then take the upload over, or discard it to upload the share itself.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._fd is None or (self.complete and not unpublished) or self._beginning:
                return False
            if self._fresh_lease is None:
                self.checkpoint()  # an empty file is as good without a note
        except ServerRefused:
            return False  # without a note it could not be taken up again
        else:
            self._close()
            return True
        finally:
            self._lock.release()

    def begin_writing(self) -> None:
        """
        Have the disk begin with what was written so far, so that ``sync`` will have less to wait for.

        Not under the lock, which the next write wants meanwhile. But ``suspend`` has to wait: as long as a
        busy disk makes this take the kernel keeps the file, and its lock, and nobody could take the upload
        up again, not even we.
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
        """Make the file's own bytes durable (``fsync``); its name is another matter."""
        with self._lock:
            if self._fd is not None:
                os.fsync(self._fd)

    def publish(self) -> tuple[str, ...]:
        """
        Make the complete share visible, by one rename.

        Returns:
            the directories whose entries have changed: to be synced, where durability demands it.

        Raises:
            NoSuchShare: the upload is gone.
            ServerRefused: the disk failed; the upload stays, closed with a note, or goes.
        """
        with self._lock:
            if self.gone:
                raise self._no_such_upload()
            if self._fd is None:  # it failed before
                self._require_open()
            assert self.complete, f"{self!r} is published too early"
            try:
                changed = self._place()
            except FileExistsError:
                # Another process has finished it meanwhile; its leases are not to be lost.
                self._leave()
                raise self._no_such_upload() from None
            except OSError as error:
                if self.suspend(unpublished=True):
                    # Until it is taken up, by its note, it makes room as others do.
                    self._received = Spans()
                else:
                    self.discard()  # nobody could come back
                raise disk.disk_error(error, f"finish {self._name()}") from error
            if self._noted is not None:
                with suppress(OSError):  # an orphaned note vouches for nothing
                    disk.remove(self._incoming + sidecar.SUFFIX)
            self._leave()
            return changed

    def discard(self) -> None:
        """Remove the unfinished share. Its file is removed only if it is still ours."""
        with self._lock:
            if self.gone:
                return
            try:
                with suppress(PipegridError, OSError):
                    # An empty file is not laid out to be removed.
                    self._reopen_empty()
                    fd = self._require_open() if self._fd is None else self._fd
                    self._remove(fd)
            finally:
                self._leave()

    def close(self) -> None:
        """Let go of it, and leave a note for whoever resumes it."""
        with self._lock:
            if not self.gone:
                with suppress(ServerRefused):
                    self.checkpoint()
                self.gone = True
                self._close()

    # The rest runs under the lock.

    def _place(self) -> tuple[str, ...]:
        """Give the file its last name; returns the directories that changed."""
        if not disk.names_inode(self._incoming, self._file or self._inode()):
            self._leave()
            raise self._no_such_upload()
        try:
            return incoming.rename(self._incoming, self._final, self.new_index)
        except FileExistsError:
            with suppress(OSError):
                disk.remove(self._incoming)
            raise

    def _remove(self, fd: int) -> None:
        incoming.remove_own(self._incoming, fd)

    def _lay_out_empty(self) -> None:
        """Have a container, without data as yet."""
        if self._fresh_lease is not None:
            # An old note of that name would vouch for bytes that an earlier file had.
            try:
                disk.remove(self._incoming + sidecar.SUFFIX)
            except OSError as error:
                raise self._cannot_go_on(error) from error
            self._lay_out(self._fresh_lease, [bytes(self.share_bytes)])

    def _reopen_empty(self) -> None:
        """Open the file again that was closed before anything was written to it, if it is still ours."""
        if self._fresh_lease is None or self._fd is not None or self.gone:
            return
        try:
            fd = incoming.open_empty(self._incoming, self._final)
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
                resumed = incoming.resume(self._incoming, self._boot_id, self.secret_hash)
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
        return disk.disk_error(error, f"go on with {self._name()}")

    def _leave(self) -> None:
        self.gone = True
        self._close()
        self._keeper.forget(self)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = self._file = None
