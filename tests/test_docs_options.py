"""docs/reference-cli.md has every option of every command, and says which of them several commands share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.command_grammar import pipegrid

DOCS = Path(__file__).parent.parent / "docs"
OF_ALL = {
    "--directory",
    "--grid",
    "--local",
    "--json",
    "--quiet",
    "--verbose",
    "--trace",
    "--help",
    "--version",
}
"""In the first table of the page; a few commands lack one that has no use there."""

NO_GRID_NEEDED = ("mirror", "speedtest")
"""They can use a grid, and never wait for its servers."""

_SECTION = re.compile(r"^### (.+)\n((?:(?!##).*\n)*)", re.MULTILINE)
_SHARED = re.compile(r"^\| (`--[^|]+) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def page() -> str:
    """Return the reference."""
    return (DOCS / "reference-cli.md").read_text("utf-8")


def named(text: str) -> set[str]:
    """Return the long and short options that a text names."""
    return set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", text))


def sections() -> dict[str, str]:
    """Return what the page says of each command, by its first word, or first two."""
    found: dict[str, str] = {}
    for heading, body in _SECTION.findall(page()):
        for usage in re.findall(r"`([^`]+)`", heading):
            words = usage.split()
            for name in {words[0], " ".join(words[:2])}:
                found[name] = found.get(name, "") + heading + body
    return found


def shared() -> Iterator[tuple[set[str], set[str]]]:
    """Yield the options of each row of "Options of several commands", and the commands that have them."""
    part = page().split("## Options of several commands")[1].split("\n## ")[0]
    last: set[str] = set()
    for options, commands in _SHARED.findall(part):
        if commands != "the same":
            last = set(re.findall(r"`([\w-]+)`", commands))
        yield named(options), last


def options_of_commands() -> Iterator[tuple[str, click.Option]]:
    """Yield each option that is shown in the help of a command, with the command's name."""
    todo: list[tuple[str, click.Command]] = [("", pipegrid)]
    while todo:
        name, command = todo.pop()
        if isinstance(command, click.Group):
            context = click.Context(command)
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                assert found is not None
                todo.append((f"{name} {child}".strip(), found))
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                yield name, option


class OptionsTests(SynchronousTestCase):
    """The page and the program have the same options."""

    def test_every_option_is_told(self) -> None:
        """In its command's section, in that of a command whose options it has, or in the shared table."""
        texts = sections()
        texts["serve"] += (DOCS / "how-to-serve.md").read_text("utf-8")
        texts["backup"] += texts["put"]
        for kind in ("debian", "rpm"):
            texts[f"mirror {kind}"] += texts["mirror list"]
        common = {option for options, _ in shared() for option in options}
        missing = [
            (name, option.opts)
            for name, option in options_of_commands()
            if name and not OF_ALL & set(option.opts)
            if not common & set(option.opts) or name.startswith("mirror ")
            if not set(option.opts) & named(texts.get(name) or texts.get(name.split()[0], ""))
        ]
        self.assertEqual(missing, [])

    def test_shared_options_are_those_of_the_commands_named(self) -> None:
        """Each row names all commands that have its options; those of mirrors mean others by them."""
        have = [(name, set(option.opts)) for name, option in options_of_commands()]
        for options, commands in shared():
            having = {name for name, opts in have if opts & options}
            if "--wait-for" in options:
                self.assertEqual(commands, set(NO_GRID_NEEDED))
                self.assertEqual({name for name in having if name.split()[0] in commands}, set())
                self.assertTrue({"put", "get", "ls", "alias create", "restore"} <= having)
            else:
                own = {name for name in having if name.startswith("mirror ")}
                self.assertEqual(commands, having - own, options)
