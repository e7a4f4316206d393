"""Processes that measure, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from misc.command import environment
from misc.speedtest.processes import ROOT
from twisted.trial.unittest import SynchronousTestCase

STUBBORN = """
import time
from misc.ending import end_on_sigterm

end_on_sigterm(1)
try:
    print("ready", flush=True)
    time.sleep(60)
except SystemExit:
    pass  # as a reactor may do
time.sleep(60)
"""


BUSY = """
import ctypes
from misc.ending import end_on_sigterm

end_on_sigterm(1)
print("ready", flush=True)
ctypes.CDLL(None).system(b"kill -TERM $PPID; exec sleep 6 >&2")
"""

RACE = """
import os, signal, time
from misc.ending import end_on_sigterm

end_on_sigterm(60)
# As if the signal came when Python has looked for signals, and does not yet wait: no handler runs.
handler = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *_: None)
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, handler)
print("ready", flush=True)
time.sleep(60)
"""

REACTING = """
import os, subprocess, sys, time
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from twisted.python.threadpool import ThreadPool
from misc import ending
from misc.speedtest.processes import running

async def work(reactor):
    with running(["cat"]) as child:
        reactor.callLater(0, print, child.pid, flush=True)
        {wait}

ending.run(work, {within_s})
"""

IDLE_POOL = """
        pool = ThreadPool(0, 3)  # nobody stops it
        pool.start()
        await deferToThreadPool(reactor, pool, int)
        await Deferred()
"""
BUSY_POOL = """
        pool = ThreadPool(0, 3)
        pool.start()
        await deferToThreadPool(reactor, pool, os.read, os.pipe()[0], 1)
"""
STUBBORN_WORK = """
        while True:
            try:
                await Deferred()
            except BaseException:
                pass
"""


def gone(pid: int) -> bool:
    """Return whether a process has ended, or does so in a moment."""
    for _ in range(500):
        try:
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                return True  # nobody may have looked at its status yet
        except OSError:
            return True
        time.sleep(0.02)
    return False


class EndTests(SynchronousTestCase):
    """Being told to end: ``misc/ending.py``."""

    def test_a_process_that_swallows_it(self) -> None:
        """It ends all the same, a bounded time later."""
        status, _ = self.end(STUBBORN, signal.SIGTERM)
        self.assertEqual(status, -signal.SIGALRM)

    def test_a_process_that_does_not_look(self) -> None:
        """One that is in a long call of C's ends a bounded time later, too."""
        self.assertEqual(self.end(BUSY)[0], -signal.SIGALRM)

    def test_a_signal_just_before_a_wait(self) -> None:
        """It interrupts the wait all the same, and the process ends in good order."""
        self.assertEqual(self.end(RACE)[0], 143)

    def test_what_runs_in_a_reactor(self) -> None:
        """It is cancelled, and what it has started ends with it."""
        for number, expected in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            self.ends("await Deferred()", 60, expected, number)

    def test_threads_of_a_pool(self) -> None:
        """Threads that wait, for work or for an answer, keep neither the process nor what it started."""
        for wait in (IDLE_POOL, BUSY_POOL):
            self.ends(wait, 1, -signal.SIGALRM)

    def test_a_reactor_that_does_not_come_round(self) -> None:
        """What blocks it is interrupted."""
        self.ends("reactor.iterate(0); time.sleep(60)", 60, 143)

    def test_work_that_goes_on(self) -> None:
        """A coroutine that will not end is ended."""
        self.ends(STUBBORN_WORK, 1, -signal.SIGALRM)

    def test_all_tools(self) -> None:
        """None of them runs a reactor in a way that forgets what was started in it."""
        forgetful = re.compile(r"import .*\breact\b|reactor\.run\((?!installSignalHandlers=False)")
        found = [
            path.name
            for path in (ROOT / "misc").rglob("*.py")
            if forgetful.search(path.read_text("utf-8"))
        ]
        self.assertEqual(found, [])

    def ends(
        self, wait: str, within_s: int, expected: int, number: signal.Signals = signal.SIGTERM
    ) -> None:
        """Check how a coroutine that waits so ends, and that its child has ended with it."""
        program = REACTING.format(wait=wait.strip(), within_s=within_s)
        status, child = self.end(program, number)
        self.assertEqual(status, expected, wait)
        self.assertTrue(gone(int(child)), wait)

    def end(self, program: str, number: signal.Signals | None = None) -> tuple[int, str]:
        """Run a program that is told to end when it says something; return its status, and that."""
        surroundings = environment()
        surroundings["PYTHONPATH"] += os.pathsep + str(ROOT)
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=surroundings
        ) as process:
            assert process.stdout is not None
            try:
                said = process.stdout.readline()
                if number is not None:
                    process.send_signal(number)
                return process.wait(timeout=30), said
            finally:
                process.kill()


class LifelineTests(SynchronousTestCase):
    """``pipegrid.speedtest.end_with_parent``."""

    def test_ends_with_standard_input(self) -> None:
        """A server ends, in good order, when nobody holds the other end any more."""
        node = Path(self.mktemp())
        serve = [
            "pipegrid.cli",
            "-q",
            "-d",
            str(node),
            "serve",
            "--port",
            "tcp:0:interface=127.0.0.1",
        ]
        with subprocess.Popen(
            [sys.executable, "-m", "pipegrid.speedtest.end_with_parent", *serve],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        ) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                self.assertRegex(process.stdout.readline(), "^pb://")
                process.stdin.close()
                self.assertEqual(process.wait(timeout=30), 0)
            finally:
                process.kill()
