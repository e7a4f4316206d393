"""One idea a module: none is longer than 400 lines, no function than 60; run it to see the longest ones."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

PACKAGE = Path(__file__).parent.parent / "src" / "pipegrid"

MOST_LINES = 400
MOST_FUNCTION_LINES = 60
"""From ``def`` to the end, what its docstring says included; decorators are not."""


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, int]]:
    """Yield the name and the lines of each function, of methods and inner ones, too."""
    for node in ast.iter_child_nodes(tree):
        name = inside
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{inside}.{node.name}" if inside else node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, (node.end_lineno or node.lineno) - node.lineno + 1
        yield from functions(node, name)


def too_long() -> dict[str, list[str]]:
    """Return what is longer than it may be, by the module that it is in, in words."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text("utf-8")
        here = [
            f"{name}, {lines} lines"
            for name, lines in functions(ast.parse(text))
            if lines > MOST_FUNCTION_LINES
        ]
        if len(text.splitlines()) > MOST_LINES:
            here.insert(0, f"{len(text.splitlines())} lines")
        if here:
            found[path.relative_to(PACKAGE).as_posix()] = here
    return found


class SizesTests(SynchronousTestCase):
    """What is cut along ideas is short."""

    def test_modules_and_functions_are_short(self) -> None:
        """Every one of them."""
        self.assertEqual(too_long(), {})

    def test_functions_are_found(self) -> None:
        """Methods and inner functions count, decorators do not."""
        text = "class A:\n    @x\n    def b(self):\n        def c():\n            pass\n\ndef d(): ...\n"
        self.assertEqual(
            dict(functions(ast.parse(text))),
            {"A.b": 3, "A.b.c": 2, "d": 1},
        )


if __name__ == "__main__":
    for module, lines in sorted(too_long().items()):
        print(f"{module}: {'; '.join(lines)}")
