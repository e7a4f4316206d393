"""Restoring extended metadata: owners, access control lists, attributes, hard links, holes."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, Literal, TypeVar

from pipegrid.disk.atomic_write import part_path, remove_part, sync_directory
from pipegrid.disk.file_system_calls import FULL
from pipegrid.errors import PipegridError
from pipegrid.tree.extended_metadata import (
    ACCESS_LIST,
    DEFAULT_LIST,
    GROUPS,
    HOLE_BYTES,
    USERS,
    StoredMetadata,
    group_bits,
    stored_metadata,
    stored_names,
    with_owners,
)
from pipegrid.tree.local_directory_descriptor import DirectoryFd

# What is restored without being asked for cannot give another user's tree any right: attributes of the kind
# ``user``, access control lists, owners. Attributes that do (``security.capability``, ``trusted``) need
# ``privileged``, as set-user-ID bits need the mode ``exact``.
#
# The order is: data, owner, attributes, lists, privileged attributes, mode, time, name. A change of the owner
# removes set-user-ID bits and capabilities, and a file without write permission accepts no attributes.

Owners = Literal["names", "numbers", "none"]
"""
``names``: a user or group of the stored name, otherwise of the stored number; ``numbers``: of the stored
number; ``none``: the user who restores.
"""

_LISTS = (ACCESS_LIST, DEFAULT_LIST, "system.nfs4_acl")
_SET_IDS = stat.S_ISUID | stat.S_ISGID
_ABSENT = frozenset({errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS})


class RestoredExtended:
    """
    The extended metadata of one file, directory or link that is restored.

    Attributes:
        stored: as parsed; owners are those of this system.
        lost: what could not be restored: kinds, and the reason of each.
    """

    __slots__ = ("_group_bits", "_may_give_rights", "_set_ids", "lost", "stored")

    def __init__(self, stored: StoredMetadata, may_give_rights: bool) -> None:
        self.stored = stored
        self._may_give_rights = may_give_rights
        self._group_bits: int | None = None
        self._set_ids = _SET_IDS
        self.lost: dict[str, str] = {}
        if stored.left_out:
            self.lost["extended attribute"] = (
                "they are too large, or could not be read when they were stored"
            )

    def apply(
        self, at: int | str, *, fresh: bool = False, found: os.stat_result | None = None
    ) -> None:
        """
        Set owner and attributes; what cannot be set is in ``lost``.

        Args:
            at: a descriptor, or a path, which is followed.
            fresh: it was just created, so a list that it has inherited is removed.
            found: its status, if the caller knows it.
        """
        try:
            self._set_owner(at, os.stat(at) if found is None else found)
        except OSError as error:
            self.lost["owner"] = _reason(error)
            self._set_ids = self._kept_set_ids(at)
        if fresh:
            self._remove_lists(at)
        for name, value in sorted(self.stored.attributes, key=lambda each: _rank(each[0])):
            if not self._set_attribute(at, name, value) and name == ACCESS_LIST:
                self._group_bits = group_bits(value)

    def limited(self, mode: int | None) -> int | None:
        """
        Return the mode to set after ``apply``.

        The bits for the group are those that a list grants at most, and its group may have fewer: without the
        list that group gets only its own. A program whose owner was not restored does not run as another one.
        """
        if mode is None:
            return None
        if mode & _SET_IDS & ~self._set_ids:
            self.lost["set-id bit"] = "the owner was not restored"
            mode &= ~_SET_IDS | self._set_ids
        if self._group_bits is None:
            return mode
        return mode & (~stat.S_IRWXG | self._group_bits << 3)

    def apply_to(self, inside: int, name: str, mtime_ns: int | None) -> None:
        """
        Do the same for an existing file or link.

        Another user may have put a second name of a foreign file there: that is not changed.

        Args:
            inside: a descriptor of its directory.
            mtime_ns: a file with several names must have this time.
        """
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
        except OSError as error:
            self.lost["owner"] = _reason(error)
            return
        try:
            found = os.fstat(fd)
            kind = stat.S_IFMT(found.st_mode)
            if kind == stat.S_IFLNK or (
                kind == stat.S_IFREG and (found.st_nlink == 1 or found.st_mtime_ns == mtime_ns)
            ):
                self.apply(f"/proc/self/fd/{fd}")
            else:
                self.lost["owner"] = "another file has this name now"
        finally:
            os.close(fd)

    def _set_owner(self, at: int | str, found: os.stat_result) -> None:
        user, group = self.stored.user, self.stored.group
        wanted = (found.st_uid if user is None else user, found.st_gid if group is None else group)
        if wanted == (found.st_uid, found.st_gid):
            return
        try:
            os.chown(at, *wanted)
        except OSError:
            if wanted[1] != found.st_gid:  # a member of a group may give files to it
                with suppress(OSError):
                    os.chown(at, -1, wanted[1])
                    if wanted[0] == found.st_uid:
                        return
            raise

    def _kept_set_ids(self, at: int | str) -> int:
        """Return the set-id bits that a file may have with the owner that it has now."""
        kept = 0
        with suppress(OSError):
            found = os.stat(at)
            kept |= stat.S_ISUID if self.stored.user in (None, found.st_uid) else 0
            same_group = self.stored.group in (None, found.st_gid) or stat.S_ISDIR(found.st_mode)
            kept |= stat.S_ISGID if same_group else 0
        return kept

    def _remove_lists(self, at: int | str) -> None:
        wanted = {name for name, _ in self.stored.attributes}
        with suppress(OSError):  # a file system without lists
            for name in os.listxattr(at):
                if name in _LISTS and name not in wanted:
                    os.removexattr(at, name)

    def _set_attribute(self, at: int | str, name: str, value: bytes) -> bool:
        kind = _KINDS[_rank(name)]
        if _rank(name) == 2 and not self._may_give_rights:
            self.lost[kind] = "they can give rights, and need may_give_rights"
            return False
        try:
            if _value(at, name) != value:
                os.setxattr(at, name, value)
        except (OSError, ValueError) as error:
            self.lost[kind] = _reason(error)
            return False
        return True


_KINDS = ("extended attribute", "access control list", "privileged attribute")


def gives_lists(directory: int) -> bool:
    """Return whether what is created in an open directory may inherit an access control list."""
    try:
        return not {*_LISTS}.isdisjoint(os.listxattr(directory))
    except OSError as error:  # such as of a directory that may not be listed
        return error.errno not in _ABSENT


def _rank(name: str) -> int:
    return 0 if name.startswith("user.") else 1 if name in _LISTS else 2


def _value(at: int | str, name: str) -> bytes | None:
    try:
        return os.getxattr(at, name)
    except OSError:
        return None  # it has none, or the attempt to set it reports why not


def owners_of(numeric: bool, none: bool) -> Owners:
    """Return which owners are restored, by the options of a command."""
    return "none" if none else "numbers" if numeric else "names"


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number == errno.EPERM:
        return "this user may not set them"
    if number in _ABSENT:
        return "the file system has none"
    if number in FULL or number in (errno.E2BIG, errno.ERANGE):
        return "the file system has no space for them"
    return getattr(error, "strerror", None) or "the system does not accept them"


class ExtendedRestore:
    """
    How the extended metadata of one tree is restored.

    Args:
        owners: see ``Owners``.
        may_give_rights: restore attributes that can give a program or its users rights.
        names: what PipeGrid has stored in the metadata of the run: it has the names of owners.
    """

    def __init__(
        self,
        owners: Owners = "names",
        may_give_rights: bool = False,
        names: Any = None,
    ) -> None:
        self._owners = owners
        self._may_give_rights = may_give_rights
        self._names = names
        self._users: dict[int, int] = {}
        self._groups: dict[int, int] = {}

    def resolve(self) -> None:
        """Look up the names of owners, for which the system may take long."""
        if self._owners != "names":
            return
        for number, name in stored_names(self._names, USERS).items():
            with suppress(KeyError, OSError, ValueError):
                self._users[number] = pwd.getpwnam(name).pw_uid
        for number, name in stored_names(self._names, GROUPS).items():
            with suppress(KeyError, OSError, ValueError):
                self._groups[number] = grp.getgrnam(name).gr_gid

    def of(self, metadata: Mapping[str, Any], ours: Any) -> RestoredExtended:
        """
        Return what is restored of an entry.

        Args:
            metadata, ours: see ``stored_metadata``.
        """
        stored = stored_metadata(metadata, ours)
        user, group, attributes = stored.user, stored.group, stored.attributes
        if self._owners == "none":
            user = group = None
        elif self._users or self._groups:
            user = None if user is None else self._user(user)
            group = None if group is None else self._group(group)
            attributes = attributes and tuple(
                (name, with_owners(value, self._user, self._group) if name in _LISTS else value)
                for name, value in attributes
            )
        if (user, group, attributes) != (stored.user, stored.group, stored.attributes):
            stored = stored._replace(user=user, group=group, attributes=attributes)
        return RestoredExtended(stored, self._may_give_rights)

    def _user(self, number: int) -> int:
        return self._users.get(number, number)

    def _group(self, number: int) -> int:
        return self._groups.get(number, number)


# Hard links of one restore: the first name of a file is fetched, and the others become links to it.
#
# A file and its further names must have the same identifier, cap, mode, time, owner and attributes. So a
# lying tree can make links only between files that it could have written as copies; and what is linked to is
# the file at a place that this run has written or found complete, never a link, and never outside of the
# target.

MAX_LINKED = 200_000
"""Files with several names that one restore knows; the names of others become copies."""

MAX_WAITING = 10_000
"""Names that wait until the file is complete; further ones become copies."""


F = TypeVar("F")


class LinkedFiles(Generic[F]):
    """
    The files of one restore that have several names; ``F`` is a name that is fetched.

    Attributes:
        left_out: the name added last is not known as another name, since there are too many.
    """

    def __init__(self) -> None:
        self.left_out = False
        # The first name of each file, and those that wait for it; None: it is complete.
        self._names: dict[Any, tuple[F, list[F] | None]] = {}
        self._waiting = 0

    def add(self, key: Any, file: F) -> F | None:
        """
        Add a name; return the one that is fetched first.

        Args:
            key: what all names of one file have in common.

        Returns:
            the name itself: fetch it; another one: it is complete, so link to it; None: this name
            waits until the first is complete.
        """
        if key not in self._names:
            self.left_out = len(self._names) >= MAX_LINKED
            if not self.left_out:
                self._names[key] = file, []
            return file
        first, waiting = self._names[key]
        self.left_out = waiting is not None and self._waiting >= MAX_WAITING
        if waiting is None:
            return first
        if self.left_out:
            return file
        waiting.append(file)
        self._waiting += 1
        return None

    def ended(self, key: Any, file: F, succeeded: bool) -> list[F]:
        """
        A name was fetched or has failed; return those that may be linked or fetched now.

        If it has failed, the next one becomes the first.
        """
        first, waiting = self._names.get(key, (None, None))
        if first is not file or waiting is None:
            return []
        if succeeded:
            self._names[key] = file, None
        elif waiting:
            self._names[key] = waiting[0], waiting[1:]
            waiting = waiting[:1]
        else:
            del self._names[key]
        self._waiting -= len(waiting)
        return waiting

    def exists(self, key: Any, file: F) -> F | None:
        """A name exists already, complete; return the first name, None if that is not complete yet."""
        if key not in self._names:
            if len(self._names) < MAX_LINKED:
                self._names[key] = file, None
            return file
        first, waiting = self._names[key]
        return first if waiting is None else None


NamedPlace = tuple[DirectoryFd, str]
"""A directory, and the path of a file in it."""


def is_one_file(first: NamedPlace, second: NamedPlace) -> bool:
    """Return whether two names are names of one file."""
    with (
        suppress(OSError, PipegridError),
        first[0].entered() as there,
        second[0].entered() as inside,
    ):
        one = os.stat(os.path.basename(first[1]), dir_fd=there, follow_symlinks=False)
        other = os.stat(os.path.basename(second[1]), dir_fd=inside, follow_symlinks=False)
        return os.path.samestat(one, other)
    return False


def link_file(
    first: NamedPlace, second: NamedPlace, size: int, mtime_ns: int | None, replace: bool
) -> bool:
    """
    Give a complete file a second name; blocks.

    Args:
        size, mtime_ns: of the file; another one is not linked to.
        replace: replace an existing file or link.

    Returns:
        whether it has the name now; if not, for whatever reason, nothing has changed.
    """
    name = os.path.basename(second[1])
    with (
        suppress(OSError, PipegridError),
        first[0].entered() as there,
        second[0].entered() as inside,
    ):
        source = os.path.basename(first[1])
        found = os.stat(source, dir_fd=there, follow_symlinks=False)
        is_same = found.st_size == size and found.st_mtime_ns == mtime_ns
        if not (stat.S_ISREG(found.st_mode) and is_same):
            return False
        remove_part(name, inside)
        hidden = part_path(name, inside)
        os.link(source, hidden, src_dir_fd=there, dst_dir_fd=inside, follow_symlinks=False)
        try:
            made = os.stat(hidden, dir_fd=inside, follow_symlinks=False)
            if not os.path.samestat(made, found):
                return False
            if replace:
                os.replace(hidden, name, src_dir_fd=inside, dst_dir_fd=inside)
            else:
                os.link(hidden, name, src_dir_fd=inside, dst_dir_fd=inside, follow_symlinks=False)
        finally:
            with suppress(OSError):  # after a rename between two names of one file it still exists
                os.unlink(hidden, dir_fd=inside)
        sync_directory(inside)
        return True
    return False


# Holes.

_ZEROS = bytes(HOLE_BYTES)


def holes_in(data: memoryview, position: int) -> Iterator[tuple[int, int, bool]]:
    """
    Divide consecutive bytes of a file into blocks of zeros and others; at both ends parts of blocks count.

    Args:
        position: of the bytes in the file; blocks of ``HOLE_BYTES`` begin at its multiples.

    Yields:
        begin and end of each part in the data, and whether it is a hole; neighbours differ.
    """
    begin = at = 0
    was_hole = False
    while at < len(data):
        end = min(len(data), at + HOLE_BYTES - (position + at) % HOLE_BYTES)
        is_hole = data[at:end].tobytes() == _ZEROS[: end - at]  # faster than comparing views
        if is_hole != was_hole and at > begin:
            yield begin, at, was_hole
            begin = at
        was_hole = is_hole
        at = end
    if at > begin:
        yield begin, at, was_hole
