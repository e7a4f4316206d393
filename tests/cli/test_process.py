"""What only a real process shows: signals, pipes that close, exit statuses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src"
TIMEOUT_S = 60

SIGNALLED = """
import os, runpy, signal, sys
seen = 0
def signalled(event, arguments):
    global seen
    if event == "import" and (seen or arguments[0] == {first!r}):
        seen += 1
        if seen == {number}:
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(signalled)
sys.argv[0] = "-m"
{run}
"""
"""A program that gets Ctrl-C at one of its imports, counted from the first that is named."""


class ProcessTests(SynchronousTestCase):
    """``pipegrid`` as a shell sees it."""

    def setUp(self) -> None:
        self.home = Path(self.mktemp()).absolute()
        self.home.mkdir()
        self.environment = {
            "HOME": str(self.home),
            "PYTHONPATH": str(SOURCE),
            "PATH": os.environ["PATH"],
        }
        self.file = self.home / "file"
        self.file.write_bytes(os.urandom(300_000))

    def start(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start a command in a scratch home."""
        process = subprocess.Popen(
            [sys.executable, "-m", "pipegrid.cli", *arguments],
            cwd=self.home,
            env=self.environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def run_command(self, *arguments: str) -> tuple[int, bytes, bytes]:
        """Run a command to its end."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, stdout, stderr

    def test_a_file_goes_and_comes_back(self) -> None:
        """With nothing configured, a grid is made, and said so on stderr only."""
        status, cap, prose = self.run_command("put", "file")
        self.assertEqual(status, 0, prose)
        self.assertIn(b"no grid is configured", prose)
        status, data, prose = self.run_command("get", cap.decode().strip())
        self.assertEqual((status, prose), (0, b""))
        self.assertEqual(data, self.file.read_bytes())

    def test_a_signal_while_the_reactor_sleeps(self) -> None:
        """It ends the command also if another thread is told of it, as if it came just before that."""
        script = (
            "import signal, sys, threading, time\n"
            "from twisted.internet.defer import Deferred\n"
            "from pipegrid.cli.startup import process\n"
            "from pipegrid.cli.console import Console\n"
            "from pipegrid.cli.command_job import Invocation\n"
            "def signalled():\n"
            "    time.sleep(0.3)\n"
            "    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
            "def start(reactor):\n"
            "    threading.Thread(target=signalled).start()\n"
            "    return Deferred().addErrback(lambda _: 1)\n"
            "console = Console(None, sys.stdout.buffer, sys.stderr)\n"
            "sys.exit(process._run_reactor(start, Invocation(console)))\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]},
            capture_output=True,
            timeout=20,
        )
        self.assertEqual((ended.returncode, ended.stderr), (130, b""))

    def test_a_signal_that_is_forgotten(self) -> None:
        """Code that catches everything while modules are loaded does not keep it from ending the command."""
        script = (
            "import os, signal, sys, time\n"
            "import pipegrid.cli\n"
            "from pipegrid.cli.startup import process\n"
            "one_heap = process.one_heap\n"
            "def forgetful():\n"
            "    try:\n"
            "        os.kill(os.getpid(), signal.SIGTERM)\n"
            "        time.sleep(5)\n"
            "    except KeyboardInterrupt:\n"
            "        one_heap()\n"
            "process.one_heap = forgetful\n"
            "sys.argv[1:] = ['-d', 'server', 'serve', '--port', 'tcp:0:interface=127.0.0.1']\n"
            "pipegrid.cli.main()\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", script],
            cwd=self.home,
            env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]},
            capture_output=True,
            timeout=20,
        )
        self.assertEqual((ended.returncode, ended.stdout), (130, b""))
        self.assertEqual(
            ended.stderr, b"pipegrid: interrupted; the same command can be run again\n"
        )

    def test_a_signal_at_any_import(self) -> None:
        """Ctrl-C prints no traceback, from the first line of the program to its end; the status is 130."""
        said = {b"", b"pipegrid: interrupted; the same command can be run again\n"}
        self.run_command("init")
        script = f"runpy.run_path({str(ROOT / 'bin/pipegrid')!r}, run_name='__main__')"
        module = "runpy.run_module('pipegrid', run_name='__main__', alter_sys=True)"
        for run, first in ((script, "pipegrid.cli"), (module, "pipegrid.version")):
            for number in (*range(1, 6), 10, 20, 40, 60, 80, 100, 150, 200, 300, 400):
                prelude = SIGNALLED.format(first=first, number=number, run=run)
                ended = subprocess.run(
                    [sys.executable, "-c", prelude, "status"],
                    cwd=self.home,
                    env=self.environment,
                    capture_output=True,
                    timeout=TIMEOUT_S,
                )
                if number > 150 and ended.returncode == 0:
                    self.assertNotIn(b"Traceback", ended.stderr)  # it was done already
                    continue
                self.assertEqual(ended.returncode, 130, (number, ended.stderr))
                self.assertIn(ended.stderr, said, number)

    def test_a_reader_that_leaves_ends_it_quietly(self) -> None:
        """``get`` and ``--help`` into ``head -c1``: no words, and a status that is not 0."""
        cap = self.run_command("put", "file")[1].decode().strip()
        process = self.start("get", cap)
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, prose = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual((process.returncode, prose), (1, b""))

    def test_signals_interrupt_and_clean_up(self) -> None:
        """SIGINT, SIGTERM and SIGHUP end a command that waits for its input: 130, and one sentence."""
        self.run_command("init")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process = self.start("put", "-", stdin=subprocess.PIPE)
            self.wait_until_reading(process)
            process.send_signal(number)
            process.wait(TIMEOUT_S)  # with its input still open, or that might end it first
            _, prose = process.communicate(timeout=TIMEOUT_S)
            self.assertEqual(process.returncode, 130, prose)
            self.assertEqual(prose.count(b"\n"), 1, prose)
            self.assertIn(b"interrupted", prose)

    def test_a_signal_while_a_pipe_is_silent(self) -> None:
        """Neither a named pipe nor a list of caps that never comes holds up the end."""
        self.run_command("init")
        pipe = self.home / "pipe"
        os.mkfifo(pipe)
        for arguments in (
            ("put", "pipe"),
            ("put", "--mutable", "pipe"),
            ("get", "--cap-file", "-"),
        ):
            process = self.start(*arguments, stdin=subprocess.PIPE)
            if "pipe" in arguments:
                self.addCleanup(os.close, self.wait_until_opened(pipe))
            else:
                self.wait_until_reading(process)
            process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT_S)
            _, prose = process.communicate(timeout=TIMEOUT_S)
            self.assertEqual(process.returncode, 130, prose)
            self.assertIn(b"interrupted", prose)

    def test_named_pipes(self) -> None:
        """Are read to the end of those who write to them."""
        self.run_command("init")
        pipe = self.home / "pipe"
        os.mkfifo(pipe)
        process = self.start("put", "pipe")
        with open(pipe, "wb") as end:
            end.write(b"hello")
        stdout, prose = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual((stdout, process.returncode), (b"URI:LIT:nbswy3dp\n", 0), prose)

    def test_a_signal_while_nobody_reads(self) -> None:
        """A reader who has stopped, of standard output or a named pipe, does not hold up the end either."""
        cap = self.run_command("put", "file")[1].decode().strip()
        pipe = self.home / "pipe"
        os.mkfifo(pipe)
        end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, end)
        for arguments in (("get", cap), ("get", cap, "-o", "pipe"), ("cat", cap)):
            process = self.start(*arguments)
            assert process.stdout is not None
            self.wait_until_full(end if "pipe" in arguments else process.stdout.fileno())
            process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT_S)  # with nothing read meanwhile
            _, prose = process.communicate(timeout=TIMEOUT_S)
            self.assertEqual(process.returncode, 130, prose)
            self.assertEqual(prose, b"pipegrid: interrupted; the same command can be run again\n")
            with contextlib.suppress(BlockingIOError):
                os.read(end, 1 << 20)

    def test_named_pipes_in_the_place_of_settings(self) -> None:
        """Are named, and not waited for."""
        self.run_command("init")
        directory = self.home / ".local/share/pipegrid"
        for name, status in (
            ("private/aliases", 2),
            ("private/servers.yaml", 0),
            ("private/introducers.yaml", 0),
            ("private/secret", 2),
            ("pipegrid.cfg", 2),
        ):
            path = directory / name
            path.unlink(missing_ok=True)
            os.mkfifo(path)
            command = ("ls", "home:") if name.endswith("aliases") else ("status",)
            found, _, prose = self.run_command(*command)
            self.assertEqual(found, status, prose)
            self.assertIn(f"{path}: it is a named pipe; put a file in its place\n", prose.decode())

    def wait_until_full(self, fd: int) -> None:
        """Return when a pipe takes no more: two looks, a moment apart, find as much in it."""
        deadline = time.monotonic() + TIMEOUT_S
        before, held = 0, -1
        while before != held or held < 1 << 15:
            self.assertLess(time.monotonic(), deadline, "nobody fills it")
            time.sleep(0.05)
            before = held
            (held,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))

    def wait_until_opened(self, pipe: Path) -> int:
        """Return the end of a named pipe to write to, when somebody has opened the other."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # noqa: PERF203  (nobody has)
                self.assertLess(time.monotonic(), deadline, "nobody opens it")
                time.sleep(0.01)

    def wait_until_reading(self, process: subprocess.Popen[bytes]) -> None:
        """Return when the process has taken a byte from its standard input."""
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        deadline = time.monotonic() + TIMEOUT_S
        while struct.unpack("i", fcntl.ioctl(process.stdin, termios.FIONREAD, b"\0" * 4)) != (0,):
            self.assertLess(time.monotonic(), deadline, "nobody reads")
            time.sleep(0.01)
