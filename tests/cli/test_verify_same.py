"""``mirror verify`` of a mirror that is as it was: the same as in the ordinary way, only sooner."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

from misc.command import environment
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.startup.fast_mirror_verify import verify_if_same
from pipegrid.mirror import stat_cache
from pipegrid.mirror.archive_file import ArchiveFile
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.local_check import VerifyPolicy
from pipegrid.mirror.manifest import write_manifest
from pipegrid.mirror.verify import verify


class VerifySameTests(SynchronousTestCase):
    """A mirror that was looked at twice."""

    def setUp(self) -> None:
        self.dest = Path(self.mktemp())
        self.make(self.dest)

    def make(self, dest: Path) -> None:
        """Make one with three files."""
        (dest / "pool").mkdir(parents=True)
        entries = []
        for number in range(3):
            data = b"x" * number
            (dest / f"pool/{number}").write_bytes(data)
            entries.append(ArchiveFile(f"pool/{number}", number, "sha256", sha256(data).digest()))
        destination = Destination(str(dest))
        write_manifest(destination, entries)
        destination.close()
        for _ in range(2):
            destination = Destination(str(dest))
            verify(destination, VerifyPolicy())
            destination.close()

    def said(self, dest: Path, *options: str) -> tuple[int, str, str, bool]:
        """Run it as a process; returns its status, what it says, and whether it loaded all."""
        command = [sys.executable, "-X", "importtime", "-m", "pipegrid.cli", "mirror", "verify"]
        done = subprocess.run(
            [*command, str(dest), *options],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        lines = done.stderr.splitlines(True)
        told = "".join(line for line in lines if not line.startswith("import time:"))
        return done.returncode, done.stdout, told, "pipegrid.cli.console" in done.stderr

    def test_what_is_said(self) -> None:
        """The same, to people and in JSON, quiet or not."""
        for options in ((), ("--json",), ("-q",)):
            soon = self.said(self.dest, *options)
            late = self.said(self.dest, *options, "--sample", "0")
            self.assertEqual(soon[:3], late[:3])
            self.assertEqual((soon[0], soon[2], soon[3], late[3]), (0, "", False, True))

    def test_what_takes_longer(self) -> None:
        """A path that JSON has escapes for, and a file that is wrong, are for the ordinary way."""
        odd = Path(f'{self.mktemp()} "')
        self.make(odd)
        status, out, _, all_loaded = self.said(odd, "--json")
        self.assertEqual((status, all_loaded), (0, True))
        self.assertIn('"right": 3', out)
        (self.dest / "pool/2").write_bytes(b"yy")
        status, out, told, _ = self.said(self.dest)
        self.assertEqual((status, out), (5, "2 of 3 files exist and are right\n"))
        self.assertIn("pool/2: it is missing, or has changed", told)

    def look(self, answer: Callable[[], Any], quiet: bool = True) -> Any:
        """Do it here, where another look gives an answer."""
        self.patch(stat_cache, "glimpse", lambda *_: answer())
        return verify_if_same(str(self.dest), False, quiet)

    def test_somebody_watches(self) -> None:
        """On a terminal there is to be a bar, unless nothing but the result is wanted."""
        terminal = StringIO()
        terminal.isatty = lambda: True  # type: ignore[method-assign]
        self.patch(sys, "stderr", terminal)
        asked: list[None] = []
        for quiet in (False, True):
            self.look(lambda: asked.append(None), quiet)
            self.assertEqual(len(asked), quiet)

    def test_nobody_listens(self) -> None:
        """What cannot be said is said by who has a sentence for that; without a stream at once."""

        def write(*_: object) -> int:
            raise OSError(errno.ENOSPC, "full")

        self.patch(os, "write", write)
        found = stat_cache.QuickCheckResult(b"", 3, 3, [])
        self.assertIs(self.look(lambda: found), found)
        for name in ("stdout", "stderr"):
            stream = self.patch(sys, name, None)
            self.assertIsNone(self.look(lambda: self.fail("it looks")))
            stream.restore()

    def test_told_to_end(self) -> None:
        """By Ctrl-C or otherwise: it says that it was interrupted."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self.addCleanup(signal.signal, number, signal.getsignal(number))
            stderr = StringIO()
            self.patch(sys, "stderr", stderr)

            def told(number: int = number) -> None:
                os.kill(os.getpid(), number)
                signal.sigtimedwait([], 5)

            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.assertEqual(self.look(told), 130)
            self.assertIn("interrupted; the same command can be run again", stderr.getvalue())

    def test_not_to_be_told(self) -> None:
        """Where whoever began it has it ignore that, it goes on."""
        self.addCleanup(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.assertIsNone(self.look(lambda: os.kill(os.getpid(), signal.SIGTERM)))
