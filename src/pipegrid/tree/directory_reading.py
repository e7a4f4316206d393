"""
One directory, read and parsed. Its content is untrusted input: bytes, entries and lengths of names are
bounded before memory is spent, and metadata is parsed only on request. Names may be any text, ``..`` as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Protocol

from twisted.internet.defer import Deferred

from pipegrid.argument_checks import check_kind
from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, MutableCap, UnknownCap
from pipegrid.core.mutable.directory_content_edits import open_write_cap
from pipegrid.core.packed_directory import entry_bytes, entry_texts, immutable_cap, readonly_cap
from pipegrid.core.text import printable
from pipegrid.errors import CapError, DirectoryError, PipegridError

Kind = Literal["directory", "file", "unknown"]

ENTRY_BYTES = 1000
"""Memory per entry in addition to its bytes: objects for it, its name and its cap."""

MAX_METADATA_BYTES = 1 << 16
"""Of one entry; Tahoe-LAFS and PipeGrid write about 200 bytes. Larger metadata is ignored."""


class ReadsFiles(Protocol):
    """What reading directories needs of a grid."""

    def read(self, cap: str | Cap, start: int = 0, length: int | None = None) -> Deferred[bytes]:
        """Fetch a file, or a range of it, into memory."""


class ListingLimits(NamedTuple):
    """
    Limits of a directory; one that exceeds them cannot be read.

    Attributes:
        directory_bytes: packed; 10,000 entries take about 3 MB.
        entries: a million small ones would fit into these bytes.
        name_bytes: in UTF-8; Tahoe-LAFS accepts names of 5000 characters.
    """

    directory_bytes: int = 64 << 20
    entries: int = 200_000
    name_bytes: int = 32 << 10


class Entry(NamedTuple):
    """
    One entry of a directory.

    Attributes:
        name: composed (NFC), any text.
        cap: that reads the child; None if only a write cap is stored and no read cap derives from it.
        write_cap: that changes the child, as stored, if the directory's cap reveals it.
        metadata_json: as stored, perhaps not valid JSON.
    """

    name: str
    cap: Cap | None
    write_cap: Cap | None = None
    metadata_json: bytes = b"{}"

    def __repr__(self) -> str:
        """Without the write cap and the metadata: logs contain it."""
        return f"Entry({self.name!r}, {self.cap!r}, ...)"

    @property
    def best(self) -> Cap | None:
        """The cap that grants most: the write cap, if it belongs to the same object as the read cap."""
        write_cap = self.write_cap
        if write_cap is None or isinstance(write_cap, UnknownCap):
            return self.cap
        return write_cap if self.cap == write_cap.readonly() else self.cap

    @property
    def kind(self) -> Kind:
        """What the child is according to its cap."""
        return kind_of(self.cap)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the entry; empty if it is not a JSON object or is too large."""
        return metadata_of(self.metadata_json)


class Listing(NamedTuple):
    """
    The entries of a directory.

    Attributes:
        entries: in ascending order of their names, which are distinct.
        size: of the directory, in bytes.
    """

    entries: tuple[Entry, ...]
    size: int

    def __repr__(self) -> str:
        """Without the entries, which are many."""
        return f"Listing(..., size={self.size})"

    @property
    def memory_bytes(self) -> int:
        """About how much memory this takes."""
        return self.size + ENTRY_BYTES * len(self.entries)


def kind_of(cap: Cap | None) -> Kind:
    """Return the kind of object that a cap reads; ``unknown`` if it does not read."""
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    reads = isinstance(file, (ChkCap, LitCap)) or (
        isinstance(file, MutableCap) and file.access != "verify"
    )
    if not reads:
        return "unknown"
    return "directory" if isinstance(cap, DirectoryCap) else "file"


def metadata_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object in data (UTF-8); an empty one if there is none, or it is too large."""
    if len(data) > MAX_METADATA_BYTES:
        return {}
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        return {}
    return found if isinstance(found, dict) else {}


def check_listing_limits(limits: ListingLimits | None) -> None:
    """Raise UsageError unless these are limits of a directory."""
    check_kind(limits, (ListingLimits, type(None)), "limits", "a ListingLimits")


async def read_listing(
    grid: ReadsFiles,
    cap: DirectoryCap,
    limits: ListingLimits | None = None,
    known: dict[bytes, Entry] | None = None,
) -> Listing:
    """
    Fetch a directory and parse it.

    Args:
        known: see ``unpack``.

    Raises:
        CapError: the cap does not read a directory.
        DirectoryError: it is damaged, or beyond the limits.
        PipegridError: the grid could not fetch it.
    """
    check_listing_limits(limits)
    limits = limits or ListingLimits()
    return unpack(cap, await read_packed(grid, cap, limits), limits, known)


async def read_packed(grid: ReadsFiles, cap: DirectoryCap, limits: ListingLimits) -> bytes:
    """
    Fetch a directory, and return its bytes; see ``unpack``.

    Raises:
        CapError: the cap does not read a directory.
        DirectoryError: it is beyond the limits.
        PipegridError: the grid could not fetch it.
    """
    file = cap.file
    if kind_of(cap) != "directory":
        raise CapError(
            "this is the verifier cap of a directory: it checks the shares but cannot list the entries; "
            "use the read cap"
        )
    if isinstance(file, LitCap):
        return file.data
    if isinstance(file, ChkCap) and file.size > limits.directory_bytes:
        raise _too_large(limits)
    # The size of a mutable directory is not known in advance.
    return await grid.read(file, 0, limits.directory_bytes + 1)


def unpack(
    cap: DirectoryCap,
    data: bytes,
    limits: ListingLimits | None = None,
    known: dict[bytes, Entry] | None = None,
) -> Listing:
    """
    Parse the bytes of a directory.

    Children that an immutable directory must not have are left out; if several have one name, the last
    counts.

    Args:
        known: entries of the same directory, by cap and by their bytes, which are not parsed again; they are
            replaced by those that it has now.

    Raises:
        DirectoryError: they are damaged, or beyond the limits.
    """
    limits = limits or ListingLimits()
    if len(data) > limits.directory_bytes:
        raise _too_large(limits)
    found = {entry.name: entry for entry in _entries(data, cap.file, limits, known)}
    return Listing(tuple(found[name] for name in sorted(found)), len(data))


def _entries(
    data: bytes, file: Cap, limits: ListingLimits, known: dict[bytes, Entry] | None
) -> Iterator[Entry]:
    before = {} if known is None else dict(known)
    if known is not None:
        known.clear()
    for count, (stored, position) in enumerate(entry_bytes(data)):
        if count >= limits.entries:
            raise DirectoryError(
                f"this directory has more than {limits.entries} entries, and was left out; "
                "programs can allow more with ListingLimits"
            )
        entry = before.get(stored) or _entry(stored, position, file, limits)
        if entry is None:
            continue
        if known is not None:
            known[stored] = entry
        yield entry


def _entry(stored: bytes, position: int, file: Cap, limits: ListingLimits) -> Entry | None:
    """Return an entry; None: an immutable directory may not have it."""
    name, cap_text, rw_data, metadata = entry_texts(stored, position)
    # A character has at most four bytes, so most names need not be encoded to check their length.
    if 4 * len(name) > limits.name_bytes < len(name.encode("utf-8")):
        raise DirectoryError(
            f"an entry of this directory has a name of more than {limits.name_bytes} bytes, which "
            f"begins with '{printable(name[:20])}'; the directory was left out"
        )
    writekey = None
    if isinstance(file, MutableCap):
        cap = readonly_cap(cap_text)
        writekey = file.secret if file.access == "write" else None
    else:
        if rw_data:
            raise DirectoryError(
                f"the child '{printable(name)}' of an immutable directory has a write cap; do not "
                "trust it"
            )
        cap = immutable_cap(cap_text)
        if cap is None and cap_text.strip(" "):
            return None
    write_cap = None if writekey is None else open_write_cap(rw_data, writekey)
    if cap is None and write_cap is not None and not isinstance(write_cap, UnknownCap):
        cap = write_cap.readonly()
    return Entry(name, cap, write_cap, metadata)


def _too_large(limits: ListingLimits) -> PipegridError:
    return DirectoryError(
        f"this directory has more than {limits.directory_bytes / (1 << 20):.4g} MiB, and was left out; "
        "programs can allow more with ListingLimits"
    )
