"""
Getting one file, or a range of it, in one round trip where the shares are where they should be.

The first burst asks the first k + e servers of the ring for their share lists and, right behind,
for the predicted share's bytes: every offset follows from the cap. Where the guess was wrong the
lists have come with the refusals, and the next round trip is right. (One of many files does without the lists
while guesses come true: ``guesses``.) The fastest k shares of the race serve the rest of the file; when they
falter another joins.

The loop looks at everything, decides, acts and waits for the next event. Its steps are methods in
the order in which they run; those that have to do with servers are ``openreaders``'.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.decoder import Decoder
from pipegrid.core.hashes import Buffer
from pipegrid.core.segmentjob import SegmentJob, SegmentResult
from pipegrid.disk.partfile import PartFile
from pipegrid.errors import SinkError
from pipegrid.reactor.wakeup import Wakeup
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.get.guesses import Guesses
from pipegrid.transfer.get.line import ClientLine
from pipegrid.transfer.get.openreaders import OpenReaders
from pipegrid.transfer.get.patience import Patience
from pipegrid.transfer.get.readers import ShareReader
from pipegrid.transfer.get.resuming import Rechecked, ResumingDecoder
from pipegrid.transfer.get.sink import SinkLike, open_sink
from pipegrid.transfer.get.tactics import Race
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.progress import Progress, ProgressReport
from pipegrid.transfer.results import GetResult
from pipegrid.transfer.settings import DownloadSettings

_UNLIMITED = 1 << 62

_RACE_BYTES = 1 << 20
"""What those who join a race late are asked for beyond the next block: it keeps 80 Mbit/s busy at 100 ms."""

_TASTE_BYTES = 1 << 16
_TASTE_SHARE = 64
"""
What the racers beyond the first k are asked for together, if the range has several segments: so much, or this
fraction of the range, at most a block. For it costs the line, and nearly always in vain.
"""

_NARROW_TASTE_BYTES = 1 << 13
"""The least of that on a line of which is known that it is narrow."""

_LUMPS = 8
"""On such a line a favourite is waited for as long as this fraction of the range takes."""

_HELPERS = 2
"""
Of a range of several segments, the taste is divided among so many servers for each extra share: two can
catch up with what one cannot (``race``).
"""

_MAX_JOBS = 3
"""Segments being decoded at the same time: both cores busy while one segment is written out."""


class Download:
    """
    The download of a range of one encoded file (not of a literal one).

    Args:
        peers: servers that may be used, in any order.
        cap: with a verifier cap it is the ciphertext that is delivered.
        sink: of a part file, what is there and proves to be good is not fetched.
        start, length: the range of plaintext; it lies within the file.
        progress: called with plaintext bytes delivered and wanted.
        avoid: copies that are known to be damaged, each as share number and server.
        holders: share number to the servers that have it, if all is known: then no server is asked.
        line: what is known of the client's line, and learns of this download.
        guesses: how right those of past downloads were, and learns of this one's.
    """

    def __init__(
        self,
        *,
        clock: IReactorTime,
        workers: CpuWorkers,
        peers: Sequence[Peer],
        cap: ChkCap | ChkVerifierCap,
        sink: SinkLike,
        start: int,
        length: int,
        settings: DownloadSettings,
        progress: Progress | None = None,
        avoid: Collection[tuple[int, Peer]] = (),
        holders: Mapping[int, Sequence[Peer]] | None = None,
        line: ClientLine | None = None,
        guesses: Guesses | None = None,
    ) -> None:
        self._line = ClientLine() if line is None else line
        self._guesses = Guesses() if guesses is None else guesses
        self._clock = clock
        self._workers = workers
        self._cap = cap
        self._settings = settings
        self._progress = ProgressReport(progress, length)
        self._changed = Wakeup(clock)
        self._sink = open_sink(sink, self._changed.fire)
        self._part = sink if isinstance(sink, PartFile) else None
        found_bytes = self._part.begin(length) if self._part is not None else 0
        self._resuming: ResumingDecoder | None = None
        if self._part is not None and found_bytes:
            self._resuming = ResumingDecoder(
                cap, start, length, found_bytes, self._part.read, settings.max_segment_bytes
            )
        self._decoder = self._resuming or Decoder(
            cap, start, length, max_segment_bytes=settings.max_segment_bytes
        )
        self._found_bytes = found_bytes
        self._jobs: set[Deferred[None]] = set()
        self._results: list[SegmentResult | Rechecked] = []
        self._bug: Failure | None = None
        geometry = self._decoder.guessed_geometry
        length -= found_bytes  # what is to be fetched, as far as can be told
        several = length > geometry.segment_bytes
        narrow = self._line.is_narrow_for(settings.extra_shares * geometry.block_bytes)
        least_bytes = _NARROW_TASTE_BYTES if narrow else _TASTE_BYTES
        # A rerun is to fetch little more than what is missing, and may taste twice if a segment was damaged.
        share_bytes = 0 if found_bytes else length // _TASTE_SHARE
        taste_bytes = max(least_bytes, share_bytes) // _HELPERS
        tastes = several or narrow
        self._taste_bytes = taste_bytes if tastes else geometry.block_bytes
        self._extra = _HELPERS * settings.extra_shares if tastes else settings.extra_shares
        self._share_of_memory = settings.memory_bytes // (cap.required_shares + self._extra)
        self._hedged = False
        self._used: dict[int, str] = {}
        self._used_by_job: dict[int, dict[int, str]] = {}
        self._started = clock.seconds()
        lumps_s = self._line.time_s(length) / _LUMPS if narrow else 0.0
        self._race = Race(self._started, lumps_s)
        # No server lags because the line is narrow.
        hedge_s = max(settings.hedge_s, 2 * self._line.time_s(geometry.segment_bytes))
        self._patience = Patience(hedge_s, settings.silence_s, self._started)
        self._readers = OpenReaders(
            clock=clock,
            peers=peers,
            cap=cap,
            decoder=self._decoder,
            ahead_bytes=self._share_of_memory,
            race=self._race,
            patience=self._patience,
            line=self._line,
            guesses=self._guesses,
            avoid=avoid,
            holders=holders,
            changed=self._changed.fire,
        )

    async def run(self) -> GetResult:
        """
        Fetch, verify and deliver the range.

        Raises:
            NotEnoughSharesError: fewer than k good shares could be had.
            CorruptionError: the shares are right but do not make up the file of the cap.
            SinkError: the plaintext could not be written.
            CapMismatch: the cap is not that of the file which is stored there.
            SegmentTooLarge: the settings do not allow the file's segments.
        """
        needs_lists = self._guesses.needs_lists
        self._guesses.began()
        try:
            self._readers.first_burst(self._extra, needs_lists)
            self._ask()
            while True:
                self._deliver()
                if self._decoder.done:
                    if not self._sink.pending_bytes:
                        break
                    await self._changed.wait()  # for a consumer that wants the rest
                    continue
                self._readers.look_at_answers()
                self._readers.look_at_readers()
                self._readers.name_corruption()
                self._readers.recruit(self._extra if self._race.open else 0)
                self._ask()
                self._start_jobs()
                if not self._decoder.done:
                    await self._changed.wait(self._wait_s())
                    self._lose_patience()
        except BaseException:
            # The caller's object is free again whatever happened, and hears of the first error only.
            with suppress(SinkError, BrokenPipeError):
                self._sink.finish()
            raise
        finally:
            self._guesses.ended()
            self._readers.let_go()
            for job in list(self._jobs):
                job.cancel()
        if not self._readers.misplaced:
            self._guesses.found(True)
        self._sink.finish()
        size = self._decoder.delivered_bytes
        self._progress.report(size)
        here = self._resuming.here if self._resuming is not None else None
        return GetResult(
            size=size,
            shares_used=dict(sorted(self._used.items())),
            corrupt=list(self._decoder.corrupt),
            elapsed_s=self._clock.seconds() - self._started,
            found_bytes=self._found_bytes,
            here_bytes=here.good_bytes if here is not None else 0,
        )

    # Asking.

    def _ask(self) -> None:
        # Those who will win are asked for all at once, and held back by pausing them: no round trip, and
        # no new connection, stands between one span and the next. Of the others a taste will do, until
        # they prove to be faster.
        if not self._sink.ready:
            return
        readers = [reader for reader in self._readers.open.values() if reader.state == "open"]
        favourites, others = readers, list[ShareReader]()
        if self._race.open:
            needed = self._cap.required_shares
            favourites, others = readers[:needed], readers[needed:]
            geometry = self._decoder.geometry
            if geometry is not None and not self._hedged:
                most_segments = self._share_of_memory // geometry.block_bytes
                left = self._decoder.segments_left
                now = self._clock.seconds()
                self._race.look(now, favourites, others, left, most_segments)
        for reader in favourites:
            self._ask_all(reader)
        for reader in others:
            if self._hedged:
                ahead = min(_RACE_BYTES, self._share_of_memory)
                reader.ask(self._decoder.wanted(reader.share_number, ahead))
            elif self._race.helps(reader.share_number):
                self._ask_all(reader)
            else:
                reader.ask(self._decoder.wanted(reader.share_number, 0, self._taste_bytes))

    def _ask_all(self, reader: ShareReader) -> None:
        number = reader.share_number
        part = self._race.parts.get(number)
        reader.ask(self._decoder.wanted(number, _UNLIMITED, part=part))

    # Decoding and delivering.

    def _start_jobs(self) -> None:
        homes = self._readers.homes
        while self._sink.ready and len(self._jobs) + len(self._results) < _MAX_JOBS:
            job = self._decoder.next_job()
            if job is None:
                if not self._start_check():
                    return
                continue
            if self._race.open:
                self._end_race(job)
            self._used_by_job[job.segment] = {
                block.share_number: homes[block.share_number].name for block in job.blocks
            }
            self._await_job(self._workers.run_if_large(3 * (job.end - job.start), job.run))

    def _start_check(self) -> bool:
        """Check a segment that may be there; returns whether there is one to be checked now."""
        check = None if self._resuming is None else self._resuming.next_check()
        if check is not None:
            self._await_job(self._workers.run(check.run))
        return check is not None

    def _await_job(self, running: Deferred[SegmentResult] | Deferred[Rechecked]) -> None:
        done = running.addCallback(self._results.append)
        self._jobs.add(done)
        done.addErrback(self._note_bug)
        done.addBoth(self._job_done, done)

    def _end_race(self, job: SegmentJob) -> None:
        """The first segment is there: go on with the shares that were fast enough to be in it."""
        numbers = self._race.end(block.share_number for block in job.blocks)
        for reader in list(self._readers.open.values()):
            if reader.share_number not in numbers:
                self._readers.close(reader)

    def _note_bug(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            self._bug = failure

    def _job_done(self, _result: None, done: Deferred[None]) -> None:
        self._jobs.discard(done)
        self._changed.fire()

    def _deliver(self) -> None:
        if self._bug is not None:
            self._bug.raiseException()
        self._sink.check()
        results = list(self._results)
        self._results.clear()
        for result in results:
            pieces = self._finish(result)
            if pieces:
                self._patience.segment_finished(self._clock.seconds())
                self._sink.write(pieces)
                if self._resuming is None or not self._resuming.is_checking:
                    done = self._decoder.delivered_bytes - self._sink.pending_bytes
                    self._progress.report(done)
        for number in self._race.done(self._decoder.segments_left[0]):
            self._readers.close(self._readers.open[number])
        for reader in self._readers.open.values():
            reader.balance()

    def _finish(self, result: SegmentResult | Rechecked) -> list[Buffer]:
        """Let the decoder know; returns what can leave."""
        if isinstance(result, SegmentResult):
            pieces = self._decoder.finish(result)
            used = self._used_by_job.pop(result.segment)
            if not result.bad_shares:
                self._used.update(used)
            return pieces
        assert self._resuming is not None
        assert self._part is not None
        pieces, forgotten = self._resuming.checked(result)
        if forgotten:
            self._part.forget_rest()
        return pieces

    # Patience.

    def _wait_s(self) -> float | None:
        if not self._sink.ready or self._jobs:
            return None
        now = self._clock.seconds()
        wait_s = self._patience.wait_s(now)
        return wait_s if self._race.due is None else min(wait_s, max(0.0, self._race.due - now))

    def _lose_patience(self) -> None:
        """Let one more share join if some keep the others waiting; give up those that are silent."""
        now = self._clock.seconds()
        if not self._sink.ready or self._jobs:
            self._patience.own_fault(now)
            return
        if self._patience.is_hedge_due(now):
            if self._some_lag():
                self._extra = self._extra + 1 if self._race.open else 1
                self._race.reopen()
                self._hedged = True
                self._patience.hedged()
            for reader in self._readers.open.values():
                reader.start_period()
        if self._patience.is_silence_over(now):
            self._readers.give_up_silent(self._settings.silence_s)

    def _some_lag(self) -> bool:
        """
        Return whether the segment waits for some servers while others have done their part.

        On a slow line all shares creep at the same pace: then one more would only slow the rest.
        """
        readers = list(self._readers.open.values())
        if self._race.open and not self._hedged:
            # Who was asked for a taste only has long given it.
            needed = self._cap.required_shares
            helpers = [each for each in readers[needed:] if self._race.helps(each.share_number)]
            readers = readers[:needed] + helpers
        busy = [reader for reader in readers if reader.waiting and not reader.paused]
        if len(busy) < len(readers):
            return True
        paces = [reader.period_bytes for reader in busy]
        return not paces or 2 * min(paces) <= max(paces)
