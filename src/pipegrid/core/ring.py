"""
The permuted ring: every file sees all servers in an order of its own, the same for everybody.

Source: the format reference, storage protocols, section 5.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from typing import TypeVar

from pipegrid.core import base32

T = TypeVar("T")

_KEY_ID_PREFIX = "v0-"
_KEY_ID_CHARACTERS = 52


def permutation_seed(server_id: str, announced: str | None = None) -> bytes:
    """
    Return the bytes that place a server on every file's ring.

    Args:
        server_id: ``v0-`` and the base32 of a public key, or any other text.
        announced: the announcement's ``permutation-seed-base32``, if it has one.

    Raises:
        ValueError: the announced seed is not base32.
    """
    if announced:
        return base32.decode(announced)
    key = server_id.removeprefix(_KEY_ID_PREFIX)
    if key != server_id and len(key) == _KEY_ID_CHARACTERS:
        try:
            return base32.decode(key)
        except ValueError:
            pass  # an id that only looks like a key is a text like any other
    return hashlib.sha256(server_id.encode("utf-8")).digest()


def permuted(
    storage_index: bytes, seeds: Mapping[T, bytes], preferred: Container[T] = ()
) -> list[T]:
    """
    Return the servers in the order in which this file's shares are placed and searched.

    Args:
        storage_index: 16 bytes.
        seeds: the permutation seed of each server. Servers with the same seed keep the order they
            have here.
        preferred: servers that come before all others, in the same order among themselves.
    """
    start = hashlib.sha1(storage_index, usedforsecurity=False)

    def position(server: T) -> tuple[bool, bytes]:
        sha1 = start.copy()
        sha1.update(seeds[server])
        return server not in preferred, sha1.digest()

    return sorted(seeds, key=position)
