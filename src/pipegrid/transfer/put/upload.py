"""
Putting one file on a grid, in one round trip where reality allows it.

The way of the data: source -> coding line (workers) -> lanes (one a share) -> pipelines (one a
server). Allocation and writes leave together, to the servers where the plan's optimistic first
placement wants them; answers are compared with the plan as they come, and only the difference
costs another round trip. A share that finds a new home late joins at the current segment, and
what it missed is coded again from the source, never kept. So is what was lost with a connection.

Nothing waits for the slowest server without need: a lane may cost the others at most the grace
(``UploadSettings``), and is dropped after it if happiness holds without its share.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.core import hashes
from pipegrid.core.caps import ChkCap
from pipegrid.core.encoder import Encoder, ShareWrite
from pipegrid.core.leases import ClientSecrets
from pipegrid.core.params import Geometry
from pipegrid.errors import NoSpace, NoSuchShare, ServerError, UnhappyError, WrongSecret
from pipegrid.reactor.wakeup import Wakeup
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.peers import Peer, ring
from pipegrid.transfer.progress import Progress, ProgressReport
from pipegrid.transfer.put.allocations import Allocations, Answer
from pipegrid.transfer.put.asking import Asking
from pipegrid.transfer.put.codingline import CodingLine
from pipegrid.transfer.put.elsewhere import Elsewhere
from pipegrid.transfer.put.openlanes import OpenLanes
from pipegrid.transfer.put.plan import UploadPlan
from pipegrid.transfer.put.reasons import said_once
from pipegrid.transfer.put.refusals import ASK_S, Refusals
from pipegrid.transfer.put.shareway import Lane
from pipegrid.transfer.put.source import Source
from pipegrid.transfer.put.whole import Begun, take_apart
from pipegrid.transfer.results import PutResult
from pipegrid.transfer.settings import UploadSettings
from pipegrid.wire.messages import Allocation, UploadSecrets

SLOW = 2.0
"""A server is slow if its answers take so many times as long as those of most others."""

_TICK_S = 0.01
"""No shorter waits: what is left of a patience may be less than the clock can tell."""

_NONE: Mapping[int, Peer] = {}

_ROUNDING_S = 1e-6
"""Waits that make up a grace may add up to so much less than it."""


class Upload:
    """
    The upload of one encoded file (not of a literal one).

    Args:
        peers: servers that may be used, in any order.
        key: 16 bytes; decides the storage index, and with it the ring.
        happy: servers of happiness without which the file does not count as stored.
        check_source: awaited before the last bytes are sent; raises SourceError if the source has
            changed since the key was made.
        elsewhere: what puts of this client have found; told of this one's end.
        progress: called with acknowledged and total bytes of shares.
        found: called with bytes of shares that servers had before, and with all that there are.
        begun: what ``WholePut`` has begun, and did not end.
        cap_known: called with the file's cap when all of it is coded.

    What somebody else stores at the same time (``contended``) a later try finds.
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
        elsewhere: Elsewhere,
        progress: Progress | None = None,
        found: Progress | None = None,
        begun: Begun | None = None,
        cap_known: Callable[[ChkCap], None] | None = None,
    ) -> None:
        self._clock = clock
        self._workers = workers
        self._source = source
        self._geometry = geometry
        self._settings = settings
        self._check_source = check_source
        self._cap_known = cap_known
        self._encoder = Encoder(geometry, key)
        self._storage_index = hashes.storage_index(key)
        self._plan: UploadPlan[Peer] = UploadPlan(
            ring(self._storage_index, peers),
            geometry.total_shares,
            happy,
            geometry.required_shares,
        )
        self._happy = happy
        self._lanes = OpenLanes(self._plan, settings.silence_s)
        self._changed = Wakeup(clock)
        self._uneventful = 0  # so many shares may be stored before there is anything to decide
        self._allocations = Allocations(
            self._storage_index,
            self._encoder.share_bytes,
            client_secrets.for_file(self._storage_index),
            self._changed.fire,
        )
        self._refusals = Refusals(
            clock, self._storage_index, self._encoder.share_bytes, self._changed.fire
        )
        self._begun = begun
        self._started = clock.seconds() if begun is None else begun.started
        self._asking = Asking(
            elsewhere,
            self._plan,
            self._allocations,
            self._encoder.share_bytes,
            self._started,
            settings.grace_s,
        )
        self._next_segment = 0
        self._placed: dict[int, Peer] = {}
        self._found: dict[int, set[Peer]] = {}
        self._found_parts: dict[int, int] = {}
        total_bytes = geometry.total_shares * self._encoder.share_bytes
        self._progress = ProgressReport(progress, total_bytes)
        self._found_before = ProgressReport(found, total_bytes)
        self._superfluous = False
        self._held: list[Lane] = []  # those whose last bytes wait
        self._others_uploading = self._aborted = False
        self._dropped: set[str] = set()

    @property
    def contended(self) -> bool:
        """Whether somebody else seems to be storing the file at the same time."""
        return self._others_uploading or self._aborted or self._refusals.contended

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
            self._asking.ask()
            if self._asking.first:
                await self._hear_first()
            if self._begun is None:
                self._open_lanes(self._plan.opening())
            else:
                self._take_over(self._begun)
            await self._send_segments(line)
            await self._settle()
        except (CancelledError, GeneratorExit):
            # Unfinished shares stay allocated, since a rerun resumes them.
            self._let_go()
            raise
        except UnhappyError:
            # If servers went away in the middle a rerun goes on when they are back, with what is where it
            # will look for it.
            self._let_go(abort=True, keep=self._plan.first() if self._lanes.lost_midway else {})
            await self._lanes.forgotten(self._clock)
            raise
        except BaseException:
            self._let_go(abort=True)
            await self._lanes.forgotten(self._clock)
            raise
        finally:
            line.stop()
        if self._superfluous:
            try:
                # Who closes the grid now would leave unfinished shares on servers.
                await self._lanes.forgotten(self._clock)
            except BaseException:
                self._let_go()
                raise
        self._let_go()
        self._progress.finish()
        self._asking.ended(self._found)
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

    async def _hear_first(self) -> None:
        """Wait until those that were asked have answered, but not long for any of them."""
        self._look_at_answers()
        while (left_s := self._asking.left_s(self._clock.seconds())) > 0:
            await self._changed.wait(max(_TICK_S, left_s))
            self._look_at_answers()

    def _take_over(self, begun: Begun) -> None:
        """Go on with what was sent already, as if it had been sent here."""
        for peer, there in begun.found.items():
            self._found_at(peer, there)
        for number, peer in begun.stored.items():
            self._plan.found(peer, [number])
            self._placed[number] = peer
        for peer, (numbers, call) in begun.calls.items():
            allocation, writes = take_apart(call, numbers)
            secrets = self._allocations.secrets_for(peer)
            for number, write in writes.items():
                lane = self._lane(peer, number, secrets)
                self._lanes.add(lane)
                lane.adopt(write, begun.started)
            self._allocations.adopt(peer, frozenset(numbers), allocation)
        self._take_stock()

    # The three parts of an upload.

    async def _send_segments(self, line: CodingLine) -> None:
        """Send every segment, and the trailers, to the lanes that are open when it goes by."""
        for index in range(self._geometry.num_segments):
            await self._wait_for_room()
            coded = await line.take()
            self._send(self._encoder.add(coded), index)
            self._next_segment = index + 1
        await self._check_source()
        trees = 32 * self._geometry.num_segments * self._geometry.total_shares
        self._send(await self._workers.run_if_large(16 * trees, self._encoder.finish), None)
        if self._cap_known is not None:
            self._cap_known(self._encoder.cap)
        if self._allocations.has_news:
            self._take_stock()
        may_hold = self._asking.may_hold_back(self._clock.seconds())
        for lane in self._lanes.open:
            if not lane.missed and lane.has_trailer:
                lane.finish(may_hold and self._asking.holds_back(lane.exceeds_window))
        if may_hold:
            self._held = [lane for lane in self._lanes.open if lane.is_held]

    async def _send_missed(self, late: Sequence[Lane]) -> None:
        """Code again, and send, what lanes that were opened late have missed, or have lost."""
        geometry = self._geometry
        assert self._next_segment == geometry.num_segments
        missed = [lane.missed for lane in late if lane.missed]
        first = min((each.start for each in missed), default=0)
        for index in range(first, max((each.stop for each in missed), default=0)):
            await self._wait_for_room()
            # A lane whose turn is not now may just have lost something that is earlier: next time.
            joining = [lane for lane in late if lane.misses_next(index)]
            if joining:
                shares = {lane.share_number for lane in joining}
                size = 8 * geometry.segment_length(index)
                writes = await self._workers.run_if_large(size, self._recode, index, shares)
                # Meanwhile one may have lost more.
                self._send(writes, index, [lane for lane in joining if lane.misses_next(index)])
        for lane in late:
            if lane.missed or lane.state != "open":
                continue
            if not lane.has_trailer:
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
        happy_since = None if self._begun is None else self._begun.happy_since
        while True:
            self._take_stock()
            if self._held and self._asking.left_s(self._clock.seconds()) <= 0:
                self._release()
            late = [
                lane
                for lane in self._lanes.open
                if lane.state == "open" and not lane.all_sent and not lane.is_held
            ]
            if late:
                await self._send_missed(late)
                continue
            if not self._lanes.open:
                if not self._plan.is_enough and self._refusals.ask():
                    await self._changed.wait(ASK_S)
                    continue
                break
            now = self._clock.seconds()
            patience = self._lanes.until_silence(now)
            if self._held:
                patience = min(patience, self._asking.left_s(now))
            if self._plan.is_enough:
                happy_since = now if happy_since is None else happy_since
                grace = self._settings.grace(happy_since - self._started)
                patience = min(patience, happy_since + grace - now)
                if patience <= 0:
                    for lane in self._lanes.open:
                        self._drop(lane)
                    break
            self._uneventful = 0 if self._progress.is_wanted else self._until_decision() - 1
            await self._changed.wait(max(_TICK_S, patience))
            self._uneventful = 0
        if not self._plan.is_enough:
            raise self._unhappy(self._plan.happiness())

    def _release(self) -> None:
        """Send last bytes, where they are wanted still; where others were lost they wait for those."""
        for lane in self._held:
            if lane.is_held:
                lane.release()
        self._held = [lane for lane in self._held if lane.state == "open" and not lane.all_sent]

    def _until_decision(self) -> int:
        """How many more shares have to be stored before there is anything to do."""
        missing = self._plan.missing
        open_ones = len(self._lanes.open)
        return min(missing, open_ones) if missing > 0 else open_ones

    def _share_stored(self) -> None:
        # To wake up, and look at everything, for each of ten shares took a tenth of a small put's time.
        if self._uneventful > 0:
            self._uneventful -= 1
        else:
            self._changed.fire()

    def _unhappy(self, reached: int) -> UnhappyError:
        full = self._refusals.explained
        why = said_once({**self._lanes.reasons, **full}) or "too few accepted it"
        if self.contended:
            advice = (
                "somebody else may be storing it at this moment, so try again when that is done"
            )
        elif full:
            advice = "make room there, add servers or ask for less with --happy"
        else:
            advice = "try again when more servers work"
        if reached >= self._happy:
            stored, needed = len(self._plan.stored), self._geometry.required_shares
            return UnhappyError(
                f"cannot store {self._source.name}: only {stored} of its shares could be stored, and it "
                f"takes {needed} to get it back ({why}); {advice}",
                stored,
                needed,
            )
        return UnhappyError(
            f"cannot store {self._source.name}: its shares reached only {reached} of the "
            f"{self._happy} servers wanted ({why}); {advice}",
            reached,
            self._happy,
        )

    # Lanes.

    def _open_lanes(self, placement: dict[int, Peer]) -> None:
        by_peer: dict[Peer, set[int]] = {}
        for number, peer in placement.items():
            by_peer.setdefault(peer, set()).add(number)
        for peer, numbers in by_peer.items():
            secrets = self._allocations.secrets_for(peer)
            for number in sorted(numbers):
                self._lanes.add(self._lane(peer, number, secrets))
            self._allocations.ask(peer, frozenset(numbers), secrets)

    def _lane(self, peer: Peer, number: int, secrets: UploadSecrets) -> Lane:
        return Lane(
            peer,
            number,
            self._storage_index,
            secrets,
            self._encoder.share_bytes,
            self._next_segment,
            self._changed.fire,
            self._share_stored,
            self._clock,
            lets_go=True,
            turn=(number + 1) / self._geometry.total_shares,
        )

    def _look_at_answers(self) -> bool:
        """Take in what servers have said to allocations; returns whether any has."""
        answers = self._allocations.take_answers()
        if answers:
            self._asking.answered(self._clock.seconds(), len(answers))
        for answer in answers:
            if not isinstance(answer.result, Failure):
                self._allocated(answer.result, answer)
            elif answer.result.check(ServerError, CancelledError):
                self._lanes.peer_failed(answer.peer, str(answer.result.value))
            else:
                answer.result.raiseException()
        return bool(answers)

    def _allocated(self, allocation: Allocation, answer: Answer) -> None:
        peer = answer.peer
        there = self._found_at(peer, allocation.already_have, answer.sent_before)
        for lane in self._lanes.open:
            if lane.peer is peer and lane.share_number in answer.numbers:
                lane.last_sign = self._clock.seconds()
                if lane.share_number in there:
                    lane.close("stored")
                # No room, or an unfinished upload: perhaps our own, which the writes then resume.
                lane.granted = lane.share_number in allocation.allocated

    def _found_at(
        self, peer: Peer, numbers: frozenset[int], sent_before: frozenset[int] = frozenset()
    ) -> set[int]:
        """Take in that a server has shares; returns those that can be."""
        if not numbers:
            return set()
        there = {n for n in numbers if n < self._geometry.total_shares}
        self._plan.found(peer, there)
        for number in there - sent_before:
            if self._placed.get(number) is not peer:
                self._found.setdefault(number, set()).add(peer)
        return there

    def _send(
        self,
        writes: Iterable[ShareWrite],
        segment: int | None,
        lanes: Iterable[Lane] | None = None,
    ) -> None:
        by_share: dict[int, list[Lane]] = {}
        for lane in self._lanes.open if lanes is None else lanes:
            by_share.setdefault(lane.share_number, []).append(lane)
        for write in writes:
            for lane in by_share.get(write.share_number, ()):
                lane.send(write, segment)

    async def _wait_for_room(self) -> None:
        """Return when every open lane has room for more, dropping those that take too long."""
        while True:
            if self._take_stock():
                self._give_up_if_hopeless()
            blocked = [lane for lane in self._lanes.open if lane.blocked]
            if not blocked:
                return
            before = self._clock.seconds()
            patience = self._lanes.until_silence(before)
            others_wait = any(one.state == "open" and not one.blocked for one in self._lanes.open)
            grace = self._settings.grace(before - self._started)
            if others_wait:
                left = [grace - lane.stalled_s for lane in blocked if self._can_spare(lane)]
                patience = min([patience, *left])
            await self._changed.wait(max(_TICK_S, patience))
            if others_wait:
                self._charge(blocked, self._clock.seconds() - before, grace)

    def _charge(self, blocked: Iterable[Lane], waited_s: float, grace_s: float) -> None:
        """Hold against lanes what they have cost the others; drop those whose grace is over."""
        for lane in blocked:
            if lane.blocked:
                lane.stalled_s += waited_s
                if lane.stalled_s >= grace_s - _ROUNDING_S:
                    if self._is_slow(lane):
                        self._drop(lane)
                    else:
                        lane.stalled_s = 0.0

    def _is_slow(self, lane: Lane) -> bool:
        """
        Return whether a server keeps the others waiting, and not the line that all of them share.

        On a full line now this lane is held up and now that, and all answers take equally long.
        """
        others = [one.pace_s for one in self._lanes.open if one is not lane]
        return bool(others) and lane.pace_s > SLOW * _median(others)

    def _give_up_if_hopeless(self) -> None:
        """Raise UnhappyError if too little can be stored: do not send a large file in vain."""
        hopeless = not self._plan.will_be_enough()
        if hopeless and not self._allocations.waiting and not self._refusals.ask():
            raise self._unhappy(self._plan.hoped_happiness())

    def _can_spare(self, lane: Lane) -> bool:
        return self._plan.will_be_enough([lane.share_number])

    def _drop(self, lane: Lane) -> None:
        """Take a share back, unless happiness needs it, or whoever gets the file."""
        if self._can_spare(lane):
            self._dropped.add(lane.peer.name)
            self._take_back(lane)

    def _take_back(self, lane: Lane) -> None:
        self._plan.dropped(lane.share_number, lane.peer)
        if lane.is_held:
            lane.close("dropped")  # all else is sent: to break that off would cost the connection
        else:
            lane.cancel("dropped")
        self._lanes.forget(lane)
        self._changed.fire()  # one whose last byte was held may have had no call to end

    def _let_go(self, *, abort: bool = False, keep: Mapping[int, Peer] = _NONE) -> None:
        self._lanes.let_go(abort=abort, keep=keep)
        self._allocations.cancel()
        self._refusals.cancel()

    # Events.

    def _take_stock(self) -> bool:
        """
        Tell the plan what has happened, and open the lanes that it wants now.

        Returns whether anything has happened that it did not know.
        """
        news = self._look_at_answers()
        for peer, there in self._refusals.take_lists():
            self._found_at(peer, there)
            news = True
        ended = self._lanes.take_ended(self._clock.seconds())
        for lane in ended:
            self._lane_ended(lane)
        if news or ended:
            for number in self._plan.superfluous():
                for lane in self._lanes.open:
                    if lane.share_number == number and not lane.all_sent:
                        self._take_back(lane)
                        self._superfluous = True
            self._open_lanes(self._plan.moves())
        if self._found_before.is_wanted:
            self._found_before.report(self._found_bytes())
        if self._progress.is_wanted:
            self._progress.report(self._acknowledged_bytes())
        return news or bool(ended)

    def _lane_ended(self, lane: Lane) -> None:
        peer, number = lane.peer, lane.share_number
        if lane.state == "stored":
            self._plan.found(peer, [number])
            if peer not in self._found.get(number, ()):
                self._placed[number] = peer
        elif lane.state == "lost":
            # Whoever stores the same with the same secrets may have ended it, as after a failure of theirs.
            self._aborted = self._aborted or isinstance(lane.error, NoSuchShare)
            self._plan.lost(number, peer)
        elif lane.state == "refused":
            if isinstance(lane.error, WrongSecret):
                self._others_uploading = True
            elif lane.unexplained or isinstance(lane.error, NoSpace):
                self._refusals.note(peer, number, lane.error)
            self._plan.refused(number, peer)
        elif lane.state == "failed":
            self._plan.failed(peer)

    def _found_bytes(self) -> int:
        """Return how much of all shares was there before, of whole ones and of those that were cut off."""
        for lane in self._lanes.open:
            number = lane.share_number
            self._found_parts[number] = max(self._found_parts.get(number, 0), lane.found_bytes)
        whole = dict.fromkeys(self._found, self._encoder.share_bytes)
        return sum((self._found_parts | whole).values())

    def _acknowledged_bytes(self) -> int:
        """Return how much of all shares is stored, or acknowledged and not lost since."""
        share_bytes = self._encoder.share_bytes
        done = dict.fromkeys(self._plan.stored, share_bytes)
        for (
            lane
        ) in self._lanes.open:  # two may have the same share, and one may have sent a part twice
            number = lane.share_number
            done[number] = max(done.get(number, 0), min(lane.acknowledged_bytes, share_bytes))
        return sum(done.values())


def _median(values: list[float]) -> float:
    """Return what half of them are below; ``statistics`` brings decimals and fractions with it."""
    ordered, middle = sorted(values), len(values) // 2
    return (ordered[middle] + ordered[~middle]) / 2
