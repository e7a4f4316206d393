"""What ``backup`` and ``put -r`` select: patterns, tags, sizes, lists, several directories, streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from tests.cli.processes import TIMEOUT_S, ProcessTestCase

CACHE_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# made by a test\n"


def paths_in(directory: Path) -> list[str]:
    """Return everything in a directory, sorted; directories end in a slash."""
    found = []
    for above, directories, files in os.walk(directory):
        base = Path(above).relative_to(directory)
        found += [f"{base / name}/" for name in directories]
        found += [str(base / name) for name in files]
    return sorted(found)


class SelectionProcessTestCase(ProcessTestCase):
    """A tree to store."""

    def write(self, path: str, content: str = "content") -> Path:
        """Make a file in the home."""
        target = self.home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        return target

    def backed_up(self, *arguments: str, status: int = 0) -> tuple[list[str], str]:
        """Run a backup, and return what a restore brings back, and what the backup said."""
        _, err = self.run_command("backup", *arguments, "--as", "test", status=status)
        target = self.home / f"back{len(list(self.home.iterdir()))}"
        self.run_command("restore", "--as", "test", "-o", str(target))
        return paths_in(target), err


class ExclusionTests(SelectionProcessTestCase):
    """What is left out by choice."""

    def test_patterns(self) -> None:
        """Are those of gitignore, from a file first and then from the command line; all is counted."""
        for path in ("a.log", "keep.log", "out/keep.log", "build/x.o", "sub/build/x.o", "# notes"):
            self.write(f"src/{path}")
        self.write("patterns", "# comment\n*.log\n!keep.log\n/build/\n/none\n\\# notes\n")
        command = [
            "src",
            "--exclude-from",
            "patterns",
            "--exclude",
            "/out",
            "--exclude",
            "!/out/keep.log",
        ]
        found, err = self.backed_up(*command, "--exclude", "./sub")
        self.assertEqual(found, ["keep.log", "sub/", "sub/build/", "sub/build/x.o"])
        self.assertIn("excluded 4 entries", err)
        said = [line for line in err.splitlines() if "matched nothing" in line]
        self.assertEqual(
            said,
            [
                "pipegrid: --exclude: the pattern '!/out/keep.log' matched nothing; nothing in a directory "
                "that is left out can be included again",
                "pipegrid: --exclude: the pattern './sub' matched nothing; a path from the directory down "
                "begins with '/', without the dot",
                "pipegrid: patterns:5: the pattern '/none' matched nothing",
            ],
        )
        for more in ([], ["--dry-run"]):
            out, _ = self.run_command("--json", "backup", *command, *more)
            self.assertEqual(json.loads(out.splitlines()[-1])["excluded"], 4)
        out, _ = self.run_command("--json", "put", "-r", *command)
        self.assertEqual(json.loads(out.splitlines()[-1])["excluded"], 4)
        _, err = self.run_command("backup", "src", "--exclude", "", status=2)
        self.assertIn("can match nothing", err)

    def test_tags_as_restic(self) -> None:
        """Of a tagged directory the same is stored as with restic, by each of the options."""
        for path in ("a/x", "a/sub/y", "b/x", "c/x", "d/x", "e/x"):
            self.write(f"src/{path}")
        self.write("src/a/CACHEDIR.TAG", CACHE_TAG)
        self.write("src/b/CACHEDIR.TAG", "no signature")
        self.write("src/c/.nobackup")
        self.write("src/d/marked", "yes: all of it")
        self.write("src/e/marked", "no")
        repository = str(self.home / "repository")
        environment = {**self.environment, "RESTIC_PASSWORD": "x", "RESTIC_REPOSITORY": repository}

        def restic(*arguments: str) -> None:
            command = ["restic", "--no-cache", "-q", *arguments]
            subprocess.run(command, cwd=self.home / "src", env=environment, check=True)

        restic("init")
        for number, options in enumerate(
            (
                ["--exclude-caches"],
                ["--exclude-if-present", ".nobackup"],
                ["--exclude-if-present", "marked:yes", "--exclude-if-present", "marked:no way"],
                ["--exclude-larger-than", "20", "--exclude-if-present", "sub"],
            )
        ):
            restic("backup", ".", *options)
            restic("restore", "latest", "--target", str(self.home / f"theirs{number}"))
            found, err = self.backed_up("src", *options)
            self.assertEqual(found, paths_in(self.home / f"theirs{number}"), options)
            self.assertIn("excluded ", err)
        _, err = self.run_command("backup", "src", "--exclude-if-present", "a/b", status=2)
        self.assertIn("'a/b' is neither the name of a file", err)

    def test_lists_with_zero_bytes(self) -> None:
        """Hold any name, also from standard input; a list that ends early is refused."""
        for name in (b"new\nline", b"caf\xe9", b"other"):
            Path(os.fsdecode(os.fsencode(self.home) + b"/" + name)).write_bytes(b"x")
        self.write("src/file")
        for name in (b"new\nline", b"caf\xe9", b"other"):
            (self.home / os.fsdecode(name)).rename(self.home / "src" / os.fsdecode(name))
        (self.home / "list").write_bytes(
            b"new\nline\0caf\xe9\0" + bytes(self.home / "src/file") + b"\0"
        )
        found, _ = self.backed_up("src", "--files-from0", "list")
        self.assertEqual(found, sorted(["new\nline", os.fsdecode(b"caf\xe9"), "file"]))
        (self.home / "list").write_bytes(b"file\0oth")
        _, err = self.run_command("backup", "src", "--files-from0", "list", status=2)
        self.assertIn("does not end in a zero byte", err)
        both = ["--files-from", "-", "--files-from0", "-"]
        _, err = self.run_command("backup", "src", *both, status=2)
        self.assertIn("standard input can be read only once", err)


class SeveralDirectoriesTests(SelectionProcessTestCase):
    """One run of several directories."""

    def test_at_their_paths(self) -> None:
        """Each is at its absolute path, unchanged files are not read, and the order does not matter."""
        for path in ("a/src/f", "a/src/d/g", "b/src/f"):
            self.write(path, path * 100)
        time.sleep(2.1)  # a file that has just changed is read again
        _, err = self.run_command("backup", "a/src", "b/src")
        self.assertIn("pipegrid: src+src@", err)
        self.assertIn("sent 3 files", err)
        for again in (("b/src", "a/src"), ("a/src",)):
            _, err = self.run_command("backup", *again)
            self.assertIn("sent 0 files", err)
        runs = [json.loads(line) for line in self.run_command("--json", "backups")[0].splitlines()]
        both = [run for run in runs if run["name"] == "src+src"]
        self.assertEqual(len(both), 2)
        home = os.path.realpath(self.home)
        self.assertEqual(both[0]["directory"], f"{home}/a/src, {home}/b/src")
        self.run_command("restore", "--as", "src+src", "-o", "back")
        for path in ("a/src/f", "a/src/d/g", "b/src/f"):
            back = Path(f"{self.home}/back{home}/{path}")
            self.assertEqual(back.read_text(), path * 100)
            self.assertEqual(back.stat().st_mtime_ns, (self.home / path).stat().st_mtime_ns)
        self.run_command("restore", f"{home}/b/src/f", "--as", "src+src", "-o", "one")
        self.assertEqual(paths_in(self.home / "one"), ["f"])
        for path in ("c/src/x", "d/src/x"):
            self.write(path)
        _, err = self.run_command("backup", "c/src", "d/src", status=2)
        self.assertIn("'src+src' is the backup of", err)
        out, _ = self.run_command("--json", "backup", "a", "a/src", "--as", "nested")
        alone, _ = self.run_command("--json", "backup", "a")
        self.assertEqual(json.loads(out)["cap"], json.loads(alone)["cap"])

    def test_what_is_missing_or_listed(self) -> None:
        """A missing one gives status 1; a list has absolute paths; ``--as`` and an alias are as for one."""
        for path in ("a/f", "a/g", "b/f"):
            self.write(path)
        self.run_command("alias", "create", "home")
        command = ("a", "gone", "b", "--as", "both", "--as", "home:kept")
        _, err = self.run_command("backup", *command, status=1)
        self.assertIn("gone: left out: it does not exist", err)
        self.assertIn("3 files", err)
        home = os.path.realpath(self.home)
        out, _ = self.run_command("ls", f"home:kept/Latest{home}/a")
        self.assertEqual(out.split(), ["f", "g"])
        _, err = self.run_command("backup", "gone", "lost", status=1)
        self.assertIn("cannot read ", err)
        self.write("list", f"{home}/a/g\n{home}/b\n")
        out, _ = self.run_command("--json", "backup", "a", "b", "--files-from", "list", "--as", "l")
        self.assertEqual(json.loads(out)["files"], 2)
        self.write("list", "a/g\n")
        _, err = self.run_command("backup", "a", "b", "--files-from", "list", status=2)
        self.assertIn("list absolute paths", err)
        out, _ = self.run_command("backup", "a", "b", "--dry-run")
        self.assertIn("would send ", out)


class StreamTests(SelectionProcessTestCase):
    """Runs of standard input, or of what a command prints."""

    def backup(self, *arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run a backup with this standard input."""
        return subprocess.run(
            [sys.executable, "-m", "pipegrid.cli", "backup", *arguments],
            cwd=self.home,
            env=self.environment,
            input=data,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def names(self) -> list[str]:
        """Return the names of all listed runs."""
        out, _ = self.run_command("--json", "backups")
        return [json.loads(line)["name"] for line in out.splitlines()]

    def test_standard_input(self) -> None:
        """Is the only file of a run, of any length, under the name that is given; an empty one fails."""
        for data in (b"small", Random(1).randbytes(3_000_000)):
            done = self.backup("--stdin", "db.sql", data=data)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(b"pipegrid: db.sql@", done.stderr)
            self.run_command("restore", "-o", "back", "-f")
            self.assertEqual((self.home / "back/db.sql").read_bytes(), data)
        self.assertEqual((self.home / "back/db.sql").stat().st_mode & 0o777, 0o600)
        done = self.backup("--stdin", "db.sql")
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"standard input is empty, so nothing is stored", done.stderr)
        self.assertEqual(self.names(), ["db.sql"] * 2)

    def test_commands(self) -> None:
        """What one prints is stored; its arguments are its own, and only its program is noted."""
        script = 'head -c 3000000 /dev/zero; echo "$@"'
        command = ["--", "sh", "-c", script, "sh", "--stdin", "-r", ""]
        done = self.backup("--from-command", "dump", "--as", "daily", *command)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.run_command("restore", "-o", "back")
        data = (self.home / "back/dump").read_bytes()
        self.assertEqual((len(data), data[3_000_000:]), (3_000_012, b"--stdin -r \n"))
        out, _ = self.run_command("--json", "backups")
        self.assertEqual(json.loads(out)["directory"], "the output of sh")
        self.write("daily/f")
        _, err = self.run_command("backup", "daily", status=2)
        self.assertIn("'daily' is the backup of the output of sh", err)

    def test_commands_that_fail(self) -> None:
        """Whatever they printed: the run fails, and is not listed."""
        self.write("src/f")
        self.run_command("backup", "src")
        for command, reason in (
            (
                ["sh", "-c", "echo something; exit 3"],
                "sh ended with status 3, so nothing is stored",
            ),
            (["sh", "-c", "echo something; kill -9 $$"], "sh ended with signal 9"),
            (["true"], "the output of true is empty"),
            (["no-such-program"], "cannot run no-such-program: No such file"),
        ):
            done = self.backup("--from-command", "dump", "--", *command)
            self.assertEqual(done.returncode, 1, command)
            self.assertIn(reason.encode(), done.stderr)
            self.assertNotIn(b"Traceback", done.stderr)
        self.assertEqual(self.names(), ["src"])

    def test_interrupted(self) -> None:
        """Ends the command, too."""
        pid = self.home / "pid"
        script = f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60"
        process = self.start("backup", "--from-command", "dump", "--", "sh", "-c", script)
        ends_s = time.monotonic() + TIMEOUT_S
        while not pid.exists() and time.monotonic() < ends_s:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual(process.returncode, 130, err)
        self.assertRaises(ProcessLookupError, os.kill, int(pid.read_text()), 0)

    def test_wrong_arguments(self) -> None:
        """A sentence each, and status 2."""
        self.write("src/f")
        self.run_command("put", "src/f")
        for arguments in (
            ["--stdin", "x", "src"],
            ["--stdin", "x", "--from-command", "y", "--", "true"],
            ["--from-command", "x"],
            ["--stdin", ""],
            ["--stdin", "a/b"],
            ["--stdin", "x", "--exclude", "y"],
            ["--stdin", "x", "--dry-run"],
            [],
        ):
            done = self.backup(*arguments)
            self.assertEqual(done.returncode, 2, (arguments, done.stderr))
            self.assertNotIn(b"Traceback", done.stderr)
