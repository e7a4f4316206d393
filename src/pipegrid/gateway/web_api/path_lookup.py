"""Path lookup: from the path of a request to the object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from pipegrid.core.caps import (
    Cap,
    ChkVerifierCap,
    DirectoryCap,
    MutableCap,
    UnknownCap,
    mutable_file,
    parse_cap,
    writes,
)
from pipegrid.core.mutable.directory_content_edits import OpenDirectory
from pipegrid.core.text import composed, printable
from pipegrid.errors import CapError, NotEnoughSharesError
from pipegrid.gateway.http_response import WebError
from pipegrid.tree.directory import Child, Directory
from pipegrid.tree.tree_grid import Grid


@attrs.frozen
class FoundObject:
    """
    What a path leads to.

    Attributes:
        cap: that grants most; None: no cap that reads it is known, or it is missing.
        child: the entry of its parent; None for a capability alone.
        parent: the directory of the last link; None for a capability alone.
        missing: the names that do not exist, the first of them in ``parent``.
        name: of the last link, composed; empty for a capability alone.
        slash: the path ended with a slash.
    """

    cap: Cap | None
    child: Child | None = None
    parent: DirectoryCap | None = None
    missing: tuple[str, ...] = ()
    name: str = ""
    slash: bool = False

    @property
    def exists(self) -> bool:
        """Whether every name was found."""
        return not self.missing

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory that can be listed."""
        cap = self.cap
        return isinstance(cap, DirectoryCap) and not is_verifier(cap)

    @property
    def directory(self) -> DirectoryCap:
        """Its cap, if that is one of a directory."""
        assert isinstance(self.cap, DirectoryCap)
        return self.cap

    @property
    def metadata(self) -> dict[str, Any] | None:
        """The metadata of the last link; None for a capability alone."""
        return None if self.child is None else self.child.metadata


def is_verifier(cap: Cap | None) -> bool:
    """Return whether this is a verify cap, which reads nothing."""
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(file, MutableCap):
        return file.access == "verify"
    return isinstance(file, ChkVerifierCap)


def cap_of(text: str) -> Cap:
    """Return the cap that a path begins with; a malformed one is of an unknown kind."""
    try:
        return parse_cap(text)
    except CapError:
        return UnknownCap(text)


async def find(grid: Grid, text: str, names: Sequence[str]) -> FoundObject:
    """
    Follow a path.

    Args:
        text: the cap that it begins with.
        names: an empty last one is a final slash.

    Raises:
        AccessProhibited: clients must not access an object on it.
        WebError: 400 if a name is empty, or below a file; 410 if a directory cannot be read.
    """
    here = FoundObject(cap_of(text))
    grid.check_access(here.cap)
    slash = bool(names) and not names[-1]
    names = names[:-1] if slash else names
    _check_names(names)
    for depth, name in enumerate(names):
        here = await _step(grid, here, name, names[depth:])
        if here.missing:
            break
        grid.check_access(here.cap)
    return attrs.evolve(here, slash=slash)


async def find_place(grid: Grid, text: str, names: Sequence[str]) -> FoundObject:
    """
    Follow a path to the directory of its last name, which is not looked up, and counts as missing.

    This is for requests that link whatever has this name: the change of the directory finds an existing one,
    so to look it up first would be a round trip more.

    Args, Raises: as ``find``; the last name is not empty.
    """
    _check_names(names)
    found = await find(grid, text, names[:-1])
    if found.missing:
        return attrs.evolve(found, missing=(*found.missing, names[-1]))
    parent = _directory_at(found, names[-1])
    return FoundObject(None, parent=parent, missing=(names[-1],), name=composed(names[-1]))


async def find_unless_new(grid: Grid, text: str, names: Sequence[str]) -> FoundObject:
    """
    Follow a path; the last name counts as missing if the directory is remembered without it.

    This is for requests that make what is missing, and link it without replacing anything: if another client
    has made it meanwhile, the change of the directory finds it.

    Args, Raises: as ``find``; the last name is not empty.
    """
    found = await find_place(grid, text, names)
    parent = found.parent
    if len(found.missing) > 1 or (parent is not None and _lacks(grid, parent, found.name)):
        return found
    assert parent is not None
    found = await _step(grid, FoundObject(parent), names[-1], names[-1:])
    grid.check_access(found.cap)
    return found


def _lacks(grid: Grid, parent: DirectoryCap, name: str) -> bool:
    if not writes(parent):
        return False
    content = grid.known_content(parent)
    return content is not None and name not in OpenDirectory.of(content).entries


def _check_names(names: Sequence[str]) -> None:
    if any(not name for name in names):
        raise WebError(
            400, "The webapi does not allow empty pathname components, i.e. a double slash"
        )


def unknown_cap(cap: UnknownCap) -> WebError:
    """Return the error of an object that nothing can be done with."""
    start = "".join(c for c in cap.text[:12] if c.isalnum() or c in ":.-")
    shown = f"{start}..." if start != cap.text else start
    return WebError(400, f"'{shown}' is not a capability that the gateway knows; copy it whole")


class FileOnPath(WebError):
    """A path goes through what is no directory; for what would be made there the status is 409."""


def _directory_at(here: FoundObject, name: str) -> DirectoryCap:
    """Return the cap of a directory; raises FileOnPath if this is none, so that ``name`` is not in it."""
    if not here.is_directory:
        if isinstance(here.cap, UnknownCap) and here.child is None:
            raise FileOnPath(400, str(unknown_cap(here.cap)))
        what = f"'{printable(here.name)}'" if here.name else "the capability before the path"
        raise FileOnPath(
            400, f"{what} is not a directory, so there is no '{printable(name)}' in it"
        )
    return here.directory


async def _step(grid: Grid, here: FoundObject, name: str, rest: Sequence[str]) -> FoundObject:
    parent = _directory_at(here, name)
    child = (await children_of(grid, parent)).get(composed(name))
    if child is None:
        return FoundObject(None, parent=parent, missing=tuple(rest), name=composed(name))
    return FoundObject(best_cap(child), child, parent, name=child.name)


async def children_of(grid: Grid, cap: DirectoryCap) -> dict[str, Child]:
    """
    Return the children of a directory by name.

    Raises:
        WebError: it cannot be read.
    """
    try:
        return await Directory(grid, cap).list()
    except NotEnoughSharesError as error:
        raise unreadable(cap, error) from error


def unreadable(cap: Cap, error: NotEnoughSharesError) -> Exception:
    """Return the error for an object with too few shares."""
    if mutable_file(cap, directories=True) is not None:
        return WebError(410, f"UnrecoverableFileError: {error}")
    return error


def best_cap(child: Child) -> Cap | None:
    """Return the cap of a child that grants most."""
    if child.write_cap is None or isinstance(child.write_cap, UnknownCap):
        return child.read_cap or child.write_cap
    if child.read_cap is not None and child.read_cap != child.write_cap.readonly():
        return child.read_cap
    return child.write_cap


def check_writes(cap: Cap | None) -> DirectoryCap:
    """
    Return the cap of a directory, which can change it.

    Raises:
        WebError: it cannot.
    """
    if not isinstance(cap, DirectoryCap) or not writes(cap):
        raise WebError(
            403, "NotWriteableError: this cap does not change the directory; use its write cap"
        )
    return cap
