"""
GBS messages that both ends share: paths, headers and CBOR bodies. Every ``unpack_`` and ``parse_`` checks
all input.

Source: the format reference, storage protocols, sections 1.4 to 1.7.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import lru_cache, wraps
from typing import TypeVar

import attrs

from pipegrid.core import base32
from pipegrid.core.hashes import Buffer
from pipegrid.wire import cbor
from pipegrid.wire.storage_messages import UNKNOWN_PROTOCOL, Allocation, ServerVersion, WriteAnswer

# The limits are those that servers enforce on requests; for answers they keep a malicious server from
# filling a client's memory. Errors are ``ValueError``.

T = TypeVar("T")

CONTENT_TYPE = "application/cbor"
SHARE_CONTENT_TYPE = "application/octet-stream"

MAX_ALLOCATE_BYTES = 8192
MAX_CORRUPT_BYTES = 32768
MAX_SHARE_NUMBERS = 256
MAX_MUTABLE_SHARE_BYTES = 69105 * 10**12

MAX_ANSWER_BYTES = 256 * 1024
"""The limit for any CBOR answer: 4096 missing ranges with offsets of 8 bytes need 135 KiB."""
MAX_REQUIRED_RANGES = 8192

_ALLOCATE_ITEMS = MAX_SHARE_NUMBERS + 6
_ALLOCATION_ITEMS = 2 * MAX_SHARE_NUMBERS + 7
_REQUIRED_ITEMS = 5 * MAX_REQUIRED_RANGES + 3
_VERSION_ITEMS = 1024  # it has eight now, and may grow
_CORRUPT_ITEMS = 16  # three, or the pieces of a text

PROTOCOL = b"http://allmydata.org/tahoe/protocols/storage/v1"
APPLICATION = b"application-version"
IMMUTABLE_SIZE = b"maximum-immutable-share-size"
MUTABLE_SIZE = b"maximum-mutable-share-size"
SPACE = b"available-space"
UNKNOWN_SPACE = (1 << 64) - 1  # old servers report 2^64, which takes a bignum

_NUMBERS = "share-numbers"
_SIZE = "allocated-size"
_HAVE = "already-have"
_ALLOCATED = "allocated"

_REMEMBERED = 256
_REMEMBERED_BYTES = 128
"""
A hundred small files need a thousand allocations, which are a dozen different messages. Short messages are
cached, both packed and unpacked; packing one takes 15 us.
"""


def _cached(unpack: Callable[[Buffer], T]) -> Callable[[Buffer], T]:
    """Cache the results for short messages; callers must not change them."""
    remembered = lru_cache(_REMEMBERED)(unpack)

    @wraps(unpack)
    def look(body: Buffer) -> T:
        return remembered(bytes(body)) if len(body) <= _REMEMBERED_BYTES else unpack(body)

    return look


_COMPLETE = cbor.dumps({"required": []})
_NO_SHARES = cbor.dumps(frozenset())


@attrs.frozen
class AllocateRequest:
    """
    The body of an allocate request.

    Attributes:
        share_numbers: at most 256 numbers, not necessarily below 256: servers ignore those.
        share_bytes: exact length of each share.
    """

    share_numbers: frozenset[int]
    share_bytes: int


def sizes(
    version: ServerVersion, max_mutable_share_bytes: int = MAX_MUTABLE_SHARE_BYTES
) -> dict[bytes, int]:
    """Return the sizes that a server reports, with the keys of both protocols."""
    room = version.available_bytes
    return {
        IMMUTABLE_SIZE: version.max_share_bytes,
        MUTABLE_SIZE: max_mutable_share_bytes,
        SPACE: UNKNOWN_SPACE if room is None else min(room, UNKNOWN_SPACE),
    }


def pack_version(
    version: ServerVersion, max_mutable_share_bytes: int = MAX_MUTABLE_SHARE_BYTES
) -> bytes:
    """Return the answer that reports what a server supports."""
    known = sizes(version, max_mutable_share_bytes)
    return cbor.dumps({PROTOCOL: known, APPLICATION: version.application.encode("utf-8")})


def unpack_version(body: Buffer) -> ServerVersion:
    """Parse a server's version message. Unknown keys are ignored, for later versions."""
    outer = cbor.loads(body, MAX_ANSWER_BYTES, _VERSION_ITEMS)
    if type(outer) is dict and PROTOCOL not in outer:
        raise ValueError(UNKNOWN_PROTOCOL)
    if type(outer) is not dict or type(outer[PROTOCOL]) is not dict:
        raise ValueError("something that is not a map of the storage protocol")
    inner = outer[PROTOCOL]
    space = cbor.expect_uint(inner.get(SPACE), "available-space", 1 << 64)
    application = cbor.expect_bytes(outer.get(APPLICATION, b""), "application-version")
    return ServerVersion(
        cbor.expect_uint(inner.get(IMMUTABLE_SIZE), "maximum-immutable-share-size", 1 << 64),
        None if space >= UNKNOWN_SPACE else space,
        application.decode("utf-8", "replace"),
    )


def pack_allocate(share_numbers: AbstractSet[int], share_bytes: int) -> bytes:
    """Return the body of an allocate request."""
    return _pack_allocate(frozenset(share_numbers), share_bytes)


@lru_cache(_REMEMBERED)
def _pack_allocate(share_numbers: frozenset[int], share_bytes: int) -> bytes:
    return cbor.dumps({_NUMBERS: share_numbers, _SIZE: share_bytes})


_ALLOCATE_KEYS = frozenset({_NUMBERS, _SIZE})


@_cached
def unpack_allocate(body: Buffer) -> AllocateRequest:
    """Return what an allocate request asks for."""
    value = cbor.loads(body, MAX_ALLOCATE_BYTES, _ALLOCATE_ITEMS)
    message = cbor.expect_map(value, _ALLOCATE_KEYS, "the request")
    return AllocateRequest(
        cbor.expect_uint_set(message[_NUMBERS], _NUMBERS, MAX_SHARE_NUMBERS),
        cbor.expect_uint(message[_SIZE], _SIZE),
    )


def pack_allocation(allocation: Allocation) -> bytes:
    """Return the answer to an allocate request."""
    return _pack_allocation(allocation.already_have, allocation.allocated)


@lru_cache(_REMEMBERED)
def _pack_allocation(already_have: frozenset[int], allocated: frozenset[int]) -> bytes:
    return cbor.dumps({_HAVE: already_have, _ALLOCATED: allocated})


_ALLOCATION_KEYS = frozenset({_HAVE, _ALLOCATED})


@_cached
def unpack_allocation(body: Buffer) -> Allocation:
    """Return what a server allocated."""
    value = cbor.loads(body, MAX_ANSWER_BYTES, _ALLOCATION_ITEMS)
    message = cbor.expect_map(value, _ALLOCATION_KEYS, "the answer")
    return Allocation(
        cbor.expect_uint_set(message[_HAVE], _HAVE, MAX_SHARE_NUMBERS),
        cbor.expect_uint_set(message[_ALLOCATED], _ALLOCATED, MAX_SHARE_NUMBERS),
    )


def pack_required(required: Iterable[tuple[int, int]]) -> bytes:
    """
    Return the answer to a write: the half-open ranges that are missing, none if the share is complete.
    """
    ranges = [{"begin": begin, "end": end} for begin, end in required]
    return cbor.dumps({"required": ranges}) if ranges else _COMPLETE


_REQUIRED_KEYS = frozenset({"required"})
_RANGE_KEYS = frozenset({"begin", "end"})


def unpack_required(body: Buffer, complete: bool) -> WriteAnswer:
    """
    Parse the answer to a write.

    Args:
        complete: whether the status (201) said that the share is complete.
    """
    if body == _COMPLETE:
        return WriteAnswer(complete)
    value = cbor.loads(body, MAX_ANSWER_BYTES, _REQUIRED_ITEMS)
    message = cbor.expect_map(value, _REQUIRED_KEYS, "the answer")
    ranges = []
    for item in cbor.expect_list(message["required"], "required", MAX_REQUIRED_RANGES):
        pair = cbor.expect_map(item, _RANGE_KEYS, "a required range")
        begin = cbor.expect_uint(pair["begin"], "begin")
        end = cbor.expect_uint(pair["end"], "end")
        if begin >= end:
            raise ValueError(f"a required range from {begin} to {end}")
        ranges.append((begin, end))
    if complete and ranges:
        raise ValueError("a share that is complete, and of which bytes are required")
    return WriteAnswer(complete, tuple(ranges))


def pack_shares(share_numbers: AbstractSet[int]) -> bytes:
    """Return the list of a server's shares."""
    return cbor.dumps(frozenset(share_numbers)) if share_numbers else _NO_SHARES


def unpack_shares(body: Buffer) -> frozenset[int]:
    """Return the share numbers in a list."""
    value = cbor.loads(body, MAX_ANSWER_BYTES, _ALLOCATION_ITEMS)
    return cbor.expect_uint_set(value, "the list of shares", MAX_SHARE_NUMBERS)


def pack_corrupt(reason: str) -> bytes:
    """
    Return the body of an advisory about a corrupt share.

    A reason that is too long for the protocol is cut; an empty one is not allowed and becomes "unknown".
    """
    room = MAX_CORRUPT_BYTES - 16
    text = reason.encode("utf-8", "replace")[:room].decode("utf-8", "ignore")
    return cbor.dumps({"reason": text or "unknown"})


_CORRUPT_KEYS = frozenset({"reason"})


def unpack_corrupt(body: Buffer) -> str:
    """Return the reason of an advisory."""
    value = cbor.loads(body, MAX_CORRUPT_BYTES, _CORRUPT_ITEMS)
    message = cbor.expect_map(value, _CORRUPT_KEYS, "the request")
    return cbor.expect_text(message["reason"], "reason", min_length=1)


# Header values are ASCII bytes, as parsers return them. Parsers of headers raise ``ValueError``; those of
# paths return None, since the answer is always 404.

# Paths.

_ROOT = "/storage/v1"
VERSION_PATH = f"{_ROOT}/version"
BUNDLE_PATH = f"{_ROOT}/bundle"
SURVEY_PATH = f"{_ROOT}/survey"
READ_BUNDLE_PATH = f"{_ROOT}/read-bundle"
_SHARE_NUMBER_DIGITS = 9  # far more than any share number has


class Resource(Enum):
    """The kind of object that a path names; the value says where its parts are in the path."""

    VERSION = "version"
    BUNDLE = "bundle"
    SURVEY = "survey"
    READ_BUNDLE = "read-bundle"
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


@attrs.frozen
class GbsTarget:
    """
    What a path names.

    Attributes:
        resource: the kind of object.
        storage_index: 16 bytes; empty if the path has none.
        share_number: 0 or more, also beyond 255, where no share exists; 0 if the path has none.
    """

    resource: Resource
    storage_index: bytes = b""
    share_number: int = 0

    @property
    def key(self) -> tuple[bytes, int]:
        """Storage index and share number."""
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
    rf"{_ROOT}/(?:(?P<alone>version|bundle|survey|read-bundle)"
    r"|(?P<kind>immutable|mutable|lease)/(?P<si>[a-z2-7]{26})"
    rf"(?:/(?P<number>[0-9]{{1,{_SHARE_NUMBER_DIGITS}}}))?"
    r"(?:/(?P<verb>shares|abort|corrupt|read-test-write))?)\Z"
)
_RESOURCES = {
    resource.value.replace("<si>", "si").replace("<n>", "n"): resource for resource in Resource
}


def parse_path(path: str) -> GbsTarget | None:
    """
    Return what a path names, or None if it names nothing.

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
    Return 16 bytes, or None if the text is not their one spelling.

    A server does this for every request, so it is optimised (1 instead of 10 us for ``base32``).
    """
    if not _INDEX.match(text):
        return None
    value = int(text.translate(_DIGITS_OF_32), 32)
    # 26 characters hold two bits more than 16 bytes.
    return None if value & 3 else (value >> 2).to_bytes(16, "big")


# Authorisation and secrets.

AUTHORIZATION = "Authorization"
SECRET = "X-Tahoe-Authorization"

RENEW_SECRET = "lease-renew-secret"
CANCEL_SECRET = "lease-cancel-secret"
UPLOAD_SECRET = "upload-secret"
WRITE_ENABLER = "write-enabler"

_LEASE_KINDS = frozenset({RENEW_SECRET, CANCEL_SECRET})
_KINDS = {kind.encode("ascii"): kind for kind in (*_LEASE_KINDS, UPLOAD_SECRET, WRITE_ENABLER)}
_LEASE_SECRET_BYTES = 32
_BASE64 = re.compile(rb"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?\Z")

NO_SECRETS: frozenset[str] = frozenset()
LEASE_SECRETS = _LEASE_KINDS
ALLOCATE_SECRETS = _LEASE_KINDS | {UPLOAD_SECRET}
UPLOAD_SECRETS = frozenset({UPLOAD_SECRET})
MUTABLE_SECRETS = _LEASE_KINDS | {WRITE_ENABLER}


def authorization(swissnum: str) -> bytes:
    """Return the value of the Authorization header, which servers compare byte for byte."""
    return b"Tahoe-LAFS " + base64.b64encode(swissnum.encode("ascii"))


def secret_lines(secrets: Mapping[str, bytes]) -> list[bytes]:
    """Return one value of an X-Tahoe-Authorization header for each secret."""
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
        ValueError: a malformed line, a kind that is missing, unknown, repeated or not required, or a secret
            of a wrong length. The text contains no secret.
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
    if kind in _LEASE_KINDS and len(secret) != _LEASE_SECRET_BYTES:
        raise ValueError("lease secrets must be 32 bytes long")
    return kind, secret


# Ranges. In headers the end is the last byte; in Python it is the one after that.

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
    Return ``(begin, end)``.

    Raises:
        ValueError: not one closed range of bytes.
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
    Return ``(begin, end)``; the total length, if given, must exceed the range and is otherwise ignored.

    Raises:
        ValueError: it has another form, including ``bytes */N``.
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
