"""
Trees and mutable files whose user gives up at a random moment: what is left, and what a rerun makes of it.

A seed says what is done, to which tree, and when it is cancelled: after so many turns of virtual time, or
from within, in a callback of its own.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import DirectoryCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.disk.atomic_write import SUFFIX
from pipegrid.errors import PipegridError
from pipegrid.testing.network import Hung
from pipegrid.tree import upload_journal, upload_queue
from pipegrid.tree.backup.backup_run import BackupOptions, Backups
from pipegrid.tree.directory import Directory, create_directory
from pipegrid.tree.tree_grid import Trees
from pipegrid.tree.tree_upload import NOTES_NAME, TreeReports
from tests.descriptors import open_files
from tests.scratch import scratch_directory
from tests.simulation.grid_world import GridWorld

PARAMS = Params(required_shares=2, total_shares=4, max_segment_bytes=64 << 10)
HAPPY = 3
ENDS_S = 200.0
"""What was cancelled has to end within this; servers that say nothing are waited for meanwhile."""

Content = dict[str, "bytes | str | None"]
Begin = Callable[[Callable[[], None]], Deferred[Any]]
"""Begins work, which calls what it is given now and then."""


def content_of(root: Path) -> Content:
    """Return all that is in a directory: bytes of files, texts of links, None for directories."""
    found: Content = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


class CancelledWork:
    """
    One seed; ``check`` raises AssertionError if something is wrong. Close it at the end.

    Attributes:
        done: what it was, for the statistics: the work, and whether it was really cancelled.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.done = ""
        self.scratch = scratch_directory()
        self.root, self.target = self.scratch / "root", self.scratch / "target"
        self.cache = self.scratch / "cache"
        self.cache.mkdir()
        self.world = GridWorld(5, latency_s=0.02, seed=seed, bytes_per_s=2_000_000)
        self._make_tree()
        self.grid: Any = None
        self._new_client()

    def close(self) -> None:
        """Remove everything."""
        self.world.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _new_client(self) -> None:
        """Another process of the same user."""
        client = self.world.client(params=PARAMS, happy=HAPPY)
        self.grid = client.grid
        self.grid.config = attrs.evolve(self.grid.config, caches=(self.cache,))
        self.trees = Trees(self.grid)

    def _make_tree(self) -> None:
        random = self.random
        self.root.mkdir()
        places = [self.root]
        for number in range(random.randrange(1, 6)):
            places.append(random.choice(places) / f"d{number}")
            places[-1].mkdir()
        for number in range(random.randrange(1, 20)):
            size = random.choice((0, 10, 500, 5000, 70_000))
            (random.choice(places) / f"f{number}").write_bytes(random.randbytes(size))
        for number in range(random.randrange(3)):
            size = random.choice((150_000, 600_000))
            (random.choice(places) / f"large{number}").write_bytes(random.randbytes(size))
        (random.choice(places) / "link").symlink_to("f0")
        for path in self.root.rglob("*"):
            os.utime(path, (1e9, 1e9), follow_symlinks=False)

    # One seed.

    def check(self) -> None:
        """Do it, cancel it, look at what is left, and do it again."""
        kinds = (self.put, self.get, self.backup, self.maintain, self.change, self.overwrite)
        kind = self.random.choice(kinds)
        begin, whole = kind()
        files = self._open_files()
        for _ in range(self.random.choice((1, 1, 3))):
            cancelled = self._cancel(begin)
            self.done = f"{kind.__name__} {'cancelled' if cancelled else 'ended'}"
            gc.collect()
            left = self._open_files() - files
            assert not left, f"open: {left}"
            assert not self.grid._running, self.grid._running
            if self.random.random() < 0.5:
                self.world.run(self.grid.close())
                self._new_client()
        result = self.world.run(begin(lambda: None))
        whole(result)
        left = self._open_files() - files
        assert not left, f"open: {left}"
        assert not list(self.scratch.rglob(f"*{SUFFIX}")), "a part was left"
        leaks = self.world.leaks()
        assert not leaks, leaks

    def _open_files(self) -> set[str]:
        """Return which of the user's files are open."""
        return {path for _, path in open_files() if path.startswith(str(self.scratch))}

    def _cancel(self, begin: Begin) -> bool:
        """Begin, give up at some moment, wait for the end; returns whether it was cancelled."""
        outcome: list[Any] = []
        calls = [0]
        within = self.random.random() < 0.3
        at_call = self.random.randrange(1, 12) if within else 0

        def called() -> None:
            calls[0] += 1
            if calls[0] == at_call and begun:
                begun[0].cancel()

        begun: list[Deferred[Any]] = []
        running = begin(called)
        begun.append(running)
        running.addBoth(outcome.append)
        turns = int(2 ** self.random.uniform(0, 11))
        crash = self.random.choice((None, None, self.random.randrange(1, turns + 1)))
        down: Any = None
        while not outcome and turns > 0:
            turns -= 1
            self.world.clock.step()
            if turns == crash:
                down = self.random.choice(self.world.servers).host
                down.crash()
        running.cancel()
        end_s = self.world.clock.seconds() + ENDS_S
        while not outcome:
            assert self.world.clock.seconds() < end_s, "it does not end"
            self.world.clock.step()
        if down is not None:
            down.restart()
        result = outcome[0]
        if isinstance(result, Failure):
            error = result.value
            assert isinstance(error, (CancelledError, PipegridError)), result.getTraceback()
            assert isinstance(error, CancelledError), f"it ended with {error!r}"
            return True
        return False

    # What is done: how it begins, and what has to be true of its result when it was not cancelled.

    def _finish(self, waiting: Deferred[Any]) -> Any:
        try:
            return self.world.run(waiting)
        except Hung as hung:
            raise AssertionError(str(hung)) from hung

    def _stored(self) -> DirectoryCap:
        result = self._finish(self.trees.put_tree(self.root))
        assert isinstance(result.cap, DirectoryCap)
        return result.cap

    def _fetched(self, cap: Any) -> Content:
        place = self.scratch / "fetched"
        result = self._finish(self.trees.get_tree(cap, place))
        assert not result.failed
        found = content_of(place)
        shutil.rmtree(place)
        return found

    def put(self) -> tuple[Begin, Callable[[Any], None]]:
        """``put -r``."""

        def begin(called: Callable[[], None]) -> Deferred[Any]:
            reports = TreeReports(progress=lambda counts: called())
            return self.trees.put_tree(self.root, reports=reports)

        def whole(result: Any) -> None:
            assert not result.counts.left_out
            assert self._fetched(result.cap) == content_of(self.root)
            assert not os.listdir(self.cache / NOTES_NAME), "notes of a put that has ended"

        return begin, whole

    def get(self) -> tuple[Begin, Callable[[Any], None]]:
        """``get -r``."""
        cap = self._stored()
        paranoid = self.random.random() < 0.3

        def begin(called: Callable[[], None]) -> Deferred[Any]:
            return self.trees.get_tree(
                cap,
                self.target,
                paranoid=paranoid,
                progress=lambda done, total: called(),
                done=lambda path, how, size: called(),
            )

        def whole(result: Any) -> None:
            assert not result.failed
            assert content_of(self.target) == content_of(self.root)

        return begin, whole

    def backup(self) -> tuple[Begin, Callable[[Any], None]]:
        """``backup``."""
        now = [1e9 + 1e6]

        def begin(called: Callable[[], None]) -> Deferred[Any]:
            now[0] += 1e5
            reports = TreeReports(progress=lambda counts: called())
            run = Backups(self.grid, now=lambda: now[0]).run(
                str(self.root), "home", BackupOptions(), reports
            )
            return self.grid._start(run)  # type: ignore[no-any-return]

        def whole(result: Any) -> None:
            assert not result.problems, result.problems
            runs = self._finish(Deferred.fromCoroutine(Backups(self.grid).runs()))
            assert result.run in runs
            for run in runs:
                assert self._fetched(run.cap) == content_of(self.root)

        return begin, whole

    def maintain(self) -> tuple[Begin, Callable[[Any], None]]:
        """``check -r``, ``repair -r`` and ``renew -r``."""
        cap = self._stored()
        shutil.rmtree(self.world.servers[0].root / "shares")
        option = self.random.choice(("verify", "add_lease", "repair", "renew"))
        todo: dict[str, Any] = {option: True}

        def begin(called: Callable[[], None]) -> Deferred[Any]:
            return self.trees.check_tree(cap, ended=lambda met, outcome: called(), **todo)

        def whole(result: Any) -> None:
            assert not result.failed, result
            if option == "repair":
                checked = self._finish(self.trees.check_tree(cap, verify=True))
                assert checked.healthy == checked.objects, checked

        return begin, whole

    def change(self) -> tuple[Begin, Callable[[Any], None]]:
        """Names that are put into a directory which can be changed."""
        made = self._finish(Deferred.fromCoroutine(create_directory(self.grid, "sdmf")))
        cap, began = made.cap, [0]

        def begin(called: Callable[[], None]) -> Deferred[Any]:
            began[0] += 1
            return Directory(self.grid, cap).put(f"name {began[0]}", b"x" * 1000)

        def whole(_: Any) -> None:
            there = self._finish(Directory(self.grid, cap).list())
            assert f"name {began[0]}" in there, there
            for child in there.values():
                assert self._finish(self.grid.read(child.cap)) == b"x" * 1000

        return begin, whole

    def overwrite(self) -> tuple[Begin, Callable[[Any], None]]:
        """A mutable file that gets one content after the other."""
        kind = self.random.choice(("sdmf", "mdmf"))
        size = self.random.choice((10, 5000, 600_000))
        contents = [bytes([65 + number]) * (size + number) for number in range(9)]
        made = self._finish(self.grid.create_mutable(contents[0], format=kind))
        began = [0]

        def begin(called: Callable[[], None]) -> Deferred[Any]:
            began[0] += 1
            number = began[0]

            def function(old: bytes) -> bytes:
                assert old in contents[:number]
                called()
                return contents[number]

            if kind == "mdmf" and number % 2:
                return self.grid.overwrite(made.cap, contents[number])  # type: ignore[no-any-return]
            return self.grid.modify(made.cap, function)  # type: ignore[no-any-return]

        def whole(_: Any) -> None:
            assert self._finish(self.grid.read(made.cap)) == contents[began[0]]

        return begin, whole


def written_soon(patch: Callable[[Any, str, Any], Any]) -> None:
    """Have a put of a tree note what it has stored at once, and store few things at a time."""
    patch(upload_journal, "MAX_UNWRITTEN", 3)
    patch(upload_queue, "MAX_OBJECTS", 16)
