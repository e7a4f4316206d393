"""
One bringing up to date on a reactor: what happens at the sources is told to the plan, and they are asked on.

A sprint goes first, where that can be; what it leaves is fetched here, with all the patience that mirrors
need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall

from pipegrid.disk.commit import Policy
from pipegrid.mirror.address import Address
from pipegrid.mirror.folding import kept_first
from pipegrid.mirror.plan import Errand
from pipegrid.mirror.present import MirrorEntry, checked
from pipegrid.mirror.report import Report
from pipegrid.mirror.sink import ArchiveSink
from pipegrid.mirror.source import MirrorSource
from pipegrid.mirror.wanted import Wanted
from pipegrid.mirror.watch import GivingRate, MirrorStanding, has_stalled, theft
from pipegrid.mirror.work import Work
from pipegrid.reactor.workers import CpuWorkers

LOOKED_AT_ONCE = 256
WATCH_S = 0.25
AHEAD_S = 0.05
"""What a limited rate may be ahead of itself before reading pauses."""


@attrs.frozen
class SyncOptions:
    """
    How it is done.

    Attributes:
        connect: makes of an address what makes endpoints for connections to it.
        limit: bytes a second from all mirrors together; None: no limit.
        sprints: a sprint may go first.
    """

    policy: Policy
    connections: int
    connect: Callable[[Address], Callable[[], Any]]
    limit: float | None
    progress: Callable[[Report], None] | None
    dry_run: bool
    sprints: bool


class Sync:
    """One bringing up to date."""

    def __init__(
        self,
        reactor: Any,
        addresses: Sequence[Any],
        work: Work,
        workers: CpuWorkers,
        options: SyncOptions,
    ) -> None:
        self._clock = reactor
        self._work_done = work
        self._workers = workers
        self._options = options
        self._plan = work.plan
        self._sink = ArchiveSink(
            work.destination,
            workers,
            options.policy,
            self._full,
            self._broken,
            None if options.limit is None else self._throttle,
            work.staged,
        )
        self._sources = [
            MirrorSource(
                number,
                address,
                self._plan,
                self._sink,
                reactor,
                options.connect(address),
                self,
                options.connections,
                tally=work.report.tallies[number],
            )
            for number, address in enumerate(addresses)
        ]
        self._paces = [GivingRate() for _ in addresses]
        self._all_read = False
        self._closed = False
        self._sink_is_full = False
        self._allowed_until_s = reactor.seconds()
        self._throttled: IDelayedCall | None = None
        self._watcher: IDelayedCall | None = None
        self._ended: Deferred[None] = Deferred()

    async def run(self, files: Iterable[MirrorEntry]) -> Report:
        """Bring some files up to date; what that means is told at ``Mirror.sync``."""
        work, options = self._work_done, self._options
        if options.sprints and not work.all_read:
            await self._workers.run(self._sprint, files)
            if self._ended.called:
                await self._ended
        if work.all_read:
            files = ()
        self._watcher = self._clock.callLater(WATCH_S, self._watch)
        destination = work.destination
        entries = kept_first(checked(files), destination.folds, destination.is_there)
        while chunk := list(islice(entries, LOOKED_AT_ONCE)):
            missing = await self._workers.run(self._look, chunk)
            if options.dry_run:
                work.would_files += len(missing)
                work.would_bytes += sum(each.size or 0 for each in missing)
                continue
            for each in missing:
                self._plan.add(each)
            self._work()
            if self._ended.called:
                break
        self._all_read = True
        self._work()
        self._look_finished()
        await self._ended
        await self._sink.flush()
        await self._workers.run(work.finish)
        return work.sum_up()

    def _sprint(self, files: Iterable[MirrorEntry]) -> bool:
        """In the thread: fetch what can be fetched without ado."""
        options = self._options
        progress = options.progress

        def told(report: Report) -> None:
            self._clock.callFromThread(self._tell, report)

        return self._work_done.sprint(
            files,
            options.policy,
            options.connections,
            lambda: self._closed or self._ended.called,
            None if progress is None else told,
        )

    def _tell(self, report: Report) -> None:
        if self._closed or self._ended.called or self._options.progress is None:
            return
        try:
            self._options.progress(report)
        except Exception as error:  # nobody else would hear of it
            self._broken(error)

    def _look(self, chunk: list[Wanted]) -> list[Wanted]:
        """In the thread: return what is not there."""
        return self._work_done.look.missing(chunk)

    def close(self) -> None:
        """End all that is under way: the timers, and the sources with their connections."""
        self._closed = True
        self._ended.addErrback(lambda _: None)  # whoever wanted to know has been told
        call, self._watcher = self._watcher, None
        if call is not None:
            call.cancel()
        throttled, self._throttled = self._throttled, None
        if throttled is not None:
            throttled.cancel()
        for source in self._sources:
            source.close()

    # What happens.

    def arrived(self, source: MirrorSource, errand: Errand, size_bytes: int) -> None:
        if errand.under_way:
            for other in self._sources:
                if errand.under_way >> other.number & 1:
                    other.forget(errand)
        self._look_finished()

    def changed(self) -> None:
        self._work()
        self._look_finished()

    def _full(self, full: bool) -> None:
        self._sink_is_full = full
        self._pause()

    def _pause(self) -> None:
        paused = self._sink_is_full or self._throttled is not None
        for source in self._sources:
            if source.is_paused != paused:
                source.pause(paused)

    def _broken(self, error: Exception) -> None:
        if not self._ended.called:
            self._ended.errback(error)

    def _work(self) -> None:
        if not self._closed:
            for source in self._sources:
                source.work()

    def _look_finished(self) -> None:
        if self._all_read and self._plan.is_idle and not self._ended.called:
            self._ended.callback(None)

    # What is watched.

    def _watch(self) -> None:
        self._watcher = self._clock.callLater(WATCH_S, self._watch)
        now_s = self._clock.seconds()
        able = [s for s in self._sources if not (s.is_resting or s.is_given_up)]
        for source, pace in zip(self._sources, self._paces, strict=True):
            owed = source.owed_bytes
            pace.note(now_s, source.asked_bytes - owed, owed > 0 and not source.is_paused)
            if source.is_paused:
                continue
            others = any(other is not source for other in able)
            for connection in list(source.connections):
                idle_s = now_s - source.last_byte_s.get(connection, now_s)
                pipelined = connection in source.pipelined
                if connection.lane.written and has_stalled(idle_s, others, pipelined):
                    source.stalled(connection, f"no byte came for {idle_s:.1f} s", others)
        if not self._plan.waits and self._all_read:
            self._steal()
        if self._options.progress is not None:
            self._tell(self._work_done.sum_up())

    def _steal(self) -> None:
        move = theft(
            [
                MirrorStanding(
                    source.number,
                    source.owed_bytes,
                    pace.bytes_per_s,
                    not (source.is_resting or source.is_given_up or source.is_paused),
                )
                for source, pace in zip(self._sources, self._paces, strict=True)
            ]
        )
        if move is None:
            return
        thief, left_bytes = self._sources[move.thief], move.size_bytes
        for errand in reversed(self._sources[move.victim].under_way()):
            if left_bytes <= 0:
                break
            if thief.ask_too(errand):
                left_bytes -= errand.size_bytes

    def _throttle(self, received_bytes: int) -> None:
        """Do not read on before so many bytes may have come."""
        limit = self._options.limit
        assert limit is not None
        now_s = self._clock.seconds()
        due_s = self._allowed_until_s = max(self._allowed_until_s, now_s) + received_bytes / limit
        if self._throttled is None and due_s - now_s > AHEAD_S:
            self._throttled = self._clock.callLater(due_s - now_s, self._unthrottle)
            self._pause()

    def _unthrottle(self) -> None:
        self._throttled = None
        self._pause()
