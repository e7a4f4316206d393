"""
A file and its key: with both it is decided what its shares are, and where they go.

To make the key of the content is the first pass over a file. It runs in a worker, in slices, so that
cancellation takes effect soon and several files share the workers fairly.
"""

from __future__ import annotations

import os

import attrs

from pipegrid.core import hashes, layout
from pipegrid.core.hashes import KEY_BYTES, TaggedHasher, convergent_key_hasher
from pipegrid.core.params import Geometry
from pipegrid.errors import SourceError
from pipegrid.transfer.peers import Means
from pipegrid.transfer.progress import Progress
from pipegrid.transfer.put.shareset import ShareSet
from pipegrid.transfer.put.source import Source

_SLICE_BYTES = 8 << 20
_READ_BYTES = 1 << 18  # stays in a core's cache between reading and hashing


@attrs.frozen(eq=False)
class KeyedFile:
    """
    One file that is put, once its key is known.

    Attributes:
        source: its plaintext.
        geometry: how it is cut.
        happy: servers of happiness without which it does not count as stored.
        secret: what the key is made of beside the content; None: the key comes of nothing.
        key: 16 bytes.
        shares: what it becomes.
    """

    source: Source
    geometry: Geometry
    happy: int
    secret: bytes | None = attrs.field(repr=False)
    key: bytes = attrs.field(repr=False)
    shares: ShareSet

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.source.name

    async def check_unchanged(self, means: Means) -> None:
        """
        Make sure that what was coded is what the key was made of.

        Raises:
            SourceError: the source has changed, or cannot be read.
        """
        if self.source.check_unchanged() or self.secret is None:
            return
        # The time stamps cannot tell; the content can.
        if self.key != await _convergent_key(self.source, self.geometry, self.secret, means):
            raise SourceError(
                f"{self.name} changed while it was read; nothing was stored, try again when no "
                f"program writes to it"
            )


async def with_key(
    source: Source,
    geometry: Geometry,
    happy: int,
    secret: bytes | None,
    means: Means,
    hashing: Progress | None = None,
) -> KeyedFile:
    """
    Return the file with the key that equal plaintext, parameters and secret always give.

    Args:
        secret: None: with a key that no one else will ever have, nor ever converge with.
        hashing: called with the bytes that were read, and with all that there are.
    """
    if secret is None:
        key = os.urandom(KEY_BYTES)
    else:
        key = await _convergent_key(source, geometry, secret, means, hashing)
    index = hashes.storage_index(key)
    shares = ShareSet(index, layout.share_bytes(geometry), means.secrets.for_file(index))
    return KeyedFile(source, geometry, happy, secret, key, shares)


async def _convergent_key(
    source: Source,
    geometry: Geometry,
    convergence: bytes,
    means: Means,
    hashing: Progress | None = None,
) -> bytes:
    hasher = convergent_key_hasher(
        convergence, geometry.required_shares, geometry.total_shares, geometry.segment_bytes
    )
    for start in range(0, source.size, _SLICE_BYTES):
        length = min(_SLICE_BYTES, source.size - start)
        if hashing is not None:
            hashing(start, source.size)
        await means.workers.run_if_large(length, _hash_slice, source, hasher, start, length)
    return hasher.digest()[:KEY_BYTES]


def _hash_slice(source: Source, hasher: TaggedHasher, start: int, length: int) -> None:
    for offset in range(start, start + length, _READ_BYTES):
        hasher.update(source.read_at(offset, min(_READ_BYTES, start + length - offset)))
