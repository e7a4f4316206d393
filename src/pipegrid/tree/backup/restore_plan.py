"""
The plan of a restore: what it writes, replaces and removes in a directory, found out before any change.

A restore removes nothing outside the target, does not follow symbolic links, and removes nothing from other
file systems or the directories of this client. An entry that was replaced since the plan was made stays.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from pipegrid.core.caps import Cap, immutable_size
from pipegrid.core.text import printable
from pipegrid.errors import SinkError, UsageError
from pipegrid.grid.client_config import GridConfig
from pipegrid.tree.directory_reading import Entry, ReadsFiles
from pipegrid.tree.file_metadata import RestoredMetadata, entry_name, restored
from pipegrid.tree.file_selection import TreeSelection
from pipegrid.tree.local_directory_descriptor import DirectoryFd
from pipegrid.tree.local_files import local_name
from pipegrid.tree.local_walk import own_directories
from pipegrid.tree.walk import Found, Unreadable, walk
from pipegrid.tree.walk_order import TreePath

MAX_EXTRAS = 1_000_000
"""Maximum number of entries of the target that a plan removes."""

RestoreVerdict = Literal["take", "enter", "leave"]
RestoreStep = Literal["write", "replace", "compare", "blocked"]
"""``compare``: a file of the right size exists; its content is compared. ``blocked``: an entry is kept."""

InodeIdentity = tuple[int, int]
MountIdentity = tuple[int, str]

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RestoreSelection:
    """
    Which part of a tree is restored.

    Args:
        include: patterns as in ``TreeSelection``; a directory that matches is restored with all its content.
            Empty: everything.
        exclude: patterns of entries that are not restored even if they are included.

    Raises:
        UsageError: a pattern is malformed.
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        self._include = TreeSelection(include) if include else None
        self._exclude = TreeSelection(exclude) if exclude else None

    @property
    def is_partial(self) -> bool:
        """Whether include patterns were given."""
        return self._include is not None

    @property
    def unmatched(self) -> list[str]:
        """The patterns that have matched nothing."""
        return [
            pattern for each in (self._include, self._exclude) if each for pattern in each.unmatched
        ]

    def excludes(self, path: TreePath, is_directory: bool) -> bool:
        """Return whether a pattern excludes an entry."""
        return self._exclude is not None and not self._exclude.takes("/".join(path), is_directory)

    def verdict(self, path: TreePath, is_directory: bool, is_within: bool) -> RestoreVerdict:
        """
        Return whether an entry is restored (``take``), is entered only because its content may be restored
        (``enter``), or is left out (``leave``).

        Args:
            is_within: whether the whole directory around the entry is restored.
        """
        if self.excludes(path, is_directory):
            return "leave"
        if is_within or self._include is None:
            return "take"
        if not self._include.takes("/".join(path), is_directory):
            return "take"
        return "enter" if is_directory else "leave"


class RestoreRules(NamedTuple):
    """
    What a restore may do to existing files and directories.

    Attributes:
        force: whether existing files are replaced.
        protected: directories that are never removed; None: nothing is removed at all.
        untouched: directories from which nothing is removed.
    """

    force: bool = False
    protected: frozenset[InodeIdentity] | None = None
    untouched: frozenset[InodeIdentity] = frozenset()


class ExtraEntry:
    """
    An entry of the target that the run does not have.

    Attributes:
        home: the directory that contains the entry.
        name: the name of the entry in ``home``.
        identity: the device and inode of the entry.
        is_directory: whether the entry is a directory, not a link to one; a directory is removed with all its
            content.
        count: number of files and links that are removed with the entry.
    """

    __slots__ = ("count", "home", "identity", "is_directory", "name")

    def __init__(
        self,
        home: DirectoryFd,
        name: str,
        identity: InodeIdentity,
        is_directory: bool,
        count: int = 1,
    ) -> None:
        self.home = home
        self.name = name
        self.identity = identity
        self.is_directory = is_directory
        self.count = count

    @property
    def path(self) -> str:
        """The local path of the entry, for messages only."""
        return os.path.join(self.home.path, self.name)


class RestorePlan:
    """
    What a restore does.

    Attributes:
        extras: entries that are removed.
        left: local paths that the run does not have but that are not removed, each with the reason.
        unreadable: directories of the run that cannot be read, each with the error; if there are any, nothing
            is removed.
        counts: for each step, the number of paths; unchanged paths are not counted.
        taken: the directories that are restored as a whole; empty without include patterns.
        wanted: the directories that are restored at least in part; empty without include patterns.
    """

    __slots__ = ("counts", "extras", "left", "selection", "taken", "unreadable", "wanted")

    def __init__(self, selection: RestoreSelection) -> None:
        self.selection = selection
        self.extras: list[ExtraEntry] = []
        self.left: list[tuple[str, str]] = []
        self.unreadable: list[tuple[TreePath, Exception]] = []
        self.counts: dict[RestoreStep, int] = {}
        self.taken: set[TreePath] = set()
        self.wanted: set[TreePath] = set()

    @property
    def is_empty(self) -> bool:
        """Whether include patterns were given but nothing is restored, though the whole run could be read."""
        return self.selection.is_partial and not self.wanted and not self.unreadable

    def wants(self, path: TreePath, is_directory: bool) -> bool:
        """Return whether an entry is restored, at least in part; ``TreeGetOptions`` calls this."""
        if not self.selection.is_partial:
            return not self.selection.excludes(path, is_directory)
        if is_directory:
            return path in self.wanted
        return self.selection.verdict(path, False, path[:-1] in self.taken) == "take"


def check_removable(target: str, config: GridConfig) -> None:
    """
    Check that a restore may remove entries from a directory.

    Raises:
        UsageError: the target is ``/``, a mount point, or in a directory of the client; or it is or contains
            the home directory or the parent of the current directory.
    """
    real = os.path.realpath(target)
    shown = printable(target)
    if not os.path.isdir(real):
        return
    reason = ""
    if real == "/" or os.path.ismount(real):
        reason = "is the root of a file system"
    elif _identity(real) in _above(os.path.expanduser("~")):
        reason = "is your home directory, or above it"
    elif _identity(real) in _above(os.path.dirname(os.getcwd())):
        reason = "is above the current directory"
    elif _above(real) & own_directories(*_of_client(config)):
        reason = "belongs to this client or its grid"
    if reason:
        raise UsageError(
            f"--delete removes nothing from '{shown}', which {reason}; restore into another directory"
        )


def protected_directories(config: GridConfig) -> frozenset[InodeIdentity]:
    """Return the directories that are never removed, even inside another directory."""
    return own_directories(*_of_client(config), os.getcwd(), os.path.expanduser("~"))


def client_directories(config: GridConfig) -> frozenset[InodeIdentity]:
    """Return the directories of this client, from which nothing is removed."""
    return own_directories(*_of_client(config))


def _of_client(config: GridConfig) -> list[str | os.PathLike[str]]:
    found: list[str | os.PathLike[str]] = [config.directory, *config.caches]
    found += [] if config.state is None else [config.state]
    return found + ([] if config.local is None else [config.local.directory])


async def plan_restore(
    grid: ReadsFiles,
    cap: Cap,
    target: str,
    selection: RestoreSelection,
    rules: RestoreRules,
    *,
    step: Callable[[RestoreStep, TreePath, int | None], None] = lambda how, path, size: None,
) -> RestorePlan:
    """
    Find out what restoring a directory does. All its directories are read, but no files, and nothing is
    changed.

    Args:
        cap: the cap of the directory.
        target: the local directory, which need not exist.
        step: called with each step, its path, and the size of a file or None.

    Raises:
        CapError: ``cap`` is not the cap of a directory.
        SinkError: the target has too many entries that the run does not have.
    """
    planner = _Planner(RestorePlan(selection), target, rules, step)
    with walk(grid, cap, all_paths=True) as tree:
        async for met in tree:
            planner.meet(met)
    return planner.plan


class _Level(NamedTuple):
    """
    The state of a directory that the walk through the run is in.

    Attributes:
        local: the existing local directory, or None.
        mount: the file system of the local directory.
        loses: whether entries may be removed from the local directory.
        blocked: whether something else exists at the local path and is not replaced.
    """

    path: TreePath
    verdict: RestoreVerdict
    local: DirectoryFd | None
    mount: MountIdentity
    loses: bool
    blocked: bool = False


class _Planner:
    __slots__ = ("plan", "rules", "stack", "step", "target")

    def __init__(
        self,
        plan: RestorePlan,
        target: str,
        rules: RestoreRules,
        step: Callable[[RestoreStep, TreePath, int | None], None],
    ) -> None:
        self.plan = plan
        self.target = target
        self.rules = rules
        self.step = step
        self.stack: list[_Level] = []

    def meet(self, met: Found | Unreadable) -> None:
        """Record what happens to an entry that the walk has met."""
        del self.stack[len(met.path) :]
        parent = self.stack[-1] if self.stack else None
        is_directory = isinstance(met, Unreadable) or met.kind == "directory"
        verdict = self._verdict(met.path, is_directory, parent)
        if isinstance(met, Unreadable):
            if verdict != "leave":
                self.plan.unreadable.append((met.path, met.error))
            return
        if verdict == "take":
            self._take(met.path, is_directory)
        kept = restored(met.metadata)
        place = self._place(met, kept, parent)
        blocked = parent is not None and parent.blocked
        if verdict == "take" and parent is not None:
            blocked = self._note_step(met, kept, parent, place) == "blocked"
        if not is_directory:
            return
        level = self._entered(met.path, verdict, place, parent)._replace(blocked=blocked)
        self.stack.append(level)
        if level.loses and level.local is not None and met.listing is not None:
            self._find_extras(level, _local_names(met.listing.entries))

    def _entered(
        self, path: TreePath, verdict: RestoreVerdict, place: str | None, parent: _Level | None
    ) -> _Level:
        """Return the level of a directory; record the reason if nothing is removed from it."""
        above = None if parent is None else parent.local
        local = None if verdict == "leave" else _local_directory(place, above)
        loses = self.rules.protected is not None and (parent is None or parent.loses)
        mount: MountIdentity = (0, "")
        if local is None or not loses:
            return _Level(path, verdict, local, mount, False)
        obstacle = ""
        try:
            with local.entered() as inside:
                status = os.fstat(inside)
                mount = _mount_of(inside, status)
        except (OSError, SinkError) as error:
            obstacle = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        else:
            if (status.st_dev, status.st_ino) in self.rules.untouched:
                obstacle = "it belongs to this client or its grid"
            elif parent is not None and mount != parent.mount:
                obstacle = "another file system is mounted there"
        if obstacle:
            self.plan.left.append((local.path, f"nothing is removed there, since {obstacle}"))
        return _Level(path, verdict, local, mount, not obstacle)

    def _verdict(self, path: TreePath, is_directory: bool, parent: _Level | None) -> RestoreVerdict:
        if parent is None:
            return "enter" if self.plan.selection.is_partial else "take"
        if parent.verdict == "leave":
            return "leave"
        return self.plan.selection.verdict(path, is_directory, parent.verdict == "take")

    def _take(self, path: TreePath, is_directory: bool) -> None:
        if not self.plan.selection.is_partial:
            return
        if is_directory:
            self.plan.taken.add(path)
            self.plan.wanted.add(path)
        for depth in range(len(path) - 1, -1, -1):
            if path[:depth] in self.plan.wanted:
                break
            self.plan.wanted.add(path[:depth])

    def _place(self, met: Found, kept: RestoredMetadata, parent: _Level | None) -> str | None:
        """
        Return the local path of an entry; None: its directory does not exist, or no local file can have its
        name.
        """
        if parent is None:
            return self.target
        if parent.local is None:
            return None
        with suppress(SinkError):  # the restore itself reports such a name
            return os.path.join(parent.local.path, local_name(met.path[-1], kept.name))
        return None

    def _note_step(
        self, met: Found, kept: RestoredMetadata, parent: _Level, place: str | None
    ) -> RestoreStep | None:
        """Count and report the step for an entry; None: no step is needed."""
        size = None if met.kind == "directory" else immutable_size(met.cap)
        how: RestoreStep | None = "blocked"
        if not parent.blocked:
            how = _step(place, met.kind == "directory", kept, size, self.rules.force)
        if how is not None:
            self.plan.counts[how] = self.plan.counts.get(how, 0) + 1
            self.step(how, met.path, size)
        return how

    def _find_extras(self, level: _Level, names: dict[str, str]) -> None:
        """
        Record the entries that the run does not have in a local directory and in all directories below it.
        """
        assert level.local is not None
        pending = [(level.local, level.path, level.verdict == "take", names)]
        while pending:
            home, path, is_within, names = pending.pop()
            try:
                with home.entered() as inside, os.scandir(inside) as found:
                    there = sorted(found, key=lambda entry: entry.name)
                    extras = [each for each in there if not _is_known(home, each, names)]
                    below = [
                        self._add_extra(home, path, each, is_within, level.mount) for each in extras
                    ]
            except OSError as error:
                no_list = error.errno == errno.EBADF  # writable, but not readable
                why = os.strerror(errno.EACCES) if no_list else error.strerror
                self.plan.left.append((home.path, f"it cannot be listed: {why}"))
                continue
            pending += [
                (each, (*path, _composed(os.path.basename(each.path))), True, {})
                for each in below
                if each is not None
            ]

    def _add_extra(
        self,
        home: DirectoryFd,
        above: TreePath,
        entry: os.DirEntry[str],
        is_within: bool,
        mount: MountIdentity,
    ) -> DirectoryFd | None:
        """
        Record an entry that the run does not have. If it is a directory from which only a part is removed,
        because patterns exclude something in it, return the directory instead.
        """
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # it was removed meanwhile
            return None
        is_directory = stat.S_ISDIR(status.st_mode)
        place = os.path.join(home.path, entry.name)
        path = (*above, _composed(entry.name))
        if self.plan.selection.verdict(path, is_directory, is_within) != "take":
            return None
        identity = (status.st_dev, status.st_ino)
        count, obstacle = 1, ""
        if is_directory:
            assert self.rules.protected is not None
            never = self.rules.protected | self.rules.untouched
            count, obstacle = _inspected(place, path, mount, never, self.plan.selection)
        if obstacle == _EXCLUDED:
            return DirectoryFd(place, identity)
        if obstacle:
            self.plan.left.append((place, obstacle))
            return None
        if len(self.plan.extras) >= MAX_EXTRAS:
            raise SinkError(
                f"{printable(self.target)} has more than {MAX_EXTRAS} entries that the run does not "
                "have; restore into another directory"
            )
        self.plan.extras.append(ExtraEntry(home, entry.name, identity, is_directory, count))
        return None


def _is_known(home: DirectoryFd, entry: os.DirEntry[str], names: dict[str, str]) -> bool:
    """
    Return whether the run has an entry; on a file system that folds names, perhaps under another spelling.
    """
    if entry.name in names:
        return True
    folded = names.get(_folded(entry.name))
    with suppress(OSError):
        return folded is not None and os.path.samestat(
            os.lstat(os.path.join(home.path, folded)), entry.stat(follow_symlinks=False)
        )
    return False


def _local_names(entries: Iterable[Entry]) -> dict[str, str]:
    """Return the local names of entries; the keys are the names themselves and their folded forms."""
    found: dict[str, str] = {}
    for entry in entries:
        with suppress(SinkError):
            name = local_name(entry.name, restored(entry.metadata).name)
            found.setdefault(_folded(name), name)
            found[name] = name
    return found


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _composed(name: str) -> str:
    """
    Return a local name as a run stores it (normalized, NFC), since patterns are compared with such names.
    """
    return entry_name(os.fsencode(name))[0]


def _local_directory(place: str | None, above: DirectoryFd | None) -> DirectoryFd | None:
    """
    Return an existing local directory; None: it does not exist, or is a symbolic link.

    Args:
        above: the directory that contains it; None: it is the target, which may be a symbolic link.
    """
    if place is None:
        return None
    with suppress(OSError, ValueError, SinkError):
        if above is None:
            return DirectoryFd(place) if stat.S_ISDIR(os.stat(place).st_mode) else None
        with above.entered() as inside:
            found = os.stat(os.path.basename(place), dir_fd=inside, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            return DirectoryFd(place, (found.st_dev, found.st_ino))
    return None


def _step(
    place: str | None, is_directory: bool, kept: RestoredMetadata, size: int | None, force: bool
) -> RestoreStep | None:
    """Return the step that restoring an entry needs at a local path; None: the entry is present already."""
    try:
        found = None if place is None else os.lstat(place)
    except (OSError, ValueError):
        found = None
    if found is None or place is None:
        return "write"
    blocked: RestoreStep = "replace" if force and not stat.S_ISDIR(found.st_mode) else "blocked"
    if is_directory:
        return None if stat.S_ISDIR(found.st_mode) else blocked
    if kept.link is not None:
        with suppress(OSError):
            if os.readlink(os.fsencode(place)) == kept.link:
                return None
        return blocked
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        return blocked
    return None if found.st_mtime_ns == kept.mtime_ns else "compare"


_EXCLUDED = "patterns exclude something in it"


def _inspected(
    place: str,
    path: TreePath,
    mount: MountIdentity,
    protected: frozenset[InodeIdentity],
    selection: RestoreSelection,
) -> tuple[int, str]:
    """
    Return how many files and links a directory contains, and the reason why the directory is not removed; an
    empty reason: it can be removed.
    """
    count = 0
    pending = [(place, path)]
    while pending:
        directory, path = pending.pop()
        try:
            fd = os.open(directory, _OPEN)
            try:
                status = os.fstat(fd)
                if (status.st_dev, status.st_ino) in protected:
                    return (
                        0,
                        "it holds a directory that is in use by this client or shell, or your home",
                    )
                if _mount_of(fd, status) != mount:
                    return 0, "another file system is mounted in it"
                with os.scandir(fd) as found:
                    for entry in found:
                        is_directory = entry.is_dir(follow_symlinks=False)
                        below = (*path, _composed(entry.name))
                        if selection.excludes(below, is_directory):
                            return 0, _EXCLUDED
                        if is_directory:
                            pending.append((os.path.join(directory, entry.name), below))
                        else:
                            count += 1
            finally:
                os.close(fd)
        except OSError as error:
            return 0, f"{printable(directory)} cannot be read: {error.strerror}"
    return count, ""


def _mount_of(fd: int, status: os.stat_result) -> MountIdentity:
    """Return the device of an open directory and, on Linux, its mount, which differs for a bind mount."""
    with (
        suppress(OSError),
        open(f"/proc/self/fdinfo/{fd}", encoding="ascii", errors="replace") as info,
    ):
        for line in info:
            if line.startswith("mnt_id:"):
                return status.st_dev, line.partition(":")[2].strip()
    return status.st_dev, ""


# Removing.


def remove_extra(extra: ExtraEntry, protected: frozenset[InodeIdentity]) -> None:
    """
    Remove an entry of a plan; the times and mode of its parent directory do not change.

    Raises:
        SinkError: the entry cannot be removed, or was replaced since the plan was made.
    """
    try:
        with extra.home.entered() as inside, _writable(inside):
            try:
                status = os.stat(extra.name, dir_fd=inside, follow_symlinks=False)
            except FileNotFoundError:
                return
            is_directory = stat.S_ISDIR(status.st_mode)
            mount = _mount_of(inside, os.fstat(inside))
            identity = (status.st_dev, status.st_ino)
            if (identity, is_directory) != (extra.identity, extra.is_directory):
                raise SinkError("something else has this name now, so it stays")
            if is_directory:
                _remove_tree(inside, extra.name, mount, protected)
            else:
                os.unlink(extra.name, dir_fd=inside)
    except (OSError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is nested too deeply"
        raise SinkError(f"cannot remove {printable(extra.path)}: {reason}") from error


def _remove_tree(
    inside: int, name: str, mount: MountIdentity, protected: frozenset[InodeIdentity]
) -> None:
    fd = os.open(name, _OPEN, dir_fd=inside)
    try:
        status = os.fstat(fd)
        if _mount_of(fd, status) != mount or (status.st_dev, status.st_ino) in protected:
            raise SinkError("it is in use, or another file system is mounted in it, so it stays")
        with _writable(fd):
            with os.scandir(fd) as found:
                entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
            for each, is_directory in entries:
                if is_directory:
                    _remove_tree(fd, each, mount, protected)
                else:
                    os.unlink(each, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=inside)


@contextmanager
def _writable(fd: int) -> Iterator[None]:
    """Make a directory writable for its owner; at the end, restore its mode and times."""
    before = os.fstat(fd)
    mode = stat.S_IMODE(before.st_mode)
    needed = mode | stat.S_IRWXU
    if needed != mode:
        with suppress(OSError):
            os.fchmod(fd, needed)
    try:
        yield
    finally:
        if needed != mode:
            with suppress(OSError):
                os.fchmod(fd, mode)
        with suppress(OSError):
            os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))


def _identity(path: str) -> InodeIdentity:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _above(path: str) -> frozenset[InodeIdentity]:
    """Return a directory and all directories above it."""
    real = Path(os.path.realpath(path))
    return own_directories(real, *real.parents)
