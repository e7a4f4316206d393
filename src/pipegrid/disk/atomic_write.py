"""
Files that appear under their name only when they are complete: they are renamed from a hidden name, or have
no name until then (``O_TMPFILE``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

from pipegrid.disk.file_system_calls import FULL
from pipegrid.disk.safe_open import CannotLock, names_file, open_locked

TYPE_CHECKING = False  # defined as in ``typing``, which is slow to import
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    UnnamedSync = Literal["never", "once", "twice"]

# The suffix of the hidden file, next to its target, that collects the target's bytes.

SUFFIX = ".pipegrid-part"


def is_part_name(name: str) -> bool:
    """Return whether a name is the hidden name of a part file, which is not user data."""
    return name.startswith(".") and name.endswith(SUFFIX)


def part_path(target: str, inside: int | None = None) -> str:
    """
    Return the hidden name of the part file for a target. A name that would be too long is cut, and a hash
    makes it unique.

    Args:
        target: a path without symbolic links; with ``inside``, a name alone.
        inside: the descriptor of the target's directory.
    """
    directory, name = os.path.split(target) if "/" in target else ("", target)
    try:
        longest = os.pathconf(directory or "." if inside is None else inside, "PC_NAME_MAX")
    except (OSError, ValueError):
        longest = 255
    hidden = f".{name}{SUFFIX}"
    if len(os.fsencode(hidden)) > longest:
        from hashlib import sha256  # loading OpenSSL takes three milliseconds

        digest = sha256(os.fsencode(name)).hexdigest()[:16]
        space = longest - len(f"..{digest}{SUFFIX}")
        cut = os.fsencode(name)[: max(0, space)].decode("utf-8", "ignore")
        hidden = f".{cut}.{digest}{SUFFIX}"
    return os.path.join(directory, hidden) if directory else hidden


# Small files are written under a hidden name next to the target, and then renamed. A process that is killed
# meanwhile leaves the hidden file; the old file is unchanged, and the next writer reuses the hidden file. If
# the hidden file is in use or cannot be locked, the writer creates ``.NAME.something`` instead.

_O_PATH = getattr(os, "O_PATH", 0)
CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def replace_file(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """
    Create or replace a file atomically.

    Args:
        mode: the permissions of the new file.
        durable: sync the bytes before the rename, and the name before this returns; False: a power cut may
            lose the file.

    Raises:
        OSError: the file cannot be written, and an existing file is unchanged; or its name could not be
            synced.
    """
    with _hidden_file(path, data, mode, durable) as name:
        os.replace(name, path)
    if durable:
        sync_name(path)


def create_file(path: Path, data: bytes, *, mode: int = 0o600) -> bool:
    """
    Create a file durably unless it exists; return whether this call created it. A file that another
    process creates at the same time stays.

    Raises:
        OSError: the file cannot be written.
    """
    is_new = True
    with _hidden_file(path, data, mode, True) as name:
        try:
            os.link(name, path)
        except FileExistsError:
            is_new = False
        with suppress(OSError):  # the file exists; a second, hidden name does no harm
            os.unlink(name)
    sync_name(path)
    return is_new


def sync_name(path: Path | str) -> None:
    """
    Sync the name of a file, which may contain the only copy of a directory's cap, or a key that others rely
    on.

    It is not an error if the name cannot be synced because this process has no permission to read the
    directory, or because the file system does not support that.

    Raises:
        OSError: the disk fails.
    """
    with suppress(PermissionError):
        sync_path(os.path.dirname(path) or ".")


def sync_directory(fd: int) -> bool:
    """
    Sync the names in an open directory; return whether its file system supports that.

    Some file systems (CIFS, many FUSE ones) reject the call and store names in their own way: that is not an
    error. A directory that this process has no permission to list is open only for use in paths (``O_PATH``),
    and cannot be synced either.

    Raises:
        OSError: the disk fails.
    """
    try:
        return sync_bytes(fd)
    except OSError as error:
        if error.errno == errno.EBADF and fcntl.fcntl(fd, fcntl.F_GETFL) & _O_PATH:
            return False
        raise


def sync_bytes(fd: int) -> bool:
    """
    Sync the bytes of an open file; return whether its file system supports that.

    Raises:
        OSError: the disk fails.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
        return False
    return True


def syncs_names(directory: Path | str) -> bool:
    """Return whether the names in a directory can be synced; True if unknown."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return sync_directory(fd)
    except OSError:  # the disk fails, as a later write will report
        return True
    finally:
        os.close(fd)


def sync_path(path: Path | str) -> None:
    """
    Sync the bytes of a file, or the names in a directory, if the file system supports that.

    Raises:
        OSError: the file or directory cannot be read, or the disk fails.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_directory(fd)
    finally:
        os.close(fd)


@contextmanager
def _hidden_file(path: Path, data: bytes, mode: int, durable: bool) -> Iterator[str]:
    """Write a new hidden file and yield its name; the caller renames it, and an error removes it."""
    fd, name = _open_hidden_file(path)
    with os.fdopen(fd, "wb") as file:  # stays open, and so locked, until the rename
        try:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(fd)
            yield name
        except BaseException:
            with suppress(OSError):
                if names_file(name, fd):
                    os.unlink(name)
            raise


def _open_hidden_file(path: Path) -> tuple[int, str]:
    """Open an empty hidden file for the new contents; return its descriptor and its name."""
    hidden = part_path(str(path))
    with suppress(OSError):  # if the disk is full or fails, ``mkstemp`` below reports it
        fd = _open_hidden(hidden)
        if fd is not None:
            return fd, hidden
    import tempfile  # takes 5 ms with its imports, and is rarely needed

    return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")


def _open_hidden(name: str) -> int | None:
    """
    Open, lock and empty the hidden file; return None if it is in use, or is not a regular file of this user.
    """
    for _ in range(2):
        try:
            fd = open_locked(name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, mode=0o600)
        except CannotLock:
            if not os.lstat(name).st_size:  # empty, so just created by this call
                os.unlink(name)
            raise
        if fd is None:
            return None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                break
            if found.st_nlink == 1:
                if found.st_size:
                    os.ftruncate(fd, 0)
                fd, opened = -1, fd
                return opened
            os.unlink(name)  # a second name, left by a process killed before it removed that name
        finally:
            if fd >= 0:
                os.close(fd)
    return None


# Removing hidden names: a second name of a complete file, left by a process that was killed while it gave the
# file its name, or a part that is no longer needed since the file is complete.


def remove_stale_link(target: str, inside: int | None = None) -> None:
    """
    Remove the hidden name of a complete file that also has its final name; do nothing if the names belong to
    different files.

    Without this call the hidden name would stay for ever, since a rerun finds the file complete. The removal
    needs the part's lock, so that a part that another process has just begun is not removed.

    Args:
        target: a path without symbolic links; with ``inside``, a name alone.
        inside: the descriptor of the target's directory.
    """
    _remove(target, inside, lambda fd: names_file(target, fd, inside))


def remove_part(target: str, inside: int | None = None) -> None:
    """
    Remove the part of a complete file, unless a process writes to the part or another user owns it.

    Args:
        target, inside: see ``remove_stale_link``.
    """
    _remove(target, inside, lambda fd: os.fstat(fd).st_uid == os.geteuid())


def _remove(target: str, inside: int | None, may_go: Callable[[int], bool]) -> None:
    part = part_path(target, inside)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError):  # usually there is no part; a remaining part does no harm
        fd = os.open(part, flags, dir_fd=inside)
        try:
            if not (stat.S_ISREG(os.fstat(fd).st_mode) and may_go(fd)):
                return
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if names_file(part, fd, inside):
                os.unlink(part, dir_fd=inside)
        finally:
            os.close(fd)


# Files without a name until they are complete: no process sees an incomplete file, and a killed process
# leaves nothing. Only Linux supports this, on some file systems (``O_TMPFILE``); ``can_name`` checks that.

_FLAGS: int = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_TMPFILE", 0)
_TEMPORARY_ERRORS = (*FULL, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EROFS)
"""Errors that may be temporary, so they do not show what the file system supports."""


def open_unnamed(directory: str, mode: int = 0o666, inside: int | None = None) -> int:
    """
    Open a new file without a name on the file system of a directory.

    Args:
        mode: the permissions of the file, before the umask.
        inside: the descriptor of the directory to which a relative ``directory`` refers.

    Raises:
        OSError: the directory does not exist, or its file system does not support unnamed files.
    """
    return os.open(directory, _FLAGS, mode, dir_fd=inside)


def open_spool(directory: str) -> int:
    """
    Open a new temporary file in a directory, for data that is too large for memory. The file disappears when
    it is closed.

    Raises:
        OSError: the directory does not exist, or no file can be created in it.
    """
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):
            return open_unnamed(directory, 0o600)
    name = f"{directory}/spool.{os.urandom(8).hex()}"
    fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    return fd


def give_name(fd: int, path: str, inside: int | None = None) -> None:
    """
    Give an unnamed file its name.

    Args:
        inside: the descriptor of the directory to which a relative ``path`` refers.

    Raises:
        FileExistsError: the name is taken; its file stays.
        FileNotFoundError: the directory does not exist.
        OSError: the disk failed.
    """
    # The source path is absolute, so ``src_dir_fd`` has no effect; but only with a descriptor does Python
    # follow the symbolic link, which linkat needs.
    source = f"/proc/self/fd/{fd:d}"
    os.link(source, path, src_dir_fd=fd, dst_dir_fd=inside, follow_symlinks=True)


def can_name(directory: str) -> bool:
    """
    Return whether a directory's file system supports unnamed files, as far as can be found out.

    This check gives no file a name, so a killed process leaves nothing. Even if the result is True,
    ``give_name`` can be forbidden later.

    Raises:
        OSError: the check is impossible now: the directory does not exist, the disk is full, or too many
            files are open.
    """
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        fd = open_unnamed(directory)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in _TEMPORARY_ERRORS:
            raise
        return False
    try:
        give_name(fd, directory)
    except FileExistsError:  # linkat has followed the link in /proc, so giving a name works
        return True
    except OSError as error:
        if error.errno in _TEMPORARY_ERRORS:
            raise
        return False
    finally:
        os.close(fd)
    return False


# What a power cut does to a file whose bytes were synced before it had a name, and whose directory was synced
# after:
#
# * tmpfs has nothing to sync. XFS has one log in the order of events: the name follows the bytes.
# * ext4 with a journal behaves like XFS. Without a journal, and on ext2, the inode on the disk still says
#   that the file has no name, until the file is synced again: a check of the file system then removes the
#   name.
# * btrfs, with most kernels, logs nothing of an unnamed file. If another process syncs the directory between
#   naming and the second sync, it logs the name without the bytes, so an empty file would be left.
#
# Of other file systems nothing is known: on them, a file has a hidden name from the beginning.

_SYNCED: dict[int, UnnamedSync] = {0x01021994: "once", 0x58465342: "once", 0xEF53: "twice"}


def unnamed_sync(fd: int) -> UnnamedSync:
    """
    Return how unnamed files become durable on the file system of an open file or directory.

    Returns:
        which ``fsync`` of the file is needed before its directory is synced: ``once``: before the file gets
            its name; ``twice``: before and after; ``never``: even then, a power cut may leave the name
            without the bytes.
    """
    if not hasattr(os, "O_TMPFILE"):
        return "never"
    asked = _fstatfs()
    return "never" if asked is None else _SYNCED.get(asked(fd), "never")


@lru_cache(maxsize=1)
def _fstatfs() -> Callable[[int], int] | None:
    """Return a function that returns the type number of a descriptor's file system, 0 if unknown."""
    import ctypes  # importing it takes a millisecond, and most commands do not need it

    try:
        function = ctypes.CDLL(None).fstatfs
    except (OSError, AttributeError):
        return None

    def kind(fd: int) -> int:
        found = (ctypes.c_long * 32)()  # the type is the first of 120 bytes
        return 0 if function(fd, found) else found[0]

    return kind


# Permissions of hidden and unnamed files, and the umask.

_NO_MODES = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


def change_mode(fd: int, mode: int) -> None:
    """
    Set the permissions of an open file; a file system without permissions is not an error.

    Raises:
        OSError: the permissions were not set, since the disk is full or fails, so others might read the file.
    """
    try:
        os.fchmod(fd, mode)
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise


def current_umask() -> int:
    """
    Return the permission bits that new files of this process do not get.

    Linux reports them. On other systems they can only be read by setting them: for a moment, another thread
    may create a file that other users cannot read.
    """
    with suppress(OSError, StopIteration, ValueError), open("/proc/self/status", "rb") as status:
        return int(next(line for line in status if line.startswith(b"Umask:"))[6:], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
