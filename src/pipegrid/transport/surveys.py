"""Questions about many files to one server: which shares it has, samples of these shares, and a lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from twisted.internet.defer import Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.errors import NoSuchShare, ServerError
from pipegrid.reactor.deferreds import all_ended, as_deferred
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.gbs_surveys_releases import MAX_QUESTIONS, Question, Sample
from pipegrid.wire.storage_messages import LeaseSecrets

__all__ = ["MAX_QUESTIONS", "Question", "Sample", "Surveyed", "survey"]


class Surveyed(NamedTuple):
    """
    A server's response to one question.

    Attributes:
        numbers: the numbers of all complete shares.
        leased: whether each of these shares has a lease now; False if no lease was requested, or there are no
            shares.
        no_lease: the server's error, if a lease was requested and not given.
        samples: the requested bytes; b"" for each share that does not exist or could not be read.
    """

    numbers: frozenset[int]
    leased: bool = False
    no_lease: ServerError | None = None
    samples: tuple[bytes, ...] = ()


OnSurveyed = Callable[[int, Surveyed | ServerError], None]


@runtime_checkable
class TakesSurveys(Protocol):
    """
    A server that may accept many questions in one request.

    Attributes:
        is_known_to_take_surveys: whether it accepts them, as far as is known.
    """

    @property
    def is_known_to_take_surveys(self) -> bool:
        """Whether the server has declared that it supports surveys, and has refused no survey."""

    def survey(
        self, questions: Sequence[Question]
    ) -> Deferred[list[Surveyed | ServerError] | None] | None:
        """
        Send all questions; returns None, and sends nothing, if the server is not known to support surveys.

        Fires with None if the server turns out not to support surveys.
        """


@runtime_checkable
class LeasesListed(Protocol):
    """A server that can add leases at less cost than ``add_lease`` if the caller also lists the shares."""

    def lease_listed(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """
        Add or renew a lease on every share of the storage index.

        The call is not ordered with other operations. It need not fail if there are no shares: the caller's
        list shows that.
        """


def takes(server: StorageServer) -> bool:
    """Return whether many questions to this server are sent in one request."""
    return isinstance(server, TakesSurveys) and server.is_known_to_take_surveys


@as_deferred
async def survey(server: StorageServer, questions: Sequence[Question], told: OnSurveyed) -> None:
    """
    Ask a server many questions, in one request if it supports surveys (``wire.gbs_surveys_releases``),
    otherwise in ordinary requests that are sent at the same time. Both take one round trip. Unlike the
    contract's other operations, the questions are not ordered with uploads to the same server: they are meant
    for files that do not change.

    Args:
        questions: at most ``MAX_QUESTIONS``.
        told: called with the index of each question in ``questions`` and its response or error, as these
            arrive, perhaps before this function returns.

    Returns:
        A Deferred that fires when all questions are answered; it does not fail with errors of the server.
            Cancelling it cancels the unanswered questions.
    """
    asked = server.survey(questions) if isinstance(server, TakesSurveys) else None
    answers: Sequence[Surveyed | ServerError] | None
    try:
        answers = None if asked is None else await asked
    except ServerError as error:
        answers = [error] * len(questions)
    if answers is None:
        await _ask_apart(server, questions, told)
        return
    for number, answer in enumerate(answers):
        told(number, answer)


async def _ask_apart(
    server: StorageServer, questions: Sequence[Question], told: OnSurveyed
) -> None:
    add_lease = server.lease_listed if isinstance(server, LeasesListed) else server.add_lease

    async def ask(number: int) -> None:
        told(number, await _ask_one(server, questions[number], add_lease))

    await all_ended([Deferred.fromCoroutine(ask(number)) for number in range(len(questions))])


async def _ask_one(
    server: StorageServer,
    question: Question,
    add_lease: Callable[[bytes, LeaseSecrets], Deferred[None]],
) -> Surveyed | ServerError:
    index = question.storage_index
    requests: list[Deferred[Any]] = [server.list_shares(index)]
    if question.lease is not None:
        requests.append(add_lease(index, question.lease))
    requests += [server.read(index, *sample) for sample in question.samples]
    outcomes = [result for _, result in await DeferredList(requests, consumeErrors=True)]
    for outcome in outcomes:
        if isinstance(outcome, Failure) and not outcome.check(ServerError):
            outcome.raiseException()  # the survey was cancelled, or this is a bug
    listed = outcomes.pop(0)
    if isinstance(listed, Failure):
        return _server_error(listed)
    leased, no_lease = False, None
    if question.lease is not None:
        outcome = outcomes.pop(0)
        if not isinstance(outcome, Failure):
            leased = bool(listed)  # ``add_lease`` may succeed without any share
        elif outcome.check(NoSuchShare):
            listed = frozenset()  # the shares were removed after they were listed
        else:
            no_lease = _server_error(outcome)
    samples = tuple(b"" if isinstance(one, Failure) else one for one in outcomes)
    return Surveyed(listed, leased, no_lease, samples)


def _server_error(failure: Failure) -> ServerError:
    error = failure.value
    assert isinstance(error, ServerError)
    return error
