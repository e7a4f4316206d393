"""
Turns errors into one sentence for people, and an exit status for scripts.

The statuses are an interface, documented in ``docs/reference-cli.md``.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Collection

from pipegrid.core.text import printable
from pipegrid.errors import (
    CorruptionError,
    NotEnoughSharesError,
    PipegridError,
    SinkError,
    SourceError,
    UnhappyError,
    UsageError,
)

TYPE_CHECKING = False  # instead of the import from ``typing``, which is slow
if TYPE_CHECKING:
    from typing import TypeGuard

    import click


class ExitStatus(enum.IntEnum):
    """The exit statuses of the process."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNHAPPY = 3
    NOT_ENOUGH_SHARES = 4
    CORRUPTION = 5
    UNCHANGED = 6
    INTERRUPTED = 130


class Interrupted(Exception):
    """The user has interrupted the command, and it has cleaned up."""


class UnprintedCap(SinkError):
    """The only copy of a cap could not be printed; the message says where the cap is saved."""


_STATUS_OF: tuple[tuple[type[Exception], ExitStatus], ...] = (
    (UnhappyError, ExitStatus.UNHAPPY),
    (NotEnoughSharesError, ExitStatus.NOT_ENOUGH_SHARES),
    (CorruptionError, ExitStatus.CORRUPTION),
    (UsageError, ExitStatus.USAGE),
    (Interrupted, ExitStatus.INTERRUPTED),
)


def status_of(error: BaseException) -> ExitStatus:
    """Return the exit status for an error."""
    for kind, status in _STATUS_OF:
        if isinstance(error, kind):
            return status
    return ExitStatus.USAGE if _is_clicks(error) else ExitStatus.FAILED


def _is_clicks(error: BaseException) -> TypeGuard[click.UsageError]:
    """Return whether an error is click's UsageError; False if click was not imported."""
    click = sys.modules.get("click")
    return click is not None and isinstance(error, click.UsageError)


def one_status(statuses: Collection[ExitStatus]) -> ExitStatus:
    """
    Return the exit status for several files: 0 if all succeeded; the failures' status if all have the same;
    else 1.
    """
    failures = set(statuses) - {ExitStatus.DONE}
    if len(failures) > 1:
        return ExitStatus.FAILED
    return failures.pop() if failures else ExitStatus.DONE


_GRAVITY = (
    ExitStatus.DONE,
    ExitStatus.UNCHANGED,
    ExitStatus.FAILED,
    ExitStatus.UNHAPPY,
    ExitStatus.CORRUPTION,
    ExitStatus.NOT_ENOUGH_SHARES,
    ExitStatus.USAGE,
    ExitStatus.INTERRUPTED,
)
"""The statuses from the least to the most severe; lost files are worse than damaged ones."""


def worst_status(statuses: Collection[ExitStatus]) -> ExitStatus:
    """Return the most severe status; 0 if there are no statuses."""
    return max(statuses, key=_GRAVITY.index, default=ExitStatus.DONE)


_OPTIONS = {
    "replace=True": "--force",
    "force=True": "--force",
    "less with happy": "less with --happy",
    "max_segment_bytes = ": "--max-segment ",
    "convergence=b''": "put --convergence ''",
    "params and happy": "-k, -n, --happy and --segment-size",
    "fetch it with Grid.get": "leave out --recursive",
    "get_tree": "'get -r'",
    "give max_paths": "give --max-paths",
    "need may_give_rights": "need --exact-modes",
    "Directory.list": "'ls --json'",
    "or leave out what is in it": "without -r",
    "another directory": "another directory with -d",
    "give its directory": "name the client's directory with -d",
}
"""Texts in error messages that name arguments of the library, and the command-line options for them."""


def with_options(text: str, parameters: Collection[str]) -> str:
    """
    Return a sentence in which options replace the given names of arguments, each at its last occurrence.
    """
    for parameter in parameters:
        before, found, after = text.rpartition(parameter)
        text = f"{before}{_OPTIONS[parameter]}{after}" if found else text
    return text


def sentence(error: BaseException) -> str:
    """Return the message of an error as one line, without a final full stop."""
    if isinstance(error, Interrupted):
        return "interrupted; the same command can be run again"
    if _is_clicks(error):
        return _usage_sentence(error)
    if isinstance(error, PipegridError):
        text = str(error) or " ".join((type(error).__doc__ or "").split())
        text = with_options(text, error.parameters)
    elif isinstance(error, FileNotFoundError) and error.filename is None and _is_nowhere():
        text = "the working directory does not exist any more; change to one that does"
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        text = where + (error.strerror or str(error) or type(error).__name__)
    else:
        text = (
            f"PipeGrid failed unexpectedly ({type(error).__name__}: {error}); run the command again with "
            "-v, and report what it prints"
        )
    return printable(text.strip()).rstrip(".")


def _is_nowhere() -> bool:
    """Return whether the working directory was removed, so that relative paths do not work."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


_CLICKS_WORDS = (
    ("is not a valid integer range", "is not a whole number"),
    ("is not a valid float range", "is not a number"),
)
"""Click's words about invalid numbers, and the simpler words that replace them."""


def _usage_sentence(error: click.UsageError) -> str:
    text = printable(" ".join(error.format_message().split())).rstrip(".")
    for clicks, ours in _CLICKS_WORDS:
        text = text.replace(clicks, ours)
    if error.ctx is None:
        return text
    link = " See" if text.endswith("?") else "; see"
    return f"{text}{link} '{error.ctx.command_path} --help'"


def unreadable(path: str, error: OSError) -> SourceError:
    """Return the error for a file that cannot be read."""
    return SourceError(f"cannot read {path}: {error.strerror}")
