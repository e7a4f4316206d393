"""``pipegrid decode``: share files become the file again, with no grid."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import Invocation, OfflineJob
from pipegrid.cli.options import cap_file_option, checked_caps, common_options
from pipegrid.cli.sizes import byte_size

if TYPE_CHECKING:
    from pipegrid.disk.part_file import PartFile
    from pipegrid.transfer.offline import DecodeResult


@click.command(name="decode")
@click.argument("words", nargs=-1, metavar="CAP SHAREFILE|DIR...", type=click.Path(readable=False))
@cap_file_option
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(readable=False),
    metavar="FILE",
    help="Where the file goes; it appears when all of it is verified. '-' is standard output.",
)
@click.option("-f", "--force", is_flag=True, help="Replace FILE if it exists.")
@click.option(
    "--max-segment",
    type=byte_size,
    metavar="SIZE",
    help="Take files with segments up to SIZE; each is held in memory.  [default: 16MiB]",
)
@common_options
@click.pass_obj
def command(
    invocation: Invocation,
    words: tuple[str, ...],
    cap_files: tuple[str, ...],
    output: str,
    force: bool,
    max_segment: int | None,
) -> OfflineJob:
    """
    Restore the file that CAP names from any k of its share files.

    They may be shares that 'encode' wrote or files from a storage server's directory, under any names. Files
    that do not belong, or are damaged, are named and left out. In a DIR, such as a storage server's whole
    directory or one with the directories of many, the file's own shares are found by its storage index.
    With --cap-file, which must hold one cap, all arguments are share files.
    """
    caps, paths = ((), words) if cap_files else (words[:1], words[1:])
    checked_caps(caps, cap_files)

    def work(console: Console) -> int:
        return decode(console, caps, cap_files, paths, output, force, max_segment)

    return OfflineJob(work)


def decode(
    console: Console,
    caps: tuple[str, ...],
    cap_files: tuple[str, ...],
    paths: tuple[str, ...],
    output: str,
    force: bool,
    max_segment: int | None,
) -> int:
    """Restore one file to where it shall go."""
    from pipegrid.cli.files import check_path, named_files
    from pipegrid.cli.outfile import OutputFile
    from pipegrid.cli.progress import ProgressBar
    from pipegrid.core.caps import LitCap, readable
    from pipegrid.core.params import MAX_SEGMENT_BYTES
    from pipegrid.core.text import counted
    from pipegrid.errors import UsageError
    from pipegrid.transfer.offline import decode_file
    from pipegrid.transfer.share_files import ShareFinder

    files = named_files(console, caps, cap_files, readable)
    if len(files) > 1:
        raise UsageError(f"decode restores one file, but {len(files)} caps were given; give one")
    check_path(files[0])
    cap = files[0].cap
    if console.json and output == "-":
        raise UsageError("--json would mix with the file on standard output; choose a file for -o")
    if not isinstance(cap, LitCap):
        finder = ShareFinder(cap.storage_index)
        paths = tuple(finder.among(paths))
        if finder.others:
            console.say(
                f"pipegrid: {counted(finder.others, 'file')} left out that the directory's name says to be "
                f"of another storage index than {files[0].base_name}"
            )
    with ExitStack() as stack:
        sink: BinaryIO | PartFile = console.data_sink
        if output != "-":
            sink = stack.enter_context(OutputFile(output, force)).file
        progress = None
        if output != "-" or not console.results.isatty():
            progress = stack.enter_context(ProgressBar(console, "decode")).transfer()
        result = decode_file(
            cap,
            paths,
            sink,
            progress=progress,
            max_segment_bytes=MAX_SEGMENT_BYTES if max_segment is None else max_segment,
        )
    _tell(console, result, output)
    return 0


def _tell(console: Console, result: DecodeResult, output: str) -> None:
    """Tell what came of it."""
    from pipegrid.cli.render import corruption_fields, warn_of_corruption
    from pipegrid.core.text import counted

    warn_of_corruption(console, result.problems)
    used = ", ".join(map(str, sorted(result.shares_used)))
    console.detail(f"{counted(result.size, 'byte')} from shares {used or 'none'}")
    console.json_result(
        {
            "path": output,
            "size": result.size,
            "shares_used": result.shares_used,
            "corrupt": corruption_fields(result.problems),
        }
    )
