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
# The bar counts the bytes of files whose shares servers have acknowledged: 100 % means stored, not sent. All
# output goes through the console, which hides the bar while it prints.

ProgressCall = Callable[[int, int], None]

_SPARE = len("^C")
"""How many columns stay free after a bar, so that an echoed ``^C`` fits on the line and is cleared."""


@contextmanager
def _aside(bar: Any) -> Iterator[None]:
    """Hide the bar while something is printed."""
    _clear(bar)
    try:
        yield
    finally:
        bar.refresh()


def _clear(bar: Any) -> None:
    """Clear a bar, and what the terminal has echoed after it."""
    if bar.disable:
        return
    if bar.ncols:
        bar.display(" " * (bar.ncols + _SPARE))
    bar.clear()


def open_bar(console: Console, text: str, unit: str = "B") -> Any:
    """
    Return a bar, which is shown until ``close_bar``; it is hidden while the console prints.

    Args:
        unit: ``B`` (shown with k and M), or the singular of what is counted, such as ``file``.
    """
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # otherwise tqdm starts a thread
    bar: Any = tqdm.tqdm(
        desc=text,
        total=0,
        unit=unit if unit == "B" else f" {unit}s",
        unit_scale=unit == "B",
        miniters=1,  # redraws even when the rate has fallen
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
    """Remove a bar for good, since another program now writes to the terminal."""
    _clear(bar)
    bar.fp.flush()
    bar.disable = True


def _shape_of(shape: Callable[[Any], tuple[int | None, int | None]], file: Any) -> Any:
    """Return how many columns and lines of a terminal a bar may use."""
    columns, lines = shape(file)
    return columns and max(columns - _SPARE, 1), lines


def close_bar(console: Console, bar: Any) -> None:
    """Remove a bar that ``open_bar`` returned; the console then prints without hiding it."""
    console.print_within(None)
    console.results.before_text = None
    _clear(bar)
    bar.close()


@attrs.define(eq=False, repr=False)
class TransferSums:
    """
    The progress of one or several transfers, in bytes of their files.

    Attributes:
        done, total: the bytes that are done, and all bytes.
        found: how many of the done bytes existed before the transfers.
        hashed: how many bytes were hashed to make keys.
        hashing: how many files are being hashed.
    """

    done: int = 0
    total: int = 0
    found: int = 0
    hashed: int = 0
    hashing: int = 0

    def exchange(self, before: TransferSums, after: TransferSums) -> None:
        """Subtract one transfer's previous numbers, and add its new ones."""
        for name in ("done", "total", "found", "hashed", "hashing"):
            change = getattr(after, name) - getattr(before, name)
            setattr(self, name, getattr(self, name) + change)


class OneTransfer:
    """
    One transfer of a command; each report is shown at once.

    Args:
        changed: is called with the transfer's previous and new numbers.
        size: the file's size, if reports count something else, such as bytes of shares; else None.
    """

    def __init__(
        self, changed: Callable[[TransferSums, TransferSums], None], size: int | None
    ) -> None:
        self._changed = changed
        self._size = size
        self._now = TransferSums()
        self._become(total=size or 0)

    def sent(self, done: int, total: int) -> None:
        """Report how many bytes are done."""
        done, total = self._of_the_file(done, total)
        self._become(done=done, total=total, hashed=0, hashing=0)

    def found(self, done: int, total: int) -> None:
        """Report how many bytes existed before the transfer."""
        self._become(found=self._of_the_file(done, total)[0])

    def hashed(self, done: int, total: int) -> None:
        """Report how many bytes were hashed to make the key."""
        if self._size is None:
            self._size = total  # the size of a pipe's data is known now
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
        unit: the singular of what is counted, if not bytes.
        fits: whether a bar may be shown; it would mix with a file that is written to the terminal.
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
        """Whether a bar is shown, so that reports are useful; False outside the context."""
        return self._bar is not None

    def transfer(self) -> ProgressCall | None:
        """
        Return a function that a transfer calls with its done and total bytes, or None if no bar is shown.
        """
        return None if self._bar is None else self.upload(None).sent

    def upload(self, size: int | None) -> OneTransfer:
        """Return the object to which an upload reports bytes of shares; ``size``: the bytes of its file."""
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
        if sums.hashing and not sums.done:  # only hashing has begun
            self._describe(f"{self._verb}: hashing", "")
            done = sums.hashed
        else:
            done, found = sums.done, min(sums.done, sums.found)
            if done < bar.n:  # another phase begins, which is counted from 0
                bar.initial = 0
                bar.reset()
            self._describe(self._verb, f"{amount(found)} found" if found else "")
            # The rate does not count bytes that existed before the transfers.
            bar.last_print_n += found - bar.initial
            bar.initial = found
        bar.update(done - bar.n)
        # Normally the rate decides when to redraw. It does not count found bytes, so redraw for them here.
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


# Messages about waiting for servers, and about retries.


def waiting_of(console: Console, progress: ProgressBar) -> Callable[[str | None], None]:
    """
    Return a function to be called with the reason for waiting for servers, and with None when the wait ends.
    """

    def waiting(why: str | None) -> None:
        progress.waits(why is not None)
        console.note("enough servers are reachable again" if why is None else why)

    return waiting


def retried_note(count: int) -> str:
    """Return the end of a summary, with the number of retries that succeeded."""
    return f"{count} at the second attempt, after servers came back"
