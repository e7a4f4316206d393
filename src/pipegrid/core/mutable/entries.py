"""
Read-write directories: the entries by name, each as it was stored.

An entry is not taken apart before somebody asks, and one that nobody changes goes back byte for byte,
whatever it holds: caps of kinds to come, caps that break their own promise, metadata that is no JSON. Only
what has no name cannot be kept, since then it is no directory.

Unpacking costs memory of at most ``MEMORY_MULTIPLE`` times the directory's bytes; reading one entry's
metadata that of its own bytes, and metadata that is too long or deep is as none.

Source: the format reference, section 8.5; that for mutable files, section 7; that of trees, 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from pipegrid.core.caps import Cap
from pipegrid.core.directory import entry_fields, readonly_cap, stored_entries
from pipegrid.core.hashes import netstring
from pipegrid.core.mutable.childcaps import open_write_cap
from pipegrid.errors import DirectoryError

MAX_DIRECTORY_BYTES = 64 << 20
"""A directory has to be read, held and written whole: this is one of some 200,000 children."""

MAX_ENTRIES = 1 << 20

MAX_METADATA_BYTES = 1 << 16
"""Of one entry."""

MAX_METADATA_DEPTH = 100

MEMORY_MULTIPLE = 32
"""What a directory unpacked takes at most, in times its bytes; the worst is one of the shortest entries."""


@attrs.frozen
class LazyEntry:
    """
    One child, as it stands in the directory; what is in it is read when somebody asks.

    Attributes:
        name: composed (NFC).
        stored: its four fields as they stand in the directory.
    """

    name: str
    stored: bytes = attrs.field(repr=False)

    @property
    def read_cap(self) -> Cap | None:
        """What reads the child; see ``directory.readonly_cap``."""
        return readonly_cap(entry_fields(self.stored)[1].decode("utf-8"))

    def write_cap(self, writekey: bytes) -> Cap | None:
        """
        Return what changes the child, or None if it is only for reading.

        Args:
            writekey: 16 bytes, the directory's own.
        """
        return open_write_cap(self.rw_data, writekey)

    @property
    def rw_data(self) -> bytes:
        """The write cap, encrypted for those with the directory's write key; empty if there is none."""
        return entry_fields(self.stored)[2]

    @property
    def metadata(self) -> dict[str, Any] | None:
        """A JSON object, a fresh one each time; None if what is stored is none, or beyond all bounds."""
        return parse_metadata(entry_fields(self.stored)[3])


@attrs.frozen(eq=False)
class OpenDirectory:
    """
    A directory that several edits are applied to, one behind the other, before it is packed again.

    Attributes:
        entries: by name; not to be changed.
        size: bytes of it when it is packed.
    """

    entries: Mapping[str, LazyEntry]
    size: int

    @classmethod
    def of(cls, data: bytes) -> OpenDirectory:
        """Return what is in a directory; raises as ``unpack_entries`` does."""
        entries = unpack_entries(data)
        return cls(entries, sum(map(_packed_bytes, entries.values())))

    def changed(self, entries: Mapping[str, LazyEntry], names: Iterable[str]) -> OpenDirectory:
        """Return it with these entries, which differ in nothing but these names; itself if not even there."""
        size, is_same = self.size, True
        for name in set(names):
            old, new = self.entries.get(name), entries.get(name)
            size += (_packed_bytes(new) if new else 0) - (_packed_bytes(old) if old else 0)
            is_same = is_same and old == new
        return self if is_same else OpenDirectory(entries, size)


def _packed_bytes(entry: LazyEntry) -> int:
    length = len(entry.stored)
    return len(str(length)) + length + 2  # a netstring


def unpack_entries(data: bytes) -> dict[str, LazyEntry]:
    """
    Return the entries by name, in ascending order of names; of several with the same name the last.

    Raises:
        DirectoryError: data is not a directory, or is larger than one may be.
    """
    if len(data) > MAX_DIRECTORY_BYTES:
        raise DirectoryError(
            f"this directory has {len(data)} bytes, and at most {MAX_DIRECTORY_BYTES} are read; "
            "if it is one, split it with the program that wrote it"
        )
    entries: dict[str, LazyEntry] = {}
    for count, stored in enumerate(stored_entries(data)):
        if count == MAX_ENTRIES:
            raise DirectoryError(
                f"this directory has more than {MAX_ENTRIES} entries, and no more are read; "
                "split it with the program that wrote it"
            )
        entries[stored.name] = LazyEntry(stored.name, stored.stored)
    return {name: entries[name] for name in sorted(entries)}


def pack_entries(entries: Mapping[str, LazyEntry]) -> bytes:
    """Return the directory's bytes; none for no entries."""
    return b"".join(netstring(entries[name].stored) for name in sorted(entries))


def parse_metadata(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object that data is, or None if it is none, too long or too deep."""
    if len(data) > MAX_METADATA_BYTES or _is_too_deep(data):
        return None
    try:
        metadata = json.loads(data.decode("utf-8"))
    except ValueError:
        return None
    return metadata if isinstance(metadata, dict) else None


def _is_too_deep(data: bytes) -> bool:
    """Say whether brackets are nested too deep, those in strings apart."""
    if data.count(b"[") + data.count(b"{") <= MAX_METADATA_DEPTH:
        return False
    depth = 0
    in_string = escaped = False
    for byte in data:
        if in_string:
            in_string = escaped or byte != 0x22
            escaped = byte == 0x5C and not escaped
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            if depth > MAX_METADATA_DEPTH:
                return True
        elif byte in b"]}":
            depth -= 1
    return False
