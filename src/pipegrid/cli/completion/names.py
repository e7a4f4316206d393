"""
Names on a grid that could come next: aliases, and what is in the directory that the line has come to.

Whoever presses Tab waits, and wanted nothing done. So a directory is read as ``ls`` reads it, no grid is made
where none is configured, and nothing is said, whatever goes wrong: after ``LIMIT_S``, or where a directory
is too large to be fetched meanwhile, nothing is offered.
"""

from __future__ import annotations

import io
import os
import signal
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from click.shell_completion import CompletionItem

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob, Invocation
from pipegrid.core.text import CAP_STARTS
from pipegrid.errors import UsageError
from pipegrid.grid.client_paths import default_directory, is_configured

if TYPE_CHECKING:
    from pipegrid.tree.tree_grid import Grid

LIMIT_S = 2.0
MAX_NAMES = 300
MAX_DIRECTORY_BYTES = 4 << 20
"""Some 10,000 entries."""


def on_grid(invocation: Invocation, text: str) -> list[CompletionItem[str]]:
    """
    Return what may follow on a grid.

    Args:
        invocation: tells the client's directory, and does what needs a grid.
        text: what is typed of the argument.
    """
    if ":" not in text:
        return [] if "/" in text else aliases(invocation, text)
    cut = text.rfind("/") + 1 or text.index(":") + 1
    head, begun = text[:cut], unicodedata.normalize("NFC", text[cut:])
    if head.startswith(CAP_STARTS) and "/" not in head:
        return []
    home = _home(invocation)
    if not is_configured(home):
        return []
    from pipegrid.tree.grid_paths import parse_here

    root, names = parse_here(head, home)
    return _items(head, _read(invocation, root, names), begun)


def anywhere(invocation: Invocation, text: str) -> list[CompletionItem[str]]:
    """Return what may follow on a grid or this machine; what looks like no alias is left to the shell."""
    here = [CompletionItem(text, type="file")]
    if text.startswith(CAP_STARTS):
        return on_grid(invocation, text) or here
    if "/" in text.partition(":")[0]:
        return here
    alias, colon, _ = text.partition(":")
    found = aliases(invocation, alias + colon)
    if not found:
        return here
    if colon:
        return on_grid(invocation, text)
    try:
        with os.scandir(".") as entries:
            local = [each.name + ("/" if os.path.isdir(each.name) else "") for each in entries]
    except OSError:
        local = []
    if not text.startswith("."):
        local = [each for each in local if not each.startswith(".")]
    return found + _items("", local, text)


def aliases(invocation: Invocation, begun: str, end: str = ":") -> list[CompletionItem[str]]:
    """Return the aliases that begin so, each with ``end`` behind it."""
    from pipegrid.tree.aliases import read_aliases

    try:
        found = read_aliases(_home(invocation))
    except UsageError:
        return []
    return _items("", (name + end for name in found if "/" not in name), begun)


def _home(invocation: Invocation) -> Path:
    named = invocation.directory
    return default_directory() if named is None else Path(named)


def _items(head: str, names: Iterable[str], begun: str) -> list[CompletionItem[str]]:
    """Return those names that begin so, as what the argument could become."""
    found = sorted(each for each in names if each.startswith(begun) and _can_be_typed(each))
    if len(found) > MAX_NAMES:  # the last one, too: how far all are alike the ends tell
        found = [*found[: MAX_NAMES - 1], found[-1]]
    return [CompletionItem(head + each) for each in found]


def _can_be_typed(name: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" or char == "\0" for char in name)


def _read(invocation: Invocation, root: str, names: tuple[str, ...]) -> list[str]:
    """Return the names in a directory, those of directories with a slash; none if that cannot be done."""
    found: list[str] = []

    async def work(grid: Grid, _: Console) -> int:
        from pipegrid.core.caps import DirectoryCap
        from pipegrid.tree.grid_paths import resolve
        from pipegrid.tree.listing import ListingLimits, read_listing

        limits = ListingLimits(directory_bytes=MAX_DIRECTORY_BYTES)
        place = await resolve(grid, root, names, limits)
        cap = place.best or place.cap
        if isinstance(cap, DirectoryCap):
            listing = await read_listing(grid, cap, limits)
            found.extend(
                entry.name + ("/" if entry.kind == "directory" else "")
                for entry in listing.entries
                if entry.name and "/" not in entry.name
            )
        return 0

    def too_late(*_: Any) -> None:
        os._exit(1)

    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    # Only the directory counts of what the line says: no trace is to be written, nobody is to be told.
    bare = Invocation(Console(None, None, io.StringIO()))
    bare.directory = invocation.directory
    if invocation.run_job is not None:
        invocation.run_job(GridJob(work), bare)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return found
