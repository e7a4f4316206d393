"""The measurement of whole trees: its trees, how a slice is scaled, what counts as met."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from misc.speedtest.trees import __main__ as trees
from misc.speedtest.trees import contents, grids
from misc.speedtest.trees.contest import FIRST, LIST, SAME, Measured, Task, table
from misc.speedtest.trees.sides import CommandFailed, Pipegrid, Runner, Took
from twisted.trial.unittest import SynchronousTestCase


class ContentsTests(SynchronousTestCase):
    """``misc/speedtest/trees/contents.py``."""

    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(shutil.rmtree, self.root)

    def test_sizes(self) -> None:
        """From 200 B to 1 MB, fifty kilobytes on average, for a slice as for the whole."""
        for count in (50, 1000):
            sizes = contents.sizes(count)
            self.assertEqual(len(sizes), count)
            self.assertGreaterEqual(min(sizes), 200)
            self.assertLessEqual(max(sizes), 1_000_000)
            self.assertLess(abs(sum(sizes) / count - 50_000), 1000)

    def test_tree(self) -> None:
        """Ten files in a directory, and ten others after a change."""
        tree, copy = self.root / "tree", self.root / "copy"
        size = contents.make_tree(tree, 30, random.Random(1))
        files = [path for path in tree.rglob("*") if path.is_file()]
        self.assertEqual(len(files), 30)
        self.assertEqual(sum(path.stat().st_size for path in files), size)
        self.assertEqual(len(list(tree.iterdir())), 3)
        shutil.copytree(tree, copy)
        contents.compare(tree, copy)
        contents.change(copy, 10, random.Random(2))
        differ = [
            path
            for path in files
            if path.read_bytes() != (copy / path.relative_to(tree)).read_bytes()
        ]
        self.assertEqual(len(differ), 10)
        self.assertRaises(RuntimeError, contents.compare, tree, copy)

    def test_a_missing_file(self) -> None:
        """Is a difference."""
        tree, copy = self.root / "tree", self.root / "copy"
        contents.make_deep(tree, 3, random.Random(1))
        shutil.copytree(tree, copy)
        (copy / "deeper" / "file1").unlink()
        self.assertRaises(RuntimeError, contents.compare, tree, copy)


class ContestTests(SynchronousTestCase):
    """``misc/speedtest/trees/contest.py``."""

    def measured(self, task: Task, ours_s: float, peer_s: float | None, scale: float) -> Measured:
        """Return one round."""
        measured = Measured(task, "theirs", 0.1, 2, constant_s=2.0, scale=scale)
        measured.ours.append(Took(ours_s, 1.0, 4.0, ""))
        if peer_s is not None:
            measured.peer.append(Took(peer_s, 1.0, 1.0, ""))
        return measured

    def test_a_slice_is_scaled(self) -> None:
        """What a tree without files takes counts once."""
        measured = self.measured(FIRST, 10.0, 12.0, 20.0)
        self.assertEqual(measured.peer_s, [202.0])
        self.assertEqual(measured.times, 20.2)
        self.assertIs(measured.met, True)
        self.assertIs(self.measured(FIRST, 11.0, 12.0, 20.0).met, False)
        self.assertIn("~202.0 s", table([measured]))
        self.assertIn("scaled", table([measured]))

    def test_what_does_not_grow_is_not_scaled(self) -> None:
        """Nor does it have to be many times as fast."""
        measured = self.measured(SAME, 1.05, 12.0, 20.0)
        self.assertEqual(measured.peer_s, [12.0])
        self.assertIs(measured.met, True)
        self.assertIs(self.measured(SAME, 1.2, None, 1.0).met, False)

    def test_nothing_is_promised_without_a_peer(self) -> None:
        """On servers of ours it is said against the ideal: a round trip, and the processors' time."""
        measured = self.measured(FIRST, 3.0, None, 1.0)
        self.assertIsNone(measured.met)
        self.assertEqual(measured.ideal_s, 2.6)

    def test_beyond_something(self) -> None:
        """A listing counts beyond its bytes."""
        measured = self.measured(LIST, 1.0, None, 1.0)
        measured.beyond.append(Took(0.95, 1.0, 1.0, ""))
        self.assertIs(measured.met, True)
        self.assertIn("met", table([measured]))


class CommandTests(SynchronousTestCase):
    """How commands are run, and what may be asked for."""

    def test_a_command_that_fails_gives_no_figure(self) -> None:
        """It is told with what it said."""
        runner = Runner(lambda: 0.0)
        self.assertEqual(runner.run(["echo", "a cap"]).said, "a cap")
        with self.assertRaises(CommandFailed) as caught:
            runner.run(["sh", "-c", "echo it broke >&2; exit 4"])
        self.assertIn("status 4: it broke", str(caught.exception))

    def test_a_round_begins_with_nothing(self) -> None:
        """Servers lose their shares, and the client what it knows of the list of backups that was there."""
        home = Path(self.mktemp())
        backups, store = home / "private" / "backup", home / "shares"
        for path in (backups, store / "incoming", store / "aa"):
            path.mkdir(parents=True)
        side = Pipegrid(home, Runner(lambda: 0.0))
        grids.World("ours", (store,), side, None).forget()
        self.assertFalse(backups.exists())
        self.assertEqual([path.name for path in store.iterdir()], ["incoming"])

    def test_who_can_lose_shares(self) -> None:
        """Only a server that has some: a repair may have put elsewhere what one lost before."""
        stores = tuple(Path(self.mktemp()) for _ in range(3))
        for store in stores:
            (store / "incoming" / "aa" / "aaindex").mkdir(parents=True)
        (stores[1] / "aa" / "aaindex").mkdir(parents=True)
        (stores[1] / "aa" / "aaindex" / "0").touch()
        (stores[2] / "aa" / "aaindex").mkdir(parents=True)
        side = Pipegrid(Path(self.mktemp()), Runner(lambda: 0.0))
        self.assertEqual(grids.World("ours", stores, side, None).holding(), [1])

    def test_options(self) -> None:
        """A peer takes part in every round, and in all of the tree, unless one says otherwise."""
        options = trees._options(["--files", "100"])
        self.assertEqual((options.peer_files, options.peer_rounds), (100, 3))
        self.assertEqual((options.protocol, options.against), ("https", "https"))
        options = trees._options(["--tiny", "--only", "first,same"])
        self.assertEqual((options.rounds, options.only), (1, ["first", "same"]))

    def test_commands_are_compiled_beforehand(self) -> None:
        """As installed ones are, or else each would compile what it imports, in its own time."""
        happened: list[str] = []

        def starting(*arguments: Any) -> Any:
            happened.append("servers")
            raise CommandFailed

        self.patch(trees, "end_on_sigterm", lambda: None)
        self.patch(trees, "compile_package", lambda: happened.append("compiled"))
        self.patch(grids, "ours", starting)
        self.assertRaises(CommandFailed, trees.main, ["--servers", "ours"])
        self.assertEqual(happened, ["compiled", "servers"])
