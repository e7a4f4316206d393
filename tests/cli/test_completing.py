"""Completion without a terminal: words as shells take them, and what may not happen at Tab."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli import completion
from pipegrid.cli.completion import for_bash, split
from pipegrid.core.encoding_parameters import Params
from pipegrid.grid.client_creation import create_client
from tests.cli.pty import SOURCE

BREAKS = " \t\n\"'@><=;|&(:"
NASTY = (
    "plain",
    "two words",
    "it's",
    'say "so"',
    "$(touch pwned) `touch pwned` $HOME",
    "back\\slash\\",
    "line\nbreak\ttab\x1b[31m\x7f\x85",
    "bang!x!",
    "~;&|<>(){}[]*?#",
    "co:lon=@",
    "\u00e9\u202e\U0001f600",
    "'",
)


def common(items: list[str]) -> str:
    """Return how far all are alike."""
    first, last = min(items), max(items)
    return next((first[:at] for at in range(len(first), 0, -1) if last.startswith(first[:at])), "")


class WordsTests(SynchronousTestCase):
    """Lines and words."""

    def test_lines(self) -> None:
        """Words as the command would be given them, and the quote that is open."""
        for text, words, last, quote, kept in (
            ("pipegrid ls wo", ["pipegrid", "ls"], "wo", "", ""),
            ("pipegrid ls ", ["pipegrid", "ls"], "", "", ""),
            ("pipegrid ls work:a/b", ["pipegrid", "ls"], "work:a/b", "", "work:"),
            ("pipegrid ls 'work:it", ["pipegrid", "ls"], "work:it", "'", ""),
            ("pipegrid ls work:'it ", ["pipegrid", "ls"], "work:it ", "'", "work:"),
            ("pipegrid ls work:'a b'/c", ["pipegrid", "ls"], "work:a b/c", "", "work:"),
            ("pipegrid ls a\\:b\\ c", ["pipegrid", "ls"], "a:b c", "", ""),
            ('pipegrid ls "a\\"\\$b\\c', ["pipegrid", "ls"], 'a"$b\\c', '"', ""),
            ("pipegrid ls a$'\\x41\\n\\'", ["pipegrid", "ls"], "aA\n'", "$'", "a"),
            ("pipegrid ls $'\\u00e9' '' x\\", ["pipegrid", "ls", "\u00e9", ""], "x", "", ""),
            ("pipegrid -d '' ", ["pipegrid", "-d", ""], "", "", ""),
        ):
            self.assertEqual(tuple(split(text, BREAKS)), (words, last, quote, kept), text)

    def test_lines_of_fish(self) -> None:
        """Its single quotes know two escapes, and its escapes stand outside quotes."""
        for text, last, quote in (
            ("x 'it\\'s \\\\ \\n", "it's \\ \\n", "'"),
            ("x a\\n\\x41\\ ", "a\nA ", ""),
            ('x "a\\$\\`', "a$\\`", '"'),
            ("x $'a", "$a", "'"),
        ):
            line = split(text, fish=True)
            self.assertEqual((line.last, line.quote), (last, quote), text)

    def test_bash_understands(self) -> None:
        """Whatever a name is and whichever quote is open, bash makes of it what it is."""
        openings = ("", "'", '"', "$'")
        script = "set +H\n"
        for value in NASTY:
            for quote in openings:
                script += f"printf '%s\\0' {quote}{for_bash(value, quote, True)}\n"
        directory = self.mktemp()
        os.mkdir(directory)
        done = subprocess.run(
            ["bash", "--norc", "-c", script],
            capture_output=True,
            cwd=directory,
            env={"LC_ALL": "C.UTF-8", "PATH": os.environ["PATH"]},
            check=True,
        )
        found = done.stdout.decode().split("\0")[:-1]
        self.assertEqual(found, [value for value in NASTY for _ in openings])
        self.assertEqual(os.listdir(directory), [])


class NamesTests(SynchronousTestCase):
    """What is offered."""

    def setUp(self) -> None:
        self.home = Path(self.mktemp()).absolute()
        (self.home / "private").mkdir(parents=True)
        cap = f"URI:DIR2:{'a' * 26}:{'a' * 52}"
        (self.home / "private/aliases").write_text(f"work: {cap}\n")

    def ask(self, line: str, shell: str = "bash") -> tuple[str, float]:
        """Press Tab; returns the answer, with zero bytes as blanks, and how long it took."""
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pipegrid.cli"],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.home),
                "PIPEGRID_DIR": str(self.home),
                "PYTHONPATH": str(SOURCE),
                "_PIPEGRID_COMPLETE": f"{shell}_complete",
                "_PIPEGRID_LINE": line,
            },
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.assertEqual(done.stderr, "")
        return done.stdout.replace("\0", " ").strip(), time.monotonic() - began

    def files(self) -> list[tuple[str, bytes]]:
        """Return what is in the client's directory."""
        return [
            (str(path.relative_to(self.home)), path.read_bytes() if path.is_file() else b"")
            for path in sorted(self.home.rglob("*"))
        ]

    def test_nothing_is_configured(self) -> None:
        """Aliases are offered; no grid is made."""
        before = self.files()
        self.assertEqual(self.ask("pipegrid ls w")[0], "open work:")
        self.assertEqual(self.ask("pipegrid ls work:")[0], "")
        self.assertEqual(self.ask("pipegrid alias remove w")[0], "plain work")
        self.assertEqual(self.files(), before)

    def test_a_grid_that_is_out_of_reach(self) -> None:
        """Who waits at Tab does so for a few seconds; and nothing is said, or changed."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            server = {
                "ann": {"anonymous-storage-NURLs": [f"pb://{'A' * 43}@127.0.0.1:{port}/s#v=1"]}
            }
            create_client(
                self.home,
                params=Params(required_shares=1, total_shares=1),
                files={"private/servers.yaml": json.dumps({"storage": {"v0-server": server}})},
            )
            before = self.files()
            answer, took_s = self.ask("pipegrid --trace trace ls work:")
        self.assertEqual(answer, "")
        self.assertGreater(took_s, completion.LIMIT_S)  # it was asked
        self.assertLess(took_s, completion.LIMIT_S + 15)
        self.assertEqual(self.files(), before)

    def test_an_option_with_its_value(self) -> None:
        """The whole word is offered, to shells that replace all of it."""
        self.assertEqual(
            self.ask("pipegrid serve --durability=b", "zsh")[0], "plain --durability=batch"
        )
        self.assertEqual(
            self.ask("pipegrid serve --durability=b", "fish")[0], "+--durability=batch"
        )

    def test_behind_another_command(self) -> None:
        """``sudo`` and the like are passed over; a line that makes no sense is none."""
        self.assertEqual(self.ask("sudo -n /usr/bin/pipegrid ls w", "fish")[0], "+work:")
        self.assertEqual(self.ask("pipegrid nonsense w", "fish")[0], "")

    def test_the_directory_on_the_line(self) -> None:
        """It is the one whose aliases count, however it is written."""
        other = self.home / "other"
        (other / "private").mkdir(parents=True)
        (other / "private/aliases").write_text("elsewhere: URI:DIR2-LIT:\n")
        for written in ("other", "~/other", "$HOME/other", "${HOME}/other"):
            self.assertEqual(self.ask(f"pipegrid -d {written} ls ")[0], "open elsewhere:")

    def test_many(self) -> None:
        """Some hundred of many names, which are as far alike as all are."""
        all_names = [f"a{number:04}" for number in range(1000)] + ["bcd", "a/b\ud800"]
        found = [str(item.value) for item in completion._items("", all_names, "")]
        self.assertEqual(len(found), completion.MAX_NAMES)
        self.assertEqual(common(found), "")
        found = [str(item.value) for item in completion._items("work:", all_names, "a0")]
        self.assertEqual(common(found), common([f"work:a{n:04}" for n in range(1000)]))
