"""
One file or directory of a tree on its way to the store, as the tree's counts, reports and bounds see it.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import attrs

from pipegrid.core.caps import ChkCap, LitCap
from pipegrid.errors import PipegridError, SourceError
from pipegrid.tree.localwalk import FileMet, LocalWalk
from pipegrid.tree.memory import Memory, Remembered
from pipegrid.tree.plan import TreeNode
from pipegrid.tree.store import Content, StoresFiles
from pipegrid.tree.underway import MAX_BYTES, WorkUnderWay
from pipegrid.tree.uploaded import OnItsWay, TreeCounts, TreeReports


class Unsent:
    """
    What could not be stored.

    Attributes:
        path: from the root.
        error: of its last try.
        met: of a file or link; a file's content is read again.
        size: of that, in bytes.
    """

    def __init__(self, path: str, error: PipegridError, met: FileMet | None = None) -> None:
        self.path = path
        self.error = error
        self.met = met
        self.size = 0
        if met is not None:
            self.size = met.found.st_size if met.link is None else len(met.link)
        if met is not None and met.link is None:
            self.met = attrs.evolve(met, content=None)


def reopened(walk: LocalWalk, path: str, why: str) -> io.FileIO:
    """
    Open a file of the walk once more.

    Args:
        why: it would be of use, for the error.

    Raises:
        SourceError: it is gone, or cannot be read.
    """
    try:
        return walk.open(path)
    except OSError as error:
        reason = "it vanished" if error.errno == 2 else f"it cannot be read: {error.strerror}"
        raise SourceError(f"{reason}, {why}") from error


class TreeSending:
    """
    Gives to the store, and asks it, for one tree.

    Args:
        under_way: is told of large files how much is left.
        wake: called when there may be room for more, or a cap has become known.
    """

    def __init__(
        self,
        store: StoresFiles,
        memory: Memory,
        counts: TreeCounts,
        reports: TreeReports,
        under_way: WorkUnderWay[TreeNode],
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._memory = memory
        self._counts = counts
        self._reports = reports
        self._under_way = under_way
        self._wake = wake

    async def put(
        self, place: TreeNode, source: Content, size: int, cap_known: Callable[[ChkCap], None]
    ) -> ChkCap | LitCap:
        """Store something, and count it; returns its cap, and raises what ``StoresFiles.put`` does."""
        sending = OnItsWay(self._reports, self._counts, size)

        def progress(done: int, total: int) -> None:
            sending.is_at(done, total)
            if self._under_way.weigh(place, size * (total - done) // max(1, total)):
                self._wake()

        def known(cap: ChkCap) -> None:
            cap_known(cap)
            self._wake()

        report = progress if size > MAX_BYTES // 8 else None
        try:
            cap, was_there = await self._store.put(source, size, known, report)
        finally:
            sending.end()
        self._counts.sent_bytes += 0 if isinstance(cap, LitCap) else size
        self._counts.already_stored += was_there
        return cap

    async def is_whole(self, known: Remembered) -> bool:
        """Look for something on the grid; whatever is wrong with it is mended by storing it again."""
        try:
            health = await self._store.check(known.cap)
        except PipegridError:
            return False
        if health.whole and health.leased:
            self._memory.checked(known.cap)
        self._counts.unleased += health.whole and not health.leased
        return health.whole
