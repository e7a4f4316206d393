"""Local files of a download: names, links, modes."""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from contextlib import suppress
from typing import Literal

from pipegrid.core.text import printable
from pipegrid.disk.atomic_write import SUFFIX, remove_part, remove_stale_link
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import SinkError, naming
from pipegrid.tree.directory_descriptor import (
    DirectoryFd,
    DirectoryPartFile,
    directory_instead,
    failed,
    link_instead,
    unmade,
)
from pipegrid.tree.entry_metadata import RestoredMetadata

# The local side of fetching a tree: what is there, and how files, directories and links come to be.
#
# Nothing is written through a symbolic link: what stands where a directory should be is looked at without
# following links, a file replaces a link instead of what it leads to, and what is made or changed is so
# by the descriptor of its ``DirectoryFd``, in whose place nothing can come. Nothing that is there is
# removed, but for what a file or link replaces if it may. Links are made last, so that nothing of the
# same tree can go through them.
#
# A file gets its mode and time before it gets its name: one that has size and time of its entry is that file,
# also after a crash.

_WRITABLE = stat.S_IRWXU
_PERMISSIONS = 0o1777
_SET_IDS = 0o6000
_STOPS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Presence = Literal["missing", "same", "perhaps", "other"]


class Differs(Exception):
    """A file that is there is not the one that it was taken for."""


class TreePart(DirectoryPartFile):
    """
    A file on its way into a tree: see ``DirectoryPartFile``; mode and time come before the name, and nobody
    may read the part who may not read the file.

    Args:
        kept: what its entry says of it.

    Attributes:
        not_kept: what of that could not be set, in words; empty: nothing.
    """

    def __init__(self, home: DirectoryFd, path: str, replace: bool, kept: RestoredMetadata) -> None:
        self._kept = kept
        self.not_kept = ""
        super().__init__(home, path, replace)
        self._mode = kept.mode
        with suppress(OSError):  # which is told of when it gets its name
            self._set_mode(0o600)

    def publish(self) -> None:
        """Give it its time, its mode, and then its name."""
        if not self.closed and self.part is not None:
            # A file system that keeps no times is no reason to fail.
            self.not_kept = _set_time(self.fileno(), self._kept)
        super().publish()

    def _set_mode(self, more: int = 0) -> None:
        super()._set_mode(more)
        if not more:  # as it gets its name
            mode = _unlike(self.fileno(), self._kept.mode)
            self.not_kept = _listed(mode and _why(mode), self.not_kept)


class ExistingFile(PartFile):
    """
    A file that is there, to be compared with one on the grid; stands where a part would, and is only read.

    What a get would write means that it differs: ``Differs`` ends it.

    Raises:
        SinkError: its directory is not in its place any more.
    """

    def __init__(self, home: DirectoryFd, path: str) -> None:
        self.path = path
        self.part = path
        self.position = 0
        with home.entered() as inside:
            self._fd = os.open(os.path.basename(path), _READ, dir_fd=inside)
        self.found_bytes = os.fstat(self._fd).st_size

    def begin(self, length: int) -> int:
        """Compare from the beginning on."""
        self.position = 0
        if self.found_bytes != length:
            raise Differs
        return length

    def write_pieces(self, pieces: object) -> None:
        """Whatever is to be written is not there."""
        if pieces:
            raise Differs

    def skip(self, length: int) -> None:
        """The next bytes are as they should be."""
        self.position += length

    def forget_rest(self) -> None:
        """Raise ``Differs``: what follows is not what is on the grid."""
        raise Differs

    def publish(self) -> None:
        """Do nothing: the file is there under its name."""

    def leave(self) -> str | None:
        """Close the file, and change nothing; there is no part to tell of."""
        self.close()
        return None


def standing(home: DirectoryFd, path: str, size: int | None, kept: RestoredMetadata) -> Presence:
    """
    Return what stands where a file shall be.

    Args:
        home: the directory that it comes into.
        size: of the file; None if nobody knows before it is read.

    Returns:
        ``missing``; ``same``: it has size and time of the file; ``perhaps``: it has its size; or ``other``.

    Raises:
        SinkError: it cannot be looked at, or its directory is not in its place any more.
    """
    try:
        with home.entered() as inside:
            name = os.path.basename(path)
            found = os.stat(name, dir_fd=inside, follow_symlinks=False)
            if found.st_nlink > 1:
                remove_stale_link(name, inside)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError) as error:
        raise failed("look at", path, error) from error
    if not stat.S_ISREG(found.st_mode) or size is None or found.st_size != size:
        return "other"
    same = kept.mtime_ns is not None and found.st_mtime_ns == kept.mtime_ns
    return "same" if same else "perhaps"


def holds(home: DirectoryFd, path: str, data: bytes) -> bool:
    """
    Return whether a file has exactly this content.

    Raises:
        SinkError: its directory is not in its place any more.
    """
    try:
        with home.entered() as inside:
            fd = os.open(os.path.basename(path), _READ, dir_fd=inside)
        with os.fdopen(fd, "rb") as file:
            return file.read(len(data) + 1) == data
    except OSError:
        return False


def may_be_replaced(home: DirectoryFd, path: str) -> bool:
    """Return whether what has this name may go for a file: all but a directory."""
    with home.entered() as inside, suppress(OSError):
        found = os.stat(os.path.basename(path), dir_fd=inside, follow_symlinks=False)
        return not stat.S_ISDIR(found.st_mode)
    return True


def in_the_way(path: str) -> SinkError:
    """Return the error for what stands where something else shall be."""
    what = "something else"
    with suppress(OSError):
        mode = os.lstat(path).st_mode
        what = (
            "a directory"
            if stat.S_ISDIR(mode)
            else "a link"
            if stat.S_ISLNK(mode)
            else "another file"
            if stat.S_ISREG(mode)
            else what
        )
    text = f"{printable(path)} is {what} already, and was left as it is; move it away"
    if what == "a directory":
        return SinkError(text)
    return naming(SinkError(f"{text}, or replace it with force=True"), "force=True")


def make_root(path: str, kept: RestoredMetadata) -> None:
    """
    Make the directory that a tree comes into, with those above it, or take the one that is there.

    One that may not be written to, as it should be in the end, is from an earlier time; it gets that back.

    Raises:
        SinkError: it cannot be made.
    """
    try:
        os.makedirs(path, kept.temporary_mode, exist_ok=True)
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise unmade(path, error) from error
    if mode == kept.mode and mode & _WRITABLE != _WRITABLE:
        with suppress(OSError):
            os.chmod(path, mode | _WRITABLE)


def begin_tree(
    path: str, into: DirectoryFd | None, kept: RestoredMetadata, force: bool
) -> tuple[DirectoryFd, int | None]:
    """
    Make the directory of a tree; as ``make_root``, or, if it is in a directory, without a way out of that.

    Args:
        into: that directory, or the one of the path itself; None: no more is known than the path.
        force: see ``make_directory``, as for the result.

    Raises:
        SinkError: it cannot be made.
    """
    if into is None:
        make_root(path, kept)
        return DirectoryFd(path), None
    if path != into.path:
        return make_directory(into, path, kept, force)
    into.check()
    return into, None


def make_directory(
    parent: DirectoryFd, path: str, kept: RestoredMetadata, force: bool
) -> tuple[DirectoryFd, int | None]:
    """
    Make a directory, or take the one that is there.

    Args:
        parent: what it comes into.
        kept: what its entry says; nobody may enter it before it is whole who may not do so then.
        force: a file or link in the way goes.

    Returns:
        the directory; and its mode, if it was there.

    Raises:
        SinkError: something else is in the way, or it cannot be made.
    """
    name = os.path.basename(path)
    mode_before = None
    try:
        with parent.entered() as inside:
            try:
                os.mkdir(name, kept.temporary_mode, dir_fd=inside)
            except FileExistsError:
                found = os.stat(name, dir_fd=inside, follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    mode_before = stat.S_IMODE(found.st_mode)
                elif force:
                    directory_instead(kept.temporary_mode, name, inside)
                else:
                    raise in_the_way(path) from None
            if mode_before is not None and mode_before & _WRITABLE != _WRITABLE:
                with suppress(OSError):  # as it should be, from an earlier time; it gets it back
                    _set_mode(inside, name, mode_before | _WRITABLE)
            found = os.stat(name, dir_fd=inside, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):  # since a moment ago
                raise in_the_way(path)
    except (OSError, ValueError) as error:
        raise unmade(path, error) from error
    return DirectoryFd(path, (found.st_dev, found.st_ino)), mode_before


def finish_directory(home: DirectoryFd, kept: RestoredMetadata, mode_before: int | None) -> str:
    """
    Give a directory its mode and time, when all that is in it is there.

    Args:
        mode_before: what it had when it was found.

    Returns:
        what could not be set, in words; empty: nothing.

    Raises:
        SinkError: it is not in its place any more.
    """
    mode = kept.mode if kept.mode is not None else mode_before
    with home.entered() as fd:  # a file system that keeps neither is no reason to fail
        time = _set_time(fd, kept)
        not_set = ""
        if mode is not None:
            try:
                os.fchmod(fd, mode)
                not_set = _unlike(fd, mode)
            except OSError as error:
                not_set = error.strerror or "it failed"
        return _listed(not_set and _why(not_set), time)


def restore_mode_and_time(home: DirectoryFd, path: str, kept: RestoredMetadata) -> str:
    """
    Give a file that is there the mode and time that its entry says; take away what is left of its part.

    One that has them is not touched, or its ``ctime`` would tell backups that it has changed.

    Returns:
        what could not be set, in words; empty: nothing.

    Raises:
        SinkError: its directory is not in its place any more.
    """
    name = os.path.basename(path)
    mode = time = ""
    with home.entered() as inside:
        remove_part(name, inside)
        try:
            found = os.stat(name, dir_fd=inside, follow_symlinks=False)
            if kept.mode is not None and _is_unlike(found.st_mode, kept.mode):
                try:
                    _set_mode(inside, name, kept.mode)
                except OSError as error:
                    mode = _why(error.strerror or "it failed")
            if kept.mtime_ns is not None and found.st_mtime_ns != kept.mtime_ns:
                times = (kept.mtime_ns, kept.mtime_ns)
                os.utime(name, ns=times, dir_fd=inside, follow_symlinks=False)
        except (OSError, OverflowError) as problem:
            time = _no_time(problem)
    return _listed(mode, time)


def _set_time(fd: int, kept: RestoredMetadata) -> str:
    try:
        if kept.mtime_ns is not None:
            os.utime(fd, ns=(kept.mtime_ns, kept.mtime_ns))
    except (OSError, OverflowError) as error:
        return _no_time(error)
    return ""


def _no_time(error: Exception) -> str:
    return f"its time could not be set ({getattr(error, 'strerror', None) or 'the system has no such time'})"


def _why(reason: str) -> str:
    return f"its mode could not be set ({reason})"


def _is_unlike(found: int, mode: int) -> bool:
    """Whether permissions differ, or set-id bits are missing; more of these may stay."""
    return bool((found ^ mode) & _PERMISSIONS or mode & ~found & _SET_IDS)


def _unlike(fd: int, mode: int | None) -> str:
    """Return why an open file has another mode than it was given; empty: it has that."""
    if mode is None or not _is_unlike(os.fstat(fd).st_mode, mode):
        return ""
    return "the file system, or the system for this user, does not keep it"


def _listed(*what: str) -> str:
    return ", and ".join(filter(None, what))


def stops_all(error: BaseException) -> bool:
    """Whether nothing more can be written into the target: it is full, or must not be written to."""
    cause: BaseException | None = error
    for _ in range(8):
        if isinstance(cause, OSError) and cause.errno in _STOPS:
            return True
        cause = None if cause is None else cause.__cause__
    return False


def _set_mode(inside: int, name: str, mode: int) -> None:
    """Give a file or directory its mode; nothing happens to what a link in its place leads to."""
    if os.chmod in os.supports_follow_symlinks:
        os.chmod(name, mode, dir_fd=inside, follow_symlinks=False)
        return
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    try:
        if not stat.S_ISLNK(os.fstat(fd).st_mode):
            os.chmod(f"/proc/self/fd/{fd}", mode)  # ``fchmod`` takes none that cannot be read
    finally:
        os.close(fd)


def make_link(home: DirectoryFd, path: str, kept: RestoredMetadata, force: bool) -> str:
    """
    Make a symbolic link, or find that it is there.

    Args:
        home: the directory that it comes into.

    Returns:
        what of its entry could not be set, in words; empty: nothing.

    Raises:
        SinkError: something else is in the way, or it cannot be made.
    """
    assert kept.link is not None
    to, name = os.fsdecode(kept.link), os.path.basename(path)
    try:
        with home.entered() as inside:
            time = ""
            try:
                os.symlink(to, name, dir_fd=inside)
            except FileExistsError:
                mode = os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode) and os.readlink(name, dir_fd=inside) == to:
                    pass
                elif not force or stat.S_ISDIR(mode):
                    raise in_the_way(path) from None
                else:
                    link_instead(to, name, inside)
            try:
                if kept.mtime_ns is not None:
                    times = (kept.mtime_ns, kept.mtime_ns)
                    os.utime(name, ns=times, dir_fd=inside, follow_symlinks=False)
            except (OSError, OverflowError, NotImplementedError) as problem:
                time = _no_time(problem)
    except (OSError, ValueError) as error:
        raise failed("make the link", path, error) from error
    return time


def write_whole(
    home: DirectoryFd, path: str, data: bytes, replace: bool, kept: RestoredMetadata
) -> str:
    """
    Write a small file in one go: under a hidden name, synced, and renamed.

    Returns:
        what of its entry could not be set, in words; empty: nothing.

    Raises:
        SinkError: it cannot be written.
    """
    try:
        part = TreePart(home, path, replace, kept)
        with part:
            part.begin(len(data))
            part.write_pieces([data])
        return part.not_kept
    except OSError as error:
        raise failed("write", path, error) from error


def space_for(path: str, size: int) -> None:
    """
    Raises:
        SinkError: a file of this size cannot fit onto the disk.
    """
    try:
        found = os.statvfs(path)
    except OSError:
        return
    free = found.f_bavail * found.f_frsize
    if size > free:
        raise SinkError(
            f"a file of {size} bytes does not fit: {free} bytes are free in {printable(path)}; free some "
            "space or choose another place"
        )


# Which names of a directory on a grid a local directory can hold; pure.
#
# A name on a grid is any text, and its exact bytes, where the metadata say them, are any bytes. What
# becomes a local name is one component of a path, and never one that leads elsewhere: not empty, ``.`` or
# ``..``, without ``/`` and NUL, no longer than a name may be. Nor is it one that would meet another: the
# same as that of another entry, as file systems see it that fold cases or compose letters, or the hidden
# name of a part of ours.

MAX_NAME_BYTES = 255
"""Of a file's name, on nearly all file systems."""


def local_name(name: str, exact: bytes | None = None) -> str:
    """
    Return the local name of an entry, as ``os.fsdecode`` gives it.

    Args:
        name: of the entry.
        exact: what the metadata say of its bytes, if they are not those of the name.

    Raises:
        SinkError: no file can be called so.
    """
    try:
        data = name.encode("utf-8") if exact is None else exact
    except UnicodeEncodeError:  # half a character
        raise _unfit(name, "it is not text") from None
    if not data:
        raise _unfit(name, "it is empty")
    if data in (b".", b".."):
        raise _unfit(os.fsdecode(data), "it leads to another directory")
    if b"/" in data:
        raise _unfit(os.fsdecode(data), "there is a slash in it")
    if b"\0" in data:
        raise _unfit(os.fsdecode(data), "there is a zero byte in it")
    if len(data) > MAX_NAME_BYTES:
        raise _unfit(
            os.fsdecode(data[:40]) + "...",
            f"it has {len(data)} bytes, and a name may have {MAX_NAME_BYTES}",
        )
    if data.startswith(b".") and data.endswith(SUFFIX.encode()):
        raise _unfit(os.fsdecode(data), "part files of unfinished downloads have such names")
    return os.fsdecode(data)


class TakenNames:
    """
    The names of one directory that were given to its entries.

    Args:
        folds: the file system holds names to be the same that differ in case, or in how their letters are
            composed.
    """

    def __init__(self, folds: bool) -> None:
        self._folds = folds
        self._taken: dict[str, str] = {}

    def take(self, name: str) -> None:
        """
        Give a name to an entry.

        Raises:
            SinkError: another one has it.
        """
        key = unicodedata.normalize("NFC", name).casefold() if self._folds else name
        other = self._taken.get(key)
        if other is not None:
            raise same_name(other, name)
        self._taken[key] = name


def same_name(name: str, second: str) -> SinkError:
    """Return the error for the second of two entries that are one file here."""
    return SinkError(
        f"two entries of this directory would both be '{printable(name)}' here, and the second, "
        f"'{printable(second)}', was left out; fetch it by its own path to another place"
    )


def _unfit(name: str, why: str) -> SinkError:
    text = (
        f"no local file can be named '{printable(name)}', since {why}; it was left out: fetch it by its cap, "
        "which Directory.list shows"
    )
    return naming(SinkError(text), "Directory.list")


# Which entry of a directory has which place in a local one, where several names may lead to one place.
#
# File systems that fold cases do so, and those that keep a short name beside a long one
# (``LONGNA~1.TXT``), or drop dots and blanks at its end. What folds can be told beforehand; the rest
# shows when an entry meets what another one has become. So what stands at an entry's place is noted, and
# belongs to that entry alone.


class NameCollisions(TakenNames):
    """
    The names and places of one directory that were given to its entries.

    Args:
        folds: as of ``TakenNames``.
    """

    def __init__(self, folds: bool) -> None:
        super().__init__(folds)
        self._owners: dict[tuple[int, int], str] = {}

    def claim(self, home: DirectoryFd, path: str) -> None:
        """
        Give what stands at a path, if anything does, to the entry that has this name.

        Args:
            home: the local directory.

        Raises:
            SinkError: it is another entry's, or the directory is not in its place any more.
        """
        name = os.path.basename(path)
        with home.entered() as inside:
            identity = _identity(inside, name)
            if identity is None:
                return
            owner = self._owners.get(identity, name)
            if owner != name and _is_one(inside, owner, name):
                raise same_name(owner, name)
            self._owners[identity] = name


def _identity(inside: int, name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name, dir_fd=inside, follow_symlinks=False)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _is_one(inside: int, name: str, other: str) -> bool:
    """Return whether two names of a file are one; not so two links to it, which are both listed."""
    return not {name, other} <= set(os.listdir(inside))


# Whether a file system takes two names that differ in case for one, which nothing but a try can tell.

_PROBE, _OTHER = (f".pipegrid-{letter}{SUFFIX}" for letter in "aA")
"""No file of a tree can have such a name."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 100
"""Another process, which tries the same, may take the file away."""


def folds_names(home: DirectoryFd) -> bool:
    """
    Return whether the file system of a directory does so.

    The file that is made for that has one name for all, so that one that a kill has left is found.
    """
    with home.entered() as inside, suppress(OSError):
        for _ in range(_TRIES):
            found = _tried(inside)
            if found is not None:
                return found
    return False


def _tried(inside: int) -> bool | None:
    """Try it in the directory of a descriptor; None: the file was taken away meanwhile."""
    os.close(os.open(_PROBE, _FLAGS, 0o600, dir_fd=inside))
    try:
        for name in (_OTHER, _PROBE):
            with suppress(FileNotFoundError):
                os.stat(name, dir_fd=inside, follow_symlinks=False)
                return name == _OTHER
        return None
    finally:
        with suppress(OSError):
            os.unlink(_PROBE, dir_fd=inside)
