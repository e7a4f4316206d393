"""
One pass over an index, from its pieces to the new one: read, count lines, hash, write.

The reader counts line ends a megabyte at a time, in blocks, so that a piece's beginning is found among a
few kilobytes; a thread beside it hashes and writes. Nothing is held but ``QUEUED`` megabytes and a
little, whatever the size of the index.

**Speed.** Counting is what costs: ``bytes.count`` looks for one line end after the other (0.6 s for 430
MB), numpy compares 32 bytes at once (0.06 s). Without numpy it is slower, and right.
"""

from __future__ import annotations

import bz2
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from queue import SimpleQueue
from threading import BoundedSemaphore, Thread
from typing import Any

import attrs

from pipegrid.mirror.pdiff import END, PatchError, Piece, merge, parse
from pipegrid.mirror.wanted import shown

CHUNK_BYTES = 1 << 20
BLOCK_BYTES = 16 << 10
QUEUED = 4
MOST_PIECES = 500
"""Of one write; systems take 1024 at least."""

MAX_XZ_MEMORY_BYTES = 128 << 20
MAX_ZSTD_WINDOW_BYTES = 128 << 20

MAX_PATCH_BYTES = 128 << 20
"""Of one patch, unpacked. Those of the largest indexes have a few megabytes."""

MAX_PATCHES = 1000
MAX_ALL_PATCHES_BYTES = 256 << 20
"""Of all patches of an index, unpacked: they are merged in memory."""


@attrs.frozen
class Patched:
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


def unpacked(path: str) -> Iterator[bytes]:
    """
    Yield the bytes of a file, unpacked if it is packed (gzip, xz, bzip2, zstandard), by the piece.

    Raises:
        PatchError: it is damaged, or cut off.
    """
    with open(path, "rb", buffering=0) as file:
        head = file.read(6)
        file.seek(0)
        if head[:4] == b"\x28\xb5\x2f\xfd":
            yield from _unpacked_zstandard(file, path)
            return
        unpacker = _unpacker(head)
        if unpacker is None:
            while data := file.read(CHUNK_BYTES):
                yield data
            return
        try:
            while data := file.read(64 << 10):
                while True:
                    part = unpacker.decompress(data, CHUNK_BYTES)
                    if part:
                        yield part
                    if unpacker.eof or unpacker.needs_input:
                        break
                    data = b""
                if unpacker.eof:
                    return
        except (OSError, lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
            raise PatchError(f"{path} is damaged: {error}") from error
        raise PatchError(f"{path} is cut off")


def _unpacked_zstandard(file: Any, path: str) -> Iterator[bytes]:
    import zstandard

    # Its objects unpack all that they are given at once, however much that is; its reader does not.
    unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
    reader = unpacker.stream_reader(file, read_across_frames=True)
    try:
        while data := reader.read(CHUNK_BYTES):
            yield data
    except zstandard.ZstdError as error:
        raise PatchError(f"{path} is damaged: {error}") from error


class _Gzip:
    """zlib's decompressor with the others' manners."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(31)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    def decompress(self, data: bytes, most: int) -> bytes:
        part = self._zlib.decompress(self._zlib.unconsumed_tail + data, most)
        self.needs_input = not self._zlib.unconsumed_tail
        return part


def _unpacker(head: bytes) -> Any:
    if head[:2] == b"\x1f\x8b":
        return _Gzip()
    if head[:6] == b"\xfd7zXZ\0":
        return lzma.LZMADecompressor(memlimit=MAX_XZ_MEMORY_BYTES)
    if head[:3] == b"BZh":
        return bz2.BZ2Decompressor()
    return None


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

    def __init__(self, data: Any) -> None:
        self.view = memoryview(data)
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
            self._counts = _count_blocks(self.view)
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
        self.at = begin + _find_end(self.view[begin : begin + BLOCK_BYTES], wanted)
        return self.view[start : self.at], lines


class _Lines:
    """The lines of an index, passed over once."""

    def __init__(self, path: str) -> None:
        self._parts = unpacked(path)
        self._chunk = _Chunk(b"")
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
                chunk = self._chunk = _Chunk(data)
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


def _count_blocks(view: memoryview) -> list[int]:
    starts = range(0, len(view), BLOCK_BYTES)
    numpy = _numpy()
    if numpy is None:
        data = bytes(view)
        return [data.count(b"\n", start, start + BLOCK_BYTES) for start in starts]
    ends = numpy.frombuffer(view, dtype=numpy.uint8) == 10
    return [int(numpy.count_nonzero(ends[start : start + BLOCK_BYTES])) for start in starts]


def _find_end(block: memoryview, number: int) -> int:
    """Return where the so-manyeth line of a block ends, from 1."""
    numpy = _numpy()
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
