"""The manual page: it says what ``--help`` says, is in the wheel, and ``man pipegrid`` shows it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import click
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli import manpage
from pipegrid.cli.app import COMMANDS, pipegrid
from tests.test_packaging import copied

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "man" / "pipegrid.1"


class ManPageTests(SynchronousTestCase):
    """``man/pipegrid.1``."""

    def show(self, *command: str, **environment: str) -> str:
        """Return what a pager would get, without overstrikes and hyphens of the page's width."""
        done = subprocess.run(
            command,
            env={
                **os.environ,
                "LC_ALL": "C.UTF-8",
                "MANWIDTH": "500",
                "MAN_KEEP_FORMATTING": "",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return " ".join(re.sub(".\b", "", done.stdout).split())

    def test_it_is_current(self) -> None:
        """If not: ``make manpage``."""
        self.assertEqual(PAGE.read_text("utf-8"), manpage.page())

    def test_man_and_mandoc_show_it(self) -> None:
        """Every command and every option with its help, without a warning."""
        plain = ("mandoc", "-T", "utf8", "-O", "width=500", str(PAGE))
        for command in (("man", "--warnings", "-l", str(PAGE)), plain):
            shown = self.show(*command).replace("‐ ", "").replace("’", "'").replace("‘", "'")
            for name in COMMANDS:
                self.assertIn(f" {name} ", shown)
                one = pipegrid.get_command(click.Context(pipegrid), name)
                assert one is not None
                for option in one.params:
                    if isinstance(option, click.Option):
                        words = " ".join((option.help or "").split())[:50]
                        self.assertIn(words, shown, (command, name, option.name))

    def test_man_finds_it_beside_the_program(self) -> None:
        """
        As pip installs it: what the wheel has under ``share/man`` comes beside the program's ``bin``.

        The wheel is built from what the container's is, and has all that is in ``src``.
        """
        home = Path(self.mktemp()).absolute()
        tree, wheels, there = home / "tree", home / "wheels", home / "there"
        tree.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "dropin.cache")
        for name in copied():
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, tree)
        sources = [path.relative_to(tree / "src") for path in (tree / "src").rglob("*.*")]
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
        offline = ("--disable-pip-version-check", "--no-index")
        subprocess.run([*pip, *offline, "-w", str(wheels), str(tree)], check=True, timeout=100)
        (wheel,) = wheels.iterdir()
        with zipfile.ZipFile(wheel) as archive:
            self.assertEqual({str(path) for path in sources} - set(archive.namelist()), set())
            (member,) = [name for name in archive.namelist() if name.endswith("/pipegrid.1")]
            self.assertRegex(member, r"^pipegrid-[^/]*\.data/data/share/man/man1/pipegrid\.1$")
            archive.extract(member, home)
        shutil.move((home / member).parents[2], there / "share")
        (there / "bin").mkdir(exist_ok=True)
        path = f"{there / 'bin'}:{os.environ['PATH']}"
        shown = self.show("man", "pipegrid", PATH=path, MANPATH="")
        self.assertIn("store files on grids of storage servers", shown)
