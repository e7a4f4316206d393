"""Read-write directory: entries, edits, merge."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

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
from pipegrid.core.crypto import applied
from pipegrid.core.hashes import HASH_BYTES, KEY_BYTES, Tag, netstring
from pipegrid.core.packed_directory import entry_fields, readonly_cap, stored_entries
from pipegrid.core.text import composed
from pipegrid.errors import CapError, ChildExists, DirectoryError, NoSuchChild, UsageError

# The write caps of a read-write directory's children: encrypted so that only its writers read them.
#
# The key follows from the directory's write key and a salt, and the salt from the cap itself, so that the
# same child gives the same bytes again. There is a checksum, too, which nobody checks: the directory's
# signature covers it all.
#
# Source: the format reference for mutable files, section 7.

_SALT = Tag(b"allmydata_dirnode_child_rwcap_to_salt_v1")
_KEY = Tag(b"allmydata_mutable_writekey_and_salt_to_dirnode_child_capkey_v1")
_SALT_BYTES = 16
_LEAST_BYTES = _SALT_BYTES + HASH_BYTES


def encrypt_write_cap(cap_text: str, writekey: bytes) -> bytes:
    """
    Return what a directory stores for a child's write cap: 48 bytes more than it has, never none.

    Args:
        cap_text: the write cap, or "" if there is none.
        writekey: 16 bytes, the directory's own.
    """
    text = cap_text.encode("utf-8")
    salt = _SALT.hash(text)[:_SALT_BYTES]
    key = _child_key(salt, writekey)
    ciphertext = applied(key, text)
    inner = hashlib.sha256(_xored(key, 0x36) + salt + ciphertext).digest()
    return salt + ciphertext + hashlib.sha256(_xored(key, 0x5C) + inner).digest()


def decrypt_write_cap(rw_data: bytes, writekey: bytes) -> str | None:
    """Return a child's write cap, "" if it has none; None if the bytes are not of this directory."""
    if len(rw_data) < _LEAST_BYTES:
        return None if rw_data else ""
    salt, ciphertext = rw_data[:_SALT_BYTES], rw_data[_SALT_BYTES:-HASH_BYTES]
    try:
        return applied(_child_key(salt, writekey), ciphertext).decode("utf-8").rstrip(" ")
    except UnicodeDecodeError:
        return None


def open_write_cap(rw_data: bytes, writekey: bytes) -> Cap | None:
    """Return a child's write cap; None if it has none, or the bytes are not of this directory."""
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


# Read-write directories: the entries by name, each as it was stored.
#
# An entry is not taken apart before somebody asks, and one that nobody changes goes back byte for byte,
# whatever it holds: caps of kinds to come, caps that break their own promise, metadata that is no JSON. Only
# what has no name cannot be kept, since then it is no directory.
#
# Unpacking costs memory of at most ``MEMORY_MULTIPLE`` times the directory's bytes; reading one entry's
# metadata that of its own bytes, and metadata that is too long or deep is as none.
#
# Source: the format reference, section 8.5; that for mutable files, section 7; that of trees, 3.

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


# Two contents of one directory, of which neither was made from the other, and edits that may be in one
# already.
#
# Source: the format reference for mutable files, section 7; that of trees, 7.4.


def merge_directories(first: bytes, second: bytes) -> bytes:
    """
    Return the directory with the entries of both: of two with one name, that which was linked later.

    For two versions with one sequence number, each of which somebody was told is stored. What only one of
    them has unlinked is there again: better twice than never. The order does not matter.

    Raises:
        DirectoryError: one of them is not a directory.
    """
    merged = unpack_entries(first)
    for name, entry in unpack_entries(second).items():
        other = merged.get(name)
        if other is None or _age(other) < _age(entry):
            merged[name] = entry
    return pack_entries(merged)


def made_before(before: bytes, after: bytes, current: bytes) -> bytes | None:
    """
    Return what is there now if edits have taken effect in it, all of them; else None: they are to be applied.

    They have if an entry is there byte for byte as they made it; it has the time in it. Then what others
    have made of their names came later, and stays: also what they have linked where a child was taken out.
    Only what is as it was before the edits has come back when versions were merged, and goes again.

    Args:
        before, after: the directory that the edits were applied to, and what became of it.

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
    Return the time of a link that is made now: after that of the one it replaces.

    Else one that was linked by a clock that goes wrong, or in the same moment, would come back in a merge.
    """
    return now if replaced is None else max(now, math.nextafter(_linked_at(replaced), math.inf))


def _age(entry: LazyEntry) -> tuple[float, bytes]:
    return _linked_at(entry), entry.stored


def _linked_at(entry: LazyEntry) -> float:
    tahoe = (entry.metadata or {}).get("tahoe")
    linked = tahoe.get("linkmotime") if isinstance(tahoe, dict) else None
    return linked if is_time(linked) else -math.inf


def is_time(value: object) -> TypeGuard[float]:
    """Say whether metadata have a time here: seconds since 1970."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


# Changes to a read-write directory, as values that can be applied again.
#
# A writer who was beaten by another reads the directory anew and applies the same edits to what is there now,
# so that nobody's change is lost. All edits of one call take effect together, or none does.
#
# **What is there now may have them already**: a version that its writer did not know to be stored was, and
# somebody else has built on it. Edits that take a child from one name to another must not find there what
# they have made themselves: two names that were exchanged would be exchanged back, a child that was
# linked in the place of one renamed would take the other's. So it is looked first whether they are there
# (``merging.made_before``).
#
# Source: the format reference for mutable files, section 7; that of trees, 3.1, 3.2 and 7.4.

MAX_NAME_BYTES = 32 << 10
"""Of a name that is written, in UTF-8; where one is longer, readers leave out the directory (``listing``)."""

MAX_CHILDREN = 200_000
"""That a directory may come to have, for the same reason; one that has more may only lose some."""

_READ_ONLY, _IMMUTABLE = "ro.", "imm."
_DOUBT = ": an earlier attempt of this change may have been stored, and others have written since"


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
        f"the directory has a child {name!r} already; choose another name, or allow replacing it{doubt}",
        name,
        repeated,
    )
