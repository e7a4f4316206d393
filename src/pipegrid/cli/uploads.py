"""
The files of one ``put``: stored many at once, their caps printed in the order asked for.

Which go at the same time is ``transfer.many``'s decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.cli.console import Console
from pipegrid.cli.outcome import ExitStatus, printable, sentence
from pipegrid.cli.progress import Progress
from pipegrid.cli.stdin import InterruptibleInput, interruptible
from pipegrid.errors import SinkError, SourceError
from pipegrid.transfer.put.many import ManyPuts
from pipegrid.transfer.put.source import size_of

if TYPE_CHECKING:
    from pipegrid.grid import Grid
    from pipegrid.transfer.progress import Progress as ProgressCall
    from pipegrid.transfer.results import PutResult


class Uploads:
    """
    The files of one ``put``.

    Args:
        files: paths; ``-`` is standard input.
        options: for ``Grid.put``.
    """

    def __init__(
        self, grid: Grid, console: Console, files: Sequence[str], options: dict[str, Any]
    ) -> None:
        self._grid = grid
        self._console = console
        self._files = files
        self._options = options
        self._outcomes: dict[int, PutResult | Failure] = {}
        self._stdin: BinaryIO | InterruptibleInput | None = None
        self._printed = 0
        self._statuses: set[ExitStatus] = set()

    async def run(self) -> int:
        """
        Store all files and print all caps.

        Returns:
            0; or the status of the failures if they share one; or 1.
        """
        with Progress(self._console, "put") as progress:

            def start(number: int, note: ProgressCall) -> Deferred[PutResult]:
                upload = self._upload(self._files[number], _both(note, progress.transfer()))
                return Deferred.fromCoroutine(upload)

            sizes = [None if path == "-" else size_of(path) for path in self._files]
            try:
                await ManyPuts(sizes, start, self._ended).run()
            except BrokenPipeError:
                raise SinkError(
                    "nobody reads standard output any more; run the command again for the caps"
                ) from None
        if len(self._statuses) > 1:
            return ExitStatus.FAILED
        return next(iter(self._statuses), ExitStatus.DONE)

    async def _upload(self, path: str, progress: ProgressCall) -> PutResult:
        if path != "-":
            return await self._grid.put(path, progress=progress, **self._options)
        source: Any = self._open_stdin()
        try:
            return await self._grid.put(source, progress=progress, **self._options)
        finally:
            if isinstance(source, InterruptibleInput):
                source.give_up()

    def _ended(self, number: int, outcome: PutResult | Failure) -> None:
        self._outcomes[number] = outcome
        self._print_in_order()

    def _open_stdin(self) -> BinaryIO | InterruptibleInput:
        if self._console.stdin is None:
            raise SourceError("cannot read standard input: it is closed")
        self._stdin = interruptible(self._console.stdin)
        return self._stdin

    def _print_in_order(self) -> None:
        while self._printed in self._outcomes:
            path, outcome = self._files[self._printed], self._outcomes.pop(self._printed)
            self._printed += 1
            if isinstance(outcome, Failure):
                self._report_failure(path, outcome)
            else:
                self._report_success(path, outcome)

    def _report_failure(self, path: str, failure: Failure) -> None:
        error = failure.value
        assert error is not None
        status = self._console.complain(error, about=_name(path))
        self._statuses.add(status)
        if self._console.json:
            fields = {"path": path, "error": sentence(error), "exit_status": int(status)}
            self._console.result("", fields)

    def _report_success(self, path: str, result: PutResult) -> None:
        console = self._console
        console.detail(
            f"{_name(path)}: {result.size} bytes, {len(result.shares_placed)} shares placed, "
            f"{len(result.shares_found)} found, happiness {result.happiness}, "
            f"{result.elapsed_s:.3f} s"
        )
        console.result(
            str(result.cap),
            {
                "path": path,
                "cap": str(result.cap),
                "size": result.size,
                "share_bytes": result.share_bytes,
                "shares_placed": result.shares_placed,
                "shares_found": result.shares_found,
                "happiness": result.happiness,
                "elapsed_s": result.elapsed_s,
            },
        )


def _both(one: ProgressCall, other: ProgressCall | None) -> ProgressCall:
    """Return what calls both."""

    def call(done: int, total: int) -> None:
        one(done, total)
        if other is not None:
            other(done, total)

    return call


def _name(path: str) -> str:
    return "standard input" if path == "-" else printable(path)
