"""Whole trees where something is wrong, as users meet it: a sentence each, and the rest goes on."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from pipegrid.core.caps import Cap, ChkCap, UnknownCap, parse_cap
from pipegrid.core.packed_directory import PackedChild, pack_immutable
from tests.cli.processes import ProcessTestCase, in_fresh_processes


class TreeHardeningTests(ProcessTestCase):
    """Real commands on an embedded grid."""

    def setUp(self) -> None:
        super().setUp()
        self.source = self.home / "src"
        (self.source / "sub").mkdir(parents=True)
        (self.source / "file").write_bytes(b"f" * 1000)
        (self.source / "sub/other").write_bytes(b"o" * 2000)
        self.remembers = self.home / ".local/share/pipegrid/private/backup"

    def assert_one_sentence(self, err: str, *words: str) -> None:
        """One line that says these words, and nothing that moves a terminal's cursor."""
        lines = [line for line in err.splitlines() if all(word in line for word in words)]
        self.assertEqual(len(lines), 1, err)
        self.assertTrue(all(line.isprintable() for line in err.splitlines()), repr(err))

    def put_directory(self, *children: PackedChild) -> str:
        """Store a directory that no honest program makes; returns its cap."""
        path = self.home / "packed"
        path.write_bytes(pack_immutable(children))
        cap, _ = self.run_command("-q", "put", str(path))
        return cap.replace("URI:CHK:", "URI:DIR2-CHK:")

    def file_cap(self) -> Cap:
        """Store a good file."""
        return parse_cap(self.run_command("-q", "put", "src/file")[0])

    def test_a_damaged_database(self) -> None:
        """It is set aside, and rebuilt; nothing is lost, in older runs either."""
        self.run_command("backup", "src")
        database = self.remembers / "database.sqlite"
        database.write_bytes(b"garbage" * 1000)
        (self.source / "file").write_bytes(b"changed")
        catalogue, err = self.run_command("backup", "src")
        self.assert_one_sentence(err, "damaged", "nothing is lost")
        self.assertEqual(len(list(self.remembers.glob("database.sqlite.damaged-*"))), 1)
        _, err = self.run_command("backup", "src")
        self.assertNotIn("damaged", err)
        self.run_command("restore", catalogue, "-o", "back")
        self.assertEqual((self.home / "back/file").read_bytes(), b"changed")
        runs = self.run_command("backups")[0].splitlines()
        self.assertEqual(len(runs), 3, runs)
        self.run_command("restore", runs[0].split()[0], "-o", "old")
        self.assertEqual((self.home / "old/file").read_bytes(), b"f" * 1000)

    @in_fresh_processes
    def test_two_backups_at_once(self) -> None:
        """The second says so."""
        self.run_command("backup", "src")
        with open(self.remembers / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _, err = self.run_command("backup", "src", status=2)
            self.assert_one_sentence(err, "another backup")
        self.run_command("backup", "src")

    def test_paths_that_are_too_long(self) -> None:
        """Are stored; what no path leads to is named, and comes back by its own PATH. Holes are zeros."""
        name = "n" * 200
        at = os.open(self.source, os.O_RDONLY)
        for _ in range(25):
            os.mkdir(name, dir_fd=at)
            below = os.open(name, os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        with open(os.open("hole", os.O_WRONLY | os.O_CREAT, dir_fd=at), "wb") as file:
            file.truncate(100_000)
        os.close(at)
        self.run_command("backup", "src")
        _, err = self.run_command("restore", "-o", "back", status=1)
        self.assertIn("File name too long", err)
        self.assertEqual((self.home / "back/file").read_bytes(), b"f" * 1000)
        self.run_command("restore", "/".join([name] * 20), "-o", "lower")
        hole = self.home.joinpath("lower", *[name] * 5, "hole")
        self.assertEqual(hole.read_bytes(), bytes(100_000))

    def test_links_in_a_loop(self) -> None:
        """They are kept as links, and followed by nobody."""
        os.symlink("b", self.source / "a")
        os.symlink("a", self.source / "b")
        os.symlink("..", self.source / "sub/up")
        cap, _ = self.run_command("put", "-r", "src")
        self.run_command("get", "-r", cap, "-o", "back")
        self.assertEqual(os.readlink(self.home / "back/a"), "b")
        self.assertEqual(os.readlink(self.home / "back/sub/up"), "..")
        self.assertEqual(self.run_command("put", "-r", "back")[0], cap)

    def test_a_target_that_is_full(self) -> None:
        """What does not fit is named; all else is there; with more room a rerun fetches the rest."""
        if os.geteuid() != 0:
            self.skipTest("only root may mount")
        (self.source / "large").write_bytes(os.urandom(3_000_000))
        cap, _ = self.run_command("put", "-r", "src")
        target = self.home / "target"
        target.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=2000000", "none", str(target)]
        if subprocess.run(mount, capture_output=True, check=False, timeout=60).returncode:
            self.skipTest("nothing can be mounted here")
        try:
            _, err = self.run_command("get", "-r", cap, "-o", "target", status=1)
            self.assert_one_sentence(err, "large", "does not fit")
            self.assertEqual((target / "sub/other").read_bytes(), b"o" * 2000)
            self.assertEqual(sorted(os.listdir(target)), ["file", "sub"])
            resize = ["mount", "-o", "remount,size=20000000", str(target)]
            subprocess.run(resize, check=True, timeout=60)
            self.run_command("get", "-r", cap, "-o", "target")
            self.assertEqual((target / "large").stat().st_size, 3_000_000)
        finally:
            subprocess.run(["umount", str(target)], check=True, timeout=60)

    def test_a_directory_that_contains_itself(self) -> None:
        """Nobody walks in circles."""
        cap, _ = self.run_command("-q", "mkdir")
        self.run_command("-q", "put", "src/file", f"{cap}/good")
        self.run_command("-q", "ln", cap, f"{cap}/self")
        _, err = self.run_command("get", "-r", cap, "-o", "back", status=1)
        self.assert_one_sentence(err, "self", "contains itself")
        self.assertEqual((self.home / "back/good").read_bytes(), b"f" * 1000)
        for arguments in (("check", "-r"), ("du",), ("stats",), ("ls", "-R")):
            out, _ = self.run_command(*arguments, cap)
            self.assertLess(len(out), 2000, arguments)

    def test_hostile_entries(self) -> None:
        """Names that move the cursor, a file of 2^60 bytes: the good file comes."""
        good = self.file_cap()
        huge = ChkCap(b"k" * 16, b"u" * 32, 3, 10, 1 << 60)
        cap = self.put_directory(
            PackedChild("good", good, {}),
            PackedChild("huge", huge, {}),
            PackedChild("esc\x1b[2J\x1b]0;mine\x07", huge, {}),
            PackedChild("..", good, {}),
        )
        _, err = self.run_command("get", "-r", cap, "-o", "back", status=1)
        self.assert_one_sentence(err, "pipegrid: huge:", "does not fit")
        self.assertEqual(os.listdir(self.home / "back"), ["good"])
        for arguments in (("ls", "-l"), ("du",), ("manifest",), ("stats",)):
            out, _ = self.run_command(*arguments, cap)
            self.assertTrue(all(line.isprintable() for line in out.splitlines()), repr(out))

    def test_caps_of_several_lines(self) -> None:
        """A cap of a kind that nobody knows makes no line of its own, for whoever reads lists of caps."""
        cap = self.put_directory(
            PackedChild("new", UnknownCap("imm.lafs://x\nURI:LIT:mfrgg  false\r\t"), {}),
            PackedChild("good", self.file_cap(), {}),
        )
        for arguments, lines in (
            (("manifest",), 3),
            (("ls", "--read-only"), 2),
            (("ls", "-R", "--read-only"), 2),
        ):
            out, _ = self.run_command(*arguments, cap)
            self.assertEqual(len(out.splitlines()), lines, out)
            self.assertIn(r"imm.lafs://x\nURI:LIT:mfrgg  false\r\t ", out)

    @in_fresh_processes
    def test_a_directory_that_vanishes(self) -> None:
        """Also the one that was named."""
        shutil.rmtree(self.source)
        _, err = self.run_command("put", "-r", "src", status=1)
        self.assert_one_sentence(err, "cannot read", "No such file or directory")
        self.assertFalse(Path(self.remembers).exists())
