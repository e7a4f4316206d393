"""
Surveys, which are questions about many files, and releases of many leases of one client. Each is one message
to one server, an extension of GBS (``docs/reference-surveys.md``, ``docs/reference-lease-releases.md``).

Messages are CBOR; both ends check them, and raise ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipegrid.core.hashes import Buffer
from pipegrid.wire import cbor
from pipegrid.wire.gbs_cbor_bodies import MAX_ANSWER_BYTES, MAX_SHARE_NUMBERS
from pipegrid.wire.storage_messages import (
    MAX_RELEASES,
    LeaseRelease,
    LeaseReleases,
    LeaseSecrets,
    ReleaseAnswers,
    Released,
)

MAX_QUESTIONS = 64
"""Maximum number of questions in a survey: one with a lease takes up to 0.2 ms, while other clients wait."""
MAX_SAMPLES = 4
"""The maximum number of samples for one file."""
MAX_SAMPLE_BYTES = 2048
"""The maximum length of a sample: a UEB has at most 1999 bytes, after 8 bytes with its length."""
MAX_SURVEY_BYTES = 32 * 1024

LEASE_NOT_ASKED = 0

_SURVEY_ITEMS = 1 + MAX_QUESTIONS * (6 + 4 * MAX_SAMPLES)
_SURVEY_ANSWER_ITEMS = 1 + MAX_QUESTIONS * (4 + MAX_SHARE_NUMBERS + MAX_SAMPLES)
_MAX_OFFSET = 1 << 62


class Sample(NamedTuple):
    """
    A range of a share, which the server is asked to read.

    Attributes:
        length: 1 to ``MAX_SAMPLE_BYTES``.
    """

    share_number: int
    offset: int
    length: int


class Question(NamedTuple):
    """
    The questions about one storage index.

    They replace up to three kinds of requests: which shares exist, some bytes of shares, and a lease.

    Attributes:
        storage_index: 16 bytes.
        lease: to add to every share, or to renew; None for no lease.
        samples: at most ``MAX_SAMPLES``.
    """

    storage_index: bytes
    lease: LeaseSecrets | None = None
    samples: tuple[Sample, ...] = ()


class SurveyAnswer(NamedTuple):
    """
    A server's answer to one question.

    Attributes:
        numbers: the numbers of all complete shares.
        lease: the HTTP status of the request for a lease; ``LEASE_NOT_ASKED`` if no lease was requested.
        samples: the bytes of each sample, fewer if the share ends earlier; or the HTTP status with which the
            read was rejected.
    """

    numbers: frozenset[int]
    lease: int
    samples: tuple[bytes | int, ...]


def pack_survey(questions: Sequence[Question]) -> bytes:
    """Return the body of a survey of at most ``MAX_QUESTIONS`` questions."""
    return cbor.dumps([_packed_question(each) for each in questions])


def _packed_question(question: Question) -> list[Any]:
    lease = question.lease
    secrets = [] if lease is None else [lease.renew, lease.cancel]
    samples = [[each.share_number, each.offset, each.length] for each in question.samples]
    return [question.storage_index, secrets, samples]


def unpack_survey(body: Buffer) -> list[Question]:
    """Return the questions of a survey."""
    value = cbor.loads(body, MAX_SURVEY_BYTES, _SURVEY_ITEMS)
    return [_unpack_question(each) for each in cbor.expect_list(value, "the survey", MAX_QUESTIONS)]


def _unpack_question(value: Any) -> Question:
    index, lease, samples = cbor.expect_fields(value, 3, "a question")
    secrets = None
    if cbor.expect_list(lease, "the lease", 2):
        renew, cancel = cbor.expect_fields(lease, 2, "the lease")
        secrets = cbor.expect_lease(renew, cancel)
    return Question(
        cbor.expect_index(index),
        secrets,
        tuple(map(_unpack_sample, cbor.expect_list(samples, "the samples", MAX_SAMPLES))),
    )


def _unpack_sample(value: Any) -> Sample:
    number, offset, length = cbor.expect_fields(value, 3, "a sample")
    cbor.expect_uint(number, "a share's number")
    cbor.expect_uint(offset, "an offset", _MAX_OFFSET)
    if not cbor.expect_uint(length, "a sample's length", MAX_SAMPLE_BYTES):
        raise ValueError("a sample of no bytes")
    return Sample(number, offset, length)


def pack_survey_answers(answers: Sequence[SurveyAnswer | int]) -> bytes:
    """
    Return the body of the answer to a survey; a number is the HTTP status with which one question was
    rejected.
    """
    return cbor.dumps([_packed_answer(each) for each in answers])


def _packed_answer(answer: SurveyAnswer | int) -> Any:
    if isinstance(answer, int):
        return answer
    return [sorted(answer.numbers), answer.lease, list(answer.samples)]


def unpack_survey_answers(body: Buffer, questions: Sequence[Question]) -> list[SurveyAnswer | int]:
    """Return the answers to the questions of a survey, in their order."""
    value = cbor.loads(body, MAX_ANSWER_BYTES, _SURVEY_ANSWER_ITEMS)
    answers = cbor.expect_answers(value, len(questions), "questions")
    return [_unpack_answer(*pair) for pair in zip(answers, questions, strict=True)]


def _unpack_answer(value: Any, question: Question) -> SurveyAnswer | int:
    if type(value) is int:
        return cbor.expect_status(value)
    numbers, lease, samples = cbor.expect_fields(value, 3, "an answer")
    for number in cbor.expect_list(numbers, "the share numbers", MAX_SHARE_NUMBERS):
        cbor.expect_uint(number, "a share's number")
    if question.lease is None:
        cbor.expect_uint(lease, "the lease's status", LEASE_NOT_ASKED)
    else:
        cbor.expect_status(lease)
    if len(cbor.expect_list(samples, "the samples", None)) != len(question.samples):
        raise ValueError(f"{len(samples)} samples where {len(question.samples)} were asked for")
    for data, sample in zip(samples, question.samples, strict=True):
        if type(data) is int:
            cbor.expect_status(data)
        elif len(cbor.expect_bytes(data, "a sample")) > sample.length:
            raise ValueError("a sample is longer than was asked for")
    return SurveyAnswer(frozenset(numbers), lease, tuple(samples))


MAX_RELEASE_BYTES = 8 * 1024

_RELEASE_ITEMS = 3 + 3 * MAX_RELEASES
_RELEASE_ANSWER_ITEMS = 3 + 4 * MAX_RELEASES


def pack_releases(request: LeaseReleases) -> bytes:
    """Return the body of a request with at most ``MAX_RELEASES`` releases."""
    pairs = [[each.storage_index, each.cancel_secret] for each in request.releases]
    return cbor.dumps([request.since, pairs])


def unpack_releases(body: Buffer) -> LeaseReleases:
    """Return the parsed body of a request for releases."""
    value = cbor.loads(body, MAX_RELEASE_BYTES, _RELEASE_ITEMS)
    since, pairs = cbor.expect_fields(value, 2, "the request")
    pairs = cbor.expect_list(pairs, "the releases", MAX_RELEASES)
    return LeaseReleases(
        cbor.expect_uint(since, "the time"), tuple(_unpack_release(each) for each in pairs)
    )


def _unpack_release(value: Any) -> LeaseRelease:
    index, secret = cbor.expect_fields(value, 2, "a release")
    cbor.expect_sized(secret, "a lease cancel secret", cbor.LEASE_SECRET_BYTES)
    return LeaseRelease(cbor.expect_index(index), secret)


def pack_release_answers(answers: ReleaseAnswers) -> bytes:
    """Return the body of the answer to a request for releases."""
    results = [each if isinstance(each, int) else list(each) for each in answers.results]
    return cbor.dumps([answers.now, results])


def unpack_release_answers(body: Buffer, count: int) -> ReleaseAnswers:
    """Return the parsed answer to a request for ``count`` releases."""
    value = cbor.loads(body, MAX_ANSWER_BYTES, _RELEASE_ANSWER_ITEMS)
    now, results = cbor.expect_fields(value, 2, "the answer")
    found = cbor.expect_answers(results, count, "releases")
    return ReleaseAnswers(
        cbor.expect_uint(now, "the server's time"), tuple(_unpack_result(each) for each in found)
    )


def _unpack_result(value: Any) -> Released | int:
    if type(value) is int:
        return cbor.expect_status(value)
    leases, kept, freed = cbor.expect_fields(value, 3, "a result")
    return Released(
        cbor.expect_uint(leases, "the number of leases"),
        cbor.expect_uint(kept, "the number of leases"),
        cbor.expect_uint(freed, "the freed bytes"),
    )
