"""
Round trips on a grid of 1,000 servers at 100 ms, in virtual time, with real servers and connections.

Of TLS there is the round trip that it adds to each new connection, and nothing else.
"""

from __future__ import annotations

import os
import random
from io import BytesIO
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap
from pipegrid.errors import NotEnoughSharesError
from pipegrid.transfer.results import CheckResult
from tests.simulation.grid_world import GridWorld
from tests.transfer.world import content

RTT_S = 0.1
SERVERS = 1000


class LargeGridTests(SynchronousTestCase):
    """What has to be looked for is found, or not, in a few round trips; nobody is asked who need not be."""

    def setUp(self) -> None:
        self.world = GridWorld(SERVERS, latency_s=RTT_S / 2, handshake_s=RTT_S)
        self.addCleanup(self.world.close)
        writer = self.world.client("writer")
        cap = self.world.run(writer.grid.put(content(200_000))).cap
        assert isinstance(cap, ChkCap)
        self.cap = cap
        self.missing = attrs.evolve(cap, key=bytes(16))
        writer.close()
        self.client = self.world.client()

    def trips(self, started: Deferred[Any]) -> tuple[Any, float]:
        """Return the result, or the error, and the round trips that it took."""
        began = self.world.clock.seconds()
        try:
            result = self.world.run(started)
        except NotEnoughSharesError as error:
            result = error
        return result, round((self.world.clock.seconds() - began) / RTT_S, 6)

    def lose(self, count: int) -> None:
        """Take shares away from so many servers."""
        index = self.cap.storage_index
        holders = [server for server in self.world.servers if server.shares(index)]
        for server in holders[:count]:
            for number in server.shares(index):
                os.unlink(server.share_path(index, number))

    def connections(self) -> int:
        return sum(bool(server.site.connections) for server in self.world.servers)

    def test_cold(self) -> None:
        """From the first connection on; those that are not needed are not made."""
        grid = self.client.grid
        result, trips = self.trips(grid.check(self.cap))
        self.assertTrue(result.healthy)
        self.assertEqual(trips, 3)
        self.assertEqual(self.connections(), 10)
        error, trips = self.trips(grid.get(self.missing, BytesIO()))
        self.assertIn("on any of 1000 servers", str(error))
        self.assertLessEqual(trips, 15)

    def test_cold_check_of_what_is_missing(self) -> None:
        """Everybody is asked."""
        self.lose(4)
        result, trips = self.trips(self.client.grid.check(self.cap))
        self.assertEqual(len(result.good_shares), 6)
        self.assertLessEqual(trips, 12)

    def test_cold_repair(self) -> None:
        """Everybody is asked, and four shares are made again."""
        self.lose(4)
        result, trips = self.trips(self.client.grid.repair(self.cap))
        self.assertEqual(len(result.uploaded), 4)
        self.assertLessEqual(trips, 15)

    def test_with_connections_up(self) -> None:
        """A healthy file takes one round trip, everything else at most nine."""
        grid = self.client.grid
        result, _ = self.trips(grid.check(self.missing))
        self.assertFalse(result.recoverable)
        result, trips = self.trips(grid.check(self.cap))
        self.assertTrue(result.healthy)
        self.assertEqual(trips, 1)
        result, trips = self.trips(grid.check(self.cap, verify=True))
        self.assertTrue(result.healthy)
        self.assertLessEqual(trips, 3)
        _, trips = self.trips(grid.get(self.missing, BytesIO()))
        self.assertLessEqual(trips, 5)
        _, trips = self.trips(grid.check(self.missing))
        self.assertLessEqual(trips, 4)
        _, trips = self.trips(grid.repair(self.missing))
        self.assertLessEqual(trips, 3)
        self.lose(4)
        result, trips = self.trips(grid.check(self.cap))
        self.assertEqual(len(result.good_shares), 6)
        self.assertLessEqual(trips, 4)
        result, trips = self.trips(grid.repair(self.cap))
        self.assertEqual(len(result.uploaded), 4)
        self.assertLessEqual(trips, 9)


class OtherGridsTests(SynchronousTestCase):
    """Smaller grids, and less regular ones."""

    def test_the_emulated_handshake_takes_as_long_as_the_real_one(self) -> None:
        """A cold check over TLS takes what it takes with its round trip alone."""
        took = []
        for tls in (False, True):
            world = GridWorld(10, latency_s=RTT_S / 2, tls=tls, handshake_s=0 if tls else RTT_S)
            self.addCleanup(world.close)
            writer = world.client("writer")
            cap = world.run(writer.grid.put(content(1000))).cap
            writer.close()
            began = world.clock.seconds()
            self.assertTrue(world.run(world.client().grid.check(cap)).healthy)
            took.append(round((world.clock.seconds() - began) / RTT_S, 6))
        self.assertEqual(took, [3, 3])

    def test_servers_that_are_not_equally_far_away(self) -> None:
        """A check of a healthy file waits for those who have it, and asks nobody else."""
        world = GridWorld(100)
        self.addCleanup(world.close)
        rng = random.Random(5)
        for server in world.servers:
            world.network.join("client", server.name, rng.uniform(0.04, 0.06))
        writer = world.client("writer")
        cap = world.run(writer.grid.put(content(1000))).cap
        writer.close()
        client = world.client()
        for _ in range(2):  # the second time over connections that are up
            self.assertTrue(world.run(client.grid.check(cap)).healthy)
            [one] = world.run(client.grid.check_many([cap]))
            assert isinstance(one, CheckResult)
            self.assertTrue(one.healthy)
            self.assertEqual(sum(bool(each.site.connections) for each in world.servers), 10)
