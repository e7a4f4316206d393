"""The options that the commands of ``pipegrid mirror`` have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.options import F, all_of, as_one
from pipegrid.cli.sizes import byte_rate

if TYPE_CHECKING:
    from pipegrid.cli.mirroring import MirrorOptions

check_options = all_of(
    click.option(
        "--paranoid", is_flag=True, help="Hash all existing files, whatever is known of them."
    ),
    click.option(
        "--sample",
        type=click.FloatRange(0, 100),
        default=0.0,
        metavar="PERCENT",
        help="Hash PERCENT of the existing files, drawn at random.",
    ),
)
"""Say how much of what is there is read again."""

from_grid_option = click.option(
    "--from-grid",
    metavar="CAP",
    help="In place of --from: bring back what --to-grid stored; nothing else needs to be given.",
)


keep_going_option = click.option(
    "--keep-going",
    is_flag=True,
    help="Show the new indexes also if no mirror has some of what they name; that is named, with status 1.",
)


def keyring_option(help: str) -> Callable[[F], F]:
    """Return the option that names keys, which comes as ``keyrings``."""
    return click.option(
        "--keyring",
        "keyrings",
        multiple=True,
        type=click.Path(readable=False),
        metavar="FILE",
        help=help,
    )


unsigned_option = click.option(
    "--allow-unsigned", is_flag=True, help="Check no signature: trust the mirror."
)


def _fetching(limit_rate: str | None, **options: Any) -> MirrorOptions:
    from pipegrid.cli.mirroring import MirrorOptions

    limit = None if limit_rate is None else byte_rate(limit_rate)
    return MirrorOptions(limit_bytes_per_s=limit, **options)


fetch_options = as_one(
    "fetching",
    _fetching,
    click.option(
        "--durability",
        type=click.Choice(["none", "batch", "strict"]),
        default="batch",
        show_default=True,
        help="When a file may get its name: at once, when its group is on the disk, or when it is.",
    ),
    click.option(
        "--limit-rate",
        metavar="BYTES",
        help="Fetch at most BYTES a second, such as 500K or 10M, from all mirrors together.",
    ),
    click.option(
        "--connections",
        type=click.IntRange(1, 64),
        default=4,
        show_default=True,
        help="To each mirror, at most.",
    ),
    click.option("--dry-run", is_flag=True, help="Fetch and remove nothing; say what would be."),
    click.option(
        "--delete",
        is_flag=True,
        help="When all files exist, remove files from DEST that are not wanted.",
    ),
    click.option(
        "--from",
        "urls",
        multiple=True,
        metavar="URL",
        help="A mirror; give several, and they share the work.",
    ),
    click.option(
        "--to-grid",
        is_flag=True,
        help="When all files exist, store them in the grid, too, and print the cap that brings it back.",
    ),
    check_options,
)
"""Those that every command has that fetches."""
