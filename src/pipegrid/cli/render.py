"""How results that several commands share are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipegrid.cli.console import Console
from pipegrid.cli.outcome import sentence
from pipegrid.core.text import printable
from pipegrid.errors import CorruptionError

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
