"""Random faults under whole puts and gets, with real servers: every seed ends in the truth."""

from __future__ import annotations

from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import GridError
from pipegrid.testing.fault_plan import FaultPlan
from pipegrid.testing.network import leaks
from tests.descriptors import left_open, open_files
from tests.scratch import scratch_path
from tests.transport.contract import SECRETS, SI
from tests.transport.gbs_world import CLIENT, GbsWorld, make_grid

SERVERS = 5
PARAMS = Params(2, 5, 65536)


class FaultTests(SynchronousTestCase):
    """Connections cut, servers stalled, crashed, restarted, refusing, slow: up to four at once."""

    def try_seed(self, seed: int) -> bool:
        """Return whether the file was stored, and could be read while the faults lasted."""
        random = Random(seed)
        world = GbsWorld(scratch_path(self), SERVERS, bytes_per_s=5_000_000)
        names = [host.name for host in world.servers]
        plan = FaultPlan.random(seed, [CLIENT], names, duration_s=2.0, lasting_s=20.0, faults=4)
        grid = make_grid(world, params=PARAMS)
        data = random.randbytes(random.choice((200, 5000, 100_000, 1_000_000)))
        plan.apply(world.network)
        put: Deferred[Any] = grid.put(data, happy=3)
        try:
            result = world.run(put, 300.0)
        except GridError:
            result = None
        else:
            cap = result.cap
            self.check_stored(world, result, plan)
            try:
                self.assertEqual(world.run(grid.read(result.cap), 300.0), data, f"{plan}")
            except GridError:
                result = None
            # When all is well again the file is there, whatever was lost meanwhile.
            world.clock.advance(60)
            if all(host.host.up for host in world.servers):
                fresh = make_grid(world, params=PARAMS)
                self.assertEqual(world.run(fresh.read(cap), 300.0), data, f"{plan}")
                world.run(fresh.close())
        world.run(grid.close(), 60.0)
        world.clock.advance(1000)
        self.assertEqual(leaks(world.clock, world.network), [], f"{plan}")
        world.close()
        return result is not None

    def check_stored(self, world: GbsWorld, result: Any, plan: FaultPlan) -> None:
        """Every share that was said to be placed is on the disk of the server that was named."""
        index = result.cap.storage_index
        by_name = {host.name: host for host in world.servers}
        for number, name in result.shares_placed.items():
            there = list(by_name[name].root.glob(f"shares/??/*/{number}"))
            self.assertTrue(there, f"share {number} of {index.hex()} is not on {name}: {plan}")

    def test_seeds(self) -> None:
        """Most puts survive, and none says what is not."""
        survived = sum(self.try_seed(seed) for seed in range(60))
        self.assertGreater(survived, 45)


class CrashTests(SynchronousTestCase):
    """A program of the simulation that crashes leaves behind what a killed one does."""

    def test_its_files_are_closed(self) -> None:
        """The share that it was sending, too, although nobody tells its connections of the end."""
        world = GbsWorld(scratch_path(self), bytes_per_s=1_000_000)
        files = open_files()
        server = world.connect()
        size = 1 << 20
        allocated = server.allocate(SI, {0}, size, SECRETS)
        world.run(server.write(SI, 0, 0, [bytes(size)], SECRETS.upload))
        world.run(allocated)
        reading = server.read(SI, 0, 0, size)
        reading.addErrback(lambda _: None)
        world.clock.advance(0.5)
        connections = world.servers[0].factory.connections
        self.assertEqual(sum(each._order.streams for each in connections), 1)
        world.servers[0].host.crash()
        self.assertEqual(left_open(files), [])
        world.run(server.disconnect())
        world.close()
