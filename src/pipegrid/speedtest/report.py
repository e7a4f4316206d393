"""The report of a run that people look at: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipegrid.speedtest.results import Run


def write_report(path: Path | str, run: Run, history: Sequence[Run] = ()) -> None:
    """
    Write one self-contained HTML file about a run.

    Args:
        path: of the file; replaced when all of it is there.
        run: what it is about.
        history: earlier runs, oldest first, of the same kind.

    Raises:
        UsageError: the libraries that draw are not installed, or the file cannot be written.
    """
    raise NotImplementedError
