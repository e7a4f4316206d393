"""Completion in real shells: what docs/reference-cli.md says to type is typed, and then Tab."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cli.pty import OnTerminal, TerminalTestCase
from tests.forked import client

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

NAMES = {
    # In the directory behind the alias, and what is in them.
    "my fileOne": "one",
    "it's fileTwo": "two",
    'say "fileThree': "three",
    "$(touch pwned) fileFour": "four",
    "`touch pwned` fileFive": "five",
    "that's fileSix": "six",
    "sub dir/deep fileSeven": "seven",
    "sub dir/plain fileEight": "eight",
}

BEHIND_AN_ALIAS = (
    # Words, each in steps: what is typed before Tab, and what then stands there once more.
    ((("work:m", "fileOne"),), "one"),
    ((("work:it", "fileTwo"),), "two"),
    ((("work:sa", "fileThree"),), "three"),
    ((("work:\\$", "fileFour"),), "four"),
    ((("'work:`", "fileFive"),), "five"),
    ((('"work:th', "fileSix"),), "six"),
    ((("'work:sub d", "dir/"), ("d", "fileSeven")), "seven"),
    ((("work:sub\\ dir/p", "fileEight"),), "eight"),
)

LOCAL = (
    ("loc", "fileNine"),
    ("'loc", "fileNine"),
    ('"loc', "fileNine"),
    ("with\\ blank/i", "fileTen"),
    ("'with blank/i", "fileTen"),
    ('"with blank/i', "fileTen"),
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

    def start(self, columns: int = 80) -> OnTerminal:
        """Return the shell with completion set up as the page says."""
        terminal = self.on_terminal(*self.shell, columns=columns)
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
            self.assertNotIn("failed unexpectedly", terminal.text)
            self.assertNotIn("Usage:", terminal.text)
            terminal.send(self.clear_line)
        terminal.send(f"{LISTED}\t\t")
        terminal.wait_for("storage-index")
        terminal.wait_for("speedtest")

    def make_grid(self) -> None:
        """A grid with names in it that shells take for more than they are."""

        def pipegrid(*argv: str) -> None:
            done = client.run(
                *("pipegrid.cli", "-q", *argv), cwd=self.home, env=self.environment, timeout=60
            )
            self.assertEqual(done.returncode, 0, done.stderr)

        pipegrid("init")
        pipegrid("alias", "create", "work")
        tree = self.home / "tree"
        for name, content in NAMES.items():
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"the content {content}\n")
        pipegrid("cp", "-r", *map(str, tree.iterdir()), "work:")
        shutil.rmtree(tree)

    def check_grid(self) -> None:
        """Names behind an alias become words that mean them, and so do local ones; none is carried out."""
        # What a Tab starts is forked: what shells make of its answers is the subject, and they ask often.
        forked = client.script(self.environment, "pipegrid.cli")
        (self.home / "bin" / "pipegrid").write_text(forked)
        self.make_grid()
        (self.home / "with blank").mkdir()
        for name in ("local fileNine", "with blank/inner fileTen"):
            (self.home / name).touch()
        terminal = self.start(columns=250)
        terminal.send("pipegrid cat ")
        for steps, _ in BEHIND_AN_ALIAS:
            for step in steps:
                self.complete(terminal, *step)
        terminal.send("\r")
        terminal.wait_until(lambda now: now.text.count("the content") == len(BEHIND_AN_ALIAS))
        found = re.findall("the content ([a-z]+)", terminal.text)
        self.assertEqual(found, [content for _, content in BEHIND_AN_ALIAS])
        terminal.send("pipegrid -q put -l ")
        for step in LOCAL:
            self.complete(terminal, *step)
        terminal.send("\r")
        terminal.wait_until(lambda now: now.text.count("URI:LIT") == len(LOCAL))
        terminal.send("pipegrid cp wo")
        self.complete(terminal, "", "work:")
        self.assertFalse((self.home / "pwned").exists())

    def complete(self, terminal: OnTerminal, typed: str, end: str) -> None:
        """Type this and Tab, which has to add what ends so."""
        seen = terminal.text.count(end)
        terminal.send(f"{typed}\t")
        terminal.wait_until(lambda now: now.text.count(end) > seen)


class BashTests(CompletionTestCase):
    """bash."""

    shell = ("bash", "--norc", "--noprofile", "-i")

    def test_completion(self) -> None:
        """Commands, options and files."""
        self.check_all()

    def test_names_on_a_grid(self) -> None:
        """What is behind an alias, and files of this machine, with blanks and quotes."""
        self.check_grid()


class ZshTests(CompletionTestCase):
    """zsh."""

    shell = ("zsh", "-f", "-i")
    before = "PS1='$ '; autoload -Uz compinit; compinit -u"

    def test_completion(self) -> None:
        """Commands, options and files."""
        self.check_all()

    def test_names_on_a_grid(self) -> None:
        """What is behind an alias, and files of this machine, with blanks and quotes."""
        self.check_grid()


class FishTests(CompletionTestCase):
    """fish."""

    shell = ("fish", "--no-config", "--interactive")
    before = "function fish_prompt; echo '$ '; end; set -g fish_autosuggestion_enabled 0"

    def test_completion(self) -> None:
        """Commands, options and files."""
        self.check_all()

    def test_names_on_a_grid(self) -> None:
        """What is behind an alias, and files of this machine, with blanks and quotes."""
        self.check_grid()


class InstallTests(TerminalTestCase):
    """``pipegrid completion --install``: what it says is done, and the next shell completes."""

    def setUp(self) -> None:
        super().setUp()
        self.environment |= {"XDG_DATA_HOME": str(self.home / ".local" / "share")}

    def install(self, shell: str, place: str) -> str:
        """Install it for a shell; returns the line that is still to be added, or nothing."""
        done = subprocess.run(
            [str(self.home / "bin" / "pipegrid"), "completion", "--install", shell],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual((done.returncode, done.stdout), (0, f"{self.home / place}\n"), done.stderr)
        self.assertEqual((self.home / place).stat().st_mode & 0o777, 0o644)
        return done.stderr.partition("; add this line to ")[2].rstrip("\n")

    def check(self, *shell: str) -> None:
        """A shell that is started now completes."""
        terminal = self.on_terminal(*shell)
        terminal.send("echo rea''dy\r")
        terminal.wait_until(lambda seen: "ready" in seen.text.split())
        terminal.send("pipegrid put --seg\t")
        terminal.wait_for("pipegrid put --segment-size")

    def add(self, told: str, name: str) -> None:
        """Add a line to a file, as was told."""
        whither, line = told.split(": ", 1)
        self.assertEqual(whither, f"~/{name}")
        with (self.home / name).open("a") as file:
            file.write(f"{line}\n")

    def test_bash_alone(self) -> None:
        """Without bash-completion it looks nowhere; the line that is printed reads the script."""
        told = self.install("bash", ".local/share/bash-completion/completions/pipegrid")
        self.add(told, ".bashrc")
        self.check("bash", "-i")

    def test_bash_completion(self) -> None:
        """It finds the script itself; nothing else is to be done."""
        (self.home / ".bashrc").write_text(". /usr/share/bash-completion/bash_completion\n")
        told = self.install("bash", ".local/share/bash-completion/completions/pipegrid")
        self.assertEqual(told, "")
        self.check("bash", "-i")

    def test_zsh_alone(self) -> None:
        """It has to be told where to look, and to complete at all."""
        (self.home / ".zshrc").touch()
        told = self.install("zsh", ".local/share/zsh/site-functions/_pipegrid")
        self.add(told, ".zshrc")
        self.check("zsh", "-i")

    def test_zsh_with_a_directory(self) -> None:
        """Where it looks below the home already, the script goes there."""
        (self.home / "func").mkdir()
        (self.home / ".zshrc").write_text(
            "echo noise; fpath=(~/func $fpath); autoload -Uz compinit; compinit -u\n"
        )
        self.assertEqual(self.install("zsh", "func/_pipegrid"), "")
        self.check("zsh", "-i")

    def test_fish(self) -> None:
        """It looks there always."""
        self.assertEqual(self.install("fish", ".config/fish/completions/pipegrid.fish"), "")
        self.check("fish", "--interactive")

    def test_the_shell_that_is_used(self) -> None:
        """Where none is named it is meant, and it is a mistake if there is no completion for it."""
        program = str(self.home / "bin" / "pipegrid")
        for shell, status in (("/usr/bin/fish", 0), ("/bin/csh", 2), ("", 2)):
            done = subprocess.run(
                [program, "completion"],
                env={**self.environment, "SHELL": shell},
                capture_output=True,
                text=True,
                timeout=60,
            )
            self.assertEqual(done.returncode, status, done.stderr)
            if status:
                self.assertEqual(done.stderr.splitlines()[-1].count("bash, zsh or fish"), 1)
            else:
                self.assertIn("complete --no-files --command pipegrid", done.stdout)
