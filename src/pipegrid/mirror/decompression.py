"""Decompression of indexes (gzip, xz, zstd, bzip2) with limits of size and memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import SEEK_END, FileIO
from typing import Any

from pipegrid.errors import PipegridError
from pipegrid.mirror.archive_file import BadEntry

# Decompression of a file in pieces, in bounded memory.

CHUNK_BYTES = 1 << 20
MAX_XZ_MEMORY_BYTES = 128 << 20
MAX_ZSTD_WINDOW_BYTES = 128 << 20
_RUN = 1  # a block that is one byte and a number of repetitions
_HAS_CHECKSUM = 4
_LEAST_BYTES = 8  # length of the shortest frame


class PatchError(PipegridError):
    """
    A file is damaged, or a patch is made for another index; the text names the file or patch. The full index
    must be fetched.
    """


def unpacked(path: str) -> Iterator[bytes]:
    """
    Yield the content of a file in pieces; a compressed file (gzip, xz, bzip2, zstandard) is decompressed.

    Raises:
        PatchError: the file is damaged or incomplete.
    """
    with open(path, "rb", buffering=0) as file, _reading(path):
        parts = _parts(file, path)
        if parts is not None:
            yield from parts
            return
        while data := file.read(CHUNK_BYTES):
            yield data


class Unpacking:
    """
    Like ``unpacked``, but fills memory that the caller provides.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = FileIO(path, "rb")
        with _reading(path):
            self._parts = _parts(self._file, path)

    def read_into(self, page: bytearray) -> int:
        """
        Fill a page of ``CHUNK_BYTES`` at least in part; return the number of bytes, which is 0 only at the
        end.

        Raises:
            PatchError: the file is damaged or incomplete.
            OSError: the file cannot be read; the error contains the file's name.
        """
        if self._parts is None:
            with _reading(self._path):
                return self._file.readinto(page)
        part = next(self._parts, b"")
        page[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._file.close()


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Add the file's name to read errors, so that they differ from errors of other files."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


def _parts(file: FileIO, path: str) -> Iterator[bytes] | None:
    """
    Return the decompressed pieces of a file, read from its beginning; None if the file is not compressed.
    """
    head = file.read(6) or b""
    file.seek(0)
    # Files of pzstd begin with a skippable frame.
    if head[:4] == b"\x28\xb5\x2f\xfd" or _is_skippable(head):
        return _unpacked_zstandard(file, path)
    kind = _kind(head)
    return None if kind is None else _unpacked(file, path, kind)


def _unpacked(file: FileIO, path: str, kind: Callable[[], Any]) -> Iterator[bytes]:
    """
    Yield the content of a file that consists of one or several compressed files, which are treated as one.

    Programs that compress with several processors, such as pbzip2, make such files. Zeros may be between the
    parts and after them.
    """
    unpacker, between, rest = kind(), False, b""
    try:
        while data := rest or file.read(64 << 10):
            rest = b""
            if between:
                data = data.lstrip(b"\0")
                if not data:
                    continue
                unpacker, between = kind(), False
            while True:
                part = unpacker.decompress(data, CHUNK_BYTES)
                if part:
                    yield part
                if unpacker.eof or unpacker.needs_input:
                    break
                data = b""
            if unpacker.eof:
                rest, between = unpacker.unused_data, True
    except (OSError, lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
        raise PatchError(f"{path} is damaged: {error}") from error
    if not between:
        raise PatchError(f"{path} is incomplete")


def _unpacked_zstandard(file: FileIO, path: str) -> Iterator[bytes]:
    import zstandard

    # zstandard's decompressor objects decompress all input at once, without a limit; its reader has a limit.
    unpacker = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
    reader = unpacker.stream_reader(file, read_across_frames=True)
    try:
        while data := reader.read(CHUNK_BYTES):
            yield data
    except zstandard.ZstdError as error:
        raise PatchError(f"{path} is damaged: {error}") from error
    if not _ends_whole(file):  # zstandard's reader does not check this
        raise PatchError(f"{path} is incomplete")


def _ends_whole(file: FileIO) -> bool:
    """
    Return whether the last frame of a zstandard file is complete, and nothing follows it.

    Source: RFC 8878, 3.1.
    """
    size = file.seek(0, SEEK_END)
    at = file.seek(0)
    with open(file.fileno(), "rb", closefd=False) as buffered:
        while at < size:
            head = buffered.read(_LEAST_BYTES)
            if len(head) < _LEAST_BYTES:
                return False
            is_skippable = _is_skippable(head)
            at += 8 + int.from_bytes(head[4:8], "little") if is_skippable else _header_bytes(head)
            is_last = is_skippable
            while not is_last and at < size:
                buffered.seek(at)
                block = int.from_bytes(buffered.read(3), "little")
                is_last = bool(block & 1)
                at += 3 + (1 if block >> 1 & 3 == _RUN else block >> 3)
            if not is_last:
                return False
            if not is_skippable and head[4] & _HAS_CHECKSUM:
                at += 4
            buffered.seek(at)
    return at == size


def _is_skippable(head: bytes) -> bool:
    return head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5


def _header_bytes(head: bytes) -> int:
    """Return the length of a frame's header, including its magic number."""
    flags = head[4]
    is_single = flags >> 5 & 1
    content = (is_single, 2, 4, 8)[flags >> 6]
    return 5 + (1 - is_single) + (0, 1, 2, 4)[flags & 3] + content


class _Gzip:
    """zlib's decompressor with the interface of the decompressors of ``bz2`` and ``lzma``."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(31)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, most: int) -> bytes:
        part = self._zlib.decompress(self._zlib.unconsumed_tail + data, most)
        self.needs_input = not self._zlib.unconsumed_tail
        return part


def _kind(head: bytes) -> Callable[[], Any] | None:
    """
    Return a factory of decompressors for a file that begins with ``head``; None if the file is not
    compressed.
    """
    if head[:2] == b"\x1f\x8b":
        return _Gzip
    if head[:6] == b"\xfd7zXZ\0":
        return partial(lzma.LZMADecompressor, memlimit=MAX_XZ_MEMORY_BYTES)
    if head[:3] == b"BZh":
        return bz2.BZ2Decompressor
    return None


# The content of an index of a Debian archive or an RPM repository, and the limit of its size.

MAX_INDEX_BYTES = 4 << 30
"""The maximum size of an index, packed or unpacked; the largest known has a quarter of a gigabyte."""


def check_index_bytes(name: str, size: int) -> None:
    """
    Check the stated size of an index.

    Raises:
        BadEntry: the size is larger than ``MAX_INDEX_BYTES``.
    """
    if size > MAX_INDEX_BYTES:
        raise BadEntry(f"{name} has a size of {size} bytes, which no index has")


def index_blocks(path: str, name: str, size: int | None) -> Iterator[bytes]:
    """
    Yield the content of an index, decompressed.

    Args:
        path: of the file.
        name: of the index, for errors.
        size: unpacked, in bytes; None if unknown: at most ``MAX_INDEX_BYTES``.

    Raises:
        BadEntry: the index has more than ``size`` bytes, or cannot be read.
    """
    most = MAX_INDEX_BYTES if size is None else size
    found = 0
    try:
        for block in unpacked(path):
            found += len(block)
            if found > most:
                raise BadEntry(f"{name} has more than {most} bytes, unpacked; it is not used")
            yield block
    except PatchError as error:
        raise BadEntry(f"the index {name} cannot be read: {error}") from error
