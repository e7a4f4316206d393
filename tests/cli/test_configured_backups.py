"""``backup --all`` and ``--configured``: options from ``pipegrid.cfg`` and from the environment."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

from tests.cli.processes import ProcessTestCase, in_fresh_processes


class ConfiguredTests(ProcessTestCase):
    """Commands in a home with a grid of its own."""

    def setUp(self) -> None:
        super().setUp()
        for name in ("photos", "docs"):
            (self.home / name).mkdir()
            (self.home / name / "file").write_text(name)
            (self.home / name / "junk.tmp").write_text("junk")
        (self.home / "photos/#auto#").touch()
        self.run_command("init", "--local")
        self.config = self.home / ".local/share/pipegrid/pipegrid.cfg"
        self.before = self.config.read_text()

    def configure(self, text: str) -> None:
        """Add sections to the configuration as ``init`` made it."""
        self.config.write_text(f"{self.before}\n{text}")

    def runs(self) -> list[tuple[str, int]]:
        """Return names and numbers of files of all runs, oldest first."""
        out, _ = self.run_command("backups", "--json")
        return [(each["name"], each["files"]) for each in map(json.loads, out.splitlines())]

    @in_fresh_processes
    def test_all(self) -> None:
        """Each section is a backup of its name, with every option, and several values on several lines."""
        self.configure(
            f"[backup pictures]\ndirectory = ~/photos\nexclude =\n    *.tmp\n    [#]*\n"
            f"    # a comment\n    100%*\nstrict = yes\n"
            f"keep-last = 1\nlimit-rate = 08:00,1M:2M 19:00,off\n\n"
            f"[backup docs]\ndirectories = {self.home}/docs\non-success = echo 50% of\n    echo {{all}}\n"
            f"metrics-file = docs.prom\n"
        )
        out, err = self.run_command("backup", "--all")
        self.assertEqual(out.count("URI:DIR2-RO:"), 1, "the cap of the catalogue is that of both")
        self.assertEqual(len(out.splitlines()), 1)
        self.assertIn("pipegrid: 2 of 2 backups succeeded", err)
        self.assertIn("--on-success: 50% of\n--on-success: {all}\n", err)
        self.assertEqual(sorted(self.runs()), [("docs", 2), ("pictures", 1)])
        self.assertTrue(self.config.with_name("docs.prom").exists())
        self.run_command("backup", "--configured", "pictures")
        self.assertEqual(sorted(self.runs()), [("docs", 2), ("pictures", 1)])
        out, _ = self.run_command("backup", "--list-configured")
        self.assertEqual(
            out.splitlines(), [f"pictures  {self.home}/photos", f"docs  {self.home}/docs"]
        )

    def test_one_that_fails(self) -> None:
        """Does not keep the others from running; the status is the worst, and the sum names it."""
        self.configure("[backup gone]\ndirectory = ~/gone\n[backup docs]\ndirectory = ~/docs\n")
        out, err = self.run_command("--json", "backup", "--all", status=1)
        self.assertIn("1 of 2 backups succeeded; gone: exit status 1", err)
        self.assertEqual(json.loads(out.splitlines()[-1]), {"backups": {"gone": 1, "docs": 0}})
        self.assertEqual(self.runs(), [("docs", 2)])

    def test_mistakes(self) -> None:
        """Are found before anything runs, in whatever section; each with its line and a remedy."""
        good = "[backup docs]\ndirectory = ~/docs\n"
        line = len(self.before.split("\n")) + 5
        for text, words in (
            (
                "keep-lst = 3",
                f":{line - 2}: [backup x] has no setting keep-lst (did you mean keep-last?)",
            ),
            ("keep-last = many", f":{line}: [backup x] keep-last: 'many' is not a whole number"),
            ("keep-last = 0", "[backup x] keep-last: 0 is not in the range"),
            ("keep-last =", "[backup x] keep-last is empty"),
            ("strict = maybe", "[backup x] strict is 'maybe', and it must be yes or no"),
            ("limit-rate = 25:00,1M", "[backup x] limit-rate: '25:00' is not a time"),
            ("ping = file:///etc/passwd", "[backup x] ping: it must be a URL"),
            ("metrics-file = m.txt", "does not end in .prom"),
            ("grid = other", "has no setting grid"),
            ("all = yes", "has no setting all"),
            ("as =\n a\n b", "[backup x]: give one NAME and one ALIAS:PATH with --as"),
            ("as = docs", "[backup docs] and [backup x] have the same name 'docs'"),
            ("[backup a:b]\ndirectory = ~/photos", "the name of a backup has no colon"),
            ("[backup]", "there is no section [backup] (did you mean backup NAME?)"),
            ("[bakup y]", "there is no section [bakup y]"),
            ("[backup docs]", "exists twice"),
            (
                "[backup  docs]\ndirectory = ~/photos",
                "[backup  docs] is the second with the name 'docs'",
            ),
            ("directory = ~/photos", "directory is set twice"),
        ):
            self.configure(f"{good}[backup x]\ndirectory = ~/photos\n{text}\n")
            for arguments in (("--all",), ("--configured", "docs", "--configured", "x")):
                _, err = self.run_command("backup", *arguments, status=2)
                self.assertIn(words, err)
                self.assertEqual(err.count("\n"), 1, err)
        self.configure(f"{good}[backup x]\nkeep-last = 3\n")
        _, err = self.run_command("backup", "--all", status=2)
        self.assertIn("[backup x] has no setting 'directory'", err)
        self.assertEqual(self.runs(), [])

    def test_of_the_command_line(self) -> None:
        """What contradicts itself, or is not there."""
        _, err = self.run_command("backup", "--all", status=2)
        self.assertIn("has no section [backup NAME]", err)
        self.configure("[backup docs]\ndirectory = ~/docs\n")
        for arguments, words in (
            (("--all", "docs"), "give no DIR"),
            (("--all", "--configured", "docs"), "choose one of --all, --configured"),
            (("--configured", "doc"), "no section [backup doc] (did you mean docs?)"),
        ):
            _, err = self.run_command("backup", *arguments, status=2)
            self.assertIn(words, err)
        self.configure("[backup docs]\ndirectory = ~/docs\n[backup photos]\ndirectory = ~/photos\n")
        for option in ("--files-from", "--files-from0"):
            _, err = self.run_command("backup", "--all", option, "-", status=2)
            self.assertIn("[backup docs] and [backup photos] both read standard input", err)
        node = self.home / "node"
        node.mkdir()
        (node / "tahoe.cfg").write_text("[client]\n[backup docs]\n")
        _, err = self.run_command("-d", str(node), "backup", "--all", status=2)
        self.assertIn("pipegrid init --tahoe", err)

    def test_what_counts_most(self) -> None:
        """The command line, then the environment, then the file."""
        self.configure("[backup docs]\ndirectory = ~/docs\nexclude = *.tmp\n")
        self.run_command("backup", "--all")
        self.environment["PIPEGRID_BACKUP_EXCLUDE"] = "junk*\nfile"
        self.run_command("backup", "--all")
        self.run_command("backup", "--all", "--exclude", "nothing")
        self.run_command("backup", "photos")
        self.run_command("backup", "photos", "--exclude", "nothing")
        self.assertEqual(
            sorted(self.runs()),
            [("docs", 0), ("docs", 1), ("docs", 2), ("photos", 1), ("photos", 3)],
        )
        self.environment["PIPEGRID_BACKUP_EXCLUDE"] = ""
        for variable, value, words in (
            ("KEEP_LAST", "x", "$PIPEGRID_BACKUP_KEEP_LAST: 'x' is not a whole number; correct it"),
            ("STRICT", "often", "$PIPEGRID_BACKUP_STRICT is 'often', and it must be yes or no"),
            ("LIMIT_RATE", "1M,2M", "$PIPEGRID_BACKUP_LIMIT_RATE: '1M' is not a time"),
            ("EXLUDE", "*.key", "$PIPEGRID_BACKUP_EXLUDE sets no option of 'backup' (did you mean"),
        ):
            self.environment[f"PIPEGRID_BACKUP_{variable}"] = value
            for arguments in (("photos",), ("--all",)):
                _, err = self.run_command("backup", *arguments, status=2)
                self.assertIn(words, err)
            del self.environment[f"PIPEGRID_BACKUP_{variable}"]
        self.environment["PIPEGRID_BACKUP_STRICT"] = "yes"
        self.environment["PIPEGRID_BACKUP_NAME"] = "that of a backup whose hook this is"
        os.mkfifo(self.home / "docs/pipe")
        self.run_command("backup", "docs", "--as", "other", status=1)

    def test_unit_of_systemd(self) -> None:
        """Its variables are in the environment of ``backup``, which takes its arguments from them."""
        self.configure("[backup docs]\ndirectory = ~/docs\n")
        unit = (Path(__file__).parents[2] / "misc/systemd/pipegrid-backup.service").read_text()
        own = dict(re.findall(r"^Environment=(\w+)=(.*)$", unit, re.MULTILINE))
        self.assertIn("PIPEGRID_BACKUP_ARGUMENTS", own)
        self.environment.update(own)
        found = re.search(r"^ExecStart=\S+/pipegrid (.*)$", unit, re.MULTILINE)
        assert found is not None
        arguments = re.sub(r"\$(\w+)", lambda name: own[name[1]], found[1])
        self.run_command(*shlex.split(arguments))
        self.assertEqual(self.runs(), [("docs", 2)])
        self.environment["PIPEGRID_BACKUP_ARGUMENT"] = "--all"
        _, err = self.run_command("backup", "--all", status=2)
        self.assertNotIn("mean PIPEGRID_BACKUP_ARGUMENTS", err)

    def test_several_directories(self) -> None:
        """Of one section are one run, each at its path."""
        self.configure(
            "[backup both]\ndirectories =\n    ~/docs\n    ~/photos\ntag =\n    a\n    b\n"
        )
        self.run_command("backup", "--all")
        self.assertEqual(self.runs(), [("both", 5)])
        out, _ = self.run_command("--json", "backups")
        self.assertEqual(json.loads(out)["tags"], ["a", "b"])
        home = os.path.realpath(self.home)
        out, _ = self.run_command("cat", f"both@latest:{home[1:]}/docs/file")
        self.assertEqual(out, "docs")

    def test_a_name_and_a_path(self) -> None:
        """``as`` may give further names; the section's name is the backup's unless it gives one."""
        self.run_command("-q", "alias", "create", "home")
        self.configure(
            "[backup one]\ndirectory = ~/docs\nas = home:backups\n"
            "[backup two]\ndirectory = ~/photos\nas = three\n"
        )
        self.run_command("backup", "--all")
        self.assertEqual(sorted(name for name, _ in self.runs()), ["one", "three"])
        out, _ = self.run_command("ls", "home:backups")
        self.assertEqual(out.split(), ["Archives/", "Latest/"])

    def test_other_commands(self) -> None:
        """Work with such a file, whatever is in its sections of backups."""
        self.configure("[backup docs]\nno such setting = 1\n")
        self.run_command("put", str(Path("docs/file")))
