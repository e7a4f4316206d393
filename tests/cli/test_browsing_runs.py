"""Runs of backups as paths, searched and compared: as users meet them, in processes."""

from __future__ import annotations

import json
import shlex

from tests.cli.processes import ProcessTestCase


class RunsAsPathsTests(ProcessTestCase):
    """``NAME@TIME:path`` wherever a path is accepted."""

    def setUp(self) -> None:
        super().setUp()
        self.source = self.home / "my files"
        (self.source / "d").mkdir(parents=True)
        (self.source / "d/a").write_bytes(b"a" * 300)
        self.run_command("-q", "backup", "my files", "--as", "my files")

    def test_wherever_a_path_is_accepted(self) -> None:
        """What ``backups`` prints can be pasted; every command that reads takes it."""
        line = self.run_command("backups")[0]
        (pasted,) = shlex.split(line.partition("  ")[0])
        self.assertRegex(pasted, r"^my files@\S+Z:$")
        run = json.loads(self.run_command("--json", "backups")[0])
        self.assertEqual(run["path"], pasted)
        for start in (pasted, "my files@latest:", "my files@today:", "my files@now:"):
            self.assertEqual(self.run_command("ls", start)[0], "d/")
            self.assertEqual(self.run_command("cat", f"{start}d/a")[0], "a" * 300)
        start = "my files@latest:"
        self.assertIn("300 d", self.run_command("du", start)[0])
        self.assertIn("count-files: 1", self.run_command("stats", f"{start}d")[0])
        self.assertEqual(len(self.run_command("manifest", start)[0].splitlines()), 3)
        self.run_command("get", f"{start}d/a", "-o", "one")
        self.run_command("get", "-r", start, "-o", "tree")
        self.run_command("cp", "-r", f"{start}d", "copy")
        self.run_command("restore", f"{start}d", "-o", "back")
        for path in ("one", "tree/d/a", "copy/d/a", "back/a"):
            self.assertEqual((self.home / path).read_bytes(), b"a" * 300, path)
        for command in (("check", "-r"), ("check",), ("renew", "-r"), ("repair", "-r")):
            self.run_command(*command, f"{start}d")
        self.run_command("alias", "create", "home")
        self.run_command("ln", f"{start}d/a", "home:linked")
        self.run_command("cp", "-r", start, "home:copied")
        self.assertEqual(self.run_command("cat", "home:copied/d/a")[0], "a" * 300)
        (self.home / "caps").write_text(f"{start}d/a\n")
        self.assertEqual(self.run_command("get", "-l", "caps")[0], "a" * 300)

    def test_mistakes(self) -> None:
        """Get one sentence that lists what there is; a run cannot be changed."""
        for arguments, said in (
            (("ls", "home@latest:"), "there is no backup called 'home'; there are my files"),
            (("ls", "my files@2020-01-01:"), "is as old as 2020-01-01_23:59:59Z; its runs: 20"),
            (("ls", "my files@latest:x"), "there is no 'x'"),
            (("get", "my files@latest"), "a colon follows the time of a run"),
            (("ls", "my files@soon:"), "'soon' is not a time of a run; give one such as latest"),
            (("ls", "my files@2026-02-30:"), "'2026-02-30' is not a time"),
            (("mkdir", "my files@latest:x"), "this directory is immutable and can never change"),
            (("restore", "my files@latest:", "--at", "3d", "-o", "x"), "leave out --as and --at"),
        ):
            status = 2
            _, err = self.run_command(*arguments, status=status)
            self.assertIn(said, err)
