"""
What clients complain about, kept for the operator: a file for each, as Tahoe-LAFS's servers do.

At most 1000 are kept, of at most 32768 bytes each: they must not fill the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from pipegrid.core import base32, dates
from pipegrid.core.text import harmless
from pipegrid.disk import files as disk
from pipegrid.disk.private import PRIVATE_FILE, make_private

MAX_ADVISORIES = 1000
MAX_REASON_BYTES = 32768


class Advisories:
    """
    All that were kept in one directory, which is made if it is missing.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, directory: str, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._full_minute: int | None = None  # in which there were too many

    def keep(self, storage_index: bytes, share_number: int, reason: str, mutable: bool) -> bool:
        """
        Write one complaint down, unless there are too many already; returns whether that was done.

        Once there are too many, it is looked once a minute whether there still are.

        Raises:
            ServerRefused: the disk failed.
        """
        now = self._clock()
        minute = int(now // 60)
        if minute == self._full_minute:
            return False
        kept = self._write(now, storage_index, share_number, reason, mutable)
        if not kept:
            self._full_minute = minute
        return kept

    def _write(
        self, now: float, storage_index: bytes, share_number: int, reason: str, mutable: bool
    ) -> bool:
        kind = "mutable" if mutable else "immutable"
        index = base32.encode(storage_index)
        when = dates.utc(now)
        path = f"{self._directory}/{when:%Y-%m-%dT%H%M%S.%f}--{index}-{share_number}"
        try:
            make_private(self._directory)
            if len(os.listdir(self._directory)) >= MAX_ADVISORIES:
                return False
            # It will be looked at in a terminal.
            safe = harmless(reason[:MAX_REASON_BYTES]).encode("utf-8", "replace")
            text = safe[:MAX_REASON_BYTES].decode("utf-8", "ignore")
            with suppress(FileExistsError):
                _make(
                    path,
                    f"time: {when:%Y-%m-%dT%H:%M:%S}Z\nshare type: {kind}\n"
                    f"storage index: {index}\nshare number: {share_number}\n\n{text}\n",
                )
        except OSError as error:
            raise disk.disk_error(error, f"keep an advisory in {self._directory!r}") from error
        return True


def _make(path: str, text: str) -> None:
    """Make a file; if the disk does not take all of it, there is none."""
    with open(path, "x", encoding="utf-8", opener=_open_private) as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            os.unlink(path)
            raise


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)
