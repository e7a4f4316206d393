"""``pipegrid get``: fetch files, or a part of one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob, Invocation
from pipegrid.cli.options import (
    EMPTY_NAME,
    CapArguments,
    cap_arguments,
    exact_modes_option,
    limit_options,
    max_paths_option,
    reading_options,
    usage_error,
)
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.outputpaths import OutputPaths, destinations
from pipegrid.errors import UsageError

if TYPE_CHECKING:
    from pipegrid.cli.files import NamedFile
    from pipegrid.cli.progress import ProgressCall
    from pipegrid.core.caps import ChkCap, LitCap, MutableCap
    from pipegrid.disk.part_file import PartFile
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import GetResult
    from pipegrid.tree.local_directory import DirectoryFd


FILES_AT_ONCE = 4


@click.command(name="get")
@cap_arguments
@click.option(
    "-o",
    "--output",
    type=click.Path(readable=False),
    metavar="FILE|DIR",
    help="Write to FILE, which appears when all of it is verified; or into the directory DIR, which is "
    "made where several files go.  [default: standard output, also '-']",
)
@click.option("-f", "--force", is_flag=True, help="Replace files that exist.")
@click.option(
    "--range",
    "byte_range",
    metavar="A-B",
    help="Only bytes A to B, both included, from 0; 'A-' is all from A on, '-N' the last N.",
)
@click.option(
    "-r",
    "--recursive",
    is_flag=True,
    help="Fetch a directory with all that is in it into DIR; existing files are not fetched again.",
)
@click.option(
    "--paranoid",
    is_flag=True,
    help="With -r: compare also files that have size and time of those on the grid, byte for byte.",
)
@exact_modes_option("[default: with -r, the permissions that the umask allows]")
@max_paths_option("1000000")
@limit_options
@reading_options
@click.pass_obj
def command(
    invocation: Invocation,
    caps: CapArguments,
    output: str | None,
    force: bool,
    byte_range: str | None,
    recursive: bool,
    paranoid: bool,
    exact_modes: bool,
    max_paths: int | None,
) -> GridJob:
    """
    Fetch the files that caps name, each perhaps with a path after it: CAP/some/path.

    Every byte is verified before it is written. What was written to standard output before an error is
    good as far as it goes; a terminal gets what is no text only with '-o -'. Several files need '-o DIR';
    there each is called as the cap file says, or after its storage index.

    With -r directories come with all that is in them, times and links as they were stored; of modes, what the
    umask allows of the permissions. What has not its mode or time in the end is reported. A rerun
    fetches what is missing or differs. Nothing that is in DIR is removed; what is in the way is named, and
    left as it is unless -f replaces it. What cannot be fetched does not stop the rest.
    """
    if (paranoid or exact_modes or max_paths is not None) and not recursive:
        given = "--paranoid" if paranoid else "--exact-modes" if exact_modes else "--max-paths"
        raise usage_error(f"{given} goes with --recursive")
    if recursive:
        from pipegrid.cli.treeget import tree_job

        return tree_job(caps, output, byte_range, force, paranoid, exact_modes, max_paths)
    if output == "-":  # as 'decode' has it; a file of this name is './-'
        output, force = None, False
    elif output is None:
        results = invocation.console.results
        results.wants_text = results.isatty()
    from pipegrid.cli.files import starts_of

    files, places = _asked_for(invocation.console, caps, output, force, byte_range)

    async def work(grid: Grid, console: Console) -> int:
        at_once = invocation.jobs or FILES_AT_ONCE
        return await fetch_files(grid, console, files, places, output, force, byte_range, at_once)

    return GridJob(work, *starts_of(files))


async def fetch_files(
    grid: Grid,
    console: Console,
    files: list[NamedFile[Any]],
    places: OutputPaths,
    output: str | None,
    force: bool,
    byte_range: str | None,
    at_once: int,
) -> int:
    """Fetch files, so many at a time, and tell what came of each in their order; returns the exit status."""
    from pipegrid.cli.files import each_in_order
    from pipegrid.cli.progress import ProgressBar
    from pipegrid.cli.trees import Locator
    from pipegrid.core.caps import fetchable

    if console.json and output is None:
        raise UsageError("--json would mix with the file on standard output; add -o FILE")
    if places.directory is not None:
        places.make_directory()
    with ExitStack() as stack:
        progress = None
        # Or it would be in the file's midst.
        if output is not None or not console.results.isatty():
            progress = stack.enter_context(ProgressBar(console, "get"))

        locator = Locator(grid)

        async def get(file: NamedFile[Any]) -> GetResult:
            place = places.of(file)
            file = await locator.located(file, fetchable)
            part = _part_of(file.cap, byte_range)
            call = None if progress is None else progress.transfer()
            return await fetch(grid, console, file.cap, part, place, force, call, places.home)

        def show(file: NamedFile[Any], result: GetResult) -> ExitStatus:
            lead = f"{file.label}: " if len(files) > 1 else ""
            report(console, file, result, places.of(file), lead)
            return ExitStatus.DONE

        def fields(file: NamedFile[Any]) -> dict[str, Any]:
            return {"path": places.of(file)}

        return await each_in_order(console, files, at_once, get, show, fields)


def _asked_for(
    console: Console,
    caps: CapArguments,
    output: str | None,
    force: bool,
    byte_range: str | None,
) -> tuple[list[NamedFile[Any]], OutputPaths]:
    """
    Return the files, and where they go.

    All that can be wrong with the question is found here, before a grid is opened.

    Raises:
        click.UsageError, PipegridError: something is.
    """
    from pipegrid.cli.files import named_files
    from pipegrid.core.caps import fetchable

    if force and output is None:
        raise usage_error("--force goes with -o")
    if output == "":
        raise usage_error(f"-o: {EMPTY_NAME}")
    files = named_files(console, *caps, fetchable)
    if len(files) > 1 and byte_range is not None:
        raise UsageError("--range is for one file; leave it out, or fetch them one by one")
    places = destinations(files, output)
    if not files[0].names:
        _part_of(files[0].cap, byte_range)
    return files, places


def _part_of(cap: ChkCap | LitCap | MutableCap, byte_range: str | None) -> tuple[int, int | None]:
    """Return beginning and length of what is wanted of a file."""
    from pipegrid.cli.ranges import resolve
    from pipegrid.core.caps import MutableCap

    if not isinstance(cap, MutableCap):
        return (0, cap.size) if byte_range is None else resolve(byte_range, cap.size)
    if byte_range is not None:
        raise UsageError(
            "--range is for immutable files, whose caps tell their sizes; leave it out"
        )
    return 0, None


async def fetch(
    grid: Grid,
    console: Console,
    cap: ChkCap | LitCap | MutableCap,
    part: tuple[int, int | None],
    output: str | None,
    force: bool,
    progress: ProgressCall | None,
    home: DirectoryFd | None = None,
) -> GetResult:
    """Fetch a part of a file, given as start and length, to where it shall go; see ``OutputFile``."""
    from pipegrid.cli.outfile import OutputFile

    with ExitStack() as stack:
        sink: BinaryIO | PartFile = console.data_sink
        if output is not None:
            opened = OutputFile(output, force, resume=True, say=console.say, home=home)
            file = stack.enter_context(opened)
            sink = file.file
        result = await grid.get(cap, sink, start=part[0], length=part[1], progress=progress)
        sink.flush()
        if output is not None:
            file.tell(result)
    return result


def report(
    console: Console, file: NamedFile[Any], result: GetResult, output: str | None, lead: str
) -> None:
    """Tell what came of one file, each line beginning with ``lead``."""
    from pipegrid.cli.render import corruption_fields, warn_of_corruption
    from pipegrid.core.text import counted

    warn_of_corruption(console, result.corrupt, lead)
    console.detail(f"{lead}{counted(result.size, 'byte')} from shares {sorted(result.shares_used)}")
    console.json_result(
        {
            "path": output,
            **({} if file.name is None else {"name": file.name}),
            "size": result.size,
            "shares_used": result.shares_used,
            "corrupt": corruption_fields(result.corrupt),
        }
    )
