"""``pipegrid backup``: stores a directory repeatedly, and reads and sends only what has changed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pipegrid.cli import cap_lookup, progress_bar
from pipegrid.cli.backup_monitoring import (
    BackupOutcome,
    BackupReports,
    ReportedJob,
    report_options,
)
from pipegrid.cli.command_job import GridJob
from pipegrid.cli.configured_options import ConfiguredCommand, configured_options
from pipegrid.cli.console import Console, source_of
from pipegrid.cli.error_report import ExitStatus, sentence, worst_status
from pipegrid.cli.options import EMPTY_NAME, gathered, grid_options, limit_options, usage_error
from pipegrid.cli.retention_options import retention_options, rules_of
from pipegrid.cli.tree_transfers import (
    SelectionOptions,
    counts_of,
    fields_of,
    report_losses,
    reports_of,
    selection_options,
)
from pipegrid.core.text import amount, counted
from pipegrid.errors import NotEnoughSharesError
from pipegrid.tree import extended_metadata, grid_paths
from pipegrid.tree.backup import backup_run, backup_sources, backup_stream, run_paths

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime

    from pipegrid.tree.tree_grid import Grid


class BackupArguments(NamedTuple):
    """
    What a run stores: directories, or a stream as one file.

    Attributes:
        sources: the directories; or a command and its arguments.
        stdin: the name of the file in the run that contains standard input.
        from_command: the name of the file in the run that contains the output of the command.
    """

    sources: tuple[str, ...]
    stdin: str | None
    from_command: str | None


@click.command(name="backup", cls=ConfiguredCommand)
@click.argument(
    "sources", nargs=-1, metavar="DIR... | -- COMMAND...", type=click.Path(readable=False)
)
@click.option(
    "--as",
    "names",
    multiple=True,
    metavar="NAME|ALIAS:PATH",
    help="The name of the backup; or a mutable directory, in which its runs are kept, too. Give the option "
    "twice for both.  [default: the names of all DIR, or of the stored file]",
)
@click.option(
    "--stdin",
    metavar="NAME",
    help="Store standard input, as the only file NAME of this run.",
)
@click.option(
    "--from-command",
    metavar="NAME",
    help="Store what COMMAND prints, as the only file NAME of this run. If COMMAND fails nothing is stored.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print what would be sent; read no file and store nothing."
)
@click.option(
    "--tag",
    "tags",
    multiple=True,
    metavar="TAG",
    help="Give the run a tag, which --keep-tag finds; may be given again.",
)
@retention_options
@configured_options
@selection_options
@report_options
@limit_options
@grid_options
@gathered("given", BackupArguments)
def backup_command(
    given: BackupArguments,
    names: tuple[str, ...],
    dry_run: bool,
    tags: tuple[str, ...],
    rules: dict[str, Any],
    selection: dict[str, Any],
    reports: BackupReports,
) -> GridJob:
    """
    Store directories as they are now, and add this run to the list of all runs.

    One DIR is the whole tree of the run; of several, each appears there at its absolute path.

    Files that have not changed since an earlier run are neither read nor sent. Objects that were not
    checked for some weeks are checked, and their leases are renewed. The printed cap restores every run in
    the list, and is the same each time: keep it on another machine. The cap that changes the list is in
    'private/backup/catalogue.cap' of the client's directory.

    With --as ALIAS:PATH the run is also kept as PATH/Archives/TIME and PATH/Latest, as Tahoe-LAFS does, so
    that either program reads the other's.

    The exit status is 1 if something could not be read; the rest is stored and listed all the same. Named
    pipes, sockets and devices are skipped, and counted. A forgotten run is no longer listed; 'pipegrid prune'
    frees the space of files that no other run has.

    Each option can also be set by a variable, such as PIPEGRID_BACKUP_LIMIT_RATE, and under its name in
    [backup NAME] of pipegrid.cfg; the command line counts most, then the variable.
    """
    sources, stdin, from_command = given
    stored = sources if from_command is None else sources[:1]  # a command may have empty arguments
    if "" in (*stored, *names, *tags, stdin, from_command):
        raise usage_error(EMPTY_NAME)
    chosen = SelectionOptions(**selection)
    path, named = _place_of(names)
    file_name = _file_name(given, chosen)
    directories = None if file_name else backup_sources.BackupDirectories(sources)
    made_anew = chosen.of(*([] if directories is None else directories.selected))
    default_name = file_name if directories is None else directories.name
    outcome = BackupOutcome(named or default_name or "", reports.json_progress)

    async def work(grid: Grid, console: Console) -> int:
        archives = None if path is None else await cap_lookup.root_of(grid, path)
        kept, with_tags = rules_of(rules), tuple(dict.fromkeys(tags))
        options = backup_run.BackupOptions(
            made_anew, chosen.one_file_system, kept, archives, named is not None, with_tags
        )
        backups = backup_run.Backups(grid, say=console.note)
        stream = source_of("-", console.stdin) if stdin else sources
        source = directories or backup_stream.BackupStream(file_name or "", stream)
        do = _would_send if dry_run else partial(_run, grid.clock)
        status = await do(outcome, console, backups, source, options, chosen)
        chosen.report_unmatched(console)
        return status

    if dry_run:
        return GridJob(work, path or "")
    return ReportedJob(work, reports, outcome, path or "")


def _file_name(given: BackupArguments, chosen: SelectionOptions) -> str | None:
    """Return the name of the file if a stream is stored, or None if directories are stored."""
    sources, stdin, from_command = given
    if stdin is not None and from_command is not None:
        raise usage_error("give --stdin or --from-command, not both")
    if stdin is None and from_command is None:
        if not sources:
            context = click.get_current_context()
            argument = next(each for each in context.command.params if each.name == "sources")
            raise click.MissingParameter(ctx=context, param=argument)
        return None
    if stdin is not None and sources:
        raise usage_error("--stdin stores standard input alone; leave out DIR")
    if from_command is not None and not sources:
        raise usage_error("--from-command needs a command; add it at the end: -- COMMAND ARGUMENTS")
    if chosen.is_any:
        raise usage_error("options that select files are for directories; leave them out")
    return stdin or from_command


def _place_of(given: tuple[str, ...]) -> tuple[str | None, str | None]:
    """
    Return the path and the name that ``--as`` gives; None for one that is missing. A value with a colon is a
    path if it begins with a cap or has the form ``ALIAS:some/path``.
    """
    paths = [each for each in given if ":" in each and _is_path(each)]
    names = [each for each in given if each not in paths]
    if len(paths) > 1 or len(names) > 1:
        raise usage_error("give one NAME and one ALIAS:PATH with --as")
    return paths[0] if paths else None, names[0] if names else None


def _is_path(text: str) -> bool:
    return grid_paths.has_path(text) or text.strip().startswith("URI:")


async def _run(
    clock: IReactorTime,
    outcome: BackupOutcome,
    console: Console,
    backups: backup_run.Backups,
    source: backup_run.BackupSource,
    options: backup_run.BackupOptions,
    chosen: SelectionOptions,
) -> ExitStatus:
    losses = extended_metadata.MetadataLosses()
    with progress_bar.ProgressBar(console, "backup") as progress:
        reports = outcome.watched(console, clock, reports_of(console, progress, losses))
        result = await backups.run(source, outcome.name, options, reports)
    run, counts = result.run, result.counts
    report_losses(console, losses, "stored")
    console.note(f"{run_paths.run_path_text(run)} {counts_of(counts)}; {result.elapsed_s:.1f} s")
    statuses = {chosen.status_of(counts)}
    for problem in result.problems:
        about = f"{run.cap} is stored, but not listed everywhere"
        # If no server has a share of the list, the next run cannot continue it, so the message does not
        # promise that.
        if not (isinstance(problem, NotEnoughSharesError) and not problem.found):
            about += "; the next run tries again"
        statuses.add(console.complain(problem, about=about))
    if result.forgotten:
        console.note(
            f"forgot {counted(len(result.forgotten), 'run')}; 'pipegrid prune' frees the space of "
            "what only they had"
        )
    console.result_once(
        str(result.catalogue),
        {
            "catalogue": str(result.catalogue),
            "name": run.name,
            "time": run.time,
            "cap": str(run.cap),
            **fields_of(counts),
            "not_stored": losses.counts(),
            "forgotten": [f"{each.name} {each.time}" for each in result.forgotten],
            "problems": [sentence(problem) for problem in result.problems],
            "elapsed_s": result.elapsed_s,
            **outcome.finished(result),
        },
    )
    return worst_status(statuses)


async def _would_send(
    outcome: BackupOutcome,
    console: Console,
    backups: backup_run.Backups,
    source: backup_run.BackupSource,
    options: backup_run.BackupOptions,
    chosen: SelectionOptions,
) -> ExitStatus:
    with progress_bar.ProgressBar(console, "backup") as progress:
        would = await backups.would_send(
            source, options, reports_of(console, progress), outcome.name
        )
    console.result(
        f"would send {counted(would.objects, 'object')}, {would.bytes} bytes ({amount(would.bytes)}; about "
        f"{amount(would.share_bytes)} on servers), and check {would.checks}",
        {
            "objects": would.objects,
            "bytes": would.bytes,
            "share_bytes": would.share_bytes,
            "checks": would.checks,
            "files": would.counts.files,
            "left_out": would.counts.left_out,
            "excluded": would.counts.excluded,
            "skipped": would.counts.skipped,
        },
    )
    return chosen.status_of(would.counts)
