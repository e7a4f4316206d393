"""
One bringing up to date, as far as it has come: what is wanted, what waits, what there is to tell.

It is begun by a sprint, where that can be, and brought to its end by ``mirror.Mirror``, if anything is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from pipegrid.mirror.address import Address
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.folding import kept_first
from pipegrid.mirror.plan import Plan
from pipegrid.mirror.present import Doubt, Look, MirrorEntry, checked
from pipegrid.mirror.report import Report, Tally
from pipegrid.mirror.sprint.sprint import Sprint
from pipegrid.mirror.wanted import Wanted

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from pipegrid.disk.commit import Policy
    from pipegrid.mirror.sprint.dialling import BegunConnections

LOOKED_AT_ONCE = 256


class Work:
    """
    Args:
        staged, takes_up: as of ``present.Look``.

    Attributes:
        would_files, would_bytes: what would be fetched, if anything were.
        all_read: nothing more is wanted.
    """

    def __init__(
        self,
        destination: Destination,
        addresses: Sequence[Address],
        doubt: Doubt,
        staged: bool = False,
        takes_up: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.destination = destination
        self.addresses = addresses
        self.staged = staged
        urls = [address.url for address in addresses]
        self.plan = Plan(len(urls), urls, destination.serial_urls)
        self.report = Report(tallies=[Tally(url) for url in urls])
        self.would_files = self.would_bytes = 0
        self.all_read = False
        self._doubt = doubt
        self._takes_up = takes_up
        self._look: Look | None = None
        self._told = 0
        self._now = now
        self._began_s = now()

    @property
    def look(self) -> Look:
        """What finds out what is missing. In the destination's thread."""
        if self._look is None:
            self._look = Look(
                self.destination, self.report, self._doubt, self.staged, self._takes_up
            )
        return self._look

    def sprint(
        self,
        files: Iterable[MirrorEntry],
        policy: Policy,
        connections: int,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[Report], None] | None = None,
        jobs: int = 1,
        ahead: BegunConnections | None = None,
    ) -> bool:
        """
        Fetch what can be fetched without ado, in this thread, which has the destination meanwhile.

        Args:
            jobs: processes that share it; for a process without other threads. All is read before they begin.
            ahead: has begun to connect to some of the mirrors.

        Returns:
            Whether that was all.

        Raises:
            BadEntry, MirrorError: as ``Sprint.run``.
        """

        def told() -> None:
            if progress is not None:
                progress(self.sum_up())

        def run(
            plan: Plan,
            tallies: Sequence[Tally],
            stops: Callable[[], bool],
            entries: Iterable[Wanted] = (),
            processes: int = 1,
        ) -> None:
            own = plan is self.plan
            if ahead is not None and not own:
                ahead.close()  # this is another process, which has connections of its own
            Sprint(
                plan,
                self.addresses,
                tallies,
                self.destination,
                policy,
                max(1, connections // processes),
                self.look.missing,
                self.staged,
                stops,
                told if own else lambda: None,  # other processes show nothing
                ahead if own else None,
            ).run(entries)

        if jobs > 1:
            self._share(files, jobs, run, stopped)
        else:
            run(self.plan, self.report.tallies, stopped, self._entries(files))
        self.all_read = True
        return self.plan.is_idle and not stopped()

    def _entries(self, files: Iterable[MirrorEntry]) -> Iterator[Wanted]:
        destination = self.destination
        return kept_first(checked(files), destination.folds, destination.is_there)

    def _share(
        self,
        files: Iterable[MirrorEntry],
        jobs: int,
        run: Callable[..., None],
        stopped: Callable[[], bool],
    ) -> None:
        """Read all, and have several processes fetch it, of which this is one."""
        from pipegrid.mirror.sprint.shared import Helpers, parts_of  # which few need

        missing: list[Wanted] = []
        entries = self._entries(files)
        while chunk := list(islice(entries, LOOKED_AT_ONCE)):
            missing += self.look.missing(chunk)
            if stopped():
                return
        own, *others = parts_of(missing, jobs)
        del missing
        run = partial(run, processes=1 + len(others))
        helpers = Helpers(self.destination, self.report, run, stopped)
        try:
            for part in others:
                helpers.start(part)
            for each in own:
                self.plan.add(each)
            run(self.plan, self.report.tallies, stopped)
            helpers.join(self.plan)
        finally:
            helpers.stop()

    def finish(self) -> None:
        """All is there, or has failed. In the destination's thread."""
        if self._takes_up and not self.staged:  # what indexes name comes later
            self.look.drop_leftovers()

    def sum_up(self) -> Report:
        """Return the report, brought up to date."""
        report, plan = self.report, self.plan
        report.fetched_files = plan.done_files + self.would_files
        report.fetched_bytes = plan.done_bytes + self.would_bytes
        report.retries = plan.retries
        report.elapsed_s = self._now() - self._began_s
        failed = plan.failed[self._told :]
        self._told += len(failed)
        for errand in failed:
            reasons = errand.reasons or {}
            why = "; ".join(
                f"{self.addresses[number].url}: {reason}" for number, reason in reasons.items()
            )
            report.fail(errand.wanted.path, why or "no mirror could be used")
        return report
