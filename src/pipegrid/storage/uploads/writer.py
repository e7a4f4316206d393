"""
The file of a share that is being written, as long as it is open: bytes in any order, straight into what will
become the share's container.

**What is where.** The file is the whole container from the start: header, a hole of the share's length,
first lease. A small share's file is empty until the first write, which as a rule brings all its data at once.
A write fills part of the hole, after what was there already has been compared with it. At most 4096
separate ranges are kept account of.

Whose the file is, when it is closed, noted, taken up again and published, is the business of ``upload``; the
other direction, complete shares, of ``reader``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from pipegrid.core.hashes import Buffer
from pipegrid.core.spans import Spans
from pipegrid.disk import files as disk
from pipegrid.errors import ConflictingWrite, NoSuchShare, ServerRefused
from pipegrid.storage import containers

MAX_RANGES = 4096
_COMPARE_BYTES = 256 * 1024


class ShareWriter:
    """
    What fills a share's file; a ``ShareUpload`` is one, and calls the rest of it under its lock.

    Attributes:
        share_number, share_bytes: which share of its index, and the length of its data.
    """

    # Whoever is one sets these: a call to an ``__init__`` is half a per cent of what a small share costs.
    share_number: int
    share_bytes: int
    _final: str  # where the share will be; for messages
    _fd: int | None
    _received: Spans
    _fresh_lease: bytes | None  # while the file is empty: what is to stand at its end
    _file: tuple[int, int] | None  # device and number of the open file, once somebody has asked
    _lock: threading.RLock

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived. It becomes visible only by ``publish``."""
        return self._received.total == self.share_bytes > 0

    @property
    def remaining_bytes(self) -> int:
        """Room that the disk still has to find for it."""
        return self.share_bytes - self._received.total

    @property
    def descriptor(self) -> int:
        """The open file of a complete share."""
        assert self._fd is not None, f"{self!r} has no file open"
        return self._fd

    @property
    def device(self) -> int:
        """The number of the file system that a complete share is on."""
        with self._lock:
            return (self._file or self._inode())[0]

    # Under the lock.

    def _compare(self, fd: int, begin: int, views: Iterator[memoryview]) -> None:
        """Make sure that what was written from ``begin`` on is what these views hold."""
        for view in views:
            for at in range(0, len(view), _COMPARE_BYTES):
                part = view[at : at + _COMPARE_BYTES]
                try:
                    stored = os.pread(fd, len(part), containers.HEADER_BYTES + begin + at)
                except OSError as error:
                    raise disk.disk_error(error, f"read {self._name()}") from error
                if stored != part:
                    raise ConflictingWrite(
                        f"other bytes were written to {self._name()} before, near byte "
                        f"{begin + at}; abort the upload and begin anew"
                    )
            begin += len(view)

    def _bound_ranges(self, offset: int, end: int) -> None:
        """Refuse one more separate range where there are too many."""
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
        """Write views into a gap, and keep account of every byte that the disk has taken."""
        while views:
            try:
                written = disk.write_pieces(fd, views, containers.HEADER_BYTES + begin)
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
        Write the whole container into the empty file; if that fails, the file is empty again.

        Raises:
            ServerRefused: the disk failed, or the data is not wanted any more.
        """
        assert self._fd is not None, "a fresh upload keeps its file open"
        header = containers.pack_header(self.share_bytes, 1)
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
        """Return the open file's device and number; asked for once for each opening."""
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


def _empty(fd: int) -> None:
    with suppress(OSError):  # what it holds is written over
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
