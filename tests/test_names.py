"""One word has one meaning: a class has a name of its own, and what a docstring names is there."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

PACKAGE = Path(__file__).parent.parent / "src" / "pipegrid"

SAME_MEANING = {"Grid"}
"""One thing, with more of it, or as much of it as a lower room needs to know."""

PUBLIC = {"Limits"}
"""Two that programs name already: those of a host, which ``http11`` has, and those of a grid."""

ELSEWHERE = {"twisted"}
"""Whose names are not ours."""

REFERENCE = re.compile(r"``([a-z]\w*(?:\.\w+)*\.[A-Z][a-z]\w*)``")
"""A class, by the module that it is in, or as much of the module's name as a reader needs."""


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
        allowed = SAME_MEANING | PUBLIC
        self.assertEqual({name: twice[name] for name in twice.keys() - allowed}, {})
        self.assertEqual(allowed - twice.keys(), set())

    def test_types_have_names_of_their_own(self) -> None:
        """A name for a type is no class's elsewhere, and means the same wherever it is written down."""
        meanings: dict[str, set[str]] = defaultdict(set)
        for path in sorted(PACKAGE.rglob("*.py")):
            tree = ast.parse(path.read_text("utf-8"))
            for name, meaning in _named_types(tree):
                meanings[name].add(meaning)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    meanings[node.name].add("a class")
        self.assertEqual({name: said for name, said in meanings.items() if len(said) > 1}, {})

    def test_no_two_names_differ_in_case_alone(self) -> None:
        """Who hears or reads one takes it for the other; also names with an underscore before them."""
        spelt: dict[str, set[str]] = defaultdict(set)
        for path in sorted(PACKAGE.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    name = node.name.strip("_")
                    spelt[name.lower()].add(name)
        self.assertEqual([names for names in spelt.values() if len(names) > 1], [])

    def test_classes_that_texts_name_are_there(self) -> None:
        """In the module that the text says; a class that moves, or is renamed, takes its mentions along."""
        homes: dict[str, list[str]] = defaultdict(list)
        texts: dict[str, str] = {}
        for path in sorted(PACKAGE.rglob("*.py")):
            relative = path.relative_to(PACKAGE.parent).with_suffix("")
            module = ".".join(relative.parts).removesuffix(".__init__")
            texts[module] = text = path.read_text("utf-8")
            exports = path.name == "__init__.py"
            for name in _classes(ast.parse(text), exports):
                homes[name].append(f".{module}.{name}")
        gone = [
            (module, said)
            for module, text in texts.items()
            for said in REFERENCE.findall(text)
            if said.split(".")[0] not in ELSEWHERE
            and not any(home.endswith(f".{said}") for home in homes[said.split(".")[-1]])
        ]
        self.assertEqual(gone, [])


def _named_types(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a module gives to types, and what each stands for."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            for each in statement.targets:
                if isinstance(each, ast.Name) and re.fullmatch(r"[A-Z]\w*[a-z]\w*", each.id):
                    yield each.id, ast.unparse(statement.value)


def _classes(tree: ast.Module, exports: bool) -> Iterator[str]:
    """Yield the classes of a module, its names for types, and what it hands on if it is a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and exports:
            yield from (alias.asname or alias.name for alias in node.names)
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            yield from (each.id for each in statement.targets if isinstance(each, ast.Name))
