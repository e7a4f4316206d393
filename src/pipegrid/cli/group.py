"""A group of commands whose help is not cut off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

import click


class CommandGroup(click.Group):
    """A group whose help says of each command what it does, in a whole sentence."""

    homes: Mapping[str, tuple[str, str]] = {}
    """Commands that are imported when they are named: the module in this package, and what it is there."""

    sections: Mapping[str, Sequence[str]] = {}
    """The commands by the heading under which the help lists them; others are under "Commands"."""

    elsewhere: Mapping[str, str] = {}
    """What other programs call commands, and what those are called here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; where no command is named, an error names them (click's own is all of the help)."""
        if not args and not ctx.resilient_parsing:
            names = self.list_commands(ctx)
            raise click.UsageError(f"say which: {', '.join(names[:-1])} or {names[-1]}", ctx)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is named first; where there is none, the error says which may be meant."""
        name = args[0]
        if name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches  # only mistakes need it

        near = self.elsewhere.get(name) or next(
            iter(get_close_matches(name, self.list_commands(ctx), 1)), None
        )
        hint = "" if near is None else f"; did you mean '{ctx.command_path} {near}'?"
        raise click.UsageError(f"No such command '{name}'{hint}", ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self.homes]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return one command, or None."""
        if cmd_name not in self.homes:
            return super().get_command(ctx, cmd_name)
        module, name = self.homes[cmd_name]
        command = getattr(import_module(f"pipegrid.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists of commands; click's own cuts off what takes a second line."""
        names = self.list_commands(ctx)
        listed = {name for section in self.sections.values() for name in section}
        rest = [name for name in names if name not in listed]
        widest = max(map(len, names), default=0)
        for heading, section in (*self.sections.items(), ("Commands", rest)):
            found = [(name, self.get_command(ctx, name)) for name in section]
            rows = [
                (name.ljust(widest), each.get_short_help_str(1000))
                for name, each in found
                if each is not None
            ]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
