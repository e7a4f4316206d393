"""Restoring extended metadata: owners, access control lists, attributes, hard links, and holes."""

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

# Some metadata is restored by default: attributes of the kind ``user``, access control lists, and owners.
# This metadata cannot give rights to the author of a tree. Attributes that can (``security.capability``,
# ``trusted``) need ``may_give_rights``, as set-user-ID bits need the mode ``exact``.
#
# The order is: data, owner, attributes, lists, privileged attributes, mode, time, name. A change of the owner
# removes set-user-ID bits and capabilities, and attributes cannot be set on a file without write permission.

Owners = Literal["names", "numbers", "none"]
"""
``names``: the user or group with the stored name or, if there is none, with the stored number; ``numbers``:
with the stored number; ``none``: the user who restores.
"""

_LISTS = (ACCESS_LIST, DEFAULT_LIST, "system.nfs4_acl")
_SET_IDS = stat.S_ISUID | stat.S_ISGID
_ABSENT = frozenset({errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS})


class RestoredExtended:
    """
    The extended metadata that is restored for one file, directory or link.

    Attributes:
        stored: the parsed metadata, with owners mapped to users and groups of this system.
        lost: the kinds of metadata that could not be restored, each with the reason.
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
        Set owner and attributes; what cannot be set is recorded in ``lost``.

        Args:
            at: a descriptor, or a path, at the end of which links are followed.
            fresh: whether the file was just created; then access control lists that it has inherited are
                removed.
            found: the status of the file, if the caller knows it.
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

        With an access control list, the group bits of the mode are a maximum, and the group itself may have
        fewer rights. So if the list could not be set, the group bits are reduced to the group's own rights.
        If the owner was not restored, set-id bits are removed, so that a program does not run as another
        user.
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
        Set owner and attributes of an existing file or link.

        If a file has several names, another user may have made a hard link from this name to a foreign file.
        So such a file is changed only if its modification time is ``mtime_ns``.

        Args:
            inside: a descriptor of the directory of the file.
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
            if wanted[1] != found.st_gid:  # users may give files to their own groups
                with suppress(OSError):
                    os.chown(at, -1, wanted[1])
                    if wanted[0] == found.st_uid:
                        return
            raise

    def _kept_set_ids(self, at: int | str) -> int:
        """Return the set-id bits that a file may have with its present owner."""
        kept = 0
        with suppress(OSError):
            found = os.stat(at)
            kept |= stat.S_ISUID if self.stored.user in (None, found.st_uid) else 0
            same_group = self.stored.group in (None, found.st_gid) or stat.S_ISDIR(found.st_mode)
            kept |= stat.S_ISGID if same_group else 0
        return kept

    def _remove_lists(self, at: int | str) -> None:
        wanted = {name for name, _ in self.stored.attributes}
        with suppress(OSError):  # this file system has no access control lists
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
    """Return whether new entries of an open directory may inherit an access control list."""
    try:
        return not {*_LISTS}.isdisjoint(os.listxattr(directory))
    except OSError as error:  # for example, no permission to read the directory
        return error.errno not in _ABSENT


def _rank(name: str) -> int:
    return 0 if name.startswith("user.") else 1 if name in _LISTS else 2


def _value(at: int | str, name: str) -> bytes | None:
    try:
        return os.getxattr(at, name)
    except OSError:
        return None  # the attribute is missing, or setting it will report why it cannot be read


def owners_of(numeric: bool, none: bool) -> Owners:
    """Return which owners are restored, from the options of a command."""
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
        may_give_rights: whether attributes are restored that can give a program or its users rights.
        names: the value of PipeGrid's key in the metadata of the run, which has the names of owners.
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
        """Look up the names of owners in the system, which may take long."""
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
        Return the extended metadata that is restored for an entry.

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


# Hard links of one restore: the first name of a file is fetched, and its other names become links to the
# first.
#
# All names of a file must have the same identifier, cap, mode, time, owner and attributes. So a forged tree
# can make links only between files that it could also have written as copies. The target of such a link is
# always a file that this run has written or found complete, never a symbolic link, and never outside of the
# directory that is restored.

MAX_LINKED = 200_000
"""Maximum number of files with several names that one restore records; the names of others become copies."""

MAX_WAITING = 10_000
"""The maximum number of names that wait until their file is complete; further names become copies."""


F = TypeVar("F")


class LinkedFiles(Generic[F]):
    """
    The files of one restore that have several names; ``F`` is a name that is fetched.

    Attributes:
        left_out: whether the name added last becomes a copy, since there are too many files or waiting names.
    """

    def __init__(self) -> None:
        self.left_out = False
        # For each file: its first name, and the names that wait for it; None: the file is complete.
        self._names: dict[Any, tuple[F, list[F] | None]] = {}
        self._waiting = 0

    def add(self, key: Any, file: F) -> F | None:
        """
        Add a name of a file; return what to do with it.

        Args:
            key: what all names of one file have in common.

        Returns:
            the name itself: fetch it. Another name, whose file is complete: make this name a link to it.
                None: this name waits until the first name is complete.
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
        Record that a name was fetched or has failed; return the waiting names that may begin now.

        After a success, all of them can be linked. After a failure, only the next one begins, and becomes the
        first name.
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
        """
        Record that a name exists already, with a complete file. Return the first name of the file, or None if
        the first name is still being fetched.
        """
        if key not in self._names:
            if len(self._names) < MAX_LINKED:
                self._names[key] = file, None
            return file
        first, waiting = self._names[key]
        return first if waiting is None else None


NamedPlace = tuple[DirectoryFd, str]
"""A directory, and the path of a file in it."""


def is_one_file(first: NamedPlace, second: NamedPlace) -> bool:
    """Return whether two names belong to the same file."""
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
    Give a complete file a second name. This blocks.

    Args:
        size, mtime_ns: the file gets the second name only if it has this size and modification time.
        replace: whether an existing file or link is replaced.

    Returns:
        whether the file has the second name now; if it has not, nothing has changed.
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
            with suppress(OSError):  # renaming between two names of one file keeps both
                os.unlink(hidden, dir_fd=inside)
        sync_directory(inside)
        return True
    return False


# Holes.

_ZEROS = bytes(HOLE_BYTES)


def holes_in(data: memoryview, position: int) -> Iterator[tuple[int, int, bool]]:
    """
    Divide consecutive bytes of a file into holes (blocks of zeros) and data; an incomplete block at either
    end can also be a hole.

    Args:
        position: the position of the bytes in the file; blocks begin at multiples of ``HOLE_BYTES``.

    Yields:
        begin and end of each part in ``data``, and whether it is a hole; holes and data alternate.
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
