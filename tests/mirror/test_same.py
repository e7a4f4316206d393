"""What of a mirror is as it was, in as little time as possible."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pipegrid.disk.file_system_calls import open_locked
from pipegrid.mirror import stat_cache
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.file_list_format import list_line
from pipegrid.mirror.local_check import VerifyPolicy
from pipegrid.mirror.stat_cache import QuickCheck, Rows, glimpse
from pipegrid.mirror.verify import verify, verify_rest
from tests.descriptors import left_open, open_files
from tests.mirror.test_seen import ROW_BYTES, SeenCase, all_same


class SameTests(SeenCase):
    """A mirror that was looked at twice."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(stat_cache, "SHARED_BYTES", 0)
        self.again()
        self.asked = 0
        self.right = 200, sum(each.size or 0 for each in self.entries)

    def look_both(self) -> tuple[int, int] | None:
        """Look in one process and in two, which find the same; nothing is left open, and nothing changed."""
        files, before = open_files(), self.tree()
        found = all_same(str(self.dest), False)
        self.assertEqual(all_same(str(self.dest), True), found)
        self.assertEqual((left_open(files), self.tree()), ([], before))
        self.assertEqual(self.asked, 0)
        return found

    def tree(self) -> list[tuple[str, int]]:
        """All that is there, and when it was changed last."""
        return sorted((str(each), each.lstat().st_ctime_ns) for each in self.dest.rglob("*"))

    def test_the_same(self) -> None:
        """It is said how much there is, in pieces of any size and whatever order its rows have."""
        self.assertEqual(self.look_both(), self.right)
        rows = self.rows.read_bytes()
        each = [rows[at : at + ROW_BYTES] for at in range(0, len(rows), ROW_BYTES)]
        stale = [bytes([*row[:40], row[40] ^ 1, *row[41:]]) for row in each]
        for piece_bytes, order in (
            (100, each),
            (1000, each[::-1]),
            (64 << 10, [row for pair in zip(stale, each, strict=True) for row in pair]),
        ):
            self.patch(stat_cache, "PIECE_BYTES", piece_bytes)
            self.rows.write_bytes(b"".join(order))
            self.assertEqual(self.look_both(), self.right)

    def test_the_rest(self) -> None:
        """What is not as it was is told, and looked at more closely, as if all of it was."""
        for number, each in enumerate(self.entries[3::30]):
            path = self.dest / each.path
            path.chmod(0o600)  # which is not wrong
            if number % 3:
                path.unlink()
        found = [glimpse(str(self.dest), shares) for shares in (False, True)]
        destination = Destination(str(self.reopened()))
        self.addCleanup(destination.close)
        whole = verify(destination, VerifyPolicy())
        for each_found in found:
            assert each_found is not None
            self.assertEqual(each_found.others, [list_line(each) for each in self.entries[3::30]])
            report = verify_rest(destination, each_found)
            assert report is not None
            self.assertEqual((report.failed_files, report.wanted_files), (4, 200))
            for name in ("wanted_files", "wanted_bytes", "present_files", "present_bytes"):
                self.assertEqual(getattr(report, name), getattr(whole, name))
            self.assertEqual(report.failed, whole.failed)
        self.manifest.write_bytes(self.manifest.read_bytes()[:-1])
        self.assertIsNone(verify_rest(destination, found[0]))
        self.assertIsNone(verify_rest(destination, None))
        self.patch(stat_cache, "MAX_OTHERS", 1)
        destination.close()
        self.assertIsNone(glimpse(str(self.dest), True))

    def test_without_room(self) -> None:
        """Directories are found to be some, too, where none can be kept open and no names be kept."""
        self.patch(stat_cache, "MAX_OPEN", 0)
        self.assertEqual(self.look_both(), self.right)
        self.patch(stat_cache, "MAX_NAMES", 0)
        self.assertEqual(self.look_both(), self.right)
        above = self.dest / "pool/0"
        above.rename(self.dest / "other")
        above.symlink_to("../other")
        self.assertIsNone(self.look_both())

    def test_no_answer(self) -> None:
        """Where anything is not as it should be, or is not known at a glance, nothing is said to be right."""
        hidden = self.dest / ".pipegrid-mirror"
        whole = Path(self.mktemp())
        os.rename(hidden, whole)

        def put_pipe(path: Path) -> None:
            path.unlink()
            os.mkfifo(path)

        changes: tuple[Callable[[], object], ...] = (
            lambda: shutil.rmtree(hidden),
            lambda: self.manifest.unlink(),
            lambda: put_pipe(self.manifest),
            lambda: self.rows.unlink(),
            lambda: self.rows.write_bytes(b""),
            lambda: os.truncate(self.rows, ROW_BYTES * 199),
            lambda: os.truncate(self.rows, ROW_BYTES * 200 - 1),
            lambda: self.rows.write_bytes(bytes(ROW_BYTES * 200)),
            lambda: put_pipe(self.rows),
            lambda: (hidden / "lock").unlink(),
            lambda: (hidden / "incoming").rmdir(),
            lambda: self.manifest.write_bytes(self.manifest.read_bytes()[:-1]),
            lambda: self.manifest.write_bytes(b"# a remark\n" + self.manifest.read_bytes()),
            lambda: self.manifest.write_bytes(self.manifest.read_bytes()[3:]),
            lambda: self.manifest.write_text(self.manifest.read_text().replace(" ", " 1", 1)),
            lambda: self.manifest.write_bytes(b"\xff" + self.manifest.read_bytes()[1:]),
            lambda: self.patch(stat_cache, "MAX_BYTES", 1000),
        )
        for number, change in enumerate(changes):
            shutil.rmtree(hidden, ignore_errors=True)
            shutil.copytree(whole, hidden)
            self.assertEqual(self.look_both(), self.right)
            change()
            self.assertIsNone(self.look_both(), number)
        self.assertIsNone(all_same("nowhere", True))

    def test_paths_that_are_refused(self) -> None:
        """However they lead to a file that is right."""
        each = self.entries[0]
        text = self.manifest.read_text()
        os.link(self.dest / each.path, self.dest / ".hidden")
        os.link(self.dest / each.path, self.dest / ".pipegrid-mirror/file")
        self.again()
        self.again()
        self.asked = 0
        self.assertEqual(self.look_both(), self.right)
        for path in (
            f"pool/../{each.path}",
            f"./{each.path}",
            f"pool/./{each.path[5:]}",
            str((self.dest / each.path).absolute()),
            each.path.replace("/", "//", 1),
            f"{each.path}/",
            ".hidden",
            ".pipegrid-mirror/file",
            "pool/" * 3000 + "x",
            "",
        ):
            self.manifest.write_text(text.replace(f" {each.path}\n", f" {path}\n", 1))
            self.assertIsNone(self.look_both(), path)

    def test_while_somebody_mirrors(self) -> None:
        """Nothing is said, and nobody waits."""
        lock = open_locked(str(self.rows.with_name("lock")), os.O_RDWR)
        assert lock is not None
        self.addCleanup(os.close, lock)
        self.assertIsNone(self.look_both())
        fcntl.flock(lock, fcntl.LOCK_UN)
        self.assertEqual(self.look_both(), self.right)

    def test_helpers_that_say_nothing(self) -> None:
        """One that died, or could not be begun, has not found anything to be right."""
        ours, look = os.getpid(), QuickCheck.look

        def die(new_quick_check: QuickCheck, text: bytes) -> tuple[int, int, list[bytes]]:
            if os.getpid() != ours:
                os._exit(3)
            return look(new_quick_check, text)

        patched = self.patch(QuickCheck, "look", die)
        self.assertIsNone(all_same(str(self.dest), True))
        patched.restore()

        def fork() -> int:
            raise BlockingIOError

        self.patch(os, "fork", fork)
        before = open_files()
        self.assertIsNone(all_same(str(self.dest), True))
        self.assertEqual(left_open(before), [])


class RowsTests(SeenCase):
    """Rows that were read."""

    def test_found(self) -> None:
        """By their places, or by an index after some searches; only where a row begins."""
        each = [bytes([number]) * ROW_BYTES for number in range(1, 20)]
        rows = Rows(b"".join(each))
        for _ in range(2):
            for number, row in enumerate(each):
                self.assertEqual(rows.find(row), number * ROW_BYTES)
        self.assertIn(each[3], rows)
        self.assertNotIn(None, rows)
        rows.discard(each[3])
        rows.discard(each[3])
        self.assertNotIn(each[3], rows)
        self.assertEqual(rows.find(each[3]), -1)
        self.assertNotIn(each[3], rows.data)
        self.assertEqual((len(rows), rows.find(each[4])), (19, 4 * ROW_BYTES))
        self.patch(stat_cache, "MAX_SEARCHES", 1)
        shifted = Rows(bytes(1) + each[0] + each[1][:-1])
        self.assertEqual(shifted.find(each[0]), -1)
