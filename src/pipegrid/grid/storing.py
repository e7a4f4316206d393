"""
Files on their way to a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred, fail
from twisted.python.failure import Failure

from pipegrid.arguments import check_callable, check_kind, shown
from pipegrid.core.caps import ChkCap
from pipegrid.core.params import Params
from pipegrid.errors import UsageError
from pipegrid.grid.base import BaseGrid
from pipegrid.grid.config import GridConfig, check_happy
from pipegrid.grid.members import Warnings
from pipegrid.grid.remembered import open_elsewhere
from pipegrid.reactor.together import begun
from pipegrid.transfer.progress import Progress, PutReports
from pipegrid.transfer.put.keynotes import KeyNotes
from pipegrid.transfer.put.source import SourceLike, size_of
from pipegrid.transfer.results import PutResult

if TYPE_CHECKING:
    from pipegrid.transfer.put.putter import Putter

# What only one kind of transfer needs is imported when the first of that kind begins.

_COUNTED_BYTES = 64 << 10
"""Of larger files in a put of many, what is acknowledged makes room for others before all of it is."""

NOTES_NAME = "unfinished"
"""Below the directory in which a client keeps what it remembers."""


class StoringGrid(BaseGrid):
    """The part of ``Grid`` that stores files: ``put`` and ``put_many``."""

    def put(
        self,
        source: SourceLike,
        *,
        params: Params | None = None,
        happy: int | None = None,
        convergence: bytes | None = None,
        random_key: bool = False,
        progress: Progress | None = None,
        found: Progress | None = None,
        hashing: Progress | None = None,
        cap_known: Callable[[ChkCap], None] | None = None,
    ) -> Deferred[PutResult]:
        """
        Store one file; fires when enough servers hold it, with its cap.

        Args:
            source: a path, bytes, or a binary file object (read from its beginning if it is a
                regular file, else to its end; it stays open); or an async iterator of bytes, an
                ``IBodyProducer``, or an ``IResponse``. What comes once is copied to temporary space.
            params: other than configured.
            happy: servers of happiness wanted, other than configured.
            convergence: the convergence secret, other than configured; ``b""`` for none.
            random_key: use a fresh key, so that the cap never equals another. If the put of a file (named by
                its path, of more than one segment) is cut off, the next put of it with a random key goes on.
            progress: called with acknowledged and total bytes of shares; what was there already counts.
            found: called with bytes of shares that turned out to be there already, and the total.
            hashing: called before that, with the bytes of the file that its key was made from so far,
                and its size; not for a file that is read in one go.
            cap_known: called with the file's cap as soon as all of it is coded, long before it is stored,
                and perhaps in vain; not for a file that lives in its cap.

        Raises (through the Deferred):
            SourceError: the source cannot be read, or changes meanwhile.
            UnhappyError: too few servers took it.
            UsageError: the parameters are impossible.
        """
        options = (params, happy, convergence, random_key)
        reports = PutReports(progress, found, hashing, cap_known)
        return self._start(self._put(source, *options, reports))

    async def _put(
        self,
        source: SourceLike,
        params: Params | None,
        happy: int | None,
        convergence: bytes | None,
        random_key: bool,
        reports: PutReports,
    ) -> PutResult:
        for name in ("progress", "found", "hashing", "cap_known"):
            check_callable(getattr(reports, name), name)
        params, happy = self._put_options(params, happy, convergence)
        if random_key:
            convergence = None
        elif convergence is None:
            convergence = self.config.convergence
        await self._readiness.wait(happy, storing=True)
        result = await self._open_putter().put(source, params, happy, convergence, reports)
        if isinstance(result.cap, ChkCap):
            self._warn_of_shares(params)
        return result

    def _put_options(
        self,
        params: Params | None = None,
        happy: int | None = None,
        convergence: bytes | None = None,
    ) -> tuple[Params, int]:
        """
        Return how a file is encoded, and how many servers of happiness are wanted, with options of ``put``.

        Raises:
            UsageError: they are impossible.
        """
        params = self.config.params if params is None else params
        check_kind(params, Params, "how a file is encoded", "a Params")
        check_kind(convergence, (bytes, type(None)), "a convergence secret", "bytes", secret=True)
        if happy is None:
            happy = min(self.config.happy, params.total_shares)
        check_happy(happy, params)
        return params, happy

    def _open_putter(self) -> Putter:
        if self._putter is None:
            from pipegrid.transfer.put.putter import Putter

            self._putter = Putter(
                self._means,
                memory=self._upload_memory,
                settings=self._upload_settings,
                notes=_key_notes(self.config, self._warnings),
                say=self._warnings.add,
                elsewhere=open_elsewhere(self.config.ask_first, self.config.caches),
            )
        return self._putter

    def put_many(
        self,
        sources: Sequence[SourceLike],
        *,
        params: Params | None = None,
        happy: int | None = None,
        convergence: bytes | None = None,
        random_key: bool = False,
        progress: Callable[[int, int, int], None] | None = None,
        found: Callable[[int, int, int], None] | None = None,
        hashing: Callable[[int, int, int], None] | None = None,
        ended: Callable[[int, PutResult | Failure], None] | None = None,
    ) -> Deferred[list[PutResult | Failure]]:
        """
        Store many files as one pipeline, the large ones first; fires with each one's outcome.

        A hundred small files take a round trip and their bytes. A file that fails does not stop the
        others. How many files are under way, and open, is bounded.

        Args:
            sources: see ``put``; so are the other options.
            progress, found, hashing: called as those of ``put`` are, with the number of the file in front.
            ended: called with the number of each file, and its outcome, as it ends.
        """
        from pipegrid.transfer.put.many import ManyPuts

        try:
            _check_list(sources)
            for name, call in (("ended", ended), ("progress", progress), ("found", found)):
                check_callable(call, name)
            check_callable(hashing, "hashing")
        except UsageError as error:
            return fail(error)
        outcomes: dict[int, PutResult | Failure] = {}
        sizes = [size_of(source) for source in sources]

        def start(number: int, pace: Progress) -> Deferred[PutResult]:
            def report(done: int, total: int) -> None:
                pace(done, total)
                if progress is not None:
                    progress(number, done, total)

            # What is left of a small file counts as a whole until it ends.
            size = sizes[number]
            counted = progress is not None or size is None or size > _COUNTED_BYTES
            reports = _numbered(number, report if counted else None, found, hashing)
            options = (params, happy, convergence, random_key)
            return begun(self._put(sources[number], *options, reports), self._reactor)

        def note(number: int, outcome: PutResult | Failure) -> None:
            outcomes[number] = outcome
            if ended is not None:
                ended(number, outcome)

        async def work() -> list[PutResult | Failure]:
            bounds = self._limits.jobs, self._reactor.seconds, lambda: self._appetite
            await ManyPuts(sizes, start, note, *bounds, self._expect).run()
            return [outcomes[number] for number in range(len(sources))]

        return self._start(work())


def _numbered(
    number: int,
    report: Progress | None,
    found: Callable[[int, int, int], None] | None,
    hashing: Callable[[int, int, int], None] | None,
) -> PutReports:
    """Return the reports of one of many files; the others are told its number in front."""
    return PutReports(
        report,
        None if found is None else partial(found, number),
        None if hashing is None else partial(hashing, number),
    )


def _check_list(sources: object) -> None:
    if not isinstance(sources, Sequence) or isinstance(sources, (str, bytes, bytearray)):
        raise UsageError(f"many files are stored from a list of sources, not {shown(sources)}")


def _key_notes(config: GridConfig, warnings: Warnings) -> KeyNotes | None:
    """Return where puts with random keys are noted: where a client may write, if it may anywhere."""
    return KeyNotes(config.caches[0] / NOTES_NAME, warnings.add) if config.caches else None
