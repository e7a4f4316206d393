"""
Which servers took bundles of small shares in earlier processes, kept in a small JSON file.

It is only a hint: a server that takes none any more refuses the first bundle, and gets ordinary requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.safe_open import read_file

LIMITS_NAME = "bundle_limits.json"
MAX_SERVERS = 1000
"""Servers that are remembered; of more, the first that were heard of are forgotten."""

_MAX_BYTES = 256 << 10
_MAX_BUNDLE_BYTES = 1 << 30


class TakesBundles(Protocol):
    """A server; ``transport.gbs.client.GbsServer`` is one."""

    @property
    def bundle_bytes(self) -> int:
        """The longest bundle that it takes, as far as it is known now; 0: none."""


class BundleLimits:
    """
    The longest bundle that each server takes, in bytes, as far as this client knows.

    Without it the first files of each command are sent by ordinary requests, until the first response shows
    that the server takes bundles: a tenth of the time of a thousand files 100 ms away (measured).

    Args:
        directories: where to look for the file; only the first is written. If empty, nothing is saved.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._path = directories[0] / LIMITS_NAME if directories else None
        self._limits = {} if self._path is None else _read(self._path)
        self._changed = False
        self._servers: list[tuple[str, TakesBundles]] = []

    def of(self, server_id: str) -> int:
        """Return what a server offered last; 0 if it is not known."""
        return self._limits.get(server_id, 0)

    def heard(self, server_id: str, bundle_bytes: int) -> None:
        """Record what a server offers; 0: it has refused a bundle."""
        if self.of(server_id) != bundle_bytes:
            self._changed = True
            self._limits.pop(server_id, None)
            if bundle_bytes:
                self._limits[server_id] = bundle_bytes

    def note_at_end(self, server_id: str, server: TakesBundles) -> None:
        """Record what a server takes when ``save`` is called."""
        self._servers.append((server_id, server))

    def save(self) -> None:
        """Write the file, if something has changed; if that fails, the next process asks again."""
        for server_id, server in self._servers:
            self.heard(server_id, server.bundle_bytes)
        if self._path is None or not self._changed:
            return
        self._changed = False
        kept = dict(list(self._limits.items())[-MAX_SERVERS:])
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path, json.dumps(kept).encode("ascii"), durable=False)


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(read_file(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        name: size
        for name, size in found.items()
        if type(size) is int and 0 < size <= _MAX_BUNDLE_BYTES
    }
