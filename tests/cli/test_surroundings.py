"""Commands where something is missing that all processes seem to have; real ones, in real surroundings."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from unittest import skipUnless

from pipegrid.cli import LEAST_FILES
from tests.cli.processes import TIMEOUT_S, ProcessTestCase

NOBODY = 54321
"""A user whom no list of users has, as containers run programs."""


def limit_files(soft: int, hard: int) -> None:
    """Let this process open so many files; ``hard`` is how far it may raise that."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class SurroundingsTests(ProcessTestCase):
    """One sentence, and what can be done is done."""

    def setUp(self) -> None:
        super().setUp()
        (self.home / "file").write_bytes(b"x" * 1000)

    def run_so(self, before: Callable[[], None], *arguments: str, status: int) -> tuple[str, str]:
        """Run a command in a process that was changed before; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "pipegrid.cli", *arguments],
            cwd=self.home,
            env=self.environment,
            preexec_fn=before,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        self.assertNotIn("failed unexpectedly", done.stderr)
        return done.stdout, done.stderr

    @skipUnless(os.geteuid() == 0, "only root can be somebody else")
    def test_a_user_without_a_home(self) -> None:
        """What needs the user's own directory says what to do; what needs none works."""
        os.chmod(self.home, 0o755)
        del self.environment["HOME"]

        def be_nobody() -> None:
            os.setresuid(NOBODY, 0, 0)  # by name alone: not all may read root's interpreter

        for words in (("put", "file"), ("status",), ("serve",), ("alias", "list"), ("ls", "home:")):
            out, err = self.run_so(be_nobody, *words, status=2)
            self.assertEqual(out, "")
            self.assertIn("set HOME, or name the client's directory with -d", err, (words, err))
        os.chmod(self.home, 0o777)
        out, _ = self.run_so(be_nobody, "encode", "file", "--shares", "shares", status=0)
        self.assertIn("URI:CHK:", out)
        self.run_so(be_nobody, "-d", "grid", "init", status=0)
        out, _ = self.run_so(be_nobody, "-d", "grid", "put", "file", status=0)
        self.assertIn("URI:CHK:", out)

    def test_relative_base_directories(self) -> None:
        """Count as not set: each working directory would have a grid that no other one knows."""
        self.environment["XDG_DATA_HOME"] = "data"
        cap, _ = self.run_so(lambda: None, "put", "file", status=0)
        self.assertFalse((self.home / "data").exists())
        self.assertTrue((self.home / ".local/share/pipegrid/pipegrid.cfg").exists())
        del self.environment["XDG_DATA_HOME"]
        self.assertEqual(self.run_so(lambda: None, "cat", cap.strip(), status=0)[0], "x" * 1000)

    def test_too_few_file_descriptors(self) -> None:
        """Every command says so, with its status; below five the interpreter itself does not start."""

        def refused(limit: int, *words: str) -> None:
            out, err = self.run_so(partial(limit_files, limit, limit), *words, status=1)
            self.assertEqual((out, err.count("\n")), ("", 1), (limit, err))
            self.assertIn(f"too few file descriptors: the limit is {limit}; raise it", err)

        commands = (("put", "file"), ("get", "URI:LIT:ae"), ("serve",), ("mirror", "list"))
        for limit in range(5, 41):
            refused(limit, "status")
        for limit in (5, 9, 40, LEAST_FILES - 1):
            for words in commands:
                refused(limit, *words)
            out, _ = self.run_so(partial(limit_files, limit, limit), "--version", status=0)
            self.assertTrue(out.startswith("pipegrid "))

    def test_a_command_that_fails_before_it_begins(self) -> None:
        """It ends with its status: where files ran out a reactor went on for ever, deaf to signals."""
        run = "import sys, pipegrid.cli as c; c._may_open_enough = lambda: True; c.main()"
        for limit in (8, 9, 12):
            done = subprocess.run(
                [sys.executable, "-c", run, "status"],
                cwd=self.home,
                env=self.environment,
                preexec_fn=partial(limit_files, limit, limit),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            self.assertIn(done.returncode, (1, 2), done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_twist_and_the_library(self) -> None:
        """They say what the command says."""
        why = "too few file descriptors: the limit is 20; raise it"
        grid = (
            "from twisted.internet import reactor, task; from pipegrid import Grid\n"
            "task.react(lambda r: Grid.open(r), ())"
        )
        for words in (
            ("-m", "twisted", "pipegrid", "-d", "node", "--port", "tcp:0:interface=127.0.0.1"),
            ("-c", grid),
        ):
            done = subprocess.run(
                [sys.executable, *words],
                cwd=self.home,
                env=self.environment,
                preexec_fn=partial(limit_files, 20, 20),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            self.assertIn(why, done.stdout + done.stderr)
            self.assertNotEqual(done.returncode, 0)

    def test_just_enough_file_descriptors(self) -> None:
        """The least number does for a put, and a limit that may be raised is."""
        for soft, hard in ((LEAST_FILES, LEAST_FILES), (9, LEAST_FILES)):
            cap, _ = self.run_so(partial(limit_files, soft, hard), "put", "file", status=0)
            again, _ = self.run_so(partial(limit_files, soft, hard), "cat", cap.strip(), status=0)
            self.assertEqual(again, "x" * 1000)

    def test_a_working_directory_that_is_gone(self) -> None:
        """Is named; what does not need it works."""
        gone = self.home / "gone"

        def go_nowhere() -> None:
            gone.mkdir()
            os.chdir(gone)
            gone.rmdir()

        for words in (("put", "-r", "."), ("backup", "."), ("get", "URI:LIT:nbswy3dp", "-o", "x")):
            _, err = self.run_so(go_nowhere, *words, status=1)
            self.assertIn("the working directory does not exist any more", err, words)
        out, _ = self.run_so(go_nowhere, "put", str(self.home / "file"), status=0)
        self.assertIn("URI:CHK:", out)

    def test_a_standard_output_that_is_closed(self) -> None:
        """Whoever asks for something and gets nothing is told so, once."""
        for words in (("--version",), ("--help",), ("put", "--help"), ("--json", "put", "file")):
            _, err = self.run_so(lambda: os.close(1), "-q", *words, status=1)
            self.assertEqual(err.count("standard output is closed"), 1, words)

    def test_as_a_module(self) -> None:
        """``python -m pipegrid`` is the same program, wherever its script was put."""
        for words in ([], ["--version"]):
            found = [
                subprocess.run(
                    [sys.executable, "-m", name, *words],
                    env=self.environment,
                    capture_output=True,
                    timeout=TIMEOUT_S,
                    check=False,
                )
                for name in ("pipegrid", "pipegrid.cli")
            ]
            self.assertEqual(found[0].stdout, found[1].stdout)
            self.assertEqual(found[0].returncode, 0 if words else 2)

    def test_help_on_a_full_disk(self) -> None:
        """It says where it could not be written."""
        full = os.open("/dev/full", os.O_WRONLY)
        self.addCleanup(os.close, full)

        def write_there() -> None:
            os.dup2(full, 1)

        for words in (("--help",), ("put", "--help"), ("--version",)):
            _, err = self.run_so(write_there, *words, status=1)
            told = "pipegrid: cannot write to standard output: No space left on device\n"
            self.assertEqual(err, told, words)
        for status, asked in ((2, "nonsense"), (1, "status")):
            _, err = self.run_so(write_there, "--json", asked, status=status)
            self.assertIn("cannot write to standard output", err, asked)
            self.assertNotIn("ignored", err)

    def test_no_file_takes_the_place_of_a_standard_stream(self) -> None:
        """What a library writes to one that was closed is in no share, and goes to no client."""
        code = (
            "import os, sys\n"
            "from pipegrid.cli import main\n"
            "sys.argv = ['pipegrid', 'put', 'file']\n"
            "try:\n"
            "    main()\n"
            "except SystemExit:\n"
            "    pass\n"
        )

        def close_all() -> None:
            os.closerange(0, 3)

        ends = "os._exit = lambda status: open('told', 'w').write(' '.join(map(names, range(3))))\n"
        names = "names = lambda n: os.readlink(f'/proc/self/fd/{n}')\n"
        done = subprocess.run(
            [sys.executable, "-c", code.replace("try:", f"{names}{ends}try:", 1)],
            cwd=self.home,
            env=self.environment,
            preexec_fn=close_all,
            timeout=TIMEOUT_S,
            check=False,
        )
        self.assertEqual(done.returncode, 0)
        told = (self.home / "told").read_text().split()
        self.assertEqual(told, [os.devnull] * 3)

    def test_json_on_a_full_disk(self) -> None:
        """That it is full is said once, and not for the failure's own line again."""

        def write_there() -> None:
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

        for words in (("put", "file"), ("status",), ("storage-index", "URI:LIT:nbswy3dp")):
            _, err = self.run_so(write_there, "-q", "--json", *words, status=1)
            self.assertEqual(err.count("No space left"), 1, words)

    def test_servers_that_are_away_over_foolscap(self) -> None:
        """It is said that they cannot be reached, and not what the lost connection made of the writes."""
        (self.home / "large").write_bytes(os.urandom(3_000_000))
        private = self.home / "grid/private"
        private.mkdir(parents=True)
        furl = f"pb://{'a' * 32}@tcp:127.0.0.1:1/swissnum"
        servers = {
            f"s{n}": {"ann": {"anonymous-storage-FURL": furl.replace("a" * 9, "abcdefghi"[n] * 9)}}
            for n in range(3)
        }
        (private / "servers.yaml").write_text(json.dumps({"storage": servers}))
        self.run_so(lambda: None, "-d", "grid", "init", status=0)
        for name in ("file", "large"):
            _, err = self.run_so(lambda: None, "-d", "grid", "put", name, status=3)
            self.assertIn("refused (s1, s2 too)", err)
            self.assertNotIn("unfinished upload", err)

    def test_a_standard_output_that_does_not_wait(self) -> None:
        """As another program may have made a pipe: all of a file comes through, buffered or not."""
        data = os.urandom(400_000)
        (self.home / "large").write_bytes(data)
        cap = self.run_so(lambda: None, "-q", "put", "large", status=0)[0].strip()
        for unbuffered in ("", "1"):
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            with subprocess.Popen(
                [sys.executable, "-m", "pipegrid.cli", "get", cap],
                cwd=self.home,
                env={**self.environment, "PYTHONUNBUFFERED": unbuffered},
                stdout=writing,
            ) as process:
                os.close(writing)
                select.select([reading], [], [], TIMEOUT_S)
                time.sleep(0.3)  # it has written what a pipe holds
                with os.fdopen(reading, "rb") as file:
                    self.assertEqual(file.read(), data)
            self.assertEqual(process.returncode, 0)

    def test_a_standard_input_that_does_not_wait(self) -> None:
        """All of a cap file is read, whenever it comes."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        with subprocess.Popen(
            [sys.executable, "-m", "pipegrid.cli", "storage-index", "-"],
            cwd=self.home,
            env=self.environment,
            stdin=reading,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            os.close(reading)
            for content in (b"nbswy3dp", b"nbuqu", b"pafa"):
                time.sleep(0.2)
                os.write(writing, b"URI:LIT:%s\n" % content)
            os.close(writing)
            out, err = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual((process.returncode, out.count("\n")), (0, 3), err)

    def test_a_disk_that_fills_up_within_the_last_write(self) -> None:
        """Is told of where standard output has no buffer, too, as in many containers."""
        (self.home / "file").write_bytes(os.urandom(90_000))
        cap = self.run_so(lambda: None, "-q", "put", "file", status=0)[0].strip()
        for unbuffered in ("", "1"):
            self.environment["PYTHONUNBUFFERED"] = unbuffered

            def have_little_room() -> None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, 80_000))
                os.dup2(os.open("copy", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)

            _, err = self.run_so(have_little_room, "get", cap, status=1)
            self.assertIn("cannot write to standard output: File too large", err)
