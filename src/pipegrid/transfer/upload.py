"""
Putting one file on a grid, in one round trip where reality allows it.

The way of the data: source -> coding line (workers) -> lanes (one a share) -> pipelines (one a
server). Allocation and writes leave together, to the servers where the plan's optimistic first
placement wants them; answers are compared with the plan as they come, and only the difference
costs another round trip. A share that finds a new home late joins at the current segment, and
what it missed is coded again from the source, never kept.

Nothing waits for the slowest server without need: a lane may cost the others at most the grace
(``UploadSettings``), and is dropped after it if happiness holds without its share.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.core import hashes
from pipegrid.core.encoder import Encoder, ShareWrite
from pipegrid.core.leases import ClientSecrets
from pipegrid.core.params import Geometry
from pipegrid.errors import ServerError, UnhappyError
from pipegrid.flow.wakeup import Wakeup
from pipegrid.flow.workers import CpuWorkers
from pipegrid.transfer.codingline import CodingLine
from pipegrid.transfer.lanes import Lane
from pipegrid.transfer.peers import Peer, ring
from pipegrid.transfer.plan import UploadPlan
from pipegrid.transfer.results import PutResult
from pipegrid.transfer.source import Source
from pipegrid.wire.messages import Allocation, LeaseSecrets, UploadSecrets

A = TypeVar("A")

Progress = Callable[[int, int], None]


@attrs.frozen
class UploadSettings:
    """
    How patient an upload is.

    Attributes:
        grace_s, grace_share: stragglers may cost this much time, or this share of the time that
            the upload has taken so far, whichever is more, once happiness holds without them.
        silence_s: a server that acknowledges nothing for so long is given up.
    """

    grace_s: float = 2.0
    grace_share: float = 0.25
    silence_s: float = 60.0

    def grace(self, elapsed_s: float) -> float:
        """Return how long stragglers may keep an upload that has taken ``elapsed_s``."""
        return max(self.grace_s, self.grace_share * elapsed_s)


class Upload:
    """
    The upload of one encoded file (not of a literal one).

    Args:
        peers: servers that may be used, in any order.
        key: 16 bytes; decides the storage index, and with it the ring.
        happy: servers of happiness without which the file does not count as stored.
        check_source: awaited before the last bytes are sent; raises SourceError if the source has
            changed since the key was made.
        progress: called with acknowledged and total bytes of shares.
    """

    def __init__(
        self,
        *,
        clock: IReactorTime,
        workers: CpuWorkers,
        peers: Sequence[Peer],
        client_secrets: ClientSecrets,
        source: Source,
        geometry: Geometry,
        key: bytes,
        happy: int,
        settings: UploadSettings,
        check_source: Callable[[], Coroutine[Any, Any, None]],
        progress: Progress | None = None,
    ) -> None:
        self._clock = clock
        self._workers = workers
        self._source = source
        self._geometry = geometry
        self._settings = settings
        self._check_source = check_source
        self._progress = progress
        self._encoder = Encoder(geometry, key)
        self._storage_index = hashes.storage_index(key)
        self._secrets = client_secrets.for_file(self._storage_index)
        self._plan: UploadPlan[Peer] = UploadPlan(
            ring(self._storage_index, peers), geometry.total_shares, happy
        )
        self._happy = happy
        self._lanes: list[Lane] = []
        self._changed = Wakeup(clock)
        self._started = clock.seconds()
        self._next_segment = 0
        self._placed: dict[int, Peer] = {}
        self._found: dict[int, set[Peer]] = {}
        self._not_granted: set[tuple[int, Peer]] = set()
        self._questions: set[Deferred[Any]] = set()
        self._answers: list[tuple[Any, Callable[..., None], tuple[Any, ...]]] = []
        self._news = False
        self._reasons: dict[str, str] = {}
        self._dropped: set[str] = set()

    async def run(self) -> PutResult:
        """
        Send the file and wait for it to be stored.

        Raises:
            UnhappyError: it could not be spread over enough servers.
            SourceError: the source could not be read, or changed.
        """
        if len(self._plan.ring) < self._happy:
            raise UnhappyError(
                f"cannot store {self._source.name}: its shares shall be on at least "
                f"{self._happy} servers but only {len(self._plan.ring)} are there; "
                "add servers or ask for less with --happy",
                len(self._plan.ring),
                self._happy,
            )
        line = CodingLine(self._encoder, self._source, self._workers)
        try:
            self._open_lanes(self._plan.first())
            await self._send_segments(line)
            await self._settle()
        except (CancelledError, GeneratorExit):
            # Unfinished shares stay allocated, since a rerun resumes them.
            self._let_go()
            raise
        except BaseException:
            unfinished = [lane for lane in self._lanes if lane.state == "open"]
            self._let_go()
            for lane in unfinished:
                lane.abort()
            raise
        finally:
            line.stop()
        self._let_go()
        return PutResult(
            cap=self._encoder.cap,
            size=self._geometry.size,
            share_bytes=self._encoder.share_bytes,
            shares_placed={n: peer.name for n, peer in sorted(self._placed.items())},
            shares_found={
                n: sorted(peer.name for peer in peers) for n, peers in sorted(self._found.items())
            },
            happiness=self._plan.happiness(),
            elapsed_s=self._clock.seconds() - self._started,
            dropped=sorted(self._dropped),
        )

    # The three parts of an upload.

    async def _send_segments(self, line: CodingLine) -> None:
        """Send every segment, and the trailers, to the lanes that are open when it goes by."""
        for index in range(self._geometry.num_segments):
            await self._wait_for_room()
            coded = await line.take()
            self._send(self._encoder.add(coded))
            self._next_segment = index + 1
        await self._check_source()
        trees = 32 * self._geometry.num_segments * self._geometry.total_shares
        self._send(await self._workers.run_if_large(16 * trees, self._encoder.finish))
        for lane in self._lanes:
            lane.has_trailer = True
            if not lane.missed:
                lane.finish()

    async def _send_missed(self) -> None:
        """Code again, and send, what lanes that were opened late have missed."""
        late = [lane for lane in self._lanes if lane.state == "open" and not lane.all_sent]
        geometry = self._geometry
        for index in range(max((lane.missed for lane in late), default=0)):
            await self._wait_for_room()
            shares = {n.share_number for n in late if n.state == "open" and index < n.missed}
            if shares:
                size = 8 * geometry.segment_length(index)
                writes = await self._workers.run_if_large(size, self._recode, index, shares)
                self._send(writes, late)
        assert self._next_segment == geometry.num_segments
        for lane in late:
            if not lane.has_trailer and lane.state == "open":
                lane.send(self._encoder.trailer(lane.share_number))
            lane.finish()

    def _recode(self, index: int, shares: set[int]) -> list[ShareWrite]:
        geometry = self._geometry
        plaintext = self._source.read_at(
            index * geometry.segment_bytes, geometry.segment_length(index)
        )
        return self._encoder.recode(index, plaintext, shares)

    async def _settle(self) -> None:
        """Wait until every share is acknowledged, or enough of them and the grace is over."""
        happy_since: float | None = None
        while True:
            self._digest()
            await self._send_missed()
            open_lanes = [lane for lane in self._lanes if lane.state == "open"]
            if not self._lanes and not self._questions and not self._answers:
                break
            now = self._clock.seconds()
            patience = self._settings.silence_s
            if self._plan.happiness() >= self._happy:
                happy_since = now if happy_since is None else happy_since
                patience = happy_since + self._settings.grace(happy_since - self._started) - now
                if patience <= 0:
                    for lane in open_lanes:
                        self._drop(lane)
                    break
            await self._changed.wait(patience)
        reached = self._plan.happiness()
        if reached < self._happy:
            reasons = "; ".join(sorted(set(self._reasons.values()))[:3]) or "too few accepted it"
            raise UnhappyError(
                f"cannot store {self._source.name}: its shares reached only {reached} of the "
                f"{self._happy} servers wanted ({reasons}); try again when more servers work",
                reached,
                self._happy,
            )

    # Lanes.

    def _open_lanes(self, placement: dict[int, Peer]) -> None:
        by_peer: dict[Peer, set[int]] = {}
        for number, peer in placement.items():
            by_peer.setdefault(peer, set()).add(number)
        for peer, numbers in by_peer.items():
            derived = self._secrets.for_server(peer.identity.lease_seed)
            secrets = UploadSecrets(LeaseSecrets(derived.renew, derived.cancel), derived.upload)
            for number in sorted(numbers):
                self._plan.sending(number, peer)
                lane = Lane(
                    peer,
                    number,
                    self._storage_index,
                    secrets,
                    self._next_segment,
                    self._changed.fire,
                    self._clock,
                )
                self._lanes.append(lane)
            self._allocate(peer, numbers, secrets)

    def _allocate(self, peer: Peer, numbers: set[int], secrets: UploadSecrets) -> None:
        answer = peer.server.allocate(
            self._storage_index, numbers, self._encoder.share_bytes, secrets
        )
        self._ask(answer, self._allocated, peer, numbers)

    def _ask(self, question: Deferred[A], answered: Callable[..., None], *args: Any) -> None:
        """
        Have ``answered(answer, *args)`` called in the next digest.

        The answer is only noted when it comes: the upload may be in the middle of a step. The first
        of ``args`` is the peer, which counts as failed if there is no answer.
        """
        self._questions.add(question)

        def note(result: A | Failure) -> None:
            self._questions.discard(question)
            self._answers.append((result, answered, args))
            self._changed.fire()

        question.addBoth(note)

    def _look_at_answers(self) -> None:
        answers, self._answers = self._answers, []
        for result, answered, args in answers:
            self._news = True
            if not isinstance(result, Failure):
                answered(result, *args)
            elif result.check(ServerError, CancelledError):
                self._peer_failed(args[0], str(result.value))
            else:
                result.raiseException()

    def _allocated(self, allocation: Allocation, peer: Peer, numbers: set[int]) -> None:
        for number in allocation.already_have:
            self._found.setdefault(number, set()).add(peer)
        self._plan.found(peer, allocation.already_have)
        for number in numbers - allocation.allocated - allocation.already_have:
            # No room, or an unfinished upload: perhaps our own, which the writes then resume.
            self._not_granted.add((number, peer))
        for lane in self._lanes:
            if lane.peer is peer and lane.share_number in numbers:
                lane.last_sign = self._clock.seconds()
                if lane.share_number in allocation.already_have:
                    lane.close("stored")

    def _peer_failed(self, peer: Peer, reason: str) -> None:
        self._reasons[peer.name] = reason
        self._plan.failed(peer)
        for lane in self._lanes:
            if lane.peer is peer:
                lane.cancel("failed")

    def _send(self, writes: Iterable[ShareWrite], lanes: Iterable[Lane] | None = None) -> None:
        by_share: dict[int, list[Lane]] = {}
        for lane in self._lanes if lanes is None else lanes:
            by_share.setdefault(lane.share_number, []).append(lane)
        for write in writes:
            for lane in by_share.get(write.share_number, ()):
                lane.send(write)

    async def _wait_for_room(self) -> None:
        """Return when every open lane has room for more, dropping those that take too long."""
        while True:
            self._digest()
            blocked = [lane for lane in self._lanes if lane.blocked]
            if not blocked:
                return
            free = any(lane.state == "open" and not lane.blocked for lane in self._lanes)
            before = self._clock.seconds()
            grace = self._settings.grace(before - self._started)
            patience = min(grace - lane.stalled_s for lane in blocked)
            await self._changed.wait(max(0.01, patience) if free else self._settings.silence_s)
            now = self._clock.seconds()
            for lane in blocked:
                if free and lane.blocked:
                    lane.stalled_s += now - before
                    if lane.stalled_s > self._settings.grace(now - self._started):
                        self._drop(lane)

    def _drop(self, lane: Lane) -> None:
        """Take a share back, unless happiness needs it."""
        if self._plan.hoped_happiness([lane.share_number]) >= self._happy:
            self._dropped.add(lane.peer.name)
            self._take_back(lane)

    def _take_back(self, lane: Lane) -> None:
        self._plan.dropped(lane.share_number, lane.peer)
        lane.cancel("dropped")
        lane.abort()

    def _let_go(self) -> None:
        """Give up whatever is unanswered, so that nothing of this upload is left behind."""
        for lane in self._lanes:
            lane.cancel("dropped")
        for question in list(self._questions):
            question.cancel()

    # Events.

    def _digest(self) -> None:
        """Tell the plan how lanes have ended, and open those that it wants instead."""
        self._look_at_answers()
        now = self._clock.seconds()
        for lane in self._lanes:
            if lane.silent_for(now) > self._settings.silence_s:
                reason = f"{lane.peer.name} was silent for {self._settings.silence_s:g} s"
                self._peer_failed(lane.peer, reason)
        ended = [lane for lane in self._lanes if lane.ended]
        self._lanes = [lane for lane in self._lanes if not lane.ended]
        for lane in ended:
            self._lane_ended(lane)
        if ended or self._news:
            self._news = False
            for number in self._plan.superfluous():
                for lane in self._lanes:
                    if lane.share_number == number and lane.state == "open":
                        self._take_back(lane)
            self._open_lanes(self._plan.moves())
        self._report()

    def _lane_ended(self, lane: Lane) -> None:
        peer, number = lane.peer, lane.share_number
        if lane.error is not None:
            self._reasons[peer.name] = str(lane.error)
        if lane.state == "stored":
            self._plan.found(peer, [number])
            if peer not in self._found.get(number, ()):
                self._placed[number] = peer
        elif lane.state == "lost":
            self._lane_lost(lane)
        elif lane.state == "refused":
            self._plan.refused(number, peer)
        elif lane.state == "failed":
            self._plan.failed(peer)

    def _lane_lost(self, lane: Lane) -> None:
        """Find out what became of a share: there before, refused, forgotten, or stored unknown to us."""
        peer, number = lane.peer, lane.share_number
        if peer in self._plan.stored.get(number, ()):
            return
        if (number, peer) in self._not_granted:
            self._plan.refused(number, peer)
            return
        # Meanwhile the share counts as under way.
        self._ask(peer.server.list_shares(self._storage_index), self._told, peer, number)

    def _told(self, there: frozenset[int], peer: Peer, number: int) -> None:
        self._plan.found(peer, there)
        if number in there:
            self._placed.setdefault(number, peer)
        else:
            self._plan.lost(number, peer)

    def _report(self) -> None:
        if self._progress is not None:
            share_bytes = self._encoder.share_bytes
            total = self._geometry.total_shares * share_bytes
            stored = set(self._plan.stored)
            done = sum(n.acknowledged_bytes for n in self._lanes if n.share_number not in stored)
            self._progress(min(total, done + len(stored) * share_bytes), total)
