"""
``store_whole`` by way of ``allocate`` and ``write``, for servers that know nothing better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.errors import ServerError
from pipegrid.flow.depth import Appetite
from pipegrid.wire.messages import (
    Allocation,
    Numbers,
    Pieces,
    Shares,
    Stored,
    UploadSecrets,
    WriteAnswer,
)

Allocate = Callable[[bytes, Numbers, int, UploadSecrets], Deferred[Allocation]]
WriteShare = Callable[[bytes, int, int, Pieces, bytes], Deferred[WriteAnswer]]


class StoresApart(ABC):
    """Half of a storage server: what it does not do together."""

    @property
    def whole_bytes(self) -> int:
        """Nothing is gained by it here."""
        return 0

    @property
    def appetite(self) -> Appetite:
        """Each share is a request of its own, or more."""
        return Appetite.COUNTED

    def expect(self, objects: int) -> None:  # noqa: B027  not all have something to prepare
        """Nothing is prepared for them."""

    @abstractmethod
    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        """Ask for room; see the contract."""

    @abstractmethod
    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
    ) -> Deferred[WriteAnswer]:
        """Write to an unfinished share; see the contract."""

    def store_whole(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored]:
        """Store whole shares; see the contract."""
        return store_apart(self.allocate, self.write, storage_index, shares, share_bytes, secrets)


def store_apart(
    allocate: Allocate,
    write: WriteShare,
    storage_index: bytes,
    shares: Shares,
    share_bytes: int,
    secrets: UploadSecrets,
) -> Deferred[Stored]:
    """Make the calls at once, one behind the other; fires when all have ended. See the contract."""
    calls: list[Deferred[Any]] = [allocate(storage_index, shares.keys(), share_bytes, secrets)]
    for number, data in shares.items():
        calls.append(write(storage_index, number, 0, [data], secrets.upload))
    ended: Deferred[Any] = DeferredList(calls, consumeErrors=True)
    return ended.addCallback(_put_together, tuple(shares))


def _put_together(outcomes: Sequence[tuple[bool, Any]], numbers: Sequence[int]) -> Stored:
    (_, allocation), *written = outcomes
    if isinstance(allocation, Failure):
        allocation.raiseException()
    there = allocation.already_have
    by_number = zip(numbers, written, strict=True)
    return Stored(allocation, why_failed(each for each in by_number if each[0] not in there))


def why_failed(written: Iterable[tuple[int, tuple[bool, Any]]]) -> dict[int, ServerError]:
    """
    Return the errors of the writes that failed, by the share.

    Args:
        written: each share's number, and what came of its write as a ``DeferredList`` has it.
    """
    failed: dict[int, ServerError] = {}
    for number, (_, outcome) in written:
        if isinstance(outcome, Failure):
            if not isinstance(outcome.value, ServerError):
                outcome.raiseException()
            failed[number] = outcome.value
    return failed
