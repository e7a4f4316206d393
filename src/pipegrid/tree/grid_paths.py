"""Paths on a grid: a directory's cap or an alias, followed by names below that directory."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
"""Maximum memory for the directories that a ``PathFinder`` caches; others are read for each path."""


class PathEnd(NamedTuple):
    """
    The object at the end of a path.

    Attributes:
        cap: the read cap of the object; None if only its write cap is stored.
        names: the names from the root; empty for the root itself.
        metadata_json: the metadata of the object's entry.
        best: the cap that grants most, if the path reveals one that grants more than reading.
    """

    cap: Cap | None
    names: tuple[str, ...] = ()
    metadata_json: bytes = b"{}"
    best: Cap | None = None

    def __repr__(self) -> str:
        """Return a text for logs, without the metadata and the write cap."""
        return f"PathEnd({self.cap!r}, {self.names!r}, ...)"

    @property
    def kind(self) -> Kind:
        """The kind of the object according to ``cap``; see ``kind_of``."""
        return kind_of(self.cap)


def parse(text: str, aliases: Mapping[str, str] | None = None) -> tuple[str, tuple[str, ...]]:
    """
    Parse a path.

        URI:DIR2-CHK:...            the directory itself
        URI:DIR2-CHK:.../a/b        a path below the directory
        URI:DIR2-CHK:...:./a/b      the same path
        home:a/b                    a path below the directory of the alias ``home``

    Names are normalized (NFC) and case-sensitive. ``.`` and ``..`` are ordinary names. There are no escapes:
    a name with a slash cannot be part of a path. One slash at the end is ignored; an empty name is an error.

    Args:
        text: the path, perhaps inside a web address or quotes; see ``core.text``.
        aliases: caps of directories by name.

    Returns:
        the text of the root's cap, which may be malformed, and the names below the root.

    Raises:
        UsageError: a name is empty, or the alias does not exist.
    """
    text = as_pasted(text)
    if text.startswith(CAP_STARTS):
        root, found, rest = text.partition(":./")
        if not found or "/" in root:
            root, found, rest = text.partition("/")
        return root, names_of(rest) if found else ()
    if not text:
        raise UsageError("the path is empty; perhaps a variable is not set")
    aliases = aliases or {}
    alias, found, rest = text.partition(":")
    if not found or "/" in alias or not alias:
        meant = text.partition("/")[0]
        hint = "a path is written ALIAS:some/path or CAP/some/path"
        if as_written(meant, aliases) is not None:
            hint = f"did you mean '{printable(meant)}:'?"
        raise UsageError(f"'{shortened(text)}' does not begin with a cap or an alias; {hint}")
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
    Parse a path that may begin with an alias of a client's directory; see ``parse``.

    Raises:
        UsageError: the text is not a path, the alias does not exist, or the aliases cannot be read.
    """
    text = as_pasted(text)
    return parse(text, None if text.startswith(CAP_STARTS) else read_aliases(directory))


def check_may_be_aliases(paths: Iterable[str]) -> None:
    """
    Check that the user has a client directory if a path begins with an alias.

    Raises:
        UsageError: a path begins with an alias, and the user has no client directory.
    """
    directory = default_directory()
    if is_configured(directory):
        return
    for path in paths:
        if names_alias(path) and not os.path.lexists(path):
            raise unknown_alias(as_pasted(path).partition(":")[0], {}, directory)


def is_on_servers(path: str) -> bool:
    """
    Return whether a path begins with a cap of an object on servers, which a literal cap is not.

    Raises:
        CapError: the cap is damaged.
    """
    root = as_pasted(path).partition("/")[0].removesuffix(":.")
    if not root.startswith(CAP_STARTS):
        return False
    cap = as_cap(root)
    return isinstance(cap, UnknownCap) or cap.storage_index is not None


def names_of(path: str) -> tuple[str, ...]:
    """
    Return the names in the part of a path that follows its root.

    Raises:
        UsageError: a name is empty.
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
    """Return whether text begins with an alias, or is a cap followed by names."""
    text = as_pasted(text)
    if text.startswith(CAP_STARTS):
        return "/" in text
    return names_alias(text)


def names_alias(text: str) -> bool:
    """Return whether text has the form ``ALIAS:some/path``; the alias need not exist."""
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
    Return the object at the end of a path; one directory is read for each name.

    Args:
        grid: an open grid.
        root: the cap of a directory; if there are no names, any cap.
        names: the names below the root.

    Raises:
        CapError: the root is not a well-formed cap.
        NoSuchChild: a name does not exist, or is below a file.
        DirectoryError: a directory of the path is damaged, or exceeds the limits.
        PipegridError: a directory could not be fetched from the grid.
    """
    return await PathFinder(grid, limits).resolve(root, names)


class PathFinder:
    """
    Follows many paths. A directory that several paths share is read only once, so later changes are not seen.

    Args:
        grid: an open grid.
        limits: the limits of each directory.
    """

    def __init__(self, grid: ReadsFiles, limits: ListingLimits | None = None) -> None:
        self._grid = grid
        self._limits = limits
        self._kept: dict[DirectoryCap, dict[str, Entry]] = {}
        self._kept_bytes = 0
        self._reading: dict[DirectoryCap, Waiters[dict[str, Entry]]] = {}

    async def resolve(self, root: str | Cap, names: Sequence[str] = ()) -> PathEnd:
        """
        Return the object at the end of a path; arguments and errors are those of the function ``resolve``.
        """
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
        """Return the entries of a directory by name; simultaneous calls share one read."""
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
    """Return a path without its root, as printable text for messages."""
    return printable("/".join(names))
