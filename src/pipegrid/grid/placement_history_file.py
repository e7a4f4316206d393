"""
Where the client's recent files were placed, kept between processes in a small JSON file.

It is only a hint: if the file cannot be used, the client continues without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.safe_open import read_file
from pipegrid.transfer.put.ask_first_policy import AskFirst, PlacementHistory

FOUND_NAME = "found_elsewhere.json"
_LEFT = "puts_to_ask_first"
_MAX_BYTES = 1000


def open_placement_history(policy: AskFirst, directories: Sequence[Path]) -> PlacementHistory:
    """
    Return the placement history, which saves its own changes.

    Args:
        directories: where to look for the file; only the first is written. If empty, nothing is saved.
    """
    if not directories:
        return PlacementHistory(policy)
    path = directories[0] / FOUND_NAME
    return PlacementHistory(policy, _read(path), lambda left: _write(path, left))


def _read(path: Path) -> int:
    try:
        document = json.loads(read_file(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return 0
    left = document.get(_LEFT) if isinstance(document, dict) else None
    return left if isinstance(left, int) else 0


def _write(path: Path, left: int) -> None:
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps({_LEFT: left}).encode("ascii"), durable=False)
