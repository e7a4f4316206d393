"""
Removing runs from the catalogue, by rules or by name; ``prune`` later releases what only these runs have
stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo

import attrs

from pipegrid.core.caps import writes
from pipegrid.core.text import composed, printable
from pipegrid.errors import CapError, UsageError
from pipegrid.tree.backup.backup_run import Backups
from pipegrid.tree.backup.backup_state_directory import CatalogueState
from pipegrid.tree.backup.catalogue import BackupRun, Machine, entry_name, parse_time
from pipegrid.tree.backup.catalogue_store import CatalogueChange
from pipegrid.tree.backup.retention import Retention, reasons
from pipegrid.tree.backup.run_paths import parse_run_path, run_within, several, whole_run


@attrs.frozen
class JudgedRun:
    """
    A run, and whether it is kept.

    Attributes:
        keeps: whether the run is kept.
        reasons: why the run is kept, or forgotten.
    """

    run: BackupRun
    keeps: bool
    reasons: tuple[str, ...]


@attrs.frozen
class ForgetRequest:
    """
    Which runs to forget.

    Attributes:
        which: names of backups, to whose runs the rules apply, and single runs as NAME@TIME, which are
            forgotten; for TIME see ``run_paths.run_within``. Empty: the rules apply to all backups.
        retention: the rules for which runs are kept.
        now: the time of the command, in the format of ``BackupRun.time``.
        machine: the machine to whose runs the rules apply.
        zone: the zone of local times; None: the machine's zone.
    """

    which: tuple[str, ...]
    retention: Retention
    now: str
    machine: Machine
    zone: tzinfo | None = None


def judge(runs: Sequence[BackupRun], request: ForgetRequest) -> list[JudgedRun]:
    """
    Return which runs a request keeps and forgets, in the order of ``runs``; runs of other backups are left
    out.

    Raises:
        UsageError: a backup or run does not exist, no run has a tag of the rules, or the request has neither
            rules nor single runs.
    """
    names, named = _selected(runs, request)
    rules = request.retention
    if rules.keeps_all and not named:
        raise UsageError(
            "give a rule such as --keep-last 10, or a run such as NAME@2026-11-22; 'pipegrid backups' lists "
            "the runs"
        )
    if rules.keeps_all and names:
        raise UsageError(
            f"'{printable(min(names))}' is a backup, and all its runs would be forgotten: give rules such as "
            "--keep-last 10, or its runs as NAME@TIME"
        )
    unknown = rules.tags.difference(*(run.tags for run in runs))
    if unknown:
        raise UsageError(
            f"no run has the tag '{printable(min(unknown))}', which would keep nothing; 'pipegrid --json "
            "backups' lists tags"
        )
    ruled = [run for run in runs if run.name in names or not (names or named)]
    why = reasons(ruled, rules, request.now, request.machine)
    judged = []
    for run in runs:
        if entry_name(run) in named:
            judged.append(JudgedRun(run, False, ("it was named",)))
        elif run in why:
            judged.append(JudgedRun(run, bool(why[run]), why[run] or ("no rule keeps it",)))
    return judged


def _selected(
    runs: Sequence[BackupRun], request: ForgetRequest
) -> tuple[frozenset[str], frozenset[str]]:
    """
    Return the names of the backups that a request names, and the entry names of its single runs.

    Raises:
        UsageError: a backup or run does not exist, or several runs fit a time.
    """
    known = {run.name for run in runs}
    now = parse_time(request.now).timestamp()
    names: set[str] = set()
    named: set[str] = set()
    for text in request.which:
        name = composed(text)
        if name in known:
            names.add(name)
            continue
        path = parse_run_path(whole_run(text), {})
        if path is None:
            raise UsageError(
                f"there is no backup called '{printable(name)}'; there are {several(sorted(known)) or 'none'}"
            )
        if path.names:
            raise UsageError(
                f"a run is forgotten as a whole: leave out what follows the time in {text!r}"
            )
        named.add(entry_name(run_within(runs, path.name, path.at, now, request.zone)))
    return frozenset(names), frozenset(named)


async def forget(
    backups: Backups, request: ForgetRequest, dry_run: bool = False
) -> list[JudgedRun]:
    """
    Remove runs from this client's catalogue; return which runs of the request were kept and forgotten.

    Each run is recorded for ``prune`` before it is removed.

    Args:
        dry_run: remove nothing.

    Raises:
        UsageError: as in ``judge``; or a backup is running, or this client has no catalogue.
        CapError: the catalogue cannot be changed with this client's cap.
        PipegridError: the catalogue cannot be read or changed.
    """
    place = backups.place
    with place.locked():
        noted = place.noted(backups.say)
        if noted.cap is None:
            raise UsageError("this client has no list of backups, so there is nothing to forget")
        if not writes(noted.cap):
            raise CapError(
                f"the cap in {place.cap_file} only reads the list of backups; put the one that changes it "
                "there, from the machine that made it"
            )
        content = await backups.catalogues.load(noted.cap)
        judged = judge(noted._replace(content=content).runs, request)
        removed = frozenset(entry_name(each.run) for each in judged if not each.keeps)
        if removed and not dry_run:
            change = CatalogueChange(
                noted.unlisted, forgetting=place.candidates.note_forgotten, removed=removed
            )
            changed = await backups.catalogues.change(noted.cap, change, content)
            place.note(CatalogueState(noted.cap, changed.content, (), changed.version))
        return judged
