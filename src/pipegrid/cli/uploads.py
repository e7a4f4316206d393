"""
The files of one ``put``: stored many at once, their caps printed in the order asked for.

Which go at the same time is ``Grid.put_many``'s decision.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twisted.python.failure import Failure

from pipegrid.cli.capfile import as_line
from pipegrid.cli.console import Console
from pipegrid.cli.outcome import ExitStatus, UnprintedCap, one_status
from pipegrid.cli.progress import ProgressBar
from pipegrid.cli.render import keep_caps, print_cap
from pipegrid.cli.stdin import InterruptibleInput, opened
from pipegrid.core.text import counted, printable
from pipegrid.errors import SourceError
from pipegrid.transfer.put.source import size_of

if TYPE_CHECKING:
    from pipegrid.transfer.results import PutResult
    from pipegrid.grid import Grid as FileGrid


class Uploads:
    """
    The files of one ``put``.

    Args:
        files: paths; ``-`` is standard input.
        options: for ``Grid.put_many``.
        with_names: print the lines of a cap file, and not only caps.
    """

    def __init__(
        self,
        grid: FileGrid,
        console: Console,
        files: Sequence[str],
        options: dict[str, Any],
        with_names: bool = False,
    ) -> None:
        self._grid = grid
        self._console = console
        self._files = files
        self._options = options
        self._with_names = with_names
        self._outcomes: dict[int, PutResult | Failure] = {}
        self._waiting: list[InterruptibleInput] = []
        self._printed = 0
        self._statuses: set[ExitStatus] = set()

    async def run(self) -> int:
        """
        Store all files and print all caps.

        Returns:
            0; or the status of the failures if they share one; or 1.
        """
        try:
            sources: list[Any] = [self._opened(path) for path in self._files]
            with ProgressBar(self._console, "put") as progress:
                bars = BarsOfFiles(progress, sources)
                await self._grid.put_many(
                    sources,
                    **(bars.calls if progress.is_wanted else {}),
                    ended=self._ended,
                    **self._options,
                )
        except UnprintedCap as error:
            self._keep_the_rest(error)
            raise
        finally:
            for each in self._waiting:
                each.give_up()
        return one_status(self._statuses)

    def _keep_the_rest(self, error: UnprintedCap) -> None:
        """Keep the caps of files that were stored after one whose cap could not be printed."""
        lines = [
            as_line(str(each.cap), self._files[number])
            for number, each in sorted(self._outcomes.items())
            if not isinstance(each, Failure)
        ]
        if lines and isinstance(error.__cause__, Exception):
            kept = keep_caps(self._grid.config.directory, lines, error.__cause__)
            self._console.complain(kept)

    def _ended(self, number: int, outcome: PutResult | Failure) -> None:
        self._outcomes[number] = outcome
        self._print_in_order()

    def _opened(self, path: str) -> Any:
        """Return what a thread may read; what it may wait for is given up in the end."""
        source = opened(path, self._console.stdin)
        if isinstance(source, InterruptibleInput):
            self._waiting.append(source)
        return source

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
        if isinstance(error, SourceError) and os.path.isdir(path):
            error = SourceError(
                f"'{printable(path)}' is a directory; add -r to store all that is in it"
            )
        self._statuses.add(self._console.failed(error, _name(path), {"path": path}))

    def _report_success(self, path: str, result: PutResult) -> None:
        console = self._console
        console.detail(
            f"{_name(path)}: {counted(result.size, 'byte')}, "
            f"{counted(len(result.shares_placed), 'share')} placed, "
            f"{len(result.shares_found)} found, happiness {result.happiness}, "
            f"{result.elapsed_s:.3f} s"
        )
        cap = str(result.cap)
        text = as_line(cap, path) if self._with_names else cap
        fields = {
            "path": path,
            "cap": cap,
            "size": result.size,
            "share_bytes": result.share_bytes,
            "shares_placed": result.shares_placed,
            "shares_found": result.shares_found,
            "happiness": result.happiness,
            "elapsed_s": result.elapsed_s,
        }
        if self._options.get("random_key"):
            print_cap(console, self._grid.config.directory, text, fields, cap, path)
        else:  # the same command makes the same cap again
            console.result(text, fields)


class BarsOfFiles:
    """
    What the files of one ``put`` report, each under its number, on one bar.

    Attributes:
        calls: the arguments of ``Grid.put_many`` that report.
    """

    def __init__(self, progress: ProgressBar, sources: Sequence[Any]) -> None:
        parts = [progress.upload(size_of(source)) for source in sources]
        self.calls: dict[str, Any] = {
            "progress": lambda number, done, total: parts[number].sent(done, total),
            "found": lambda number, done, total: parts[number].found(done, total),
            "hashing": lambda number, done, total: parts[number].hashed(done, total),
        }


def _name(path: str) -> str:
    return "standard input" if path == "-" else printable(path)
