"""
Answers surveys, which are questions about many files in one request, each with the same result as in a
request of its own (``wire.gbs_surveys_releases``); and carries out releases of many leases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.core.hashes import Buffer
from pipegrid.server.gbs import responses
from pipegrid.server.gbs.body_receivers import InSteps, ReadService, read_part, reason_of
from pipegrid.server.gbs.read_test_write_requests import SlotQueue
from pipegrid.server.gbs.request_check import Operation, Rule
from pipegrid.server.gbs.responses import Answer
from pipegrid.wire import gbs_surveys_releases
from pipegrid.wire.gbs_surveys_releases import LEASE_NOT_ASKED, Question, SurveyAnswer
from pipegrid.wire.storage_messages import (
    LeaseRelease,
    LeaseSecrets,
    ReleaseAnswers,
    Released,
)

_NUMBER_BYTES = 64
"""The memory in bytes of one share number in an answer, and of an answer without numbers and samples."""


class SurveyService(ReadService, Protocol):
    """The part of the GBS service that surveys use in addition to ``ReadService``."""

    slots: SlotQueue


class Survey(InSteps):
    """
    Receives a survey, and answers one question in each step.

    If one question is rejected, the others are answered. Leases are renewed in the page cache, without
    waiting for the disk. If a renewal must wait for a slot that is being changed, so must the answer.
    """

    def __init__(self, service: SurveyService, rule: Rule, owner: int = 0) -> None:
        super().__init__(service, rule, (), self._look_in_steps, self._say)
        self._service = service
        self._owner = owner  # of the leases: a named client's number, or 0
        self._results: list[SurveyAnswer | int] = []
        self._waiting: list[Deferred[None]] = []

    def _look_in_steps(self, body: Buffer) -> Iterator[None]:
        try:
            questions = gbs_surveys_releases.unpack_survey(body)
        except ValueError as error:
            self.refuse(responses.text(400, str(error)))
            return
        service, results = self._service, self._results
        for number, question in enumerate(questions):
            yield
            found = _look(service, question)
            if not self.charge(_held_bytes(found)):  # held until the answer waits for no slot
                self.refuse(responses.BUSY)
                return
            results.append(found)
            if question.lease is not None:
                lease = question.lease
                if self._owner:
                    lease = lease._replace(owner=self._owner)
                leased = _renew(service, question.storage_index, lease)
                if leased.called and isinstance(leased.result, int):
                    _note_lease(leased.result, results, number)
                else:
                    self._waiting.append(leased.addCallback(_note_lease, results, number))

    def _say(self, _: Buffer) -> Answer | Deferred[Answer]:
        if not self._waiting:
            return self._packed()
        return DeferredList(self._waiting).addCallback(lambda _: self._packed())

    def _packed(self) -> Answer:
        return responses.cbor(gbs_surveys_releases.pack_survey_answers(self._results))


def _look(service: SurveyService, question: Question) -> SurveyAnswer | int:
    try:
        numbers = service.store.list_shares(question.storage_index)
    except Exception as error:
        return service.answer_error(Operation.LIST, error).status
    samples = tuple(
        read_part(service, question.storage_index, one.share_number, one.offset, one.length)
        for one in question.samples
    )
    return SurveyAnswer(numbers, LEASE_NOT_ASKED, samples)


def _held_bytes(found: SurveyAnswer | int) -> int:
    """Return an estimate of the memory that an answer takes until it is sent, in bytes."""
    if isinstance(found, int):
        return _NUMBER_BYTES
    samples = sum(len(each) for each in found.samples if isinstance(each, bytes))
    return samples + _NUMBER_BYTES * (1 + len(found.numbers))


def _renew(service: SurveyService, storage_index: bytes, lease: LeaseSecrets) -> Deferred[int]:
    def failed(failure: Failure) -> int:
        return service.answer_error(Operation.LEASE, reason_of(failure)).status

    added = service.slots.read(storage_index, service.store.add_lease, storage_index, lease)
    return added.addCallbacks(lambda _: responses.LEASE_ADDED.status, failed)


def _note_lease(status: int, results: list[SurveyAnswer | int], number: int) -> None:
    found = results[number]
    if isinstance(found, SurveyAnswer):
        results[number] = SurveyAnswer(found.numbers, status, found.samples)


# A release request releases many leases of one client (``wire.gbs_surveys_releases``).


class LeaseReleasesCall(InSteps):
    """
    Receives a request to release many leases, and releases one in each step.

    If one release fails, the others are carried out. The answer waits for slots that are being changed.
    """

    def __init__(self, service: SurveyService, rule: Rule) -> None:
        super().__init__(service, rule, (), self._release_in_steps, self._say)
        self._service = service
        self._results: list[Deferred[Released | int]] = []

    def _release_in_steps(self, body: Buffer) -> Iterator[None]:
        try:
            request = gbs_surveys_releases.unpack_releases(body)
        except ValueError as error:
            self.refuse(responses.text(400, str(error)))
            return
        for one in request.releases:
            yield
            self._results.append(self._release_one(one, request.since))

    def _release_one(self, one: LeaseRelease, since: int) -> Deferred[Released | int]:
        def failed(failure: Failure) -> int:
            return self._service.answer_error(Operation.RELEASE_LEASES, reason_of(failure)).status

        index, release = one.storage_index, self._service.store.release_lease
        done = self._service.slots.read(index, release, index, one.cancel_secret, since)
        return done.addCallbacks(lambda released: released, failed)

    def _say(self, _: Buffer) -> Deferred[Answer]:
        def pack(outcomes: list[tuple[bool, Released | int]]) -> Answer:
            results = tuple(result for _, result in outcomes)
            now = self._service.store.now
            return responses.cbor(
                gbs_surveys_releases.pack_release_answers(ReleaseAnswers(now, results))
            )

        return DeferredList(self._results).addCallback(pack)
