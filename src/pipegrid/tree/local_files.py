"""Local files of a download: names, links, modes."""

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

# The local side of fetching a tree: what exists already, and how files, directories and links are created.
#
# Nothing is written through a symbolic link. Whether a directory exists is checked without following links; a
# file replaces a link itself, not its target; and everything is created by the descriptor of its
# ``DirectoryFd``, which cannot be redirected. Existing files stay, except those that a file or link may
# replace. Links are created last, so that nothing of the same tree is written through them.
#
# A file gets its mode and time before its name, so a file with the size and time of its entry is complete,
# also after a crash.

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
    A file being fetched into a tree: see ``DirectoryPartFile``. It gets mode and time before its name, and
    the part file is readable only by users who may read the file.

    Args:
        kept: the metadata of its entry.
        inside: see ``DirectoryPartFile``.

    Attributes:
        not_kept: a clause about the metadata that could not be set; empty if all was set.
        identity: after ``publish``, the device and inode of what has the name, if the caller keeps the
            directory open; otherwise None.
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
        with suppress(OSError):  # reported when it gets its name
            self._set_mode(0o600)

    def publish(self, syncs_name: bool = True) -> None:
        """Set its time and its mode, then give it its name."""
        if not self.closed and self.part is not None:
            if self._kept.extended is not None:
                self._kept.extended.apply(self.fileno(), fresh=True)
                self._mode = self._kept.extended.limited(self._mode)
            # A file system that keeps no times does not make the download fail.
            self.not_kept = _set_time(self.fileno(), self._kept)
        super().publish(syncs_name)
        if self._there is not None:
            self.identity = _identity(self._there, os.path.basename(self.path))

    def _set_mode(self, more: int = 0) -> None:
        if more and self._mode is not None:
            # Until it has its owner, a program with set-id bits would run as the user who restores.
            change_mode(self.fileno(), self._mode & 0o777 | more)
            return
        super()._set_mode(more)
        if not more:  # see above
            self.not_kept = _listed(_unlike(self.fileno(), self._mode), self.not_kept)


class SparseTreePart(TreePart):
    """The same for a file that had holes: blocks of zeros are not written, so they take no space."""

    def write_pieces(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write consecutive pieces without their holes; ``OSError`` if that fails."""
        for piece in pieces:
            data = memoryview(piece).cast("B")
            for begin, end, is_hole in holes_in(data, self.position):
                # What an earlier writer has left at this place is overwritten.
                if is_hole and self.position >= os.fstat(self.fileno()).st_size:
                    self.skip(end - begin)
                else:
                    super().write_pieces([data[begin:end]])

    def publish(self, syncs_name: bool = True) -> None:
        """Extend the file to its end, which may be a hole; then as ``TreePart`` does."""
        if not self.closed and os.fstat(self.fileno()).st_size < self.position:
            os.ftruncate(self.fileno(), self.position)
        super().publish(syncs_name)


class UnnamedFile:
    """
    A small file being fetched into a tree, which has no name until all of it is durable. So there is nothing
    that another process could see or change before, and a killed one leaves nothing.

    Args:
        path: of the file; its last component is used, the rest is for messages.
        inside: a descriptor of its directory, open as long as this is used.
        data: all its bytes.
        kept: the metadata of its entry, which it gets at once.
        inherits: its directory may give it an access control list.

    Attributes:
        not_kept, identity: as of ``TreePart``.

    Raises:
        OSError: it cannot be written.
    """

    __slots__ = ("_fd", "_inside", "identity", "not_kept", "path")

    def __init__(
        self, path: str, inside: int, data: bytes, kept: RestoredMetadata, inherits: bool
    ) -> None:
        self.path = path
        self._inside = inside
        # A file without write permission accepts no attributes, and a write removes set-id bits.
        mode = 0o666 if kept.mode is None else kept.mode & 0o777 | 0o600
        self._fd = open_unnamed(".", mode, inside)
        try:
            found = os.fstat(self._fd)
            self.identity = found.st_dev, found.st_ino
            write_all(self._fd, data, 0)
            wanted, has_changed = kept.mode, inherits
            if wanted is not None and mode & ~found.st_mode & 0o600:  # by the umask, or by a list
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
        """Return the open descriptor, which ``leave`` closes."""
        return self._fd

    def sync(self) -> None:
        """Make its bytes durable; raises ``OSError``."""
        sync_bytes(self._fd)

    def publish(self) -> None:
        """
        Give it its name.

        Raises:
            TargetExists: something has that name.
            OSError: it cannot get a name.
        """
        try:
            give_name(self._fd, os.path.basename(self.path), self._inside)
        except FileExistsError:
            raise exists_already(self.path) from None

    def leave(self) -> None:
        """Release it; without a name, it is gone."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_sparse(kept: RestoredMetadata) -> bool:
    """Return whether a file gets holes."""
    return kept.extended is not None and kept.extended.stored.sparse


def tree_part(
    home: DirectoryFd,
    path: str,
    replace: bool,
    kept: RestoredMetadata,
    inside: int | None = None,
) -> TreePart:
    """Return a new part file; see ``TreePart``."""
    return (SparseTreePart if is_sparse(kept) else TreePart)(home, path, replace, kept, inside)


class ExistingFile(PartFile):
    """
    An existing file that is compared with one on the grid. It takes the place of a part file, and is only
    read.

    A write means that the file differs, and raises ``Differs``.

    Raises:
        SinkError: its directory was moved or replaced.
    """

    def __init__(self, home: DirectoryFd, path: str) -> None:
        self.path = path
        self.part = path
        self.position = 0
        with home.entered() as inside:
            self._fd = os.open(os.path.basename(path), _READ, dir_fd=inside)
        self.found_bytes = os.fstat(self._fd).st_size

    def begin(self, length: int) -> int:
        """Compare the file from its beginning."""
        self.position = 0
        if self.found_bytes != length:
            raise Differs
        return length

    def write_pieces(self, pieces: object) -> None:
        """Raise ``Differs``: these bytes are not in the file."""
        if pieces:
            raise Differs

    def skip(self, length: int) -> None:
        """Skip bytes that are equal."""
        self.position += length

    def forget_rest(self) -> None:
        """Raise ``Differs``: the rest of the file is not equal."""
        raise Differs

    def publish(self, syncs_name: bool = True) -> None:
        """Do nothing: the file has its name already."""

    def leave(self) -> str | None:
        """Close the file without changing it; there is no part file to report."""
        self.close()
        return None


def standing(home: DirectoryFd, path: str, size: int | None, kept: RestoredMetadata) -> Presence:
    """
    Return what exists at the place of a file.

    Args:
        home: the directory of the file.
        size: of the file; None if it is known only by reading it.

    Returns:
        ``missing``; ``same``: size and time are those of the file; ``perhaps``: its size is; or ``other``.

    Raises:
        SinkError: it cannot be examined, or its directory was moved or replaced.
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
        SinkError: its directory was moved or replaced.
    """
    try:
        with home.entered() as inside:
            fd = os.open(os.path.basename(path), _READ, dir_fd=inside)
        with os.fdopen(fd, "rb") as file:
            return file.read(len(data) + 1) == data
    except OSError:
        return False


def may_be_replaced(home: DirectoryFd, path: str) -> bool:
    """Return whether what has this name may be replaced by a file: all but a directory."""
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

    An earlier fetch may have made it read-only, as its entry says; it becomes writable until the end.

    Raises:
        SinkError: it cannot be created.
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
    Create the directory of a tree, as ``make_root`` does or, with ``into``, without leaving that directory.

    Args:
        into: the directory of the path, or the path itself; None: only the path is known.
        force: see ``make_directory``, as for the result.

    Raises:
        SinkError: it cannot be created.
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
        parent: the directory above it.
        kept: the metadata of its entry; until it is complete, only users may enter it who may do so then.
        force: a file or link of this name is replaced.

    Returns:
        the directory and, if it existed, its mode.

    Raises:
        SinkError: something else has the name, or it cannot be created.
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
                ):  # made read-only by an earlier fetch; its mode is set again at the end
                    _set_mode(inside, name, mode_before | _WRITABLE)
            found = os.stat(name, dir_fd=inside, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):  # it was one a moment ago
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
        mode_before: the mode of a directory that existed, except the target.
        existed: the directory existed, so its lists stay.

    Returns:
        a clause about what could not be set; empty if all was set.

    Raises:
        SinkError: it was moved or replaced.
    """
    mode = kept.mode if kept.mode is not None else mode_before
    with home.entered() as fd:  # a file system that keeps neither does not make the download fail
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

    A file that has them is not touched: a new ``ctime`` would make backup programs read it again.

    Returns:
        a clause about what could not be set; empty if all was set.

    Raises:
        SinkError: its directory was moved or replaced.
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
    """Set the time of an open file, or of a name in a directory; return a clause if that fails."""
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
    """Whether permissions differ, or set-id bits are missing; additional set-id bits may stay."""
    return bool((found ^ mode) & _PERMISSIONS or mode & ~found & _SET_IDS)


def _unlike(fd: int, mode: int | None) -> str:
    """Return a clause if an open file does not have the mode that was set; empty if it has."""
    if mode is None or not _is_unlike(os.fstat(fd).st_mode, mode):
        return ""
    return _why("the file system, or this user's rights, do not allow it")


def _listed(*what: str) -> str:
    return ", and ".join(filter(None, what))


def stops_all(error: BaseException) -> bool:
    """Whether nothing more can be written to the target: it is full or read-only."""
    cause: BaseException | None = error
    for _ in range(8):
        if isinstance(cause, OSError) and cause.errno in _STOPS:
            return True
        cause = None if cause is None else cause.__cause__
    return False


def _set_mode(inside: int, name: str, mode: int) -> None:
    """Set the mode of a file or directory; the target of a symbolic link is not changed."""
    if os.chmod in os.supports_follow_symlinks:
        os.chmod(name, mode, dir_fd=inside, follow_symlinks=False)
        return
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    try:
        if not stat.S_ISLNK(os.fstat(fd).st_mode):
            os.chmod(
                f"/proc/self/fd/{fd}", mode
            )  # ``fchmod`` does not work on files that cannot be read
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
        SinkError: something else has the name, or it cannot be created.
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
        SinkError: it does not.
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
# A name on a grid is any text, and its exact bytes, if the metadata gives them, are any bytes. A local name
# is one component of a path that stays inside its directory: not empty, ``.`` or ``..``, without ``/`` and
# NUL, and not too long. It must also differ from the names of other entries on file systems that fold case or
# compose letters, and from hidden names of part files.

MAX_NAME_BYTES = 255
"""Most file systems have this limit."""


def local_name(name: str, exact: bytes | None = None) -> str:
    """
    Return the local name of an entry, as ``os.fsdecode`` gives it.

    Args:
        name: of the entry.
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
    """Return the error for the second of two entries that would be one local file."""
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


# Which entry of a directory owns which local file, if the file system may give one file several names.
#
# File systems that fold case do so, and those that keep a short name (``LONGNA~1.TXT``) next to a long one,
# or drop dots and blanks at the end of a name. Case folding is found out before the fetch; the rest only when
# an entry meets the file of another one. So the file of each entry is recorded, and belongs to that entry
# alone.


class NameCollisions:
    """
    The names and files that entries of one directory have taken.

    Args:
        folds: the file system treats names as equal that differ only in case or composition.
    """

    def __init__(self, folds: bool) -> None:
        self._folds = folds
        self._taken: dict[str, str] = {}
        self._owners: dict[tuple[int, int], str] = {}

    def take(self, name: str) -> None:
        """
        Take a name for an entry.

        Raises:
            SinkError: another entry has it.
        """
        key = unicodedata.normalize("NFC", name).casefold() if self._folds else name
        other = self._taken.get(key)
        if other is not None:
            raise same_name(other, name)
        self._taken[key] = name

    def claim(self, home: DirectoryFd, path: str, identity: tuple[int, int] | None = None) -> None:
        """
        Record that what exists at a path, if anything does, belongs to the entry of this name.

        Args:
            home: the local directory.
            identity: the device and inode of what exists there, if the caller knows.

        Raises:
            SinkError: it belongs to another entry, or the directory was moved or replaced.
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
    """Return whether two names are one directory entry; two hard links are not, since both are listed."""
    return not {name, other} <= set(os.listdir(inside))


# Whether a file system folds case, which only a test with a file can show.

_PROBE, _OTHER = (f".pipegrid-{letter}{SUFFIX}" for letter in "aA")
"""No file of a tree can have such a name."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 100
"""Another process that tests the same may remove the file."""


def folds_names(home: DirectoryFd) -> bool:
    """
    Return whether the file system of a directory folds case.

    The test file always has the same name, so that one left by a killed process is found and removed.
    """
    with home.entered() as inside, suppress(OSError):
        for _ in range(_TRIES):
            found = _tried(inside)
            if found is not None:
                return found
    return False


def _tried(inside: int) -> bool | None:
    """Test it in the open directory; None: another process removed the file meanwhile."""
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
