"""Destinations of commands that change directories: a directory, and a name in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from pipegrid.cli import cap_lookup
from pipegrid.core.caps import Cap, DirectoryCap
from pipegrid.core.text import CAP_STARTS, as_pasted, printable
from pipegrid.errors import CapError, ChildExists, NoSuchChild, UsageError
from pipegrid.tree import directory, grid_paths

if TYPE_CHECKING:
    from pipegrid.tree.directory import Child, Directory
    from pipegrid.tree.tree_grid import Grid


def is_on_grid(text: str) -> bool:
    """
    Return whether an argument is a path on the grid, and not a local file.

    A path on the grid begins with an existing alias. A cap, or a text with an unknown alias, also counts if
    no local file has this name.

    Raises:
        UsageError: the aliases cannot be read.
    """
    bare = as_pasted(text)
    if bare.startswith(CAP_STARTS):
        return not os.path.lexists(text)
    if not grid_paths.names_alias(bare):
        return False
    return cap_lookup.begins_with_alias(bare) or not os.path.lexists(text)


def alias_in(text: str) -> str:
    """
    Return the alias that an argument probably means, if only the colon is missing and no file has that name;
    else "".

    Raises:
        UsageError: the aliases cannot be read.
    """
    meant = f"{text.strip()}:"
    there = ":" in text or "/" in text or os.path.lexists(text)
    return meant if not there and cap_lookup.begins_with_alias(meant) else ""


@attrs.frozen
class GridDestination:
    """
    A name in a mutable directory.

    Attributes:
        directory: the directory for the name; if directories on the path are ``missing``, the last existing
            one.
        there: the object that has this name now, or None.
        path_caps: the caps of the existing directories on the path, ``directory`` included.
        missing: the names of the directories to create, each below the previous one.
        ends_with_slash: whether the path ends with a slash, so that the name must be a directory's.
    """

    _grid: Grid
    directory: Directory
    name: str
    there: Child | None
    path_caps: tuple[Cap | None, ...]
    missing: tuple[str, ...] = ()
    ends_with_slash: bool = False

    async def reach(self) -> Directory:
        """
        Return the directory for the name, after creating missing directories.

        Raises:
            PipegridError: see ``make_directories``.
        """
        if not self.missing:
            return self.directory

        return await directory.make_directories(self._grid, self.directory.cap, self.missing)

    def check_free(self, force: bool, cap: Cap | None = None) -> None:
        """
        Check that a new object may get the name.

        Args:
            cap: the cap of the new object, if it is known.

        Raises:
            NoSuchChild: see ``check_kind``.
            ChildExists: an object has the name and must not be replaced, or is another mutable directory,
                whose only write cap may be in this entry.
        """
        self.check_kind(cap)
        there = self.there
        if there is not None and there.kind == "directory" and there.write_cap not in (None, cap):
            raise ChildExists(
                f"a directory '{printable(self.name)}' exists already, and its cap may be stored nowhere "
                "else; choose another name, or remove it first with 'pipegrid rm -r'",
                self.name,
            )
        if there is not None and not force:
            raise ChildExists(
                f"'{printable(self.name)}' exists already; choose another name, or replace it with -f",
                self.name,
            )

    def check_kind(self, cap: Cap | None = None) -> None:
        """
        Check that a path that ends with a slash leads to a directory.

        Raises:
            NoSuchChild: neither the existing object nor the new one is a directory.
        """
        is_directory = self.there is not None and self.there.kind == "directory"
        if self.ends_with_slash and not (is_directory or isinstance(cap, DirectoryCap)):
            raise no_directory(self.name)


async def spot_at(
    grid: Grid, text: str, into: str | None = None, make: bool = False
) -> GridDestination:
    """
    Return the destination at a path.

    Args:
        into: the name that an object gets if the path leads to an existing directory, as with cp and mv;
            None: the destination is the entry of that directory itself.
        make: whether an object is added; then directories on the path may be missing, and
            ``GridDestination.reach`` creates them.

    Raises:
        UsageError: the path is invalid, or has no name or an invalid name, or its alias does not exist.
        NoSuchChild: an object on the path does not exist, or is not a directory.
        CapError: the directory of the name is immutable or not a directory, or its write cap is not known.
    """
    root, names = await cap_lookup.root_of(grid, text)
    ends_with_slash = text.rstrip().endswith("/")
    path_caps = await directory.look_up(grid, root, names)
    whole = len(path_caps) == len(names) + 1
    if whole and into is not None and isinstance(path_caps[-1].cap, DirectoryCap):
        held = directory.Directory(
            grid, directory.check_writable(path_caps[-1].cap, _called(names))
        )
        there = (await held.list()).get(into)
        return GridDestination(grid, held, into, there, tuple(child.cap for child in path_caps))
    if not names:
        raise UsageError("this is a cap or an alias without a path; add a name in its directory")
    absent = names[len(path_caps) - 1 : -1]
    if absent and not make:
        raise NoSuchChild(
            f"the path leads through '{printable(absent[0])}', which does not exist; check the path",
            absent[0],
        )
    if make:
        for name in names[len(path_caps) - 1 :]:
            directory.check_name(name)  # before storing or creating anything
    way_there = path_caps[: len(names)]
    before = way_there[-1]
    if before.cap is None:
        raise CapError(f"no cap is known that reads '{printable(before.name)}'; use another path")
    called = _called(names[: len(way_there) - 1])
    held = directory.Directory(grid, directory.check_writable(before.cap, called))
    there = path_caps[-1] if whole else None
    caps = tuple(child.cap for child in way_there)
    return GridDestination(grid, held, names[-1], there, caps, absent, ends_with_slash)


async def check_takes(grid: Grid, path: str, sources: Sequence[str]) -> None:
    """
    Check that the target of several objects is a directory, before any object is stored.

    Raises:
        UsageError: the target is not a directory.
        PipegridError: the target cannot be read.
    """
    if len(sources) < 2:
        return

    root, names = await cap_lookup.root_of(grid, path)
    path_caps = await directory.look_up(grid, root, names)
    if len(path_caps) <= len(names) or path_caps[-1].kind != "directory":
        raise UsageError(
            f"more than one thing goes into a directory, and {_called(names)} is none; make it with "
            "'pipegrid mkdir', or give another"
        )


def missing(spot: GridDestination) -> NoSuchChild:
    """Return the error for a name that does not exist in a directory."""
    return NoSuchChild(
        f"there is no '{printable(spot.name)}'; 'pipegrid ls' lists what exists", spot.name
    )


def no_directory(name: str) -> NoSuchChild:
    """Return the error for a path that ends with a slash and does not lead to a directory."""
    return NoSuchChild(
        f"there is no directory '{printable(name)}'; make it with 'pipegrid mkdir', or leave out the slash",
        name,
    )


def _called(names: tuple[str, ...]) -> str:
    return f"'{printable('/'.join(names))}'" if names else "this directory"
