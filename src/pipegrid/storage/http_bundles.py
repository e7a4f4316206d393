"""
Bundles: many small uploads in one request, each carried out as its own requests would be (see
``wire.gbs_bundles``).

One upload's refusal is its own: the others go on. The answer waits until every share that came is durable,
so that a bundle is one group for the disk, as many requests in a row are.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.storage import http_answers as answers
from pipegrid.storage.http_answers import Answer
from pipegrid.storage.http_bodies import Call
from pipegrid.storage.http_requests import Operation, Rule
from pipegrid.storage.paths import MAX_SHARE_NUMBER, Key
from pipegrid.storage.uploads import Upload
from pipegrid.wire import gbs_bundles
from pipegrid.wire.gbs_bundles import BundledAnswer, BundledUpload
from pipegrid.wire.messages import Allocation

if TYPE_CHECKING:
    from pipegrid.storage.http_service import GbsService

_STORED = answers.SHARE_COMPLETE.status


class Bundle(Call):
    """Receives a bundle, and carries it out."""

    waits = True

    def __init__(self, service: GbsService, rule: Rule) -> None:
        super().__init__(service, rule, (), self._carry_out)
        self._uploads: list[BundledUpload] | None = None
        self._answers: list[BundledAnswer] = []
        self._done: Deferred[Answer] = Deferred()
        self._committing = 1  # this bundle itself, until all of it has been begun

    def may_finish(self, committing: Container[bytes]) -> bool:
        """
        Return whether it may be carried out now; its body is complete.

        Args:
            committing: storage indexes of which a share is becoming durable on this connection. A bundle that
                names one of them waits, as an allocation does, or it would not see that share.
        """
        uploads = self._unpacked()
        shares = sum(len(each.shares) for each in uploads)
        return self.service.has_room_for(shares) and not any(
            each.storage_index in committing for each in uploads
        )

    def _unpacked(self) -> list[BundledUpload]:
        if self._uploads is None:
            self._uploads = []
            if self.refusal is None:
                try:
                    self._uploads = gbs_bundles.unpack_bundle(self.body)
                    self.body.clear()  # it is in memory once
                except ValueError as error:
                    self.refuse(answers.text(400, str(error)))
        return self._uploads

    def _carry_out(self, _: bytes) -> Deferred[Answer]:
        shares: list[Key] = []
        for upload in self._unpacked():
            allocation = self._allocate(upload)
            statuses: dict[int, int] = {}
            self._answers.append(BundledAnswer(allocation, statuses))
            if isinstance(allocation, Allocation):
                for number, data in upload.shares.items():
                    if self._write(upload, number, data, statuses):
                        shares.append((upload.storage_index, number))
        self.shares = shares
        self._uploads = []
        self._one_done()
        return self._done

    def _allocate(self, wanted: BundledUpload) -> Allocation | int:
        try:
            return self.service.allocate(
                wanted.storage_index, wanted.share_numbers, wanted.share_bytes, wanted.secrets
            )
        except Exception as error:
            return self.service.answer_error(Operation.ALLOCATE, error).status

    def _write(
        self, wanted: BundledUpload, number: int, data: bytes, statuses: dict[int, int]
    ) -> bool:
        """Write one whole share; returns whether it has to become durable now."""
        service = self.service
        try:
            if number > MAX_SHARE_NUMBER:
                statuses[number] = answers.NOT_FOUND.status
                return False
            upload = service.store.upload(wanted.storage_index, number, wanted.secrets.upload)
            if len(data) > upload.share_bytes:
                statuses[number] = answers.BAD_CONTENT_RANGE.status
                return False
            try:
                upload.write(0, [data])
            finally:
                service.received(upload, len(data))
            if not upload.complete:  # more was allocated before, under the same secret
                upload.checkpoint()
                statuses[number] = answers.OK.status
                return False
            self._commit(upload, number, statuses)
        except Exception as error:
            statuses[number] = service.answer_error(Operation.WRITE, error).status
            return False
        return True

    def _commit(self, upload: Upload, number: int, statuses: dict[int, int]) -> None:
        self._committing += 1
        self.service.commit(upload).addCallbacks(
            self._stored, self._share_failed, (number, statuses), {}, (number, statuses)
        )

    def _stored(self, _: None, number: int, statuses: dict[int, int]) -> None:
        statuses[number] = _STORED
        self._one_done()

    def _share_failed(self, failure: Failure, number: int, statuses: dict[int, int]) -> None:
        error = failure.value
        assert isinstance(error, Exception)
        statuses[number] = self.service.answer_error(Operation.WRITE, error).status
        self._one_done()

    def _one_done(self) -> None:
        self._committing -= 1
        if not self._committing:
            self._done.callback(answers.cbor(gbs_bundles.pack_answers(self._answers)))
