"""
Tagged hashes: every hash of the format is SHA-256d over a netstring tag and a value.

Source: the format reference, sections 1.1 to 1.3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from hashlib import _Hash

Buffer = bytes | bytearray | memoryview


@runtime_checkable
class StoredBytes(Protocol):
    """Bytes that are too many for memory, returned in pieces, such as a part of a file."""

    def __len__(self) -> int: ...

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes in order, in pieces of a megabyte; raises OSError if they cannot be read."""


HASH_BYTES = 32
KEY_BYTES = 16
STORAGE_INDEX_BYTES = 16

_NOTHING = hashlib.sha256()  # copying it takes half the time of making a new one
_HEADS = [b"%d:" % length for length in range(65)]  # the starts of short netstrings


def netstring(value: bytes) -> bytes:
    """Return decimal length, colon, value, comma."""
    return b"%d:%s," % (len(value), value)


class TaggedHasher:
    """An incremental tagged hash: call ``update`` any number of times, then ``digest`` once or more."""

    __slots__ = ("_inner",)

    def __init__(self, inner: _Hash) -> None:
        self._inner = inner

    def update(self, data: Buffer) -> None:
        """Feed the next bytes of the value; buffers of 2 KiB and more release the GIL."""
        self._inner.update(data)

    def digest(self) -> bytes:
        """Return the 32-byte hash of everything fed so far."""
        outer = _NOTHING.copy()
        outer.update(self._inner.digest())
        return outer.digest()


class Tag:
    """One tag; its inner SHA-256 is computed once and copied, which saves one compression per hash."""

    __slots__ = ("_midstate",)

    def __init__(self, tag: bytes) -> None:
        self._midstate = hashlib.sha256(netstring(tag))

    def hasher(self) -> TaggedHasher:
        """Return a new incremental hash with this tag."""
        return TaggedHasher(self._midstate.copy())

    def hash(self, value: Buffer) -> bytes:
        """Return the 32-byte tagged hash of value."""
        inner = self._midstate.copy()
        inner.update(value)
        outer = _NOTHING.copy()
        outer.update(inner.digest())
        return outer.digest()

    def hash_pieces(self, pieces: Iterable[Buffer]) -> bytes:
        """Return the tagged hash of the pieces as if they were joined."""
        hasher = self.hasher()
        for piece in pieces:
            hasher.update(piece)
        return hasher.digest()

    def hash_pair(self, left: bytes, right: bytes) -> bytes:
        """Return the tagged hash of two values, each wrapped in a netstring."""
        inner = self._midstate.copy()
        # The usual case; formatting takes half as long again.
        if len(left) < len(_HEADS) > len(right):
            inner.update(_HEADS[len(left)] + left + b"," + _HEADS[len(right)] + right + b",")
        else:
            inner.update(netstring(left) + netstring(right))
        outer = _NOTHING.copy()
        outer.update(inner.digest())
        return outer.digest()


STORAGE_INDEX = Tag(b"allmydata_immutable_key_to_storage_index_v1")
BLOCK = Tag(b"allmydata_encoded_subshare_v1")
UEB = Tag(b"allmydata_uri_extension_v1")
CRYPTTEXT = Tag(b"allmydata_crypttext_v1")
CRYPTTEXT_SEGMENT = Tag(b"allmydata_crypttext_segment_v1")
MERKLE_NODE = Tag(b"Merkle tree internal node")
MERKLE_EMPTY_LEAF = Tag(b"Merkle tree empty leaf")

_CONVERGENT_KEY = b"allmydata_immutable_content_to_key_with_added_secret_v1+"


def tagged_hash(tag: bytes, value: Buffer) -> bytes:
    """Return the 32-byte tagged hash for a tag that is not a constant."""
    return Tag(tag).hash(value)


@lru_cache(maxsize=4096)  # asked for at each step of a file
def storage_index(key: bytes) -> bytes:
    """Return the 16-byte storage index that names the shares of the file with this key."""
    return STORAGE_INDEX.hash(key)[:STORAGE_INDEX_BYTES]


def convergent_key_hasher(
    convergence: bytes, required_shares: int, total_shares: int, segment_bytes: int
) -> TaggedHasher:
    """
    Return a hash for the whole plaintext; the first 16 bytes of its digest are the key.

    Args:
        convergence: the convergence secret, any bytes, may be empty.
        segment_bytes: the *rounded* segment size S of this file, not the configured maximum.
    """
    numbers = b"%d,%d,%d" % (required_shares, total_shares, segment_bytes)
    return Tag(_CONVERGENT_KEY + netstring(convergence) + netstring(numbers)).hasher()
