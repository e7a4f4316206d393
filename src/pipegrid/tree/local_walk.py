"""
Walks through local directories: ``LocalWalk`` yields the entries of one directory, with the content of small
files; ``JoinedWalk`` walks several directories as one tree, each at its absolute path.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, NamedTuple

from pipegrid.disk.atomic_write import is_part_name
from pipegrid.disk.mount_table import mounted_file_systems
from pipegrid.tree.extended_metadata import read_extended
from pipegrid.tree.file_selection import DirectoryTag, TreeSelection
from pipegrid.tree.tree_plan import MAX_ENTRIES

SMALL_BYTES = 128 << 10
"""Files up to this size are read by the walk; larger ones are read when they are stored."""

BATCH_THINGS = 128
BATCH_BYTES = 1 << 20
MAX_DEPTH = 1000
"""The maximum number of levels below the root, since readers accept no more."""

_OPEN_LEVELS = 32
_TRIES = 3
"""How many times a small file is read if it changes during each read."""

CHANGED = "it changed while it was read; store it again when no program writes to it"
"""The reason for leaving out a file that changed during a read, so the bytes may be of two versions."""

_NOTHING = TreeSelection()


_OF_KERNEL = frozenset(
    {
        *(
            "proc",
            "sysfs",
            "cgroup",
            "cgroup2",
            "devpts",
            "debugfs",
            "tracefs",
            "securityfs",
            "bpf",
        ),
        *("configfs", "pstore", "efivarfs", "mqueue", "hugetlbfs", "fusectl", "binfmt_misc"),
        *("rpc_pipefs", "selinuxfs", "nsfs"),
    }
)
"""File systems that show the state of the kernel, and have no stored files."""


class DirectoryBegun(NamedTuple):
    """
    The beginning of a directory: ``number`` is its new number, ``parent`` the number of the directory above
    (-1 for the root); for ``extended`` see ``FileMet``.
    """

    number: int
    parent: int
    name: bytes
    path: str
    found: os.stat_result
    extended: dict[str, Any] | None = None


class DirectoryEnded(NamedTuple):
    """The end of a directory, of which everything has been yielded."""

    number: int


class FileMet(NamedTuple):
    """
    A file or symbolic link.

    Attributes:
        parent: the number of the directory that contains it.
        path: the path from the root, with ``/``, decoded as Python decodes names.
        found: the status of the file before it was read.
        began_ns: when that status was taken, in nanoseconds since 1970.
        content: the bytes of a small file; for a larger one, the open file, which the caller closes; None if
            content was not requested.
        link: the target of a symbolic link.
        known: the result of ``know`` for this file.
        extended: the stored form of the extended metadata; empty if there is none; None: it was not read.
        hard_link: the identifier of a file with several names; see ``extended_metadata``.
    """

    parent: int
    name: bytes
    path: str
    found: os.stat_result
    began_ns: int
    content: bytes | io.FileIO | None = None
    link: bytes | None = None
    known: Any = None
    extended: dict[str, Any] | None = None
    hard_link: str | None = None

    def __repr__(self) -> str:
        """Return a text for logs, without the content."""
        return f"FileMet({self.path!r}, ...)"

    def is_same(self, found: os.stat_result) -> bool:
        """Return whether size and times of a status are those of this file, which is then unchanged."""
        return _signature(found) == _signature(self.found)


class LeftOut(NamedTuple):
    """An entry that is not stored; ``why`` is a sentence."""

    path: str
    why: str


class Skipped(NamedTuple):
    """
    An entry that is never stored: it has no content, or is the part file of an unfinished download.

    Attributes:
        what: a phrase that describes the entry.
        is_part: whether it is a part file.
    """

    path: str
    what: str
    is_part: bool = False


Thing = DirectoryBegun | DirectoryEnded | FileMet | LeftOut | Skipped


LinkId = Callable[[os.stat_result, str], str | None]
"""Returns the identifier of a file with several names; see ``extended_metadata.HardLinks``."""


class WalkOptions(NamedTuple):
    """
    How local directories are walked; the same for all directories of one tree.

    Attributes:
        one_file_system: whether mounted file systems in a directory appear as empty directories.
        without: directories to skip, each by device and inode; see ``own_directories``.
        read: whether files are read.
        now_ns: returns the nanoseconds since 1970.
    """

    one_file_system: bool = False
    without: Collection[tuple[int, int]] = ()
    read: bool = True
    now_ns: Callable[[], int] = time.time_ns


_DEFAULTS = WalkOptions()


class LocalWalk:
    """
    One walk through a directory, in batches. All methods block: call them in a worker thread.

    Everything is opened relative to its directory and no symbolic link is followed, so another process cannot
    redirect the walk by moving directories. Entries that cannot be read, and loops of mounts, are reported.
    Sockets, devices, pipes and part files are skipped, and so are file systems of the kernel such as
    ``/proc``, unless they contain the root.

    A batch ends when it reaches a number of entries or bytes, or an open file. Only the lowest
    ``_OPEN_LEVELS`` directories on the current path are open. When the walk returns to a closed directory, it
    is opened again as the parent of a lower one, and must be the same directory as before.

    Args:
        root: the path of the root; if it is a link, the link is followed, since the user named it.
        selection: which entries are stored.
        options: how the walk is done.
        mounted: paths of directories that are always entered, even with ``one_file_system`` if they are on
            another file system than the root. Directories that the walk does not meet are reported.
        levels_above: the number of levels of the joined tree above the root.
        know: called with every regular file before it is opened; if it returns something, the file is not
            read.
        link_id: called with a file that has several names, and its path; returns an identifier that all names
            share. If it is given, extended metadata is read, too. Then ``know`` returns an object with the
            attribute ``extended``; if that is None, extended metadata is read again.
    """

    def __init__(
        self,
        root: str,
        *,
        selection: TreeSelection = _NOTHING,
        options: WalkOptions = _DEFAULTS,
        mounted: Collection[str] = (),
        levels_above: int = 0,
        know: Callable[[str, os.stat_result], Any] = lambda path, found: None,
        link_id: LinkId | None = None,
    ) -> None:
        self._root = root
        self._selection = selection
        self._mounted = set(mounted)
        self._not_met = set(mounted)
        self._most_levels = MAX_DEPTH - levels_above
        self._options = options
        self._know = know
        self._identify = link_id
        self._levels: list[_Level] = []
        self._numbers = 0
        self._bytes = 0
        self._kernels: dict[int, str] | None = None
        self._things = self._walk()
        self._busy = Lock()  # lets ``close`` wait for the thread that reads

    def batch(self) -> list[Thing]:
        """
        Return the next entries; an empty list at the end of the walk.

        Raises:
            OSError: the root cannot be read.
        """
        batch: list[Thing] = []
        with self._busy:
            self._bytes = 0
            for thing in self._things:
                batch.append(thing)
                is_open = isinstance(thing, FileMet) and isinstance(thing.content, io.FileIO)
                if is_open or len(batch) >= BATCH_THINGS or self._bytes >= BATCH_BYTES:
                    break
        return batch

    def close(self) -> None:
        """Close all directories when the current batch has ended."""
        with self._busy:
            self._things.close()
            while self._levels:
                self._levels.pop().close()

    @property
    def excluded(self) -> int:
        """Number of entries that the selection has left out so far."""
        return self._selection.excluded

    def open(self, path: str) -> io.FileIO:
        """
        Open again a file that the walk has met.

        Raises:
            OSError: the file cannot be opened, or is no longer a regular file.
        """
        *above, name = path.split("/")
        fd = os.open(self._root, _DIRECTORY & ~os.O_NOFOLLOW)
        try:
            for each in above:
                inner = os.open(each, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = inner
            return _open_file(fd, name, self._shown(path))
        finally:
            os.close(fd)

    def _shown(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _walk(self) -> Generator[Thing, None, None]:
        fd = os.open(self._root, _DIRECTORY & ~os.O_NOFOLLOW)
        yield self._enter(fd, "", b"", os.fstat(fd))
        yield from self._list()
        while self._levels:
            level = self._levels[-1]
            if not level.names:
                yield DirectoryEnded(level.number)
                yield from self._leave()
                continue
            name, is_directory = level.names.pop()
            path = f"{level.path}/{name}" if level.path else name
            try:
                if is_directory:
                    yield from self._descend(name, path)
                else:
                    yield from self._look(level, name, path)
            except OSError as error:
                yield LeftOut(path, reason_of(error))
        for path in self._selection.unmet:
            yield LeftOut(path, "it is in the list, but does not exist")
        for path in sorted(self._not_met):
            yield LeftOut(path, "it was given, but is not a readable directory, or is excluded")

    def _enter(self, fd: int, path: str, name: bytes, found: os.stat_result) -> DirectoryBegun:
        parent = self._levels[-1].number if self._levels else -1
        level = _Level(self._numbers, fd, path, (found.st_dev, found.st_ino))
        self._numbers += 1
        self._levels.append(level)
        if len(self._levels) > _OPEN_LEVELS:
            self._levels[-_OPEN_LEVELS - 1].close()
        extended = None if self._identify is None else read_extended(fd, found)
        return DirectoryBegun(level.number, parent, name, path, found, extended)

    def _list(self) -> Iterator[LeftOut]:
        """Read the names in the lowest directory; yield a ``LeftOut`` for each entry that cannot be read."""
        level = self._levels[-1]
        selection = self._selection
        try:
            tag = next((each.name for each in selection.tags if _has_tag(level.fd, each)), None)
            with os.scandir(level.fd) as entries:
                for entry in entries:
                    path = f"{level.path}/{entry.name}" if level.path else entry.name
                    if tag is not None and entry.name != tag:
                        selection.leave_out(path)
                        continue
                    if not selection.may_take(path):
                        continue  # no ``stat``, which some file systems refuse
                    try:
                        is_directory = entry.is_dir(follow_symlinks=False)
                    except OSError as error:
                        if selection.takes(path, True):
                            yield LeftOut(path, reason_of(error))
                        continue
                    if selection.takes(path, is_directory):
                        level.names.append((entry.name, is_directory))
                    if len(level.names) > MAX_ENTRIES:
                        level.names.clear()
                        yield LeftOut(
                            level.path,
                            f"it has more than {MAX_ENTRIES} entries, more than a directory may have; "
                            "split it",
                        )
                        return
        except OSError as error:
            if len(self._levels) == 1:
                raise
            level.names.clear()
            yield LeftOut(level.path, reason_of(error))
        # Names are taken from the end, so all files of a directory come before its subdirectories.
        level.names.sort(key=lambda each: (each[1], each[0]), reverse=True)

    def _descend(self, name: str, path: str) -> Iterator[Thing]:
        level = self._levels[-1]
        if len(self._levels) > self._most_levels:
            yield LeftOut(path, f"it is more than {MAX_DEPTH} levels deep; readers take no more")
            return
        fd = os.open(name, _DIRECTORY, dir_fd=level.fd)
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) in self._options.without:
            os.close(fd)
            return
        if any(each.identity == (found.st_dev, found.st_ino) for each in self._levels):
            os.close(fd)
            yield LeftOut(path, "it contains itself, through a mount")
            return
        yield self._enter(fd, path, os.fsencode(name), found)
        is_mounted = found.st_dev != level.identity[0]
        if is_mounted and path not in self._mounted:
            if self._kernels is None:
                self._kernels = kernel_devices()
            if (kind := self._kernels.get(found.st_dev)) is not None:
                yield Skipped(
                    path, f"the file system {kind} of the kernel, which has no files on a disk"
                )
                return
        self._not_met.discard(path)
        outside = is_mounted or level.is_outside
        if not (self._options.one_file_system and outside) or path in self._mounted:
            yield from self._list()
        elif self._leads_to_mounted(path):
            entered = self._levels[-1]
            entered.is_outside = True
            yield from self._list()
            entered.names = [
                each for each in entered.names if self._leads_to_mounted(f"{path}/{each[0]}")
            ]

    def _leads_to_mounted(self, path: str) -> bool:
        """Return whether a directory of ``mounted`` is at this path or below it."""
        return any(f"{each}/".startswith(f"{path}/") for each in self._mounted)

    def _leave(self) -> Iterator[LeftOut]:
        """
        Return to the directory above. If it is closed, open it again; yield a ``LeftOut`` if it was moved.
        """
        level = self._levels.pop()
        if self._levels and self._levels[-1].fd < 0:
            above = self._levels[-1]
            with suppress(OSError):
                fd = os.open("..", _DIRECTORY, dir_fd=level.fd) if level.fd >= 0 else -1
                found = os.fstat(fd)
                if (found.st_dev, found.st_ino) == above.identity:
                    above.fd = fd
                else:
                    os.close(fd)
            if above.fd < 0 and above.names:
                above.names.clear()
                yield LeftOut(
                    above.path, "it was moved while it was read; the rest of it is left out"
                )
        level.close()

    def _look(self, level: _Level, name: str, path: str) -> Iterator[Thing]:
        began_ns = self._options.now_ns()
        found = os.stat(name, dir_fd=level.fd, follow_symlinks=False)
        raw = os.fsencode(name)
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFLNK:
            link = os.fsencode(os.readlink(name, dir_fd=level.fd))
            extended = None
            if self._identify is not None:
                extended = read_extended(f"/proc/self/fd/{level.fd}/{name}", found)
            yield FileMet(level.number, raw, path, found, began_ns, link, link, extended=extended)
        elif kind == stat.S_IFDIR:  # it was another kind when the names were read
            if self._selection.takes(path, True):
                yield from self._descend(name, path)
        elif kind != stat.S_IFREG:
            yield Skipped(path, _KINDS.get(kind, "no file"))
        elif is_part_name(name):
            yield Skipped(path, "the part of an unfinished download", is_part=True)
        else:
            if not self._selection.takes_size(found.st_size):
                return
            known = self._know(path, found)
            if known is not None or not self._options.read:
                extended = None if known is None else self._extended_of(known, level, path, found)
                link_id = self._link_id(found, path)
                yield FileMet(
                    level.number, raw, path, found, began_ns, None, None, known, extended, link_id
                )
                return
            fd = _open_regular(level.fd, name)
            try:
                met = self._take(fd, level, raw, path)
            except BaseException:
                os.close(fd)
                raise
            if met is None or not isinstance(met.content, io.FileIO):
                os.close(fd)
            yield met or LeftOut(path, CHANGED)

    def _extended_of(
        self, known: Any, level: _Level, path: str, found: os.stat_result
    ) -> dict[str, Any] | None:
        """
        Return the extended metadata of a known file, whose content is not read. The metadata is read from the
        disk only if the record of the file lacks it.
        """
        if self._identify is None:
            return None
        if known.extended is not None or not self._options.read:
            extended: dict[str, Any] | None = known.extended
            return extended
        name = path.rpartition("/")[2]
        try:
            with _open_file(level.fd, name, self._shown(path)) as file:
                return read_extended(file.fileno(), found)
        except OSError:
            return None

    def _link_id(self, found: os.stat_result, path: str) -> str | None:
        if self._identify is None or found.st_nlink < 2:
            return None
        return self._identify(found, path)

    def _take(self, fd: int, level: _Level, name: bytes, path: str) -> FileMet | None:
        """
        Read a small file, or return a larger one open; None: the file changed during each attempt.

        Each system call competes for the GIL with the reactor's thread, so few are made for a small file.
        """
        for _ in range(_TRIES):
            began_ns = self._options.now_ns()
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise _not_regular()
            extended = None if self._identify is None else read_extended(fd, found)
            content: bytes | io.FileIO | None = None
            if found.st_size <= SMALL_BYTES:
                content = os.pread(fd, found.st_size + 1, 0)
                if len(content) != found.st_size:
                    content = _read_to_end(fd)
                if _signature(os.fstat(fd)) != _signature(found):
                    continue
                if len(content) > SMALL_BYTES:
                    if found.st_size:
                        continue
                    content = None  # its size is unknown; the reader finds the end
            if isinstance(content, bytes):
                self._bytes += len(content)
            else:
                content = io.FileIO(self._shown(path), "rb", opener=lambda _path, _flags: fd)
            link_id = self._link_id(found, path)
            return FileMet(
                level.number, name, path, found, began_ns, content, None, None, extended, link_id
            )
        return None


def kernel_devices() -> dict[int, str]:
    """Return the kind of each mounted file system that shows the state of the kernel, by device number."""
    return {each.device: each.kind for each in mounted_file_systems() if each.kind in _OF_KERNEL}


def own_directories(*paths: str | os.PathLike[str]) -> frozenset[tuple[int, int]]:
    """
    Return the device and inode of each of these directories that exists.

    A backup of a home directory must not store the database that the backup writes, or a local test grid in
    the home directory, which grows with everything that is stored.
    """
    found = set()
    for path in paths:
        with suppress(OSError):
            status = os.stat(path)
            found.add((status.st_dev, status.st_ino))
    return frozenset(found)


class _Level:
    """
    A directory that the walk is in; ``fd`` is -1 while it is closed. If the directory ``is_outside`` the file
    system, only the path to directories of ``mounted`` is stored of it.
    """

    def __init__(self, number: int, fd: int, path: str, identity: tuple[int, int]) -> None:
        self.number = number
        self.fd = fd
        self.path = path
        self.identity = identity
        self.names: list[tuple[str, bool]] = []
        self.is_outside = False

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_KINDS = {
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def _open_regular(fd: int, name: str) -> int:
    """
    Open a file, without blocking if a pipe has replaced it; the caller checks that it is still a regular
    file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=fd)


def _open_file(fd: int, name: str, shown: str) -> io.FileIO:
    """Open a file, without blocking if a pipe has replaced it, and check that it is a regular file."""
    file = io.FileIO(shown, "rb", opener=lambda _path, _flags: _open_regular(fd, name))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _not_regular()
    return file


def _not_regular() -> OSError:
    return OSError(errno.ENOENT, "it is not a file any more")


def _has_tag(fd: int, tag: DirectoryTag) -> bool:
    try:
        found = os.stat(tag.name, dir_fd=fd, follow_symlinks=False)
        if not tag.header:
            return True
        if not stat.S_ISREG(found.st_mode):
            return False
        with _open_file(fd, tag.name, tag.name) as file:
            return os.pread(file.fileno(), len(tag.header), 0) == tag.header
    except OSError:  # a missing or unreadable file is no tag
        return False


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _read_to_end(fd: int) -> bytes:
    """Return the content of a small file up to its real end, since files in ``/proc`` report a size of 0."""
    content = bytearray()
    while len(content) <= SMALL_BYTES:
        more = os.pread(fd, SMALL_BYTES + 1 - len(content), len(content))
        if not more:
            break
        content += more
    return bytes(content)


def reason_of(error: OSError) -> str:
    """Return, as a sentence, why an entry that was listed could not be read."""
    if error.errno == errno.ENOENT:
        return "it vanished while the directory was read"
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        return "it was replaced by something else while the directory was read"
    if error.errno == errno.ESTALE:
        return (
            "it cannot be read: its file system lost it (stale file handle); mount that again, and store "
            "it then"
        )
    return f"it cannot be read: {error.strerror}"


class JoinedWalk:
    """
    A walk through several directories as one tree, whose root is the root of the file system.

    Directories above the given ones appear with their own metadata and no other entries; they are not listed,
    so the user needs no permission to read them. A given directory that cannot be read is reported, and the
    walk continues; if none can be read, the walk fails. See ``LocalWalk``.

    Args:
        directories: absolute paths without links, none below another.
        walk_of: called with a directory, its path in the joined tree, and the number of levels above it;
            returns a walk through it.
    """

    def __init__(
        self, directories: Sequence[str], walk_of: Callable[[str, str, int], LocalWalk]
    ) -> None:
        self._directories = sorted(directories, key=lambda each: each.split("/"))
        self._walk_of = walk_of
        self._numbers = 0
        self._above: list[tuple[str, int]] = []
        self._walks: dict[str, LocalWalk] = {}
        self._batches = self._all_batches()
        self._busy = Lock()

    def batch(self) -> list[Thing]:
        """Return the next entries; an empty list at the end of the walk."""
        with self._busy:
            return next(self._batches, [])

    def close(self) -> None:
        """Close all directories when the current batch has ended."""
        with self._busy:
            self._batches.close()
            for walk in self._walks.values():
                walk.close()

    @property
    def excluded(self) -> int:
        """Number of entries that the selections have left out so far."""
        return sum(walk.excluded for walk in self._walks.values())

    def open(self, path: str) -> io.FileIO:
        """Open again a file that one of the walks has met; see ``LocalWalk.open``."""
        for prefix, walk in list(self._walks.items()):  # the walk's thread may add a walk
            if path.startswith(f"{prefix}/"):
                return walk.open(path[len(prefix) + 1 :])
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _all_batches(self) -> Generator[list[Thing], None, None]:
        lost: OSError | None = None
        have_some = False
        yield [self._enter("", os.stat("/"))]
        for directory in self._directories:
            prefix = directory.lstrip("/")
            walk = self._walk_of(directory, prefix, prefix.count("/") + 1)
            self._walks[prefix] = walk
            try:
                missing = self._missing(prefix)
                met = walk.batch()
            except OSError as error:
                lost = error
                yield [LeftOut(prefix, _why_missing(error))]
                continue
            have_some = True
            above = [*self._leave_to(prefix), *(self._enter(*each) for each in missing)]
            parent = self._above[-1][1]
            base = self._numbers
            while met:
                yield [*above, *(self._placed(thing, prefix, base, parent) for thing in met)]
                above = []
                met = walk.batch()
        if lost is not None and not have_some:
            raise lost
        yield [DirectoryEnded(number) for _, number in reversed(self._above)]

    def _missing(self, prefix: str) -> list[tuple[str, os.stat_result]]:
        """
        Return the directories above a path for which no ``DirectoryBegun`` was yielded yet, with their
        status.
        """
        begun = {path for path, _ in self._above}
        ends = [at for at, char in enumerate(prefix) if char == "/"]
        paths = [prefix[:end] for end in ends if prefix[:end] not in begun]
        return [(path, os.stat(f"/{path}", follow_symlinks=False)) for path in paths]

    def _leave_to(self, prefix: str) -> Iterator[Thing]:
        """Leave the open directories that do not contain a path: yield a ``DirectoryEnded`` for each."""
        while self._above[-1][0] and not prefix.startswith(f"{self._above[-1][0]}/"):
            yield DirectoryEnded(self._above.pop()[1])

    def _enter(self, path: str, found: os.stat_result) -> DirectoryBegun:
        number, self._numbers = self._numbers, self._numbers + 1
        parent = self._above[-1][1] if self._above else -1
        self._above.append((path, number))
        return DirectoryBegun(number, parent, os.fsencode(path.rpartition("/")[2]), path, found)

    def _placed(self, thing: Thing, prefix: str, base: int, parent: int) -> Thing:
        """Return an item that a walk has yielded, with its number and path in the joined tree."""
        if isinstance(thing, DirectoryEnded):
            return DirectoryEnded(base + thing.number)
        path = f"{prefix}/{thing.path}" if thing.path else prefix
        if isinstance(thing, FileMet):
            return thing._replace(parent=base + thing.parent, path=path)
        if not isinstance(thing, DirectoryBegun):
            return thing._replace(path=path)
        self._numbers = base + thing.number + 1
        number = base + thing.number
        if thing.parent < 0:
            name = os.fsencode(prefix.rpartition("/")[2])
            return thing._replace(number=number, parent=parent, name=name, path=path)
        return thing._replace(number=number, parent=base + thing.parent, path=path)


EntryWalk = LocalWalk | JoinedWalk


def _why_missing(error: OSError) -> str:
    """Return, as a sentence, why a given directory could not be read."""
    known = {errno.ENOENT: "it does not exist", errno.ENOTDIR: "it is not a directory"}
    return known.get(error.errno or 0) or reason_of(error)
