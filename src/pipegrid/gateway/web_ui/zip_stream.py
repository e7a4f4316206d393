"""
A ZIP file, written from beginning to end in constant memory; and harmless names for its members.

ZIP has advantages over tar: every system can open it, names are UTF-8, and the list of members comes last, so
programs notice an incomplete file. Nothing is compressed, since most stored files are compressed already.
``zipfile`` would hold an object per member; here a ``BodySpool`` holds the list of members.

Source: PKWARE's APPNOTE.TXT 6.3, sections 4.3 and 4.5; Info-ZIP's extra field 0x5455.
"""

from __future__ import annotations

import re
import struct
import time
import unicodedata
import zlib
from collections.abc import Callable, Mapping

import attrs

from pipegrid.core.text import composed
from pipegrid.gateway.body_spool import BodySpool

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_DESCRIPTOR = struct.Struct("<4s3L")
_DESCRIPTOR_64 = struct.Struct("<4sL2Q")

_UTF8, _SIZES_FOLLOW = 1 << 11, 1 << 3
_MOST = 0xFFFFFFFF
_UNIX = 3 << 8
_VERSION_64 = 45
_DIRECTORY, _FILE = 0o040755, 0o100644
_PIECE_BYTES = 64 << 10


@attrs.frozen
class ZipMember:
    """
    A member of an archive.

    Attributes:
        path: names with slashes between them; a directory's path ends with a slash.
        size: in bytes.
        changed_s: time of the last change, in seconds since 1970; None: not known.
        is_program: whether its owner may run the file.
    """

    path: str
    size: int = 0
    changed_s: int | None = None
    is_program: bool = False


class ZipStream:
    """
    Writes members one after the other, then the list of members.

    Args:
        write: called with the next bytes of the ZIP file.
        listing: keeps the list of members until it is written.
    """

    def __init__(self, write: Callable[[bytes], object], listing: BodySpool) -> None:
        self._write_out = write
        self._listing = listing
        self._offset = 0
        self._count = 0
        self._open: ZipMember | None = None
        self._member_offset = self._written = self._crc = 0

    def add(self, member: ZipMember, data: bytes = b"") -> None:
        """Write a complete member: a file with its content, or a directory."""
        offset, crc = self._offset, zlib.crc32(data)
        self._put(_head(member, 0, crc, len(data)))
        self._put(data)
        self._list(member, 0, crc, len(data), offset)

    def begin(self, member: ZipMember) -> None:
        """Begin a member whose content follows in pieces, ``member.size`` bytes in total."""
        assert self._open is None
        self._open, self._member_offset = member, self._offset
        self._written = self._crc = 0
        self._put(_head(member, _SIZES_FOLLOW, 0, 0))

    def write(self, data: bytes) -> None:
        """Write the next piece of the member that ``begin`` began."""
        self._crc = zlib.crc32(data, self._crc)
        self._written += len(data)
        self._put(data)

    def end(self) -> None:
        """End the member that ``begin`` began; all its content was written."""
        member = self._open
        assert member is not None
        assert self._written == member.size
        self.drop()
        self._list(member, _SIZES_FOLLOW, self._crc, member.size, self._member_offset)

    def drop(self) -> None:
        """
        If a member was begun, end it, even if it is incomplete, and leave it out of the list of members.
        """
        member, self._open = self._open, None
        if member is not None:
            shape = _DESCRIPTOR_64 if _is_large(member) else _DESCRIPTOR
            self._put(shape.pack(b"PK\x07\x08", self._crc, self._written, self._written))

    def finish(self) -> list[tuple[int, int]]:
        """
        Return the pieces of the list of members, each as offset and length in ``listing``.

        The caller then calls ``write_listing`` with each piece, as fast as the client reads, and finally
        ``close``.
        """
        size = self._listing.size
        return [(at, min(_PIECE_BYTES, size - at)) for at in range(0, size, _PIECE_BYTES)]

    def write_listing(self, piece: tuple[int, int]) -> None:
        """
        Write a piece of the list of members.

        Raises:
            BodyRefused: the disk had no space for the list.
        """
        self._listing.check()
        self._write_out(self._listing.read_at(*piece))

    def close(self) -> None:
        """Write the end records of the ZIP file."""
        size, start = self._listing.size, self._offset
        after = start + size
        count, version = self._count, _VERSION_64
        self._write_out(
            _END_64.pack(
                b"PK\x06\x06", _END_64.size - 12, version, version, 0, 0, count, count, size, start
            )
            + _LOCATOR_64.pack(b"PK\x06\x07", 0, after, 1)
            + _END.pack(
                b"PK\x05\x06",
                0,
                0,
                min(count, 0xFFFF),
                min(count, 0xFFFF),
                min(size, _MOST),
                min(start, _MOST),
                0,
            )
        )

    def _put(self, data: bytes) -> None:
        if data:
            self._offset += len(data)
            self._write_out(data)

    def _list(self, member: ZipMember, flags: int, crc: int, size: int, offset: int) -> None:
        self._count += 1
        large = [value for value in (size, size, offset) if value >= _MOST]
        extra = _time_extra(member)
        if large:
            extra += struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large)
        name = member.path.encode()
        is_directory = member.path.endswith("/")
        mode = _DIRECTORY if is_directory else _FILE | (0o111 if member.is_program else 0)
        stored_time, stored_date = _dos_time(member.changed_s)
        self._listing.write(
            _CENTRAL.pack(
                b"PK\x01\x02",
                _UNIX | _VERSION_64,
                _VERSION_64 if large or _is_large(member) else 20,
                _UTF8 | flags,
                0,
                stored_time,
                stored_date,
                crc,
                min(size, _MOST),
                min(size, _MOST),
                len(name),
                len(extra),
                0,
                0,
                0,
                mode << 16 | (0x10 if is_directory else 0),
                min(offset, _MOST),
            )
            + name
            + extra
        )
        self._listing.check()


def _head(member: ZipMember, flags: int, crc: int, size: int) -> bytes:
    large = _is_large(member)
    extra = _time_extra(member)
    if large:
        extra += struct.pack("<2H2Q", 1, 16, size, size)
    name = member.path.encode()
    shown = _MOST if large else size
    stored_time, stored_date = _dos_time(member.changed_s)
    return (
        _LOCAL.pack(
            b"PK\x03\x04",
            _VERSION_64 if large else 20,
            _UTF8 | flags,
            0,
            stored_time,
            stored_date,
            crc,
            shown,
            shown,
            len(name),
            len(extra),
        )
        + name
        + extra
    )


def _is_large(member: ZipMember) -> bool:
    return member.size >= _MOST


def _time_extra(member: ZipMember) -> bytes:
    return b"" if member.changed_s is None else struct.pack("<2HBl", 0x5455, 5, 1, member.changed_s)


def _dos_time(changed_s: int | None) -> tuple[int, int]:
    """Return a time as MS-DOS time and date, which begin in 1980 and have steps of two seconds."""
    at = time.gmtime(changed_s or 0)
    if at.tm_year < 1980:
        return 0, 1 << 5 | 1
    return (
        at.tm_hour << 11 | at.tm_min << 5 | at.tm_sec // 2,
        at.tm_year - 1980 << 9 | at.tm_mon << 5 | at.tm_mday,
    )


# Harmless names of members, for every system on which the archive may be extracted.
#
# A name on a grid can be any text. When members are extracted, each path must stay below the target
# directory, must not be the path of another member or of a device, and must not look like something else. So
# characters that Windows, macOS or Linux could misunderstand are replaced. If several names could be the same
# for a file system, the later ones get a number.

MAX_NAME_BYTES = 200
"""Maximum size of one name in UTF-8; file systems accept 255 bytes."""

MAX_PATH_BYTES = 60_000
"""Maximum size of a member's path, whose length has 16 bits in the archive."""

_MEANINGFUL = frozenset('/\\:*?"<>|')
_DEVICE = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9\u00b9\u00b2\u00b3])\Z")


def harmless_name(name: str) -> str:
    """Return a form of the name that every system accepts as the name of a file or directory."""
    safe = "".join(c if _is_harmless(c) else "_" for c in composed(name))
    kept = safe.rstrip(" .")
    safe = kept + "_" * (len(safe) - len(kept)) or "_"
    if _DEVICE.match(safe.partition(".")[0].rstrip(" ").casefold()):
        safe = "_" + safe
    return _shortened(safe)


def _is_harmless(char: str) -> bool:
    return char == " " or (char.isprintable() and char not in _MEANINGFUL)


def _shortened(name: str, more: str = "") -> str:
    """Return a name with ``more`` before its extension, shortened to ``MAX_NAME_BYTES``."""
    stem, dot, extension = name.rpartition(".")
    if not stem or len(extension.encode()) > 20:
        stem, dot, extension = name, "", ""
    end = f"{more}{dot}{extension}"
    most = MAX_NAME_BYTES - len(end.encode())
    short = stem.encode()[:most].decode("utf-8", "ignore")
    return (short if short == stem else short.rstrip(" .")) + end


class MemberNames:
    """The names in one directory of an archive, which must all differ."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def take(self, name: str) -> str:
        """
        Return the harmless form of a name; with a number if an earlier name could be the same for a file
        system.
        """
        wanted = chosen = harmless_name(name)
        key = _folded(wanted)
        number = self._taken.get(key, 0)
        while _folded(chosen) in self._taken:
            number += 1
            chosen = _shortened(wanted, f" ({number + 1})")
        self._taken[key] = number
        self._taken.setdefault(_folded(chosen), 0)
        return chosen


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def is_program(metadata: Mapping[str, object]) -> bool:
    """Return whether metadata say that the owner may run the file."""
    mode = metadata.get("st_mode")
    return isinstance(mode, int) and bool(mode & 0o100)


def changed_at(metadata: Mapping[str, object]) -> int | None:
    """
    Return when a file was changed, else when it was linked, in seconds since 1970; None if its entry has no
    time.
    """
    tahoe = metadata.get("tahoe")
    linked = tahoe.get("linkmotime") if isinstance(tahoe, Mapping) else None
    for found in (metadata.get("mtime"), linked):
        if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found < 1 << 31:
            return int(found)
    return None
