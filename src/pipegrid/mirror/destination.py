"""
The directory that holds a mirror: where files come in, and how they get their names. Synchronous, for one
thread.

Every path below it is walked one part at a time, without following symbolic links, so that no index and
no link leads out of it. Directories that were walked once are kept open (``MAX_OPEN_DIRECTORIES``).

What is not published yet lies in ``HIDDEN/incoming``, named by its hash, so that the next run takes up
what a killed one left. One process at a time has the lock.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import new as new_hash

from pipegrid.disk import files as disk
from pipegrid.mirror.lists import lines_of, list_line, read_list
from pipegrid.mirror.verified import Ledger, is_noted, is_noted_by_librepo, note, proof
from pipegrid.mirror.wanted import HIDDEN, BadEntry, MirrorError, Wanted, shown

MAX_OPEN_DIRECTORIES = 256
MANIFEST = "manifest"
STAGED = f"{HIDDEN}/staged"
LINKED = "link.new"
READ_BYTES = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class WrongResult(MirrorError):
    """What was made here of patches or a packed file is not what the archive names."""


class Destination:
    """
    One mirror's directory, made if it is not there, and locked.

    Raises (also later):
        MirrorError: it cannot be used, is full, or another process mirrors to it.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._open_directories: OrderedDict[str, int] = OrderedDict()
        self._count = 0
        self._ledger: Ledger | None = None
        self._lock: int | None = None
        self.device = 0
        try:
            os.makedirs(self.path, exist_ok=True)
            self._root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self.error(error, "be used as a mirror") from error
        try:
            self.device = os.fstat(self._root).st_dev
            self._hidden = self._make_directory(self._root, HIDDEN)
            self._incoming = self._make_directory(self._hidden, "incoming")
            self._lock = disk.open_locked(
                os.path.join(self.path, HIDDEN, "lock"), os.O_RDWR | os.O_CREAT
            )
            if self._lock is None:
                raise MirrorError(
                    f"another process is mirroring to {self.path}; wait until it has finished"
                )
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise self.error(error, "be used as a mirror") from error
            raise

    def __repr__(self) -> str:
        return f"<Destination {self.path}>"

    def close(self) -> None:
        """Let go of everything; the lock, too."""
        for fd in self._open_directories.values():
            os.close(fd)
        self._open_directories.clear()
        for name in ("_incoming", "_hidden", "_root", "_lock"):
            fd = self.__dict__.pop(name, None)
            if fd is not None:
                os.close(fd)
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def error(self, error: OSError, what: str) -> MirrorError:
        """Return the sentence for an error of the operating system."""
        if error.errno in _FULL:
            return MirrorError(
                f"{self.path} cannot {what}: the disk is full; make room and run it again,"
                " it goes on where it stopped"
            )
        reason = os.strerror(error.errno) if error.errno else str(error)
        return MirrorError(f"{self.path} cannot {what}: {reason}")

    # What is there.

    def is_there(self, wanted: Wanted, paranoid: bool = False, staged: bool = False) -> bool:
        """
        Return whether the file is there and right: known to be, or hashed now.

        Args:
            paranoid: hash it, whatever is known.
            staged: it may also be staged.

        Raises:
            BadEntry: its path leads over a symbolic link, or something else is in its place.
        """
        if staged:
            path = f"{STAGED}/{wanted.path}"
            if self._is_at(path, wanted, paranoid):
                return True
            # One of an earlier run that did not come to its end: it would be taken for the new one.
            self._remove(path)
        return self._is_at(wanted.path, wanted, paranoid)

    def _is_at(self, path: str, wanted: Wanted, paranoid: bool) -> bool:
        directory, name = self._place(path, make=False)
        if directory is None:
            return False
        try:
            fd = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory
            )
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._in_the_way(wanted.path, "a symbolic link") from error
            raise self.error(error, f"read {shown(wanted.path)}") from error
        try:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise self._in_the_way(wanted.path, "a directory")
            if not stat.S_ISREG(status.st_mode):
                raise self._in_the_way(wanted.path, "no file")
            if wanted.size is not None and status.st_size != wanted.size:
                return False
            if not paranoid and self._is_known(fd, wanted, status):
                return True
            if hash_file(fd, wanted.algorithm) != wanted.digest:
                return False
            self.note(fd, wanted)
            return True
        except OSError as error:
            raise self.error(error, f"read {shown(wanted.path)}") from error
        finally:
            os.close(fd)

    def _is_known(self, fd: int, wanted: Wanted, status: os.stat_result) -> bool:
        if is_noted(fd, wanted, status):
            return True
        if wanted.size is not None and is_noted_by_librepo(fd, wanted, status):
            self.note(fd, wanted)
            return True
        return self._ledger is not None and self._ledger.find(wanted.path) == proof(wanted, status)

    def note(self, fd: int, wanted: Wanted) -> None:
        """Write down that the open file is right."""
        if not note(fd, wanted):
            if self._ledger is None:
                self._ledger = Ledger(os.path.join(self.path, HIDDEN, "verified.sqlite"))
            self._ledger.note([(wanted.path, proof(wanted, os.fstat(fd)))])

    # What comes in.

    def open_incoming(self, wanted: Wanted) -> tuple[int, str]:
        """Make a file for what is coming; returns its descriptor and its name in ``incoming``."""
        self._count += 1
        name = f"{wanted.digest.hex()}.{self._count}"
        try:
            return os.open(name, _NEW_FILE, 0o644, dir_fd=self._incoming), name
        except FileExistsError:  # of an earlier run
            return self.open_incoming(wanted)

    def open_own(self, name: str) -> int:
        """Make a file of our own in ``incoming``; returns its descriptor."""
        return os.open(name, _NEW_FILE, 0o644, dir_fd=self._incoming)

    def discard(self, name: str) -> None:
        """Remove a file that did not become what was wanted."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._incoming)

    def publish(self, name: str, path: str, staged: bool = False) -> str:
        """
        Give a file that came in its final name; returns the directory that has changed.

        Args:
            staged: only below ``STAGED``, where readers do not see it, until ``release``.

        Raises:
            BadEntry: its path leads over a symbolic link, or a directory is in its place.
            OSError: it could not be renamed.
        """
        if staged:
            path = f"{STAGED}/{path}"
        directory, last = self._place(path, make=True)
        assert directory is not None
        try:
            os.rename(name, last, src_dir_fd=self._incoming, dst_dir_fd=directory)
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            raise self._in_the_way(path, "a directory") from error
        return os.path.join(self.path, os.path.dirname(path))

    def release(self, paths: Iterable[str]) -> None:
        """
        Give staged files their final names, in this order; those that are not staged stay as they are.

        Raises:
            BadEntry, MirrorError: as ``publish``.
        """
        changed: dict[str, None] = {}
        for path in paths:
            old, name = self._place(f"{STAGED}/{path}", make=False)
            new, _ = self._place(path, make=True)
            if old is None or new is None:
                continue
            try:
                os.rename(name, name, src_dir_fd=old, dst_dir_fd=new)
            except FileNotFoundError:
                continue
            except (IsADirectoryError, NotADirectoryError) as error:
                raise self._in_the_way(path, "a directory") from error
            except OSError as error:
                raise self.error(error, f"hold {shown(path)}") from error
            changed[os.path.dirname(path)] = None
        self._sync_directories(changed)

    def _sync_directories(self, paths: Iterable[str]) -> None:
        """Make new names durable: what goes away after that is named by nothing that could come back."""
        for path in paths:
            fd = self._directory(path, make=False)
            if fd is not None:
                try:
                    os.fsync(fd)
                except OSError as error:
                    raise self.error(error, f"hold {shown(path)}") from error

    def link(self, path: str, other: str) -> None:
        """
        Give a file that is staged, or there, another name, at once to be seen; for names that are hashes.

        Where the file system has no hard links there is no such name.

        Raises:
            BadEntry, MirrorError: as ``publish``.
        """
        for where in (f"{STAGED}/{path}", path):
            old, name = self._place(where, make=False)
            if old is None or not _exists(name, old):
                continue
            new, last = self._place(other, make=True)
            assert new is not None
            if _is_same(name, old, last, new):
                return
            self.discard(LINKED)
            with suppress(OSError):
                os.link(name, LINKED, src_dir_fd=old, dst_dir_fd=self._incoming)
                os.rename(LINKED, last, src_dir_fd=self._incoming, dst_dir_fd=new)
            return

    def clear_staged(self) -> None:
        """Forget what is staged and was not released."""
        for path in sorted(self.others(frozenset(), STAGED), reverse=True):
            self.delete(path)

    def make(
        self, wanted: Wanted, write: Callable[[int], bytes | None], staged: bool = False
    ) -> None:
        """
        Make a file here that mirrors need not give.

        Args:
            write: writes it to the descriptor that it is given; returns its SHA-256 if it knows that.

        Raises:
            WrongResult: it is not what is wanted.
            MirrorError: it cannot be written.
        """
        try:
            fd, name = self.open_incoming(wanted)
        except OSError as error:
            raise self.error(error, f"hold {shown(wanted.path)}") from error
        try:
            found = write(fd)
            if found is None or wanted.algorithm != "sha256":
                found = hash_file(fd, wanted.algorithm)
            if wanted.size not in (None, os.fstat(fd).st_size) or found != wanted.digest:
                raise WrongResult(f"what was made is not the {shown(wanted.path)} of the archive")
            os.fsync(fd)
            self.note(fd, wanted)
            self.publish(name, wanted.path, staged)
        except BaseException as error:
            self.discard(name)
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise self.error(error, f"hold {shown(wanted.path)}") from error
            raise
        finally:
            os.close(fd)

    def stage(self, files: Mapping[str, bytes]) -> None:
        """
        Write files of our own below ``STAGED``, durably.

        Raises:
            MirrorError: they cannot be written.
        """
        for path, data in files.items():
            name = "own.new"
            self.discard(name)
            try:
                fd = self.open_own(name)
                try:
                    disk.write_all(fd, data, 0)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                self.publish(name, path, staged=True)
            except OSError as error:
                raise self.error(error, f"hold {shown(path)}") from error

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """Return a file that is there, and no longer than that; a symbolic link is not followed."""
        directory, name = self._place(path, make=False)
        if directory is None:
            return None
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(name, flags, dir_fd=directory)
        except OSError:
            return None
        with open(fd, "rb") as file:
            return file.read() if os.fstat(fd).st_size <= most_bytes else None

    def staged_path(self, path: str) -> str:
        """Return where a file can be read now: where it is staged, or under its name."""
        staged = os.path.join(self.path, STAGED, path)
        return staged if os.path.lexists(staged) else os.path.join(self.path, path)

    def leftovers(self) -> dict[bytes, str]:
        """Return what an earlier run left in ``incoming``, by the hash that it should have; drop the rest."""
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

    def take_up(self, name: str, wanted: Wanted, staged: bool = False) -> bool:
        """Publish what an earlier run left if it is whole and right; else remove it."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._incoming)
        try:
            status = os.fstat(fd)
            if wanted.size in (None, status.st_size) and (
                hash_file(fd, wanted.algorithm) == wanted.digest
            ):
                os.fsync(fd)
                self.note(fd, wanted)
                self.publish(name, wanted.path, staged)
                return True
        finally:
            os.close(fd)
        self.discard(name)
        return False

    # What should be there.

    def write_manifest(self, entries: Iterable[Wanted]) -> None:
        """Note what the last complete run wanted, in the form of ``lists``; whole, or as it was."""
        path = os.path.join(self.path, HIDDEN, MANIFEST)
        try:
            with open(path + ".new", "wb") as file:
                for each in entries:
                    file.write(list_line(each))
                file.flush()
                os.fsync(file.fileno())
            os.replace(path + ".new", path)
        except OSError as error:
            raise self.error(error, "note what it holds") from error

    def manifest(self) -> Iterator[Wanted]:
        """
        Yield what the last complete run wanted.

        Raises:
            MirrorError: there was none.
        """
        try:
            with open(os.path.join(self.path, HIDDEN, MANIFEST), "rb") as file:
                yield from read_list(lines_of(file), MANIFEST)
        except FileNotFoundError:
            raise MirrorError(
                f"{self.path} does not say what it should hold: no run to it was complete yet"
            ) from None

    # What is too much.

    def others(self, kept: frozenset[str], below: str = "") -> Iterator[str]:
        """Yield the paths of files that are not among those to be kept; links and devices as well."""
        ahead = [below]
        while ahead:
            directory = ahead.pop()
            fd = self._directory(directory, make=False)
            if fd is None:
                continue
            with os.scandir(fd) as entries:
                names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for name, is_directory in sorted(names):
                path = f"{directory}/{name}" if directory else name
                if path == HIDDEN:
                    continue
                if is_directory:
                    ahead.append(path)
                elif path not in kept:
                    yield path

    def delete_others(self, paths: Iterable[str], dry_run: bool = False) -> list[str]:
        """Remove all files but those of these paths; returns them. ``dry_run``: only tell."""
        others = list(self.others(frozenset(paths)))
        for path in () if dry_run else others:
            self.delete(path)
        return others

    def _remove(self, path: str) -> None:
        directory, name = self._place(path, make=False)
        if directory is not None:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)

    def delete(self, path: str) -> None:
        """
        Remove a file, and the directories above it that are empty then; never outside.

        Raises:
            MirrorError: it cannot be removed.
        """
        try:
            self._remove(path)
        except OSError as error:
            raise self.error(error, f"be rid of {shown(path)}") from error
        if self._ledger is not None:
            self._ledger.forget([path])
        above = os.path.dirname(path)
        while above:
            parent = self._directory(os.path.dirname(above), make=False)
            if parent is None:
                break
            fd = self._open_directories.pop(above, None)
            if fd is not None:
                os.close(fd)
            try:
                os.rmdir(os.path.basename(above), dir_fd=parent)
            except OSError:
                break
            above = os.path.dirname(above)

    # Directories.

    def _place(self, path: str, make: bool) -> tuple[int | None, str]:
        above, _, name = path.rpartition("/")
        return self._directory(above, make), name

    def _directory(self, path: str, make: bool) -> int | None:
        """Return the descriptor of a directory below the root; None if it is not there and not to be made."""
        if not path:
            return self._root
        known = self._open_directories
        fd = known.get(path)
        if fd is not None:
            known.move_to_end(path)
            return fd
        above, _, name = path.rpartition("/")
        parent = self._directory(above, make)
        if parent is None:
            return None
        try:
            fd = (
                self._make_directory(parent, name)
                if make
                else os.open(name, _DIRECTORY, dir_fd=parent)
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise self._in_the_way(path, "a symbolic link or a file") from error
            raise self.error(error, f"hold {shown(path)}") from error
        known[path] = fd
        if len(known) > MAX_OPEN_DIRECTORIES:
            os.close(known.popitem(last=False)[1])
        return fd

    @staticmethod
    def _make_directory(parent: int, name: str) -> int:
        try:
            return os.open(name, _DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=parent)
            return os.open(name, _DIRECTORY, dir_fd=parent)

    def _in_the_way(self, path: str, what: str) -> BadEntry:
        return BadEntry(
            f"{shown(path)} cannot be kept in {self.path}: there is {what} in its place; move it away"
        )


def _exists(name: str, directory: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _is_same(name: str, directory: int, other: str, other_directory: int) -> bool:
    try:
        return os.path.samestat(
            os.stat(name, dir_fd=directory, follow_symlinks=False),
            os.stat(other, dir_fd=other_directory, follow_symlinks=False),
        )
    except FileNotFoundError:
        return False


def hash_file(fd: int, algorithm: str) -> bytes:
    """Return the hash of an open file, from its beginning."""
    hasher = new_hash(algorithm)
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    offset = 0
    while size := os.preadv(fd, [buffer], offset):
        hasher.update(view[:size])
        offset += size
    return hasher.digest()
