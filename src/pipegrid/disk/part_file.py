"""
Files that appear under their name only when they are complete, and whose part file survives an
interruption.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pipegrid.disk.atomic_write import (
    change_mode,
    current_umask,
    part_path,
    remove_stale_link,
    sync_bytes,
    sync_directory,
    sync_name,
)
from pipegrid.disk.interruptible_pipe_writes import interruptible
from pipegrid.disk.safe_open import names_inode, open_to_write, own_descriptor
from pipegrid.errors import SinkError, naming

_MOST_PIECES = 512  # the number in one write; systems accept at least 1024

# errors of file systems without locks
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


class PartInUse(SinkError):
    """Another process is writing the same file."""


class TargetExists(SinkError):
    """A file exists, perhaps created just now, that may not be replaced."""


def exists_already(path: str) -> TargetExists:
    """Return the error for a file that may not be replaced."""
    text = f"{path} exists already; choose another name, or add replace=True"
    return naming(TargetExists(text), "replace=True")


class PartFile:
    """
    A file that is written from its beginning on; ``publish`` gives it its name, ``leave`` does not.

    Until then its bytes are in ``.NAME.pipegrid-part`` next to it: one name per target, so that the next
    writer of the target, even after ``kill -9``, finds the part, and resumes or removes it. A writer that
    resumes has to check every byte of it. Also a context manager: leaving it without an error publishes.
    Writes are appended in order, and may skip bytes that exist already. A device, a pipe or a descriptor of
    this process that the path names is written directly, without a part.

    Hazards, and what is done about them:

    * two processes write one target: the part is locked (``flock``), and the second one raises an error;
    * between opening and locking, the part is renamed or removed: the name is checked again under the lock;
    * the part has a second name, since a process was killed while publishing it, or by a hard link: it is
      left alone, and a new one is begun;
    * a symbolic link, a pipe or another user's file has the hidden name: links are never followed, only
      regular files of this user are written, and the rest is removed if permitted;
    * the part was created with a laxer umask: its permissions are reduced.

    The bytes are synced before the file gets its name, and then the name, so that a power cut leaves
    neither an empty nor an incomplete file. If a disk fails to sync a part, nothing of it is kept. A file
    system that cannot sync is not an error.

    Args:
        path: of the file. If it is a symbolic link, that stays, and its target is replaced.
        replace: replace an existing file; its permissions stay, unless links are not followed.
        resume: continue what an interrupted writer has left; otherwise that is removed, and no part is
            left.
        follow: follow a symbolic link; otherwise a link, device or pipe is replaced as a file would be.
        inside: a descriptor of the directory, open as long as the part is, to use instead of the path; then
            links are not followed.

    Attributes:
        path: as it was given; used in errors.
        part: the path of the part; None for a device or pipe.
        found_bytes: how many bytes an earlier writer has left, to be checked.
        position: where the next write goes.

    Raises:
        SinkError: the file exists and may not be replaced, cannot be written, or another process is writing
            it.
    """

    def __init__(
        self,
        path: str,
        replace: bool = False,
        resume: bool = True,
        follow: bool = True,
        inside: int | None = None,
    ) -> None:
        self.path = path
        self._directory = inside
        self.found_bytes = self.position = 0
        self.part: str | None = None
        self._replace = replace
        self._resume = resume
        self._mode: int | None = None  # of the file that is replaced
        directory, name = os.path.split(path)
        if inside is not None:
            self._target = name
        elif follow:
            self._target = os.path.realpath(path)
        else:
            self._target = os.path.join(os.path.realpath(directory), name)
        self._fd = -1
        self._publishing = self._has_whole_pieces = False
        try:
            # The resolved name of /dev/stdout, or of a shell's >(...), does not lead to the pipe.
            there = path if follow else self._target
            mode: int | None = os.stat(there, dir_fd=inside, follow_symlinks=follow).st_mode
        except OSError as error:
            # The part may be possible where the final name is not: then the download would be useless.
            if error.errno == errno.ENAMETOOLONG:
                raise self._error(error) from error
            if error.errno == errno.ELOOP and not replace:
                raise exists_already(path) from error
            mode = None
        if mode is not None and not (follow or stat.S_ISDIR(mode)):
            mode = stat.S_IFREG
        elif mode is not None and stat.S_ISREG(mode) and own_descriptor(path) is not None:
            # A descriptor that a shell has opened, as with ``>>``, is written from its current position on.
            mode = stat.S_IFIFO
        if mode is not None and stat.S_ISDIR(mode):
            raise SinkError(f"cannot write {path}: it is a directory; name a file in it")
        if mode is not None and stat.S_ISREG(mode):
            self._mode = mode & 0o777 if follow else None
            if not replace:
                remove_stale_link(self._target, inside)
                raise exists_already(path)
        try:
            if mode is not None and not stat.S_ISREG(mode):
                with interruptible():  # a pipe, which waits for its reader
                    self._fd = open_to_write(path)
            else:
                self._open_part()
        except OSError as error:
            raise self._error(error) from error

    @property
    def name(self) -> str:
        """The name for errors, as ``open`` files have it."""
        return self.path

    # Opening.

    def _open_part(self) -> None:
        part = part_path(self._target, self._directory)
        try:
            self._fd = self._locked(part)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            with suppress(OSError):
                if not os.lstat(part, dir_fd=self._directory).st_size:  # it was created just now
                    os.unlink(part, dir_fd=self._directory)
            # Without locks two writers would not know of each other: then each has its own part.
            part = part_path(f"{self._target}.{os.urandom(6).hex()}", self._directory)
            self._resume = False
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(part, flags, 0o666, dir_fd=self._directory)
        self.part = part
        self._set_mode(0o600)
        if not self._resume:
            os.ftruncate(self._fd, 0)
        self.found_bytes = os.fstat(self._fd).st_size

    def _locked(self, part: str) -> int:
        """Open or create the part, and lock it; remove what has its name, unless it is in use."""
        for _ in range(100):
            fd, is_new = self._open_or_make(part)
            try:
                if self._is_ours(part, fd, is_new):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        raise SinkError(f"cannot write {self.path}: {part} is replaced again and again; remove it")

    def _open_or_make(self, part: str) -> tuple[int, bool]:
        """Return the descriptor of the part, and whether it is new."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            new = os.open(part, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=self._directory)
            return new, True
        except FileExistsError:
            pass
        try:
            return os.open(part, flags, dir_fd=self._directory), False
        except FileNotFoundError:
            return self._open_or_make(part)
        except OSError as error:
            status = os.lstat(part, dir_fd=self._directory)
            ours = status.st_uid == os.geteuid()
            if stat.S_ISLNK(status.st_mode) or (stat.S_ISREG(status.st_mode) and not ours):
                os.unlink(part, dir_fd=self._directory)
                return self._open_or_make(part)
            raise self._in_the_way(part) from error

    def _is_ours(self, part: str, fd: int, is_new: bool) -> bool:
        """Lock the part; False if it must be opened again, since its name is now that of another file."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._in_the_way(part)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PartInUse(
                f"another process is writing to {self.path}; wait for it, or choose another name"
            ) from None
        if names_inode(part, (status.st_dev, status.st_ino), self._directory):
            status = os.fstat(fd)  # checked again under the lock
            if status.st_nlink == 1 and status.st_uid == os.geteuid():
                if not is_new and (laxer := status.st_mode & current_umask() & 0o777):
                    os.fchmod(fd, stat.S_IMODE(status.st_mode) & ~laxer)
                return True
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=self._directory)
        return False

    def _in_the_way(self, part: str) -> SinkError:
        return SinkError(
            f"cannot write {self.path}: {part}, where its part file belongs, is not a part file of "
            "PipeGrid; remove it"
        )

    def _set_mode(self, more: int = 0) -> None:
        if (
            self._mode is not None
        ):  # users who could not read the replaced file cannot read this one
            change_mode(self._fd, self._mode | more)

    # Bytes.

    def fileno(self) -> int:
        """Return the descriptor, for callers that write to it themselves, from the beginning on."""
        return self._fd

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of it; ``OSError`` if that fails."""
        self.write_pieces([data])
        return len(data)

    def write_pieces(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write consecutive pieces; ``OSError`` if that fails."""
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        views.reverse()
        while views:
            batch = views[: -_MOST_PIECES - 1 : -1]
            if self.part is not None:
                written = os.pwritev(self._fd, batch, self.position)
            else:
                with interruptible(self.fileno):
                    written = os.writev(self._fd, batch)
            self.position += written
            while views and written >= len(views[-1]):
                written -= len(views.pop())
            if written:
                views[-1] = views[-1][written:]
        self._has_whole_pieces = self.position > 0

    def skip(self, length: int) -> None:
        """Skip bytes that exist already."""
        self.position += length
        self._has_whole_pieces = True

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the part, fewer at its end; in any thread."""
        return os.pread(self._fd, length, offset)

    def begin(self, length: int) -> int:
        """
        Write from the beginning on; remove bytes from ``length`` on.

        Returns:
            how many bytes remain.
        """
        is_used = self.found_bytes or self.position or self._has_whole_pieces
        self.position = 0
        if self.part is not None and is_used:  # otherwise it is new, and empty
            self._cut(length)
            self.found_bytes = os.fstat(self._fd).st_size
        return self.found_bytes

    def forget_rest(self) -> None:
        """Remove the bytes after ``position``."""
        if self.part is not None:
            self._cut(self.position)

    def _cut(self, length: int) -> None:
        if os.fstat(self._fd).st_size > length:
            os.ftruncate(self._fd, length)

    def flush(self) -> None:
        """Do nothing, for callers that flush any file: ``write`` does not buffer."""

    def publish(self, syncs_name: bool = True) -> None:
        """
        Make the file durable and give it its name; takes as long as the disk does; in any thread.

        Args:
            syncs_name: make the name durable, too; otherwise the caller syncs the directory.

        Raises:
            SinkError: it cannot be written, or a file of that name has appeared meanwhile; the part still
                exists.
        """
        if self._fd < 0:
            return
        self._publishing = True
        try:
            if self.part is not None:
                self._set_mode()
                self.sync()
                self._give_name(self.part)
                if syncs_name:
                    self._sync_directory()
        except BaseException as error:
            self._publishing = False
            if isinstance(error, OSError):
                raise self._error(error) from error
            raise
        self.close()

    def leave(self) -> str | None:
        """
        Release the unfinished file; a useful part stays. Does nothing while the file is being published.

        Returns:
            the name of the part, if it contains anything to resume.
        """
        if self._publishing:
            return None  # another thread publishes it, and then closes it
        if self._fd < 0 or self.part is None:
            self.close()
            return None
        # A write that failed within the first segment left nothing that can be resumed.
        kept = self._resume and (self._has_whole_pieces or self.found_bytes > 0)
        if not kept:
            with suppress(OSError):
                os.unlink(self.part, dir_fd=self._directory)
        self.close()
        return self.part if kept else None

    def close(self) -> None:
        """Release the lock and the file."""
        fd, self._fd = self._fd, -1
        with suppress(OSError):  # it may be closed
            os.close(fd)

    @property
    def closed(self) -> bool:
        """Whether it was published, or left."""
        return self._fd < 0

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.leave()
            return
        try:
            self.publish()
        finally:
            self.leave()

    def _give_name(self, part: str) -> None:
        fd = self._directory
        inside: dict[str, Any] = {} if fd is None else {"src_dir_fd": fd, "dst_dir_fd": fd}
        if self._replace:
            os.replace(part, self._target, **inside)
            return
        try:  # unless another process has created it meanwhile
            os.link(part, self._target, **inside)
        except FileExistsError:
            raise exists_already(self.path) from None
        except OSError:  # a file system without hard links
            with suppress(FileNotFoundError):
                os.lstat(self._target, dir_fd=self._directory)
                raise exists_already(self.path) from None
            os.rename(part, self._target, **inside)
        else:
            with suppress(OSError):  # another process may have removed it, or the next writer does
                os.unlink(part, dir_fd=self._directory)

    def sync(self) -> None:
        """Sync all bytes, as ``publish`` does; raises ``OSError``."""
        try:
            sync_bytes(self._fd)
        except OSError:
            self._resume = False  # it may read well, and another sync succeed, with bytes lost
            raise

    def _sync_directory(self) -> None:
        if self._directory is not None:
            sync_directory(self._directory)
        else:
            sync_name(self._target)

    def _error(self, error: OSError) -> SinkError:
        return SinkError(f"cannot write {self.path}: {error.strerror}")
