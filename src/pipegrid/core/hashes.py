"""
Tagged hashes, and the secrets that a client derives from its lease secret for each file and server. Every
hash of the format is SHA-256d over a netstring tag and a value.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from pipegrid.errors import UsageError

if TYPE_CHECKING:
    from hashlib import _Hash

Buffer = bytes | bytearray | memoryview


@runtime_checkable
class StoredBytes(Protocol):
    """
    Bytes that need not be in memory as a whole, such as a part of a file; ``pieces`` returns them piece by
    piece.
    """

    def __len__(self) -> int: ...

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes in order, in pieces of a megabyte. Raises OSError if they cannot be read."""


HASH_BYTES = 32
KEY_BYTES = 16
STORAGE_INDEX_BYTES = 16

_NOTHING = hashlib.sha256()  # a copy of this takes half the time of a new hash
_HEADS = [b"%d:" % length for length in range(65)]  # the heads of short netstrings, by length


def netstring(value: bytes) -> bytes:
    """Return the value as a netstring: its length in decimal, a colon, the value, a comma."""
    return b"%d:%s," % (len(value), value)


class TaggedHasher:
    """
    An incremental tagged hash: call ``update`` any number of times, then ``digest``, which may be called
    repeatedly.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: _Hash) -> None:
        self._inner = inner

    def update(self, data: Buffer) -> None:
        """Feed the next bytes of the value. For buffers of 2 KiB or more, the GIL is released meanwhile."""
        self._inner.update(data)

    def digest(self) -> bytes:
        """Return the 32-byte hash of everything fed so far."""
        outer = _NOTHING.copy()
        outer.update(self._inner.digest())
        return outer.digest()


class Tag:
    """
    One tag. The SHA-256 state after the tag is computed once and copied for each hash, which saves one
    compression per hash.
    """

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
        """Return the 32-byte tagged hash of the joined pieces."""
        hasher = self.hasher()
        for piece in pieces:
            hasher.update(piece)
        return hasher.digest()

    def hash_pair(self, left: bytes, right: bytes) -> bytes:
        """Return the tagged hash of two values, each wrapped in a netstring."""
        inner = self._midstate.copy()
        # The usual case: short values, with their netstring heads from the table. ``netstring`` takes half as
        # long again.
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
    """Return the 32-byte tagged hash of value, for a tag that is not a constant."""
    return Tag(tag).hash(value)


@lru_cache(maxsize=4096)  # each step of a transfer needs the storage index
def storage_index(key: bytes) -> bytes:
    """Return the 16-byte storage index that names the shares of the file with this key."""
    return STORAGE_INDEX.hash(key)[:STORAGE_INDEX_BYTES]


def convergent_key_hasher(
    convergence: bytes, required_shares: int, total_shares: int, segment_bytes: int
) -> TaggedHasher:
    """
    Return the hash to feed with the whole plaintext; the first 16 bytes of its digest are the file's key.

    Args:
        convergence: the convergence secret, any bytes, may be empty.
        segment_bytes: the *rounded* segment size S of this file, not the configured maximum.
    """
    numbers = b"%d,%d,%d" % (required_shares, total_shares, segment_bytes)
    return Tag(_CONVERGENT_KEY + netstring(convergence) + netstring(numbers)).hasher()


# Secrets for leases, uploads and mutable files.

LEASE_SECRET_BYTES = 32

_FILE_RENEWAL = Tag(b"allmydata_file_renewal_secret_v1")
_FILE_CANCEL = Tag(b"allmydata_file_cancel_secret_v1")
_SERVER_RENEWAL = Tag(b"allmydata_bucket_renewal_secret_v1")
_SERVER_CANCEL = Tag(b"allmydata_bucket_cancel_secret_v1")
_UPLOAD = Tag(b"pipegrid_upload_secret_v1")
_ENABLER_MASTER = Tag(b"allmydata_mutable_writekey_to_write_enabler_master_v1")
_ENABLER = Tag(b"allmydata_mutable_write_enabler_master_and_nodeid_to_write_enabler_v1")


class ServerSecrets(NamedTuple):
    """The three secrets that one server gets for one file, 32 bytes each."""

    renew: bytes
    cancel: bytes
    upload: bytes

    def __repr__(self) -> str:
        """Return only the class name, since logs may contain the result."""
        return "ServerSecrets(...)"


class FileSecrets(NamedTuple):
    """
    The secrets of one file, from which ``for_server`` derives those for a server: three hashes of 32 bytes.
    """

    renewal: bytes
    cancel: bytes
    upload: bytes

    def __repr__(self) -> str:
        """Return only the class name, since logs may contain the result."""
        return "FileSecrets(...)"

    def for_server(self, lease_seed: bytes) -> ServerSecrets:
        """
        Return the secrets of this file on one server.

        Args:
            lease_seed: 20 bytes, the server's tub id (also for a server that is reached over HTTPS).
        """
        return ServerSecrets(
            renew=_SERVER_RENEWAL.hash_pair(self.renewal, lease_seed),
            cancel=_SERVER_CANCEL.hash_pair(self.cancel, lease_seed),
            upload=_UPLOAD.hash_pair(self.upload, lease_seed),
        )


class ClientSecrets:
    """
    Derives all secrets of one client, in three steps: for the client, for a file, for a server. No server
    learns the secrets of another server.

    Only PipeGrid derives the upload secret. Other clients draw a random upload secret for every attempt. With
    a derived one, any process that has the lease secret can resume an interrupted upload, and no other
    process can.

    Args:
        lease_secret: the 32 bytes that a node directory keeps in ``private/secret``.

    Raises:
        UsageError: the lease secret has another length.
    """

    __slots__ = ("_cancel", "_renewal", "_upload")

    def __init__(self, lease_secret: bytes) -> None:
        if len(lease_secret) != LEASE_SECRET_BYTES:
            raise UsageError(
                f"the lease secret has {len(lease_secret)} bytes instead of {LEASE_SECRET_BYTES}; "
                "restore private/secret, or remove it to get a new one"
            )
        # In this step the secret is the tag, and the constant is the value. In all later steps the tag is a
        # constant.
        secret_tag = Tag(lease_secret)
        self._renewal = secret_tag.hash(b"allmydata_client_renewal_secret_v1")
        self._cancel = secret_tag.hash(b"allmydata_client_cancel_secret_v1")
        self._upload = _UPLOAD.hash(lease_secret)

    def for_file(self, storage_index: bytes) -> FileSecrets:
        """Return the secrets of one file; ``for_server`` then derives those for a server."""
        return FileSecrets(
            renewal=_FILE_RENEWAL.hash_pair(self._renewal, storage_index),
            cancel=_FILE_CANCEL.hash_pair(self._cancel, storage_index),
            upload=_UPLOAD.hash_pair(self._upload, storage_index),
        )


def write_enabler(writekey: bytes, lease_seed: bytes) -> bytes:
    """Return the 32-byte write enabler of a mutable file on one server, derived from the file's write key."""
    return _ENABLER.hash_pair(_ENABLER_MASTER.hash(writekey), lease_seed)
