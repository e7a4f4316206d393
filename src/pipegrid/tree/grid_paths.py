"""
Paths on a grid: a directory's cap, or an alias of one, and names below it.

    URI:DIR2-CHK:...            the directory itself
    URI:DIR2-CHK:.../a/b        below it
    URI:DIR2-CHK:...:./a/b      the same
    home:a/b                    below what the alias ``home`` stands for

Names are composed (NFC) and their case counts. ``.`` and ``..`` are names as any other. There are no
escapes: a name with a slash in it has no path, and its entry is reached by its cap. One slash at the end
counts for nothing; an empty name in between is a mistake.

Source: the reference on trees, section 1.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from pipegrid.core.caps import Cap, DirectoryCap, UnknownCap, as_cap, unknown_kind
from pipegrid.core.text import CAP_STARTS, as_pasted, printable
from pipegrid.errors import NoSuchChild, UsageError
from pipegrid.grid.client_paths import default_directory, is_configured
from pipegrid.reactor.deferreds import Waiters
from pipegrid.tree.aliases import as_written, read_aliases, shortened, unknown_alias
from pipegrid.tree.directory_reading import (
    Entry,
    Kind,
    ListingLimits,
    ReadsFiles,
    kind_of,
    read_listing,
)

KEPT_BYTES = 32 << 20
"""Memory that directories may take which a ``PathFinder`` keeps; what comes later is read for each path."""


@attrs.frozen
class PathEnd:
    """
    Where a path leads.

    Attributes:
        cap: of what is there; None if only its write cap is stored.
        names: on the way from the root; empty for the root itself.
        metadata_json: what its entry says.
        best: the cap that grants most, where the path tells one that does more than read.
    """

    cap: Cap | None
    names: tuple[str, ...] = ()
    metadata_json: bytes = attrs.field(default=b"{}", repr=False)
    best: Cap | None = attrs.field(default=None, repr=False)

    @property
    def kind(self) -> Kind:
        """What is there, as ``cap`` tells; see ``kind_of``."""
        return kind_of(self.cap)


def parse(text: str, aliases: Mapping[str, str] | None = None) -> tuple[str, tuple[str, ...]]:
    """
    Take a path apart.

    Args:
        text: what only carried it here counts for nothing; see ``core.text``.
        aliases: names of directories, and their caps.

    Returns:
        the text of the cap of its root, which may be malformed, and names.

    Raises:
        UsageError: there is an empty name in it, or no such alias.
    """
    text = as_pasted(text)
    if text.startswith(CAP_STARTS):
        root, found, rest = text.partition(":./")
        if not found or "/" in root:
            root, found, rest = text.partition("/")
        return root, names_of(rest) if found else ()
    if not text:
        raise UsageError("the path is empty; perhaps a variable is not set")
    alias, found, rest = text.partition(":")
    if not found or "/" in alias or not alias:
        meant = text.partition("/")[0] if aliases else ""
        known = bool(aliases) and as_written(meant, aliases or {}) is not None
        hint = f"did you mean '{printable(meant)}:'?" if known else ""
        raise UsageError(
            f"'{shortened(text)}' does not begin with a cap or an alias; "
            + (hint or "a path is written ALIAS:some/path or CAP/some/path")
        )
    aliases = aliases or {}
    written = as_written(alias, aliases)
    if written is None and rest.startswith("//"):
        raise UsageError(
            f"there is no cap in this address of {alias}; give the cap, which begins with URI:"
        )
    if written is None:
        raise unknown_alias(alias, aliases)
    return aliases[written], names_of(rest)


def parse_here(text: str, directory: Path) -> tuple[str, tuple[str, ...]]:
    """
    Take a path apart that may begin with an alias of a client's directory; see ``parse``.

    Raises:
        UsageError: it is no path, there is no such alias, or the aliases cannot be read.
    """
    text = as_pasted(text)
    needed = not text.startswith(CAP_STARTS)
    return parse(text, read_aliases(directory) if needed else None)


def check_may_be_aliases(paths: Iterable[str]) -> None:
    """
    Raises:
        UsageError: one of the paths begins with an alias, and nothing is configured where the user's are.
    """
    directory = default_directory()
    if is_configured(directory):
        return
    for path in paths:
        if names_alias(path) and not os.path.lexists(path):
            raise unknown_alias(as_pasted(path).partition(":")[0], {}, directory)


def is_on_servers(path: str) -> bool:
    """
    Return whether a path begins with the cap of what only servers can have, as far as is known.

    Raises:
        CapError: that cap is damaged.
    """
    root = as_pasted(path).partition("/")[0].removesuffix(":.")
    if not root.startswith(CAP_STARTS):
        return False
    cap = as_cap(root)
    return isinstance(cap, UnknownCap) or cap.storage_index is not None


def names_of(path: str) -> tuple[str, ...]:
    """
    Return the names in what follows a root.

    Raises:
        UsageError: one is empty.
    """
    path = path.removesuffix("/")
    if not path:
        return ()
    names = tuple(unicodedata.normalize("NFC", name) for name in path.split("/"))
    if "" in names:
        raise UsageError(
            f"there is an empty name in the path '{shortened(path)}'; leave out a slash"
        )
    return names


def has_path(text: str) -> bool:
    """Return whether text is more than a cap: one with names behind it, or an alias."""
    text = as_pasted(text)
    if text.startswith(CAP_STARTS):
        return "/" in text
    return names_alias(text)


def names_alias(text: str) -> bool:
    """Return whether text begins as ``ALIAS:some/path`` does; there need be no such alias."""
    text = as_pasted(text)
    alias, found, _ = text.partition(":")
    return bool(found and alias) and "/" not in alias and not text.startswith(CAP_STARTS)


async def resolve(
    grid: ReadsFiles,
    root: str | Cap,
    names: Sequence[str] = (),
    limits: ListingLimits | None = None,
) -> PathEnd:
    """
    Return what a path leads to: a listing for each name.

    Args:
        grid: an open grid.
        root: the cap of a directory, or of anything if there are no names.
        names: below it.

    Raises:
        CapError: the root is no well-formed cap.
        NoSuchChild: there is nothing of such a name, or it is below a file.
        DirectoryError: a directory on the way is damaged, or beyond the limits.
        PipegridError: the grid could not fetch it.
    """
    return await PathFinder(grid, limits).resolve(root, names)


class PathFinder:
    """
    Follows many paths; a directory that several lead through is read once, and seen as it was then.

    Args:
        grid: an open grid.
        limits: of each directory.
    """

    def __init__(self, grid: ReadsFiles, limits: ListingLimits | None = None) -> None:
        self._grid = grid
        self._limits = limits
        self._kept: dict[DirectoryCap, dict[str, Entry]] = {}
        self._kept_bytes = 0
        self._reading: dict[DirectoryCap, Waiters[dict[str, Entry]]] = {}

    async def resolve(self, root: str | Cap, names: Sequence[str] = ()) -> PathEnd:
        """Return what a path leads to; arguments and errors as of ``resolve`` of this module."""
        place = PathEnd(as_cap(root))
        for depth, name in enumerate(names):
            directory = place.best or place.cap
            if isinstance(directory, UnknownCap) and not depth:
                raise unknown_kind(directory)
            if not isinstance(directory, DirectoryCap):
                what = (
                    f"'{shown(names[:depth])}' is"
                    if depth
                    else "the cap before the path is that of"
                )
                raise NoSuchChild(
                    f"{what} not a directory, so there is no '{printable(name)}' in it; check the path",
                    name,
                )
            name = unicodedata.normalize("NFC", name)
            entry = (await self._entries(directory)).get(name)
            if entry is None:
                where = f" in '{shown(names[:depth])}'" if depth else ""
                raise NoSuchChild(
                    f"there is no '{printable(name)}'{where}; 'pipegrid ls' lists what exists",
                    name,
                )
            place = PathEnd(entry.cap, (*place.names, name), entry.metadata_json, entry.best)
        return place

    async def _entries(self, directory: DirectoryCap) -> dict[str, Entry]:
        """Return what is in a directory, by names; who asks while it is read waits for that."""
        if directory in self._kept:
            return self._kept[directory]
        if directory in self._reading:
            return await self._reading[directory].wait()
        waiting = self._reading[directory] = Waiters()
        try:
            listing = await read_listing(self._grid, directory, self._limits)
        except Exception as error:
            del self._reading[directory]
            waiting.fail(error)
            raise
        del self._reading[directory]
        entries = {entry.name: entry for entry in listing.entries}
        if self._kept_bytes + listing.memory_bytes <= KEPT_BYTES:
            self._kept_bytes += listing.memory_bytes
            self._kept[directory] = entries
        waiting.fire(entries)
        return entries


def shown(names: Sequence[str]) -> str:
    """Return a path as a terminal can show it, without its root."""
    return printable("/".join(names))
