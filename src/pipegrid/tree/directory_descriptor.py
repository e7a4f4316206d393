"""A local directory held by its descriptor, so that no rename or link redirects what is written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pipegrid.core.text import printable
from pipegrid.disk.atomic_write import part_path
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import SinkError

# The local directory that something comes into: the one that was there first, whatever has its name by now.
#
# In a directory that others may write to, a link can come into the place of one that was just looked at. So
# what is made, named or changed in a directory goes by a descriptor that was proved to be that
# directory's, and a name in it, never by a path again. A descriptor lives as long as one step, or one
# file's part.

_FLAGS = os.O_DIRECTORY | os.O_CLOEXEC


class DirectoryFd:
    """
    A directory that things come into.

    Args:
        identity: its device and inode; by default those of what has its name now.

    Raises:
        SinkError: it is not there.
    """

    def __init__(self, path: str, identity: tuple[int, int] | None = None) -> None:
        self.path = path
        self._identity = identity or self._look()

    def check(self) -> None:
        """
        Raises:
            SinkError: it was moved or removed, or something else, such as a link, has come into its way.
        """
        if self._look() != self._identity:
            raise self._replaced()

    def open(self) -> int:
        """
        Return a descriptor of it, which the caller closes: no other directory, whatever comes into its place.

        Raises:
            SinkError: as of ``check``.
        """
        try:
            try:
                fd = os.open(self.path, os.O_RDONLY | _FLAGS)
            except PermissionError:  # one that may be written to and not be listed
                fd = os.open(self.path, getattr(os, "O_PATH", os.O_RDONLY) | _FLAGS)
        except (OSError, ValueError) as error:
            raise failed("write in", self.path, error) from error
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != self._identity:
            os.close(fd)
            raise self._replaced()
        return fd

    @contextmanager
    def entered(self) -> Iterator[int]:
        """Open it for one step."""
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
    A file on its way into a directory: see ``PartFile``; a link that has its name is replaced, not followed.

    Args:
        home: the directory that it comes into.
        path: where it shall be; of it only the name counts, and the rest is for errors.
        replace: what is there, if it is no directory.
        keeps_mode: a file that is replaced leaves its permissions behind.
    """

    def __init__(
        self, home: DirectoryFd, path: str, replace: bool, *, keeps_mode: bool = False
    ) -> None:
        self._home = home
        self._inside: int | None = home.open()
        try:
            super().__init__(path, replace, follow=False, inside=self._inside)
        except BaseException:
            self._release()
            raise
        if keeps_mode:
            with suppress(OSError):
                found = os.stat(os.path.basename(path), dir_fd=self._inside, follow_symlinks=False)
                self._mode = found.st_mode & 0o777 if stat.S_ISREG(found.st_mode) else None
                self._set_mode(0o600)

    def close(self) -> None:
        """Let go of the file, and of its directory."""
        super().close()
        self._release()

    def publish(self) -> None:
        """Give it its name, if its directory is still in its place."""
        self._home.check()
        super().publish()

    def _release(self) -> None:
        fd, self._inside = self._inside, None
        if fd is not None:
            os.close(fd)


def unmade(path: str, error: Exception) -> SinkError:
    """Return the error for a directory that could not be made."""
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return SinkError(
            f"cannot make the directory {printable(path)}: a file is in its way; choose another directory, "
            "or move the file away"
        )
    return failed("make the directory", path, error)


def failed(what: str, path: str, error: Exception) -> SinkError:
    """Return the error for something that could not be done on the disk."""
    reason = getattr(error, "strerror", None) or str(error)
    return SinkError(f"cannot {what} {printable(path)}: {reason}")


# Something comes into the place of a file or link: what was there goes only when it has come.


def link_instead(to: str, name: str, inside: int) -> None:
    """
    Make a link in the place of what is there.

    Args:
        to: where it leads.
        name: of both, in the directory that is open as ``inside``.

    Raises:
        OSError: it cannot be made; what was there still is.
    """
    hidden = part_path(name, inside)
    try:
        os.symlink(to, hidden, dir_fd=inside)
    except FileExistsError:  # left by a process that was killed
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
    Make a directory in the place of a file or link; arguments and errors as of ``link_instead``.

    No directory takes a file's name from it, so the file steps aside: a process that is killed before the
    directory is there leaves it beside, under the name that a part of it would have.
    """
    hidden = part_path(name, inside)
    os.replace(name, hidden, src_dir_fd=inside, dst_dir_fd=inside)
    try:
        os.mkdir(name, mode, dir_fd=inside)
    except BaseException:
        os.replace(hidden, name, src_dir_fd=inside, dst_dir_fd=inside)
        raise
    os.unlink(hidden, dir_fd=inside)
