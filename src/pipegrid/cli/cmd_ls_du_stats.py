"""``pipegrid ls``, ``du``, ``stats`` and ``manifest``: show the contents and sizes of directories."""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from typing import Any, Literal

import click

from pipegrid.cli import cap_list_files, cap_lookup
from pipegrid.cli.command_job import GridJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import (
    NO_SHORT_HELP,
    grid_path,
    human_option,
    reading_options,
    usage_error,
)
from pipegrid.core import base32, caps
from pipegrid.core.text import amount, printable
from pipegrid.tree import directory_reading, file_metadata, grid_paths, tree_grid, walk

# ``pipegrid ls``: lists the names in a directory.

Layout = Literal["names", "long", "human"]


@click.command(name="ls", context_settings=NO_SHORT_HELP)
@click.argument("path", metavar="CAP[/PATH]", shell_complete=grid_path)
@click.option(
    "-l", "long", is_flag=True, help="Show types, modes, sizes and times; --json always shows them."
)
@human_option
@click.option(
    "-R",
    "--recursive",
    is_flag=True,
    help="Also list everything in subdirectories, with its path; each directory once.",
)
@click.option(
    "--read-only",
    is_flag=True,
    help="Show before each name its read cap, which can be shared; '-' if there is none.",
)
@reading_options
def ls_command(path: str, long: bool, human: bool, recursive: bool, read_only: bool) -> GridJob:
    """
    List the names in a directory.

    A directory's name is shown with a slash after it. Control characters are shown as escapes. A directory
    that cannot be read does not stop the rest; the exit status shows it.
    """
    if human and not long:
        raise usage_error("-h is for the sizes that -l shows; add -l")
    layout: Layout = "human" if human else "long" if long else "names"

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        show = _shower(console.json, layout, read_only)

        def meet(met: walk.Met) -> None:
            if met.path and isinstance(met, walk.Found):
                console.result(*show(met.path, grid_paths.PathEnd(met.cap, (), met.metadata_json)))

        place = await cap_lookup.place_of(grid, path)
        if not place.names:
            cap_lookup.check_known(place)
        if place.kind != "directory":
            bare = not (place.names or console.json or read_only)
            name = (str(place.cap),) if bare else place.names[-1:]
            console.result(*show(name, place))
            return ExitStatus.DONE
        if recursive:
            return await cap_lookup.walk_through(grid, console, place, meet)

        assert place.cap is not None
        listing = await grid.tree.list_directory(place.cap)
        if not (console.json or long or read_only):
            # The same lines as from ``_shower``, made faster for directories with ten thousand entries.
            console.results_of(
                (
                    cap_lookup.shown_path((each.name,)) + ("/" if each.kind == "directory" else ""),
                    {},
                )
                for each in listing.entries
            )
            return ExitStatus.DONE
        console.results_of(
            show((entry.name,), grid_paths.PathEnd(entry.cap, (), entry.metadata_json))
            for entry in listing.entries
        )
        return ExitStatus.DONE

    return GridJob(work, path)


def _shower(
    json: bool, layout: Layout, read_only: bool
) -> Callable[[Sequence[str], grid_paths.PathEnd], tuple[str, dict[str, Any]]]:
    """
    Return a function that turns an entry's path and ``PathEnd`` into the line for people and the fields for
    ``--json``.
    """

    def named(path: Sequence[str], place: grid_paths.PathEnd) -> str:
        name = cap_lookup.shown_path(path) + ("/" if place.kind == "directory" else "")
        # A cap of an unknown kind may be any text, even one of several lines.
        return (
            f"{'-' if place.cap is None else printable(str(place.cap))} {name}"
            if read_only
            else name
        )

    def show(path: Sequence[str], place: grid_paths.PathEnd) -> tuple[str, dict[str, Any]]:
        if read_only and place.cap is not None and not isinstance(place.cap, caps.UnknownCap):
            place = place._replace(cap=place.cap.readonly())
        if json:
            return "", _fields(path, place)
        # Names alone need no metadata; parsing metadata would double the time.
        if layout == "names":
            return named(path, place), {}
        return _long(named(path, place), place, layout == "human"), {}

    return show


def _fields(path: Sequence[str], place: grid_paths.PathEnd) -> dict[str, Any]:
    stored = directory_reading.metadata_of(place.metadata_json)
    fields: dict[str, Any] = {
        "path": list(path),
        "type": place.kind,
        "cap": None if place.cap is None else str(place.cap),
        "size": size_of(place.cap),
        "metadata": stored,
    }
    link = file_metadata.restored(stored).link
    if link is not None:
        fields["link"] = link.decode("utf-8", "surrogateescape")
    return fields


def _long(name: str, place: grid_paths.PathEnd, human: bool) -> str:
    """Return the line of an entry with its kind, mode, size and time."""
    stored = directory_reading.metadata_of(place.metadata_json)
    kept = file_metadata.restored(stored)
    link, size = kept.link, size_of(place.cap)
    kind = "l" if link is not None else {"directory": "d", "file": "-"}.get(place.kind, "?")
    mode = "---------" if kept.mode is None else stat.filemode(kept.mode & 0o7777)[1:]
    arrow = (
        "" if link is None else f" -> {cap_lookup.shown_path([link.decode('utf-8', 'replace')])}"
    )
    digits = "?" if size is None else amount(size) if human else str(size)
    width = 8 if human else 13
    return f"{kind}{mode} {digits:>{width}} {_time(stored, kept.mtime_ns)} {name}{arrow}"


def size_of(cap: caps.Cap | None) -> int | None:
    """
    Return the size in bytes of a file, or of a directory's content; None if the cap does not contain it.
    """
    file = cap.file if isinstance(cap, caps.DirectoryCap) else cap
    return caps.immutable_size(file)


def _time(stored: dict[str, Any], mtime_ns: int | None) -> str:
    """Return the modification time of a file in UTC, or else the time when it was linked."""
    from datetime import datetime, timezone

    seconds: Any = None if mtime_ns is None else mtime_ns / 1e9
    if seconds is None and isinstance(stored.get("tahoe"), dict):
        seconds = stored["tahoe"].get("linkmotime")
    if type(seconds) in (int, float):
        try:
            return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")
        except (OverflowError, ValueError, OSError):
            pass  # the calendar has no such year
    return "-".ljust(20)


# ``pipegrid du``: prints the size of a tree.


@click.command(name="du", context_settings=NO_SHORT_HELP)
@click.argument("paths", nargs=-1, required=True, metavar="CAP[/PATH]...", shell_complete=grid_path)
@click.option("-s", "--summarize", is_flag=True, help="Print only the total.")
@human_option
@reading_options
def du_command(paths: tuple[str, ...], summarize: bool, human: bool) -> GridJob:
    """
    Print the bytes of the files in every directory of a tree, those below it included.

    Each file is counted once, in the first directory that has it, since it is stored once. Files whose cap
    does not contain their size, such as mutable ones, count as 0 bytes. Several trees are counted
    separately.
    """

    async def measure(
        grid: tree_grid.Grid, console: Console, path: str, root: str | None
    ) -> ExitStatus:
        sums: list[tuple[tuple[str, ...], int]] = []

        def close(depth: int) -> None:
            while len(sums) > depth:
                name, size = sums.pop()
                if sums:
                    sums[-1] = (sums[-1][0], sums[-1][1] + size)
                if not summarize or not sums:
                    within = cap_lookup.shown_path(name)
                    if root is not None:
                        within = f"{root.rstrip('/')}/{within}" if name else root
                    more = {} if root is None else {"argument": root}
                    console.result(
                        f"{amount(size):>8} {within}" if human else f"{size:>15} {within}",
                        {**more, "path": list(name), "size": size},
                    )

        def meet(met: walk.Met) -> None:
            close(len(met.path))
            if isinstance(met, walk.Unreadable):
                return
            if met.listing is not None:
                sums.append((met.path, 0))
            elif met.kind == "file" and not met.again:
                name, size = sums[-1]
                sums[-1] = (name, size + (size_of(met.cap) or 0))

        place = await cap_lookup.directory_at(grid, path)
        status = await cap_lookup.walk_through(grid, console, place, meet)
        close(0)
        return status

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        numbers = iter(range(1, len(paths) + 1))

        async def each(grid: tree_grid.Grid, console: Console, path: str) -> ExitStatus:
            number = next(numbers)
            root = cap_lookup.argument_label(path, number) if len(paths) > 1 else None
            return await measure(grid, console, path, root)

        return await cap_lookup.each_argument(grid, console, paths, each)

    return GridJob(work, *paths)


# ``pipegrid stats``: counts a tree's objects.


@click.command(name="stats")
@click.argument("path", metavar="CAP[/PATH]", shell_complete=grid_path)
@reading_options
def stats_command(path: str) -> GridJob:
    """
    Count the files and directories of a tree, each once, and their bytes.

    Names and meanings are those of 'tahoe stats'. Mutable files and directories are counted without their
    sizes, which only reading them would show. A directory that cannot be read is reported and counted as a
    directory; the exit status shows it.
    """

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        stats = walk.TreeStats()
        place = await cap_lookup.directory_at(grid, path)
        status = await cap_lookup.walk_through(grid, console, place, stats.count)
        fields = stats.fields()
        lines = [
            f"{name}: {value}" for name, value in fields.items() if not isinstance(value, list)
        ]
        lines += [f"  {first}-{last} bytes: {files}" for first, last, files in stats.histogram()]
        console.result("\n".join(lines), fields)
        return status

    return GridJob(work, path)


# ``pipegrid manifest``: prints the caps of all objects in a tree.


@click.command(name="manifest")
@click.argument("path", metavar="CAP[/PATH]", shell_complete=grid_path)
@click.option(
    "--verify-cap", "verifier", is_flag=True, help="Print verifier caps, which cannot read."
)
@click.option("-s", "--storage-index", is_flag=True, help="Print storage indexes, and no paths.")
@reading_options
def manifest_command(path: str, verifier: bool, storage_index: bool) -> GridJob:
    """
    Print the cap and path of every object of a tree, each once.

    The lines are those of a cap file. Small files, which have no shares, have no verifier cap and no
    storage index, so these options leave them out. A directory that cannot be read is printed and reported,
    and does not stop the rest.
    """
    if verifier and storage_index:
        raise usage_error("choose one of --verify-cap and -s")

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        def meet(met: walk.Met) -> None:
            if met.cap is None or (isinstance(met, walk.Found) and met.again):
                return
            known = None if isinstance(met.cap, caps.UnknownCap) else met.cap
            index = None if known is None else known.storage_index
            checks = None if known is None else known.verifier()
            fields: dict[str, Any] = {
                "path": list(met.path),
                "type": met.kind if isinstance(met, walk.Found) else "directory",
                "cap": str(met.cap),
                "verifycap": "" if checks is None else str(checks),
                "storage-index": "" if index is None else base32.encode(index),
            }
            name = "/".join(met.path)
            kind = "storage-index" if storage_index else "verifycap" if verifier else "cap"
            # A cap of an unknown kind may be any text, even one of several lines.
            shown = printable(fields[kind])
            told = console.json and not isinstance(met, walk.Found)  # ``walk_through`` printed it
            if shown and not told:
                line = shown if storage_index or not name else cap_list_files.as_line(shown, name)
                console.result(line, fields)

        place = await cap_lookup.directory_at(grid, path)
        return await cap_lookup.walk_through(grid, console, place, meet)

    return GridJob(work, path)
