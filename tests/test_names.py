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

GLOSSARY = PACKAGE.parent.parent / "docs" / "glossary.md"

_WORDS = """
access address agent ahead aliases and announce archive args argument arguments ask assets assignment
async backup backups bar base base32 batches batching benchmark blacklist blocking buildbot bulk byte
cache calls cat change changes charts check checks children cipher claim clamped client clock cmd
collector command comparison completion config configured connection console content control copied copy
creation credentials database databases dates debian decode decoder decoding decompression deferreds
descriptor dialer diff discovery download du encode encoder encoding end endpoints epoll erasure error
errors exchange failover failure fast faults fetch figures filter filtered find first foolscap form
format formats from fuse garbage get grammar hashes headers health hedge history hooks host html http
identity ignore incoming indexes init interface interfaces interruptible invitation invite job join json
layout lazy link list listed listener lists local lock log lookup loop loss ls manager manpage many
messages metadata metrics mirror mirrors model modules monitoring mount mounted mutable mutables network
new object offline onion open opening operands options order origin outcomes output overview package
packed page parameters parent parser path paths patterns peers ping pins pipe plan point pool port
private process processes progress protocol proxy put query queue quota range ranges rate raw reactor
reader readiness reading received receiver receivers recorder registry relay repair report resource
responder restore results resume retained retry root rotation rpm runner safe search selection selfcheck
sender serve service settings signatures simulated sink site small socket socks socks5 source space
spans speedtest spool sqlite state states stats status store stream streams strict system systemd table
tahoe tcp templates text throttle timeline timeouts timetable tls to tor trace tracing tracker traffic
transfer transfers transport turns twist twisted unique update uploader urls user verification verifier
with without workers wormhole writer yaml zip
"""

ORDINARY = set(_WORDS.split())
"""Words of module names that the glossary does not list: ordinary ones, commands, protocols and products."""


SIBLINGS = {
    "bundles": "two ends of one message",
    "client": "one contract over two transports",
    "decoder": "immutable and mutable format",
    "encoder": "immutable and mutable format",
    "surveys": "two ends of one message",
    "uploads": "one contract over two transports",
}
"""Names that several modules have, with what they have in common; at most 20."""

NOUNS = set[str]()
"""That look like participles."""

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

    def test_modules_have_names_of_their_own(self) -> None:
        """But for siblings of one contract."""
        homes: dict[str, list[str]] = defaultdict(list)
        for path in _modules():
            homes[path.stem].append(path.relative_to(PACKAGE).as_posix())
        twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
        self.assertEqual({name: twice[name] for name in twice.keys() - SIBLINGS.keys()}, {})
        self.assertEqual(SIBLINGS.keys() - twice.keys(), set())
        self.assertLessEqual(len(SIBLINGS), 20)

    def test_module_names_are_terms_or_ordinary_words(self) -> None:
        """A newcomer finds each word in the glossary, or knows it; a name is no bare participle."""
        known = ORDINARY | _glossary_words()
        unknown = {
            f"{path.stem}: {word}"
            for path in _modules()
            for word in path.stem.split("_")
            if not {word, word.removesuffix("s"), word + "s", f"{word.removesuffix('ies')}y"}
            & known
        }
        self.assertEqual(unknown, set(), "name it in the glossary's terms, or add the word here")
        bare = {path.stem for path in _modules() if re.fullmatch(r"[a-z]+(ed|ing)", path.stem)}
        self.assertEqual(bare - NOUNS, set())

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


def _modules() -> Iterator[Path]:
    """Yield the modules whose names were chosen."""
    return (path for path in sorted(PACKAGE.rglob("*.py")) if not path.name.startswith("__"))


def _glossary_words() -> set[str]:
    """Return the words of the terms that the glossary explains."""
    rows = [line.split("|") for line in GLOSSARY.read_text("utf-8").splitlines() if "|" in line]
    terms = [row[1].lower() for row in rows if len(row) == 4]
    return {word for term in terms for word in re.findall(r"[a-z0-9]+", term)}


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
