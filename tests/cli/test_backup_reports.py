"""Hooks, pings, metrics and lines of progress of ``backup``."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.cli import backup_end_hooks, backup_metrics
from pipegrid.cli.backup_end_hooks import MAX_OUTPUT_BYTES, HookOutcome, run_hook
from pipegrid.cli.backup_monitoring import with_status_lines
from pipegrid.tree.tree_upload import TreeCounts, TreeReports
from tests.cli.processes import ProcessTestCase, in_fresh_processes

reactor: Any = installed_reactor


def _runs(pid: str) -> bool:
    """Return whether a process runs; one that was killed may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class HookTests(TestCase):
    """Commands of the user, run by the reactor of this process."""

    timeout = 60

    def run_hook(self, command: str, time_limit_s: float = 30.0) -> Deferred[HookOutcome]:
        """Run one with a variable."""
        return Deferred.fromCoroutine(
            run_hook(reactor, command, {"PIPEGRID_RUN": "now"}, time_limit_s)
        )

    async def ended(self, command: str, time_limit_s: float = 30.0) -> HookOutcome:
        """Return the outcome of one."""
        return await self.run_hook(command, time_limit_s)

    def test_outcomes(self) -> Deferred[None]:
        """Output of both streams, variables, statuses and signals; standard input is empty."""

        async def work() -> None:
            ended = await self.ended('echo "$PIPEGRID_RUN $HOME"; echo oh >&2; cat')
            self.assertEqual(
                ended, HookOutcome(None, f"now {os.environ.get('HOME', '')}\noh\n".encode())
            )
            self.assertEqual((await self.ended("exit 7")).problem, "its exit status is 7")
            self.assertEqual((await self.ended("kill -9 $$")).problem, "signal 9 ended it")
            self.assertEqual(
                (await self.ended("no-such-command")).problem, "its exit status is 127"
            )
            self.assertIn("cannot be started", str((await self.ended("a\0b")).problem))
            self.patch(backup_end_hooks, "SHELL", "/no/such/shell")
            self.assertIn("cannot be started", str((await self.ended("true")).problem))

        return Deferred.fromCoroutine(work())

    def test_megabytes(self) -> Deferred[None]:
        """What it prints is read, so that it goes on, and dropped beyond a bound."""

        async def work() -> None:
            ended = await self.ended("head -c 5000000 /dev/zero | tr '\\0' x; exit 3")
            self.assertEqual(ended.problem, "its exit status is 3")
            self.assertEqual(len(ended.output), MAX_OUTPUT_BYTES)
            self.assertEqual(ended.dropped_bytes, 5_000_000 - MAX_OUTPUT_BYTES)

        return Deferred.fromCoroutine(work())

    def test_one_that_hangs(self) -> Deferred[None]:
        """Is ended with its children, even if it does not want to; one in the background does not matter."""

        async def work() -> None:
            self.patch(backup_end_hooks, "_ENDING_S", 0.2)
            pids = Path(self.mktemp())
            began_s = time.monotonic()
            ended = await self.ended(
                f"trap '' TERM; sleep 50 & echo $! $$ > {pids}; sleep 50; sleep 50",
                0.3,
            )
            self.assertEqual(ended.problem, "it did not end within 0.3 s, and was ended")
            self.assertLess(time.monotonic() - began_s, 20)
            while any(map(_runs, pids.read_text().split())):  # until the kernel has ended them
                await deferLater(reactor, 0.01, lambda: None)
            pids.unlink()
            await self.ended(f"(trap '' TERM; sleep 50) & echo $! > {pids}; sleep 50", 0.3)
            while any(map(_runs, pids.read_text().split())):  # what the shell has left behind, too
                await deferLater(reactor, 0.01, lambda: None)
            began_s = time.monotonic()
            self.assertIsNone((await self.ended("sleep 5 & echo on")).problem)
            self.assertLess(time.monotonic() - began_s, 4)

        return Deferred.fromCoroutine(work())

    def test_cancelling(self) -> Deferred[None]:
        """Ends it."""

        async def work() -> None:
            pids = Path(self.mktemp())
            running = self.run_hook(f"echo $$ > {pids}; exec sleep 50")
            while not pids.exists() or not pids.read_text():
                await deferLater(reactor, 0.01, lambda: None)
            running.cancel()
            with self.assertRaises(CancelledError):
                await running
            self.assertRaises(ProcessLookupError, os.kill, int(pids.read_text()), 0)

        return Deferred.fromCoroutine(work())


class MetricsTests(SynchronousTestCase):
    """The file for node exporters."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "backup.prom"

    def write(self, name: str, **values: float) -> str:
        """Write values; returns the file."""
        backup_metrics.write_metrics(self.path, name, values)
        return self.path.read_text()

    def test_several_backups(self) -> None:
        """Each keeps its lines; a failure keeps the time of the last success; another user can read it."""
        self.addCleanup(os.umask, os.umask(0o077))
        self.write('odd "name"\\', exit_status=0, last_success_timestamp_seconds=1.5e9, files=3)
        self.write("docs", exit_status=0)
        text = self.write('odd "name"\\', exit_status=1)
        self.assertIn('pipegrid_backup_exit_status{name="docs"} 0.0\n', text)
        self.assertIn('pipegrid_backup_exit_status{name="odd \\"name\\"\\\\"} 1.0\n', text)
        self.assertIn(
            'pipegrid_backup_last_success_timestamp_seconds{name="odd \\"name\\"\\\\"} 1.5e+09',
            text,
        )
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o644)
        self.assertEqual(os.listdir(self.directory), ["backup.prom"])

    def test_what_was_there(self) -> None:
        """What is not understood, or too large, is replaced; a link is, and its target stays."""
        for content in (
            b"\xff",
            b"not { metrics",
            b'up{a="b"} 1\n',
            b"x" * (2 << 20),
            b"pipegrid_backup_files{",
        ):
            self.path.write_bytes(content)
            text = self.write("docs", files=1)
            self.assertNotIn("up{", text)
            self.assertIn('pipegrid_backup_files{name="docs"} 1.0', text)
        target = self.directory / "target"
        target.write_text("mine")
        self.path.unlink()
        self.path.symlink_to(target)
        self.write("docs", files=1)
        self.assertFalse(self.path.is_symlink())
        self.assertEqual(target.read_text(), "mine")

    def test_it_cannot_be_written(self) -> None:
        """The error is the caller's to report, and what was there stays."""
        with self.assertRaises(OSError):
            backup_metrics.write_metrics(self.directory / "no/backup.prom", "docs", {"files": 1})
        (self.directory / "taken.prom").mkdir()
        with self.assertRaises(OSError):
            backup_metrics.write_metrics(self.directory / "taken.prom", "docs", {"files": 1})


class ProgressConsole:
    """Notes lines of JSON."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def json_result(self, fields: dict[str, Any]) -> None:
        """Note one."""
        self.lines.append(fields)


class StatusLinesTests(SynchronousTestCase):
    """Lines of progress in virtual time."""

    def test_one_a_second(self) -> None:
        """At most, however often something moves; and what reported before still does."""
        clock, console = Clock(), ProgressConsole()
        moved: list[TreeCounts] = []
        inner = TreeReports(progress=moved.append)
        reports = with_status_lines(console, clock, inner)  # type: ignore[arg-type]
        counts = TreeCounts(files=4, bytes=1000, sent_bytes=100, unchanged_bytes=150)
        for _ in range(45):
            clock.advance(0.1)
            reports.progress(counts)
            reports.sending(counts, 1)
        self.assertEqual(len(moved), 45)
        self.assertEqual(len(console.lines), 4)
        first = console.lines[0]
        self.assertEqual(first["message_type"], "status")
        self.assertEqual((first["total_files"], first["total_bytes"]), (4, 1000))
        self.assertTrue(250 < first["bytes_done"] < 270)
        self.assertAlmostEqual(first["percent_done"], first["bytes_done"] / 1000)


class Monitor(HTTPServer):
    """Notes what is asked."""

    def __init__(self, status: int = 200) -> None:
        self.paths: list[str] = []
        self.status = status
        super().__init__(("127.0.0.1", 0), MonitorHandler)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self.thread.start()

    def stop(self) -> None:
        """Stop answering."""
        self.shutdown()
        self.thread.join()
        self.server_close()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}/uuid"


class MonitorHandler(BaseHTTPRequestHandler):
    """Answers each with the monitor's status."""

    server: Monitor

    def do_GET(self) -> None:
        """Answer."""
        self.server.paths.append(self.path)
        self.send_response(self.server.status)
        self.send_header("Location", "file:///etc/passwd")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""


class ReportingTests(ProcessTestCase):
    """Whole commands."""

    def setUp(self) -> None:
        super().setUp()
        (self.home / "docs").mkdir()
        (self.home / "docs/file").write_text("x" * 100)

    def monitor(self, status: int = 200) -> Monitor:
        """Start one."""
        made = Monitor(status)
        self.addCleanup(made.stop)
        return made

    @in_fresh_processes
    def test_success(self) -> None:
        """Hook, metrics and ping agree, and no cap is in the hook's environment."""
        monitor = self.monitor()
        _, err = self.run_command(
            *(
                "backup",
                "docs",
                "--on-success",
                "env; echo $PIPEGRID_FILES files",
                "--on-failure",
                "echo no",
            ),
            *("--metrics-file", "m.prom", "--ping", monitor.url),
        )
        self.assertEqual(monitor.paths, ["/uuid/start", "/uuid"])
        self.assertIn("--on-success: PIPEGRID_BACKUP_NAME=docs\n", err)
        self.assertIn("--on-success: PIPEGRID_EXIT_STATUS=0\n", err)
        self.assertIn("--on-success: 1 files\n", err)
        self.assertNotIn("URI:", err)
        self.assertNotIn("--on-failure", err)
        metrics = (self.home / "m.prom").read_text()
        self.assertIn('pipegrid_backup_bytes{name="docs"} 100.0', metrics)
        self.assertIn("last_success", metrics)

    def test_failure(self) -> None:
        """What was left out, a refused run and a failing hook: each is a failure, with its status."""
        monitor = self.monitor()
        report = ("--ping", monitor.url, "--metrics-file", "m.prom")
        hooks = (
            "--on-success",
            "echo yes; exit 9",
            "--on-failure",
            "echo status $PIPEGRID_EXIT_STATUS",
        )
        _, err = self.run_command("backup", "docs", *hooks, *report, status=1)
        self.assertIn("the command of --on-success failed: its exit status is 9", err)
        self.assertEqual(monitor.paths[-1], "/uuid/fail")
        os.mkfifo(self.home / "docs/pipe")
        _, err = self.run_command("backup", "docs", "--strict", *hooks, *report, status=1)
        self.assertIn("--on-failure: status 1\n", err)
        self.assertEqual(monitor.paths[-1], "/uuid/fail")
        _, err = self.run_command("backup", "gone", *hooks, *report, status=1)
        self.assertIn("--on-failure: status 1\n", err)
        failing = ("--on-failure", "exit 5")
        _, err = self.run_command("backup", "docs", "--as", "a/b", *failing, status=2)
        self.assertIn("the command of --on-failure failed: its exit status is 5", err)
        bad = os.fsdecode(b"caf\xe9")
        (self.home / bad).mkdir()
        _, err = self.run_command("backup", bad, *report, status=2)
        self.assertIn("cannot be the name of a backup", err)
        metrics = (self.home / "m.prom").read_text()
        self.assertIn('pipegrid_backup_exit_status{name="caf', metrics)
        self.assertIn('pipegrid_backup_exit_status{name="docs"} 1.0', metrics)
        self.assertIn('pipegrid_backup_exit_status{name="gone"} 1.0', metrics)
        self.assertNotIn("last_success_timestamp_seconds{", metrics)

    def test_reports_that_fail(self) -> None:
        """A monitor or disk that does not work is reported, and the backup is as good as without."""
        monitor = self.monitor(302)
        _, err = self.run_command(
            "backup", "docs", "--ping", monitor.url, "--metrics-file", "no/dir/m.prom"
        )
        self.assertIn("cannot ping 127.0.0.1: it answers 302, a redirect", err)
        self.assertIn("cannot write the metrics to no/dir/m.prom: No such file or directory", err)
        monitor.stop()
        _, err = self.run_command("backup", "docs", "--metrics-file", "m.txt", status=2)
        self.assertIn("does not end in .prom", err)
        config = self.home / ".local/share/pipegrid/pipegrid.cfg"
        with config.open("a") as file:
            file.write("[connections]\ntcp = disabled\n")
        _, err = self.run_command("backup", "docs", "--ping", monitor.url)
        self.assertIn("no connection to 127.0.0.1", err)

    def test_a_dry_run(self) -> None:
        """Reports nothing."""
        monitor = self.monitor()
        _, err = self.run_command(
            "backup", "docs", "--dry-run", "--on-success", "echo no", "--ping", monitor.url
        )
        self.assertEqual((monitor.paths, "--on-success" in err), ([], False))

    def test_lines_of_progress(self) -> None:
        """With --json-progress each line has a type, and the last is what --json prints; without, as ever."""
        out, _ = self.run_command("backup", "docs", "--json-progress")
        last = json.loads(out.splitlines()[-1])
        self.assertEqual(
            (last["message_type"], last["files"], last["name"]), ("summary", 1, "docs")
        )
        self.assertNotIn("message_type", self.run_command("backup", "docs", "--json")[0])

    def test_interrupting(self) -> None:
        """Ends a hook that hangs, and the command, with status 130; no other report follows."""
        monitor = self.monitor()
        process = self.start(
            *(
                "backup",
                "docs",
                "--ping",
                monitor.url,
                "--on-success",
                "echo $$ > pid; exec sleep 100",
            )
        )
        with process:
            while not (self.home / "pid").exists() or not (self.home / "pid").read_text():
                time.sleep(0.02)
                self.assertIsNone(process.poll())
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130)
        self.assertEqual(monitor.paths, ["/uuid/start"])
        pid = int((self.home / "pid").read_text())
        self.assertRaises(ProcessLookupError, os.kill, pid, 0)


class SampleTests(ProcessTestCase):
    """``check --sample``."""

    def test_parts(self) -> None:
        """Each run verifies another part, and says until when the round lasts."""
        (self.home / "docs").mkdir()
        for number in range(8):
            (self.home / f"docs/{number}").write_bytes(os.urandom(300))
        cap, _ = self.run_command("put", "-r", "docs")
        verified = 0
        for left in (2, 1, 0):
            out, err = self.run_command("check", "-r", "--sample", "34%", cap)
            self.assertIn("9 objects: 9 healthy", out)
            self.assertIn("pipegrid: verified another 34%: ", err)
            verified += int(err.split("34%: ")[1].split()[0])
            if left:
                self.assertIn(f"this round lasts another {left} run", err)
            else:
                self.assertIn("every object has been verified; the next round lasts 3 runs", err)
        self.assertGreaterEqual(verified, 9)
        out, _ = self.run_command("--json", "check", "-r", "--sample", "0.5", cap)
        sample = json.loads(out.splitlines()[-1])["sample"]
        self.assertEqual((sample["percent"], sample["runs_left"]), (0.5, 199))
        shares = self.home / ".local/share/pipegrid/storage"
        shares.rename(self.home / "away")
        self.run_command("check", "-r", "--sample", "34%", cap, status=4)
        (self.home / "away").rename(shares)
        _, err = self.run_command("check", "-r", "--sample", "34%", cap)
        self.assertIn("this round lasts another 2 runs", err)
        for text in ("0", "101%", "3 parts", "-1", "1e1"):
            _, err = self.run_command("check", "--sample", text, cap, status=2)
            self.assertIn("is not a percentage", err)
        _, err = self.run_command("check", "--sample", "3%", "--verify", cap, status=2)
        self.assertIn("choose one of --verify and --sample", err)
