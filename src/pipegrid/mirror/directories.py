"""
The directories of a mirror, kept open (``MAX_OPEN_DIRECTORIES``).

Every path is walked one part at a time, without following symbolic links, so that no index and no link
leads out of the mirror's own.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress

from pipegrid.disk.files import FULL
from pipegrid.disk.reading import is_directory
from pipegrid.disk.replacing import sync_directory
from pipegrid.errors import PipegridError
from pipegrid.mirror.wanted import BadEntry, MirrorError, quoted

MAX_OPEN_DIRECTORIES = 256
MAX_ABSENT = 4096
"""Directories that are known not to be there; nobody else makes them while the lock is held."""

READ_BYTES = 1 << 20
_LINKED = "link.new"
_NO_LINKS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
)
"""How file systems say that a file cannot have another name, or no more of them; no disk fails so."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Directories:
    """
    Those below one.

    Args:
        make: it is made if it is not there; else all are absent then.

    Raises:
        MirrorError: it cannot be used.

    Attributes:
        path: of the one, absolute.
        root: its descriptor; -1: it is not there.
    """

    def __init__(self, path: str, make: bool = True) -> None:
        self.path = path
        self._open: OrderedDict[str, int] = OrderedDict()
        self._absent: set[str] = set()
        try:
            if make:
                os.makedirs(path, exist_ok=True)
            self.root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not make:
                self.root = -1
                return
            raise self.error(error, "be used as a mirror") from error

    def close(self) -> None:
        """Close all descriptors; a second call does nothing."""
        while self._open:
            os.close(self._open.popitem()[1])
        if self.root >= 0:
            os.close(self.root)
            self.root = -1

    def forget(self, path: str) -> None:
        """Let go of one that goes away."""
        fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)

    def prune(self, path: str, stays: str) -> None:
        """Remove a directory that is empty, and those above that are empty then; but for one."""
        while path and path != stays:
            parent, name = self.place(path, make=False)
            if parent is None:
                break
            self.forget(path)
            try:
                os.rmdir(name, dir_fd=parent)
            except OSError:
                break
            path = os.path.dirname(path)

    def folds(self, name: str) -> bool:
        """Return whether what is called so in the root is called so in letters of the other case as well."""
        return self.root >= 0 and is_same(name, self.root, name.swapcase(), self.root)

    def place(self, path: str, make: bool) -> tuple[int | None, str]:
        """Return the descriptor of the directory that a path is in, as ``directory``, and its last part."""
        above, _, name = path.rpartition("/")
        return self.directory(above, make), name

    def directory(self, path: str, make: bool) -> int | None:
        """Return the descriptor of a directory below the root; None if it is not there and not to be made."""
        if not path:
            return self.root if self.root >= 0 else None
        known = self._open
        fd = known.get(path)
        if fd is not None:
            known.move_to_end(path)
            return fd
        if not make and path in self._absent:
            return None
        above, _, name = path.rpartition("/")
        parent = self.directory(above, make)
        if parent is None:
            self._note_absent(path)
            return None
        try:
            if make:
                fd = make_directory(parent, name, path in self._absent)
            else:
                fd = os.open(name, _DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            self._note_absent(path)
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise self.in_the_way(path, "a symbolic link or a file") from error
            raise self.error(error, f"hold {quoted(path)}") from error
        self._absent.discard(path)
        known[path] = fd
        if len(known) > MAX_OPEN_DIRECTORIES:
            os.close(known.popitem(last=False)[1])
        return fd

    def files(self, below: str, without: str) -> Iterator[str]:
        """
        Yield the paths of all that is below a directory, links and devices too.

        Args:
            without: this directory is left out; and others that have one of its name are, which are not ours.
        """
        ahead = [below]
        while ahead:
            directory = ahead.pop()
            fd = self.directory(directory, make=False)
            if fd is None:
                continue
            with os.scandir(fd) as entries:
                names = [(entry.name, is_directory(entry)) for entry in entries]
            if directory and (without, True) in names:
                continue
            for name, is_below in sorted(names):
                path = f"{directory}/{name}" if directory else name
                if path == without:
                    continue
                if is_below:
                    ahead.append(path)
                else:
                    yield path

    def _note_absent(self, path: str) -> None:
        if len(self._absent) >= MAX_ABSENT:
            self._absent.clear()
        self._absent.add(path)

    def forget_absent(self) -> None:
        """Somebody else has made directories."""
        self._absent.clear()

    def sync(self, paths: Iterable[str]) -> None:
        """Make new names durable: what goes away after that is named by nothing that could come back."""
        for path in paths:
            fd = self.directory(path, make=False)
            if fd is not None:
                try:
                    sync_directory(fd)
                except OSError as error:
                    raise self.error(error, f"hold {quoted(path)}") from error

    def open_file(self, path: str, name: str) -> int | None:
        """
        Open a file to read it, whatever it is; returns its descriptor, None if it is not there.

        Args:
            name: what errors call it.

        Raises:
            BadEntry: it is a symbolic link, or its path leads over one.
            MirrorError: it cannot be read.
        """
        directory, last = self.place(path, make=False)
        if directory is None:
            return None
        try:
            return os.open(
                last, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self.in_the_way(name, "a symbolic link") from error
            raise self.error(error, f"read {quoted(name)}") from error

    def in_the_way(self, path: str, what: str) -> BadEntry:
        """Return the error for a path that leads over something else, or to it."""
        return BadEntry(
            f"{quoted(path)} cannot be kept in {self.path}: there is {what} in its place; move it away"
        )

    def error(self, error: OSError | PipegridError, what: str) -> MirrorError:
        """Return the sentence for an error of the operating system, or for one that stands for such a one."""
        if isinstance(error, MirrorError):  # it has its sentence
            return error
        if isinstance(error, PipegridError):
            if not isinstance(error.__cause__, OSError):
                return MirrorError(f"{self.path} cannot {what}: {error}")
            error = error.__cause__
        if error.errno in FULL:
            return self.full(what)
        reason = os.strerror(error.errno) if error.errno else str(error)
        return MirrorError(f"{self.path} cannot {what}: {reason}")

    def full(self, what: str) -> MirrorError:
        """Return the sentence for a disk that takes no more."""
        return MirrorError(
            f"{self.path} cannot {what}: the disk is full; make room and run it again,"
            " it goes on where it stopped"
        )


def make_directory(parent: int, name: str, absent: bool = False) -> int:
    """Open a directory in another one, by its descriptor, made if it is not there, as when ``absent``."""
    if not absent:
        with suppress(FileNotFoundError):
            return os.open(name, _DIRECTORY, dir_fd=parent)
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=parent)
    return os.open(name, _DIRECTORY, dir_fd=parent)


def exists(name: str, directory: int) -> bool:
    """Return whether a regular file of this name is in a directory, by its descriptor."""
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def is_same(name: str, directory: int, other: str, other_directory: int) -> bool:
    """Return whether two names are those of one file."""
    try:
        return os.path.samestat(
            os.stat(name, dir_fd=directory, follow_symlinks=False),
            os.stat(other, dir_fd=other_directory, follow_symlinks=False),
        )
    except FileNotFoundError:
        return False


def link_as(name: str, directory: int, other: str, other_directory: int, by_way_of: int) -> None:
    """
    Give a file another name, by way of a third directory; where there are no hard links there is none.

    Raises:
        OSError: there could be one, but for the disk, or what is in its place.
    """
    if is_same(name, directory, other, other_directory):
        return
    with suppress(FileNotFoundError):
        os.unlink(_LINKED, dir_fd=by_way_of)
    try:
        os.link(name, _LINKED, src_dir_fd=directory, dst_dir_fd=by_way_of)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return
        raise
    os.rename(_LINKED, other, src_dir_fd=by_way_of, dst_dir_fd=other_directory)


def read_at(name: str, directory: int, most_bytes: int) -> bytes | None:
    """Return a file that is no longer than that; None: there is none. A symbolic link is not followed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except OSError:
        return None
    with open(fd, "rb") as file:
        return file.read() if os.fstat(fd).st_size <= most_bytes else None


def hash_file(fd: int, algorithm: str) -> bytes:
    """Return the hash of an open file, from its beginning."""
    from hashlib import new as new_hash  # OpenSSL takes three milliseconds to load

    hasher = new_hash(algorithm)
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    offset = 0
    while size := os.preadv(fd, [buffer], offset):
        hasher.update(view[:size])
        offset += size
    return hasher.digest()
