"""What is known of files by their looks: it finds all that is wrong, and is never needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipegrid.mirror import destination as destination_module
from pipegrid.mirror import stat_cache
from pipegrid.mirror.archive_file import BadEntry
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.file_scheduler import Report
from pipegrid.mirror.local_check import LocalCheck, VerifyPolicy
from pipegrid.mirror.stat_cache import StatCache, glimpse
from pipegrid.mirror.verify import verify
from tests.mirror.test_verify import VerifyCase

ROW_BYTES = 64


def all_same(dest: str, shares: bool) -> tuple[int, int] | None:
    """How many files a mirror has, and their bytes, if a glance tells that all are right."""
    found = glimpse(dest, shares)
    if found is None or found.others:
        return None
    return found.files, found.size_bytes


class SeenCase(VerifyCase):
    """Files that are seen for the second time."""

    def setUp(self) -> None:
        super().setUp()
        self.rows = self.dest / ".pipegrid-mirror/seen"
        self.manifest = self.rows.with_name("manifest")
        self.look(1)  # which hashes them
        self.again()  # and so it knows them by their attributes, and sees how they look
        self.asked = 0

        def asks(name: str, whose: Any) -> None:
            original = getattr(whose, name)

            def ask(*arguments: Any, **more: Any) -> Any:
                self.asked += 1
                return original(*arguments, **more)

            self.patch(whose, name, ask)

        asks("getxattr", os)
        asks("hash_file", destination_module)

    def again(self, processes: int = 1) -> Report:
        """Look at all of it as another run does."""
        other = Destination(str(self.reopened()))
        try:
            return verify(other, VerifyPolicy(), processes=processes)
        finally:
            other.close()

    def reopened(self) -> Path:
        """Where it is, with nobody there."""
        self.destination.close()
        return self.dest


class SeenTests(SeenCase):
    """As above."""

    def test_a_glance_is_enough(self) -> None:
        """Of files that look as before no attribute is read; by ``verify`` and by what fetches."""
        self.assertEqual(self.rows.stat().st_size, ROW_BYTES * len(self.entries))
        size = sum(each.size or 0 for each in self.entries)
        for processes in (1, 3):
            report = self.again(processes)
            self.assertEqual(
                (report.wanted_files, report.wanted_bytes, report.present_files), (200, size, 200)
            )
            self.assertEqual((report.present_bytes, report.failed_files), (size, 0))
        other = Destination(str(self.dest))
        self.addCleanup(other.close)
        self.assertEqual(LocalCheck(other, Report(), VerifyPolicy()).missing(self.entries), [])
        self.assertEqual(self.asked, 0)
        self.assertEqual(self.rows.stat().st_size, ROW_BYTES * len(self.entries))

    def test_doubted(self) -> None:
        """Who wants all of it hashed, or some, has it hashed."""
        self.destination = Destination(str(self.reopened()))
        self.addCleanup(self.destination.close)
        self.assertEqual(self.look(1, paranoid=True).present_files, 200)
        self.assertEqual(self.asked, 400)  # hash and attribute, which stays as it is
        self.asked = 0
        self.assertEqual((self.look(1).present_files, self.asked), (200, 0))
        verify(self.destination, VerifyPolicy(sample=0.5))
        self.assertTrue(2 * 20 < self.asked < 2 * 180, self.asked)

    def test_what_fetches_sees_it_too(self) -> None:
        """A run writes down how files look that it knows by their attributes."""
        self.reopened()
        self.rows.unlink()
        for asked in (200, 0):
            self.asked = 0
            other = Destination(str(self.dest))
            self.assertEqual(LocalCheck(other, Report(), VerifyPolicy()).missing(self.entries), [])
            other.close()
            self.assertEqual(self.asked, asked)

    def test_what_has_changed(self) -> None:
        """It is found as it is without rows: content, size, time, name, kind, and the way there."""
        whole = self.reopened().with_suffix(".whole")
        shutil.copytree(self.dest, whole)
        outside = Path(self.mktemp()).absolute()
        size = sum(each.size or 0 for each in self.entries)
        self.patch(stat_cache, "SHARED_BYTES", 0)
        for number, (change, wrong) in enumerate(self.changes(outside)):
            path = self.dest / self.entries[number * 7].path
            for rows in (True, False):
                shutil.rmtree(self.dest)
                shutil.copytree(whole, self.dest)
                self.again()
                self.asked = 0
                self.again()
                self.assertEqual(self.asked, 0)
                self.assertEqual(all_same(str(self.dest), rows), (200, size))
                change(path)
                if not rows:
                    self.rows.unlink()
                self.assertIsNone(all_same(str(self.dest), True))
                report = self.again(1 + number % 2 * 2)
                self.assertEqual(
                    (report.wanted_files, report.failed_files), (200, wrong), (number, rows)
                )
                if outside.is_dir():
                    shutil.rmtree(outside)
                outside.unlink(missing_ok=True)

    def changes(self, outside: Path) -> list[tuple[Callable[[Path], object], int]]:
        """What can be done to a file, and how many are wrong then."""

        def rewritten(path: Path, more: int = 0, later_ns: int = 0) -> None:
            status = path.stat()
            path.unlink()
            path.write_bytes(b"x" * (status.st_size + more))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + later_ns))

        def linked(path: Path) -> None:
            path.rename(outside)
            path.symlink_to(outside)

        def linked_above(path: Path) -> None:
            path.parent.rename(outside)
            path.parent.symlink_to(outside)

        def made(kind: Callable[[Path], object], path: Path) -> None:
            path.unlink()
            kind(path)

        def copied(path: Path) -> None:
            shutil.copy(path, outside)
            os.replace(outside, path)

        below = sum(each.path.startswith("pool/0/") for each in self.entries)
        return [
            (rewritten, 1),
            (lambda path: rewritten(path, later_ns=1), 1),
            (lambda path: rewritten(path, more=1), 1),
            (lambda path: path.write_bytes(b"x" * path.stat().st_size), 1),
            (lambda path: os.truncate(path, 0), 1),
            (Path.unlink, 1),
            (linked, 1),
            (lambda path: made(os.mkdir, path), 1),
            (lambda path: made(os.mkfifo, path), 1),
            (lambda path: path.parent.rename(outside), below),
            (linked_above, below),
            # Nothing is wrong with these.
            (lambda path: path.chmod(0o600), 0),
            (copied, 0),
            (lambda path: outside.hardlink_to(path), 0),
        ]

    def test_time_set_back(self) -> None:
        """Of a file that was written to no row holds, though size and time are as before."""
        rows = StatCache(str(self.rows), str(self.manifest))
        each = self.entries[0]
        path = self.dest / each.path
        status = path.stat()
        self.assertTrue(rows.holds(each.digest, status))
        self.assertFalse(rows.holds(self.entries[1].digest, status))
        path.write_bytes(b"x" * status.st_size)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        self.assertEqual(path.stat().st_mtime_ns, status.st_mtime_ns)
        self.assertFalse(rows.holds(each.digest, path.stat()))

    def test_what_is_refused(self) -> None:
        """A manifest that names what is not the mirror's is refused, whatever is known of that."""
        each = self.entries[0]
        text = self.manifest.read_text()
        for path in (f"pool/../{each.path}", f"./{each.path}", f"/{each.path}", "pool//x", "pool/"):
            self.manifest.write_text(text.replace(each.path, path, 1))
            with self.assertRaises(BadEntry):
                self.again()
        self.manifest.write_text("# a remark\n\n" + text.replace(" ", "  ", 1) + "\n")
        self.assertEqual(self.again().present_files, 200)
        self.manifest.write_text("nonsense\n" + text)
        with self.assertRaises(BadEntry):
            self.again()


class RowsTests(SeenCase):
    """The file of rows."""

    def test_damaged(self) -> None:
        """It helps less, and nothing is right for it; half a row makes it begin anew."""
        (self.dest / self.entries[0].path).unlink()
        rows = self.rows.read_bytes()
        for data, left in (
            (b"", 199),
            (bytes(len(rows)), len(rows) // ROW_BYTES + 199),
            (bytes([*rows[:9], rows[9] ^ 1, *rows[10:]]), 201),
            (rows[:-1], 199),
            (rows[1:], 199),
            (rows * 9, 199),
        ):
            self.rows.write_bytes(data)
            report = self.again()
            self.assertEqual((report.present_files, report.failed_files), (199, 1))
            size = self.rows.stat().st_size
            self.assertEqual(size % ROW_BYTES, 0)
            self.assertTrue(size // ROW_BYTES in (left, left - 1), (size // ROW_BYTES, left))

    def test_cannot_be_written(self) -> None:
        """Then each look is a closer one."""
        self.rows.unlink()
        self.rows.mkdir()
        for _ in range(2):
            self.asked = 0
            self.assertEqual((self.again().present_files, self.asked), (200, 200))

    def test_a_named_pipe(self) -> None:
        """Nobody waits for who would write into it, or read."""
        self.rows.unlink()
        os.mkfifo(self.rows)
        for _ in range(2):
            self.asked = 0
            self.assertEqual((self.again().present_files, self.asked), (200, 200))

    def test_by_several_processes(self) -> None:
        """What each of them sees is written down once."""
        self.rows.unlink()
        for asked in (True, False):
            self.asked = 0
            self.assertEqual(self.again(3).present_files, 200)
            self.assertEqual((self.asked > 0, self.rows.stat().st_size), (asked, 200 * ROW_BYTES))

    def test_no_more_than_that(self) -> None:
        """A large mirror's rows are bounded; the other files are asked for their attributes."""
        self.rows.unlink()
        self.patch(stat_cache, "MAX_ROWS", 150)
        self.patch(stat_cache, "GATHERED", 16)
        for asked in (200, 50, 50):
            self.asked = 0
            self.assertEqual((self.again().present_files, self.asked), (200, asked))
            self.assertEqual(self.rows.stat().st_size, 150 * ROW_BYTES)
