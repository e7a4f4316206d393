"""``pipegrid pdiff``: bring an index up to date by patches."""

from __future__ import annotations

import re
from contextlib import ExitStack

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import OfflineJob
from pipegrid.cli.options import common_options, usage_error
from pipegrid.cli.outcome import ExitStatus


@click.command(name="pdiff")
@click.argument("index", type=click.Path(readable=False))
@click.argument(
    "patches", nargs=-1, required=True, type=click.Path(readable=False), metavar="PATCH..."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(readable=False),
    metavar="OUT",
    help="Where the result goes.",
)
@click.option("-f", "--force", is_flag=True, help="Replace OUT if it exists.")
@click.option(
    "--sha256", metavar="HEX", help="What the result must hash to; if it does not, there is no OUT."
)
@common_options
def command(
    index: str, patches: tuple[str, ...], output: str, force: bool, sha256: str | None
) -> OfflineJob:
    """
    Apply the PATCHes, oldest first, to INDEX, and write the result to OUT.

    Patches are ed scripts, as Debian's archive has them. All of them cost one pass over INDEX. Packed files
    (gzip, xz, bzip2, zstandard) are unpacked; OUT is not packed. Prints SHA-256, size and name of the result.
    """
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise usage_error("--sha256 takes 64 hexadecimal digits")
    return OfflineJob(lambda console: _patch(console, index, patches, output, force, sha256))


def _patch(
    console: Console,
    index: str,
    patches: tuple[str, ...],
    output: str,
    force: bool,
    sha256: str | None,
) -> int:
    from pipegrid.cli.outfile import OutputFile
    from pipegrid.errors import SinkError
    from pipegrid.mirror.decompress import PatchError
    from pipegrid.mirror.pdiff import apply_patches

    with ExitStack() as stack:
        out = stack.enter_context(OutputFile(output, force)).file
        try:
            patched = apply_patches(index, patches, out.fileno())
        except OSError as error:
            if error.filename is not None:  # what is read has its name in what is wrong with it
                raise
            raise SinkError(
                f"cannot write {output}: {error.strerror}; free some space or choose another place"
            ) from error
        found = patched.digest.hex()
        if sha256 is not None and found != sha256.lower():
            raise PatchError(
                f"the result has another SHA-256, {found}: a patch is damaged, missing, or not for {index};"
                " fetch the index again"
            )
    console.result(
        f"{found}  {patched.size_bytes}  {output}",
        {"path": output, "size": patched.size_bytes, "sha256": found},
    )
    return ExitStatus.DONE
