"""Cap files: caps that need not stand on the command line, and several at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli import cap_list_files
from pipegrid.cli.cap_list_files import as_line, parse_cap_file
from pipegrid.cli.error_report import sentence
from pipegrid.core.caps import LitCap, checkable
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import UsageError
from pipegrid.grid.client_creation import create_local
from pipegrid.transfer.results import RenewResult
from tests.cli.support import FakeGrid, Run
from tests.cli.test_process import SOURCE

ONE, TWO = str(LitCap(b"one")), str(LitCap(b"two"))
DIRECTORY = f"URI:DIR2-RO:{'a' * 26}:{'b' * 51}a"
CHK = f"URI:CHK:{'a' * 26}:{'b' * 51}a:3:10:1000"


NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
).filter(str.strip)
STARTS = [b"URI:CHK:", b"URI:LIT:", b"URI:DIR2-CHK:", b"ro.", b"\n", b"  ", b":3:10:", CHK.encode()]


class FormatTests(SynchronousTestCase):
    """What ``put -l`` writes, and a person writes by hand."""

    def read(self, data: bytes) -> list[tuple[str, str | None]]:
        return [(line.text, line.name) for line in parse_cap_file(data, "caps")]

    @given(
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
        ).filter(str.strip)
    )
    def test_names_come_back(self, name: str) -> None:
        """Whatever a file is called; on one line, without what a terminal would act upon."""
        line = as_line(ONE, name)
        self.assertTrue(line.isprintable(), line)
        self.assertEqual(self.read(f"{line}\n".encode()), [(ONE, name)])

    def test_bytes_that_are_no_text(self) -> None:
        """They come out of a path as they went in."""
        name = os.fsdecode(b"caf\xe9 \\ \xff")
        line = as_line(ONE, name)
        self.assertTrue(line.endswith("caf\\udce9 \\\\ \\udcff"), line)
        self.assertEqual(self.read(line.encode()), [(ONE, name)])

    def test_by_hand(self) -> None:
        """Empty lines, comments, a mark at the beginning, ends as on Windows, any white space."""
        data = f"\ufeff# mine\r\n\r\n  {ONE}\tone two\r\n{TWO}\r\n{CHK}   x".encode()
        self.assertEqual(self.read(data), [(ONE, "one two"), (TWO, None), (CHK, " x")])

    def test_paths(self) -> None:
        """They have blanks; two of them, or a tab, end one. What looks like a comment is none in a line."""
        data = (
            "home:a day at sea.jpg\nhome:a day  sea #2.jpg\n"
            f"{DIRECTORY}/some day/b #1\tname  of two\n  {DIRECTORY}:./some day \nhome:a  \n"
            f"my home:x y\n{CHK} a/b c\n # home:b\n"
        ).encode()
        expected = [
            ("home:a day at sea.jpg", None),
            ("home:a day", "sea #2.jpg"),
            (f"{DIRECTORY}/some day/b #1", "name  of two"),
            (f"{DIRECTORY}:./some day ", None),
            ("home:a", None),
            ("my home:x y", None),
            (CHK, "a/b c"),
        ]
        self.assertEqual(self.read(data), expected)

    @given(st.lists(st.sampled_from(STARTS) | st.binary(max_size=30)).map(b"".join))
    def test_strangers_bytes(self, data: bytes) -> None:
        """Whatever a file holds: caps, or one sentence that says what is wrong; nothing unforeseen."""
        try:
            for line in parse_cap_file(data, "caps"):
                checkable(line.text)
        except UsageError as error:
            self.assertTrue(sentence(error))

    def test_bounds(self) -> None:
        """Neither bytes nor caps without end."""
        for data, words in (
            (b"", "caps contains no caps"),
            (b"# nothing\n\n", "caps contains no caps"),
            (bytes(cap_list_files.MAX_BYTES + 1), "larger than 16 MiB"),
            (b"URI:LIT:\n" * (cap_list_files.MAX_CAPS + 1), "more than 100000 caps"),
            (b"x  \0", "caps:1: it holds a zero byte"),
            (b"x\nx  a\\x00", "caps:2: no file can have this name"),
            (b"x  \\ud800", "caps:1: no file can have this name"),
        ):
            with self.assertRaises(UsageError) as caught:
                self.read(data)
            self.assertIn(words, str(caught.exception))


class CapFileTests(SynchronousTestCase):
    """``--cap-file`` of every command that takes a cap."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.caps = self.directory / "caps"
        self.out = self.directory / "out"

    def run_command(self, *arguments: str, stdin: bytes = b"", status: int = 0) -> Run:
        run = Run(*arguments, stdin=stdin)
        self.assertEqual(self.successResultOf(run.finished), status, run.stderr)
        return run

    def refused(self, words: str, *arguments: str, stdin: bytes = b"", status: int = 2) -> None:
        """One sentence, and nothing is asked of any server, nor written."""
        run = self.run_command(*arguments, stdin=stdin, status=status)
        self.assertIn(words, run.stderr)
        self.assertEqual(run.stderr.count("\n"), 1, run.stderr)
        self.assertEqual(run.grid.seen, [])
        self.assertFalse(self.out.exists())

    def test_from_a_file_and_from_standard_input(self) -> None:
        """For each of the commands."""
        self.caps.write_text(ONE)
        for source, stdin in ((str(self.caps), b""), ("-", ONE.encode())):
            option = ("--cap-file", source)
            self.assertEqual(self.run_command("get", *option, stdin=stdin).stdout, "one")
            decoded = self.run_command("decode", *option, "-o", "-", stdin=stdin)
            self.assertEqual(decoded.stdout, "one")
            index = self.run_command("storage-index", *option, stdin=stdin)
            self.assertEqual(index.stdout, "-\n")
            for command in ("check", "repair", "renew"):
                run = Run(command, *option, stdin=stdin, grid=FakeGrid(hold=True))
                self.assertEqual([cap for cap, _ in run.grid.seen], [LitCap(b"one")])
                run.finished.cancel()
                self.successResultOf(run.finished)

    def test_several_files_into_a_directory(self) -> None:
        """Under their names; of directories in a name nothing is left, so that nothing goes elsewhere."""
        self.caps.write_text(f"{ONE}  ../../one.txt\n{TWO}  sub/two.txt\n")
        self.run_command("get", "--cap-file", str(self.caps), "-o", str(self.out))
        found = {path.name: path.read_bytes() for path in self.out.iterdir()}
        self.assertEqual(found, {"one.txt": b"one", "two.txt": b"two"})
        run = self.run_command("get", "--cap-file", str(self.caps), "-o", str(self.out), status=1)
        self.assertEqual(run.stderr.count("exists already"), 2)
        again = ("--json", "get", "--cap-file", str(self.caps), "-o", str(self.out))
        failed = self.run_command(*again, status=1).objects
        paths = [str(self.out / name) for name in ("one.txt", "two.txt")]
        self.assertEqual([each["path"] for each in failed], paths)
        self.assertEqual([each["exit_status"] for each in failed], [1, 1])
        self.run_command("get", "--cap-file", str(self.caps), "-fo", str(self.out))

    def test_a_directory_that_is_replaced(self) -> None:
        """What would come into it afterwards is named and left out; a link in its place is not followed."""
        elsewhere = self.directory / "elsewhere"
        elsewhere.mkdir()
        for jobs in ("1", "2"):
            grid = FakeGrid(hold=True)
            run = Run("get", ONE, TWO, "-o", str(self.out), "--jobs", jobs, grid=grid)
            self.out.rename(self.directory / f"moved {jobs}")
            self.out.symlink_to("elsewhere")
            while grid.held:
                grid.held.popitem()[1].callback(None)
            self.assertEqual(self.successResultOf(run.finished), 1)
            self.assertEqual(run.stderr.count("another directory has replaced"), 2)
            self.assertEqual(list(elsewhere.iterdir()), [])
            self.out.unlink()

    def test_a_directory_that_is_replaced_at_any_moment(self) -> None:
        """Nothing leads out of the one that was there: neither a part nor a name is written elsewhere."""
        elsewhere, moved = self.directory / "elsewhere", self.directory / "moved"
        for step in ("__init__", "_open_part", "write_pieces", "publish", "_give_name"):
            elsewhere.mkdir()
            original = getattr(PartFile, step)

            def swapping(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                if not moved.exists():
                    self.out.rename(moved)
                    self.out.symlink_to("elsewhere")
                    for part in moved.glob(".*"):  # as who wants it to be found there would
                        shutil.copy(part, elsewhere / part.name)
                    self.copied = set(os.listdir(elsewhere))
                return original(*args, **kwargs)

            with mock.patch.object(PartFile, step, swapping):
                Run("get", ONE, TWO, "-o", str(self.out))
            self.assertTrue(self.out.is_symlink(), step)
            self.assertEqual(set(os.listdir(elsewhere)), self.copied, step)
            self.out.unlink()
            for path in (moved, elsewhere):
                shutil.rmtree(path)

    def test_links_in_the_directory(self) -> None:
        """One that has a file's name is in the way, and replaced with force; nothing comes where it leads."""
        self.caps.write_text(f"{ONE}  one\n{TWO}  two\n")
        self.out.mkdir()
        (self.out / "one").symlink_to("../outside")
        (self.out / "two").write_bytes(b"")
        (self.out / "two").chmod(0o640)
        command = ("get", "--cap-file", str(self.caps), "-o", str(self.out))
        self.assertEqual(self.run_command(*command, status=1).stderr.count("exists already"), 2)
        self.assertFalse((self.directory / "outside").exists())
        self.run_command(*command, "--force")
        self.assertFalse((self.directory / "outside").exists())
        self.assertFalse((self.out / "one").is_symlink())
        self.assertEqual((self.out / "one").read_bytes(), b"one")
        self.assertEqual((self.out / "two").read_bytes(), b"two")
        self.assertEqual((self.out / "two").stat().st_mode & 0o777, 0o640)

    def test_without_names(self) -> None:
        """They are called after the storage index, or what stands for it."""
        self.run_command("get", ONE, TWO, "-o", str(self.out))
        self.assertEqual(len(list(self.out.glob("literal-*"))), 2)

    def test_one_file_into_a_directory(self) -> None:
        """Where the directory is there, or is meant."""
        self.caps.write_text(f"{ONE}  name")
        self.run_command("get", "--cap-file", str(self.caps), "-o", f"{self.out}/")
        self.assertEqual((self.out / "name").read_bytes(), b"one")
        self.caps.write_text(f"{TWO}  other")
        self.run_command("get", "--cap-file", str(self.caps), "-o", str(self.out))
        self.assertEqual((self.out / "other").read_bytes(), b"two")

    def test_no_place_for_all(self) -> None:
        """Standard output, a range, one name for two, or no name at all."""
        self.refused("add -o DIR", "get", ONE, TWO)
        self.refused(
            "--range is for one file", "get", ONE, TWO, "--range", "0-", "-o", str(self.out)
        )
        for lines, words in (
            (f"{ONE}  same\n{TWO}  a/same", "caps number 1 and 2 would both be written to"),
            (f"{ONE}  a\n{TWO}  a/", "'a/' names no file"),
            (f"{ONE}  a\n{TWO}  ..", "'..' names no file"),
        ):
            self.caps.write_text(lines)
            self.refused(words, "get", "--cap-file", str(self.caps), "-o", str(self.out))

    def test_the_same_cap_again(self) -> None:
        """It counts once, which is said."""
        run = self.run_command("get", ONE, ONE, "-o", str(self.out))
        self.assertEqual(len(run.grid.seen), 1)
        self.assertIn("1 of 2 caps were given before", run.stderr)

    def test_what_is_no_cap_file(self) -> None:
        """Empty, junk, endless, a directory, missing; the line is named."""
        for data, words in (
            (b"", "contains no caps"),
            (b"URI:CHK:torn\n", f"{self.caps}:1: this file cap has 1 field"),
            (b"\x89PNG\r\n\x1a\n" + bytes(range(128, 256)), f"{self.caps}:1: "),
        ):
            self.caps.write_bytes(data)
            self.refused(words, "check", "--cap-file", str(self.caps))
        with self.caps.open("wb") as file:
            file.truncate(10 << 30)
        self.refused("larger than 16 MiB", "check", "--cap-file", str(self.caps))
        self.refused("larger than 16 MiB", "check", "--cap-file", "/dev/zero")
        self.refused("Is a directory", "check", "--cap-file", str(self.directory), status=1)
        self.refused("No such file", "check", "--cap-file", "nowhere", status=1)
        self.refused("only once", "check", "--cap-file", "-", "--cap-file", "-")
        self.refused("Missing argument 'CAP...' or option '--cap-file'", "check")
        self.refused("standard input contains no caps", "get", "-")
        self.refused("only once", "check", "-", "--from", "-")
        self.refused("the name is empty", "check", "--cap-file", "")
        both = f"{ONE}\n{TWO}".encode()
        self.refused("2 caps were given", "decode", "--cap-file", "-", "-o", "x", stdin=both)

    def test_one_that_is_bad(self) -> None:
        """It is named, with its line, and the others are looked at."""
        self.caps.write_text(f"{os.urandom(40).hex()}\n{ONE}\n")
        result = RenewResult(LitCap(b""), {}, 0, 0, [], [])
        run = Run("renew", "--cap-file", str(self.caps), grid=FakeGrid(renew_result=result))
        self.assertEqual(self.successResultOf(run.finished), 1, run.stderr)
        self.assertIn(f"{self.caps}:1: ", run.stderr)
        self.assertIn("nothing to renew", run.stdout)
        run = Run("renew", ONE, "nonsense", grid=FakeGrid(renew_result=result))
        self.assertEqual(self.successResultOf(run.finished), 1, run.stderr)
        self.assertIn("cap number 2: ", run.stderr)

    def test_as_many_as_there_may_be(self) -> None:
        """As they end, all of them, and their sum."""
        caps = [str(LitCap(b"%d" % number)) for number in range(2000)]
        self.caps.write_text("\n".join(caps))
        grid = FakeGrid(renew_result=RenewResult(LitCap(b""), {}, 0, 0, [], []))
        run = Run("--json", "renew", "--cap-file", str(self.caps), grid=grid)
        self.assertEqual(self.successResultOf(run.finished), 0)
        *objects, summary = run.objects
        self.assertEqual([each["cap"] for each in objects], caps[::-1])
        sums = {"objects": 2000, "healthy": 2000, "literal": 2000}
        self.assertEqual({n: v for n, v in summary["summary"].items() if v}, sums)

    def test_put_prints_names(self) -> None:
        """``put -l``; without it, caps only."""
        path = self.directory / "a\nb"
        path.write_bytes(b"one")
        run = self.run_command("put", "-l", str(path))
        self.assertEqual(run.stdout, f"{ONE}  {self.directory}/a\\nb\n")
        self.caps.write_text(run.stdout)
        self.run_command("get", "--cap-file", str(self.caps), "-o", f"{self.out}/")
        self.assertEqual([each.name for each in self.out.iterdir()], ["a\nb"])


class WholeTests(SynchronousTestCase):
    """Many files, as a user has them: there and back by one cap file."""

    def setUp(self) -> None:
        self.home = Path(self.mktemp()).absolute()
        create_local(self.home / "grid", servers=4)
        self.files = {f"file {number}": os.urandom(100 + number) for number in range(12)}
        for name, data in self.files.items():
            (self.home / name).write_bytes(data)

    def pipegrid(self, *arguments: str, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pipegrid.cli", *arguments],
            cwd=self.home,
            env={**os.environ, "PIPEGRID_DIR": str(self.home / "grid"), "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(done.returncode, status, done.stderr)
        self.said = done.stderr
        return done.stdout

    def test_there_and_back(self) -> None:
        """put -l, check, renew, lose a server, repair, get; each line says which file it is of."""
        (self.home / "caps").write_text(self.pipegrid("put", "-l", *self.files))
        for command, words in (
            (("check", "--add-lease"), "healthy: 10 of 10 shares good"),
            (("renew",), "renewed: 10 of 10 shares have a lease now, on 4 servers"),
            (("repair",), "healthy: nothing to repair"),
        ):
            lines = self.pipegrid(*command, "--cap-file", "caps").splitlines()
            self.assertEqual(sorted(line.partition(": ")[0] for line in lines), sorted(self.files))
            self.assertIn("pipegrid: 12 objects: 12 ", self.said)
            self.assertTrue(all(words in line for line in lines), lines)
        self.pipegrid("get", "--cap-file", "caps", "-o", "back")
        for name, data in self.files.items():
            self.assertEqual((self.home / "back" / name).read_bytes(), data)
        lines = self.pipegrid("--json", "check", "--add-lease", "--cap-file", "caps").splitlines()
        found = [json.loads(line) for line in lines]
        summary = found.pop()["summary"]
        self.assertEqual((summary["objects"], summary["healthy"], summary["failed"]), (12, 12, 0))
        self.assertEqual(sorted(each["name"] for each in found), sorted(self.files))
        servers = [f"local-0{number}" for number in range(4)]
        self.assertEqual([each["renewed"] for each in found], [servers] * 12)

    def test_one_lost_file_does_not_stop_the_others(self) -> None:
        """It is named; the status is its own, since it is the only one."""
        caps = self.pipegrid("put", "-l", *self.files)
        (self.home / "caps").write_text(f"{CHK}  lost\n{caps}")
        lines = self.pipegrid("renew", "--cap-file", "caps", status=4).splitlines()
        words = "0 of 10 shares have a lease now, on 0 servers; any 3 restore the file"
        self.assertIn(f"lost: lost: {words}", lines)
        self.assertEqual(len(lines), 13)
        self.pipegrid("get", "--cap-file", "caps", "-o", "back", status=4)
        self.assertRegex(self.said, "^pipegrid: lost: [^\n]*\n$")
        self.assertEqual({path.name for path in (self.home / "back").iterdir()}, set(self.files))
        objects = [
            json.loads(line)
            for line in self.pipegrid(
                "--json", "repair", "--cap-file", "caps", status=4
            ).splitlines()
        ]
        summary = objects.pop()["summary"]
        self.assertEqual((summary["failed"], summary["healthy"]), (1, 12))
        [lost] = [each for each in objects if each["name"] == "lost"]
        self.assertEqual(lost["exit_status"], 4)
        self.assertEqual({each["name"] for each in objects}, {"lost", *self.files})
