"""
A progress bar on stderr, if somebody watches.

It counts bytes of files, as far as servers have acknowledged their shares: 100 % means stored, not sent. All
that a command prints meanwhile goes through the console, which takes the bar away and brings it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import attrs

from pipegrid.cli.console import Console
from pipegrid.cli.render import amount

ProgressCall = Callable[[int, int], None]


@contextmanager
def aside(bar: Any) -> Iterator[None]:
    """Let something be printed where a bar is."""
    bar.clear()
    try:
        yield
    finally:
        bar.refresh()


@attrs.define
class _Part:
    """
    One transfer of a command.

    Attributes:
        size: of its file, if what is reported counts something else, such as bytes of shares.
        done, total: what was reported last, in bytes of the file.
        found: what was there when it began.
        hashed: of the file, for its key; None: that is over, or was never begun.
    """

    size: int | None = None
    done: int = 0
    total: int = 0
    found: int | None = None
    hashed: int | None = None

    def report(self, done: int, total: int) -> None:
        """Note how far it has come."""
        if self.size is not None and total:
            done, total = self.size * done // total, self.size
        if self.found is None:  # nothing can have been acknowledged before the first report
            self.found = done
        self.done, self.total, self.hashed = done, total, None


class Progress:
    """
    A context manager: one bar for all transfers of a command.

    Args:
        unit: what is counted, if that is not bytes.
    """

    def __init__(self, console: Console, verb: str, unit: str = "B") -> None:
        self._console = console
        self._verb = verb
        self._unit = unit
        self._parts: dict[int, _Part] = {}
        self._bar: Any = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody watches."""
        return self._bar is not None

    def transfer(self, size: int | None = None) -> ProgressCall | None:
        """
        Return what one transfer calls with what is done and what there is to do; None: nobody watches.

        Args:
            size: of the file, if it reports something else than bytes of it.
        """
        if self._bar is None:
            return None
        return self._reporting(self._part(size))

    def upload(self, size: int | None) -> tuple[ProgressCall | None, ProgressCall | None]:
        """Return what an upload calls with bytes of shares, and with bytes that its key was made from."""
        if self._bar is None:
            return None, None
        part = self._part(size)

        def hashed(done: int, total: int) -> None:
            part.hashed, part.total = done, total
            if part.size is None:
                part.size = total  # of a pipe, this is the first that anybody knows
            self._show()

        return self._reporting(part), hashed

    def _part(self, size: int | None) -> _Part:
        part = self._parts[len(self._parts)] = _Part(size, total=size or 0)
        return part

    def _reporting(self, part: _Part) -> ProgressCall:
        def progress(done: int, total: int) -> None:
            part.report(done, total)
            self._show()

        return progress

    def _show(self) -> None:
        parts = self._parts.values()
        bar = self._bar
        bar.total = sum(part.total for part in parts) or None
        hashed = [part.hashed for part in parts if part.hashed is not None]
        if hashed and len(hashed) == len(self._parts):  # nothing is being sent yet
            self._describe(f"{self._verb}: hashing", "")
            done = sum(hashed)
        else:
            found = sum(part.found or 0 for part in parts)
            there = amount(found) if self._unit == "B" else str(found)
            self._describe(self._verb, f"{there} was there" if found else "")
            done = sum(part.done for part in parts)
            bar.initial = found  # what was there says nothing of the rate
        if done < bar.n:  # another phase: it counts anew
            bar.n = done
            bar.refresh()
        else:
            bar.update(done - bar.n)

    def _describe(self, text: str, postfix: str) -> None:
        if (text, postfix) != (self._bar.desc.removesuffix(": "), self._bar.postfix or ""):
            self._bar.set_description_str(text + ": ", refresh=False)
            self._bar.set_postfix_str(postfix, refresh=False)
            self._bar.refresh()

    def __enter__(self) -> Progress:
        if self._console.shows_progress:
            import tqdm

            tqdm.tqdm.monitor_interval = 0  # no thread of its own
            self._bar = tqdm.tqdm(
                desc=self._verb,
                total=0,
                unit=self._unit,
                unit_scale=True,
                leave=False,
                dynamic_ncols=True,
                file=self._console.stderr,
            )
            self._console.print_within(partial(aside, self._bar))
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
            self._bar = None
