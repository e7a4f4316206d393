"""
Surveys: questions about many files in one request, each answered as its own requests would be (see
``wire.gbs_surveys``).

One question's refusal is its own. Nothing waits for the disk: leases are renewed in the page cache, as those
of single requests are. A slot that is being changed is waited for, and with it the answer.
"""

from __future__ import annotations

from typing import Protocol

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.core.hashes import Buffer
from pipegrid.errors import NoSuchShare, PipegridError
from pipegrid.server.gbs import answers
from pipegrid.server.gbs.answers import Answer
from pipegrid.server.gbs.requests import Operation
from pipegrid.server.slotqueue import SlotQueue
from pipegrid.storage.paths import MAX_SHARE_NUMBER
from pipegrid.storage.store import ShareStore
from pipegrid.wire import gbs_surveys
from pipegrid.wire.gbs_surveys import LEASE_NOT_ASKED, Question, Sample, SurveyAnswer
from pipegrid.wire.messages import LeaseSecrets


class SurveyService(Protocol):
    """What surveys ask of the service."""

    store: ShareStore
    slots: SlotQueue
    sent_bytes: int

    def answer_error(self, operation: Operation, error: Exception) -> Answer:
        """Return the answer for an error."""


def answer_survey(service: SurveyService, body: Buffer) -> Answer | Deferred[Answer]:
    """Carry a survey out; the answer waits for nothing but slots that are being changed."""
    try:
        questions = gbs_surveys.unpack_survey(body)
    except ValueError as error:
        return answers.text(400, str(error))
    results: list[SurveyAnswer | int] = []
    waiting: list[Deferred[None]] = []
    for number, question in enumerate(questions):
        results.append(_look(service, question))
        if question.lease is not None:
            leased = _renew(service, question.storage_index, question.lease)
            if leased.called and isinstance(leased.result, int):
                _note_lease(leased.result, results, number)
            else:
                waiting.append(leased.addCallback(_note_lease, results, number))
    if not waiting:
        return answers.cbor(gbs_surveys.pack_answers(results))
    return DeferredList(waiting).addCallback(
        lambda _: answers.cbor(gbs_surveys.pack_answers(results))
    )


def _look(service: SurveyService, question: Question) -> SurveyAnswer | int:
    try:
        numbers = service.store.list_shares(question.storage_index)
    except Exception as error:
        return service.answer_error(Operation.LIST, error).status
    samples = tuple(_sample(service, question.storage_index, one) for one in question.samples)
    return SurveyAnswer(numbers, LEASE_NOT_ASKED, samples)


def _sample(service: SurveyService, storage_index: bytes, sample: Sample) -> bytes | int:
    try:
        if sample.share_number > MAX_SHARE_NUMBER:
            raise NoSuchShare(f"there is no share {sample.share_number}, nor can there be one")
        reader = service.store.open_share(storage_index, sample.share_number)
        try:
            wanted = min(sample.length, max(0, reader.share_bytes - sample.offset))
            data = reader.read(sample.offset, wanted) if wanted else b""
        finally:
            reader.close()
        if len(data) < wanted:
            raise PipegridError(f"{reader!r} ends before its end; look after the disk")
    except Exception as error:
        return service.answer_error(Operation.READ, error).status
    service.sent_bytes += len(data)
    return data


def _renew(service: SurveyService, storage_index: bytes, lease: LeaseSecrets) -> Deferred[int]:
    def failed(failure: Failure) -> int:
        error = failure.value
        assert isinstance(error, Exception)
        return service.answer_error(Operation.LEASE, error).status

    added = service.slots.read(storage_index, service.store.add_lease, storage_index, lease)
    return added.addCallbacks(lambda _: answers.LEASE_ADDED.status, failed)


def _note_lease(status: int, results: list[SurveyAnswer | int], number: int) -> None:
    found = results[number]
    if isinstance(found, SurveyAnswer):
        results[number] = SurveyAnswer(found.numbers, status, found.samples)
