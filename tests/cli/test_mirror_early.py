"""``mirror rpm`` and ``mirror debian`` as processes: without Twisted while all goes well."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import datetime, timezone
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.console import Console
from pipegrid.cli.mirror_debian_rpm import RpmOptions, rpm_job
from pipegrid.cli.mirror_options import MirrorOptions
from pipegrid.cli.startup.lazy_modules import LAZY
from pipegrid.mirror import mirror_without_reactor
from pipegrid.mirror.destination import Destination
from tests.cli.test_imports import COMMAND, modules
from tests.cli.test_mirror_shortcut import REACTOR
from tests.mirror.archive import Archive, Signer
from tests.mirror.rpmarchive import REPOMD, RpmArchive
from tests.mirror.test_sprint import Server, ok

NO = b"HTTP/1.1 404 No\r\nContent-Length: 5\r\n\r\nnone\n"

UNSIGNED = RpmOptions(False, False, (), True)


class EarlyTests(SynchronousTestCase):
    """With servers of their own."""

    def setUp(self) -> None:
        self.dest = Path(self.mktemp())
        self.signer = Signer()
        self.addCleanup(self.signer.close)
        self.options = ("--keyring", self.signer.keyring)

    def serve(self, files: dict[str, bytes]) -> None:
        """Start a web server."""
        self.server = Server(files)
        self.addCleanup(self.server.close)
        self.plain = lambda path, _: ok(files[path]) if path in files else NO
        self.server.answer = self.plain

    def mirror(self, kind: str, *options: str) -> tuple[dict[str, Any], set[str]]:
        """Run it; returns what it says, and what of Twisted it loaded."""
        arguments = ("--json", "mirror", kind, str(self.dest), "--from", self.server.url)
        out, loaded = modules(COMMAND, *arguments, *self.options, *options)
        twisted = {name for name in loaded if name.startswith(("twisted", "click"))}
        return json.loads(out), twisted - {*LAZY}

    def found(self) -> dict[str, bytes]:
        """What is there."""
        return {
            str(path.relative_to(self.dest)): path.read_bytes()
            for path in self.dest.rglob("*")
            if path.is_file() and ".pipegrid-mirror" not in path.parts
        }

    def test_rpm(self) -> None:
        """A clone, and a run that finds less and deletes; all on few connections, and ``verify`` knows it."""
        archive = RpmArchive(self.signer)
        self.serve(archive.files)
        said, loaded = self.mirror("rpm")
        self.assertEqual((said["fetched"], said["failed"], loaded), (20, 0, set()))
        self.assertEqual(self.found(), archive.files)
        self.assertLessEqual(self.server.connections, 4)
        archive.packages.pop()
        archive.publish()
        self.serve(archive.files)
        said, loaded = self.mirror("rpm", "--delete")
        self.assertEqual((said["present"], said["removed"], loaded), (19, 0, set()))
        said, loaded = self.mirror(
            "rpm", "--delete"
        )  # nobody reads the indexes any more that name it
        self.assertEqual((said["present"], said["removed"], loaded), (19, 2, set()))
        self.assertEqual(self.found(), archive.files)
        out, _ = modules(COMMAND, "--json", "mirror", "verify", str(self.dest), "--paranoid")
        self.assertEqual(json.loads(out)["right"], 19 + 5)

    def test_debian(self) -> None:
        """A clone, and a run that has its index patched."""
        archive = Archive(
            self.signer, patches=True, count=30, filler=300, now=datetime.now(timezone.utc)
        )
        options = ("--suite", "sid", "--component", "main", "--indexes", "unpacked")
        self.serve(archive.files)
        said, loaded = self.mirror("debian", *options)
        self.assertEqual((said["fetched"], said["failed"], loaded), (30, 0, set()))
        archive.add()
        archive.publish()
        self.serve(archive.files)
        said, loaded = self.mirror("debian", *options)
        self.assertEqual((said["fetched"], said["patched"], loaded), (1, 1, set()))
        self.assertEqual(
            {path for path in self.found() if "/pool/" in f"/{path}"},
            {path for path in archive.files if path.startswith("pool/") and path.endswith(".deb")},
        )

    def test_the_rest(self) -> None:
        """What is not as it should be at any moment is for the reactor, which goes on from there."""
        archive = RpmArchive(self.signer)
        self.serve(archive.files)
        busy = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"
        index = next(path for path in archive.files if "primary" in path)
        package = archive.packages[7].path

        def once(which: str, instead: bytes) -> Callable[[str, int], bytes]:
            left = [instead]

            def answer(path: str, count: int) -> bytes:
                return left.pop() if path == which and left else self.plain(path, count)

            return answer

        data = archive.files[REPOMD]
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
        for which, instead in (
            (REPOMD, busy),
            (REPOMD, chunked % (len(data), data)),
            (REPOMD, ok(data, b"Connection: close\r\n")),
            (index, busy),
            (package, busy),
        ):
            self.dest = Path(self.mktemp())
            self.server.answer = once(which, instead)
            said, loaded = self.mirror("rpm")
            self.assertIn(REACTOR, loaded)
            self.assertEqual(self.found(), archive.files)
            self.assertEqual((said["fetched"], said["failed"]), (20, 0))

    def test_bounds(self) -> None:
        """More than such a file may have is not read, and nothing that nobody asked for."""
        archive = RpmArchive(self.signer)
        self.serve(archive.files)
        self.patch(mirror_without_reactor, "MISSING_BYTES", 4)
        for answer in (self.plain, lambda *_: ok(b"") + b"more", lambda *_: ok(bytes(9 << 20))):
            self.server.answer = answer
            fetching = MirrorOptions(urls=(self.server.url,), connections=1, durability="none")
            job: Any = rpm_job(self.mktemp(), UNSIGNED, fetching)
            archive.files.pop(REPOMD + ".asc", None)
            console = Console(None, None, StringIO())
            self.assertIsNone(job.run_without_reactor(console, lambda: False))

    def test_destinations(self) -> None:
        """One that another process has, and one whose directories lead elsewhere: a sentence each."""
        archive = RpmArchive()
        self.serve(archive.files)
        fetching = MirrorOptions(urls=(self.server.url,), connections=1, durability="none")
        elsewhere = Path(self.mktemp())
        elsewhere.mkdir()

        def early() -> tuple[int, str]:
            err = StringIO()
            job: Any = rpm_job(str(self.dest), UNSIGNED, fetching)
            return job.run_without_reactor(
                Console(None, BytesIO(), err), lambda: False
            ), err.getvalue()

        with contextlib.closing(Destination(str(self.dest))):
            status, said = early()
        self.assertEqual(status, 1)
        self.assertIn("another process is mirroring", said)
        for path in ("repodata", ".pipegrid-mirror/staged", ".pipegrid-mirror/incoming"):
            link = self.dest / path
            if link.is_dir():
                link.rmdir()
            link.symlink_to(elsewhere.absolute())
            status, said = early()
            self.assertEqual((path, status), (path, 1))
            self.assertEqual(said.count("\n"), 1, said)
            link.unlink()
        self.assertEqual(list(elsewhere.iterdir()), [])
        self.assertEqual(early()[0], 0)

    def test_stopped(self) -> None:
        """Wherever it is told to stop, it does, and says so; the next run brings it to its end."""
        archive = RpmArchive()
        self.serve(archive.files)
        fetching = MirrorOptions(urls=(self.server.url,), connections=1, durability="none")
        for after in (0, 1, 2, 3, 5, 8, 12, 100_000):
            left = [False] * after
            err = StringIO()
            job: Any = rpm_job(str(self.dest), UNSIGNED, fetching)
            status = job.run_without_reactor(
                Console(None, BytesIO(), err), lambda left=left: not (left and [left.pop()])
            )
            if after < 5:
                self.assertEqual(status, 130)
                self.assertIn("pipegrid: interrupted", err.getvalue())
        self.assertEqual(status, 0, err.getvalue())
        self.assertEqual(self.found(), archive.files)
