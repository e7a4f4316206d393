"""
What fetching a tree needs, what it may take, and what comes of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.caps import Cap
from pipegrid.transfer.progress import Progress
from pipegrid.transfer.results import GetResult
from pipegrid.transfer.settings import Limits
from pipegrid.tree.listing import ListingLimits, ReadsFiles
from pipegrid.tree.walk import WalkLimits

SMALL_IN_FLIGHT_BYTES = 16 << 20
"""Of small files together: it fills a line of 1 Gbit/s at 100 ms."""

LARGE_AT_ONCE = 3
"""Each may hold what ``DownloadSettings.memory_bytes`` says."""


class FetchesFiles(ReadsFiles, Protocol):
    """What fetching a tree needs of a grid."""

    def get(
        self, cap: str | Cap, sink: Any, *, progress: Progress | None = None
    ) -> Deferred[GetResult]:
        """Fetch a file into a sink; see ``Grid.get``."""

    @property
    def clock(self) -> IReactorTime:
        """The reactor, as far as it tells the time."""


MAX_PATHS = 1_000_000
"""Of a tree that is fetched, unless somebody says otherwise."""


@attrs.define
class TreeGetResult:
    """
    What came of fetching a tree.

    Attributes:
        files: that were fetched.
        present: files that were there.
        directories, links: that are there now.
        size: bytes of files that were fetched or there.
        fetched_bytes: of the former.
        second_tries: files that came, and directories that were read, when servers were in reach again.
        failed: how many objects were left out; each was told.
        part_files: of other downloads, which the tree has and which were skipped.
        not_kept: how many files, directories and links have not the mode or time that they should.
    """

    files: int = 0
    present: int = 0
    directories: int = 0
    links: int = 0
    size: int = 0
    fetched_bytes: int = 0
    second_tries: int = 0
    failed: int = 0
    part_files: int = 0
    not_kept: int = 0


@attrs.frozen
class GetTreeLimits:
    """
    What fetching a tree may take.

    Attributes:
        in_flight_bytes: of small files.
        large_at_once: files that are larger.
        jobs: files of either kind.
        paths: files, directories and links; a few of them can have a billion paths.
        walk, listing: see there.
    """

    in_flight_bytes: int = SMALL_IN_FLIGHT_BYTES
    large_at_once: int = LARGE_AT_ONCE
    jobs: int = 1 << 20
    walk: WalkLimits = attrs.field(factory=WalkLimits)
    listing: ListingLimits = attrs.field(factory=ListingLimits)
    paths: int = MAX_PATHS


def bounded(limits: Limits) -> GetTreeLimits:
    """Return what fetching a tree may take, of what its grid may: a quarter of the memory for each use."""
    bounds = GetTreeLimits()
    jobs = bounds.jobs if limits.jobs is None else limits.jobs
    in_flight_bytes, walk = bounds.in_flight_bytes, bounds.walk
    if limits.memory_bytes is not None:
        part = limits.memory_bytes // 4
        in_flight_bytes = min(in_flight_bytes, part)
        walk = attrs.evolve(walk, ahead_bytes=min(walk.ahead_bytes, part))
    return GetTreeLimits(in_flight_bytes, min(bounds.large_at_once, jobs), jobs, walk)
