"""
Several files on their way to the grid at once, their caps printed in the order asked for.

How many: as many as hold a bounded number of bytes together, so that a hundred small files
share their round trips; and always two, so that the next large file starts while the last bytes of the
one before are being acknowledged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.cli.console import Console
from pipegrid.cli.outcome import ExitStatus, printable, sentence
from pipegrid.cli.progress import Progress
from pipegrid.cli.stdin import InterruptibleInput, interruptible
from pipegrid.errors import SinkError, SourceError

if TYPE_CHECKING:
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import PutResult

MIN_FILES = 2
MAX_FILES = 32
MAX_BYTES = 8 << 20
"""Plaintext of the files in flight, beyond MIN_FILES; each file's own memory is bounded by the grid."""


def may_start(sizes_in_flight: Sequence[int], size: int) -> bool:
    """Return whether a file of ``size`` bytes may join those in flight."""
    if len(sizes_in_flight) < MIN_FILES:
        return True
    return len(sizes_in_flight) < MAX_FILES and sum(sizes_in_flight) + size <= MAX_BYTES


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
        self._outcomes: dict[int, Any] = {}  # a PutResult, or what was raised instead
        self._in_flight: dict[int, tuple[int, Deferred[Any]]] = {}
        self._wakeup: Deferred[None] = Deferred()
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
            try:
                for number, path in enumerate(self._files):
                    size = _size(path)
                    while not may_start([size for size, _ in self._in_flight.values()], size):
                        await self._next_end()
                    self._start(number, size, progress)
                    self._print_in_order()
                while self._in_flight:
                    await self._next_end()
            except BrokenPipeError:
                await self._abandon()
                raise SinkError(
                    "nobody reads standard output any more; run the command again for the caps"
                ) from None
            except BaseException:
                await self._abandon()
                raise
        if len(self._statuses) > 1:
            return ExitStatus.FAILED
        return next(iter(self._statuses), ExitStatus.DONE)

    def _start(self, number: int, size: int, progress: Progress) -> None:
        upload = Deferred.fromCoroutine(self._upload(self._files[number], progress))
        self._in_flight[number] = (size, upload)
        upload.addCallbacks(self._ended, self._failed, (number,), {}, (number,), {})

    async def _upload(self, path: str, progress: Progress) -> Any:
        source: Any = self._open_stdin() if path == "-" else path
        return await self._grid.put(source, progress=progress.transfer(), **self._options)

    def _ended(self, outcome: Any, number: int) -> None:
        self._outcomes[number] = outcome
        del self._in_flight[number]
        if not self._wakeup.called:
            self._wakeup.callback(None)

    def _failed(self, reason: Failure, number: int) -> None:
        self._ended(reason.value, number)

    async def _next_end(self) -> None:
        """Wait until an upload has ended, well or not, and print what can be printed."""
        self._wakeup = Deferred()
        await self._wakeup
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
            if isinstance(outcome, BaseException):
                self._report_failure(path, outcome)
            else:
                self._report_success(path, outcome)

    def _report_failure(self, path: str, error: BaseException) -> None:
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

    async def _abandon(self) -> None:
        """Cancel what is in flight, and wait until it has cleaned up."""
        if isinstance(self._stdin, InterruptibleInput):
            self._stdin.give_up()
        running = [upload for _, upload in self._in_flight.values()]
        for upload in running:
            upload.cancel()
        await DeferredList(running, consumeErrors=True)


def _size(path: str) -> int:
    """Return a file's size, or more than any budget if it is unknown."""
    if path != "-":
        try:
            return os.stat(path).st_size
        except OSError:
            return 0  # it will fail at once
    return MAX_BYTES


def _name(path: str) -> str:
    return "standard input" if path == "-" else printable(path)
