"""Servers go away in the middle of a tree, and come back: the tree is whole all the same."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.core.caps import Cap, DirectoryCap
from pipegrid.errors import GridError, NotEnoughSharesError, UnhappyError
from pipegrid.grid.file_grid import Grid
from pipegrid.reactor.deferreds import start_cancellable
from pipegrid.transfer.settings import Limits
from pipegrid.transfer.upkeep import Upkeep, UpkeepOutcome, UpkeepRequest
from pipegrid.tree.backup.catalogue import ARCHIVES, LATEST, Archives, BackupRun
from pipegrid.tree.backup.catalogue_store import CatalogueChange, GridCatalogues
from pipegrid.tree.directory import Directory, create_directory
from pipegrid.tree.retry_queue import FIRST_WAIT_S, WAIT_S
from pipegrid.tree.tree_check import CheckReports, FirstMet, TreeSummary, check_trees
from pipegrid.tree.tree_download import GetTreeLimits
from pipegrid.tree.tree_upload import GIVE_UP, TreeReports, TreeResult, tree_upload
from tests.tree.test_download import TreeTestCase

OUTAGE_S = 70.0
SIZES = ("large", 100), ("small", 5)


class OutageTestCase(TreeTestCase):
    """A directory of a few files in directories within one another; two things are under way at a time."""

    def setUp(self) -> None:
        super().setUp()
        self.source = self.scratch / "source"
        random = Random(1)
        for path in ("a/b/one", "a/b/two", "a/three", "c/four", "c/five", "six", "seven"):
            file = self.source / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(random.randbytes(1000 + len(path)))
        os.symlink("a/b/" + "n" * 60, self.source / "link")
        self.client.grid._limits = Limits(jobs=2)
        self.left_out: list[str] = []
        self.said: list[str | None] = []

    def servers_go(self, count: int = 10, for_s: float | None = OUTAGE_S) -> None:
        """Stop so many servers, for so long."""
        for server in self.world.servers[:count]:
            server.host.crash()
            if for_s is not None:
                self.world.clock.callLater(for_s, server.host.restart)

    def before(self, name: str, number: int, act: Callable[[], None]) -> None:
        """Do something right before the grid is asked to do this for the so manieth time."""
        real, calls = getattr(Grid, name), 0

        def counted(grid: Grid, *args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                act()
            return real(grid, *args, **options)

        self.patch(Grid, name, counted)

    def put_tree(self) -> TreeResult:
        """Store the directory."""
        reports = TreeReports(
            lambda path, why: self.left_out.append(path), waiting=self.said.append
        )
        upload = tree_upload(self.client.grid, self.source, reports=reports)
        return self.world.run(Deferred.fromCoroutine(upload.run()))

    def fetch(self, cap: Cap) -> Any:
        """Fetch a tree, and return what it left out."""
        return self.world.run(self.trees.get_tree(cap, self.target, waiting=self.said.append))

    def same(self) -> bool:
        """Whether what was fetched is what there was, modes and times included."""

        def described(root: Any) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for path in sorted(root.rglob("*")):
                status = path.lstat()
                what = (
                    path.read_bytes()
                    if path.is_file()
                    else os.readlink(path)
                    if path.is_symlink()
                    else 0
                )
                found[str(path.relative_to(root))] = (what, status.st_mode, status.st_mtime_ns)
            return found

        return described(self.source) == described(self.target)


class PutTests(OutageTestCase):
    """What is stored in spite of it."""

    def test_at_any_moment(self) -> None:
        """Whatever is sent when the servers go, a file, a link or any directory, comes at a second try."""
        whole = self.put_tree()
        self.assertEqual((whole.counts.second_tries, self.said), (0, []))
        sent = whole.counts.sent_files + whole.counts.sent_directories + 1  # the link
        self.assertEqual(sent, 12)
        for number in range(2, sent + 1):
            with self.subTest(number=number):
                for each in self.source.rglob("*"):  # other contents, or all would be there
                    if each.is_file() and not each.is_symlink():
                        each.write_bytes(each.read_bytes() + b"%d" % number)
                self.said.clear()
                self.before("put", number, self.servers_go)
                result = self.put_tree()
                self.assertEqual(self.left_out, [])
                self.assertIn(result.counts.second_tries, range(1, 5))
                self.assertGreater(result.elapsed_s, OUTAGE_S)
                self.assertEqual(len(self.said), 2)
                self.assertRegex(self.said[0] or "", "waiting for them, up to (2|10) minutes")
                self.assertIsNone(self.said[1])
                again = self.put_tree()
                self.assertEqual(again.cap, result.cap)
                self.assertEqual(again.counts.sent_bytes, result.counts.sent_bytes)
                self.assertEqual(again.counts.files, result.counts.files)
        self.assertEqual(self.fetch(result.cap).failed, 0)
        self.assertTrue(self.same())

    def test_too_few_servers(self) -> None:
        """It is the same when some are left, but not enough; a rest that is enough needs no second try."""
        self.before("put", 4, lambda: self.servers_go(4))
        self.assertGreater(self.put_tree().counts.second_tries, 0)
        self.assertEqual(self.left_out, [])

    def test_what_is_gone_by_then(self) -> None:
        """A file that vanished, or changed, is left out with that reason; all else is there."""

        def go() -> None:
            self.servers_go()
            (self.source / "six").unlink(missing_ok=True)
            (self.source / "seven").write_bytes(b"another")

        self.before("put", 1, go)
        result = self.put_tree()
        self.assertIn(result.counts.left_out, (1, 2))
        self.assertLessEqual(set(self.left_out), {"six", "seven"})
        self.assertEqual(result.counts.files + result.counts.left_out, 7)

    def test_servers_that_stay_away(self) -> None:
        """After ten minutes all is given up, and the error is that of the grid."""
        self.before("put", 4, lambda: self.servers_go(for_s=None))
        began_s = self.world.clock.seconds()
        with self.assertRaises(GridError):
            self.put_tree()
        self.assertGreater(self.world.clock.seconds() - began_s, WAIT_S - 30)
        self.assertLess(self.world.clock.seconds() - began_s, WAIT_S + 180)

    def test_servers_that_were_never_there(self) -> None:
        """Who begins without a network is told so soon, or after two minutes if there is little to store."""
        self.servers_go(for_s=None)
        began_s = self.world.clock.seconds()
        with self.assertRaises(GridError):
            self.put_tree()
        self.assertLess(self.world.clock.seconds() - began_s, FIRST_WAIT_S + 90)
        for number in range(GIVE_UP * 3):
            (self.source / f"more{number}").write_bytes(b"%d" % number * 500)
        self.client.grid._limits = Limits()
        began_s = self.world.clock.seconds()
        with self.assertRaises(UnhappyError):
            self.put_tree()
        self.assertLess(self.world.clock.seconds() - began_s, 60)

    def test_full_servers(self) -> None:
        """What servers refuse is not tried again."""
        for server in self.world.servers[:6]:
            server.free_bytes = 0
        with self.assertRaises(GridError):
            self.put_tree()
        self.assertEqual(self.said, [])


class GetTests(OutageTestCase):
    """What is fetched in spite of it."""

    def stored(self) -> DirectoryCap:
        """Store the tree."""
        cap = self.put_tree().cap
        self.client.grid._limits = Limits()
        return cap

    def test_files(self) -> None:
        """Files that were asked for when servers went come at a second try; directories keep times."""
        cap = self.stored()
        files = 7
        for number in range(1, files + 1):
            with self.subTest(number=number):
                reads = 4 + number  # after the directories
                self.before("read", reads, self.servers_go)
                result = self.fetch(cap)
                self.assertEqual((result.failed, result.files, result.links), (0, files, 1))
                self.assertTrue(self.same())
                for path in sorted(self.target.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def test_directories(self) -> None:
        """A directory that could not be read is read at the end, with all in it."""
        cap = self.stored()
        for number in (2, 3, 4):
            with self.subTest(number=number):
                self.before("read", number, self.servers_go)
                result = self.fetch(cap)
                self.assertEqual((result.failed, result.files, result.directories), (0, 7, 4))
                self.assertGreater(result.second_tries, 0)
                self.assertTrue(self.same())
                for path in sorted(self.target.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def made(self) -> Directory:
        """Make a directory that can be changed."""
        made: Directory = self.world.run(
            start_cancellable(create_directory(self.client.grid), self.world.clock)
        )
        return made

    def test_mutable_directories(self) -> None:
        """They are read at the end, as those are that do not change."""
        above, below = (self.made() for _ in range(2))
        self.world.run(below.link("file", self.put(b"f" * 100)))
        self.world.run(above.link("mutable", below.cap))
        self.before("read", 2, self.servers_go)
        result = self.fetch(above.cap)
        self.assertEqual((result.failed, result.files, result.second_tries), (0, 1, 1))

    def test_files_that_live_in_their_caps(self) -> None:
        """They come without servers, so that they show nothing of these: nothing new begins all the same."""
        tree = {
            f"{number:02}{kind}": kind.encode() * size
            for number in range(20)
            for kind, size in SIZES
        }
        cap = self.directory(tree)
        self.before("read", 3, self.servers_go)
        fetching = self.trees.get_tree(
            cap, self.target, limits=GetTreeLimits(jobs=1), waiting=self.said.append
        )
        result = self.world.run(fetching)
        self.assertEqual((result.failed, result.files), (0, 40))
        self.assertEqual(result.second_tries, 1)
        self.assertEqual(len(self.said), 2)

    def test_without_the_first_directory(self) -> None:
        """Nothing is waited for: whoever has no network is told so."""
        cap = self.stored()
        self.servers_go()
        began_s = self.world.clock.seconds()
        with self.assertRaises(NotEnoughSharesError):
            self.fetch(cap)
        self.assertLess(self.world.clock.seconds() - began_s, OUTAGE_S)
        self.assertEqual(self.said, [])

    def test_servers_that_stay_away(self) -> None:
        """Then what did not come is named, and the rest is there."""
        cap = self.stored()
        self.before("read", 8, lambda: self.servers_go(for_s=None))
        problems: list[tuple[str, ...]] = []
        result = self.world.run(
            self.trees.get_tree(
                cap,
                self.target,
                problem=lambda path, error: problems.append(path),
                waiting=self.said.append,
            )
        )
        self.assertEqual(result.failed, len(problems))
        self.assertEqual(result.failed + result.files, 7)
        self.assertGreater(result.failed, 0)
        for server in self.world.servers:
            server.host.restart()


class RepairTests(OutageTestCase):
    """What is repaired in spite of it."""

    def damaged_tree(self) -> Cap:
        """Store the tree, and have one server lose all that it has."""
        cap = self.put_tree().cap
        self.client.grid._limits = Limits()
        for path in Path(self.world.servers[9].root, "shares").glob("*/*/*"):
            path.unlink()
        return cap

    def repair(self, cap: Cap, number: int = 0, **todo: bool) -> TreeSummary:
        """Look after the tree; servers go away right before the so manieth object."""
        self.ended: dict[str, UpkeepOutcome] = {}
        begin, calls = Upkeep.begin, 0

        def ended(_: int, place: FirstMet, outcome: UpkeepOutcome) -> None:
            self.assertNotIn("/".join(place.path), self.ended)
            self.ended["/".join(place.path)] = outcome

        def counted(upkeep: Upkeep, *args: Any, **options: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                self.go()
            begin(upkeep, *args, **options)

        patch = self.patch(Upkeep, "begin", counted)
        reports = CheckReports(ended, waiting=self.said.append)
        todo_request = UpkeepRequest(**todo)
        checking = check_trees(self.client.grid, [cap], todo_request, reports=reports)
        summary = self.world.run(checking)
        patch.restore()
        self.assertEqual(len(self.ended), summary.objects)
        return summary

    def go(self) -> None:
        """Servers go for a while."""
        self.servers_go()

    def test_servers_that_come_back(self) -> None:
        """What was to be repaired when they were away is, when they are back; each object is told of once."""
        for number, verify in itertools.product((6, 9, 12), (False, True)):
            with self.subTest(number=number, verify=verify):
                cap = self.damaged_tree()
                self.said.clear()
                summary = self.repair(cap, number, repair=True, verify=verify)
                self.assertEqual((summary.objects, summary.unreadable), (12, 0))
                self.assertEqual((summary.lost, summary.damaged, summary.failed), (0, 0, 0))
                self.assertGreater(summary.second_tries, 0)
                self.assertRegex(self.said[0] or "", "waiting for them, up to (2|10) minutes")
                self.assertIsNone(self.said[-1])
                self.assertEqual(self.repair(cap).healthy, 12)

    def test_servers_that_stay_away(self) -> None:
        """They are waited for ten minutes in all; then each object is told of as it was."""
        cap = self.damaged_tree()
        self.patch(self, "go", lambda: self.servers_go(for_s=None))
        began_s = self.world.clock.seconds()
        summary = self.repair(cap, 9, repair=True)
        self.assertGreater(summary.lost + summary.failed + summary.damaged, 0)
        self.assertEqual(summary.second_tries, 0)
        self.assertLess(self.world.clock.seconds() - began_s, WAIT_S + 180)

    def test_some_that_are_gone_for_good(self) -> None:
        """Others take what they had, and nobody is waited for."""
        cap = self.damaged_tree()
        for server in self.world.servers[:3]:
            server.host.crash()
        began_s = self.world.clock.seconds()
        summary = self.repair(cap, repair=True)
        self.assertEqual((summary.repaired, summary.second_tries, self.said), (12, 0, []))
        self.assertLess(self.world.clock.seconds() - began_s, 2)

    def test_a_check_waits_for_nobody(self) -> None:
        """Who asks how things are is told how they are."""
        cap = self.damaged_tree()
        self.assertGreater(self.repair(cap, 9).lost, 0)
        self.assertEqual(self.said, [])


class CatalogueTests(OutageTestCase):
    """The list of backups is written when servers come back."""

    def test_servers_that_come_back(self) -> None:
        """Each write of it waits a little: the first, and a change."""
        store = GridCatalogues(self.client.grid, lambda: 1_700_000_000.0)
        self.servers_go(for_s=3.0)
        began_s = self.world.clock.seconds()
        cap = self.world.run(Deferred.fromCoroutine(store.create()))
        self.assertGreater(self.world.clock.seconds() - began_s, 3.0)
        self.servers_go(for_s=12.0)
        change = CatalogueChange((BackupRun("src", "2026-11-22_18:23:31Z", cap.readonly()),))
        changed = self.world.run(Deferred.fromCoroutine(store.change(cap, change)))
        self.assertEqual(len(changed.runs), 1)

    def test_archives(self) -> None:
        """The directory that Tahoe-LAFS's backups are in is written later, too."""
        root = self.world.run(Deferred.fromCoroutine(create_directory(self.client.grid))).cap
        archives = Archives(self.client.grid, str(root), (), lambda: 1_700_000_000.0)
        self.world.run(Deferred.fromCoroutine(archives.prepare()))
        self.servers_go(for_s=3.0)
        run = BackupRun("src", "2026-11-22_18:23:31Z", root.readonly())
        self.world.run(Deferred.fromCoroutine(archives.keep(run)))
        found = self.world.run(Directory(self.client.grid, root).list())
        self.assertEqual(set(found), {ARCHIVES, LATEST})

    def test_servers_that_stay_away(self) -> None:
        """It gives up after a minute."""
        store = GridCatalogues(self.client.grid, lambda: 1_700_000_000.0)
        self.servers_go(for_s=None)
        began_s = self.world.clock.seconds()
        with self.assertRaises(GridError):
            self.world.run(Deferred.fromCoroutine(store.create()))
        self.assertLess(self.world.clock.seconds() - began_s, 120.0)
