"""The state of one run of a mirror, and the worker processes that share its work."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice

from pipegrid.errors import PipegridError
from pipegrid.mirror.archive_file import ArchiveFile, MirrorError, kept_first
from pipegrid.mirror.connection_scheduler import FetchSchedule
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.epoll_driver import ALONE_STALL_S, EpollDriver
from pipegrid.mirror.file_scheduler import Report, Scheduler, Tally
from pipegrid.mirror.local_check import LocalCheck, MirrorEntry, VerifyPolicy, checked
from pipegrid.mirror.mirror_urls import Address
from pipegrid.mirror.stat_cache import ForkedWork

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import

if TYPE_CHECKING:
    from typing import Any

    from pipegrid.disk.durability import Policy
    from pipegrid.mirror.epoll_file_store import FileStore
    from pipegrid.mirror.epoll_socket_cache import SocketCache


# The state of one run: which files are wanted and waiting, and the report.
#
# The epoll driver begins the run, where possible; ``mirror_api.Mirror`` completes it if files remain.


LOOKED_AT_ONCE = 256


class MirrorRun:
    """
    One run of a mirror.

    Args:
        staged, takes_up: as for ``local_check.LocalCheck``.

    Attributes:
        would_files, would_bytes: how much a dry run would fetch; ``would_paths``: the first paths of these
            files.
        all_read: whether the list of wanted files has been read to its end.
    """

    def __init__(
        self,
        destination: Destination,
        addresses: Sequence[Address],
        verify_policy: VerifyPolicy,
        staged: bool = False,
        takes_up: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.destination = destination
        self.addresses = addresses
        self.staged = staged
        urls = [address.url for address in addresses]
        self.plan = Scheduler(len(urls), urls, destination.serial_urls)
        self.report = Report(tallies=[Tally(url) for url in urls])
        self.would_files = self.would_bytes = 0
        self.would_paths: list[str] = []
        self.all_read = False
        self._verify_policy = verify_policy
        self._takes_up = takes_up
        self._reported_count = 0
        self._now = now
        self._began_s = now()

    @cached_property
    def look(self) -> LocalCheck:
        """The check for missing files. For the destination's thread."""
        return LocalCheck(
            self.destination, self.report, self._verify_policy, self.staged, self._takes_up
        )

    def run_on_epoll(
        self,
        files: Iterable[MirrorEntry],
        policy: Policy,
        connections: int,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[Report], None] | None = None,
        jobs: int = 1,
        preconnected: SocketCache | None = None,
    ) -> bool:
        """
        Fetch what the epoll driver can fetch, in the calling thread, which must be the destination's.

        Args:
            jobs: how many processes share the work; more than one only if this process has no other threads.
                The list is read to its end before they start.
            preconnected: may have opened connections in advance.

        Returns:
            Whether every file is present or has failed; False as well if the run must end.

        Raises:
            BadEntry, MirrorError: as for ``EpollDriver.run``.
        """

        def report_progress() -> None:
            if progress is not None:
                progress(self.sum_up())

        def new_store(*called: Callable[..., Any]) -> FileStore:
            from pipegrid.mirror.epoll_file_store import FileStore

            return FileStore(self.destination, policy, self.staged, *called)

        def run(
            plan: Scheduler,
            tallies: Sequence[Tally],
            stops: Callable[[], bool],
            entries: Iterable[ArchiveFile] = (),
            processes: int = 1,
        ) -> None:
            own = plan is self.plan
            if preconnected is not None and not own:
                preconnected.close()  # this worker process makes its own connections
            most = max(1, connections // processes)
            EpollDriver(
                FetchSchedule(plan, self.addresses, tallies, most, ALONE_STALL_S),
                new_store,
                self.look.missing,
                stops,
                report_progress if own else lambda: None,  # worker processes show no progress
                preconnected if own else None,
            ).run(entries)

        if jobs > 1:
            self._share(files, jobs, run, stopped)
        else:
            run(self.plan, self.report.tallies, stopped, self._entries(files))
        self.all_read = True
        return self.plan.is_idle and not stopped()

    def _entries(self, files: Iterable[MirrorEntry]) -> Iterator[ArchiveFile]:
        destination = self.destination
        return kept_first(checked(files), destination.folds, destination.is_there)

    def _share(
        self,
        files: Iterable[MirrorEntry],
        jobs: int,
        run: Callable[..., None],
        stopped: Callable[[], bool],
    ) -> None:
        """Read the whole list, and fetch it with several processes; this process fetches one part."""
        missing: list[ArchiveFile] = []
        entries = self._entries(files)
        while chunk := list(islice(entries, LOOKED_AT_ONCE)):
            missing += self.look.missing(chunk)
            if stopped():
                return
        own, *others = parts_of(missing, jobs)
        del missing
        run = partial(run, processes=1 + len(others))
        processes = WorkerProcesses(self.destination, self.report, run, stopped)
        try:
            for part in others:
                processes.start(part)
            for each in own:
                self.plan.add(each)
            run(self.plan, self.report.tallies, stopped)
            processes.join(self.plan)
        finally:
            processes.stop()

    def finish(self) -> None:
        """
        Remove leftovers of earlier runs, since every file is present or has failed. Runs in the destination's
        thread.
        """
        # After a staged run, which fetches indexes, the run for the files that they name may still use the
        # leftovers.
        if self._takes_up and not self.staged:
            self.look.drop_leftovers()

    def sum_up(self) -> Report:
        """Update the report, and return it."""
        report, plan = self.report, self.plan
        report.fetched_files = plan.done_files + self.would_files
        report.fetched_bytes = plan.done_bytes + self.would_bytes
        report.fetched = plan.done_paths + self.would_paths
        report.retries = plan.retries
        report.elapsed_s = self._now() - self._began_s
        failed = plan.failed[self._reported_count :]
        self._reported_count += len(failed)
        for job in failed:
            reasons = job.reasons or {}
            why = "; ".join(
                f"{self.addresses[number].url}: {reason}" for number, reason in reasons.items()
            )
            report.fail(job.wanted.path, why or "no mirror could be used")
        return report


# One run by several processes, for the case that one processor is the limit.
#
# The files are divided into parts of about equally many bytes and files. Each process has its part and its
# own connections, and writes to the same directory. The processes are forked when the missing files are
# known, before threads are started. Each process reports its result through a pipe; files that the process
# could not fetch wait in the parent's scheduler. If a process ends without a result, its part is checked, and
# its missing files are fetched again.
#
# A forked process ends when its parent has ended: it checks this whenever it checks for signals.

FILE_BYTES = 32 << 10
"""The fixed cost of a file, as the number of bytes that could be fetched in that time."""

WORTHWHILE_FILES = 64
"""The minimum number of files for each process; for fewer files, a process costs more than it saves."""

LOOK_S = 0.1
"""How often to check whether the run must end, while waiting for worker processes."""

END_S = 5.0
"""How long workers have to end before they are killed; they check for signals regularly and on input."""


def parts_of(files: Sequence[ArchiveFile], jobs: int) -> list[list[ArchiveFile]]:
    """
    Divide files into at most ``jobs`` parts that take equally long; fewer parts if they would be too small.
    """
    count = max(1, min(jobs, len(files) // WORTHWHILE_FILES))
    parts: list[list[ArchiveFile]] = [[] for _ in range(count)]
    loads = [0] * count
    for each in sorted(files, key=lambda one: -(one.size or 0)):
        least = loads.index(min(loads))
        parts[least].append(each)
        loads[least] += (each.size or 0) + FILE_BYTES
    return parts


class WorkerProcesses:
    """
    Processes that fetch parts of the wanted files.

    Args:
        report: has the tallies of the mirrors, in the order of the scheduler.
        fetch: the work of each process: fetches the files of a scheduler, as far as the epoll driver can, and
            stops if it must.
        stopped: returns whether the run must end.
    """

    def __init__(
        self,
        destination: Destination,
        report: Report,
        fetch: Callable[[Scheduler, Sequence[Tally], Callable[[], bool]], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._destination = destination
        self._report = report
        self._fetch = fetch
        self._stopped = stopped
        self._running: list[tuple[ForkedWork, list[ArchiveFile]]] = []

    def start(self, files: list[ArchiveFile]) -> None:
        """Start a process for these files. Raises: MirrorError: no more processes are possible."""
        process = ForkedWork(lambda is_orphan: self._work(files, is_orphan))
        error = process.error
        if error is not None:
            process.stop()
            raise MirrorError(
                f"no further process can be started ({error.strerror}); ask for fewer --jobs"
            ) from error
        self._running.append((process, files))

    def _work(self, files: list[ArchiveFile], is_orphan: Callable[[], bool]) -> dict[str, Any]:
        """Fetch files, and return the result. Runs in the worker process."""
        self._destination.forked()
        tallies = [Tally(each.url) for each in self._report.tallies]
        urls = [each.url for each in tallies]
        plan = Scheduler(len(urls), urls, self._destination.serial_urls)
        for each in files:
            plan.add(each)
        try:
            self._fetch(plan, tallies, lambda: self._stopped() or is_orphan())
        except PipegridError as error:
            return {"error": str(error)}
        return _result(plan, tallies, files)

    def join(self, plan: Scheduler) -> None:
        """
        Wait until all processes have ended, and add their done and remaining files to a scheduler.

        If the run must end meanwhile, the processes are stopped.

        Raises:
            MirrorError: a process could not continue, since the destination accepts no more files.
        """
        failed = None
        self._destination.has_changed()
        while self._running:
            self._wait()
            process, files = self._running.pop(0)
            try:
                result = process.join()
            finally:
                process.stop()
            if result is None:
                self._look(plan, files)
            elif "error" in result:
                failed = failed or result["error"]
            else:
                self._take_over(plan, files, result)
        if failed:
            raise MirrorError(failed)

    def _wait(self) -> None:
        """
        Wait until the first process of the list has reported or ended; if the run must end, end all
        processes.
        """
        looks = 0
        while not select.select([self._running[0][0].result_fd], [], [], LOOK_S)[0]:
            if self._stopped():
                if looks in (0, round(END_S / LOOK_S)):
                    self._signal_children(signal.SIGKILL if looks else signal.SIGTERM)
                looks += 1

    def _signal_children(self, number: signal.Signals) -> None:
        for process, _ in self._running:
            os.kill(process.pid, number)

    def _look(self, plan: Scheduler, files: list[ArchiveFile]) -> None:
        """
        Check which files were fetched by a process that ended without a report; add the missing ones to the
        scheduler.
        """
        for each in files:
            if self._destination.is_there(each):
                plan.add_done(1, each.size or 0, 0, [each.path])
            else:
                plan.add(each)

    def _take_over(self, plan: Scheduler, files: list[ArchiveFile], result: dict[str, Any]) -> None:
        plan.serial_urls.update(result["serial"])
        paths = [files[number].path for number in result["paths"]]
        plan.add_done(result["files"], result["bytes"], result["retries"], paths)
        for tally, counts in zip(self._report.tallies, result["tallies"], strict=True):
            tally.files += counts["files"]
            tally.received_bytes += counts["received_bytes"]
            tally.refused += counts["refused"]
            tally.broken += counts["broken"]
            tally.connections += counts["connections"]
            # The processes were busy at the same time.
            tally.busy_s = max(tally.busy_s, counts["busy_s"])
        for number, refused_by, reasons in result["left"]:
            plan.add_failed(files[number], refused_by, reasons)

    def stop(self) -> None:
        """Stop the processes that still run."""
        for process, _ in self._running:
            process.stop()
        self._running.clear()


def _result(plan: Scheduler, tallies: Sequence[Tally], files: list[ArchiveFile]) -> dict[str, Any]:
    """Return a worker process's result, which identifies files by their position in the process's part."""
    numbers = {each.path: number for number, each in enumerate(files)}
    return {
        "files": plan.done_files,
        "bytes": plan.done_bytes,
        "paths": [numbers[path] for path in plan.done_paths],
        "retries": plan.retries,
        "serial": sorted(plan.serial_urls),
        "left": [
            (numbers[each.wanted.path], each.refused_by & ~each.unproven, each.reasons or {})
            for each in (*plan.waiting(), *plan.failed)
        ],
        "tallies": list(map(vars, tallies)),
    }
