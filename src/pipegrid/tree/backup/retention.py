"""Which runs of a backup are kept; pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import attrs

from pipegrid.tree.backup.catalogue import BackupRun, Machine


@attrs.frozen
class Retention:
    """
    How many runs to keep of each backup; None: the rule keeps none of its own. Without any rule all are kept.

    Attributes:
        last: so many, the newest.
        daily, weekly: of so many days or weeks in which there was a run, the newest of each (UTC; weeks begin
            on Mondays).
    """

    last: int | None = None
    daily: int | None = None
    weekly: int | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        return self.last is None and self.daily is None and self.weekly is None


def kept(
    runs: Sequence[BackupRun],
    rules: Retention,
    now: str | None = None,
    machine: Machine | None = None,
) -> list[BackupRun]:
    """
    Return the runs that some rule keeps, in the order given; the newest of each backup always stays.

    Runs of one name that several machines have made are kept apart: no machine's displace another's. Those of
    which nobody noted the machine count as the only one's, if there is one alone.

    Runs without a single file displace none that has some: a disk that was not mounted looks like that, night
    after night. So the rules are applied to all runs, and once more to those with files. Of these the newest
    stays, too, in which least is left out: what a failing disk does not give back any more is only there.

    Args:
        now: the time (UTC) of the run that is listed just now. What claims to be later, because a clock was
            wrong once, stays and counts for no rule: it would have what is really new forgotten.
        machine: on which it was stored, whose rules these are: all runs of others stay.
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
            )  # the first, and so the newest, of them
        for counted in (newest_first, with_files):
            keep.update(counted[: rules.last or 0])
            keep.update(_first_of_each(counted, rules.daily or 0, lambda at: at.date()))
            keep.update(_first_of_each(counted, rules.weekly or 0, lambda at: at.isocalendar()[:2]))
    return [run for run in runs if run in keep]


def _series(runs: Sequence[BackupRun]) -> dict[BackupRun, tuple[str, str]]:
    """Return of each run to which series it belongs."""
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
