"""The state of one run, and its worker processes."""

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

TYPE_CHECKING = False  # as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from typing import Any

    from pipegrid.disk.durability import Policy
    from pipegrid.mirror.epoll_file_store import FileStore
    from pipegrid.mirror.epoll_socket_cache import SocketCache


# The state of one run: what is wanted, what waits, and the report.
#
# The epoll driver begins it, where possible, and ``mirror_api.Mirror`` completes it, if anything remains.


LOOKED_AT_ONCE = 256


class MirrorRun:
    """
    One run of a mirror.

    Args:
        staged, takes_up: as in ``local_check.LocalCheck``.

    Attributes:
        would_files, would_bytes: what would be fetched in a dry run; ``would_paths``: the first of it.
        all_read: whether no more files are wanted.
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
        """The check for missing files. In the destination's thread."""
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
        Fetch what the epoll driver can fetch, in this thread, which has the destination meanwhile.

        Args:
            jobs: processes that share the work; for a process without other threads. The list is read to
                its end before they start.
            preconnected: may have opened connections in advance.

        Returns:
            Whether that was all.

        Raises:
            BadEntry, MirrorError: as ``EpollDriver.run``.
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
                preconnected.close()  # this is another process, which has connections of its own
            most = max(1, connections // processes)
            EpollDriver(
                FetchSchedule(plan, self.addresses, tallies, most, ALONE_STALL_S),
                new_store,
                self.look.missing,
                stops,
                report_progress if own else lambda: None,  # other processes show no progress
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
        """Read the whole list, and let several processes fetch it, of which this is one."""
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
        """Complete the run: every file is present or has failed. In the destination's thread."""
        if self._takes_up and not self.staged:  # files of the indexes come later
            self.look.drop_leftovers()

    def sum_up(self) -> Report:
        """Return the report, brought up to date."""
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


# One run by several processes, if one processor is the limit.
#
# Each has a part of the files, with about as many bytes and files as the others, connections of its own,
# and the same directory. They are forked when the missing files are known, before there are threads. Each
# reports its result through a pipe; what it left waits in the scheduler of the parent, as if the parent had
# left it. If a process ends without a result, its part is checked and fetched again.
#
# A forked process ends when its parent has ended: it checks this whenever it checks for signals.

FILE_BYTES = 32 << 10
"""The cost of a file of any size, in bytes that could be fetched meanwhile."""

WORTHWHILE_FILES = 64
"""One more process for fewer files costs more than it saves."""

LOOK_S = 0.1
"""How often to check, while waiting for others, whether the run must end."""

END_S = 5.0
"""How long others have to end; they check whenever bytes arrive, or none do."""


def parts_of(files: Sequence[ArchiveFile], jobs: int) -> list[list[ArchiveFile]]:
    """
    Divide files among at most ``jobs`` processes, as many as are worth it; each part takes equally long.
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
        fetch: the work of each process: fetches the jobs of a scheduler, as far as all goes well, until it
            must stop.
        stopped: whether the run must end.
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
        """Start one more process for these files. Raises: MirrorError: no more processes are possible."""
        process = ForkedWork(lambda is_orphan: self._work(files, is_orphan))
        error = process.error
        if error is not None:
            process.stop()
            raise MirrorError(
                f"no further process can be started ({error.strerror}); ask for fewer --jobs"
            ) from error
        self._running.append((process, files))

    def _work(self, files: list[ArchiveFile], is_orphan: Callable[[], bool]) -> dict[str, Any]:
        """Fetch, and return the result. In the process."""
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
        Wait until all have ended, and put into a scheduler what they have done and what they have left.

        If the run must end meanwhile, they are stopped.

        Raises:
            MirrorError: one could not continue: the destination accepts nothing any more.
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
        """Wait until the first one reports, which it does once, at its end."""
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
        """A process ended without a report: check which files it has fetched."""
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
            tally.busy_s = max(tally.busy_s, counts["busy_s"])  # it was busy at the same time
        for number, refused_by, reasons in result["left"]:
            plan.add_failed(files[number], refused_by, reasons)

    def stop(self) -> None:
        """Stop the processes that still run."""
        for process, _ in self._running:
            process.stop()
        self._running.clear()


def _result(plan: Scheduler, tallies: Sequence[Tally], files: list[ArchiveFile]) -> dict[str, Any]:
    """Return the report of a process; its files are named by their index in its part."""
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
