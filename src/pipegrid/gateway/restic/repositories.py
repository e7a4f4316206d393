"""
Repositories of restic: directories below the directory of the client's alias ``restic``.

A repository has one directory for each kind of object; its objects are immutable files. The layout is that of
restic on a disk, so restic can open what ``pipegrid get -r`` fetches. ``data`` is split into 256 directories
by the first byte of the id, so linking a pack publishes only one of them; concurrent links become one
publish. ``private/aliases`` has the alias's write cap, written when the first repository is created.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, DeferredList, DeferredLock
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, parse_cap
from pipegrid.errors import ChildExists, UnhappyError, UsageError
from pipegrid.gateway.restic.object_directory import ListMemory, ObjectDirectory
from pipegrid.gateway.restic.repository_paths import (
    CONFIG,
    DATA,
    INDEX,
    KEYS,
    KINDS,
    LOCKS,
    SNAPSHOTS,
    bucket_of,
    is_bucket,
    is_object_id,
)
from pipegrid.reactor.deferreds import Waiters, gather
from pipegrid.transfer.put.source import SourceLike
from pipegrid.tree.aliases import add_alias, read_aliases
from pipegrid.tree.directory import check_writable
from pipegrid.tree.tree_grid import Grid

LISTS_AT_ONCE = 16
"""How many subdirectories of ``data`` are read at the same time for a list."""

KEYS_S = 2.0
"""Maximum age of a cached list of keys, in seconds."""

MAX_KEYS = 20
"""Maximum number of keys that are read in advance; restic tries up to this many."""

MAX_HELD_LOCKS = 100
MAX_LOCK_BYTES = 64 << 10
"""Maximum size of a lock that is held in memory; restic's locks have about 200 bytes."""

SMALL_KINDS = (CONFIG, KEYS)

INLINE_KINDS = (CONFIG, KEYS, SNAPSHOTS)
INLINE_BYTES = 1 << 10
"""
Objects of ``INLINE_KINDS`` up to this size are stored as literal caps in their directory. This saves one of
two round trips when they are stored, and all when they are read. Locks are not stored so: if a publish of the
directory reached too few servers, a lock would count as not stored, although some servers have it.
"""

AHEAD_S = 1.0
"""Maximum age of a list that was read in advance, in seconds."""

_LISTED_TOGETHER = {INDEX: SNAPSHOTS, SNAPSHOTS: INDEX}
"""Listing one of these kinds reads the other in advance: restic lists both, one after the other."""

File = ChkCap | LitCap


# Each command of restic first reads keys and config, so the gateway caches their contents.

SMALL_BYTES = 16 << 10
"""Maximum size of an object whose content is cached; a config has 155 bytes, a key about 450."""

MAX_SMALL = 256
"""Maximum number of cached contents."""

SMALL_S = 60.0
"""How long a content stays in the cache; until then, a loss of the object on the grid is not noticed."""


class SmallObjects:
    """
    Contents of small objects by cap, cached for a minute; concurrent requests for a content share one fetch.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._kept: OrderedDict[ChkCap, tuple[float, bytes]] = OrderedDict()
        self._fetching: dict[ChkCap, Waiters[bytes]] = {}

    def fetch(self, cap: ChkCap) -> Deferred[bytes]:
        """
        Fire with the content of a small object.

        Fails as ``Grid.read`` does.
        """
        waiters = self._fetching.get(cap)
        if waiters is not None:
            return waiters.wait()
        waiters = self._fetching[cap] = Waiters()
        waiting = waiters.wait()
        known = self._kept.get(cap)
        if known is not None and self._grid.clock.seconds() < known[0]:
            self._ended(known[1], cap)
        else:
            self._grid.read(cap).addCallback(self._keep, cap).addBoth(self._ended, cap)
        return waiting

    def _keep(self, data: bytes, cap: ChkCap) -> bytes:
        self._kept[cap] = self._grid.clock.seconds() + SMALL_S, data
        self._kept.move_to_end(cap)
        while len(self._kept) > MAX_SMALL:
            self._kept.popitem(last=False)
        return data

    def _ended(self, result: bytes | Failure, cap: ChkCap) -> None:
        waiters = self._fetching.pop(cap)
        if isinstance(result, bytes):
            waiters.fire(result)
        else:
            assert isinstance(result.value, Exception)
            waiters.fail(result.value)


def is_small(cap: ChkCap | LitCap) -> bool:
    """Return whether an object is small enough for its content to be cached."""
    return isinstance(cap, ChkCap) and cap.size <= SMALL_BYTES


# A repository.


class ObjectExists(Exception):
    """The repository has another ``config``, which is never replaced."""


class Repository:
    """
    One repository of restic.

    When ``store`` returns, the object is stored and linked. The directory for its link is read or created
    while the object is stored.

    restic stores a **lock** even before it reads a repository. If too few servers are reachable to store the
    lock, it is held in memory, so that restic can still read. Other changes first store these locks, and fail
    if that fails.

    Args:
        directory: the repository's directory.
        small: contents of small objects.
    """

    def __init__(self, grid: Grid, directory: ObjectDirectory, small: SmallObjects) -> None:
        self._grid = grid
        self._directory = directory
        self._small = small
        self._held: dict[str, LitCap] = {}
        self._lock_events = 0
        self._ahead: dict[str, tuple[int, float]] = {}

    async def make_directories(self) -> None:
        """Create the missing directories of a new repository."""
        await self._directory.read()
        made = map(self._directory.made_subdirectory, KINDS)
        await gather([Deferred.fromCoroutine(each) for each in made])

    # Reading.

    def look_ahead(self) -> None:
        """
        Start reading what each command of restic reads first: keys, config, and the list of locks.

        Errors are ignored: requests that need these objects report them.
        """
        self._read_ahead(LOCKS)
        for kind in (CONFIG, KEYS):
            Deferred.fromCoroutine(self._read_small(kind)).addErrback(lambda _: None)

    async def _read_small(self, kind: str) -> None:
        if kind == CONFIG:
            children = {CONFIG: await self._directory.find(CONFIG)}
        else:
            directory = await self._directory.subdirectory(kind)
            children = {} if directory is None else dict(await directory.read_since(KEYS_S))
        caps = [cap for cap in children.values() if isinstance(cap, ChkCap) and is_small(cap)]
        await DeferredList([self._small.fetch(cap) for cap in caps[:MAX_KEYS]], consumeErrors=True)

    # Commands of restic use locks to agree which of them may go on: each stores a lock and then lists all
    # locks. So a list that was read in advance is used only if no command has stored or listed a lock since
    # that read began. Then the list is newer than the last lock of the command that asks for it.

    def _read_ahead(self, kind: str) -> None:
        self._ahead[kind] = self._lock_events, self._grid.clock.seconds()

        async def read() -> None:
            directory = await self._directory.subdirectory(kind)
            if directory is not None:
                await directory.read()

        Deferred.fromCoroutine(read()).addErrback(lambda _: None)

    async def _listed(self, kind: str, directory: ObjectDirectory) -> Mapping[str, Cap]:
        """Return the content of the directory of a kind: read now, or in advance if that is recent enough."""
        if kind == KEYS:  # each command lists the keys when it begins
            return await directory.read_since(KEYS_S)
        events, began_s = self._ahead.pop(kind, (-1, 0.0))
        age_s = self._grid.clock.seconds() - began_s
        if events == self._lock_events and age_s <= AHEAD_S:
            return await directory.read_since(age_s)
        return await directory.read()

    async def content(self, kind: str, found: File) -> bytes | None:
        """
        Return the content of an object if its cap contains it, or if it is a small config or key, which are
        cached; otherwise None.
        """
        if isinstance(found, LitCap):
            return found.data
        return await self._small.fetch(found) if kind in SMALL_KINDS and is_small(found) else None

    async def find(self, kind: str, object_id: str) -> File | None:
        """Return the cap of an object; None if the object does not exist."""
        if kind == LOCKS and object_id in self._held:
            return self._held[object_id]
        directory = await self._directory_of(kind, object_id)
        found = None if directory is None else await directory.find(object_id or kind)
        return found if isinstance(found, ChkCap | LitCap) else None

    async def objects(self, kind: str) -> AsyncIterator[list[tuple[str, int]]]:
        """Yield ids and sizes in bytes of all objects of a kind, one directory at a time."""
        directory = await self._directory.subdirectory(kind)
        if directory is None:
            return
        if kind in _LISTED_TOGETHER and kind not in self._ahead:
            self._read_ahead(_LISTED_TOGETHER[kind])
        children = await self._listed(kind, directory)
        if kind == LOCKS:
            self._lock_events += 1
        if kind != DATA:
            held = self._held if kind == LOCKS else {}
            yield _objects({**children, **held})
            return
        waiting = deque(
            (name, directory.opened(name, cap))
            for name, cap in sorted(children.items())
            if is_bucket(name)
        )
        running: deque[tuple[str, Deferred[Mapping[str, Cap]]]] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < LISTS_AT_ONCE:
                    name, bucket = waiting.popleft()
                    running.append((name, bucket.read()))
                name, reading = running[0]
                found = _objects(await reading)
                running.popleft()
                yield [each for each in found if bucket_of(each[0]) == name]
        finally:
            for _, reading in running:
                reading.addErrback(lambda _: None)
                reading.cancel()

    # Changing.

    async def store(self, kind: str, object_id: str, source: SourceLike) -> None:
        """
        Store an object; return when it is linked.

        Args:
            source: as for ``Grid.put``; its SHA-256 has been checked. It is read twice.

        Raises:
            ObjectExists: the repository has a ``config`` with different content.
            PipegridError: the grid failed.
        """
        if kind == LOCKS:
            try:
                await self._store_lock(object_id, source)
            finally:
                self._lock_events += 1
            return
        await self._store_held()
        await self._store(kind, object_id, source)

    async def _store(self, kind: str, object_id: str, source: SourceLike) -> None:
        data = _small_content(source, INLINE_BYTES) if kind in INLINE_KINDS else None
        if data is not None:
            directory = await self._made_directory(kind, object_id)
            await self._link(directory, kind, object_id, LitCap(data))
            return
        looking = Deferred.fromCoroutine(self._ready_directory(kind, object_id))
        try:
            # With convergence, an object that restic sends again after an interruption need not be uploaded
            # again. restic encrypts objects, so equal objects reveal nothing about the files.
            stored = await self._grid.put(source)
        except BaseException:
            looking.addErrback(lambda _: None)
            looking.cancel()
            raise
        await self._link(await looking, kind, object_id, stored.cap)

    async def _link(
        self, directory: ObjectDirectory, kind: str, object_id: str, cap: ChkCap | LitCap
    ) -> None:
        name = object_id or kind
        try:
            await directory.link(name, cap, replace=kind != CONFIG)
        except ChildExists:
            if await directory.find(name) != cap:
                raise ObjectExists from None

    async def _ready_directory(self, kind: str, object_id: str) -> ObjectDirectory:
        directory = await self._made_directory(kind, object_id)
        with suppress(Exception):  # after a failure here, the link fails as well and reports it
            await directory.look_ahead()
        return directory

    async def remove(self, kind: str, object_id: str) -> None:
        """
        Remove an object, if it exists: drop a lock that is held in memory; unlink any other object, and
        return when the changed directory is stored.
        """
        if kind == LOCKS:
            if self._held.pop(object_id, None) is not None:
                return
        else:
            await self._store_held()
        directory = await self._directory_of(kind, object_id)
        if directory is not None:
            await directory.unlink(object_id or kind)

    async def _directory_of(self, kind: str, object_id: str) -> ObjectDirectory | None:
        if kind == CONFIG:
            return self._directory
        directory = await self._directory.subdirectory(kind)
        if kind != DATA or directory is None:
            return directory
        return await directory.subdirectory(bucket_of(object_id))

    async def _made_directory(self, kind: str, object_id: str) -> ObjectDirectory:
        if kind == CONFIG:
            return self._directory
        made = await self._directory.made_subdirectory(kind)
        return await made.made_subdirectory(bucket_of(object_id)) if kind == DATA else made

    # Locks.

    async def _store_lock(self, object_id: str, source: SourceLike) -> None:
        try:
            await self._store(LOCKS, object_id, source)
        except UnhappyError:
            data = _small_content(source, MAX_LOCK_BYTES)
            if data is None or len(self._held) >= MAX_HELD_LOCKS:
                raise
            self._held[object_id] = LitCap(data)

    async def _store_held(self) -> None:
        for object_id, lock in list(self._held.items()):
            await self._store(LOCKS, object_id, lock.data)
            self._held.pop(object_id, None)


def _objects(children: Mapping[str, Cap]) -> list[tuple[str, int]]:
    """Return ids and sizes of the children whose names are restic's ids."""
    return [
        (name, cap.size)
        for name, cap in children.items()
        if is_object_id(name) and isinstance(cap, ChkCap | LitCap)
    ]


def _small_content(source: Any, most_bytes: int) -> bytes | None:
    """Return the content of a source; None if it has more than ``most_bytes``."""
    if isinstance(source, bytes):
        return source if len(source) <= most_bytes else None
    source.seek(0)
    data: bytes = source.read(most_bytes + 1)
    source.seek(0)
    return data if len(data) <= most_bytes else None


ALIAS = "restic"
MAX_OPEN = 64
"""Maximum number of repositories that are kept open."""


class Repositories:
    """
    All repositories of a client.

    Args:
        directory: the client's directory.
    """

    def __init__(self, grid: Grid, directory: Path) -> None:
        self._grid = grid
        self._path = directory
        self._memory = ListMemory()
        self._root: ObjectDirectory | None = None
        self._small = SmallObjects(grid)
        self._open: OrderedDict[Cap, Repository] = OrderedDict()
        self._making = DeferredLock()

    async def open(self, folders: Sequence[str], *, fresh: bool = False) -> Repository | None:
        """
        Return a repository; None if it does not exist.

        Args:
            fresh: read again what other clients may have changed, and start reading what restic needs next.

        Raises:
            UsageError, CapError: the alias does not name a directory that can be changed.
            PipegridError: the grid failed.
        """
        here = self._find_root()
        if here is not None and fresh:
            way = _known_way(here, folders)
            if len(way) > len(folders):
                self._opened(way[-1]).look_ahead()
            await gather([each.read() for each in way])
        for name in folders:
            here = None if here is None else await here.subdirectory(name)
        return None if here is None else self._opened(here)

    async def make(self, folders: Sequence[str]) -> None:
        """
        Create a repository, if it does not exist.

        Raises: as ``open``; and SinkError: the alias cannot be written.
        """
        here = self._find_root() or await self._make_root()
        for name in folders:
            await here.read()
            here = await here.made_subdirectory(name)
        await self._opened(here).make_directories()

    def _opened(self, directory: ObjectDirectory) -> Repository:
        if directory.cap not in self._open:
            self._open[directory.cap] = Repository(self._grid, directory, self._small)
        self._open.move_to_end(directory.cap)
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return self._open[directory.cap]

    def _find_root(self) -> ObjectDirectory | None:
        text = read_aliases(self._path).get(ALIAS)
        if text is None:
            return None
        cap = parse_cap(text)
        if self._root is None or self._root.cap != cap:
            check_writable(cap, f"the directory of the alias '{ALIAS}'")
            assert isinstance(cap, DirectoryCap)
            self._root = ObjectDirectory(self._grid, cap, self._memory)
        return self._root

    async def _make_root(self) -> ObjectDirectory:
        async with self._making:
            found = self._find_root()
            if found is None:
                made = await self._grid.create_directory()
                try:
                    add_alias(self._path, ALIAS, str(made.cap))
                except UsageError:  # another process has added the alias meanwhile
                    if self._find_root() is None:
                        raise
                found = self._find_root()
            assert found is not None
            return found


def _known_way(root: ObjectDirectory, folders: Sequence[str]) -> list[ObjectDirectory]:
    """
    Return the directories on the path from the root to a repository, as far as cached lists contain them.
    """
    way = [root]
    for name in folders:
        cap = way[-1].known(name)
        if not isinstance(cap, DirectoryCap):
            break
        way.append(way[-1].opened(name, cap))
    return way
