"""A local directory held by its identity, so that no rename or link can redirect writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pipegrid.core.text import printable
from pipegrid.disk.atomic_write import part_path
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import SinkError

# A ``DirectoryFd`` always means the directory that had its path at first, even if another one has the path
# now.
#
# In a directory that others may write to, another process can replace a subdirectory by a link after it was
# checked. So every entry is created, renamed or changed by its name and a descriptor that was verified to
# belong to the right directory, never by a path. A descriptor is open for one step, or as long as one part
# file.

_FLAGS = os.O_DIRECTORY | os.O_CLOEXEC


class DirectoryFd:
    """
    A directory into which files are written.

    Args:
        identity: the device and inode of the directory; by default, of the directory that has the path now.
        is_new: whether this run has created the directory.

    Attributes:
        is_new: whether this run has created the directory, so that no earlier run can have left a part file
            in it.

    Raises:
        SinkError: the directory does not exist.
    """

    def __init__(
        self, path: str, identity: tuple[int, int] | None = None, is_new: bool = False
    ) -> None:
        self.path = path
        self.is_new = is_new
        self._identity = identity or self._look()
        self._is_lost = False

    def check_again(self) -> None:
        """
        Check the directory with ``check``, but only if an earlier check has failed.

        Raises:
            SinkError: as for ``check``.
        """
        if self._is_lost:
            self.check()

    def check(self) -> None:
        """
        Check that the path still leads to this directory.

        Raises:
            SinkError: the directory was moved, removed, or replaced, perhaps by a link.
        """
        self._is_lost = True
        if self._look() != self._identity:
            raise self._replaced()
        self._is_lost = False

    def open(self) -> int:
        """
        Return a descriptor of the directory, never of another one that replaced it. The caller must close it.

        Raises:
            SinkError: as for ``check``.
        """
        try:
            try:
                fd = os.open(self.path, os.O_RDONLY | _FLAGS)
            except PermissionError:  # the directory may be writable but not readable
                fd = os.open(self.path, getattr(os, "O_PATH", os.O_RDONLY) | _FLAGS)
        except (OSError, ValueError) as error:
            self._is_lost = True
            raise failed("write in", self.path, error) from error
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != self._identity:
            os.close(fd)
            self._is_lost = True
            raise self._replaced()
        return fd

    @contextmanager
    def entered(self) -> Iterator[int]:
        """Open the directory for one step; yields its descriptor."""
        fd = self.open()
        try:
            yield fd
        finally:
            os.close(fd)

    def _replaced(self) -> SinkError:
        return SinkError(
            f"another directory has replaced {printable(self.path)} meanwhile, so nothing more is written "
            "there; run the same command again"
        )

    def _look(self) -> tuple[int, int]:
        try:
            found = os.stat(self.path)
        except (OSError, ValueError) as error:
            raise failed("write in", self.path, error) from error
        return found.st_dev, found.st_ino


class DirectoryPartFile(PartFile):
    """
    A file that is being written into a directory: see ``PartFile``; a link with its name is replaced, not
    followed.

    Args:
        home: the directory of the file.
        path: the path of the file; only its last component is used, the rest is for messages.
        replace: whether an existing file or link is replaced.
        keeps_mode: whether the new file gets the permissions of the file that it replaces.
        inside: a descriptor from ``home.open``, if the caller keeps it open as long as this file; None: open
            one.
    """

    def __init__(
        self,
        home: DirectoryFd,
        path: str,
        replace: bool,
        *,
        keeps_mode: bool = False,
        inside: int | None = None,
    ) -> None:
        self._home = home
        self._inside: int | None = home.open() if inside is None else None
        try:
            there = self._inside if inside is None else inside
            super().__init__(path, replace, follow=False, inside=there)
        except BaseException:
            self._release()
            raise
        if keeps_mode:
            with suppress(OSError):
                found = os.stat(os.path.basename(path), dir_fd=there, follow_symlinks=False)
                self._mode = found.st_mode & 0o777 if stat.S_ISREG(found.st_mode) else None
                self._set_mode(0o600)

    def close(self) -> None:
        """Close the file and its directory."""
        super().close()
        self._release()

    def publish(self, syncs_name: bool = True) -> None:
        """Give the file its name, if its directory was not replaced."""
        self._home.check()
        super().publish(syncs_name)

    def _release(self) -> None:
        fd, self._inside = self._inside, None
        if fd is not None:
            os.close(fd)


def unmade(path: str, error: Exception) -> SinkError:
    """Return the error for a directory that could not be created."""
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return SinkError(
            f"cannot make the directory {printable(path)}: a file is in its way; choose another directory, "
            "or move the file away"
        )
    return failed("make the directory", path, error)


def failed(what: str, path: str, error: Exception) -> SinkError:
    """Return the error for a failed operation on the disk."""
    reason = getattr(error, "strerror", None) or str(error)
    return SinkError(f"cannot {what} {printable(path)}: {reason}")


# Replacement of a file or link. If creating the replacement fails, the old one stays.


def link_instead(to: str, name: str, inside: int) -> None:
    """
    Replace a file or link by a symbolic link.

    Args:
        to: the target of the link.
        name: the name of the old entry and of the link, in the directory that is open as ``inside``.

    Raises:
        OSError: the link cannot be created; the old entry still exists.
    """
    hidden = part_path(name, inside)
    try:
        os.symlink(to, hidden, dir_fd=inside)
    except FileExistsError:  # a killed process has left this link
        os.unlink(hidden, dir_fd=inside)
        os.symlink(to, hidden, dir_fd=inside)
    try:
        os.replace(hidden, name, src_dir_fd=inside, dst_dir_fd=inside)
    except BaseException:
        with suppress(OSError):
            os.unlink(hidden, dir_fd=inside)
        raise


def directory_instead(mode: int, name: str, inside: int) -> None:
    """
    Replace a file or link by a directory; arguments and errors are those of ``link_instead``.

    A directory cannot be renamed onto a file, so the file is first renamed to the name of its part file. If
    the process is killed before the directory exists, the file keeps that name.
    """
    hidden = part_path(name, inside)
    os.replace(name, hidden, src_dir_fd=inside, dst_dir_fd=inside)
    try:
        os.mkdir(name, mode, dir_fd=inside)
    except BaseException:
        os.replace(hidden, name, src_dir_fd=inside, dst_dir_fd=inside)
        raise
    os.unlink(hidden, dir_fd=inside)
