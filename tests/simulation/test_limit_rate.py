"""``--limit-rate`` in virtual time: real clients and servers, every byte on the line counted."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from pipegrid.flow.rate_timetable import RateLimit, Rates, RateTimetable
from pipegrid.transport.throttle import Throttle
from tests.simulation.grid_world import CLIENT, Client, GridWorld
from tests.simulation.test_grid_budgets import BudgetTestCase

RATE = 200_000


class LimitRateTests(BudgetTestCase):
    """A client of ten servers whose line could do much more."""

    def make(
        self,
        rate: RateLimit = RATE,
        tls: bool = False,
        local_minute: Callable[[float], int] = lambda now_s: 0,
    ) -> tuple[GridWorld, Client]:
        """
        Return a world and a client whose connections share a rate.

        Args:
            local_minute: of the week, at a time of the world's clock.
        """
        world = self.make_world(tls=tls)
        clock = world.network.host(CLIENT).clock
        throttle = Throttle(clock, rate, lambda: local_minute(clock.seconds()))
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

    def test_each_direction(self) -> None:
        """UP:DOWN: what is sent takes its own time, and what is received another."""
        world, client = self.make(RateTimetable((0,), (Rates(RATE, 4 * RATE),)))
        data = Random(4).randbytes(600_000)
        since = len(world.network.log)
        result, put_s = world.timed(lambda: client.grid.put(data))
        sent = self.sent_bytes(world, since, to_clients=False)
        self.assertGreater(put_s, (sent - RATE / 4) / RATE * 0.95)
        since = len(world.network.log)
        found, get_s = world.timed(lambda: client.grid.read(result.cap))
        self.assertEqual(found, data)
        received = self.sent_bytes(world, since, to_clients=True)
        self.assertLess(get_s, received / (4 * RATE) * 1.1 + 2)

    def test_the_rate_changes_while_bytes_pass(self) -> None:
        """From one rate to a higher one, and to none at all, by the clock on the wall."""
        slow, fast, change_s = RATE // 4, 2 * RATE, 10.0
        begun = [0.0]

        def local_minute(now_s: float) -> int:
            return 0 if now_s - begun[0] < change_s else 100

        for second in (fast, None):
            table = RateTimetable((0, 100), (Rates(slow, slow), Rates(second, second)))
            world, client = self.make(table, local_minute=local_minute)
            begun[0] = world.network.host(CLIENT).clock.seconds()
            data = Random(5).randbytes(600_000)
            since = len(world.network.log)
            result, put_s = world.timed(lambda client=client, data=data: client.grid.put(data))  # type: ignore[misc]
            sent = self.sent_bytes(world, since, to_clients=False)
            rest = sent - slow * change_s
            self.assertGreater(rest, 1_000_000)
            least_s = 0 if second is None else (rest - fast / 4 - slow * 2) / fast * 0.95
            most_s = 3 if second is None else rest / fast * 1.1 + 3
            self.assertGreater(put_s, change_s + least_s)
            self.assertLess(put_s, change_s + most_s)
            cap = result.cap
            self.assertEqual(
                world.run(client.grid.read(cap)),
                data,
            )

    def test_a_clock_that_is_set_back(self) -> None:
        """The earlier entry counts again, at once, and the transfer goes on."""
        table = RateTimetable((0, 100), (Rates(RATE, RATE), Rates(None, None)))
        begun = [0.0]
        world, client = self.make(
            table, local_minute=lambda now_s: 100 if now_s - begun[0] < 0.5 else 0
        )
        begun[0] = world.network.host(CLIENT).clock.seconds()
        world.clock.advance(1)
        data = Random(6).randbytes(600_000)
        since = len(world.network.log)
        _, put_s = world.timed(lambda: client.grid.put(data))
        sent = self.sent_bytes(world, since, to_clients=False)
        self.assertGreater(put_s, (sent - 2 * RATE) / RATE * 0.9)
