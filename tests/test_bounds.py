"""What ``setup.cfg`` promises of Pythons and dependencies: said alike everywhere, and held by the sources."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Iterator

from misc.lowest import SETUP, lowest, requirements
from twisted.trial.unittest import SynchronousTestCase

ROOT = SETUP.parent
QUALITY = ROOT / "docs" / "reference-quality.md"


def setup() -> configparser.ConfigParser:
    """Return the project's settings."""
    found = configparser.ConfigParser(interpolation=None)
    found.read(SETUP)
    return found


def oldest() -> str:
    """Return the oldest Python, such as ``3.10``."""
    return setup()["options"]["python_requires"].removeprefix(">= ")


def promised() -> list[str]:
    """Return the Pythons that are named, oldest first."""
    lines = setup()["metadata"]["classifiers"].splitlines()
    return [line.rpartition(" ")[2] for line in lines if re.search(r":: 3\.\d+$", line)]


def too_new(text: str) -> Iterator[int]:
    """
    Yield the lines of comprehensions that wait, inside another one, which does not itself wait.

    Python 3.10 compiles none of them; parsers and linters let them pass.
    """
    inner = (ast.ListComp, ast.SetComp, ast.DictComp)
    for outer in ast.walk(ast.parse(text)):
        if isinstance(outer, (*inner, ast.GeneratorExp)):
            for node in ast.walk(outer):
                if node is not outer and isinstance(node, inner) and _waits(node):
                    yield node.lineno


def _waits(node: ast.ListComp | ast.SetComp | ast.DictComp) -> bool:
    return any(each.is_async for each in node.generators) or any(
        isinstance(each, ast.Await) for each in ast.walk(node)
    )


class PythonTests(SynchronousTestCase):
    """Which Pythons it runs on."""

    def test_one_oldest(self) -> None:
        """What is installed, checked, formatted, chosen and written down has the same oldest Python."""
        self.assertEqual(promised()[0], oldest())
        self.assertEqual(setup()["mypy"]["python_version"], oldest())
        short = oldest().replace(".", "")
        self.assertIn(f'target-version = "py{short}"', (ROOT / "pyproject.toml").read_text())
        chosen = (ROOT / "misc" / "fastest-python.sh").read_text()
        self.assertIn(f"sys.version_info >= ({oldest().replace('.', ', ')})", chosen)
        self.assertIn(f"Python {oldest()},", (ROOT / "README.md").read_text())
        self.assertIn(f"Python {oldest()} or", (ROOT / "docs" / "tutorial.md").read_text())

    def test_each_was_run(self) -> None:
        """``make pythons`` tries just those that are named, and the documentation tells what was run."""
        tried = re.findall(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        self.assertEqual(tried, [" ".join(f"python{each}" for each in promised())])
        rows = re.findall(r"^\| all tests on Python (3\.\d+) \|", QUALITY.read_text(), re.MULTILINE)
        self.assertEqual(rows, promised())

    def test_the_oldest_compiles_it(self) -> None:
        """No comprehension waits inside another one, which only Python 3.11 and later allow."""
        found = [
            f"{path.relative_to(ROOT)}:{line}"
            for where in ("src", "misc", "tests")
            for path in sorted((ROOT / where).rglob("*.py"))
            if "await " in (text := path.read_text("utf-8")) or "async for" in text
            for line in too_new(text)
        ]
        self.assertEqual(found, [])

    def test_what_it_does_not_compile(self) -> None:
        """Awaiting, and iterating over what comes later, in lists, sets and dictionaries."""
        for inner in ("[await f(x) for x in y]", "{x async for x in y}", "{x: await x for x in y}"):
            self.assertEqual(list(too_new(f"async def g():\n    [{inner} for y in z]")), [2])
            self.assertEqual(list(too_new(f"async def g():\n    return {inner}")), [])
        later = "async def g():\n    [(await x for x in y) for y in z]"
        self.assertEqual(list(too_new(later)), [])


class LowestTests(SynchronousTestCase):
    """``misc/lowest.py``, which ``make lowest`` installs by."""

    def test_all_that_is_needed(self) -> None:
        """Every dependency has a bound in ``setup.cfg``, and the constraint is just that."""
        needed = [each for each in setup()["options"]["install_requires"].splitlines() if each]
        self.assertEqual(requirements([]), needed)
        found = list(lowest(needed))
        self.assertEqual(
            [each.replace("==", " >= ") for each in found],
            [re.sub(r"\[.*\]|, <.*", "", each) for each in needed],
        )
        self.assertIn("twisted==23.10", found)

    def test_extras(self) -> None:
        """Those of extras come with them, once, and what has no bound is not constrained."""
        more = requirements(["mirror", "speedtest", "test"])
        self.assertEqual(len(more), len(set(more)))
        self.assertIn("types-PyYAML", more)
        found = list(lowest(more))
        self.assertIn("numpy==" + setup()["options.extras_require"]["mirror"].split()[-1], found)
        self.assertFalse([each for each in found if each.startswith("types-")])
        self.assertRaises(KeyError, requirements, ["nothing"])

    def test_what_has_no_oldest(self) -> None:
        """A requirement of another form is an error: it would be left out of what is tried."""
        for wrong in ("attrs > 22", "attrs < 24, >= 22", "attrs >= 22; python_version < '3.11'"):
            self.assertRaises(ValueError, list, lowest([wrong]))


class NewestTests(SynchronousTestCase):
    """What is not promised to stay as it is, is not used in releases that nobody has tried."""

    def bounded(self) -> set[str]:
        """Return the dependencies for which a newest version is named, in small letters."""
        config = setup()
        lines = config["options"]["install_requires"].splitlines()
        lines += config["options.extras_require"]["invite"].splitlines()
        return {re.split(r"[ \[]", line)[0].lower() for line in lines if "<" in line}

    def test_libraries_of_which_private_names_are_used(self) -> None:
        """Modules and names that begin with an underscore; and those that these are looked up in."""
        packages = {"attr": "attrs", "OpenSSL": "pyopenssl", "wormhole": "magic-wormhole"}
        found = {"attrs", "foolscap", "pyopenssl", "twisted"}  # also in other ways than by import
        for path in (ROOT / "src").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.ImportFrom) or node.module is None:
                    continue
                names = [*node.module.split("."), *(each.name for each in node.names)]
                private = any(re.match("_[a-z]", name, re.IGNORECASE) for name in names)
                if private and names[0] not in sys.stdlib_module_names | {"pipegrid", "__future__"}:
                    found.add(packages.get(names[0], names[0]))
        self.assertEqual(found - self.bounded(), set())

    def test_the_bounds_are_told(self) -> None:
        """The page on quality has each, as ``setup.cfg`` has it."""
        text = (ROOT / "docs" / "reference-quality.md").read_text()
        for line in setup()["options"]["install_requires"].splitlines():
            name, _, bound = line.partition(", <")
            if bound:
                shown = re.split(r"[ \[]", name)[0]
                self.assertIn(f"{shown} <{bound}".lower(), text.lower())
