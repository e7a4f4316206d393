"""Copies into directories that can change, on real servers of a simulated network."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, UnknownCap
from pipegrid.errors import ChildExists, UsageError
from pipegrid.tree import copy_to_grid
from pipegrid.tree.copy_to_grid import Copier, CopyReports, Item, decide, local_items
from pipegrid.tree.directory import Child, Directory, create_directory
from tests.grid.test_mutables import GridTestCase
from tests.scratch import scratch_directory
from tests.tree.support import changing_cap

A, B = LitCap(b"a"), LitCap(b"b")
TREE = DirectoryCap(LitCap(b""))


class DecideTests(SynchronousTestCase):
    """What to do where something has the name already; pure."""

    def item(self, cap: Cap) -> Item:
        """What is on the grid."""
        return Item("x", "x", None, Child("x", cap))

    def test_decisions(self) -> None:
        """Never one thing for another of a different kind, and nothing lost without force."""
        write = changing_cap(1)
        folder = Child("x", write)
        own = Child("x", A, None)
        self.assertEqual(decide(self.item(A), None, False), "new")
        self.assertEqual(decide(self.item(A), own, False), "same")
        self.assertEqual(decide(self.item(B), own, True), "new")
        self.assertEqual(decide(self.item(TREE), Child("x", TREE), False), "same")
        for item, there, force in (
            (B, own, False),
            (TREE, own, True),
            (A, Child("x", TREE), True),
            (TREE, folder, False),  # its write cap is not known
        ):
            with self.assertRaises(ChildExists):
                decide(self.item(item), there, force)


class CopierTests(GridTestCase):
    """Whole copies."""

    def setUp(self) -> None:
        super().setUp()
        self.local = scratch_directory()
        self.addCleanup(shutil.rmtree, self.local, True)
        self.failed: list[tuple[str, str]] = []
        self.done: list[tuple[str, str]] = []
        self.directory = self.make()

    def make(self) -> Directory:
        """Return a new directory."""
        made: Directory = self.run_all(create_directory(self.grid))
        return made

    def run_all(self, work: Any) -> Any:
        """Do something."""
        return self.world.run(Deferred.fromCoroutine(work))

    def copier(self, **options: Any) -> Copier:
        """Return what copies, and notes what it says."""
        reports = CopyReports(
            lambda item, how, cap: self.done.append((item.name, how)),
            lambda label, error: self.failed.append((label, str(error))),
        )
        return Copier(self.grid, lambda path: succeed(TREE), reports, **options)

    def children(self, directory: Directory) -> dict[str, Child]:
        """List a directory."""
        found: dict[str, Child] = self.world.run(directory.list())
        return found

    def on_grid(self, directory: Directory, *names: str) -> list[Item]:
        """What is in a directory, as items."""
        children = self.children(directory)
        return [Item(name, name, None, children[name]) for name in names or children]

    def test_of_what_can_change(self) -> None:
        """A snapshot: immutable below, too; what is unknown is named and left out."""
        inner, outer = self.make(), self.make()
        file = self.world.run(self.grid.create_mutable(b"m" * 100)).cap
        self.world.run(inner.link("file", file, metadata={"kept": 1}))
        self.world.run(outer.link("inner", inner.cap))
        self.world.run(outer.link("future", UnknownCap("ro.URI:NEW:x")))
        self.world.run(outer.link("plain", A))
        self.world.run(self.directory.link("from", outer.cap))
        target = self.make()
        self.run_all(self.copier().into(target, self.on_grid(self.directory)))
        copied = self.children(target)["from"].cap
        assert isinstance(copied, DirectoryCap)
        self.assertIsInstance(copied.file, (ChkCap, LitCap))
        below = self.children(Directory(self.grid, copied))
        self.assertEqual(sorted(below), ["inner", "plain"])
        self.assertEqual([label for label, _ in self.failed], ["from/future"])
        assert below["inner"].cap is not None
        last = self.children(Directory(self.grid, below["inner"].cap))["file"]
        self.assertEqual(last.metadata, {"kept": 1})
        self.world.run(self.grid.overwrite(file, b"changed"))
        self.assertEqual(self.world.run(self.grid.read(last.cap)), b"m" * 100)

    def test_without_temporary_space(self) -> None:
        """A copy of what can change needs some; it is said where there is none, and the rest is copied."""
        file = self.world.run(self.grid.create_mutable(b"m" * 100)).cap
        self.world.run(self.directory.link("file", file))
        self.world.run(self.directory.link("plain", A))
        nowhere = FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
        self.patch(tempfile, "TemporaryFile", mock.Mock(side_effect=nowhere))
        target = self.make()
        self.run_all(self.copier().into(target, self.on_grid(self.directory)))
        self.assertEqual(list(self.children(target)), ["plain"])
        self.assertEqual([label for label, _ in self.failed], ["file"])
        self.assertIn("temporary space: No usable", self.failed[0][1])

    def test_a_directory_in_itself(self) -> None:
        """Is named, and the rest is copied."""
        self.world.run(self.directory.link("self", self.directory.cap))
        self.world.run(self.directory.link("a", A))
        target = self.make()
        items = [Item("loop", "loop", None, Child("", self.directory.cap.readonly()))]
        self.run_all(self.copier().into(target, items))
        copied = self.children(target)["loop"].cap
        assert copied is not None
        self.assertEqual(sorted(self.children(Directory(self.grid, copied))), ["a"])
        self.assertEqual([label for label, _ in self.failed], ["loop/self"])
        self.assertIn("contains itself", self.failed[0][1])

    def test_many_paths_to_few_directories(self) -> None:
        """Each is read and stored once; what it lacks is told wherever it is."""
        above = self.make()
        self.world.run(above.link("future", UnknownCap("ro.URI:NEW:x")))
        for _ in range(8):
            below, above = above, self.make()
            for name in "ab":
                self.world.run(above.link(name, below.cap))
        listed: list[Any] = []
        really_list = Directory.list

        def noting(directory: Directory) -> Any:
            listed.append(directory.cap)
            return really_list(directory)

        self.patch(Directory, "list", noting)
        item = Item("x", "x", None, Child("", above.cap))
        self.run_all(self.copier().into(self.directory, [item]))
        self.assertEqual(len(listed), 10)  # and the target
        labels = [label for label, _ in self.failed]
        self.assertEqual(labels[0], "x/a/a/a/a/a/a/a/a/future")
        self.assertEqual(labels[1:], [f"x/{'a/' * n}b" for n in range(7, -1, -1)])

    def test_many_local_files(self) -> None:
        """Are told from directories once each, and not by comparing each with all the others."""
        compared = 0

        class Compared(Item):
            def __eq__(self, other: object) -> bool:
                nonlocal compared
                compared += 1
                return self is other

            __hash__ = object.__hash__

        (self.local / "f").touch()
        items = [Compared(str(n), "f", str(self.local / "f")) for n in range(300)]
        self.run_all(self.copier().into(self.directory, items))
        self.assertEqual(len(self.children(self.directory)), 300)
        self.assertLess(compared, 1000)

    def test_into_one_that_is_there(self) -> None:
        """What is in it goes into it, each by the same rules, and what is in the way is named."""
        (self.local / "d").mkdir()
        for name in ("new", "old"):
            (self.local / "d" / name).write_text(name)
        os.symlink("old", self.local / "d/link")
        os.mkfifo(self.local / "d/pipe")
        there = self.make()
        self.world.run(self.directory.link("d", there.cap))
        item = Item("d", "d", str(self.local / "d"))
        self.run_all(self.copier().into(self.directory, [item]))
        children = self.children(there)
        self.assertEqual(sorted(children), ["link", "new", "old"])
        self.assertEqual(children["link"].metadata["pipegrid"]["link"], "old")
        self.assertEqual([label for label, _ in self.failed], ["d/pipe"])
        self.failed.clear()
        (self.local / "d/pipe").unlink()
        self.run_all(self.copier().into(self.directory, [item]))
        self.assertIn("already", self.failed[0][1])
        self.run_all(self.copier(force=True).into(self.directory, [item]))
        self.assertIn(("d", "merged"), self.done)

    def test_links_take_two_round_trips(self) -> None:
        """Of a hundred names on the grid: one to list the target, two to change it."""
        items = [Item(f"n{number}", "n", None, Child("n", A)) for number in range(100)]
        target = self.make()
        self.world.run(self.grid.read(target.cap.file))
        trips, _ = self.trips(Deferred.fromCoroutine(self.copier().into(target, items)))
        self.assertLessEqual(trips, 3.0)
        self.assertEqual(len(self.children(target)), 100)

    def test_names_that_are_the_same(self) -> None:
        """The first has the name, composed or not; the second is reported."""
        items = [
            Item("caf\u00e9", "1", None, Child("", A)),
            Item("cafe\u0301", "2", None, Child("", B)),
        ]
        self.run_all(self.copier().into(self.directory, items))
        self.assertEqual(list(self.children(self.directory)), ["caf\u00e9"])
        self.assertEqual([label for label, _ in self.failed], ["2"])

    def test_too_much(self) -> None:
        """A local directory has a bound."""
        self.patch(copy_to_grid, "MAX_ITEMS", 2)
        for name in "abc":
            (self.local / name).touch()
        with self.assertRaises(UsageError):
            local_items(str(self.local), "x")
