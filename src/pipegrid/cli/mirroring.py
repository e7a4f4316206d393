"""The progress of a mirroring on a terminal: files, bytes, rate, time left."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipegrid.cli.console import Console
from pipegrid.cli.progress import aside

if TYPE_CHECKING:
    from pipegrid.mirror.mirror import Report


class Display:
    """A context manager: a bar on stderr, if somebody watches."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Any = None
        if console.shows_progress:
            import tqdm

            tqdm.tqdm.monitor_interval = 0  # no thread of its own
            self._bar = tqdm.tqdm(
                desc="mirror",
                total=0,
                unit="B",
                unit_scale=True,
                leave=False,
                dynamic_ncols=True,
                file=console.stderr,
            )
            console.print_within(partial(aside, self._bar))

    def show(self, report: Report) -> None:
        """Show how far it is."""
        bar = self._bar
        if bar is None:
            return
        bar.total = report.wanted_bytes
        done = report.present_files + report.fetched_files
        bar.set_postfix_str(f"{done}/{report.wanted_files} files", refresh=False)
        bar.update(report.present_bytes + report.fetched_bytes - bar.n)

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._console.print_within(None)
            self._bar.close()
