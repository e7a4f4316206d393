"""
Directories as the bytes of one file, in which children with names, caps and metadata are packed.

Source: Tahoe-LAFS's ``dirnodes.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import attrs

from pipegrid.core.caps import (
    Cap,
    ChkCap,
    ChkVerifierCap,
    DirectoryCap,
    LitCap,
    MutableCap,
    UnknownCap,
    parse_cap,
)
from pipegrid.core.hashes import netstring
from pipegrid.core.text import composed
from pipegrid.errors import CapError, DirectoryError, UsageError

_IMMUTABLE = "imm."
_READ_ONLY = "ro."
_MAX_LENGTH_DIGITS = 12
_ZERO = ord("0")

# One encoder for all entries: ``dumps`` would create one per entry, which takes as long as encoding.
_JSON = json.JSONEncoder(allow_nan=False)


@attrs.frozen
class PackedChild:
    """
    One entry of an immutable directory.

    Attributes:
        name: any text; this module returns it composed (NFC).
        cap: the cap of an immutable file or directory, an ``UnknownCap`` marked ``imm.``, or an
            ``UnknownCap`` of an empty text for an entry that has only a name and metadata.
        metadata: any JSON object; its keys are written in their order.
    """

    name: str
    cap: Cap
    metadata: dict[str, Any] = attrs.Factory(dict)


def directory_cap(file_cap: Cap) -> DirectoryCap:
    """
    Return the cap of the directory whose packed entries this file contains.

    Raises:
        CapError: the cap is already a directory's cap, or of an unknown kind.
    """
    if isinstance(file_cap, (ChkCap, ChkVerifierCap, LitCap, MutableCap)):
        return DirectoryCap(file_cap)
    raise CapError("only the cap of a file can become that of a directory; this one is not")


def pack_immutable(children: Iterable[PackedChild]) -> bytes:
    """
    Return the bytes of an immutable directory; b"" for no children. Entries are sorted by the code points of
    their names.

    Raises:
        UsageError: two names are the same, a child is mutable, or its name or metadata cannot be stored.
    """
    entries: dict[str, bytes] = {}
    for child in children:
        name = composed(child.name)
        if name in entries:
            raise UsageError(
                f"cannot pack the directory: two children are named {name!r}; rename one"
            )
        entries[name] = _pack_entry(name, child)
    return b"".join(netstring(entries[name]) for name in sorted(entries))


def unpack_immutable(data: bytes) -> list[PackedChild]:
    """
    Return the children in ascending order of their names.

    Children whose caps an immutable directory must not have are left out. Of several children with the same
    name, the last one counts.

    Raises:
        DirectoryError: data is not an immutable directory; or a child has an encrypted write cap.
    """
    children: dict[str, PackedChild] = {}
    for stored, position in entry_bytes(data):
        name, cap_text, rw_data, packed = entry_texts(stored, position)
        metadata = _metadata(packed, position)
        if rw_data:
            raise DirectoryError(
                f"the child {name!r} of an immutable directory has a write cap; do not trust it"
            )
        cap = immutable_cap(cap_text)
        if cap is not None:
            children[name] = PackedChild(name, cap, metadata)
    return [children[name] for name in sorted(children)]


def _pack_entry(name: str, child: PackedChild) -> bytes:
    cap: Cap | None = child.cap
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if not isinstance(file, (ChkCap, LitCap)):
        text = str(cap)
        marked = not isinstance(cap, UnknownCap) or text.startswith(_IMMUTABLE)
        if text:
            cap = immutable_cap(text) if marked else None
    if cap is None:
        raise UsageError(
            f"cannot put {name!r} into an immutable directory, since it may change; "
            "give a cap of an immutable file or directory"
        )
    try:
        metadata = _JSON.encode(child.metadata).encode("ascii")
        fields = (name.encode("utf-8"), str(cap).removeprefix(_IMMUTABLE).encode("utf-8"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot pack the child {name!r}: its name or metadata cannot be written ({error})"
        ) from None
    return b"".join(netstring(field) for field in (*fields, b"", metadata))


def immutable_cap(text: str) -> Cap | None:
    """
    Return the cap of an immutable directory's child from the stored text. None if such a directory must not
    have it.

    The stored text needs no prefix ``imm.``, since the directory implies it.
    """
    bare = text.rstrip(" ").removeprefix(_IMMUTABLE)
    try:
        cap = parse_cap(bare)
    except CapError:
        return None
    if isinstance(cap, UnknownCap):
        promises_less = not bare or bare.startswith((_READ_ONLY, _IMMUTABLE))
        return None if promises_less else UnknownCap(_IMMUTABLE + bare)
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    return cap if isinstance(file, (ChkCap, LitCap)) else None


def readonly_cap(text: str) -> Cap | None:
    """
    Return the read cap of a read-write directory's child from the stored text, for which the directory
    implies the prefix ``ro.``.

    None if the text is empty. A cap that is unknown, malformed, or grants more than reading becomes an
    ``UnknownCap`` with a prefix.
    """
    text = text.rstrip(" ")
    if not text:
        return None
    if not text.startswith((_IMMUTABLE, _READ_ONLY)):
        text = _READ_ONLY + text
    try:
        return parse_cap(text)
    except CapError:
        # A malformed cap of one child must not make the directory unreadable; an ``UnknownCap`` can at least
        # be shown.
        return UnknownCap(text)


def entry_bytes(data: bytes) -> Iterator[tuple[bytes, int]]:
    """
    Yield the bytes of each entry, without the length stored before it, and the offset where the entry begins.

    Raises:
        DirectoryError: data is not a directory.
    """
    position, size = 0, len(data)
    while position < size:
        (stored,), end = _take_netstrings(data, position, 1, position)
        yield stored, position
        position = end


def entry_texts(stored: bytes, position: int = 0) -> tuple[str, str, bytes, bytes]:
    """Return the same four fields as ``entry_fields``, with the composed name and the read cap as text."""
    name, cap_text, rw_data, metadata = entry_fields(stored, position)
    try:
        return composed(name.decode("utf-8")), cap_text.decode("utf-8"), rw_data, metadata
    except UnicodeDecodeError:
        _damaged(position, "its name or cap is not UTF-8")


def entry_fields(stored: bytes, position: int = 0) -> tuple[bytes, bytes, bytes, bytes]:
    """
    Return name, read cap, write cap data and metadata of one entry, as stored.

    Args:
        position: the offset of the entry in the directory, for the error.

    Raises:
        DirectoryError: the entry has fewer or more than four fields.
    """
    (name, cap_text, rw_data, metadata), at = _take_netstrings(stored, 0, 4, position)
    if at != len(stored):
        _damaged(position, "there are bytes after its last field")
    return name, cap_text, rw_data, metadata


def _take_netstrings(
    data: bytes, at: int, count: int, entry_position: int
) -> tuple[list[bytes], int]:
    """Return the values of ``count`` consecutive netstrings, and the position after them."""
    values = []
    for _ in range(count):
        colon = data.find(b":", at, at + _MAX_LENGTH_DIGITS + 1)
        digits = data[at:colon]
        if colon < 0 or not digits.isdigit() or (digits[0] == _ZERO and len(digits) > 1):
            _damaged(entry_position, "a field has no length")
        end = colon + 1 + int(digits)
        if data[end : end + 1] != b",":
            _damaged(entry_position, "a field does not end where it says")
        values.append(data[colon + 1 : end])
        at = end + 1
    return values, at


def _metadata(data: bytes, entry_position: int) -> dict[str, Any]:
    try:
        metadata = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):  # RecursionError: the JSON is nested too deep
        metadata = None
    if not isinstance(metadata, dict):
        _damaged(entry_position, "its metadata is not a JSON object")
    return metadata


def _damaged(entry_position: int, why: str) -> NoReturn:
    raise DirectoryError(
        f"this is not a directory, or a damaged one: in the entry at byte {entry_position}, {why}; "
        "check that the cap is a directory's"
    )
