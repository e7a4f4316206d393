"""``pipegrid serve`` as its supervisor has it: told that it is ready, signals, no memory, no descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from misc.attack.honest import Client
from misc.attack.measure import serve_command
from misc.attack.target import Target, make_target
from misc.command import environment
from misc.speedtest.processes import cpu_s
from twisted.internet.task import Clock
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.server import systemd
from pipegrid.server.metrics import MAX_CONNECTIONS
from pipegrid.wire import gbs_cbor_bodies, gbs_paths_headers

PATIENCE_S = 30.0


class ProcessTestCase(SynchronousTestCase):
    """A server's process."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.target: Target
        self.rng = random.Random(1)

    def serve(
        self, *options: str, quiet: bool = True, **surroundings: str
    ) -> subprocess.Popen[str]:
        """Start one, and wait until it listens."""
        command = serve_command(self.directory, options)
        if not quiet:
            command.remove("-q")
        process = subprocess.Popen(
            command,
            env=environment() | surroundings,
            stdin=subprocess.PIPE,  # it ends when that does
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        assert process.stdout is not None
        nurl, furl = (process.stdout.readline().strip() for _ in range(2))
        self.target = make_target(nurl, furl, self.directory, PATIENCE_S)
        return process

    def until(self, done: Callable[[], object]) -> None:
        """Wait for something."""
        ends = time.monotonic() + PATIENCE_S
        while not done():
            self.assertLess(time.monotonic(), ends)
            time.sleep(0.01)

    def honest(self) -> None:
        """Put and get something."""
        Client(self.target, self.rng).put_and_get()


class SupervisorTests(ProcessTestCase):
    """systemd."""

    def test_it_says_how_it_goes(self) -> None:
        """Ready when it listens, alive while it serves, stopping when it is told to end."""
        path = f"\0pipegrid-test-{os.getpid()}-{time.monotonic_ns()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(path)
            systemd.settimeout(PATIENCE_S)
            process = self.serve(NOTIFY_SOCKET="@" + path[1:], WATCHDOG_USEC="200000")
            said = [systemd.recv(100) for _ in range(4)]
            self.assertEqual(sorted(set(said)), [b"READY=1", b"WATCHDOG=1"])
            self.assertEqual(said.count(b"READY=1"), 1)
            process.terminate()
            while said[-1] != b"STOPPING=1":
                said.append(systemd.recv(100))
            self.assertEqual(process.wait(PATIENCE_S), 0)

    def test_nobody_wants_to_know(self) -> None:
        """Without systemd, or with odd words in its place, nothing is sent."""
        for odd in ({}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "relative"}):
            self.assertFalse(systemd.notify(systemd.READY, odd))
        self.assertFalse(systemd.notify(systemd.READY, {"NOTIFY_SOCKET": "/nowhere/x"}))

    def test_how_often(self) -> None:
        """Twice as often as it must be, if it is we who are asked."""
        pid = str(os.getpid())
        self.assertEqual(systemd.watchdog_s({"WATCHDOG_USEC": "30000000"}), 15.0)
        self.assertEqual(systemd.watchdog_s({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": pid}), 1.0)
        for none in ({}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}):
            self.assertIsNone(systemd.watchdog_s(none))
        self.assertIsNone(systemd.watchdog_s({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}))
        self.assertIsNone(systemd.stay_alive(Clock()))


class LogTests(ProcessTestCase):
    """What ``logrotate`` does."""

    def test_rotation(self) -> None:
        """After SIGHUP the log goes to a new file of the same name, for nobody else to read."""
        log = self.directory.with_name("log")
        process = self.serve("--log", str(log))
        old = log.rename(log.with_name("log.1"))
        process.send_signal(signal.SIGHUP)
        self.until(log.exists)
        process.terminate()
        self.assertEqual(process.wait(PATIENCE_S), 0)
        formats = {
            path: [json.loads(text)["log_format"] for text in path.read_text().splitlines()]
            for path in (old, log)
        }
        self.assertTrue(any("serving {storage} with" in each for each in formats[old]))
        self.assertIn("stopped serving {storage}", formats[log])
        self.assertNotIn("stopped serving {storage}", formats[old])
        self.assertEqual(stat.S_IMODE(log.stat().st_mode), 0o600)

    def test_a_log_that_cannot_be_opened_anew(self) -> None:
        """The old one goes on, one sentence says so, and the server serves."""
        log = self.directory.with_name("logs") / "log"
        log.parent.mkdir()
        process = self.serve("--log", str(log), quiet=False)
        assert process.stderr is not None
        log.parent.rename(log.parent.with_name("elsewhere"))
        process.send_signal(signal.SIGHUP)
        self.assertTrue(any("the old log file stays in use" in text for text in process.stderr))
        self.honest()

    def test_without_a_log(self) -> None:
        """A terminal that is closed does not end the server."""
        process = self.serve()
        process.send_signal(signal.SIGHUP)
        self.honest()
        self.assertIsNone(process.poll())

    def test_what_strangers_say(self) -> None:
        """Corruption reasons cannot clear the operator's screen, nor forge lines of the log."""
        process = self.serve(quiet=False)
        assert process.stderr is not None
        index = bytes(16)
        requests = self.target.requests
        reason = b"\x1b[2J\x9b31m\n2030-01-01 root logged in\x07".decode("latin-1")
        body = gbs_cbor_bodies.pack_corrupt(reason)
        with self.target.connect_tls() as connection:
            connection.sendall(requests.allocate(index, 4) + requests.write(index, 0, b"abcd"))
            connection.sendall(
                requests.request("POST", gbs_paths_headers.corrupt_path(index, 0), body=body)
            )
            answers = b""
            while answers.count(b"HTTP/1.1") < 3:
                answers += connection.recv(65536)
        process.terminate()
        said = process.stderr.read()
        self.assertIn(r"corrupt: \x1b[2J\x9b31m\n2030-01-01 root logged in\x07", said)
        self.assertTrue(said.replace("\n", "").isprintable(), said)
        [advisory] = (self.directory / "storage/corruption-advisories").iterdir()
        self.assertIn(r"\x1b[2J\x9b31m", advisory.read_text())
        self.assertTrue(advisory.read_text().replace("\n", "").isprintable())


class CrowdTests(ProcessTestCase):
    """Too many connections."""

    def test_options(self) -> None:
        """As many as an operator says, in all and from one address; the oldest stranger goes."""
        self.serve("--max-connections", "16", "--max-per-address", "4")
        strangers = [self.target.connect() for _ in range(4)]
        others = [self.target.connect("127.0.0.2") for _ in range(4)]
        self.honest()
        strangers[0].settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError):
            self.assertEqual(strangers[0].recv(1), b"")
        for each in (*strangers[1:], *others):
            each.setblocking(False)
            self.assertRaises(BlockingIOError, each.recv, 1)
        for each in (*strangers, *others):
            each.close()

    def test_foolscap_that_does_not_go_on(self) -> None:
        """Connections that only begin with Foolscap's words are strangers, too."""
        self.serve("--max-connections", "16", "--max-per-address", "4")
        strangers = [self.target.connect() for _ in range(4)]
        for each in strangers:
            each.sendall(b"GET /id/aaaa")
        self.honest()
        for each in strangers:
            each.close()

    def test_bursts_at_the_page_of_metrics(self) -> None:
        """While silent connections come by the hundred, few have a descriptor of the server's."""
        page = str(self.directory.relative_to(Path.cwd()) / "m")
        process = self.serve("--metrics", f"unix:{page}")
        self.honest()
        descriptors = Path(f"/proc/{process.pid}/fd")
        before, most = len(os.listdir(descriptors)), 0
        silent = [socket.socket(socket.AF_UNIX) for _ in range(600)]
        for each in silent:
            each.setblocking(False)
        for _ in range(3):
            for each in silent:
                with contextlib.suppress(
                    OSError
                ):  # BlockingIOError: those that wait are many enough
                    each.connect(page)
                most = max(most, len(os.listdir(descriptors)))
            time.sleep(0.1)
            self.assertLessEqual(len(os.listdir(descriptors)), before + MAX_CONNECTIONS)
        # As many are being closed as are open, and one has just been accepted: it is closed at once.
        self.assertLessEqual(most, before + 2 * MAX_CONNECTIONS + 1)
        for each in silent:
            each.close()
        self.honest()


class ExhaustionTests(ProcessTestCase):
    """What cannot be survived ends the process; what can is waited for."""

    def test_no_memory(self) -> None:
        """A process without memory ends with one sentence and status 1, instead of half a server."""
        process = self.serve("--durability", "none")
        self.honest()
        used = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * 4096
        limit = used + (24 << 20)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))

        secrets = gbs_paths_headers.secret_lines(
            {
                gbs_paths_headers.WRITE_ENABLER: bytes(32),
                gbs_paths_headers.RENEW_SECRET: bytes(32),
                gbs_paths_headers.CANCEL_SECRET: bytes(32),
            }
        )
        lines = [b"X-Tahoe-Authorization: " + each for each in secrets]
        path = f"/storage/v1/mutable/{'a' * 26}/read-test-write"
        request = self.target.requests.request("POST", path, *lines, body=bytes(31 << 20))
        with contextlib.suppress(OSError), self.target.connect_tls() as connection:
            connection.sendall(request)
            connection.recv(1)
        self.assertEqual(process.wait(PATIENCE_S), 1)
        assert process.stderr is not None
        said = process.stderr.read()
        self.assertEqual(said.count("\n"), 1, said)
        self.assertIn("no memory left", said)

    def test_no_descriptors(self) -> None:
        """Connections beyond the limit of open files wait or are closed; nothing spins, and it goes on."""
        process = self.serve()
        self.honest()
        soft = len(os.listdir(f"/proc/{process.pid}/fd")) + 10
        hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        strangers = [self.target.connect() for _ in range(40)]
        time.sleep(0.3)
        before_s = cpu_s(process.pid)
        time.sleep(1.0)
        self.assertLess(cpu_s(process.pid) - before_s, 0.5)
        for each in strangers:
            each.close()
        self.until(self.is_served)
        self.assertIsNone(process.poll())

    def is_served(self) -> bool:
        """Return whether an honest client is."""
        try:
            self.honest()
        except OSError:
            return False
        return True

    def test_what_counts(self) -> None:
        """MemoryError, threads that cannot be started, and what is caused by either."""
        ends: list[int] = []
        forget = systemd.end_without_memory(ends.append)
        self.addCleanup(forget)
        self.patch(os, "write", lambda fd, data: len(data))
        caused: Any = OSError("x")
        caused.__cause__ = MemoryError()
        log = Logger()
        fatal = (MemoryError(), RuntimeError("can't start new thread"), caused)
        for error in (*fatal, ValueError(), RuntimeError("x")):
            log.failure("it failed", Failure(error))
        self.assertEqual(ends, [1, 1, 1])
        self.flushLoggedErrors(MemoryError, RuntimeError, OSError, ValueError)
