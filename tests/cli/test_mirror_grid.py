"""``pipegrid mirror --to-grid`` and ``--from-grid`` as they are used: a mirror that survives its machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from twisted.internet.defer import Deferred

from tests.cli.test_mirror_debian import DebianCase
from tests.cli.test_mirror_rpm import RpmCase
from tests.mirror.archive import check_readers
from tests.mirror.rpmarchive import RpmArchive


class DebianGridTests(DebianCase):
    """A Debian archive, and the grid within this machine that a client makes by itself."""

    async def client(self) -> tuple[str, str]:
        """Make a client with a grid of its own on this machine; returns the options that name it."""
        client = ("-d", str(Path(self.mktemp()).absolute()))
        status, _, err = await self.run_command(*client, "init")
        self.assertEqual(status, 0, err)
        return client

    async def _test_there_and_back(self) -> None:
        self.serve(self.made())
        client = await self.client()
        status, out, err = await self.run_command(
            *client, *self.arguments("--to-grid", "--source", "--json")
        )
        self.assertEqual(status, 0, err)
        told = json.loads(out)
        cap = told["cap"]
        self.assertTrue(cap.startswith("URI:DIR2-CHK:"), cap)
        # 20 packages, 3 sources of 2 files, 2 indexes in 2 forms, 3 release files.
        self.assertEqual(told["stored"], 33)
        before = self.found()
        status, out, err = await self.run_command(*client, *self.arguments("--to-grid", "--source"))
        self.assertIn(f"\nin the grid: {cap}\n", out)
        shutil.rmtree(self.dest)
        brought = ("mirror", "debian", str(self.dest), "--from-grid", cap)
        status, out, err = await self.run_command(*client, *brought, "--dry-run")
        self.assertEqual((status, self.dest.exists()), (0, False), err)
        status, out, err = await self.run_command(*client, *brought)
        self.assertEqual((status, self.found()), (0, before), err)
        self.assertIn("33 files", out)
        self.assertEqual(check_readers(self.dest), 40)
        status, out, _ = await self.run_command("mirror", "verify", str(self.dest), "--paranoid")
        self.assertEqual((status, out), (0, "33 of 33 files exist and are right\n"))
        (self.dest / "other").write_bytes(b"other")
        status, out, err = await self.run_command(*client, *brought, "--delete")
        self.assertIn("1 removed", out)
        self.assertEqual(check_readers(self.dest), 40)
        self.server.asked.clear()
        status, _, err = await self.run_command(*self.arguments("--source"))
        self.assertEqual((status, [path for path in self.server.asked if "pool" in path]), (0, []))

    def test_there_and_back(self) -> Deferred[None]:
        """What was stored comes back from one cap; apt can read it, and the next run fetches nothing."""
        return Deferred.fromCoroutine(self._test_there_and_back())

    async def _test_bad_input(self) -> None:
        self.serve(self.made())
        client = await self.client()
        brought = ("mirror", "debian", str(self.dest), "--from-grid")
        for arguments, words in (
            ((*brought, "URI:DIR2:x"), "cap"),
            ((*brought, "URI:LIT:krugkidfnzsc4"), "give the one that --to-grid printed"),
            ((*brought, "URI:DIR2-LIT:"), "give the cap that --to-grid printed"),
            ((*brought, "URI:DIR2-LIT:", "--from", self.url), "cannot be combined with --from or"),
            (("mirror", "debian", str(self.dest), "--suite", "sid"), "give --from URL"),
            (("mirror", "debian", str(self.dest), "--from", self.url), "give a suite"),
        ):
            status, out, err = await self.run_command(*client, *arguments)
            self.assertIn(status, (1, 2), err)
            self.assertEqual(out, "")
            self.assertIn(words, err)
            self.assertEqual(self.found(), set())

    def test_bad_input(self) -> Deferred[None]:
        """One sentence each."""
        return Deferred.fromCoroutine(self._test_bad_input())


class RpmGridTests(RpmCase):
    """An RPM repository."""

    async def client(self) -> tuple[str, str]:
        """Make a client with a grid of its own on this machine; returns the options that name it."""
        client = ("-d", str(Path(self.mktemp()).absolute()))
        status, _, err = await self.run_command(*client, "init")
        self.assertEqual(status, 0, err)
        return client

    async def _test_there_and_back(self) -> None:
        self.serve(RpmArchive(self.signer))
        client = await self.client()
        status, out, err = await self.run_command(*client, *self.arguments("--to-grid", "--json"))
        self.assertEqual(status, 0, err)
        cap = json.loads(out)["cap"]
        shutil.rmtree(self.dest)
        status, _, err = await self.run_command(
            *client, "mirror", "rpm", str(self.dest), "--from-grid", cap
        )
        self.assertEqual((status, self.found()), (0, self.archive.files), err)

    def test_there_and_back(self) -> Deferred[None]:
        """It comes back to the byte."""
        return Deferred.fromCoroutine(self._test_there_and_back())
