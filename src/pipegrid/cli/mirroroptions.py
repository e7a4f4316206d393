"""The options that the commands of ``pipegrid mirror`` have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click

from pipegrid.cli.options import byte_size

F = TypeVar("F", bound=Callable[..., Any])


def check_options(function: F) -> F:
    """Add the options that say how much of what is there is read again."""
    for option in (
        click.option(
            "--paranoid", is_flag=True, help="Hash all that is there, whatever is known of it."
        ),
        click.option(
            "--sample",
            type=click.FloatRange(0, 100),
            default=0.0,
            metavar="PERCENT",
            help="Hash so many percent of what is there, drawn at random.",
        ),
    ):
        function = option(function)
    return function


_FETCH_OPTIONS = (
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
        help="Fetch no more than so many bytes a second, such as 500K or 10M, from all mirrors together.",
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
        help="When all is there, remove files from DEST that are not wanted.",
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
        help="When all is there, store it in the grid, too, and print the cap that brings it back.",
    ),
)


def fetch_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every command has that fetches; they come as one ``Fetching``."""

    @wraps(function)
    def fetch(
        *arguments: Any,
        urls: tuple[str, ...],
        to_grid: bool,
        delete: bool,
        dry_run: bool,
        connections: int,
        limit_rate: str | None,
        durability: Any,
        sample: float,
        paranoid: bool,
        **others: Any,
    ) -> Any:
        from pipegrid.cli.mirroring import Fetching

        limit = None if limit_rate is None else byte_size(limit_rate)
        fetching = Fetching(
            urls, to_grid, delete, dry_run, connections, limit, durability, sample, paranoid
        )
        return function(*arguments, fetching=fetching, **others)

    for option in _FETCH_OPTIONS:
        fetch = option(fetch)
    return check_options(fetch)
