"""
The command line's grammar: global options, and commands that are loaded when they are named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.group import CommandGroup
from pipegrid.cli.job import GridJob, Invocation, Job, OfflineJob, ReactorJob, failure
from pipegrid.cli.options import common_options
from pipegrid.cli.outcome import ExitStatus, Interrupted
from pipegrid.cli.plain import COMPLETION
from pipegrid.errors import SinkError
from pipegrid.version import __version__

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from pipegrid.cli.job import OpenGrid
    from pipegrid.reactor.preconnect import Preconnector

SECTIONS = {
    "Files": ("put", "get", "cat", "encode", "decode", "storage-index"),
    "Directories": ("alias", "mkdir", "ls", "cp", "ln", "mv", "rm", "du", "stats", "manifest"),
    "Backups": ("backup", "backups", "restore"),
    "Maintenance": ("check", "repair", "renew"),
    "Servers": ("init", "status", "serve"),
    "Mirrors": ("mirror", "pdiff"),
    "Measuring": ("speedtest",),
    "Shell": ("completion",),
}
"""The commands, by the section of the help that lists them, in the order in which people meet them."""

COMMANDS = tuple(name for names in SECTIONS.values() for name in names)
"""Each is ``command`` in ``cmd_NAME``, with ``_`` for ``-``."""


class LazyGroup(CommandGroup):
    """All commands of ``COMMANDS``; the module of each is imported when it is named."""

    sections = SECTIONS
    homes = {name: (f"cmd_{name.replace('-', '_')}", "command") for name in COMMANDS}

    elsewhere = {
        "add": "put",
        "add-alias": "alias add",
        "create-alias": "alias create",
        "deep-check": "check -r",
        "delete": "rm",
        "download": "get",
        "fetch": "get",
        "list": "ls",
        "list-aliases": "alias list",
        "rename": "mv",
        "snapshots": "backups",
        "store": "put",
        "unlink": "rm",
        "upload": "put",
        "verify": "check --verify",
        "version": "--version",
    }

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; no arguments at all get the help, on stderr, as they ask for nothing."""
        if (
            not args and not ctx.resilient_parsing
        ):  # a shell that wants the commands has none, either
            invocation: Invocation = ctx.obj
            invocation.console.say(ctx.get_help())
            ctx.exit(ExitStatus.USAGE)
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@common_options
@click.version_option(__version__, message="pipegrid %(version)s")
def pipegrid() -> None:
    """
    Store files on grids of storage servers, and get them back.

    Each file is encrypted, spread over many servers so that any few of them restore it, and
    described by a capability, a short string that is both its address and its key. Keep it safe.
    """


def parse(
    arguments: Sequence[str],
    console: Console,
    run_job: Callable[[GridJob, Invocation], int] | None = None,
) -> tuple[Invocation, Job]:
    """
    Return what the arguments ask for; ``--help`` and the like are answered at once.

    Args:
        run_job: for what a shell wants to have completed.

    Raises:
        click.UsageError: they make no sense.
        Interrupted: a signal came while they were looked at.
        SystemExit: they asked for a shell completion script, which was printed.
    """
    invocation = Invocation(console)
    if COMPLETION in os.environ:
        from pipegrid.cli.completion.shells import answer_shells

        answer_shells()
        invocation.run_job = run_job
    try:
        outcome: Any = pipegrid.main(
            args=list(arguments), prog_name="pipegrid", standalone_mode=False, obj=invocation
        )
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None or isinstance(error, FileNotFoundError):  # for no directory
            raise
        raise SinkError(f"cannot write to standard output: {error.strerror}") from error  # the help
    except AttributeError:
        if sys.stdout is None:  # closed, and an older click (8.1.0) was to print the help there
            console.results.write(b"")  # says so
        raise
    except click.Abort:  # Ctrl-C, while caps were read from a terminal or a pipe
        raise Interrupted from None
    if isinstance(outcome, int):  # the status of --help and --version
        status = outcome
        if status == ExitStatus.DONE:
            console.results.write(b"")  # click says nothing of a standard output that is closed
        return invocation, OfflineJob(lambda _console: status)
    job: Job = outcome
    return invocation, job


def start(
    arguments: Sequence[str],
    console: Console,
    reactor: Any,
    open_grid: OpenGrid | None = None,
) -> Deferred[int]:
    """
    Run a command line under a running reactor.

    Args:
        arguments: without the program's name.
        open_grid: stands in for ``Grid.open``.

    Returns:
        Fires with the exit status; every error has become a sentence on stderr. Cancelling it
        stops the command, cleans up, and gives 130.
    """
    from twisted.internet.defer import succeed

    try:
        invocation, job = parse(arguments, console)
    except Exception as error:
        return succeed(failure(error, console))
    if isinstance(job, OfflineJob):
        return succeed(job.run(console))
    return start_job(job, invocation, reactor, open_grid)


def start_job(
    job: GridJob | ReactorJob,
    invocation: Invocation,
    reactor: Any,
    open_grid: OpenGrid | None = None,
    ahead: Preconnector | None = None,
) -> Deferred[int]:
    """
    Do a job under a running reactor; fires with the exit status, as ``start`` does.

    Args:
        ahead: makes connections to the grid's servers already.
    """
    from twisted.internet.defer import Deferred

    if isinstance(job, ReactorJob):
        return Deferred.fromCoroutine(job.run(invocation, reactor))
    if open_grid is None:
        from pipegrid.tree.tree_grid import Grid

        open_grid = Grid.open if ahead is None else partial(Grid.open, ahead=ahead)
    return Deferred.fromCoroutine(job.run(invocation, reactor, open_grid))
