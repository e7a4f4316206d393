"""Extended metadata in backups: attributes, access control lists, hard links, holes, and names of owners."""

from __future__ import annotations

import base64
import errno
import grp
import hashlib
import os
import pwd
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

# The stored form of extended metadata. An entry has these keys under ``pipegrid`` only if there is something
# to store, so a tree in which no entry has extended metadata has the same cap whether or not extended
# metadata was requested:
#
#     "xattrs": {"user.comment": "aGVsbG8="}   names percent-encoded, values in base64
#     "xattrs_left_out": 1                     attributes that are too large, or could not be read
#     "hard_link": "0123456789abcdef"          the same for all names of one file
#     "sparse": true                           the file had holes
#
# Linux keeps access control lists in attributes. The metadata of the root of a run has the names of owners,
# as ``users`` and ``groups``: {"1000": "alice"}.
#
# The identifier of a hard link is derived from the path of the first name. A restore only compares
# identifiers with each other and derives no path from them, so a tree cannot make a restore link to a file
# outside the tree.

ATTRIBUTES = "xattrs"
LEFT_OUT = "xattrs_left_out"
HARD_LINK = "hard_link"
SPARSE = "sparse"
USERS = "users"
GROUPS = "groups"

ACCESS_LIST = "system.posix_acl_access"
DEFAULT_LIST = "system.posix_acl_default"

MAX_ATTRIBUTES = 256
MAX_ATTRIBUTE_BYTES = 32 << 10
"""Maximum for one entry, names and values together; as base64 they fit into metadata that readers accept."""

MAX_OWNERS = 100
"""Maximum number of users, and of groups, whose names a run stores; of others, only numbers are stored."""

MAX_HARD_LINKS = 500_000
"""Maximum number of hard-linked files with names not yet met; names of further ones become separate files."""

HOLE_BYTES = 4096

_MAX_NAME_BYTES = 255
_MAX_OWNER_CHARACTERS = 256
_MAX_ID = (1 << 32) - 2  # the largest number means "do not change"
_BY_POLICY = (
    "security.selinux",
    "security.ima",
    "security.evm",
    "security.SMACK64",
    "security.apparmor",
)
"""Attributes that the system sets by its policy on new files; they belong to the machine, not to the file."""

_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})


# Reading local files.


def read_extended(at: int | str, found: os.stat_result) -> dict[str, Any]:
    """
    Return the stored form of the attributes and holes of a file, directory or link; empty if there are none.

    Args:
        at: an open descriptor, which is set to position 0; or a path, at the end of which no link is
            followed.
    """
    extended = _read_attributes(at)
    if isinstance(at, int) and stat.S_ISREG(found.st_mode) and has_holes(at, found):
        extended[SPARSE] = True
    return extended


def _read_attributes(at: int | str) -> dict[str, Any]:
    follow = isinstance(at, int)
    try:
        names = os.listxattr(at, follow_symlinks=follow)
    except OSError as error:
        return {} if error.errno in _UNSUPPORTED else {LEFT_OUT: 1}
    if not names:
        return {}
    stored: dict[str, str] = {}
    size = left_out = 0
    for name in sorted(names):
        if name.startswith(_BY_POLICY):
            continue
        try:
            value = os.getxattr(at, name, follow_symlinks=follow)
        except OSError as error:
            left_out += error.errno != errno.ENODATA  # the attribute was removed meanwhile
            continue
        raw = os.fsencode(name)
        if len(stored) >= MAX_ATTRIBUTES or size + len(raw) + len(value) > MAX_ATTRIBUTE_BYTES:
            left_out += 1
            continue
        size += len(raw) + len(value)
        stored[quote_from_bytes(raw)] = base64.b64encode(value).decode("ascii")
    found: dict[str, Any] = {ATTRIBUTES: stored, LEFT_OUT: left_out}
    return {key: value for key, value in found.items() if value}


def attribute_bytes(ours: Mapping[str, Any] | None) -> int:
    """Return the approximate size of the stored attributes of an entry in bytes."""
    attributes = ours.get(ATTRIBUTES) if ours else None
    return (
        sum(len(name) + len(value) + 8 for name, value in attributes.items()) if attributes else 0
    )


def has_holes(fd: int, found: os.stat_result) -> bool:
    """
    Return whether an open file has holes: blocks of zeros that take no space.

    A compressed file also takes less space than its size, but has no holes, so the space alone is not enough.
    """
    if found.st_blocks * 512 + HOLE_BYTES > found.st_size:
        return False
    try:
        hole = os.lseek(fd, 0, os.SEEK_HOLE)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        return False
    return hole < found.st_size


class HardLinks:
    """
    The files with several names that one run has met.

    Attributes:
        left_out: number of names that are stored as separate files, since there were too many hard-linked
            files.
    """

    def __init__(self) -> None:
        self._open: dict[
            tuple[int, int], list[Any]
        ] = {}  # by device and inode: identifier, and number of names not met yet
        self.left_out = 0

    def identifier(self, found: os.stat_result, path: str) -> str | None:
        """
        Return the identifier of a file with several names, the same for each name; None: there are too many
        files.
        """
        key = (found.st_dev, found.st_ino)
        known = self._open.get(key)
        if known is None:
            if len(self._open) >= MAX_HARD_LINKS:
                self.left_out += 1
                return None
            digest = hashlib.sha256(b"hard link\0" + os.fsencode(path)).hexdigest()[:16]
            self._open[key] = known = [digest, found.st_nlink]
        known[1] -= 1
        if known[1] <= 0:
            del self._open[key]
        identifier: str = known[0]
        return identifier


class OwnerNames:
    """The owners of the files of one run, including users and groups in access control lists."""

    def __init__(self) -> None:
        self.users: set[int] = set()
        self.groups: set[int] = set()

    def add(self, found: os.stat_result, extended: Mapping[str, Any] | None) -> None:
        """Add the owner and group of a file, and those in its access control lists."""
        if len(self.users) < 10 * MAX_OWNERS:
            self.users.add(found.st_uid)
        if len(self.groups) < 10 * MAX_OWNERS:
            self.groups.add(found.st_gid)
        for name in (ACCESS_LIST, DEFAULT_LIST) if extended else ():
            stored = extended.get(ATTRIBUTES, {}).get(name) if extended else None
            if stored is not None and len(self.users) + len(self.groups) < 10 * MAX_OWNERS:
                for is_user, number in _listed_owners(base64.b64decode(stored)):
                    (self.users if is_user else self.groups).add(number)

    def stored(self) -> tuple[dict[str, Any], int]:
        """
        Return the stored form of the owners' names, and how many owners exceed the limit. This asks the
        system, which may take long.
        """
        users, more_users = _named(self.users, lambda number: pwd.getpwuid(number).pw_name)
        groups, more_groups = _named(self.groups, lambda number: grp.getgrgid(number).gr_name)
        table = {USERS: users, GROUPS: groups}
        return {key: names for key, names in table.items() if names}, more_users + more_groups


def _named(numbers: set[int], ask: Callable[[int], str]) -> tuple[dict[str, str], int]:
    named = {}
    for number in sorted(numbers)[:MAX_OWNERS]:
        try:
            name = ask(number)
        except (KeyError, OverflowError, OSError):  # this number has no name
            continue
        if name.isprintable() and len(name) <= _MAX_OWNER_CHARACTERS:
            named[str(number)] = name
    return named, max(0, len(numbers) - MAX_OWNERS)


# A stored access control list has a version, and entries of a kind, permissions, and the number of a user or
# group.

_LIST_HEAD = struct.Struct("<I")
_LIST_ENTRY = struct.Struct("<HHI")
_LIST_VERSION = 2
_USER, _OWNING_GROUP, _GROUP, _MASK = 2, 4, 8, 16


def _list_entries(value: bytes) -> Iterator[tuple[int, int, int]]:
    head = _LIST_HEAD.size
    if len(value) < head or (len(value) - head) % _LIST_ENTRY.size:
        return
    if _LIST_HEAD.unpack_from(value)[0] == _LIST_VERSION:
        yield from _LIST_ENTRY.iter_unpack(value[head:])


def _listed_owners(value: bytes) -> Iterator[tuple[bool, int]]:
    for kind, _, number in _list_entries(value):
        if kind in (_USER, _GROUP):
            yield kind == _USER, number


def with_owners(value: bytes, user: Callable[[int], int], group: Callable[[int], int]) -> bytes:
    """Return an access control list with the numbers of its users and groups mapped by the functions."""
    entries = [
        (kind, bits, user(number) if kind == _USER else group(number) if kind == _GROUP else number)
        for kind, bits, number in _list_entries(value)
    ]
    if not entries:
        return value
    return _LIST_HEAD.pack(_LIST_VERSION) + b"".join(_LIST_ENTRY.pack(*each) for each in entries)


def group_bits(value: bytes) -> int:
    """Return the permissions that an access control list grants to the file's owning group."""
    bits = {kind: bits & 7 for kind, bits, _ in _list_entries(value)}
    return bits.get(_OWNING_GROUP, 0) & bits.get(_MASK, 7)


# Parsing of metadata from a grid, which is untrusted input.


class StoredMetadata(NamedTuple):
    """
    The extended metadata of an entry.

    Attributes:
        attributes: pairs of name and value.
        left_out: number of attributes that were not stored, or are malformed.
        hard_link: the identifier of a file with several names.
        sparse: whether the file had holes.
        user, group: numbers of the owner and group.
    """

    attributes: tuple[tuple[str, bytes], ...] = ()
    left_out: int = 0
    hard_link: str | None = None
    sparse: bool = False
    user: int | None = None
    group: int | None = None


def stored_metadata(metadata: Mapping[str, Any], ours: Any) -> StoredMetadata:
    """
    Return the extended metadata of an entry; malformed values are ignored.

    Args:
        metadata: the metadata of the entry.
        ours: the value of PipeGrid's key in the metadata; None if the key is missing.
    """
    user, group = _number(metadata.get("st_uid")), _number(metadata.get("st_gid"))
    if not isinstance(ours, dict) or ours.keys().isdisjoint(
        (ATTRIBUTES, LEFT_OUT, HARD_LINK, SPARSE)
    ):
        return StoredMetadata(user=user, group=group)
    attributes, wrong = _parse_attributes(ours.get(ATTRIBUTES, {}))
    left_out = ours.get(LEFT_OUT)
    if type(left_out) is int and 0 < left_out < 1 << 32:
        wrong += left_out
    link = ours.get(HARD_LINK)
    link = link if isinstance(link, str) and len(link) == 16 else None
    return StoredMetadata(attributes, wrong, link, ours.get(SPARSE) is True, user, group)


def _parse_attributes(given: Any) -> tuple[tuple[tuple[str, bytes], ...], int]:
    """Return the valid attributes, and the number of malformed ones."""
    if not isinstance(given, dict):
        return (), 1
    found: list[tuple[str, bytes]] = []
    size = wrong = 0
    for quoted, text in given.items():
        parsed = None if len(found) >= MAX_ATTRIBUTES else _parse_attribute(quoted, text)
        if parsed is not None:
            size += len(parsed[0]) + len(parsed[1])
        if parsed is None or size > MAX_ATTRIBUTE_BYTES:
            wrong += 1
        else:
            found.append((os.fsdecode(parsed[0]), parsed[1]))
    return tuple(found), wrong


def _parse_attribute(quoted: str, text: Any) -> tuple[bytes, bytes] | None:
    if not isinstance(text, str) or len(text) > 2 * MAX_ATTRIBUTE_BYTES:
        return None
    try:
        name = unquote_to_bytes(quoted) if len(quoted) <= 3 * _MAX_NAME_BYTES else b""
        value = base64.b64decode(text.encode("ascii"), validate=True)
    except ValueError:  # UnicodeEncodeError, too
        return None
    return (name, value) if 0 < len(name) <= _MAX_NAME_BYTES and b"\0" not in name else None


def stored_names(ours: Any, key: str) -> dict[int, str]:
    """
    Return the names of users or groups in the metadata of a run, by their numbers.

    Args:
        ours: the value of PipeGrid's key in the metadata; None if the key is missing.
        key: ``USERS`` or ``GROUPS``.
    """
    given = ours.get(key) if isinstance(ours, dict) else None
    names: dict[int, str] = {}
    for text, name in given.items() if isinstance(given, dict) else ():
        number = _number(int(text)) if text.isdecimal() and len(text) <= 10 else None
        sensible = (
            isinstance(name, str) and 0 < len(name) <= _MAX_OWNER_CHARACTERS and name.isprintable()
        )
        if number is not None and sensible and len(names) < MAX_OWNERS:
            names[number] = name
    return names


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_ID else None


# Messages about metadata that was lost.


class MetadataLosses:
    """The metadata that could not be stored or restored, by kind, such as ``owner``."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[int, str, str]] = {}  # entries, first path, reason

    def add(self, path: str, kind: str, why: str) -> None:
        """Count an entry that lost this kind of metadata."""
        count, path, why = self._kinds.get(kind, (0, path, why))
        self._kinds[kind] = count + 1, path, why

    def counts(self) -> dict[str, int]:
        """Return the number of entries that lost each kind of metadata."""
        return {kind: count for kind, (count, _, _) in self._kinds.items()}

    def sentences(self, done: str) -> list[str]:
        """Return a clause for each kind of lost metadata; ``done`` is ``stored`` or ``restored``."""
        return [
            f"{kind}s of {count} {'entry' if count == 1 else 'entries'} not {done} ({why}), "
            f"the first: {path}"
            for kind, (count, path, why) in self._kinds.items()
        ]
