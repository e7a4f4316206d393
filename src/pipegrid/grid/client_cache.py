"""Cached announcements and placement hint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError
from pipegrid.grid.servers_yaml import read_bounded
from pipegrid.grid.strict_config import parse_yaml
from pipegrid.transfer.put.placement_history import AskFirst, PlacementHistory
from pipegrid.wire.announcements import MAX_ID_CHARACTERS, MAX_SERVERS, Announcement

# What introducers said, kept for the day on which they are down; one file for each.
#
# A list of ``ann`` and ``key_s``, as Tahoe-LAFS keeps it, whose own cache is read where its directory is
# used. Of a server that the introducer has not named of late there is ``missing_since``, too. Written as
# JSON, a line for each server, which is YAML that is read a hundred times faster. It is only a cache:
# whatever is wrong with it, there is none, and a warning.


def cache_name(introducer: str) -> str:
    """Return the name of an introducer's cache file, whatever the introducer is called; no other has it."""
    plain = _plain(introducer)
    if plain != introducer:
        # Others may look the same: of a name in Cyrillic only its length is left.
        plain += "-" + hashlib.sha256(introducer.encode("utf-8", "replace")).hexdigest()[:16]
    return f"introducer_{plain}_cache.yaml"


def cache_names(introducer: str) -> list[str]:
    """Return what its cache file may be called, the best first: earlier versions told fewer names apart."""
    return list(
        dict.fromkeys([cache_name(introducer), f"introducer_{_plain(introducer)}_cache.yaml"])
    )


def _plain(introducer: str) -> str:
    plain = "".join(c if (c.isalnum() and c.isascii()) or c in "-_." else "_" for c in introducer)
    return plain[:100]


def read_cache(path: Path) -> list[Announcement]:
    """
    Return what a cache file says; nothing if there is none.

    Raises:
        UsageError: it cannot be read or understood.
    """
    data = read_bounded(path)
    if data is None:
        return []
    document: Any
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = parse_yaml(data, str(path))
    if not isinstance(document, list):
        raise UsageError(f"cannot understand {path}: it is not a list; remove it")
    return [each for each in map(_announcement, document[:MAX_SERVERS]) if each is not None]


def _announcement(entry: Any) -> Announcement | None:
    if not isinstance(entry, dict):
        return None
    server_id, fields = entry.get("key_s"), entry.get("ann")
    if isinstance(server_id, bytes):  # as some versions of Tahoe-LAFS wrote it
        server_id = server_id.decode("ascii", "replace")
    if not isinstance(server_id, str) or len(server_id) > MAX_ID_CHARACTERS:
        return None
    since = entry.get("missing_since")
    since_s = None
    if isinstance(since, (int, float)) and 0 <= since < 1e12:
        since_s = float(since)
    return Announcement(server_id, fields, since_s) if isinstance(fields, dict) else None


def write_cache(path: Path, announcements: Iterable[Announcement]) -> None:
    """
    Replace a cache file, whole; what it says is secret, as addresses are.

    Raises:
        OSError: it cannot be written.
    """
    lines = [
        json.dumps(
            {"ann": dict(each.fields), "key_s": each.server_id}
            | ({} if each.missing_since_s is None else {"missing_since": int(each.missing_since_s)})
        )
        for each in announcements
    ]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    document = "[" + ",\n".join(lines) + "]\n"
    replace_file(path, document.encode("ascii"), durable=False)


# What a client remembers between processes of where its files were found; a hint, and never more.
#
# One small JSON file beside what introducers said. Whatever is wrong with it, nothing is remembered.

FOUND_NAME = "found_elsewhere.json"
_LEFT = "puts_to_ask_first"
_MAX_BYTES = 1000


def open_elsewhere(policy: AskFirst, directories: Sequence[Path]) -> PlacementHistory:
    """
    Return what is remembered; it writes down itself what changes.

    Args:
        directories: where to look, the first of which may be written; none: nothing is remembered.
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
