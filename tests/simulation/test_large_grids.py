"""
Round trips on a grid of 1,000 servers at 100 ms, in virtual time, with real servers and connections.

Without TLS, which adds one round trip to each new connection.
"""

from __future__ import annotations

import os
from io import BytesIO
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap
from pipegrid.errors import NotEnoughSharesError
from tests.simulation.grid_world import GridWorld
from tests.transfer.world import content

RTT_S = 0.1
SERVERS = 1000


class LargeGridTests(SynchronousTestCase):
    """What has to be looked for is found, or not, in a few round trips; nobody is asked who need not be."""

    def setUp(self) -> None:
        self.world = GridWorld(SERVERS, latency_s=RTT_S / 2)
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
        return sum(bool(server.factory.connections) for server in self.world.servers)

    def test_cold(self) -> None:
        """From the first connection on; those that are not needed are not made."""
        grid = self.client.grid
        result, trips = self.trips(grid.check(self.cap))
        self.assertTrue(result.healthy)
        self.assertEqual(trips, 2)
        self.assertEqual(self.connections(), 10)
        error, trips = self.trips(grid.get(self.missing, BytesIO()))
        self.assertIn("on any of 1000 servers", str(error))
        self.assertLessEqual(trips, 14)

    def test_cold_repair(self) -> None:
        """Everybody is asked, and four shares are made again."""
        self.lose(4)
        result, trips = self.trips(self.client.grid.repair(self.cap))
        self.assertEqual(len(result.uploaded), 4)
        self.assertLessEqual(trips, 15)

    def test_with_connections_up(self) -> None:
        """A healthy file takes one round trip, everything else at most twelve."""
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
        self.assertLessEqual(trips, 7)
        _, trips = self.trips(grid.check(self.missing))
        self.assertLessEqual(trips, 4)
        _, trips = self.trips(grid.repair(self.missing))
        self.assertLessEqual(trips, 4)
        self.lose(4)
        result, trips = self.trips(grid.check(self.cap))
        self.assertEqual(len(result.good_shares), 6)
        self.assertLessEqual(trips, 5)
        result, trips = self.trips(grid.repair(self.cap))
        self.assertEqual(len(result.uploaded), 4)
        self.assertLessEqual(trips, 12)
