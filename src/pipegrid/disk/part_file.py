"""
A file that appears under its name only when it is whole, and whose part outlives an interruption.

Until then its bytes are in ``.NAME.pipegrid-part`` beside it: one name for one target, so that whoever writes
to the target next, be it after ``kill -9``, finds the part, and takes it up or clears it away. Nothing here
knows what the bytes should be; whoever takes a part up has to check every byte of it.

Hazards, and what meets them:

* two processes write to one target: the part is locked (``flock``), and the second one says so;
* between opening and locking the part gets its final name, or goes: the name is looked at again under the
  lock;
* a process was killed between giving the part its name and taking the hidden one away (``secondname``), or
  somebody made a hard link: a part with another name besides is left to that, and a new one is begun;
* a symbolic link, a pipe or another user's file has the hidden name: a link is never followed, nothing but
  a regular file of our own is written to, and a link or a file of somebody else is removed, if the system
  lets us;
* the part was made under a laxer umask: what this one forbids is taken away.

**Durability.** The bytes are synced before the file gets its name, and the name after that, so that neither
an empty nor a torn file can be found after a power cut, and what was said to be done is. Of a part that a
disk fails to sync nothing is kept. A file system that cannot sync is no reason to fail.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pipegrid.disk.atomic_write import part_path, remove_stale_link, sync_path
from pipegrid.disk.private_output import change_mode, current_umask, interruptible
from pipegrid.disk.safe_open import names_file, open_to_write, own_descriptor
from pipegrid.errors import SinkError, naming

_MOST_PIECES = 512  # of one write; systems take 1024 at least

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})  # none there


class PartInUse(SinkError):
    """Another process writes to the same file at this moment."""


class TargetExists(SinkError):
    """There is a file already, or since a moment ago, that may not be replaced."""


class PartFile:
    """
    A file that is written from its beginning on; ``publish`` gives it its name, ``leave`` does not.

    Also a context manager: leaving it without an error publishes. Writes are appended in order, and may
    pass over bytes that are there already. A device or pipe is written to directly, and has no part; so is a
    descriptor of this process that the path means.

    Args:
        path: where the file shall be. A link there stays, and what it points to is replaced.
        replace: replace an existing file, whose permissions stay, unless links are not followed.
        resume: take up what an interrupted writer has left; otherwise it is cleared away, and nothing is
            left by us.
        follow: a link there; otherwise it, or a device or pipe, is replaced as a file would be.
        inside: a descriptor of the directory, open until the part is let go of, by which all is done instead
            of by the path; then no link is followed.

    Attributes:
        path: as it was given; what errors call it.
        part: where the bytes are until then; None for a device or pipe.
        found_bytes: how much was there, to be checked.
        position: where the next write goes.

    Raises:
        SinkError: the file exists and may not be replaced, cannot be written, or somebody else is writing it.
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
            # Of /dev/stdout, or what a shell makes of >(...), no resolved name leads to the pipe behind it.
            there = path if follow else self._target
            mode: int | None = os.stat(there, dir_fd=inside, follow_symlinks=follow).st_mode
        except OSError as error:
            # A part could be made beside what can never have this name: all would be fetched for nothing.
            if error.errno == errno.ENAMETOOLONG:
                raise self._error(error) from error
            if error.errno == errno.ELOOP and not replace:
                raise self._exists() from error
            mode = None
        if mode is not None and not (follow or stat.S_ISDIR(mode)):
            mode = stat.S_IFREG
        elif mode is not None and stat.S_ISREG(mode) and own_descriptor(path) is not None:
            # What a shell has opened for us, as with ``>>``, goes on where it is.
            mode = stat.S_IFIFO
        if mode is not None and stat.S_ISDIR(mode):
            raise SinkError(f"cannot write {path}: it is a directory; name a file in it")
        if mode is not None and stat.S_ISREG(mode):
            self._mode = mode & 0o777 if follow else None
            if not replace:
                remove_stale_link(self._target, inside)
                raise self._exists()
        try:
            if mode is not None and not stat.S_ISREG(mode):
                with interruptible():  # a pipe, for its reader
                    self._fd = open_to_write(path)
            else:
                self._open_part()
        except OSError as error:
            raise self._error(error) from error

    @property
    def name(self) -> str:
        """What an error about it calls it, as ``open`` files have it."""
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
                if not os.lstat(part, dir_fd=self._directory).st_size:  # it was made just now
                    os.unlink(part, dir_fd=self._directory)
            # Without locks two writers would not know of each other: then each has a name of its own.
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
        """Open or make the part, and lock it; what is in the way is removed, unless it is somebody's work."""
        for _ in range(100):
            fd = self._open_or_make(part)
            try:
                if self._is_ours(part, fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        raise SinkError(f"cannot write {self.path}: {part} is replaced again and again; remove it")

    def _open_or_make(self, part: str) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(part, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=self._directory)
        except FileExistsError:
            pass
        try:
            return os.open(part, flags, dir_fd=self._directory)
        except FileNotFoundError:
            return self._open_or_make(part)
        except OSError as error:
            status = os.lstat(part, dir_fd=self._directory)
            ours = status.st_uid == os.geteuid()
            if stat.S_ISLNK(status.st_mode) or (stat.S_ISREG(status.st_mode) and not ours):
                os.unlink(part, dir_fd=self._directory)
                return self._open_or_make(part)
            raise self._in_the_way(part) from error

    def _is_ours(self, part: str, fd: int) -> bool:
        """Lock it; False if it is to be opened again, since the name leads elsewhere now."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._in_the_way(part)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PartInUse(
                f"another process is writing to {self.path}; wait for it, or choose another name"
            ) from None
        if names_file(part, fd, self._directory):
            status = os.fstat(fd)  # under the lock
            if status.st_nlink == 1 and status.st_uid == os.geteuid():
                self._tighten(fd, status.st_mode)
                return True
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=self._directory)
        return False

    def _in_the_way(self, part: str) -> SinkError:
        return SinkError(
            f"cannot write {self.path}: {part}, where its part file belongs, is not a part file of "
            "PipeGrid; remove it"
        )

    def _tighten(self, fd: int, mode: int) -> None:
        mask = current_umask()
        if mode & mask & 0o777:
            os.fchmod(fd, stat.S_IMODE(mode) & ~mask)

    def _set_mode(self, more: int = 0) -> None:
        if self._mode is not None:  # who could not read the file that was there, cannot now
            change_mode(self._fd, self._mode | more)

    # Bytes.

    def fileno(self) -> int:
        """Return its descriptor, for those who write to it by themselves, from the beginning on."""
        return self._fd

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of it; ``OSError`` if that fails."""
        self.write_pieces([data])
        return len(data)

    def write_pieces(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write the pieces one behind the other; ``OSError`` if that fails."""
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
        """The next bytes are there already."""
        self.position += length
        self._has_whole_pieces = True

    def read(self, offset: int, length: int) -> bytes:
        """Return what is there, or less where it ends; any thread may."""
        return os.pread(self._fd, length, offset)

    def begin(self, length: int) -> int:
        """
        Write from the beginning on; what is behind so many bytes goes.

        Returns:
            how much is there.
        """
        self.position = 0
        if self.part is not None:
            self._cut(length)
            self.found_bytes = os.fstat(self._fd).st_size
        return self.found_bytes

    def forget_rest(self) -> None:
        """What is behind ``position`` is of no use."""
        if self.part is not None:
            self._cut(self.position)

    def _cut(self, length: int) -> None:
        if os.fstat(self._fd).st_size > length:
            os.ftruncate(self._fd, length)

    def flush(self) -> None:
        """Do nothing, for those who flush any file: ``write`` keeps nothing in a buffer."""

    def publish(self) -> None:
        """
        Make it durable and give it its name; takes as long as the disk does, so any thread may.

        Raises:
            SinkError: it cannot be written, or a file of that name has come up meanwhile; the part is still
                there.
        """
        if self._fd < 0:
            return
        self._publishing = True
        try:
            if self.part is not None:
                self._set_mode()
                self.sync()
                self._give_name(self.part)
                self._sync_directory()
        except BaseException as error:
            self._publishing = False
            if isinstance(error, OSError):
                raise self._error(error) from error
            raise
        self.close()

    def leave(self) -> str | None:
        """
        Let go of it unfinished; a part that may be of use stays. Nothing, if it is being published just now.

        Returns:
            the name of the part, if there is anything in it for another time.
        """
        if self._publishing:
            return None  # in another thread, which finishes, and lets go of it
        if self._fd < 0 or self.part is None:
            self.close()
            return None
        # Of a write that failed half way through the first segment nothing could be used.
        kept = self._resume and (self._has_whole_pieces or self.found_bytes > 0)
        if not kept:
            with suppress(OSError):
                os.unlink(self.part, dir_fd=self._directory)
        self.close()
        return self.part if kept else None

    def close(self) -> None:
        """Let go of the lock and the file."""
        fd, self._fd = self._fd, -1
        with suppress(OSError):  # it may be none
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
        try:  # unless another client took it meanwhile
            os.link(part, self._target, **inside)
        except FileExistsError:
            raise self._exists() from None
        except OSError:  # a file system without hard links
            with suppress(FileNotFoundError):
                os.lstat(self._target, dir_fd=self._directory)
                raise self._exists() from None
            os.rename(part, self._target, **inside)
        else:
            with suppress(OSError):  # whoever found it to be done has done so; or the next one does
                os.unlink(part, dir_fd=self._directory)

    def sync(self) -> None:
        """Have all bytes on the disk; ``publish`` does so, too, and ``OSError`` is raised if that fails."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                self._resume = False  # it may read well, and another sync succeed, with bytes lost
                raise

    def _sync_directory(self) -> None:
        with suppress(OSError):  # one that may not be read, or a system that cannot
            if self._directory is not None:
                os.fsync(self._directory)
            else:
                sync_path(os.path.dirname(self._target))

    def _exists(self) -> TargetExists:
        text = f"{self.path} exists already; choose another name, or add replace=True"
        return naming(TargetExists(text), "replace=True")

    def _error(self, error: OSError) -> SinkError:
        return SinkError(f"cannot write {self.path}: {error.strerror}")
