"""
CBOR bodies of GBS messages, for clients and servers. Every ``unpack_`` function checks all input.

Source: Tahoe-LAFS's ``http-storage-node-protocol.rst``, and how its server 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from functools import lru_cache, wraps
from typing import NamedTuple, TypeVar

from pipegrid.core.hashes import Buffer
from pipegrid.wire import cbor
from pipegrid.wire.storage_messages import UNKNOWN_PROTOCOL, Allocation, ServerVersion, WriteAnswer

# The limits of requests are those that servers enforce. The limits of answers keep a malicious server from
# filling a client's memory. Errors are ``ValueError``.

T = TypeVar("T")


MAX_ALLOCATE_BYTES = 8192
MAX_CORRUPT_BYTES = 32768
MAX_SHARE_NUMBERS = 256
MAX_MUTABLE_SHARE_BYTES = 69105 * 10**12

MAX_ANSWER_BYTES = 256 * 1024
"""The maximum length of a CBOR answer without share data: 4096 missing ranges need 135 KiB."""
MAX_REQUIRED_RANGES = 8192

_ALLOCATE_ITEMS = MAX_SHARE_NUMBERS + 6
_ALLOCATION_ITEMS = 2 * MAX_SHARE_NUMBERS + 7
_REQUIRED_ITEMS = 5 * MAX_REQUIRED_RANGES + 3
_VERSION_ITEMS = 1024  # a version has eight items now, and may grow
_CORRUPT_ITEMS = 16  # an advisory has three items; a text in pieces has more

PROTOCOL = b"http://allmydata.org/tahoe/protocols/storage/v1"
APPLICATION = b"application-version"
IMMUTABLE_SIZE = b"maximum-immutable-share-size"
MUTABLE_SIZE = b"maximum-mutable-share-size"
SPACE = b"available-space"
UNKNOWN_SPACE = (1 << 64) - 1  # old servers report 2^64, a CBOR big number

_NUMBERS = "share-numbers"
_SIZE = "allocated-size"
_HAVE = "already-have"
_ALLOCATED = "allocated"

_REMEMBERED = 256
_REMEMBERED_BYTES = 128
"""
Messages of at most this length are cached, both packed and unpacked. A hundred small files need a thousand
allocations, which are a dozen different messages; packing one takes 15 µs.
"""


def _cached(unpack: Callable[[Buffer], T]) -> Callable[[Buffer], T]:
    """Cache the results of a function for short messages; callers must not change the results."""
    remembered = lru_cache(_REMEMBERED)(unpack)

    @wraps(unpack)
    def look(body: Buffer) -> T:
        return remembered(bytes(body)) if len(body) <= _REMEMBERED_BYTES else unpack(body)

    return look


_COMPLETE = cbor.dumps({"required": []})
_NO_SHARES = cbor.dumps(frozenset())


class AllocateRequest(NamedTuple):
    """
    The body of an allocate request.

    Attributes:
        share_numbers: at most 256 numbers. Servers ignore numbers of 256 and more.
        share_bytes: exact length of each share.
    """

    share_numbers: frozenset[int]
    share_bytes: int


def sizes(version: ServerVersion) -> dict[bytes, int]:
    """Return the sizes that a server reports, with the keys that both protocols use."""
    room = version.available_bytes
    return {
        IMMUTABLE_SIZE: version.max_share_bytes,
        MUTABLE_SIZE: MAX_MUTABLE_SHARE_BYTES,
        SPACE: UNKNOWN_SPACE if room is None else min(room, UNKNOWN_SPACE),
    }


def pack_version(version: ServerVersion) -> bytes:
    """Return the answer that reports what a server supports."""
    return cbor.dumps({PROTOCOL: sizes(version), APPLICATION: version.application.encode("utf-8")})


def unpack_version(body: Buffer) -> ServerVersion:
    """Parse a server's version message. Unknown keys are ignored, so that later versions can add some."""
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
    """Return the parsed body of an allocate request."""
    value = cbor.loads(body, MAX_ALLOCATE_BYTES, _ALLOCATE_ITEMS)
    message = cbor.expect_map(value, _ALLOCATE_KEYS, "the request")
    return AllocateRequest(
        cbor.expect_uint_set(message[_NUMBERS], _NUMBERS, MAX_SHARE_NUMBERS),
        cbor.expect_uint(message[_SIZE], _SIZE),
    )


@lru_cache(_REMEMBERED)
def pack_allocation(allocation: Allocation) -> bytes:
    """Return the answer to an allocate request."""
    return cbor.dumps({_HAVE: allocation.already_have, _ALLOCATED: allocation.allocated})


_ALLOCATION_KEYS = frozenset({_HAVE, _ALLOCATED})


@_cached
def unpack_allocation(body: Buffer) -> Allocation:
    """Return the allocation in an answer to an allocate request."""
    value = cbor.loads(body, MAX_ANSWER_BYTES, _ALLOCATION_ITEMS)
    message = cbor.expect_map(value, _ALLOCATION_KEYS, "the answer")
    return Allocation(
        cbor.expect_uint_set(message[_HAVE], _HAVE, MAX_SHARE_NUMBERS),
        cbor.expect_uint_set(message[_ALLOCATED], _ALLOCATED, MAX_SHARE_NUMBERS),
    )


def pack_required(required: Iterable[tuple[int, int]]) -> bytes:
    """
    Return the answer to a write: the half-open ranges that are missing; no ranges if the share is complete.
    """
    ranges = [{"begin": begin, "end": end} for begin, end in required]
    return cbor.dumps({"required": ranges}) if ranges else _COMPLETE


_REQUIRED_KEYS = frozenset({"required"})
_RANGE_KEYS = frozenset({"begin", "end"})


def unpack_required(body: Buffer, complete: bool) -> WriteAnswer:
    """
    Return the missing ranges in the answer to a write.

    Args:
        complete: whether the status (201) says that the share is complete.
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
    """Return the body of a list of shares."""
    return cbor.dumps(frozenset(share_numbers)) if share_numbers else _NO_SHARES


def unpack_shares(body: Buffer) -> frozenset[int]:
    """Return the share numbers in a list."""
    value = cbor.loads(body, MAX_ANSWER_BYTES, _ALLOCATION_ITEMS)
    return cbor.expect_uint_set(value, "the list of shares", MAX_SHARE_NUMBERS)


def pack_corrupt(reason: str) -> bytes:
    """
    Return the body of an advisory about a corrupt share.

    A reason that is too long for the protocol is cut; an empty reason, which the protocol forbids, becomes
    "unknown".
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
