"""Many runs walked together: what is found and what differs, and how little is read for it."""

from __future__ import annotations

from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import DirectoryCap
from pipegrid.errors import DirectoryError, UsageError
from pipegrid.tree.backup import history_walk
from pipegrid.tree.backup.backup_search import FoundVersion, SearchedNames, search_runs
from pipegrid.tree.backup.catalogue import BackupRun
from pipegrid.tree.backup.history_walk import CachedDirectories
from pipegrid.tree.backup.tree_changes import TreeChange, TreeChangeCounts, compare_trees
from pipegrid.tree.walk_order import WalkLimits
from tests.tree.support import FakeGrid, Tree


def metadata(mtime_ns: int = 1, **more: Any) -> dict[str, Any]:
    """Return the metadata of an entry."""
    return {"pipegrid": {"mode": 0o644, "mtime_ns": mtime_ns, **more}, "mtime": mtime_ns / 1e9}


class HistoryTestCase(SynchronousTestCase):
    """Runs on a grid that only reads."""

    def setUp(self) -> None:
        self.grid = FakeGrid()
        self.unreadable: list[tuple[tuple[str, ...], str]] = []

    def finish(self, work: Any) -> None:
        """Run a coroutine to its end; all reads are answered together, as in one round trip."""
        running = Deferred.fromCoroutine(work)
        self.trips = 0
        while not running.called:
            self.trips += 1
            self.assertTrue(self.grid.release(), "it waits for nothing")
        self.successResultOf(running)

    def note(self, path: tuple[str, ...], error: Exception) -> None:
        """Note what could not be read."""
        self.unreadable.append((path, str(error)))

    def runs(self, *trees: Tree | DirectoryCap) -> list[BackupRun]:
        """Return a run for each tree."""
        caps = [
            each if isinstance(each, DirectoryCap) else self.grid.directory(each) for each in trees
        ]
        return [
            BackupRun("home", f"2026-11-{day:02}_00:00:00Z", cap) for day, cap in enumerate(caps, 1)
        ]


class SearchTests(HistoryTestCase):
    """Finding names in all runs."""

    def search(self, runs: list[BackupRun], *patterns: str, **more: Any) -> list[FoundVersion]:
        """Return what is found."""
        found: list[FoundVersion] = []
        wanted = SearchedNames(patterns, **more)
        self.finish(search_runs(self.grid, runs, wanted, found.append, self.note))
        return found

    def described(self, runs: list[BackupRun], *patterns: str, **more: Any) -> list[Any]:
        """Return what is found, and in which runs."""
        return [
            ("/".join(each.path), each.first.at.day, each.last.at.day, each.count)
            for each in self.search(runs, *patterns, **more)
        ]

    def test_versions(self) -> None:
        """Each distinct one has the first and last run that has it, and how many do."""
        one, two = b"1" * 100, b"2" * 100
        runs = self.runs(
            {"d": {"a": one, "b": one}},
            {"d": {"a": one, "b": one}},
            {"d": {"a": two, "b": one}},
            {"d": {"a": one}, "e": {"a": one}},
            {},
            {"d": {"a": {"a": two}}},
        )
        self.assertEqual(
            self.described(runs, "a"),
            [
                ("d/a", 1, 4, 3),
                ("d/a", 3, 3, 1),
                ("d/a", 6, 6, 1),
                ("d/a/a", 6, 6, 1),
                ("e/a", 4, 4, 1),
            ],
        )
        self.assertEqual(self.described(runs, "b"), [("d/b", 1, 3, 3)])
        self.assertEqual(self.described(runs, "d/"), [("d", 1, 6, 5)])
        self.assertEqual(self.described(runs, "nothing"), [])
        sizes = [each.size for each in self.search(runs, "d", "d/a")]
        self.assertEqual(sizes, [None, 100, 100, None])

    def test_patterns(self) -> None:
        """Are those of ``--exclude``: a name anywhere, or a path from the root."""
        runs = self.runs({"x": {"a.jpg": b"", "b.png": b"", "y": {"a.jpg": b""}}, "a.jpg": b""})
        for patterns, expected in (
            (["*.jpg"], ["a.jpg", "x/a.jpg", "x/y/a.jpg"]),
            (["/a.jpg"], ["a.jpg"]),
            (["x/*.jpg"], ["x/a.jpg"]),
            (["**/y/*"], ["x/y/a.jpg"]),
            (["[ab].p?g", "y/"], ["x/b.png", "x/y"]),
        ):
            found = [path for path, *_ in self.described(runs, *patterns)]
            self.assertEqual(sorted(found), expected, patterns)
        for wrong in ([], [""], ["a" * 5000]):
            work = search_runs(self.grid, runs, SearchedNames(tuple(wrong)), print, self.note)
            self.failureResultOf(Deferred.fromCoroutine(work), UsageError)

    def test_times_of_change(self) -> None:
        """Of the files, not of the runs; an unknown time fits none."""
        day = 86400 * 10**9
        tree = {"a": (b"1", metadata(day)), "b": (b"1", metadata(2 * day)), "c": b"1"}
        runs = self.runs(tree)
        self.assertEqual([path for path, *_ in self.described(runs, "*", newer_ns=2 * day)], ["b"])
        self.assertEqual([path for path, *_ in self.described(runs, "*", older_ns=2 * day)], ["a"])
        self.assertEqual(len(self.described(runs, "*")), 3)

    def test_as_one_run_after_the_other(self) -> None:
        """What is found is what separate searches of all runs find."""
        random = Random(5)
        for _ in range(30):
            trees = [self.random_tree(random, 3) for _ in range(6)]
            runs = self.runs(*trees)
            expected: dict[Any, list[int]] = {}
            for number, each in enumerate(runs, 1):
                for found in self.search([each], "a", "b/"):
                    version = found.path, None if found.size is None else found.cap
                    expected.setdefault(version, []).append(number)
            together = {
                (each.path, None if each.size is None else each.cap): (
                    each.first.at.day,
                    each.last.at.day,
                    each.count,
                )
                for each in self.search(runs, "a", "b/")
            }
            self.assertEqual(
                together, {key: (days[0], days[-1], len(days)) for key, days in expected.items()}
            )

    def random_tree(self, random: Random, depth: int) -> dict[str, Any]:
        """Return a tree of few names."""
        return {
            name: self.random_tree(random, depth - 1)
            if depth and random.random() < 0.5
            else random.choice([b"1", b"2"]) * 60
            for name in "abc"
            if random.random() < 0.8
        }

    def test_what_is_read(self) -> None:
        """100 runs of 10,000 files of which 1 % change: at most three times the reads of one run."""
        tree: dict[str, Any] = {
            f"d{number:02}": {
                f"f{file:02}": f"{number} {file} ".encode() * 20 for file in range(100)
            }
            for number in range(100)
        }
        runs = []
        for day in range(100):
            tree = {
                **tree,
                f"d{day:02}": {
                    f"f{file:02}": f"day {day} {file} ".encode() * 20 for file in range(100)
                },
            }
            runs.append(self.grid.directory(tree))
        all_runs = [
            BackupRun("home", f"2026-01-01_00:{n // 60:02}:{n % 60:02}Z", cap)
            for n, cap in enumerate(runs)
        ]
        self.grid.held = True
        before = self.grid.reads
        self.assertEqual(len(self.search(all_runs[:1], "f07")), 100)
        one, trips_of_one = self.grid.reads - before, self.trips
        before = self.grid.reads
        found = self.search(all_runs, "f07")
        every, trips = self.grid.reads - before, self.trips
        self.assertEqual((one, len(found)), (101, 199))
        self.assertLessEqual(every, 3 * one)
        self.assertLessEqual(trips, 3 * trips_of_one)

    def test_each_directory_is_read_once(self) -> None:
        """Also if it moves, is at several paths, or comes back in a later run."""
        same = {f"f{n}": b"x" * 200 for n in range(3)}
        other = {f"g{n}": b"x" * 200 for n in range(3)}
        runs = self.runs(
            {"a": same, "b": same}, {"a": other}, {"a": same}, {"moved": {"here": same}, "b": other}
        )
        self.grid.reads = 0
        self.assertEqual(len(self.search(runs, "f1")), 3)
        self.assertEqual(self.grid.reads, 4 + 2 + 1)

    def test_many_that_are_read_at_once(self) -> None:
        """As from a grid on the same machine: that many directories take no deep stack."""
        tree = {f"d{n}": {"f": b"x" * 200, "n": f"{n}".encode()} for n in range(3000)}
        self.assertEqual(len(self.search(self.runs(tree), "f")), 3000)

    def test_little_memory(self) -> None:
        """What is read in advance is bounded, and what does not fit is read again."""
        tree = {f"d{n}": {"f": b"x" * 200, "n": f"{n}".encode()} for n in range(300)}
        self.patch(history_walk, "KEPT_BYTES", 5000)
        self.patch(history_walk, "AHEAD_BYTES", 2000)
        self.grid.held = True
        runs = self.runs(tree, {**tree, "e": {"f": b"y" * 200}})
        found = self.search(runs, "f")
        self.assertEqual(len(found), 301)
        self.assertLess(self.grid.most, 40)

    def test_what_cannot_be_read(self) -> None:
        """Is reported, and everything else found; limits end a search."""
        runs = self.runs({"d": {"a": b"1" * 100}}, {"d": {"a": b"2" * 100}, "e": {"a": b"3"}})
        entry = next(iter(self.grid.directory({"a": b"1" * 100}).file for _ in "1"))
        self.grid.broken.add(entry)
        self.assertEqual(self.described(runs, "a"), [("d/a", 2, 2, 1), ("e/a", 2, 2, 1)])
        self.assertEqual([path for path, _ in self.unreadable], [("d",)])
        deep: dict[str, Any] = {"a": b""}
        for _ in range(20):
            deep = {"d": deep}
        self.unreadable.clear()
        for limits, error in (
            (WalkLimits(depth=5), None),
            (WalkLimits(objects=10), DirectoryError),
        ):
            work = search_runs(
                self.grid, self.runs(deep), SearchedNames(("a",)), print, self.note, limits=limits
            )
            running = Deferred.fromCoroutine(work)
            if error is not None:
                self.failureResultOf(running, error)
            else:
                self.successResultOf(running)
                self.assertIn("too deep", self.unreadable[0][1])

    def test_cancelled(self) -> None:
        """All reads end."""
        runs = self.runs({f"d{n}": {"f": b"x" * 200, "n": f"{n}".encode()} for n in range(30)})
        self.grid.held = True
        directories = CachedDirectories(self.grid)
        work = search_runs(
            self.grid, runs, SearchedNames(("f",)), print, self.note, directories=directories
        )
        running = Deferred.fromCoroutine(work)
        self.grid.release()
        self.assertGreater(len(self.grid.waiting), 10)
        running.cancel()
        self.failureResultOf(running)
        directories.close()
        self.assertTrue(all(answer.called for _, answer in self.grid.waiting))


class ChangesTestsOfTrees(HistoryTestCase):
    """What differs between two trees."""

    def compare(self, old: Tree, new: Tree) -> tuple[list[tuple[str, str]], TreeChangeCounts]:
        """Return the changes, and their counts."""
        changes: list[TreeChange] = []
        roots = self.grid.directory(old), self.grid.directory(new)
        self.finish(compare_trees(self.grid, *roots, changes.append, self.note))
        counts = TreeChangeCounts()
        for each in changes:
            counts.count(each)
        self.assertEqual(counts.total, len(changes))
        return [(each.how, "/".join(each.path)) for each in changes], counts

    def test_kinds(self) -> None:
        """Added, removed, changed in content, type, or metadata alone."""
        one, two = b"1" * 100, b"2" * 150
        link = (b"1" * 100, metadata(1, link="x"))
        old = {
            "a": one,
            "b": one,
            "d": {"x": one},
            "m": (one, metadata(1)),
            "t": (one, metadata()),
            "u": one,
        }
        new = {
            "a": two,
            "c": one,
            "e": {"x": {"y": one}},
            "m": (one, metadata(2)),
            "t": link,
            "u": {},
        }
        changes, counts = self.compare(old, new)
        self.assertEqual(
            changes,
            [
                *(
                    ("content", "a"),
                    ("removed", "b"),
                    ("added", "c"),
                    ("removed", "d"),
                    ("added", "e"),
                ),
                *(("metadata", "m"), ("type", "t"), ("type", "u")),
                *(("removed", "d/x"), ("added", "e/x"), ("added", "e/x/y")),
            ],
        )
        self.assertEqual(
            (counts.added, counts.removed, counts.changed, counts.metadata), (4, 3, 3, 1)
        )
        self.assertEqual((counts.added_bytes, counts.removed_bytes), (150 + 200 + 100, 500))

    def test_directories(self) -> None:
        """With other content count if more than their time differs; equal ones are not read."""
        same: dict[str, Any] = {f"d{n}": {"f": f"{n}".encode() * 200} for n in range(10)}
        old = {**same, "d": ({"a": b"1"}, metadata(1)), "e": ({"a": b"1"}, metadata(1))}
        new = {**same, "d": ({"a": b"2"}, metadata(2)), "e": ({"a": b"1"}, metadata(2))}
        new["f"] = old["f"] = {"x": {}}
        self.grid.reads = 0
        self.assertEqual(self.compare(old, new)[0], [("metadata", "e"), ("content", "d/a")])
        self.assertEqual(self.grid.reads, 2)
        self.assertEqual(self.compare(new, new), ([], TreeChangeCounts()))
        self.assertEqual(self.grid.reads, 2)

    def test_what_cannot_be_read(self) -> None:
        """Is reported, and does not count as removed."""
        old = {"d": {"a": b"1" * 100, "b": b""}, "e": b"1"}
        new = {"d": {"a": b"2" * 100, "b": b""}, "e": b"2"}
        self.grid.broken.add(self.grid.directory({"a": b"2" * 100, "b": b""}).file)
        changes, _ = self.compare(old, new)
        self.assertIn(("content", "e"), changes)
        self.assertEqual([path for path, _ in self.unreadable], [("d",)])
        self.assertNotIn(("removed", "d/a"), changes)
