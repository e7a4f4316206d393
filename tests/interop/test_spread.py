"""What was stored while one of Tahoe-LAFS's servers was down is spread when it is back."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, cast
from unittest import mock

from misc.speedtest.peers.nodes import FOOLSCAP, HTTPS, StorageNodes, servers_file, stop
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import TestCase

from pipegrid import Grid
from pipegrid.core import base32
from pipegrid.core.encoding_parameters import Params
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.transfer.results import CheckResult
from pipegrid.transfer.upkeep import UpkeepRequest
from pipegrid.tree.tree_check import FirstMet, TreeSummary, check_tree

OBJECTS = 5


class TahoeSpreadTests(TestCase):
    """Three servers, 2 of 3, and an object of each kind."""

    timeout = 240

    def test_a_server_that_was_down(self) -> Deferred[None]:
        """Over HTTPS and over Foolscap: unspread, repaired, healthy; then any server may be killed."""
        return Deferred.fromCoroutine(self._with_servers())

    async def _with_servers(self) -> None:
        root = Path(self.mktemp()).absolute()
        root.mkdir()
        cache = mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(root / "cache")})
        with cache, StorageNodes(root, 3) as servers:
            for protocol in (HTTPS, FOOLSCAP):
                self.home = root / protocol
                (self.home / "private").mkdir(parents=True)
                settings = "[client]\nshares.needed = 2\nshares.total = 3\nshares.happy = 1\n"
                (self.home / "pipegrid.cfg").write_text(settings)
                for name in ("convergence", "secret"):
                    secret = base32.encode(protocol.encode().ljust(32))
                    (self.home / "private" / name).write_text(secret + "\n")
                text = servers_file(servers.addresses(), protocol)
                (self.home / SERVERS_NAME).write_text(text, "utf-8")
                await self._one_protocol(servers)

    async def _one_protocol(self, servers: StorageNodes) -> None:
        stop(servers.nodes[:1])
        await self._open(self._store)
        servers.nodes[0].start()
        servers.nodes[0].wait()
        await self._open(self._repair)
        for node in servers.nodes:
            stop([node])
            await self._open(self._read)
            node.start()
            node.wait()

    async def _open(self, work: Any) -> None:
        grid = await Grid.open(cast(IReactorTime, reactor), self.home)
        try:
            await work(grid)
        finally:
            await grid.close()

    async def _store(self, grid: Grid) -> None:
        self.assertEqual(grid.config.params, Params(2, 3))
        random = Random(str(self.home))
        self.contents: dict[str, bytes] = {}
        root = await grid.create_directory()
        small, large = random.randbytes(1000), random.randbytes(400_000)
        for name, data in (("small", small), ("large", large)):
            cap = (await grid.put(data)).cap
            await root.link(name, cap)
            self.contents[str(cap)] = data
        for format in ("sdmf", "mdmf"):
            made = (await grid.create_mutable(large, format=format)).cap
            await root.link(format, made)
            self.contents[str(made)] = large
        self.root = str(root.cap)
        (warning,) = grid.warnings
        self.assertIn("reached fewer servers than wanted (at least 2 of 3)", warning)
        self.assertEqual(await self._states(grid), {"healthy"})

    async def _check(self, grid: Grid, **todo: bool) -> TreeSummary:
        self.states: set[str] = set()

        def ended(_: FirstMet, outcome: Any) -> None:
            if isinstance(outcome, CheckResult):
                self.states.add(outcome.state)

        return await check_tree(grid, self.root, UpkeepRequest(**todo), ended=ended)

    async def _states(self, grid: Grid) -> set[str]:
        await self._check(grid)
        return self.states

    async def _repair(self, grid: Grid) -> None:
        self.assertEqual(await self._states(grid), {"unspread"})
        night = await self._check(grid, repair=True, add_lease=True)
        self.assertEqual((night.objects, night.repaired), (OBJECTS, OBJECTS))
        again = await self._check(grid, repair=True, add_lease=True)
        self.assertEqual((again.healthy, again.repaired), (OBJECTS, 0))
        whole = await self._check(grid, verify=True)
        self.assertEqual(whole.healthy, OBJECTS)

    async def _read(self, grid: Grid) -> None:
        self.assertLessEqual(await self._states(grid), {"reachable", "healthy"})
        for cap, data in self.contents.items():
            self.assertEqual(await grid.read(cap), data)
