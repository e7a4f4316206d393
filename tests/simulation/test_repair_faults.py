"""
Repairs on a whole grid in virtual time: what they cost, and random faults while they go on.

Real servers and clients; a schedule of faults for each seed, which a failure prints.
"""

from __future__ import annotations

import gc
from random import Random

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import NotEnoughSharesError
from pipegrid.testing.fault_plan import FaultPlan
from pipegrid.transfer.results import RepairResult
from pipegrid.transfer.settings import DownloadSettings
from tests.core.simple_encoder import Encoded, encode
from tests.simulation.fault_schedules import Rot
from tests.simulation.grid_world import CLIENT, CONVERGENCE, GridWorld

SEEDS = range(500, 540)
MBIT = 125_000
MB = 1_000_000


class RepairTestCase(SynchronousTestCase):
    """A grid of ten servers, with one file."""

    def tearDown(self) -> None:
        self.world.close()

    def make(self, data: bytes, params: Params, world: GridWorld) -> None:
        """Store the file."""
        self.world = world
        self.client = world.client(params=params, download=DownloadSettings(silence_s=20.0))
        result = world.run(self.client.grid.put(data))
        assert isinstance(result.cap, ChkCap)
        self.cap = result.cap
        self.share_bytes = result.share_bytes
        world.clock.advance(1)

    def copies(self) -> dict[int, list[bytes]]:
        """Every copy of every share on all disks, also of one that its server would not read."""
        found: dict[int, list[bytes]] = {}
        for server in self.world.servers:
            for path in sorted((server.root / "shares").glob("??/*/*")):
                share = path.read_bytes()[12 : 12 + self.share_bytes]
                found.setdefault(int(path.name), []).append(share)
        return found


class BudgetTests(RepairTestCase):
    """A line of 100 Mbit/s to all servers together, 100 ms away."""

    def test_cost(self) -> None:
        """The bytes of all shares, then those of k shares or of what is missing, and a few round trips."""
        data = Random(1).randbytes(10 * MB)
        rate = 100 * MBIT
        self.make(data, Params(), GridWorld(latency_s=0.05, shared_bytes_per_s=rate))
        before = self.copies()
        for server in self.world.servers[:2]:
            Rot(server.name, "vanish", 0).apply(self.world)
        result, took_s = self.world.timed(lambda: self.client.grid.repair(self.cap.verifier()))
        self.assertTrue(result.whole)
        self.assertEqual(len(result.uploaded), 2)
        self.assertEqual(self.copies(), before)
        # Eight shares are read three at a time; making two of ten anew goes as fast as three come.
        bytes_s = (8 / 3 + 1) * len(data) / rate
        self.assertLess(took_s, 1.03 * bytes_s + 12 * 0.1)
        self.assertEqual(self.world.leaks(), [])


class FaultTests(RepairTestCase):
    """Connections cut at any byte, servers stalled, crashed and restarted, slow, and refusing."""

    def test_promises_hold(self) -> None:
        """It ends; what it says is made is there, byte for byte; and a rerun in peace makes all whole."""
        outcomes = {"whole": 0, "in part": 0, "lost": 0}
        gc.collect()
        gc.freeze()  # what was there before need not be looked through after every repair
        self.addCleanup(gc.unfreeze)
        for seed in SEEDS:
            outcomes[self.replayable(seed)] += 1
        self.assertGreater(outcomes["whole"], 10, str(outcomes))

    def replayable(self, seed: int) -> str:
        """Perform it, and name it if it fails."""
        try:
            return self.perform(seed)
        except BaseException:
            print(f"\nseed {seed}")
            raise

    def perform(self, seed: int) -> str:
        """Let one schedule happen; return what came of it."""
        chance = Random(seed)
        params = Params(3, 10, 3000)
        data = chance.randbytes(chance.choice((200, 3000, 20_000, 60_000)))
        latency_s = chance.choice((0.0, 0.01, 0.1))
        bytes_per_s = chance.choice((None, 100_000))
        world = GridWorld(latency_s=latency_s, bytes_per_s=bytes_per_s, seed=seed, policy="batch")
        self.make(data, params, world)
        file = encode(data, 3, 10, 3000, secret=CONVERGENCE)
        self.assertEqual(file.cap, self.cap)
        names = [server.name for server in world.servers]
        for name in chance.sample(names, chance.randint(1, 6)):
            how = chance.choice(("vanish", "vanish", "flip", "shorten"))
            Rot(name, how, chance.random()).apply(world)
        rotten = self.copies()
        plan = FaultPlan.random(
            chance.randrange(1 << 32),
            [CLIENT],
            names,
            chance.choice((0.2, 1.0, 5.0)),
            lasting_s=chance.choice((0.2, 3.0, 30.0)),
            faults=chance.choice((1, 3, 6)),
            bytes_scale=chance.choice((3000, 100_000)),
        )
        plan.apply(world.network)
        result = self.repair()
        self.check(result, file, rotten)
        world.clock.advance(60)  # the faults are over
        again = self.repair()
        self.check(again, file, rotten)
        assert again is not None
        self.assertTrue(again.whole, again)
        self.assertEqual(world.run(self.client.grid.read(self.cap)), data)
        self.assertEqual(world.leaks(), [])
        self.assertEqual([server.unfinished() for server in world.servers], [[]] * 10)
        world.close()
        if result is None:
            return "lost"
        return "whole" if result.whole else "in part"

    def repair(self) -> RepairResult | None:
        """Repair; None if too few shares could be had."""
        started: Deferred[RepairResult] = self.client.grid.repair(self.cap.verifier())
        try:
            return self.world.run(started)
        except NotEnoughSharesError:
            return None

    def check(
        self, result: RepairResult | None, file: Encoded, rotten: dict[int, list[bytes]]
    ) -> None:
        """Nothing on a disk is wrong that was not before, and what the result says is there."""
        there = self.copies()
        for number, copies in there.items():
            for copy in copies:
                # Behind one that was cut off a server may have written a lease.
                known = [file.shares[number], *rotten.get(number, [])]
                self.assertTrue(any(copy.startswith(other) for other in known))
        if result is None:
            return
        for number, name in result.uploaded.items():
            (path,) = (self.world[name].root / "shares").glob(f"??/*/{number}")
            share = path.read_bytes()[12 : 12 + self.share_bytes]
            self.assertTrue(share == file.shares[number])
        # Some bytes of a share mean nothing: a good one may have other ones there.
        self.assertLessEqual(set(result.after.good_shares), set(there))
        gc.collect()
