"""Giving a child of a directory another place: the edit that links it there, and both halves of a move."""

from __future__ import annotations

from pipegrid.core.caps import UnknownCap
from pipegrid.core.mutable.edits import Link
from pipegrid.core.names import composed
from pipegrid.core.text import printable
from pipegrid.errors import CapError, ChildExists, NoSuchChild, PipegridError, UsageError
from pipegrid.tree.directory import Child, Directory, check_writable


async def move(
    source: Directory, name: str, target: Directory, new_name: str, replace: bool = False
) -> None:
    """
    Give a child another name, or another directory: linked there first, then taken out here.

    Metadata go with it. Who is interrupted between the two has it twice; nothing is lost, and the same move
    again finishes it.

    Raises:
        NoSuchChild, ChildExists: as of ``Directory.rename``; but the child that moves may be there.
        CapError: one of the directories cannot be changed.
        UsageError: somebody has put another child in its place meanwhile, which stays; or has taken it out,
            and may have moved it somewhere else.
        PipegridError: of the second half, which begins by saying that the first is done.
    """
    check_writable(source.cap, "the directory that it is taken out of")
    check_writable(target.cap, "the directory that it goes to")
    if source.cap == target.cap:
        await source.rename(name, new_name, replace=replace)
        return
    child = (await source.list()).get(composed(name))
    if child is None:
        raise NoSuchChild(f"there is no '{printable(name)}' in the directory; check the path", name)
    try:
        await target.change([link_of(child, new_name, replace)])
    except ChildExists:
        if not is_same(child, (await target.list()).get(composed(new_name))):
            raise
    try:
        is_out = await source.unlink_same(name, child, True)
    except NoSuchChild:
        # Not undone: if it was an earlier try of the same move that took it out, this is its only place.
        raise UsageError(
            f"another client took '{printable(name)}' out of its old place while it was moved: it is in its "
            "new place, and if they have moved it, too, then also where they have put it"
        ) from None
    except PipegridError as error:
        error.args = (
            f"'{printable(name)}' is in its new place, and still in the old one, until the same command is "
            f"run again: {error}",
        )
        raise
    if not is_out:
        raise UsageError(
            f"'{printable(name)}' was replaced by another client while it was moved: what it was "
            f"is in its new "
            "place, and what it is now stays where it is"
        )


def is_same(child: Child, other: Child | None) -> bool:
    """Whether a child, put where another is, changes neither what is there nor who can change that."""
    return other is not None and child.cap is not None and child.cap == other.cap


def link_of(child: Child, name: str, replace: bool = False) -> Link:
    """
    Return the edit that links a child somewhere else, metadata included.

    Raises:
        CapError: no cap of it is known.
    """
    if child.cap is None:
        raise CapError(f"nothing is known of '{printable(child.name)}' that could be linked")
    both = isinstance(child.write_cap, UnknownCap)
    return Link(name, child.cap, child.read_cap if both else None, dict(child.metadata), replace)
