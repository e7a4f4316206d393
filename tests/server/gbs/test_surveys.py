"""Surveys at the GBS server: they answer, and leave behind, what their plain requests would."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from unittest import mock

from pipegrid.errors import NoSpace
from pipegrid.wire import gbs_cbor_bodies, gbs_paths_headers, gbs_surveys_releases
from pipegrid.wire.gbs_surveys_releases import MAX_SURVEY_BYTES, Question, Sample, SurveyAnswer
from tests.server.gbs.support import (
    Reply,
    ServerTestCase,
    allocate,
    head,
    lease_headers,
    list_shares,
    parse_replies,
    read,
    write,
)
from tests.storage.support import OTHERS_SECRETS, SI
from tests.wire.test_cbor import BOMBS

LEASE = OTHERS_SECRETS.lease
DATA = bytes(range(200))
NOBODY = b"n" * 16


class SurveyTests(ServerTestCase):
    """Questions about many files in one request."""

    def survey(self, *questions: Question) -> list[SurveyAnswer | int]:
        """Return what is answered to them."""
        body = gbs_surveys_releases.pack_survey(questions)
        return gbs_surveys_releases.unpack_survey_answers(self.post(body).body, questions)

    def post(self, body: bytes, *lines: bytes) -> Reply:
        """Return the answer to any body."""
        [reply] = self.ask(head("POST", gbs_paths_headers.SURVEY_PATH, *lines, body=body) + body)
        return reply

    def store_two(self) -> None:
        """Store shares 0 and 3."""
        self.ask(allocate((0, 3), 200), write(0, 0, DATA), write(3, 0, DATA[::-1]))

    def share_files(self) -> list[bytes]:
        """Return what lies on the disk of both."""
        return [path.read_bytes() for path in sorted(map(Path, map(self.final, (0, 3))))]

    def test_what_is_asked(self) -> None:
        """Numbers, a lease and samples; of what is not there nothing."""
        self.store_two()
        samples = (
            Sample(0, 10, 20),
            Sample(3, 190, 2048),
            Sample(3, 200, 1),
            Sample(1, 0, 5),
        )
        found, nothing = self.survey(Question(SI, LEASE, samples), Question(NOBODY, LEASE))
        self.assertEqual(
            found,
            SurveyAnswer(frozenset({0, 3}), 204, (DATA[10:30], DATA[::-1][190:], b"", 404)),
        )
        self.assertEqual(nothing, SurveyAnswer(frozenset(), 404, ()))
        [strange] = self.survey(Question(SI, None, (Sample(256, 0, 1),)))
        self.assertEqual(strange, SurveyAnswer(frozenset({0, 3}), 0, (404,)))

    def test_as_plain_requests(self) -> None:
        """Answers and files are those of single requests."""
        self.store_two()
        before = self.share_files()
        self.survey(Question(SI, LEASE))
        surveyed = self.share_files()
        self.assertNotEqual(surveyed, before)
        for path, data in zip(map(self.final, (0, 3)), before, strict=True):
            Path(path).write_bytes(data)
        listed, renewed, sampled = self.ask(
            list_shares(),
            head("PUT", gbs_paths_headers.lease_path(SI), *lease_headers(OTHERS_SECRETS), body=b""),
            read(0, 10, 30),
        )
        self.assertEqual(renewed.status, 204)
        self.assertEqual(self.share_files(), surveyed)
        [answer] = self.survey(Question(SI, LEASE, (Sample(0, 10, 20),)))
        assert isinstance(answer, SurveyAnswer)
        self.assertEqual(answer.numbers, gbs_cbor_bodies.unpack_shares(listed.body))
        self.assertEqual(answer.samples, (sampled.body,))

    def test_a_refusal_is_its_own(self) -> None:
        """What fails of one question does not touch the others."""
        self.store_two()
        with mock.patch.object(self.store, "add_lease", side_effect=NoSpace("full")):
            first, second = self.survey(Question(SI, LEASE), Question(SI))
        self.assertEqual(first, SurveyAnswer(frozenset({0, 3}), 507, ()))
        self.assertEqual(second, SurveyAnswer(frozenset({0, 3}), 0, ()))
        with mock.patch.object(self.store, "list_shares", side_effect=OSError("io")):
            [failed] = self.survey(Question(SI))
        self.assertEqual(failed, 500)
        self.flushLoggedErrors(OSError)

    def test_a_slot_that_is_being_changed(self) -> None:
        """The answer waits for it, as that of a single request for a lease does."""
        self.store_two()
        busy = self.service.slots._busy
        waiting: deque[object] = deque()
        busy[SI] = waiting  # type: ignore[assignment]
        connection, transport = self.connect()
        body = gbs_surveys_releases.pack_survey([Question(SI, LEASE), Question(NOBODY)])
        connection.dataReceived(head("POST", gbs_paths_headers.SURVEY_PATH, body=body) + body)
        self.settle()
        self.assertEqual(transport.written, b"")
        self.assertEqual(len(waiting), 1)
        self.service.slots._run(SI)
        self.settle()
        self.assertIn(b"200 OK", bytes(transport.written))
        self.assertEqual(busy, {})
        transport.lose()

    def test_too_much_that_waits(self) -> None:
        """What was read for surveys that wait counts as held, and beyond the bound they are refused."""
        self.store_two()
        busy = self.service.slots._busy
        busy[SI] = deque()
        body = gbs_surveys_releases.pack_survey(
            [Question(SI, LEASE, (Sample(0, 0, 200),) * 4)] * 64
        )
        connection, transport = self.connect()
        connection.dataReceived(head("POST", gbs_paths_headers.SURVEY_PATH, body=body) + body)
        self.settle()
        one = self.service._held_bytes
        self.assertGreater(one, 64 * 4 * 200)
        with mock.patch("pipegrid.server.gbs.storage_operations.MAX_HELD_BYTES", 5 * one // 2):
            for _ in range(2):
                connection.dataReceived(
                    head("POST", gbs_paths_headers.SURVEY_PATH, body=body) + body
                )
                self.settle()
        self.assertEqual(self.service._held_bytes, 2 * one)
        self.service.slots._run(SI)
        self.settle()
        statuses = [reply.status for reply in parse_replies(transport.written)]
        self.assertEqual(statuses, [200, 200, 503])
        self.assertEqual(self.service._held_bytes, 0)

    def test_what_is_refused(self) -> None:
        """No message, too long a one, bombs, the wrong secret: as other messages are."""
        self.assertEqual(self.post(b"x").status, 400)
        self.assertEqual(self.post(bytes(MAX_SURVEY_BYTES + 1)).status, 413)
        for bomb in BOMBS.values():
            self.assertEqual(self.post(bomb).status, 400)
        self.assertEqual(self.post(b"\x80", b"Accept: text/html").status, 406)
        self.assertEqual(self.post(b"\x80", *lease_headers()).status, 400)
        wrong = head("POST", gbs_paths_headers.SURVEY_PATH, body=b"\x80").replace(
            b"Tahoe-LAFS", b"Nobody"
        )
        self.assertEqual(self.statuses(wrong + b"\x80"), [401])
        self.assertEqual(self.statuses(head("GET", gbs_paths_headers.SURVEY_PATH)), [405])
