"""Path lookup: finds the object that the path of a request names."""

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
        cap: the known cap that grants most; None: the object does not exist, or no read cap of it is known.
        child: the object's entry in its directory; None: the path has no names, or the object does not exist.
        parent: the directory of the last name that was looked up; None for a path without names.
        missing: the last names of the path, from the first that does not exist; that name would be in
            ``parent``.
        name: the name that was looked up last, composed; empty for a path without names.
        slash: whether the path ended with a slash.
    """

    cap: Cap | None
    child: Child | None = None
    parent: DirectoryCap | None = None
    missing: tuple[str, ...] = ()
    name: str = ""
    slash: bool = False

    @property
    def exists(self) -> bool:
        """Whether the object exists: every name was found."""
        return not self.missing

    @property
    def is_directory(self) -> bool:
        """Whether the object is a directory that can be listed."""
        cap = self.cap
        return isinstance(cap, DirectoryCap) and not is_verifier(cap)

    @property
    def directory(self) -> DirectoryCap:
        """The cap of the object, which must be a directory."""
        assert isinstance(self.cap, DirectoryCap)
        return self.cap

    @property
    def metadata(self) -> dict[str, Any] | None:
        """The metadata of the object's entry; None if there is no entry."""
        return None if self.child is None else self.child.metadata


def is_verifier(cap: Cap | None) -> bool:
    """Return whether this is a verify cap, which cannot read the object."""
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(file, MutableCap):
        return file.access == "verify"
    return isinstance(file, ChkVerifierCap)


def cap_of(text: str) -> Cap:
    """Return the cap at the beginning of a path; malformed text becomes a cap of unknown kind."""
    try:
        return parse_cap(text)
    except CapError:
        return UnknownCap(text)


async def find(grid: Grid, text: str, names: Sequence[str]) -> FoundObject:
    """
    Follow a path, looking up each name.

    Args:
        text: the cap at the beginning of the path.
        names: the names that follow; an empty last name means that the path ends with a slash.

    Raises:
        AccessProhibited: the blacklist prohibits access to an object on the path.
        WebError: 400 if a name is empty; 410 if a directory cannot be read; see also ``FileOnPath``.
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
    Follow a path to the directory of its last name; treat that name as missing, without looking it up.

    For requests that link something under the last name: the change of the directory notices an existing
    child, so looking up the name first would waste a round trip.

    Args, Raises: as ``find``; the last name must not be empty.
    """
    _check_names(names)
    found = await find(grid, text, names[:-1])
    if found.missing:
        return attrs.evolve(found, missing=(*found.missing, names[-1]))
    parent = _directory_at(found, names[-1])
    return FoundObject(None, parent=parent, missing=(names[-1],), name=composed(names[-1]))


async def find_unless_new(grid: Grid, text: str, names: Sequence[str]) -> FoundObject:
    """
    Follow a path; if the cached directory does not contain the last name, treat the name as missing.

    For requests that create an object only if none of this name exists: if another client has created one
    meanwhile, the change of the directory notices that.

    Args, Raises: as ``find``; the last name must not be empty.
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
    """Return the error for a cap of unknown kind."""
    start = "".join(c for c in cap.text[:12] if c.isalnum() or c in ":.-")
    shown = f"{start}..." if start != cap.text else start
    return WebError(400, f"'{shown}' is not a capability that the gateway knows; copy it whole")


class FileOnPath(WebError):
    """A path goes through an object that is not a directory; the status is 400, but 409 for PUT and POST."""


def _directory_at(here: FoundObject, name: str) -> DirectoryCap:
    """
    Return the cap of a directory; raise FileOnPath, which mentions ``name``, if the object is not a
    directory.
    """
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
        WebError: the directory cannot be read.
    """
    try:
        return await Directory(grid, cap).list()
    except NotEnoughSharesError as error:
        raise unreadable(cap, error) from error


def unreadable(cap: Cap, error: NotEnoughSharesError) -> Exception:
    """Return the error for an object of which too few shares were found."""
    if mutable_file(cap, directories=True) is not None:
        return WebError(410, f"UnrecoverableFileError: {error}")
    return error


def best_cap(child: Child) -> Cap | None:
    """Return the write cap of a child if its kind is known, else the read cap, else the write cap."""
    if child.write_cap is None or isinstance(child.write_cap, UnknownCap):
        return child.read_cap or child.write_cap
    if child.read_cap is not None and child.read_cap != child.write_cap.readonly():
        return child.read_cap
    return child.write_cap


def check_writes(cap: Cap | None) -> DirectoryCap:
    """
    Return a cap if it is the write cap of a directory.

    Raises:
        WebError: the cap cannot change a directory.
    """
    if not isinstance(cap, DirectoryCap) or not writes(cap):
        raise WebError(
            403, "NotWriteableError: this cap does not change the directory; use its write cap"
        )
    return cap
