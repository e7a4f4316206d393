"""One word has one meaning: a class has a name of its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

PACKAGE = Path(__file__).parent.parent / "src" / "pipegrid"

SAME_MEANING = {"Child", "Entry", "Grid", "Workers"}
"""One thing, with more of it, or as much of it as a lower room needs to know."""

STILL_TO_BE_NAMED = {"Limits", "WriteResult"}
"""This list only becomes shorter. Two of these are public: limits of a host, and of a grid."""


class NamesTests(SynchronousTestCase):
    """What is found by its name is found once."""

    def test_classes_have_names_of_their_own(self) -> None:
        """But for those that mean the same; names with an underscore are their module's own."""
        homes: dict[str, list[str]] = defaultdict(list)
        for path in sorted(PACKAGE.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(path.relative_to(PACKAGE).as_posix())
        twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
        allowed = SAME_MEANING | STILL_TO_BE_NAMED
        self.assertEqual({name: twice[name] for name in twice.keys() - allowed}, {})
        self.assertEqual(allowed - twice.keys(), set())
