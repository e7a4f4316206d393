"""
What a mirror should hold: all that its last complete run wanted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from pipegrid.mirror.destination import Destination
from pipegrid.mirror.lists import lines_of, list_line, read_list
from pipegrid.mirror.wanted import HIDDEN, MirrorError, Wanted

MANIFEST = "manifest"


def write_manifest(destination: Destination, entries: Iterable[Wanted]) -> None:
    """Note what the last complete run wanted, in the form of ``lists``; whole, or as it was."""
    for _ in noting(destination, entries):
        pass
    keep_manifest(destination)


def noting(destination: Destination, entries: Iterable[Wanted]) -> Iterator[Wanted]:
    """Yield entries, and write down on the way what ``keep_manifest`` makes the manifest."""
    path = os.path.join(destination.path, HIDDEN, MANIFEST)
    try:
        with open(path + ".new", "wb") as file:
            for each in entries:
                file.write(list_line(each))
                yield each
    except OSError as error:
        raise destination.error(error, "note what it holds") from error


def keep_manifest(destination: Destination) -> None:
    """What was noted is what the last complete run wanted."""
    path = os.path.join(destination.path, HIDDEN, MANIFEST)
    try:
        with open(path + ".new", "rb") as file:
            os.fsync(file.fileno())
        os.replace(path + ".new", path)
    except OSError as error:
        raise destination.error(error, "note what it holds") from error


def read_manifest(destination: Destination) -> Iterator[Wanted]:
    """
    Yield what the last complete run wanted.

    Raises:
        MirrorError: there was none.
    """
    try:
        with open(os.path.join(destination.path, HIDDEN, MANIFEST), "rb") as file:
            yield from read_list(lines_of(file), MANIFEST)
    except FileNotFoundError:
        raise MirrorError(
            f"{destination.path} does not say what it should hold: no run to it was complete yet"
        ) from None
