"""
``access.blacklist``: objects that no caller gets, even with their capability.

Each line is a storage index and a reason. The file is read again whenever it has changed. If the file cannot
be read, every object is blocked, since the file may forbid any of them.
"""

from __future__ import annotations

import os
from pathlib import Path

from pipegrid.core import base32
from pipegrid.core.caps import Cap, UnknownCap, as_cap
from pipegrid.core.text import printable
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import AccessProhibited
from pipegrid.grid.tahoe_settings_check import BLACKLIST_NAME

MAX_BYTES = 16 << 20


class AccessBlacklist:
    """
    The blacklist of one client's directory.

    Args:
        directory: the client's directory; the blacklist may be missing, and may appear later.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / BLACKLIST_NAME
        self._seen: tuple[int, int, int] | None = None
        self._reasons: dict[str, str] = {}

    def check(self, cap: Cap | str | None) -> None:
        """
        Raise an error if the blacklist names the object of a cap.

        Raises:
            AccessProhibited: the object is blocked.
        """
        cap = as_cap(cap) if isinstance(cap, str) else cap
        if cap is None or isinstance(cap, UnknownCap):
            return
        index = cap.storage_index
        if index is None:
            return
        reason = self._current().get(base32.encode(index))
        if reason is not None:
            raise AccessProhibited(f"Access Prohibited: {printable(reason)}")

    def _current(self) -> dict[str, str]:
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            self._seen, self._reasons = None, {}
            return self._reasons
        except OSError as error:
            raise self._unreadable(error) from error
        seen = (found.st_mtime_ns, found.st_size, found.st_ino)
        if seen != self._seen:
            self._reasons = self._read()
            self._seen = seen
        return self._reasons

    def _read(self) -> dict[str, str]:
        try:
            data = read_file(self._path, MAX_BYTES + 1)
        except OSError as error:
            raise self._unreadable(error) from error
        if len(data) > MAX_BYTES:
            raise AccessProhibited(
                f"Access Prohibited: {self._path} has more than {MAX_BYTES} bytes; shorten it"
            )
        reasons: dict[str, str] = {}
        for line in data.decode("utf-8", "replace").splitlines():
            index, _, reason = line.strip().partition(" ")
            if index and not index.startswith("#"):
                reasons[index] = reason.strip()
        return reasons

    def _unreadable(self, error: OSError) -> AccessProhibited:
        return AccessProhibited(
            f"Access Prohibited: cannot read {self._path}: {error.strerror}; it may forbid access"
        )
