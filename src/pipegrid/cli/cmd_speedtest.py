"""``pipegrid speedtest``: how far from the wire? The commands of the group are loaded when they are named."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from pipegrid.cli.group import CommandGroup
from pipegrid.cli.options import common_options

HOMES = {
    "run": "speedtest_run",
    "selfcheck": "speedtest_run",
    "compare": "speedtest_results",
    "report": "speedtest_results",
    "responder": "speedtest_paths",
    "proxy": "speedtest_paths",
}
"""The module of each command, in which it is called as it is here."""

DEFAULT = "run"
SELF_CHECK = "--self-check"

_FLAGS = ("-v", "--verbose", "-q", "--quiet", "--json")
_VALUED = ("-d", "--directory", "--trace")
_HELP = ("-h", "--help")


class SpeedTestGroup(CommandGroup):
    """``run`` is meant where no command is named."""

    homes = {name: (home, name) for name, home in HOMES.items()}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with the name of the command in its place."""
        if ctx.resilient_parsing and not with_command(args)[:-1]:
            return super().parse_args(ctx, args)  # a shell completes what is not written yet
        return super().parse_args(ctx, with_command(args))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        """Complete a command, or an option of the one that is meant where none is named."""
        found = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("-"):
            return found
        meant = self.get_command(ctx, DEFAULT)
        assert meant is not None
        with meant.make_context(DEFAULT, [], parent=ctx, resilient_parsing=True) as below:
            own = {item.value for item in found}
            more = [*meant.shell_complete(below, incomplete), CompletionItem(SELF_CHECK)]
        return found + [
            item
            for item in more
            if item.value not in own and str(item.value).startswith(incomplete)
        ]


def with_command(args: list[str]) -> list[str]:
    """Return arguments in which a command is named, behind the group's own options."""
    at = 0
    while at < len(args) and args[at].partition("=")[0] in (*_FLAGS, *_VALUED):
        at += 2 if args[at] in _VALUED else 1
    own, rest = args[:at], args[at:]
    if rest[:1] == [SELF_CHECK]:
        return [*own, "selfcheck", *rest[1:]]
    if not rest or (rest[0].startswith("-") and rest[0] not in _HELP):
        return [*own, DEFAULT, *rest]
    return args


@click.group(name="speedtest", cls=SpeedTestGroup, subcommand_metavar="[COMMAND] [ARGS]...")
@common_options
def command() -> None:
    """
    Measure what files cost: in round trips, and compared with raw TCP on the same path in the same run.

    Without a command, 'run' is meant: 'pipegrid speedtest --link dsl'. It measures a private grid, which it
    starts and removes again; with -d, the grid of that directory.
    """
