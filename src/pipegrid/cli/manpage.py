r"""
The manual page, made from the commands' ``--help``: ``python -m pipegrid.cli.manpage`` prints it.

The wheel has it as ``share/man/man1/pipegrid.1``; a test checks that it is current. Source: man(7).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator

import click

from pipegrid.cli.command_grammar import pipegrid
from pipegrid.version import __version__

STATUSES = (
    ("0", "done"),
    ("1", "a file could not be read or written, or any other error"),
    ("2", "the command line, a cap or a configuration is invalid"),
    ("3", "not enough servers, or happiness not reached"),
    ("4", "not enough shares"),
    ("5", "corruption found"),
    ("130", "interrupted, after cleaning up"),
)

_COMMON = {"--directory", "--json", "--quiet", "--verbose", "--trace", "--help", "--version"}
"""Options that every command has; the man page describes them once."""


def page() -> str:
    """Return the whole man page, as troff source."""
    context = click.Context(pipegrid, info_name="pipegrid", **pipegrid.context_settings)
    lines = [
        r".\" Made by 'make manpage' of what --help says; do not change it by hand.",
        f'.TH PIPEGRID 1 "" "pipegrid {__version__}" "User Commands"',
        ".SH NAME",
        r"pipegrid \- store files on grids of storage servers, and get them back",
        ".SH SYNOPSIS",
        r".B pipegrid",
        r"[\fIOPTION\fR]... \fICOMMAND\fR [\fIARGUMENT\fR]...",
        ".SH DESCRIPTION",
        *_prose(_help(pipegrid)),
        ".SH OPTIONS",
        "They may be given before or after the command.",
        *_options(pipegrid, context, common=True),
        ".SH COMMANDS",
    ]
    for name, command, below in _commands(pipegrid, context):
        lines += _command(name, command, below)
    lines += [".SH EXIT STATUS"]
    for status, meaning in STATUSES:
        lines += [".TP", rf"\fB{status}\fR", _escaped(meaning)]
    lines += [
        ".SH ENVIRONMENT",
        ".TP",
        r"\fBPIPEGRID_DIR\fR",
        r"The client's directory, where \-d names none.",
        ".TP",
        r"\fBXDG_DATA_HOME\fR",
        r"Where there is neither, the directory is \fIpipegrid\fR in this one, or in \fI~/.local/share\fR.",
        ".SH FILES",
        ".TP",
        r"\fIpipegrid.cfg\fR",
        "In the client's directory: how files are encoded, and the grid of its own.",
        ".TP",
        r"\fIprivate/servers.yaml\fR, \fIprivate/introducers.yaml\fR",
        "Servers, and introducers that name servers.",
        ".SH EXAMPLES",
        ".nf",
        r"pipegrid put \-l *.jpg > caps",
        r"pipegrid check \-\-add\-lease \-\-cap\-file caps",
        r"pipegrid get \-\-cap\-file caps \-o back/",
        ".fi",
    ]
    return "\n".join(lines) + "\n"


def _commands(
    group: click.Group, context: click.Context, lead: str = ""
) -> Iterator[tuple[str, click.Command, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        below = click.Context(command, info_name=name, parent=context)
        yield lead + name, command, below
        if isinstance(command, click.Group):
            yield from _commands(command, below, f"{lead}{name} ")


def _command(name: str, command: click.Command, context: click.Context) -> list[str]:
    # "[OPTIONS]" is left out, since the page lists the options.
    words = [word for word in command.collect_usage_pieces(context) if word != "[OPTIONS]"]
    arguments = " ".join(rf"\fI{_escaped(word)}\fR" for word in words)
    return [
        rf".SS \fB{_escaped(name)}\fR {arguments}".rstrip(),
        *_prose(_help(command)),
        *_options(command, context, common=False),
    ]


def _options(command: click.Command, context: click.Context, *, common: bool) -> list[str]:
    lines = []
    for option in command.get_params(context):
        if not isinstance(option, click.Option) or option.hidden:
            continue
        if common is _COMMON.isdisjoint(option.opts):
            continue
        record = option.get_help_record(context)
        if record is not None:
            names = re.sub(r"(?<![\w-])(-[\w-]+)", r"\\fB\1\\fR", record[0])
            lines += [".TP", _escaped(names, keep=True), _escaped(" ".join(record[1].split()))]
    return lines


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "")


def _prose(text: str) -> list[str]:
    """Return a text, whose paragraphs are separated by empty lines, as lines of troff."""
    lines: list[str] = []
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text)):
        lines += [*([".PP"] if number else []), _escaped(" ".join(paragraph.split()))]
    return lines


def _escaped(text: str, *, keep: bool = False) -> str:
    r"""Return text that roff shows unchanged; ``keep``: except ``\fB`` and ``\fR``."""
    text = text if keep else text.replace("\\", r"\e")
    text = text.replace("-", r"\-")
    return rf"\&{text}" if text[:1] in (".", "'") else text


if __name__ == "__main__":
    sys.stdout.write(page())
