"""
One pass over an index, from its pieces to the new one: read, count lines, hash, write.

The reader counts line ends a megabyte at a time, in blocks, so that a piece's beginning is found among a
few kilobytes; a thread beside it hashes and writes. Nothing is held but ``QUEUED`` megabytes and a
little, whatever the size of the index.

**Speed.** Counting is what costs: ``bytes.count`` looks for one line end after the other (0.6 s for 430
MB), numpy compares 32 bytes at once (0.06 s), but takes as long to load as a small index to be counted.
Without numpy it is slower, and right.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from queue import SimpleQueue
from threading import BoundedSemaphore, Thread
from typing import Any, NamedTuple

from pipegrid.mirror.pdiff import END, Piece, merge, parse
from pipegrid.mirror.unpacking import CHUNK_BYTES, PatchError, unpacked
from pipegrid.mirror.wanted import shown

BLOCK_BYTES = 16 << 10
QUEUED = 4
WORTH_NUMPY_BYTES = 64 << 20
"""Of an index, packed or not."""

MOST_PIECES = 500
"""Of one write; systems take 1024 at least."""

MAX_PATCH_BYTES = 128 << 20
"""Of one patch, unpacked. Those of the largest indexes have a few megabytes."""

MAX_PATCHES = 1000
MAX_ALL_PATCHES_BYTES = 256 << 20
"""Of all patches of an index, unpacked: they are merged in memory."""


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
        raise PatchError(f"{len(patches)} patches are too many; fetch the index anew")
    parsed, size = [], 0
    for path in patches:
        patch = read_patch(path)
        size += len(patch)
        if size > MAX_ALL_PATCHES_BYTES:
            raise PatchError(
                f"the patches have more than {MAX_ALL_PATCHES_BYTES} bytes together; fetch the index anew"
            )
        parsed.append(parse(patch, path))
    pieces = merge(parsed)
    return write_pieces(index, pieces, fd, most_bytes)


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
    source = _Lines(index)
    writer = _Writer(fd, most_bytes, index)
    try:
        line = 0
        for piece in pieces:
            if isinstance(piece, list):
                writer.write(b"".join(piece))
                continue
            first, last = piece
            for end, kept in ((first, None), (last, writer)):
                missing = source.advance(end - line, kept)
                if missing and end != END:
                    raise PatchError(
                        f"a patch is not for {shown(index)}: it speaks of line {end},"
                        f" and there are {end - missing}"
                    )
                line = end
        return writer.finish()
    finally:
        writer.stop()
        source.close()


class _Chunk:
    """A part of the index, and where its lines end."""

    def __init__(self, data: Any, numpy: Any) -> None:
        self.view = memoryview(data)
        self._numpy = numpy
        self.at = 0
        self._counts: list[int] | None = None
        self._block = 0
        self._passed = 0  # line ends of the block that are behind us
        self._left = 0

    def take(self, lines: int) -> tuple[memoryview, int]:
        """Return the bytes of the next so many lines, or all that are left; and how many ends they have."""
        if lines >= END >> 1:  # all of it, so nobody counts
            rest, self.at = self.view[self.at :], len(self.view)
            return rest, 0
        if self._counts is None:
            self._counts = _count_blocks(self.view, self._numpy)
            self._left = sum(self._counts)
        start = self.at
        if lines > self._left:
            self.at = len(self.view)
            ends, self._left = self._left, 0
            return self.view[start:], ends
        self._left -= lines
        wanted = lines + self._passed
        while wanted > self._counts[self._block]:
            wanted -= self._counts[self._block]
            self._block += 1
        self._passed = wanted
        begin = self._block * BLOCK_BYTES
        self.at = begin + _find_end(self.view[begin : begin + BLOCK_BYTES], wanted, self._numpy)
        return self.view[start : self.at], lines


class _Lines:
    """The lines of an index, passed over once."""

    def __init__(self, path: str) -> None:
        self._parts = unpacked(path)
        self._numpy = _numpy() if os.path.getsize(path) >= WORTH_NUMPY_BYTES else None
        self._chunk = _Chunk(b"", self._numpy)
        self._unended = False

    def advance(self, lines: int, writer: _Writer | None) -> int:
        """Go on by so many lines, and write them, or not; returns how many are missing at the end."""
        while lines > 0:
            chunk = self._chunk
            if chunk.at == len(chunk.view):
                data = next(self._parts, None)
                if data is None:
                    # A last line without an end is a line.
                    missing = lines - (1 if self._unended else 0)
                    self._unended = False
                    return missing
                chunk = self._chunk = _Chunk(data, self._numpy)
            view, ends = chunk.take(lines)
            if len(view):
                self._unended = view[-1] != 10
                if writer is not None:
                    writer.write(view)
            lines -= ends
        return 0

    def close(self) -> None:
        """Let go of the file."""
        self._parts.close()  # type: ignore[attr-defined]


class _Writer:
    """Hashes and writes in a thread, in order; ``QUEUED`` chunks are on the way at most."""

    def __init__(self, fd: int, most_bytes: int | None, index: str) -> None:
        self._fd = fd
        self._most_bytes = most_bytes
        self._index = index
        self._hash = sha256()
        self._size = 0
        self._queue: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._room = BoundedSemaphore(QUEUED)
        self._gathered: list[Any] = []
        self._gathered_bytes = 0
        self._error: BaseException | None = None
        self._thread: Thread | None = Thread(target=self._work, name="pipegrid-patch")
        self._thread.start()

    def write(self, data: Any) -> None:
        """Write some more; it must not change any more."""
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= CHUNK_BYTES or len(self._gathered) >= MOST_PIECES:
            self._hand_over()

    def finish(self) -> Patched:
        """Wait until all is written."""
        self._hand_over()
        self.stop()
        if self._error is not None:
            raise self._error
        return Patched(self._size, self._hash.digest())

    def stop(self) -> None:
        """End the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _hand_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._gathered:
            self._size += self._gathered_bytes
            if self._most_bytes is not None and self._size > self._most_bytes:
                raise PatchError(
                    f"what becomes of {shown(self._index)} has more than {self._most_bytes} bytes"
                )
            self._room.acquire()
            self._queue.put(self._gathered)
            self._gathered, self._gathered_bytes = [], 0

    def _work(self) -> None:
        """In the thread."""
        while (pieces := self._queue.get()) is not None:
            if self._error is None:
                self._hash_and_write(pieces)
            del pieces
            self._room.release()

    def _hash_and_write(self, pieces: list[Any]) -> None:
        try:
            for piece in pieces:
                self._hash.update(piece)
            self._write_all(pieces)
        except BaseException as error:  # for whoever waits in ``finish``
            self._error = error

    def _write_all(self, pieces: list[Any]) -> None:
        written = os.writev(self._fd, pieces)
        if written < sum(map(len, pieces)):
            view = memoryview(b"".join(pieces))[written:]
            while view:
                view = view[os.write(self._fd, view) :]


def _count_blocks(view: memoryview, numpy: Any) -> list[int]:
    starts = range(0, len(view), BLOCK_BYTES)
    if numpy is None:
        data = bytes(view)
        return [data.count(b"\n", start, start + BLOCK_BYTES) for start in starts]
    ends = numpy.frombuffer(view, dtype=numpy.uint8) == 10
    return [int(numpy.count_nonzero(ends[start : start + BLOCK_BYTES])) for start in starts]


def _find_end(block: memoryview, number: int, numpy: Any) -> int:
    """Return where the so-manyeth line of a block ends, from 1."""
    if numpy is not None:
        return (
            int(numpy.flatnonzero(numpy.frombuffer(block, dtype=numpy.uint8) == 10)[number - 1]) + 1
        )
    data = bytes(block)
    at = 0
    for _ in range(number):
        at = data.index(b"\n", at) + 1
    return at


@lru_cache(maxsize=1)
def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
