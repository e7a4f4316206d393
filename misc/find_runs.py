"""
How long does ``find`` take over many runs of a backup, compared with one?

An embedded grid gets the directories of 100 runs of 10,000 files in 100 directories; each run changes the 100
files of one directory, which is 1 %. The files themselves are not stored, since ``find`` reads none. One
process searches the last run and all runs in turn, with a new cache each time; printed are the medians of
five rounds, and how many directories were read.

    python -m misc.find_runs [--runs N]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet import task
from twisted.internet.defer import Deferred

from pipegrid.core.caps import ChkCap, DirectoryCap
from pipegrid.core.packed_directory import PackedChild, pack_immutable
from pipegrid.tree.backup.backup_search import FoundVersion, SearchedNames, search_runs
from pipegrid.tree.backup.catalogue import BackupRun, shown_time
from pipegrid.tree.backup.history_walk import CachedDirectories
from pipegrid.tree.tree_grid import Grid

DIRECTORIES = 100
FILES = 100
ROUNDS = 5
PATTERN = "photo-*7.jpg"


def main(arguments: Sequence[str]) -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m misc.find_runs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, default=100)
    runs = parser.parse_args(arguments).runs
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "client"
        command = [sys.executable, "-m", "pipegrid.cli", "-q", "-d", str(home), "init", "--local"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        task.react(lambda reactor: Deferred.fromCoroutine(measure(reactor, home, runs)))


async def measure(reactor: Any, home: Path, count: int) -> None:
    """Store the directories, and search them."""
    grid = await Grid.open(reactor, str(home))
    try:
        runs = await stored_runs(grid, count)
        one, every, reads = [], [], (0, 0)
        for _ in range(ROUNDS):
            took, found_in_one, first = await searched(grid, runs[-1:])
            one.append(took)
            took, found, second = await searched(grid, runs)
            every.append(took)
            reads = first, second
    finally:
        await grid.close()
    ratio = statistics.median(every) / statistics.median(one)
    print(
        f"one run: {statistics.median(one):.3f} s, {reads[0]} directories read, {found_in_one} found\n"
        f"{count} runs: {statistics.median(every):.3f} s, {reads[1]} directories read, {found} found\n"
        f"ratio: {ratio:.2f}"
    )


async def searched(grid: Grid, runs: Sequence[BackupRun]) -> tuple[float, int, int]:
    """Search runs; return the seconds that took, how much was found, and how many directories were read."""
    found: list[FoundVersion] = []
    directories = CachedDirectories(grid)
    began = time.perf_counter()
    await search_runs(
        grid, runs, SearchedNames((PATTERN,)), found.append, refuse, directories=directories
    )
    return time.perf_counter() - began, len(found), directories.count


def refuse(path: tuple[str, ...], error: Exception) -> None:
    """Fail: nothing may be unreadable."""
    raise error


async def stored_runs(grid: Grid, count: int) -> list[BackupRun]:
    """Store the directories of all runs."""
    random = Random(1)
    named = [
        PackedChild(f"d{place:03}", await stored(grid, files(random)), metadata(place))
        for place in range(DIRECTORIES)
    ]
    runs = []
    for number in range(count):
        place = number % DIRECTORIES
        changed = await stored(grid, files(random))
        named[place] = PackedChild(f"d{place:03}", changed, metadata(1000 + number))
        root = await stored(grid, named)
        runs.append(BackupRun("home", shown_time(1_700_000_000 + 86_400 * number), root))
    return runs


def files(random: Random) -> list[PackedChild]:
    """Return the entries of the files of one directory."""
    return [
        PackedChild(
            f"photo-{number:03}.jpg",
            ChkCap(random.randbytes(16), random.randbytes(32), 3, 10, 3_000_000),
            metadata(random.randrange(10**9)),
        )
        for number in range(FILES)
    ]


def metadata(seconds: int) -> dict[str, Any]:
    """Return the metadata of an entry, as a backup stores it."""
    ours = {"mode": 0o644, "mtime_ns": seconds * 10**9}
    return {
        "mtime": float(seconds),
        "st_mode": 33188,
        "st_uid": 1000,
        "st_gid": 1000,
        "pipegrid": ours,
    }


async def stored(grid: Grid, entries: Sequence[PackedChild]) -> DirectoryCap:
    """Store a directory."""
    cap = (await grid.put(pack_immutable(entries))).cap
    assert isinstance(cap, ChkCap)
    return DirectoryCap(cap)


if __name__ == "__main__":
    main(sys.argv[1:])
