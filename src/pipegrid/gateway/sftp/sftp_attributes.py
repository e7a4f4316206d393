"""SFTP attributes of files, and how the metadata of directory entries stores them."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from typing import Any

from pipegrid.core.mutable.directory_content_edits import is_time
from pipegrid.gateway.sftp.sftp_messages import FileAttributes
from pipegrid.tree.directory_reading import Kind
from pipegrid.tree.file_metadata import KEY, restored

_MOST = (1 << 32) - 1
_PERMISSIONS = 0o7777
_USUAL = {"directory": 0o755, "file": 0o644, "unknown": 0}
_TYPES = {"directory": stat.S_IFDIR, "file": stat.S_IFREG, "unknown": stat.S_IFREG}
_OURS = (os.getuid(), os.getgid())


def attributes_of(
    kind: Kind, metadata: Mapping[str, Any], size: int | None, writable: bool
) -> FileAttributes:
    """
    Return the attributes that a client gets for an entry.

    Args:
        metadata: the entry's metadata, which any program can write, so values can be invalid.
        size: size of a file; None: unknown, or not a file.
        writable: whether the account can change the entry's directory.
    """
    found = restored(metadata)
    mode = _USUAL[kind]
    if found.mode is not None and found.link is None and kind != "unknown":
        mode = found.mode & _PERMISSIONS
    if not writable:
        mode &= ~0o222
    changed_ns = found.mtime_ns
    seconds = _linked_at(metadata) if changed_ns is None else changed_ns // 10**9
    seconds = min(max(0, seconds), _MOST)
    ids = (_id(metadata.get("st_uid"), _OURS[0]), _id(metadata.get("st_gid"), _OURS[1]))
    return FileAttributes(size, ids, _TYPES[kind] | mode, (seconds, seconds))


def _id(value: Any, usual: int) -> int:
    return value if type(value) is int and 0 <= value <= _MOST else usual


def _linked_at(metadata: Mapping[str, Any]) -> int:
    tahoe = metadata.get("tahoe")
    linked = tahoe.get("linkmotime") if isinstance(tahoe, dict) else None
    return int(linked) if is_time(linked) else 0


def metadata_changes(
    before: Mapping[str, Any], kind: Kind, change: FileAttributes, new_content: bool = False
) -> dict[str, Any]:
    """
    Return the keys and values that a change of attributes sets in an entry's metadata.

    Args:
        before: the metadata before the change.
        change: attributes that are not None are set; metadata contain neither size nor access time.
        new_content: the content changes as well, so metadata must not mark the entry as a symbolic link any
            more.
    """
    ours = before.get(KEY)
    if isinstance(ours, dict):
        ours = dict(ours)
    else:
        found = restored(before, "exact")
        known = (("mode", found.mode), ("mtime_ns", found.mtime_ns))
        ours = {key: value for key, value in known if value is not None}
    if new_content:
        for key in ("link", "link_quoted"):
            ours.pop(key, None)
    changes: dict[str, Any] = {}
    if change.mode is not None:
        ours["mode"] = change.mode & _PERMISSIONS
        changes["st_mode"] = _TYPES[kind] | ours["mode"]
    if change.times is not None and ours.get("mtime_ns", -1) // 10**9 != change.times[1]:
        # If the new time is in the same second as the stored one, the nanoseconds that another program stored
        # are kept.
        ours["mtime_ns"] = change.times[1] * 10**9
        changes["mtime"] = float(change.times[1])
    if change.ids is not None:
        changes["st_uid"], changes["st_gid"] = change.ids
    return {**changes, KEY: ours}


def attributes_of_new(asked: FileAttributes) -> FileAttributes:
    """Return the attributes of a new file or directory: as with the usual umask, only the owner may write."""
    mode = None if asked.mode is None else asked.mode & ~0o022
    return FileAttributes(None, asked.ids, mode, asked.times)


def long_name(name: str, attributes: FileAttributes) -> str:
    """Return the line that clients show for an entry, as ``ls -l`` does."""
    uid, gid = attributes.ids or (0, 0)
    changed = attributes.times[1] if attributes.times else 0
    try:
        date = time.strftime("%b %d  %Y", time.gmtime(changed))
        if abs(time.time() - changed) < 180 * 86400:
            date = time.strftime("%b %d %H:%M", time.gmtime(changed))
    except (OverflowError, ValueError):
        date = "?"
    mode = stat.filemode(attributes.mode or 0)
    return f"{mode}    1 {uid:<8} {gid:<8} {attributes.size or 0:>8} {date:<12} {name}"
