"""The cache of each introducer's announcements, on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipegrid.disk.atomic_write import replace_file
from pipegrid.errors import UsageError
from pipegrid.grid.servers_yaml import read_bounded
from pipegrid.grid.strict_config import parse_yaml
from pipegrid.wire.announcements import MAX_ID_CHARACTERS, MAX_SERVERS, Announcement

# The announcements of each introducer are cached in one file, so that the grid is usable while the introducer
# is down.
#
# The file is a list of ``ann`` and ``key_s``, in Tahoe-LAFS's format; in a Tahoe-LAFS directory, the node's
# own cache is read. A server that the introducer no longer announces also has ``missing_since``. The file is
# written as JSON, one line for each server: JSON is YAML, and is parsed a hundred times faster. If the file
# cannot be used, the client warns and continues without a cache.


def cache_name(introducer: str) -> str:
    """Return the name of an introducer's cache file; each introducer name gives a different file name."""
    plain = _plain(introducer)
    if plain != introducer:
        # Replacing characters makes names collide (a Cyrillic name keeps only its length), so add a hash.
        plain += "-" + hashlib.sha256(introducer.encode("utf-8", "replace")).hexdigest()[:16]
    return _file_name(plain)


def cache_names(introducer: str) -> list[str]:
    """
    Return the possible names of an introducer's cache file: today's first, then those of earlier versions.
    """
    names = [cache_name(introducer), _file_name(_plain(introducer))]
    return list(dict.fromkeys(names))


def _file_name(plain: str) -> str:
    return f"introducer_{plain}_cache.yaml"


def _plain(introducer: str) -> str:
    plain = "".join(c if (c.isalnum() and c.isascii()) or c in "-_." else "_" for c in introducer)
    return plain[:100]


def read_cache(path: Path) -> list[Announcement]:
    """
    Return the announcements in a cache file; an empty list if the file does not exist.

    Raises:
        UsageError: the file cannot be read or parsed.
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
    Replace a cache file atomically. Server addresses are secrets, so only the owner may read the file.

    Raises:
        OSError: the file cannot be written.
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
