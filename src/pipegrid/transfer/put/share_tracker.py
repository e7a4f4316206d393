"""Active, ended and stored shares of one upload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IReactorTime

from pipegrid.errors import NoSuchShare, ServerError, ServerTimeout, is_absence
from pipegrid.reactor.deferreds import Wakeup
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.put.share_assignment import UploadPlan
from pipegrid.transfer.put.share_upload import ShareState, ShareUpload, is_unexplained
from pipegrid.transfer.put.straggler_policy import is_silent
from pipegrid.transfer.results import Progress, ProgressReport

# The ways of one transfer: those that are open, those that have ended, and why some have failed.
#
# What an end means for the placement is the transfer's business.

_NONE: Mapping[int, Peer] = {}

FORGET_S = 2.0
"""For a server that does not answer; it forgets by itself after half an hour."""


class ActiveShares:
    """
    The ways of one transfer.

    Args:
        silence_s: a server that acknowledges nothing for so long is given up.

    Attributes:
        open: those that have not ended.
        ended: the others; writes of theirs may be unanswered still.
        reasons: nickname of a server to what went wrong there, if anything did.
        absent: those of them that were out of reach, or did not answer in time.
    """

    def __init__(self, plan: UploadPlan[Peer], silence_s: float) -> None:
        self.open: list[ShareUpload] = []
        self.ended: list[ShareUpload] = []
        self.reasons: dict[str, str] = {}
        self.absent: set[str] = set()
        self._plan = plan
        self._forgetting: set[Deferred[None]] = set()
        self._silence_s = silence_s

    def add(self, way: ShareUpload) -> None:
        """A share is on its way."""
        self._plan.sending(way.share_number, way.peer)
        self.open.append(way)

    def peer_failed(self, peer: Peer, error: BaseException | None) -> None:
        """A server is gone, and with it all that was on its way there."""
        self.reasons[peer.name] = str(error)
        self._note_absence(peer.name, error)
        self._plan.failed(peer)
        for way in self.open:
            if way.peer is peer:
                way.cancel(ShareState.FAILED)

    @property
    def lost_midway(self) -> bool:
        """Whether some server failed that had taken a part of its share, but not all."""
        return any(
            way.state is ShareState.FAILED and way.acknowledged_bytes
            for way in [*self.open, *self.ended]
        )

    def take_ended(self, now: float) -> list[ShareUpload]:
        """
        Return the ways that have ended since the last time; give up silent servers first.

        What a way met that no server may raise is raised here.
        """
        for way in self.open:
            way.resolve_uncertain()
            if is_silent(way, now, self._silence_s):
                silent = f"{way.peer.name} was silent for {self._silence_s:g} s"
                self.peer_failed(way.peer, ServerTimeout(silent))
        ended = [way for way in self.open if way.ended]
        if ended:
            self.open = [way for way in self.open if not way.ended]
            self.ended += ended
        for way in ended:
            if way.bug is not None:
                way.bug.raiseException()
            there = way.state in (
                ShareState.STORED,
                ShareState.FOUND,
            )  # whatever was thought before
            if not (there or way.error is None or is_unexplained(way.state, way.error)):
                self._note(way.peer.name, way.error)
            if way.is_useless:
                self.abort_share(way)
        return ended

    def _note(self, server: str, error: ServerError) -> None:
        """Remember why a share is not there; a server that does not know it was lost, or refused, before."""
        if isinstance(error, NoSuchShare):
            self.reasons.setdefault(server, str(error))
        else:
            self.reasons[server] = str(error)
        self._note_absence(server, error)

    def _note_absence(self, server: str, error: BaseException | None) -> None:
        if is_absence(error):
            self.absent.add(server)

    def release(self, *, abort: bool = False, keep: Mapping[int, Peer] = _NONE) -> None:
        """
        Give up whatever is unanswered, so that nothing of the transfer is left behind here.

        Args:
            abort: have servers forget unfinished shares, too; they stay for a rerun to resume otherwise.
            keep: but not these, of the shares with these numbers at these servers.
        """
        unfinished = [way for way in self.open if not way.ended]
        for way in [*self.open, *self.ended]:
            way.cancel(ShareState.DROPPED)
            way.detach()
        if abort:
            for way in unfinished:
                if keep.get(way.share_number) is not way.peer:
                    self.abort_share(way)

    def abort_share(self, way: ShareUpload) -> None:
        """Have its server forget the unfinished share of a way that has ended."""
        told = way.abort()
        self._forgetting.add(told)
        told.addBoth(lambda _: self._forgetting.discard(told))

    async def wait_for_aborts(self, clock: IReactorTime) -> None:
        """
        Wait until servers have forgotten what they shall, but not long.

        Whoever is told of the failure may close everything at once, and what was not sent then never will be.
        """
        if self._forgetting:
            over = Wakeup(clock)
            DeferredList(list(self._forgetting)).addCallback(over.fire)
            await over.wait(FORGET_S)


# Where the shares of one upload are: what servers had, what was placed, and how many bytes of all are there.
#
# Pure: told of answers and of ways that have ended; it tells the plan what is stored.


class StoredShares:
    """
    The shares of one upload.

    Args:
        plan: is told what is stored.
        share_bytes: of one share.
        progress: called with acknowledged and total bytes of shares.
        found: called with bytes of shares that servers had before, and with all that there are.

    Attributes:
        placed: which server has a share that was sent here.
        found: which servers had a share before.
    """

    def __init__(
        self,
        plan: UploadPlan[Peer],
        share_bytes: int,
        progress: Progress | None = None,
        found: Progress | None = None,
    ) -> None:
        self.placed: dict[int, Peer] = {}
        self.found: dict[int, set[Peer]] = {}
        self._plan = plan
        self._share_bytes = share_bytes
        self._found_parts: dict[int, int] = {}
        self._progress = ProgressReport(progress, plan.total_shares * share_bytes)
        self._found_before = ProgressReport(found, plan.total_shares * share_bytes)

    def found_at(
        self, peer: Peer, numbers: frozenset[int], sent_before: frozenset[int] = frozenset()
    ) -> set[int]:
        """
        Take in that a server has shares; returns those that can be.

        Args:
            sent_before: of these it is not known whether they were there before.
        """
        if not numbers:
            return set()
        there = {n for n in numbers if n < self._plan.total_shares}
        self._plan.found(peer, there)
        for number in there - sent_before:
            if self.placed.get(number) is not peer:
                self.found.setdefault(number, set()).add(peer)
        return there

    def stored(self, peer: Peer, number: int) -> None:
        """A share that was sent is complete there."""
        self._plan.found(peer, [number])
        if peer not in self.found.get(number, ()):
            self.placed[number] = peer

    def names_placed(self) -> dict[int, str]:
        """Return share numbers with the server that each was sent to."""
        return {number: peer.name for number, peer in sorted(self.placed.items())}

    def names_found(self) -> dict[int, list[str]]:
        """Return share numbers with the servers that had each before."""
        return {
            number: sorted(peer.name for peer in peers)
            for number, peers in sorted(self.found.items())
        }

    @property
    def is_followed(self) -> bool:
        """Whether somebody wants to know how much is stored, whenever it is more."""
        return self._progress.is_wanted

    def report(self, ways: Sequence[ShareUpload]) -> None:
        """Tell who wants to know how much is there by now."""
        if self._found_before.is_wanted:
            self._found_before.report(self.found_bytes(ways))
        if self._progress.is_wanted:
            self._progress.report(self.acknowledged_bytes(ways))

    def finish(self) -> None:
        """Tell that all is stored that will be."""
        self._progress.finish()

    def found_bytes(self, ways: Iterable[ShareUpload]) -> int:
        """Return how much of all shares was there before, of whole ones and of those that were cut off."""
        for way in ways:
            number = way.share_number
            self._found_parts[number] = max(self._found_parts.get(number, 0), way.found_bytes)
        whole: Mapping[int, int] = dict.fromkeys(self.found, self._share_bytes)
        return sum({**self._found_parts, **whole}.values())

    def acknowledged_bytes(self, ways: Iterable[ShareUpload]) -> int:
        """Return how much of all shares is stored, or acknowledged and not lost since."""
        done = dict.fromkeys(self._plan.stored, self._share_bytes)
        for way in ways:  # two may have the same share, and one may have sent a part twice
            number = way.share_number
            done[number] = max(done.get(number, 0), min(way.acknowledged_bytes, self._share_bytes))
        return sum(done.values())
