"""
The directory that a mirror is written to: names, staging, and atomic replacement; also a variant that is only
read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property

from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.atomic_write import sync_directory
from pipegrid.disk.file_system_calls import FULL
from pipegrid.disk.safe_open import is_directory
from pipegrid.errors import PipegridError
from pipegrid.mirror import HIDDEN, MANIFEST
from pipegrid.mirror.archive_file import ArchiveFile, BadEntry, MirrorError, holder, quoted
from pipegrid.mirror.hash_cache import HashCache, is_noted_at
from pipegrid.mirror.stat_cache import QuickCheck, StatCache

# The directories of a mirror, of which at most ``MAX_OPEN_DIRECTORIES`` are kept open.
#
# Every path is opened one part at a time, without following symbolic links, so that neither an index nor a
# link leads out of the mirror's directory.

MAX_OPEN_DIRECTORIES = 256
MAX_ABSENT = 4096
"""Maximum number of missing directories that are remembered; the lock keeps other runs from making any."""

READ_BYTES = 1 << 20
_LINKED = "link.new"
_OWN_NEW = "own.new"
_NO_LINKS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
)
"""Errors of a file system that supports no (or no more) hard links; a failing disk gives other errors."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Directories:
    """
    The directories below a root.

    Args:
        make: whether to make the root if it does not exist. False: if there is no root, all directories count
            as absent.

    Raises:
        MirrorError: the root cannot be used.

    Attributes:
        path: the absolute path of the root.
        root: the root's descriptor; -1 if the root does not exist.
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
        """Close a directory's descriptor, since the directory will be removed."""
        fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)

    def prune(self, path: str, stays: str) -> None:
        """Remove a directory if it is empty, and then each parent that has become empty; never ``stays``."""
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
        """Return whether a name in the root is found with upper and lower case swapped, too."""
        return self.root >= 0 and is_same(name, self.root, name.swapcase(), self.root)

    def place(self, path: str, make: bool) -> tuple[int | None, str]:
        """
        Return the descriptor of the directory of a path, as from ``directory``, and the last part of the
        path.
        """
        above, _, name = path.rpartition("/")
        return self.directory(above, make), name

    def directory(self, path: str, make: bool) -> int | None:
        """
        Return the descriptor of a directory below the root; None if it does not exist and ``make`` is
        false.
        """
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
        Yield the paths of everything below a directory, including links and devices.

        Args:
            without: the path of a directory that is left out. Other directories that contain a directory of
                this name are other mirrors, and are left out, too.
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
        """Forget which directories are absent, since another process has made some."""
        self._absent.clear()

    def sync(self, paths: Iterable[str]) -> None:
        """
        Sync these directories, so that the new names in them are durable before files that they replace are
        removed.
        """
        for path in paths:
            fd = self.directory(path, make=False)
            if fd is not None:
                with self.reporting(f"hold {quoted(path)}"):
                    sync_directory(fd)

    def open_file(self, path: str, name: str) -> int | None:
        """
        Open a file of any type for reading; return its descriptor, or None if it does not exist.

        Args:
            name: of the file, for errors.

        Raises:
            BadEntry: the file is a symbolic link, or its path leads through one.
            MirrorError: the file cannot be read.
        """
        directory, last = self.place(path, make=False)
        if directory is None:
            return None
        try:
            return os.open(last, _READ, dir_fd=directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self.in_the_way(name, "a symbolic link") from error
            raise self.error(error, f"read {quoted(name)}") from error

    def in_the_way(self, path: str, what: str) -> BadEntry:
        """Return the error for a path that something else occupies, such as a symbolic link."""
        return BadEntry(
            f"{quoted(path)} cannot be kept in {self.path}: {what} has its name; move that away"
        )

    def error(self, error: OSError | PipegridError, what: str) -> MirrorError:
        """Return the ``MirrorError`` for an error of the operating system, or of ``disk.durability``."""
        if isinstance(error, MirrorError):  # it has been converted already
            return error
        if isinstance(error, PipegridError):
            if not isinstance(error.__cause__, OSError):
                return MirrorError(f"{self.path} cannot {what}: {error}")
            error = error.__cause__
        if error.errno in FULL:
            return self.full(what)
        reason = os.strerror(error.errno) if error.errno else str(error)
        return MirrorError(f"{self.path} cannot {what}: {reason}")

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Raise ``MirrorError`` instead of an error of the operating system; see ``error``."""
        try:
            yield
        except OSError as error:
            raise self.error(error, what) from error

    def full(self, what: str) -> MirrorError:
        """Return the error for a full disk."""
        return MirrorError(
            f"{self.path} cannot {what}: the disk is full; free some space and run it again, and it resumes"
        )


def make_directory(parent: int, name: str, absent: bool = False) -> int:
    """
    Open a directory in a parent directory, and make it if it does not exist. ``absent``: it is known not to
    exist.
    """
    if not absent:
        with suppress(FileNotFoundError):
            return os.open(name, _DIRECTORY, dir_fd=parent)
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=parent)
    return os.open(name, _DIRECTORY, dir_fd=parent)


def exists(name: str, directory: int) -> bool:
    """Return whether a directory, given by its descriptor, contains a regular file of this name."""
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def is_same(name: str, directory: int, other: str, other_directory: int) -> bool:
    """Return whether two names are names of the same file."""
    try:
        return os.path.samestat(
            os.stat(name, dir_fd=directory, follow_symlinks=False),
            os.stat(other, dir_fd=other_directory, follow_symlinks=False),
        )
    except FileNotFoundError:
        return False


def link_as(name: str, directory: int, other: str, other_directory: int, through: int) -> None:
    """
    Add another name to a file atomically, with a temporary name in the directory ``through``. Does nothing
    without hard links.

    Raises:
        OSError: the disk failed, or something other than a file has the name.
    """
    if is_same(name, directory, other, other_directory):
        return
    with suppress(FileNotFoundError):
        os.unlink(_LINKED, dir_fd=through)
    try:
        os.link(name, _LINKED, src_dir_fd=directory, dst_dir_fd=through)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return
        raise
    os.rename(_LINKED, other, src_dir_fd=through, dst_dir_fd=other_directory)


def hash_file(fd: int, algorithm: str) -> bytes:
    """Return the hash of the whole content of an open file."""
    from hashlib import new as new_hash  # OpenSSL takes three milliseconds to load

    hasher = new_hash(algorithm)
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    offset = 0
    while size := os.preadv(fd, [buffer], offset):
        hasher.update(view[:size])
        offset += size
    return hasher.digest()


# The directory of a mirror: how files arrive and are published. Synchronous, for one thread.
#
# Unpublished files are in ``HIDDEN/incoming``, named by their hash, so that the next run can resume an
# interrupted one. Only one process at a time has the lock.

STAGED = f"{HIDDEN}/staged"
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class WrongResult(MirrorError):
    """
    A file that was made here from patches or a packed file does not have the hash that the archive gives.
    """


class DestinationLocked(MirrorError):
    """Another process is writing to the destination or reading it; try again later."""


class Destination:
    """
    One mirror's directory, which is made if it does not exist, and locked.

    Raises (methods, too):
        MirrorError: the directory cannot be used, the disk is full, or another process uses the mirror.

    Attributes:
        manifest: the path of the list of the last complete run.
        unnoted_files: how many wrong files are still recorded as right, since the records cannot be changed.
        folds: whether the file system ignores case in names; see ``PathCollisions``.
        serial_urls: URLs of the mirrors that this run has found unable to pipeline; see ``Scheduler``.
        changes: how many published names this process has added or removed.
    """

    device = unnoted_files = 0
    folds = False

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._count = 0
        self.serial_urls: set[str] = set()
        self.changes = 0
        hidden = os.path.join(self.path, HIDDEN)
        self.manifest = os.path.join(hidden, MANIFEST)
        self._open(hidden)
        self.error = self._directories.error
        self.reporting = self._directories.reporting
        self.sync_names = self._directories.sync
        try:
            if not self._begin(os.path.join(hidden, "lock")):
                raise DestinationLocked(
                    f"another process is mirroring to {self.path}, or checking it; wait until it has finished"
                )
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise self.error(error, "be used as a mirror") from error
            raise

    def _open(self, hidden: str) -> None:
        self._directories = Directories(self.path)
        seen = StatCache(os.path.join(hidden, "seen"), self.manifest)
        self._verified = HashCache(os.path.join(hidden, "verified.sqlite"), seen)

    def _begin(self, lock: str) -> bool:
        self.device = os.fstat(self._directories.root).st_dev
        self._hidden = make_directory(self._directories.root, HIDDEN)
        self.folds = self._directories.folds(HIDDEN)
        self._incoming = make_directory(self._hidden, "incoming")
        self._lock = disk.open_locked(lock, os.O_RDWR | os.O_CREAT)
        return self._lock is not None

    def __repr__(self) -> str:
        return f"<Destination {self.path}>"

    def close(self) -> None:
        """Close all files, and release the lock."""
        self._directories.close()
        for name in ("_incoming", "_hidden", "_lock"):
            fd = self.__dict__.pop(name, None)
            if fd is not None:
                os.close(fd)
        self._verified.close()

    def forked(self) -> None:
        """
        Adapt to a fork: this process is the child, and shares everything with its parent except the database.
        """
        self._verified.forked()

    def has_changed(self) -> None:
        """Adapt to the fact that other processes have made directories."""
        self._directories.forget_absent()

    def where(self, path: str) -> str:
        """Return the full path of a file of the mirror, for callers that open it themselves."""
        return f"{self.path}/{path}"

    # Existing files.

    def new_quick_check(self) -> QuickCheck:
        """Return an object that checks lines of the manifest by file status alone."""
        return QuickCheck(self._directories.root, self._verified.seen.rows)

    def is_there(self, wanted: ArchiveFile, paranoid: bool = False, staged: bool = False) -> bool:
        """
        Return whether the file exists and is right, according to the records, or by hashing it now.

        Args:
            paranoid: hash the file even if it is recorded as right.
            staged: a staged file counts, too; a wrong staged file is removed.

        Raises:
            BadEntry: the path leads through a symbolic link, or something other than a file has the name.
        """
        if staged:
            path = f"{STAGED}/{wanted.path}"
            if self._is_at(path, wanted, paranoid):
                return True
            # The staged file is from an interrupted run, and must not be mistaken for the new one.
            self._remove(path)
        return self._is_at(wanted.path, wanted, paranoid)

    def _is_at(self, path: str, wanted: ArchiveFile, paranoid: bool) -> bool:
        directory, name = self._directories.place(path, make=False)
        if directory is None:
            return False
        if not paranoid and is_noted_at(directory, name, wanted, self._verified.seen):
            return True
        fd = self._directories.open_file(path, wanted.path)
        if fd is None:
            return False
        try:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise self._directories.in_the_way(wanted.path, "a directory")
            if not stat.S_ISREG(status.st_mode):
                raise self._directories.in_the_way(wanted.path, "no file")
            if wanted.size is not None and status.st_size != wanted.size:
                return False
            if not paranoid and self._verified.is_known(fd, wanted, status):
                return True
            if hash_file(fd, wanted.algorithm) != wanted.digest:
                if not self._verified.withdraw(fd, wanted, status):
                    self.unnoted_files += 1
                return False
            if not (paranoid and self._verified.is_known(fd, wanted, status)):
                self.note(fd, wanted)  # not again: the record changes the file's status
            return True
        except OSError as error:
            raise self.error(error, f"read {quoted(wanted.path)}") from error
        finally:
            os.close(fd)

    def note(self, fd: int, wanted: ArchiveFile) -> None:
        """Record that the open file is right."""
        self._verified.note(fd, wanted)

    # Received files.

    def open_incoming(self, wanted: ArchiveFile) -> tuple[int, str]:
        """Make a file for received bytes; return its descriptor and its name in ``incoming``."""
        self._count += 1
        name = f"{wanted.digest.hex()}.{self._count}"
        try:
            return os.open(name, _NEW_FILE, 0o644, dir_fd=self._incoming), name
        except FileExistsError:  # left by an earlier run
            return self.open_incoming(wanted)

    def open_own(self, name: str) -> int:
        """Make a file of the mirror's own in ``incoming``; return its descriptor."""
        return os.open(name, _NEW_FILE, 0o644, dir_fd=self._incoming)

    def discard(self, name: str) -> None:
        """Remove an incomplete or wrong file from ``incoming``."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._incoming)

    def publish(self, name: str, path: str, staged: bool = False) -> str:
        """
        Move a received file to its final name; return the directory that has changed.

        Args:
            staged: move the file below ``STAGED`` instead, where clients do not see it until ``release``.

        Raises:
            BadEntry: the path leads through a symbolic link, or a directory has the name.
            OSError: the file could not be renamed.
        """
        if staged:
            path = f"{STAGED}/{path}"
        directory, last = self._directories.place(path, make=True)
        assert directory is not None
        try:
            os.rename(name, last, src_dir_fd=self._incoming, dst_dir_fd=directory)
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            raise self._directories.in_the_way(path, "a directory") from error
        self.changes += not staged
        return self.where(os.path.dirname(path))

    def release(self, paths: Iterable[str]) -> None:
        """
        Move staged files to their final names, in the order of ``paths``; skip paths that are not staged.

        Raises:
            BadEntry: as for ``publish``.
            MirrorError: a file cannot be renamed.
        """
        changed: dict[str, None] = {}
        for path in paths:
            old, name = self._directories.place(f"{STAGED}/{path}", make=False)
            new, _ = self._directories.place(path, make=True)
            if old is None or new is None:
                continue
            try:
                os.rename(name, name, src_dir_fd=old, dst_dir_fd=new)
            except FileNotFoundError:
                continue
            except (IsADirectoryError, NotADirectoryError) as error:
                raise self._directories.in_the_way(path, "a directory") from error
            except OSError as error:
                raise self.error(error, f"hold {quoted(path)}") from error
            self.changes += 1
            changed[os.path.dirname(path)] = None
        self._directories.sync(changed)

    def move(self, path: str, other: str) -> None:
        """
        Rename an unpublished file; do nothing if the file does not exist.

        Raises:
            MirrorError: the file cannot be renamed.
        """
        old, name = self._directories.place(path, make=False)
        if old is None or not exists(name, old):
            return
        new, last = self._directories.place(other, make=True)
        with self.reporting(f"hold {quoted(other)}"):
            os.rename(name, last, src_dir_fd=old, dst_dir_fd=new)

    def link(self, path: str, other: str) -> None:
        """
        Add another published name, such as a hash, to a staged or existing file.

        Does nothing on a file system without hard links.

        Raises:
            BadEntry: a path leads through a symbolic link.
            MirrorError: the name cannot be added.
        """
        for where in (f"{STAGED}/{path}", path):
            old, name = self._directories.place(where, make=False)
            if old is None or not exists(name, old):
                continue
            new, last = self._directories.place(other, make=True)
            assert new is not None
            with self.reporting(f"hold {quoted(other)}"):
                link_as(name, old, last, new, self._incoming)
            self.changes += 1
            return

    def is_linked(self, path: str, other: str) -> bool:
        """Return whether a staged or existing file already has ``other`` as its second name."""
        try:
            return os.path.samefile(self.staged_path(path), self.where(other))
        except OSError:
            return False

    def has_hash(self, path: str, algorithm: str, digest: bytes) -> bool:
        """Return whether a staged or existing file has this hash."""
        for where in (f"{STAGED}/{path}", path):
            fd = self._directories.open_file(where, path)
            if fd is not None:
                try:
                    return hash_file(fd, algorithm) == digest
                except OSError as error:
                    raise self.error(error, f"read {quoted(path)}") from error
                finally:
                    os.close(fd)
        return False

    def clear_staged(self) -> None:
        """Remove all staged files; those that were released are not staged any more."""
        for path in sorted(self.others(frozenset(), STAGED), reverse=True):
            self.delete(path)

    def accept(
        self, fd: int, name: str, wanted: ArchiveFile, staged: bool, sha256: bytes | None = None
    ) -> bool:
        """
        If the content of an open file of ``incoming`` is right, sync the file and give it its final name;
        return whether it is right.

        Args:
            staged: as for ``publish``.
            sha256: the SHA-256 of the content; None if unknown.
        """
        if wanted.size not in (None, os.fstat(fd).st_size):
            return False
        known = sha256 if wanted.algorithm == "sha256" else None
        if (known or hash_file(fd, wanted.algorithm)) != wanted.digest:
            return False
        os.fsync(fd)
        self.note(fd, wanted)
        self.publish(name, wanted.path, staged)
        return True

    def make(self, wanted: ArchiveFile, write: Callable[[int], bytes]) -> None:
        """
        Make a file locally instead of fetching it, and stage it.

        Args:
            write: writes the content to the given descriptor; returns its SHA-256.

        Raises:
            WrongResult: the content does not have the hash of ``wanted``.
            MirrorError: the file cannot be written.
        """
        with self.reporting(f"hold {quoted(wanted.path)}"):
            fd, name = self.open_incoming(wanted)
        try:
            if not self.accept(fd, name, wanted, True, write(fd)):
                raise WrongResult(f"the {quoted(wanted.path)} made here is not that of the archive")
        except BaseException as error:
            self.discard(name)
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise self.error(error, f"hold {quoted(wanted.path)}") from error
            raise
        finally:
            os.close(fd)

    def stage(self, files: Mapping[str, bytes]) -> None:
        """
        Write files of the mirror's own below ``STAGED``, durably; skip those that already exist with the same
        content.

        Raises:
            MirrorError: a file cannot be written.
        """
        for path, data in files.items():
            # An unchanged file keeps its modification time, with which clients check whether it has changed.
            if self.read(path, len(data)) != data:
                with self.reporting(f"hold {quoted(path)}"):
                    self._write_own(data)
                    self.publish(_OWN_NEW, path, staged=True)

    def _write_own(self, data: bytes) -> None:
        """Write a new file of the mirror's own durably to ``incoming``, under a temporary name."""
        self.discard(_OWN_NEW)
        fd = self.open_own(_OWN_NEW)
        try:
            disk.write_all(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def keep_own(self, name: str, data: bytes) -> None:
        """
        Replace a file of the mirror's own in ``HIDDEN``, atomically.

        Raises:
            MirrorError: the file cannot be written.
        """
        with self.reporting("record its files"):
            self._write_own(data)
            os.rename(_OWN_NEW, name, src_dir_fd=self._incoming, dst_dir_fd=self._hidden)

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """
        Return the content of a file; None if it is missing, unreadable, a symbolic link, or larger than
        ``most_bytes``.
        """
        directory, name = self._directories.place(path, make=False)
        if directory is None:
            return None
        try:
            fd = os.open(name, _READ, dir_fd=directory)
        except OSError:
            return None
        with open(fd, "rb") as file:
            return file.read() if os.fstat(fd).st_size <= most_bytes else None

    def holds(self, files: Mapping[str, bytes]) -> bool:
        """Return whether all of these files exist with this content."""
        return all(self.read(path, len(data)) == data for path, data in files.items())

    def staged_path(self, path: str) -> str:
        """Return the full path of a file that is staged or published; a staged one is preferred."""
        staged = self.where(f"{STAGED}/{path}")
        return staged if os.path.lexists(staged) else self.where(path)

    def leftovers(self) -> dict[bytes, str]:
        """
        Return names of an interrupted run's files in ``incoming``, one for each hash that a file should have;
        remove all other files there.
        """
        found: dict[bytes, str] = {}
        for name in os.listdir(self._incoming):
            digest = name.partition(".")[0]
            try:
                key = bytes.fromhex(digest)
            except ValueError:
                key = b""
            if not key or key in found:
                self.discard(name)
            else:
                found[key] = name
        return found

    def take_up(self, name: str, wanted: ArchiveFile, staged: bool = False) -> bool:
        """Publish a file of an interrupted run if it is complete and right; otherwise remove it."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._incoming)
        try:
            if self.accept(fd, name, wanted, staged):
                return True
        finally:
            os.close(fd)
        self.discard(name)
        return False

    # Unwanted files.

    def others(self, kept: frozenset[str], below: str = "") -> Iterator[str]:
        """Yield the paths of all files, links and devices that are not in ``kept``."""
        holds = holder(kept, self.folds)
        for path in self._directories.files(below, HIDDEN):
            if not holds(path):
                yield path

    def delete_others(self, paths: Iterable[str], dry_run: bool = False) -> list[str]:
        """Remove all files except ``paths``; return the removed ones. ``dry_run``: only return them."""
        others = list(self.others(frozenset(paths)))
        for path in () if dry_run else others:
            self.delete(path)
        return others

    def _remove(self, path: str) -> None:
        directory, name = self._directories.place(path, make=False)
        if directory is not None:
            with self.reporting(f"remove {quoted(path)}"), suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
                self.changes += not path.startswith(f"{HIDDEN}/")

    def delete(self, path: str) -> None:
        """
        Remove a file, and its parents inside the mirror that become empty.

        Raises:
            MirrorError: the file cannot be removed.
        """
        self._remove(path)
        self._verified.forget(path)
        self._directories.prune(os.path.dirname(path), HIDDEN)


# A mirror's directory that is not changed: for a dry run, or a user who may only read.
#
# Nothing is made in the directory, not even the directory itself, and nothing is recorded. The lock is taken
# as a shared one, if it exists and can be opened, so that several processes may read, but none writes at the
# same time.
#
# A dry run fetches into a directory for temporary files, which replaces ``HIDDEN``. That directory is locked
# while the run lasts; the next run removes the unlocked directory of an interrupted run.

_SCRATCH = "pipegrid-mirror-"
"""The prefix of the names of directories for temporary files."""

_LEFT_S = 3600.0
"""Minimum age at which an unlocked directory for temporary files is removed: a new one is not locked yet."""

_COPIED = ("compressed", "filters", "checked", "reindexed")
"""Files that are copied from ``HIDDEN``, since they are read, and some of them get new entries."""


class ReadOnlyDestination(Destination):
    """
    Like ``Destination``, but nothing is changed, and the directory need not exist.

    Attributes:
        unnoted_files: how many records were not written or removed, since this destination is only read.
    """

    def _open(self, hidden: str) -> None:
        self._scratch: str | None = None
        self._directories = _Directories(
            self.path, lambda: self._hidden, lambda: self._scratch or "TMPDIR"
        )
        seen = _Seen(os.path.join(hidden, "seen"), self.manifest)
        self._verified = self._unnoted = _Verified(os.path.join(hidden, "verified.sqlite"), seen)

    def _begin(self, lock: str) -> bool:
        self.folds = self._directories.folds(HIDDEN)
        try:
            self._lock = disk.open_locked(lock, os.O_RDONLY, shared=True)
        except OSError:
            return True  # there is no mirror, or this user may not open its lock
        return self._lock is not None

    @property
    def unnoted_files(self) -> int:  # type: ignore[override]
        """How many records were not written or removed, since this destination is only read."""
        return self._unnoted.files

    @cached_property
    def _hidden(self) -> int:  # type: ignore[override]
        from shutil import copyfile  # a check does not need this module
        from tempfile import gettempdir, mkdtemp

        remove_left(gettempdir())
        self._scratch = mkdtemp(prefix=_SCRATCH)
        fd = os.open(self._scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # if locks do not work, no directory is removed as unused
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.device = os.fstat(fd).st_dev
        for name in _COPIED:
            with suppress(OSError):
                copyfile(f"{self.path}/{HIDDEN}/{name}", f"{self._scratch}/{name}")
        return fd

    @cached_property
    def _incoming(self) -> int:  # type: ignore[override]
        return make_directory(self._hidden, "incoming")

    def close(self) -> None:
        """Close all files, and remove the directory for temporary files."""
        super().close()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            from shutil import rmtree

            rmtree(scratch, ignore_errors=True)

    def where(self, path: str) -> str:
        if self._scratch is not None and path.startswith(f"{HIDDEN}/"):
            return self._scratch + path[len(HIDDEN) :]
        return super().where(path)

    def leftovers(self) -> dict[bytes, str]:
        """Return nothing: files of an interrupted run are left for the next run that writes."""
        return {}


def remove_left(directory: str) -> None:
    """Remove the unused temporary directories of this user's dry runs."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(_SCRATCH):
                _remove_if_left(entry.path)


def _remove_if_left(path: str) -> None:
    with suppress(OSError):
        fd = disk.open_locked(path, os.O_RDONLY | os.O_DIRECTORY)
        if fd is None:
            return
        try:
            found = os.fstat(fd)
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _LEFT_S:
                from shutil import rmtree

                rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)


class _Directories(Directories):
    """
    The directories below a root. None of them is made, except in the temporary directory that replaces
    ``HIDDEN``.
    """

    def __init__(self, path: str, hidden: Callable[[], int], scratch: Callable[[], str]) -> None:
        super().__init__(path, make=False)
        self._hidden = hidden
        self._scratch = scratch

    def full(self, what: str) -> MirrorError:
        """Return the error for a full disk: only the directory for temporary files can be full."""
        return MirrorError(
            f"{self._scratch()} cannot {what}: the disk is full; free some space, or name another directory "
            "with "
            "TMPDIR"
        )

    def directory(self, path: str, make: bool) -> int | None:
        if path == HIDDEN:
            return self._hidden()
        return super().directory(path, make and path.startswith(f"{HIDDEN}/"))


class _Seen(StatCache):
    """A ``StatCache`` that is only read."""

    def _start_over(self) -> None:
        pass

    def keep(self) -> None:
        self._new = []


class _Verified(HashCache):
    """A ``HashCache`` that is only read."""

    files = 0

    def note(self, fd: int, wanted: ArchiveFile) -> None:
        self.files += 1

    def withdraw(self, fd: int, wanted: ArchiveFile, status: os.stat_result) -> bool:
        self.files += 1
        return self.seen.withdraw(wanted.digest, status)

    def forget(self, path: str) -> None:
        """Do nothing: no file was recorded."""
