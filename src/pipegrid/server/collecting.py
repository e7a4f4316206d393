"""Removing shares whose leases have run out, from time to time, where the clock can be believed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from twisted.logger import Logger

from pipegrid.storage.expiry import Expiry
from pipegrid.storage.steadytime import SteadyDate, look
from pipegrid.storage.store import ShareStore

log = Logger()


class Collecting:
    """
    Args:
        storage: the directory, for the note of when it was looked.
        expiry: what is removed. If all leases end that were not renewed since a day, no clock is asked.
        date: by which leases are made; told what each look believes.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        store: ShareStore,
        storage: Path,
        expiry: Expiry,
        date: SteadyDate,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._storage = storage
        self._expiry = expiry
        self._date = date
        self._clock = clock

    def __call__(self) -> int:
        """
        Remove what is to be; returns how many shares. It may take long; call it in a thread.
        """
        now = self._clock()  # once: what is believed is no later reading
        if self._expiry.renewed_since is None:
            try:
                looks = look(self._storage, now)
            except FileNotFoundError:
                return 0  # there is no storage directory, and so no share
            except OSError as error:
                log.warn(
                    "leases that have run out are kept: {storage} takes no note of when they were looked "
                    "at ({reason}); make it writable",
                    storage=str(self._storage),
                    reason=error.strerror or str(error),
                )
                return 0
            self._date.looked(looks)
            if looks.held_s:
                log.info(
                    "leases that have run out are kept for {days:.1f} more days: this server has not looked "
                    "at them regularly until now, or its clock was wrong, and clients may renew them",
                    days=looks.held_s / 86400,
                )
                return 0
        return self._store.collect_garbage(self._expiry, now)
