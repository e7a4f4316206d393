"""``pipegrid encode``: a file becomes share files, with no grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import Invocation, OfflineJob
from pipegrid.cli.options import (
    Encoding,
    choose_params,
    common_options,
    encoding_options,
    key_options,
)

if TYPE_CHECKING:
    from pipegrid.grid.client_config import GridConfig


@click.command(name="encode")
@click.argument("file", type=click.Path(readable=False))
@click.option(
    "--shares",
    "share_directory",
    required=True,
    type=click.Path(file_okay=False, readable=False),
    metavar="DIR",
    help="Where the share files go; they are called 0, 1, 2...",
)
@click.option("-f", "--force", is_flag=True, help="Replace existing shares.")
@encoding_options
@key_options
@common_options
@click.pass_obj
def command(
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
        from pipegrid.cli.progress import ProgressBar
        from pipegrid.core.params import Params
        from pipegrid.transfer.offline import encode_file

        config = _configuration(invocation.directory)
        params = choose_params(config.params if config else Params(), encoding)
        secret = key["convergence"]
        if secret is None and config and not key["random_key"]:
            secret = config.convergence
        with ProgressBar(console, "encode") as progress:
            result = encode_file(
                file,
                share_directory,
                params,
                secret,
                force=force,
                progress=progress.transfer(),
            )
        if not result.paths:
            console.say(f"pipegrid: {file} is so small that its cap holds it; there are no shares")
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


def _configuration(directory: str | None) -> GridConfig | None:
    """Return what the client's directory says; None if none was named and the user has none."""
    from pipegrid.errors import UsageError
    from pipegrid.grid.client_config import load
    from pipegrid.grid.client_paths import default_directory, is_configured

    if directory is not None:
        return load(directory, offline=True)
    try:
        own = default_directory()
    except UsageError:  # without a home there is none, either
        return None
    return load(own, offline=True) if is_configured(own) else None
