"""
Checking a file: who has which shares, and with ``verify``, whether every byte of them is right.

As many servers are asked at once as the file has shares, and a healthy file is known as soon as all its
shares are known on as many servers: nobody else is asked, unless one has none of them, or takes longer than
the others by far. Otherwise all are, in waves (``waves``). Verification streams a few shares at once
through the verifier, never holding more than a few chunks of each; what it finds wrong makes it look for
other copies. A server that was lost meanwhile is asked once more: the line was full of all that.

**The cap.** With the first questions two servers are asked for the UEB of the share that they should
have. If it is not what the cap says, others tell whether a share is damaged or the cap is wrong
(``core.fit``); in that case nothing is said of any server.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pipegrid.core import layout, ueb
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.fit import CapFit
from pipegrid.core.placement import servers_of_happiness
from pipegrid.core.verifier import ShareVerifier
from pipegrid.errors import (
    CorruptionError,
    NoSuchShare,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)
from pipegrid.reactor.together import few_at_a_time
from pipegrid.transfer.capacity import Capacity
from pipegrid.transfer.found import FoundShares, judge, longest_share, ueb_in, ueb_place
from pipegrid.transfer.get.waves import MORE_QUESTIONS, Waves
from pipegrid.transfer.peers import Means, Peer, ring
from pipegrid.transfer.progress import Progress, ProgressReport
from pipegrid.transfer.results import CheckResult
from pipegrid.transfer.underway import RequestsUnderWay
from pipegrid.transfer.verifierfeed import SMALL_SHARE_BYTES, VerifierFeed
from pipegrid.transfer.watch import Watch
from pipegrid.transfer.worth import Streams

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
        means: Means,
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
        self._streams = Streams(means.clock, silence_s)
        self._verified = 0
        self._report = ProgressReport(progress, 0)
        self._ring = ring(self._cap.storage_index, means.peers)
        self._waves: Waves[Peer] = Waves(self._ring, cap.total_shares, more)
        self._answered_s = 0.0
        # Of each, whether it is for a sample.
        self._requests: RequestsUnderWay[bool] = RequestsUnderWay(means.clock)
        self._fit = CapFit(self._cap)
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
        watch = Watch(self._clock, self._silence_s)
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
            self._fit.told(peer, packed)

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
            self._fit.told(peer, packed)

    async def _read(self, number: int, peer: Peer, offset: int, length: int) -> bytes:
        if offset >= layout.MAX_OFFSET:
            return b""
        watch = Watch(self._clock, self._silence_s)
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
        watch = Watch(self._clock, self._silence_s, worth=worth)
        feeder = VerifierFeed(verifier, self._workers, watch.sign, worth)
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
