"""``close()`` of a grid leaves the reactor as it was, whatever its servers speak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from pipegrid import Grid, Params
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME
from tests.interop.processes import start_pipegrid_server, write_servers

reactor: Any = installed_reactor


class CleanCloseTests(TestCase):
    """Foolscap servers in processes of their own, so that all that is in this reactor is the client's."""

    timeout = 120

    async def setUp(self) -> None:  # type: ignore[override]
        directory = Path(self.mktemp())
        directory.mkdir(parents=True)
        furls = {}
        for number in range(3):
            server, furl = start_pipegrid_server(directory / f"server{number}")
            self.addCleanup(server.stop)
            furls[f"server {number}"] = furl
        self.client = directory / "client"
        create_client(self.client, params=Params(1, 3), happy=1, files={SERVERS_NAME: ""})
        write_servers(self.client, furls)
        await deferLater(reactor, 0)
        self.before = self.selectables()

    def selectables(self) -> set[Any]:
        """Return what the reactor reads and writes."""
        return {*reactor.getReaders(), *reactor.getWriters()}

    async def assert_clean(self, grid: Grid) -> None:
        """Close it, and look at the reactor in the same turn."""
        await grid.close()
        calls = [repr(call) for call in reactor.getDelayedCalls()]
        self.assertEqual([call for call in calls if "onTimeout" not in call], [])
        self.assertEqual(self.selectables() - self.before, set())

    async def test_after_a_put_and_a_get(self) -> None:
        """Of what was finished."""
        grid = await Grid.open(reactor, self.client)
        cap = (await grid.put(bytes(100_000))).cap
        self.assertEqual(len(await grid.read(cap)), 100_000)
        await self.assert_clean(grid)

    async def test_amid_a_put(self) -> None:
        """Of what is under way, at any time of it."""
        for delay_s in (0.0, 0.001, 0.01, 0.05):
            grid = await Grid.open(reactor, self.client)
            putting = grid.put(bytes(3_000_000))
            await deferLater(reactor, delay_s)
            await self.assert_clean(grid)
            with self.assertRaises(CancelledError):
                await putting

    async def test_at_once(self) -> None:
        """Of what has only been opened."""
        grid = await Grid.open(reactor, self.client)
        await self.assert_clean(grid)
