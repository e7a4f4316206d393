"""
The lock between a client's processes that store, or link what is stored, and the one that releases leases.

A put that finds its file on servers relies on this client's lease of an earlier put. So no process of the
client stores anything while another one releases leases; any number may store at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from pipegrid.disk.safe_open import open_locked
from pipegrid.errors import SinkError, UsageError

NAME = "storing.lock"

WAIT_S = 60.0
"""How long a process waits for others. A release of 10,000 leases takes a few seconds."""

_RETRY_S = 0.25
_FLAGS = os.O_RDWR | os.O_CREAT


class StoringLock:
    """
    One process's part of the lock.

    Args:
        caches: of the client's configuration; without any nothing is locked, as no state is kept either.
    """

    def __init__(self, caches: Sequence[Path], clock: IReactorTime) -> None:
        self._path = caches[0] / NAME if caches else None
        self._clock = clock
        self._fd = -1

    async def share(self) -> None:
        """
        Take part as a process that stores; a second call does nothing.

        Raises:
            UsageError: another process has been releasing leases for ``WAIT_S``.
        """
        if self._fd >= 0 or self._path is None:
            return
        try:
            if not await self._take(self._path, shared=True):
                raise UsageError(
                    "'pipegrid prune' is releasing leases of this client, so nothing can be stored now; try "
                    "again when it has ended"
                )
        except OSError:  # no locks, or nothing can be written here: then no process releases leases
            self._path = None

    async def exclude(self) -> None:
        """
        Exclude processes that store.

        Raises:
            UsageError: other processes have been storing for ``WAIT_S``.
            SinkError: the file system has no locks, or cannot be written.
        """
        if self._path is None:
            raise UsageError("this client keeps no state, so its leases cannot be released early")
        try:
            taken = await self._take(self._path, shared=False)
        except OSError as error:
            raise SinkError(
                f"cannot lock {self._path}: {error.strerror or error}; no lease was released"
            ) from error
        if not taken:
            raise UsageError(
                "another process of this client stores files, perhaps a gateway; nothing was released: try "
                "again when it has ended"
            )

    async def _take(self, path: Path, *, shared: bool) -> bool:
        ends_s = self._clock.seconds() + WAIT_S
        while True:
            try:
                fd = open_locked(str(path), _FLAGS, shared=shared, mode=0o600)
            except FileNotFoundError:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            if fd is not None:
                self.release()  # another call of this process may have taken it meanwhile
                self._fd = fd
                return True
            if self._clock.seconds() >= ends_s:
                return False
            await deferLater(self._clock, _RETRY_S)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
