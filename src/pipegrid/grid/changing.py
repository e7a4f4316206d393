"""
Files of a grid that can change.

What is done with them is in ``mutables``, which is loaded with the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred, fail

from pipegrid.core.caps import Cap, MutableCap
from pipegrid.core.filecaps import writable
from pipegrid.core.params import Params
from pipegrid.errors import UsageError
from pipegrid.grid.base import BaseGrid
from pipegrid.transfer.progress import Progress
from pipegrid.transfer.put.source import SourceLike

if TYPE_CHECKING:
    from pipegrid.grid.mutables import Mutables
    from pipegrid.transfer.mutable.joining import Merge
    from pipegrid.transfer.mutable.modifying import ContentEdit, Redo
    from pipegrid.transfer.mutable.written import CreateResult, WriteResult

T = TypeVar("T")

# What only one kind of transfer needs is imported when the first of that kind begins.


class ChangingGrid(BaseGrid):
    """Makes and changes mutable files."""

    def create_mutable(
        self,
        source: SourceLike,
        *,
        format: str | None = None,
        params: Params | None = None,
        progress: Progress | None = None,
    ) -> Deferred[CreateResult]:
        """
        Store a mutable file; fires with its write cap (``result.cap``; ``.readonly()`` is to be given away).

        Args:
            source: as for ``put``; at most 128 MiB, which are held in memory.
            format: ``"sdmf"``, one segment; or ``"mdmf"``, of which ranges can be changed; by
                default, as configured.
            params: other than configured; the segment size is the format's.
            progress: called once, with all bytes stored.

        Raises (through the Deferred):
            SourceError: the source cannot be read.
            UnhappyError: too few servers took it.
            UsageError: it is too large.
        """
        return self._start(self._create(source, format, params, progress))

    async def _create(
        self,
        source: SourceLike,
        format: str | None,
        params: Params | None,
        progress: Progress | None,
    ) -> CreateResult:
        result = await self._open_mutables().create(source, format, params, progress)
        self._warn_of_shares(self.config.params if params is None else params)
        return result

    def overwrite(self, cap: str | Cap, source: SourceLike) -> Deferred[WriteResult]:
        """
        Replace the content of a mutable file, whatever it was.

        Raises (through the Deferred):
            CapError: the cap does not write.
            UncoordinatedWriteError: somebody else wrote at the same time, and theirs is there now.
            NotEnoughSharesError: nothing is known of its versions, or none can be read.
        """
        return self._start_writing(cap, lambda own, file: own.overwrite(file, source))

    def update(self, cap: str | Cap, offset: int, data: bytes) -> Deferred[WriteResult]:
        """
        Write bytes into a mutable file, from an offset within it or at its end; the others stay.

        Of MDMF only the segments that are touched travel; SDMF is written whole.
        """
        return self._start_writing(cap, lambda own, file: own.update(file, offset, data))

    def modify(
        self,
        cap: str | Cap,
        function: ContentEdit,
        *,
        merge: Merge | None = None,
        remembered: bytes | None = None,
        redo: Redo | None = None,
    ) -> Deferred[WriteResult]:
        """
        Apply a function to the content of a mutable file; fires when the result is what is there.

        Other writers' changes are never lost by it, nor is this one: it is applied again to what they made
        of the file. Changes that are asked for at the same time are written as one version.

        Args:
            function: from old bytes to new bytes. It may be called several times, also with content that has
                its change already; what it raises fails the call, and nothing is written.
            merge: makes one content of several versions with the same number; by default the highest counts.
            remembered: what the content was when this client saw it last, if the caller has kept it; then it
                need not be read again. It is held against the version that was seen.
            redo: finds the change in content that has it already. It is given content that the function was
                applied to, what became of it, and what is there now, and returns the latter, perhaps put
                right, or None: then the function is applied to it. Of changes that are joined all must have
                the same.
        """
        return self._start_writing(
            cap, lambda own, file: own.modify(file, function, merge, remembered, redo)
        )

    def look_ahead(self, cap: str | Cap) -> Deferred[None]:
        """
        Find out what a change of a mutable file needs to know, while the change itself is not known yet.

        The next ``modify`` of the file in this process then takes one round trip. Nothing is written, and
        nothing is taken for granted: servers test what was found when the change is written.

        Raises (through the Deferred):
            CapError: the cap does not write.
            NotEnoughSharesError: no version can be read.
        """
        return self._start_writing(cap, lambda own, file: own.look_ahead(file))

    def _start_writing(
        self, cap: str | Cap, write: Callable[[Mutables, MutableCap], Coroutine[Any, Any, T]]
    ) -> Deferred[T]:
        try:
            file = writable(cap)
        except UsageError as error:
            return fail(error)
        return self._start(write(self._open_mutables(), file))
