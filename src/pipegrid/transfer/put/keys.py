"""
The first pass over a file: from the plaintext to the key.

It runs in a worker, in slices, so that cancellation takes effect soon and several files share
the workers fairly.
"""

from __future__ import annotations

import os

from pipegrid.core.hashes import KEY_BYTES, TaggedHasher, convergent_key_hasher
from pipegrid.core.params import Geometry
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.progress import Progress
from pipegrid.transfer.put.source import Source

_SLICE_BYTES = 8 << 20
_READ_BYTES = 1 << 18  # stays in a core's cache between reading and hashing


def random_key() -> bytes:
    """Return a key that no one else will ever have, nor ever converge with."""
    return os.urandom(KEY_BYTES)


async def convergent_key(
    source: Source,
    geometry: Geometry,
    convergence: bytes,
    workers: CpuWorkers,
    hashing: Progress | None = None,
) -> bytes:
    """
    Return the 16-byte key that equal plaintext, parameters and secret always give.

    Args:
        hashing: called with the bytes that were read, and with all that there are.
    """
    hasher = convergent_key_hasher(
        convergence, geometry.required_shares, geometry.total_shares, geometry.segment_bytes
    )
    for start in range(0, source.size, _SLICE_BYTES):
        length = min(_SLICE_BYTES, source.size - start)
        if hashing is not None:
            hashing(start, source.size)
        await workers.run_if_large(length, _hash_slice, source, hasher, start, length)
    return hasher.digest()[:KEY_BYTES]


def _hash_slice(source: Source, hasher: TaggedHasher, start: int, length: int) -> None:
    for offset in range(start, start + length, _READ_BYTES):
        hasher.update(source.read_at(offset, min(_READ_BYTES, start + length - offset)))
