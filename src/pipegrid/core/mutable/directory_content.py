"""
The content of read-write directories: entries, encrypted write caps, and merging.

Source: the format reference for mutable files, section 7; that of trees, sections 3 and 7.4.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

from pipegrid.core.caps import (
    Cap,
    UnknownCap,
    parse_cap,
)
from pipegrid.core.hashes import HASH_BYTES, KEY_BYTES, Tag, netstring
from pipegrid.core.packed_directory import entry_bytes, entry_fields, entry_texts, readonly_cap
from pipegrid.core.stream_cipher import applied
from pipegrid.errors import CapError, DirectoryError

# The write caps of children are encrypted so that only writers of the directory can read them. The key is
# derived from the directory's write key and a salt, and the salt from the cap itself, so equal caps give
# equal bytes. The stored checksum is not verified: the directory's signature covers it.

_SALT = Tag(b"allmydata_dirnode_child_rwcap_to_salt_v1")
_KEY = Tag(b"allmydata_mutable_writekey_and_salt_to_dirnode_child_capkey_v1")
_SALT_BYTES = 16
_LEAST_BYTES = _SALT_BYTES + HASH_BYTES


def encrypt_write_cap(cap_text: str, writekey: bytes) -> bytes:
    """
    Return the encrypted write cap of a child: 48 bytes longer than the cap, never empty.

    Args:
        cap_text: the write cap, or "" for none.
        writekey: 16 bytes, the directory's own.
    """
    text = cap_text.encode("utf-8")
    salt = _SALT.hash(text)[:_SALT_BYTES]
    key = _child_key(salt, writekey)
    ciphertext = applied(key, text)
    inner = hashlib.sha256(_xored(key, 0x36) + salt + ciphertext).digest()
    return salt + ciphertext + hashlib.sha256(_xored(key, 0x5C) + inner).digest()


def decrypt_write_cap(rw_data: bytes, writekey: bytes) -> str | None:
    """Return a child's write cap, "" if it has none, or None if it was not encrypted for this directory."""
    if len(rw_data) <= _LEAST_BYTES:  # encrypted nothing has that length
        return "" if len(rw_data) in (0, _LEAST_BYTES) else None
    salt, ciphertext = rw_data[:_SALT_BYTES], rw_data[_SALT_BYTES:-HASH_BYTES]
    try:
        return applied(_child_key(salt, writekey), ciphertext).decode("utf-8").rstrip(" ")
    except UnicodeDecodeError:
        return None


def open_write_cap(rw_data: bytes, writekey: bytes) -> Cap | None:
    """Return a child's write cap; None if it has none, or it was not encrypted for this directory."""
    text = decrypt_write_cap(rw_data, writekey)
    if not text:
        return None
    try:
        return parse_cap(text)
    except CapError:
        # One bad child must not hide the others; an unknown cap can at least be shown.
        return UnknownCap(text)


def _child_key(salt: bytes, writekey: bytes) -> bytes:
    return _KEY.hash_pair(salt, writekey)[:KEY_BYTES]


def _xored(key: bytes, value: int) -> bytes:
    return bytes(byte ^ value for byte in key)


# An entry is parsed only when needed. An unchanged one is written back byte for byte, whatever it contains:
# caps of unknown kinds, caps that break their own promise, metadata that is not JSON. Only an entry without
# a name is an error, since then it is no directory.

MAX_DIRECTORY_BYTES = 64 << 20
"""A directory is read, held and written as a whole; this is the size of one with some 200,000 children."""

MAX_ENTRIES = 1 << 20

MAX_METADATA_BYTES = 1 << 16
"""The limit for one entry."""

MAX_METADATA_DEPTH = 100

MEMORY_MULTIPLE = 32
"""An unpacked directory takes at most this many times its bytes; the worst case is the shortest entries."""


class LazyEntry(NamedTuple):
    """
    One child as it is stored in the directory; parsed when an attribute is read.

    Attributes:
        name: composed (NFC).
        stored: its four stored fields.
    """

    name: str
    stored: bytes

    def __repr__(self) -> str:
        """Without the caps: logs contain it."""
        return f"LazyEntry({self.name!r}, ...)"

    @property
    def read_cap(self) -> Cap | None:
        """The read cap of the child; see ``packed_directory.readonly_cap``."""
        return readonly_cap(entry_fields(self.stored)[1].decode("utf-8"))

    def write_cap(self, writekey: bytes) -> Cap | None:
        """
        Return the write cap of the child, or None if it has none.

        Args:
            writekey: 16 bytes, the directory's own.
        """
        return open_write_cap(self.rw_data, writekey)

    @property
    def rw_data(self) -> bytes:
        """The encrypted write cap; empty if the child has none."""
        return entry_fields(self.stored)[2]

    @property
    def metadata(self) -> dict[str, Any] | None:
        """
        A JSON object, a new one each time; None if the stored metadata is not one, or exceeds the limits.
        """
        return parse_metadata(entry_fields(self.stored)[3])


class OpenDirectory(NamedTuple):
    """
    A parsed directory that several edits are applied to before it is packed again.

    Attributes:
        entries: by name; must not be changed.
        size: its length in bytes when packed.
    """

    entries: Mapping[str, LazyEntry]
    size: int

    @classmethod
    def of(cls, data: bytes) -> OpenDirectory:
        """Parse a directory; raises as ``unpack_entries`` does."""
        entries = unpack_entries(data)
        return cls(entries, sum(map(_packed_bytes, entries.values())))

    def changed(self, entries: Mapping[str, LazyEntry], names: Iterable[str]) -> OpenDirectory:
        """
        Return the directory with these entries, which may differ in ``names`` only; itself if none differs.
        """
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
            "split it with the program that wrote it"
        )
    entries: dict[str, LazyEntry] = {}
    for count, (stored, position) in enumerate(entry_bytes(data)):
        if count == MAX_ENTRIES:
            raise DirectoryError(
                f"this directory has more than {MAX_ENTRIES} entries, and no more are read; "
                "split it with the program that wrote it"
            )
        name = entry_texts(stored, position)[0]
        entries[name] = LazyEntry(name, stored)
    return {name: entries[name] for name in sorted(entries)}


def pack_entries(entries: Mapping[str, LazyEntry]) -> bytes:
    """Return the directory's bytes; b"" for no entries."""
    return b"".join(netstring(entries[name].stored) for name in sorted(entries))


def parse_metadata(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object that data contains, or None if it is not one, too long or too deep."""
    if len(data) > MAX_METADATA_BYTES or _is_too_deep(data):
        return None
    try:
        metadata = json.loads(data.decode("utf-8"))
    except ValueError:
        return None
    return metadata if isinstance(metadata, dict) else None


def _is_too_deep(data: bytes) -> bool:
    """Return whether brackets outside strings are nested too deep."""
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


# Merging of two versions of a directory, neither of which was made from the other.


def merge_directories(first: bytes, second: bytes) -> bytes:
    """
    Return the directory with the entries of both; of two with the same name, the one linked later.

    For two versions with one sequence number, both of which were reported as stored. A child that only one
    of them has unlinked exists again: an extra entry is better than a lost one. The order of the arguments
    does not matter.

    Raises:
        DirectoryError: one of them is not a directory.
    """
    merged = unpack_entries(first)
    for name, entry in unpack_entries(second).items():
        other = merged.get(name)
        if other is None or _age(other) < _age(entry):
            merged[name] = entry
    return pack_entries(merged)


def content_if_applied(before: bytes, after: bytes, current: bytes) -> bytes | None:
    """
    Return the current content if the edits have taken effect in it, else None: then apply them again.

    They have if an entry is byte for byte as they made it, since it contains the time. Later changes of the
    same names by others stay, also a link in place of a child that was removed. Only entries that equal
    those before the edits have come back by a merge, and are removed again.

    Args:
        before, after: the directory before and after the edits.

    Raises:
        DirectoryError: one of them is not a directory.
    """
    old, new, entries = map(unpack_entries, (before, after, current))
    changed = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    if not any(name in new and entries.get(name) == new[name] for name in changed):
        return None
    for name in changed:
        if name in old and entries.get(name) == old[name]:
            del entries[name]
            if name in new:
                entries[name] = new[name]
    return pack_entries(entries)


def later(now: float, replaced: LazyEntry | None) -> float:
    """
    Return the time of a new link: later than that of the one it replaces.

    Otherwise a link made in the same moment, or with a wrong clock, would return in a merge.
    """
    return now if replaced is None else max(now, math.nextafter(_linked_at(replaced), math.inf))


def _age(entry: LazyEntry) -> tuple[float, bytes]:
    return _linked_at(entry), entry.stored


def _linked_at(entry: LazyEntry) -> float:
    tahoe = (entry.metadata or {}).get("tahoe")
    linked = tahoe.get("linkmotime") if isinstance(tahoe, dict) else None
    return linked if is_time(linked) else -math.inf


def is_time(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a time in metadata: seconds since 1970."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
