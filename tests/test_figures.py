"""``misc.figures``: the tables of promises are current, and commands append what they measure."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import attrs
from misc import figures
from misc.figures import BEGIN, END, PAGES, Figure, Promise
from twisted.trial.unittest import SynchronousTestCase

DOCS = Path(__file__).parent.parent / "docs"
MAKEFILE = DOCS.parent / "Makefile"
CONTRIBUTING = DOCS.parent / "CONTRIBUTING.md"
ONE = Promise(
    "one", PAGES[0], "a put: at most 2 s", "make it", (Figure("1 s", "yes", "abc", "2026-01-01"),)
)


class PagesTests(SynchronousTestCase):
    """``docs/figures.json`` and the pages that are made from it."""

    def test_tables_are_current(self) -> None:
        """Else: python -m misc.figures --write"""
        promises = figures.load()
        for name in PAGES:
            text = (DOCS / f"{name}.md").read_text("utf-8")
            self.assertEqual(
                figures.page(text, name, promises), text, "python -m misc.figures --write"
            )

    def test_the_file_is_as_it_is_written(self) -> None:
        """What a command appends changes nothing else; every figure has a commit and a date."""
        path = Path(self.mktemp())
        figures.save(figures.load(), path)
        self.assertEqual(path.read_text("utf-8"), figures.FILE.read_text("utf-8"))
        for each in figures.load():
            for one in each.figures:
                self.assertRegex(f"{one.commit} {one.date}", r"^[0-9a-f]{7,}\+? \d{4}-\d\d-\d\d$")

    def test_commands_exist(self) -> None:
        """Each promise is measured by a target of make, a module of ours or of trial, or the program."""
        targets = re.search(r"^\.PHONY: (.*)$", MAKEFILE.read_text("utf-8"), re.MULTILINE)
        assert targets is not None
        for each in figures.load():
            first, second, *rest = each.command.split()
            if first == "make":
                self.assertIn(second, targets[1].split(), each.name)
            elif [first, second] == ["python", "-m"] and rest[0].startswith("misc."):
                path = DOCS.parent / rest[0].replace(".", "/")
                self.assertTrue(path.with_suffix(".py").exists() or path.is_dir(), each.name)
            else:
                self.assertIn(first, ("python", "pipegrid"), each.name)
            if each.reads is not None:
                self.assertTrue(
                    {"status"} <= set(each.reads) or {"median", "unit"} <= set(each.reads)
                )

    def test_a_page_without_a_place_is_an_error(self) -> None:
        """As is a verdict that is none, and a name that two have."""
        self.assertRaises(ValueError, figures.page, "# Page\n", PAGES[0], [ONE])
        path = Path(self.mktemp())
        for wrong in ([ONE, ONE], [attrs.evolve(ONE, page="other")]):
            figures.save(wrong, path)
            self.assertRaises(ValueError, figures.load, path)

    def test_a_row(self) -> None:
        """The latest figure is shown; what is not kept, or was never measured, stands out."""
        self.assertEqual(ONE.row(), "| a put: at most 2 s | `make it` | 1 s, 2026-01-01 | yes |\n")
        self.assertIn("| **not measured** |", attrs.evolve(ONE, figures=()).row())


class MakeTests(SynchronousTestCase):
    """What measures, in the Makefile and in CONTRIBUTING.md."""

    def dry_run(self, *arguments: str) -> str:
        """Return the commands that ``make`` would run."""
        done = subprocess.run(
            ["make", "-n", "CHECKED=1", "PYTHON=python3", *arguments],
            cwd=MAKEFILE.parent,
            env={**os.environ, "MAKEFLAGS": ""},
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_each_target_runs_its_modules(self) -> None:
        """With its options and those of the caller; or through what appends figures."""
        text = MAKEFILE.read_text("utf-8")
        found = re.findall(r"^measure\.(\S+) := (.*) ## \w", text, re.MULTILINE)
        [names] = re.findall(r"^MEASURE := (.*)$", text, re.MULTILINE)
        self.assertEqual([name for name, _ in found], names.split())
        for name, modules in found:
            said = self.dry_run(name, "ARGS=--seed 7")
            for module in modules.split():
                self.assertRegex(said, rf"python -m +{module}\s[^\n]*(\\\n[^\n]*)*--seed 7\n", name)
        recorded = self.dry_run("links", "RECORD=1")
        self.assertIn("python -m misc.figures --record misc.speedtest.links_check", recorded)

    def test_help_has_a_line_for_each_target(self) -> None:
        """Except those that others call."""
        said = subprocess.run(
            ["make", "--no-print-directory", "help"],
            cwd=MAKEFILE.parent,
            env={**os.environ, "MAKEFLAGS": ""},
            capture_output=True,
            text=True,
        )
        [phony] = re.findall(r"^\.PHONY: (.*)$", MAKEFILE.read_text("utf-8"), re.MULTILINE)
        lines = [line.split()[0] for line in said.stdout.splitlines() if len(line.split()) > 1]
        self.assertEqual(
            sorted(lines), sorted(set(phony.split()) - {"run-module", "prerequisites"})
        )

    def test_the_table_lists_every_program(self) -> None:
        """Each module of misc/ that measures or soaks and is run by its name."""
        text = CONTRIBUTING.read_text("utf-8")
        for folder in ("soak", "speedtest"):
            for path in sorted((MAKEFILE.parent / "misc" / folder).rglob("*.py")):
                if "__name__ ==" in path.read_text("utf-8") and path.stem not in ("relay", "nodes"):
                    module = ".".join(path.relative_to(MAKEFILE.parent).with_suffix("").parts)
                    self.assertIn(f"`{module.removesuffix('.__main__')}`", text)


class RecordTests(SynchronousTestCase):
    """What commands print becomes figures."""

    def test_lines_of_json_are_judged(self) -> None:
        """By the median; a round that breaks the limit makes it barely."""
        reads = {
            "match": {"name": "put"},
            "median": "median",
            "low": "spread.0",
            "high": "spread.1",
            "unit": "s",
            "at_most": 2,
        }
        line = {"name": "put", "median": 1.5, "spread": [1.0, 1.8]}
        self.assertEqual(figures.judge(line, reads), ("1.5 (1 to 1.8) s", "yes"))
        self.assertEqual(
            figures.judge(line | {"spread": [1.0, 2.1]}, reads), ("1.5 (1 to 2.1) s", "barely")
        )
        self.assertEqual(
            figures.judge(line | {"median": 2.1}, reads | {"at_most": 2.0}),
            ("2.1 (1 to 1.8) s", "no"),
        )
        self.assertIsNone(figures.judge(line | {"name": "get"}, reads))
        self.assertIsNone(figures.judge({"name": "put"}, reads))

    def run_on(self, promise: Promise, *arguments: str) -> tuple[Promise, str]:
        """Run the command with a file that has this promise alone; returns it, and its page."""
        docs = Path(self.mktemp())
        docs.mkdir()
        for name in PAGES:
            (docs / f"{name}.md").write_text(f"# Page\n\n{BEGIN}{END}")
        figures.save([promise], docs / "figures.json")
        self.assertEqual(figures.main(arguments, io.StringIO(), docs / "figures.json"), 0)
        [after] = figures.load(docs / "figures.json")
        return after, (docs / f"{PAGES[0]}.md").read_text("utf-8")

    def test_a_command_appends(self) -> None:
        """It is run, its figure is appended with today's commit, and the page shows it."""
        reads = {
            "module": "misc.speedtest.startup",
            "match": {"scenario": "startup"},
            "median": "ratio.median",
            "unit": "times",
            "at_most": 1000,
            "json": True,
        }
        if shutil.which("git") is None:
            raise self.skipTest("there is no git")
        promise = attrs.evolve(ONE, reads=reads)
        arguments = ("--record", "misc.speedtest.startup", "--pairs", "1")
        after, page = self.run_on(promise, *arguments)
        self.assertEqual(len(after.figures), 2)
        self.assertRegex(after.figures[-1].figure, r"^[\d.]+ times `--pairs 1`$")
        self.assertIn(f"| {after.figures[-1].figure}, {after.figures[-1].date} |", page)

    def test_a_status_is_a_figure(self) -> None:
        """Of commands that hold or do not; another status means that nothing was tried."""
        promise = attrs.evolve(ONE, reads={"module": "misc.attack", "status": "held"})
        after, _ = self.run_on(promise, "--record", "misc.attack", "--list")
        self.assertEqual(
            (after.figures[-1].figure, after.figures[-1].kept), ("held `--list`", "yes")
        )
        after, _ = self.run_on(promise, "--record", "misc.attack", "--wrong")
        self.assertEqual(len(after.figures), 1)

    def test_a_figure_by_hand(self) -> None:
        """What only a person can read off."""
        after, page = self.run_on(ONE, "--add", "one", "3 s", "no")
        self.assertEqual((after.figures[-1].figure, after.figures[-1].kept), ("3 s", "no"))
        self.assertIn("| 3 s, ", page)
        self.assertIn("| **no** |", page)
        self.assertEqual(json.dumps(after.reads), "null")
