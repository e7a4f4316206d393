"""Local files of a download: file names, parts, links, modes and times."""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from pipegrid.core.text import printable
from pipegrid.disk.atomic_write import (
    SUFFIX,
    change_mode,
    give_name,
    open_unnamed,
    remove_part,
    remove_stale_link,
    sync_bytes,
)
from pipegrid.disk.file_system_calls import write_all
from pipegrid.disk.part_file import PartFile, exists_already
from pipegrid.errors import SinkError, naming
from pipegrid.tree.file_metadata import RestoredMetadata
from pipegrid.tree.local_directory_descriptor import (
    DirectoryFd,
    DirectoryPartFile,
    directory_instead,
    failed,
    link_instead,
    unmade,
)
from pipegrid.tree.metadata_restore import holes_in

# The local side of fetching a tree: checking what exists already, and creating files, directories and links.
#
# Nothing is written through a symbolic link. Whether a directory exists is checked without following links. A
# file replaces a link itself, not its target. Everything is created by the descriptor of its ``DirectoryFd``,
# which cannot be redirected. Existing files stay, except those that a file or link may replace. Links are
# created last, so that no file of the same tree is written through them.
#
# A file gets its mode and time before its name. So an existing file with the size and time of its entry is
# complete, even after a crash.

_WRITABLE = stat.S_IRWXU
_PERMISSIONS = 0o1777
_SET_IDS = 0o6000
_STOPS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Presence = Literal["missing", "same", "perhaps", "other"]


class Differs(Exception):
    """An existing file differs from the one on the grid."""


class TreePart(DirectoryPartFile):
    """
    A file that is being fetched into a tree: see ``DirectoryPartFile``. It gets its mode and time before its
    name, and only users who may read the finished file can read the part file.

    Args:
        kept: the metadata of the file's entry.
        inside: see ``DirectoryPartFile``.

    Attributes:
        not_kept: a clause about the metadata that could not be set; empty if all was set.
        identity: after ``publish``, the device and inode of the file, if ``inside`` was given; otherwise
            None.
    """

    def __init__(
        self,
        home: DirectoryFd,
        path: str,
        replace: bool,
        kept: RestoredMetadata,
        inside: int | None = None,
    ) -> None:
        self._kept = kept
        self._there = inside
        self.not_kept = ""
        self.identity: tuple[int, int] | None = None
        super().__init__(home, path, replace, inside=inside)
        self._mode = kept.mode
        with suppress(OSError):  # a failure is reported when the file gets its name
            self._set_mode(0o600)

    def publish(self, syncs_name: bool = True) -> None:
        """Set the time and mode of the file, then give it its name."""
        if not self.closed and self.part is not None:
            if self._kept.extended is not None:
                self._kept.extended.apply(self.fileno(), fresh=True)
                self._mode = self._kept.extended.limited(self._mode)
            # The download goes on if the file system does not support times.
            self.not_kept = _set_time(self.fileno(), self._kept)
        super().publish(syncs_name)
        if self._there is not None:
            self.identity = _identity(self._there, os.path.basename(self.path))

    def _set_mode(self, more: int = 0) -> None:
        if more and self._mode is not None:
            # Set-id bits are set only after the owner; before that, the program would run as the user who
            # restores.
            change_mode(self.fileno(), self._mode & 0o777 | more)
            return
        super()._set_mode(more)
        if not more:  # see above
            self.not_kept = _listed(_unlike(self.fileno(), self._mode), self.not_kept)


class SparseTreePart(TreePart):
    """A ``TreePart`` for a file that had holes: blocks of zeros are not written, so they take no space."""

    def write_pieces(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write consecutive pieces except their holes; raises ``OSError`` if writing fails."""
        for piece in pieces:
            data = memoryview(piece).cast("B")
            for begin, end, is_hole in holes_in(data, self.position):
                # If an earlier attempt has left bytes at this position, zeros must overwrite them.
                if is_hole and self.position >= os.fstat(self.fileno()).st_size:
                    self.skip(end - begin)
                else:
                    super().write_pieces([data[begin:end]])

    def publish(self, syncs_name: bool = True) -> None:
        """Extend the file to its full size if it ends in a hole; then publish it as ``TreePart`` does."""
        if not self.closed and os.fstat(self.fileno()).st_size < self.position:
            os.ftruncate(self.fileno(), self.position)
        super().publish(syncs_name)


class UnnamedFile:
    """
    A small file that is being fetched into a tree, and has no name until all its bytes are durable. Until
    then no other process can see or change the file, and if this process is killed, the file vanishes.

    Args:
        path: the path of the file; only its last component is used, the rest is for messages.
        inside: a descriptor of the file's directory, which stays open while this object is used.
        data: all bytes of the file.
        kept: the metadata of the file's entry, which is set immediately.
        inherits: whether the file may get an access control list from its directory.

    Attributes:
        not_kept, identity: as in ``TreePart``.

    Raises:
        OSError: the file cannot be written.
    """

    __slots__ = ("_fd", "_inside", "identity", "not_kept", "path")

    def __init__(
        self, path: str, inside: int, data: bytes, kept: RestoredMetadata, inherits: bool
    ) -> None:
        self.path = path
        self._inside = inside
        # The first mode has write permission, without which attributes cannot be set. Set-id bits are set at
        # the end, since a write removes them.
        mode = 0o666 if kept.mode is None else kept.mode & 0o777 | 0o600
        self._fd = open_unnamed(".", mode, inside)
        try:
            found = os.fstat(self._fd)
            self.identity = found.st_dev, found.st_ino
            write_all(self._fd, data, 0)
            wanted, has_changed = kept.mode, inherits
            if wanted is not None and mode & ~found.st_mode & 0o600:  # a umask or ACL took bits
                change_mode(self._fd, mode)
                has_changed = True
            if kept.extended is not None:
                kept.extended.apply(self._fd, fresh=inherits, found=found)
                wanted = kept.extended.limited(wanted)
                has_changed = has_changed or bool(kept.extended.stored.attributes)
            self.not_kept = _set_time(self._fd, kept)
            if wanted is not None and (has_changed or stat.S_IMODE(found.st_mode) != wanted):
                change_mode(self._fd, wanted)
                self.not_kept = _listed(_unlike(self._fd, wanted), self.not_kept)
        except BaseException:
            self.leave()
            raise

    def fileno(self) -> int:
        """Return the open descriptor of the file, which ``leave`` closes."""
        return self._fd

    def sync(self) -> None:
        """Make the bytes of the file durable; raises ``OSError``."""
        sync_bytes(self._fd)

    def publish(self) -> None:
        """
        Give the file its name.

        Raises:
            TargetExists: the name exists already.
            OSError: the file cannot get the name.
        """
        try:
            give_name(self._fd, os.path.basename(self.path), self._inside)
        except FileExistsError:
            raise exists_already(self.path) from None

    def leave(self) -> None:
        """Close the file; if it has no name, it vanishes."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_sparse(kept: RestoredMetadata) -> bool:
    """Return whether a file had holes, which are restored."""
    return kept.extended is not None and kept.extended.stored.sparse


def tree_part(
    home: DirectoryFd,
    path: str,
    replace: bool,
    kept: RestoredMetadata,
    inside: int | None = None,
) -> TreePart:
    """Return a new part file of the class that its metadata needs; see ``TreePart``."""
    return (SparseTreePart if is_sparse(kept) else TreePart)(home, path, replace, kept, inside)


class ExistingFile(PartFile):
    """
    An existing file that is compared with a file on the grid. It is used in place of a part file, and is only
    read.

    A call to write means that the files differ, and raises ``Differs``.

    Raises:
        SinkError: the directory of the file was moved or replaced.
    """

    def __init__(self, home: DirectoryFd, path: str) -> None:
        self.path = path
        self.part = path
        self.position = 0
        with home.entered() as inside:
            self._fd = os.open(os.path.basename(path), _READ, dir_fd=inside)
        self.found_bytes = os.fstat(self._fd).st_size

    def begin(self, length: int) -> int:
        """Start to compare from the beginning; raises ``Differs`` if the length is different."""
        self.position = 0
        if self.found_bytes != length:
            raise Differs
        return length

    def write_pieces(self, pieces: object) -> None:
        """Raise ``Differs``: these bytes are not in the file."""
        if pieces:
            raise Differs

    def skip(self, length: int) -> None:
        """Skip bytes that are equal in both files."""
        self.position += length

    def forget_rest(self) -> None:
        """Raise ``Differs``: the rest of the file is different."""
        raise Differs

    def publish(self, syncs_name: bool = True) -> None:
        """Do nothing: the file has its name already."""

    def leave(self) -> str | None:
        """Close the file without changing it; returns None, since there is no part file."""
        self.close()
        return None


def standing(home: DirectoryFd, path: str, size: int | None, kept: RestoredMetadata) -> Presence:
    """
    Return what exists at the path of a file.

    Args:
        home: the directory of the file.
        size: the size of the file on the grid; None if only reading the file shows it.

    Returns:
        ``missing``; ``same``: a file with the same size and time; ``perhaps``: a file with the same size; or
            ``other``.

    Raises:
        SinkError: the path cannot be examined, or its directory was moved or replaced.
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
    Return whether an existing file has exactly this content.

    Raises:
        SinkError: the directory of the file was moved or replaced.
    """
    try:
        with home.entered() as inside:
            fd = os.open(os.path.basename(path), _READ, dir_fd=inside)
        with os.fdopen(fd, "rb") as file:
            return file.read(len(data) + 1) == data
    except OSError:
        return False


def may_be_replaced(home: DirectoryFd, path: str) -> bool:
    """Return whether a file may replace what exists at a path: anything except a directory."""
    with home.entered() as inside, suppress(OSError):
        found = os.stat(os.path.basename(path), dir_fd=inside, follow_symlinks=False)
        return not stat.S_ISDIR(found.st_mode)
    return True


def in_the_way(path: str) -> SinkError:
    """Return the error for an existing file that must not be replaced."""
    what = "something else"
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link", stat.S_IFREG: "another file"}
    with suppress(OSError):
        what = kinds.get(stat.S_IFMT(os.lstat(path).st_mode), what)
    text = f"{printable(path)} is {what} already, and was left as it is; move it away"
    if what == "a directory":
        return SinkError(text)
    return naming(SinkError(f"{text}, or replace it with force=True"), "force=True")


def make_root(path: str, kept: RestoredMetadata) -> None:
    """
    Create the directory into which a tree is fetched, and its parents, or use the existing one.

    If an earlier fetch made an existing directory read-only, as its entry says, the directory is made
    writable until the end of this fetch.

    Raises:
        SinkError: the directory cannot be created.
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
    Create the directory of a tree: with ``into``, only below that directory; otherwise like ``make_root``.

    Args:
        into: the parent directory of the path, or the directory at the path itself; None: only the path is
            known.
        force: as in ``make_directory``, which also describes the result.

    Raises:
        SinkError: the directory cannot be created.
    """
    if into is None:
        existed = os.path.lexists(path)
        make_root(path, kept)
        return DirectoryFd(path, is_new=not existed), None
    if path != into.path:
        return make_directory(into, path, kept, force)
    into.check()
    return into, None


def make_directory(
    parent: DirectoryFd, path: str, kept: RestoredMetadata, force: bool
) -> tuple[DirectoryFd, int | None]:
    """
    Create a directory, or use the existing one.

    Args:
        parent: the parent directory.
        kept: the metadata of the directory's entry; users whom the final mode excludes cannot enter the
            directory while it is filled, either.
        force: whether a file or link of this name is replaced.

    Returns:
        the directory and, if it existed, its mode.

    Raises:
        SinkError: something else has the name, or the directory cannot be created.
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
                with suppress(
                    OSError
                ):  # an earlier fetch made it read-only; its mode is set again at the end
                    _set_mode(inside, name, mode_before | _WRITABLE)
            found = os.stat(name, dir_fd=inside, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):  # it was replaced meanwhile
                raise in_the_way(path)
    except (OSError, ValueError) as error:
        raise unmade(path, error) from error
    identity = (found.st_dev, found.st_ino)
    return DirectoryFd(path, identity, is_new=mode_before is None), mode_before


def finish_directory(
    home: DirectoryFd, kept: RestoredMetadata, mode_before: int | None, existed: bool = False
) -> str:
    """
    Set the mode and time of a directory when its content is complete.

    Args:
        mode_before: the mode of an existing directory; None for a new one, and for the target.
        existed: whether the directory existed, so that its access control lists stay.

    Returns:
        a clause about what could not be set; empty if all was set.

    Raises:
        SinkError: the directory was moved or replaced.
    """
    mode = kept.mode if kept.mode is not None else mode_before
    with home.entered() as fd:  # the download goes on if mode or time cannot be set
        if kept.extended is not None:
            kept.extended.apply(fd, fresh=not existed)
            mode = kept.extended.limited(mode)
        time = _set_time(fd, kept)
        not_set = ""
        if mode is not None:
            try:
                os.fchmod(fd, mode)
                not_set = _unlike(fd, mode)
            except OSError as error:
                not_set = _why(error.strerror or "it failed")
        return _listed(not_set, time)


def restore_mode_and_time(home: DirectoryFd, path: str, kept: RestoredMetadata) -> str:
    """
    Give an existing file the mode and time of its entry, and remove its part file.

    A mode and time that are right already are not set: a new ``ctime`` would make backup programs read the
    file again.

    Returns:
        a clause about what could not be set; empty if all was set.

    Raises:
        SinkError: the directory of the file was moved or replaced.
    """
    name = os.path.basename(path)
    mode = time = ""
    wanted = kept.mode
    with home.entered() as inside:
        remove_part(name, inside)
        if kept.extended is not None:
            kept.extended.apply_to(inside, name, kept.mtime_ns)
            wanted = kept.extended.limited(wanted)
        try:
            found = os.stat(name, dir_fd=inside, follow_symlinks=False)
            if wanted is not None and _is_unlike(found.st_mode, wanted):
                try:
                    _set_mode(inside, name, wanted)
                except OSError as error:
                    mode = _why(error.strerror or "it failed")
            if found.st_mtime_ns != kept.mtime_ns:
                time = _set_time(name, kept, inside)
        except OSError as problem:
            time = _no_time(problem)
    return _listed(mode, time)


def _set_time(at: int | str, kept: RestoredMetadata, inside: int | None = None) -> str:
    """
    Set the time of an open file, or of a name in a directory; return a clause if this fails, otherwise an
    empty string.
    """
    try:
        if kept.mtime_ns is not None:
            times = (kept.mtime_ns, kept.mtime_ns)
            os.utime(at, ns=times, dir_fd=inside, follow_symlinks=inside is None)
    except (OSError, OverflowError, NotImplementedError) as error:
        return _no_time(error)
    return ""


def _no_time(error: Exception) -> str:
    return f"its time could not be set ({getattr(error, 'strerror', None) or 'the system has no such time'})"


def _why(reason: str) -> str:
    return f"its mode could not be set ({reason})"


def _is_unlike(found: int, mode: int) -> bool:
    """Return whether permissions differ, or set-id bits are missing; additional set-id bits are accepted."""
    return bool((found ^ mode) & _PERMISSIONS or mode & ~found & _SET_IDS)


def _unlike(fd: int, mode: int | None) -> str:
    """Return a clause if an open file does not have this mode; otherwise an empty string."""
    if mode is None or not _is_unlike(os.fstat(fd).st_mode, mode):
        return ""
    return _why("the file system, or this user's rights, do not allow it")


def _listed(*what: str) -> str:
    return ", and ".join(filter(None, what))


def stops_all(error: BaseException) -> bool:
    """
    Return whether an error shows that nothing more can be written to the target, which is full or read-only.
    """
    cause: BaseException | None = error
    for _ in range(8):
        if isinstance(cause, OSError) and cause.errno in _STOPS:
            return True
        cause = None if cause is None else cause.__cause__
    return False


def _set_mode(inside: int, name: str, mode: int) -> None:
    """Set the mode of a file or directory; if the name is a symbolic link, nothing is changed."""
    if os.chmod in os.supports_follow_symlinks:
        os.chmod(name, mode, dir_fd=inside, follow_symlinks=False)
        return
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    try:
        if not stat.S_ISLNK(os.fstat(fd).st_mode):
            os.chmod(f"/proc/self/fd/{fd}", mode)  # ``fchmod`` fails on files that cannot be read
    finally:
        os.close(fd)


def make_link(home: DirectoryFd, path: str, kept: RestoredMetadata, force: bool) -> str:
    """
    Create a symbolic link, unless it exists.

    Args:
        home: the directory of the link.

    Returns:
        a clause about metadata that could not be set; empty if all was set.

    Raises:
        SinkError: something else has the name, or the link cannot be created.
    """
    assert kept.link is not None
    to, name = os.fsdecode(kept.link), os.path.basename(path)
    try:
        with home.entered() as inside:
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
            if kept.extended is not None:
                kept.extended.apply_to(inside, name, kept.mtime_ns)
            time = _set_time(name, kept, inside)
    except (OSError, ValueError) as error:
        raise failed("make the link", path, error) from error
    return time


def space_for(path: str, size: int) -> None:
    """
    Check that a file of this size fits onto the disk.

    Raises:
        SinkError: the disk has too little free space.
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


# This part checks which names on a grid a local directory can have. It does no input or output.
#
# A name on a grid is any text. If the metadata has the exact bytes of a name, these can be any bytes. A local
# name is one component of a path that stays inside its directory: not empty, ``.`` or ``..``, without ``/``
# and NUL, and not too long. It must also differ from hidden names of part files and, on file systems that
# fold case or normalize letters, from the names of other entries.

MAX_NAME_BYTES = 255
"""The limit of most file systems."""


def local_name(name: str, exact: bytes | None = None) -> str:
    """
    Return the local name of an entry, as ``os.fsdecode`` gives it.

    Args:
        name: the name of the entry.
        exact: the bytes of the name according to the metadata, if they differ from ``name``.

    Raises:
        SinkError: no file can have this name.
    """
    try:
        data = name.encode("utf-8") if exact is None else exact
    except UnicodeEncodeError:  # a lone surrogate
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


def same_name(name: str, second: str) -> SinkError:
    """Return the error for the second of two entries that would have the same local file."""
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


# This part records which entry of a directory owns which local file, since a file system may give one file
# several names.
#
# Such file systems fold case, or keep a short name (``LONGNA~1.TXT``) next to a long one, or drop dots and
# blanks at the end of a name. Case folding is detected before the fetch; the other cases only when an entry
# meets the file of another entry. So the file of each entry is recorded, and belongs to that entry alone.


class NameCollisions:
    """
    The names and files that entries of one directory have taken.

    Args:
        folds: whether the file system treats names as equal that differ only in case or Unicode
            normalization.
    """

    def __init__(self, folds: bool) -> None:
        self._folds = folds
        self._taken: dict[str, str] = {}
        self._owners: dict[tuple[int, int], str] = {}

    def take(self, name: str) -> None:
        """
        Take a name for an entry.

        Raises:
            SinkError: another entry has taken the name.
        """
        key = unicodedata.normalize("NFC", name).casefold() if self._folds else name
        other = self._taken.get(key)
        if other is not None:
            raise same_name(other, name)
        self._taken[key] = name

    def claim(self, home: DirectoryFd, path: str, identity: tuple[int, int] | None = None) -> None:
        """
        Record that the file at a path, if one exists, belongs to the entry with its name.

        Args:
            home: the local directory.
            identity: the device and inode of the file, if the caller knows them.

        Raises:
            SinkError: the file belongs to another entry, or the directory was moved or replaced.
        """
        name = os.path.basename(path)
        if identity is not None and self._owners.setdefault(identity, name) == name:
            return
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
    """
    Return whether two names are spellings of one directory entry; two hard links are not, since the directory
    lists both.
    """
    return not {name, other} <= set(os.listdir(inside))


# This part tests with a file whether a file system folds case, since nothing else shows it.

_PROBE, _OTHER = (f".pipegrid-{letter}{SUFFIX}" for letter in "aA")
"""``local_name`` accepts no such name, so no file of a tree has it."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 100
"""The test is tried up to this many times, since another process with the same test may remove the file."""


def folds_names(home: DirectoryFd) -> bool:
    """
    Return whether the file system of a directory folds case.

    The test file always has the same name, so that a file left by a killed process is found and removed.
    """
    with home.entered() as inside, suppress(OSError):
        for _ in range(_TRIES):
            found = _tried(inside)
            if found is not None:
                return found
    return False


def _tried(inside: int) -> bool | None:
    """Test an open directory for case folding; None: another process removed the test file meanwhile."""
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
