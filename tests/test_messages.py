"""Every sentence that the program can print: results, warnings, errors and the log."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.plain_words import DO_NOT_SAY, NOT_A

SOURCE = Path(__file__).parents[1] / "src" / "pipegrid"

EXCEPTIONS: dict[str, str] = {}
"""Words that a message has to use, and why: ``"part of the message": "reason"``."""


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string of two words or more that is no docstring, with {} for values."""
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in parts or id(node) in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        text = " ".join(text.split())
        if " " in text:
            yield node.lineno, text


class PlainMessagesTests(SynchronousTestCase):
    """Messages are in plain English."""

    def test_plain_words(self) -> None:
        """No message has a word that the glossary replaces; it says "not a file" rather than "no file"."""
        wrong = []
        unused = set(EXCEPTIONS)
        for path in sorted(SOURCE.rglob("*.py")):
            for line, text in messages(ast.parse(path.read_text())):
                used = {each for each in EXCEPTIONS if each in text}
                unused -= used
                found = [] if used else [*DO_NOT_SAY.finditer(text), *NOT_A.finditer(text)]
                where = f"{path.relative_to(SOURCE)}:{line}"
                wrong += [f"{where}: {match[0]!r} in {text!r}" for match in found]
        self.assertEqual(wrong, [], "\n".join(wrong))
        self.assertEqual(unused, set(), "these exceptions are not needed any more")

    def test_finds_them(self) -> None:
        """The check sees texts with values in them, in pieces, and in lists; it ignores docstrings."""
        source = 'def f(x):\n    "nobody"\n    g(f"a {x} "\n      "is no file"); y = ["was cut off", "one"]\n'
        found = [text for _, text in messages(ast.parse(source))]
        self.assertEqual(found, ["a {} is no file", "was cut off"])
        self.assertIsNotNone(NOT_A.search(found[0]))
        self.assertIsNotNone(DO_NOT_SAY.search(found[1]))
