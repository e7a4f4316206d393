"""Reading a directory of this machine."""

from __future__ import annotations

import errno
import io
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.mount_table import mounted_file_systems
from pipegrid.tree import local_walk
from pipegrid.tree.file_selection import CACHES, DirectoryTag, TreeSelection
from pipegrid.tree.local_walk import (
    DirectoryBegun,
    DirectoryEnded,
    FileMet,
    LeftOut,
    LocalWalk,
    Skipped,
    WalkOptions,
)
from tests.descriptors import left_open, open_files
from tests.images import mounted_ext4


def everything(walk: LocalWalk) -> list[Any]:
    """Return all that a walk meets."""
    things = []
    while batch := walk.batch():
        things += batch
    walk.close()
    return things


class LocalWalkTests(SynchronousTestCase):
    """What is met, and what is left out."""

    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(shutil.rmtree, self.root, True)

    def write(self, path: str, content: bytes = b"x") -> Path:
        """Make a file."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return target

    def seen(self, **options: Any) -> list[str]:
        """Return what is met, as short text."""
        texts = []
        for thing in everything(LocalWalk(str(self.root), **options)):
            if isinstance(thing, DirectoryBegun):
                texts.append(f"+{thing.path}")
            elif isinstance(thing, DirectoryEnded):
                texts.append("-")
            elif isinstance(thing, LeftOut):
                texts.append(f"!{thing.path}: {thing.why}")
            elif isinstance(thing, Skipped):
                texts.append(f"~{thing.path}: {thing.what}")
            else:
                texts.append(thing.path)
        return texts

    def test_order(self) -> None:
        """Files of a directory first, by name; then what is below it."""
        for path in ("b", "a/y", "a/x/deep", "c"):
            self.write(path)
        (self.root / "empty").mkdir()
        self.assertEqual(
            self.seen(),
            ["+", "b", "c", "+a", "a/y", "+a/x", "a/x/deep", "-", "-", "+empty", "-", "-"],
        )

    def test_contents(self) -> None:
        """Small files come with their bytes, large ones open, links with what they lead to."""
        self.write("small", b"content")
        self.write("large", b"y" * (local_walk.SMALL_BYTES + 1))
        os.symlink("no/such", self.root / "link")
        os.symlink(self.root, self.root / "loop")
        met = {
            each.path: each
            for each in everything(LocalWalk(str(self.root)))
            if isinstance(each, FileMet)
        }
        self.assertEqual(met["small"].content, b"content")
        self.assertEqual(met["link"].link, b"no/such")
        self.assertEqual(met["loop"].link, os.fsencode(self.root))
        file = met["large"].content
        assert isinstance(file, io.FileIO)
        self.assertEqual(len(file.read()), local_walk.SMALL_BYTES + 1)
        self.assertEqual(file.name, str(self.root / "large"))
        file.close()

    def test_what_has_no_content(self) -> None:
        """Sockets, pipes and devices are skipped, and nobody waits for them; so are parts of downloads."""
        os.mkfifo(self.root / "pipe")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self.root / "sock"))
        self.write("z")
        self.write(".z.pipegrid-part")
        self.write(".other.pipegrid-part/kept")
        self.assertEqual(
            self.seen(),
            [
                "+",
                "~.z.pipegrid-part: the part of an unfinished download",
                "~pipe: a named pipe",
                "~sock: a socket",
                "z",
                "+.other.pipegrid-part",
                ".other.pipegrid-part/kept",
                "-",
                "-",
            ],
        )

    def test_unreadable(self) -> None:
        """A file and a directory that cannot be opened are named; all else is met."""
        for path in ("a", "bad", "dir/bad/x", "z"):
            self.write(path)
        real = os.open

        def refusing(path: Any, *args: Any, **options: Any) -> int:
            if path == "bad":
                raise PermissionError(13, "Permission denied", path)
            return real(path, *args, **options)

        self.patch(os, "open", refusing)
        self.assertEqual(
            self.seen(),
            [
                "+",
                "a",
                "!bad: it cannot be read: Permission denied",
                "z",
                "+dir",
                "!dir/bad: it cannot be read: Permission denied",
                "-",
                "-",
            ],
        )

    def test_what_vanishes(self) -> None:
        """A file and a directory that are gone when their turn comes are named."""
        for path in ("a", "b", "d/x", "e/x"):
            self.write(path)

        def know(path: str, found: os.stat_result) -> None:
            if path == "a":
                (self.root / "b").unlink()
                shutil.rmtree(self.root / "d")

        vanished = "it vanished while the directory was read"
        self.assertEqual(
            self.seen(know=know),
            ["+", "a", f"!b: {vanished}", f"!d: {vanished}", "+e", "e/x", "-", "-"],
        )

    def test_few_calls(self) -> None:
        """A small file is examined, opened, read between two looks, and closed."""
        self.write("a")
        calls: list[str] = []

        def noting(name: str, real: Callable[..., Any], *args: Any, **more: Any) -> Any:
            calls.append(name)
            return real(*args, **more)

        with ExitStack() as stack:
            for name in ("stat", "open", "fstat", "pread", "close"):
                noted = partial(noting, name, getattr(os, name))
                stack.enter_context(mock.patch.object(os, name, noted))
            self.assertEqual(self.seen(), ["+", "a", "-"])
        at = calls.index("pread")
        self.assertEqual(
            calls[at - 3 : at + 3], ["stat", "open", "fstat", "pread", "fstat", "close"]
        )

    def test_files_that_report_another_size(self) -> None:
        """Are read to their end: none, as in ``/proc``; or more than they have, as in ``/sys``."""
        self.write("none", b"content" * 1000)
        self.write("more", b"y" * 10)
        self.write("large", b"z" * (local_walk.SMALL_BYTES + 1))
        real, sizes = os.fstat, {7000: 0, 10: 4096, local_walk.SMALL_BYTES + 1: 0}

        def fstat(fd: int) -> os.stat_result:
            found = real(fd)
            fields = list(found)
            fields[6] = sizes.get(found.st_size, found.st_size)
            return os.stat_result(
                fields, {"st_mtime_ns": found.st_mtime_ns, "st_ctime_ns": found.st_ctime_ns}
            )

        self.patch(os, "fstat", fstat)
        met = {
            each.path: each
            for each in everything(LocalWalk(str(self.root)))
            if isinstance(each, FileMet)
        }
        self.assertEqual(met["none"].content, b"content" * 1000)
        self.assertEqual(met["more"].content, b"y" * 10)
        large = met["large"].content
        assert isinstance(large, io.FileIO)
        large.close()

    def without_kinds(self, failing: dict[str, int]) -> list[str]:
        """Have names listed without kinds, and some fail when looked at; returns those that were."""
        real, looked_at = os.scandir, []

        class Entry:
            def __init__(self, entry: os.DirEntry[str]) -> None:
                self.name = entry.name
                self._entry = entry

            def is_dir(self, *, follow_symlinks: bool = True) -> bool:
                looked_at.append(self.name)
                if self.name in failing:
                    raise OSError(failing[self.name], os.strerror(failing[self.name]))
                return self._entry.is_dir(follow_symlinks=follow_symlinks)

        @contextmanager
        def scandir(fd: int) -> Iterator[Iterator[Entry]]:
            with real(fd) as entries:
                yield (Entry(entry) for entry in entries)

        self.patch(os, "scandir", scandir)
        return looked_at

    def test_a_file_system_without_kinds(self) -> None:
        """One entry that cannot be looked at is left out by name; all else is met, in the root as well."""
        for path in ("a", "bad", "d/x", "d/lost", "z"):
            self.write(path)
        self.without_kinds({"bad": errno.EACCES, "lost": errno.ESTALE})
        self.assertEqual(
            self.seen(),
            [
                "+",
                "!bad: it cannot be read: Permission denied",
                "a",
                "z",
                "+d",
                "!d/lost: it cannot be read: its file system lost it (stale file handle); mount that again, "
                "and store it then",
                "d/x",
                "-",
                "-",
            ],
        )

    def test_what_is_excluded_is_not_looked_at(self) -> None:
        """Nor is it named, whatever is wrong with it."""
        for path in ("a", "bad", "mount/x", "other/x"):
            self.write(path)
        looked_at = self.without_kinds(dict.fromkeys(("bad", "mount"), errno.ENOTCONN))
        wanted = ["+", "a", "+other", "other/x", "-", "-"]
        self.assertEqual(
            self.seen(selection=TreeSelection(["bad", "mount/"])),
            wanted,
        )
        self.assertNotIn("bad", looked_at)
        looked_at.clear()
        self.assertEqual(
            self.seen(selection=TreeSelection(["bad"], ["other", "a"])),
            wanted,
        )
        self.assertEqual(sorted(looked_at), ["a", "other", "x"])

    def test_a_damaged_inode(self) -> None:
        """On a real file system that lists no kinds: that entry is left out, with the reason."""
        root = mounted_ext4(self, 1024, without="filetype")
        for name in ("a", "lost", "z"):
            (root / name).write_bytes(b"x")
        inode = (root / "lost").stat().st_ino
        image = str(root.parent / "image")
        subprocess.run(["umount", str(root)], check=True)
        subprocess.run(
            ["debugfs", "-w", "-R", f"clri <{inode}>", image], check=True, capture_output=True
        )
        subprocess.run(["mount", "-o", "loop", image, str(root)], check=True)
        self.root = root
        without = TreeSelection(["lost+found"])
        bad, *others = self.seen(selection=without)[1:]
        self.assertTrue(bad.startswith("!lost: it cannot be read: "), bad)
        self.assertEqual(others, ["a", "z", "-"])
        self.assertEqual(self.seen(selection=TreeSelection(["lost*"])), ["+", "a", "z", "-"])

    def test_a_file_that_changes(self) -> None:
        """It is read again; if it never stands still it is named."""
        self.write("a", b"1234")
        real = os.pread
        reads = []

        def changing(fd: int, length: int, offset: int) -> bytes:
            data = real(fd, length, offset)
            reads.append(data)
            if len(reads) < self.changes:
                with open(self.root / "a", "ab") as file:
                    file.write(b"5")
            return data

        self.changes = 3
        self.patch(os, "pread", changing)
        (met,) = (
            each for each in everything(LocalWalk(str(self.root))) if isinstance(each, FileMet)
        )
        self.assertEqual(met.content, b"123455")
        self.assertEqual(met.found.st_size, 6)
        self.changes = 1000
        self.assertIn(
            "!a: it changed while it was read; store it again when no program writes to it",
            self.seen(),
        )

    def test_what_is_known(self) -> None:
        """Is not opened, nor is anything if nothing shall be read."""
        self.write("a")
        self.write("b")
        (a, b) = (
            each
            for each in everything(
                LocalWalk(str(self.root), know=lambda path, found: "cap" if path == "a" else None)
            )
            if isinstance(each, FileMet)
        )
        self.assertEqual((a.known, a.content, b.known, b.content), ("cap", None, None, b"x"))
        (a, b) = (
            each
            for each in everything(LocalWalk(str(self.root), options=WalkOptions(read=False)))
            if isinstance(each, FileMet)
        )
        self.assertEqual((a.content, b.content), (None, None))

    def test_selection(self) -> None:
        """What is excluded is not looked into; what was listed and is not there is named."""
        for path in ("a/b", "skip/x", "c.tmp"):
            self.write(path)
        self.assertEqual(
            self.seen(selection=TreeSelection(["skip/", "*.tmp"])), ["+", "+a", "a/b", "-", "-"]
        )
        self.assertEqual(
            self.seen(selection=TreeSelection(only=["a", "no"])),
            ["+", "+a", "a/b", "-", "-", "!no: it is in the list, but does not exist"],
        )

    def test_links_to_directories(self) -> None:
        """Are no directories, for git and for patterns that end in a slash."""
        self.write("d/x")
        os.symlink("d", self.root / "link")
        self.assertEqual(
            self.seen(selection=TreeSelection(["link/"])), ["+", "link", "+d", "d/x", "-", "-"]
        )
        self.assertEqual(self.seen(selection=TreeSelection(["link"])), ["+", "+d", "d/x", "-", "-"])

    def test_tags(self) -> None:
        """Of a directory with one, only itself and the tag are stored; a wrong one is a file like others."""
        for path in ("a/x", "a/CACHEDIR.TAG", "b/x", "c/x", "c/deep/y", "d/x", "e/x", "f/x"):
            self.write(path)
        good = CACHES.header + b"\n# made by a test\n"
        for path in ("b/CACHEDIR.TAG", "c/CACHEDIR.TAG", "target"):
            self.write(path, good)
        os.symlink("../target", self.root / "d/CACHEDIR.TAG")
        (self.root / "e/CACHEDIR.TAG").mkdir()
        os.mkfifo(self.root / "f/CACHEDIR.TAG")
        selection = TreeSelection(tags=[CACHES])
        seen = self.seen(selection=selection)
        self.assertEqual(
            [each for each in seen if each[0] in "bc"], ["b/CACHEDIR.TAG", "c/CACHEDIR.TAG"]
        )
        self.assertEqual(
            [each for each in seen if each.endswith("x")], ["a/x", "d/x", "e/x", "f/x"]
        )
        self.assertEqual(selection.excluded, 3)
        selection = TreeSelection(["CACHEDIR.TAG"], tags=[DirectoryTag("CACHEDIR.TAG")])
        self.assertNotIn(
            "/", "".join(each for each in self.seen(selection=selection) if each[0] != "+")
        )
        self.write("CACHEDIR.TAG", good)
        self.assertEqual(
            self.seen(selection=TreeSelection(tags=[CACHES])), ["+", "CACHEDIR.TAG", "-"]
        )

    def test_large_files(self) -> None:
        """Are left out above a size; links and directories have none."""
        self.write("small", b"x" * 5000)
        self.write("large", b"x" * 5001)
        os.symlink("x" * 4000, self.root / "link")
        selection = TreeSelection(max_file_bytes=5000)
        self.assertEqual(self.seen(selection=selection), ["+", "link", "small", "-"])
        self.assertEqual(selection.excluded, 1)

    def test_depth(self) -> None:
        """A tree deeper than descriptors go is met whole, and its directories are let go of."""
        before = open_files()
        depth = 3 * local_walk._OPEN_LEVELS
        path = "/".join(["d"] * depth)
        self.write(path + "/file")
        for level in range(1, depth):
            self.write("/".join(["d"] * level) + "/z")
        seen = self.seen()
        self.assertEqual(seen.count("-"), depth + 1)
        self.assertEqual(sum(each.endswith("z") for each in seen), depth - 1)
        self.assertFalse([each for each in seen if each.startswith("!")])
        self.assertEqual(left_open(before), [])

    def test_too_deep(self) -> None:
        """Deeper than readers go is named."""
        self.patch(local_walk, "MAX_DEPTH", 3)
        self.write("a/b/c/d/e")
        self.assertIn("!a/b/c/d: it is more than 3 levels deep; readers take no more", self.seen())

    def test_too_many(self) -> None:
        """A directory with more than readers take is named; it is there, and empty."""
        self.patch(local_walk, "MAX_ENTRIES", 3)
        for n in range(4):
            self.write(f"many/{n}")
        self.write("z")
        seen = self.seen()
        self.assertEqual(seen[:3], ["+", "z", "+many"])
        self.assertIn("more than 3 entries", seen[3])

    def test_own_directories(self) -> None:
        """Those that are named by what they are, and not by a path, are passed over."""
        self.write("grid/share")
        self.write("a")
        os.symlink("grid", self.root / "way")
        without = local_walk.own_directories(self.root / "way", self.root / "no")
        self.assertEqual(self.seen(options=WalkOptions(without=without)), ["+", "a", "way", "-"])

    def test_one_file_system(self) -> None:
        """What is mounted in it comes as an empty directory."""
        self.write("mounted/x")
        real = os.fstat

        def elsewhere(fd: int) -> os.stat_result:
            found = real(fd)
            if os.readlink(f"/proc/self/fd/{fd}").endswith("mounted"):
                fields = list(found)
                fields[2] = 9999
                return os.stat_result(fields, {"st_mtime_ns": 1, "st_mtime": 0.0})
            return found

        self.patch(os, "fstat", elsewhere)
        self.assertEqual(
            self.seen(options=WalkOptions(one_file_system=True)), ["+", "+mounted", "-", "-"]
        )
        self.assertEqual(self.seen(), ["+", "+mounted", "mounted/x", "-", "-"])

    def test_file_systems_of_the_kernel(self) -> None:
        """Such as ``/proc``: one that is mounted in it comes as an empty directory, and is reported."""
        self.write("mounted/x")
        real, device = os.fstat, os.stat("/proc").st_dev

        def elsewhere(fd: int) -> os.stat_result:
            found = real(fd)
            if os.readlink(f"/proc/self/fd/{fd}").endswith("mounted"):
                fields = list(found)
                fields[2] = device
                return os.stat_result(fields, {"st_mtime_ns": 1, "st_mtime": 0.0})
            return found

        self.patch(os, "fstat", elsewhere)
        what = "the file system proc of the kernel, which has no files on a disk"
        self.assertEqual(self.seen(), ["+", "+mounted", f"~mounted: {what}", "-", "-"])
        self.assertEqual(list(mounted_file_systems(str(self.root / "none"))), [])

    def test_batches(self) -> None:
        """They end with so many things, so many bytes, or a file that is open."""
        for n in range(300):
            self.write(f"{n:03}", b"")
        walk = LocalWalk(str(self.root))
        self.assertEqual([len(walk.batch()) for _ in range(4)], [128, 128, 46, 0])
        shutil.rmtree(self.root)
        for n in range(40):
            self.write(f"{n:03}", bytes(100_000))
        self.write("030", bytes(200_000))
        walk = LocalWalk(str(self.root))
        self.assertEqual([len(walk.batch()) for _ in range(5)], [12, 11, 9, 10, 0][:5])
        walk.close()

    def test_names_that_are_no_text(self) -> None:
        """Come as the bytes that they are."""
        name = os.fsencode(str(self.root)) + b"/caf\xe9"
        with open(name, "wb"):
            pass
        (met,) = (
            each for each in everything(LocalWalk(str(self.root))) if isinstance(each, FileMet)
        )
        self.assertEqual(met.name, b"caf\xe9")

    def test_the_root(self) -> None:
        """A link to it is followed; if it is none, the first batch says so."""
        self.write("d/x")
        os.symlink("d", self.root / "link")
        walk = LocalWalk(str(self.root / "link"))
        self.assertEqual(len(walk.batch()), 3)
        walk.close()
        self.assertRaises(NotADirectoryError, LocalWalk(str(self.root / "d/x")).batch)
        self.assertRaises(FileNotFoundError, LocalWalk(str(self.root / "no")).batch)

    def test_open_again(self) -> None:
        """A file that was met is opened again, but through no link."""
        self.write("a/b/c", b"again")
        walk = LocalWalk(str(self.root))
        with walk.open("a/b/c") as file:
            self.assertEqual(file.read(), b"again")
        os.rename(self.root / "a/b", self.root / "a/real")
        os.symlink("real", self.root / "a/b")
        self.assertRaises(OSError, walk.open, "a/b/c")
        walk.close()
