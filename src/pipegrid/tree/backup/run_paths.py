"""
Paths into runs of backups, ``NAME@TIME:some/path``, and the runs that they mean.

NAME is the name of a backup in the client's own catalogue, and TIME any text that ``run_times`` accepts. The
path leads into the newest run up to that time. But if the text before the first colon is an alias, the path
begins with that alias instead.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta, tzinfo
from pathlib import Path
from typing import NamedTuple

from pipegrid.core import clamped_dates
from pipegrid.core.text import CAP_STARTS, as_pasted, composed, counted, printable
from pipegrid.errors import UsageError
from pipegrid.grid.file_grid import Grid
from pipegrid.reactor.deferreds import Waiters
from pipegrid.tree.aliases import as_written, no_alias, read_aliases
from pipegrid.tree.backup.backup_run import Backups
from pipegrid.tree.backup.catalogue import BackupRun
from pipegrid.tree.backup.run_times import (
    EXAMPLES,
    is_latest,
    parse_span,
    run_time_text,
    time_at,
)
from pipegrid.tree.grid_paths import names_of, parse_here

AHEAD_S = 3600
"""Clocks of machines may differ by this many seconds; a run further in the future has a wrong time."""

SHOWN = 8
"""The maximum number of names or runs that a message lists."""


class RunPath(NamedTuple):
    """
    A parsed path into a run.

    Attributes:
        name: the name of the backup, normalized (NFC).
        at: the time as the user wrote it.
        names: the names of the path below the root of the run.
    """

    name: str
    at: str
    names: tuple[str, ...] = ()


class ChosenRun(NamedTuple):
    """
    The run chosen for a name and a time.

    Attributes:
        run: the newest run that fits.
        later: number of runs that were left out because their time is in the future.
    """

    run: BackupRun
    later: int = 0

    @property
    def warning(self) -> str:
        """A warning about the runs that were left out; empty if there are none."""
        if not self.later:
            return ""
        runs = counted(self.later, "run")
        return (
            f"{runs} of {self.run.name!r} with a time in the future not considered: some clock is or was "
            "wrong; to use such a run, give its time, which 'pipegrid backups' prints"
        )


def run_path_text(run: BackupRun, zone: tzinfo | None = None) -> str:
    """
    Return the path of a run's root in the form that commands accept, ``home@2026-11-22_19:23:31+01:00:``.
    """
    return f"{printable(run.name)}@{run_time_text(run.at, zone)}:"


def shell_text(run: BackupRun) -> str:
    """Return the path of a run's root, quoted for a shell."""
    return shlex.quote(run_path_text(run))


def parse_run_path(text: str, aliases: Mapping[str, str]) -> RunPath | None:
    """
    Parse a path into a run; None: this is a path of another kind.

    Args:
        aliases: the client's aliases; if the text before the first colon is one of them, the result is None.

    Raises:
        UsageError: the text looks like a path into a run, but lacks the colon, or has no valid time or an
            empty name.
    """
    text = as_pasted(text)
    if "@" not in text or text.startswith(CAP_STARTS):
        return None
    alias, colon, _ = text.partition(":")
    if colon and as_written(alias, aliases) is not None:
        return None
    for at, end in _times_in(text):
        if text[end : end + 1] == ":":
            return RunPath(composed(text[:at]), text[at + 1 : end], names_of(text[end + 1 :]))
        if text[end : end + 1] in ("", "/"):
            raise UsageError(
                f"a colon follows the time of a run: '{printable(text[:end])}:{printable(text[end + 1 :])}'"
            )
    if colon and "@" in alias[1:] and "/" not in alias:
        written = printable(alias.rpartition("@")[2][:40])
        raise UsageError(
            f"{no_alias(alias)}, and '{written}' is not a time of a run; give one such as {EXAMPLES}"
        )
    return None


def names_start(text: str) -> int:
    """Return the index after the colon of a path into a run, where its names begin; 0 for other text."""
    return next((end + 1 for _, end in _times_in(text) if text[end : end + 1] == ":"), 0)


def whole_run(text: str) -> str:
    """
    Return ``NAME@TIME`` with a colon appended, for arguments that can only be runs; other text is unchanged.
    """
    bare = as_pasted(text)
    is_run = any(end == len(bare) and ":" not in bare[:at] for at, end in _times_in(bare))
    return f"{bare}:" if is_run else text


def _times_in(text: str) -> Iterator[tuple[int, int]]:
    """
    Yield the index of each ``@`` that a time follows, and the end of that time; only before the first slash.
    """
    for found in re.finditer("@", text.partition("/")[0]):
        end = time_at(text, found.end())
        if found.start() and end > found.end():
            yield found.start(), end


def run_path_here(text: str, directory: Path) -> RunPath | None:
    """
    Parse a path into a run with the aliases of a client's directory; see ``parse_run_path``.

    Raises:
        UsageError: as in ``parse_run_path``, or the aliases cannot be read.
    """
    if "@" not in text or as_pasted(text).startswith(CAP_STARTS):
        return None
    return parse_run_path(text, read_aliases(directory))


def choose_run(
    runs: Sequence[BackupRun],
    name: str | None,
    at: str | None,
    now: float,
    zone: tzinfo | None = None,
) -> ChosenRun:
    """
    Return the run that was the newest at a time.

    If ``at`` is None or ``latest``, runs with a time in the future are left out, unless the backup has no
    other runs.

    Args:
        name: the name of the backup; None, if the catalogue has only one.
        at: see ``parse_span``; None: the newest.
        now: seconds since 1970.

    Raises:
        UsageError: no run fits, several backups exist but no name was given, or ``at`` is not a time.
    """
    same = runs_called(runs, name)
    name = same[0].name
    if at is None or is_latest(at):
        limit = clamped_dates.utc(now) + timedelta(seconds=AHEAD_S)
        fitting = [run for run in same if run.at <= limit] or same
        return ChosenRun(_newest(fitting), len(same) - len(fitting))
    last = parse_span(at, now, zone).last
    fitting = [run for run in same if run.at <= last]
    if not fitting:
        raise UsageError(
            f"no run of {name!r} is as old as {run_time_text(last, zone)}; its runs: {_listed(same, zone)}"
        )
    return ChosenRun(_newest(fitting))


def run_within(
    runs: Sequence[BackupRun], name: str, at: str, now: float, zone: tzinfo | None = None
) -> BackupRun:
    """
    Return the only run of a backup in the span of a time, or the newest for ``latest``.

    Unlike ``choose_run``, this never chooses an earlier run; it is used before an action that cannot be
    undone.

    Raises:
        UsageError: no run or several runs fit, the backup does not exist, or ``at`` is not a time.
    """
    if is_latest(at):
        return choose_run(runs, name, at, now, zone).run
    same = runs_called(runs, name)
    span = parse_span(at, now, zone)
    found = [run for run in same if span.first <= run.at <= span.last]
    if len(found) == 1:
        return found[0]
    called, when = printable(same[0].name), printable(at)
    if found:
        raise UsageError(
            f"{len(found)} runs of '{called}' are of {when}; give the time of one: {_listed(found, zone)}"
        )
    raise UsageError(f"no run of '{called}' is of {when}; its runs: {_listed(same, zone)}")


def runs_called(runs: Sequence[BackupRun], name: str | None) -> list[BackupRun]:
    """
    Return the runs of one backup.

    Args:
        name: the name of the backup; None, if the runs are of only one.

    Raises:
        UsageError: no backup has this name, or several backups exist but no name was given.
    """
    names = sorted({run.name for run in runs})
    if not names:
        raise UsageError("the catalogue lists no backup; 'pipegrid backup' makes one")
    if name is None and len(names) > 1:
        raise UsageError(f"there are backups of {several(names)}; choose one with --as")
    name = names[0] if name is None else composed(name)
    if name not in names:
        raise UsageError(
            f"there is no backup called '{printable(name)}'; the catalogue has: {several(names)}"
        )
    return [run for run in runs if run.name == name]


def several(names: Collection[str]) -> str:
    """Return the first ``SHOWN`` names and the number of further names, for a message."""
    few = [printable(each) for each in list(names)[:SHOWN]]
    more = len(names) - len(few)
    return ", ".join(few) + (f" and {more} more" if more else "")


def _listed(runs: Sequence[BackupRun], zone: tzinfo | None) -> str:
    return several([run_time_text(at, zone) for at in sorted(run.at for run in runs)])


def _newest(runs: Sequence[BackupRun]) -> BackupRun:
    return max(runs, key=lambda run: (run.at, run.time))


class RunFinder:
    """
    Finds runs in the catalogue of a grid's client; the catalogue is read only once.

    Args:
        grid: an open grid.
        say: called with sentences for the user; None: the sentences become warnings of the grid.
    """

    def __init__(self, grid: Grid, say: Callable[[str], None] | None = None) -> None:
        self._grid = grid
        self._say = say or grid.add_warning
        self._runs: tuple[BackupRun, ...] | None = None
        self._reading: Waiters[tuple[BackupRun, ...]] | None = None

    async def runs(self) -> tuple[BackupRun, ...]:
        """
        Return all runs of the catalogue, oldest first.

        Raises:
            PipegridError: the catalogue cannot be read.
        """
        if self._runs is not None:
            return self._runs
        if self._reading is not None:
            return await self._reading.wait()
        waiting = self._reading = Waiters()
        try:
            self._runs = await Backups(self._grid, say=self._say).runs()
        except Exception as error:
            self._reading = None
            waiting.fail(error)
            raise
        self._reading = None
        waiting.fire(self._runs)
        return self._runs

    async def find(self, path: RunPath) -> BackupRun:
        """
        Return the run that a path leads into.

        Raises:
            UsageError: no run fits; the message lists the existing runs or backups.
            PipegridError: the catalogue cannot be read.
        """
        chosen = choose_run(await self.runs(), path.name, path.at, time.time())
        if chosen.warning:
            self._say(chosen.warning)
        return chosen.run

    async def root_of(self, text: str) -> tuple[str, tuple[str, ...]]:
        """
        Parse a path of any kind, including paths that begin with a run or an alias of the client.

        Returns:
            the text of the root's cap, and the names below the root; see ``grid_paths.parse``.

        Raises:
            UsageError: the text is not a path, or its alias, backup or run does not exist.
            PipegridError: the catalogue cannot be read.
        """
        directory = self._grid.config.directory
        path = run_path_here(text, directory)
        if path is not None:
            return str((await self.find(path)).cap), path.names
        return parse_here(text, directory)
