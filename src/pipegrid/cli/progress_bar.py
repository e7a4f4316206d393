"""The progress bar of a transfer, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs

from pipegrid.cli.console import Console
from pipegrid.core.text import amount

# A progress bar on stderr, if that is a terminal.
#
# It counts the bytes of files whose shares servers have acknowledged: 100 % means stored, not sent. All
# output goes through the console, which hides the bar meanwhile.

ProgressCall = Callable[[int, int], None]

_SPARE = len("^C")
"""Columns after a bar for what the terminal echoes there, so that it fits on the line and is cleared."""


@contextmanager
def _aside(bar: Any) -> Iterator[None]:
    """Hide the bar while something is printed."""
    _clear(bar)
    try:
        yield
    finally:
        bar.refresh()


def _clear(bar: Any) -> None:
    """Clear a bar, and what was echoed after it."""
    if bar.disable:
        return
    if bar.ncols:
        bar.display(" " * (bar.ncols + _SPARE))
    bar.clear()


def open_bar(console: Console, text: str, unit: str = "B") -> Any:
    """
    Return a bar that is hidden while the console prints, until ``close_bar``.

    Args:
        unit: ``B``, shown in thousands and millions; or a word for one of what is counted.
    """
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # otherwise tqdm starts a thread
    bar: Any = tqdm.tqdm(
        desc=text,
        total=0,
        unit=unit if unit == "B" else f" {unit}s",
        unit_scale=unit == "B",
        miniters=1,  # else a phase that is slower than the previous one is not shown for long
        leave=False,
        dynamic_ncols=True,
        file=console.stderr,
    )
    if shape := bar.dynamic_ncols:
        bar.dynamic_ncols = partial(_shape_of, shape)
        bar.ncols, bar.nrows = bar.dynamic_ncols(console.stderr)
    console.print_within(partial(_aside, bar))
    console.results.before_text = partial(_take_away, bar)
    return bar


def _take_away(bar: Any) -> None:
    """Remove a bar for good: another program writes to the terminal now."""
    _clear(bar)
    bar.fp.flush()
    bar.disable = True


def _shape_of(shape: Callable[[Any], tuple[int | None, int | None]], file: Any) -> Any:
    """Return the columns and lines of a terminal for a bar."""
    columns, lines = shape(file)
    return columns and max(columns - _SPARE, 1), lines


def close_bar(console: Console, bar: Any) -> None:
    """Remove a bar of ``open_bar``; the console prints normally again."""
    console.print_within(None)
    console.results.before_text = None
    _clear(bar)
    bar.close()


@attrs.define(eq=False, repr=False)
class TransferSums:
    """
    The progress of some transfers, in bytes of their files.

    Attributes:
        done, total: as last reported.
        found: the part of these that existed before.
        hashed: for the keys of files.
        hashing: how many files are being hashed.
    """

    done: int = 0
    total: int = 0
    found: int = 0
    hashed: int = 0
    hashing: int = 0

    def exchange(self, before: TransferSums, after: TransferSums) -> None:
        """Replace one transfer's previous numbers by its new ones."""
        for name in ("done", "total", "found", "hashed", "hashing"):
            change = getattr(after, name) - getattr(before, name)
            setattr(self, name, getattr(self, name) + change)


class OneTransfer:
    """
    One transfer of a command; its reports are shown at once.

    Args:
        changed: gets its previous and its new numbers.
        size: of its file, if the reports count something else, such as bytes of shares.
    """

    def __init__(
        self, changed: Callable[[TransferSums, TransferSums], None], size: int | None
    ) -> None:
        self._changed = changed
        self._size = size
        self._now = TransferSums()
        self._become(total=size or 0)

    def sent(self, done: int, total: int) -> None:
        """Report the bytes that are done."""
        done, total = self._of_the_file(done, total)
        self._become(done=done, total=total, hashed=0, hashing=0)

    def found(self, done: int, total: int) -> None:
        """Report the bytes that existed before."""
        self._become(found=self._of_the_file(done, total)[0])

    def hashed(self, done: int, total: int) -> None:
        """Report the bytes that were hashed for the key."""
        if self._size is None:
            self._size = total  # for a pipe, the size is known only now
        self._become(total=total, hashed=done, hashing=1)

    def _become(self, **changes: int) -> None:
        before, self._now = self._now, attrs.evolve(self._now, **changes)
        self._changed(before, self._now)

    def _of_the_file(self, done: int, total: int) -> tuple[int, int]:
        if self._size is None or not total:
            return done, total
        return self._size * done // total, self._size


class ProgressBar:
    """
    A context manager: one bar for all transfers of a command.

    Args:
        unit: what is counted, if not bytes.
        fits: False: show no bar, since it would mix with a file on the terminal.
    """

    def __init__(self, console: Console, verb: str, unit: str = "B", fits: bool = True) -> None:
        self._console = console
        self._fits = fits
        self._verb = verb
        self._unit = unit
        self._sums = TransferSums()
        self._bar: Any = None
        self._shown_s = 0.0
        self._waits = ""

    @property
    def is_wanted(self) -> bool:
        """Whether a bar is shown, so that reports are useful; only within the ``with``."""
        return self._bar is not None

    def transfer(self) -> ProgressCall | None:
        """Return the function that one transfer calls with its done and total bytes; None without a bar."""
        return None if self._bar is None else self.upload(None).sent

    def upload(self, size: int | None) -> OneTransfer:
        """Return the object that an upload reports to in bytes of shares; its file has ``size`` bytes."""
        return OneTransfer(self._show, size)

    def waits(self, waits: bool) -> None:
        """Show whether the command waits because too few servers are reachable."""
        self._waits = ": waiting for servers" if waits else ""
        if self._bar is not None:
            self._describe(self._verb, self._bar.postfix or "")

    def _show(self, before: TransferSums, after: TransferSums) -> None:
        sums, bar = self._sums, self._bar
        sums.exchange(before, after)
        if bar is None:
            return
        bar.total, found_before = sums.total or None, bar.initial
        if sums.hashing and not sums.done:  # nothing has been sent yet
            self._describe(f"{self._verb}: hashing", "")
            done = sums.hashed
        else:
            done, found = sums.done, min(sums.done, sums.found)
            if done < bar.n:  # another phase, with its own count, time and rate
                bar.initial = 0
                bar.reset()
            self._describe(self._verb, f"{amount(found)} found" if found else "")
            # Bytes that existed before do not count for the rate.
            bar.last_print_n += found - bar.initial
            bar.initial = found
        bar.update(done - bar.n)
        # Found bytes are not a step for the rate, which decides when to redraw; without other steps it
        # would never redraw.
        if bar.initial != found_before and bar._time() >= self._shown_s + bar.mininterval:
            self._shown_s = bar._time()
            bar.refresh()

    def _describe(self, text: str, postfix: str) -> None:
        text += self._waits
        if (text, postfix) != (self._bar.desc, self._bar.postfix or ""):
            self._bar.set_description_str(text, refresh=False)
            self._bar.set_postfix_str(postfix, refresh=False)
            self._bar.refresh()

    def __enter__(self) -> ProgressBar:
        if self._fits and self._console.shows_progress:
            self._bar = open_bar(self._console, self._verb, self._unit)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            close_bar(self._console, self._bar)
            self._bar = None


# Messages about waiting for servers, and about second attempts.


def waiting_of(console: Console, progress: ProgressBar) -> Callable[[str | None], None]:
    """Return a function that gets the reason for waiting for servers, and None when they have returned."""

    def waiting(why: str | None) -> None:
        progress.waits(why is not None)
        console.note("enough servers are reachable again" if why is None else why)

    return waiting


def retried_note(count: int) -> str:
    """Return the number of second attempts that succeeded, as the end of a summary."""
    return f"{count} at the second attempt, after servers came back"
