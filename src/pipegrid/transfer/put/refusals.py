"""
Servers that did not take a share and did not say why: full, read-only, or in the middle of the same upload.

A storage server that has no room leaves a share out of its answer to the allocation, and says of the writes
that it knows no such upload. It says the same when somebody else's upload of that share ended between the
two. Of a full server nothing more need be known while others take its shares, so it is asked only when
happiness is out of reach without it: for its list, which shows what somebody else has stored, and its room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import NoSpace, ServerError
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.put import reasons
from pipegrid.transfer.put.fullservers import FullServers
from pipegrid.transfer.put.shareset import ShareSet
from pipegrid.wire.messages import ServerVersion

T = TypeVar("T")

ASK_S = 5.0
"""For an answer; the put has failed as it is, and nobody wants to wait long to be told why."""


class Refusals:
    """
    The servers of one upload that refuse, and what they say when they are asked.

    Args:
        shares: those of the file.
        changed: called when all that were asked have answered.
        full: told of those that have no room.

    Attributes:
        contended: whether somebody else stores the same file at this moment, as far as they tell.
        explained: nickname of a server to why it refuses.
    """

    def __init__(
        self,
        clock: IReactorTime,
        shares: ShareSet,
        changed: Callable[[], None],
        full: FullServers,
    ) -> None:
        self.contended = False
        self.explained: dict[str, str] = {}
        self._clock = clock
        self._of_file = shares
        self._changed = changed
        self._known_full = full
        self._shares: dict[Peer, set[int]] = {}
        self._full: set[Peer] = set()
        self._asked: set[Peer] = set()
        self._questions: set[Deferred[Any]] = set()
        self._lists: list[tuple[Peer, frozenset[int]]] = []
        self._bug: Failure | None = None

    def note(self, peer: Peer, share_number: int, error: ServerError | None) -> None:
        """The server did not take this share; ``NoSpace``, if that is why, does not say how much it has."""
        self._shares.setdefault(peer, set()).add(share_number)
        if isinstance(error, NoSpace):
            self._full.add(peer)
            self._explain(peer, str(error))
        else:
            self.explained.setdefault(peer.name, reasons.not_told(peer.name))

    def ask(self) -> bool:
        """Ask those that were not asked before; returns whether any answer is to be waited for."""
        for peer in [peer for peer in self._shares if peer not in self._asked]:
            self._asked.add(peer)
            self._question(peer.server.version(), self._told_version, peer)
            self._question(
                peer.server.list_shares(self._of_file.storage_index), self._told_shares, peer
            )
        return bool(self._questions)

    def take_lists(self) -> list[tuple[Peer, frozenset[int]]]:
        """Return the lists that have come since the last time; raises what no server may raise."""
        if self._bug is not None:
            self._bug.raiseException()
        lists, self._lists = self._lists, []
        return lists

    def cancel(self) -> None:
        """Give up what is unanswered."""
        self._changed = _nothing
        for question in list(self._questions):
            question.cancel()

    def _question(self, question: Deferred[T], told: Callable[[T, Peer], None], peer: Peer) -> None:
        self._questions.add(question)
        question.addTimeout(ASK_S, self._clock)
        question.addCallback(told, peer)
        question.addErrback(self._not_told).addBoth(self._answered, question)

    def _told_version(self, version: ServerVersion, peer: Peer) -> None:
        room = version.available_bytes
        if room is not None and room < self._of_file.share_bytes:
            self._explain(peer, reasons.no_room(peer.name, room, self._of_file.share_bytes))
        elif peer not in self._full:
            self.contended = True

    def _explain(self, peer: Peer, reason: str) -> None:
        self.explained[peer.name] = reason
        self._known_full.refused(peer, self._of_file.share_bytes, reason, self._clock.seconds())

    def _told_shares(self, there: frozenset[int], peer: Peer) -> None:
        self._lists.append((peer, there))
        self.contended = self.contended or bool(there & self._shares[peer])

    def _not_told(self, failure: Failure) -> None:
        if not failure.check(ServerError, CancelledError, TimeoutError):
            self._bug = failure

    def _answered(self, _: object, question: Deferred[Any]) -> None:
        self._questions.discard(question)
        if not self._questions:
            self._changed()


def _nothing() -> None:
    """Stands for ``changed`` once the upload is over: nobody is to be told."""
