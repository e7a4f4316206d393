"""Buffers that nobody has written to."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import erasure


class FreshTests(SynchronousTestCase):
    """Their size, and that they are one's own."""

    def test_size(self) -> None:
        """As asked for; they can be written, and each is another."""
        for make in (erasure._make, None):  # the latter: not CPython
            self.patch(erasure, "_make", make)
            for size_bytes in (0, 1, 1000, 1 << 20):
                first, second = erasure.uninitialised(size_bytes), erasure.uninitialised(size_bytes)
                self.assertIs(type(first), bytearray)
                self.assertEqual(len(first), size_bytes)
                first[:] = b"a" * size_bytes
                second[:] = b"b" * size_bytes
                self.assertEqual(first, b"a" * size_bytes)
