"""A group of commands whose help is not cut off."""

from __future__ import annotations

import click


class CommandGroup(click.Group):
    """A group whose help says of each command what it does, in a whole sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands; click's own cuts off what takes a second line."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(1000)) for name, each in found if each is not None]
            )
