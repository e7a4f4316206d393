"""Reports of unattended backups: hooks, pings of a monitor, a file of metrics, and lines of progress."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pipegrid.cli import backup_end_hooks, backup_metrics, configured_options
from pipegrid.cli.command_job import GridJob, Invocation, OpenGrid, status_of_job
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, sentence
from pipegrid.cli.options import as_one
from pipegrid.core.text import printable
from pipegrid.errors import PipegridError
from pipegrid.grid import client_config
from pipegrid.transport import status_ping

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IReactorTime

    from pipegrid.tree.backup.backup_run import BackupResult
    from pipegrid.tree.tree_grid import Grid
    from pipegrid.tree.tree_upload import TreeCounts, TreeReports

STATUS_S = 1.0
"""The shortest time between two lines of progress."""


class BackupOutcome:
    """
    The progress and outcome of one backup.

    Attributes:
        name: the name of the backup.
        result: the result of the run, or None until the run is stored.
        status: the exit status.
        ended_s: when the backup ended, in seconds since 1970.
        elapsed_s: how long the backup took.
    """

    def __init__(self, name: str, shows_progress: bool) -> None:
        self.name = name
        self.result: BackupResult | None = None
        self.status = ExitStatus.DONE
        self.ended_s = self.elapsed_s = 0.0
        self._shows_progress = shows_progress

    def watched(self, console: Console, clock: IReactorTime, reports: TreeReports) -> TreeReports:
        """
        Return reports that do the same as ``reports`` and, with ``--json-progress``, also print lines of
        progress.
        """
        if not self._shows_progress:
            return reports
        return with_status_lines(console, clock, reports)

    def finished(self, result: BackupResult) -> dict[str, str]:
        """Record the result; return the fields to be added to its line of JSON."""
        self.result = result
        return {"message_type": "summary"} if self._shows_progress else {}

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables for a hook; they contain no secret and no cap."""
        found = {
            configured_options.NAME_VARIABLE: self.name,
            "PIPEGRID_EXIT_STATUS": str(int(self.status)),
            "PIPEGRID_ELAPSED_S": f"{self.elapsed_s:.1f}",
        }
        if self.result is not None:
            counts = self.result.counts
            found |= {
                "PIPEGRID_RUN": self.result.run.time,
                "PIPEGRID_FILES": str(counts.files),
                "PIPEGRID_BYTES": str(counts.bytes),
                "PIPEGRID_SENT_BYTES": str(counts.sent_bytes),
                "PIPEGRID_LEFT_OUT": str(counts.left_out),
            }
        return found

    @property
    def metrics(self) -> backup_metrics.Values:
        """The known metrics, by their names in ``backup_metrics.METRICS``."""
        found = {
            "last_run_timestamp_seconds": self.ended_s,
            "exit_status": float(self.status),
            "duration_seconds": self.elapsed_s,
        }
        if self.status == ExitStatus.DONE:
            found["last_success_timestamp_seconds"] = self.ended_s
        if self.result is not None:
            counts = self.result.counts
            found |= {
                "files": float(counts.files),
                "bytes": float(counts.bytes),
                "sent_bytes": float(counts.sent_bytes),
                "left_out": float(counts.left_out),
            }
        return found


def with_status_lines(console: Console, clock: IReactorTime, reports: TreeReports) -> TreeReports:
    """
    Return reports that do the same as ``reports`` and also print the progress, as JSON with restic's names of
    fields, in at most one line per second.
    """
    began_s = clock.seconds()
    next_s = began_s + STATUS_S
    sending_bytes = 0

    def show(counts: TreeCounts) -> None:
        nonlocal next_s
        now_s = clock.seconds()
        if now_s < next_s:
            return
        next_s = now_s + STATUS_S
        done = min(counts.unchanged_bytes + counts.sent_bytes + sending_bytes, counts.bytes)
        console.json_result(
            {
                "message_type": "status",
                "seconds_elapsed": int(now_s - began_s),
                "percent_done": round(done / counts.bytes, 4) if counts.bytes else 0.0,
                "total_files": counts.files,
                "total_bytes": counts.bytes,
                "bytes_done": done,
                "error_count": counts.left_out,
            }
        )

    def progress(counts: TreeCounts) -> None:
        reports.progress(counts)
        show(counts)

    def sending(counts: TreeCounts, more: int) -> None:
        nonlocal sending_bytes
        reports.sending(counts, more)
        sending_bytes += more
        show(counts)

    return reports._replace(progress=progress, sending=sending)


class BackupReports(NamedTuple):
    """The options that choose what an unattended backup reports; see their declarations."""

    on_success: str | None
    on_failure: str | None
    ping: str | None
    metrics_file: str | None
    json_progress: bool


class ReportedJob(GridJob):
    """
    A job that runs a backup and reports its outcome; an interrupted backup is not reported.

    Args:
        outcome: a record that the work fills in.
    """

    def __init__(
        self,
        work: Callable[[Grid, Console], Awaitable[int]],
        reports: BackupReports,
        outcome: BackupOutcome,
        *paths: str,
    ) -> None:
        super().__init__(work, *paths)
        self._reports = reports
        self._outcome = outcome

    async def run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        """Do the work, and report the outcome; return the exit status."""
        outcome, began_s = self._outcome, reactor.seconds()
        starting = self._begin_ping(invocation, reactor)
        status = await super().run(invocation, reactor, open_grid)
        if starting is not None:
            starting.cancel()
        outcome.status = ExitStatus(status)
        if status == ExitStatus.INTERRUPTED:
            return status
        outcome.elapsed_s = reactor.seconds() - began_s
        return await status_of_job(invocation.console, self._report(invocation, reactor))

    async def _report(self, invocation: Invocation, reactor: Any) -> ExitStatus:
        console, outcome, reports = invocation.console, self._outcome, self._reports
        succeeded = outcome.status == ExitStatus.DONE
        hook = reports.on_success if succeeded else reports.on_failure
        if hook:
            await self._run_hook(console, reactor, hook, "success" if succeeded else "failure")
        outcome.ended_s = time.time()
        if reports.metrics_file is not None:
            self._write_metrics(console, reports.metrics_file)
        if reports.ping is not None:
            await self._ping(invocation, reactor, "" if outcome.status == 0 else "fail")
        return outcome.status

    async def _run_hook(self, console: Console, reactor: Any, command: str, when: str) -> None:
        outcome = self._outcome
        ended = await backup_end_hooks.run_hook(reactor, command, outcome.variables)
        for line in ended.output.decode("utf-8", "backslashreplace").splitlines():
            console.say(f"--on-{when}: {printable(line)}")
        if ended.dropped_bytes:
            console.say(f"--on-{when}: {ended.dropped_bytes} further bytes are not shown")
        if ended.problem is not None:
            console.fault(f"the command of --on-{when} failed: {ended.problem}")
            if outcome.status == ExitStatus.DONE:
                outcome.status = ExitStatus.FAILED

    def _write_metrics(self, console: Console, path: str) -> None:
        outcome = self._outcome
        try:
            backup_metrics.write_metrics(Path(path), outcome.name, outcome.metrics)
        except OSError as error:
            why = error.strerror or str(error)
            console.fault(f"cannot write the metrics to {printable(path)}: {why}")

    # The monitor.

    def _begin_ping(self, invocation: Invocation, reactor: Any) -> Deferred[None] | None:
        """Begin to report the start of the backup to the monitor, and return without waiting."""
        if self._reports.ping is None:
            return None
        from twisted.internet.defer import CancelledError, Deferred

        starting = Deferred.fromCoroutine(self._ping(invocation, reactor, "start"))
        starting.addErrback(lambda failure: failure.trap(CancelledError) and None)
        return starting

    async def _ping(self, invocation: Invocation, reactor: Any, event: str) -> None:
        assert self._reports.ping is not None
        directory = invocation.grid_directory
        try:
            policy, _ = client_config.connections_of(directory)
        except PipegridError as error:
            problem: str | None = f"no ping is sent: {sentence(error)}"
        else:
            problem = await status_ping.ping(reactor, policy, self._reports.ping, event)
        if problem is not None:
            invocation.console.fault(f"{problem}; the backup itself is not affected")


# The options.


def _ping_url(text: str) -> str:
    try:
        return status_ping.check_ping_url(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _metrics_path(_ctx: click.Context, _param: click.Parameter, path: str | None) -> str | None:
    if path is not None and not path.endswith(".prom"):
        raise click.BadParameter(f"{path!r} does not end in .prom, so node exporters ignore it")
    return path


def _json_too(ctx: click.Context, _param: click.Parameter, wanted: bool) -> bool:
    invocation = ctx.find_object(Invocation)
    if wanted and invocation is not None:
        invocation.console.json = True
    return wanted


report_options = as_one(
    "reports",
    BackupReports,
    click.option(
        "--json-progress",
        is_flag=True,
        callback=_json_too,
        help="As --json, with a line of progress each second at most, and 'message_type' in each.",
    ),
    click.option(
        "--metrics-file",
        type=click.Path(dir_okay=False, readable=False),
        callback=_metrics_path,
        metavar="FILE.prom",
        help="Write the outcome to FILE.prom, for the textfile collector of Prometheus's node exporter.",
    ),
    click.option(
        "--ping",
        type=_ping_url,
        metavar="URL",
        help="Report to a monitor such as healthchecks.io: URL/start at first, then URL or, after a failure, "
        "URL/fail.",
    ),
    click.option(
        "--on-failure",
        metavar="COMMAND",
        help="Run COMMAND with sh if the exit status is another than 0; PIPEGRID_EXIT_STATUS has it.",
    ),
    click.option(
        "--on-success",
        metavar="COMMAND",
        help="Run COMMAND with sh if the exit status is 0; if it fails, the status is 1.",
    ),
)
"""The options that choose what an unattended backup reports."""
