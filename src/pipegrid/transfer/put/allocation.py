"""Allocation of shares on servers, their refusals, and servers that are full."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.core.placement import servers_of_happiness
from pipegrid.errors import NoSpace, ServerError
from pipegrid.reactor.deferreds import gather
from pipegrid.transfer import failure_messages
from pipegrid.transfer.failure_messages import PlacementOutcome, not_spread
from pipegrid.transfer.peers import CallTimeout, Peer, TransferContext
from pipegrid.transfer.put.file_key import KeyedFile, ShareSet
from pipegrid.wire.messages import Allocation, ServerVersion, UploadSecrets

# Asking servers for room, and keeping what they answer until the upload looks at it.
#
# The answer comes in the middle of anything, so it is only noted; the writes that follow the question
# do not wait for it.


@attrs.frozen
class RoomAnswer:
    """
    What one server said to one question for room.

    Attributes:
        numbers: the shares that it was asked for.
        sent_before: those that this upload had begun to send to the same server before.
    """

    peer: Peer
    numbers: frozenset[int]
    sent_before: frozenset[int]
    result: Allocation | Failure


class Allocations:
    """
    All questions for room of one upload.

    Args:
        shares: those of the file.
        changed: called when an answer has come that is not as hoped, when most have come, and when all have.
    """

    def __init__(self, shares: ShareSet, changed: Callable[[], None]) -> None:
        self._shares = shares
        self._changed = changed
        self._asked: dict[Peer, frozenset[int]] = {}
        self._unanswered: set[Deferred[Allocation]] = set()
        self._answers: list[RoomAnswer] = []
        self._answered_count = 0

    @property
    def waiting(self) -> bool:
        """Whether some server has not answered yet."""
        return bool(self._unanswered)

    @property
    def has_news(self) -> bool:
        """Whether answers have come that nobody has looked at."""
        return bool(self._answers)

    def ask(self, peer: Peer, share_numbers: frozenset[int], secrets: UploadSecrets) -> None:
        """Ask a server for room for these shares; writes may follow at once."""
        sent_before = self._asked.get(peer, frozenset())
        self._asked[peer] = sent_before | share_numbers
        question = peer.server.allocate(
            self._shares.storage_index, share_numbers, self._shares.share_bytes, secrets
        )
        self._know(question, peer, share_numbers, sent_before)

    def adopt(
        self, peer: Peer, share_numbers: frozenset[int], question: Deferred[Allocation]
    ) -> None:
        """Know a question that somebody else has asked."""
        self._asked[peer] = self._asked.get(peer, frozenset()) | share_numbers
        self._know(question, peer, share_numbers, frozenset())

    def _know(
        self,
        question: Deferred[Allocation],
        peer: Peer,
        share_numbers: frozenset[int],
        sent_before: frozenset[int],
    ) -> None:
        self._unanswered.add(question)
        question.addBoth(self._answered, question, peer, share_numbers, sent_before)

    def _answered(
        self,
        result: Allocation | Failure,
        question: Deferred[Allocation],
        peer: Peer,
        share_numbers: frozenset[int],
        sent_before: frozenset[int],
    ) -> None:
        self._unanswered.discard(question)
        self._answered_count += 1
        self._answers.append(RoomAnswer(peer, share_numbers, sent_before, result))
        as_hoped = (
            isinstance(result, Allocation)
            and not result.already_have
            and share_numbers <= result.allocated
        )
        most = len(self._asked) // 2 + 1  # how long they took says how long others are waited for
        if not (as_hoped and self._unanswered) or self._answered_count == most:
            self._changed()

    def take_answers(self) -> list[RoomAnswer]:
        """Return the answers that have come since the last time."""
        answers, self._answers = self._answers, []
        return answers

    def cancel(self) -> None:
        """Give up what is unanswered."""
        for question in list(self._unanswered):
            question.cancel()


# Servers that are full, as the puts of a client have found, and what follows for the next ones.
#
# A server that has no room says so only when it is given shares, and asked why it did not take them;
# where too few others are left each put learns that anew, which costs it its bytes and three questions to
# each server. So it is remembered, for ``FULL_S`` and for shares that are as large or larger: room may
# come back with the end of a lease, and what is too large for a server says nothing of what is smaller.
# After that time one put finds out how things are, and the others wait for its outcome no more than
# before: they go by what was known.
#
# A put that cannot come to its happiness without full servers asks them for their lists only, since what is
# there already counts, and is refused when these do not help.

FULL_S = 5.0
"""A put in vain every so often costs nobody much, and room that has come back is found soon."""

ASK_S = 5.0
"""As ``refusals.ASK_S``; a server that takes longer is given shares, as if nothing were known."""


@attrs.define
class _Full:
    """A server that does not take shares of so many bytes, until then by the clock; and its reason."""

    share_bytes: int
    until_s: float
    reason: str


class FullServers:
    """What all puts of a client have found; times are seconds of one clock."""

    def __init__(self) -> None:
        self._full: dict[Peer, _Full] = {}

    def __repr__(self) -> str:
        return f"<FullServers: {len(self._full)}>"

    def refused(self, peer: Peer, share_bytes: int, reason: str, now_s: float) -> None:
        """The server has no room for a share of this size, and that is its sentence."""
        before = self._full.get(peer)
        if before is not None:
            share_bytes = min(share_bytes, before.share_bytes)
        self._full[peer] = _Full(share_bytes, now_s + FULL_S, reason)

    def took(self, names: Iterable[str]) -> None:
        """The servers of these names have taken shares."""
        if self._full:
            taken = set(names)
            self._full = {peer: each for peer, each in self._full.items() if peer.name not in taken}

    def among(self, peers: Iterable[Peer], share_bytes: int, now_s: float) -> dict[Peer, str]:
        """
        Return those of these servers that will not take a share of this size, with their reasons.

        Of those that have not been tried for ``FULL_S`` none is returned: whoever asks tries them.
        """
        if not self._full:
            return {}
        found = {}
        for peer in peers:
            each = self._full.get(peer)
            if each is None or share_bytes < each.share_bytes:
                continue
            if now_s < each.until_s:
                found[peer] = each.reason
            else:
                each.until_s = now_s + FULL_S
        return found

    async def check(self, means: TransferContext, file: KeyedFile) -> None:
        """
        Refuse a file that full servers leave no way to be stored.

        Raises:
            UnhappyError: that is so.
        """
        if not self._full:
            return
        takers = means.takers
        full = self.among(takers, file.shares.share_bytes, means.clock.seconds())
        others = len(takers) - len(full)
        if not full or others >= file.happy:
            return
        homes = await _homes(means.clock, full, file.shares.storage_index)
        if homes is None:
            return
        reached = servers_of_happiness(homes)
        if reached + others < file.happy:
            outcome = PlacementOutcome(
                reached=reached,
                happy=file.happy,
                stored=len(homes),
                required_shares=file.geometry.required_shares,
                full={peer.name: reason for peer, reason in full.items()},
            )
            raise not_spread(file.name, outcome)


async def _homes(
    clock: IReactorTime, servers: Collection[Peer], storage_index: bytes
) -> dict[int, set[Peer]] | None:
    """Return the shares that these servers list, with who has each; None if one does not answer."""

    async def ask(peer: Peer) -> frozenset[int] | None:
        try:
            return await CallTimeout(clock, ASK_S).answer(
                peer.server.list_shares(storage_index), peer
            )
        except ServerError:
            return None

    answers = await gather([Deferred.fromCoroutine(ask(peer)) for peer in servers])
    homes: dict[int, set[Peer]] = {}
    for peer, there in zip(servers, answers, strict=True):
        if there is None:
            return None
        for number in there:
            homes.setdefault(number, set()).add(peer)
    return homes


# Servers that did not take a share and did not say why: full, read-only, or in the middle of the same upload.
#
# A storage server that has no room leaves a share out of its answer to the allocation, and says of the writes
# that it knows no such upload. It says the same when somebody else's upload of that share ended between the
# two. Of a full server nothing more need be known while others take its shares, so it is asked only when
# happiness is out of reach without it: for its list, which shows what somebody else has stored, and its room.

T = TypeVar("T")


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
            self.explained.setdefault(peer.name, failure_messages.not_told(peer.name))

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
            self._explain(
                peer, failure_messages.no_room(peer.name, room, self._of_file.share_bytes)
            )
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
