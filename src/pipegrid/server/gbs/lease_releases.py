"""
Answers releases of leases: many leases of one client in one request (``wire.gbs_lease_releases``).
"""

from __future__ import annotations

from collections.abc import Iterator

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.core.hashes import Buffer
from pipegrid.server.gbs import responses
from pipegrid.server.gbs.body_receivers import InSteps, reason_of
from pipegrid.server.gbs.request_check import Operation, Rule
from pipegrid.server.gbs.responses import Answer
from pipegrid.server.gbs.surveys import SurveyService
from pipegrid.wire import gbs_lease_releases
from pipegrid.wire.storage_messages import LeaseRelease, ReleaseAnswers, Released


class LeaseReleasesCall(InSteps):
    """
    Receives a request, and releases one lease in each step.

    If one release fails, the others are carried out. The answer waits for slots that are being changed.
    """

    def __init__(self, service: SurveyService, rule: Rule) -> None:
        super().__init__(service, rule, (), self._release_in_steps, self._say)
        self._service = service
        self._results: list[Deferred[Released | int]] = []

    def _release_in_steps(self, body: Buffer) -> Iterator[None]:
        try:
            request = gbs_lease_releases.unpack_releases(body)
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
            return responses.cbor(gbs_lease_releases.pack_answers(ReleaseAnswers(now, results)))

        return DeferredList(self._results).addCallback(pack)
