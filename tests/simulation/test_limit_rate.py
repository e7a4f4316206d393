"""``--limit-rate`` in virtual time: real clients and servers, every byte on the line counted."""

from __future__ import annotations

from random import Random

from pipegrid.transport.throttle import Throttle
from tests.simulation.grid_world import CLIENT, Client, GridWorld
from tests.simulation.test_grid_budgets import BudgetTestCase

RATE = 200_000


class LimitRateTests(BudgetTestCase):
    """A client of ten servers whose line could do much more."""

    def make(self, rate: int = RATE, tls: bool = False) -> tuple[GridWorld, Client]:
        """Return a world and a client whose connections share a rate."""
        world = self.make_world(tls=tls)
        throttle = Throttle(world.network.host(CLIENT).clock, rate)
        endpoint = world.network.endpoint
        world.network.endpoint = lambda *ends: throttle.endpoint(endpoint(*ends))  # type: ignore[method-assign, assignment]
        return world, world.client()

    def test_put_and_get(self) -> None:
        """Both ways, with and without TLS: the bytes take as long as they should, and all arrives."""
        for tls in (False, True):
            world, client = self.make(tls=tls)
            data = Random(1).randbytes(600_000)
            since = len(world.network.log)
            result, put_s = world.timed(lambda client=client, data=data: client.grid.put(data))  # type: ignore[misc]
            sent = self.sent_bytes(world, since, to_clients=False)
            self.assertGreater(sent, 2_000_000)
            self.assertGreater(put_s, (sent - RATE / 4) / RATE * 0.95)
            self.assertLess(put_s, sent / RATE * 1.1 + 1)
            since = len(world.network.log)
            cap = result.cap
            found, get_s = world.timed(lambda client=client, cap=cap: client.grid.read(cap))  # type: ignore[misc]
            self.assertEqual(found, data)
            received = self.sent_bytes(world, since, to_clients=True)
            self.assertGreater(get_s, (min(received, 600_000) - RATE / 4 - 300_000) / RATE)
            self.assertLess(get_s, received / RATE * 1.1 + 2)

    def test_many_small_files(self) -> None:
        """What is in flight at first does not slip through."""
        world, client = self.make(50_000)
        random = Random(2)
        files = [random.randbytes(300) for _ in range(60)]
        since = len(world.network.log)
        results, put_s = world.timed(lambda: client.grid.put_many(files))
        sent = self.sent_bytes(world, since, to_clients=False)
        self.assertEqual(len(results), 60)
        self.assertGreater(put_s, (sent - 50_000 / 4) / 50_000 * 0.95)
        self.assertLess(put_s, sent / 50_000 * 1.1 + 1)

    def test_cancelling(self) -> None:
        """Nothing is left behind; what comes after goes on."""
        world, client = self.make()
        running = client.grid.put(Random(3).randbytes(500_000))
        world.clock.advance(2)
        running.addErrback(lambda _: None)
        running.cancel()
        cap = world.run(client.grid.put(b"x" * 1000)).cap
        self.assertEqual(world.run(client.grid.read(cap)), b"x" * 1000)
