"""Which runs of a backup are kept; pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import attrs

from pipegrid.tree.backup.catalogue import BackupRun, Machine


@attrs.frozen
class Retention:
    """
    How many runs of each backup are kept; None: the rule does not apply. Without rules all are kept.

    Attributes:
        last: this many of the newest.
        daily, weekly: the newest run of each of this many days or weeks that have runs (UTC; weeks begin on
            Mondays).
    """

    last: int | None = None
    daily: int | None = None
    weekly: int | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether no rule is set."""
        return self.last is None and self.daily is None and self.weekly is None


def kept(
    runs: Sequence[BackupRun],
    rules: Retention,
    now: str | None = None,
    machine: Machine | None = None,
) -> list[BackupRun]:
    """
    Return the runs that a rule keeps, in the given order; the newest of each backup always stays.

    Each machine's runs of a name are a series of their own. Runs of an unknown machine belong to the only
    known one, if exactly one is known.

    Runs without any file do not displace runs with files: an unmounted disk makes such runs night after
    night. So the rules are applied to all runs, and again to those with files. Of these the newest with the
    fewest entries left out stays, too: only it may have what a failing disk has lost.

    Args:
        now: the time (UTC) of the current run. Runs with later times, from a clock that was
            wrong, stay and count for no rule: otherwise they would displace new runs.
        machine: on which the current run was made. Runs of other machines stay.
    """
    if rules.keeps_all:
        return list(runs)
    keep = {run for run in runs if now is not None and run.time > now}
    if machine is not None and machine.id:
        keep.update(run for run in runs if run.machine.id not in ("", machine.id))
    series = _series(runs)
    for each in dict.fromkeys(series.values()):
        newest_first = sorted(
            (run for run in runs if series[run] == each and run not in keep),
            key=lambda run: run.time,
            reverse=True,
        )
        keep.update(newest_first[:1])
        with_files = [run for run in newest_first if run.files]
        if with_files:
            keep.add(
                min(with_files, key=lambda run: run.left_out)
            )  # the first, which is the newest
        for counted in (newest_first, with_files):
            keep.update(counted[: rules.last or 0])
            keep.update(_first_of_each(counted, rules.daily or 0, lambda at: at.date()))
            keep.update(_first_of_each(counted, rules.weekly or 0, lambda at: at.isocalendar()[:2]))
    return [run for run in runs if run in keep]


def _series(runs: Sequence[BackupRun]) -> dict[BackupRun, tuple[str, str]]:
    """Return the series of each run."""
    machines: dict[str, set[str]] = {}
    for run in runs:
        machines.setdefault(run.name, set()).update({run.machine.id} - {""})
    only = {name: min(ids) for name, ids in machines.items() if len(ids) == 1}
    return {run: (run.name, run.machine.id or only.get(run.name, "")) for run in runs}


def _first_of_each(
    runs: Sequence[BackupRun], count: int, period_of: Callable[[datetime], object]
) -> list[BackupRun]:
    found: dict[object, BackupRun] = {}
    for run in runs:
        found.setdefault(period_of(run.at), run)
    return list(found.values())[:count]
