"""
Storing again what others have stored elsewhere: real servers and clients in virtual time, of all sizes.

``tests/interop/storing_again.py`` does it with Tahoe-LAFS's own processes.
"""

from __future__ import annotations

from functools import partial
from random import Random

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap
from pipegrid.transfer.results import PutResult
from tests.simulation.grid_world import GridWorld

LATENCY_S = 0.05
RTT = 2 * LATENCY_S
FILES = {500: 20, 20_000: 20, 200_000: 10, 3_000_000: 2, 20_000_000: 1}
"""How many of each size, in bytes."""
MBIT = 125_000


class StoringAgainTests(SynchronousTestCase):
    """Ten servers, on which an earlier client, with another ring, has stored the files."""

    def setUp(self) -> None:
        self.world = GridWorld(latency_s=LATENCY_S, shared_bytes_per_s=100 * MBIT)
        self.addCleanup(self.world.close)

    def copies(self, stored: PutResult) -> int:
        """Return how many share files of a file there are."""
        assert isinstance(stored.cap, ChkCap)
        index = stored.cap.storage_index
        for server in self.world.servers:
            self.assertEqual(server.unfinished(), [])
        return sum(len(server.shares(index)) for server in self.world.servers)

    def test_from_the_second_file_on(self) -> None:
        """No file of any size gets a share more; twenty of each of the smallest, in series."""
        other = self.world.client("other", seed="another ring")
        client = self.world.client()
        first = True
        for size in FILES:
            for number in range(FILES[size]):
                data = Random(f"{size} {number}").randbytes(size)
                self.world.run(other.grid.put(data))
                stored = self.world.run(client.grid.put(data))
                self.world.clock.advance(1)
                copies = self.copies(stored)
                if first:  # which nobody could know; docs/explanation-transfers.md
                    self.assertGreater(copies, 10)
                else:
                    self.assertEqual(copies, 10, f"file {number} of {size} bytes")
                    self.assertEqual(stored.shares_placed, {})
                first = False
        self.assertEqual(self.world.leaks(), [])

    def test_large_files_teach_nothing_dear(self) -> None:
        """Of a large file the first one gets no share more either."""
        other = self.world.client("other", seed="another ring")
        client = self.world.client()
        data = Random(1).randbytes(10_000_000)
        self.world.run(other.grid.put(data))
        stored = self.world.run(client.grid.put(data))
        self.world.clock.advance(1)
        self.assertEqual(self.copies(stored), 10)

    def test_fresh_files_cost_what_they_did(self) -> None:
        """Whatever the size and the line: as long as with ``never``, to the nanosecond."""
        for size in (500, 200_000, 3_000_000):
            took_s = []
            for policy in ("auto", "never"):
                client = self.world.client(f"{policy}{size}", ask_first=policy)
                for number in range(3):
                    data = Random(f"{policy} {size} {number}").randbytes(size)
                    _, seconds = self.world.timed(partial(client.grid.put, data))
                took_s.append(seconds)
            self.assertAlmostEqual(took_s[0], took_s[1], 6, f"{size} bytes")
