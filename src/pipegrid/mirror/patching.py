"""
One pass over an index, from its pieces to the new one: read, count lines, hash, write.

The reader counts line ends a page at a time, in blocks, so that a piece's beginning is found among a few
kilobytes; a thread beside it hashes and writes. ``PAGES`` megabytes go round between the two, whatever
the size of the index: memory that is touched for the first time would cost as much as reading and
writing do.

**Speed.** Counting: ``bytearray.count`` takes 0.2 s for 430 MB in lines of 70 bytes, numpy half of that, and
a tenth of a second to be loaded, so that small indexes go without; but it lets the other thread work.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from hashlib import sha256
from queue import SimpleQueue
from threading import BoundedSemaphore, Thread
from typing import Any, NamedTuple

from pipegrid.mirror.pdiff import END, MAX_EDITS, LineEdit, Piece, merge, parse
from pipegrid.mirror.unpacking import CHUNK_BYTES, PatchError, Unpacking, unpacked
from pipegrid.mirror.wanted import quoted

BLOCK_BYTES = 16 << 10
PAGES = 6
"""Of ``CHUNK_BYTES`` each."""

WORTH_NUMPY_BYTES = 64 << 20
"""Of an index, packed or not."""

MOST_PIECES = 500
"""Of one write; systems take 1024 at least."""

MAX_PATCH_BYTES = 128 << 20
"""Of one patch, unpacked. Those of the largest indexes have a few megabytes."""

MAX_PATCHES = 1000
MAX_ALL_PATCHES_BYTES = 256 << 20
"""Of all patches of an index, unpacked: they are merged in memory."""

MAX_PATCH_LINES = 4_000_000
"""Of the same: each takes 50 bytes more than it has. The patches of two weeks of sid have a million."""


class Patched(NamedTuple):
    """
    What came out.

    Attributes:
        size_bytes: of the result.
        digest: its SHA-256.
    """

    size_bytes: int
    digest: bytes


def apply_patches(
    index: str, patches: Sequence[str], fd: int, most_bytes: int | None = None
) -> Patched:
    """
    Write what the patches, one behind the other, make of an index.

    Args:
        index: its path; packed ones are unpacked on the way.
        patches: their paths, oldest first; packed or not. Without any the index is unpacked.
        fd: what the result is written to, from where it stands.
        most_bytes: of the result; beyond that it is an error.

    Raises:
        PatchError: a patch is damaged, too large, or not for this index.
        OSError: a file cannot be read or written.
    """
    if len(patches) > MAX_PATCHES:
        raise PatchError(f"{len(patches)} patches are too many; fetch the index again")
    return write_pieces(index, merge(_parsed(patches)), fd, most_bytes)


def _parsed(patches: Sequence[str]) -> list[list[LineEdit]]:
    """Return the edits of each. Raises PatchError if all together have too much of anything."""
    parsed: list[list[LineEdit]] = []
    size = lines = edits = 0
    for path in patches:
        patch = read_patch(path)
        size += len(patch)
        if size > MAX_ALL_PATCHES_BYTES:
            raise PatchError(
                f"the patches have more than {MAX_ALL_PATCHES_BYTES} bytes together; fetch the index again"
            )
        lines += patch.count(b"\n")
        if lines > MAX_PATCH_LINES:
            raise PatchError(
                f"the patches have more than {MAX_PATCH_LINES} lines together; fetch the index again"
            )
        parsed.append(parse(patch, path, MAX_EDITS - edits))
        edits += len(parsed[-1])
    return parsed


def read_patch(path: str) -> bytes:
    """
    Return a patch, unpacked.

    Raises:
        PatchError: it is damaged, or larger than ``MAX_PATCH_BYTES``.
    """
    parts = []
    size = 0
    for part in unpacked(path):
        size += len(part)
        if size > MAX_PATCH_BYTES:
            raise PatchError(f"the patch {path} is larger than {MAX_PATCH_BYTES} bytes")
        parts.append(bytes(part))
    return b"".join(parts)


def write_pieces(
    index: str, pieces: Sequence[Piece], fd: int, most_bytes: int | None = None
) -> Patched:
    """
    Write an index's pieces, in one pass over it.

    Raises:
        PatchError: the index has fewer lines than the pieces speak of, is damaged, or becomes too large.
        OSError: it cannot be read, or the result not written.
    """
    # In this order: a thread that nobody stops would keep the whole process from its end.
    with closing(Unpacking(index)) as unpacking, closing(_Writer(fd, most_bytes, index)) as writer:
        source = _Lines(unpacking, os.path.getsize(index), writer)
        line = 0
        for piece in pieces:
            if isinstance(piece, list):
                writer.write(b"".join(piece))
                continue
            first, last = piece
            for end, kept in ((first, False), (last, True)):
                missing = source.advance(end - line, kept)
                if missing and end != END:
                    raise PatchError(
                        f"a patch is not for {quoted(index)}: it speaks of line {end},"
                        f" and there are {end - missing}"
                    )
                line = end
        return writer.finish()


class _Page:
    """A part of the index, and where its lines end."""

    def __init__(self, data: bytearray, size_bytes: int, ends: _Ends) -> None:
        self.data = data
        self.size_bytes = size_bytes
        self.at = 0
        self._ends = ends
        self._view = memoryview(data)
        self._counts: list[int] | None = None
        self._block = 0
        self._passed = 0  # line ends of the block that are behind us
        self._left = 0

    def take(self, lines: int) -> tuple[memoryview, int]:
        """Return the bytes of the next so many lines, or all that are left; and how many ends they have."""
        start = self.at
        if lines >= END >> 1:  # all of it, so nobody counts
            self.at = self.size_bytes
            return self._view[start : self.at], 0
        if self._counts is None:
            self._counts = self._ends.count(self.data, self.size_bytes)
            self._left = sum(self._counts)
        if lines > self._left:
            self.at = self.size_bytes
            ends, self._left = self._left, 0
            return self._view[start : self.at], ends
        self._left -= lines
        wanted = lines + self._passed
        while wanted > self._counts[self._block]:
            wanted -= self._counts[self._block]
            self._block += 1
        self._passed = wanted
        self.at = self._ends.behind(self.data, self._block * BLOCK_BYTES, wanted)
        return self._view[start : self.at], lines


class _Ends:
    """Where the lines of the page end that was counted last."""

    def count(self, data: bytearray, size_bytes: int) -> list[int]:
        """How many lines end in each block."""
        return [
            data.count(b"\n", start, min(start + BLOCK_BYTES, size_bytes))
            for start in range(0, size_bytes, BLOCK_BYTES)
        ]

    def behind(self, data: bytearray, start: int, number: int) -> int:
        """Return what follows the so-manyeth end of the block that starts there."""
        at = start
        for _ in range(number):
            at = data.index(b"\n", at) + 1
        return at


class _NumpyEnds(_Ends):
    """The same, quicker, and without keeping the other thread waiting."""

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy
        self._is_end = numpy.empty(CHUNK_BYTES, dtype=bool)

    def count(self, data: bytearray, size_bytes: int) -> list[int]:
        numpy, is_end = self._numpy, self._is_end
        numpy.equal(numpy.frombuffer(data, numpy.uint8), 10, out=is_end)
        is_end[size_bytes:] = False  # what the page had before
        return [
            int(numpy.count_nonzero(is_end[start : start + BLOCK_BYTES]))
            for start in range(0, size_bytes, BLOCK_BYTES)
        ]

    def behind(self, data: bytearray, start: int, number: int) -> int:
        block = self._is_end[start : start + BLOCK_BYTES]
        return start + int(self._numpy.flatnonzero(block)[number - 1]) + 1


class _Lines:
    """The lines of an index, passed over once; what is kept of them goes to a writer."""

    def __init__(self, source: Unpacking, size_bytes: int, writer: _Writer) -> None:
        self._writer = writer
        self._source = source
        numpy = _numpy() if size_bytes >= WORTH_NUMPY_BYTES else None
        self._ends = _Ends() if numpy is None else _NumpyEnds(numpy)
        self._page = _Page(bytearray(), 0, self._ends)
        self._unended = False

    def advance(self, lines: int, kept: bool) -> int:
        """Go on by so many lines, and keep them, or not; returns how many are missing at the end."""
        while lines > 0:
            page = self._page
            if page.at == page.size_bytes:
                if not self._turn():
                    # A last line without an end is a line.
                    missing = lines - (1 if self._unended else 0)
                    self._unended = False
                    return missing
                page = self._page
            view, ends = page.take(lines)
            if view:
                self._unended = view[-1] != 10
                if kept:
                    self._writer.write(view)
            lines -= ends
        return 0

    def _turn(self) -> bool:
        """Give the page to the writer, to be used again, and read another; returns whether there was more."""
        data = self._writer.other_page(self._page.data)
        self._page = _Page(data, self._source.read_into(data), self._ends)
        return self._page.size_bytes > 0


class _Work(NamedTuple):
    """What the writer's thread is given: what to write, and the page that nobody needs then."""

    pieces: list[bytes | memoryview]
    page: bytearray | None


class _Writer:
    """Hashes and writes in a thread, in order; what is read goes through ``PAGES`` pages."""

    def __init__(self, fd: int, most_bytes: int | None, index: str) -> None:
        self._fd = fd
        self._most_bytes = most_bytes
        self._index = index
        self._hash = sha256()
        self._size = 0
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._room = BoundedSemaphore(PAGES)  # texts of patches come without pages
        self._free: SimpleQueue[bytearray] = SimpleQueue()
        self._pages = 0
        self._gathered: list[bytes | memoryview] = []
        self._gathered_bytes = 0
        self._error: BaseException | None = None
        self._thread: Thread | None = Thread(target=self._work, name="pipegrid-patch")
        self._thread.start()

    def write(self, data: bytes | memoryview) -> None:
        """Write some more; it must not change until its page comes back."""
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= CHUNK_BYTES or len(self._gathered) >= MOST_PIECES:
            self._hand_over(None)

    def other_page(self, used: bytearray) -> bytearray:
        """Take back a page of which all was written that is to be, and return one to read into."""
        self._hand_over(used if used else None)
        if self._pages < PAGES:
            self._pages += 1
            return bytearray(CHUNK_BYTES)
        return self._free.get()

    def finish(self) -> Patched:
        """Wait until all is written."""
        self._hand_over(None)
        self.close()
        if self._error is not None:
            raise self._error
        return Patched(self._size, self._hash.digest())

    def close(self) -> None:
        """End the thread, behind all that it was given; a second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _hand_over(self, page: bytearray | None) -> None:
        if self._error is not None:
            raise self._error
        self._size += self._gathered_bytes
        if self._most_bytes is not None and self._size > self._most_bytes:
            raise PatchError(
                f"what becomes of {quoted(self._index)} has more than {self._most_bytes} bytes"
            )
        if self._gathered or page is not None:
            self._room.acquire()
            self._queue.put(_Work(self._gathered, page))
            self._gathered, self._gathered_bytes = [], 0

    def _work(self) -> None:
        """Hash and write what is queued, until None comes; in the thread."""
        while (work := self._queue.get()) is not None:
            if self._error is None and work.pieces:
                self._hash_and_write(work.pieces)
            work.pieces.clear()
            self._room.release()
            if work.page is not None:
                self._free.put(work.page)

    def _hash_and_write(self, pieces: Sequence[bytes | memoryview]) -> None:
        try:
            for piece in pieces:
                self._hash.update(piece)
            self._write_all(pieces)
        except BaseException as error:  # for whoever waits in ``finish``
            self._error = error

    def _write_all(self, pieces: Sequence[bytes | memoryview]) -> None:
        written = os.writev(self._fd, pieces)
        if written < sum(map(len, pieces)):
            view = memoryview(b"".join(pieces))[written:]
            while view:
                view = view[os.write(self._fd, view) :]


@lru_cache(maxsize=1)
def _numpy() -> Any:
    # Its linear algebra would start a thread for each processor, which takes as long again as all the rest.
    variable = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(variable)
    os.environ.setdefault(variable, "1")
    try:
        import numpy
    except ImportError:
        return None
    finally:
        if before is None:
            del os.environ[variable]
    return numpy
