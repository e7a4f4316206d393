"""The list of backup runs, and the ``Archives`` directory of runs in the layout of Tahoe-LAFS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import lru_cache, partial
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from pipegrid.core import clamped_dates
from pipegrid.core.caps import DirectoryCap
from pipegrid.core.mutable.directory_content_edits import Edit, Link, Unlink
from pipegrid.errors import DirectoryError, UsageError
from pipegrid.grid.file_grid import Grid
from pipegrid.reactor.deferreds import gather
from pipegrid.tree.directory import Directory, check_writable, make_directories
from pipegrid.tree.directory_reading import Entry, ListingLimits, metadata_of, unpack
from pipegrid.tree.file_metadata import KEY
from pipegrid.tree.retry_queue import with_retries

# The list of all runs of a client's backups is a directory on the grid, so that one cap restores all runs.
# This part does no input or output.
#
# Each run is an entry, named after the backup and its time, ``home 2026-11-22_18:23:31Z``, with the cap of
# the root of its tree. So every program that reads directories, including Tahoe-LAFS, lists the runs and
# their content. The metadata of the entry is that of the root, with the details of the run under ``backup``
# in ``pipegrid``.
#
# The directory is mutable, so its cap stays the same, and several machines may share it: a run changes the
# directory by edits, which apply to any content. Entries that are not runs stay. In earlier versions each
# list was a separate immutable directory; these lists can still be read.

MAX_BYTES = 64 << 20
TIME_FORMAT = "%Y-%m-%d_%H:%M:%SZ"


@attrs.frozen
class Machine:
    """
    The machine on which a run was made.

    Attributes:
        id: unique to the machine; empty: unknown, as in runs of earlier versions.
        name: the host name at the time of the run.
    """

    id: str = ""
    name: str = attrs.field(default="", eq=False)


@attrs.frozen
class BackupRun:
    """
    One stored state of a directory.

    Attributes:
        name: the name of the backup.
        time: when the run was stored, in UTC, as in ``2026-11-22_18:23:31Z``.
        cap: the cap of the root of the tree.
        metadata: the metadata of the root.
        files, bytes: the number of files in the tree, and their size.
        left_out: number of entries that should be in the tree but are not.
        directory: the absolute path that was stored, printable; empty: unknown.
        machine: the machine on which the run was made.
        counted: whether ``files``, ``bytes`` and ``left_out`` are known; they are not for runs in
            ``Archives``.
        tags: tags that the user has given the run.
    """

    name: str
    time: str
    cap: DirectoryCap
    metadata: dict[str, Any] = attrs.field(factory=dict, eq=False, repr=False)
    files: int = 0
    bytes: int = 0
    left_out: int = 0
    directory: str = ""
    machine: Machine = Machine()
    counted: bool = attrs.field(default=True, eq=False)
    tags: tuple[str, ...] = attrs.field(default=(), eq=False)

    @property
    def at(self) -> datetime:
        """The ``time`` of the run as a datetime, in UTC."""
        return parse_time(self.time)


def entry_name(run: BackupRun) -> str:
    """Return the name of a run's entry in the catalogue."""
    return f"{run.name} {run.time}"


def entry_of(run: BackupRun) -> Link:
    """Return the edit that lists a run; if two runs have the same name and second, the later edit counts."""
    ours = dict(run.metadata.get(KEY) or {})
    ours["backup"] = {
        "name": run.name,
        "time": run.time,
        "files": run.files,
        "bytes": run.bytes,
        "left_out": run.left_out,
        **({"directory": run.directory} if run.directory else {}),
        **({"machine": run.machine.id, "host": run.machine.name} if run.machine.id else {}),
        **({"tags": list(run.tags)} if run.tags else {}),
    }
    return Link(entry_name(run), run.cap, metadata={**run.metadata, KEY: ours})


def runs_of(cap: DirectoryCap, content: bytes) -> list[BackupRun]:
    """
    Return the runs that a catalogue lists, oldest first.

    Args:
        cap: a read or write cap of the catalogue.
        content: the bytes of the directory.

    Raises:
        DirectoryError: the content is not a directory, or has entries but no run.
    """
    return list(_runs_of(cap, content))


@lru_cache(maxsize=2)  # one backup run calls this six times
def _runs_of(cap: DirectoryCap, content: bytes) -> tuple[BackupRun, ...]:
    entries = unpack(cap, content, ListingLimits(MAX_BYTES)).entries
    runs = []
    for entry in entries:
        metadata = entry.metadata
        ours = metadata.get(KEY)
        said = ours.get("backup") if isinstance(ours, dict) else None
        if not isinstance(said, dict) or not isinstance(entry.cap, DirectoryCap):
            continue
        assert isinstance(ours, dict)
        name, _, time = entry.name.rpartition(" ")
        try:
            parse_time(time)
        except UsageError:
            continue
        kept = {key: value for key, value in metadata.items() if key not in (KEY, "tahoe")}
        kept[KEY] = {key: value for key, value in ours.items() if key != "backup"}
        files, size, left_out = (_count(said.get(key)) for key in ("files", "bytes", "left_out"))
        directory, machine, host = (
            _text(said.get(key)) for key in ("directory", "machine", "host")
        )
        where = Machine(machine, host)
        run = BackupRun(name, time, entry.cap, kept, files, size, left_out, directory, where)
        tags = said.get("tags")
        if isinstance(tags, list):
            run = attrs.evolve(run, tags=tuple(each for each in tags if isinstance(each, str)))
        runs.append(run)
    if entries and not runs:
        raise DirectoryError(
            "this directory is not a catalogue of backups; to fetch it use 'pipegrid get -r'"
        )
    return tuple(sorted(runs, key=lambda run: (run.time, run.name)))


def shown_time(seconds: float) -> str:
    """Return a time (seconds since 1970) in the format of ``BackupRun.time``."""
    return clamped_dates.utc(seconds).strftime(TIME_FORMAT)


def own_time(name: str, now: float, runs: Iterable[BackupRun]) -> str:
    """Return the time for a new run: now, or the next second that no other run of this name has."""
    taken = {run.time for run in runs if run.name == name}
    while (when := shown_time(now)) in taken:
        now += 1
    return when


def warning_of_later_runs(run: BackupRun, listed: Iterable[BackupRun]) -> str:
    """
    Return a warning if a listed run has a later time than the run just stored; otherwise an empty string.
    """
    later = max((each.time for each in listed if each.name == run.name), default="")
    if later <= run.time:
        return ""
    return (
        f"a listed run of {run.name!r} has the time {later}, later than this one's, {run.time}: "
        "some clock is or was wrong; 'latest' and 'restore' leave out runs more than an hour in the future"
    )


def warning_of_no_files(run: BackupRun, listed: Iterable[BackupRun]) -> str:
    """
    Return a warning if the run just stored has no files, but an earlier run has; otherwise an empty string.
    """
    same = (each for each in listed if each.name == run.name and each.machine.id == run.machine.id)
    before = max((each for each in same if each.files), key=lambda each: each.time, default=None)
    if run.files or before is None:
        return ""
    return (
        f"this run of {run.name!r} has no file, and that of {before.time} has {before.files}: mount the "
        f"disk, if one is missing; a restore takes that run with '--at {before.time}'"
    )


def is_time(text: str) -> bool:
    """Return whether a text is exactly a time in the format of ``BackupRun.time``."""
    try:
        datetime.strptime(text, TIME_FORMAT)
    except ValueError:
        return False
    return True


def parse_time(text: str) -> datetime:
    """
    Parse a time in UTC, in the format of runs or a shorter one (``2026-11-22``, ``2026-11-22_18:23``); ``T``
    or a space may replace ``_``. A shorter text means the last second of that day or minute.

    Raises:
        UsageError: the text is not a time.
    """
    bare = text.strip().removesuffix("Z").replace("T", "_").replace(" ", "_")
    for form, rest in (
        ("%Y-%m-%d_%H:%M:%S", {}),
        ("%Y-%m-%d_%H:%M", {"second": 59}),
        ("%Y-%m-%d", {"hour": 23, "minute": 59, "second": 59}),
    ):
        try:
            found = datetime.strptime(bare, form)
        except ValueError:
            continue
        return found.replace(tzinfo=timezone.utc, **rest)
    raise UsageError(
        f"{text!r} is not a time; give one such as 2026-11-22 or 2026-11-22_18:23:31Z (UTC)"
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int:
    return int(value) if type(value) is int and value >= 0 else 0


# Runs of a backup are also kept under an alias, in the layout of Tahoe-LAFS's ``backup``, so that either
# program reads the runs of the other:
#
#     TO/Archives/2026-11-22_18:23:31Z   the tree of that run, immutable
#     TO/Latest                          the tree of the last run
#
# ``TO`` and ``Archives`` are mutable, and are created if they are missing. If two runs have the same second,
# such as runs of two machines, the run that is stored later gets the next free second as its name, and its
# own time goes into the metadata.

ARCHIVES = "Archives"
LATEST = "Latest"


class Archives:
    """
    The ``Archives`` of one directory on the grid.

    Args:
        root: the cap of the directory at which the path begins.
        names: the names of the path; the directories may be missing.
        now: returns the seconds since 1970.
    """

    __slots__ = ("_archives", "_grid", "_names", "_now", "_root", "_to")

    def __init__(
        self,
        grid: Grid,
        root: str,
        names: tuple[str, ...],
        now: Callable[[], float],
    ) -> None:
        self._grid = grid
        self._root = root
        self._names = names
        self._now = now
        self._to: Directory | None = None
        self._archives: Directory | None = None

    async def prepare(self) -> None:
        """
        Find the directories, or create them.

        Raises:
            ChildExists: a file has the name of a directory.
            CapError: a directory cannot be changed.
            PipegridError: the grid failed.
        """
        to = await make_directories(self._grid, self._root, self._names)
        check_writable(to.cap, "the directory that keeps the backup")
        archives = await make_directories(self._grid, to.cap, (ARCHIVES,))
        check_writable(archives.cap, f"'{ARCHIVES}'")
        self._to = Directory(self._grid, to.cap, self._now)
        self._archives = Directory(self._grid, archives.cap, self._now)

    async def keep(self, run: BackupRun, forgotten: Sequence[BackupRun] = ()) -> None:
        """
        Add a run as the latest, and remove forgotten runs whose entries still have the same cap. Both writes
        are retried if servers were unreachable.

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
        changes = (partial(archives.change_by, choose), partial(to.change_by, lambda _: [latest]))
        clock = self._grid.clock
        await gather([Deferred.fromCoroutine(with_retries(clock, each)) for each in changes])


async def archived_runs(
    grid: Grid, cap: DirectoryCap, content: bytes, name: str
) -> list[BackupRun] | None:
    """
    Return the runs in ``Archives`` of a directory, oldest first, or None if it has no ``Archives``.

    The number of files in each run is unknown.

    Args:
        content: the bytes of the directory.
        name: the name that the runs get.

    Raises:
        PipegridError: ``Archives`` could not be read.
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
    """Return the time of an entry's run: the name of the entry, unless its metadata has a time."""
    try:
        time = metadata_of(entry.metadata_json)[KEY]["backup"]["time"]
    except (KeyError, TypeError):
        return entry.name
    return time if isinstance(time, str) else entry.name


def _free_time(run: BackupRun, entries: Mapping[str, Entry]) -> str:
    """Return the time of a run, or the next second that is not the name of another run."""
    when = run.time
    while (there := entries.get(when)) is not None and there.cap != run.cap:
        when = shown_time(parse_time(when).timestamp() + 1)
    return when
