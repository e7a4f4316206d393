"""
Any bytes from a server, cut anywhere: the parser never raises, says things in their order, and what it says
does not depend on the cuts. It keeps little of what it has not told yet. And good answers, of all forms and
in any order, are what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from misc.fuzz.choices import Choices
from pipegrid.http11.response_parser import END, Event, Informational, ResponseHead, ResponseParser
from pipegrid.http11.response_parser import _Violation as Violation

_LIMIT_BYTES = 200

Answers = list[tuple[int, bool, tuple[tuple[bytes, bytes], ...], bytes]]


class _Watched(ResponseParser):
    """httptools makes a parse error of any exception in a callback; here it is kept."""

    broke: BaseException | None = None
    passed_on_bytes = 1  # cuts decide who reads a body: llhttp all of it, or its rest nobody

    def on_headers_complete(self) -> None:
        self._watch(super().on_headers_complete)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._watch(super().on_header, name, value)

    def on_body(self, data: bytes) -> None:
        self._watch(super().on_body, data)

    def on_message_complete(self) -> None:
        self._watch(super().on_message_complete)

    def on_message_begin(self) -> None:
        self._watch(super().on_message_begin)

    def _watch(self, call: Callable[..., None], *args: bytes) -> None:
        try:
            call(*args)
        except Violation:
            raise
        except Exception as error:
            self.broke = error
            raise


def run(data: bytes) -> None:
    """Let the first byte say whether the rest is what came, or a plan of good answers."""
    choices = Choices(data)
    if data[:1] >= b"\x80":
        choices.byte()
        _good_answers(choices)
    else:
        _any_bytes(choices)


def _any_bytes(choices: Choices) -> None:
    """Parse the same bytes whole, cut, and with narrow limits."""
    requests = [bool(choices.byte() & 1) for _ in range(choices.below(6))]
    ends = choices.flag()
    cuts = [choices.number(2) for _ in range(choices.below(8))]
    wire = choices.rest()
    whole = _parse(requests, wire, [], ends)
    assert _parse(requests, wire, cuts, ends) == whole, "the cuts changed the meaning"
    if len(wire) <= 300:
        each = _parse(requests, wire, list(range(len(wire))), ends)
        assert each == whole, "byte by byte it has another meaning"
    _parse_narrowly(requests, wire, max(1, len(cuts)))


def _good_answers(choices: Choices) -> None:
    """Write answers whose meaning is known, and compare."""
    cuts = [choices.number(2) for _ in range(choices.below(8))]
    requests: list[bool] = []
    wire = b""
    meant: list[tuple[int, bytes]] = []
    while choices.more and len(requests) < 10:
        for _ in range(choices.below(3)):
            wire += b"HTTP/1.1 100 Continue\r\n\r\n"
            meant.append((100, b""))
        is_head = choices.flag()
        status, head, body, content = choices.pick((_with_length, _in_chunks, _empty))(choices)
        requests.append(is_head)
        wire += head + (b"" if is_head else body)
        meant.append((status, b"" if is_head else content))
    for places in ([], cuts, list(range(len(wire)))):
        answers, failed, closed = _parse(requests, wire, places, False)
        assert not failed, "good answers are refused"
        assert not closed, "an answer is taken for the last"
        assert [(status, body) for status, _, _, body in answers] == meant, (
            "they mean another thing"
        )
        assert all(complete for _, complete, _, _ in answers), "one is not complete"


Good = tuple[int, bytes, bytes, bytes]
"""Status, head and body on the wire, and what the body means."""


def _with_length(choices: Choices) -> Good:
    body = choices.take(choices.below(40))
    return 200, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body, body


def _in_chunks(choices: Choices) -> Good:
    chunks = [choices.take(1 + choices.below(20)) for _ in range(choices.below(5))]
    chunks = [chunk for chunk in chunks if chunk]
    extension = choices.pick((b"", b";x", b';x="y"'))
    trailer = choices.pick((b"", b"T: x\r\n"))
    body = b"".join(b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    head = b"HTTP/1.1 206 Some\r\nA: b\r\nTransfer-Encoding: chunked\r\n\r\n"
    return 206, head, body + b"0\r\n%s\r\n" % trailer, b"".join(chunks)


def _empty(choices: Choices) -> Good:
    """Nothing follows these, whatever length they speak of."""
    status = choices.pick((204, 304))
    length = choices.pick((b"", b"Content-Length: 5\r\n"))
    return status, b"HTTP/1.1 %d \r\n%s\r\n" % (status, length), b"", b""


def _parse(
    requests: list[bool], wire: bytes, cuts: list[int], ends: bool
) -> tuple[Answers, bool, bool]:
    """Return the answers, whether there was an error, and whether the last was the last."""
    parser = _Watched()
    for is_head in requests:
        parser.expect(is_head)
    events: list[Event] = []
    places = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        events += _feed(parser, wire[start:end])
    failed, closed = parser.error is not None, parser.closed
    if ends:
        events += parser.end()
    return _check(events, requests), failed, closed


def _feed(parser: _Watched, piece: bytes) -> list[Event]:
    was_over = parser.closed or parser.error is not None
    events = parser.feed(piece)
    if parser.broke is not None:
        raise parser.broke
    assert not (was_over and events), "it goes on after the end"
    assert sum(len(event) for event in events if isinstance(event, bytes)) <= len(piece)
    assert repr(parser)
    return events


def _check(events: list[Event], requests: list[bool]) -> Answers:
    """Return what the events amount to; raise if their order is not the promised one."""
    answers: Answers = []
    head: ResponseHead | None = None
    body = b""
    over = False
    ended = 0
    for event in events:
        assert not over, "there is an answer behind the last one"
        if isinstance(event, Informational):
            assert head is None, "an interim answer within another"
            assert 100 <= event.status < 200
            answers.append((event.status, True, (), b""))
        elif isinstance(event, ResponseHead):
            assert head is None, "a head within an answer"
            assert 200 <= event.status <= 999
            assert ended < len(requests), "an answer to nothing"
            head, body = event, b""
        elif event is END:
            assert head is not None, "the end of nothing"
            assert head.length in (None, len(body)), "a body of another length than announced"
            assert not (requests[ended] and body), "a body in answer to HEAD"
            answers.append((head.status, True, tuple(head.headers), body))
            ended += 1
            over = not head.keep_alive
            head = None
        else:
            assert isinstance(event, bytes)
            assert event, "an empty piece of a body"
            assert head is not None, "a body of nothing"
            body += event
            assert head.length is None or len(body) <= head.length
    if head is not None:
        answers.append((head.status, False, tuple(head.headers), body))
    return answers


def _parse_narrowly(requests: list[bool], wire: bytes, step: int) -> None:
    """With narrow limits, what is neither told nor refused is bounded."""
    parser = _Watched(max_header_bytes=_LIMIT_BYTES, max_headers=5)
    silent_bytes = 0
    for number, at in enumerate(range(0, len(wire), step)):
        if number < len(requests):
            parser.expect(requests[number])
        piece = wire[at : at + step]
        events = _feed(parser, piece)
        for event in events:
            if isinstance(event, ResponseHead):
                assert len(event.headers) <= 5
                held = sum(len(name) + len(value) for name, value in event.headers)
                assert held + len(event.reason) <= 2 * _LIMIT_BYTES
        if parser.error is not None or parser.closed:
            return
        silent_bytes = 0 if events else silent_bytes + len(piece)
        assert silent_bytes <= _LIMIT_BYTES, "it keeps more than it may"


def seeds() -> dict[str, bytes]:
    """Return answers of each form."""
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n00A;name=value\r\n0123\n\r\n\r\n9\r\n0\r\nTrailer: x\r\n\r\n"
    )
    until_close = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end"
    get, head = b"\0", b"\1"

    def seed(requests: bytes, wire: bytes, ends: bytes = b"\0", cuts: bytes = b"\1\0\x10") -> bytes:
        return bytes([len(requests)]) + requests + ends + cuts + wire

    plan = b"\x80\2\0\x13\0\x40" + b"\0\0\0\3abc" + b"\1\1\0\4abcd" + b"\0\0\1\2\1ab\1cd\1\1"
    return {
        "good": plan,
        "good-heads": plan + b"\0\1\1\1\1xy\0\0" + b"\2\0\2\1\1" + b"\0\1\2\0\1" + plan[6:],
        "length": seed(get, ok),
        "chunked": seed(get, chunked),
        "until-close": seed(get, until_close, b"\1"),
        "head": seed(head, b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n"),
        "head-chunked": seed(head + get, chunked[: chunked.index(b"3\r\n")] + ok),
        "pipelined": seed(get + head + get, ok + ok[:-3] + chunked, b"\0", b"\2\0\x20\0\x50"),
        "no-body": seed(
            get * 2, b"HTTP/1.1 204 No\r\nContent-Length: 9\r\n\r\nHTTP/1.1 304 \r\n\r\n"
        ),
        "interim": seed(get, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102\r\nA: b\r\n\r\n" + ok),
        "close": seed(get * 2, ok.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n") + ok),
        "old-keep-alive": seed(
            get * 2, ok.replace(b"1.1 200 OK", b"1.0 200 OK\r\nConnection: keep-alive") * 2
        ),
        "folded": seed(get, b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 0\r\n\r\n"),
        "upgrade": seed(get, b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n"),
        "gzip": seed(get, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        "two-lengths": seed(get, b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\na"),
    }
