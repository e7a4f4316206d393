"""
Edits of directories: links, unlinks, renames and metadata, which can be applied again; and new directories.

Source: the format reference for mutable files, section 7; that of trees, sections 3 and 7.4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from pipegrid.core.hashes import netstring
from pipegrid.core.mutable.directory_content import (
    MAX_DIRECTORY_BYTES,
    MAX_METADATA_BYTES,
    MAX_METADATA_DEPTH,
    LazyEntry,
    OpenDirectory,
    encrypt_write_cap,
    is_time,
    later,
    pack_entries,
    parse_metadata,
)
from pipegrid.core.packed_directory import entry_fields
from pipegrid.core.text import composed
from pipegrid.errors import CapError, ChildExists, NoSuchChild, UsageError

# Edits are values, so they can be applied again: after an uncoordinated write, the writer reads the
# directory again and applies the same edits, and no change is lost. All edits of one call take effect
# together, or none.
#
# The current content may contain them already, if a version was stored without its writer learning it and
# another writer built on it. Applying renames twice would exchange two names back, so ``content_if_applied``
# checks this first.

MAX_NAME_BYTES = 32 << 10
"""For names that are written, in UTF-8; readers reject a directory with a longer one."""


MAX_CHILDREN = 200_000
"""The limit for writing, for the same reason; a directory with more children can only lose some."""


_READ_ONLY, _IMMUTABLE = "ro.", "imm."


_PERHAPS_STORED = (
    ": an earlier attempt of this change may have been stored, and others have written since"
)


@attrs.frozen
class Link:
    """
    Put a child into the directory.

    Attributes:
        name: any text; composed when it is applied.
        cap: of the child; a write cap is stored with its read cap. An ``UnknownCap`` without a prefix
            counts as a write cap, and then ``read_cap`` must be given; an empty one is a child of which no
            cap is known.
        read_cap: only with an unknown ``cap``.
        metadata: replaces that of an existing child, except the times of linking; None to keep
            it. With ``no-write`` in it only the read cap is stored.
        replace: whether a child of this name may exist.
        replace_directory: whether that may be a directory.
    """

    name: str
    cap: Cap = attrs.field(repr=shown_cap)
    read_cap: Cap | None = attrs.field(default=None, repr=shown_cap)
    metadata: dict[str, Any] | None = None
    replace: bool = True
    replace_directory: bool = True


@attrs.frozen
class Unlink:
    """
    Remove a child from the directory.

    Attributes:
        must_exist: whether it is an error if the child does not exist.
    """

    name: str
    must_exist: bool = True


@attrs.frozen
class Rename:
    """
    Give a child another name; caps and metadata stay, the times of linking are new.

    Attributes:
        replace: whether a child with the new name may exist.
        replace_directory: whether that may be a directory.
    """

    old: str
    new: str
    replace: bool = True
    replace_directory: bool = True


@attrs.frozen
class SetMetadata:
    """
    Set keys of the metadata of a child; its caps and the other keys stay.

    Attributes:
        changes: keys and values; ``tahoe``, the times of linking, is ignored.
    """

    name: str
    changes: Mapping[str, Any]


Edit = Link | Unlink | Rename | SetMetadata


def apply_edits(
    data: bytes, edits: Sequence[Edit], writekey: bytes, now: float, repeated: bool = False
) -> bytes:
    """
    Return the directory's bytes after the edits, in their order.

    Args:
        data: the directory; entries that no edit names are copied byte for byte.
        writekey: 16 bytes, the directory's own.
        now: seconds since 1970.
        repeated: the same edits may have taken effect before, so a child to unlink may be missing, and one
            to link or rename may exist.

    Raises:
        DirectoryError: data is not a directory.
        NoSuchChild, ChildExists: an edit is not possible; nothing was changed.
        UsageError: a child cannot be stored.
    """
    return pack_entries(edited(OpenDirectory.of(data), edits, writekey, now, repeated).entries)


def edited(
    before: OpenDirectory,
    edits: Sequence[Edit],
    writekey: bytes,
    now: float,
    repeated: bool = False,
) -> OpenDirectory:
    """Return a changed copy of a directory; otherwise as ``apply_edits``."""
    entries = dict(before.entries)
    most = max(MAX_CHILDREN, len(entries))
    for number, edit in enumerate(edits):
        if isinstance(edit, Link):
            _link(entries, edit, writekey, _time_of(now, edit.name, before, entries), repeated)
        elif isinstance(edit, Unlink):
            if entries.pop(composed(edit.name), None) is None and edit.must_exist and not repeated:
                raise _no_such_child(edit.name)
        elif isinstance(edit, SetMetadata):
            _set_metadata(entries, edit, _time_of(now, edit.name, before, entries), repeated)
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
    if old is not None and not _may_replace(edit, old):
        there = {old.read_cap, old.write_cap(writekey)}
        if not repeated or edit.cap not in there:
            raise _child_exists(edit.name, repeated)
    metadata = _linked_metadata(old, edit.metadata, now)
    if metadata.get("no-write"):
        write_text = ""
    packed = _metadata_bytes(edit.name, metadata, strict=edit.metadata is not None)
    entries[name] = _entry(name, read_text, write_text, packed, writekey)


def _may_replace(edit: Link | Rename, old: LazyEntry) -> bool:
    if not edit.replace:
        return False
    return edit.replace_directory or not isinstance(old.read_cap, DirectoryCap)


def pack_new(links: Sequence[Link], writekey: bytes) -> bytes:
    """
    Return the bytes of a directory that is created with its children, whose metadata are as given.

    Of several children with one name the last counts. With ``no-write`` in its metadata a child is stored
    with its read cap only.

    Raises:
        UsageError: a child cannot be stored, or there are too many.
    """
    entries: dict[str, LazyEntry] = {}
    for link in links:
        if (link.metadata or {}).get("no-write") and not isinstance(link.cap, UnknownCap):
            link = attrs.evolve(link, cap=link.cap.readonly())
        entry = new_entry(link, writekey)
        entries[entry.name] = entry
    if len(entries) > MAX_CHILDREN:
        raise UsageError(
            f"the directory would have {len(entries)} entries, and at most {MAX_CHILDREN} are allowed; "
            "put some of them into another"
        )
    return pack_entries(entries)


def _set_metadata(
    entries: dict[str, LazyEntry], edit: SetMetadata, now: float, repeated: bool
) -> None:
    name = composed(edit.name)
    old = entries.get(name)
    if old is None:
        raise _no_such_child(edit.name, repeated)
    stored_name, cap_text, rw_data, _ = entry_fields(old.stored)
    metadata = _linked_metadata(old, {**(old.metadata or {}), **edit.changes}, now)
    packed = _metadata_bytes(edit.name, metadata, strict=False)
    fields = (stored_name, cap_text, rw_data, packed)
    entries[name] = LazyEntry(name, b"".join(map(netstring, fields)))


def new_entry(link: Link, writekey: bytes) -> LazyEntry:
    """
    Return an entry with metadata exactly as given, without times of linking.

    For directories that are created with their children; the caller handles ``no-write``.

    Raises:
        UsageError: the child cannot be stored.
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
    """
    Return whether a child may have been renamed before, and removed from its new name by a later edit.
    """
    old, new = composed(edit.old), composed(edit.new)
    takers = (
        each.old if isinstance(each, Rename) else each.name
        for each in later
        if not isinstance(each, (Link, SetMetadata))
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
    if there is not None and not _may_replace(edit, there) and not done:
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
    """Return the write cap ("" for none) and the read cap to store."""
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
    if not text and read_cap is None:
        return "", ""
    if text.startswith((_READ_ONLY, _IMMUTABLE)) and read_cap is None:
        return "", _unknown_read_text(edit.name, text)
    if read_cap is None or str(read_cap).startswith(_IMMUTABLE) or not text:
        why = "its cap is of a kind that this version does not know, so its read cap must be given too"
        raise _unlinkable(edit.name, f"{why}; or put ro. or imm. before it if it is one")
    return text, _unknown_read_text(edit.name, str(read_cap))


def _unknown_read_text(name: str, text: str) -> str:
    bare = text.removeprefix(_READ_ONLY).removeprefix(_IMMUTABLE)
    try:
        known = not isinstance(parse_cap(bare), UnknownCap)
    except CapError:
        known = True
    if known or not bare or bare.startswith((_READ_ONLY, _IMMUTABLE)):
        why = "its cap can do more than the ro. or imm. before it allows; leave that out"
        raise _unlinkable(name, why)
    return text.removeprefix(_READ_ONLY)


def _linked_metadata(
    old: LazyEntry | None, given: dict[str, Any] | None, now: float
) -> dict[str, Any]:
    """Return the metadata of a child that is linked now, replacing an old one if given."""
    before = old.metadata if old is not None else None
    before = {} if before is None else before
    if given is None:
        metadata = dict(before)
    else:
        metadata = {key: value for key, value in given.items() if key != "tahoe"}
    times = before.get("tahoe")
    created = times.get("linkcrtime") if isinstance(times, dict) else None
    if not is_time(created):
        created = before.get("ctime")  # written before 2009
    if not is_time(created):
        created = now
    metadata["tahoe"] = _times(times, created, now)
    return metadata


def _times(old: object, created: Any, modified: float) -> dict[str, Any]:
    """Return the ``tahoe`` object with these times; its other fields stay."""
    times = dict(old) if isinstance(old, dict) else {}
    times["linkcrtime"] = created
    times["linkmotime"] = modified
    return times


def name_bytes(name: str) -> bytes:
    """
    Return a composed name as an entry stores it.

    Raises:
        UsageError: it cannot be stored.
    """
    try:
        data = name.encode("utf-8")
    except UnicodeEncodeError:
        why = "half a character, or a byte that is not UTF-8, cannot be written"
        raise _unlinkable(name, why) from None
    if len(data) > MAX_NAME_BYTES:
        raise UsageError(
            f"cannot link {name[:20]!r}...: a name of {len(data)} bytes, and at most {MAX_NAME_BYTES} "
            "are allowed"
        )
    return data


def _metadata_bytes(name: str, metadata: dict[str, Any], strict: bool) -> bytes:
    try:
        # Metadata from other writers is kept, even with infinity, which JSON does not allow.
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
    remark = _PERHAPS_STORED if repeated else ""
    return NoSuchChild(
        f"the directory has no child {name!r}; list it to see what exists{remark}", name, repeated
    )


def _child_exists(name: str, repeated: bool) -> ChildExists:
    remark = _PERHAPS_STORED if repeated else ""
    return ChildExists(
        f"the directory has a child {name!r} already; choose another name, or allow replacing it{remark}",
        name,
        repeated,
    )
