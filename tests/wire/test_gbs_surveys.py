"""Surveys as bytes: what is packed is unpacked, and nothing else is taken."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire import cbor, gbs_surveys_releases
from pipegrid.wire.gbs_surveys_releases import (
    LEASE_NOT_ASKED,
    MAX_QUESTIONS,
    MAX_SAMPLE_BYTES,
    MAX_SAMPLES,
    MAX_SURVEY_BYTES,
    Question,
    Sample,
    SurveyAnswer,
)
from pipegrid.wire.storage_messages import LeaseSecrets

INDEX = b"i" * 16
LEASE = LeaseSecrets(b"r" * 32, b"c" * 32)
FULL = Question(INDEX, LEASE, (Sample(255, (1 << 62) - 1, MAX_SAMPLE_BYTES),) * MAX_SAMPLES)

samples = st.builds(
    Sample, st.integers(0, 300), st.integers(0, 1 << 60), st.integers(1, MAX_SAMPLE_BYTES)
)
questions = st.builds(
    Question,
    st.binary(min_size=16, max_size=16),
    st.sampled_from([None, LEASE]),
    st.lists(samples, max_size=MAX_SAMPLES).map(tuple),
)


class QuestionsTests(SynchronousTestCase):
    """What a server reads."""

    @given(st.lists(questions, max_size=8))
    def test_there_and_back(self, asked: list[Question]) -> None:
        """Whatever is asked arrives."""
        self.assertEqual(
            gbs_surveys_releases.unpack_survey(gbs_surveys_releases.pack_survey(asked)),
            asked,
        )

    def test_the_longest(self) -> None:
        """The longest survey fits."""
        body = gbs_surveys_releases.pack_survey([FULL] * MAX_QUESTIONS)
        self.assertLess(len(body), MAX_SURVEY_BYTES)
        self.assertEqual(len(gbs_surveys_releases.unpack_survey(body)), MAX_QUESTIONS)

    def test_refused(self) -> None:
        """Everything else is refused with the place."""
        for value, what in (
            ([[INDEX, [], []]] * (MAX_QUESTIONS + 1), "the survey has"),
            ({}, "the survey is not an array"),
            ([[INDEX, []]], "a question has 2 fields"),
            ([[INDEX[1:], [], []]], "storage index"),
            ([["x" * 16, [], []]], "storage index"),
            ([[INDEX, [b"r" * 32], []]], "the lease has 1 fields"),
            ([[INDEX, [b"r" * 32, b"c" * 31], []]], "cancel secret"),
            ([[INDEX, None, []]], "the lease is not an array"),
            ([[INDEX, [], [[0, 0, 1]] * (MAX_SAMPLES + 1)]], "the samples has"),
            ([[INDEX, [], [[0, 0, 0]]]], "no bytes"),
            ([[INDEX, [], [[0, 0, MAX_SAMPLE_BYTES + 1]]]], "length"),
            ([[INDEX, [], [[0, -1, 1]]]], "an offset"),
            ([[INDEX, [], [[0, 1 << 63, 1]]]], "an offset"),
            ([[INDEX, [], [[True, 0, 1]]]], "number"),
        ):
            with self.assertRaisesRegex(ValueError, what):
                gbs_surveys_releases.unpack_survey(cbor.dumps(value))
        with self.assertRaises(ValueError):
            gbs_surveys_releases.unpack_survey(bytes(MAX_SURVEY_BYTES + 1))


class AnswersTests(SynchronousTestCase):
    """What a client reads."""

    def test_there_and_back(self) -> None:
        """Whatever is answered arrives."""
        asked = [FULL, Question(INDEX), Question(INDEX, None, (Sample(1, 2, 3),))]
        answered: list[SurveyAnswer | int] = [
            SurveyAnswer(frozenset(range(256)), 204, (b"x" * MAX_SAMPLE_BYTES, 404, b"", 500)),
            503,
            SurveyAnswer(frozenset(), LEASE_NOT_ASKED, (b"abc",)),
        ]
        body = gbs_surveys_releases.pack_survey_answers(answered)
        self.assertEqual(gbs_surveys_releases.unpack_survey_answers(body, asked), answered)

    def test_refused(self) -> None:
        """A server that answers other than it was asked says nothing."""
        plain, sampled = Question(INDEX), Question(INDEX, LEASE, (Sample(0, 0, 3),))
        for question, answer, what in (
            (plain, [[], 204, []], "status"),
            (plain, [[], 0, [b""]], "1 samples where 0"),
            (plain, 99, "not a status"),
            (plain, 600, "a status"),
            (plain, [[-1], 0, []], "number"),
            (plain, [list(range(257)), 0, []], "share numbers"),
            (plain, [[], 0], "2 fields"),
            (sampled, [[], 0, [b""]], "not a status"),
            (sampled, [[], 204, [b"abcd"]], "longer"),
            (sampled, [[], 204, ["abc"]], "not a byte string"),
            (sampled, [[], 204, []], "0 samples where 1"),
        ):
            body = cbor.dumps([answer])
            with self.assertRaisesRegex(ValueError, what):
                gbs_surveys_releases.unpack_survey_answers(body, [question])
        good: Any = [[], 0, []]
        with self.assertRaisesRegex(ValueError, "2 answers to 1"):
            gbs_surveys_releases.unpack_survey_answers(cbor.dumps([good, good]), [plain])
