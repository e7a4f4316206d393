"""
What is met on a walk through a tree, and what a walk may take.
"""

from __future__ import annotations

import hashlib
from typing import Any

import attrs

from pipegrid.core.caps import Cap, DirectoryCap, LitCap, UnknownCap
from pipegrid.tree.listing import Kind, Listing, metadata_of

TreePath = tuple[str, ...]
"""Names from the root of a tree."""


@attrs.frozen
class WalkLimits:
    """
    What a walk may take.

    Attributes:
        reads: directories that are being read at a time.
        ahead_bytes: of memory for directories that were read, or are being read, ahead of the walk.
        open_bytes: of memory for those that the walk is in.
        depth: levels below the root.
        objects: that are met; a tree of thirty directories can have a billion paths.
    """

    reads: int = 64
    ahead_bytes: int = 64 << 20
    open_bytes: int = 256 << 20
    depth: int = 1000
    objects: int = 20_000_000


@attrs.frozen
class Found:
    """
    A directory, file, or unknown object that a walk has met.

    Attributes:
        path: names from the root; empty for the root itself.
        cap: what reads it; None if only a write cap is stored, encrypted.
        kind: ``directory``, ``file`` or ``unknown``.
        metadata_json: what its entry says beside the cap; see ``metadata``.
        again: an object of this verifier cap was met before. If all paths are wanted, it is entered all the
            same, and otherwise not, but for a directory that was met by its verifier cap only. Literal ones
            are never met again, since they are on no server.
        listing: of a directory that is entered next, what is in it.
        best: the cap that grants most, where the tree tells one that does more than read.
    """

    path: TreePath
    cap: Cap | None
    kind: Kind
    metadata_json: bytes = attrs.field(default=b"{}", repr=False)
    again: bool = False
    listing: Listing | None = attrs.field(default=None, repr=False)
    best: Cap | None = attrs.field(default=None, repr=False)

    @property
    def metadata(self) -> dict[str, Any]:
        """What its entry says beside the cap."""
        return metadata_of(self.metadata_json)


@attrs.frozen
class Unreadable:
    """
    A directory that could not be read, or is not entered; the walk goes on behind it.

    Attributes:
        path, cap, metadata_json, best: as of what is found.
        error: why, a sentence.
    """

    path: TreePath
    cap: Cap | None
    error: Exception
    metadata_json: bytes = attrs.field(default=b"{}", repr=False)
    best: Cap | None = attrs.field(default=None, repr=False)

    @property
    def metadata(self) -> dict[str, Any]:
        """What its entry says beside the cap."""
        return metadata_of(self.metadata_json)


Met = Found | Unreadable


def identity_of(cap: Cap | None) -> bytes | None:
    """
    Return 16 bytes that tell an object from all others, whatever its cap grants; None if it is on no server.

    They are made of the verifier cap, so that a hostile cap with the storage index of another file hides
    nothing.
    """
    if cap is None or isinstance(cap, UnknownCap):
        return None
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(file, LitCap):
        return None
    return hashlib.sha256(str(file.verifier()).encode("ascii")).digest()[:16]
