"""
Carries out bundles: many small uploads or reads in one request, each with the same result as in a request of
its own (``wire.gbs_bundles``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from typing import Any, Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.core.hashes import Buffer
from pipegrid.disk.group_commit import Ending
from pipegrid.server.connection_turns import FairTurns
from pipegrid.server.gbs import responses
from pipegrid.server.gbs.body_receivers import (
    InSteps,
    ReadService,
    Service,
    is_over_quota,
    read_part,
    reason_of,
)
from pipegrid.server.gbs.request_check import Operation, Rule
from pipegrid.server.gbs.responses import Answer
from pipegrid.storage.share_store import ShareStore
from pipegrid.storage.storage_paths import MAX_SHARE_NUMBER, possible_numbers
from pipegrid.storage.uploads.eviction import NOBODY, Client
from pipegrid.storage.uploads.incoming_share import IncomingShare
from pipegrid.wire import gbs_bundles
from pipegrid.wire.gbs_bundles import BundledAnswer, BundledUpload
from pipegrid.wire.storage_messages import Allocation

_STORED = responses.SHARE_COMPLETE.status
_NONE: frozenset[int] = frozenset()
_JUST = {number: frozenset({number}) for number in range(MAX_SHARE_NUMBER + 1)}


class BundleService(Service, Protocol):
    """The part of the GBS service that bundles use in addition to ``Service``."""

    store: ShareStore

    @property
    def takes_whole(self) -> bool:
        """
        Whether a share that arrives as a whole is written to an unnamed file, and named when it is durable.
        """

    def reserve(self, shares: int) -> None:
        """Count shares before they begin to wait to become durable; a negative number releases that many."""

    def has_space_for(self, shares: int) -> bool:
        """Return whether this number of further shares may wait to become durable."""

    def commit_each(
        self, uploads: Sequence[IncomingShare], ended: Callable[[IncomingShare, Ending], None]
    ) -> None:
        """
        Make shares durable and visible; ``ended`` is called for each, perhaps before this method returns.
        """


class Bundle(InSteps):
    """
    Receives a bundle, and carries it out.

    ``owner`` is the number of the named client that sends the bundle, or 0.

    If one upload is rejected, the others continue. The answer waits until every received share is durable, so
    the shares of a bundle become durable as one group, like those of many consecutive requests.
    """

    def __init__(
        self, service: BundleService, rule: Rule, client: Client = NOBODY, owner: int = 0
    ) -> None:
        super().__init__(service, rule, (), self._carry_out, self._commit)
        self._service = service
        self._client = client
        self._owner = owner
        self._uploads: list[BundledUpload] = []
        self._unpacking: Iterator[None] | None = None
        self._answers: list[BundledAnswer] = []
        self._done: Deferred[Answer] = Deferred()
        self._committing: dict[IncomingShare, dict[int, int]] = {}  # where its status will be noted
        self._reserved = 0
        self._takes_whole = False  # determined in ``_carry_out``

    def may_begin(self, committing: Container[bytes]) -> bool:
        """
        Return whether the bundle, whose body is complete, may be carried out now; True if it is being carried
        out.

        Args:
            committing: storage indexes of shares of this connection that are becoming durable. A bundle that
                names one of them waits, like an allocation; otherwise it would not see that share.
        """
        if self._steps is not None:
            return True
        uploads = self._uploads
        shares = sum(len(each.shares) for each in uploads)
        return self._service.has_space_for(shares) and not any(
            each.storage_index in committing for each in uploads
        )

    def unpack(self, turns: FairTurns[Any]) -> bool:
        """Parse the complete body in steps; returns whether parsing is finished and the turn is not over."""
        if self._unpacking is None:
            self._unpacking = iter(())
            if self.refusal is None:
                self._unpacking = gbs_bundles.unpack_bundle_in_steps(self.body, self._uploads)
        try:
            for _ in self._unpacking:
                if turns.over:
                    return False
        except ValueError as error:
            self._uploads = []
            self.refuse(responses.text(400, str(error)))
        if not self.body:
            return True
        self.body.clear()  # its parsed form replaces it
        return not turns.over

    def abandon(self) -> None:
        """
        Stop, since the client is gone. Shares whose writing has begun are stored; the rest of the bundle is
        dropped.
        """
        super().abandon()
        if self._steps is not None:
            self._uploads = []
            self._service.commit_each(list(self._committing), self._ended_one)
            self._release_reserved()

    def _carry_out(self, _: Buffer) -> Iterator[None]:
        uploads = self._uploads
        self._reserved = sum(len(each.shares) for each in uploads)
        self._service.reserve(self._reserved)
        self._takes_whole = self._service.takes_whole
        for each in uploads:
            wanted = _owned(each, self._owner) if self._owner else each
            statuses: dict[int, int] = {}
            taken = yield from self._take_whole(wanted, statuses)
            allocation = yield from self._allocate(wanted, taken)
            self._answers.append(BundledAnswer(allocation, statuses))
            if isinstance(allocation, int) or len(taken) == len(wanted.shares):
                if not taken:
                    yield
                continue
            for number, data in wanted.shares.items():
                if number not in taken:
                    upload = self._write(wanted, number, data, statuses)
                    if upload is not None:
                        self._committing[upload] = statuses
                    yield

    def _commit(self, _: Buffer) -> Deferred[Answer]:
        complete = list(self._committing)
        self._uploads = []
        self.shares = [(upload.storage_index, upload.share_number) for upload in complete]
        self._service.commit_each(complete, self._ended_one)
        self._release_reserved()
        if not complete:
            self._answer()
        return self._done

    def _release_reserved(self) -> None:
        reserved, self._reserved = self._reserved, 0
        self._service.reserve(-reserved)

    def _take_whole(
        self, wanted: BundledUpload, statuses: dict[int, int]
    ) -> Generator[None, None, frozenset[int]]:
        """
        If possible, as for most bundles, store each share with one call; returns the numbers of the stored
        shares.
        """
        taken = _NONE
        if not (self._takes_whole and _is_whole(wanted)):
            return taken
        for number, data in wanted.shares.items():
            try:
                share = self._service.store.take_whole(
                    wanted.storage_index, number, data, wanted.secrets
                )
            except Exception as error:
                self.service.answer_error(Operation.ALLOCATE, error)  # logs an error of the server
                return taken  # ``_allocate`` reports the reason
            if share is None:
                return taken
            self._service.received(share, len(data))
            self._committing[share] = statuses
            taken = taken | _JUST[number] if taken else _JUST[number]
            yield
        return taken

    def _allocate(
        self, wanted: BundledUpload, taken: frozenset[int]
    ) -> Generator[None, None, Allocation | int]:
        """
        Allocate the shares that are not in ``taken``; those in ``taken`` are already stored and count as
        allocated even if this fails.
        """
        if taken and len(taken) == len(wanted.share_numbers):
            return Allocation(_NONE, taken)
        try:
            allocation = yield from self._service.store.allocate_in_steps(
                wanted.storage_index,
                possible_numbers(wanted.share_numbers - taken),
                wanted.share_bytes,
                wanted.secrets,
                self._client,
            )
        except Exception as error:
            status = self.service.answer_error(Operation.ALLOCATE, error).status
            return Allocation(_NONE, taken) if taken else status
        allocation = Allocation(allocation.already_have, allocation.allocated | taken)
        store, numbers = self._service.store, wanted.share_numbers
        if is_over_quota(store, numbers, wanted.share_bytes, allocation, self._owner):
            return responses.QUOTA_REACHED.status
        return allocation

    def _write(
        self, wanted: BundledUpload, number: int, data: bytes, statuses: dict[int, int]
    ) -> IncomingShare | None:
        """Write a share; returns its upload if it is complete and must become durable."""
        service = self._service
        try:
            if number > MAX_SHARE_NUMBER:
                statuses[number] = responses.NOT_FOUND.status
                return None
            upload = service.store.upload(wanted.storage_index, number, wanted.secrets.upload)
            if len(data) > upload.share_bytes:
                statuses[number] = responses.BAD_CONTENT_RANGE.status
                return None
            try:
                upload.write(0, [data])
            finally:
                service.received(upload, len(data))
            if upload.complete:
                return upload
            upload.checkpoint()  # it was allocated earlier with this secret, and is longer
            statuses[number] = responses.OK.status
        except Exception as error:
            statuses[number] = service.answer_error(Operation.WRITE, error).status
        return None

    def _ended_one(self, upload: IncomingShare, outcome: Ending) -> None:
        statuses = self._committing.pop(upload)
        if outcome is None:
            status = _STORED
        else:
            error = reason_of(outcome) if isinstance(outcome, Failure) else outcome
            status = self.service.answer_error(Operation.WRITE, error).status
        statuses[upload.share_number] = status
        if not self._committing:
            self._answer()

    def _answer(self) -> None:
        self._done.callback(responses.cbor(gbs_bundles.pack_answers(self._answers)))


def _owned(upload: BundledUpload, owner: int) -> BundledUpload:
    """Return an upload in which the lease belongs to a named client."""
    secrets = upload.secrets._replace(lease=upload.secrets.lease._replace(owner=owner))
    return attrs.evolve(upload, secrets=secrets)


def _is_whole(wanted: BundledUpload) -> bool:
    """Return whether an upload has all requested shares, each with the right length."""
    shares = wanted.shares
    return (
        len(shares) == len(wanted.share_numbers)
        and wanted.share_bytes > 0
        and all(number in _JUST and len(shares[number]) == wanted.share_bytes for number in shares)
    )


# Reads.

_ITEM_BYTES = 64
"""The memory of one item of an answer, in addition to its data."""


class ReadBundle(InSteps):
    """
    Receives a bundle of reads, and reads one share in each step.

    If one read is rejected, the others are answered.
    """

    def __init__(self, service: ReadService, rule: Rule) -> None:
        super().__init__(service, rule, (), self._read_in_steps, self._say)
        self._service = service
        self._results: list[bytes | int] = []

    def _read_in_steps(self, body: Buffer) -> Iterator[None]:
        try:
            reads = gbs_bundles.unpack_reads(body)
        except ValueError as error:
            self.refuse(responses.text(400, str(error)))
            return
        # Count the memory before anything is read: the shares that many clients ask for must not be in memory
        # at the same time.
        if not self.charge(sum(_ITEM_BYTES + each.length for each in reads)):
            self.refuse(responses.BUSY)
            return
        for read in reads:
            yield
            self._results.append(
                read_part(self._service, read.storage_index, read.share_number, 0, read.length)
            )

    def _say(self, _: Buffer) -> Answer:
        return responses.cbor(gbs_bundles.pack_read_answers(self._results))
