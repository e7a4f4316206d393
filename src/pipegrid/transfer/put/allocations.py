"""
Asking servers for room, and keeping what they answer until the upload looks at it.

The answer comes in the middle of anything, so it is only noted; the writes that follow the question
do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.transfer.peers import Peer
from pipegrid.transfer.put.shareset import ShareSet
from pipegrid.wire.messages import Allocation, UploadSecrets


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
