"""
Messages of SFTP, version 3: parsing of requests, within limits, and packing of replies.

Source: draft-ietf-secsh-filexfer-02, and OpenSSH's PROTOCOL for its extensions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum

import attrs

from pipegrid.errors import PipegridError

VERSION = 3

MAX_MESSAGE_BYTES = 256 << 10
"""Maximum size of a request or a reply; OpenSSH, sshfs and rclone accept this size."""

MAX_DATA_BYTES = MAX_MESSAGE_BYTES - 1024
"""Maximum size of file content in one request or reply."""

MAX_PATH_BYTES = 32 << 10
MAX_HANDLE_BYTES = 256
_MAX_EXTENDED_ATTRIBUTES = 64


class RequestKind(IntEnum):
    """The type numbers of SFTP requests."""

    INIT = 1
    OPEN = 3
    CLOSE = 4
    READ = 5
    WRITE = 6
    LSTAT = 7
    FSTAT = 8
    SETSTAT = 9
    FSETSTAT = 10
    OPENDIR = 11
    READDIR = 12
    REMOVE = 13
    MKDIR = 14
    RMDIR = 15
    REALPATH = 16
    STAT = 17
    RENAME = 18
    READLINK = 19
    SYMLINK = 20
    EXTENDED = 200


class ReplyKind(IntEnum):
    VERSION = 2
    STATUS = 101
    HANDLE = 102
    DATA = 103
    NAME = 104
    ATTRS = 105
    EXTENDED_REPLY = 201


class Status(IntEnum):
    OK = 0
    EOF = 1
    NO_SUCH_FILE = 2
    PERMISSION_DENIED = 3
    FAILURE = 4
    BAD_MESSAGE = 5
    OP_UNSUPPORTED = 8


class OpenFlag(IntEnum):
    """Flags of OPEN, which say how a file is opened."""

    READ = 1
    WRITE = 2
    APPEND = 4
    CREATE = 8
    TRUNCATE = 16
    EXCLUSIVE = 32


class SftpError(PipegridError):
    """
    A request fails; the client gets the message.

    Attributes:
        status: SFTP status code, which the client program evaluates.
    """

    def __init__(self, message: str, status: Status = Status.FAILURE) -> None:
        super().__init__(message)
        self.status = status


class MalformedRequest(SftpError):
    """The bytes are not a valid request; bytes that follow cannot be parsed either."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the request is malformed: {why}", Status.BAD_MESSAGE)


_SIZE, _IDS, _MODE, _TIMES, _EXTENDED = 1, 2, 4, 8, 1 << 31


@attrs.frozen
class FileAttributes:
    """
    Attributes of a file, received from a client or sent to it; None: not given.

    Attributes:
        size: in bytes.
        ids: numbers of user and group.
        mode: type and permissions, as in ``st_mode``.
        times: last access and last change, in seconds since 1970.
    """

    size: int | None = None
    ids: tuple[int, int] | None = None
    mode: int | None = None
    times: tuple[int, int] | None = None

    def packed(self) -> bytes:
        flags, fields = 0, b""
        if self.size is not None:
            flags, fields = flags | _SIZE, fields + struct.pack(">Q", self.size)
        if self.ids is not None:
            flags, fields = flags | _IDS, fields + struct.pack(">2L", *self.ids)
        if self.mode is not None:
            flags, fields = flags | _MODE, fields + struct.pack(">L", self.mode)
        if self.times is not None:
            flags, fields = flags | _TIMES, fields + struct.pack(">2L", *self.times)
        return struct.pack(">L", flags) + fields


class Fields:
    """
    Reads the fields of one request, one after the other.

    Each method raises MalformedRequest if its field is incomplete, or longer than allowed.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def uint32(self) -> int:
        """Return the next field, a 32-bit number."""
        return int.from_bytes(self._take(4), "big")

    def uint64(self) -> int:
        """Return the next field, a 64-bit number."""
        return int.from_bytes(self._take(8), "big")

    def string(self, most_bytes: int) -> bytes:
        """Return the next field, a string of at most ``most_bytes``."""
        length = self.uint32()
        if length > most_bytes:
            raise MalformedRequest(f"a field has {length} bytes; at most {most_bytes} are allowed")
        return self._take(length)

    def attributes(self) -> FileAttributes:
        """Return the next field as attributes; extended attributes are skipped."""
        flags = self.uint32()
        size = self.uint64() if flags & _SIZE else None
        ids = (self.uint32(), self.uint32()) if flags & _IDS else None
        mode = self.uint32() if flags & _MODE else None
        times = (self.uint32(), self.uint32()) if flags & _TIMES else None
        if flags & _EXTENDED:
            count = self.uint32()
            if count > _MAX_EXTENDED_ATTRIBUTES:
                raise MalformedRequest(f"it has {count} extended attributes")
            for _ in range(2 * count):
                self.string(MAX_MESSAGE_BYTES)
        return FileAttributes(size, ids, mode, times)

    def _take(self, length: int) -> bytes:
        taken = self._data[self._at : self._at + length]
        if len(taken) < length:
            raise MalformedRequest("a field ends after the request")
        self._at += length
        return taken


class RequestBuffer:
    """
    Splits the bytes of a channel into requests; holds the bytes of at most one request and one receive
    window.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0

    def __len__(self) -> int:
        return len(self._data) - self._at

    def add(self, data: bytes) -> None:
        if self._at:
            del self._data[: self._at]
            self._at = 0
        self._data += data

    def next(self) -> tuple[int, bytes, int] | None:
        """
        Return type, fields and length in bytes of the next request; None: it has not arrived completely.

        Raises:
            MalformedRequest: the request is empty or too long, so the next request cannot be found.
        """
        if len(self) < 4:
            return None
        length = int.from_bytes(self._data[self._at : self._at + 4], "big")
        if not 1 <= length <= MAX_MESSAGE_BYTES:
            raise MalformedRequest(
                f"it has {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
            )
        if len(self) < 4 + length:
            return None
        start, end = self._at + 5, self._at + 4 + length
        found = self._data[start - 1], bytes(self._data[start:end])
        self._at = end
        return (*found, 4 + length)


def packed_string(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def message(kind: ReplyKind, fields: bytes) -> bytes:
    return struct.pack(">LB", 1 + len(fields), kind) + fields


def version_reply(extensions: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the reply to INIT: version of the protocol, and names and versions of the extensions."""
    pairs = b"".join(packed_string(name) + packed_string(value) for name, value in extensions)
    return message(ReplyKind.VERSION, VERSION.to_bytes(4, "big") + pairs)


def status_reply(number: int, status: Status, text: str = "") -> bytes:
    """Return the reply that reports the outcome of a request."""
    data = text.encode("utf-8", "replace")[:2000]
    fields = struct.pack(">2L", number, status) + packed_string(data) + packed_string(b"en")
    return message(ReplyKind.STATUS, fields)


def handle_reply(number: int, handle: bytes) -> bytes:
    """Return the reply that gives the client a handle."""
    return message(ReplyKind.HANDLE, number.to_bytes(4, "big") + packed_string(handle))


def data_reply(number: int, data: bytes) -> bytes:
    """Return the reply that contains a part of a file."""
    return message(ReplyKind.DATA, number.to_bytes(4, "big") + packed_string(data))


def attributes_reply(number: int, attributes: FileAttributes) -> bytes:
    return message(ReplyKind.ATTRS, number.to_bytes(4, "big") + attributes.packed())


def packed_name(name: bytes, long_name: bytes, attributes: FileAttributes) -> bytes:
    """Return one entry for ``names_reply``, packed."""
    return packed_string(name) + packed_string(long_name) + attributes.packed()


def names_reply(number: int, names: list[bytes]) -> bytes:
    """Return the reply with a directory's entries, or with a single path; ``packed_name`` packs each."""
    return message(ReplyKind.NAME, struct.pack(">2L", number, len(names)) + b"".join(names))


def extended_reply(number: int, fields: bytes) -> bytes:
    """Return the reply to a request of an extension."""
    return message(ReplyKind.EXTENDED_REPLY, number.to_bytes(4, "big") + fields)
