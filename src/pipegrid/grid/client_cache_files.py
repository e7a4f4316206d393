"""
Small JSON files in which a client's processes leave hints for the client's later processes.

The hints say which servers took bundles of small shares, and how many puts must first ask for existing
shares. A server that no longer takes bundles refuses the first one, and then gets ordinary requests. If a
file cannot be used, the client continues without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.safe_open import read_file
from pipegrid.transfer.put.ask_first_policy import AskFirst, PlacementHistory

LIMITS_NAME = "bundle_limits.json"
FOUND_NAME = "found_elsewhere.json"
MAX_SERVERS = 1000
"""Maximum number of remembered servers; if there are more, the earliest recorded ones are forgotten."""

_MAX_LIMITS_BYTES = 256 << 10
_MAX_FOUND_BYTES = 1000
_MAX_BUNDLE_BYTES = 1 << 30
_LEFT = "puts_to_ask_first"


class BundleLimits:
    """
    The length in bytes of the longest bundle that each server takes, as far as this client knows.

    Without a known limit, each command sends its first files by ordinary requests, until the first response
    shows that the server takes bundles. This costs a tenth of the time of a thousand files at a round-trip
    time of 100 ms (measured).

    Args:
        directories: the first contains the file. If empty, nothing is read or saved.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._path = directories[0] / LIMITS_NAME if directories else None
        self._limits = {
            name: size
            for name, size in _read(self._path, _MAX_LIMITS_BYTES).items()
            if type(size) is int and 0 < size <= _MAX_BUNDLE_BYTES
        }
        self._changed = False
        self._offers: list[tuple[str, Callable[[], int]]] = []

    def of(self, server_id: str) -> int:
        """Return the bundle length that a server offered last, in bytes; 0 if it is not known."""
        return self._limits.get(server_id, 0)

    def heard(self, server_id: str, bundle_bytes: int) -> None:
        """Record the bundle length that a server offers; 0 if the server has refused a bundle."""
        if self.of(server_id) != bundle_bytes:
            self._changed = True
            self._limits.pop(server_id, None)
            if bundle_bytes:
                self._limits[server_id] = bundle_bytes

    def note_at_end(self, server_id: str, bundle_bytes: Callable[[], int]) -> None:
        """
        Make ``save`` call a function that returns the bundle length of a server, and record this length.
        """
        self._offers.append((server_id, bundle_bytes))

    def save(self) -> None:
        """
        Write the file if a limit has changed. If writing fails, the next process learns the limits from the
        servers.
        """
        for server_id, bundle_bytes in self._offers:
            self.heard(server_id, bundle_bytes())
        if self._path is not None and self._changed:
            self._changed = False
            _write(self._path, dict(list(self._limits.items())[-MAX_SERVERS:]))


def open_placement_history(policy: AskFirst, directories: Sequence[Path]) -> PlacementHistory:
    """
    Return the placement history, which saves its own changes.

    Args:
        directories: the first contains the file. If empty, nothing is read or saved.
    """
    if not directories:
        return PlacementHistory(policy)
    path = directories[0] / FOUND_NAME
    left = _read(path, _MAX_FOUND_BYTES).get(_LEFT)
    return PlacementHistory(
        policy, left if isinstance(left, int) else 0, lambda left: _write(path, {_LEFT: left})
    )


def _read(path: Path | None, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file; an empty object if the file does not exist or cannot be used."""
    try:
        found = json.loads(read_file(path, most_bytes)) if path is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, values: dict[str, int]) -> None:
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps(values).encode("ascii"), durable=False)
