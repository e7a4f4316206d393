"""
One sprint by several processes, where one processor limits.

Each has a part of the files, of about as many bytes and files as the others', connections of its own, and
the same directory. They are forked when it is known what is missing, before there are threads; each tells
through a pipe what it has done, and what it left waits in the plan of the process that began them, as if it
had left that itself. A process that ends without a word has its part looked at, and fetched again.

Whoever is forked ends when its parent has: it looks each time that it would look for signals.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from pipegrid.errors import PipegridError
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.plan import Plan
from pipegrid.mirror.report import Report, Tally
from pipegrid.mirror.wanted import MirrorError, Wanted

FILE_BYTES = 32 << 10
"""What a file costs whatever its size, in bytes that could be fetched meanwhile."""

WORTHWHILE_FILES = 64
"""A process more for fewer costs more than it saves."""

LOOK_S = 0.1
"""How often it is looked, while waiting for others, whether all is to end."""

END_S = 5.0
"""How long others have to end when they are told to; they look whenever bytes come, or none do."""

Sprinting = Callable[[Plan, Sequence[Tally], Callable[[], bool]], None]
"""Fetches what waits in a plan, as far as all goes well, until it is told to stop."""


def parts_of(files: Sequence[Wanted], jobs: int) -> list[list[Wanted]]:
    """Deal files to so many processes, or fewer if they are not worth it; each part takes as long."""
    count = max(1, min(jobs, len(files) // WORTHWHILE_FILES))
    parts: list[list[Wanted]] = [[] for _ in range(count)]
    loads = [0] * count
    for each in sorted(files, key=lambda one: -(one.size or 0)):
        least = loads.index(min(loads))
        parts[least].append(each)
        loads[least] += (each.size or 0) + FILE_BYTES
    return parts


class Helpers:
    """
    Processes that fetch parts of what is wanted.

    Args:
        report: has the tallies of the mirrors, in the order of the plan.
        sprint: what each process does.
        stopped: whether all of it is to end.
    """

    def __init__(
        self,
        destination: Destination,
        report: Report,
        sprint: Sprinting,
        stopped: Callable[[], bool],
    ) -> None:
        self._destination = destination
        self._report = report
        self._sprint = sprint
        self._stopped = stopped
        self._running: list[tuple[int, int, list[Wanted]]] = []

    def start(self, files: list[Wanted]) -> None:
        """Have one more process fetch these. Raises: MirrorError: there can be no more processes."""
        ours, theirs = os.pipe()
        parent = os.getpid()
        try:
            child = os.fork()
        except OSError as error:
            os.close(ours)
            os.close(theirs)
            raise MirrorError(
                f"no further process can be started ({error.strerror}); ask for fewer --jobs"
            ) from error
        if not child:
            os.close(ours)
            self._work(files, theirs, lambda: self._stopped() or os.getppid() != parent)
        os.close(theirs)
        self._running.append((child, ours, files))

    def _work(self, files: list[Wanted], told: int, stopped: Callable[[], bool]) -> NoReturn:
        """In the process: fetch, tell, and end without any of the parent's ceremony."""
        status = 1
        try:
            self._destination.forked()
            tallies = [Tally(each.url) for each in self._report.tallies]
            urls = [each.url for each in tallies]
            plan = Plan(len(urls), urls, self._destination.serial_urls)
            for each in files:
                plan.add(each)
            try:
                self._sprint(plan, tallies, stopped)
                result = _result(plan, tallies, files)
            except PipegridError as error:
                result = {"error": str(error)}
            with open(told, "w", encoding="ascii") as pipe:
                json.dump(result, pipe)
            status = 0
        finally:
            os._exit(status)

    def join(self, plan: Plan) -> None:
        """
        Wait until all have ended, and put into a plan what they have done and what they have left.

        If all of it is to end meanwhile, they are told.

        Raises:
            MirrorError: one could not go on: the destination can take nothing any more.
        """
        failed = None
        self._destination.has_changed()
        while self._running:
            self._wait()
            child, ours, files = self._running.pop(0)
            with open(ours, encoding="ascii") as pipe:
                text = pipe.read()
            _, status = os.waitpid(child, 0)
            if status:
                self._look(plan, files)
                continue
            result = json.loads(text)
            failed = failed or result.get("error")
            if "error" not in result:
                self._take_over(plan, files, result)
        if failed:
            raise MirrorError(failed)

    def _wait(self) -> None:
        """Until the first has something to tell: it tells all of it at once, in the end."""
        looks = 0
        while not select.select([self._running[0][1]], [], [], LOOK_S)[0]:
            if self._stopped():
                if looks in (0, round(END_S / LOOK_S)):
                    self._tell(signal.SIGKILL if looks else signal.SIGTERM)
                looks += 1

    def _tell(self, number: signal.Signals) -> None:
        for child, _, _ in self._running:
            os.kill(child, number)

    def _look(self, plan: Plan, files: list[Wanted]) -> None:
        """A process ended in the middle: what it has done is done."""
        for each in files:
            if self._destination.is_there(each):
                plan.add_done(1, each.size or 0, 0)
            else:
                plan.add(each)

    def _take_over(self, plan: Plan, files: list[Wanted], result: dict[str, Any]) -> None:
        plan.serial_urls.update(result["serial"])
        plan.add_done(result["files"], result["bytes"], result["retries"])
        for tally, counts in zip(self._report.tallies, result["tallies"], strict=True):
            tally.files += counts[0]
            tally.received_bytes += counts[1]
            tally.refused += counts[2]
            tally.broken += counts[3]
            tally.connections += counts[4]
            tally.busy_s = max(tally.busy_s, counts[5])  # it was busy at the same time
        for number, refused_by, reasons in result["left"]:
            plan.take_over(files[number], refused_by, {int(key): reasons[key] for key in reasons})

    def stop(self) -> None:
        """Have those that still run end at once."""
        for child, ours, _ in self._running:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(ours)
        self._running.clear()


def _result(plan: Plan, tallies: Sequence[Tally], files: list[Wanted]) -> dict[str, Any]:
    """Return what a process has to tell; its files are named by where they stand in its part."""
    numbers = {each.path: number for number, each in enumerate(files)}
    return {
        "files": plan.done_files,
        "bytes": plan.done_bytes,
        "retries": plan.retries,
        "serial": sorted(plan.serial_urls),
        "left": [
            (numbers[each.wanted.path], each.refused_by & ~each.unproven, each.reasons or {})
            for each in (*plan.waiting(), *plan.failed)
        ],
        "tallies": [
            (
                each.files,
                each.received_bytes,
                each.refused,
                each.broken,
                each.connections,
                each.busy_s,
            )
            for each in tallies
        ],
    }
