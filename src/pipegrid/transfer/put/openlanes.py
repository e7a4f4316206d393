"""
The lanes of one transfer: those that are open, those that have ended, and why some have failed.

What an end means for the placement is the transfer's business.
"""

from __future__ import annotations

from collections.abc import Mapping

from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.interfaces import IReactorTime

from pipegrid.errors import NoSuchShare, ServerError, ServerTimeout, is_absence
from pipegrid.reactor.wakeup import Wakeup
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.put.pace import is_silent
from pipegrid.transfer.put.plan import UploadPlan
from pipegrid.transfer.put.sharestate import State, is_unexplained
from pipegrid.transfer.put.shareway import ShareWay

_NONE: Mapping[int, Peer] = {}

FORGET_S = 2.0
"""For a server that does not answer; it forgets by itself after half an hour."""


class OpenLanes:
    """
    The lanes of one transfer.

    Args:
        silence_s: a server that acknowledges nothing for so long is given up.

    Attributes:
        open: those that have not ended.
        ended: the others; writes of theirs may be unanswered still.
        reasons: nickname of a server to what went wrong there, if anything did.
        absent: those of them that were out of reach, or did not answer in time.
    """

    def __init__(self, plan: UploadPlan[Peer], silence_s: float) -> None:
        self.open: list[ShareWay] = []
        self.ended: list[ShareWay] = []
        self.reasons: dict[str, str] = {}
        self.absent: set[str] = set()
        self._plan = plan
        self._forgetting: set[Deferred[None]] = set()
        self._silence_s = silence_s

    def add(self, lane: ShareWay) -> None:
        """A share is on its way."""
        self._plan.sending(lane.share_number, lane.peer)
        self.open.append(lane)

    def peer_failed(self, peer: Peer, error: BaseException | None) -> None:
        """A server is gone, and with it all that was on its way there."""
        self.reasons[peer.name] = str(error)
        self._note_absence(peer.name, error)
        self._plan.failed(peer)
        for lane in self.open:
            if lane.peer is peer:
                lane.cancel(State.FAILED)

    @property
    def lost_midway(self) -> bool:
        """Whether some server failed that had taken a part of its share, but not all."""
        return any(
            lane.state is State.FAILED and lane.acknowledged_bytes
            for lane in [*self.open, *self.ended]
        )

    def take_ended(self, now: float) -> list[ShareWay]:
        """
        Return the lanes that have ended since the last time; give up silent servers first.

        What a lane met that no server may raise is raised here.
        """
        for lane in self.open:
            lane.resolve_doubt()
            if is_silent(lane, now, self._silence_s):
                silent = f"{lane.peer.name} was silent for {self._silence_s:g} s"
                self.peer_failed(lane.peer, ServerTimeout(silent))
        ended = [lane for lane in self.open if lane.ended]
        if ended:
            self.open = [lane for lane in self.open if not lane.ended]
            self.ended += ended
        for lane in ended:
            if lane.bug is not None:
                lane.bug.raiseException()
            there = lane.state in (State.STORED, State.FOUND)  # whatever was thought before
            if not (there or lane.error is None or is_unexplained(lane.state, lane.error)):
                self._note(lane.peer.name, lane.error)
            if lane.is_useless:
                self.forget(lane)
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

    def let_go(self, *, abort: bool = False, keep: Mapping[int, Peer] = _NONE) -> None:
        """
        Give up whatever is unanswered, so that nothing of the transfer is left behind here.

        Args:
            abort: have servers forget unfinished shares, too; they stay for a rerun to resume otherwise.
            keep: but not these, of the shares with these numbers at these servers.
        """
        unfinished = [lane for lane in self.open if not lane.ended]
        for lane in [*self.open, *self.ended]:
            lane.cancel(State.DROPPED)
            lane.detach()
        if abort:
            for lane in unfinished:
                if keep.get(lane.share_number) is not lane.peer:
                    self.forget(lane)

    def forget(self, lane: ShareWay) -> None:
        """Have its server forget the unfinished share of a lane that has ended."""
        told = lane.abort()
        self._forgetting.add(told)
        told.addBoth(lambda _: self._forgetting.discard(told))

    async def forgotten(self, clock: IReactorTime) -> None:
        """
        Wait until servers have forgotten what they shall, but not long.

        Whoever is told of the failure may close everything at once, and what was not sent then never will be.
        """
        if self._forgetting:
            over = Wakeup(clock)
            DeferredList(list(self._forgetting)).addCallback(over.fire)
            await over.wait(FORGET_S)
