"""
``pipegrid forget``, ``prune``, ``pin``, ``unpin``, ``pins``, ``space``: choose which runs stay, and free or
show their space.
"""

from __future__ import annotations

import time
from typing import Any

import click

from pipegrid.cli import cap_lookup
from pipegrid.cli.command_job import GridJob, OfflineJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import EMPTY_NAME, common_options, grid_options, grid_path, usage_error
from pipegrid.cli.retention_options import retention_options, rules_of
from pipegrid.core import caps
from pipegrid.core.text import amount, counted, printable
from pipegrid.errors import CannotReach, CapError, GridError, UsageError
from pipegrid.transfer import upkeep
from pipegrid.tree import aliases, prune_roots, tree_check, tree_grid
from pipegrid.tree.backup import backup_run, catalogue, forget, prune, run_paths, space


@click.command(name="forget")
@click.argument("which", nargs=-1, metavar="[NAME|RUN]...")
@click.option("--dry-run", is_flag=True, help="Print what would be forgotten; change nothing.")
@retention_options
@grid_options
def forget_command(which: tuple[str, ...], dry_run: bool, rules: dict[str, Any]) -> GridJob:
    """
    Remove runs from the list of backups, by rules or by name.

    Rules apply to the backups NAME, or to all; they count and forget runs of this machine only, and the
    newest run always stays. RUN is NAME@TIME, as 'pipegrid backups' prints it, or a day or minute with one
    run; it is forgotten whatever the rules are. For each run is printed why it is kept or forgotten.

    The space of what only forgotten runs have is freed by 'pipegrid prune'. A run that is also kept under an
    alias stays there.
    """
    if "" in which:
        raise usage_error(EMPTY_NAME)
    retention = rules_of(rules)
    if retention.keeps_all and not which:
        raise usage_error("give a rule such as --keep-last 10, or runs as NAME@TIME")

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        backups = backup_run.Backups(grid, say=console.note)
        request = forget.ForgetRequest(
            which, retention, catalogue.shown_time(time.time()), backups.place.machine(not dry_run)
        )
        judged = await forget.forget(backups, request, dry_run)
        for each in judged:
            _show_judged(console, each, dry_run)
        gone = counted(sum(not each.keeps for each in judged), "run")
        console.note(
            f"{gone} would be forgotten"
            if dry_run
            else f"forgot {gone}; 'pipegrid prune' frees the space of what only they had"
        )
        return ExitStatus.DONE

    return GridJob(work, makes=False)


def _show_judged(console: Console, judged: forget.JudgedRun, dry_run: bool) -> None:
    run = judged.run
    what = "keep" if judged.keeps else "forget"
    tags = f" [{', '.join(map(printable, run.tags))}]" if run.tags else ""
    reasons = printable("; ".join(judged.reasons))
    console.result(
        f"{what:6}  {run_paths.shell_text(run)}{tags}  {reasons}",
        {
            "path": run_paths.run_path_text(run),
            "name": run.name,
            "time": run.time,
            "cap": str(run.cap),
            "kept": judged.keeps,
            "reasons": list(judged.reasons),
            "tags": list(run.tags),
            "dry_run": dry_run,
        },
    )


@click.command(name="prune")
@click.option("--dry-run", is_flag=True, help="Print what would be freed; change nothing.")
@grid_options
def prune_command(dry_run: bool) -> GridJob:
    """
    Free the space of what backups have stored and no run has any more.

    This client's leases on such files and directories are released. Servers of PipeGrid remove what has no
    other lease at once; on others the leases end within 31 days. What a listed run of any machine, an alias,
    a pin or another cap in the client's 'private' directory reaches stays. A cap that is kept nowhere else
    does not protect anything: pin it first ('pipegrid pin').

    Nothing is released unless all servers answer and all that is kept can be read. No backup can run at the
    same time.
    """

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        backups = backup_run.Backups(grid, say=console.note)
        pruning = prune.Prune(grid, backups.place, say=backups.say, now=time.time)
        result = await pruning.run(dry_run)
        status = _show_pruned(console, result, dry_run)
        if not result.is_complete:
            console.note("a forgotten run could not be read as a whole; the next prune tries again")
        return status

    return GridJob(work, makes=False)


def _show_pruned(console: Console, result: prune.PruneResult, dry_run: bool) -> ExitStatus:
    objects = counted(result.objects, "object")
    about = f"about {amount(result.share_bytes)} on servers"
    freed = result.released.freed_bytes
    everywhere = not result.without
    if dry_run:
        text = f"would release {objects} ({about})"
    elif not result.objects:
        text = "nothing to release"
    elif not everywhere and not result.released.leases and not result.problems:
        text = f"{objects} ({about}) can be freed when their leases end"
    else:
        text = f"released {objects}; servers freed {amount(freed)}"
    console.result(
        text,
        {
            "dry_run": dry_run,
            "objects": result.objects,
            "share_bytes": result.share_bytes,
            "leases": result.released.leases,
            "freed_bytes": freed,
            "undone": result.undone,
            "kept": result.kept,
            "kept_share_bytes": result.kept_bytes,
            "without": list(result.without),
        },
    )
    if result.kept:
        size = f"about {amount(result.kept_bytes)} on servers"
        console.note(
            f"{counted(result.kept, 'object')} ({size}) that no run has any more stay: an alias, a "
            "pin or another cap in 'private' reaches them, such as a run under an alias's 'Archives', which "
            "'forget' leaves there"
        )
    if result.without and result.objects:
        ends = catalogue.shown_time(time.time() + LEASE_S)
        console.note(
            f"{', '.join(map(printable, result.without))}: leases cannot be released there, and "
            f"end by {ends[:10]} at the latest"
        )
    status = ExitStatus.DONE
    for problem in result.problems:
        about = f"{counted(result.undone, 'object')} could not be released; prune again"
        status = console.complain(problem, about=about)
    if result.undone and not result.problems:
        console.note(
            f"{counted(result.undone, 'object')} had their leases renewed meanwhile, and stay"
        )
    return status


LEASE_S = 31 * 86400
"""How many seconds servers keep a lease that was renewed just now."""


# Pins.


@click.command(name="pin")
@click.argument("what", metavar="CAP|ALIAS:PATH|RUN", shell_complete=grid_path)
@click.argument("name", required=False)
@grid_options
def pin_command(what: str, name: str | None) -> GridJob:
    """
    Protect a file or tree from 'prune', whatever is forgotten.

    RUN is NAME@TIME. The read cap is kept under NAME (by default what was given) in
    'private/pins' of the client's directory, and everything that it reaches gets a lease of this client.
    'pipegrid renew -r CAP' renews those; do it each month, since backups renew only what they meet.
    """
    if what == "" or name == "":
        raise usage_error(EMPTY_NAME)

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        cap = await _pinned(grid, what)
        called = name or (what if not what.startswith("URI:") else str(cap)[:30])
        prune_roots.add_pin(grid.config.directory, called, cap)
        console.result(
            f"pinned {printable(called.strip())}", {"pin": called.strip(), "cap": str(cap)}
        )
        # If another client has stored the object, that client can release its leases at any time.
        leased = await tree_check.check_tree(grid, cap, upkeep.UpkeepRequest(renew=True))
        if leased.healthy == leased.objects and not leased.unreadable:
            return ExitStatus.DONE
        return console.complain(
            GridError(
                f"{counted(leased.objects - leased.healthy + leased.unreadable, 'object')} of what was "
                "pinned got no lease everywhere; see 'pipegrid check -r', and pin it again"
            )
        )

    return GridJob(work, what, makes=False)


async def _pinned(grid: tree_grid.Grid, what: str) -> caps.Cap:
    """Return the read cap of what the user has named."""
    place = await cap_lookup.place_of(grid, run_paths.whole_run(what))
    if place.cap is None:
        raise UsageError(f"{printable(what)} has no cap that reads it")
    cap: Any = place.cap
    if not hasattr(cap, "readonly"):
        raise CapError(
            "this version does not know this kind of cap, so what it reaches is not known"
        )
    read: caps.Cap = cap.readonly()
    return read


@click.command(name="unpin")
@click.argument("name")
@common_options
def unpin_command(name: str) -> OfflineJob:
    """Remove the pin NAME, or that of a cap; 'prune' may free what it kept."""
    directory = cap_lookup.client_directory()

    def work(console: Console) -> int:
        cap = prune_roots.remove_pin(directory, name.strip())
        console.result(str(cap), {"pin": name, "cap": str(cap)})
        return ExitStatus.DONE

    return OfflineJob(work)


@click.command(name="pins")
@common_options
def pins_command() -> OfflineJob:
    """List the pins and their caps."""
    directory = cap_lookup.client_directory()

    def work(console: Console) -> int:
        for name, cap in prune_roots.read_pins(directory).items():
            console.result(f"{printable(name)}: {cap}", {"pin": name, "cap": str(cap)})
        return ExitStatus.DONE

    return OfflineJob(work)


# Space.


@click.command(name="space")
@grid_options
def space_command() -> GridJob:
    """
    Print what backups, runs and aliases occupy on servers, all together.

    The numbers are computed from the sizes of files and their encoding. For a run it is what no other run
    has; what several backups or aliases have counts for each of them. The last line is what 'prune' would
    free now.
    """

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        backups = backup_run.Backups(grid, say=console.note)
        runs = await backups.runs()
        named = aliases.read_aliases(grid.config.directory)
        kept = [
            prune_roots.Root(name, caps.parse_cap(text)) for name, text in sorted(named.items())
        ]
        found = await space.occupied_space(grid, runs, kept)
        for name, size in found.backups.items():
            _show_space(console, "backup", name, size)
        for run, size in zip(runs, found.runs, strict=True):
            _show_space(console, "run", run.name, size, run)
        for name, size in found.kept.items():
            _show_space(console, "alias", name, size)
        for name in found.unreadable:
            console.note(f"a part of {printable(name)} could not be read, and is not counted")
        try:
            pruning = prune.Prune(grid, backups.place, say=backups.say, now=time.time)
            would = await pruning.run(dry_run=True)
        except (CannotReach, UsageError) as error:
            console.note(f"what can be freed is not known: {error}")
            return ExitStatus.FAILED
        _show_space(console, "reclaimable", "", would.share_bytes)
        return ExitStatus.FAILED if found.unreadable else ExitStatus.DONE

    return GridJob(work, makes=False)


def _show_space(
    console: Console, kind: str, name: str, size: int, run: catalogue.BackupRun | None = None
) -> None:
    fields: dict[str, Any] = {
        "kind": kind,
        "name": name,
        "share_bytes": size,
        "computed": True,
    }
    if run is None:
        label = f"{kind} {printable(name)}:" if name else f"{kind}:"
        console.result(f"{label} {amount(size)}", fields)
        return
    fields |= {"path": run_paths.run_path_text(run), "time": run.time}
    console.result(f"{kind} {run_paths.shell_text(run)} {amount(size)} in no other run", fields)
