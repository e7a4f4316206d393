"""What ``backup`` and ``put -r`` select: patterns, tags, sizes, lists, several directories, streams."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.cli.processes import ProcessTestCase

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
