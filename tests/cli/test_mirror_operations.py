"""``pipegrid mirror`` in the hands of cron: what is said, when to wait for another run, and dry runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from pipegrid.mirror.destination import Destination
from tests.cli.test_mirror_debian import DebianCase
from tests.cli.test_mirror_rpm import RpmCase
from tests.mirror.rpmarchive import RpmArchive
from tests.mirror.unchanged import look_of

NOBODY = 65534
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
"""Another user, who may write nothing of ours, but reads the program wherever it is installed."""


class OperationsTests(DebianCase):
    """A Debian archive that is mirrored again and again."""

    def setUp(self) -> None:
        super().setUp()
        self.serve(self.made())

    async def quiet(self, *options: str) -> tuple[int, str]:
        """Run it as cron does; returns the status, and what would be in the mail."""
        status, out, err = await self.run_command("-q", *self.arguments(*options))
        return status, out + err

    async def _test_mails(self) -> None:
        status, said = await self.quiet()
        files = len([path for path in self.archive.files if path.endswith(".deb")])
        first, *names, more, totals = said.splitlines()
        self.assertTrue(first.startswith(f"{self.dest}: {files} files, "), first)
        self.assertEqual(
            (status, more.split()[0], totals.split()[:2]), (0, "+", [f"{files}", "files,"])
        )
        self.assertTrue(all(name.startswith("+ pool/") for name in names), names)
        self.assertEqual(await self.quiet(), (0, ""))
        self.assertEqual(await self.quiet("--exit-unchanged", "--delete"), (6, ""))
        gone = min(path for path in self.archive.files if path.endswith(".deb"))
        self.archive.drop(gone)
        new = self.archive.add()
        self.archive.publish()
        status, said = await self.quiet("--dry-run", "--exit-unchanged")
        self.assertEqual(status, 0)
        self.assertIn(" would be fetched", said)
        status, said = await self.quiet("--exit-unchanged")
        self.assertEqual((status, f"+ {new}\n" in said), (0, True), said)
        # Names by hash of the generation before stay for one run more, and their packages with them.
        await self.quiet("--delete")
        status, said = await self.quiet("--delete")
        self.assertEqual((status, (self.dest / gone).exists()), (0, False), said)
        self.assertEqual(await self.quiet("--exit-unchanged", "--delete"), (6, ""))

    def test_mails(self) -> Deferred[None]:
        """Nothing is said where nothing changed; else what changed, and totals."""
        return Deferred.fromCoroutine(self._test_mails())

    async def _test_release_alone(self) -> None:
        await self.quiet()
        self.archive.publish()  # the same packages, with a new date
        status, out, _ = await self.run_command(*self.arguments("--json", "--exit-unchanged"))
        told = json.loads(out)
        self.assertEqual((told["fetched"], told["changed"], status), (0, True, 0))
        status, out, _ = await self.run_command(*self.arguments("--json", "--exit-unchanged"))
        self.assertEqual((json.loads(out)["changed"], status), (False, 6))
        status, out, _ = await self.run_command(*self.arguments("--json"))
        self.assertEqual((json.loads(out)["changed"], status), (False, 0))

    def test_release_alone(self) -> Deferred[None]:
        """A new release file is a change, with no package at all."""
        return Deferred.fromCoroutine(self._test_release_alone())

    async def _test_failures_count(self) -> None:
        await self.quiet()
        path = min(path for path in self.archive.files if path.endswith(".deb"))
        (self.dest / path).unlink()
        del self.archive.files[path]
        status, said = await self.quiet("--exit-unchanged")
        self.assertEqual((status, said.count(path)), (1, 1), said)

    def test_failures_count(self) -> Deferred[None]:
        """Where anything failed the status is 1, though nothing changed."""
        return Deferred.fromCoroutine(self._test_failures_count())

    async def _test_waits(self) -> None:
        await self.quiet()
        with closing(Destination(str(self.dest))):
            status, _, err = await self.run_command(*self.arguments("--wait=0"))
            self.assertEqual(status, 1)
            self.assertIn("another process is mirroring to", err)
            status, _, err = await self.run_command(*self.arguments("--wait=1"))
            self.assertEqual(status, 1)
            self.assertIn(f"another process uses {self.dest}; waiting for it, 1 s at most", err)
            self.assertIn("another process is mirroring to", err)
        for options in (["--wait"], ["--wait=60", "--dry-run"]):
            other = Destination(str(self.dest))
            reactor.callLater(0.5, other.close)
            status, _, err = await self.run_command(*self.arguments(*options))
            self.assertEqual((status, "waiting for it, " in err), (0, True), err)

    def test_waits(self) -> Deferred[None]:
        """``--wait`` begins when the other run ends, and ends itself when it has waited long enough."""
        return Deferred.fromCoroutine(self._test_waits())

    async def _test_waits_early(self) -> None:
        other = Destination(str(self.dest))
        reactor.callLater(1.0, other.close)
        command = [sys.executable, "-m", "pipegrid.cli", *self.arguments("--wait")]
        done = await deferToThread(
            subprocess.run, command, capture_output=True, text=True, timeout=120
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("waiting for it, 3600 s at most", done.stderr)
        self.assertEqual(done.stdout.count("\n"), 1)

    def test_waits_early(self) -> Deferred[None]:
        """So it is without a reactor, too."""
        return Deferred.fromCoroutine(self._test_waits_early())

    async def _test_waits_and_ends(self) -> None:
        with closing(Destination(str(self.dest))):
            command = [sys.executable, "-m", "pipegrid.cli", *self.arguments("--wait")]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            assert process.stderr is not None
            self.assertIn("waiting for it", process.stderr.readline())
            process.terminate()
            self.assertEqual(await deferToThread(process.wait, 60), 130)
            process.stderr.close()

    def test_waits_and_ends(self) -> Deferred[None]:
        """Who waits can be told to end."""
        return Deferred.fromCoroutine(self._test_waits_and_ends())


class DryRunTests(DebianCase):
    """A dry run in a process of its own, of another user, writes nothing."""

    if os.geteuid():
        skip = "only root can be another user"

    async def run_as_nobody(self, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it as a user who may write to no directory but that for temporary files."""
        environment = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "PATH": os.defpath}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
        return await deferToThread(
            subprocess.run,
            [*AS_NOBODY, sys.executable, "-m", "pipegrid.cli", *arguments],
            cwd="/",
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    async def _test_writes_nothing(self) -> None:
        place = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, place)
        place.chmod(0o755)
        (place / "tmp").mkdir()
        os.chown(place / "tmp", NOBODY, NOBODY)
        ring = place / "ring.gpg"
        shutil.copy(self.signer.keyring, ring)
        ring.chmod(0o644)
        self.serve(self.made())
        for is_there in (False, True):
            self.dest = place / "dest"
            self.assertEqual(self.dest.exists(), is_there)
            options = self.arguments("--dry-run", "--delete", "--json")
            options[options.index(self.signer.keyring)] = str(ring)
            before = look_of(place)
            done = await self.run_as_nobody(place, *options)
            self.assertEqual(done.returncode, 0, done.stderr)
            told = json.loads(done.stdout)
            self.assertEqual((told["present"], told["changed"]), (is_there and 20, not is_there))
            after = look_of(place)
            for each in (before, after):  # only its times change, since something was in it
                each[str(place / "tmp")] = each[str(place / "tmp")][:2]
            self.assertEqual(after, before)
            status, _, err = await self.run_command(*self.arguments())
            self.assertEqual(status, 0, err)

    def test_writes_nothing(self) -> Deferred[None]:
        """Neither in DEST, nor where that would be, nor at home: no lock, no directory, no note."""
        return Deferred.fromCoroutine(self._test_writes_nothing())


class RpmOperationsTests(RpmCase):
    """The same of an RPM repository."""

    async def _test_changed(self) -> None:
        self.serve(RpmArchive(self.signer))
        options = self.arguments("--json", "--exit-unchanged")
        for changed, status in ((True, 0), (False, 6)):
            found, out, err = await self.run_command(*options)
            self.assertEqual((json.loads(out)["changed"], found), (changed, status), err)
        self.assertEqual((await self.run_command("-q", *self.arguments()))[1:], ("", ""))

    def test_changed(self) -> Deferred[None]:
        """``changed`` and the status say whether anything did."""
        return Deferred.fromCoroutine(self._test_changed())
