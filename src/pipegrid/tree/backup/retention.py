"""Retention: which runs of a backup are kept, and why. This module does no input or output."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import attrs

from pipegrid.errors import UsageError
from pipegrid.tree.backup.catalogue import BackupRun, Machine

_DURATION = re.compile(
    r"(?:(\d{1,4})y)?(?:(\d{1,4})m)?(?:(\d{1,4})w)?(?:(\d{1,5})d)?(?:(\d{1,6})h)?\Z"
)


class Duration(NamedTuple):
    """
    A length of time, as ``--keep-within`` accepts it.

    Attributes:
        text: the text that the user gave, such as ``1y6m7d12h``.
        months: calendar years and months, in months.
        rest: weeks, days and hours.
    """

    text: str
    months: int
    rest: timedelta

    def before(self, at: datetime) -> datetime:
        """
        Return the time that is this long before ``at``; the earliest possible time if the result would be
        earlier.
        """
        month = at.year * 12 + at.month - 1 - self.months
        if month < 12:  # year 0 does not exist
            return datetime.min.replace(tzinfo=at.tzinfo)
        year, month = divmod(month, 12)
        days = (datetime(year + (month + 1) // 12, (month + 1) % 12 + 1, 1) - timedelta(days=1)).day
        begin = at.replace(year=year, month=month + 1, day=min(at.day, days))
        try:
            return begin - self.rest
        except OverflowError:
            return datetime.min.replace(tzinfo=at.tzinfo)


def parse_duration(text: str) -> Duration:
    """
    Parse a duration of years, months, weeks, days and hours, in this order: ``1y6m``, ``2w``, ``7d12h``.

    Raises:
        UsageError: the text is not a duration.
    """
    match = _DURATION.match(text.strip())
    if match is None or not any(match.groups()):
        raise UsageError(
            f"{text!r} is not a duration; give one such as 30d, 2w, 12h or 1y6m (years, months, weeks, days, "
            "hours)"
        )
    years, months, weeks, days, hours = (int(each or 0) for each in match.groups())
    rest = timedelta(weeks=weeks, days=days, hours=hours)
    return Duration(text.strip(), years * 12 + months, rest)


@attrs.frozen
class Retention:
    """
    The rules for which runs of each backup are kept; a rule that is None does not apply. Without rules, all
    runs are kept.

    Attributes:
        last: keep this many of the newest runs.
        hourly, daily, weekly, monthly, yearly: for this many of the latest hours (days, weeks, months, years
            in UTC) that have runs, keep the newest run of each; weeks begin on Mondays.
        within: keep runs that are at most this much older than the newest run.
        tags: keep runs that have one of these tags.
    """

    last: int | None = None
    hourly: int | None = attrs.field(default=None, kw_only=True)
    daily: int | None = None
    weekly: int | None = None
    monthly: int | None = attrs.field(default=None, kw_only=True)
    yearly: int | None = attrs.field(default=None, kw_only=True)
    within: Duration | None = attrs.field(default=None, kw_only=True)
    tags: frozenset[str] = attrs.field(default=frozenset(), kw_only=True, converter=frozenset)

    @property
    def keeps_all(self) -> bool:
        """Whether no rule is set."""
        return self == Retention()


_Period = Callable[[datetime], str]

_PERIODS: dict[str, tuple[str, _Period]] = {
    "hourly": ("hour", lambda at: f"{at:%Y-%m-%d %H}h"),
    "daily": ("day", lambda at: f"{at:%Y-%m-%d}"),
    "weekly": ("week", lambda at: "{}-W{:02}".format(*at.isocalendar()[:2])),
    "monthly": ("month", lambda at: f"{at:%Y-%m}"),
    "yearly": ("year", lambda at: f"{at:%Y}"),
}


def reasons(
    runs: Sequence[BackupRun],
    rules: Retention,
    now: str | None = None,
    machine: Machine | None = None,
) -> Mapping[BackupRun, tuple[str, ...]]:
    """
    Return the reasons why each run is kept; a run without reasons is forgotten.

    The runs that one machine made of one backup form a series, whose newest run is always kept. Runs of an
    unknown machine belong to the series of the known machine, if there is exactly one.

    Runs without any file must not displace runs with files, since an unmounted disk makes such runs every
    night. So the rules are applied to all runs, and again to the runs with files. Among the runs with files,
    the one with the fewest left-out entries (the newest of several) is also kept: it may be the only run with
    the files that a failing disk has lost.

    Args:
        now: the time (UTC) of the current run. Runs with later times, from a wrong clock, are kept, and do
            not count for any rule: otherwise they would displace new runs. None: no time is in the future.
        machine: the machine of the current run. Runs of other machines are kept. None: runs of all machines
            can be forgotten.
    """
    why: dict[BackupRun, dict[str, None]] = {run: {} for run in runs}

    def keep(chosen: Iterable[BackupRun], reason: str) -> None:
        for run in chosen:
            why[run].setdefault(reason)

    if rules.keeps_all:
        keep(runs, "no rule was given")
    keep((run for run in runs if now is not None and run.time > now), "its time is in the future")
    if machine is not None and machine.id:
        others = (run for run in runs if run.machine.id not in ("", machine.id))
        keep(others, "made on another machine")
    series = _series(runs)
    apart = {run for run in runs if why[run]}
    for each in dict.fromkeys(series.values()):
        newest_first = sorted(
            (run for run in runs if series[run] == each and run not in apart),
            key=lambda run: run.time,
            reverse=True,
        )
        _judge(newest_first, rules, keep)
    return {run: tuple(found) for run, found in why.items()}


def _judge(
    newest_first: Sequence[BackupRun],
    rules: Retention,
    keep: Callable[[Iterable[BackupRun], str], None],
) -> None:
    """Apply the rules to one series."""
    keep(newest_first[:1], "the newest")
    with_files = [run for run in newest_first if run.files]
    if with_files:
        # If several runs have the minimum, ``min`` returns the first, which is the newest.
        best = min(with_files, key=lambda run: run.left_out)
        keep([best], "least is left out")
    for run in newest_first:
        for tag in sorted(rules.tags.intersection(run.tags)):
            keep([run], f"tag {tag!r}")
    for counted in (newest_first, with_files):
        keep(counted[: rules.last or 0], f"one of the last {rules.last}")
        if rules.within is not None and counted:
            since = rules.within.before(counted[0].at)
            recent = (run for run in counted if run.at >= since)
            keep(recent, f"within {rules.within.text}")
        for rule, (period, period_of) in _PERIODS.items():
            for name, run in _first_of_each(counted, getattr(rules, rule) or 0, period_of):
                keep([run], f"last of {period} {name}")


def _series(runs: Sequence[BackupRun]) -> dict[BackupRun, tuple[str, str]]:
    """Return the series of each run, as the backup's name and the machine's id."""
    machines: dict[str, set[str]] = {}
    for run in runs:
        machines.setdefault(run.name, set()).update({run.machine.id} - {""})
    only = {name: min(ids) for name, ids in machines.items() if len(ids) == 1}
    return {run: (run.name, run.machine.id or only.get(run.name, "")) for run in runs}


def _first_of_each(
    runs: Sequence[BackupRun], count: int, period_of: _Period
) -> list[tuple[str, BackupRun]]:
    found: dict[str, BackupRun] = {}
    for run in runs:
        found.setdefault(period_of(run.at), run)
    return list(found.items())[:count]
