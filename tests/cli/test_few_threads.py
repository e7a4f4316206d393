"""Commands where the system gives no threads at all: they go on with one, say so once, and never hang."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet import threads
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site
from twisted.web.static import Data

from pipegrid.reactor.process_settings import FEW_THREADS

reactor: Any = installed_reactor

_NO_THREADS = """
import sys, threading

def start(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = start
from pipegrid.cli import main
sys.argv[0] = "pipegrid"
sys.exit(main())
"""
LONGEST_S = 60


class FewThreadsTests(TestCase):
    """As a limit of processes makes it (``ulimit -u``), whoever runs the test."""

    timeout = 240

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.file = self.directory / "file"
        self.file.write_bytes(os.urandom(3_000_000))

    def run_command(self, *arguments: object, stdin: int = subprocess.DEVNULL) -> tuple[str, str]:
        """Return what a command prints that has no threads, and what it tells; it has to succeed."""
        done = subprocess.run(
            [sys.executable, "-c", _NO_THREADS, *map(str, arguments)],
            capture_output=True,
            stdin=stdin,
            text=True,
            timeout=LONGEST_S,
            env={**os.environ, "XDG_DATA_HOME": str(self.directory.absolute())},
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        return done.stdout, done.stderr

    def test_files_and_backups(self) -> None:
        """Put, get, backup and restore, in one thread."""
        out, told = self.run_command("put", self.file)
        self.assertEqual(told.count(FEW_THREADS), 1)
        target = self.directory / "again"
        self.run_command("get", out.strip(), "-o", target)
        self.assertEqual(target.read_bytes(), self.file.read_bytes())
        tree = self.directory / "tree"
        tree.mkdir()
        (tree / "a").write_bytes(self.file.read_bytes())
        self.run_command("backup", tree)
        self.run_command("restore", "-o", self.directory / "restored")
        restored = (self.directory / "restored" / "a").read_bytes()
        self.assertEqual(restored, self.file.read_bytes())

    def test_a_pipe(self) -> None:
        """A source that may wait for ever takes a thread: one sentence says that there is none."""
        ours, theirs = os.pipe()
        os.close(theirs)
        done = subprocess.run(
            [sys.executable, "-c", _NO_THREADS, "put", "-"],
            capture_output=True,
            stdin=ours,
            text=True,
            timeout=LONGEST_S,
            env={**os.environ, "XDG_DATA_HOME": str(self.directory.absolute())},
            check=False,
        )
        os.close(ours)
        if done.returncode:
            self.assertIn("ulimit -u", done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_a_mirror(self) -> None:
        """Of files that go to a helper's thread, from a host whose name has to be looked up."""
        return Deferred.fromCoroutine(self._mirror())  # type: ignore[return-value]

    async def _mirror(self) -> None:
        data = self.file.read_bytes()
        root = Resource()
        root.putChild(b"file", Data(data, "application/octet-stream"))
        port = reactor.listenTCP(0, Site(root), interface="127.0.0.1")
        listed = self.directory / "list"
        listed.write_text(f"{hashlib.sha256(data).hexdigest()} {len(data)} file\n")
        url = f"http://localhost:{port.getHost().port}/"
        try:
            for name, options in (("one", ()), ("two", ("--jobs", "2", "--durability", "strict"))):
                place = self.directory / name
                arguments = ("mirror", "list", listed, place, "--from", url, *options)
                await threads.deferToThread(self.run_command, *arguments)
                self.assertEqual((place / "file").read_bytes(), data)
        finally:
            await port.stopListening()
