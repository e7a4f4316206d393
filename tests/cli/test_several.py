"""Commands with several arguments: one that is bad never stops the others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.command_grammar import pipegrid
from tests.cli.processes import ProcessTestCase
from tests.cli.support import Run

DAMAGED = "URI:CHK:damaged"


class UnreadableFileTests(SynchronousTestCase):
    """The parser asks no file whether it may be read: the command names it, and does the rest."""

    def test_put(self) -> None:
        """The others are stored; of a file without read permission the parser knows nothing."""
        self.patch(os, "access", lambda path, *_, **__: "unreadable" not in str(path))
        home = Path(self.mktemp())
        home.mkdir()
        paths = [home / name for name in ("a.txt", "unreadable.txt", "b.txt")]
        for path in paths:
            path.write_text(path.name)
        run = Run("put", *map(str, paths))
        self.assertEqual(self.successResultOf(run.finished), 0, run.stderr)
        self.assertEqual(run.stdout.count("URI:LIT:"), 3)

    def test_all_commands(self) -> None:
        """No argument and no option of files has the parser look whether they may be read."""
        for name, command in _commands(pipegrid, click.Context(pipegrid)):
            for each in command.params:
                if isinstance(each.type, click.Path) and not each.type.exists:
                    self.assertFalse(each.type.readable, (name, each.name))


def _commands(group: click.Group, context: click.Context) -> list[tuple[str, click.Command]]:
    found: list[tuple[str, click.Command]] = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found.append((name, command))
        if isinstance(command, click.Group):
            found += _commands(command, context)
    return found


class SeveralTests(ProcessTestCase):
    """Whole commands, on a grid that the first of them makes."""

    def setUp(self) -> None:
        super().setUp()
        for name in ("one", "two", "d/inner"):
            path = self.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name * 100)
        self.run_command("alias", "create", "home")

    def listed(self, path: str = "home:") -> list[str]:
        """Return what ``ls -R`` shows."""
        return self.run_command("ls", "-R", path)[0].split()

    def failing(self, *arguments: str, said: tuple[str, ...]) -> str:
        """Run a command of which some arguments are bad; returns what it printed."""
        out, err = self.run_command(*arguments, status=1)
        for each in said:
            self.assertIn(each, err)
        return out

    def test_cp_to_the_grid(self) -> None:
        """What is missing, a directory without -r, a name that is taken: each is named."""
        self.run_command("cp", "two", "home:")
        said = ("no local file none", "'d' is a directory; add -r", "'two' exists already", "'one'")
        self.failing(
            "cp", "none", "d", "two", "home:nothing", "one", "d/../one", "home:", said=said
        )
        self.assertEqual(self.listed(), ["one", "two"])
        out = self.failing("--json", "cp", "none", "one", "home:new", said=("none",))
        found = [json.loads(line) for line in out.splitlines()]
        self.assertEqual([each.get("exit_status") for each in found], [1, None])

    def test_cp_only_bad_ones(self) -> None:
        """If none can be copied, nothing is made."""
        self.failing("cp", "none", "nil", "home:new", said=("none", "nil"))
        self.assertEqual(self.listed(), [])

    def test_cp_from_the_grid(self) -> None:
        """The rest comes."""
        self.run_command("cp", "-r", "one", "two", "d", "home:")
        self.failing("cp", "home:none", "home:d", "home:one", "here", said=("'none'", "add -r"))
        self.assertEqual(os.listdir(self.home / "here"), ["one"])

    def test_caps(self) -> None:
        """A damaged cap among several, also in a cap file."""
        cap, _ = self.run_command("put", "one")
        (self.home / "caps").write_text(f"{DAMAGED}\n{cap}  first\nhome:none\n")
        said = ("caps:1: ", "copy it whole", "'none'")
        for command in ("check", "renew", "repair"):
            self.assertIn("first: ", self.failing(command, "--cap-file", "caps", said=said))
        self.failing("get", "--cap-file", "caps", "-o", "out", said=said)
        self.assertEqual(os.listdir(self.home / "out"), ["first"])
        out = self.failing("storage-index", DAMAGED, cap, said=("cap number 1: ",))
        self.assertEqual(len(out), 26)
        _, err = self.run_command("check", DAMAGED, DAMAGED + "x", status=2)
        self.assertIn("cap number 1: ", err)

    def test_rm_du_mkdir(self) -> None:
        """They take several paths."""
        self.run_command("mkdir", "home:x", "home:y/z")
        self.run_command("cp", "-r", "one", "two", "d", "home:x")
        out = self.failing("du", "-s", "home:x", "home:none", "home:y", said=("'none'",))
        self.assertEqual(out.split(), ["1300", "home:x", "0", "home:y"])
        said = ("'none'", "'d' is a directory")
        self.failing("rm", "home:x/none", "home:x/d", "home:x/one", said=said)
        self.assertEqual(self.listed("home:x"), ["d/", "d/inner", "two"])
        self.failing("mkdir", "home:x/two", "home:new", said=("'two'",))
        self.assertIn("new/", self.listed())

    def test_more_shares_than_servers(self) -> None:
        """Every command that makes them warns, once, and ``init`` does."""
        said = "99 shares of a file on 10 servers: some servers hold several"
        (self.home / "d/more").write_text("more" * 100)
        for words in (("put", "-n", "99", "one", "two"), ("put", "-r", "-n", "99", "d")):
            _, err = self.run_command(*words)
            self.assertEqual(err.count(said), 1, err)
        _, err = self.run_command("put", "one")
        self.assertEqual(err, "")
        _, err = self.run_command("init", "-n", "99")
        self.assertIn(said, err)
        for more in (("mkdir",), ("backup", "d"), ("put", "--mutable", "one")):
            _, err = self.run_command(*more)
            self.assertEqual(err.count(said), 1, err)

    def test_mv_ln(self) -> None:
        """They take several to a directory."""
        self.run_command("mkdir", "home:x")
        self.run_command("cp", "one", "two", "home:")
        self.failing("ln", "home:none", "home:one", "home:two", "home:x", said=("'none'",))
        self.assertEqual(self.listed("home:x"), ["one", "two"])
        self.run_command("mkdir", "home:y")
        self.failing("mv", "home:none", "home:one", "home:two", "home:y", said=("'none'",))
        self.assertEqual(self.listed(), ["x/", "x/one", "x/two", "y/", "y/one", "y/two"])
        for command in ("mv", "ln"):
            _, err = self.run_command(command, "home:x/one", "home:x/two", "home:new", status=2)
            self.assertIn("more than one thing goes into a directory", err)
