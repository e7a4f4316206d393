"""
A cache of file blocks on the local disk, so that data that was read once is not fetched again.

The blocks are in files without names, whose space the system frees however the process ends. So no later
process can use wrong blocks. The checksum of each block is kept in memory.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import IO

import attrs

from pipegrid.core.caps import Cap
from pipegrid.disk.private_files import make_private
from pipegrid.errors import SinkError

BLOCK_BYTES = 128 << 10
"""Block size. The kernel reads files in requests of this size or a multiple of it; see ``set_read_ahead``."""

SLOTS = ((8 << 10, 16), (32 << 10, 16), (BLOCK_BYTES, 1))
"""
Slot sizes, and the fraction of the cache for each: one divided by the second number. Small files and the ends
of large files use small slots; slots of the last size use what remains.
"""

LEAST_BYTES = 1 << 20
"""Minimum size of the cache, even if less is configured: else blocks would be dropped before their use."""

BlockKey = tuple[Cap, int]


@attrs.frozen(eq=False)
class CachedBlock:
    """The slot of a block, and the length and checksum that its bytes must have."""

    slot: int
    length: int
    checksum: int


class BlockFile:
    """
    A file without a name, divided into slots of equal size; if all are used, the least recently used block is
    replaced.

    Methods may be called in any thread.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, directory: Path, slot_bytes: int, slots: int) -> None:
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._lock = Lock()
        self._blocks: OrderedDict[BlockKey, CachedBlock] = OrderedDict()
        self._free: list[int] = []
        self._used = 0
        self._users = 0
        self._closed = False
        self._file: IO[bytes] = TemporaryFile(dir=directory)  # noqa: SIM115  until ``close``

    def read(self, key: BlockKey) -> bytes | None:
        """Return a block; None: it is not cached, or its bytes on the disk are wrong."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                return None
            self._blocks.move_to_end(key)
            self._users += 1
        try:
            data = os.pread(self._file.fileno(), block.length, block.slot * self._slot_bytes)
        except OSError:
            data = b""
        finally:
            self._leave()
        good = len(data) == block.length and zlib.crc32(data) == block.checksum
        with self._lock:
            # During the read, another block may have taken the slot; then ``_blocks`` does not contain this
            # block any more.
            if self._blocks.get(key) is not block:
                return None
            if not good:
                del self._blocks[key]
                self._free.append(block.slot)
                return None
        return data

    def write(self, key: BlockKey, data: bytes | memoryview) -> None:
        """
        Store a block, unless it is cached already.

        Raises:
            OSError: the disk is full or fails, or all slots are being written (ENOBUFS); the block is not
                cached.
        """
        with self._lock:
            if key in self._blocks or self._is_closed():
                return
            slot = self._take_slot()
            self._users += 1
        try:
            written = os.pwrite(self._file.fileno(), data, slot * self._slot_bytes)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with self._lock:
                self._free.append(slot)
            raise
        finally:
            self._leave()
        block = CachedBlock(slot, len(data), zlib.crc32(data))
        with self._lock:
            if self._is_closed():
                return
            before = self._blocks.pop(key, None)
            if before is not None:  # another thread has stored the same block
                self._free.append(before.slot)
            self._blocks[key] = block

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._used < self._slots:
            self._used += 1
            return self._used - 1
        if not self._blocks:  # all slots are being written
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return self._blocks.popitem(last=False)[1].slot

    def __contains__(self, key: BlockKey) -> bool:
        with self._lock:
            return key in self._blocks

    def close(self) -> None:
        """Forget all blocks; the file is closed as soon as no thread uses its descriptor."""
        with self._lock:
            self._blocks.clear()
            self._free.clear()
            self._closed = True
            self._users += 1
        self._leave()

    def _is_closed(self) -> bool:
        return self._closed

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._closed and not self._users:
                with suppress(OSError):
                    self._file.close()


class BlockCache:
    """
    Blocks of immutable files, by cap and block number; methods may be called in any thread.

    A block has ``BLOCK_BYTES``; the last block of a file may be shorter. If the disk is full, blocks are
    simply not cached.

    Args:
        directory: directory for the cache's files; if missing, it is created with access only for its owner.
        size_bytes: size of the whole cache; raised to ``LEAST_BYTES`` if smaller.
        say: called at most once, in any thread, with a sentence, if the disk is full or fails.

    Raises:
        SinkError: the directory or a file cannot be created.
    """

    def __init__(self, directory: Path, size_bytes: int, say: Callable[[str], object]) -> None:
        self._directory = directory
        self._say = say
        self._said = False
        self._files: list[tuple[int, BlockFile]] = []
        rest = max(size_bytes, LEAST_BYTES)
        try:
            make_private(str(directory))
            for slot_bytes, divisor in SLOTS:
                part = rest if divisor == 1 else max(size_bytes, LEAST_BYTES) // divisor
                rest -= part
                slots = part // slot_bytes
                self._files.append((slot_bytes, BlockFile(directory, slot_bytes, slots)))
        except OSError as error:
            self.close()
            raise SinkError(
                f"no cache can be kept in {directory}: {error.strerror}; give another directory with "
                "--cache-dir, or none with --cache-size 0"
            ) from error

    def read(self, cap: Cap, number: int, length: int) -> bytes | None:
        """Return a block of a file; ``length`` is the block's length. None: it is not cached."""
        return self._file(length).read((cap, number))

    def has(self, cap: Cap, number: int, length: int) -> bool:
        """Return whether a block of a file is cached; ``length`` is the block's length."""
        return (cap, number) in self._file(length)

    def write(self, cap: Cap, number: int, data: bytes | memoryview) -> None:
        """Store a block of a file; if the disk fails, the block is not cached."""
        try:
            self._file(len(data)).write((cap, number), data)
        except OSError as error:
            if error.errno == errno.ENOBUFS or self._said:
                return
            self._said = True
            self._say(
                f"cannot write to the cache in {self._directory}: {error.strerror}; blocks that are not "
                "cached are fetched each time they are read"
            )

    def _file(self, length: int) -> BlockFile:
        return next(file for slot_bytes, file in self._files if length <= slot_bytes)

    def close(self) -> None:
        for _, file in self._files:
            file.close()
