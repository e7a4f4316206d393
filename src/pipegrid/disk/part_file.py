"""
Files that appear under their name only when they are complete, with part files that survive an interruption.
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

_MOST_PIECES = 512  # pieces per write; systems accept at least 1024

# Errors of file systems without locks.
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


class PartInUse(SinkError):
    """Another process is already writing the file."""


class TargetExists(SinkError):
    """The target exists, perhaps created just now, and must not be replaced."""


def exists_already(path: str) -> TargetExists:
    """Return the error for a file that exists and must not be replaced."""
    text = f"{path} exists already; choose another name, or add replace=True"
    return naming(TargetExists(text), "replace=True")


class PartFile:
    """
    A file that is written from its beginning; ``publish`` gives it its name, ``leave`` does not.

    Before that, its bytes are in ``.NAME.pipegrid-part`` next to it: one part name per target, so that the
    next writer of the target finds the part even after ``kill -9``, and resumes or removes it. A writer that
    resumes must check every byte of the part. Also a context manager: leaving it without an error publishes.
    Writes are appended in order, and may skip bytes that exist already. If the path names a device, a pipe or
    a descriptor of this process, it is written directly, without a part.

    Hazards, and what is done about them:

    * two processes write one target: the part is locked (``flock``), and the second process gets an error;
    * another process renames or removes the part between opening and locking: the name is checked again under
      the lock;
    * the part has a second name, since a process was killed while publishing it, or by a hard link: that file
      is not written, and a new part is begun;
    * a symbolic link or another user's regular file has the part's name: it is removed, if permitted. If a
      pipe, device or directory has the name, the writer gets an error;
    * the part was created with a laxer umask: its permissions are reduced.

    The bytes are synced before the file gets its name, and the name is synced after that, so that a power cut
    leaves neither an empty nor an incomplete file. If the disk fails to sync a part, the part is not kept. It
    is not an error if the file system cannot sync.

    Args:
        path: of the file. If it is a symbolic link, the link stays, and its target is replaced.
        replace: replace an existing file; its permissions stay, unless links are not followed.
        resume: continue the part of an interrupted writer; otherwise that part is emptied, and ``leave``
            removes it.
        follow: follow a symbolic link; otherwise a link, device or pipe is replaced as a file would be.
        inside: a descriptor of the directory, to use instead of the path's directory; it must stay open as
            long as the part is. Then ``follow`` must be False.

    Attributes:
        path: the path as given; used in errors.
        part: the path of the part; None for a device or pipe.
        found_bytes: how many bytes an earlier writer has left; they must be checked.
        position: where the next write goes.

    Raises:
        SinkError: the file exists and must not be replaced, cannot be written, or another process is writing
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
        self._mode: int | None = None  # permissions of the file to replace
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
            # Use the path as given: the resolved name of /dev/stdout, or of a shell's >(...), does not lead
            # to the pipe.
            there = path if follow else self._target
            mode: int | None = os.stat(there, dir_fd=inside, follow_symlinks=follow).st_mode
        except OSError as error:
            # The part's name may be short enough while the final name is too long: fail now, before a useless
            # download.
            if error.errno == errno.ENAMETOOLONG:
                raise self._error(error) from error
            if error.errno == errno.ELOOP and not replace:
                raise exists_already(path) from error
            mode = None
        if mode is not None and not (follow or stat.S_ISDIR(mode)):
            mode = stat.S_IFREG
        elif mode is not None and stat.S_ISREG(mode) and own_descriptor(path) is not None:
            # A descriptor that a shell has opened, as with ``>>``, is written from its current position.
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
                with interruptible():  # opening a pipe waits for its reader
                    self._fd = open_to_write(path)
            else:
                self._open_part()
        except OSError as error:
            raise self._error(error) from error

    @property
    def name(self) -> str:
        """The path, for errors; file objects of ``open`` have the same attribute."""
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
                if not os.lstat(part, dir_fd=self._directory).st_size:  # empty, so new
                    os.unlink(part, dir_fd=self._directory)
            # Without locks two writers would not notice each other, so each writer gets its own part.
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
        """
        Open or create the part, and lock it. A link, another user's file, or a file with a second name is
        removed first.

        Raises:
            PartInUse: another process has locked the part.
            SinkError: a pipe, device or directory has the part's name.
        """
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
        """Return the descriptor of the part, and whether this call created the part."""
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
        """
        Lock the part; return False if it must be opened again, since its name now belongs to another file, or
        since this file could not be used and was removed.
        """
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
            status = os.fstat(fd)  # the file may have changed before the lock
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
        ):  # users who could not read the replaced file cannot read this one either
            change_mode(self._fd, self._mode | more)

    # Bytes.

    def fileno(self) -> int:
        """Return the descriptor, for callers that write the whole file themselves."""
        return self._fd

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all bytes; raise ``OSError`` if that fails."""
        self.write_pieces([data])
        return len(data)

    def write_pieces(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write consecutive pieces; raise ``OSError`` if that fails."""
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
        """Move the position forward over bytes that exist already."""
        self.position += length
        self._has_whole_pieces = True

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the part, or fewer at its end. May be called in any thread."""
        return os.pread(self._fd, length, offset)

    def begin(self, length: int) -> int:
        """
        Start to write at the beginning again, and remove existing bytes after the first ``length``.

        Returns:
            how many existing bytes remain.
        """
        is_used = self.found_bytes or self.position or self._has_whole_pieces
        self.position = 0
        if self.part is not None and is_used:  # otherwise the part is new and empty
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
        """
        Do nothing, since ``write`` does not buffer; the method exists because callers flush file objects.
        """

    def publish(self, syncs_name: bool = True) -> None:
        """
        Make the file durable and give it its name. Waits for the disk; may be called in any thread.

        Args:
            syncs_name: make the name durable, too; otherwise the caller syncs the directory.

        Raises:
            SinkError: the file cannot be written, or another file of that name has appeared meanwhile; the
                part still exists.
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
        Close the unfinished file; the part stays if a later writer can resume it. Does nothing while the file
        is being published.

        Returns:
            the name of the part, if it stays.
        """
        if self._publishing:
            return None  # the thread that publishes the file also closes it
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
        """Release the lock, and close the file."""
        fd, self._fd = self._fd, -1
        with suppress(OSError):  # the file may already be closed
            os.close(fd)

    @property
    def closed(self) -> bool:
        """Whether the file was published, left or closed."""
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
        try:  # fails if another process has created the target meanwhile
            os.link(part, self._target, **inside)
        except FileExistsError:
            raise exists_already(self.path) from None
        except OSError:  # the file system has no hard links
            with suppress(FileNotFoundError):
                os.lstat(self._target, dir_fd=self._directory)
                raise exists_already(self.path) from None
            os.rename(part, self._target, **inside)
        else:
            with suppress(OSError):  # otherwise the next writer removes it
                os.unlink(part, dir_fd=self._directory)

    def sync(self) -> None:
        """Sync all bytes, as ``publish`` does; raise ``OSError`` if that fails."""
        try:
            sync_bytes(self._fd)
        except OSError:
            self._resume = False  # bytes may be lost, even if reading and a further sync succeed
            raise

    def _sync_directory(self) -> None:
        if self._directory is not None:
            sync_directory(self._directory)
        else:
            sync_name(self._target)

    def _error(self, error: OSError) -> SinkError:
        return SinkError(f"cannot write {self.path}: {error.strerror}")
