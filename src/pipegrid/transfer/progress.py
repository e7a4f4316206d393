"""
Telling a caller how far a transfer has come.

What is told never falls and is never repeated, whatever the transfer has to do again.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pipegrid.core.caps import ChkCap

Progress = Callable[[int, int], None]
"""Called with what is done and what there is to do, in the unit that the transfer names."""


@attrs.frozen
class PutReports:
    """
    What the caller of a put is told, each as a part of a whole; None: does not want to know.

    Attributes:
        progress: of bytes of shares, those that are acknowledged.
        found: of bytes of shares, those that servers had before.
        hashing: of bytes of the file, those that its key was made from; before the others.
        cap_known: not a part, but the file's cap, as soon as all of it is coded and long before it is stored;
            perhaps more than once. Not told of files that live in their caps.
    """

    progress: Progress | None = None
    found: Progress | None = None
    hashing: Progress | None = None
    cap_known: Callable[[ChkCap], None] | None = None


class ProgressReport:
    """
    One transfer's reports to its caller, if there is one who wants to know.

    Args:
        total: what there is to do in all.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._told = -1

    @property
    def is_wanted(self) -> bool:
        """Whether anybody is told; if not, nothing need be counted."""
        return self._progress is not None

    def more(self, amount: int) -> None:
        """There is more to do than was thought."""
        self._total += amount

    def report(self, done: int) -> None:
        """Tell the caller that ``done`` of ``total`` is done, unless as much was told already."""
        if self._progress is not None and done > self._told:
            self._told = done
            self._progress(done, self._total)

    def finish(self) -> None:
        """All is done that was worth doing."""
        self.report(self._total)
