"""The help, as a person reads it on a terminal of 80 columns."""

from __future__ import annotations

import io

import click
from click.testing import CliRunner
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.command_grammar import COMMANDS, SECTIONS, pipegrid
from pipegrid.cli.command_job import Invocation
from pipegrid.cli.console import Console
from tests.plain_words import DO_NOT_SAY, NOT_A


def helps() -> dict[str, str]:
    """Return the help of the program and of every command, by what is typed for it."""
    found: dict[str, str] = {}

    def visit(command: click.Command, words: tuple[str, ...]) -> None:
        run = CliRunner().invoke(
            pipegrid,
            [*words, "--help"],
            obj=Invocation(Console(None, None, io.StringIO())),
        )
        found[" ".join(("pipegrid", *words))] = run.output
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                visit(inner, (*words, name))

    visit(pipegrid, ())
    return found


class WholeHelpTests(SynchronousTestCase):
    """``--help`` of the program and of each command."""

    def test_groups(self) -> None:
        """Every command is in one section, under its heading."""
        text = helps()["pipegrid"]
        for heading, names in SECTIONS.items():
            section = text.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
            found = [line.split()[0] for line in section.splitlines() if line[2:3] != " "]
            self.assertEqual(found, list(names))
        self.assertEqual(len(set(COMMANDS)), len(COMMANDS))

    def test_80_columns(self) -> None:
        """No line is broken by the terminal."""
        for name, text in helps().items():
            for line in text.splitlines():
                self.assertLessEqual(len(line), 80, (name, line))

    def test_plain_words(self) -> None:
        """The help has none of the words that the glossary replaces, where they can only mean that."""
        for name, text in helps().items():
            text = " ".join(text.split())
            for match in (*DO_NOT_SAY.finditer(text), *NOT_A.finditer(text)):
                self.fail(f"{name}: {match[0]!r}")
