"""What a restore would do, and what it may remove, on a local directory."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import SinkError, UsageError
from pipegrid.tree.backup import restore_plan
from pipegrid.tree.backup.restore_plan import (
    RestorePlan,
    RestoreRules,
    RestoreSelection,
    plan_restore,
    remove_extra,
)
from tests.tree.support import FakeGrid, Tree


class RestorePlanTests(SynchronousTestCase):
    """Plans, and removing what they say."""

    def setUp(self) -> None:
        self.target = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(shutil.rmtree, self.target, ignore_errors=True)
        self.grid = FakeGrid()

    def plan(
        self,
        tree: Tree,
        selection: RestoreSelection | None = None,
        protected: tuple[Path, ...] = (),
        **rules: Any,
    ) -> RestorePlan:
        """Return a plan that may remove."""
        found = frozenset((os.stat(each).st_dev, os.stat(each).st_ino) for each in protected)
        work = plan_restore(
            self.grid,
            self.grid.directory(tree),
            str(self.target),
            selection or RestoreSelection(),
            RestoreRules(protected=found, **rules),
        )
        return self.successResultOf(Deferred.fromCoroutine(work))

    def names(self, plan: RestorePlan) -> list[str]:
        """Return what is removed."""
        return [os.path.relpath(extra.path, self.target) for extra in plan.extras]

    def test_what_is_protected(self) -> None:
        """Stays with all that holds it, and why is noted."""
        (self.target / "a/b/client").mkdir(parents=True)
        (self.target / "c").mkdir()
        plan = self.plan({}, protected=(self.target / "a/b/client",))
        self.assertEqual(self.names(plan), ["c"])
        self.assertEqual(len(plan.left), 1)
        self.assertIn("in use by this client", plan.left[0][1])

    def test_below_what_is_not_replaced(self) -> None:
        """Nothing is written; with ``force`` it is."""
        (self.target / "a").write_bytes(b"a file")
        tree: Tree = {"a": {"b": {"c": b"content"}}}
        self.assertEqual(self.plan(tree).counts, {"blocked": 3})
        self.assertEqual(self.plan(tree, force=True).counts, {"replace": 1, "write": 2})

    def test_what_is_protected_since(self) -> None:
        """Is not removed either; nor what has taken the name of something shown."""
        for name in ("a", "b", "c"):
            (self.target / name / "x").mkdir(parents=True)
        (self.target / "f").write_bytes(b"")
        a, b, c, f = self.plan({}).extras
        status = os.stat(self.target / "a/x")
        self.assertRaises(SinkError, remove_extra, a, frozenset({(status.st_dev, status.st_ino)}))
        os.rename(self.target / "b", self.target / "moved")
        (self.target / "b").mkdir()
        self.assertIn(
            "something else", str(self.assertRaises(SinkError, remove_extra, b, frozenset()))
        )
        shutil.rmtree(self.target / "c")
        os.symlink(self.target / "moved", self.target / "c")
        self.assertRaises(SinkError, remove_extra, c, frozenset())
        (self.target / "f").unlink()
        remove_extra(f, frozenset())
        self.assertTrue((self.target / "moved/x").is_dir())

    def test_a_directory_that_was_replaced(self) -> None:
        """By a link to another one: nothing is removed there."""
        (self.target / "d").mkdir()
        (self.target / "d/extra").write_bytes(b"")
        (extra,) = self.plan({"d": {"a": b"1"}}).extras
        other = self.target / "other"
        os.rename(self.target / "d", other)
        os.symlink(other, self.target / "d")
        remove_extra(extra, frozenset())  # the same directory, by another path
        self.assertFalse((other / "extra").exists())
        (other / "extra").write_bytes(b"")
        (self.target / "d").unlink()
        os.symlink(self.target, self.target / "d")
        (self.target / "extra").write_bytes(b"")
        self.assertRaises(SinkError, remove_extra, extra, frozenset())
        self.assertTrue((self.target / "extra").exists())

    def test_links_are_not_followed(self) -> None:
        """A link where the run has a directory is none, so nothing in it counts."""
        other = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(shutil.rmtree, other)
        (other / "kept").write_bytes(b"")
        os.symlink(other, self.target / "d")
        self.assertEqual(self.names(self.plan({"d": {"a": b"1"}})), [])
        link = self.target.with_name(f"{self.target.name}-link")
        self.addCleanup(link.unlink)
        os.symlink(other, link)
        self.target = link  # but the target itself may be one, as for every restore
        self.assertEqual(self.names(self.plan({})), ["kept"])

    def test_names(self) -> None:
        """Are compared as they are restored: with their exact bytes."""
        exact = {"pipegrid": {"name_quoted": "caf%E9"}}
        with open(os.fsencode(self.target) + b"/caf\xe9", "wb"):
            pass
        (self.target / "Upper").write_bytes(b"")
        self.assertEqual(
            self.names(self.plan({"caf\ufffd": (b"", exact), "upper": b""})), ["Upper"]
        )

    def test_what_patterns_exclude_in_an_extra_directory(self) -> None:
        """Stays with the directories that lead there; only the rest is removed."""
        for path in (
            "old/a.keep",
            "old/b",
            "old/x/y/c.keep",
            "old/x/z/d",
            "gone/e",
            "new/e\u0301.x",
        ):
            (self.target / path).parent.mkdir(parents=True, exist_ok=True)
            (self.target / path).write_bytes(b"")
        plan = self.plan({}, RestoreSelection(exclude=["*.keep", "\u00e9.x"]))  # that is composed
        self.assertEqual(sorted(self.names(plan)), ["gone", "old/b", "old/x/z"])
        for extra in plan.extras:
            remove_extra(extra, frozenset())
        left = sorted(str(each.relative_to(self.target)) for each in self.target.rglob("*.*"))
        self.assertEqual(left, ["new/e\u0301.x", "old/a.keep", "old/x/y/c.keep"])

    def test_directories_of_the_client_that_the_run_has(self) -> None:
        """Nothing is removed in them, however deep; the rest of the target is made like the run."""
        for path in ("home/extra", "home/client/new", "home/client/private/aliases"):
            (self.target / path).parent.mkdir(parents=True, exist_ok=True)
            (self.target / path).write_bytes(b"")
        status = os.stat(self.target / "home/client")
        tree = {"home": {"client": {"private": {"secret": b""}, "old": b""}}}
        plan = self.plan(tree, untouched=frozenset({(status.st_dev, status.st_ino)}))
        self.assertEqual(self.names(plan), ["home/extra"])
        self.assertIn("belongs to this client", plan.left[0][1])

    def test_mounts(self) -> None:
        """Nothing is removed in what is mounted in the target, even from the same file system."""
        for path in ("d/extra", "d/mounted/kept", "e/mounted/kept", "f/x"):
            (self.target / path).parent.mkdir(parents=True)
            (self.target / path).write_bytes(b"")
        real = restore_plan._mount_of

        def mount_of(fd: int, status: os.stat_result) -> tuple[int, str]:
            is_mounted = "mounted" in os.readlink(f"/proc/self/fd/{fd}")
            return (status.st_dev, "another") if is_mounted else real(fd, status)

        extras = self.plan({"d": {"mounted": {}}, "f": {"x": b""}}).extras
        (e,) = [extra for extra in extras if extra.name == "e"]
        self.patch(restore_plan, "_mount_of", mount_of)
        plan = self.plan({"d": {"mounted": {}}, "f": {"x": b""}})
        self.assertEqual(self.names(plan), ["d/extra"])
        self.assertEqual(len(plan.left), 2)
        self.assertRaises(SinkError, remove_extra, e, frozenset())  # mounted since it was shown
        self.assertTrue((self.target / "e/mounted/kept").exists())

    def test_links_that_appear_meanwhile(self) -> None:
        """A directory that becomes a link while the plan is made is not followed."""
        other = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(shutil.rmtree, other)
        (other / "kept").write_bytes(b"")
        (self.target / "d").mkdir()
        real = os.stat
        swapped: list[Any] = []

        def stat_then_swap(path: Any, **more: Any) -> os.stat_result:
            found = real(path, **more)
            if str(path).endswith("d") and not swapped:
                swapped.append(path)
                os.rename(self.target / "d", self.target / "moved")
                os.symlink(other, self.target / "d")
            return found

        self.patch(os, "stat", stat_then_swap)
        plan = self.plan({"d": {"a": b"1"}})
        self.assertTrue((self.target / "d").is_symlink())
        self.assertNotIn("d/kept", self.names(plan))

    def test_bounds(self) -> None:
        """Too many extra entries end it."""
        self.patch(restore_plan, "MAX_EXTRAS", 3)
        for number in range(4):
            (self.target / f"{number}").write_bytes(b"")
        cap = self.grid.directory({})
        selection = RestoreSelection()
        rules = RestoreRules(protected=frozenset())
        work = plan_restore(self.grid, cap, str(self.target), selection, rules)
        self.failureResultOf(Deferred.fromCoroutine(work), SinkError)

    def test_what_cannot_be_read(self) -> None:
        """Is noted, unless it is left out anyway."""
        tree = {"d": {"a": b"1" * 100}, "e": {"b": b"2" * 100}}
        for directory in tree.values():
            self.grid.broken.add(self.grid.directory(directory).file)
        plan = self.plan(tree, RestoreSelection(exclude=["e"]))
        self.assertEqual([path for path, _ in plan.unreadable], [("d",)])

    def test_patterns(self) -> None:
        """What is wanted is what patterns include, with the directories that lead there."""
        tree = {"d": {"a.jpg": b"", "x": {"b.txt": b"", "c.jpg": b""}}, "e": {"b.txt": b""}}
        plan = self.plan(tree, RestoreSelection(["x/", "a.*"], ["c.*"]))
        for text, expected in (("d", True), ("d/x", True), ("e", False)):
            self.assertEqual(plan.wants(tuple(text.split("/")), True), expected, text)
        for text, expected in (
            ("d/a.jpg", True),
            ("d/x/b.txt", True),
            ("d/x/c.jpg", False),
            ("e/b.txt", False),
        ):
            self.assertEqual(plan.wants(tuple(text.split("/")), False), expected, text)
        self.assertTrue(self.plan(tree, RestoreSelection(["*.gif"])).is_empty)
        self.assertRaises(UsageError, RestoreSelection, ["x" * 5000])
