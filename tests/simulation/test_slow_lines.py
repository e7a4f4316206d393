"""A line so slow that what is on its way at once takes longer than anybody is silent."""

from __future__ import annotations

from random import Random

from twisted.internet.defer import gatherResults

from pipegrid import Cap
from pipegrid.testing.link_model import Bottleneck
from tests.simulation.grid_world import CLIENT, Client, GridWorld
from tests.simulation.test_grid_budgets import RTT_S, BudgetTestCase

RATE = 10_000
"""Bytes a second: what thirty files of 12 kB are coded to takes two minutes."""


class SlowLineTests(BudgetTestCase):
    """Ten servers behind one slow line, who all answer as soon as something has come."""

    def test_many_small_files(self) -> None:
        """Nobody is silent who answers for one file after the other, however long the last ones wait."""
        world = self.make_world(shared_bytes_per_s=RATE)
        client = world.client()
        random = Random(1)
        files = [random.randbytes(12_000) for _ in range(30)]
        since = len(world.network.log)
        results, took_s = world.timed(
            lambda: gatherResults([client.grid.put(data) for data in files])
        )
        self.assertGreater(took_s, 110)
        sent = self.sent_bytes(world, since, to_clients=False)
        self.assertLess(took_s, sent / RATE * 1.1 + 2)
        self.assertEqual({result.happiness for result in results}, {10})

    def test_many_small_files_back(self) -> None:
        """So it is on the way back."""
        world = self.make_world()
        random = Random(2)
        files = [random.randbytes(40_000) for _ in range(30)]
        caps = self.stored(world, files)
        client = self.slow_client(world)
        found, took_s = world.timed(lambda: gatherResults([client.grid.read(cap) for cap in caps]))
        self.assertGreater(took_s, 110)
        self.assertEqual(found, files)

    def test_a_tree_back(self) -> None:
        """Nothing of a tree is asked for twice while everything waits longer than servers may be silent."""
        world = self.make_world()
        random = Random(4)
        files = [random.randbytes(100_000) for _ in range(40)]
        caps = self.stored(world, files)
        client = self.slow_client(world, 10 * RATE)
        world.run(client.grid.read(caps[0]))  # shares are where they should be
        since = len(world.network.log)
        with client.grid.reading_a_tree():
            found, took_s = world.timed(
                lambda: gatherResults([client.grid.read(cap) for cap in caps])
            )
        self.assertEqual(found, files)
        self.assertGreater(took_s, 40)
        self.assertLess(self.sent_bytes(world, since, to_clients=True), 4_000_000 * 1.3)

    def test_check_verify(self) -> None:
        """Nor is a file lost whose shares are long on their way to be verified."""
        world = self.make_world()
        random = Random(3)
        files = [random.randbytes(12_000) for _ in range(30)]
        caps = self.stored(world, files)
        client = self.slow_client(world)
        found, took_s = world.timed(
            lambda: gatherResults([client.grid.check(cap, verify=True) for cap in caps])
        )
        self.assertGreater(took_s, 110)
        self.assertEqual({len(each.good_shares) for each in found}, {10})

    def stored(self, world: GridWorld, files: list[bytes]) -> list[Cap]:
        """Return the caps of files that somebody else has stored, over a line that is not slow."""
        grid = world.client("writer").grid
        results = world.run(gatherResults([grid.put(data) for data in files]))
        return [result.cap for result in results]

    def slow_client(self, world: GridWorld, rate: int = RATE) -> Client:
        """Return a client that has a slow line to all servers."""
        there, back = Bottleneck(rate), Bottleneck(rate)
        for server in world.servers:
            world.network.join(CLIENT, server.name, RTT_S / 2, there, back)
        return world.client()
