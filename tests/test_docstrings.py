"""A docstring says what the name and the types do not, or there is none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

PACKAGE = Path(__file__).parent.parent / "src" / "pipegrid"

LEAST_WORDS = 5
"""Four say the name once more, or "See above": units, what None means and what is raised need more."""

Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def short_docstrings(tree: ast.AST, inside: str = "") -> Iterator[str]:
    """Yield the name of everything whose docstring has fewer words, and what it says."""
    if isinstance(tree, Documented):
        text = ast.get_docstring(tree)
        if text is not None and len(text.split()) < LEAST_WORDS:
            yield f"{inside or 'the module'}: {text}"
    for node in ast.iter_child_nodes(tree):
        name = inside
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{inside}.{node.name}" if inside else node.name
        yield from short_docstrings(node, name)


class DocstringsTests(SynchronousTestCase):
    """What a docstring is for: shapes, units, errors, who calls it."""

    def test_docstrings_say_something(self) -> None:
        """Of modules, classes and functions alike; those without one need none."""
        found: dict[str, list[str]] = {}
        for path in sorted(PACKAGE.rglob("*.py")):
            short = list(short_docstrings(ast.parse(path.read_text("utf-8"))))
            if short:
                found[path.relative_to(PACKAGE).as_posix()] = short
        self.assertEqual(found, {}, "say what a caller needs, or leave it out")

    def test_short_docstrings_are_found(self) -> None:
        """In modules, classes, methods, coroutines and what is within them; line breaks do not count."""
        text = (
            '"""A module."""\n'
            "class A:\n"
            '    """\n    One\n    class.\n    """\n'
            "    if x:\n"
            "        async def b(self):\n"
            '            """Return four words only."""\n'
            "            def c():\n"
            '                """Return five words, at last."""\n'
            "    def d(self): ...\n"
        )
        self.assertEqual(
            list(short_docstrings(ast.parse(text))),
            ["the module: A module.", "A: One\nclass.", "A.b: Return four words only."],
        )
