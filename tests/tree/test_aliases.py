"""The file of aliases, which both programs share, and several commands at once."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from misc.command import environment
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.error_report import status_of
from pipegrid.errors import SinkError, UsageError
from pipegrid.tree import aliases
from pipegrid.tree.aliases import add_alias, read_aliases, remove_alias
from pipegrid.tree.grid_paths import parse_here
from tests import vectors
from tests.locks import failing_locks

RECORDED: dict[str, Any] = vectors.load("trees")["aliases"]
CAP = "URI:DIR2-LIT:"
EACH = 15
ADDS = """
import sys
from pathlib import Path
from pipegrid.tree.aliases import add_alias
directory, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    add_alias(directory, f"{name}{number}", "URI:DIR2-LIT:")
"""


class AliasFileTests(SynchronousTestCase):
    """What stands in it, and stays in it."""

    def setUp(self) -> None:
        self.home = Path(self.mktemp())
        self.private = self.home / "private"
        self.private.mkdir(parents=True)
        self.path = self.private / "aliases"

    def test_a_link(self) -> None:
        """To another program's file, or among files under version control, stays; the file changes."""
        theirs = self.home / "theirs"
        theirs.write_text(f"there: {CAP}\n")
        self.path.symlink_to("../theirs")
        add_alias(self.home, "ours", CAP)
        self.assertTrue(self.path.is_symlink())
        self.assertEqual(theirs.read_text(), f"there: {CAP}\nours: {CAP}\n")
        remove_alias(self.home, "there")
        self.assertEqual(theirs.read_text(), f"ours: {CAP}\n")

    def test_no_utf_8(self) -> None:
        """Is an error with file and line, and nothing is added to it."""
        data = f"home: {CAP}\n".encode("utf-16")
        self.path.write_bytes(data)
        for do in (lambda: read_aliases(self.home), lambda: add_alias(self.home, "ours", CAP)):
            error = self.assertRaises(UsageError, do)
            self.assertIn("aliases:1: it is UTF-16", str(error))
        self.assertEqual(self.path.read_bytes(), data)

    def test_a_name_that_stands_twice(self) -> None:
        """The last one counts; all are removed, and each may have been the only copy of its cap."""
        caps = [f"URI:DIR2-CHK:{letter * 26}:{'a' * 52}:3:10:100" for letter in "bcd"]
        lines = [f"two: {caps[0]}", f"one: {caps[1]}", f"two: {caps[2]}", f"two: {caps[0]}"]
        self.path.write_text("\n".join([*lines, f"two: {caps[1]}"]))
        told: list[str] = []
        self.assertEqual(remove_alias(self.home, "two", told.append), caps[1])
        self.assertEqual(told, [caps[1], caps[0], caps[2]])
        self.assertEqual(self.path.read_text(), f"one: {caps[1]}\n")

    def test_one_name_in_two_forms(self) -> None:
        """However a keyboard or a file system composes a letter: it is one alias, and stands there once."""
        composed, apart = "caf\u00e9", "cafe\u0301"
        add_alias(self.home, apart, CAP)
        self.assertEqual(read_aliases(self.home), {composed: CAP})
        self.assertEqual(parse_here(f"{apart}:a", self.home), (CAP, ("a",)))
        self.assertRaises(UsageError, add_alias, self.home, apart, CAP)
        self.path.write_text(f"{apart}: {CAP}\n")  # another program's
        self.assertEqual(parse_here(f"{composed}:a", self.home), (CAP, ("a",)))
        self.assertRaises(UsageError, add_alias, self.home, composed, CAP)
        remove_alias(self.home, composed)
        self.assertEqual(self.path.read_bytes(), b"")

    def test_recorded(self) -> None:
        """Lines are read as Tahoe-LAFS reads them; what we add, it finds behind them, and they stay."""
        text = RECORDED["file_utf8"]
        self.path.write_bytes(text.encode())
        self.assertEqual(read_aliases(self.home), RECORDED["parsed_by_tahoe"])
        add_alias(self.home, "ours", CAP)
        added = self.path.read_bytes()
        self.assertEqual(added, text.encode() + b"\n" + f"ours: {CAP}\n".encode())
        self.assertEqual(remove_alias(self.home, "ours"), CAP)
        self.assertEqual(self.path.read_bytes(), text.encode() + b"\n")
        remove_alias(self.home, "home")  # which is there twice
        rest = {n: c for n, c in RECORDED["parsed_by_tahoe"].items() if n != "home"}
        self.assertEqual(read_aliases(self.home), rest)
        self.assertIn(b"# a comment line\n", self.path.read_bytes())

    def test_a_disk_that_is_full(self) -> None:
        """It is nobody's mistake (status 1), nothing is lost, and the same works when there is room."""
        add_alias(self.home, "ours", CAP)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(aliases, "replace_file", side_effect=full):
            for change in (
                lambda: add_alias(self.home, "more", CAP),
                lambda: remove_alias(self.home, "ours"),
            ):
                with self.assertRaises(SinkError) as caught:
                    change()
                self.assertEqual(status_of(caught.exception), 1)
                self.assertIn("No space left on device; nothing was changed", str(caught.exception))
        self.assertEqual(read_aliases(self.home), {"ours": CAP})
        add_alias(self.home, "more", CAP)

    def test_processes_at_once(self) -> None:
        """Processes that add aliases at the same time lose none of each other's."""
        names = ("a", "b", "c")
        running = [
            subprocess.Popen(
                [sys.executable, "-c", ADDS, str(self.home), name, str(EACH)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment(),
            )
            for name in names
        ]
        for process in running:
            assert process.stdout is not None
            self.assertEqual(process.stdout.readline(), b"ready\n")
        for process in running:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        for process in running:
            process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0)
        expected = {f"{name}{number}": CAP for name in names for number in range(EACH)}
        self.assertEqual(read_aliases(self.home), expected)

    def test_while_another_changes_them(self) -> None:
        """Who finds the file locked waits, bounded, and then says so; nothing is written."""
        waits: list[float] = []
        fd = os.open(self.private, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with mock.patch("pipegrid.tree.aliases.time.sleep", waits.append):
            error = self.assertRaises(UsageError, add_alias, self.home, "a", CAP)
        self.assertIn("another command is changing the aliases", str(error))
        self.assertLess(1.0, sum(waits))
        self.assertLess(sum(waits), 10.0)
        self.assertFalse(self.path.exists())
        fcntl.flock(fd, fcntl.LOCK_UN)
        add_alias(self.home, "a", CAP)
        self.assertEqual(read_aliases(self.home), {"a": CAP})

    def test_a_file_system_without_locks(self) -> None:
        """Has aliases all the same; of what else keeps a lock from being taken there is a sentence."""
        with failing_locks(errno.ENOLCK):
            add_alias(self.home, "a", CAP)
            add_alias(self.home, "b", CAP)
            remove_alias(self.home, "b")
        with failing_locks(errno.EIO):
            error = self.assertRaises(SinkError, add_alias, self.home, "c", CAP)
        self.assertIn(f"cannot lock {self.private}: Input/output error", str(error))
        self.assertEqual(read_aliases(self.home), {"a": CAP})
