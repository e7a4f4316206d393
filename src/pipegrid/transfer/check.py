"""Check and verify one file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
from twisted.internet.defer import Deferred, execute
from twisted.python.failure import Failure

from pipegrid.core import layout, ueb
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.placement import possible_happiness, servers_of_happiness
from pipegrid.core.ueb import CapCheck
from pipegrid.core.verifier import ShareVerifier
from pipegrid.errors import (
    CorruptionError,
    NoSuchShare,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)
from pipegrid.reactor.deferreds import RequestSet, few_at_a_time
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.capacity import Capacity
from pipegrid.transfer.get.share_search import MORE_QUESTIONS, QueryBatches
from pipegrid.transfer.peers import (
    CallTimeout,
    Peer,
    SlowStreamDetector,
    StreamRates,
    TransferContext,
    ring,
    server_ids,
)
from pipegrid.transfer.results import CheckResult, Progress, ProgressReport
from pipegrid.transport.interface import StreamConsumer

# What is known of a file's shares, and what follows from it.
#
# Pure: facts are written down by whoever asked (``check``, ``upkeep``).


@attrs.define
class FoundShares:
    """
    What the servers said.

    Attributes:
        holders: share number to the servers with a copy that is not known to be bad.
        answered: the servers that gave a list of shares, and none of them failed later.
        bad: copies that are damaged, each as share number and server.
        unreachable: nicknames of servers that could not be asked.
        corrupt: what is wrong with the bad copies.
        packed_ueb: of a good share; b"" if none was verified.
        reasons: why servers could not be asked, by their nicknames.
        full: those that answered and take no more shares, as they say.
    """

    holders: dict[int, list[Peer]] = attrs.field(factory=dict)
    answered: list[Peer] = attrs.field(factory=list)
    bad: set[tuple[int, Peer]] = attrs.field(factory=set)
    unreachable: list[str] = attrs.field(factory=list)
    corrupt: list[CorruptionError] = attrs.field(factory=list)
    packed_ueb: bytes = b""
    reasons: dict[str, str] = attrs.field(factory=dict)
    full: set[Peer] = attrs.field(factory=set)

    def sharemap(self) -> dict[int, set[Peer]]:
        """Return share number to the servers that hold a good copy, without shares that none holds."""
        return {number: set(peers) for number, peers in self.holders.items() if peers}

    def possible_happiness(self, total_shares: int) -> int:
        """Return the happiness that a repair can reach with the servers that answered."""
        takers = [peer for peer in self.answered if peer not in self.full and peer.takes_uploads]
        return possible_happiness(self.sharemap(), takers, total_shares, self.bad)

    def could_spread(self, total_shares: int) -> bool:
        """
        Whether nothing is missing, and more servers could have a share, if no more are full than are known
        to be.
        """
        shares = self.sharemap()
        if len(shares) < total_shares:
            return False
        return servers_of_happiness(shares) < self.possible_happiness(total_shares)


def judge(cap: ChkCap | ChkVerifierCap, found: FoundShares) -> CheckResult:
    """Return what follows from what was found."""
    good = {number: peers for number, peers in found.holders.items() if peers}
    reached = servers_of_happiness(found.sharemap())
    possible = found.possible_happiness(cap.total_shares)
    return CheckResult(
        cap=cap,
        healthy=len(good) == cap.total_shares and reached >= possible,
        recoverable=len(good) >= cap.required_shares,
        good_shares={n: sorted([peer.name for peer in good[n]]) for n in sorted(good)},
        corrupt=found.corrupt,
        happiness=reached,
        required_shares=cap.required_shares,
        total_shares=cap.total_shares,
        unreachable=sorted(set(found.unreachable)),
        reasons=dict(sorted(found.reasons.items())),
        possible_happiness=possible,
        servers=len(found.answered) + len(set(found.unreachable)),
        share_servers={n: server_ids(good[n]) for n in sorted(good)},
        answered={peer.identity.server_id: peer.name for peer in found.answered},
    )


@attrs.frozen
class UebPlace:
    """
    Where a share has its UEB, if it was written as most are.

    Attributes:
        offset, length: of the record with its length in front.
        length_bytes: of that length.
    """

    offset: int
    length: int
    length_bytes: int


def ueb_place(cap: ChkCap | ChkVerifierCap) -> UebPlace:
    """Return where the UEB should be."""
    geometry = Params(cap.required_shares, cap.total_shares).geometry(cap.size)
    where = layout.for_geometry(geometry)
    length = where.ueb_length_bytes + ueb.packed_length(geometry)
    return UebPlace(where.uri_extension, length, where.ueb_length_bytes)


def ueb_in(data: bytes, length_bytes: int) -> bytes:
    """Return the record behind its length, if all of it is there."""
    length = int.from_bytes(data[:length_bytes], "big")
    packed = data[length_bytes : length_bytes + length]
    return packed if len(packed) == length <= ueb.MAX_UEB_BYTES else b""


def longest_share(size: int, required_shares: int) -> int:
    """Return what no honest share exceeds: each block may bring three hashes of 32 bytes, doubled."""
    return 200 * (size // required_shares + 1) + (1 << 20)


# One share's stream on its way into its verifier: in order, and held back where verifying takes longer.

SMALL_SHARE_BYTES = 1 << 18
"""Shares up to this are small: of these more are verified at once."""

_CHUNK_BYTES = 1 << 19
_HELD_BYTES = 1 << 20

_AT_ONCE_BYTES = SMALL_SHARE_BYTES + (1 << 16)
"""
What is no longer is verified where it comes, within a fraction of a millisecond: of a small share all. For
threads hundreds of objects that are looked at together would have more jobs than may wait.
"""


class VerifierFeed(StreamConsumer):
    """Feeds one share's stream to its verifier in a worker, chunk by chunk, in order."""

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
        """Return when the verifier has seen every byte of the stream."""
        self._ended = True
        self._feed()
        while self._running is not None:
            self._drained = Deferred()
            await self._drained
        if self._bug is not None:
            self._bug.raiseException()

    def give_up(self) -> None:
        """Nothing more is verified: what is in a worker ends by itself, and nobody waits for it."""
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
        self._running.addErrback(self._note_bug).addCallback(self._fed)

    def _note_bug(self, failure: Failure) -> None:
        self._bug = failure

    def _feed_chunks(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            self._verifier.feed(chunk)

    def _fed(self, _result: None) -> None:
        self._running = None
        if self._given_up:
            return
        self._sign()  # while we held it back, the server could give none
        if self._paused and self._producer is not None:
            self._paused = False
            self._worth.go_on()
            self._producer.resumeProducing()
        if self._ended or self._queued_bytes >= _CHUNK_BYTES:
            self._feed()
        if self._drained is not None and self._running is None:
            waiter, self._drained = self._drained, None
            waiter.callback(None)


# Checking a file: who has which shares, and with ``verify``, whether every byte of them is right.
#
# As many servers are asked at once as the file has shares, and a healthy file is known as soon as all its
# shares are known on as many servers: nobody else is asked, unless one has none of them, or takes longer than
# the others by far. Otherwise all are, in waves (``waves``). Verification streams a few shares at once
# through the verifier, never holding more than a few chunks of each; what it finds wrong makes it look for
# other copies. A server that was lost meanwhile is asked once more: the line was full of all that.
#
# **The cap.** With the first questions two servers are asked for the UEB of the share that they should
# have. If it is not what the cap says, others tell whether a share is damaged or the cap is wrong
# (``core.ueb``); in that case nothing is said of any server.

_SHARES_AT_ONCE = 3
_SMALL_SHARES_AT_ONCE = 32
"""Of small shares more are read at once: they cost round trips, not memory."""

_SAMPLES = 2
"""Of so many shares the UEB is read with the first questions; one will do, the other is for its failing."""

_UEBS_AT_ONCE = 16

_PATIENCE_S = 0.25
"""
If all but some who should have shares have answered, and had them, these get twice the time that the others
took, and at least so much more.
"""


class Check:
    """
    The check of one encoded file (not of a literal one).

    Args:
        verify: read every share and check every byte of it.
        progress: called with shares verified and shares found.
        silence_s: a server that gives no sign of life for so long counts as unreachable.
        more: how many servers are asked at least when those who should have the shares do not.
        capacity: what servers have said of their space.

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
        self._waves: QueryBatches[Peer] = QueryBatches(self._ring, cap.total_shares, more)
        self._answered_s = 0.0
        # Of each, whether it is for a sample.
        self._requests: RequestSet[bool] = RequestSet(means.clock)
        self._fit = CapCheck(self._cap)
        self._sampled_bytes = 0
        self._seen: set[tuple[int, Peer]] = set()
        self._lost: dict[Peer, None] | None = {}
        self.found = FoundShares()

    async def run(self) -> CheckResult:
        """
        Ask servers, verify if wanted, and judge.

        Raises:
            CapMismatch: the cap is not that of the file which is stored there.
        """
        try:
            for number, peer in enumerate(self._ring[: min(_SAMPLES, self._cap.total_shares)]):
                self._requests.start(self._sample(number, peer), True)
            await self._ask_until(self._is_whole)
            await self._look_at_cap()
            while True:
                if self._verify:
                    await self._verify_copies()
                if not (self._waves.exhausted or self._is_whole()):
                    await self._ask_until(lambda: False)
                elif not (self._verify and await self._ask_again()):
                    await self.note_full()
                    return self.judge()
        finally:
            self._requests.cancel()

    def _is_whole(self) -> bool:
        """Whether there is a copy of each share, each on a server of its own."""
        holders = {number: set(peers) for number, peers in self.found.holders.items() if peers}
        wanted = self._cap.total_shares
        if len(holders) < wanted or len(self.found.answered) < wanted:
            return False
        return servers_of_happiness(holders) == wanted

    # Questions.

    async def _ask_until(self, is_enough: Callable[[], bool]) -> None:
        """Ask servers until that is enough, or all have answered."""
        began_s = self._clock.seconds()
        while not (is_enough() or self._waves.exhausted):
            left_s: float | None = None
            if self._waves.holding:
                took_s = self._answered_s - began_s
                patience_s = took_s + max(took_s, _PATIENCE_S)
                left_s = began_s + patience_s - self._clock.seconds()
                if left_s <= 0:
                    self._waves.hurry()
                    left_s = None
            for peer in self._waves.next():
                self._waves.asked(peer)
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
            self._waves.ended(peer, in_vain=not numbers)
            self._answered_s = self._clock.seconds()
        self.found.answered.append(peer)
        for number in numbers:
            if (number, peer) not in self._seen:
                self.found.holders.setdefault(number, []).append(peer)

    async def _ask_again(self) -> bool:
        """Ask servers once more to which no connection could be had, or was lost; whether there are any."""
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
        """Read the UEB where this share has it, if it is there and was written as most are."""
        place = ueb_place(self._cap)
        data = await self._read(number, peer, place.offset, place.length)
        self._sampled_bytes += len(data)
        packed = ueb_in(data, place.length_bytes)
        if packed:
            self._fit.record(peer, packed)

    async def _read_ueb(self, number: int, peer: Peer) -> None:
        """Read the UEB where the share's header says it is."""
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
        Find out whether it is the cap of what is stored.

        Raises:
            CapMismatch: it is not.
        """
        while not self._fit.fits and any(self._requests.running.values()):
            await self._requests.wait()
        copies = [
            (number, peer) for number, peers in sorted(self.found.holders.items()) for peer in peers
        ]
        if not self._sampled_bytes:  # shares that were expected there are not
            await few_at_a_time(
                _UEBS_AT_ONCE, [partial(self._sample, *copy) for copy in copies[:_SAMPLES]]
            )
        # Two first, since mostly a sample was in another place only; then all, to be sure.
        for batch in (copies[:_SAMPLES], copies[_SAMPLES:]):
            if self._fit.fits:
                return
            await few_at_a_time(_UEBS_AT_ONCE, [partial(self._read_ueb, *copy) for copy in batch])
        if self._fit.mismatch is not None:
            raise self._fit.mismatch

    # Verification.

    async def _verify_copies(self) -> None:
        """Verify what was found and not looked at."""
        copies = [
            (number, peer)
            for number, peers in sorted(self.found.holders.items())
            for peer in peers
            if (number, peer) not in self._seen
        ]
        self._seen.update(copies)
        self._report.more(len(copies))
        await few_at_a_time(
            _SMALL_SHARES_AT_ONCE if self._is_small else _SHARES_AT_ONCE,
            [partial(self._verify_copy, number, peer) for number, peer in copies],
        )

    @property
    def _is_small(self) -> bool:
        return self._cap.size // self._cap.required_shares <= SMALL_SHARE_BYTES

    async def _verify_copy(self, number: int, peer: Peer) -> None:
        try:
            problems = await self._verify_share(number, peer)
        except NoSuchShare:
            self.found.holders[number].remove(peer)  # it was listed by mistake, or has gone
        except ServerRefused as error:  # it is there, and says that its share is not in order
            what = f"share {number} cannot be read: {error}"
            self.found.corrupt.append(CorruptionError(what, number, None, peer.name))
            self.found.bad.add((number, peer))
            self.found.holders[number].remove(peer)
        except ServerError as error:
            self._note_unreachable(peer, error)
            self.found.holders[number].remove(peer)
            self._seen.discard((number, peer))
            if peer in self.found.answered:
                self.found.answered.remove(peer)
        else:
            for problem in problems:
                problem.server = peer.name
            self.found.corrupt.extend(problems)
            if problems:
                self.found.bad.add((number, peer))
                self.found.holders[number].remove(peer)
        self._verified += 1
        self._report.report(self._verified)

    async def _verify_share(self, number: int, peer: Peer) -> list[CorruptionError]:
        """Return what is wrong with one share."""
        verifier = ShareVerifier(self._cap, number)
        worth = self._streams.begin()
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
        """Find out which servers have no space, if shares could be on more of them than they are."""
        if self.found.could_spread(self._cap.total_shares):
            self.found.full |= await self._capacity.full(
                self.found.answered, self._cap.size // self._cap.required_shares, self._silence_s
            )

    def judge(self) -> CheckResult:
        """Return what follows from what was found."""
        return judge(self._given, self.found)
