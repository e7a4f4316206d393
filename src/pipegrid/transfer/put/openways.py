"""
The ways of one transfer: those that are open, those that have ended, and why some have failed.

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


class OpenWays:
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
        self.open: list[ShareWay] = []
        self.ended: list[ShareWay] = []
        self.reasons: dict[str, str] = {}
        self.absent: set[str] = set()
        self._plan = plan
        self._forgetting: set[Deferred[None]] = set()
        self._silence_s = silence_s

    def add(self, way: ShareWay) -> None:
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
                way.cancel(State.FAILED)

    @property
    def lost_midway(self) -> bool:
        """Whether some server failed that had taken a part of its share, but not all."""
        return any(
            way.state is State.FAILED and way.acknowledged_bytes
            for way in [*self.open, *self.ended]
        )

    def take_ended(self, now: float) -> list[ShareWay]:
        """
        Return the ways that have ended since the last time; give up silent servers first.

        What a way met that no server may raise is raised here.
        """
        for way in self.open:
            way.resolve_doubt()
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
            there = way.state in (State.STORED, State.FOUND)  # whatever was thought before
            if not (there or way.error is None or is_unexplained(way.state, way.error)):
                self._note(way.peer.name, way.error)
            if way.is_useless:
                self.forget(way)
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
        unfinished = [way for way in self.open if not way.ended]
        for way in [*self.open, *self.ended]:
            way.cancel(State.DROPPED)
            way.detach()
        if abort:
            for way in unfinished:
                if keep.get(way.share_number) is not way.peer:
                    self.forget(way)

    def forget(self, way: ShareWay) -> None:
        """Have its server forget the unfinished share of a way that has ended."""
        told = way.abort()
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
