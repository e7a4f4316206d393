"""
The lock between processes of a client that store, or link what is stored, and a process that releases leases.

A put that finds its file on servers relies on this client's lease of an earlier put. So no process of the
client can store while another process releases leases. Any number of processes can store at the same time.

A process that has stored keeps the shared lock until it ends, since it may still link the stored objects. A
gateway does not end, so it releases the lock when it has stored and changed nothing for ``IDLE_S``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from pipegrid.disk.safe_open import CannotLock, open_locked
from pipegrid.errors import SinkError, UsageError
from pipegrid.reactor.deferreds import Timer

NAME = "storing.lock"

WAIT_S = 60.0
"""How long a process waits for the lock. A release of 10,000 leases takes a few seconds."""

IDLE_S = 900.0
"""How long a gateway keeps the lock after storing something; by then, clients have linked the new objects."""

_RETRY_S = 0.25
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})


class StoringLock:
    """
    One process's use of the lock.

    Args:
        states: directories; the first contains the lock file. If empty, nothing is locked, and leases cannot
            be released early.
    """

    def __init__(self, states: Sequence[Path], clock: IReactorTime) -> None:
        self._path = states[0] / NAME if states else None
        self._clock = clock
        self._fd = -1
        self._is_shared = False
        self._using = 0
        self._leaves_when_idle = False
        self._idle_since = 0.0
        self._leaving = Timer(clock, self._leave)

    def leave_when_idle(self) -> None:
        """
        From now on, release the lock when nothing was stored for ``IDLE_S``; for a process that does not end,
        such as a gateway.
        """
        self._leaves_when_idle = True

    async def share(self) -> None:
        """
        Take the lock as a process that stores, if the file system has locks. The caller calls ``stored`` when
        its operation has ended.

        Raises:
            UsageError: another process has been releasing leases for ``WAIT_S``.
            SinkError: the lock cannot be opened now, for example for lack of file descriptors.
        """
        if self._path is not None and not (self._fd >= 0 and self._is_shared):
            await self._share(self._path)
        self._using += 1

    async def _share(self, path: Path) -> None:
        try:
            taken = await self._take(path, shared=True)
        except CannotLock:  # without locks, no process can release leases
            self._path = None
            return
        except OSError as error:
            if error.errno in _EXHAUSTED:
                raise SinkError(
                    f"cannot lock {path}: {error.strerror}; nothing was stored: try again"
                ) from error
            return  # without the lock, no process can release leases; try again at the next call
        if not taken:
            raise UsageError(
                "'pipegrid prune' is releasing leases of this client, so nothing can be stored now; try "
                "again when it has ended"
            )

    def stored(self) -> None:
        """Record that an operation that has called ``share`` has ended."""
        self._using -= 1
        if not self._using and self._leaves_when_idle and self._fd >= 0:
            self._idle_since = self._clock.seconds()
            self._leaving.set(IDLE_S)

    async def __aenter__(self) -> None:
        await self.share()

    async def __aexit__(self, *_: object) -> None:
        self.stored()

    def _leave(self) -> None:
        if not self._using:  # otherwise ``stored`` sets the timer again
            left_s = self._idle_since + IDLE_S - self._clock.seconds()
            if left_s > 0:
                self._leaving.set(left_s)
            else:
                self.release()

    async def exclude(self) -> None:
        """
        Take the lock as the process that releases leases; no process can store then.

        Raises:
            UsageError: other processes have been storing for ``WAIT_S``, or the client has no directory for
                the lock.
            SinkError: the file system has no locks, or cannot be written.
        """
        if self._path is None:
            raise UsageError("this client keeps no state, so its leases cannot be released early")
        if not self._using:
            self.release()  # the shared lock, kept after earlier operations of this process
        try:
            taken = await self._take(self._path, shared=False)
        except OSError as error:
            raise SinkError(
                f"cannot lock {self._path}: {error.strerror or error}; no lease was released"
            ) from error
        if not taken:
            raise UsageError(
                "another process of this client stores files; nothing was released: try again when it has "
                f"ended or, if it is a gateway, has stored nothing for {IDLE_S / 60:.0f} minutes"
            )

    async def _take(self, path: Path, *, shared: bool) -> bool:
        ends_s = self._clock.seconds() + WAIT_S
        while True:
            try:
                # Another user's process, such as root's, may have made the file; a reader's permission is
                # enough to share the lock.
                flags = os.O_CREAT | (os.O_RDONLY if shared else os.O_RDWR)
                fd = open_locked(str(path), flags, shared=shared, mode=0o644)
            except FileNotFoundError:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            if fd is not None:
                self.release()  # another call may have taken the lock meanwhile
                self._fd, self._is_shared = fd, shared
                return True
            if self._clock.seconds() >= ends_s:
                return False
            await deferLater(self._clock, _RETRY_S)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        self._leaving.stop()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
