"""Bytes of answers become the same answers however they arrive, and nothing else gets through."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.http11.response_parser import (
    END,
    MAX_INFORMATIONAL,
    Event,
    Informational,
    ResponseHead,
    ResponseParser,
)

# What an answer amounts to: status, body, whether it is complete.
Answer = tuple[int, bytes, bool]


def answers(events: Sequence[Event]) -> list[Answer]:
    """Join what the parser said, so that only the content counts and not the pieces."""
    found: list[Answer] = []
    for event in events:
        if isinstance(event, ResponseHead):
            found.append((event.status, b"", False))
        elif isinstance(event, bytes):
            found[-1] = (found[-1][0], found[-1][1] + event, False)
        elif event is END:
            found[-1] = (*found[-1][:2], True)
        else:
            assert isinstance(event, Informational)
            found.append((event.status, b"", True))
    return found


def parse(data: bytes, *, to: str = "G", pieces: Sequence[int] = ()) -> tuple[list[Answer], str]:
    """
    Parse the answers to requests, one letter each (H for HEAD), cut at the given places.

    Returns the answers, and the error or "closed" or "".
    """
    parser = ResponseParser()
    for letter in to:
        parser.expect(letter == "H")
    events: list[Event] = []
    cuts = [0, *sorted(pieces), len(data)]
    for start, end in pairwise(cuts):
        events += parser.feed(data[start:end])
    return answers(events), parser.error or "closed" * parser.closed


@attrs.frozen
class Form:
    """One way to write an answer, and what it means."""

    wire: bytes
    to: str
    meaning: list[Answer]


FORMS = [
    Form(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", "G", [(200, b"abc", True)]),
    Form(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "G", [(200, b"", True)]),
    Form(b"HTTP/1.1 404\r\nContent-Length:1\r\nEmpty:\r\n\r\nx", "G", [(404, b"x", True)]),
    Form(b"HTTP/1.1 204 No Content\r\n\r\n", "G", [(204, b"", True)]),
    Form(b"HTTP/1.1 204 No\r\nContent-Length: 9\r\n\r\n", "G", [(204, b"", True)]),
    Form(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 70\r\n\r\n", "G", [(304, b"", True)]),
    Form(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n00A;name=value\r\n0123\n\r\n\r\n9\r\n0\r\n\r\n",
        "G",
        [(200, b"abc0123\n\r\n\r\n9", True)],
    ),
    Form(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
        b"1\r\na\r\n0\r\nTrailer: x\r\nOther:\r\n\r\n",
        "G",
        [(200, b"a", True)],
    ),
    Form(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "G", [(200, b"", True)]
    ),
    Form(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nab\r\n0\r\nContent-Length: 2\r\nDigest: x\r\n\r\n",
        "G",
        [(200, b"ab", True)],
    ),
    Form(b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n", "H", [(200, b"", True)]),
    Form(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "H", [(200, b"", True)]),
    Form(b"HTTP/1.1 200 OK\r\n\r\n", "H", [(200, b"", True)]),
    Form(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "H", [(200, b"", True)]),
    Form(b"HTTP/1.1 404 Not Found\r\nX: y\r\n\r\n", "H", [(404, b"", True)]),
    Form(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 1\r\n\r\n!",
        "G",
        [(100, b"", True), (201, b"!", True)],
    ),
    Form(
        b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n",
        "H",
        [(103, b"", True), (200, b"", True)],
    ),
    Form(
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi",
        "G",
        [(200, b"hi", True)],
    ),
    # What Twisted's Agent takes, too, and RFC 9112 permits (2.2, 5.2, 6.3, 7.1.1).
    Form(b"HTTP/1.1 200 OK\nContent-Length: 3\nX: y\n\nabc", "G", [(200, b"abc", True)]),
    Form(
        b"HTTP/1.1 200 OK\r\nX: a\r\n  b\r\nY:\r\n\tc\r\nContent-Length: 3\r\n\r\nabc",
        "G",
        [(200, b"abc", True)],
    ),
    Form(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3  \r\nabc\r\n0 \r\n\r\n",
        "G",
        [(200, b"abc", True)],
    ),
]

REPEATED_LENGTHS = [
    Form(
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nA: b\r\ncontent-length:3 \r\n\r\nabc",
        "G",
        [(200, b"abc", True)],
    ),
    Form(b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH: 3, 3\r\n\r\nabc", "G", [(200, b"abc", True)]),
    Form(
        b"HTTP/1.1 200 OK\nContent-Length: 3\nContent-Length: 3\nContent-Length: 3,3\n\nabc",
        "G",
        [(200, b"abc", True)],
    ),
    Form(
        b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nContent-Length: 7\r\n\r\n",
        "H",
        [(200, b"", True)],
    ),
]
"""As the first answer of a connection, and behind such a one."""


TWICE = (HealthCheck.differing_executors,)
"""Also run by a class that inherits them, in another setting."""


class ParserTests(SynchronousTestCase):
    """Every form of answer, whole and in pieces."""

    def test_every_form(self) -> None:
        """Each form of answer is understood, and the connection stays usable."""
        for form in FORMS:
            self.assertEqual(parse(form.wire, to=form.to), (form.meaning, ""), form.wire)

    def test_every_form_byte_by_byte(self) -> None:
        """Answers that arrive one byte at a time are the same."""
        for form in FORMS:
            cuts = range(len(form.wire))
            self.assertEqual(
                parse(form.wire, to=form.to, pieces=cuts), (form.meaning, ""), form.wire
            )

    def test_lengths_that_are_repeated(self) -> None:
        """A server that repeats the length does so in all its answers; they are understood, in any pieces."""
        plain = Form(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "G", [(200, b"hi", True)])
        for form in REPEATED_LENGTHS:
            wire = form.wire + plain.wire + form.wire
            to = form.to + plain.to + form.to
            for pieces in ((), range(len(wire)), range(0, len(wire), 7)):
                self.assertEqual(
                    parse(wire, to=to, pieces=pieces),
                    (form.meaning + plain.meaning + form.meaning, ""),
                    (form.wire, pieces),
                )

    def test_fields_that_go_on_are_joined(self) -> None:
        """By blanks, as RFC 9112 says."""
        parser = ResponseParser()
        parser.expect()
        [head, _] = parser.feed(
            b"HTTP/1.1 200 OK\r\nX: a\r\n  b\r\n\tc\r\nContent-Length: 0\r\n\r\n"
        )
        assert isinstance(head, ResponseHead)
        self.assertEqual(b"".join(dict(head.headers)[b"x"].split()), b"abc")

    @given(
        st.lists(st.sampled_from(FORMS), min_size=1, max_size=8),
        st.lists(st.integers(0, 800), max_size=12),
    )
    @settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=TWICE)
    def test_any_sequence_any_split(self, forms: list[Form], cuts: list[int]) -> None:
        """Any answers one behind the other, split anywhere, are the same answers."""
        wire = b"".join(form.wire for form in forms)
        to = "".join(form.to for form in forms)
        meaning = [answer for form in forms for answer in form.meaning]
        pieces = [cut for cut in cuts if cut < len(wire)]
        self.assertEqual(parse(wire, to=to, pieces=pieces), (meaning, ""))

    @given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
    @settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=TWICE)
    def test_bodies_are_not_looked_into(self, body: bytes, cuts: list[int]) -> None:
        """Whatever a body contains, it is only a body, also while an answer to HEAD is awaited."""
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        if body:
            chunked += b"%x\r\n%s\r\n" % (len(body), body)
        wire = (
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            + chunked
            + b"0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nHTTP/1.1 204 No\r\n\r\n"
        )
        self.assertEqual(
            parse(wire, to="GGHG", pieces=cuts),
            ([(200, body, True), (200, body, True), (200, b"", True), (204, b"", True)], ""),
        )

    def test_tiny_chunks(self) -> None:
        """Chunks of a byte without number come as one piece for each read, and answers stay apart."""
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        wire = head + b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n" + head + b"1\r\ny\r\n" * 200
        parser = ResponseParser()
        for _ in range(2):
            parser.expect()
        events = parser.feed(wire)
        self.assertEqual(len(events), 5)
        self.assertEqual(events[1:3], [b"x" * 10_000, END])
        self.assertEqual(events[4], b"y" * 200)
        self.assertEqual(parser.feed(b"0\r\n\r\n"), [END])
        self.assertIsNone(parser.error)

    def test_head_properties(self) -> None:
        """The head tells version, reason, length and headers by lower-case name, in order."""
        parser = ResponseParser()
        parser.expect()
        head = parser.feed(b"HTTP/1.1 200 Very good\r\nB: 1\r\na: 2\r\nCONTENT-LENGTH: 5\r\n\r\n")[
            0
        ]
        assert isinstance(head, ResponseHead)
        self.assertEqual(
            (head.version, head.reason, head.length, head.keep_alive, head.until_close),
            ((1, 1), b"Very good", 5, True, False),
        )
        self.assertEqual(head.headers, [(b"b", b"1"), (b"a", b"2"), (b"content-length", b"5")])

    def test_last_answers(self) -> None:
        """Answers that end the connection say so, and what follows them is ignored."""
        for wire, to, says_close in [
            (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx", "G", True),
            (b"HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 1\r\n\r\nx", "G", True),
            (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\n", "H", True),
            (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", "G", False),
            (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n", "H", False),
        ]:
            parser = ResponseParser()
            parser.expect(to == "H")
            parser.expect()
            events = parser.feed(wire + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            self.assertEqual(len(answers(events)), 1, wire)
            self.assertTrue(parser.closed)
            self.assertIsNone(parser.error)
            assert isinstance(events[0], ResponseHead)
            self.assertEqual(events[0].says_close, says_close, wire)
            self.assertEqual(parser.feed(b"more"), [])

    def test_body_until_close(self) -> None:
        """A body without a length ends with the connection, and is not complete before."""
        parser = ResponseParser()
        parser.expect()
        events = parser.feed(b"HTTP/1.1 200 OK\r\n\r\nabc") + parser.feed(b"HTTP/1.1 200")
        assert isinstance(events[0], ResponseHead)
        self.assertTrue(events[0].until_close)
        self.assertEqual(answers(events), [(200, b"abcHTTP/1.1 200", False)])
        self.assertEqual(parser.end(), [END])

    def test_end_completes_nothing_else(self) -> None:
        """The end of the connection does not complete a body of known length, chunks, or a head."""
        for wire in (
            b"",
            b"HTTP/1.1 200",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        ):
            parser = ResponseParser()
            parser.expect()
            parser.feed(wire)
            self.assertEqual(parser.end(), [], wire)


class ViolationTests(SynchronousTestCase):
    """What is not an answer to a request is an error, after whatever was right before it."""

    def test_not_http(self) -> None:
        """Garbage in every place is refused."""
        for wire in (
            b"garbage",
            b"HTTP/1.1 2x0 OK\r\n\r\n",
            b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nName : x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1, \r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n 2\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nX: a\rb\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        ):
            for to in ("GGG", "GGH"):
                found, error = parse(b"HTTP/1.1 204 No\r\n\r\n" + wire, to=to)
                self.assertEqual(found[0], (204, b"", True), wire)
                self.assertNotIn(error, ("", "closed"), wire)
                self.assertFalse(any(done for _, _, done in found[1:]), wire)

    def test_answer_without_request(self) -> None:
        """An answer nobody asked for is an error; the one before it stands."""
        one = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"
        for pieces in ([], [len(one)], range(2 * len(one))):
            found, error = parse(one * 2, pieces=pieces)
            self.assertEqual(found, [(200, b"x", True)])
            self.assertEqual(error, "it belongs to no request")

    def test_body_behind_an_answer_to_head(self) -> None:
        """A server that sends a body to HEAD is caught."""
        wire = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"
        found, error = parse(wire, to="HG")
        self.assertEqual(found, [(200, b"", True)])
        self.assertIn("not HTTP", error)

    def test_long_heads(self) -> None:
        """Heads that are too long or have too many lines end the parsing, in whatever pieces."""
        start = b"HTTP/1.1 200 OK\r\n"
        for head in (
            start + b"X: " + b"x" * 5000 + b"\r\n\r\n",
            start + b"X" * 5000 + b": x\r\n\r\n",
            start + b"X: 0123456789\r\n" * 200 + b"\r\n",
            start + b"X: y\r\n" * 60 + b"\r\n",
            b"HTTP/1.1 200 " + b"O" * 5000 + b"\r\n\r\n",
            start + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"T: xyz\r\n" * 400 + b"\r\n",
            start + b"Transfer-Encoding: chunked\r\n\r\n0\r\nT: " + b"x" * 5000,
            start + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 5000,
        ):
            for step in (1, 100, 10_000):
                parser = ResponseParser(max_header_bytes=1000, max_headers=50)
                parser.expect()
                fed = 0
                for start_of_piece in range(0, len(head), step):
                    parser.feed(head[start_of_piece : start_of_piece + step])
                    fed += step
                    if parser.error:
                        break
                if step < 10_000:
                    self.assertLess(fed, 3000, "it is noticed in time")
                    self.assertIn("a head ", str(parser.error), (head[:50], step))

    def test_endless_interim_answers(self) -> None:
        """A server cannot go on saying "100 Continue" for ever."""
        interim = b"HTTP/1.1 100 Continue\r\n\r\n"
        found, error = parse(interim * MAX_INFORMATIONAL)
        self.assertEqual((len(found), error), (MAX_INFORMATIONAL, ""))
        found, error = parse(interim * (MAX_INFORMATIONAL + 1))
        self.assertEqual(len(found), MAX_INFORMATIONAL)
        self.assertNotEqual(error, "")

    def test_an_interim_answer_has_no_body(self) -> None:
        """One that comes with a body all the same is refused; its bytes are nobody's."""
        for framing in (
            b"Content-Length: 3",
            b"Transfer-Encoding: x",
            b"Transfer-Encoding: chunked",
        ):
            wire = b"HTTP/1.1 199 x\r\n" + framing + b"\r\n\r\n3\r\nabc\r\n"
            for pieces in ((), range(len(wire))):
                found, error = parse(wire, pieces=pieces)
                self.assertEqual(found, [(199, b"", True)])
                self.assertIn("body", error)


class PassedOnTests(ParserTests):
    """The same, if every body of known length is handed on as it is as soon as anything of it is left."""

    def setUp(self) -> None:
        self.patch(ResponseParser, "passed_on_bytes", 1)

    def test_it_happens(self) -> None:
        """A long body is the very bytes that were read, and the next answer is an answer."""
        parser = ResponseParser()
        for _ in range(2):
            parser.expect()
        parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n12")
        part = b"345"
        [found] = parser.feed(part)
        self.assertIs(found, part)
        *_, end = events = parser.feed(b"6HTTP/1.1 204 No\r\n\r\n")
        self.assertEqual(events[0], b"6")
        self.assertIs(end, END)
        self.assertEqual(len(events), 4)
