"""
The work of ``restore`` for a known run: shows or does a restore, removes other files, writes one file to a
pipe.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import click

from pipegrid.cli import cap_lookup, cmd_get_cat, tree_transfers
from pipegrid.cli.console import Console, say_some
from pipegrid.cli.error_report import ExitStatus, one_status, worst_status
from pipegrid.core import caps
from pipegrid.core.text import amount, counted, printable
from pipegrid.errors import CapError, PipegridError, UsageError
from pipegrid.tree.backup import restore_plan

if TYPE_CHECKING:
    from pipegrid.core.caps import Cap
    from pipegrid.tree.grid_paths import PathEnd
    from pipegrid.tree.tree_grid import Grid
    from pipegrid.tree.walk_order import TreePath

_STEPS = {
    "write": "write",
    "replace": "replace",
    "compare": "replace if its content differs:",
    "blocked": "keep the directory that exists:",
}
_STEPS_WITHOUT_FORCE = _STEPS | {
    "compare": "keep if its content differs, without -f:",
    "blocked": "keep what exists, without -f:",
}


class RestoreChoice(NamedTuple):
    """
    What ``restore`` restores, shows and removes.

    Attributes:
        include, exclude: the patterns of entries to restore, and not to restore.
        dry_run: whether only to show what would be done.
        delete: whether to remove files that the run does not have.
        yes: whether to remove files without asking.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    dry_run: bool = False
    delete: bool = False
    yes: bool = False

    def selection(self) -> restore_plan.RestoreSelection:
        """
        Return the selection for the patterns.

        Raises:
            UsageError: a pattern is malformed.
        """
        return restore_plan.RestoreSelection(self.include, self.exclude)


async def restore_tree(
    grid: Grid,
    console: Console,
    root: Cap | None,
    metadata_json: bytes,
    target: str,
    how: tree_transfers.TreeOptions,
    choice: RestoreChoice,
) -> ExitStatus:
    """
    Restore a directory, or show what that would do; return the status.

    Args:
        root: the cap of the directory.
        how: the options for fetching, without ``wants``.

    Raises:
        UsageError: files in the target must not be removed, or the user did not agree.
        PipegridError: the directory cannot be read.
    """
    if choice == RestoreChoice():
        return await tree_transfers.fetch_tree(grid, console, root, target, how, metadata_json)
    if choice.delete:
        restore_plan.check_removable(target, grid.config)
    selection = choice.selection()
    plan = restore_plan.RestorePlan(selection)
    if choice.dry_run or choice.delete or choice.include:
        plan = await _planned(grid, console, root, target, how, choice, selection)
    if plan.is_empty:
        shown = ", ".join(f"'{printable(each)}'" for each in choice.include[:5])
        console.note(f"nothing in the run matches {shown}, so nothing is restored")
        return ExitStatus.FAILED
    statuses = _report_unread(console, plan, choice)
    if choice.dry_run:
        _summarise(console, plan)
        return worst_status(statuses)
    if choice.delete and plan.extras and not plan.unreadable:
        _ask(console, plan.extras, choice.yes)
    status = await tree_transfers.fetch_tree(
        grid, console, root, target, how._replace(wants=plan.wants), metadata_json
    )
    status = one_status([*statuses, status])
    if selection.unmatched and not choice.delete:
        say_some(
            console,
            [f"'{printable(each)}' matches nothing in the run" for each in selection.unmatched],
        )
    if not choice.delete:
        return status
    if status or plan.unreadable:
        console.note(
            "nothing was removed, since the run could not be restored as a whole; correct what "
            "is named above, and run the same command again"
        )
        return status or ExitStatus.FAILED
    return _remove(grid, console, plan)


def _report_unread(
    console: Console, plan: restore_plan.RestorePlan, choice: RestoreChoice
) -> set[ExitStatus]:
    """
    Report the directories of a plan that could not be read, except those that the transfer will report
    itself; return the statuses.
    """
    return {
        console.failed(error, cap_lookup.shown_path(path), {"path": list(path)}, True)
        for path, error in plan.unreadable
        if choice.dry_run or (choice.include and path)
    }


async def _planned(
    grid: Grid,
    console: Console,
    root: Cap | None,
    target: str,
    how: tree_transfers.TreeOptions,
    choice: RestoreChoice,
    selection: restore_plan.RestoreSelection,
) -> restore_plan.RestorePlan:
    """Return the plan of a restore; a dry run prints its steps."""

    def step(done: restore_plan.RestoreStep, path: TreePath, size: int | None) -> None:
        if choice.dry_run:
            shown = "" if size is None else f"  {amount(size)}"
            steps = _STEPS if how.force else _STEPS_WITHOUT_FORCE
            text = f"{steps[done]} {cap_lookup.shown_path(path)}{shown}"
            console.result(text, {"path": list(path), "would": done, "size": size})

    assert root is not None
    rules = restore_plan.RestoreRules(
        how.force,
        restore_plan.protected_directories(grid.config) if choice.delete else None,
        restore_plan.client_directories(grid.config),
    )
    plan = await restore_plan.plan_restore(grid, root, target, selection, rules, step=step)
    if choice.dry_run:
        for extra in plan.extras:
            console.result(f"remove {_shown(extra)}", {"local": extra.path, "would": "remove"})
    say_some(console, [f"{printable(path)} stays: {why}" for path, why in plan.left])
    return plan


def _summarise(console: Console, plan: restore_plan.RestorePlan) -> None:
    """Print how many files a restore would write, replace, compare, keep and remove."""
    counts = plan.counts
    removed = f", remove {sum(each.count for each in plan.extras)}" if plan.extras else ""
    console.note(
        f"would write {counts.get('write', 0)}, replace {counts.get('replace', 0)}, compare "
        f"{counts.get('compare', 0)}, keep {counts.get('blocked', 0)}{removed}; nothing was changed"
    )


def _ask(console: Console, extras: list[restore_plan.ExtraEntry], yes: bool) -> None:
    """
    Show what will be removed, and ask the user to agree.

    Raises:
        UsageError: the answer is no, or there is no terminal to ask on.
    """
    say_some(console, [f"will remove {_shown(extra)}" for extra in extras])
    if yes:
        return
    what = counted(sum(each.count for each in extras), "file")
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            f"--delete would remove {what} that the run does not have; look with --dry-run, then add --yes"
        )
    if not click.confirm(f"Restore, and remove {what} that the run does not have?", err=True):
        raise UsageError("nothing was restored or removed")


def _remove(grid: Grid, console: Console, plan: restore_plan.RestorePlan) -> ExitStatus:
    """Remove the files that a plan lists as extra; return the status of those that cannot be removed."""
    protected = restore_plan.protected_directories(grid.config)
    statuses: list[ExitStatus] = []
    removed = 0
    for extra in plan.extras:
        try:
            restore_plan.remove_extra(extra, protected)
        except PipegridError as error:
            statuses.append(
                console.failed(error, printable(extra.path), {"local": extra.path}, True)
            )
            continue
        removed += extra.count
        console.json_result({"local": extra.path, "outcome": "removed"})
    console.note(f"removed {counted(removed, 'file')} that the run does not have")
    return one_status(statuses)


def _shown(extra: restore_plan.ExtraEntry) -> str:
    within = f"/ with {counted(extra.count, 'file')}" if extra.is_directory else ""
    return printable(extra.path) + within


async def restore_to_stdout(grid: Grid, console: Console, place: PathEnd) -> ExitStatus:
    """
    Write one file to standard output.

    Raises:
        CapError: the object is not a file.
        PipegridError: the file cannot be fetched.
    """
    cap = cap_lookup.check_known(place).cap
    if isinstance(cap, caps.DirectoryCap):
        raise CapError("'-o -' is for one file, and this is a directory; give a directory with -o")
    if cap is None:
        raise CapError("no cap is known that reads this file; restore the directory that has it")
    file = caps.fetchable(cap)
    size = None if isinstance(file, caps.MutableCap) else file.size
    await cmd_get_cat.fetch(grid, console, file, (0, size), None, None)
    return ExitStatus.DONE
