"""Looking at what is there, by one process and by several."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror import HIDDEN, NEW_MANIFEST, destination, manifest
from pipegrid.mirror import destination as destinations
from pipegrid.mirror.archive_file import ArchiveFile, MirrorError
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.file_list_format import list_line
from pipegrid.mirror.file_scheduler import MAX_SHOWN, Report
from pipegrid.mirror.hash_cache import Ledger, is_noted_at
from pipegrid.mirror.local_check import VerifyPolicy
from pipegrid.mirror.manifest import add_to_manifest, parts_of_manifest, read_pieces, write_manifest
from pipegrid.mirror.verify import verify


class VerifyCase(SynchronousTestCase):
    """A destination with files."""

    def setUp(self) -> None:
        self.patch(manifest, "WORTHWHILE_BYTES", 100)
        rng = random.Random(1)
        self.dest = Path(self.mktemp())
        self.entries: list[ArchiveFile] = []
        for number in range(200):
            path = f"pool/{number % 7}/a file{number}"
            data = rng.randbytes(rng.randrange(1, 900))
            (self.dest / path).parent.mkdir(parents=True, exist_ok=True)
            (self.dest / path).write_bytes(data)
            self.entries.append(ArchiveFile(path, len(data), "sha256", sha256(data).digest()))
        self.destination = Destination(str(self.dest))
        self.addCleanup(self.destination.close)
        write_manifest(self.destination, self.entries)

    def look(self, processes: int, paranoid: bool = False) -> Report:
        """Do it."""
        return verify(self.destination, VerifyPolicy(paranoid), processes=processes)


class VerifyTests(VerifyCase):
    """As above."""

    def test_parts(self) -> None:
        """Every line is in one part, however many there are; a short manifest has one."""
        for count in (1, 2, 3, 7, 50):
            parts = parts_of_manifest(self.destination, count)
            self.assertEqual(len(parts), count)
            found = [each for part in parts for each in read_pieces(self.destination, part)]
            for piece in found:
                self.assertTrue(piece.endswith(b"\n"))
            self.assertEqual(b"".join(found), b"".join(map(list_line, self.entries)))
        self.patch(manifest, "WORTHWHILE_BYTES", 1 << 20)
        self.assertEqual(len(parts_of_manifest(self.destination, 50)), 1)

    def test_all_is_well(self) -> None:
        """Nothing is missing, whoever looked."""
        size = sum(each.size or 0 for each in self.entries)
        for processes in (1, 3):
            for paranoid in (False, True):
                report = self.look(processes, paranoid)
                self.assertEqual(
                    (report.wanted_files, report.wanted_bytes), (len(self.entries), size)
                )
                self.assertEqual(
                    (report.present_files, report.present_bytes), (len(self.entries), size)
                )
                self.assertEqual((report.failed_files, report.failed), (0, []))

    def test_what_is_wrong(self) -> None:
        """It is named in the order of the manifest, up to a bound, and counted."""
        self.look(1)
        bad = self.entries[3::6]
        for number, each in enumerate(bad):
            path = self.dest / each.path
            if number % 3 == 0:
                path.unlink()
            elif number % 3 == 1:
                path.write_bytes(b"x" * (each.size or 0))
            else:
                path.unlink()
                path.symlink_to("/etc/passwd")
        alone = self.look(1)
        self.assertEqual(alone.failed_files, len(bad))
        self.assertEqual([path for path, _ in alone.failed], [e.path for e in bad[:MAX_SHOWN]])
        for processes in (2, 5):
            found = self.look(processes)
            self.assertEqual(
                (found.failed, found.failed_files, found.present_files),
                (alone.failed, alone.failed_files, alone.present_files),
            )

    def test_a_link_in_place_of_a_manifest(self) -> None:
        """Leads nowhere: what is outside stays as it is."""
        outside = Path(self.mktemp())
        outside.write_bytes(b"somebody's")
        (self.dest / HIDDEN / NEW_MANIFEST).symlink_to(outside.absolute())
        for write, entries in ((write_manifest, self.entries), (add_to_manifest, [])):
            error = self.assertRaises(MirrorError, write, self.destination, entries)
            self.assertIn("cannot record its files", str(error))
        self.assertEqual(outside.read_bytes(), b"somebody's")
        self.assertEqual(self.look(1).wanted_files, len(self.entries))

    def test_what_cannot_be_read(self) -> None:
        """Is named as what is wrong, and all the others are looked at."""
        bad = self.dest / self.entries[3].path
        number = bad.stat().st_ino
        real = os.preadv

        def preadv(fd: int, *arguments: Any) -> int:
            if os.fstat(fd).st_ino == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, *arguments)

        self.patch(os, "preadv", preadv)
        for processes in (1, 3):
            found = self.look_anew(processes, True)
            self.assertEqual(found.present_files, len(self.entries) - 1)
            (named,) = found.failed
            self.assertEqual(named[0], self.entries[3].path)
            self.assertIn("Input/output error", named[1])

    def test_what_was_found_to_be_wrong(self) -> None:
        """Stays wrong, though it looks as it did when it was right, as on a disk that forgets."""
        for has_attributes in (True, False):
            if not has_attributes:

                def refuse(*_: object, **__: object) -> None:
                    raise OSError(errno.ENOTSUP, "there are no attributes")

                for name in ("getxattr", "setxattr", "removexattr"):
                    self.patch(os, name, refuse)
            for processes, each in zip((1, 3), (self.entries[0], self.entries[-1]), strict=True):
                self.assertEqual(self.look_anew(processes).failed_files, 0)
                path = self.dest / each.path
                right, status = path.read_bytes(), path.stat()
                path.write_bytes(bytes(len(right)))
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
                self.destination._verified.seen.add(each.digest, path.stat())  # no clock has moved
                self.assertEqual(self.look_anew(processes).failed_files, 0)
                for paranoid in (True, False, False):
                    found = self.look_anew(processes, paranoid)
                    self.assertEqual([name for name, _ in found.failed], [each.path])
                path.write_bytes(right)

    def test_a_disk_that_keeps_what_it_was_told(self) -> None:
        """What was found to be wrong stays so, though no note of it goes; or it is said that it may not."""
        each = self.entries[7]
        path = self.dest / each.path
        right = path.read_bytes()
        for fails in (("removexattr",), ("unlink",), ("removexattr", "unlink")):
            path.write_bytes(right)
            self.look_anew(1)
            status = path.stat()
            path.write_bytes(bytes(len(right)))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            self.destination._verified.seen.add(each.digest, path.stat())  # no clock has moved
            self.assertEqual(self.look_anew(1).failed_files, 0)
            for further, count in ((("utime",), 1), ((), 0)):
                with ExitStack() as stack:
                    for name in (*fails, *further):
                        broken = OSError(errno.EIO, os.strerror(errno.EIO))
                        stack.enter_context(mock.patch.object(os, name, side_effect=broken))
                    found = self.look_anew(1, True)
                    self.assertEqual((found.failed_files, found.unnoted_files), (1, count))
            found = self.look_anew(1)
            self.assertEqual([name for name, _ in found.failed], [each.path])

    def look_anew(self, processes: int, paranoid: bool = False) -> Report:
        """Do it as another command would."""
        self.destination.close()
        self.destination = Destination(str(self.dest))
        self.addCleanup(self.destination.close)
        return self.look(processes, paranoid)

    def test_helpers_that_say_nothing(self) -> None:
        """Their parts are looked at here: nothing is right because nobody has looked."""
        (self.dest / self.entries[-1].path).unlink()
        for what in ("death", "no fork"):
            if what == "no fork":

                def fork() -> int:
                    raise BlockingIOError

                self.patch(os, "fork", fork)
            else:
                self.patch(Destination, "forked", lambda _: os._exit(3))
            report = self.look(3)
            self.assertEqual((report.wanted_files, report.failed_files), (len(self.entries), 1))
            self.assertEqual(report.failed[0][0], self.entries[-1].path)


class LedgerTests(VerifyCase):
    """Where file systems take no notes."""

    def setUp(self) -> None:
        super().setUp()

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOTSUP, "there are no attributes")

        for name in ("getxattr", "setxattr", "removexattr"):
            self.patch(os, name, refuse)
        self.path = self.dest / HIDDEN / "verified.sqlite"

    def hashed(self) -> int:
        """Look as another command would; return how many files had to be hashed."""
        (self.dest / HIDDEN / "seen").unlink(missing_ok=True)
        hashed: list[int] = []
        really_hash = destination.hash_file

        def counting(fd: int, algorithm: str) -> bytes:
            hashed.append(fd)
            return really_hash(fd, algorithm)

        self.patch(destinations, "hash_file", counting)
        self.destination.close()
        self.destination = Destination(str(self.dest))
        self.addCleanup(self.destination.close)
        report = verify(self.destination, VerifyPolicy(False))
        self.assertEqual((report.present_files, report.failed), (len(self.entries), []))
        self.destination.close()
        return len(hashed)

    def test_it_saves_time(self) -> None:
        """What was hashed once is known by the next command; the first file alone is hashed, and opens it."""
        self.assertEqual(self.hashed(), len(self.entries))
        self.assertLessEqual(self.hashed(), 1)

    def test_a_disk_that_is_full(self) -> None:
        """Damages no ledger, and is no reason to fail: it stays, and a later run goes on with it."""
        self.hashed()
        for words in (["journal_mode"], ["INSERT"], ["SELECT", "INSERT", "DELETE"]):
            with self.failing(words, sqlite3.OperationalError("database or disk is full")):
                self.hashed()
            names = [name for name in os.listdir(self.path.parent) if name.startswith("verified")]
            self.assertEqual(names, [self.path.name])
        self.assertLessEqual(self.hashed(), 1)

    def test_a_damaged_one(self) -> None:
        """Is moved away with all that belongs to it, and begun anew."""
        self.hashed()
        self.path.write_bytes(b"no database" * 1000)
        wal = self.path.with_name(self.path.name + "-wal")
        wal.write_bytes(b"of the one before" * 1000)
        self.assertEqual(self.hashed(), len(self.entries))
        self.assertLessEqual(self.hashed(), 1)
        self.assertTrue(self.path.with_name(self.path.name + ".damaged").exists())
        ledger = Ledger(str(self.path))
        self.addCleanup(ledger.close)
        with self.failing(["SELECT"], sqlite3.DatabaseError("database disk image is malformed")):
            bad = Ledger(str(self.path))
            self.assertIsNone(bad.find(self.entries[0].path))
        self.assertFalse(self.path.exists())

    def test_what_cannot_be_withdrawn(self) -> None:
        """Takes all the rest with it: what is known to be wrong is never right again by itself."""
        self.hashed()
        each = self.entries[5]
        self.destination = Destination(str(self.dest))
        self.addCleanup(self.destination.close)
        full = sqlite3.OperationalError("database or disk is full")
        with self.failing(["DELETE"], full), open(self.dest / each.path, "rb") as file:
            status = os.fstat(file.fileno())
            self.destination._verified.withdraw(file.fileno(), each, status)
        self.assertFalse(self.path.exists())

    @contextmanager
    def failing(self, words: list[str], error: sqlite3.Error) -> Iterator[None]:
        """Have statements with one of these words fail."""

        class Failing(sqlite3.Connection):
            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                if any(word in statement for word in words):
                    raise error
                return super().execute(statement, *values)

            def executemany(self, statement: str, rows: Any) -> sqlite3.Cursor:
                if any(word in statement for word in words):
                    raise error
                return super().executemany(statement, rows)

        connect = partial(sqlite3.connect, factory=Failing)
        with mock.patch.object(sqlite3, "connect", connect):
            yield


class NotedTests(VerifyCase):
    """A look without opening."""

    def test_what_counts(self) -> None:
        """Hash, size and time as they are noted, and of a plain file."""
        self.look(1)
        each = self.entries[0]
        path = self.dest / each.path
        directory = os.open(path.parent, os.O_RDONLY)
        self.addCleanup(os.close, directory)

        def noted(wanted: ArchiveFile = each, name: str = path.name) -> bool:
            return is_noted_at(directory, name, wanted)

        if not noted():
            return  # this file system has no attributes
        self.assertFalse(noted(each.replaced(digest=bytes(32))))
        self.assertFalse(noted(each.replaced(size=(each.size or 0) + 1)))
        self.assertTrue(noted(each.replaced(size=None)))
        self.assertFalse(noted(name="nothing"))
        os.symlink(path.name, path.parent / "link")
        self.assertFalse(noted(name="link"))
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        self.assertFalse(noted())
