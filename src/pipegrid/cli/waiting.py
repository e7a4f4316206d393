"""What commands say while servers are waited for, and of what was tried a second time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipegrid.cli.console import Console
    from pipegrid.cli.progress import ProgressBar


def waiting_of(console: Console, progress: ProgressBar) -> Callable[[str | None], None]:
    """Return what is told why servers are waited for, and None when they are there again."""

    def waiting(why: str | None) -> None:
        progress.waits(why is not None)
        console.say(f"pipegrid: {'goes on' if why is None else why}")

    return waiting


def retried_note(count: int) -> str:
    """Return what came at a second try, in words for the end of a summary."""
    return f"{count} at a second try, with servers back in reach"
