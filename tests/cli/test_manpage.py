"""The manual page: it says what ``--help`` says, and ``man`` shows it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import click
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli import manpage
from pipegrid.cli.command_grammar import COMMANDS, pipegrid

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
