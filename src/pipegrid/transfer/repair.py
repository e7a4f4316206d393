"""Repair one immutable file: encode missing shares again and place them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from pipegrid.core import ueb
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.encoder import CodedSegment, Reencoder, ShareWrite
from pipegrid.core.encoding_parameters import Geometry, check_segment_bytes
from pipegrid.errors import ServerError
from pipegrid.reactor.deferreds import Wakeup, few_at_a_time
from pipegrid.transfer.check import Check, FoundShares
from pipegrid.transfer.failure_messages import SearchOutcome, each_once, too_few_shares
from pipegrid.transfer.get.download import Download
from pipegrid.transfer.get.share_downloads import DownloadRequest
from pipegrid.transfer.get.share_search_policy import MAX_QUESTIONS
from pipegrid.transfer.peers import Peer, TransferContext, ring
from pipegrid.transfer.put.allocation import AllocationResponse, Allocations
from pipegrid.transfer.put.file_key import ShareSet, ShareTarget
from pipegrid.transfer.put.share_assignment import UploadPlan
from pipegrid.transfer.put.share_tracker import ActiveShares
from pipegrid.transfer.put.share_upload import ShareState, ShareUpload
from pipegrid.transfer.put.straggler_policy import until_silence
from pipegrid.transfer.results import CheckResult, Progress, ProgressReport, RepairResult
from pipegrid.transfer.server_space import Capacity
from pipegrid.transfer.settings import DownloadSettings
from pipegrid.transfer.time_limits import CallTimeout
from pipegrid.transport.interface import StreamConsumer

# Passing the bytes of a download, as whole segments, to a coroutine that takes one segment at a time.
#
# At most a few segments are held; when they are not taken, the download is paused.

_HELD_SEGMENTS = 2


class SegmentFeed(StreamConsumer):
    """The sink of a download of a whole file; its segments are taken one by one."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._paused = False
        self._whole: deque[list[memoryview]] = deque()
        self._completed = 0
        self._pieces: list[memoryview] = []
        self._piece_bytes = 0
        self._failure: Failure | None = None
        self._waiter: Deferred[None] | None = None

    async def take(self) -> list[memoryview]:
        """
        Return the pieces of the next segment; one call at a time.

        Raises:
            Exception: any error that ended the download before this segment.
        """
        while not self._whole:
            if self._failure is not None:
                self._failure.raiseException()
            self._waiter = Deferred()
            await self._waiter
        pieces = self._whole.popleft()
        if self._paused and self._producer is not None:
            self._paused = False
            self._producer.resumeProducing()
        return pieces

    def ended(self, result: Any) -> None:
        """Record the end of the download, successful or not; must be the last callback of the download."""
        if isinstance(result, Failure):
            self._failure = result
            self._wake()

    def write(self, data: bytes) -> None:
        """Add bytes of the file, which may belong to several segments."""
        view = memoryview(data)
        while view:
            missing = self._geometry.segment_length(self._completed) - self._piece_bytes
            piece, view = view[:missing], view[missing:]
            self._pieces.append(piece)
            self._piece_bytes += len(piece)
            if len(piece) == missing:
                self._whole.append(self._pieces)
                self._completed += 1
                self._pieces, self._piece_bytes = [], 0
        if len(self._whole) >= _HELD_SEGMENTS and not self._paused and self._producer is not None:
            self._paused = True
            self._producer.pauseProducing()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and (self._whole or self._failure is not None):
            waiter, self._waiter = self._waiter, None
            waiter.callback(None)


# Repairing a file: missing or damaged shares are encoded again from the other shares, and placed.
#
# First every share is verified. Before any missing share is encoded, servers are found for all of them: each
# server gets an allocation and the header, and its response to the header shows that it accepts the rest.
# Then the ciphertext is read from k good shares, segment by segment, encoded as at the first upload, and sent
# to those servers. No key is needed. Good shares stay where they are; during the repair their leases are
# renewed. If a server has several shares, and another server has none that counts for happiness, that other
# server also gets one of them.
#
# A damaged copy stays, too, since shares cannot be changed; its server gets a share with another number, if
# any.
#
# Only data in flight is held in memory. So if a server fails midway, its share is encoded again for another
# server, in another round.

_RENEWALS = 64
"""Number of servers on which leases are renewed at the same time: a renewal costs little but a round trip."""

SMALL_SHARE_BYTES = 16 << 10
"""Shares up to this size are encoded before a server has accepted them, which saves a round trip."""

_ROUNDS = 4
"""Maximum number of rounds; each round encodes the file for servers that have not failed yet."""


class Repair:
    """
    The repair of one encoded file (not of a literal one).

    Args:
        progress: called with acknowledged and total bytes of the new shares.
        capacity: what servers have reported of their space.
    """

    def __init__(
        self,
        means: TransferContext,
        cap: ChkCap | ChkVerifierCap,
        settings: DownloadSettings,
        progress: Progress | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        clock = self._clock = means.clock
        self._means = means
        self._given = cap
        self._cap = cap.verifier()
        self._settings = settings
        self._progress = progress
        self._started = clock.seconds()
        self._storage_index = self._cap.storage_index
        # Shares are probably missing, so ask all servers in one batch: waiting for a second batch would take
        # longest.
        self._check = Check(
            means,
            cap,
            verify=True,
            silence_s=settings.silence_s,
            more=MAX_QUESTIONS,
            capacity=capacity,
        )
        # The wanted happiness is the number of shares, so they are spread as widely as servers allow.
        n = self._cap.total_shares
        self._plan: UploadPlan[Peer] = UploadPlan(ring(self._storage_index, means.peers), n, n)
        self._changed = Wakeup(clock)
        self._uploads = ActiveShares(self._plan, settings.silence_s)
        self._uploaded: dict[int, str] = {}
        self._renewed: set[Peer] = set()

    async def run(self) -> RepairResult:
        """
        Check the file, and repair it if needed.

        Raises:
            NotEnoughSharesError: fewer than k good shares are left.
            CorruptionError: the shares are valid but do not make up the file of the cap.
            SegmentTooLarge: the file has larger segments than the settings permit.
            CapMismatch: the cap does not match the stored file.
        """
        return await self._make_whole(await self._check.run())

    async def run_after(
        self, before: CheckResult, found: FoundShares, packed_ueb: bytes, renewed: Collection[Peer]
    ) -> RepairResult:
        """
        Repair the file after a check that read no blocks.

        Damage in the shares that are read is found during the repair, and damaged shares are not used.

        Args:
            before: the result of the check.
            found: the shares that the check found.
            packed_ueb: the UEB of a good share.
            renewed: servers whose leases were just renewed.

        Raises:
            Exception: see ``run``.
        """
        found.packed_ueb = packed_ueb
        self._check.found = found
        self._renewed.update(renewed)
        return await self._make_whole(before)

    async def _make_whole(self, before: CheckResult) -> RepairResult:
        found = self._check.found
        if not before.recoverable:
            outcome = SearchOutcome(
                len(before.good_shares),
                self._cap.required_shares,
                self._cap.total_shares,
                servers=len(self._plan.ring),
                reasons=found.reasons,
                was_any=bool(found.holders or found.bad),
                absent=len(set(found.unreachable)),
            )
            raise too_few_shares("repair", outcome)
        self._fill_plan()
        if self._plan.assignments():  # a repair holds whole segments in memory
            segment_bytes = ueb.parse(found.packed_ueb).segment_bytes
            check_segment_bytes(segment_bytes, self._cap.size, self._settings.max_segment_bytes)
        self._advise()
        share_bytes = Reencoder(self._cap, found.packed_ueb).share_bytes
        secrets = self._means.secrets.for_file(self._storage_index)
        self._shares = ShareSet(self._storage_index, share_bytes, secrets)
        self._allocations = Allocations(self._shares, self._changed.fire)
        self._wanted_bytes = len(self._plan.assignments()) * share_bytes
        progress = self._progress if self._wanted_bytes else None
        self._report = ProgressReport(progress, self._wanted_bytes)
        renewing = Deferred.fromCoroutine(self._renew_leases())
        try:
            small = share_bytes <= SMALL_SHARE_BYTES
            for _ in range(_ROUNDS):
                if not await self._round(Reencoder(self._cap, found.packed_ueb), small):
                    break
            self._report.finish()
            await renewing
        finally:
            renewing.addErrback(lambda reason: reason.trap(CancelledError))
            renewing.cancel()
        for number, peers in self._plan.stored.items():
            known = found.holders.setdefault(number, [])
            known.extend(peer for peer in peers if peer not in known)
        await self._check.note_full()
        return RepairResult(
            cap=self._given,
            before=before,
            after=self._check.judge(),
            uploaded=dict(sorted(self._uploaded.items())),
            renewed=sorted(peer.name for peer in self._renewed),
            reasons=each_once(self._uploads.reasons),
            elapsed_s=self._clock.seconds() - self._started,
            reasons_by_server=dict(sorted(self._uploads.reasons.items())),
            absent=sorted(self._uploads.absent),
        )

    def _fill_plan(self) -> None:
        found = self._check.found
        for number, peers in found.holders.items():
            for peer in peers:
                self._plan.found(peer, [number])
        for number, peer in found.bad:
            self._plan.barred(number, peer)
        for peer in self._plan.ring:
            if peer not in found.answered:
                self._plan.failed(peer)
            elif (reason := peer.no_uploads()) is not None:
                self._plan.closed(peer)
                self._uploads.reasons.setdefault(peer.name, reason)
        for peer in found.full:
            self._plan.closed(peer)

    def _advise(self) -> None:
        """Report damaged copies to their servers, without waiting for responses."""
        for error in self._check.found.corrupt:
            for number, peer in self._check.found.bad:
                if number == error.share_number and peer.name == error.server:
                    advice = peer.server.advise_corrupt_share(
                        self._storage_index, number, str(error)
                    )
                    advice.addErrback(lambda reason: reason.trap(ServerError, CancelledError))

    async def _renew_leases(self) -> None:
        """Renew the leases of the shares that were found; new shares get leases by their allocation."""
        holders = {peer for peers in self._plan.stored.values() for peer in peers}

        async def renew(peer: Peer) -> None:
            lease = self._shares.secrets_for(peer).lease
            watch = CallTimeout(self._clock, self._settings.silence_s)
            try:
                await watch.answer(peer.server.add_lease(self._storage_index, lease), peer)
            except ServerError as error:
                self._uploads.reasons.setdefault(peer.name, str(error))
            else:
                self._renewed.add(peer)

        await few_at_a_time(_RENEWALS, [partial(renew, peer) for peer in holders - self._renewed])

    # One round.

    async def _round(self, encoder: Reencoder, small: bool) -> bool:
        """
        Run one round: send the missing shares for which there is a server; return whether any share was sent.
        """
        try:
            if small:
                return await self._send_whole(encoder)
            await self._find_space(encoder)
            if self._uploads.open:
                await self._send_segments(encoder)
                await self._wait_while(lambda: bool(self._uploads.open))
                return True
            return False
        except (CancelledError, GeneratorExit):
            # Unfinished shares stay allocated, so that a repeated repair can resume them.
            self._release_all()
            raise
        except BaseException:
            self._release_all(abort=True)
            await self._uploads.wait_for_aborts(self._clock)
            raise

    def _release_all(self, *, abort: bool = False) -> None:
        self._uploads.release(abort=abort)
        self._allocations.cancel()

    async def _find_space(self, encoder: Reencoder) -> None:
        """
        Open share uploads for all missing shares, and wait until servers have accepted or refused each of
        them.
        """
        header = encoder.layout.pack_header()
        while True:
            self._process_events()
            for upload in self._open_missing(encoder):
                upload.sender.send(ShareWrite(upload.share_number, 0, (header,)))
                upload.sender.flush()
            if all(upload.acknowledged_bytes for upload in self._uploads.open):
                return
            await self._wait()

    async def _send_whole(self, encoder: Reencoder) -> bool:
        """
        Encode small shares before servers have accepted them, and send each share directly after its
        allocation.

        This saves a round trip; allocation and share are one message if the server supports bundles.
        """
        if not self._plan.assignments():
            return False
        shares: dict[int, list[ShareWrite]] = {}
        async with self._ciphertext(encoder) as feed:
            writes: list[ShareWrite] = []
            for index in range(encoder.geometry.num_segments):
                writes += encoder.add(await self._coded(encoder, index, await feed.take()))
        for write in [*writes, *encoder.finish()]:
            shares.setdefault(write.share_number, []).append(write)
        while True:
            self._process_events()
            for upload in self._open_missing(encoder):
                for write in shares[upload.share_number]:
                    upload.sender.send(write)
                upload.finish()
            if not self._uploads.open:
                return True
            await self._wait()

    def _open_missing(self, encoder: Reencoder) -> Iterator[ShareUpload]:
        """
        Open share uploads for all missing shares for which there is a server, and yield these uploads, server
        by server.
        """
        moves = self._plan.assignments()
        for peer in dict.fromkeys(moves.values()):
            numbers = sorted(number for number, home in moves.items() if home is peer)
            secrets = self._shares.secrets_for(peer)
            self._allocations.ask(peer, frozenset(numbers), secrets)
            for number in numbers:
                target = ShareTarget(peer, number, self._shares, secrets)
                upload = ShareUpload(target, self._changed.fire, self._changed.fire, self._clock)
                self._uploads.add(upload)
                yield upload

    @asynccontextmanager
    async def _ciphertext(self, encoder: Reencoder) -> AsyncIterator[SegmentFeed]:
        """Download the file's ciphertext while the context is open."""
        feed, found = SegmentFeed(encoder.geometry), self._check.found
        request = DownloadRequest(self._cap, 0, self._cap.size, found.bad, found.holders)
        download = Download(self._means, request, feed, self._settings)
        running = Deferred.fromCoroutine(download.run()).addBoth(feed.ended)
        try:
            yield feed
        finally:
            running.cancel()

    async def _coded(
        self,
        encoder: Reencoder,
        index: int,
        ciphertext: list[memoryview],
        numbers: set[int] | None = None,
    ) -> CodedSegment:
        """Return an encoded segment. ``numbers``: the shares whose blocks are wanted; None: all shares."""
        size = 8 * encoder.geometry.segment_length(index)
        return await self._means.workers.run_if_large(size, _code, encoder, ciphertext, numbers)

    async def _send_segments(self, encoder: Reencoder) -> None:
        async with self._ciphertext(encoder) as feed:
            for index in range(encoder.geometry.num_segments):
                ciphertext = await feed.take()
                await self._wait_while(lambda: any(each.blocked for each in self._uploads.open))
                if not self._uploads.open:
                    return
                numbers = {upload.share_number for upload in self._uploads.open}
                coded = await self._coded(encoder, index, ciphertext, numbers)
                self._send(encoder.add(coded), encoder)
        numbers = {upload.share_number for upload in self._uploads.open}
        trees = 32 * encoder.geometry.num_segments * encoder.geometry.total_shares
        self._send(
            await self._means.workers.run_if_large(16 * trees, encoder.finish, numbers), encoder
        )
        for upload in self._uploads.open:
            upload.finish()

    def _send(self, writes: Iterable[ShareWrite], encoder: Reencoder) -> None:
        uploads = {upload.share_number: upload for upload in self._uploads.open}
        for write in writes:
            if write.offset == 0:  # the header was sent already
                offset = encoder.layout.header_bytes
                write = ShareWrite(write.share_number, offset, write.pieces[1:])
            if write.share_number in uploads:
                uploads[write.share_number].sender.send(write)

    async def _wait_while(self, condition: Callable[[], bool]) -> None:
        self._process_events()
        while condition():
            await self._wait()
            self._process_events()

    async def _wait(self) -> None:
        """Wait for the next event, or until some server has been silent for too long."""
        silent_s = until_silence(
            self._uploads.open, self._clock.seconds(), self._settings.silence_s
        )
        await self._changed.wait(max(0.01, silent_s))

    # Events.

    def _process_events(self) -> None:
        """Update the plan with all new events."""
        for answer in self._allocations.take_responses():
            self._allocated(answer)
        for upload in self._uploads.take_ended(self._clock.seconds()):
            self._upload_ended(upload)
        done = sum(
            upload.acknowledged_bytes for upload in [*self._uploads.open, *self._uploads.ended]
        )
        self._report.report(min(done, self._wanted_bytes))

    def _allocated(self, answer: AllocationResponse) -> None:
        peer, result = answer.peer, answer.result
        if isinstance(result, Failure):
            if not result.check(ServerError, CancelledError):
                result.raiseException()
            self._uploads.peer_failed(peer, result.value)
            return
        self._renewed.add(peer)
        for upload in self._uploads.open:
            if upload.peer is peer and upload.share_number in answer.numbers:
                upload.last_activity = self._clock.seconds()
                if upload.share_number in result.already_have:
                    upload.close(ShareState.FOUND)  # another client has stored the share first
                upload.granted = upload.share_number in result.allocated

    def _upload_ended(self, upload: ShareUpload) -> None:
        peer, number = upload.peer, upload.share_number
        if upload.state is ShareState.REFUSED and not upload.granted:
            self._uploads.reasons[peer.name] = f"{peer.name} takes no shares"
        if upload.state in (ShareState.STORED, ShareState.FOUND):
            self._plan.found(peer, [number])
            if upload.state is ShareState.STORED:
                self._uploaded[number] = peer.name
        elif upload.state is ShareState.FAILED:
            self._plan.failed(peer)
        else:
            self._plan.refused(number, peer)


def _code(
    encoder: Reencoder, ciphertext: list[memoryview], numbers: set[int] | None
) -> CodedSegment:
    # The hashes of all shares are needed, but only the blocks of the shares that are sent.
    return encoder.code(encoder.encrypt(ciphertext), numbers)
