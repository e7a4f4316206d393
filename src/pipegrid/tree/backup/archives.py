"""
Runs of a backup under an alias, as Tahoe-LAFS's ``backup`` keeps them, so that either reads the other's:

    TO/Archives/2026-11-22_18:23:31Z   the tree of that run, which can never change
    TO/Latest                          the tree of the last one

``TO`` and ``Archives`` can be changed; they are made if they are missing. Of two runs of one second, such as
those of two machines, the later one to be kept gets the next second that is free, and notes its own.

Source: the reference on trees, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
from twisted.internet.defer import Deferred

from pipegrid.core.caps import DirectoryCap
from pipegrid.core.mutable.edits import Edit, Link, Unlink
from pipegrid.grid.grid import Grid
from pipegrid.reactor.together import together
from pipegrid.tree.backup.catalogue import (
    MAX_BYTES,
    BackupRun,
    is_time,
    parse_time,
    shown_time,
)
from pipegrid.tree.directory import Directory, check_writable
from pipegrid.tree.listing import Entry, ListingLimits, metadata_of, unpack
from pipegrid.tree.lookup import make_directories
from pipegrid.tree.metadata import KEY

ARCHIVES = "Archives"
LATEST = "Latest"


@attrs.define
class Archives:
    """
    The archives of one directory.

    Args:
        root: the cap of the directory that the path begins with.
        names: of the path; may be missing.
        now: seconds since 1970.
    """

    _grid: Grid
    _root: str
    _names: tuple[str, ...]
    _now: Callable[[], float]
    _to: Directory | None = None
    _archives: Directory | None = None

    async def prepare(self) -> None:
        """
        Find the directories, or make them.

        Raises:
            ChildExists: a file is in the way.
            CapError: one of them cannot be changed.
            PipegridError: the grid failed.
        """
        to = await make_directories(self._grid, self._root, self._names)
        check_writable(to.cap, "the directory under which the backup is to be kept")
        archives = await make_directories(self._grid, to.cap, (ARCHIVES,))
        check_writable(archives.cap, f"'{ARCHIVES}'")
        self._to = Directory(self._grid, to.cap, self._now)
        self._archives = Directory(self._grid, archives.cap, self._now)

    async def keep(self, run: BackupRun, forgotten: Sequence[BackupRun] = ()) -> None:
        """
        Keep a run, as the latest, beside all others; take out those that are forgotten, if they are still
        what they were.

        Raises:
            PipegridError: the grid failed.
        """
        to, archives = self._to, self._archives
        assert to is not None, "prepare first"
        assert archives is not None
        gone = {(each.time, each.cap) for each in forgotten}

        def choose(content: bytes) -> list[Edit]:
            entries = unpack(archives.cap, content).entries
            old = [each.name for each in entries if gone and (_time_of(each), each.cap) in gone]
            time = _free_time(run, {each.name: each for each in entries})
            noted = {} if time == run.time else {KEY: {"backup": {"time": run.time}}}
            link: Edit = Link(time, run.cap, metadata=noted)
            return [*(Unlink(name, must_exist=False) for name in old if name != time), link]

        latest: Edit = Link(LATEST, run.cap, metadata={})
        changes = (archives.change_by(choose), to.change_by(lambda _: [latest]))
        await together([Deferred.fromCoroutine(each) for each in changes])


async def archived_runs(
    grid: Grid, cap: DirectoryCap, content: bytes, name: str
) -> list[BackupRun] | None:
    """
    Return the runs that are kept below a directory, oldest first, or None if it keeps no archives.

    How many files each has is not told there.

    Args:
        content: its bytes.
        name: what the backup is called.

    Raises:
        PipegridError: the archives could not be read.
    """
    entries = unpack(cap, content, ListingLimits(MAX_BYTES)).entries
    archives = next((each for each in entries if each.name == ARCHIVES), None)
    if archives is None or not isinstance(archives.cap, DirectoryCap):
        return None
    runs = []
    for time, child in (await Directory(grid, archives.cap).list()).items():
        if isinstance(child.cap, DirectoryCap) and is_time(time):
            runs.append(BackupRun(name, time, child.cap, child.metadata, counted=False))
    return sorted(runs, key=lambda run: run.time)


def _time_of(entry: Entry) -> str:
    """Return when the run of an entry was: its name, unless another run had that already."""
    try:
        time = metadata_of(entry.metadata_json)[KEY]["backup"]["time"]
    except (KeyError, TypeError):
        return entry.name
    return time if isinstance(time, str) else entry.name


def _free_time(run: BackupRun, entries: Mapping[str, Entry]) -> str:
    """Return the first second from that of a run on in which there is no other one."""
    when = run.time
    while (there := entries.get(when)) is not None and there.cap != run.cap:
        when = shown_time(parse_time(when).timestamp() + 1)
    return when
