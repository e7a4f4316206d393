"""Completion in real shells: what docs/reference-cli.md says to type is typed, and then Tab."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.cli.pty import OnTerminal, TerminalTestCase

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference-cli.md"

COMPLETED = (
    # What is typed before Tab, and what stands there afterwards.
    ("pipegrid statu", "pipegrid status "),
    # ("pipegrid ren", "pipegrid renew "),
    ("pipegrid put --seg", "pipegrid put --segment-size "),
    ("pipegrid -q check --veri", "pipegrid -q check --verify "),
    ("pipegrid put holi", "pipegrid put holiday.jpg "),
    # ("pipegrid get --cap-file my-c", "pipegrid get --cap-file my-caps "),
    ("pipegrid get -o holi", "pipegrid get -o holiday.jpg "),
    ("pipegrid -d dire", "pipegrid -d directory/"),
    ("pipegrid serve --durability ba", "pipegrid serve --durability batch "),
    ("pipegrid speedtest comp", "pipegrid speedtest compare "),
    ("pipegrid speedtest --roun", "pipegrid speedtest --rounds "),
    ("pipegrid speedtest --link wan --roun", "pipegrid speedtest --link wan --rounds "),
)

LISTED = "pipegrid "
"""Behind this Tab shows all commands."""


def documented(shell: str) -> str:
    """Return the line with which the page has completion set up."""
    found = re.findall(
        rf"^(.*_PIPEGRID_COMPLETE={shell}_source.*?)(?:  +#.*)?$", PAGE.read_text(), re.M
    )
    assert len(found) == 1, found
    line: str = found[0]
    return line


class CompletionTestCase(TerminalTestCase):
    """What holds for every shell."""

    shell: Sequence[str] = ()
    before = ""
    clear_line = "\x15"

    def setUp(self) -> None:
        super().setUp()
        (self.home / "holiday.jpg").touch()
        (self.home / "my-caps").touch()
        (self.home / "directory").mkdir()

    def start(self) -> OnTerminal:
        """Return the shell with completion set up as the page says."""
        terminal = self.on_terminal(*self.shell)
        for line in (self.before, documented(Path(self.shell[0]).name), "echo rea''dy"):
            if line:
                terminal.send(f"{line}\r")
        terminal.wait_until(lambda seen: "ready" in seen.lines)
        return terminal

    def check_all(self) -> None:
        """Everything in the table is completed, and all commands are listed."""
        terminal = self.start()
        for typed, whole in COMPLETED:
            terminal.send(f"{typed}\t")
            terminal.wait_for(whole.rstrip())
            terminal.send("Z")  # a letter behind it tells where the cursor is
            terminal.wait_for(f"{whole}Z")
            self.assertNotIn("nobody foresaw", terminal.text)
            self.assertNotIn("Usage:", terminal.text)
            terminal.send(self.clear_line)
        terminal.send(f"{LISTED}\t\t")
        terminal.wait_for("storage-index")
        terminal.wait_for("speedtest")


class BashTests(CompletionTestCase):
    """bash."""

    shell = ("bash", "--norc", "--noprofile", "-i")

    def test_completion(self) -> None:
        """Commands, options and files."""
        self.check_all()


class ZshTests(CompletionTestCase):
    """zsh."""

    shell = ("zsh", "-f", "-i")
    before = "PS1='$ '; autoload -Uz compinit; compinit -u"

    def test_completion(self) -> None:
        """Commands, options and files."""
        self.check_all()


class FishTests(CompletionTestCase):
    """fish."""

    shell = ("fish", "--no-config", "--interactive")
    before = "function fish_prompt; echo '$ '; end; set -g fish_autosuggestion_enabled 0"

    def test_completion(self) -> None:
        """Commands, options and files."""
        self.check_all()
