"""
Options of a command from the environment, and from the sections ``[backup NAME]`` of ``pipegrid.cfg``.

Every option has a variable and a setting, named after the option: ``--limit-rate`` is
``PIPEGRID_BACKUP_LIMIT_RATE``, and ``limit-rate`` in a section. The command line takes precedence over the
environment, and the environment over the file. Everything is parsed before any backup runs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource, iter_params_for_processing

from pipegrid.cli import command_job
from pipegrid.cli.command_job import GridJob, Invocation
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, worst_status
from pipegrid.cli.options import all_of, common_options
from pipegrid.core.text import counted, printable
from pipegrid.errors import UsageError
from pipegrid.grid import client_paths, strict_config, tor_socks_settings

DIRECTORIES = ("directory", "directories")
"""The settings of a section that are not options: the directories to store, one path per line."""

_SELECTING = ("every", "configured", "list_configured")
"""Parameters that choose sections, and so cannot be settings of a section."""

_STREAMS = ("stdin", "from_command")
"""Parameters that are allowed only on the command line, since a section stores directories."""

configured_options = all_of(
    click.option(
        "--list-configured",
        is_flag=True,
        expose_value=False,
        help="List the backups in the sections [backup NAME] of pipegrid.cfg; run none.",
    ),
    click.option(
        "--configured",
        multiple=True,
        expose_value=False,
        metavar="NAME",
        help="Run the backup in [backup NAME] of pipegrid.cfg; may be given several times.",
    ),
    click.option(
        "--all",
        "every",
        is_flag=True,
        expose_value=False,
        help="Run all backups in pipegrid.cfg, one after the other, whatever each one's outcome.",
    ),
)
"""The options that every ``ConfiguredCommand`` has and handles itself."""


NAME_VARIABLE = "PIPEGRID_BACKUP_NAME"
"""The variable with the name of the backup, for the hooks that ``backup`` runs; it sets no option."""

ARGUMENTS_VARIABLE = "PIPEGRID_BACKUP_ARGUMENTS"
"""The variable with the command line of ``backup``, in systemd's unit and the unit's environment file."""


class BackupSection(NamedTuple):
    """
    A section ``[backup NAME]`` of ``pipegrid.cfg``.

    Attributes:
        directories: the directories to store; they become arguments of the command.
        values: the settings, by the names of parameters.
        where: the file, line and name of each setting, for errors; "": those of the section.
    """

    name: str
    directories: tuple[str, ...]
    values: dict[str, Any]
    where: dict[str, str]


class ConfiguredCommand(click.Command):
    """A command whose options may also be set in the environment, and in sections of ``pipegrid.cfg``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """
        Parse the command line, and the variables or sections that set further options.

        Raises:
            click.UsageError: the command line or a setting is invalid; the message names the setting's place.
            UsageError: a section or variable is invalid.
        """
        invocation = ctx.find_object(Invocation)
        if ctx.resilient_parsing or invocation is None:
            return super().parse_args(ctx, args)
        from_environment, where = self._environment(os.environ)
        if invocation.places is None:
            given, rest, order = self.make_parser(ctx).parse_args(args=[*args])
            if any(given.get(name) for name in _SELECTING):
                return self._parse_sections(ctx, invocation, [*args], (given, rest, order))
        ctx.default_map = {**(ctx.default_map or {}), **from_environment}
        places = {**(invocation.places or {}), **where}
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = "" if error.param is None else error.param.name or ""
            place = places.get(name)
            if place is None or ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE:
                raise
            raise click.UsageError(f"{place}: {error.message.rstrip('.')}; correct it") from None

    def invoke(self, ctx: click.Context) -> Any:
        """Return the job of the command, or of the sections that were chosen."""
        job = ctx.meta.pop(_JOB, None)
        return super().invoke(ctx) if job is None else job

    # Access to options by their long names.

    def _settable(self) -> dict[str, click.Option]:
        """Return the options that a section or an environment variable may set, by their long names."""
        others = {param.name for param in _params_of(common_options)}.union(_SELECTING, _STREAMS)
        found = {}
        for param in self.params:
            if isinstance(param, click.Option) and param.name not in others:
                long = [each for each in param.opts if each.startswith("--")]
                found[long[0].removeprefix("--")] = param
        return found

    def _environment(self, environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the values of options that are in the environment, and the name of the variable of each."""
        values, where = {}, {}
        known: set[str] = set()
        for name, param in self._settable().items():
            variable = f"PIPEGRID_{self.name}_{name}".upper().replace("-", "_")
            text = environment.get(variable, "")
            if text and param.name is not None:
                values[param.name] = _value(param, text, f"${variable}", None)
                where[param.name] = f"${variable}"
            known.add(variable)
        self._check_variables(environment, known)
        return values, where

    def _check_variables(self, environment: Mapping[str, str], known: Collection[str]) -> None:
        """Refuse a variable that looks like an option's but sets no option, as with a misspelt name."""
        start = f"PIPEGRID_{self.name}_".upper()
        # A hook of 'backup' may run another 'backup', and units of systemd pass on all their variables.
        others = (NAME_VARIABLE, ARGUMENTS_VARIABLE)
        for variable, text in environment.items():
            if variable.startswith(start) and text and variable not in (*known, *others):
                close = strict_config.closest_name(variable, known)
                raise UsageError(
                    f"${printable(variable)} sets no option of '{self.name}'{close}; correct or unset it"
                )

    # Sections.

    def _parse_sections(
        self,
        ctx: click.Context,
        invocation: Invocation,
        args: list[str],
        parsed: tuple[dict[str, Any], list[str], list[click.Parameter]],
    ) -> list[str]:
        given, rest, order = parsed
        params = self.get_params(ctx)
        for param in iter_params_for_processing(order, params):
            if isinstance(param, click.Option):
                param.handle_parse_result(ctx, given, rest)
        named = tuple(given.get("configured") or ())
        arguments = [given.get(each.name) for each in params if isinstance(each, click.Argument)]
        # For an argument that was not given, click's parser has None, an empty tuple, or an object of its
        # own.
        if rest or any(isinstance(each, (str, tuple, list)) and each for each in arguments):
            raise click.UsageError("what is stored is in pipegrid.cfg; give no DIR", ctx)
        if sum(map(bool, (given.get("every"), named, given.get("list_configured")))) > 1:
            raise click.UsageError("choose one of --all, --configured and --list-configured", ctx)
        sections = self._sections(invocation, named)
        if given.get("list_configured"):
            ctx.meta[_JOB] = command_job.OfflineJob(lambda console: _list(console, sections))
            for section in sections:
                self._context(ctx, invocation, args, section)
            return []
        made = [(each.name, *self._context(ctx, invocation, args, each)) for each in sections]
        self._check_names(made)
        _check_input(made)
        jobs = []
        for section, (name, context, own) in zip(sections, made, strict=True):
            with context, _of_section(section):
                job = super().invoke(context)
            jobs.append((name, job, own))
        ctx.meta[_JOB] = SectionsJob(jobs)
        return []

    def _context(
        self, ctx: click.Context, invocation: Invocation, args: list[str], section: BackupSection
    ) -> tuple[click.Context, Invocation]:
        """Return the parsed options of one section: the command's context, and the global options."""
        own = copy.copy(invocation)
        own.places = section.where
        stored = ["--", *section.directories] if section.directories else []
        with _of_section(section):
            context = self.make_context(
                ctx.info_name,
                [*args, *stored],
                parent=ctx.parent,
                obj=own,
                default_map=section.values,
            )
        return context, own

    def _check_names(self, made: Sequence[tuple[str, click.Context, Invocation]]) -> None:
        """
        Refuse two sections that store backups of the same name, which ``--as`` on the command line may cause.
        """
        param = self._settable().get("as")
        seen: dict[str, str] = {}
        for section, context, _ in made:
            names = () if param is None else context.params.get(param.name or "") or ()
            for name in (each for each in names if ":" not in each):
                if name in seen:
                    raise UsageError(
                        f"[backup {seen[name]}] and [backup {section}] have the same name {name!r}; "
                        "give each its own"
                    )
                seen[name] = section

    def _sections(self, invocation: Invocation, named: Sequence[str]) -> list[BackupSection]:
        """
        Return the sections with the given names, or all sections.

        Raises:
            UsageError: a section does not exist, or a setting in any section is wrong.
        """
        path, parser = strict_config.read_config(invocation.grid_directory)
        if path.name == client_paths.TAHOE_CONFIG_NAME:
            raise UsageError(
                f"{path} is Tahoe-LAFS's, which permits no sections of other programs; make a directory with "
                "'pipegrid init --tahoe', and configure backups in its pipegrid.cfg"
            )
        headings = [each for each in parser.sections() if strict_config.is_backup_section(each)]
        found: dict[str, BackupSection] = {}
        for section in (self._read(parser, each, path) for each in headings):
            if section.name in found:
                raise UsageError(
                    f"{section.where['']} is the second with the name {section.name!r}; give each its own"
                )
            found[section.name] = section
        if not found:
            raise UsageError(f"{path} has no section [backup NAME]; add one, with a 'directory'")
        for name in named:
            if name not in found:
                close = strict_config.closest_name(name, found)
                raise UsageError(f"{path} has no section [backup {printable(name)}]{close}")
        return [found[name] for name in dict.fromkeys(named or found)]

    def _read(self, parser: strict_config.SettingsFile, heading: str, path: Path) -> BackupSection:
        name = strict_config.backup_name(heading)
        settable = self._settable()
        values: dict[str, Any] = {}
        where = {"": f"{parser.at_section(heading)}: [{heading}]"}
        if ":" in name:
            raise UsageError(
                f"{where['']}: the name of a backup has no colon, since it would be a path; choose another"
            )
        directories: list[str] = []
        for setting, text in parser.items(heading):
            place = parser.at(heading, setting)
            if setting in DIRECTORIES:
                directories += [
                    str(client_paths.expanded(each, path.parent, place))
                    for each in _lines(text, place)
                ]
                continue
            param = settable.get(setting)
            if param is None or param.name is None:
                close = strict_config.closest_name(setting, [*settable, *DIRECTORIES])
                raise UsageError(f"{where['']} has no setting {setting}{close}; correct it by hand")
            values[param.name] = _value(param, text, place, path.parent)
            where[param.name] = place
        names = settable.get("as")
        if names is not None and names.name is not None:
            said = values.get(names.name, ())
            if all(":" in each for each in said):  # only paths, and no name
                values[names.name] = (name, *said)
        return BackupSection(name, tuple(directories), values, where)


_JOB = "pipegrid.configured.job"


def _check_input(made: Sequence[tuple[str, click.Context, Invocation]]) -> None:
    """Refuse two sections that both read standard input: the second would read nothing."""
    reading = [
        section
        for section, context, _ in made
        if context.params.get("stdin")
        or "-" in (context.params.get("files_from"), context.params.get("files_from0"))
    ]
    if len(reading) > 1:
        raise UsageError(
            f"[backup {reading[0]}] and [backup {reading[1]}] both read standard input, which can be read "
            "only once; give each a file"
        )


@contextmanager
def _of_section(section: BackupSection) -> Iterator[None]:
    """Name the section in errors that the command raises, unless the error names a setting already."""
    try:
        yield
    except click.MissingParameter as error:
        if isinstance(error.param, click.Argument):
            text = f"{section.where['']} has no setting 'directory'; add what is stored"
            raise click.UsageError(text) from None
        raise
    except click.UsageError as error:
        text = error.format_message().rstrip(".")
        if any(text.startswith(place) for place in section.where.values()) or text.startswith("$"):
            raise
        raise click.UsageError(f"{section.where['']}: {text}") from None


def _params_of(add: Callable[[Any], Any]) -> list[click.Parameter]:
    """Return the parameters that a decorator adds."""
    found: list[click.Parameter] = add(lambda: None).__click_params__
    return found


def _lines(text: str, where: str) -> list[str]:
    found = [line.strip() for line in text.split("\n") if line.strip()]
    if not found:
        raise UsageError(f"{where} is empty; write a value, or leave the line out")
    return found


def _value(param: click.Option, text: str, where: str, base: Path | None) -> Any:
    """
    Return the value of a setting, in the form in which click takes it from a command line.

    Args:
        base: the directory of the settings' file, to which paths are relative; None: paths are relative to
            the working directory.
    """
    lines = _lines(text, where)
    if param.is_flag:
        word = text.strip().lower()
        if word not in (*tor_socks_settings.TRUE, *tor_socks_settings.FALSE):
            raise UsageError(f"{where} is {text.strip()[:60]!r}, and it must be yes or no")
        return word in tor_socks_settings.TRUE
    if isinstance(param.type, click.Path) and base is not None:
        lines = [
            each if each == "-" else str(client_paths.expanded(each, base, where)) for each in lines
        ]
    return tuple(lines) if param.multiple else "\n".join(lines)


def _list(console: Console, sections: Sequence[BackupSection]) -> ExitStatus:
    for each in sections:
        stored = ", ".join(map(printable, each.directories))
        console.result(
            f"{printable(each.name)}  {stored}",
            {"name": each.name, "directories": list(each.directories)},
        )
    return ExitStatus.DONE


class SectionsJob(GridJob):
    """
    A job that runs several backups, one after the other; each opens the grid with its own limits.

    Args:
        jobs: the name, job and options of each backup.
    """

    asks_servers = False  # each backup connects when it begins

    def __init__(self, jobs: Sequence[tuple[str, GridJob, Invocation]]) -> None:
        self._jobs = jobs

    async def run(
        self, invocation: Invocation, reactor: Any, open_grid: command_job.OpenGrid
    ) -> int:
        """Run the backups; return the worst status."""
        console = invocation.console
        statuses: dict[str, ExitStatus] = {}
        for name, job, own in self._jobs:
            console.note(f"backup {printable(name)}")
            statuses[name] = ExitStatus(await job.run(own, reactor, open_grid))
            if statuses[name] == ExitStatus.INTERRUPTED or console.results.reader_left:
                break
        failed = {name: status for name, status in statuses.items() if status}
        left = len(self._jobs) - len(statuses)
        text = f"{len(statuses) - len(failed)} of {counted(len(self._jobs), 'backup')} succeeded"
        for name, status in failed.items():
            text += f"; {printable(name)}: exit status {int(status)}"
        console.note(text + (f"; {left} not begun" if left else ""))
        if not (console.results.failed or console.results.abandoned):
            console.json_result(
                {"backups": {name: int(status) for name, status in statuses.items()}}
            )
        return worst_status(statuses.values())
