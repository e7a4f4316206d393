"""``pipegrid get`` and ``cat``: fetch files, or a part of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import click

from pipegrid.cli import cap_lookup, health_output, output_file, progress_bar, tree_transfers
from pipegrid.cli.command_job import GridJob, Invocation
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import (
    EMPTY_NAME,
    CapArguments,
    cap_arguments,
    exact_modes_option,
    gathered,
    limit_options,
    max_paths_option,
    reading_options,
    usage_error,
)
from pipegrid.core import caps as core_caps
from pipegrid.core.text import counted, printable
from pipegrid.errors import UsageError
from pipegrid.tree import local_directory_descriptor

if TYPE_CHECKING:
    from pipegrid.cli.cap_lookup import NamedFile
    from pipegrid.core.caps import ChkCap, LitCap, MutableCap
    from pipegrid.disk.part_file import PartFile
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import GetResult
    from pipegrid.tree.file_metadata import Modes
    from pipegrid.tree.local_directory_descriptor import DirectoryFd


# The output paths of one ``get``.


class OutputPaths:
    """
    The output path of each file; None stands for standard output.

    Args:
        paths: the output paths, in the order of the files.

    Attributes:
        directory: the path of the output directory, if there is one.
        home: the open output directory; if another directory gets its path meanwhile, no file is written
            there.
    """

    def __init__(
        self, files: Sequence[NamedFile[Any]], paths: Sequence[str | None], directory: str | None
    ) -> None:
        self.directory = directory
        self.home: DirectoryFd | None = None
        self._paths = {id(file): path for file, path in zip(files, paths, strict=True)}

    def of(self, file: NamedFile[Any]) -> str | None:
        """Return the output path of a file; None for standard output, and for a file with a problem."""
        return self._paths.get(id(file))


def made_home(path: str) -> DirectoryFd:
    """
    Open the output directory; make it if it is missing.

    Raises:
        SinkError: the directory cannot be made, or the path is not a directory.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise local_directory_descriptor.unmade(path, error) from error
    return local_directory_descriptor.DirectoryFd(path)


def destinations(files: Sequence[NamedFile[Any]], output: str | None) -> OutputPaths:
    """
    Return the output path of each file. Several files go into a directory; one file goes into a directory, to
    another path, or to standard output.

    Only the last part of a file's name is used, so that no file gets outside the directory.

    Raises:
        UsageError: there is no directory for several files, or two files would have the same name.
    """
    count = len(files)
    files = [file for file in files if file.problem is None]
    if output is None:
        if count > 1:
            raise UsageError(f"{count} files cannot be separated on standard output; add -o DIR")
        return OutputPaths(files, [None], None)
    if count == 1 and not (output.endswith("/") or os.path.isdir(output)):
        return OutputPaths(files, [output], None)
    names = [_name(file) for file in files]
    taken: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if name in taken:
            raise UsageError(
                f"caps number {taken[name]} and {number} would both be written to "
                f"{printable(os.path.join(output, name))}; give them different names in the cap file"
            )
        taken[name] = number
    return OutputPaths(files, [os.path.join(output, name) for name in names], output)


def _name(file: NamedFile[Any]) -> str:
    name = file.base_name if file.name is None else file.name.rpartition("/")[2]
    if name in ("", ".", ".."):
        raise UsageError(f"{file.label!r} names no file; correct it in the cap file")
    return name


# ``pipegrid get``: fetches files, or a part of a file.

FILES_AT_ONCE = 4


class GetOptions(NamedTuple):
    """The options of ``get``; see their declarations."""

    output: str | None
    force: bool
    byte_range: str | None
    recursive: bool
    paranoid: bool
    exact_modes: bool
    max_paths: int | None


@click.command(name="get")
@cap_arguments
@click.option(
    "-o",
    "--output",
    type=click.Path(readable=False),
    metavar="FILE|DIR",
    help="Write to FILE, which appears when all of it is verified; or into the directory DIR, which is "
    "created for several files.  [default: standard output, also '-']",
)
@click.option("-f", "--force", is_flag=True, help="Replace files that exist.")
@click.option(
    "--range",
    "byte_range",
    metavar="A-B",
    help="Only bytes A to B, both included, counted from 0; 'A-' is everything from A on, '-N' the last N "
    "bytes.",
)
@click.option(
    "-r",
    "--recursive",
    is_flag=True,
    help="Fetch a directory with everything in it into DIR; existing files are not fetched again.",
)
@click.option(
    "--paranoid",
    is_flag=True,
    help="With -r: also compare files whose size and time match those on the grid, byte for byte.",
)
@exact_modes_option("[default: with -r, the permissions that the umask allows]")
@max_paths_option("1000000")
@limit_options
@reading_options
@click.pass_obj
@gathered("options", GetOptions)
def get_command(invocation: Invocation, caps: CapArguments, options: GetOptions) -> GridJob:
    """
    Fetch files by their caps, or by a path after a cap: CAP/some/path.

    Every byte is verified before it is written. If an error ends a file on standard output, the bytes
    before it are right. Content that is not text goes to a terminal only with '-o -'. Several files need
    '-o DIR'; each is named as in the cap file, or after its storage index.

    With -r, directories are fetched with everything in them. Times and links are as they were stored,
    permissions as the umask allows; a mode or time that cannot be set is reported. A second run fetches
    what is missing or differs. Nothing in DIR is removed; an existing file that differs is named and kept,
    unless -f replaces it. A file that cannot be fetched does not stop the others.
    """
    if options.recursive:
        modes: Modes = "exact" if options.exact_modes else "umask"
        how = tree_transfers.TreeOptions(options.force, options.paranoid, modes, options.max_paths)
        return tree_transfers.tree_job(caps, options.output, options.byte_range, how)
    for flag, value in (
        ("--paranoid", options.paranoid),
        ("--exact-modes", options.exact_modes),
        ("--max-paths", options.max_paths),
    ):
        if value:
            raise usage_error(f"{flag} needs --recursive")
    if options.output == "-":  # as in 'decode'; './-' names a file '-'
        options = options._replace(output=None, force=False)
    elif options.output is None:
        results = invocation.console.results
        results.wants_text = results.isatty()

    files, places = _asked_for(invocation.console, caps, options)

    async def work(grid: Grid, console: Console) -> int:
        at_once = invocation.jobs or FILES_AT_ONCE
        return await fetch_files(grid, console, files, places, options, at_once)

    return GridJob(work, *cap_lookup.starts_of(files))


async def fetch_files(
    grid: Grid,
    console: Console,
    files: list[NamedFile[Any]],
    places: OutputPaths,
    options: GetOptions,
    at_once: int,
) -> int:
    """
    Fetch several files at the same time, and report the outcomes in the order of the files; return the exit
    status.
    """
    if console.json and options.output is None:
        raise UsageError("--json would mix with the file on standard output; add -o FILE")
    if places.directory is not None:
        places.home = made_home(places.directory)
    fits = options.output is not None or not console.results.isatty()
    with progress_bar.ProgressBar(console, "get", fits=fits) as progress:
        locator = cap_lookup.Locator(grid)

        async def get(file: NamedFile[Any]) -> GetResult:
            path, output = places.of(file), None
            file = await locator.located(file, core_caps.fetchable)
            part = _part_of(file.cap, options.byte_range)
            call = progress.transfer()
            if path is not None:
                output = output_file.resumable(console, path, options.force, places.home)
            return await fetch(grid, console, file.cap, part, output, call)

        def show(file: NamedFile[Any], result: GetResult) -> ExitStatus:
            lead = f"{file.label}: " if len(files) > 1 else ""
            report(console, file, result, places.of(file), lead)
            return ExitStatus.DONE

        def fields(file: NamedFile[Any]) -> dict[str, Any]:
            return {"path": places.of(file)}

        return await cap_lookup.each_in_order(console, files, at_once, get, show, fields)


def _asked_for(
    console: Console, caps: CapArguments, options: GetOptions
) -> tuple[list[NamedFile[Any]], OutputPaths]:
    """
    Return the files and their output paths.

    All arguments are checked here, before a grid is opened.

    Raises:
        click.UsageError, PipegridError: the arguments are invalid.
    """
    if options.force and options.output is None:
        raise usage_error("--force needs -o")
    if options.output == "":
        raise usage_error(f"-o: {EMPTY_NAME}")
    files = cap_lookup.named_files(console, *caps, core_caps.fetchable)
    if len(files) > 1 and options.byte_range is not None:
        raise UsageError("--range is for one file; leave it out, or fetch them one by one")
    places = destinations(files, options.output)
    if not files[0].root:
        _part_of(files[0].cap, options.byte_range)
    return files, places


def _part_of(cap: ChkCap | LitCap | MutableCap, byte_range: str | None) -> tuple[int, int | None]:
    """Return where the wanted part of a file starts, and its length (None: to the end)."""
    if not isinstance(cap, core_caps.MutableCap):
        return (0, cap.size) if byte_range is None else resolve(byte_range, cap.size)
    if byte_range is not None:
        raise UsageError(
            "--range is for immutable files, whose caps contain their sizes; leave it out"
        )
    return 0, None


async def fetch(
    grid: Grid,
    console: Console,
    cap: ChkCap | LitCap | MutableCap,
    part: tuple[int, int | None],
    output: output_file.OutputFile | None,
    progress: progress_bar.ProgressCall | None,
) -> GetResult:
    """
    Fetch a part of a file, given as start and length, to ``output``, or to standard output if ``output`` is
    None.
    """
    with output or nullcontext():
        sink: BinaryIO | PartFile = console.data_sink if output is None else output.file
        result = await grid.get(cap, sink, start=part[0], length=part[1], progress=progress)
        sink.flush()
        if output is not None:
            output.report_misfit(result)
    return result


def report(
    console: Console, file: NamedFile[Any], result: GetResult, path: str | None, lead: str
) -> None:
    """Report the outcome for one file, each line beginning with ``lead``."""
    health_output.warn_of_corruption(console, result.corrupt, lead)
    console.detail(f"{lead}{counted(result.size, 'byte')} from shares {sorted(result.shares_used)}")
    console.json_result(
        {
            "path": path,
            **({} if file.name is None else {"name": file.name}),
            "size": result.size,
            "shares_used": result.shares_used,
            "corrupt": health_output.corruption_fields(result.corrupt),
        }
    )


# ``pipegrid cat``: writes the bytes of files to standard output.


@click.command(name="cat")
@cap_arguments
@reading_options
@click.pass_obj
def cat_command(invocation: Invocation, caps: CapArguments) -> GridJob:
    """
    Write files to standard output, one after the other.

    Each argument is a cap, or a cap and a path: CAP/some/path. Every byte is verified before it is written.
    A file that cannot be fetched does not stop the others; the exit status shows it.
    """
    files = cap_lookup.named_files(invocation.console, *caps, core_caps.fetchable)

    async def work(grid: Grid, console: Console) -> int:
        if console.json:
            raise UsageError("--json would mix with the files on standard output; leave it out")
        locator = cap_lookup.Locator(grid)

        async def write(file: NamedFile[Any]) -> None:
            located = await locator.located(file, core_caps.fetchable)
            await grid.get(located.cap, console.data_sink)
            console.data_sink.flush()

        return await cap_lookup.each_in_order(
            console, files, 1, write, lambda _file, _result: ExitStatus.DONE
        )

    return GridJob(work, *cap_lookup.starts_of(files))


# Byte ranges on the command line: ``A-B`` with both ends included, as in HTTP.

_RANGE = re.compile(r"([0-9]{1,20})?-([0-9]{1,20})?")


def resolve(text: str, size: int) -> tuple[int, int]:
    """
    Return the start and length that a range has in a file of ``size`` bytes.

    ``0-99`` is the first hundred bytes, ``100-`` everything from byte 100 on, ``-100`` the last hundred.

    Raises:
        UsageError: the text is not a range, or the range reaches outside the file.
    """
    match = _RANGE.fullmatch(text)
    if match is None or text == "-":
        raise UsageError(f"{text!r} is not a range; write 0-99, 100- or -100")
    first, last = match[1], match[2]
    if first is None:
        length = int(last)
        start, end = size - length, size
    else:
        start = int(first)
        end = size if last is None else int(last) + 1
        if end <= start and last is not None:
            raise UsageError(f"the range {text} ends before it begins")
    if not 0 <= start < end <= size:
        raise UsageError(f"the range {text} reaches outside the file, which has {_extent(size)}")
    return start, end - start


def _extent(size: int) -> str:
    if size == 0:
        return "no bytes at all"
    return "one byte, number 0" if size == 1 else f"{size} bytes, 0 to {size - 1}"
