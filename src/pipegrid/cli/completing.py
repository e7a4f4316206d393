"""What a shell is offered where an argument may begin with an alias; what it costs is imported then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.cli.job import Invocation

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem


def grid_path(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Offer aliases, and names behind them."""
    from pipegrid.cli.completion.names import on_grid

    return on_grid(_invocation(ctx), incomplete)


def any_path(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Offer the same, and local files."""
    from pipegrid.cli.completion.names import anywhere

    return anywhere(_invocation(ctx), incomplete)


def alias_name(
    ctx: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Offer aliases, without the colon."""
    from pipegrid.cli.completion.names import aliases

    return aliases(_invocation(ctx), incomplete, "")


def _invocation(ctx: click.Context) -> Invocation:
    invocation = ctx.find_object(Invocation)
    assert invocation is not None
    return invocation
