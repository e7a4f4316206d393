"""What a person sees while a command runs: the bar, and results beside it, on terminals of two widths."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import tqdm.std
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.console import Console
from pipegrid.cli.progress_bar import ProgressBar
from pipegrid.cli.tree_transfers import counts_of, reports_of
from pipegrid.core.caps import LitCap
from pipegrid.grid.client_creation import create_local
from pipegrid.tree.tree_upload import TreeCounts
from tests.cli.pty import TerminalTestCase
from tests.cli.support import Terminal

WIDTHS = (80, 130)
CAP = re.compile(r"URI:CHK:[a-z2-7]{26}:[a-z2-7]{52}:3:10:(\d+)")


class RateTests(SynchronousTestCase):
    """What the bar says of how fast it goes, by a clock of the test's."""

    def setUp(self) -> None:
        self.now_s = 1000.0
        self.patch(tqdm.std, "time", lambda: self.now_s)
        self.stderr = Terminal()

    def last_shown(self) -> str:
        """What stands there now."""
        return self.stderr.getvalue().rstrip("\r").rpartition("\r")[2]

    def test_sending_after_hashing(self) -> None:
        """A slow line is shown from its first second on, and not with the rate at which keys are made."""
        size = 600_000_000
        with ProgressBar(Console(None, None, self.stderr), "put") as progress:
            upload = progress.upload(size)
            for eighth in range(21):
                upload.hashed(size * eighth // 20, size)
                self.now_s += 0.125
            self.assertIn("put: hashing: 100%", self.last_shown())
            upload.sent(0, 10)
            for second in range(1, 31):
                self.now_s += 1
                upload.sent(second * 2_000_000 * 3, size * 3)
                shown = self.last_shown()
                self.assertTrue(shown.startswith("put:  "), shown)
                self.assertIn(f"| {second * 2.0:.2f}"[:6] + "M/600M ", shown)
                self.assertIn(f"[00:{second:02}<", shown)
                self.assertIn("2.00MB/s]", shown)

    def test_what_was_found_is_not_fast(self) -> None:
        """What servers had says nothing of the rate at which the rest goes."""
        size = 100_000_000
        with ProgressBar(Console(None, None, self.stderr), "put") as progress:
            upload = progress.upload(size)
            upload.sent(0, size)
            self.now_s += 1
            upload.found(70_000_000, size)
            upload.sent(71_000_000, size)
            self.assertIn("70 MB found", self.last_shown())
            self.now_s += 1
            upload.sent(72_000_000, size)
            self.assertRegex(self.last_shown(), "72.0M/100M .*, 1.00MB/s")

    def test_what_is_unchanged(self) -> None:
        """Of a tree it counts as done, and as found."""
        with ProgressBar(Console(None, None, self.stderr), "backup") as progress:
            reports = reports_of(Console(None, None, self.stderr), progress)
            self.now_s += 1
            reports.progress(TreeCounts(bytes=100_000_000, unchanged_bytes=70_000_000))
            self.assertIn("70.0M/100M", self.last_shown())
            self.now_s += 1
            reports.sending(TreeCounts(bytes=100_000_000, unchanged_bytes=70_000_000), 2_000_000)
            self.assertIn("72.0M/100M", self.last_shown())
            self.assertIn("70 MB found", self.last_shown())

    def test_servers_that_are_waited_for(self) -> None:
        """The bar says so, with a sentence beside it, until they are in reach."""
        with ProgressBar(Console(None, None, self.stderr), "backup") as progress:
            reports = reports_of(Console(None, None, self.stderr), progress)
            self.now_s += 1
            reports.waiting("too few servers are reachable")
            self.assertIn("pipegrid: too few servers are reachable\n", self.stderr.getvalue())
            reports.progress(TreeCounts(bytes=100_000_000, sent_bytes=70_000_000))
            self.assertIn("backup: waiting for servers", self.last_shown())
            self.now_s += 1
            reports.waiting(None)
            reports.progress(TreeCounts(bytes=100_000_000, sent_bytes=71_000_000))
            self.assertIn("pipegrid: enough servers are reachable again\n", self.stderr.getvalue())
            self.assertNotIn("waiting", self.last_shown())

    def test_a_second_try(self) -> None:
        """The summary says what came at one, and nothing if nothing did."""
        self.assertNotIn("second", counts_of(TreeCounts(files=3)))
        said = counts_of(TreeCounts(files=3, second_tries=2, left_out=1))
        self.assertIn("; 2 at the second attempt, after servers came back; 1 left out", said)


class BarTests(TerminalTestCase):
    """A bar on stderr, results on stdout, both the same terminal."""

    def setUp(self) -> None:
        super().setUp()
        create_local(self.home / "grid")
        self.environment["PIPEGRID_DIR"] = str(self.home / "grid")

    def test_what_is_no_text(self) -> None:
        """It does not come onto a terminal unless one insists; text does."""
        for words, data, status in (
            ((), b"a line of text\n", 0),
            ((), b"\x1b[7mPK\0\0", 1),
            (("-o", "-"), b"PK\0\0", 0),
        ):
            with self.subTest(data=data):
                terminal = self.on_terminal("pipegrid", "get", str(LitCap(data)), *words)
                self.assertEqual(terminal.finish(), status)
                if status:
                    self.assertNotIn("PK", terminal.raw)
                    self.assertIn("this file is not text", terminal.text)
                    self.assertIn("with '-o -'", " ".join(terminal.text.split()))
                else:
                    self.assertEqual(terminal.raw.replace("\r\n", "\n"), data.decode())

    def make(self, name: str, size: int) -> bytes:
        data = os.urandom(size)
        (self.home / name).write_bytes(data)
        return data

    def test_put(self) -> None:
        """The cap stands on a line of its own, whole, whatever the bar was at."""
        self.make("file", 3_000_000)
        for columns in WIDTHS:
            terminal = self.on_terminal("pipegrid", "put", "file", columns=columns)
            self.assertEqual(terminal.finish(), 0, terminal.text)
            self.assertRegex(terminal.raw, r"put: hashing: .*/3\.00M")
            self.assertRegex(terminal.raw, r"put: +[0-9]+%.*/3\.00M")
            self.assertNotIn("/10.0M", terminal.raw)  # bytes of shares are nobody's business
            (line,) = terminal.text.splitlines()
            self.assertTrue(CAP.fullmatch(line), terminal.raw)
        self.assertIn("3 MB found", terminal.raw)  # the second time, all is there

    def test_several_files(self) -> None:
        """So do many caps, some printed in the middle, in the order of the files."""
        sizes = [1000 + number for number in range(12)]
        sizes.insert(3, 4_000_000)
        names = [f"file-{size}" for size in sizes]
        for name, size in zip(names, sizes, strict=True):
            self.make(name, size)
        for columns in WIDTHS:
            terminal = self.on_terminal("pipegrid", "put", *names, columns=columns)
            self.assertEqual(terminal.finish(), 0, terminal.text)
            found = [CAP.fullmatch(line) for line in terminal.text.splitlines()]
            self.assertEqual([int(match[1]) for match in found if match], sizes)
            self.assertEqual(len(found), len(sizes), terminal.text)

    def test_a_pipe_that_ends_on_the_terminal(self) -> None:
        """The bar is gone before ``tee`` shows the first cap, and does not come back."""
        self.make("file", 2_000_000)
        self.make("more", 1_000_000)
        for command in ("put file more", "put -r d", "get -o - {}"):
            if command == "put -r d":
                (self.home / "d").mkdir()
                self.make("d/one", 2_000_000)
            text = str(LitCap(b"".join(b"line %d\n" % number for number in range(5))))
            script = (
                f"pipegrid -q alias list; pipegrid {command.format(text)} | (sleep 0.3; tee copy)"
            )
            for _ in range(3):
                terminal = self.on_terminal("sh", "-c", script)
                self.assertEqual(terminal.finish(), 0, terminal.text)
                copy = (self.home / "copy").read_text()
                prose = [each for each in terminal.text.splitlines() if "pipegrid: " not in each]
                self.assertEqual("\n".join(prose), copy.rstrip("\n"), terminal.raw)

    def test_a_terminal_that_cannot_draw(self) -> None:
        """There is no bar where the cursor does not move, nor where the terminal has no name."""
        self.make("file", 2_000_000)
        for name in ("dumb", ""):
            self.environment["TERM"] = name
            terminal = self.on_terminal("sh", "-c", "pipegrid put file | tee copy")
            self.assertEqual(terminal.finish(), 0, terminal.text)
            self.assertTrue(CAP.fullmatch(terminal.raw.strip()), terminal.raw)

    def test_get(self) -> None:
        """A bar while it goes to a file, none in the midst of one that goes to the terminal."""
        data = "".join(f"line {number}\r\n" for number in range(20)).encode()
        (self.home / "file").write_bytes(data)
        put = [sys.executable, "-m", "pipegrid.cli", "put", "file"]
        cap = subprocess.run(
            put, cwd=self.home, env=self.environment, stdout=subprocess.PIPE, check=True, text=True
        ).stdout.strip()
        for columns in WIDTHS:
            terminal = self.on_terminal("pipegrid", "get", cap, columns=columns)
            self.assertEqual(terminal.finish(), 0)
            self.assertEqual(terminal.lines, data.decode().split("\r\n")[:-1])
            self.assertNotIn("get: ", terminal.raw)
            terminal = self.on_terminal("pipegrid", "get", cap, "-fo", "copy", columns=columns)
            self.assertEqual((terminal.finish(), terminal.lines), (0, []))
            self.assertIn("get: ", terminal.raw)
            self.assertEqual((self.home / "copy").read_bytes(), data)

    def test_ctrl_c(self) -> None:
        """It is interrupted in a line of its own, and nothing of the bar is left."""
        for columns in WIDTHS:
            terminal = self.on_terminal("pipegrid", "put", "-", columns=columns)
            terminal.wait_until(lambda seen: "put: " in seen.raw)
            terminal.send("\x03")
            self.assertEqual(terminal.finish(), 130)
            (line,) = terminal.lines
            self.assertRegex(line, "^pipegrid: interrupted.* the same command can be run again$")
            self.assertNotIn("put: :", terminal.raw)

    def test_a_terminal_that_hangs_up(self) -> None:
        """The bar is taken away, as at Ctrl-C, for whoever sees that terminal again."""
        terminal = self.on_terminal("pipegrid", "put", "-")
        terminal.wait_until(lambda seen: "put: " in seen.raw)
        terminal.process.kill(signal.SIGHUP)
        self.assertEqual(terminal.finish(), 130)
        (line,) = terminal.lines
        self.assertRegex(line, "^pipegrid: interrupted.* the same command can be run again$")

    def test_ctrl_c_behind_a_bar_of_the_whole_width(self) -> None:
        """The terminal's echo of it breaks no line, so that all of the bar can be taken away."""
        self.make("file", 3_000_000)
        for columns in WIDTHS:
            terminal = self.on_terminal("pipegrid", "put", "file", "-", columns=columns)
            terminal.wait_until(lambda seen: "%|" in seen.raw)
            terminal.send("\x03")
            self.assertEqual(terminal.finish(), 130)
            self.assertIn("^C", terminal.raw)
            (line,) = [
                each for each in terminal.lines if "URI:" not in each and ":3000000" not in each
            ]
            self.assertRegex(line, "^pipegrid: interrupted.* the same command can be run again$")

    def test_objects(self) -> None:
        """They are counted one by one, and the unit is a word."""
        (self.home / "dir").mkdir()
        for number in range(30):
            (self.home / "dir" / str(number)).write_text("x" * 100 + str(number))
        put = [sys.executable, "-m", "pipegrid.cli", "put", "-qr", "dir"]
        cap = subprocess.run(
            put, cwd=self.home, env=self.environment, stdout=subprocess.PIPE, check=True, text=True
        ).stdout.strip()
        terminal = self.on_terminal("pipegrid", "check", "-r", cap)
        self.assertEqual(terminal.finish(), 0, terminal.text)
        self.assertRegex(terminal.raw, r"check: [0-9]+ objects \[")
        self.assertEqual(terminal.lines, ["31 objects: 31 healthy, 310 of 310 shares good"])

    def test_prose_and_results_of_one_command(self) -> None:
        """A file that is not there is told of between the caps, each on its line."""
        self.make("file", 300_000)
        for columns in WIDTHS:
            terminal = self.on_terminal(
                "pipegrid", "put", "file", "nothing", "file", columns=columns
            )
            self.assertEqual(terminal.finish(), 1)
            first, second, third = terminal.text.splitlines()
            self.assertTrue(CAP.fullmatch(first) and first == third, terminal.text)
            self.assertEqual(second, "pipegrid: cannot read nothing: No such file or directory")
