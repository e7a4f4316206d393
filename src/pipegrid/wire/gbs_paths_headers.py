"""
Paths and headers of GBS messages, for clients and servers. Every ``parse_`` function checks all input.

Source: Tahoe-LAFS's ``http-storage-node-protocol.rst``, and how its server 1.20 behaves.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from pipegrid.core import base32

# Header values are ASCII bytes, as HTTP parsers return them. Functions that parse headers raise
# ``ValueError``. Functions that parse paths return None, since the response to an invalid path is always 404.

CONTENT_TYPE = "application/cbor"
SHARE_CONTENT_TYPE = "application/octet-stream"


# Paths.

_ROOT = "/storage/v1"
VERSION_PATH = f"{_ROOT}/version"
BUNDLE_PATH = f"{_ROOT}/bundle"
SURVEY_PATH = f"{_ROOT}/survey"
READ_BUNDLE_PATH = f"{_ROOT}/read-bundle"
RELEASE_LEASES_PATH = f"{_ROOT}/release-leases"
_SHARE_NUMBER_DIGITS = 9  # far more than a share number needs


class Resource(Enum):
    """
    The kind of object that a path names. The value gives the positions of the storage index and the share
    number in the path.
    """

    VERSION = "version"
    BUNDLE = "bundle"
    SURVEY = "survey"
    READ_BUNDLE = "read-bundle"
    RELEASE_LEASES = "release-leases"
    ALLOCATE = "immutable/<si>"
    SHARES = "immutable/<si>/shares"
    SHARE = "immutable/<si>/<n>"
    ABORT = "immutable/<si>/<n>/abort"
    CORRUPT = "immutable/<si>/<n>/corrupt"
    LEASE = "lease/<si>"
    MUTABLE_READ_TEST_WRITE = "mutable/<si>/read-test-write"
    MUTABLE_SHARES = "mutable/<si>/shares"
    MUTABLE_SHARE = "mutable/<si>/<n>"
    MUTABLE_CORRUPT = "mutable/<si>/<n>/corrupt"


class GbsTarget(NamedTuple):
    """
    The object that a path names.

    Attributes:
        resource: the kind of object.
        storage_index: 16 bytes; empty if the path has none.
        share_number: 0 or more, even above 255, where no share exists; 0 if the path has none.
    """

    resource: Resource
    storage_index: bytes = b""
    share_number: int = 0

    @property
    def key(self) -> tuple[bytes, int]:
        """The storage index and the share number."""
        return self.storage_index, self.share_number


def allocate_path(storage_index: bytes) -> str:
    """Return the path to allocate shares (POST)."""
    return f"{_ROOT}/immutable/{base32.encode(storage_index)}"


def shares_path(storage_index: bytes) -> str:
    """Return the path that lists shares (GET)."""
    return f"{_ROOT}/immutable/{base32.encode(storage_index)}/shares"


def share_path(storage_index: bytes, share_number: int) -> str:
    """Return the path to write (PATCH) and read (GET) a share."""
    return f"{_ROOT}/immutable/{base32.encode(storage_index)}/{share_number:d}"


def abort_path(storage_index: bytes, share_number: int) -> str:
    """Return the path to abort an upload (PUT)."""
    return f"{share_path(storage_index, share_number)}/abort"


def corrupt_path(storage_index: bytes, share_number: int) -> str:
    """Return the path for advisories about a share (POST)."""
    return f"{share_path(storage_index, share_number)}/corrupt"


def lease_path(storage_index: bytes) -> str:
    """Return the path to add leases (PUT)."""
    return f"{_ROOT}/lease/{base32.encode(storage_index)}"


_PATH = re.compile(
    rf"{_ROOT}/(?:(?P<alone>version|bundle|survey|read-bundle|release-leases)"
    r"|(?P<kind>immutable|mutable|lease)/(?P<si>[a-z2-7]{26})"
    rf"(?:/(?P<number>[0-9]{{1,{_SHARE_NUMBER_DIGITS}}}))?"
    r"(?:/(?P<verb>shares|abort|corrupt|read-test-write))?)\Z"
)
_RESOURCES = {
    resource.value.replace("<si>", "si").replace("<n>", "n"): resource for resource in Resource
}


def parse_path(path: str) -> GbsTarget | None:
    """
    Return the object that a path names, or None if the path names nothing.

    Nothing is decoded or normalised: a path with dots, percent signs or doubled slashes names nothing.
    """
    match = _PATH.match(path)
    if match is None:
        return None
    alone, kind, si, number, verb = match.groups()
    if alone is not None:
        return GbsTarget(_RESOURCES[alone])
    shape = f"{kind}/si"
    if number is not None:
        shape += "/n"
    if verb is not None:
        shape += f"/{verb}"
    resource = _RESOURCES.get(shape)
    storage_index = decode_storage_index(si)
    if resource is None or storage_index is None:
        return None
    return GbsTarget(resource, storage_index, int(number or 0))


_DIGITS_OF_32 = str.maketrans(
    "abcdefghijklmnopqrstuvwxyz234567", "0123456789abcdefghijklmnopqrstuv"
)
_INDEX = re.compile(r"[a-z2-7]{26}\Z")


def decode_storage_index(text: str) -> bytes | None:
    """
    Return the 16 bytes that a text encodes, or None if the text is not the only valid spelling of a storage
    index.

    A server decodes a storage index for every request, so this is optimised (1 instead of 10 µs for
    ``base32``).
    """
    if not _INDEX.match(text):
        return None
    value = int(text.translate(_DIGITS_OF_32), 32)
    # 26 characters hold two bits more than 16 bytes; these bits must be zero.
    return None if value & 3 else (value >> 2).to_bytes(16, "big")


# Authorization and secrets.

AUTHORIZATION = "Authorization"
SECRET = "X-Tahoe-Authorization"
RENEW_SECRET = "lease-renew-secret"
CANCEL_SECRET = "lease-cancel-secret"
UPLOAD_SECRET = "upload-secret"
WRITE_ENABLER = "write-enabler"
LEASE_SECRETS = frozenset({RENEW_SECRET, CANCEL_SECRET})
_KINDS = {kind.encode("ascii"): kind for kind in (*LEASE_SECRETS, UPLOAD_SECRET, WRITE_ENABLER)}
_LEASE_SECRET_BYTES = 32
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?\Z")


NO_SECRETS: frozenset[str] = frozenset()


ALLOCATE_SECRETS = LEASE_SECRETS | {UPLOAD_SECRET}
UPLOAD_SECRETS = frozenset({UPLOAD_SECRET})
MUTABLE_SECRETS = LEASE_SECRETS | {WRITE_ENABLER}


def authorization(swissnum: str) -> bytes:
    """Return the value of the Authorization header, which servers compare byte for byte."""
    return b"Tahoe-LAFS " + base64.b64encode(swissnum.encode("ascii"))


def secret_lines(secrets: Mapping[str, bytes]) -> list[bytes]:
    """Return the value of an X-Tahoe-Authorization header for each secret."""
    return [
        kind.encode("ascii") + b" " + base64.b64encode(secret) for kind, secret in secrets.items()
    ]


def parse_secrets(lines: Iterable[bytes], required: frozenset[str]) -> dict[str, bytes]:
    """
    Return secrets by kind.

    Args:
        lines: the values of all X-Tahoe-Authorization headers.
        required: the kinds that must occur, and no others.

    Raises:
        ValueError: a line is malformed; a kind is missing, unknown, repeated or not required; or a secret has
            a wrong length. The text contains no secret.
    """
    secrets: dict[str, bytes] = {}
    for line in lines:
        kind, secret = _parse_secret(line)
        if kind in secrets:
            raise ValueError(f"the secret {kind} is given twice")
        secrets[kind] = secret
    if secrets.keys() != required:
        raise ValueError(f"the secrets must be {sorted(required)}, not {sorted(secrets)}")
    return secrets


def _parse_secret(line: bytes) -> tuple[str, bytes]:
    name, _, text = line.strip().partition(b" ")
    kind = _KINDS.get(name)
    if kind is None:
        raise ValueError("an X-Tahoe-Authorization header of no known kind")
    text = text.strip()
    if not text or not _BASE64.match(text):
        raise ValueError(f"the secret {kind} is empty, or not base64")
    secret = binascii.a2b_base64(text)
    if kind in LEASE_SECRETS and len(secret) != _LEASE_SECRET_BYTES:
        raise ValueError("lease secrets must be 32 bytes long")
    return kind, secret


# Ranges. In headers the end is the last byte of the range; in Python it is the byte after the range.

_DIGITS = r"([0-9]{1,32})"
_RANGE = re.compile(rf"\s*bytes\s*=\s*{_DIGITS}\s*-\s*{_DIGITS}\s*\Z".encode("ascii"), re.I)
_CONTENT_RANGE = re.compile(
    rf"\s*bytes\s+{_DIGITS}\s*-\s*{_DIGITS}\s*/\s*(?:\*|{_DIGITS})\s*\Z".encode("ascii"), re.I
)


def format_range(begin: int, end: int) -> bytes:
    """Return the value of a Range header for ``[begin, end)``, which must not be empty."""
    return b"bytes=%d-%d" % (begin, end - 1)


def parse_range(value: bytes) -> tuple[int, int]:
    """
    Return ``(begin, end)`` of a Range header.

    Raises:
        ValueError: the header is not one closed range of bytes.
    """
    match = _RANGE.match(value)
    if match is None:
        raise ValueError("the Range is not one closed range of bytes")
    return _from_to(match, "Range")


def format_content_range(begin: int, end: int) -> bytes:
    """Return the value of a Content-Range header for ``[begin, end)`` of unknown total length."""
    return b"bytes %d-%d/*" % (begin, end - 1)


def parse_content_range(value: bytes) -> tuple[int, int]:
    """
    Return ``(begin, end)`` of a Content-Range header; a total length must exceed the range, and is otherwise
    ignored.

    Raises:
        ValueError: the header has another form, such as ``bytes */N``.
    """
    match = _CONTENT_RANGE.match(value)
    if match is None:
        raise ValueError("the Content-Range is not of the form: bytes FIRST-LAST/*")
    begin, end = _from_to(match, "Content-Range")
    if match[3] is not None and int(match[3]) < end:
        raise ValueError("the Content-Range ends after the last byte")
    return begin, end


def _from_to(match: re.Match[bytes], what: str) -> tuple[int, int]:
    begin, last = int(match[1]), int(match[2])
    if last < begin:
        raise ValueError(f"the {what} ends before it begins")
    return begin, last + 1
