"""
A progress bar on stderr, if somebody watches.

It counts bytes that servers have acknowledged, so 100 % means stored, not sent.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from pipegrid.cli.console import Console

ProgressCall = Callable[[int, int], None]


class Progress:
    """A context manager: one bar for all transfers of a command."""

    def __init__(self, console: Console, verb: str) -> None:
        self._console = console
        self._parts: dict[int, tuple[int, int]] = {}
        self._bar: Any = None
        if console.shows_progress:
            import tqdm

            tqdm.tqdm.monitor_interval = 0  # no thread of its own
            self._bar = tqdm.tqdm(
                desc=verb, total=0, unit="B", unit_scale=True, leave=False, file=console.stderr
            )
            console.clear_with(self._bar.clear)

    def transfer(self) -> ProgressCall | None:
        """Return what one transfer calls with ``(done, total)`` bytes; None: nobody watches."""
        if self._bar is None:
            return None
        number = len(self._parts)
        self._parts[number] = (0, 0)

        def progress(done: int, total: int) -> None:
            self._parts[number] = (done, total)
            self._show()

        return progress

    def _show(self) -> None:
        done = sum(part[0] for part in self._parts.values())
        self._bar.total = sum(part[1] for part in self._parts.values())
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._console.clear_with(lambda: None)
            self._bar.close()
