"""Reading several directories of this machine as one tree."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.tree import local_walk
from pipegrid.tree.backup.backup_sources import BackupDirectories, still_exists
from pipegrid.tree.backup.backup_stream import BackupStream
from pipegrid.tree.file_selection import TreeSelection
from pipegrid.tree.local_walk import (
    DirectoryBegun,
    DirectoryEnded,
    EntryWalk,
    FileMet,
    LeftOut,
    WalkOptions,
)


class JoinedWalkTests(SynchronousTestCase):
    """Each directory is at its absolute path."""

    def setUp(self) -> None:
        self.root = Path(os.path.realpath(tempfile.mkdtemp(prefix="pg")))
        self.addCleanup(shutil.rmtree, self.root, True)
        self.asked: list[str] = []

    def write(self, path: str, content: bytes = b"x") -> None:
        """Make a file."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def walk(self, *names: str, exclude: list[str] | None = None, **options: Any) -> EntryWalk:
        """Return a walk through directories below the root."""
        source = BackupDirectories([str(self.root / name) for name in names])

        def know(path: str, _: os.stat_result) -> None:
            self.asked.append(os.path.join(source.base, path))

        def link_id(_: os.stat_result, path: str) -> str:
            return os.path.join(source.base, path)

        return source.walk(
            lambda _: TreeSelection(exclude or []), know, link_id, WalkOptions(**options)
        )

    def tree(self, walk: EntryWalk) -> dict[str, str]:
        """Return what is met, by path from the root; checks that numbers and nesting fit."""
        found: dict[str, str] = {}
        opened: list[tuple[int, str]] = []
        above = str(self.root).lstrip("/")
        batches = 0
        while batch := walk.batch():
            batches += 1
            for thing in batch:
                if isinstance(thing, DirectoryEnded):
                    self.assertEqual(opened.pop()[0], thing.number)
                    continue
                path = os.path.relpath(thing.path or ".", above) if thing.path else ""
                if isinstance(thing, (DirectoryBegun, FileMet)):
                    number, parent = opened[-1] if opened else (-1, "")
                    self.assertEqual(thing.parent, number)
                    self.assertEqual(thing.path, f"{parent}/{os.fsdecode(thing.name)}".lstrip("/"))
                if isinstance(thing, DirectoryBegun):
                    self.assertGreater(thing.number, opened[-1][0] if opened else -1)
                    opened.append((thing.number, thing.path))
                    found[path] = "directory"
                else:
                    found[path] = thing.why if isinstance(thing, LeftOut) else "file"
        self.assertEqual(opened, [])
        walk.close()
        return {path: what for path, what in found.items() if path and not path.startswith("..")}

    def test_paths(self) -> None:
        """Two of one name do not collide; what is next to them is not stored, nor even listed."""
        for path in ("a/src/f", "a/src/d/g", "a/other", "b/src/f", "a/src2/h"):
            self.write(path)
        (self.root / "a/src/d").chmod(0o750)
        walk = self.walk("b/src", "a/src2", "a/src", "a/src")
        self.assertEqual(
            list(self.tree(walk)),
            [
                ".",
                "a",
                "a/src",
                "a/src/f",
                "a/src/d",
                "a/src/d/g",
                "a/src2",
                "a/src2/h",
                "b",
                "b/src",
                "b/src/f",
            ],
        )
        self.assertEqual(self.asked[0], str(self.root / "a/src/f"))
        file = walk.open(str(self.root / "b/src/f").lstrip("/"))
        self.assertEqual(file.read(), b"x")
        file.close()
        self.assertRaises(OSError, walk.open, "b/src/f")

    def test_patterns(self) -> None:
        """Begin at each of the directories, and what they leave out is counted."""
        for path in ("a/f", "a/d/f", "b/f", "b/g"):
            self.write(path)
        walk = self.walk("a", "b", exclude=["/f"])
        self.assertEqual(list(self.tree(walk)), [".", "a", "a/d", "a/d/f", "b", "b/g"])
        self.assertEqual(walk.excluded, 2)

    def test_one_that_is_missing(self) -> None:
        """Is reported, and the others are stored; if all are missing, the walk fails."""
        self.write("a/f")
        self.write("file")
        found = self.tree(self.walk("a", "gone/x", "file"))
        self.assertEqual(list(found), [".", "a", "a/f", "file", "gone/x"])
        self.assertEqual(found["gone/x"], "it does not exist")
        self.assertEqual(found["file"], "it is not a directory")
        walk = self.walk("gone", "too")
        with self.assertRaises(FileNotFoundError):
            self.tree(walk)

    def test_one_inside_another(self) -> None:
        """Is part of it; one that is not met is reported."""
        for path in ("a/d/f", "a/f"):
            self.write(path)
        self.assertEqual(BackupDirectories([f"{self.root}/a/d", f"{self.root}/a"]).name, "a")
        found = self.paths_of_one(self.walk("a", "a/d"))
        self.assertEqual(found, ["", "f", "d", "d/f"])
        for names, options in ((("a", "a/no"), {}), (("a", "a/d"), {"exclude": ["d"]})):
            found = self.paths_of_one(self.walk(*names, **options))
            self.assertTrue(found[-1].endswith("or is excluded"), found)

    def paths_of_one(self, walk: EntryWalk) -> list[str]:
        """Return what is met in one directory."""
        found = []
        while batch := walk.batch():
            for thing in batch:
                if isinstance(thing, LeftOut):
                    found.append(f"{thing.path}: {thing.why}")
                elif not isinstance(thing, DirectoryEnded):
                    found.append(thing.path)
        walk.close()
        return found

    def test_a_mount_inside(self) -> None:
        """With ``one_file_system`` it is stored if it was given, too."""
        self.write("a/d/f")
        self.mount("a/d")
        self.assertEqual(self.paths_of_one(self.walk("a", one_file_system=True)), ["", "d"])
        walk = self.walk("a", "a/d", one_file_system=True)
        self.assertEqual(self.paths_of_one(walk), ["", "d", "d/f"])

    def mount(self, *names: str) -> None:
        """Let these directories be in another file system."""
        real, others = os.fstat, {os.stat(self.root / name).st_ino for name in names}

        def fstat(fd: int) -> os.stat_result:
            found = real(fd)
            if found.st_ino not in others:
                return found
            fields = list(found)
            fields[2] += 1
            return os.stat_result(fields, {"st_mtime_ns": 1, "st_ctime_ns": 1})

        self.patch(os, "fstat", fstat)

    def test_below_a_mount(self) -> None:
        """With ``one_file_system`` a given directory below what is mounted is stored; others are not."""
        for path in ("a/m/d/e/f", "a/m/other/f", "a/m/f", "a/m/d2/f", "a/g"):
            self.write(path)
        self.mount("a/m", "a/m/d", "a/m/d/e", "a/m/other", "a/m/d2")
        walk = self.walk("a", "a/m/d/e", one_file_system=True)
        self.assertEqual(self.paths_of_one(walk), ["", "g", "m", "m/d", "m/d/e", "m/d/e/f"])
        found = self.paths_of_one(self.walk("a", "a/m/no", one_file_system=True))
        self.assertTrue(found.pop().endswith("or is excluded"), found)
        self.assertEqual(found, ["", "g", "m"])

    def test_a_file_system_of_the_kernel(self) -> None:
        """Is skipped where it is mounted, unless it was given, too."""
        self.write("a/d/f")
        device = os.stat(self.root / "a/d").st_dev + 1
        self.patch(local_walk, "kernel_devices", lambda: {device: "proc"})
        self.mount("a/d")
        self.assertEqual(self.paths_of_one(self.walk("a")), ["", "d", "d"])
        self.assertEqual(self.paths_of_one(self.walk("a", "a/d")), ["", "d", "d/f"])

    def test_hard_links(self) -> None:
        """Are identified by their paths in the joined tree, not by those in their directory."""
        for name in ("a", "b"):
            self.write(f"{name}/f")
            os.link(self.root / name / "f", self.root / name / "g")
        walk, found = self.walk("a", "b"), []
        while batch := walk.batch():
            found += [thing.hard_link for thing in batch if isinstance(thing, FileMet)]
        walk.close()
        self.assertEqual(found, [str(self.root / each) for each in ("a/f", "a/g", "b/f", "b/g")])

    def test_too_deep(self) -> None:
        """Directories above count as levels."""
        above = str(self.root / "a").count("/")
        self.patch(local_walk, "MAX_DEPTH", above + 1)
        for path in ("a/1/2/3", "b/f"):
            self.write(path)
        found = self.tree(self.walk("a", "b"))
        self.assertIn("levels deep", found["a/1/2"])

    def test_large_files(self) -> None:
        """Come open, as the last of a batch."""
        for path in ("a/large", "b/large"):
            self.write(path, b"y" * (local_walk.SMALL_BYTES + 1))
        walk = self.walk("a", "b")
        while batch := walk.batch():
            for thing in batch:
                if isinstance(thing, FileMet):
                    self.assertIs(thing, batch[-1])
                    assert isinstance(thing.content, io.FileIO)
                    thing.content.close()
        walk.close()

    def test_names(self) -> None:
        """Sources have a name for the backup and a text for the catalogue."""
        source = BackupDirectories(["/z/b", "/a/a"])
        self.assertEqual((source.name, source.root, source.base), ("a+b", "/a/a, /z/b", "/"))
        self.assertEqual(BackupDirectories(["/"]).name, "root")
        self.assertEqual(BackupDirectories(["/", "/usr"]).walked, ["/"])
        many = BackupDirectories([f"/usr/{number:050}" for number in range(3000)])
        self.assertEqual(len(many.walked), 3000)
        self.assertLess(len(many.root), 5000)
        self.assertTrue(many.root.endswith(" more"))
        self.assertTrue(still_exists("/nowhere, /usr"))
        self.assertFalse(still_exists("/nowhere, /nothing"))
        self.assertTrue(still_exists("standard input"))
        self.assertEqual(BackupStream("x", ["pg_dump", "secret"]).root, "the output of pg_dump")
        for name in ("", ".", "a/b", "a\0b"):
            self.assertRaises(UsageError, BackupStream, name, io.BytesIO())
