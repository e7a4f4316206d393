"""The command line's grammar: global options, and commands whose modules are loaded when they are named."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli import completion
from pipegrid.cli.command_job import GridJob, Invocation, Job, OfflineJob, ReactorJob, failure
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, Interrupted
from pipegrid.cli.options import common_options
from pipegrid.cli.startup.fast_mirror_args import COMPLETION
from pipegrid.errors import SinkError
from pipegrid.tree import tree_grid
from pipegrid.version import __version__

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from pipegrid.cli.command_job import OpenGrid
    from pipegrid.reactor.preconnect import Preconnector


# A group of commands whose help shows whole sentences.


class CommandGroup(click.Group):
    """A group whose help describes each command in a whole sentence."""

    homes: Mapping[str, tuple[str, str]] = {}
    """For commands imported when they are named: the module in this package, and the name in the module."""

    sections: Mapping[str, Sequence[str]] = {}
    """The commands under each heading of the help; all other commands are under "Commands"."""

    names_in_other_programs: Mapping[str, str] = {}
    """Names that other programs give to commands, and the names of these commands here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """
        Parse the command line. If it names no command, raise an error that lists the commands; click would
        print the whole help.
        """
        if not args and not ctx.resilient_parsing:
            names = self.list_commands(ctx)
            raise click.UsageError(
                f"name one of these: {', '.join(names[:-1])} or {names[-1]}", ctx
            )
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names; if it does not exist, the error suggests one."""
        name = args[0]
        if name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches  # only for wrong names

        near = self.names_in_other_programs.get(name) or next(
            iter(get_close_matches(name, self.list_commands(ctx), 1)), None
        )
        hint = "" if near is None else f"; did you mean '{ctx.command_path} {near}'?"
        raise click.UsageError(f"No such command '{name}'{hint}", ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self.homes]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return one command, or None."""
        if cmd_name not in self.homes:
            return super().get_command(ctx, cmd_name)
        module, name = self.homes[cmd_name]
        command = getattr(import_module(f"pipegrid.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """
        Write the lists of commands with whole sentences; click would shorten sentences longer than a line.
        """
        names = self.list_commands(ctx)
        listed = {name for section in self.sections.values() for name in section}
        rest = [name for name in names if name not in listed]
        widest = max(map(len, names), default=0)
        for heading, section in (*self.sections.items(), ("Commands", rest)):
            found = [(name, self.get_command(ctx, name)) for name in section]
            rows = [
                (name.ljust(widest), each.get_short_help_str(1000))
                for name, each in found
                if each is not None
            ]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


# The command line's grammar: global options, and commands whose modules are loaded when they are named.

SECTIONS = {
    "Files": {
        "put": "cmd_put",
        "get": "cmd_get_cat",
        "cat": "cmd_get_cat",
        "encode": "cmd_encode_decode",
        "decode": "cmd_encode_decode",
        "storage-index": "cmd_encode_decode",
    },
    "Directories": {
        "alias": "cmd_alias",
        "mkdir": "cmd_directory_changes",
        "ls": "cmd_ls_du_stats",
        "cp": "cmd_directory_changes",
        "ln": "cmd_directory_changes",
        "mv": "cmd_directory_changes",
        "rm": "cmd_directory_changes",
        "du": "cmd_ls_du_stats",
        "stats": "cmd_ls_du_stats",
        "manifest": "cmd_ls_du_stats",
    },
    "Backups": {
        "backup": "cmd_backup",
        "backups": "cmd_backups_restore",
        "restore": "cmd_backups_restore",
        "forget": "cmd_forget_prune_pins",
        "prune": "cmd_forget_prune_pins",
        "pin": "cmd_forget_prune_pins",
        "unpin": "cmd_forget_prune_pins",
        "pins": "cmd_forget_prune_pins",
        "mount": "cmd_mount",
        "find": "cmd_find_diff",
        "diff": "cmd_find_diff",
        "space": "cmd_forget_prune_pins",
    },
    "Maintenance": {
        "check": "cmd_upkeep",
        "repair": "cmd_upkeep",
        "renew": "cmd_upkeep",
    },
    "Servers": {
        "init": "cmd_init",
        "invite": "cmd_invite",
        "join": "cmd_join",
        "status": "cmd_status",
        "serve": "cmd_serve",
        "introducer": "cmd_introducer",
        "grid-manager": "cmd_grid_manager",
        "gateway": "cmd_gateway",
    },
    "Mirrors": {
        "mirror": "cmd_mirror",
        "pdiff": "cmd_mirror",
    },
    "Measuring": {
        "speedtest": "cmd_speedtest",
    },
    "Shell": {
        "completion": "cmd_completion",
    },
}
"""
The headings of the help, and below each its commands with their modules, in the order of first use. In its
module, a command ``NAME`` is ``NAME_command``, with ``_`` for ``-``.
"""

COMMANDS = {name: module for names in SECTIONS.values() for name, module in names.items()}


class LazyGroup(CommandGroup):
    """
    The group of all commands in ``COMMANDS``; each module is imported when one of its commands is named.
    """

    sections = {heading: tuple(names) for heading, names in SECTIONS.items()}
    homes = {
        name: (module, f"{name.replace('-', '_')}_command") for name, module in COMMANDS.items()
    }

    names_in_other_programs = {
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
        """Parse the command line; if it is empty, print the help on stderr."""
        if not args and not ctx.resilient_parsing:  # no help while a shell completes
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
    Parse a command line, and return its job; ``--help`` and ``--version`` print their text at once.

    Args:
        run_job: runs jobs for shell completion.

    Raises:
        click.UsageError: the arguments are invalid.
        Interrupted: a signal came while the arguments were parsed.
        SystemExit: the environment asked for a completion script or for completions, which were printed.
    """
    invocation = Invocation(console)
    if COMPLETION in os.environ:
        completion.answer_shells()
        invocation.run_job = run_job
    try:
        outcome: Any = pipegrid.main(
            args=list(arguments), prog_name="pipegrid", standalone_mode=False, obj=invocation
        )
    except BrokenPipeError:
        raise
    except OSError as error:
        # An error with a path, such as that of a missing directory, is reported with its path.
        if error.filename is not None or isinstance(error, FileNotFoundError):
            raise
        # Otherwise the help could not be printed.
        raise SinkError(f"cannot write to standard output: {error.strerror}") from error
    except AttributeError:
        # With a closed standard output, click 8.1.0 raises AttributeError when it prints the help.
        if sys.stdout is None:
            console.results.write(b"")  # raises SinkError
        raise
    except click.Abort:  # Ctrl-C, while caps were read from a terminal or a pipe
        raise Interrupted from None
    if isinstance(outcome, int):  # the status of --help and --version
        if outcome == ExitStatus.DONE:
            # Click ignores a closed standard output; this write raises an error for it.
            console.results.write(b"")
        return invocation, OfflineJob(lambda _console: outcome)
    return invocation, outcome


def start(
    arguments: Sequence[str],
    console: Console,
    reactor: Any,
    open_grid: OpenGrid | None = None,
) -> Deferred[int]:
    """
    Run a command line under a running reactor.

    Args:
        arguments: the command line without the program's name.
        open_grid: is called instead of ``Grid.open``.

    Returns:
        A Deferred that fires with the exit status, after every error was printed as a sentence on stderr.
            Cancelling stops the command, which cleans up and exits with 130.
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
    Do a job under a running reactor; return a Deferred that fires with the exit status, as ``start`` does.

    Args:
        ahead: the preconnector that has connected to the grid's servers in advance, or None.
    """
    from twisted.internet.defer import Deferred

    if isinstance(job, ReactorJob):
        return Deferred.fromCoroutine(job.run(invocation, reactor))
    open_grid = open_grid or partial(tree_grid.Grid.open, ahead=ahead)
    return Deferred.fromCoroutine(job.run(invocation, reactor, open_grid))
