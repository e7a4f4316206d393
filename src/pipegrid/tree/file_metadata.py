"""The metadata of a local file in its directory entry: time, mode, target of a link, and exact name."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args
from urllib.parse import quote_from_bytes, unquote_to_bytes

import attrs

from pipegrid.disk.atomic_write import current_umask

if TYPE_CHECKING:
    from pipegrid.tree.metadata_restore import ExtendedRestore, RestoredExtended

KEY = "pipegrid"

_MODE_BITS = 0o7777
_MAX_BYTES = 64 << 10
"""Maximum for a name or the target of a link; no system accepts longer ones."""

_MAX_NS = 10**9 << 39
"""17,000 years. The times of ext4 end in 2446, those of XFS in 2486, those in 64-bit nanoseconds in 2262."""


Modes = Literal["umask", "stored", "exact"]
"""
Which mode bits a fetched file or directory gets. ``umask``: its permissions, as limited by the umask.
``stored``: its permissions and sticky bit and, for directories, the set-group-ID bit. ``exact``: all bits,
including set-user-ID and set-group-ID for files.
"""

MODES = get_args(Modes)


@attrs.frozen
class RestoredMetadata:
    """
    The metadata that is restored for a file, directory or link; None: the entry does not have it.

    Attributes:
        mode: the bits that ``Modes`` selects.
        mtime_ns: the modification time in nanoseconds since 1970.
        link: the target of a symbolic link, not empty and without NUL; None if the entry is not a link.
        name: the exact name in any bytes, if it differs from the entry's name.
        extended: owner, attributes, hard link and holes; None: they are not restored.
    """

    mode: int | None = None
    mtime_ns: int | None = None
    link: bytes | None = None
    name: bytes | None = None
    extended: RestoredExtended | None = attrs.field(default=None, eq=False)

    @property
    def temporary_mode(self) -> int:
        """The mode of a directory while it is filled: the final mode, with all permissions for the owner."""
        return (0o777 if self.mode is None else self.mode) | stat.S_IRWXU


def entry_metadata(
    found: os.stat_result,
    *,
    link: bytes | None = None,
    name: bytes | None = None,
    extended: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """
    Return the metadata of the entry of a file, directory or link.

        {"mtime": 1700000000.25, "st_mode": 33188, "st_uid": 1000, "st_gid": 1000,
         "pipegrid": {"mode": 420, "mtime_ns": 1700000000250000000}}

    The first four keys are those of ``tahoe backup``; ``pipegrid`` has what is needed to restore a file
    exactly:

    * ``mode``: permissions, with the set-user-ID, set-group-ID and sticky bits.
    * ``mtime_ns``: nanoseconds since 1970, for which a float is not precise enough.
    * ``link``: the target of a symbolic link. For readers that do not support links, the entry's cap is that
      of a file with the target as its content.
    * ``name_quoted``, ``link_quoted``: the bytes of the name or target, percent-encoded, if they are not
      UTF-8 or if the name is not normalized (NFC), as names of entries always are.

    ``ctime``, ``st_ino`` and ``st_dev``, which ``tahoe backup`` also writes, are left out: no program can
    restore them, and they change when a disk is restored or a machine restarts. The cap of a directory
    depends on its bytes, so such a change would give new caps to the directory and to all directories above
    it. Without these keys, a tree that was restored and stored again has the same cap.

    Args:
        link: the target of a symbolic link.
        name: the exact name, if the entry's name differs.
        extended: the stored form of metadata that only backups have; see ``extended_metadata``.
    """
    ours: dict[str, Any] = {"mode": found.st_mode & _MODE_BITS, "mtime_ns": found.st_mtime_ns}
    if link is not None:
        ours["link"] = link.decode("utf-8", "replace")
        if ours["link"].encode("utf-8") != link:
            ours["link_quoted"] = quote_from_bytes(link)
    if name is not None:
        ours["name_quoted"] = quote_from_bytes(name)
    if extended:
        ours.update(extended)
    return {
        "mtime": found.st_mtime,
        "st_mode": found.st_mode,
        "st_uid": found.st_uid,
        "st_gid": found.st_gid,
        KEY: ours,
    }


def entry_name(raw: bytes) -> tuple[str, bytes | None]:
    """
    Return the entry name for a file name, and the exact name if it differs.

    Entry names are normalized (NFC); bytes that are not UTF-8 become U+FFFD.
    """
    name = unicodedata.normalize("NFC", raw.decode("utf-8", "replace"))
    return name, None if name.encode("utf-8") == raw else raw


def restored(
    metadata: Mapping[str, Any],
    modes: Modes = "stored",
    extended: ExtendedRestore | None = None,
    *,
    is_file: bool = False,
    umask: int | None = None,
) -> RestoredMetadata:
    """
    Return the metadata of an entry that can be restored. Metadata is untrusted input: malformed values are
    ignored.

    Args:
        modes: which mode bits are restored; see ``Modes``.
        extended: how extended metadata is restored; None: it is not restored.
        is_file: whether the entry is a file, even if the metadata says that it is a directory.
        umask: the umask of this process, if the caller knows it.

    If the entry was made by ``tahoe backup``, ``st_mode`` and ``mtime`` are used.
    """
    ours = metadata.get(KEY)
    more = None if extended is None else extended.of(metadata, ours)
    if not isinstance(ours, dict):
        mode = _mode(metadata, metadata, modes, is_file, umask)
        return RestoredMetadata(mode, _from_float(metadata.get("mtime")), extended=more)
    link = _exact(ours, "link")
    return RestoredMetadata(
        _mode(ours, metadata, modes, is_file, umask),
        _whole(ours.get("mtime_ns"), -_MAX_NS, _MAX_NS),
        link if link and b"\0" not in link else None,
        _exact(ours, "name"),
        more,
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


def _mode(
    says: Mapping[str, Any],
    metadata: Mapping[str, Any],
    modes: Modes,
    is_file: bool,
    umask: int | None,
) -> int | None:
    full = _whole(metadata.get("st_mode"), 0, 1 << 32)
    mode = full if says is metadata else _whole(says.get("mode"), 0, 1 << 32)
    if mode is None:
        return None
    if modes == "exact":
        return mode & _MODE_BITS
    if modes == "umask":
        return mode & 0o777 & ~(current_umask() if umask is None else umask)
    kept = 0o3777 if not is_file and full is not None and stat.S_ISDIR(full) else 0o1777
    return mode & kept


def _whole(value: Any, least: int, end: int) -> int | None:
    # ``bool`` is a subclass of ``int``, but JSON's ``true`` is no number.
    if type(value) is not int or not least <= value < end:
        return None
    return int(value)


def _from_float(value: Any) -> int | None:
    if type(value) not in (int, float) or not -_MAX_NS / 1e9 < value < _MAX_NS / 1e9:
        return None
    seconds: float = value
    return round(seconds * 1e9)
