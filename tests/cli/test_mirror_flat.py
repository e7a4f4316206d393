"""``pipegrid mirror debian`` with flat archives: real processes that are killed, and apt itself."""

from __future__ import annotations

import gzip
import os
import random
import re
import signal
import subprocess
import sys
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from tests.cli.test_mirror_debian import AptCase
from tests.mirror.archive import sha
from tests.mirror.flatarchive import FlatArchive

KILLS = 6

_FIELD = re.compile(r"^(Filename|Size|SHA256): (.*)$", re.MULTILINE)


def named_in(root: Path, directory: str = "") -> int:
    """Raise if the index that can be seen names what is not there; returns how many files it names."""
    path = root / directory / "Packages.gz"
    if not path.exists():
        return 0
    count = 0
    for paragraph in gzip.decompress(path.read_bytes()).decode().split("\n\n"):
        found = dict(_FIELD.findall(paragraph))
        if found:
            data = (root / found["Filename"]).read_bytes()
            assert (len(data), sha(data)) == (int(found["Size"]), found["SHA256"]), found
            count += 1
    return count


class FlatTests(AptCase):
    """What it does."""

    def made_flat(self, **options: Any) -> FlatArchive:
        """Make an archive of today."""
        return FlatArchive(self.signer, now=datetime.now(timezone.utc), **options)

    def arguments(self, *options: str) -> list[str]:
        """``mirror debian``, of all that there is."""
        return [
            *("mirror", "debian", str(self.dest), "--from", self.url),
            *("--keyring", self.signer.keyring, *options),
        ]

    async def _test_apt(self) -> None:
        built = self.build()
        for directory, suite in (("", "/"), ("", "./"), ("amd64/", "amd64/")):
            packages = {f"{directory}{path.rpartition('/')[2]}": d for path, d in built.items()}
            self.dest = Path(self.mktemp()).absolute()
            self.serve(self.made_flat(directory=directory, packages=packages))
            self.source = suite
            for form in ("packed", "unpacked"):
                options = ("--suite", suite, "--indexes", form, "--source")
                status, _, err = await self.run_command(*self.arguments(*options))
                self.assertEqual(status, 0, err)
                got = await self.apt_gets(form, "pg-one", "pg-two")
                self.assertEqual(got, sorted(packages.values()))

    def test_apt(self) -> Deferred[None]:
        """``apt-get update`` and ``apt-get download`` work from the result, by the same suite."""
        return Deferred.fromCoroutine(self._test_apt())

    async def _test_kills(self) -> None:
        seed = random.randrange(1 << 30)
        rng = random.Random(seed)
        self.serve(self.made_flat(count=100))
        command = [sys.executable, "-m", "pipegrid.cli", *self.arguments("--suite", "/")]
        killed = number = 0
        # The quicker the machine, the more runs end before they are killed.
        while number < KILLS or (not killed and number < 5 * KILLS):
            number += 1
            process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
            missing = self.archive.pool.keys() - self.found()
            after = rng.choice((rng.randrange(1, 4 + len(missing)), 4 + len(missing)))
            self.server.asked.clear()
            delay_s = rng.random() ** 3 * 0.02
            self.server.kill_at = (after, partial(reactor.callLater, delay_s, process.kill))
            await deferToThread(process.communicate)
            killed += process.returncode == -signal.SIGKILL
            try:
                named = named_in(self.dest)
            except Exception as error:
                raise AssertionError(f"seed {seed}, kill {number}: {error!r}: {error}") from error
            if named or number % 3 == 2:
                del self.archive.pool[rng.choice(sorted(self.archive.pool))]
                for _ in range(20):
                    self.archive.add()
                self.archive.publish()
        self.server.kill_at = None
        options = ("--suite", "/", "--delete", "--source")
        status, _, err = await self.run_command(*self.arguments(*options))
        self.assertEqual(status, 0, f"seed {seed}: {err}")
        self.assertEqual(named_in(self.dest), len(self.archive.pool), seed)
        expected = self.archive.files.keys() - {"Packages", "Sources"}
        self.assertEqual(self.found(), expected, seed)
        self.assertGreater(killed, 0, f"seed {seed}: none was killed in time")
        status, _, _ = await self.run_command("mirror", "verify", str(self.dest), "--paranoid")
        self.assertEqual(status, 0)
        os.unlink(self.dest / min(self.archive.pool))
        status, _, _ = await self.run_command("mirror", "verify", str(self.dest))
        self.assertEqual(status, 5)

    def test_kills(self) -> Deferred[None]:
        """Killed at any moment, the index names nothing that is not there; then all is as in the archive."""
        return Deferred.fromCoroutine(self._test_kills())

    async def _test_dates(self) -> None:
        archive = FlatArchive(self.signer, now=datetime(2037, 1, 1, tzinfo=timezone.utc))
        self.serve(archive)
        status, _, err = await self.run_command(*self.arguments("--suite", "./"))
        self.assertEqual((status, self.found()), (1, set()))
        self.assertIn("which is in the future; check the clock", err)
        status, _, err = await self.run_command(*self.arguments("--suite", "./", "--ignore-dates"))
        self.assertEqual(status, 0, err)

    def test_dates(self) -> Deferred[None]:
        """A release file of the future is believed only if that is asked for."""
        return Deferred.fromCoroutine(self._test_dates())
