"""What travels when a little of a large mutable file changes, and when a large directory is listed."""

from __future__ import annotations

from typing import Any

from pipegrid.core.caps import DirectoryCap, LitCap
from pipegrid.core.hash_tree import num_nodes
from pipegrid.core.hashes import HASH_BYTES
from pipegrid.core.mutable.directory_content_edits import Link
from pipegrid.tree.directory import Directory, create_directory
from tests.grid.test_mutables import GridTestCase
from tests.transfer.world import content
from tests.transport.gbs_world import CLIENT
from tests.tree.test_directory import _started

SIZE = 20_000_000
CHANGED = 1000
K, N = 3, 10
BLOCK = (128 << 10) // K + 2 + 16
"""Of MDMF at 3 of 10, with its salt."""
REQUEST_BYTES = 1200
"""Head of a request or answer, and what CBOR has around tests and writes."""
FIXED_BYTES = 2500
"""Of each share whatever its size: header, keys, signature, chain, and the hashes on the way to the root."""
TREE_BYTES = num_nodes(153) * HASH_BYTES
"""A tree of at most ``WHOLE_TREE_BYTES`` is read whole: a request a level would cost more."""


class CountingTestCase(GridTestCase):
    """Ten servers, 50 ms away; every byte of every packet is counted."""

    def sent(self, work: Any) -> tuple[int, int]:
        """Return how many bytes the client sent, and received, for something."""
        log = self.world.network.log
        log.clear()
        self.world.run(work)
        self.assertLess(len(log), log.maxlen or 0)
        up = sum(each.size_bytes for each in log if each.from_host == CLIENT)
        return up, sum(each.size_bytes for each in log) - up

    def warm(self, grid: Any) -> None:
        """Have connections up."""
        cap = self.world.run(grid.create_mutable(b"warm")).cap
        self.world.run(grid.read(cap.readonly()))


class RangeTests(CountingTestCase):
    """A little of a large file."""

    def test_a_range(self) -> None:
        """
        A kilobyte in the middle of 20 MB: up goes the segment that it lies in, down what is old of it.

        One of 153; all of them would be 67 MB.
        """
        data = content(SIZE)
        cap = self.world.run(self.grid.create_mutable(data, format="mdmf")).cap
        other = self.open()
        self.warm(other)
        for offset in (SIZE // 2, SIZE // 4):  # nothing known, then the version known
            up, down = self.sent(other.update(cap, offset, b"x" * CHANGED))
            self.assertLess(up, N * (BLOCK + FIXED_BYTES + 2 * REQUEST_BYTES))
            self.assertGreater(up, N * BLOCK)
            most_down = K * BLOCK + N * (4000 + TREE_BYTES + FIXED_BYTES + 3 * REQUEST_BYTES)
            self.assertLess(down, most_down)
            self.assertGreater(down, K * BLOCK)
        expected = bytearray(data)
        for offset in (SIZE // 2, SIZE // 4):
            expected[offset : offset + CHANGED] = b"x" * CHANGED
        self.assertEqual(self.world.run(self.open().read(cap)), bytes(expected))

    def test_a_boundary(self) -> None:
        """A range on both sides of a segment's end: two segments, and no more."""
        cap = self.world.run(self.grid.create_mutable(content(2_000_000), format="mdmf")).cap
        other = self.open()
        self.warm(other)
        segment = 131073
        up, down = self.sent(other.update(cap, 7 * segment - 500, b"x" * CHANGED))
        self.assertLess(up, N * (2 * BLOCK + FIXED_BYTES + 2 * REQUEST_BYTES))
        self.assertLess(down, 2 * K * BLOCK + N * (8000 + FIXED_BYTES + 3 * REQUEST_BYTES))


class ListTests(CountingTestCase):
    """A large directory."""

    def test_ten_thousand_entries(self) -> None:
        """It is listed in one round trip more than its bytes take, which travel once."""
        directory: Any = self.world.run(_started(create_directory(self.grid)))
        child = LitCap(b"child")
        edits = [Link(f"{number:05}", child) for number in range(10_000)]
        self.world.run(directory.change(edits))
        size = len(self.world.run(self.grid.read(directory.cap.file)))
        grid = self.open()
        self.warm(grid)
        directory = Directory(grid, DirectoryCap(directory.cap.file.readonly()))
        began_s = self.world.clock.seconds()
        log = self.world.network.log
        log.clear()
        children = self.world.run(directory.list())
        trips = self.world.round_trips(began_s)
        self.assertEqual(len(children), 10_000)
        down = sum(each.size_bytes for each in log if each.from_host != CLIENT)
        self.assertLess(down, 1.05 * size + N * (4000 + 2 * REQUEST_BYTES))
        self.assertLess(trips, 2.1)
