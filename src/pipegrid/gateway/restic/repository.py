"""
A repository of restic: directories by kind, below them immutable files.

It has the layout that restic has on a disk, ``data`` split into 256 directories by the first byte of the id:
what ``pipegrid get -r`` fetches is a repository that restic opens. So a pack is linked by a publish of a
256th of all links; links that are asked for at the same time are joined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.core.caps import Cap, ChkCap, LitCap
from pipegrid.errors import ChildExists, UnhappyError
from pipegrid.gateway.restic.object_directory import ObjectDirectory
from pipegrid.gateway.restic.repository_paths import (
    CONFIG,
    DATA,
    KINDS,
    LOCKS,
    bucket_of,
    is_bucket,
    is_object_id,
)
from pipegrid.reactor.deferreds import gather
from pipegrid.transfer.put.source import SourceLike
from pipegrid.tree.public_grid import Grid

LISTS_AT_ONCE = 16
"""Directories of ``data`` that are read at once for a list."""

MAX_HELD_LOCKS = 100
MAX_LOCK_BYTES = 64 << 10
"""Of a lock that is held in memory; restic's have some 200."""

File = ChkCap | LitCap


class ObjectExists(Exception):
    """There is another ``config``, which is never replaced."""


class Repository:
    """
    One repository.

    An object that has been stored is durable and linked; the directory that it goes to is looked at, or
    made, while it is stored.

    **Locks** of a grid that has too few servers to store anything are held in memory: restic locks a
    repository before it reads it. Nothing else is changed until they are stored.

    Args:
        directory: its own.
    """

    def __init__(self, grid: Grid, directory: ObjectDirectory) -> None:
        self._grid = grid
        self._directory = directory
        self._held: dict[str, LitCap] = {}

    async def make_directories(self) -> None:
        """Make what is missing of a new repository."""
        await self._directory.read()
        await gather(
            [
                Deferred.fromCoroutine(self._directory.subdirectory(kind, make=True))
                for kind in KINDS
            ]
        )

    async def refresh(self) -> None:
        """Look what has become of the repository's own directory."""
        await self._directory.read()

    # Reading.

    async def find(self, kind: str, object_id: str) -> File | None:
        """Return the cap of an object; None if there is none."""
        if kind == LOCKS and object_id in self._held:
            return self._held[object_id]
        directory = await self._directory_of(kind, object_id)
        found = None if directory is None else await directory.find(object_id or kind)
        return found if isinstance(found, ChkCap | LitCap) else None

    async def objects(self, kind: str) -> AsyncIterator[list[tuple[str, int]]]:
        """Yield ids and sizes in bytes of all objects of a kind, a directory's at a time."""
        directory = await self._directory.subdirectory(kind)
        if directory is None:
            return
        children = await directory.read()
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
        Store an object; returns when it is linked.

        Args:
            source: what ``Grid.put`` takes; its bytes have been checked. It is read twice.

        Raises:
            ObjectExists: there is a ``config`` already, with other content.
            PipegridError: the grid failed.
        """
        if kind == LOCKS:
            await self._store_lock(object_id, source)
            return
        await self._store_held()
        await self._store(kind, object_id, source)

    async def _store(self, kind: str, object_id: str, source: SourceLike) -> None:
        looking: Deferred[ObjectDirectory] = Deferred.fromCoroutine(
            self._ready_directory(kind, object_id)
        )
        looking.addErrback(lambda failure: failure)
        try:
            # Convergent: what restic sends again after an interruption is on the servers already. It is
            # encrypted by restic, so that equal content says nothing of what was backed up.
            stored = await self._grid.put(source)
        except BaseException:
            looking.addErrback(lambda _: None)
            looking.cancel()
            raise
        directory = await looking
        name = object_id or kind
        try:
            await directory.link(name, stored.cap, replace=kind != CONFIG)
        except ChildExists:
            if await directory.find(name) != stored.cap:
                raise ObjectExists from None

    async def _ready_directory(self, kind: str, object_id: str) -> ObjectDirectory:
        directory = await self._directory_of(kind, object_id, make=True)
        assert directory is not None
        with suppress(Exception):  # the change will meet it again, and say so
            await directory.look_ahead()
        return directory

    async def remove(self, kind: str, object_id: str) -> None:
        """Unlink an object, if it is there; returns when that is stored."""
        if kind == LOCKS:
            if self._held.pop(object_id, None) is not None:
                return
        else:
            await self._store_held()
        directory = await self._directory_of(kind, object_id)
        if directory is not None:
            await directory.unlink(object_id or kind)

    async def _directory_of(
        self, kind: str, object_id: str, *, make: bool = False
    ) -> ObjectDirectory | None:
        if kind == CONFIG:
            return self._directory
        directory = await self._directory.subdirectory(kind, make=make)
        if kind != DATA or directory is None:
            return directory
        return await directory.subdirectory(bucket_of(object_id), make=make)

    # Locks.

    async def _store_lock(self, object_id: str, source: SourceLike) -> None:
        try:
            await self._store(LOCKS, object_id, source)
        except UnhappyError:
            data = _small_content(source)
            if data is None or len(self._held) >= MAX_HELD_LOCKS:
                raise
            self._held[object_id] = LitCap(data)

    async def _store_held(self) -> None:
        for object_id, lock in list(self._held.items()):
            await self._store(LOCKS, object_id, lock.data)
            self._held.pop(object_id, None)


def _objects(children: Mapping[str, Cap]) -> list[tuple[str, int]]:
    """Return ids and sizes of what restic has stored; other names are not its own."""
    return [
        (name, cap.size)
        for name, cap in children.items()
        if is_object_id(name) and isinstance(cap, ChkCap | LitCap)
    ]


def _small_content(source: Any) -> bytes | None:
    """Return the content of a source that may be held in memory."""
    if isinstance(source, bytes):
        return source if len(source) <= MAX_LOCK_BYTES else None
    source.seek(0)
    data: bytes = source.read(MAX_LOCK_BYTES + 1)
    return data if len(data) <= MAX_LOCK_BYTES else None
