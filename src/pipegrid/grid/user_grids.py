"""
Several grids of one user.

``pipegrid.cfg`` of the user's own directory names further grids and their directories:

    [grids]
    friends = grids/friends

``pipegrid --grid friends`` uses the grid ``friends``. Each directory is an ordinary client's directory.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipegrid.core.text import decode_text
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError
from pipegrid.grid import client_creation
from pipegrid.grid.client_paths import CONFIG_NAME, expanded
from pipegrid.grid.strict_config import read_config

MAX_GRIDS = 100
_GRID_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}\Z")
_GRIDS = "grids"
"""A section of ``pipegrid.cfg``; also the directory next to that file that contains further grids."""


def grids_of(directory: Path) -> dict[str, Path]:
    """
    Return the directories of a user's grids, by name; only the first ``MAX_GRIDS``.

    Args:
        directory: the client's directory whose ``pipegrid.cfg`` names the grids.

    Raises:
        UsageError: the file cannot be read.
    """
    if not (directory / CONFIG_NAME).is_file():
        return {}
    _, parser = read_config(directory)
    names = parser.options(_GRIDS) if parser.has_section(_GRIDS) else []
    return {
        name: expanded(parser.get(_GRIDS, name).strip(), directory, parser.at(_GRIDS, name))
        for name in names[:MAX_GRIDS]
    }


def grid_directory(directory: Path, name: str) -> Path:
    """
    Return the directory of one of a user's grids.

    Raises:
        UsageError: the user has no grid with this name, or the name is not valid.
    """
    found = grids_of(directory)
    name = checked_grid_name(name)
    if name not in found:
        known = f"there are {', '.join(found)}" if found else "there is none yet"
        raise UsageError(
            f"{directory} names no grid '{name}' ({known}); 'pipegrid --grid {name} join CODE' adds one"
        )
    return found[name]


def checked_grid_name(name: str) -> str:
    """
    Return the name of a grid in lower case, as the settings have it.

    Raises:
        UsageError: the text cannot be a grid's name.
    """
    if _GRID_NAME.match(name) is None:
        raise UsageError(
            "a grid's name has 1 to 40 letters, digits, hyphens and underscores; choose such a name"
        )
    return name.lower()  # names of settings have no case


def place_for_grid(directory: Path, name: str) -> Path:
    """
    Return the path at which a further grid of a user is created.

    Raises:
        UsageError: a grid with this name exists, or the path exists.
    """
    name = checked_grid_name(name)
    if name in grids_of(directory):
        raise UsageError(
            f"there is a grid '{name}' already; choose another name, or use it as it is"
        )
    place = directory / _GRIDS / name
    if os.path.lexists(place):
        raise UsageError(f"{place} exists already; choose another name")
    return place


def name_grid(directory: Path, name: str, place: Path) -> None:
    """
    Add a grid to the settings of a user's own directory.

    Args:
        place: the grid's directory, within ``directory`` or ``directory`` itself.

    Raises:
        UsageError: there are too many grids, or the settings cannot be written.
        SinkError: the disk is full.
    """
    if len(grids_of(directory)) >= MAX_GRIDS:
        raise UsageError(f"{directory} names {MAX_GRIDS} grids already; remove some by hand")
    path = directory / CONFIG_NAME
    value = os.path.relpath(place.absolute(), directory.absolute())
    text = decode_text(read_file(path), str(path), keep_ends=True)
    client_creation.rewrite(
        path.resolve(), client_creation.with_settings(text, {name: value}, _GRIDS)
    )
