"""A process that was forked begins as a fresh one does, ends as one, and nothing stays of the server."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from misc.command import environment
from twisted.trial.unittest import SynchronousTestCase

import pipegrid
from tests.forked import around, client
from tests.forked.server import settings_of

HERE = Path(__file__).parent
SOURCE = Path(pipegrid.__file__).parent.parent
TIMEOUT_S = 60
THREADED = """
import sys
already = "twisted.internet.reactor" in sys.modules
from twisted.internet import reactor
from twisted.internet.threads import deferToThread
def go_on(count):
    if count:
        deferToThread(lambda: count - 1).addCallback(go_on)  # which has to wake this reactor, and no other
    else:
        print("there already:", already, flush=True)
        reactor.stop()
reactor.callWhenRunning(go_on, 300)
reactor.run()
sys.exit(int(sys.argv[1]))
"""


class ForkedTests(SynchronousTestCase):
    """``run``, beside ``subprocess.run``."""

    def setUp(self) -> None:
        self.environment = {
            "HOME": self.mktemp(),
            "LC_ALL": "C.UTF-8",
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(SOURCE),
            "OURS": os.fsdecode(b"caf\xe9 = \xc3\xa9\n"),
        }

    def forked(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run ``probe`` in a process that is forked."""
        options = {"timeout": TIMEOUT_S, **options}
        return client.run("probe", *arguments, cwd=HERE, env=self.environment, **options)

    def fresh(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run it in a fresh one."""
        return subprocess.run(
            [sys.executable, "-m", "probe", *arguments],
            cwd=HERE,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def test_it_begins_as_a_fresh_one(self) -> None:
        """Streams, signals, environment, directory, open files, and whatever else is asked."""
        mask = os.umask(0o027)
        self.addCleanup(os.umask, mask)
        arguments = ("facts", "", "two words", "\u00e9", os.fsdecode(b"caf\xe9"))
        for more in ({}, {"LC_ALL": "C", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}):
            self.environment |= more
            forked, fresh = (
                json.loads(run(*arguments).stdout) for run in (self.forked, self.fresh)
            )
            self.assertEqual(forked.keys(), fresh.keys())
            for name in fresh:
                self.assertEqual(forked[name], fresh[name], name)
            self.assertEqual(fresh["umask"], 0o027)

    def test_it_ends_as_a_fresh_one(self) -> None:
        """With any status, by a signal, with a sentence or a traceback."""
        for arguments in (
            ("0",),
            ("3",),
            ("a sentence",),
            ("fail",),
            ("signal", str(int(signal.SIGINT))),
            ("signal", str(int(signal.SIGKILL))),
            ("signal", str(int(signal.SIGTERM))),
        ):
            forked, fresh = self.forked(*arguments), self.fresh(*arguments)
            self.assertEqual(forked.returncode, fresh.returncode, arguments)
            self.assertEqual(forked.stdout, fresh.stdout, arguments)
            ends = [each.stderr.splitlines()[-1:] for each in (forked, fresh)]
            self.assertEqual(ends[0], ends[1], arguments)

    def test_each_draws_its_own(self) -> None:
        """What is random is another in each, and so is its number."""
        found = [self.forked("random").stdout.split() for _ in range(4)]
        for drawn in zip(*found, strict=True):
            self.assertEqual(len(set(drawn)), 4, drawn)

    def test_input(self) -> None:
        """More than a pipe holds goes in, and comes out while it does."""
        data = os.urandom(1000).hex().encode() * 200
        done = self.forked("copy", data=data)
        self.assertEqual((done.returncode, done.stdout), (0, data))
        self.assertEqual(done.stderr, b"at the end\n")
        self.assertEqual(self.forked("0", data=data).returncode, 0)  # which reads nothing

    def test_too_long(self) -> None:
        """What is not over in time is ended."""
        self.assertRaises(subprocess.TimeoutExpired, self.forked, "wait", timeout=0.3)

    def test_what_cannot_be_asked_for(self) -> None:
        """What an interpreter reads when it begins takes another server."""
        script = client.script(self.environment, "probe").replace("exec ", "PYTHONSTARTUP=x exec ")
        done = self.through_a_shell(script, "0")
        _, said = done.communicate(timeout=TIMEOUT_S)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"has to begin with it", said)

    def through_a_shell(self, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the program that stands for ``probe``."""
        program = Path(self.mktemp())
        program.write_text(script)
        program.chmod(0o755)
        process = subprocess.Popen(
            [program.absolute(), *arguments],
            cwd=HERE,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def test_through_a_shell(self) -> None:
        """Streams and status go through, and signals both ways."""
        script = client.script(self.environment, "probe")
        done = self.through_a_shell(script, "copy")
        self.assertEqual(done.communicate(b"in", timeout=TIMEOUT_S), (b"in", b"at the end\n"))
        done = self.through_a_shell(script, "7")
        self.assertEqual(done.wait(TIMEOUT_S), 7)
        for number in (signal.SIGINT, signal.SIGTERM):
            done = self.through_a_shell(script, "wait")
            assert done.stdout is not None
            self.assertEqual(done.stdout.readline(), b"waits\n")
            done.send_signal(number)
            self.assertEqual(done.wait(TIMEOUT_S), -number)

    def test_who_asks_is_killed(self) -> None:
        """So is what was asked for; or it would stay for ever."""
        done = self.through_a_shell(client.script(self.environment, "probe"), "wait")
        assert done.stdout is not None
        self.assertEqual(done.stdout.readline(), b"waits\n")
        done.kill()
        self.assertEqual(done.stdout.read(), b"")  # nobody holds its other end any more

    def test_around(self) -> None:
        """Processes of a program with libraries of its own: each has its own reactor, and its own status."""
        beside = Path(self.mktemp()).absolute()
        beside.mkdir()
        (beside / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        (beside / "python").chmod(0o755)
        program = beside / "program"
        program.write_text(THREADED, "utf-8")
        both = '"$TAHOE" 1 & "$TAHOE" 2; second=$?; wait $!; echo $? $second; exit 5'
        done = subprocess.run(
            [sys.executable, str(HERE / "around.py"), str(program), "sh", "-c", both],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        self.assertEqual((done.returncode, done.stderr), (5, b""))
        self.assertEqual(done.stdout.splitlines(), [b"there already: True"] * 2 + [b"1 2"])

    def test_nothing_stays(self) -> None:
        """When whoever began the server is killed, it ends, and its socket goes."""
        program = (
            "import os, time\n"
            "from tests.forked import client\n"
            "server = client._server(os.environ)\n"
            "print(server._process.pid, server.path, flush=True)\n"
            "time.sleep(100)\n"
        )
        path = os.pathsep.join((str(SOURCE), str(HERE.parent.parent)))
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=self.environment | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        assert process.stdout is not None
        pid, directory = process.stdout.readline().split()
        self.assertTrue(Path(directory).exists())
        process.kill()
        process.stdout.close()
        deadline = time.monotonic() + TIMEOUT_S
        while Path(directory).parent.exists() or self.runs(int(pid)):
            self.assertLess(time.monotonic(), deadline, "it stays")
            time.sleep(0.02)

    def runs(self, pid: int) -> bool:
        """Return whether a process runs; one that nobody waits for does not."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False


class AroundTests(SynchronousTestCase):
    """``around``: another program that is forked, whatever environment the tests were begun with."""

    def test_nothing_of_ours(self) -> None:
        """Whoever starts it as a command of ours gets the process that the server has prepared."""
        for begun in ({}, {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "/elsewhere"}):
            kept = {each: os.environ[each] for each in os.environ if each not in around.OURS}
            with mock.patch.dict(os.environ, kept | begun, clear=True):
                given = {
                    name: value for name, value in environment().items() if name not in around.OURS
                }
                self.assertEqual(settings_of(given), settings_of(around.surroundings()), begun)
        self.assertIn(f"unset {' '.join(around.OURS)}\n", around.script(["asking"]))
