"""What paths lead to, with which attributes; of trees that any program may have written."""

from __future__ import annotations

import errno
import json
import os
import stat
from datetime import datetime, timezone
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, UnknownCap
from pipegrid.core.packed_directory import PackedChild, pack_immutable
from pipegrid.errors import GridError
from pipegrid.mount import mounted_tree
from pipegrid.mount.mounted_tree import (
    MOST_DEPTH,
    RUNS_FRESH_S,
    RUNS_WAIT_S,
    BackupsRoot,
    MountedNode,
    MountedTree,
    backups_content,
    content_of,
    directory_name,
    node_of,
)
from pipegrid.tree.backup.catalogue import BackupRun
from pipegrid.tree.directory_reading import Entry
from pipegrid.tree.file_metadata import entry_metadata
from tests.tree.support import changing_cap, entry_bytes

NOW = datetime(2026, 11, 25, tzinfo=timezone.utc).timestamp()

FILE = ChkCap(bytes(16), bytes(32), 3, 10, 1000)


def entry(name: str, cap: Cap | None = FILE, **metadata: Any) -> Entry:
    """Return an entry of a directory."""
    return Entry(name, cap, None, json.dumps(metadata).encode())


def directory(*children: PackedChild) -> DirectoryCap:
    """Return a directory that its cap contains."""
    return DirectoryCap(LitCap(pack_immutable(children)))


class ContentTests(SynchronousTestCase):
    """Entries of directories."""

    def test_lying_names(self) -> None:
        """Names that no file can have, or that lead away, never appear; nor does a name appear twice."""
        wrong = ["", ".", "..", "a/b", "/", "a\0b", "x" * 256, "\ud800"]
        quoted = [{"name_quoted": name} for name in ("..", "%2E%2E", "a%2Fb", "%00", "")]
        entries = [entry(name) for name in (*wrong, "good")]
        entries += [entry(f"q{n}", pipegrid=each) for n, each in enumerate(quoted)]
        entries += [entry("b", pipegrid={"name_quoted": "good"})]
        found = content_of(entries, True)
        self.assertEqual(list(found.children), ["good"])

    def test_exact_names(self) -> None:
        """Names that are not UTF-8 are the bytes that were stored."""
        found = content_of([entry("\ufffd", pipegrid={"name_quoted": "%FFa"})], True)
        self.assertEqual([os.fsencode(name) for name in found.children], [b"\xffa"])

    def test_modes(self) -> None:
        """As restored ones, without what permits writing; wrong metadata is ignored."""
        for given, kind, shown in (
            ({}, FILE, 0o100444),
            ({"pipegrid": {"mode": 0o4755}, "st_mode": 0o104755}, FILE, 0o100555),
            ({"pipegrid": {"mode": 0o640}}, FILE, 0o100440),
            ({"pipegrid": {"mode": "x"}}, FILE, 0o100444),
            ({}, directory(), 0o040555),
            ({"pipegrid": {"mode": 0o3770}, "st_mode": 0o043770}, directory(), 0o043550),
            ({"pipegrid": {"mode": 0o777, "link": "a/../b"}}, FILE, 0o120777),
            ({}, None, 0o100000),
            ({}, UnknownCap("imm.x-something"), 0o100000),
        ):
            self.assertEqual(node_of(entry("n", kind, **given)).full_mode, shown, given)

    def test_times_and_links(self) -> None:
        """Nanoseconds, also before 1970, as they were stored; a link's target is any bytes."""
        link = node_of(
            entry("l", pipegrid={"link": "\ufffd", "link_quoted": "%FF/x", "mtime_ns": -5})
        )
        self.assertEqual((link.kind, link.target, link.mtime_ns), ("link", b"\xff/x", -5))
        self.assertEqual(node_of(entry("f", mtime=1.5)).mtime_ns, 1_500_000_000)
        self.assertEqual(node_of(entry("f", tahoe={"linkmotime": 2.5})).mtime_ns, 2_500_000_000)

    def test_what_a_put_stores(self) -> None:
        """The metadata that PipeGrid writes leads to the file's own attributes."""
        found = os.stat(__file__)
        node = node_of(entry("f", **entry_metadata(found)))
        self.assertEqual(node.mtime_ns, found.st_mtime_ns)
        self.assertEqual(node.full_mode, found.st_mode & ~0o222)


class BackupsTests(SynchronousTestCase):
    """The directories above the runs."""

    def run_of(self, name: str, time: str) -> BackupRun:
        """Return a run."""
        return BackupRun(name, time, directory())

    def test_layout(self) -> None:
        """One directory for each backup, in it one for each run, and a link to the newest."""
        times = ["2026-11-22_18:23:31Z", "2026-11-23_18:23:31Z", "2026-10-01_00:00:00Z"]
        runs = [self.run_of("home", time) for time in times] + [self.run_of("work", times[0])]
        found = backups_content(runs, NOW)
        self.assertEqual(list(found.children), ["home", "work"])
        home = found.children["home"].inside
        assert home is not None
        self.assertEqual(list(home.children), [*sorted(times), "latest"])
        self.assertEqual(home.children["latest"].target, times[1].encode())

    def test_names_of_backups(self) -> None:
        """Whatever a backup is called, it has a directory of its own."""
        names = ["a/b", "a_b", ".", "..", "", "x" * 300, "\ud800"]
        runs = [self.run_of(name, "2026-11-22_18:23:31Z") for name in names]
        found = backups_content(runs, NOW)
        self.assertEqual(len(found.children), len(names))
        for name in found.children:
            self.assertNotIn(name, ("", ".", ".."))
            self.assertNotIn("/", name)
            self.assertLess(len(os.fsencode(name)), 255)
        self.assertEqual(directory_name("home"), "home")

    def test_the_list_is_read_again(self) -> None:
        """After some seconds; until then, and while it cannot be read, there is the last one."""
        clock = Clock()
        calls = 0

        async def runs() -> list[BackupRun]:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise GridError("no servers")
            return [self.run_of("home", "2026-11-22_18:23:31Z")] * calls

        said: list[str] = []
        root = BackupsRoot(runs, clock, lambda: NOW, said.append)

        def node() -> MountedNode:
            return self.successResultOf(Deferred.fromCoroutine(root.node()))

        first = node()
        clock.advance(RUNS_FRESH_S)
        self.assertIs(node(), first)
        clock.advance(0.1)
        self.assertIs(node(), first)
        self.assertEqual(calls, 2)
        self.assertEqual(said, ["the list of backups cannot be read again: no servers"])
        clock.advance(2 * RUNS_FRESH_S + 0.1)
        self.assertIsNot(node(), first)

    def test_a_list_that_never_arrives(self) -> None:
        """One program waits for it, ten seconds, and gets the last one; later ones wait less often."""
        clock = Clock()
        first = [self.run_of("home", "2026-11-22_18:23:31Z")]
        never: list[Deferred[list[BackupRun]]] = []

        async def runs() -> list[BackupRun]:
            if not clock.seconds():
                return first
            never.append(Deferred())
            return await never[-1]

        said: list[str] = []
        root = BackupsRoot(runs, clock, lambda: NOW, said.append)
        node = self.successResultOf(Deferred.fromCoroutine(root.node()))
        clock.advance(RUNS_FRESH_S + 0.1)
        waiting = Deferred.fromCoroutine(root.node())
        self.assertIs(self.successResultOf(Deferred.fromCoroutine(root.node())), node)
        self.assertNoResult(waiting)
        clock.advance(RUNS_WAIT_S)
        self.assertIs(self.successResultOf(waiting), node)
        for _ in range(1000):
            clock.advance(1)
            Deferred.fromCoroutine(root.node())
        self.assertLess(len(never), 20)
        self.assertIn("no server returned it within 10 seconds", said[0])

    def test_a_run_in_the_future(self) -> None:
        """The link leads where ``restore`` takes its files from."""
        times = ["2026-11-22_18:23:31Z", "2026-11-23_18:23:31Z", "2036-01-01_00:00:00Z"]
        home = backups_content([self.run_of("e\u0301", time) for time in times], NOW)
        (found,) = home.children.values()
        assert found.inside is not None
        self.assertEqual(found.inside.children["latest"].target, times[1].encode())
        self.assertIn(times[2], found.inside.children)


class PathsTests(SynchronousTestCase):
    """Paths of a tree that is in one cap, or in a grid that has one mutable directory."""

    def tree(self, cap: DirectoryCap, mutable: bytes = b"") -> MountedTree:
        """Return a mounted tree; every mutable directory has the given content."""
        node = MountedNode("directory", 0o555, cap=cap)

        class OneDirectory:
            clock = Clock()

            def read(self, _cap: Cap, _start: int = 0, _length: int = 0) -> Deferred[bytes]:
                done: Deferred[bytes] = Deferred()
                done.callback(mutable)
                return done

        async def root() -> MountedNode:
            return node

        tree: Any = MountedTree(OneDirectory(), root)  # type: ignore[arg-type]
        self.addCleanup(tree.close)
        return tree  # type: ignore[no-any-return]

    def attributes(self, tree: MountedTree, *path: str) -> dict[str, int]:
        """Return the attributes at a path."""
        return self.successResultOf(Deferred.fromCoroutine(tree.attributes(path)))

    def errno_of(self, tree: MountedTree, *path: str) -> int | None:
        """Return the number of the error at a path."""
        failed = self.failureResultOf(Deferred.fromCoroutine(tree.locate(path)), OSError)
        number: int | None = failed.value.errno
        return number

    def test_attributes(self) -> None:
        """Sizes, owners, and numbers in the order of the names, the same each time."""
        inner = directory(PackedChild("x", LitCap(b"12345")), PackedChild("y", FILE))
        cap = directory(PackedChild("b", inner), PackedChild("a", inner))
        tree = self.tree(cap)
        x, y = self.attributes(tree, "a", "x"), self.attributes(tree, "a", "y")
        self.assertEqual((x["st_size"], y["st_size"], y["st_blocks"]), (5, 1000, 2))
        self.assertEqual((x["st_uid"], x["st_gid"]), (os.getuid(), os.getgid()))
        self.assertEqual(y["st_ino"], x["st_ino"] + 1)
        self.assertEqual(self.attributes(self.tree(cap), "a", "x"), x)
        paths = [(), ("a",), ("b",), ("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
        self.assertEqual(len({self.attributes(tree, *path)["st_ino"] for path in paths}), 7)
        listed = self.successResultOf(Deferred.fromCoroutine(tree.list_directory(("a",))))
        self.assertEqual((listed[0][0], listed[0][1].inode), ("x", x["st_ino"]))
        self.assertTrue(stat.S_ISDIR(self.attributes(tree)["st_mode"]))

    def test_nowhere(self) -> None:
        """Paths that lead to nothing, through a file, or too deep."""
        tree = self.tree(directory(PackedChild("f", FILE)))
        self.assertEqual(self.errno_of(tree, "g"), errno.ENOENT)
        self.assertEqual(self.errno_of(tree, "f", "g"), errno.ENOTDIR)
        self.assertEqual(self.errno_of(tree, *["d"] * (MOST_DEPTH + 1)), errno.ENAMETOOLONG)

    def test_a_directory_in_itself(self) -> None:
        """It can be listed, and entered once; so programs that go through everything come to an end."""
        loop = changing_cap(1)
        stored = entry_bytes("again", str(loop.readonly()))
        tree = self.tree(directory(), mutable=stored)
        node = MountedNode("directory", 0o555, cap=loop.readonly())
        self.patch(tree, "_root", lambda: _returned(node))
        self.attributes(tree, "again")
        self.assertEqual(self.errno_of(tree, "again", "again"), errno.ELOOP)

    def test_subdirectories_in_advance(self) -> None:
        """Listing one after the other reads the next ones; at the end nothing is left running."""
        children = [PackedChild(f"{n:03}", directory(PackedChild(str(n), FILE))) for n in range(20)]
        tree = self.tree(directory(*children))
        for number in range(4):
            self.successResultOf(Deferred.fromCoroutine(tree.list_directory((f"{number:03}",))))
        self.assertGreater(len(tree.views._views), 10)
        self.assertEqual(tree._reading.running, {})

    def test_a_huge_directory(self) -> None:
        """The attributes of everything in it take one read of it, and one of the directory above."""
        names = [f"{number:05}" for number in range(30_000)]
        inner = pack_immutable([PackedChild(name, LitCap(b"x")) for name in names])
        huge = ChkCap(bytes(16), bytes(32), 3, 10, len(inner))
        outer = pack_immutable([PackedChild("huge", DirectoryCap(huge))])
        above = ChkCap(bytes(range(16)), bytes(32), 3, 10, len(outer))
        tree = self.tree(DirectoryCap(above))
        seen: list[Cap] = []

        def read(cap: Cap, _start: int = 0, _length: int = 0) -> Deferred[bytes]:
            seen.append(cap)
            return succeed(inner if cap == huge else outer)

        self.patch(tree.views._grid, "read", read)
        for name in names[:3]:
            self.assertEqual(self.attributes(tree, "huge", name)["st_size"], 1)
        self.assertEqual(seen, [above, huge])

    def test_servers_that_are_absent(self) -> None:
        """A file whose size only they know has no attributes then, rather than being shown as empty."""
        file = changing_cap(2).file.readonly()
        tree = self.tree(directory(), mutable=entry_bytes("f", str(file)))
        node = MountedNode("directory", 0o555, cap=changing_cap(1).readonly())
        self.patch(tree, "_root", lambda: _returned(node))
        error = GridError("no server has it")
        tree.views._grid.size = lambda _cap: fail(error)  # type: ignore[method-assign, assignment]
        failed = self.failureResultOf(Deferred.fromCoroutine(tree.attributes(("f",))))
        self.assertIs(failed.value, error)
        tree.views._grid.size = lambda _cap: succeed(7)  # type: ignore[method-assign, assignment]
        self.assertEqual(self.attributes(tree, "f")["st_size"], 7)

    def test_nothing_is_imported_from_fuse(self) -> None:
        """The tree works without it, so that its tests run everywhere."""
        self.assertNotIn("mfusepy", vars(mounted_tree))


async def _returned(node: MountedNode) -> MountedNode:
    return node
