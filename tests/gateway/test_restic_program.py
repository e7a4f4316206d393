"""The program restic on a gateway with an embedded grid; it comes with Debian."""

from __future__ import annotations

import os
import shutil
from hashlib import shake_256
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import ensureDeferred, gatherResults
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import SkipTest
from twisted.web.resource import Resource

from pipegrid import Grid
from pipegrid.gateway.http_site import GatewaySite
from pipegrid.gateway.restic.restic_resource import ResticResource
from tests.gateway.test_restic_resource import ResourceTestCase

reactor: Any = installed_reactor
RESTIC = shutil.which("restic")


class ResticTestCase(ResourceTestCase):
    """restic, with a small tree of files."""

    timeout = 300

    async def setUp(self) -> None:  # type: ignore[override]
        if RESTIC is None:
            raise SkipTest("restic is not installed")
        await super().setUp()
        self.tree = Path(self.mktemp())
        for n in range(40):
            file = self.tree / f"d{n % 4}" / f"f{n}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(shake_256(b"%d" % n).digest(n * n * 60))
        self.cache = Path(self.mktemp()).absolute()

    async def run_restic(self, *arguments: str, repository: str = "r", status: int = 0) -> str:
        """Run a command; returns what it printed."""
        assert RESTIC is not None
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.cache),
            "RESTIC_CACHE_DIR": str(self.cache),
            "RESTIC_REPOSITORY": f"rest:{self.url}/restic/{repository}/",
            "RESTIC_PASSWORD": "secret",
            "GOMAXPROCS": "1",
        }
        out, err, code = await getProcessOutputAndValue(
            RESTIC, arguments, environment, str(Path.cwd()), reactor
        )
        self.assertEqual(code, status, (arguments, out, err))
        return str((out + err).decode())

    def assert_same(self, found: Path) -> None:
        """Compare a restored tree with the original."""
        originals = {p.relative_to(self.tree): p for p in self.tree.rglob("*") if p.is_file()}
        there = {p.relative_to(found): p for p in found.rglob("*") if p.is_file()}
        self.assertEqual(originals.keys(), there.keys())
        for name, path in originals.items():
            self.assertEqual(there[name].read_bytes(), path.read_bytes(), name)


class BackupTests(ResticTestCase):
    """What people do with restic."""

    async def test_backup(self) -> None:
        """init, backup, backup again, check, restore with seven servers dead, forget --prune."""
        await self.run_restic("init")
        await self.run_restic("backup", str(self.tree))
        (self.tree / "new").write_bytes(b"new" * 10_000)
        again = await self.run_restic("backup", str(self.tree))
        self.assertIn("1 new", again)
        self.assertIn("no errors were found", await self.run_restic("check", "--read-data"))
        target = Path(self.mktemp())
        await self.run_restic("restore", "latest", "--target", str(target))
        self.assert_same(target / self.tree)
        await self.run_restic("forget", "--keep-last", "1", "--prune")
        self.assertIn("no errors were found", await self.run_restic("check", "--read-data"))
        self.assertEqual(len((await self.run_restic("list", "snapshots")).split()), 1)
        self.assertEqual((await self.run_restic("list", "locks")).split(), [])

    async def test_few_servers(self) -> None:
        """With seven of ten servers gone, restore works, with its lock; backup fails, and changes nothing."""
        await self.run_restic("init")
        await self.run_restic("backup", str(self.tree))
        await self.stop()
        for n in range(7):
            shutil.rmtree(self.directory / "storage" / f"{n:02d}")
            (self.directory / "storage" / f"{n:02d}").write_text("dead")
        await self.start()
        target = Path(self.mktemp())
        await self.run_restic("restore", "latest", "--target", str(target))
        self.assert_same(target / self.tree)
        self.assertEqual((await self.run_restic("list", "locks", "--no-lock")).split(), [])

    async def test_plain_repository(self) -> None:
        """What ``pipegrid get -r`` fetches is a repository that restic opens without a gateway."""
        await self.run_restic("init")
        await self.run_restic("backup", str(self.tree))
        fetched = Path(self.mktemp()).absolute()
        end = await self.grid.tree.resolve("restic:r")
        assert end.cap is not None
        await self.grid.tree.get_tree(end.cap, fetched)
        out = await self.run_restic("check", "--read-data", "-r", str(fetched))
        self.assertIn("no errors were found", out)

    async def test_two_writers(self) -> None:
        """Two backups at a time, each through a gateway of its own: both are there, whole."""
        await self.run_restic("init")
        grid = await Grid.open(reactor, self.directory)
        root = Resource()
        root.putChild(b"restic", ResticResource(grid, self.settings))
        site = GatewaySite(root, self.settings, reactor)
        port = reactor.listenTCP(0, site, interface="127.0.0.1")
        other = Path(self.mktemp())
        other.mkdir()
        (other / "file").write_bytes(shake_256(b"other").digest(500_000))
        try:
            url = self.url
            first = ensureDeferred(self.run_restic("backup", str(self.tree)))
            self.url = f"http://127.0.0.1:{port.getHost().port}"
            second = ensureDeferred(self.run_restic("backup", str(other)))
            await gatherResults([first, second])
            self.assertEqual(len((await self.run_restic("list", "snapshots")).split()), 2)
            self.url = url
            self.assertEqual(len((await self.run_restic("list", "snapshots")).split()), 2)
            self.assertIn("no errors were found", await self.run_restic("check", "--read-data"))
        finally:
            site.close_all()
            await port.stopListening()
            await deferLater(reactor, 0)
            await grid.close()

    async def test_mount(self) -> None:
        """A mounted repository shows the files."""
        if not os.access("/dev/fuse", os.W_OK) or shutil.which("fusermount") is None:
            raise SkipTest("file systems in user space cannot be mounted here")
        await self.run_restic("init")
        await self.run_restic("backup", str(self.tree))
        place = Path(self.mktemp()).absolute()
        place.mkdir()
        mounting = ensureDeferred(self.run_restic("mount", str(place), status=0))
        try:
            found = place / "snapshots" / "latest" / self.tree / "d0" / "f4"
            for _ in range(200):
                if await deferToThread(found.exists):
                    break
                await deferLater(reactor, 0.1)
            data = await deferToThread(found.read_bytes)
            self.assertEqual(data, (self.tree / "d0" / "f4").read_bytes())
        finally:
            await getProcessOutputAndValue("umount", [str(place)], os.environ, None, reactor)
            await mounting
