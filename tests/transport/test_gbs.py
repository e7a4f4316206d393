"""Real client, real server, simulated network: the contract."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.simulation.driver import leaks
from pipegrid.transport.interface import StorageServer
from tests.transport.contract import StorageServerContract
from tests.transport.gbs_world import GbsWorld

T = TypeVar("T")


class GbsContractTests(StorageServerContract, SynchronousTestCase):
    """The contract, over HTTP and a network of 20 ms there and back."""

    def setUp(self) -> None:
        self.world = GbsWorld(Path(self.mktemp()), latency_s=0.01, policy="batch")
        self.addCleanup(self.world.close)
        super().setUp()

    def tearDown(self) -> None:
        super().tearDown()
        self.world.clock.advance(70)  # servers close what was cut off while it idled
        self.assertEqual(leaks(self.world.clock, self.world.network), [])

    def make_server(self, capacity_bytes: int | None = None) -> StorageServer:
        if capacity_bytes is not None:
            self.world.servers[0].free_bytes = capacity_bytes
        return self.world.connect()

    def resolve(self, waiting: Deferred[T]) -> T:
        return self.world.run(waiting)

    def settle(self) -> None:
        self.world.clock.advance(1.0)
