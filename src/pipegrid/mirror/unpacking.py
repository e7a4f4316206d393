"""What is in a packed file, by the piece, and in bounded memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Iterator
from io import FileIO
from typing import Any

from pipegrid.errors import PipegridError

CHUNK_BYTES = 1 << 20
MAX_XZ_MEMORY_BYTES = 128 << 20
MAX_ZSTD_WINDOW_BYTES = 128 << 20


class PatchError(PipegridError):
    """A patch is damaged, or not for this index; the text says which and where. The full index is needed."""


def unpacked(path: str) -> Iterator[bytes]:
    """
    Yield the bytes of a file, unpacked if it is packed (gzip, xz, bzip2, zstandard), by the piece.

    Raises:
        PatchError: it is damaged, or cut off.
    """
    with open(path, "rb", buffering=0) as file:
        parts = _parts(file, path)
        if parts is not None:
            yield from parts
            return
        while data := file.read(CHUNK_BYTES):
            yield data


class Unpacking:
    """
    The same, read into memory of the caller's.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._file = FileIO(path, "rb")
        self._parts = _parts(self._file, path)

    def read_into(self, page: bytearray) -> int:
        """
        Fill a page of ``CHUNK_BYTES``, or some of it; returns how many bytes, 0 at the end.

        Raises:
            PatchError: the file is damaged, or cut off.
        """
        if self._parts is None:
            return self._file.readinto(page)
        part = next(self._parts, b"")
        page[: len(part)] = part
        return len(part)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _parts(file: FileIO, path: str) -> Iterator[bytes] | None:
    """Return what is in a packed file; None: it is not packed, and stands at its beginning."""
    head = file.read(6) or b""
    file.seek(0)
    if head[:4] == b"\x28\xb5\x2f\xfd":
        return _unpacked_zstandard(file, path)
    unpacker = _unpacker(head)
    return None if unpacker is None else _unpacked(file, path, unpacker)


def _unpacked(file: FileIO, path: str, unpacker: Any) -> Iterator[bytes]:
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


def _unpacked_zstandard(file: FileIO, path: str) -> Iterator[bytes]:
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
