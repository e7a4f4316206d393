"""``pipegrid find`` and ``diff``: search the runs of backups, and compare two runs."""

from __future__ import annotations

import shlex
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pipegrid.cli import cap_lookup, cmd_backups_restore
from pipegrid.cli.command_job import GridJob, Invocation, OpenGrid
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, worst_status
from pipegrid.cli.options import EMPTY_NAME, gathered, grid_options, grid_path, usage_error
from pipegrid.core import caps, clamped_dates
from pipegrid.core.text import amount, counted, printable
from pipegrid.errors import NoSuchChild, UsageError
from pipegrid.tree import directory_reading, grid_paths
from pipegrid.tree.backup import backup_search, history_walk, run_paths, run_times, tree_changes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipegrid.tree.backup.catalogue import BackupRun
    from pipegrid.tree.grid_paths import PathEnd
    from pipegrid.tree.tree_grid import Grid
    from pipegrid.tree.walk_order import TreePath


# ``pipegrid find``: finds files by their names in all runs.


class FindOptions(NamedTuple):
    """The options of ``find``; see their declarations."""

    name: str | None
    at: str | None
    newer: str | None
    older: str | None
    catalogue: str | None


@click.command(name="find")
@click.argument("patterns", nargs=-1, required=True, metavar="PATTERN...")
@click.option("--as", "name", metavar="NAME", help="Search only the backup NAME.  [default: all]")
@click.option(
    "--at",
    metavar="TIME",
    help="Search only the newest run of each backup up to TIME.  [default: all]",
)
@click.option(
    "--newer",
    metavar="TIME",
    help="Only files that were changed at TIME, such as 2026-11-22 or 3d, or later.",
)
@click.option("--older", metavar="TIME", help="Only files that were changed before TIME.")
@click.option(
    "--in",
    "catalogue",
    metavar="CAP",
    help="Search the backups of another catalogue, as 'backups' takes it.",
    shell_complete=grid_path,
)
@grid_options
@gathered("options", FindOptions)
def find_command(patterns: tuple[str, ...], options: FindOptions) -> GridJob:
    """
    Find files by their names in all runs of backups.

    A PATTERN is as for 'backup --exclude': '*.jpg' is a name in any directory, 'docs/*.txt' a path from the
    root of the backup, '**/old/' a directory. Each version of a file is one line: its path in the newest run
    that has it, which 'get' and 'cat' take, its size, when it was changed, and the runs that have it. What
    several runs share is read once.

    The exit status is 1 if nothing was found.
    """
    if "" in patterns:
        raise usage_error(f"PATTERN: {EMPTY_NAME}")

    async def work(grid: Grid, console: Console) -> int:
        now = time.time()
        wanted = _wanted(patterns, options, now)
        runs = await cmd_backups_restore.listed_runs(grid, console, options.catalogue, some=True)
        series = _series(runs, options, now)
        printer = _FoundPrinter(console, options.catalogue is None)
        with closing(history_walk.CachedDirectories(grid)) as directories:
            for each in series:
                await backup_search.search_runs(
                    grid, each, wanted, printer.found, printer.unreadable, directories=directories
                )
        if printer.statuses:
            return worst_status(printer.statuses)
        if not printer.count:
            searched = counted(sum(map(len, series)), "run")
            shown = ", ".join(f"'{printable(each)}'" for each in patterns[:5])
            console.note(f"nothing in {searched} matches {shown}")
            return ExitStatus.FAILED
        return ExitStatus.DONE

    return GridJob(work, options.catalogue or "", makes=False)


def _wanted(
    patterns: tuple[str, ...], options: FindOptions, now: float
) -> backup_search.SearchedNames:
    """
    Return the names and times to search for.

    Raises:
        UsageError: a pattern or time is malformed.
    """

    def since_1970(text: str | None) -> int | None:
        if text is None:
            return None
        return int(run_times.parse_span(text, now).first.timestamp()) * 10**9

    wanted = backup_search.SearchedNames(
        patterns, since_1970(options.newer), since_1970(options.older)
    )
    wanted.matcher()
    return wanted


def _series(runs: Sequence[BackupRun], options: FindOptions, now: float) -> list[list[BackupRun]]:
    """
    Return the runs to search, one list for each backup, the oldest run first; with ``--at``, only one run of
    each backup.

    Raises:
        UsageError: the backup that was named does not exist, or no backup has a run as old as ``--at`` says.
    """
    names = sorted({run.name for run in runs}) if options.name is None else [options.name]
    if options.at is None:
        found = [run_paths.runs_called(runs, name) for name in names]
        return [sorted(each, key=lambda run: run.at) for each in found]
    chosen = []
    for name in names:
        try:
            chosen.append([run_paths.choose_run(runs, name, options.at, now).run])
        except UsageError:  # noqa: PERF203
            if len(names) == 1:
                raise
    if not chosen:
        raise UsageError(f"no backup has a run as old as '{printable(options.at)}'")
    return chosen


class _Printer:
    """Reports directories that cannot be read; ``statuses`` are the exit statuses of their errors."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.statuses: set[ExitStatus] = set()

    def unreadable(self, path: TreePath, error: Exception) -> None:
        """Report a directory that cannot be read."""
        self.statuses.add(
            self._console.failed(error, cap_lookup.shown_path(path), {"path": list(path)}, True)
        )


class _FoundPrinter(_Printer):
    """
    Prints versions of files; ``count`` is how many were printed.

    Args:
        own: whether the runs are in this client's catalogue, so that NAME@TIME leads to them.
    """

    def __init__(self, console: Console, own: bool) -> None:
        super().__init__(console)
        self._own = own
        self.count = 0

    def found(self, version: backup_search.FoundVersion) -> None:
        """Print one version, as a line or as JSON."""
        self.count += 1
        root = run_paths.run_path_text(version.last) if self._own else f"{version.last.cap}/"
        place = root + printable("/".join(version.path))
        shown = shlex.quote(place) + ("/" if version.kind == "directory" else "")
        what = [] if version.size is None else [amount(version.size)]
        if version.mtime_ns is not None:
            changed = run_times.run_time_text(clamped_dates.utc(version.mtime_ns // 10**9))
            what.append(f"changed {changed}")
        runs = counted(version.count, "run")
        if version.count > 1:
            runs += f" since {run_times.run_time_text(version.first.at)}"
        self._console.result(
            f"{shown}  {', '.join([*what, runs])}",
            {
                "place": place,
                "name": version.last.name,
                "path": list(version.path),
                "type": version.kind,
                "cap": None if version.cap is None else str(version.cap),
                "size": version.size,
                "mtime_ns": version.mtime_ns,
                "first": version.first.time,
                "last": version.last.time,
                "runs": version.count,
            },
        )


# ``pipegrid diff``: shows what differs between two runs.

_MARKS = {"added": "+", "removed": "-", "content": "M", "type": "T", "metadata": "U"}


class _DiffJob(GridJob):
    """A job whose status is 1 only if the trees differ; an error that would give status 1 gives status 2."""

    differs = False

    async def run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        """Do the work, and return the status; errors and cancellation are printed as a sentence."""
        status = await super().run(invocation, reactor, open_grid)
        return ExitStatus.USAGE if status == ExitStatus.FAILED and not self.differs else status


@click.command(name="diff")
@click.argument("old", metavar="RUN", shell_complete=grid_path)
@click.argument("new", metavar="RUN", shell_complete=grid_path)
@click.argument("path", metavar="[PATH]", required=False)
@click.option("--as", "name", metavar="NAME", help="The backup of a RUN that is only a time.")
@grid_options
def diff_command(old: str, new: str, path: str | None, name: str | None) -> GridJob:
    """
    Show what differs between two runs of a backup, or below PATH in them.

    A RUN is NAME@TIME, or any CAP or ALIAS:some/path of a directory. A TIME alone, such as yesterday or
    2026-11-22, means the NAME of the other RUN, or the only backup.

    A line begins with + (added), - (removed), M (content changed), T (has become a directory, file or link),
    or U (only permissions or time changed). Directories that are equal are not read.

    The exit status is 0 if nothing differs, 1 if something does, and 2 or more after an error.
    """
    if "" in (old, new, path):
        raise usage_error(f"RUN or PATH: {EMPTY_NAME}")
    names = tuple(part for part in (path or "").split("/") if part)

    async def work(grid: Grid, console: Console) -> int:
        finder = run_paths.RunFinder(grid, console.note)
        called = name or _name_in(old, grid) or _name_in(new, grid)
        ends = [await _end_of(grid, finder, text, names, called) for text in (old, new)]
        if ends == [None, None]:
            shown = printable("/".join(names))
            raise NoSuchChild(f"there is no '{shown}' in either; check the path", names[-1])
        printer = _ChangePrinter(console)
        await _compare(grid, ends[0], ends[1], names, printer)
        job.differs = bool(printer.counts.total)
        if printer.statuses:
            job.differs = False
            return worst_status(printer.statuses)
        printer.summarise()
        return ExitStatus.FAILED if job.differs else ExitStatus.DONE

    texts = [text for text in (old, new) if not _is_time(text)]
    job = _DiffJob(work, *texts, makes=False)
    return job


def _is_time(text: str) -> bool:
    return run_times.time_at(text, 0) == len(text)


def _name_in(text: str, grid: Grid) -> str | None:
    """Return the backup's name in a RUN such as NAME@TIME; None if the RUN is not such a path."""
    path = run_paths.run_path_here(run_paths.whole_run(text), grid.config.directory)
    return None if path is None else path.name


async def _end_of(
    grid: Grid,
    finder: run_paths.RunFinder,
    text: str,
    names: tuple[str, ...],
    name: str | None,
) -> PathEnd | None:
    """
    Return the object at a path in a run; None if no object is at the path.

    Raises:
        UsageError, CapError: the text is not a run or path.
        PipegridError: the run or a directory on the path cannot be read.
    """
    if _is_time(text):
        run = run_paths.choose_run(await finder.runs(), name, text, time.time()).run
        root, within = str(run.cap), names
    else:
        root, within = await finder.root_of(run_paths.whole_run(text))
        place = await grid_paths.resolve(grid, root, within)  # unlike PATH, the RUN must exist
        within += names
        if not names:
            return place
    try:
        return await grid_paths.resolve(grid, root, within)
    except NoSuchChild:
        if not names:
            raise
        return None


async def _compare(
    grid: Grid,
    old: PathEnd | None,
    new: PathEnd | None,
    names: tuple[str, ...],
    printer: _ChangePrinter,
) -> None:
    """Compare the objects at the ends of two paths, which may be directories, files, or missing (None)."""
    both = [None if end is None else cap_lookup.check_known(end) for end in (old, new)]
    roots = [end.cap for end in both if end is not None and isinstance(end.cap, caps.DirectoryCap)]
    if len(roots) < 2:
        entries = [
            None
            if end is None
            else directory_reading.Entry("", end.cap, metadata_json=end.metadata_json)
            for end in both
        ]
        if (change := tree_changes.change_of(names[-1:], *entries)) is not None:
            printer.changed(change)
        empty = caps.DirectoryCap(caps.LitCap(b""))
        if not roots:
            return
        first = both[0] is not None and both[0].cap == roots[0]
        roots = [roots[0], empty] if first else [empty, roots[0]]
    await tree_changes.compare_trees(grid, roots[0], roots[1], printer.changed, printer.unreadable)


class _ChangePrinter(_Printer):
    """Prints the changes between two trees, and counts them."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.counts = tree_changes.TreeChangeCounts()

    def changed(self, change: tree_changes.TreeChange) -> None:
        """Count one change, and print it."""
        self.counts.count(change)
        old, new = change.sizes
        entry = change.new or change.old
        assert entry is not None
        slash = "/" if entry.kind == "directory" else ""
        sizes = [amount(size) for size in (old, new) if size is not None]
        shown = f"  {' -> '.join(sizes)}" if sizes and change.how != "metadata" else ""
        name = cap_lookup.shown_path(change.path)
        self._console.result(
            f"{_MARKS[change.how]} {name}{slash}{shown}",
            {
                "path": list(change.path),
                "change": change.how,
                "old_size": old,
                "new_size": new,
            },
        )

    def summarise(self) -> None:
        """Print the total numbers of changed paths and bytes."""
        counts = self.counts
        self._console.json_result(
            {
                "added": counts.added,
                "removed": counts.removed,
                "changed": counts.changed,
                "metadata": counts.metadata,
                "added_bytes": counts.added_bytes,
                "removed_bytes": counts.removed_bytes,
            }
        )
        self._console.note(
            f"{counts.added} added, {counts.removed} removed, {counts.changed} changed, "
            f"{counts.metadata} with other metadata only; {amount(counts.added_bytes)} new, "
            f"{amount(counts.removed_bytes)} gone"
        )
