"""
What an entry of a tree says beside the cap: when a file was changed, its mode, what a link leads to.

    {"mtime": 1700000000.25, "st_mode": 33188, "st_uid": 1000, "st_gid": 1000,
     "pipegrid": {"mode": 420, "mtime_ns": 1700000000250000000}}

The first four are as ``tahoe backup`` writes them; ``pipegrid`` holds what brings a file back exactly:

* ``mode``: permissions, with the set-user-ID, set-group-ID and sticky bits.
* ``mtime_ns``: nanoseconds since 1970; a float cannot hold them.
* ``link``: of a symbolic link, what it leads to. The entry's cap is that of a file with the same content, so
  that readers that know no links show where it led.
* ``name_quoted``, ``link_quoted``: the bytes of the name or the link, percent-encoded, where the text beside
  them cannot say them: names that are no UTF-8, or that are not composed (NFC), which entries of directories
  always are.

**What is left out, and why.** ``tahoe backup`` also writes ``ctime``, ``st_ino`` and ``st_dev``. No program
can restore them, and they change where nothing has: device numbers when a machine starts, inodes and
``ctime`` when a disk was restored or a file moved. The cap of a directory follows from its bytes, so each
of them would make new directories of old ones, all the way up to the root. Without them one tree has one cap:
a tree that was restored and stored again has the cap that it had, which is the shortest proof of a restore.

What is read here was written by somebody else, perhaps to do harm: see ``restored``.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Mapping
from typing import Any, Literal, get_args
from urllib.parse import quote_from_bytes, unquote_to_bytes

import attrs

from pipegrid.disk.private_files import current_umask

KEY = "pipegrid"

_MODE_BITS = 0o7777
_MAX_BYTES = 64 << 10
"""Of a name or a link; no system takes longer ones."""

_MAX_NS = 10**9 << 39
"""Seventeen thousand years. ext4 takes dates to 2446, XFS to 2486; 64 bits of nanoseconds end in 2262."""


Modes = Literal["umask", "stored", "exact"]
"""
What a file or directory gets of its mode: what the umask allows of its permissions; its permissions, and the
set-group-ID and sticky bits of directories; or all of it, also what lets a file run as whoever fetched it.
"""

MODES = get_args(Modes)


@attrs.frozen
class RestoredMetadata:
    """
    What of a file, directory or link is brought back; None: its entry does not say.

    Attributes:
        mode: what ``Modes`` says of it.
        mtime_ns: when it was changed.
        link: what a symbolic link leads to; None also if it is none. Never empty, without NUL.
        name: its exact name, where that of the entry is not. It may be anything, as entries' names may.
    """

    mode: int | None = None
    mtime_ns: int | None = None
    link: bytes | None = None
    name: bytes | None = None

    @property
    def temporary_mode(self) -> int:
        """That of a directory while things come into it: no more people may enter it than in the end."""
        return (0o777 if self.mode is None else self.mode) | stat.S_IRWXU


def entry_metadata(
    found: os.stat_result, *, link: bytes | None = None, name: bytes | None = None
) -> dict[str, Any]:
    """
    Return what an entry says of a file, directory or link.

    Args:
        link: what it leads to, if it is a symbolic link.
        name: its exact name, if the entry has another one.
    """
    ours: dict[str, Any] = {"mode": found.st_mode & _MODE_BITS, "mtime_ns": found.st_mtime_ns}
    if link is not None:
        ours["link"] = link.decode("utf-8", "replace")
        if ours["link"].encode("utf-8") != link:
            ours["link_quoted"] = quote_from_bytes(link)
    if name is not None:
        ours["name_quoted"] = quote_from_bytes(name)
    return {
        "mtime": found.st_mtime,
        "st_mode": found.st_mode,
        "st_uid": found.st_uid,
        "st_gid": found.st_gid,
        KEY: ours,
    }


def entry_name(raw: bytes) -> tuple[str, bytes | None]:
    """
    Return what the entry of something with this name is called, and the name if that does not say it.

    Entries have names in Unicode's composed form; what is no UTF-8 shows as U+FFFD.
    """
    name = unicodedata.normalize("NFC", raw.decode("utf-8", "replace"))
    return name, None if name.encode("utf-8") == raw else raw


def restored(metadata: Mapping[str, Any], modes: Modes = "stored") -> RestoredMetadata:
    """
    Return what an entry's metadata say that can be brought back; what makes no sense counts as not said.

    Args:
        modes: what of its mode; see there.

    Entries of ``tahoe backup`` have ``st_mode`` and ``mtime``.
    """
    ours = metadata.get(KEY)
    if not isinstance(ours, dict):
        mode = _mode(metadata, metadata, modes)
        return RestoredMetadata(mode, _from_float(metadata.get("mtime")))
    link = _exact(ours, "link")
    return RestoredMetadata(
        _mode(ours, metadata, modes),
        _whole(ours.get("mtime_ns"), -_MAX_NS, _MAX_NS),
        link if link and b"\0" not in link else None,
        _exact(ours, "name"),
    )


def _exact(ours: dict[str, Any], key: str) -> bytes | None:
    quoted = ours.get(key + "_quoted")
    if isinstance(quoted, str) and len(quoted) <= 3 * _MAX_BYTES:
        return unquote_to_bytes(quoted)
    text = ours.get(key)
    if not isinstance(text, str) or len(text) > _MAX_BYTES:
        return None
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # lone surrogates
        return None


def _mode(says: Mapping[str, Any], metadata: Mapping[str, Any], modes: Modes) -> int | None:
    full = _whole(metadata.get("st_mode"), 0, 1 << 32)
    mode = full if says is metadata else _whole(says.get("mode"), 0, 1 << 32)
    if mode is None:
        return None
    if modes == "exact":
        return mode & _MODE_BITS
    if modes == "umask":
        return mode & 0o777 & ~current_umask()
    kept = 0o3777 if full is not None and stat.S_ISDIR(full) else 0o1777
    return mode & kept


def _whole(value: Any, least: int, end: int) -> int | None:
    # JSON's true is an int for Python.
    if type(value) is not int or not least <= value < end:
        return None
    return int(value)


def _from_float(value: Any) -> int | None:
    if type(value) not in (int, float) or not -_MAX_NS / 1e9 < value < _MAX_NS / 1e9:
        return None
    seconds: float = value
    return round(seconds * 1e9)
