"""
Where a path of names leads from a directory that can change, and the directories that are missing on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipegrid.core.caps import Cap, DirectoryCap, UnknownCap, parse_cap
from pipegrid.core.filecaps import unknown_kind
from pipegrid.core.names import composed
from pipegrid.core.text import printable
from pipegrid.errors import ChildExists, NoSuchChild
from pipegrid.tree.directory import (
    ChangesFiles,
    Child,
    Directory,
    check_writable,
    create_directory,
)
from pipegrid.tree.givenedits import check_name


async def look_up(grid: ChangesFiles, root: str | Cap, names: Sequence[str]) -> list[Child]:
    """
    Return what stands on the way that a path takes, from its root on, with write caps where they are known.

    Returns:
        fewer than a path of all names has, if the rest of them is not there.

    Raises:
        NoSuchChild: a name is below what is no directory.
        CapError: the root is no well-formed cap.
        PipegridError: a directory could not be read.
    """
    cap = parse_cap(root.strip()) if isinstance(root, str) else root
    way = [_root_child(cap)]
    for depth, name in enumerate(names):
        here = way[-1].cap
        if isinstance(here, UnknownCap) and not depth:
            raise unknown_kind(here)
        if not isinstance(here, DirectoryCap):
            what = printable("/".join(names[:depth]))
            raise NoSuchChild(
                f"'{what}' is no directory, so there is no '{printable(name)}' in it; check the path"
                if depth
                else "the cap before the path is not that of a directory; check the path",
                name,
            )
        found = (await Directory(grid, here).list()).get(composed(name))
        if found is None:
            break
        way.append(found)
    return way


async def make_directories(
    grid: ChangesFiles, root: str | Cap, names: Sequence[str], format: str | None = None
) -> Directory:
    """
    Return the directory that a path leads to; what is missing of the way is made.

    Raises:
        ChildExists: a file is in the way.
        CapError: a directory in which one is missing cannot be changed.
        UsageError: none can have such a name; nothing was made.
        PipegridError: the grid failed.
    """
    way = await look_up(grid, root, names)
    here = way[-1]
    if not isinstance(here.cap, DirectoryCap):
        raise ChildExists(
            f"'{printable(here.name)}' is there and is no directory; take another name", here.name
        )
    directory = Directory(grid, here.cap)
    absent = names[len(way) - 1 :]
    for name in absent:
        check_name(name)
    for name in absent:
        check_writable(directory.cap, _called(directory, way[0].cap, here.name))
        made = await create_directory(grid, format)
        try:
            await directory.link(name, made.cap)
            directory = made
        except ChildExists:  # somebody else made it at the same time
            there = (await directory.list()).get(composed(name))
            if there is None or not isinstance(there.cap, DirectoryCap):
                raise
            directory = Directory(grid, there.cap)
    return directory


def _called(directory: Directory, root: Cap | None, name: str) -> str:
    return "this directory" if directory.cap == root or not name else f"'{printable(name)}'"


def _root_child(cap: Cap) -> Child:
    if isinstance(cap, UnknownCap):
        return Child("", cap)
    return Child("", cap.readonly(), cap if cap.readonly() != cap else None)
