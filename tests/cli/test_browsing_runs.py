"""Runs of backups as paths, searched and compared: as users meet them, in processes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from pipegrid.cli.cap_lookup import storage_index_text
from pipegrid.core.caps import parse_cap
from tests.cli.processes import ProcessTestCase, in_fresh_processes
from tests.cli.pty import TerminalTestCase


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
        self.assertEqual(self.run_command("get", "--from", "caps")[0], "a" * 300)

    @in_fresh_processes
    def test_local_times(self) -> None:
        """Runs are printed in local time; what is printed, and its part without the zone, lead to the run."""
        self.environment["TZ"] = "EST5EDT,M3.2.0,M11.1.0"
        line = self.run_command("backups")[0]
        (pasted,) = shlex.split(line.partition("  ")[0])
        self.assertRegex(pasted, r"-0[45]:00:$")
        self.assertEqual(self.run_command("ls", pasted)[0], "d/")
        self.assertEqual(self.run_command("ls", f"{pasted[:-7]}:")[0], "d/")
        at = pasted[len("my files@") : -7]
        self.assertIn(at, self.run_command("restore", "-o", "x", "--at", at)[1])
        self.environment["TZ"] = "UTC0"
        self.assertEqual(self.run_command("ls", pasted)[0], "d/")
        _, err = self.run_command("ls", f"{pasted[:-7]}:", status=2)  # four or five hours earlier
        self.assertIn("no run of 'my files' is as old as", err)

    def test_completion(self) -> None:
        """Offers what is in a run."""
        self.run_command("-q", "backup", "my files", "--as", "src")
        for typed, expected in (
            ("src@latest:", "src@latest:d/"),
            ("src@2100-01-01_10:00:", "src@2100-01-01_10:00:d/"),
            ("src@latest:d/", "src@latest:d/a"),
        ):
            more = {"_PIPEGRID_COMPLETE": "fish_complete", "_PIPEGRID_LINE": f"pipegrid ls {typed}"}
            done = subprocess.run(
                [sys.executable, "-m", "pipegrid.cli"],
                cwd=self.home,
                env={**self.environment, **more},
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertIn(expected, done.stdout)

    def test_mistakes(self) -> None:
        """Get one sentence that lists what there is; a run cannot be changed."""
        for arguments, said in (
            (
                ("ls", "home@latest:"),
                "there is no backup called 'home'; the catalogue has: my files",
            ),
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


class FindDiffTests(ProcessTestCase):
    """``find`` and ``diff``."""

    def setUp(self) -> None:
        super().setUp()
        self.source = self.home / "src"
        (self.source / "d/old").mkdir(parents=True)
        self.write("d/a.txt", b"a" * 300, 1_600_000_000)
        self.write("d/old/b.txt", b"b" * 300, 1_600_000_000)
        self.write("c", b"c", 1_600_000_000)
        self.run_command("-q", "backup", "src")
        self.run_command("-q", "backup", "src")
        self.write("d/a.txt", b"A" * 400, 1_700_000_000)
        (self.source / "c").unlink()
        self.write("new\nline", b"", 1_700_000_000)
        self.run_command("-q", "backup", "src")
        lines = self.run_command("backups")[0].splitlines()
        self.first, self.second, self.third = (line.partition("  ")[0] for line in lines)

    def write(self, path: str, data: bytes, time_s: int) -> None:
        """Make a file."""
        (self.source / path).write_bytes(data)
        os.utime(self.source / path, (time_s, time_s))

    def test_find(self) -> None:
        """Each version is a line; what it begins with can be pasted."""
        out, _ = self.run_command("find", "*.txt")
        first = self.first[len("src@") : -1]
        self.assertEqual(
            out.splitlines(),
            [
                f"{self.second}d/a.txt  300 B, changed 2020-09-13_12:26:40Z, 2 runs since {first}",
                f"{self.third}d/a.txt  400 B, changed 2023-11-14_22:13:20Z, 1 run",
                f"{self.third}d/old/b.txt  300 B, changed 2020-09-13_12:26:40Z, 3 runs since {first}",
            ],
        )
        pasted = out.split()[0]
        self.assertEqual(self.run_command("cat", pasted)[0], "a" * 300)
        out, _ = self.run_command("--json", "find", "old/", "c", "--as", "src")
        found = [json.loads(line) for line in out.splitlines()]
        self.assertEqual(
            [(each["path"], each["type"], each["size"], each["runs"]) for each in found],
            [(["c"], "file", 1, 2), (["d", "old"], "directory", None, 3)],
        )
        self.assertEqual(found[0]["place"], f"{self.second}c")
        self.assertIn("a.txt", self.run_command("find", "*", "--newer", "2023-11-14")[0])
        self.assertNotIn("b.txt", self.run_command("find", "*", "--newer", "2023-11-14")[0])
        self.assertNotIn(
            "400 B", self.run_command("find", "d/*.txt", "--older", "1d", "--at", first)[0]
        )
        self.assertIn(r"'src@", self.run_command("find", "new*")[0])
        self.assertIn(r"new\nline", self.run_command("find", "new*")[0])

    def test_find_in_another_catalogue(self) -> None:
        """What a line begins with can be pasted, too."""
        catalogue, _ = self.run_command("-q", "backup", "src")
        out, _ = self.run_command("find", "b.txt", "--in", catalogue.strip())
        self.assertEqual(self.run_command("cat", out.split()[0])[0], "b" * 300)
        shown, _ = self.run_command("--json", "find", "b.txt", "--in", catalogue.strip())
        self.assertEqual(self.run_command("cat", json.loads(shown)["place"])[0], "b" * 300)

    def test_find_nothing(self) -> None:
        """Is status 1 and a sentence; mistakes are status 2."""
        out, err = self.run_command("find", "*.jpg", "*.gif", status=1)
        self.assertEqual((out, err), ("", "pipegrid: nothing in 3 runs matches '*.jpg', '*.gif'\n"))
        for arguments, said in (
            (("",), "perhaps a variable is not set"),
            (("*", "--newer", "soon"), "'soon' is not a time"),
            (("*", "--as", "home"), "there is no backup called 'home'; the catalogue has: src"),
            (("*", "--at", "2020-01-01"), "its runs: 20"),
            ((), "Missing argument"),
        ):
            self.assertIn(said, self.run_command("find", *arguments, status=2)[1])

    def test_diff(self) -> None:
        """Shows what differs; the status is as diff's."""
        out, err = self.run_command("diff", self.first, self.third, status=1)
        self.assertEqual(out, "- c  1 B\n+ new\\nline  0 B\nM d/a.txt  300 B -> 400 B")
        self.assertIn("1 added, 1 removed, 1 changed, 0 with other metadata only; 400 B new", err)
        self.assertEqual(self.run_command("-q", "diff", self.first, self.second), ("", ""))
        self.assertEqual(self.run_command("diff", "latest", "src@latest", "--as", "src")[0], "")
        out, _ = self.run_command("--json", "diff", self.third, self.first[:-1], "d", status=1)
        lines = [json.loads(line) for line in out.splitlines()]
        self.assertEqual(
            lines[0], {"path": ["a.txt"], "change": "content", "old_size": 400, "new_size": 300}
        )
        self.assertEqual(lines[-1]["changed"], 1)
        cap = json.loads(self.run_command("--json", "backups")[0].splitlines()[0])["cap"]
        self.assertEqual(self.run_command("diff", cap, self.second)[0], "")
        out, _ = self.run_command("diff", cap, "latest", "/c", status=1)
        self.assertEqual(out, "- c  1 B")
        out, _ = self.run_command("diff", cap, "latest", "d/a.txt", status=1)
        self.assertEqual(out, "M a.txt  300 B -> 400 B")
        self.assertEqual(self.run_command("diff", cap, "latest", "d/old/b.txt")[0], "")
        shutil.copytree(self.source, self.home / "other")
        self.run_command("backup", "other")
        self.assertEqual(self.run_command("diff", "latest", "src@latest")[0], "")
        self.assertIn("choose one with --as", self.run_command("diff", "now", "now", status=2)[1])

    def test_diff_mistakes(self) -> None:
        """Are status 2."""
        for arguments, said in (
            (("latest", "2020-01-01"), "its runs: 20"),
            (("latest", "nothing"), "does not begin with a cap or an alias"),
            (("latest", "now", "x"), "there is no 'x' in either"),
            (("latest", "src@latest:nowhere", "x"), "there is no 'nowhere'"),
            (("latest",), "Missing argument"),
        ):
            self.assertIn(said, self.run_command("diff", *arguments, status=2)[1])

    def test_names_like_runs(self) -> None:
        """A directory whose name ends like a run is found by its path."""
        (self.home / "odd/d@latest").mkdir(parents=True)
        (self.home / "odd/d@latest/f").write_bytes(b"f")
        self.run_command("backup", "odd")
        runs = [json.loads(line) for line in self.run_command("--json", "backups")[0].splitlines()]
        (cap,) = (run["cap"] for run in runs if run["name"] == "odd")
        self.run_command("diff", f"{cap}/d@latest", f"{cap}/d@latest")


class RestoreChoiceTests(ProcessTestCase):
    """What ``restore`` selects, shows and removes."""

    def setUp(self) -> None:
        super().setUp()
        self.source = self.home / "src"
        for path in ("a.jpg", "b.txt", "d/c.jpg", "d/x/e.txt", "e/f.txt"):
            self.write(self.source / path, path.encode() * 60)
        self.run_command("-q", "backup", "src")
        self.back = self.home / "back"

    def write(self, path: Path, data: bytes = b"mine") -> None:
        """Make a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def found(self, root: Path | None = None) -> list[str]:
        """Return all paths in a directory."""
        root = root or self.back
        return sorted(str(each.relative_to(root)) for each in root.rglob("*"))

    def test_include_and_exclude(self) -> None:
        """Patterns select; directories on the way are made only for what is in them."""
        self.run_command("restore", "-o", "back", "--include", "*.jpg")
        self.assertEqual(self.found(), ["a.jpg", "d", "d/c.jpg"])
        self.run_command("restore", "-o", "two", "--include", "d/", "--exclude", "*.jpg")
        self.assertEqual(self.found(self.home / "two"), ["d", "d/x", "d/x/e.txt"])
        self.run_command("restore", "-o", "three", "--exclude", "d", "--exclude", "/b.*")
        self.assertEqual(self.found(self.home / "three"), ["a.jpg", "e", "e/f.txt"])
        _, err = self.run_command("restore", "-o", "four", "--include", "*.gif", status=1)
        self.assertIn("nothing in the run matches '*.gif', so nothing is restored", err)
        self.assertFalse((self.home / "four").exists())
        _, err = self.run_command("restore", "-o", "five", "--exclude", "*.gif")
        self.assertIn("'*.gif' matches nothing in the run", err)
        _, err = self.run_command("restore", "-o", "six", "--include", "", status=2)
        self.assertIn("perhaps a variable is not set", err)

    def test_dry_run(self) -> None:
        """Shows what would be written, replaced, kept and removed, and changes nothing."""
        self.run_command("restore", "-o", "back")
        (self.back / "a.jpg").unlink()
        self.write(self.back / "b.txt")
        same = (self.back / "e/f.txt").read_bytes()
        self.write(self.back / "e/f.txt", same)
        self.write(self.back / "extra/one")
        self.write(self.back / "extra/two")
        before = [(each, os.lstat(self.back / each).st_mtime_ns) for each in self.found()]
        out, err = self.run_command("restore", "-o", "back", "--dry-run", "--delete", "-f")
        self.assertEqual(
            out.splitlines(),
            [
                "write a.jpg  300 B",
                "replace b.txt  300 B",
                "replace if its content differs: e/f.txt  420 B",
                "remove back/extra/ with 2 files",
            ],
        )
        self.assertIn(
            "would write 1, replace 1, compare 1, keep 0, remove 2; nothing was changed", err
        )
        out, _ = self.run_command("restore", "-o", "back", "--dry-run")
        self.assertEqual(
            out.splitlines()[1:],
            [
                "keep what exists, without -f: b.txt  300 B",
                "keep if its content differs, without -f: e/f.txt  420 B",
            ],
        )
        out, _ = self.run_command("--json", "restore", "-o", "back", "--dry-run")
        self.assertEqual(
            [json.loads(line)["would"] for line in out.splitlines()],
            ["write", "blocked", "compare"],
        )
        self.assertEqual(
            [(each, os.lstat(self.back / each).st_mtime_ns) for each in self.found()], before
        )
        _, err = self.run_command("restore", "src@latest", "-o", "new", status=2)
        self.assertIn("a colon follows the time of a run: 'src@latest:'", err)
        (self.back / "a.jpg").mkdir()
        out, _ = self.run_command("restore", "-o", "back", "--dry-run", "-f")
        self.assertEqual(out.splitlines()[0], "keep the directory that exists: a.jpg  300 B")
        out, _ = self.run_command("restore", "-o", "new", "--dry-run")
        self.assertEqual(len(out.splitlines()), 8)
        self.assertFalse((self.home / "new").exists())

    def test_delete(self) -> None:
        """Removes what the run does not have, after a yes; never through links."""
        self.run_command("restore", "-o", "back")
        outside = self.home / "outside"
        self.write(outside / "kept")
        self.write(self.back / "extra/deep/one")
        os.symlink(outside, self.back / "extra/link")
        os.symlink(outside, self.back / "d/link")
        self.write(self.back / "-odd\nname")
        (self.back / "extra/deep").chmod(0o500)
        (self.back / "d").chmod(0o755)
        times = os.stat(self.source / "d").st_mtime_ns
        _, err = self.run_command("restore", "-o", "back", "--delete", status=2)
        self.assertIn("will remove back/d/link", err)
        self.assertIn(r"will remove back/-odd\nname", err)
        self.assertIn(
            "--delete would remove 4 files that the run does not have; look with --dry-run", err
        )
        self.assertIn("extra/deep/one", self.found())
        (self.back / "a.jpg").unlink()
        _, err = self.run_command("restore", "-o", "back", "--delete", "--yes")
        self.assertIn("removed 4 files that the run does not have", err)
        self.assertEqual(self.found(), self.found(self.source))
        self.assertEqual(os.stat(self.back / "d").st_mtime_ns, times)
        self.assertEqual((outside / "kept").read_bytes(), b"mine")
        _, err = self.run_command("restore", "-o", "back", "--delete")
        self.assertIn("removed 0 files", err)

    def test_delete_with_patterns(self) -> None:
        """Removes only what they select."""
        self.run_command("restore", "-o", "back")
        for path in ("d/more.jpg", "d/more.txt", "new/x.jpg", "y.tmp"):
            self.write(self.back / path)
        self.run_command("restore", "-o", "back", "--delete", "--yes", "--include", "*.jpg")
        self.assertEqual(
            set(self.found()) - set(self.found(self.source)),
            {"d/more.txt", "new", "new/x.jpg", "y.tmp"},
        )
        self.run_command("restore", "-o", "back", "--delete", "--yes", "--exclude", "*.tmp")
        self.assertEqual(set(self.found()) - set(self.found(self.source)), {"y.tmp"})

    def test_delete_after_a_failure(self) -> None:
        """Removes nothing."""
        self.run_command("restore", "-o", "back")
        self.write(self.back / "extra")
        self.write(self.back / "b.txt")
        _, err = self.run_command("restore", "-o", "back", "--delete", "--yes", status=1)
        self.assertIn("nothing was removed, since the run could not be restored as a whole", err)
        self.assertIn("extra", self.found())

    def test_what_cannot_be_read(self) -> None:
        """A directory whose paths patterns may include is reported, and the status says so."""
        out, _ = self.run_command("--json", "ls", "src@latest:")
        lost = next(each for each in map(json.loads, out.splitlines()) if each["path"] == ["d"])
        index = storage_index_text(parse_cap(lost["cap"]))
        shares = list(self.home.rglob(index))
        self.assertTrue(shares)
        for each in shares:
            shutil.rmtree(each)
        out, err = self.run_command("restore", "-o", "back", "--include", "*.jpg", status=4)
        self.assertEqual(self.found(), ["a.jpg"])
        self.assertIn("d: ", err)
        self.write(self.back / "extra.jpg")
        _, err = self.run_command(
            "restore", "-o", "back", "--include", "*.jpg", "--delete", "--yes", status=4
        )
        self.assertIn("nothing was removed", err)
        _, err = self.run_command("restore", "-o", "new", "--include", "c.*", status=4)
        self.assertNotIn("nothing in the run matches", err)

    def test_where_nothing_is_removed(self) -> None:
        """At ``/``, the home directory, above the current one, a mount point, or the client's directory."""
        client = self.home / ".local/share/pipegrid"
        self.write(self.home / "tree/share/pipegrid/odd")
        (self.home / "tree/share/pipegrid").chmod(client.stat().st_mode & 0o777)
        self.write(client / "new")
        self.write(client.parent / "extra")
        self.run_command("backup", "tree")
        _, err = self.run_command("restore", "--as", "tree", "-o", ".local", "--delete", "--yes")
        self.assertIn("nothing is removed there, since it belongs to this client", err)
        self.assertTrue((client / "new").exists())
        self.assertTrue((client / "odd").exists())
        self.assertFalse((client.parent / "extra").exists())
        for target, said in (
            ("/", "is the root of a file system"),
            ("/proc", "is the root of a file system"),
            (".", "is your home directory, or above it"),
            ("..", "is your home directory, or above it"),
            (str(client), "belongs to this client or its grid"),
            (str(client / "private"), "belongs to this client or its grid"),
        ):
            _, err = self.run_command(
                "restore", "--as", "src", "-o", target, "--delete", "--yes", status=2
            )
            self.assertIn(said, err)
        _, err = self.run_command(
            "restore", "src@latest:a.jpg", "-o", "back", "--delete", "--yes", status=2
        )
        self.assertIn("--delete is for a directory, and PATH is a file", err)
        self.assertIn(
            "--yes is for --delete", self.run_command("restore", "-o", "x", "--yes", status=2)[1]
        )

    def test_one_file_to_standard_output(self) -> None:
        """``-o -`` writes its bytes, and nothing else."""
        done = subprocess.run(
            [sys.executable, "-m", "pipegrid.cli", "-q", "restore", "d/c.jpg", "-o", "-"],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            check=True,
        )
        self.assertEqual((done.stdout, done.stderr), (b"d/c.jpg" * 60, b""))
        out, _ = self.run_command("restore", "src@latest:d/c.jpg", "-o", "-")
        self.assertEqual(out, "d/c.jpg" * 60)
        for arguments, said in (
            (("-o", "-"), "give its PATH"),
            (("d", "-o", "-"), "this is a directory"),
            (("b.txt", "-o", "-", "--dry-run"), "leave out the options"),
            (("nothing", "-o", "-"), "there is no 'nothing'"),
        ):
            self.assertIn(said, self.run_command("restore", *arguments, status=2)[1])


class AgreementTests(TerminalTestCase):
    """On a terminal ``restore --delete`` asks."""

    def run_quietly(self, *arguments: str) -> None:
        """Run a command without a terminal."""
        subprocess.run(
            [str(self.home / "bin/pipegrid"), *arguments],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            check=True,
        )

    def test_answers(self) -> None:
        """No changes nothing, yes restores and removes."""
        (self.home / "src").mkdir()
        (self.home / "src/a").write_bytes(b"a")
        self.run_quietly("backup", "src")
        (self.home / "back").mkdir()
        (self.home / "back/extra").write_bytes(b"")
        for answer, status, found in (("n", 2, ["extra"]), ("y", 0, ["a"])):
            terminal = self.on_terminal(
                "pipegrid", "restore", "-o", "back", "--delete", columns=120
            )
            terminal.wait_for("will remove back/extra")
            terminal.wait_for("Restore, and remove 1 file that the run does not have? [y/N]")
            terminal.send(f"{answer}\r")
            self.assertEqual(terminal.finish(), status, terminal.text)
            self.assertEqual(os.listdir(self.home / "back"), found)
