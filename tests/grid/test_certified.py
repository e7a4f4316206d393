"""With grid managers: new shares go to certified servers only, and are read from all of them."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from io import BytesIO
from pathlib import Path
from typing import Any

from foolscap.api import flushEventualQueue
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from pipegrid.core import base32
from pipegrid.core.caps import ChkCap, LitCap, MutableCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import UnhappyError
from pipegrid.grid import Grid
from pipegrid.grid.client_creation import ClientPreferences, create_client
from pipegrid.grid.client_paths import INTRODUCERS_NAME, SERVERS_NAME
from pipegrid.grid.servers_and_introducers_yaml import IntroducerAddress, Introducers
from pipegrid.server import serve
from pipegrid.server.introducer_process import IntroducerNode, IntroducerSettings
from pipegrid.server.serve import ServeSettings, StorageNode
from pipegrid.server.server_certificates import install
from pipegrid.wire import server_address
from pipegrid.wire.announcements import AnnouncementKey, make_signing_key
from pipegrid.wire.grid_manager_certificates import CERTIFICATES, parse_manager_key

reactor: Any = installed_reactor

MANAGER = make_signing_key()
DAYS_S = {0: 86400.0, 1: 86400.0, 2: 86400.0, 3: -60.0, 4: None}
"""Of each server, in how many seconds its certificate expires; None: it has none."""


def certificate(key: AnnouncementKey, left_s: float) -> dict[str, str]:
    """Return a certificate of the manager's, made out to a server's key."""
    expires = datetime.fromtimestamp(time.time() + left_s, timezone.utc).isoformat()
    text = json.dumps({"expires": expires, "public_key": key.public_text, "version": 1})
    return {"certificate": text, "signature": base32.encode(MANAGER.sign(text.encode()))}


def name_of(cap: ChkCap | LitCap | MutableCap) -> str:
    """Return what servers call the directory of a file's shares."""
    assert not isinstance(cap, LitCap)
    return base32.encode(cap.storage_index)


class CertifiedTests(TestCase):
    """Five real servers, three of them certified; announced, or of the user's own file."""

    timeout = 60

    def setUp(self) -> Deferred[None]:  # type: ignore[override]
        return Deferred.fromCoroutine(self._set_up())

    async def _set_up(self) -> None:
        self.patch(serve, "LOOK_S", 0.2)
        self.directory = Path(self.mktemp())
        self.introducer = IntroducerNode(
            reactor,
            IntroducerSettings(
                directory=self.directory / "introducer", port="tcp:0:interface=127.0.0.1"
            ),
        )
        await self.introducer.start()
        self.furl = server_address.parse_furl(self.introducer.furl)
        self.keys = [make_signing_key() for _ in DAYS_S]
        self.certificates = [
            [] if left_s is None else [certificate(key, left_s)]
            for key, left_s in zip(self.keys, DAYS_S.values(), strict=True)
        ]
        self.nodes = [self.node(number) for number in DAYS_S]
        await gatherResults([node.start() for node in self.nodes])
        self.grids: list[Grid] = []

    def node(self, number: int) -> StorageNode:
        """Make a storage server with a key and certificates."""
        directory = self.directory / f"node{number}"
        (directory / "private").mkdir(parents=True)
        (directory / "private" / "node.privkey").write_text(f"{self.keys[number]}\n")
        return StorageNode(
            reactor,
            ServeSettings(
                directory=directory,
                port="tcp:0:interface=127.0.0.1",
                durability="none",
                introducers={"test": self.furl},
                nickname=f"node {number}",
                certificate_files=self.certificate_files(directory, number),
            ),
        )

    def certificate_files(self, directory: Path, number: int) -> list[Path]:
        """Write the certificates of a server, and return their files."""
        files = []
        for count, each in enumerate(self.certificates[number]):
            path = directory / f"{count}.cert"
            path.write_text(json.dumps(each))
            files.append(path)
        return files

    def tearDown(self) -> Deferred[Any]:  # type: ignore[override]
        return Deferred.fromCoroutine(self._tear_down())

    async def _tear_down(self) -> None:
        await gatherResults([grid.close() for grid in self.grids])
        await gatherResults([node.stop() for node in self.nodes])
        await self.introducer.stop()
        await flushEventualQueue()

    async def open(self, name: str, static: bool, managed: bool) -> Grid:
        """Make a client's directory, and open its grid."""
        entries = {
            key.server_id: {
                "ann": {
                    "nickname": f"node {number}",
                    "anonymous-storage-NURLs": [node.nurl],
                    CERTIFICATES: self.certificates[number],
                }
            }
            for number, (key, node) in enumerate(zip(self.keys, self.nodes, strict=True))
        }
        introducers = Introducers((IntroducerAddress("i", self.furl),)).as_text()
        create_client(
            self.directory / name,
            params=Params(2, 5),
            happy=3,
            files={SERVERS_NAME: json.dumps({"storage": entries})}
            if static
            else {INTRODUCERS_NAME: introducers},
            preferences=ClientPreferences(
                managers=[parse_manager_key("alice", MANAGER.public_text)] if managed else []
            ),
        )
        grid = await Grid.open(reactor, self.directory / name, wait_for=5)
        self.grids.append(grid)
        return grid

    def shares(self, cap: ChkCap | LitCap | MutableCap) -> list[int]:
        """Return how many shares of a file each server has."""
        name = name_of(cap)
        places = [
            self.directory / f"node{number}" / "storage" / "shares" / name[:2] / name
            for number in DAYS_S
        ]
        return [len(list(each.iterdir())) if each.exists() else 0 for each in places]

    def test_announced(self) -> Deferred[None]:
        """As introducers pass them on."""
        return Deferred.fromCoroutine(self._test(False))

    def test_static(self) -> Deferred[None]:
        """As ``servers.yaml`` has them."""
        return Deferred.fromCoroutine(self._test(True))

    async def _test(self, static: bool) -> None:
        free = await self.open("free", static, False)
        everywhere = (await free.put(b"e" * 5000)).cap
        self.assertEqual(self.shares(everywhere), [1] * 5)
        old = (await free.create_mutable(b"old")).cap

        grid = await self.open("managed", static, True)
        statuses = {status.nickname: status for status in await grid.status()}
        reasons = {name: status.no_uploads for name, status in statuses.items()}
        said = [
            (statuses[f"node {number}"].certified_by, statuses[f"node {number}"].certified_until)
            for number in DAYS_S
        ]
        self.assertEqual([by for by, _ in said], ["alice"] * 4 + [None])
        expected = [
            json.loads(each[0]["certificate"])["expires"] if each else None
            for each in self.certificates
        ]
        self.assertEqual([until for _, until in said], expected)
        self.assertEqual([reasons[f"node {number}"] for number in range(3)], [None] * 3)
        self.assertIn("of grid manager alice has expired", reasons["node 3"] or "")
        self.assertIn("no certificate of a configured grid manager", reasons["node 4"] or "")
        for size in (5000, 300_000):
            stored = (await grid.put(b"s" * size)).cap
            found = self.shares(stored)
            self.assertEqual((sum(found), found[3:]), (5, [0, 0]))
        made = (await grid.create_mutable(b"new")).cap
        found = self.shares(made)
        self.assertEqual((sum(found), found[3:]), (5, [0, 0]))
        with self.assertRaises(UnhappyError) as caught:
            await grid.put(b"t" * 5000, happy=4)
        self.assertIn("only 3 of 5 have a valid certificate", str(caught.exception))

        await gatherResults([self.nodes[number].stop() for number in (0, 1, 2)])
        into = BytesIO()
        await grid.get(everywhere, into)  # from those that are not certified
        self.assertEqual(into.getvalue(), b"e" * 5000)
        into = BytesIO()
        await grid.get(old, into)
        self.assertEqual(into.getvalue(), b"old")

    def test_installed_while_the_server_runs(self) -> Deferred[None]:
        """Clients that run learn of it, without a restart."""
        return Deferred.fromCoroutine(self._test_installed())

    async def _test_installed(self) -> None:
        grid = await self.open("managed", False, True)
        number = 4
        directory = self.directory / f"node{number}"
        self.assertIn("no certificate", await self.reason(grid, number) or "")
        signed = certificate(self.keys[number], 86400.0)
        install(directory, self.keys[number].public_text, "a", json.dumps(signed).encode(), "FILE")
        for _ in range(200):
            if await self.reason(grid, number) is None:
                break
            await deferLater(reactor, 0.1, lambda: None)
        self.assertIsNone(await self.reason(grid, number))

    async def reason(self, grid: Grid, number: int) -> str | None:
        """Return why a server gets no new shares."""
        (found,) = [each for each in await grid.status() if each.nickname == f"node {number}"]
        return found.no_uploads

    def test_repair(self) -> Deferred[None]:
        """Missing shares are made anew on certified servers."""
        return Deferred.fromCoroutine(self._test_repair())

    async def _test_repair(self) -> None:
        grid = await self.open("managed", True, True)
        free = await self.open("free", True, False)
        for cap in ((await free.put(b"e" * 5000)).cap, (await free.put(b"f" * 300_000)).cap):
            name = name_of(cap)
            for number in (0, 3, 4):
                place = self.directory / f"node{number}" / "storage" / "shares" / name[:2] / name
                for share in list(place.iterdir()):
                    share.unlink()
            result = await grid.repair(cap)
            self.assertTrue(result.whole)
            found = self.shares(cap)
            self.assertEqual((sum(found), found[3:]), (5, [0, 0]))
