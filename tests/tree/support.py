"""Trees in memory, for tests: directories packed as they are on grids, and a grid that only reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, MutableCap, is_literal_size
from pipegrid.core.hashes import netstring
from pipegrid.core.packed_directory import PackedChild, pack_immutable
from pipegrid.errors import NotEnoughSharesError

Tree = Mapping[str, Any]
"""Names to bytes, caps, or trees; a tuple has metadata as its second."""


def changing_cap(number: int) -> DirectoryCap:
    """Return the read cap of a directory that can change."""
    secret = hashlib.sha256(str(number).encode()).digest()
    return DirectoryCap(MutableCap("SSK", "read", secret[:16], secret))


def entry_bytes(name: str, cap: str, rw_data: bytes = b"", metadata: bytes = b"{}") -> bytes:
    """Return one entry as it is stored, whatever it says."""
    fields = (name.encode(), cap.encode(), rw_data, metadata)
    return netstring(b"".join(netstring(field) for field in fields))


class FakeGrid:
    """
    Holds files by their caps, and gives them as ``Grid`` does.

    Attributes:
        held: whether reads wait for ``release``.
        waiting: caps of the reads that do, and their answers, in the order of asking.
        reads: how many were ever asked for.
        most: how many waited at once, at most.
        broken: caps that cannot be read.
    """

    def __init__(self) -> None:
        self.files: dict[Cap, bytes] = {}
        self.held = False
        self.waiting: list[tuple[Cap, Deferred[Any]]] = []
        self.reads = 0
        self.most = 0
        self.broken: set[Cap] = set()

    def file(self, data: bytes) -> Cap:
        """Store a file, and return its cap, which follows from its content."""
        if is_literal_size(len(data)):
            return LitCap(data)
        digest = hashlib.sha256(data).digest()
        cap = ChkCap(digest[:16], digest, 3, 10, len(data))
        self.files[cap] = data
        return cap

    def directory(self, tree: Tree) -> DirectoryCap:
        """Store a tree, and return the cap of its root."""
        children = []
        for name, given in tree.items():
            metadata: dict[str, Any] = {}
            if isinstance(given, tuple):
                given, metadata = given
            if isinstance(given, bytes):
                given = self.file(given)
            elif isinstance(given, Mapping):
                given = self.directory(given)
            children.append(PackedChild(name, given, metadata))
        return self.packed(pack_immutable(children))

    def packed(self, data: bytes) -> DirectoryCap:
        """Store the bytes of a directory, good or not."""
        cap = self.file(data)
        assert isinstance(cap, (ChkCap, LitCap))
        return DirectoryCap(cap)

    def changing(self, number: int, tree: Mapping[str, Cap]) -> DirectoryCap:
        """Store a directory that can change, under a cap of that number, so that it may hold itself."""
        cap = changing_cap(number)
        self.files[cap.file] = b"".join(
            entry_bytes(name, str(child)) for name, child in sorted(tree.items())
        )
        return cap

    def read(self, cap: str | Cap, start: int = 0, length: int | None = None) -> Deferred[bytes]:
        """Answer as ``Grid.read`` does: at once, or when it is released."""
        assert not isinstance(cap, str)
        self.reads += 1
        end = None if length is None else start + length

        def answer(_: object) -> bytes:
            if cap in self.broken or cap not in self.files:
                raise NotEnoughSharesError("2 of 3 shares were found; try again", 2, 3)
            return self.files[cap][start:end]

        waiting: Deferred[Any] = Deferred()
        waiting.addCallback(answer)
        if self.held:
            self.waiting.append((cap, waiting))
            self.most = max(self.most, len(self.waiting))
        else:
            waiting.callback(None)
        return waiting

    def release(self) -> int:
        """Answer all that wait, as a round trip would; returns how many did."""
        waiting, self.waiting = self.waiting, []
        for _, answer in waiting:
            if not answer.called:
                answer.callback(None)
        return len(waiting)
