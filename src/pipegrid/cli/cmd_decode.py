"""``pipegrid decode``: share files become the file again, with no grid."""

from __future__ import annotations

from contextlib import ExitStack

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import OfflineJob
from pipegrid.cli.options import common_options


@click.command(name="decode")
@click.argument("cap")
@click.argument("share_files", nargs=-1, metavar="SHAREFILE...", type=click.Path())
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(),
    metavar="FILE",
    help="Where the file goes; it appears when all of it is verified. '-' is standard output.",
)
@click.option("-f", "--force", is_flag=True, help="Replace FILE if it exists.")
@common_options
def command(cap: str, share_files: tuple[str, ...], output: str, force: bool) -> OfflineJob:
    """
    Restore the file that CAP names from any k of its share files.

    They may be shares that 'encode' wrote or files from a storage server's directory, under any names. Files
    that do not belong, or are damaged, are named and left out.
    """

    def work(console: Console) -> int:
        return decode(console, cap, share_files, output, force)

    return OfflineJob(work)


def decode(
    console: Console, text: str, share_files: tuple[str, ...], output: str, force: bool
) -> int:
    """Restore one file to where it shall go."""
    from pipegrid.cli.outfile import OutputFile
    from pipegrid.cli.progress import Progress
    from pipegrid.cli.render import corruption_fields, plural, warn_of_corruption
    from pipegrid.core.filecaps import readable
    from pipegrid.errors import UsageError
    from pipegrid.transfer.offline import decode_file

    cap = readable(text)
    if console.json and output == "-":
        raise UsageError("--json would mix with the file on standard output; choose a file for -o")
    with ExitStack() as stack:
        sink = console.data_sink
        if output != "-":
            sink = stack.enter_context(OutputFile(output, force)).file
        progress = stack.enter_context(Progress(console, "decode"))
        result = decode_file(cap, share_files, sink, progress=progress.transfer())
    warn_of_corruption(console, result.problems)
    used = ", ".join(map(str, sorted(result.shares_used)))
    console.detail(f"{plural(result.size, 'byte')} from shares {used or 'none'}")
    if console.json:
        console.result(
            "",
            {
                "path": output,
                "size": result.size,
                "shares_used": result.shares_used,
                "corrupt": corruption_fields(result.problems),
            },
        )
    return 0
