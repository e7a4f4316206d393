"""How results that several commands share are shown."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from pipegrid.cli.capfile import as_line
from pipegrid.cli.console import Console
from pipegrid.cli.outcome import UnprintedCap, sentence
from pipegrid.core.text import printable
from pipegrid.disk.private_output import open_private
from pipegrid.errors import CorruptionError, SinkError

if TYPE_CHECKING:
    from pathlib import Path

UNPRINTED = "unprinted.caps"
"""In the client's private directory: a cap file."""

MAX_LINES = 20
"""Of one kind, on a screen; a file of ten shares has fewer problems, unless somebody gave ten thousand."""


def corruption_fields(corrupt: Sequence[CorruptionError]) -> list[dict[str, Any]]:
    """Return the documented JSON form of damage."""
    return [
        {
            "share_number": error.share_number,
            "offset": error.offset,
            "server": error.server,
            "problem": sentence(error),
        }
        for error in corrupt
    ]


def warn_of_corruption(
    console: Console, corrupt: Sequence[CorruptionError], lead: str = ""
) -> None:
    """Tell of damage that did no harm this time; ``lead`` says of which file, if there are several."""
    say_some(console, [f"{lead}worked around damage: {located(error)}" for error in corrupt])


def say_some(console: Console, lines: Sequence[str]) -> None:
    """Tell the first of many things, and how many more there are, which ``-v`` tells as well."""
    shown = len(lines) if console.verbosity > 0 or len(lines) <= MAX_LINES else MAX_LINES - 1
    for line in lines[:shown]:
        console.say(f"pipegrid: {line}")
    if shown < len(lines):
        console.say(f"pipegrid: and {len(lines) - shown} more like that; -v names them")


def print_cap(
    console: Console, directory: Path, text: str, fields: dict[str, Any], cap: str, name: str = ""
) -> None:
    """
    Print the result with a cap that nobody else has; if that fails, keep the cap.

    Args:
        directory: the client's.
        text: for people; ``fields``: for ``--json``.
        name: of its file, if it has one.

    Raises:
        UnprintedCap: it could not be printed; the sentence says where it is.
    """
    try:
        console.result(text, fields)
    except (BrokenPipeError, SinkError) as error:
        raise keep_caps(directory, [as_line(cap, name) if name else cap], error) from error


def keep_caps(directory: Path, lines: Sequence[str], error: Exception) -> UnprintedCap:
    """
    Append lines of a cap file to the one with the caps that could not be printed.

    Args:
        error: why they could not.

    Returns:
        The error that says why, and where they are; with the caps themselves if they cannot be kept.
    """
    gone = isinstance(error, BrokenPipeError)
    why = "nobody reads standard output any more" if gone else sentence(error)
    count = "the cap is" if len(lines) == 1 else f"{len(lines)} caps are"
    path = directory / "private" / UNPRINTED
    try:
        fd = open_private(str(path), os.O_WRONLY | os.O_APPEND)
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as second:
        return UnprintedCap(
            f"{why}; {count} not kept either, since {printable(str(path))} cannot be written "
            f"({second.strerror}): {' '.join(lines)}"
        )
    return UnprintedCap(f"{why}; {count} kept in {printable(str(path))}")


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """
    Return rows as lines with their columns aligned; the last of a row takes what it needs.

    Args:
        rows: may have different lengths.
        right: numbers of the columns that are aligned at the right.
    """
    widths: dict[int, int] = {}
    for row in rows:
        for number, cell in enumerate(row[:-1]):
            widths[number] = max(widths.get(number, 0), len(cell))
    lines = []
    for row in rows:
        cells = [
            cell.rjust(widths[number]) if number in right else cell.ljust(widths[number])
            for number, cell in enumerate(row[:-1])
        ]
        lines.append("  ".join([*cells, *row[-1:]]).rstrip())
    return lines


def grouped(reasons: Sequence[str]) -> list[str]:
    """Return each reason once, with the servers whose it is, if their names are its first word."""
    servers: dict[str, list[str]] = {}
    for reason in reasons:
        name, _, rest = reason.partition(" ")
        servers.setdefault(rest, []).append(name)
    return [
        f"{names[0]} {rest}" if len(names) == 1 else f"{', '.join(names)}: {rest}"
        for rest, names in servers.items()
    ]


def located(error: CorruptionError) -> str:
    """Return what is damaged, and on which server if that is known and not said yet."""
    text = sentence(error)
    where = printable(error.server)
    return f"{where}: {text}" if where and where not in text else text


def amount(size: int | None) -> str:
    """Return a number of bytes as people read it: three digits and a unit."""
    if size is None:
        return "unknown"
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} PB"
