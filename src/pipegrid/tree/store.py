"""
Where the files of a tree go: to a grid, or nowhere, to learn what would be sent.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import Any, Protocol

from twisted.internet.defer import Deferred, succeed

from pipegrid.core.caps import Cap, ChkCap, LitCap, is_literal_size
from pipegrid.core.params import Params
from pipegrid.grid.grid import Grid
from pipegrid.transfer.progress import Progress

Source = bytes | io.FileIO | None
FileCap = ChkCap | LitCap


class Store(Protocol):
    """Takes files."""

    def put(
        self,
        source: Source,
        size: int,
        cap_known: Callable[[ChkCap], None] | None,
        progress: Progress | None,
    ) -> Deferred[FileCap]:
        """Store one file; see ``Grid.put``. ``source`` is None where nothing is read."""

    def check(self, cap: Cap) -> Deferred[bool]:
        """Renew the leases of a file; fires with whether it is as good as a put leaves it."""


class GridStore:
    """
    A grid.

    Args:
        options: of ``Grid.put``, the same for all.
    """

    def __init__(self, grid: Grid, **options: Any) -> None:
        self._grid = grid
        self._options = options
        params = options.get("params") or grid.config.params
        self._happy = options.get("happy") or min(grid.config.happy, params.total_shares)

    def put(
        self,
        source: Source,
        size: int,
        cap_known: Callable[[ChkCap], None] | None,
        progress: Progress | None,
    ) -> Deferred[FileCap]:
        """Store one file."""
        assert source is not None
        running = self._grid.put(source, cap_known=cap_known, progress=progress, **self._options)
        return running.addCallback(lambda result: result.cap)

    def check(self, cap: Cap) -> Deferred[bool]:
        """Count its shares, and renew their leases."""
        running = self._grid.check(cap, add_lease=True)
        return running.addCallback(
            lambda result: result.recoverable and result.happiness >= self._happy
        )


class NoStore:
    """
    Nothing is stored: what would be is counted.

    Attributes:
        objects, bytes: files and directories, before they are encoded.
        checks: of those that would be checked.
    """

    def __init__(self, params: Params) -> None:
        self._params = params
        self.objects = self.bytes = self.checks = 0

    def put(
        self,
        source: Source,
        size: int,
        cap_known: Callable[[ChkCap], None] | None,
        progress: Progress | None,
    ) -> Deferred[FileCap]:
        """Count it, and make up a cap of the right length."""
        if is_literal_size(size):
            return succeed(LitCap(b"?" * size))
        self.objects += 1
        self.bytes += size
        digest = hashlib.sha256(b"%d" % self.objects).digest()
        k, n = self._params.required_shares, self._params.total_shares
        return succeed(ChkCap(digest[:16], digest, k, n, size))

    def check(self, cap: Cap) -> Deferred[bool]:
        """Count it."""
        self.checks += 1
        return succeed(True)
