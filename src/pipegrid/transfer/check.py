"""Check and verify one file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from twisted.internet.defer import Deferred, execute
from twisted.python.failure import Failure

from pipegrid.core import layout, ueb
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.placement import possible_happiness, servers_of_happiness
from pipegrid.core.share_verifier import ShareVerifier
from pipegrid.core.ueb import CapCheck
from pipegrid.errors import (
    CorruptionError,
    NoSuchShare,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)
from pipegrid.reactor.deferreds import RequestSet, few_at_a_time
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.get.share_search_policy import MORE_QUESTIONS, QueryBatches
from pipegrid.transfer.peers import Peer, TransferContext, ring, server_ids
from pipegrid.transfer.results import CheckResult, Progress, ProgressReport
from pipegrid.transfer.server_space import Capacity
from pipegrid.transfer.time_limits import CallTimeout, SlowStreamDetector, StreamRates
from pipegrid.transport.interface import StreamConsumer

# What is known of a file's shares, and the check result that follows.
#
# Pure: the callers, ``Check`` and ``Upkeep``, record what servers respond.


class FoundShares:
    """
    What the servers responded.

    Attributes:
        holders: maps a share number to the servers with a copy that is not known to be bad.
        answered: servers that returned a list of shares and did not fail afterwards.
        bad: damaged copies, each as share number and server.
        unreachable: nicknames of servers that could not be asked.
        corrupt: errors that describe the damage of the bad copies.
        packed_ueb: the UEB of a good share; b"" if no share was verified.
        reasons: maps a server's nickname to the reason why the server could not be asked.
        full: servers of ``answered`` that have no space for a share, or did not respond when asked for their
            space; empty if the space does not matter.
    """

    __slots__ = (
        "answered",
        "bad",
        "corrupt",
        "full",
        "holders",
        "packed_ueb",
        "reasons",
        "unreachable",
    )

    def __init__(self) -> None:
        self.holders: dict[int, list[Peer]] = {}
        self.answered: list[Peer] = []
        self.bad: set[tuple[int, Peer]] = set()
        self.unreachable: list[str] = []
        self.corrupt: list[CorruptionError] = []
        self.packed_ueb = b""
        self.reasons: dict[str, str] = {}
        self.full: set[Peer] = set()

    def sharemap(self) -> dict[int, set[Peer]]:
        """Return the servers with a good copy of each share; leave out shares without a good copy."""
        return {number: set(peers) for number, peers in self.holders.items() if peers}

    def copies(self) -> list[tuple[int, Peer]]:
        """Return the copies that are not known to be bad, sorted by share number."""
        return [(number, peer) for number, peers in sorted(self.holders.items()) for peer in peers]

    def is_whole(self, total_shares: int) -> bool:
        """Return whether every share has a copy, each on a different server."""
        if min(len(self.answered), len(self.holders)) < total_shares:
            return False
        return servers_of_happiness(self.sharemap()) == total_shares

    def possible_happiness(self, total_shares: int) -> int:
        """Return the happiness that a repair can reach with the servers that responded."""
        takers = [peer for peer in self.answered if peer not in self.full and peer.takes_uploads]
        return possible_happiness(self.sharemap(), takers, total_shares, self.bad)

    def could_spread(self, total_shares: int) -> bool:
        """
        Return whether all shares exist and could be on more servers; a server counts as full only if this is
        known.
        """
        shares = self.sharemap()
        if len(shares) < total_shares:
            return False
        reached = servers_of_happiness(shares)
        return reached < total_shares and reached < self.possible_happiness(total_shares)


def judge(cap: ChkCap | ChkVerifierCap, found: FoundShares) -> CheckResult:
    """Return the check result that follows from ``found``."""
    good = {number: peers for number, peers in sorted(found.holders.items()) if peers}
    reached = servers_of_happiness(found.sharemap())
    possible = reached
    if reached < cap.total_shares:  # otherwise no higher happiness is possible
        possible = found.possible_happiness(cap.total_shares)
    return CheckResult(
        cap=cap,
        healthy=len(good) == cap.total_shares and reached >= possible,
        recoverable=len(good) >= cap.required_shares,
        good_shares={n: sorted([peer.name for peer in peers]) for n, peers in good.items()},
        corrupt=found.corrupt,
        happiness=reached,
        required_shares=cap.required_shares,
        total_shares=cap.total_shares,
        unreachable=sorted(set(found.unreachable)),
        reasons=dict(sorted(found.reasons.items())),
        possible_happiness=possible,
        servers=len(found.answered) + len(set(found.unreachable)),
        share_servers={n: server_ids(peers) for n, peers in good.items()},
        answered={peer.identity.server_id: peer.name for peer in found.answered},
    )


class UebPlace(NamedTuple):
    """
    The place of the UEB in a share with the usual layout.

    Attributes:
        offset, length: where the length field begins, and the size of length field and UEB together.
        length_bytes: size of the length field.
    """

    offset: int
    length: int
    length_bytes: int


def ueb_place(cap: ChkCap | ChkVerifierCap) -> UebPlace:
    """Return where a share with the usual layout has its UEB."""
    geometry = Params(cap.required_shares, cap.total_shares).geometry(cap.size)
    where = layout.for_geometry(geometry)
    length = where.ueb_length_bytes + ueb.packed_length(geometry)
    return UebPlace(where.uri_extension, length, where.ueb_length_bytes)


def ueb_in(data: bytes, length_bytes: int) -> bytes:
    """Return the UEB that follows the length field, if the data contains all of it; otherwise b""."""
    length = int.from_bytes(data[:length_bytes], "big")
    packed = data[length_bytes : length_bytes + length]
    return packed if len(packed) == length <= ueb.MAX_UEB_BYTES else b""


def longest_share(size: int, required_shares: int) -> int:
    """
    Return a size in bytes that no undamaged share exceeds: twice the size of blocks of one byte with three
    hashes of 32 bytes each.
    """
    return 200 * (size // required_shares + 1) + (1 << 20)


# Passing the stream of one share to its verifier, in order; the stream is paused while the verifier is
# slower.

SMALL_SHARE_BYTES = 1 << 18
"""Shares up to this size are small: more small shares than large ones are verified at the same time."""

_CHUNK_BYTES = 1 << 19
_HELD_BYTES = 1 << 20

_AT_ONCE_BYTES = SMALL_SHARE_BYTES + (1 << 16)
"""
Chunks up to this size are verified in the reactor thread, within a fraction of a millisecond; a small share
is one chunk. If small chunks were verified in worker threads, checking hundreds of objects at the same time
would exceed the limit of waiting jobs.
"""


class VerifierFeed(StreamConsumer):
    """
    Passes one share's stream to its verifier, chunk by chunk, in order; large chunks in a worker thread.
    """

    def __init__(
        self,
        verifier: ShareVerifier,
        workers: CpuWorkers,
        sign: Callable[[], None],
        worth: SlowStreamDetector,
    ) -> None:
        self._verifier = verifier
        self._workers = workers
        self._sign = sign
        self._worth = worth
        self._paused = False
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._running: Deferred[None] | None = None
        self._drained: Deferred[None] | None = None
        self._ended = self._given_up = False
        self._bug: Failure | None = None

    def write(self, data: bytes) -> None:
        self._sign()
        self._worth.came(len(data))
        self._queue.append(data)
        self._queued_bytes += len(data)
        if self._queued_bytes >= _HELD_BYTES and self._producer is not None and not self._paused:
            self._paused = True
            self._worth.hold()
            self._producer.pauseProducing()
        if self._queued_bytes >= _CHUNK_BYTES:
            self._feed()

    async def drained(self) -> None:
        """Return when the verifier has processed every byte of the stream."""
        self._ended = True
        self._feed()
        while self._running is not None:
            self._drained = Deferred()
            await self._drained
        if self._bug is not None:
            self._bug.raiseException()

    def give_up(self) -> None:
        """Verify nothing more; a running job ends by itself, and its result is ignored."""
        self._given_up = True
        self._queue.clear()

    def _feed(self) -> None:
        if self._running is not None or not self._queue or self._given_up:
            return
        size = self._queued_bytes
        chunks, self._queue, self._queued_bytes = self._queue, [], 0
        if size <= _AT_ONCE_BYTES:
            self._running = execute(self._feed_chunks, chunks)
        else:
            self._running = self._workers.run(self._feed_chunks, chunks)
        self._running.addBoth(self._fed)

    def _feed_chunks(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            self._verifier.feed(chunk)

    def _fed(self, result: Failure | None) -> None:
        self._bug = result or self._bug
        self._running = None
        if self._given_up:
            return
        self._sign()  # while the stream was paused, the server could not show activity
        if self._paused and self._producer is not None:
            self._paused = False
            self._worth.go_on()
            self._producer.resumeProducing()
        if self._ended or self._queued_bytes >= _CHUNK_BYTES:
            self._feed()
        if self._drained is not None and self._running is None:
            waiter, self._drained = self._drained, None
            waiter.callback(None)


# Checking a file: which servers have which shares and, with ``verify``, whether every byte of the shares is
# right.
#
# As many servers are asked at the same time as the file has shares. A healthy file is recognized as soon as
# all its shares are known, each on a different server; then no further server is asked. If one of these
# servers has no share, or is much slower than the others, all servers are asked, in growing batches
# (``QueryBatches``). Verification streams a few shares at the same time through the verifier, and holds at
# most a few chunks of each; if a share is damaged, other copies are searched for. A server whose connection
# was lost is asked once more, since the load on the link may have broken the connection.
#
# **The cap.** Along with the first queries, two servers are asked for the UEB of the share that they should
# have. If the UEB does not match the cap, the UEBs of other shares show whether a share is damaged or the cap
# is wrong (``CapCheck``); if the cap is wrong, no server is accused.

_SHARES_AT_ONCE = 3
_SMALL_SHARES_AT_ONCE = 32
"""Number of small shares read at once: more than of large ones, since each costs round trips, not memory."""

_SAMPLES = 2
"""Number of shares whose UEB is read with the first queries; one UEB suffices, the second is a reserve."""

_UEBS_AT_ONCE = 16

_PATIENCE_S = 0.25
"""
If every server that has responded had shares, further servers are asked only when the other responses take
too long: twice as long as the responses so far, and at least this many seconds longer than these.
"""


class Check:
    """
    The check of one encoded file (not of a literal one).

    Args:
        verify: read every share and check every byte of it.
        progress: called with the number of shares verified and the number found.
        silence_s: a server without activity for this many seconds counts as unreachable.
        more: minimum number of pending queries once a server without shares, or a slow one, shows that
            further servers must be asked.
        capacity: what servers have reported of their space.

    Attributes:
        found: what is known of the shares.
    """

    def __init__(
        self,
        means: TransferContext,
        cap: ChkCap | ChkVerifierCap,
        verify: bool,
        progress: Progress | None = None,
        silence_s: float = 60.0,
        more: int = MORE_QUESTIONS,
        capacity: Capacity | None = None,
    ) -> None:
        self._clock = means.clock
        self._capacity = capacity or Capacity(means.clock)
        self._workers = means.workers
        self._cap = cap.verifier()
        self._given = cap
        self._verify = verify
        self._silence_s = silence_s
        self._streams = StreamRates(means.clock, silence_s)
        self._verified = 0
        self._report = ProgressReport(progress, 0)
        self._ring = ring(self._cap.storage_index, means.peers)
        self._batches: QueryBatches[Peer] = QueryBatches(self._ring, cap.total_shares, more)
        self._answered_s = 0.0
        # The value of each request: whether it reads a UEB by ``_sample``.
        self._requests: RequestSet[bool] = RequestSet(means.clock)
        self._fit = CapCheck(self._cap)
        self._sampled_bytes = 0
        self._seen: set[tuple[int, Peer]] = set()
        self._lost: dict[Peer, None] | None = {}
        self.found = FoundShares()

    async def run(self) -> CheckResult:
        """
        Ask servers, verify if wanted, and return the result.

        Raises:
            CapMismatch: the cap does not match the stored file.
        """
        try:
            for number, peer in enumerate(self._ring[: min(_SAMPLES, self._cap.total_shares)]):
                self._requests.start(self._sample(number, peer), True)
            await self._ask_until(self._is_whole)
            await self._look_at_cap()
            while True:
                if self._verify:
                    await self._verify_copies()
                if not (self._batches.exhausted or self._is_whole()):
                    await self._ask_until(lambda: False)
                elif not (self._verify and await self._ask_again()):
                    await self.note_full()
                    return self.judge()
        finally:
            self._requests.cancel()

    def _is_whole(self) -> bool:
        return self.found.is_whole(self._cap.total_shares)

    # Questions.

    async def _ask_until(self, is_enough: Callable[[], bool]) -> None:
        """Ask servers until ``is_enough`` holds or all have responded."""
        began_s = self._clock.seconds()
        while not (is_enough() or self._batches.exhausted):
            left_s: float | None = None
            if self._batches.holding:
                took_s = self._answered_s - began_s
                time_limit_s = took_s + max(took_s, _PATIENCE_S)
                left_s = began_s + time_limit_s - self._clock.seconds()
                if left_s <= 0:
                    self._batches.hurry()
                    left_s = None
            for peer in self._batches.next():
                self._batches.asked(peer)
                self._requests.start(self._ask(peer), False)
            await self._requests.wait(left_s)

    async def _ask(self, peer: Peer) -> None:
        watch = CallTimeout(self._clock, self._silence_s)
        numbers: list[int] = []
        try:
            listed = await watch.answer(peer.server.list_shares(self._cap.storage_index), peer)
            numbers = [number for number in listed if number < self._cap.total_shares]
        except ServerError as error:
            self._note_unreachable(peer, error)
            return
        finally:
            self._batches.ended(peer, without_effect=not numbers)
            self._answered_s = self._clock.seconds()
        self.found.answered.append(peer)
        for number in numbers:
            if (number, peer) not in self._seen:
                self.found.holders.setdefault(number, []).append(peer)

    async def _ask_again(self) -> bool:
        """
        Ask servers again whose connection failed or was lost; return whether there were any such servers.
        """
        again, self._lost = self._lost or {}, None
        for peer in again:
            self.found.unreachable = [each for each in self.found.unreachable if each != peer.name]
            self.found.reasons.pop(peer.name, None)
        await few_at_a_time(_UEBS_AT_ONCE, [partial(self._ask, peer) for peer in again])
        return bool(again)

    def _note_unreachable(self, peer: Peer, error: ServerError) -> None:
        if self._lost is not None and isinstance(error, ServerUnreachable):
            self._lost[peer] = None
        self.found.unreachable.append(peer.name)
        self.found.reasons.setdefault(peer.name, str(error))

    # The cap.

    async def _sample(self, number: int, peer: Peer) -> None:
        """
        Read the UEB from the place where the share should have it, if the share exists and has the usual
        layout.
        """
        place = ueb_place(self._cap)
        data = await self._read(number, peer, place.offset, place.length)
        self._sampled_bytes += len(data)
        packed = ueb_in(data, place.length_bytes)
        if packed:
            self._fit.record(peer, packed)

    async def _read_ueb(self, number: int, peer: Peer) -> None:
        """Read the UEB at the offset that the share's header names."""
        header = await self._read(number, peer, 0, layout.MAX_HEADER_BYTES)
        try:
            where = layout.parse_header(header)
        except ValueError:
            return
        length = where.ueb_length_bytes + ueb.MAX_UEB_BYTES
        data = await self._read(number, peer, where.uri_extension, length)
        packed = ueb_in(data, where.ueb_length_bytes)
        if packed:
            self._fit.record(peer, packed)

    async def _read(self, number: int, peer: Peer, offset: int, length: int) -> bytes:
        if offset >= layout.MAX_OFFSET:
            return b""
        watch = CallTimeout(self._clock, self._silence_s)
        call = peer.server.read(self._cap.storage_index, number, offset, length)
        try:
            return await watch.answer(call, peer)
        except ServerError:
            return b""

    async def _look_at_cap(self) -> None:
        """
        Check that the cap matches the stored file.

        Raises:
            CapMismatch: the cap does not match.
        """
        while not self._fit.fits and any(self._requests.running.values()):
            await self._requests.wait()
        copies = self.found.copies()
        if not self._sampled_bytes:  # the expected servers did not have the shares
            await few_at_a_time(
                _UEBS_AT_ONCE, [partial(self._sample, *copy) for copy in copies[:_SAMPLES]]
            )
        # Read the UEBs of two copies first, since usually the cap is right and only the sampled shares had an
        # unusual layout; then read the UEBs of all other copies, to be sure.
        for batch in (copies[:_SAMPLES], copies[_SAMPLES:]):
            if self._fit.fits:
                return
            await few_at_a_time(_UEBS_AT_ONCE, [partial(self._read_ueb, *copy) for copy in batch])
        if self._fit.mismatch is not None:
            raise self._fit.mismatch

    # Verification.

    async def _verify_copies(self) -> None:
        """Verify the copies that were found and not verified yet."""
        copies = [copy for copy in self.found.copies() if copy not in self._seen]
        self._seen.update(copies)
        self._report.more(len(copies))
        await few_at_a_time(
            _SMALL_SHARES_AT_ONCE if self._is_small else _SHARES_AT_ONCE,
            [partial(self._verify_copy, *copy) for copy in copies],
        )

    @property
    def _is_small(self) -> bool:
        return self._cap.size // self._cap.required_shares <= SMALL_SHARE_BYTES

    async def _verify_copy(self, number: int, peer: Peer) -> None:
        is_good, problems = False, list[CorruptionError]()
        try:
            problems = await self._verify_share(number, peer)
            is_good = not problems
        except NoSuchShare:
            pass  # the server listed the share by mistake, or the share has been removed
        except ServerRefused as error:  # the server reports that the share is damaged
            problems = [CorruptionError(f"share {number} cannot be read: {error}", number)]
        except ServerError as error:
            self._note_unreachable(peer, error)
            self._seen.discard((number, peer))
            if peer in self.found.answered:
                self.found.answered.remove(peer)
        for problem in problems:
            problem.server = peer.name
            self.found.corrupt.append(problem)
            self.found.bad.add((number, peer))
        if not is_good:
            self.found.holders[number].remove(peer)
        self._verified += 1
        self._report.report(self._verified)

    async def _verify_share(self, number: int, peer: Peer) -> list[CorruptionError]:
        """Return the errors that describe the damage of one share."""
        verifier = ShareVerifier(self._cap, number)
        worth = SlowStreamDetector(self._streams)
        watch = CallTimeout(self._clock, self._silence_s, worth=worth)
        feeder = VerifierFeed(verifier, self._workers, watch.progress, worth)
        longest = longest_share(self._cap.size, self._cap.required_shares)
        try:
            stream = peer.server.stream(self._cap.storage_index, number, 0, longest, feeder)
            await watch.answer(stream, peer)
            await feeder.drained()
        finally:
            feeder.give_up()
        if self._is_small:
            problems = verifier.finish()
        else:
            problems = await self._workers.run(verifier.finish)
        if not problems:
            self.found.packed_ueb = verifier.packed_ueb
        return problems

    async def note_full(self) -> None:
        """Find out which servers have no space, if the shares could be on more servers than now."""
        if self.found.could_spread(self._cap.total_shares):
            self.found.full |= await self._capacity.full(
                self.found.answered, self._cap.size // self._cap.required_shares, self._silence_s
            )

    def judge(self) -> CheckResult:
        """Return the check result for the responses so far."""
        return judge(self._given, self.found)
