"""``pipegrid encode``, ``decode`` and ``storage-index``: commands without a grid."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from pipegrid.cli import cap_lookup, health_output, output_file, progress_bar
from pipegrid.cli.command_job import Invocation, OfflineJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, one_status
from pipegrid.cli.options import (
    CapArguments,
    Encoding,
    byte_size,
    cap_arguments,
    cap_file_option,
    checked_caps,
    choose_params,
    common_options,
    encoding_options,
    key_options,
)
from pipegrid.core import caps as core_caps
from pipegrid.core import encoding_parameters
from pipegrid.core.text import counted
from pipegrid.errors import CapError, UsageError
from pipegrid.grid import client_config, client_paths
from pipegrid.transfer import offline_encoding

if TYPE_CHECKING:
    from pipegrid.disk.part_file import PartFile


# ``pipegrid encode``: encodes a file into share files, without a grid.


@click.command(name="encode")
@click.argument("file", type=click.Path(readable=False))
@click.option(
    "--shares",
    "share_directory",
    required=True,
    type=click.Path(file_okay=False, readable=False),
    metavar="DIR",
    help="The directory for the share files, which are named 0, 1, 2...",
)
@click.option("-f", "--force", is_flag=True, help="Replace existing shares.")
@encoding_options
@key_options
@common_options
@click.pass_obj
def encode_command(
    invocation: Invocation,
    file: str,
    share_directory: str,
    force: bool,
    encoding: Encoding,
    key: dict[str, Any],
) -> OfflineJob:
    """
    Encode FILE into share files and print its capability.

    Shares and capability are those that 'put' would make with the same options: defaults and the
    convergence secret come from the client's directory. Without one the key is random.
    """

    def work(console: Console) -> int:
        config = _configuration(invocation.directory)
        params = choose_params(config.params if config else encoding_parameters.Params(), encoding)
        secret = key["convergence"]
        if secret is None and config and not key["random_key"]:
            secret = config.convergence
        with progress_bar.ProgressBar(console, "encode") as progress:
            result = offline_encoding.encode_file(
                file,
                share_directory,
                params,
                secret,
                force=force,
                progress=progress.transfer(),
            )
        if not result.paths:
            console.note(f"{file} is so small that its cap contains it; there are no shares")
        console.result(
            str(result.cap),
            {
                "path": file,
                "cap": str(result.cap),
                "size": result.size,
                "share_bytes": result.share_bytes,
                "shares": result.paths,
            },
        )
        return 0

    return OfflineJob(work)


def _configuration(directory: str | None) -> client_config.GridConfig | None:
    """
    Return the configuration in a client's directory, or, if none is named, in the user's own; None if the
    user has none.
    """
    if directory is not None:
        return client_config.load(directory, offline=True)
    try:
        own = client_paths.default_directory()
    except UsageError:  # without a home directory the user has none
        return None
    return client_config.load(own, offline=True) if client_paths.is_configured(own) else None


# ``pipegrid decode``: restores a file from share files, without a grid.


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
    help="Accept files with segments up to SIZE; each is held in memory.  [default: 16MiB]",
)
@common_options
@click.pass_obj
def decode_command(
    invocation: Invocation,
    words: tuple[str, ...],
    cap_files: tuple[str, ...],
    output: str,
    force: bool,
    max_segment: int | None,
) -> OfflineJob:
    """
    Restore the file that CAP names from any k of its share files.

    Share files are those that 'encode' wrote, or files of a storage server, under any names. Files that are
    damaged or belong to another cap are named and left out. In a DIR, such as the storage directory of a
    server, or a directory of several of them, the shares are found by their storage index. With --cap-file,
    which must hold one cap, all arguments are share files; a line of it that is damaged is named, and then
    the exit status is not 0.
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
    """Restore one file from share files, and write it to the output path."""
    named = cap_lookup.named_files(console, caps, cap_files, core_caps.readable)
    files = [file for file in named if file.problem is None]
    if len(files) > 1:
        raise UsageError(f"decode restores one file, but {len(files)} caps were given; give one")
    cap_lookup.check_path(files[0])
    cap = files[0].cap
    if console.json and output == "-":
        raise UsageError("--json would mix with the file on standard output; choose a file for -o")
    statuses = {
        console.failed(file.problem, file.label, cap_lookup.identity(file), True)
        for file in named
        if file.problem is not None
    }
    if not isinstance(cap, core_caps.LitCap):
        finder = offline_encoding.ShareFinder(cap.storage_index)
        paths = tuple(finder.among(paths))
        if finder.others:
            console.note(
                f"{counted(finder.others, 'file')} left out, since their directory is that of "
                f"another storage index than {files[0].base_name}"
            )
    with ExitStack() as stack:
        sink: BinaryIO | PartFile = console.data_sink
        if output != "-":
            sink = stack.enter_context(output_file.OutputFile(output, force)).file
        fits = output != "-" or not console.results.isatty()
        bar = stack.enter_context(progress_bar.ProgressBar(console, "decode", fits=fits))
        result = offline_encoding.decode_file(
            cap,
            paths,
            sink,
            progress=bar.transfer(),
            max_segment_bytes=max_segment or encoding_parameters.MAX_SEGMENT_BYTES,
        )
    _print_result(console, result, output)
    return one_status(statuses)


def _print_result(console: Console, result: offline_encoding.DecodeResult, path: str) -> None:
    """Report the outcome of a decoding."""
    health_output.warn_of_corruption(console, result.problems)
    used = ", ".join(map(str, sorted(result.shares_used)))
    console.detail(f"{counted(result.size, 'byte')} from shares {used or 'none'}")
    console.json_result(
        {
            "path": path,
            "size": result.size,
            "shares_used": result.shares_used,
            "corrupt": health_output.corruption_fields(result.problems),
        }
    )


# ``pipegrid storage-index``: the names that servers give to the shares of files.


@click.command(name="storage-index")
@cap_arguments
@common_options
def storage_index_command(caps: CapArguments) -> OfflineJob:
    """
    Print the storage indexes of files, by which servers name their shares.

    On a server's disk the shares are in shares/XX/INDEX, where XX are the first two characters of INDEX. A
    storage index alone neither reads nor checks a file. No grid is needed. Caps of directories and mutable
    files, and verifier caps, are accepted as well. A literal cap, which contains its file, has no storage
    index: its line is '-'.
    """

    def work(console: Console) -> int:
        files = cap_lookup.named_files(console, *caps, core_caps.keepable)
        statuses: set[ExitStatus] = set()
        for file in files:
            try:
                cap_lookup.check_path(file)
            except CapError as error:
                if len(files) == 1:
                    raise
                statuses.add(console.failed(error, file.label, cap_lookup.identity(file), True))
                continue
            index = cap_lookup.storage_index_text(file.cap) or None
            coded = (
                None if isinstance(file.cap, (core_caps.LitCap, core_caps.MutableCap)) else file.cap
            )
            fields: dict[str, Any] = {
                **cap_lookup.identity(file),
                "storage_index": index,
                "size": None if isinstance(file.cap, core_caps.MutableCap) else file.cap.size,
                "required_shares": None if coded is None else coded.required_shares,
                "total_shares": None if coded is None else coded.total_shares,
            }
            console.result(index or "-", fields)
        return one_status(statuses)

    return OfflineJob(work)
