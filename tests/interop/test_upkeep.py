"""Upkeep of many objects on Tahoe-LAFS's own servers: check, leases, and repair after one was emptied."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import cast
from unittest import mock

from misc.speedtest.peers.nodes import HTTPS, StorageNodes, servers_file
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from pipegrid import Grid
from pipegrid.core import base32
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.transfer.results import CheckResult, RepairResult

FILES = 50


class UpkeepTests(TestCase):
    """Ten servers take their seconds to start, so one test does all with them."""

    timeout = 120

    def test_fifty_files(self) -> Deferred[None]:
        """All healthy; leases added; one of ten servers loses everything, and gets it back."""
        return Deferred.fromCoroutine(self._with_servers())

    async def _with_servers(self) -> None:
        root = Path(self.mktemp()).absolute()
        root.mkdir()
        cache = mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(root / "cache")})
        with cache, StorageNodes(root, 10) as servers:
            home = root / "client"
            (home / "private").mkdir(parents=True)
            (home / "pipegrid.cfg").write_text("[client]\n")
            for name in ("convergence", "secret"):
                (home / "private" / name).write_text(base32.encode(b"s" * 32) + "\n")
            (home / SERVERS_NAME).write_text(servers_file(servers.addresses(), HTTPS), "utf-8")
            grid = await Grid.open(cast(IReactorTime, reactor), home)
            try:
                await self._maintain(grid, servers)
            finally:
                await grid.close()

    async def _maintain(self, grid: Grid, servers: StorageNodes) -> None:
        random = Random(1)
        stored = await grid.put_many([random.randbytes(100 + 300 * n) for n in range(FILES)])
        caps = [one.cap for one in stored if not isinstance(one, Failure)]
        self.assertEqual(len(caps), FILES)
        for one in await grid.check_many(caps, add_lease=True):
            assert isinstance(one, CheckResult)
            self.assertTrue(one.healthy)
            self.assertEqual((len(one.renewed), one.lease_problems), (10, []))
        emptied = servers.nodes[3]
        before = sum(1 for path in emptied.shares.rglob("*") if path.is_file())
        self.assertGreaterEqual(before, FILES)
        for path in emptied.shares.iterdir():
            if path.name != "incoming":
                shutil.rmtree(path)
        for one in await grid.check_many(caps):
            assert isinstance(one, CheckResult)
            self.assertEqual(len(one.good_shares), 9)
        for outcome in await grid.check_many(caps, repair=True, add_lease=True):
            assert isinstance(outcome, RepairResult)
            self.assertTrue(outcome.whole)
            self.assertEqual(list(outcome.uploaded.values()), [emptied.directory.name])
        for one in await grid.check_many(caps, verify=True):
            assert isinstance(one, CheckResult)
            self.assertTrue(one.healthy and not one.corrupt)
        for renewed in await grid.renew_many(caps):
            assert not isinstance(renewed, Failure)
            self.assertEqual(len(renewed.leases), 10)
