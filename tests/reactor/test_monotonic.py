"""Time limits fire when they are due, whatever happens to the clock on the wall."""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from misc.command import environment
from twisted.internet.selectreactor import SelectReactor
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.reactor.process_settings import make_monotonic
from pipegrid.wire import server_address

HOUR_S = 3600.0

# As the clock is for a process whose machine's is set back by an hour at a signal.
CLOCK = """
import os, signal, sys, time

wall, shift_s = time.time, 0.0
time.time = lambda: wall() + shift_s

def set_back(number, frame):
    global shift_s
    shift_s = -3600.0
    os.write(1, b"set back\\n")  # twist takes what is printed for its log

signal.signal(signal.SIGUSR1, set_back)
"""

HALF_HEAD = """
from pipegrid.server.gbs import http_connection
http_connection.HEAD_TIMEOUT_S, http_connection.TICK_S = 0.5, 0.1
"""

SERVE = """
from pipegrid.cli import main
sys.argv = ["pipegrid", "-q", "-d", sys.argv[1], "serve", "--port", "tcp:0:interface=127.0.0.1"]
main()
"""

TWIST = """
from twisted.application.twist._twist import Twist
Twist.main(["twist", "pipegrid", "--directory", sys.argv[1], "--port", "tcp:0:interface=127.0.0.1"])
"""

COMMAND = """
import os, signal
from pipegrid.cli.startup import process
from pipegrid.cli.console import Console
from pipegrid.cli.command_job import Invocation
from twisted.internet.task import deferLater

def start(reactor):
    def ask(_):
        os.kill(os.getpid(), signal.SIGUSR1)
        return deferLater(reactor, 0.2)
    return deferLater(reactor, 0.05).addCallback(ask).addCallback(lambda _: 0)

sys.exit(process._run_reactor(start, Invocation(Console(None, None, sys.stderr))))
"""


def _has_nurl(line: str) -> bool:
    return "#v=1" in line


class RunningTests(SynchronousTestCase):
    """Real processes, whose ``time.time`` goes back by an hour."""

    def start(self, program: str) -> subprocess.Popen[str]:
        """Start one."""
        process = subprocess.Popen(
            [sys.executable, "-c", CLOCK + program, self.mktemp()],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def first_line(self, process: subprocess.Popen[str], wanted: Callable[[str], bool]) -> str:
        """Return the first line that is wanted."""
        assert process.stdout is not None
        for line in process.stdout:
            if wanted(line):
                return line.strip()
        raise AssertionError("the process ended")

    def test_a_server(self) -> None:
        """``pipegrid serve`` closes a connection with half a head."""
        process = self.start(HALF_HEAD + SERVE)
        address = server_address.parse_nurl(self.first_line(process, _has_nurl))
        self.look_whether_it_closes(process, address.host, address.port)

    def test_a_service_of_twist(self) -> None:
        """So does ``twist pipegrid``."""
        process = self.start(HALF_HEAD + TWIST)
        found = re.search(r"pb://[^@]+@127[^#]+#v=1", self.first_line(process, _has_nurl))
        assert found is not None
        address = server_address.parse_nurl(found[0])
        self.look_whether_it_closes(process, address.host, address.port)

    def look_whether_it_closes(self, process: subprocess.Popen[str], host: str, port: int) -> None:
        """Send half a head, set the clock back, and wait for the end."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with context.wrap_socket(socket.create_connection((host, port))) as connection:
            connection.settimeout(30)
            connection.sendall(b"GET / HTTP/1.1\r\n")
            os.kill(process.pid, 10)
            self.first_line(process, lambda line: line == "set back\n")
            self.assertEqual(connection.recv(1), b"")

    def test_a_command(self) -> None:
        """Every command's waits end when they are due."""
        process = self.start(COMMAND)
        self.assertEqual(process.wait(30), 0)


class MakeMonotonicTests(SynchronousTestCase):
    """One reactor, and time that jumps."""

    def setUp(self) -> None:
        self.wall_s = 1_000_000_000.0
        self.fired: list[str] = []
        # A reactor of its own: trial's is for tests that need a real one.
        self.reactor: Any = SelectReactor()
        self.addCleanup(self.reactor.removeAll)
        self.reactor.seconds = lambda: self.wall_s

    def later(self, delay_s: float, name: str) -> Any:
        """Arrange a call."""
        return self.reactor.callLater(delay_s, self.fired.append, name)

    def run_for(self, seconds: float) -> None:
        """Let calls come that are due after so long."""
        now_s = time.monotonic()
        self.patch(time, "monotonic", lambda: now_s + seconds)
        self.reactor.seconds = time.monotonic  # as it would have seen it
        self.reactor.runUntilCurrent()

    def test_what_was_arranged_before(self) -> None:
        """It comes when it would have come, in the same order, and what was cancelled does not."""
        self.later(5.0, "second")
        self.later(0.5, "cancelled").cancel()
        self.later(1.0, "first")
        self.reactor.timeout()  # these are in the heap, the next ones are not
        late = self.later(HOUR_S, "never")
        moved = self.later(HOUR_S, "third")
        make_monotonic(self.reactor)
        self.wall_s -= HOUR_S
        self.assertGreater(self.reactor.timeout(), 0.0)
        self.assertLess(self.reactor.timeout(), 5.0)
        self.run_for(20.0)
        moved.reset(0)
        self.reactor.runUntilCurrent()
        self.assertEqual(self.fired, ["first", "second", "third"])
        self.assertTrue(late.active())

    def test_twice(self) -> None:
        """Again does nothing."""
        make_monotonic(self.reactor)
        call = self.later(5.0, "it")
        due_s = call.getTime()
        make_monotonic(self.reactor)
        self.assertEqual(call.getTime(), due_s)
        self.assertIs(self.reactor.seconds, time.monotonic)


class WallTimeTests(SynchronousTestCase):
    """Who asks for a date."""

    def test_only_what_needs_a_date_asks_for_one(self) -> None:
        """``time.time`` is for leases and files' times; limits have a reactor's clock."""
        source = Path(__file__).parents[2] / "src" / "pipegrid"
        asking = {
            str(path.relative_to(source))
            for path in source.rglob("*.py")
            if "time.time" in path.read_text("utf-8") and "speedtest" not in path.parts
        }
        dates = {
            "reactor/process_settings.py",  # tells of it
            "cli/__init__.py",  # whether it tells anything at all
            "cli/backup_monitoring.py",  # when a backup ended, for its metrics
            "cli/cmd_grid_manager.py",  # until when a certificate is valid
            "cli/cmd_status.py",  # the same
            "cli/cmd_backups_restore.py",  # which runs are of the future
            "cli/cmd_find_diff.py",  # the same
            "tree/backup/run_paths.py",  # the same
            "cli/cmd_forget_prune_pins.py",  # which runs are of the future, and when leases end
            "server/server_certificates.py",  # the same
            "disk/directory_claim.py",  # when a process began, for other programs
            "gateway/transfer_records.py",  # when a transfer began, for people
            "gateway/sftp/file_writer.py",  # times of files
            "gateway/sftp/sftp_attributes.py",  # how a listing writes the date of a file
            "gateway/root_resource.py",  # since when a server has been connected, for people
            "wire/grid_manager_certificates.py",  # whether a certificate has expired
            "grid/introducer_discovery.py",  # since when an introducer has not named a server
            "grid/local_grid.py",
            "mirror/destination.py",  # how old is what a dry run has left
            "server/serve.py",  # leases, the ages of uploads, advisories
            "storage/garbage_collector.py",  # leases
            "transfer/put/file_key.py",  # how old a note is
            "transfer/put/source.py",  # whether a file has just been changed
            "tree/local_walk.py",  # the same
            "tree/directory.py",  # when a link was made
            "tree/backup/backup_database.py",
            "tree/upload_journal.py",  # notes of a put that was cut off are kept for a week
            "tree/backup/backup_run.py",  # when a run was, and when its objects were last checked
        }
        self.assertEqual(asking - dates, set(), "is it a limit? then it is the reactor's time")
