"""``pipegrid backups`` and ``pipegrid restore``: list the runs of backups, and restore a run."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import NamedTuple

import click

from pipegrid.cli import cap_list_files, cap_lookup, restore_run, tree_transfers
from pipegrid.cli.command_job import GridJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import (
    EMPTY_NAME,
    exact_modes_option,
    gathered,
    grid_options,
    grid_path,
    limit_options,
    max_paths_option,
    owner_options,
    usage_error,
)
from pipegrid.core import caps, packed_directory
from pipegrid.core.text import amount, as_pasted, counted, printable
from pipegrid.errors import CapError, NoSuchChild, UsageError
from pipegrid.tree import aliases, directory_reading, grid_paths, metadata_restore, tree_grid
from pipegrid.tree.backup import backup_run, catalogue, run_paths, run_times

# ``pipegrid backups``: lists the runs.

NONE_LISTED = (
    "this client's own list has no backup; if another machine has stored one, give the cap that 'pipegrid "
    "backup' printed there"
)


@click.command(name="backups")
@click.argument("cap", required=False, metavar="[CAP]", shell_complete=grid_path)
@grid_options
def backups_command(cap: str | None) -> GridJob:
    """
    List the runs of all backups, the oldest first, as NAME@TIME: in local time.

    Other commands accept this as the beginning of a path: 'ls NAME@TIME:some/path'. TIME may also be
    'latest', shorter, such as 2026-11-22 or 2026-11-22_18:23, 'yesterday', or 3d, 12h or 2w ago: the newest
    run up to then. A time without a zone is local, Z means UTC. NAME is a backup of this client; for another
    catalogue use 'restore CAP NAME@TIME:PATH'.

    CAP is what 'backup' printed, on this machine or another one, or ALIAS:some/path as given to 'backup
    --as'; without CAP, this client's backups are listed.
    """

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        runs = await listed_runs(grid, console, cap)
        if cap is None and not runs:
            console.note(NONE_LISTED)
        several = len({run.machine.id for run in runs} - {""}) > 1
        for run in runs:
            host = f", on {printable(run.machine.name)}" if several and run.machine.name else ""
            left_out = f", {run.left_out} left out" if run.left_out else ""
            what = f"  {counted(run.files, 'file')}, {amount(run.bytes)}{left_out}"
            console.result(
                f"{run_paths.shell_text(run)}{what if run.counted else ''}{host}",
                {
                    "path": run_paths.run_path_text(run),
                    "name": run.name,
                    "time": run.time,
                    "cap": str(run.cap),
                    "files": run.files if run.counted else None,
                    "bytes": run.bytes if run.counted else None,
                    "left_out": run.left_out,
                    "directory": run.directory,
                    "machine": run.machine.id,
                    "host": run.machine.name,
                    "tags": list(run.tags),
                },
            )
        return ExitStatus.DONE

    return GridJob(work, cap or "", makes=cap is not None)


async def listed_runs(
    grid: tree_grid.Grid, console: Console, cap: str | None, *, some: bool = False
) -> Sequence[catalogue.BackupRun]:
    """
    Return the runs of a catalogue, of an archives directory, or of this client.

    Args:
        cap: the cap of a catalogue, or a path that leads to a catalogue or an archives directory.
        some: whether to raise an error if this client has no runs.

    Raises:
        CapError: the cap is not that of a catalogue.
        PipegridError: the catalogue cannot be read.
        UsageError: this client has no runs, and ``some`` is true.
    """
    backups = backup_run.Backups(grid, say=console.note)
    if cap is None:
        own = await backups.runs()
        if some and not own:
            raise UsageError(NONE_LISTED)
        return own
    place = await cap_lookup.place_of(grid, cap)
    if not isinstance(place.cap, caps.DirectoryCap):
        raise CapError("this is not the cap that 'pipegrid backup' printed; use that one")
    name = place.names[-1] if place.names else "backup"
    content = await backups.catalogues.load(place.cap)
    archived = await catalogue.archived_runs(grid, place.cap, content, name)
    return catalogue.runs_of(place.cap, content) if archived is None else archived


# ``pipegrid restore``: restores a run of a backup.

MAX_PATHS = 20_000_000


class RestoreOptions(NamedTuple):
    """The options of ``restore``; see their declarations."""

    output: str
    name: str | None
    at: str | None
    force: bool
    paranoid: bool
    exact_modes: bool
    numeric_owner: bool
    no_owner: bool
    max_paths: int | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    dry_run: bool
    delete: bool
    yes: bool

    @property
    def choice(self) -> restore_run.RestoreChoice:
        """Which entries are restored, and whether other files are removed."""
        return restore_run.RestoreChoice(
            self.include, self.exclude, self.dry_run, self.delete, self.yes
        )


@click.command(name="restore")
@click.argument("arguments", nargs=-1, metavar="[CAP] [PATH]", shell_complete=grid_path)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(readable=False),
    metavar="DIR",
    help="Directory to write to; '-' writes the file at PATH to standard output.",
)
@click.option("--as", "name", metavar="NAME", help="The backup to restore, if there are several.")
@click.option(
    "--at",
    metavar="TIME",
    help="Restore the newest run up to TIME: 2026-11-22, 2026-11-22_18:23 (local time; add Z for UTC), "
    "yesterday, or 3d ago.  [default: latest]",
)
@click.option("-f", "--force", is_flag=True, help="Replace existing files.")
@click.option(
    "--paranoid", is_flag=True, help="Compare existing files with the grid, byte for byte."
)
@exact_modes_option("[default: permissions, and the set-group-ID and sticky bits of directories]")
@owner_options
@max_paths_option("20000000")
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Restore only what matches, as '*.jpg' or 'docs/', directories with all their content. Repeatable.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Do not restore what matches, as of 'backup --exclude'. Repeatable.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print what would be written, replaced and removed; read no file and change nothing.",
)
@click.option(
    "--delete",
    is_flag=True,
    help="When all is restored, remove from DIR what the run does not have; it is shown first, and a "
    "terminal asks.",
)
@click.option("--yes", is_flag=True, help="Do not ask before --delete removes something.")
@limit_options
@grid_options
@gathered("options", RestoreOptions)
def restore_command(arguments: tuple[str, ...], options: RestoreOptions) -> GridJob:
    """
    Restore a directory from a backup, or what is at PATH in it.

    A file or link at PATH is written to DIR under its own name, a directory's entries under theirs. CAP is
    what 'backup' printed, and works on any machine that reaches the servers; ALIAS:some/path as given to
    'backup --as' works, too. Without CAP, a run of this client's backups is restored. PATH may begin with a
    run, NAME@TIME:some/path, as 'backups' prints it. Existing files that have not changed are not fetched
    again, and nothing is removed without --delete. Permissions are restored whatever the umask is; for a
    tree that another person has stored use 'get -r'. Owners, access control lists, extended attributes, hard
    links and holes are restored as well. What cannot be restored is reported.
    """
    _check_options(options)
    if options.output == "":
        raise usage_error(f"-o: {EMPTY_NAME}")
    # '/' names the whole run, but an empty argument comes from an unset variable.
    if any(not each.strip() for each in arguments):
        raise usage_error(f"CAP or PATH: {EMPTY_NAME}")
    rest = list(arguments)
    cap = rest.pop(0) if rest and _is_cap(rest[0]) else None
    path = _run_path(rest[0], options) if rest else None
    missing = _missing_alias(rest[0]) if rest and cap is None and path is None else ""
    if len(rest) > 1:
        raise usage_error(_too_many(rest, cap, missing))
    names = tuple(part for part in rest[0].split("/") if part) if rest else ()
    name, at = options.name, options.at
    if path is not None:
        names, name, at = path.names, path.name, path.at
    if options.output == "-" and not names:
        raise usage_error("'-o -' writes one file; give its PATH")

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        if missing:
            console.note(f"{missing}, so '{printable(rest[0])}' is looked for in the run")
        runs = await listed_runs(grid, console, cap, some=True)
        found = run_paths.choose_run(runs, name, at, time.time())
        run = found.run
        if found.warning:
            console.note(found.warning)
        console.note(_described(run, runs))
        if options.output == "-":
            called = {each.name for each in runs}
            place = await _found(grid, run.cap, names, called, cap is None)
            return await restore_run.restore_to_stdout(grid, console, place)
        root, metadata_json, is_file = await _root_of(grid, run, names, runs, cap is None)
        if is_file and options.delete:
            raise UsageError("--delete is for a directory, and PATH is a file; leave out --delete")
        how = tree_transfers.TreeOptions(
            options.force,
            options.paranoid,
            modes="exact" if options.exact_modes else "stored",
            max_paths=options.max_paths or MAX_PATHS,
            extended=_extended(options, run),
        )
        return await restore_run.restore_tree(
            grid, console, root, metadata_json, options.output, how, options.choice
        )

    return GridJob(work, *arguments[:1], makes=cap is not None)


def _extended(
    options: RestoreOptions, run: catalogue.BackupRun
) -> metadata_restore.ExtendedRestore:
    """Return the rules for restoring the extended metadata of a run, such as owners and modes."""
    owners = metadata_restore.owners_of(options.numeric_owner, options.no_owner)
    names = run.metadata.get("pipegrid")
    return metadata_restore.ExtendedRestore(owners, options.exact_modes, names)


async def _root_of(
    grid: tree_grid.Grid,
    run: catalogue.BackupRun,
    names: tuple[str, ...],
    runs: Sequence[catalogue.BackupRun],
    alone: bool,
) -> tuple[caps.Cap | None, bytes, bool]:
    """
    Return the cap of the directory to restore, its metadata, and whether it was made for a single file.

    The arguments are those of ``_found``.
    """
    import json

    if not names:
        return run.cap, json.dumps(run.metadata).encode(), False
    place = await _found(grid, run.cap, names, {each.name for each in runs}, alone)
    if isinstance(place.cap, caps.DirectoryCap):
        return place.cap, place.metadata_json, False
    return _directory_of_one(place), b"{}", True  # the file is the only entry


def _check_options(options: RestoreOptions) -> None:
    """Raise an error for options that exclude each other, or a malformed pattern."""
    if options.numeric_owner and options.no_owner:
        raise usage_error("give --numeric-owner or --no-owner, not both")
    choice = options.choice
    if "" in (*choice.include, *choice.exclude):
        raise usage_error(f"--include or --exclude: {EMPTY_NAME}")
    choice.selection()
    if options.output == "-" and choice != restore_run.RestoreChoice():
        raise usage_error(
            "'-o -' writes one file; leave out the options that select or remove files"
        )
    if choice.yes and not choice.delete:
        raise usage_error("--yes is for --delete; leave it out, or add --delete")


def _run_path(text: str, options: RestoreOptions) -> run_paths.RunPath | None:
    """
    Return an argument parsed as a path into a run; None: it is a path within the run that options choose.

    Raises:
        click.UsageError: an option also chooses a run.
    """
    if not grid_paths.names_alias(text):
        return None  # an entry's name may look like NAME@TIME
    path = run_paths.run_path_here(text, cap_lookup.client_directory())
    if path is not None and (options.name, options.at) != (None, None):
        raise usage_error(f"'{printable(text)}' says which run it is; leave out --as and --at")
    return path


def _described(run: catalogue.BackupRun, runs: Sequence[catalogue.BackupRun]) -> str:
    """Return a description of the run to restore, with the number of files that are missing in it."""
    machines = {each.machine.id for each in runs if each.name == run.name} - {""}
    host = f", on {printable(run.machine.name)}" if len(machines) > 1 and run.machine.name else ""
    lacking = f"; {run.left_out} left out when it was stored" if run.left_out else ""
    return f"{printable(run.name)} as of {run_times.run_time_text(run.at)}{host}{lacking}"


def _too_many(paths: list[str], cap: str | None, missing: str) -> str:
    """Return the error message for several paths."""
    if cap is not None or missing:
        return (
            f"{missing and missing + '; '}give one CAP and one PATH; --as NAME says of which backup"
        )
    return cap_list_files.caps_in_file(paths[0], by_option=False) or (
        f"'{printable(paths[0])}' is neither a cap nor an alias; give one PATH, and with --as NAME of which "
        "backup"
    )


async def _found(
    grid: tree_grid.Grid, root: caps.Cap, names: tuple[str, ...], called: set[str], alone: bool
) -> grid_paths.PathEnd:
    """
    Return the end of a path in a run.

    Args:
        called: the names of all backups; a path that is such a name was probably meant for ``--as``.
        alone: whether no cap was given, so that the path may be meant as a cap.

    Raises:
        CapError, UsageError: the path does not exist, and was probably meant as a backup's name, a cap or a
            run.
        NoSuchChild: the path does not exist.
    """
    path = "/".join(names)
    try:
        return await grid_paths.resolve(grid, root, names)
    except NoSuchChild:
        if path in called:
            shown = printable(shlex.quote(path))
            raise CapError(
                f"there is no '{printable(path)}' in the run; for the backup of that name say --as {shown}"
            ) from None
        if alone:
            run_paths.parse_run_path(path, {})  # raises an error for a run without a colon
            cap_list_files.check_no_file(path)
        raise


def _missing_alias(text: str) -> str:
    """Return a hint if a path looks as if it began with an alias; otherwise ""."""
    return aliases.no_alias(text.partition(":")[0]) if grid_paths.names_alias(text) else ""


def _directory_of_one(place: grid_paths.PathEnd) -> caps.DirectoryCap:
    """
    Return the cap of a literal directory with only one entry, the file at the end of a path.

    Raises:
        CapError: no cap for reading the file is known, or the file is mutable, and so not part of a backup.
    """
    cap = cap_lookup.check_known(place).cap
    if cap is None or isinstance(cap, caps.MutableCap):
        path = printable("/".join(place.names))
        raise CapError(
            f"{path} is not a file of a backup, since it is mutable; fetch its directory"
        )
    child = packed_directory.PackedChild(
        place.names[-1], cap, directory_reading.metadata_of(place.metadata_json)
    )
    return caps.DirectoryCap(caps.LitCap(packed_directory.pack_immutable([child])))


def _is_cap(text: str) -> bool:
    """Return whether an argument is a cap or begins with an existing alias, and so is not a path in a run."""
    bare = as_pasted(text)
    return bare.startswith("URI:") or cap_lookup.begins_with_alias(bare)
