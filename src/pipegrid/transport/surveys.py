"""
Questions about many files to one server: which shares it has, some bytes of them, and a lease.

A server that can takes them in one message (``wire.gbs_surveys``); others are sent ordinary requests, all in
one breath, so that it is one round trip in both cases. What is asked here is not ordered with uploads to the
same server, as the contract's own calls are: it is for files that lie there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.errors import NoSuchShare, ServerError
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.gbs_surveys import MAX_QUESTIONS, Question, Sample
from pipegrid.wire.messages import LeaseSecrets

__all__ = ["MAX_QUESTIONS", "Question", "Sample", "Surveyed", "survey"]


@attrs.frozen
class Surveyed:
    """
    What a server answered to one question.

    Attributes:
        numbers: of all complete shares.
        leased: whether there is a lease now on each of them; False as well if none was asked for, or there
            are no shares.
        no_lease: what kept the server from giving one, if it should have.
        samples: as asked for, each b"" if there is no such share, or it could not be read.
    """

    numbers: frozenset[int]
    leased: bool = False
    no_lease: ServerError | None = None
    samples: tuple[bytes, ...] = ()


OnSurveyed = Callable[[int, Surveyed | ServerError], None]


@runtime_checkable
class TakesSurveys(Protocol):
    """
    A server to which many questions may go in one message.

    Attributes:
        is_known_to_take_surveys: whether they will, as far as is known.
    """

    @property
    def is_known_to_take_surveys(self) -> bool:
        """Whether it has said what it takes, and has not refused one."""

    def survey(
        self, questions: Sequence[Question]
    ) -> Deferred[list[Surveyed | ServerError] | None] | None:
        """
        Ask all of them; None if it takes no surveys, as far as is known, and nothing was sent.

        Fires with None if it turned out that it takes none.
        """


@runtime_checkable
class LeasesListed(Protocol):
    """A server that leases what it was asked to list beside, at less cost than ``add_lease``."""

    def lease_listed(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """
        Add or renew a lease on every share of the index.

        Not ordered with anything. It need not fail where there are no shares: the list shows that.
        """


Leasing = Callable[[bytes, LeaseSecrets], Deferred[None]]


def takes(server: StorageServer) -> bool:
    """Return whether many questions will go to this server in one message."""
    return isinstance(server, TakesSurveys) and server.is_known_to_take_surveys


def survey(
    server: StorageServer, questions: Sequence[Question], told: OnSurveyed
) -> Deferred[None]:
    """
    Ask a server many questions.

    Args:
        questions: at most ``MAX_QUESTIONS``.
        told: called with the number of each question and its answer, or error, as they come, perhaps
            before this returns.

    Returns:
        A Deferred that fires when all are answered; it does not fail with errors of the server's. Cancelling
        it gives up what is unanswered.
    """
    asked = server.survey(questions) if isinstance(server, TakesSurveys) else None
    if asked is None:
        return _ask_apart(server, questions, told)

    def answered(answers: list[Surveyed | ServerError] | None) -> Deferred[None] | None:
        if answers is None:
            return _ask_apart(server, questions, told)
        for number, answer in enumerate(answers):
            told(number, answer)
        return None

    def failed(failure: Failure) -> None:
        error = failure.value
        if not isinstance(error, ServerError):
            failure.raiseException()
        for number in range(len(questions)):
            told(number, error)

    return asked.addCallbacks(answered, failed)


def _ask_apart(
    server: StorageServer, questions: Sequence[Question], told: OnSurveyed
) -> Deferred[None]:
    add_lease = server.lease_listed if isinstance(server, LeasesListed) else server.add_lease

    async def ask(number: int) -> None:
        told(number, await _ask_one(server, questions[number], add_lease))

    asked = [Deferred.fromCoroutine(ask(number)) for number in range(len(questions))]
    return DeferredList(asked, consumeErrors=True).addCallback(_first_failure)


async def _ask_one(
    server: StorageServer, question: Question, add_lease: Leasing
) -> Surveyed | ServerError:
    index = question.storage_index
    requests: list[Deferred[Any]] = [server.list_shares(index)]
    if question.lease is not None:
        requests.append(add_lease(index, question.lease))
    requests += [server.read(index, *attrs.astuple(sample)) for sample in question.samples]
    outcomes = [result for _, result in await DeferredList(requests, consumeErrors=True)]
    for outcome in outcomes:
        if isinstance(outcome, Failure) and not outcome.check(ServerError):
            outcome.raiseException()  # cancelled, or a bug
    listed = outcomes.pop(0)
    if isinstance(listed, Failure):
        return _server_error(listed)
    leased, no_lease = False, None
    if question.lease is not None:
        outcome = outcomes.pop(0)
        if not isinstance(outcome, Failure):
            leased = bool(listed)  # it may not have been told that there are none
        elif not outcome.check(NoSuchShare):
            no_lease = _server_error(outcome)
    samples = tuple(b"" if isinstance(one, Failure) else one for one in outcomes)
    return Surveyed(listed, leased, no_lease, samples)


def _server_error(failure: Failure) -> ServerError:
    error = failure.value
    assert isinstance(error, ServerError)
    return error


def _first_failure(outcomes: list[Any]) -> None:
    for _, result in outcomes:
        if isinstance(result, Failure):
            result.raiseException()
