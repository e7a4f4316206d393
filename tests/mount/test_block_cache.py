"""Blocks on the local disk: bounded, checked, and gone with their process."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap
from pipegrid.errors import SinkError
from pipegrid.mount.block_cache import BLOCK_BYTES, LEAST_BYTES, BlockCache
from tests.scratch import scratch_path


def cap_of(number: int, size: int = 10 * BLOCK_BYTES) -> ChkCap:
    """Return the cap of some file."""
    return ChkCap(number.to_bytes(16, "big"), bytes(32), 3, 10, size)


class BlockCacheTests(SynchronousTestCase):
    """One cache on a real disk."""

    def setUp(self) -> None:
        self.directory = scratch_path(self) / "a" / "cache"
        self.said: list[str] = []

    def cache(self, size_bytes: int = LEAST_BYTES) -> BlockCache:
        """Return a new cache."""
        cache = BlockCache(self.directory, size_bytes, self.said.append)
        self.addCleanup(cache.close)
        return cache

    def test_what_was_written(self) -> None:
        """It is returned, whatever its size, for its file and number alone."""
        cache = self.cache()
        for length in (1, 8 << 10, (8 << 10) + 1, 32 << 10, BLOCK_BYTES):
            data = os.urandom(length)
            self.assertIsNone(cache.read(cap_of(length), 2, length))
            cache.write(cap_of(length), 2, data)
            self.assertEqual(cache.read(cap_of(length), 2, length), data)
            self.assertTrue(cache.has(cap_of(length), 2, length))
            self.assertIsNone(cache.read(cap_of(length), 3, length))
        self.assertIsNone(cache.read(cap_of(0), 2, 1))

    def test_nothing_is_left(self) -> None:
        """No other user may look into the directory, and no file in it has a name."""
        cache = self.cache()
        cache.write(cap_of(1), 0, b"secret")
        self.assertEqual(self.directory.stat().st_mode & 0o777, 0o700)
        self.assertEqual(self.directory.parent.stat().st_mode & 0o777, 0o700)
        self.assertEqual(os.listdir(self.directory), [])

    def test_bounded(self) -> None:
        """The block that was not used for longest gives way, and the disk holds no more than was said."""
        cache = self.cache(2 * LEAST_BYTES)
        files = [file._file.fileno() for _, file in cache._files]
        slots = cache._files[-1][1]._slots
        for number in range(3 * slots):
            cache.write(cap_of(number), 0, bytes([number]) * BLOCK_BYTES)
            self.assertIsNotNone(cache.read(cap_of(0), 0, BLOCK_BYTES))
        kept = [n for n in range(3 * slots) if cache.has(cap_of(n), 0, BLOCK_BYTES)]
        self.assertEqual(kept, [0, *range(2 * slots + 1, 3 * slots)])
        for number in range(1000):
            cache.write(cap_of(number), 1, b"small")
        self.assertLessEqual(sum(os.fstat(each).st_size for each in files), 2 * LEAST_BYTES)

    def test_a_damaged_block(self) -> None:
        """It is not returned, and its slot is used again."""
        cache = self.cache()
        cache.write(cap_of(1), 0, b"right")
        os.pwrite(cache._files[0][1]._file.fileno(), b"wrong", 0)
        self.assertIsNone(cache.read(cap_of(1), 0, 5))
        cache.write(cap_of(1), 0, b"again")
        self.assertEqual(cache.read(cap_of(1), 0, 5), b"again")

    def test_full_disk(self) -> None:
        """It is reported once; blocks are not cached, and later ones are when there is space."""
        cache = self.cache()
        written = os.pwrite

        def full(_fd: int, _data: bytes, _offset: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.patch(os, "pwrite", full)
        for number in range(100):
            cache.write(cap_of(number), 0, bytes(BLOCK_BYTES))
        self.patch(os, "pwrite", lambda fd, data, at: written(fd, data[:1], at))
        cache.write(cap_of(1), 0, b"a part of it")
        self.assertFalse(cache.has(cap_of(1), 0, 12))
        self.assertEqual(len(self.said), 1)
        self.assertIn(f"cannot write to the cache in {self.directory}: No space left", self.said[0])
        self.patch(os, "pwrite", written)
        cache.write(cap_of(1), 0, b"all of it")
        self.assertEqual(cache.read(cap_of(1), 0, 9), b"all of it")

    def test_a_really_full_disk(self) -> None:
        """The same on a small file system; mounting one needs root."""
        small = scratch_path(self)
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            self.skipTest("this user may not mount a small file system")
        self.addCleanup(subprocess.run, ["umount", "-l", str(small)], check=False)
        cache = BlockCache(Path(small), 8 << 20, self.said.append)
        self.addCleanup(cache.close)
        blocks = [os.urandom(BLOCK_BYTES) for _ in range(8)]
        for number, block in enumerate(blocks):
            cache.write(cap_of(1), number, block)
        self.assertEqual(len(self.said), 1)
        found = [cache.read(cap_of(1), number, BLOCK_BYTES) for number in range(8)]
        kept = [number for number, block in enumerate(found) if block is not None]
        self.assertTrue(0 < len(kept) < 8)
        self.assertEqual([found[number] for number in kept], [blocks[number] for number in kept])

    def test_no_cache_possible(self) -> None:
        """The error names the directory and what to do."""
        self.directory.parent.mkdir(parents=True)
        self.directory.write_text("a file")
        error = self.assertRaises(SinkError, self.cache)
        self.assertIn(f"no cache can be kept in {self.directory}", str(error))
        self.assertIn("--cache-dir", str(error))

    def test_closed_while_it_is_written(self) -> None:
        """The file keeps its number until the write has ended: another file could get it."""
        cache = self.cache()
        written = os.pwrite

        def write(fd: int, data: bytes, offset: int) -> int:
            cache.close()
            self.assertEqual(os.fstat(fd).st_nlink, 0)
            return written(fd, data, offset)

        self.patch(os, "pwrite", write)
        cache.write(cap_of(1), 0, b"data")
        self.assertEqual(self.said, [])
        self.assertTrue(all(file._file.closed for _, file in cache._files))
        self.assertFalse(cache.has(cap_of(1), 0, 4))

    def test_closed(self) -> None:
        """Threads that still use it then neither fail nor get anything."""
        cache = self.cache()
        cache.write(cap_of(1), 0, b"data")
        cache.close()
        self.assertIsNone(cache.read(cap_of(1), 0, 4))
        cache.write(cap_of(2), 0, b"data")
        self.assertIsNone(cache.read(cap_of(2), 0, 4))
