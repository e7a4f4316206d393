"""Download of a file or a range of it, in one round trip if the shares are on the expected servers."""

from __future__ import annotations

from contextlib import suppress

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from pipegrid.core.decoder import Decoder
from pipegrid.core.hashes import Buffer
from pipegrid.core.segment_decoding import SegmentJob, SegmentResult
from pipegrid.disk.part_file import PartFile
from pipegrid.reactor.deferreds import Wakeup
from pipegrid.transfer.get.get_history import GetHistory
from pipegrid.transfer.get.hedge_policy import ReadPolicy
from pipegrid.transfer.get.resume_decoder import Rechecked, ResumingDecoder
from pipegrid.transfer.get.share_downloads import DownloadRequest, ShareReaders
from pipegrid.transfer.get.sink import SinkLike, open_sink
from pipegrid.transfer.peers import TransferContext
from pipegrid.transfer.results import GetResult, Progress, ProgressReport
from pipegrid.transfer.settings import DownloadSettings

_MAX_JOBS = 3
"""Maximum number of segments decoded at the same time: two cores are busy while one segment is written."""


class Download:
    """
    The download of a range of one encoded file (not of a literal one).

    The first requests ask the first k + e servers of the ring (e: extra shares) for their lists of shares,
    and at the same time for bytes of the share that each server should have: the cap determines every offset.
    If a server does not have that share, the lists arrive together with its refusal, and the next requests go
    to the right servers. (When many files are downloaded the lists are left out while the servers are guessed
    right: see ``Guesses``.) The fastest k shares serve the rest of the file; if they become slow, another
    share is added.

    The loop in ``run`` reads all events, decides, acts and waits for the next event. Its steps are methods in
    the order in which they run; steps that involve servers are methods of ``ShareReaders``.

    Args:
        sink: receives the plaintext; if it is a part file, its segments that prove to be right are not
            fetched.
        progress: called with plaintext bytes delivered and wanted.
        earlier: results of earlier downloads; this download adds its own result.
    """

    def __init__(
        self,
        means: TransferContext,
        request: DownloadRequest,
        sink: SinkLike,
        settings: DownloadSettings,
        progress: Progress | None = None,
        earlier: GetHistory | None = None,
    ) -> None:
        cap, start, length = request.cap, request.start, request.length
        clock = self._clock = means.clock
        self._workers = means.workers
        self._asks_lists = request.asks_lists
        self._settings = settings
        self._progress = ProgressReport(progress, length)
        self._changed = Wakeup(clock)
        self._sink = open_sink(sink, self._changed.fire, means.workers)
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
        self._used: dict[int, str] = {}
        self._used_by_job: dict[int, dict[int, str]] = {}
        self._started = clock.seconds()
        self._policy = ReadPolicy(
            settings,
            earlier or GetHistory(),
            self._decoder.guessed_geometry,
            length,
            found_bytes,
            self._started,
        )
        self._readers = ShareReaders(
            means, request, self._decoder, self._policy, self._changed.fire
        )

    @property
    def handed_on(self) -> bool:
        """
        Whether the caller's object may have received a part of the file, so that the download must not be
        repeated.
        """
        return self._sink.handed_on

    async def run(self) -> GetResult:
        """
        Fetch, verify and deliver the range.

        Raises:
            NotEnoughSharesError: fewer than k good shares could be read.
            CorruptionError: the shares are valid but do not make up the file of the cap.
            SinkError: the plaintext could not be written.
            CapMismatch: the cap does not match the file that is stored.
            SegmentTooLarge: the file has larger segments than the settings permit.
        """
        policy = self._policy
        needs_lists = policy.began() or self._asks_lists
        try:
            self._readers.first_burst(policy.extra_shares, needs_lists)
            self._ask()
            while True:
                self._deliver()
                if self._decoder.done:
                    if not self._sink.pending_bytes:
                        await self._sink.flushed()
                        break
                    await self._changed.wait()  # until the sink accepts the remaining plaintext
                    continue
                self._readers.look_at_responses()
                self._readers.look_at_readers()
                self._readers.name_corruption()
                self._readers.recruit(policy.wanted_extra)
                self._ask()
                self._start_jobs()
                if not self._decoder.done:
                    await self._changed.wait(self._wait_s())
                    self._check_time_limits()
        except BaseException:
            # Release the caller's object in any case, but report only the first error: if the client of a
            # request has disconnected, releasing the request raises a second error.
            with suppress(Exception):
                self._sink.finish()
            raise
        finally:
            policy.ended()
            self._readers.release()
            for job in list(self._jobs):
                job.cancel()
            self._results.clear()
            self._decoder.release()
        policy.succeeded()
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
        if not self._sink.ready:
            return
        decoder, readers = self._decoder, self._readers.open
        shares = [reader for reader in readers.values() if reader.state == "open"]
        now = self._clock.seconds()
        for ask in self._policy.asks(now, shares, decoder.geometry, decoder.segments_left):
            number = ask.share_number
            spans = decoder.wanted(number, ask.ahead_bytes, ask.most_bytes, ask.part)
            readers[number].ask(spans)

    # Decoding and delivering.

    def _start_jobs(self) -> None:
        homes = self._readers.homes
        while self._sink.ready and len(self._jobs) + len(self._results) < _MAX_JOBS:
            job = self._decoder.next_job()
            if job is None:
                if not self._start_check():
                    return
                continue
            if self._policy.race.open:
                self._end_race(job)
            self._used_by_job[job.segment] = {
                block.share_number: homes[block.share_number].name for block in job.blocks
            }
            self._await_job(self._workers.run_if_large(3 * (job.end - job.start), job.run))

    def _start_check(self) -> bool:
        """Start to check a segment that may be in the part file; return whether there is one to check now."""
        check = None if self._resuming is None else self._resuming.next_check()
        if check is not None:
            self._await_job(self._workers.run(check.run))
        return check is not None

    def _await_job(self, running: Deferred[SegmentResult] | Deferred[Rechecked]) -> None:
        done = running.addCallback(self._results.append)
        self._jobs.add(done)
        done.addBoth(self._job_done, done)

    def _end_race(self, job: SegmentJob) -> None:
        """
        End the race, since the first segment can be decoded: keep only the shares that were fast enough to
        contribute.
        """
        numbers = self._policy.race.end(block.share_number for block in job.blocks)
        for reader in list(self._readers.open.values()):
            if reader.share_number not in numbers:
                self._readers.close(reader)

    def _job_done(self, result: Failure | None, done: Deferred[None]) -> None:
        if isinstance(result, Failure) and not result.check(CancelledError):
            self._bug = result
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
                self._policy.timeouts.segment_finished(self._clock.seconds())
                self._sink.write(pieces)
                if self._resuming is None or not self._resuming.is_checking:
                    done = self._decoder.delivered_bytes - self._sink.pending_bytes
                    self._progress.report(done)
        for number in self._policy.race.done(self._decoder.segments_left[0]):
            self._readers.close(self._readers.open[number])
        for reader in self._readers.open.values():
            reader.balance()

    def _finish(self, result: SegmentResult | Rechecked) -> list[Buffer]:
        """
        Pass a decoded or checked segment to the decoder; return the plaintext that can be delivered.
        """
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

    # Time limits.

    def _wait_s(self) -> float | None:
        if not self._sink.ready or self._jobs:
            return None
        return self._policy.wait_s(self._clock.seconds())

    def _check_time_limits(self) -> None:
        """Add a share if some servers delay the others; give up silent servers."""
        now, policy = self._clock.seconds(), self._policy
        if not self._sink.ready or self._jobs:
            policy.timeouts.reader_paused(now)
            return
        readers = list(self._readers.open.values())
        if policy.looks_for_laggards(now, readers):
            for reader in readers:
                reader.period_bytes = 0
        if policy.timeouts.is_silence_over(now):
            last_activity = policy.timeouts.last_activity
            self._readers.give_up_silent(self._settings.silence_s, last_activity)
