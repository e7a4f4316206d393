"""
What a client remembers between processes of where its files were found; a hint, and never more.

One small JSON file beside what introducers said. Whatever is wrong with it, nothing is remembered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipegrid.disk.reading import read_file
from pipegrid.disk.replacing import replace_file
from pipegrid.transfer.put.elsewhere import AskFirst, Elsewhere

FOUND_NAME = "found_elsewhere.json"
_LEFT = "puts_to_ask_first"
_MAX_BYTES = 1000


def open_elsewhere(policy: AskFirst, directories: Sequence[Path]) -> Elsewhere:
    """
    Return what is remembered; it writes down itself what changes.

    Args:
        directories: where to look, the first of which may be written; none: nothing is remembered.
    """
    if not directories:
        return Elsewhere(policy)
    path = directories[0] / FOUND_NAME
    return Elsewhere(policy, _read(path), lambda left: _write(path, left))


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
