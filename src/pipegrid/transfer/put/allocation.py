"""Requests for space on servers, and servers that refuse a share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import NoSpace, QuotaReached, ServerError
from pipegrid.transfer import failure_messages
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.put.client_put_state import ASK_S, FullServers
from pipegrid.transfer.put.file_key import ShareSet
from pipegrid.wire.storage_messages import Allocation, ServerVersion, UploadSecrets

# Allocation requests of one upload; their responses are kept until the upload takes them.
#
# A response can arrive at any moment, so it is only recorded. The writes that follow a request do not
# wait for its response.


class AllocationResponse(NamedTuple):
    """
    The response of one server to one allocation request.

    Attributes:
        numbers: numbers of the shares that were requested.
        sent_before: numbers of the shares that this upload had requested from the same server earlier.
    """

    peer: Peer
    numbers: frozenset[int]
    sent_before: frozenset[int]
    result: Allocation | Failure


class Allocations:
    """
    All allocation requests of one upload.

    Args:
        shares: the shares of the file.
        changed: called when a server fails, already has shares or does not allocate all requested shares;
            when most servers have responded; and when all have.
    """

    def __init__(self, shares: ShareSet, changed: Callable[[], None]) -> None:
        self._shares = shares
        self._changed = changed
        self._asked: dict[Peer, frozenset[int]] = {}
        self._unanswered: set[Deferred[Allocation]] = set()
        self._answers: list[AllocationResponse] = []
        self._answered_count = 0

    @property
    def waiting(self) -> bool:
        """Whether a response is outstanding."""
        return bool(self._unanswered)

    @property
    def has_responses(self) -> bool:
        """Whether there are responses that ``take_responses`` has not returned."""
        return bool(self._answers)

    def ask(self, peer: Peer, share_numbers: frozenset[int], secrets: UploadSecrets) -> None:
        """Request space on a server for these shares; the writes need not wait for the response."""
        question = peer.server.allocate(
            self._shares.storage_index, share_numbers, self._shares.share_bytes, secrets
        )
        self.adopt(peer, share_numbers, question)

    def adopt(
        self, peer: Peer, share_numbers: frozenset[int], question: Deferred[Allocation]
    ) -> None:
        """Track a request that was sent, perhaps by another object."""
        sent_before = self._asked.get(peer, frozenset())
        self._asked[peer] = sent_before | share_numbers
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
        self._answers.append(AllocationResponse(peer, share_numbers, sent_before, result))
        as_hoped = (
            isinstance(result, Allocation)
            and not result.already_have
            and share_numbers <= result.allocated
        )
        # the time until most servers have responded decides how long the put waits for the rest
        most = len(self._asked) // 2 + 1
        if not (as_hoped and self._unanswered) or self._answered_count == most:
            self._changed()

    def take_responses(self) -> list[AllocationResponse]:
        """Return the responses since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def cancel(self) -> None:
        for question in list(self._unanswered):
            question.cancel()


# Servers that refused a share without a reason: they are full, read-only, or busy with another upload of the
# same share.
#
# A server without space leaves a share out of its response to the allocation, and responds to the writes that
# it knows no such upload. A server responds the same if another client's upload of that share ended between
# the allocation and the writes. While other servers take the refused shares, the reason does not matter. So a
# server is asked for the reason only when happiness cannot be reached without it: for its list of shares,
# which includes shares of other clients, and for its space.

T = TypeVar("T")


class Refusals:
    """
    The servers of one upload that refuse shares, and their reasons.

    Args:
        shares: the shares of the file.
        changed: called when all queried servers have responded.
        full: is notified of servers without space.

    Attributes:
        contended: whether the servers' responses suggest that another client is storing the same file.
        explained: maps a server's nickname to the reason why the server refuses shares.
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
        self._over_quota: set[Peer] = (
            set()
        )  # servers that refused by quota; their message says more than the free space
        self._asked: set[Peer] = set()
        self._questions: set[Deferred[Any]] = set()
        self._lists: list[tuple[Peer, frozenset[int]]] = []
        self._bug: Failure | None = None

    def note(self, peer: Peer, share_number: int, error: ServerError | None) -> None:
        """
        Record that a server refused this share. An error of type ``NoSpace`` gives the reason, but not how
        much space is free.
        """
        self._shares.setdefault(peer, set()).add(share_number)
        if isinstance(error, NoSpace):
            self._full.add(peer)
            if isinstance(error, QuotaReached):
                self._over_quota.add(peer)
            self._explain(peer, str(error))
        else:
            self.explained.setdefault(peer.name, failure_messages.not_reported(peer.name))

    def ask(self) -> bool:
        """Ask the refusing servers that were not asked yet; return whether a response is outstanding."""
        for peer in [peer for peer in self._shares if peer not in self._asked]:
            self._asked.add(peer)
            self._question(peer.server.version(), self._received_version, peer)
            self._question(self._leased_list(peer), self._received_shares, peer)
        return bool(self._questions)

    def _leased_list(self, peer: Peer) -> Deferred[frozenset[int]]:
        """
        Add a lease to a server's shares of the file, then return the list of these shares: without this
        client's lease, a share could vanish when the client that stored it releases its own lease. If the
        server has no space for the lease, return an empty list.
        """
        server, index = peer.server, self._of_file.storage_index

        def listed(error: type[Exception] | None) -> frozenset[int] | Deferred[frozenset[int]]:
            return frozenset() if error is NoSpace else server.list_shares(index)

        leasing: Deferred[Any] = server.add_lease(index, self._of_file.secrets_for(peer).lease)
        leasing.addErrback(lambda failure: failure.trap(NoSpace, ServerError))
        return leasing.addCallback(listed)

    def take_lists(self) -> list[tuple[Peer, frozenset[int]]]:
        """Return the lists of shares since the last call; raise any exception that is no server error."""
        if self._bug is not None:
            self._bug.raiseException()
        lists, self._lists = self._lists, []
        return lists

    def cancel(self) -> None:
        self._changed = lambda: None
        for question in list(self._questions):
            question.cancel()

    def _question(
        self, question: Deferred[T], received: Callable[[T, Peer], None], peer: Peer
    ) -> None:
        self._questions.add(question)
        question.addTimeout(ASK_S, self._clock)
        question.addCallback(received, peer)
        question.addErrback(self._failed).addBoth(self._answered, question)

    def _received_version(self, version: ServerVersion, peer: Peer) -> None:
        room = version.available_bytes
        if peer in self._over_quota:
            return
        if room is not None and room < self._of_file.share_bytes:
            self._explain(
                peer, failure_messages.servers_full(peer.name, room, self._of_file.share_bytes)
            )
        elif peer not in self._full:
            self.contended = True

    def _explain(self, peer: Peer, reason: str) -> None:
        self.explained[peer.name] = reason
        self._known_full.refused(peer, self._of_file.share_bytes, reason, self._clock.seconds())

    def _received_shares(self, there: frozenset[int], peer: Peer) -> None:
        self._lists.append((peer, there))
        self.contended = self.contended or bool(there & self._shares[peer])

    def _failed(self, failure: Failure) -> None:
        if not failure.check(ServerError, CancelledError, TimeoutError):
            self._bug = failure

    def _answered(self, _: object, question: Deferred[Any]) -> None:
        self._questions.discard(question)
        if not self._questions:
            self._changed()
