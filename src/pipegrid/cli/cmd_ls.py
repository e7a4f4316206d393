"""``pipegrid ls``: what is in a directory?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from pipegrid.cli.completing import grid_path
from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import NO_SHORT_HELP, human_option, reading_options, usage_error
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import amount
from pipegrid.core.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipegrid.core.caps import Cap
    from pipegrid.tree.grid_paths import PathEnd
    from pipegrid.tree.listing import Listing
    from pipegrid.tree.tree_grid import Grid

Layout = Literal["names", "long", "human"]


@click.command(name="ls", context_settings=NO_SHORT_HELP)
@click.argument("path", metavar="CAP[/PATH]", shell_complete=grid_path)
@click.option(
    "-l", "long", is_flag=True, help="Show kinds, modes, sizes and times; with --json all comes."
)
@human_option
@click.option(
    "-R",
    "--recursive",
    is_flag=True,
    help="List all that is below, too, with its path; each directory once.",
)
@click.option(
    "--read-only",
    is_flag=True,
    help="Show before each name its read cap, which can be shared; '-' if there is none.",
)
@reading_options
def command(path: str, long: bool, human: bool, recursive: bool, read_only: bool) -> GridJob:
    """
    List the names in a directory.

    A directory's name is shown with a slash after it. Control characters are shown as escapes. A directory
    that cannot be read does not stop the rest; the exit status shows it.
    """

    if human and not long:
        raise usage_error("-h is for the sizes that -l shows; add -l")
    layout: Layout = "human" if human else "long" if long else "names"

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.trees import check_known, place_of

        place = await place_of(grid, path)
        if not place.names:
            check_known(place)
        if place.kind != "directory":
            bare = not (place.names or console.json or read_only)
            name = (str(place.cap),) if bare else place.names[-1:]
            console.result(*_shower(console.json, layout, read_only)(name, place))
            return ExitStatus.DONE
        if recursive:
            return await _list_all(grid, console, place, layout, read_only)
        from pipegrid.tree.grid_paths import PathEnd

        assert place.cap is not None
        listing = await grid.tree.list_directory(place.cap)
        if not (console.json or long or read_only):
            console.results_of(_names(listing))
            return ExitStatus.DONE
        show = _shower(console.json, layout, read_only)
        console.results_of(
            show((entry.name,), PathEnd(entry.cap, (), entry.metadata_json))
            for entry in listing.entries
        )
        return ExitStatus.DONE

    return GridJob(work, path)


def _names(listing: Listing) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the line of each entry, as ``_shower`` would show it; ten thousand are worth a shorter way."""
    from pipegrid.cli.trees import shown_path

    for entry in listing.entries:
        yield shown_path((entry.name,)) + ("/" if entry.kind == "directory" else ""), {}


async def _list_all(
    grid: Grid, console: Console, place: PathEnd, layout: Layout, read_only: bool
) -> ExitStatus:
    from pipegrid.cli.trees import walk_through
    from pipegrid.tree.grid_paths import PathEnd
    from pipegrid.tree.walk import Found, Met

    show = _shower(console.json, layout, read_only)

    def meet(met: Met) -> None:
        if met.path and isinstance(met, Found):
            console.result(*show(met.path, PathEnd(met.cap, (), met.metadata_json)))

    return await walk_through(grid, console, place, meet)


def _shower(
    json: bool, layout: Layout, read_only: bool
) -> Callable[[Sequence[str], PathEnd], tuple[str, dict[str, Any]]]:
    """Return what makes of an entry's path and place the line for people and the fields of ``--json``."""
    import attrs

    from pipegrid.cli.trees import shown_path
    from pipegrid.core.caps import UnknownCap

    def readable(place: PathEnd) -> PathEnd:
        if read_only and place.cap is not None and not isinstance(place.cap, UnknownCap):
            return attrs.evolve(place, cap=place.cap.readonly())
        return place

    def named(path: Sequence[str], place: PathEnd) -> str:
        name = shown_path(path) + ("/" if place.kind == "directory" else "")
        # One of a kind that nobody knows may be any text, of several lines.
        return (
            f"{'-' if place.cap is None else printable(str(place.cap))} {name}"
            if read_only
            else name
        )

    def show(path: Sequence[str], place: PathEnd) -> tuple[str, dict[str, Any]]:
        place = readable(place)
        if json:
            return "", _fields(path, place)
        # Names alone need no metadata, which take as long as all the rest.
        if layout == "names":
            return named(path, place), {}
        return _long(named(path, place), place, layout == "human"), {}

    return show


def _fields(path: Sequence[str], place: PathEnd) -> dict[str, Any]:
    from pipegrid.tree.listing import metadata_of
    from pipegrid.tree.metadata import restored

    metadata = metadata_of(place.metadata_json)
    fields: dict[str, Any] = {
        "path": list(path),
        "type": place.kind,
        "cap": None if place.cap is None else str(place.cap),
        "size": size_of(place.cap),
        "metadata": metadata,
    }
    link = restored(metadata).link
    if link is not None:
        fields["link"] = link.decode("utf-8", "surrogateescape")
    return fields


def _long(name: str, place: PathEnd, human: bool) -> str:
    """Return the line of an entry with kind, mode, size and time."""
    from pipegrid.cli.trees import shown_path
    from pipegrid.tree.listing import metadata_of
    from pipegrid.tree.metadata import restored

    metadata = metadata_of(place.metadata_json)
    kept = restored(metadata)
    link, size = kept.link, size_of(place.cap)
    kind = "l" if link is not None else {"directory": "d", "file": "-"}.get(place.kind, "?")
    mode = "---------" if kept.mode is None else _mode(kept.mode)
    arrow = "" if link is None else f" -> {shown_path([link.decode('utf-8', 'replace')])}"
    digits = "?" if size is None else amount(size) if human else str(size)
    width = 8 if human else 13
    return f"{kind}{mode} {digits:>{width}} {_time(metadata, kept.mtime_ns)} {name}{arrow}"


def size_of(cap: Cap | None) -> int | None:
    """Return the bytes of a file, or of a directory's entries, where the cap says them."""
    from pipegrid.core.caps import ChkCap, DirectoryCap, LitCap

    file = cap.file if isinstance(cap, DirectoryCap) else cap
    return file.size if isinstance(file, (ChkCap, LitCap)) else None


def _mode(mode: int) -> str:
    import stat

    return stat.filemode(mode & 0o7777)[1:]


def _time(metadata: dict[str, Any], mtime_ns: int | None) -> str:
    """Return the time of a file in UTC, or else of its link, as a person reads it."""
    from datetime import datetime, timezone

    seconds: Any = None if mtime_ns is None else mtime_ns / 1e9
    if seconds is None and isinstance(metadata.get("tahoe"), dict):
        seconds = metadata["tahoe"].get("linkmotime")
    if type(seconds) in (int, float):
        try:
            return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")
        except (OverflowError, ValueError, OSError):
            pass  # a year that no calendar has
    return "-".ljust(20)
