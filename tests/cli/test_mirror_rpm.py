"""``pipegrid mirror rpm`` as it is used: real processes that are killed, and what a person reads."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase
from twisted.web.server import Site

from pipegrid.cli.command_grammar import start
from pipegrid.cli.console import Console
from pipegrid.mirror.decompression import unpacked
from pipegrid.mirror.rpm_metadata import packages, read_repomd
from tests.cli.test_mirror_debian import Files
from tests.mirror.archive import Signer
from tests.mirror.rpmarchive import REPOMD, RpmArchive
from tests.mirror.unchanged import look_of

KILLS = 6


class RpmCase(TestCase):
    """The command line, and a web server on this machine."""

    def setUp(self) -> None:
        self.dest = Path(self.mktemp()).absolute()
        self.signer = Signer()
        self.addCleanup(self.signer.close)

    def serve(self, archive: RpmArchive) -> str:
        """Start a web server; returns its URL."""
        self.archive = archive
        self.server = Files(archive)
        port: Any = reactor.listenTCP(0, Site(self.server), interface="127.0.0.1")  # type: ignore[arg-type]
        self.addCleanup(port.stopListening)
        self.url = f"http://127.0.0.1:{port.getHost().port}/"
        return self.url

    def arguments(self, *options: str) -> list[str]:
        """``mirror rpm``, signed."""
        known = ["--keyring", self.signer.armored]
        return ["mirror", "rpm", str(self.dest), "--from", self.url, *known, *options]

    async def run_command(self, *arguments: str) -> tuple[int, str, str]:
        """Run it here; returns status, stdout, stderr."""
        out, err = io.BytesIO(), io.StringIO()
        status = await start(list(arguments), Console(io.BytesIO(), out, err), reactor)
        return status, out.getvalue().decode(), err.getvalue()

    def found(self) -> dict[str, bytes]:
        """What is there, our own things apart."""
        return {
            str(path.relative_to(self.dest)): path.read_bytes()
            for path in self.dest.rglob("*")
            if path.is_file() and ".pipegrid-mirror" not in path.parts
        }

    def check_readers(self) -> int:
        """Look that all that the indexes name is there; returns how many packages that is."""
        found = self.found()
        if REPOMD not in found:
            return 0
        repomd = read_repomd(found[REPOMD], "x")
        for index in repomd.files:
            self.assertEqual(len(found[index.file.path]), index.file.size)
        path = str(self.dest / repomd.primary.file.path)
        named = list(packages(unpacked(path), "x"))
        for package in named:
            self.assertEqual(len(found[package.file.path]), package.file.size)
        return len(named)


class RpmTests(RpmCase):
    """What it does, and what it refuses."""

    async def _test_all_of_it(self) -> None:
        self.serve(RpmArchive(self.signer))
        status, out, err = await self.run_command(*self.arguments("--json"))
        self.assertEqual((status, self.found()), (0, self.archive.files), err)
        told = json.loads(out)
        self.assertEqual((told["fetched"], told["failed"], told["removed"]), (20, 0, 0))
        self.assertGreater(told["index_bytes"], 0)
        status, out, _ = await self.run_command("mirror", "verify", str(self.dest), "--paranoid")
        self.assertEqual((status, out), (0, "25 of 25 files exist and are right\n"))
        old = self.archive.packages[0]
        self.archive.add(old.name, "0", "1.1", "1")
        self.archive.publish()
        before = look_of(self.dest)
        options = self.arguments("--newest-only", "--delete")
        status, out, _ = await self.run_command(*options, "--dry-run")
        self.assertEqual((status, look_of(self.dest)), (0, before))
        self.assertNotIn("removed", out)
        status, out, _ = await self.run_command(*options)
        self.assertEqual(status, 0)
        self.assertIn(old.path, self.found())  # by the index of before, which readers may have
        before = look_of(self.dest)
        status, out, _ = await self.run_command(*options, "--dry-run")
        self.assertEqual((status, look_of(self.dest)), (0, before))
        self.assertIn("2 would be removed", out)
        status, out, _ = await self.run_command(*options)
        self.assertEqual(status, 0)
        self.assertNotIn(old.path, self.found())
        self.assertIn("Packages/p/p0-1.1-1.x86_64.rpm", self.found())

    def test_all_of_it(self) -> Deferred[None]:
        """All files, signed; only the newest if asked; a dry run changes nothing; ``verify`` knows all."""
        return Deferred.fromCoroutine(self._test_all_of_it())

    async def _test_bad_input(self) -> None:
        self.serve(RpmArchive(self.signer))
        plain = ["mirror", "rpm", str(self.dest), "--from", self.url]
        other = Signer()
        self.addCleanup(other.close)
        for arguments, words in (
            (plain, "give --keyring, or --allow-unsigned"),
            ([*plain, "--keyring", "/nowhere/ring"], "/nowhere/ring cannot be read"),
            ([*plain, "--keyring", other.keyring], "it is signed by another key"),
            (self.arguments("--allow-unsigned"), "give one of them"),
            ([*self.arguments(), "--from", "ftp://x"], "is not the URL of a mirror"),
            (
                ["mirror", "rpm", str(self.dest), "--from", self.url + "none", "--allow-unsigned"],
                "has no repodata/repomd.xml",
            ),
        ):
            status, out, err = await self.run_command(*arguments)
            self.assertIn(status, (1, 2), err)
            self.assertEqual((out, err.count("\n")), ("", 1), err)
            self.assertIn(words, err)
            self.assertFalse(self.dest.exists() and self.found())

    def test_bad_input(self) -> Deferred[None]:
        """One sentence each."""
        return Deferred.fromCoroutine(self._test_bad_input())

    async def _test_kills(self) -> None:
        seed = random.randrange(1 << 30)
        rng = random.Random(seed)
        self.serve(RpmArchive(self.signer, count=150))
        killed = number = 0
        # The quicker the machine, the more runs end before they are killed.
        while number < KILLS or (killed <= KILLS // 3 and number < 5 * KILLS):
            number += 1
            command = [sys.executable, "-m", "pipegrid.cli", *self.arguments()]
            command += rng.choice(([], ["--delete"], ["--durability", "none"]))
            process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
            after = rng.randrange(1, 60 if number > 1 else 150)
            delay_s = rng.random() ** 3 * 0.02
            self.server.asked.clear()
            self.server.kill_at = (after, partial(reactor.callLater, delay_s, process.kill))
            await deferToThread(process.communicate)
            killed += process.returncode == -signal.SIGKILL
            try:
                named = self.check_readers()
            except Exception as error:
                raise AssertionError(f"seed {seed}, kill {number}: {error!r}: {error}") from error
            if named or number % 3 == 2:
                for _ in range(60):
                    self.archive.packages.pop(rng.randrange(len(self.archive.packages)))
                    self.archive.add(f"q{rng.randrange(1 << 40)}")
                self.archive.publish()
        self.server.kill_at = None
        here = self.archive.files.keys() & self.found().keys()
        self.server.asked.clear()
        status, _, err = await self.run_command(*self.arguments("--delete"))
        self.assertEqual(status, 0, f"seed {seed}: {err}")
        asked = {path for path in self.server.asked if path.endswith(".rpm")}
        self.assertEqual(asked & here, set(), seed)
        self.assertEqual(self.check_readers(), 150, seed)
        self.assertGreater(killed, KILLS // 3, f"seed {seed}: hardly any was killed in time")

    def test_kills(self) -> Deferred[None]:
        """Killed at any moment, no index names what is not there; the next run fetches only the rest."""
        return Deferred.fromCoroutine(self._test_kills())
