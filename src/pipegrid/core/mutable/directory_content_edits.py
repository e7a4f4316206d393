"""
The content of read-write directories: entries, encrypted write caps, and merging of two versions. Also edits
(links, unlinks, renames and metadata), which can be applied again to a newer version.

Source: Tahoe-LAFS's ``mutable.rst``, and how 1.20 behaves; ``dirnodes.rst``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

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
from pipegrid.core.hashes import HASH_BYTES, KEY_BYTES, Tag, netstring
from pipegrid.core.packed_directory import entry_bytes, entry_fields, entry_texts, readonly_cap
from pipegrid.core.stream_cipher import applied
from pipegrid.core.text import composed
from pipegrid.errors import CapError, ChildExists, DirectoryError, NoSuchChild, UsageError

# The write caps of children are encrypted so that only writers of the directory can read them. The key is
# derived from the directory's write key and a salt. The salt is derived from the child's cap, so equal caps
# give equal bytes. The stored checksum is not verified, since the directory's signature covers it.

_SALT = Tag(b"allmydata_dirnode_child_rwcap_to_salt_v1")
_KEY = Tag(b"allmydata_mutable_writekey_and_salt_to_dirnode_child_capkey_v1")
_SALT_BYTES = 16
_LEAST_BYTES = _SALT_BYTES + HASH_BYTES


def encrypt_write_cap(cap_text: str, writekey: bytes) -> bytes:
    """
    Return the encrypted write cap of a child. The result is 48 bytes longer than the cap, and never empty.

    Args:
        cap_text: the write cap, or "" for none.
        writekey: 16 bytes, the write key of the directory.
    """
    text = cap_text.encode("utf-8")
    salt = _SALT.hash(text)[:_SALT_BYTES]
    key = _child_key(salt, writekey)
    ciphertext = applied(key, text)
    inner = hashlib.sha256(_xored(key, 0x36) + salt + ciphertext).digest()
    return salt + ciphertext + hashlib.sha256(_xored(key, 0x5C) + inner).digest()


def decrypt_write_cap(rw_data: bytes, writekey: bytes) -> str | None:
    """
    Return a child's write cap, "" if the child has none, or None if the cap was not encrypted for this
    directory.
    """
    if len(rw_data) <= _LEAST_BYTES:  # an encrypted empty cap has that length
        return "" if len(rw_data) in (0, _LEAST_BYTES) else None
    salt, ciphertext = rw_data[:_SALT_BYTES], rw_data[_SALT_BYTES:-HASH_BYTES]
    try:
        return applied(_child_key(salt, writekey), ciphertext).decode("utf-8").rstrip(" ")
    except UnicodeDecodeError:
        return None


def open_write_cap(rw_data: bytes, writekey: bytes) -> Cap | None:
    """
    Return a child's write cap; None if the child has none, or if the cap was not encrypted for this
    directory.
    """
    text = decrypt_write_cap(rw_data, writekey)
    if not text:
        return None
    try:
        return parse_cap(text)
    except CapError:
        # A malformed cap of one child must not make the directory unreadable; an ``UnknownCap`` can at least
        # be shown.
        return UnknownCap(text)


def _child_key(salt: bytes, writekey: bytes) -> bytes:
    return _KEY.hash_pair(salt, writekey)[:KEY_BYTES]


def _xored(key: bytes, value: int) -> bytes:
    return bytes(byte ^ value for byte in key)


# An entry is parsed only when its fields are needed. An unchanged entry is written back byte for byte,
# whatever it contains: caps of unknown kinds, caps that grant more than their prefix says, metadata that is
# not JSON. Only an entry without a name is an error, since a directory has no such entry.

MAX_DIRECTORY_BYTES = 64 << 20
"""Largest directory in bytes, about 200,000 children: directories are read, held and written as a whole."""

MAX_ENTRIES = 1 << 20

MAX_METADATA_BYTES = 1 << 16
"""The maximum length of one entry's metadata."""

MAX_METADATA_DEPTH = 100

MEMORY_MULTIPLE = 32
"""An unpacked directory takes at most this many times its packed bytes in memory; short entries take most."""


class LazyEntry(NamedTuple):
    """
    One child as it is stored in the directory; each attribute is parsed when it is read.

    Attributes:
        name: the name, composed (NFC).
        stored: the entry's four fields, as stored.
    """

    name: str
    stored: bytes

    def __repr__(self) -> str:
        """Return a short form without the caps, since logs may contain it."""
        return f"LazyEntry({self.name!r}, ...)"

    @property
    def read_cap(self) -> Cap | None:
        """The read cap of the child; see ``packed_directory.readonly_cap``."""
        return readonly_cap(entry_fields(self.stored)[1].decode("utf-8"))

    def write_cap(self, writekey: bytes) -> Cap | None:
        """
        Return the write cap of the child, or None if it has none.

        Args:
            writekey: 16 bytes, the write key of the directory.
        """
        return open_write_cap(self.rw_data, writekey)

    @property
    def rw_data(self) -> bytes:
        """
        The encrypted write cap. If the child has none, it is an encrypted empty text of 48 bytes, or empty.
        """
        return entry_fields(self.stored)[2]

    @property
    def metadata(self) -> dict[str, Any] | None:
        """
        The metadata as a new JSON object each time; None if the stored metadata is not an object, or exceeds
        the limits.
        """
        return parse_metadata(entry_fields(self.stored)[3])


class OpenDirectory(NamedTuple):
    """
    A parsed directory to which several edits are applied before it is packed again.

    Attributes:
        entries: the entries by name; this mapping must not be changed.
        size: the length of the packed directory in bytes.
    """

    entries: Mapping[str, LazyEntry]
    size: int

    @classmethod
    def of(cls, data: bytes) -> OpenDirectory:
        """Parse a directory; raises the same errors as ``unpack_entries``."""
        entries = unpack_entries(data)
        return cls(entries, sum(map(_packed_bytes, entries.values())))

    def changed(self, entries: Mapping[str, LazyEntry], names: Iterable[str]) -> OpenDirectory:
        """
        Return a directory with ``entries``, which differ from the present entries in ``names`` only; this
        directory itself if none differs.
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
    Return the entries by name, in ascending order of names. Of several entries with the same name, the last
    one counts.

    Raises:
        DirectoryError: data is not a directory, or is too large.
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
    """
    Return the JSON object that data contains. None if data is not a JSON object, too long, or nested too
    deep.
    """
    if len(data) > MAX_METADATA_BYTES or _is_too_deep(data):
        return None
    try:
        metadata = json.loads(data.decode("utf-8"))
    except ValueError:
        return None
    return metadata if isinstance(metadata, dict) else None


def _is_too_deep(data: bytes) -> bool:
    """Return whether brackets outside strings are nested deeper than ``MAX_METADATA_DEPTH``."""
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


# Merging of two versions of a directory, neither of which was derived from the other.


def merge_directories(first: bytes, second: bytes) -> bytes:
    """
    Return the directory with the entries of both versions. Of two entries with the same name, the one linked
    later is kept.

    This is for two versions with one sequence number, both of which were reported as stored. A child that
    only one of them has unlinked exists again: an extra entry is better than a lost one. The order of the
    arguments does not matter.

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
    Return the current content if the edits have taken effect in it. Return None if not: then the edits must
    be applied again.

    The edits have taken effect if any entry is byte for byte as they made it; this is unambiguous since an
    entry contains its time. What others changed later under the same names is kept, including a new link in
    place of a removed child. If an entry is the same as before the edits, a merge has brought it back; then
    the returned content has the edits' change of this entry again.

    Args:
        before, after: the directory before and after the edits.

    Raises:
        DirectoryError: an argument is not a directory.
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
    Return the time of a new link: ``now``, but always later than the time of the link that it replaces.

    Otherwise, after two links in the same moment or with a wrong clock, a merge would bring back the replaced
    link.
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


# Edits are values, so they can be applied again: after an uncoordinated write, the writer reads the directory
# again and applies the same edits, and no change is lost. All edits of one call take effect together, or none
# does.
#
# The current content may contain the edits already, if a version was stored without its writer learning this,
# and another writer built on that version. Applying such renames twice would swap two exchanged names back,
# so ``content_if_applied`` checks this first.

MAX_NAME_BYTES = 32 << 10
"""The maximum length of a written name, in bytes of UTF-8. Listing a directory with a longer name fails."""


MAX_CHILDREN = 200_000
"""Maximum number of children after an edit, since listing more fails. A larger directory cannot grow."""


_READ_ONLY, _IMMUTABLE = "ro.", "imm."


_PERHAPS_STORED = (
    ": an earlier attempt of this change may have been stored, and others have written since"
)


@attrs.frozen
class Link:
    """
    Put a child into the directory.

    Attributes:
        name: any text; it is composed (NFC) when the edit is applied.
        cap: the child's cap; a write cap is stored along with its read cap. An ``UnknownCap`` without a
            prefix counts as a write cap, and then ``read_cap`` must be given. An ``UnknownCap`` of an empty
            text makes an entry without a cap.
        read_cap: needed only with an unknown ``cap``.
        metadata: replaces the metadata of an existing child, except the times of linking; None keeps the
            metadata. If it has ``no-write``, only the read cap is stored.
        replace: whether the link may replace an existing child of this name.
        replace_directory: whether the link may replace a directory.
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
    Give a child another name. Caps and metadata stay the same, except that the times of linking are new.

    Attributes:
        replace: whether an existing child with the new name may be replaced.
        replace_directory: whether a directory with the new name may be replaced.
    """

    old: str
    new: str
    replace: bool = True
    replace_directory: bool = True


@attrs.frozen
class SetMetadata:
    """
    Set keys of a child's metadata. Its caps and the keys that are not given stay the same.

    Attributes:
        changes: keys and values; the key ``tahoe`` (the times of linking) is ignored.
    """

    name: str
    changes: Mapping[str, Any]


Edit = Link | Unlink | Rename | SetMetadata


def apply_edits(
    data: bytes, edits: Sequence[Edit], writekey: bytes, now: float, repeated: bool = False
) -> bytes:
    """
    Return the directory's bytes after applying the edits in their order.

    Args:
        data: the directory; entries that no edit names are copied byte for byte.
        writekey: 16 bytes, the write key of the directory.
        now: seconds since 1970.
        repeated: the same edits may have taken effect before. So it is no error if a child to unlink is
            missing, or a child to link or rename exists.

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
    """Return a changed copy of a parsed directory; arguments and errors are those of ``apply_edits``."""
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
    _check_count(len(entries), most)
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
    Return the bytes of a new directory with these children. Their metadata are stored as given.

    Of several children with one name, the last one counts. A child with ``no-write`` in its metadata is
    stored with its read cap only.

    Raises:
        UsageError: a child cannot be stored, or there are too many children.
    """
    entries: dict[str, LazyEntry] = {}
    for link in links:
        if (link.metadata or {}).get("no-write") and not isinstance(link.cap, UnknownCap):
            link = attrs.evolve(link, cap=link.cap.readonly())
        entry = new_entry(link, writekey)
        entries[entry.name] = entry
    _check_count(len(entries), MAX_CHILDREN)
    return pack_entries(entries)


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise UsageError(
            f"the directory would have {count} entries, and at most {most} are allowed; "
            "put some of them into another"
        )


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
    entries[name] = _of_fields(name, stored_name, cap_text, rw_data, packed)


def new_entry(link: Link, writekey: bytes) -> LazyEntry:
    """
    Return an entry with metadata exactly as given, without times of linking.

    This is for directories that are created along with their children. ``no-write`` in the metadata has no
    effect here; the caller handles it.

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
    return _of_fields(name, name_bytes(name), read_text.encode("utf-8"), rw_data, metadata)


def _of_fields(name: str, *fields: bytes) -> LazyEntry:
    return LazyEntry(name, b"".join(map(netstring, fields)))


def _is_passed_on(entries: dict[str, LazyEntry], edit: Rename, later: Sequence[Edit]) -> bool:
    """
    Return whether an earlier attempt may have renamed the child and then removed it from its new name by one
    of the ``later`` edits.
    """
    old, new = composed(edit.old), composed(edit.new)
    takers = (_names_of(each)[0] for each in later if isinstance(each, (Unlink, Rename)))
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
    stored_name = name_bytes(new_name)
    entries[new_name] = _of_fields(new_name, stored_name, cap_text, rw_data, stored_metadata)


def _stored_caps(edit: Link) -> tuple[str, str]:
    """Return the write cap ("" for none) and the read cap that an entry stores."""
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
    """
    Return the metadata of a child that is linked now. ``old`` is the entry that the link replaces, if any.
    """
    before = (old.metadata if old is not None else None) or {}
    if given is None:
        metadata = dict(before)
    else:
        metadata = {key: value for key, value in given.items() if key != "tahoe"}
    times = before.get("tahoe")
    created = times.get("linkcrtime") if isinstance(times, dict) else None
    if not is_time(created):
        created = before.get("ctime")  # the time in entries written before 2009
    if not is_time(created):
        created = now
    metadata["tahoe"] = _times(times, created, now)
    return metadata


def _times(old: object, created: Any, modified: float) -> dict[str, Any]:
    """Return the ``tahoe`` object with these times; other fields of ``old`` stay."""
    times = dict(old) if isinstance(old, dict) else {}
    times["linkcrtime"] = created
    times["linkmotime"] = modified
    return times


def name_bytes(name: str) -> bytes:
    """
    Return a composed name as an entry stores it.

    Raises:
        UsageError: the name cannot be stored.
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
        # Metadata from other writers is kept even if it has infinite numbers, which JSON does not allow.
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
