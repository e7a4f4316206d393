"""
The examples in the documentation work.

A ``console`` block is a session: lines after ``$ `` are commands, what follows is their output, stderr
included, where ``...`` stands for anything. A ``python NAME`` or ``ini NAME`` block is saved under that
name for the commands behind it. Each page runs in one shell, in a scratch directory that is also its home.
On most pages the shell's ``pipegrid`` has a process forked (``tests.forked``); on those in ``FRESH`` it
begins one itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.forked import client

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FRESH = (
    "README",
    "how-to-gateway",
    "how-to-introducer",
    "how-to-library",
    "how-to-share-a-folder",
    "how-to-speedtest",
    "how-to-web-interface",
    "tutorial",
    "tutorial-grid-for-three-friends",
)
"""What people meet first, and what begins processes itself."""

_BLOCK = re.compile(r"^```(console|(?:ini|python) \S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
_ANCHORED = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_MARK = "--- end of command ---"


def commands(page: Path) -> list[tuple[str, str]]:
    """Return the commands of a page, each with the output that it shows."""
    found: list[tuple[str, str]] = []
    for kind, body in _BLOCK.findall(page.read_text("utf-8")):
        if kind != "console":
            found.append((f"cat > {kind.split()[1]} <<'END OF FILE'\n{body}END OF FILE", ""))
            continue
        for line in body.splitlines(keepends=True):
            if line.startswith("$ "):
                found.append((line[2:].rstrip("\n"), ""))
            else:
                command, output = found.pop()
                found.append((command, output + line))
    return found


def matches(expected: str, actual: str) -> bool:
    """Return whether the output is as shown; a line of three dots stands for any lines, or none."""
    pattern = re.escape(expected.strip() + "\n")
    pattern = re.sub(r"^\\\.\\\.\\\.\\?\n", "(?:.*\n)*?", pattern, flags=re.MULTILINE)
    pattern = pattern.replace(r"\.\.\.", ".*?")
    return re.fullmatch(pattern, actual.strip() + "\n") is not None


def anchors(text: str) -> set[str]:
    """Return what links can name in a page: its headings, as GitHub makes anchors of them."""
    found: set[str] = set()
    for heading in _HEADING.findall(text):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = 0
        while (unique := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(unique)
    return found


class DocsTests(SynchronousTestCase):
    """What the pages show is what happens."""

    def setUp(self) -> None:
        self.home = Path(self.mktemp()).absolute()
        programs = self.home / "bin"
        programs.mkdir(parents=True)
        self.environment = {
            "HOME": str(self.home),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONWARNINGS": "ignore",
            "LC_ALL": "C.UTF-8",
        }
        self.add_program("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')

    def add_program(self, name: str, script: str) -> None:
        """Let the shell find it."""
        program = self.home / "bin" / name
        program.write_text(script)
        program.chmod(0o755)

    def run_page(self, page: Path) -> None:
        """Run all commands of a page and compare what they print."""
        script = f'#!/bin/sh\nexec "{sys.executable}" -m pipegrid.cli "$@"\n'
        if page.stem not in FRESH:
            script = client.script(self.environment, "pipegrid.cli")
        self.add_program("pipegrid", script)
        session = commands(page)
        script = "".join(
            f"{command}\n(s=$?; echo; echo '{_MARK}'; exit $s)\n" for command, _ in session
        )
        done = subprocess.run(
            ["bash", "-c", f"exec 2>&1\n{script}"],
            cwd=self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=100,
        )
        outputs = done.stdout.split(f"\n{_MARK}\n")
        for (command, expected), output in zip(session, outputs, strict=False):
            if not matches(expected, output):
                self.fail(f"{page.name}\n$ {command}\n{output}\ninstead of\n{expected}")
        self.assertEqual(len(outputs), len(session) + 1)

    def test_links_lead_somewhere(self) -> None:
        """Every relative link in every page is to a file that exists."""
        broken = [
            f"{page.name}: {target}"
            for page in PAGES
            for target in _LINK.findall(page.read_text("utf-8"))
            if not (page.parent / target).exists()
        ]
        self.assertEqual(broken, [])

    def test_links_lead_to_a_heading(self) -> None:
        """Every link with an anchor names a heading of the page to which it leads."""
        broken = [
            f"{page.name}: {target}#{anchor}"
            for page in PAGES
            for target, anchor in _ANCHORED.findall(page.read_text("utf-8"))
            if (anchored := page.parent / target if target else page).suffix == ".md"
            and anchor not in anchors(anchored.read_text("utf-8"))
        ]
        self.assertEqual(broken, [])
        self.assertEqual(
            anchors("# `a b` *c*: d's\n## A\n## A\n### init [-n N]"),
            {"a-b-c-ds", "a", "a-1", "init--n-n"},
        )

    def test_output_that_differs_is_noticed(self) -> None:
        """The comparison can fail."""
        self.assertTrue(matches("a ... c\n...\nz\n", "a b c\n1\n2\nz\n"))
        self.assertTrue(matches("a\n...\nz\n", "a\nz\n"))
        self.assertFalse(matches("a\nz\n", "a\nb\nz\n"))
        self.assertFalse(matches("", "Traceback"))


def _add_tests() -> None:
    for page in PAGES:
        if commands(page):
            name = re.sub(r"\W", "_", page.stem).lower()

            def test(self: DocsTests, page: Path = page) -> None:
                self.run_page(page)

            test.__doc__ = f"The examples in {page.name} work."
            setattr(DocsTests, f"test_{name}", test)


_add_tests()
