"""
Changes to a read-write directory, as values that can be applied again.

A writer who was beaten by another reads the directory anew and applies the same edits to what is there now,
so that nobody's change is lost. All edits of one call take effect together, or none does.

**What is there now may have them already**: a version that its writer did not know to be stored was, and
somebody else has built on it. Edits that take a child from one name to another must not find there what they
have made themselves: two names that were exchanged would be exchanged back, a child that was linked in the
place of one renamed would take the other's. So it is looked first whether they are there
(``merging.made_before``).

Source: the format reference for mutable files, section 7; that of trees, 3.1, 3.2 and 7.4.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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
    shown_cap,
)
from pipegrid.core.directory import entry_fields
from pipegrid.core.hashes import netstring
from pipegrid.core.mutable.childcaps import encrypt_write_cap
from pipegrid.core.mutable.entries import (
    MAX_DIRECTORY_BYTES,
    MAX_METADATA_BYTES,
    MAX_METADATA_DEPTH,
    LazyEntry,
    OpenDirectory,
    pack_entries,
    parse_metadata,
)
from pipegrid.core.mutable.merging import is_time, later
from pipegrid.core.names import composed
from pipegrid.errors import CapError, ChildExists, NoSuchChild, UsageError

MAX_NAME_BYTES = 32 << 10
"""Of a name that is written, in UTF-8; where one is longer, readers leave out the directory (``listing``)."""

MAX_CHILDREN = 200_000
"""That a directory may come to have, for the same reason; one that has more may only lose some."""

_READ_ONLY, _IMMUTABLE = "ro.", "imm."
_DOUBT = ": an earlier try of this change may have been stored, and others have written since"


@attrs.frozen
class Link:
    """
    Put a child into the directory.

    Attributes:
        name: any text; composed when it is applied.
        cap: of the child; a write cap is stored with its read cap. An ``UnknownCap`` needs a prefix, or else
            it is taken for a write cap, and ``read_cap`` must be given.
        read_cap: only with a ``cap`` that is unknown.
        metadata: takes the place of what the child of this name had, but for the times of linking; None to
            keep that. With ``no-write`` in it the child is stored for reading only.
        replace: whether a child of this name may be there.
    """

    name: str
    cap: Cap = attrs.field(repr=shown_cap)
    read_cap: Cap | None = attrs.field(default=None, repr=shown_cap)
    metadata: dict[str, Any] | None = None
    replace: bool = True


@attrs.frozen
class Unlink:
    """
    Take a child out of the directory.

    Attributes:
        must_exist: whether it has to be there.
    """

    name: str
    must_exist: bool = True


@attrs.frozen
class Rename:
    """
    Give a child another name; caps and metadata stay, the times of linking are new.

    Attributes:
        replace: whether a child with the new name may be there.
    """

    old: str
    new: str
    replace: bool = True


Edit = Link | Unlink | Rename


def apply_edits(
    data: bytes, edits: Sequence[Edit], writekey: bytes, now: float, repeated: bool = False
) -> bytes:
    """
    Return the directory's bytes after the edits, in their order.

    Args:
        data: the directory as it is; entries that no edit names are copied byte for byte.
        writekey: 16 bytes, the directory's own.
        now: seconds since 1970.
        repeated: the same edits may have taken effect before: a child that is to go may be gone, one that
            is to be linked or renamed may have been.

    Raises:
        DirectoryError: data is not a directory.
        NoSuchChild, ChildExists: an edit asks for what it must not; nothing was changed.
        UsageError: a child cannot be written so.
    """
    return pack_entries(edited(OpenDirectory.of(data), edits, writekey, now, repeated).entries)


def edited(
    before: OpenDirectory,
    edits: Sequence[Edit],
    writekey: bytes,
    now: float,
    repeated: bool = False,
) -> OpenDirectory:
    """Return what edits make of a directory, which stays as it is; otherwise as ``apply_edits``."""
    entries = dict(before.entries)
    most = max(MAX_CHILDREN, len(entries))
    for number, edit in enumerate(edits):
        if isinstance(edit, Link):
            _link(entries, edit, writekey, _time_of(now, edit.name, before, entries), repeated)
        elif isinstance(edit, Unlink):
            if entries.pop(composed(edit.name), None) is None and edit.must_exist and not repeated:
                raise _no_such_child(edit.name)
        elif not (repeated and _is_passed_on(entries, edit, edits[number + 1 :])):
            _rename(entries, edit, _time_of(now, edit.new, before, entries), repeated)
    if len(entries) > most:
        raise UsageError(
            f"the directory would have {len(entries)} entries, and at most {most} are allowed; "
            "put some of them into another"
        )
    after = before.changed(entries, [composed(name) for edit in edits for name in _names_of(edit)])
    if after.size > MAX_DIRECTORY_BYTES:
        raise UsageError(
            f"the directory would have {after.size} bytes, and at most {MAX_DIRECTORY_BYTES} are allowed; "
            "put some of its entries into another"
        )
    return after


def _time_of(now: float, name: str, before: OpenDirectory, entries: dict[str, LazyEntry]) -> float:
    name = composed(name)
    return later(later(now, before.entries.get(name)), entries.get(name))


def _names_of(edit: Edit) -> tuple[str, ...]:
    return (edit.old, edit.new) if isinstance(edit, Rename) else (edit.name,)


def _link(
    entries: dict[str, LazyEntry], edit: Link, writekey: bytes, now: float, repeated: bool
) -> None:
    name = composed(edit.name)
    old = entries.get(name)
    write_text, read_text = _stored_caps(edit)
    if old is not None and not edit.replace:
        there = {old.read_cap, old.write_cap(writekey)}
        if not repeated or edit.cap not in there:
            raise _child_exists(edit.name, repeated)
    metadata = _linked_metadata(old, edit.metadata, now)
    if metadata.get("no-write"):
        write_text = ""
    packed = _metadata_bytes(edit.name, metadata, strict=edit.metadata is not None)
    entries[name] = _entry(name, read_text, write_text, packed, writekey)


def new_entry(link: Link, writekey: bytes) -> LazyEntry:
    """
    Return an entry with metadata exactly as given, without times of linking.

    For directories that are made with their children; what ``no-write`` means there is the caller's business.

    Raises:
        UsageError: the child cannot be written so.
    """
    write_text, read_text = _stored_caps(link)
    packed = _metadata_bytes(link.name, link.metadata or {}, strict=True)
    return _entry(composed(link.name), read_text, write_text, packed, writekey)


def _entry(
    name: str, read_text: str, write_text: str, metadata: bytes, writekey: bytes
) -> LazyEntry:
    rw_data = encrypt_write_cap(write_text, writekey)
    fields = (name_bytes(name), read_text.encode("utf-8"), rw_data, metadata)
    return LazyEntry(name, b"".join(map(netstring, fields)))


def _is_passed_on(entries: dict[str, LazyEntry], edit: Rename, later: Sequence[Edit]) -> bool:
    """Return whether a child may have been renamed, and be gone from its new name by a later edit."""
    old, new = composed(edit.old), composed(edit.new)
    takers = (
        each.old if isinstance(each, Rename) else each.name
        for each in later
        if not isinstance(each, Link)
    )
    return old not in entries and new not in entries and new in map(composed, takers)


def _rename(entries: dict[str, LazyEntry], edit: Rename, now: float, repeated: bool) -> None:
    old_name, new_name = composed(edit.old), composed(edit.new)
    entry = entries.get(old_name)
    if entry is None:
        if repeated and new_name in entries:
            return
        raise _no_such_child(edit.old, repeated)
    if old_name == new_name:
        return
    there = entries.get(new_name)
    done = repeated and there is not None and there.read_cap == entry.read_cap
    if there is not None and not edit.replace and not done:
        raise _child_exists(edit.new, repeated)
    del entries[old_name]
    _, cap_text, rw_data, stored_metadata = entry_fields(entry.stored)
    metadata = parse_metadata(stored_metadata)
    if metadata is not None:
        metadata["tahoe"] = _times(metadata.get("tahoe"), now, now)
        stored_metadata = json.dumps(metadata).encode("ascii")
    fields = (name_bytes(new_name), cap_text, rw_data, stored_metadata)
    entries[new_name] = LazyEntry(new_name, b"".join(map(netstring, fields)))


def _stored_caps(edit: Link) -> tuple[str, str]:
    """Return the write cap ("" for none) and the read cap to be stored."""
    cap, read_cap = edit.cap, edit.read_cap
    if not isinstance(cap, UnknownCap):
        if read_cap is not None and str(read_cap) != str(cap.readonly()):
            raise _unlinkable(edit.name, "its read cap is not that of its write cap; give only one")
        file = cap.file if isinstance(cap, DirectoryCap) else cap
        if isinstance(file, MutableCap) and file.access != "verify":
            return (str(cap) if file.access == "write" else ""), str(cap.readonly())
        if isinstance(file, (ChkCap, LitCap)):
            return "", str(cap)
        assert isinstance(file, (ChkVerifierCap, MutableCap))
        raise _unlinkable(edit.name, "a verifier cap does not read anything; give a cap that does")
    text = str(cap)
    if text.startswith((_READ_ONLY, _IMMUTABLE)) and read_cap is None:
        return "", _unknown_read_text(edit.name, text)
    if read_cap is None or str(read_cap).startswith(_IMMUTABLE) or not text:
        why = "its cap is of a kind that is not known here, so that its read cap must be given too"
        raise _unlinkable(edit.name, f"{why}; or put ro. or imm. before it if it is one")
    return text, _unknown_read_text(edit.name, str(read_cap))


def _unknown_read_text(name: str, text: str) -> str:
    bare = text.removeprefix(_READ_ONLY).removeprefix(_IMMUTABLE)
    try:
        known = not isinstance(parse_cap(bare), UnknownCap)
    except CapError:
        known = True
    if known or not bare or bare.startswith((_READ_ONLY, _IMMUTABLE)):
        why = "its cap does not keep what ro. or imm. before it promises; give it without"
        raise _unlinkable(name, why)
    return text.removeprefix(_READ_ONLY)


def _linked_metadata(
    old: LazyEntry | None, given: dict[str, Any] | None, now: float
) -> dict[str, Any]:
    """Return the metadata of a child that is linked now in the place of an old one, or none."""
    before = old.metadata if old is not None else None
    before = {} if before is None else before
    if given is None:
        metadata = dict(before)
    else:
        metadata = {key: value for key, value in given.items() if key != "tahoe"}
    times = before.get("tahoe")
    created = times.get("linkcrtime") if isinstance(times, dict) else None
    if not is_time(created):
        created = before.get("ctime")  # what writers before 2009 left
    if not is_time(created):
        created = now
    metadata["tahoe"] = _times(times, created, now)
    return metadata


def _times(old: object, created: Any, modified: float) -> dict[str, Any]:
    """Return the ``tahoe`` object with these times, and what else is in it."""
    times = dict(old) if isinstance(old, dict) else {}
    times["linkcrtime"] = created
    times["linkmotime"] = modified
    return times


def name_bytes(name: str) -> bytes:
    """
    Return a composed name as an entry has it.

    Raises:
        UsageError: none can have it.
    """
    try:
        data = name.encode("utf-8")
    except UnicodeEncodeError:
        why = "half a character, or a byte that is no UTF-8, cannot be written"
        raise _unlinkable(name, why) from None
    if len(data) > MAX_NAME_BYTES:
        raise UsageError(
            f"cannot link {name[:20]!r}...: a name of {len(data)} bytes, and at most {MAX_NAME_BYTES} "
            "are allowed"
        )
    return data


def _metadata_bytes(name: str, metadata: dict[str, Any], strict: bool) -> bytes:
    try:
        # What others have stored stays as it is, though JSON knows no infinity.
        data = json.dumps(metadata, allow_nan=not strict).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise _unlinkable(name, f"its metadata cannot be written as JSON ({error})") from None
    if parse_metadata(data) is None:
        raise UsageError(
            f"cannot link {name!r}: its metadata takes {len(data)} bytes; at most {MAX_METADATA_BYTES} are "
            f"allowed, and {MAX_METADATA_DEPTH} levels"
        )
    return data


def _unlinkable(name: str, why: str) -> UsageError:
    return UsageError(f"cannot link {name!r}: {why}")


def _no_such_child(name: str, repeated: bool = False) -> NoSuchChild:
    doubt = _DOUBT if repeated else ""
    return NoSuchChild(
        f"the directory has no child {name!r}; list it to see what exists{doubt}", name, repeated
    )


def _child_exists(name: str, repeated: bool) -> ChildExists:
    doubt = _DOUBT if repeated else ""
    return ChildExists(
        f"the directory has a child {name!r} already; take another name, or allow to replace it{doubt}",
        name,
        repeated,
    )
