"""
Several puts of one file at the same time, in virtual time: all of them end well.

``misc/soak/twins.py`` does it with processes; here each round is one history, which its seed gives again.
"""

from __future__ import annotations

from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.placement import servers_of_happiness
from tests.simulation.grid_world import LEASE_SECRET, GridWorld

ROUNDS = 34
SIZES = (200, 3000, 30_000, 300_000)
SPREADS_S = (0.0, 0.01, 0.1, 0.3)


class TwinTests(SynchronousTestCase):
    """Everybody gets their cap, and every share is right."""

    def play(self, seed: int, writers: int, users: bool, servers: int = 10) -> None:
        """
        One round.

        Args:
            users: whether each has secrets of their own, or all are one user.
        """
        chance = Random(seed)
        world = GridWorld(servers, bytes_per_s=chance.choice((None, 1_000_000)), policy="batch")
        try:
            data = chance.randbytes(chance.choice(SIZES))
            spread_s = chance.choice(SPREADS_S)
            clients = [
                world.client(f"client{n}", lease_secret=bytes([n]) * 32 if users else LEASE_SECRET)
                for n in range(writers)
            ]
            ended: list[Any] = []
            running: list[Deferred[Any]] = []
            for client in clients:
                if chance.random() < 0.5:  # with connections, or without
                    world.run(client.grid.status())
            for client in clients:
                world.clock.advance(chance.uniform(0, spread_s))
                running.append(client.grid.put(data).addBoth(ended.append))
            for one in running:
                world.run(one)
            caps = {getattr(each, "cap", each) for each in ended}
            self.assertEqual(len(caps), 1, f"seed {seed}: {ended}")
            index = caps.pop().storage_index
            there: dict[int, set[str]] = {}
            copies: dict[int, set[bytes]] = {}
            for server in world.servers:
                for number, share in server.shares(index).items():
                    there.setdefault(number, set()).add(server.name)
                    copies.setdefault(number, set()).add(share)
            self.assertEqual(set(map(len, copies.values())), {1}, f"seed {seed}")
            self.assertEqual(sorted(there), list(range(10)), f"seed {seed}")
            self.assertGreaterEqual(servers_of_happiness(there), 7, f"seed {seed}")
            left = world.leaks()
            self.assertEqual(left, [], f"seed {seed}")
        finally:
            world.close()

    def test_two_processes_of_one_user(self) -> None:
        """They share their secrets, and so their uploads."""
        for seed in range(ROUNDS):
            self.play(seed, 2, users=False)

    def test_two_users(self) -> None:
        """Neither can write what the other has begun."""
        for seed in range(ROUNDS):
            self.play(seed, 2, users=True)

    def test_more_than_two(self) -> None:
        """Three and four, of both kinds, also with a few servers to spare."""
        for seed in range(12):
            self.play(seed, 3 + seed % 2, users=seed % 3 == 0, servers=10 + seed % 4)
