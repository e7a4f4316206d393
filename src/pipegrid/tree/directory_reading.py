"""
Reading and parsing of one directory. Its content is untrusted input: the number of bytes and entries and the
length of names are limited before memory is used, and metadata is parsed only on request. Names may be any
text, including ``..``.
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
"""Memory of the Python objects for one entry (with its name and cap), in addition to its packed bytes."""

MAX_METADATA_BYTES = 1 << 16
"""Maximum metadata of an entry; Tahoe-LAFS and PipeGrid write about 200 bytes. Larger metadata is ignored."""


class ReadsFiles(Protocol):
    """The methods of a grid that reading directories needs."""

    def read(self, cap: str | Cap, start: int = 0, length: int | None = None) -> Deferred[bytes]:
        """Fetch a file, or a range of it, into memory."""


class ListingLimits(NamedTuple):
    """
    Limits of a directory; a directory that exceeds them cannot be read.

    Attributes:
        directory_bytes: maximum size when packed; 10,000 entries take about 3 MB.
        entries: maximum number; without this limit, a million small entries would fit into the bytes.
        name_bytes: maximum for a name in UTF-8; Tahoe-LAFS accepts names of 5000 characters.
    """

    directory_bytes: int = 64 << 20
    entries: int = 200_000
    name_bytes: int = 32 << 10


class Entry(NamedTuple):
    """
    One entry of a directory.

    Attributes:
        name: any text, normalized (NFC).
        cap: the child's read cap; None if only a write cap is stored from which no read cap can be derived.
        write_cap: the child's write cap as stored, if the directory's cap reveals it.
        metadata_json: the metadata as stored; may be invalid JSON.
    """

    name: str
    cap: Cap | None
    write_cap: Cap | None = None
    metadata_json: bytes = b"{}"

    def __repr__(self) -> str:
        """Return a text for logs, without the write cap and the metadata."""
        return f"Entry({self.name!r}, {self.cap!r}, ...)"

    @property
    def best(self) -> Cap | None:
        """The cap that grants most: the write cap if it belongs to the read cap, otherwise the read cap."""
        write_cap = self.write_cap
        if write_cap is None or isinstance(write_cap, UnknownCap):
            return self.cap
        return write_cap if self.cap == write_cap.readonly() else self.cap

    @property
    def kind(self) -> Kind:
        """The kind of the child according to its cap."""
        return kind_of(self.cap)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the entry; empty if it is not a JSON object or is too large."""
        return metadata_of(self.metadata_json)


class Listing(NamedTuple):
    """
    The entries of a directory.

    Attributes:
        entries: the entries in ascending order of their distinct names.
        size: the size of the directory in bytes.
    """

    entries: tuple[Entry, ...]
    size: int

    def __repr__(self) -> str:
        """Return a text without the entries, which may be many."""
        return f"Listing(..., size={self.size})"

    @property
    def memory_bytes(self) -> int:
        """The approximate memory that the listing takes."""
        return self.size + ENTRY_BYTES * len(self.entries)


def kind_of(cap: Cap | None) -> Kind:
    """Return the kind of object that a cap can read; ``unknown`` if it cannot read."""
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    reads = isinstance(file, (ChkCap, LitCap)) or (
        isinstance(file, MutableCap) and file.access != "verify"
    )
    if not reads:
        return "unknown"
    return "directory" if isinstance(cap, DirectoryCap) else "file"


def metadata_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object in UTF-8 data; an empty one if the data is too large or no JSON object."""
    if len(data) > MAX_METADATA_BYTES:
        return {}
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):  # RecursionError: the JSON is nested too deeply
        return {}
    return found if isinstance(found, dict) else {}


def check_listing_limits(limits: ListingLimits | None) -> None:
    """Raise UsageError if ``limits`` is neither a ``ListingLimits`` nor None."""
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
        CapError: the cap cannot read a directory.
        DirectoryError: the directory is damaged, or exceeds the limits.
        PipegridError: the directory could not be fetched from the grid.
    """
    check_listing_limits(limits)
    limits = limits or ListingLimits()
    return unpack(cap, await read_packed(grid, cap, limits), limits, known)


async def read_packed(grid: ReadsFiles, cap: DirectoryCap, limits: ListingLimits) -> bytes:
    """
    Fetch a directory, and return its bytes; see ``unpack``.

    Raises:
        CapError: the cap cannot read a directory.
        DirectoryError: the directory exceeds the limits.
        PipegridError: the directory could not be fetched from the grid.
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
    # The size of a mutable directory is not known in advance; one more byte shows that it is too large.
    return await grid.read(file, 0, limits.directory_bytes + 1)


def unpack(
    cap: DirectoryCap,
    data: bytes,
    limits: ListingLimits | None = None,
    known: dict[bytes, Entry] | None = None,
) -> Listing:
    """
    Parse the bytes of a directory.

    Children that an immutable directory must not have are left out. If several children have the same name,
    the last one counts.

    Args:
        known: entries of an earlier version, read with the same cap, by their bytes. Entries with the same
            bytes are reused without parsing. The dictionary is then filled with the present entries.

    Raises:
        DirectoryError: the directory is damaged, or exceeds the limits.
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
    """Return a parsed entry; None: an immutable directory must not have this child."""
    name, cap_text, rw_data, metadata = entry_texts(stored, position)
    # A character has at most four bytes in UTF-8, so the length of most names can be checked without encoding
    # them.
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
