"""Errors speak to those who called: to a program of its arguments, to a person of options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.error_report import _OPTIONS, sentence
from pipegrid.core.caps import parse_cap, readable
from pipegrid.errors import SinkError, UsageError, naming
from pipegrid.transfer.failure_messages import LESS

PACKAGE = Path(__file__).parent.parent / "src" / "pipegrid"

COMMANDS = {
    "gateway",
    "buildbot.py",
    "cli",
    "mirror",
    "mount",
    "server",
    "speedtest",
    "tree/backup",
    "tree/copy_to_grid.py",
}
"""What only commands run; all else is called by programs, too."""

OPTION = re.compile(r"(?<![\w-])(--[a-z][\w-]*|-[a-zA-Z])(?![\w-])")
COMMAND = re.compile(r"'(?:pipegrid|ulimit) [^']*'?")
"""A whole command may stand in an error; of one that goes on behind a variable its beginning."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text("utf-8"))


def strings(tree: ast.Module) -> Iterator[str]:
    """Yield what is said, without docstrings."""
    silent = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in silent
        ):
            yield node.value


class LibraryErrorTests(SynchronousTestCase):
    """What is raised outside commands."""

    def test_no_options_outside_commands(self) -> None:
        """A program has none to give."""
        found = {
            name: said
            for name, tree in modules()
            if not any(name == each or name.startswith(f"{each}/") for each in COMMANDS)
            for said in strings(tree)
            if " " in said and OPTION.search(COMMAND.sub("", said))
        }
        self.assertEqual(found, {})

    def test_commands_know_an_option_for_each(self) -> None:
        """Of all arguments that errors name."""
        named = set()
        for _, tree in modules():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "naming":
                    named |= {
                        each.value for each in node.args[1:] if isinstance(each, ast.Constant)
                    }
        self.assertLess({"replace=True", "force=True", "less with happy"}, named)
        self.assertIn(LESS, _OPTIONS)
        self.assertEqual(named - _OPTIONS.keys(), set())

    def test_sentences(self) -> None:
        """Both are told what to do; what stands in a path is left as it is."""
        error = naming(SinkError("force=True exists; add force=True"), "force=True")
        self.assertEqual(str(error), "force=True exists; add force=True")
        self.assertEqual(sentence(error), "force=True exists; add --force")
        with self.assertRaises(UsageError) as caught:
            readable(parse_cap("URI:DIR2-LIT:"))
        self.assertTrue(str(caught.exception).endswith("; get_tree fetches all that is in it"))
        self.assertTrue(sentence(caught.exception).endswith("; 'get -r' fetches all that is in it"))
