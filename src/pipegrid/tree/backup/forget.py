"""Removing runs from the catalogue, by rules or by name; what only they have stored is then for ``prune``."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from pipegrid.core.text import composed, printable
from pipegrid.errors import CapError, UsageError
from pipegrid.tree.backup.backup_run import Backups, is_writable
from pipegrid.tree.backup.backup_state_directory import CatalogueState
from pipegrid.tree.backup.catalogue import BackupRun, Machine, entry_name, runs_of
from pipegrid.tree.backup.catalogue_store import CatalogueChange
from pipegrid.tree.backup.retention import Retention, reasons

NAMED = "it was named"
NO_RULE = "no rule keeps it"


@attrs.frozen
class JudgedRun:
    """
    A run, and what happens to it.

    Attributes:
        reasons: why it is kept, or forgotten.
    """

    run: BackupRun
    keeps: bool
    reasons: tuple[str, ...]


@attrs.frozen
class ForgetRequest:
    """
    Which runs to forget.

    Attributes:
        which: names of backups, to which the rules apply (all, if none is given), and single runs, each as
            NAME@DATE.
        now: the time of the command, as runs have it.
        machine: whose runs the rules count.
    """

    which: tuple[str, ...]
    retention: Retention
    now: str
    machine: Machine


def judge(runs: Sequence[BackupRun], request: ForgetRequest) -> list[JudgedRun]:
    """
    Return what happens to the runs that a request is about, in the order of the runs.

    Raises:
        UsageError: there is no such backup or run; or neither rules nor runs were given.
    """
    names, named = selected(runs, request.which)
    rules = request.retention
    if rules.keeps_all and not named:
        raise UsageError(
            "give a rule such as --keep-last 10, or a run such as NAME@2026-11-22; 'pipegrid backups' lists "
            "the runs"
        )
    if rules.keeps_all and names:
        raise UsageError(
            f"'{printable(min(names))}' is a backup, and all its runs would be forgotten: give rules such as "
            "--keep-last 10, or its runs as NAME@DATE"
        )
    ruled = [run for run in runs if not rules.keeps_all and (not names or run.name in names)]
    if named and not names:
        ruled = []
    why = reasons(ruled, rules, request.now, request.machine)
    judged = []
    for run in runs:
        if entry_name(run) in named:
            judged.append(JudgedRun(run, False, (NAMED,)))
        elif run in why:
            judged.append(JudgedRun(run, bool(why[run]), why[run] or (NO_RULE,)))
    return judged


def selected(
    runs: Sequence[BackupRun], which: Sequence[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """
    Return the names of backups in ``which``, and the entry names of single runs.

    Raises:
        UsageError: there is no such backup or run, or several runs are of that time.
    """
    known = {run.name for run in runs}
    names: set[str] = set()
    named: set[str] = set()
    for text in which:
        name = composed(text)
        if name in known:
            names.add(name)
        else:
            named.add(entry_name(_run_named(runs, name, known)))
    return frozenset(names), frozenset(named)


def names_run(text: str) -> bool:
    """Return whether a text has the form NAME@DATE, as the time of a run begins; a path has not."""
    name, _, date = text.rpartition("@")
    return bool(name) and not {":", "/"} & set(name) and date[:4].isdecimal() and date[4:5] == "-"


def _run_named(runs: Sequence[BackupRun], text: str, known: set[str]) -> BackupRun:
    name, at, date = text.rpartition("@")
    if not at or name not in known:
        raise UsageError(
            f"there is no backup called '{printable(text if not at else name)}'; there are "
            f"{', '.join(sorted(map(printable, known))) or 'none'}"
        )
    wanted = date.strip().replace("T", "_").replace(" ", "_")
    found = [run for run in runs if run.name == name and run.time.startswith(wanted) and wanted]
    if len(found) != 1:
        times = ", ".join(run.time for run in found[:5])
        raise UsageError(
            f"there is no run of '{printable(name)}' at {printable(date)!r}; 'pipegrid backups' lists them"
            if not found
            else f"{len(found)} runs of '{printable(name)}' are of {printable(date)!r} ({times}); give the "
            "time of one"
        )
    return found[0]


async def forget(
    backups: Backups, request: ForgetRequest, dry_run: bool = False
) -> list[JudgedRun]:
    """
    Remove runs from this client's catalogue; return what has happened to the runs of the request.

    Each is noted for ``prune`` before it is removed.

    Args:
        dry_run: remove nothing.

    Raises:
        UsageError: see ``judge``; or a backup runs, or there is no catalogue.
        CapError: the catalogue cannot be changed with this client's cap.
        PipegridError: it cannot be read or changed.
    """
    place = backups.place
    place.lock()
    try:
        noted = place.noted(backups.say)
        if noted.cap is None:
            raise UsageError("this client has no list of backups, so there is nothing to forget")
        if not is_writable(noted.cap):
            raise CapError(
                f"the cap in {place.cap_file} only reads the list of backups; put the one that changes it "
                "there, from the machine that made it"
            )
        content = await backups.catalogues.load(noted.cap)
        every = {entry_name(run): run for run in (*runs_of(noted.cap, content), *noted.unlisted)}
        runs = sorted(every.values(), key=lambda run: (run.time, run.name))
        judged = judge(runs, request)
        removed = frozenset(entry_name(each.run) for each in judged if not each.keeps)
        if dry_run or not removed:
            return judged
        change = CatalogueChange(
            noted.unlisted, forgetting=place.candidates.note_forgotten, removed=removed
        )
        changed = await backups.catalogues.change(noted.cap, change, content)
        place.note(CatalogueState(noted.cap, changed.content, (), changed.version))
        return judged
    finally:
        place.unlock()
