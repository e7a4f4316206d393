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


@attrs.define(eq=False)
class Part:
    """
    One transfer of a command; what it reports is shown at once.

    Attributes:
        size: of its file, if what is reported counts something else, such as bytes of shares.
        done_bytes, total_bytes: what was reported last, of the file.
        found_bytes: what of that was there before.
        hashed_bytes: of the file, for its key; None: that is over, or was never begun.
    """

    show: Callable[[], None]
    size: int | None = None
    done_bytes: int = 0
    total_bytes: int = 0
    found_bytes: int = 0
    hashed_bytes: int | None = None

    def sent(self, done: int, total: int) -> None:
        """It has come so far."""
        self.done_bytes, self.total_bytes = self._of_the_file(done, total)
        self.hashed_bytes = None
        self.show()

    def found(self, done: int, total: int) -> None:
        """So much was there before."""
        self.found_bytes, _ = self._of_the_file(done, total)
        self.show()

    def hashed(self, done: int, total: int) -> None:
        """Its key was made from so much of the file."""
        self.hashed_bytes, self.total_bytes = done, total
        if self.size is None:
            self.size = total  # of a pipe, this is the first that anybody knows
        self.show()

    def _of_the_file(self, done: int, total: int) -> tuple[int, int]:
        if self.size is None or not total:
            return done, total
        return self.size * done // total, self.size


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
        self._parts: list[Part] = []
        self._bar: Any = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody watches."""
        return self._bar is not None

    def transfer(self) -> ProgressCall | None:
        """Return what one transfer calls with what is done and what there is to do; None: nobody watches."""
        return None if self._bar is None else self.upload(None).sent

    def upload(self, size: int | None) -> Part:
        """Return what an upload reports to, which counts bytes of shares; its file has ``size`` bytes."""
        part = Part(self._show, size, total_bytes=size or 0)
        self._parts.append(part)
        return part

    def _show(self) -> None:
        if self._bar is None:
            return
        bar, parts = self._bar, self._parts
        bar.total = sum(part.total_bytes for part in parts) or None
        hashed = [part.hashed_bytes for part in parts if part.hashed_bytes is not None]
        if hashed and not any(part.done_bytes for part in parts):  # nothing has arrived yet
            self._describe(f"{self._verb}: hashing", "")
            done = sum(hashed)
        else:
            done = sum(part.done_bytes for part in parts)
            found = min(done, sum(part.found_bytes for part in parts))
            self._describe(self._verb, f"{amount(found)} found" if found else "")
            bar.initial = found  # what was there says nothing of the rate
        if done < bar.n:  # another phase: it counts anew
            bar.n = done
            bar.refresh()
        else:
            bar.update(done - bar.n)

    def _describe(self, text: str, postfix: str) -> None:
        if (f"{text}: ", postfix) != (self._bar.desc, self._bar.postfix or ""):
            self._bar.set_description_str(f"{text}: ", refresh=False)
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
