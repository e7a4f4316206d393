"""Sizes and rates, as people write them on a command line."""

from __future__ import annotations

import re

import click

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def byte_size(text: str) -> int:
    """
    Return a number of bytes: ``131072``, ``128KiB``, ``1.5MiB``; ``K`` is ``KiB``, ``kB`` is 1000.

    Raises:
        click.BadParameter: it is none, or zero.
    """
    match = re.fullmatch(r"\s*([0-9]{1,15})(?:\.([0-9]{1,3}))?\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[3].lower()) if match else None
    found = 0
    if match is not None and unit is not None:
        found = int(match[1] + (match[2] or "")) * unit // 10 ** len(match[2] or "")
    if found == 0:
        raise click.BadParameter(f"{text!r} is not a size such as 131072, 128KiB or 1MiB")
    return found


def byte_room(text: str) -> int:
    """
    Return a number of bytes that may be none: a size, or ``0``; see ``byte_size``.

    Raises:
        click.BadParameter: it is neither.
    """
    return 0 if text.strip() == "0" else byte_size(text)


def byte_rate(text: str) -> int:
    """
    Return bytes a second: a size, with ``/s`` behind it or not; see ``byte_size``.

    Raises:
        click.BadParameter: it is none, or zero.
    """
    try:
        return byte_size(text.strip().removesuffix("/s"))
    except click.BadParameter:
        raise click.BadParameter(
            f"{text!r} is no number of bytes a second, such as 500kB, 2MiB or 1.5MB/s"
        ) from None
