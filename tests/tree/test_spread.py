"""What was stored while servers were away is spread over all of them by the repair of each night."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.core.caps import ChkCap, DirectoryCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.packed_directory import PackedChild, pack_immutable
from pipegrid.transfer.results import CheckResult, RepairResult
from pipegrid.transfer.upkeep import UpkeepOutcome, UpkeepRequest
from pipegrid.tree.directory import Directory, create_directory
from pipegrid.tree.tree_check import FirstMet, TreeSummary, check_tree
from tests.simulation.grid_world import Client, GridWorld
from tests.simulation.test_grid_budgets import BudgetTestCase

GRIDS = (Params(2, 3), 3, 1), (Params(3, 10), 10, 3)
"""How files are encoded, how many servers there are, and how many are away at first."""

OBJECTS = 7


class SpreadTests(BudgetTestCase):
    """A tree of every kind of object, stored while servers are away."""

    world: GridWorld
    client: Client

    def make(self, params: Params, servers: int) -> None:
        self.world = self.make_world(servers=servers)
        self.client = self.world.client(params=params, happy=1)
        self.mutables: list[str] = []
        self.contents: dict[str, bytes] = {}

    def store(self) -> None:
        """Store one object of each kind below a directory that can change."""

        async def work() -> str:
            grid = self.client.grid
            random = Random(1)
            small, large = random.randbytes(1000), random.randbytes(300_000)
            put = [(await grid.put(data)).cap for data in (small, large)]
            chk: list[Any] = put
            packed = pack_immutable([PackedChild("inner", chk[0], {})])
            directory = (await grid.put(packed)).cap
            assert isinstance(directory, ChkCap)
            root = await create_directory(grid)
            await root.link("small", chk[0])
            await root.link("large", chk[1])
            await root.link("directory", DirectoryCap(directory))
            self.contents |= {str(chk[0]): small, str(chk[1]): large, str(directory): packed}
            for format in ("sdmf", "mdmf"):
                data = random.randbytes(150_000)
                cap = (await grid.create_mutable(data, format=format)).cap
                await root.link(format, cap)
                self.contents[str(cap)] = data
                self.mutables.append(str(cap))
            below = await create_directory(grid)
            await below.link("again", chk[0])
            assert below.cap is not None
            await root.link("below", below.cap)
            return str(root.cap)

        self.root = self.world.run(Deferred.fromCoroutine(work()))

    def maintain(self, **todo: bool) -> TreeSummary:
        self.ended: dict[str, UpkeepOutcome] = {}

        def ended(place: FirstMet, outcome: UpkeepOutcome) -> None:
            self.ended["/".join(place.path)] = outcome

        return self.world.run(
            check_tree(self.client.grid, self.root, UpkeepRequest(**todo), ended=ended)
        )

    def states(self) -> set[str]:
        """Check everything; returns the states that were found."""
        self.maintain()
        found: set[str] = set()
        for outcome in self.ended.values():
            assert isinstance(outcome, CheckResult), outcome
            found.add(outcome.state)
        return found

    def nightly(self) -> TreeSummary:
        return self.maintain(repair=True, add_lease=True)

    def assert_readable(self) -> None:
        """By another client, which knows nothing yet."""
        reader = self.world.client("reader", params=Params(2, 3))

        async def work() -> None:
            for cap, data in self.contents.items():
                self.assertEqual(await reader.grid.read(cap), data)
            self.assertEqual(len(await Directory(reader.grid, self.root).list()), 6)

        self.world.run(Deferred.fromCoroutine(work()))
        reader.close()
        self.world.clients.remove(reader)

    def each_killed(self) -> Iterator[int]:
        """Kill each server, one at a time."""
        for number, server in enumerate(self.world.servers):
            server.host.crash()
            yield number
            server.host.restart()
            self.world.clock.advance(120)

    def test_stored_in_an_outage(self) -> None:
        """Servers come back; the check says what is wrong, the repair spreads all, and any one may die."""
        for params, servers, away in GRIDS:
            with self.subTest(servers=servers):
                self.make(params, servers)
                for server in self.world.servers[:away]:
                    server.host.crash()
                self.store()
                self.assertEqual(self.states(), {"healthy"})
                for server in self.world.servers[:away]:
                    server.host.restart()
                self.world.clock.advance(120)
                self.assertEqual(self.states(), {"unspread"})
                self.assertEqual(self.maintain().unspread, OBJECTS)
                night = self.nightly()
                self.assertEqual((night.objects, night.repaired), (OBJECTS, OBJECTS))
                self.assert_well_from_now_on(params, servers)

    def assert_well_from_now_on(self, params: Params, servers: int) -> None:
        self.assertEqual(self.states(), {"healthy"})
        for outcome in self.ended.values():
            assert isinstance(outcome, CheckResult)
            self.assertEqual(outcome.happiness, min(params.total_shares, servers))
        again = self.nightly()
        self.assertEqual((again.healthy, again.repaired), (OBJECTS, 0), "a second run does nothing")
        for outcome in self.ended.values():
            self.assertNotIsInstance(outcome, RepairResult)
        for _ in self.each_killed():
            # Of some, all shares are left: a server has one that another one got a copy of.
            self.assertLessEqual(self.states(), {"reachable", "healthy"})
            self.assert_readable()
        self.assertEqual(self.states(), {"healthy"})

    def test_a_wiped_disk(self) -> None:
        """What it had is made again there; then any server may die."""
        for params, servers, _ in GRIDS:
            with self.subTest(servers=servers):
                self.make(params, servers)
                self.store()
                self.wipe(1)
                self.assertEqual(self.states(), {"damaged"})
                night = self.nightly()
                self.assertEqual((night.objects, night.repaired), (OBJECTS, OBJECTS))
                self.assert_well_from_now_on(params, servers)

    def wipe(self, number: int) -> None:
        for path in Path(self.world.servers[number].root, "shares").glob("*/*/*"):
            path.unlink()

    def test_a_night_in_the_outage(self) -> None:
        """What the night does while a server is away changes nothing about the one when it is back."""
        params, servers, _ = GRIDS[0]
        self.make(params, servers)
        self.store()
        self.world.servers[2].host.crash()
        self.assertEqual(self.states(), {"reachable"})
        summary = self.nightly()
        self.assertEqual(summary.repaired, OBJECTS)
        self.assertEqual(self.states(), {"healthy"}, "as well as the servers in reach allow")
        again = self.nightly()
        self.assertEqual((again.healthy, again.repaired), (OBJECTS, 0))
        self.world.servers[2].host.restart()
        self.world.clock.advance(120)
        self.nightly()
        self.assert_well_from_now_on(params, servers)

    def test_a_server_without_space(self) -> None:
        """It is not counted on: what is on all others is healthy, and no repair is tried each night."""
        params, servers, _ = GRIDS[0]
        self.make(params, servers)
        self.world.servers[0].host.crash()
        self.store()
        self.world.servers[0].free_bytes = 0
        self.world.servers[0].host.restart()
        self.world.clock.advance(120)
        self.assertEqual(self.states(), {"healthy"})
        again = self.nightly()
        self.assertEqual((again.healthy, again.repaired), (OBJECTS, 0))
        self.world.servers[0].free_bytes = 1 << 40
        self.world.clock.advance(120)
        self.assertEqual(self.states(), {"unspread"})

    def test_fewer_servers_than_shares(self) -> None:
        """Shares that share servers are healthy where there are no others."""
        self.make(Params(3, 10), 4)
        self.store()
        self.assertEqual(self.states(), {"healthy"})
        again = self.nightly()
        self.assertEqual((again.healthy, again.repaired), (OBJECTS, 0))

    def test_writes_after_a_repair(self) -> None:
        """They reach all copies, so that nothing old is left behind, whoever writes."""
        params, servers, _ = GRIDS[0]
        self.make(params, servers)
        other = self.world.client("other", params=params, happy=1)
        self.world.servers[0].host.crash()
        self.store()
        for number, cap in enumerate(self.mutables):
            self.contents[cap] = b"%d" % number * 140_000
            self.world.run(other.grid.overwrite(cap, self.contents[cap]))
        self.world.servers[0].host.restart()
        self.world.clock.advance(120)
        self.nightly()
        writes: list[Callable[[str], Any]] = [
            lambda cap: other.grid.update(cap, 70_000, b"more"),
            lambda cap: self.client.grid.update(cap, 20_000, b"more"),
            lambda cap: other.grid.overwrite(cap, self.contents[cap]),
        ]
        for write in writes:
            for cap in self.mutables:
                self.world.run(write(cap))
            self.assertEqual(self.states(), {"healthy"})
        for _ in self.each_killed():
            self.assert_readable()
