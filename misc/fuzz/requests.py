"""
Whole connections to the GBS server: any bytes in any pieces, and clients that stop reading, wait, or go away.

The server never fails, holds little of what it was sent or has to say, answers every request in turn or
closes, and in the end closes whatever is silent. What it stores stays as it is.

The input is what the client sends, literally, but for bytes from 0x80 on: those stand for whole headers and
requests (``_WORDS``), or for what happens meanwhile (``_EVENTS``); 0xff makes the next byte literal.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import httptools
from tests.descriptors import left_open, open_files
from twisted.internet.defer import Deferred, execute
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.task import Clock
from twisted.logger import ILogObserver, LogEvent, LogLevel, globalLogPublisher
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.disk.durability import Committable, Disk
from pipegrid.disk.group_commit import GroupCommit
from pipegrid.server.gbs.http_connection import GbsConnection, GbsSite
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.storage.share_store import ShareStore
from pipegrid.wire import gbs_bundles, gbs_cbor_bodies, gbs_paths_headers
from pipegrid.wire.gbs_bundles import BundledUpload
from pipegrid.wire.storage_messages import LeaseSecrets, UploadSecrets

P = ParamSpec("P")
T = TypeVar("T")

_SWISSNUM = "swissnum"
_SI, _OTHER_SI = bytes(range(16)), bytes(16)
_SECRETS = UploadSecrets(LeaseSecrets(b"r" * 32, b"c" * 32), b"u" * 32)
_SMALL, _LARGE = b"a small share", b"0123456789abcdef" * 5000
_PIECE_BYTES = 1 << 16
_QUEUE_BYTES = 3 << 16
"""Of requests: what the transport delivered at once, what the parser made of that, and a little more."""
_QUEUE_EVENTS = 5000
"""Of the same; in 16 KiB, the most that is parsed at once, there may be 2730 chunks."""
_UNSENT_BYTES = 1 << 20
"""Of answers, once the client has stopped reading: 256 KiB of small ones and a piece of a stream."""

# What the words are made of.


def _header(name: str, value: bytes) -> bytes:
    return b"%s: %s\r\n" % (name.encode("ascii"), value)


def _secret_headers(secrets: dict[str, bytes]) -> bytes:
    lines = gbs_paths_headers.secret_lines(secrets)
    return b"".join(_header(gbs_paths_headers.SECRET, line) for line in lines)


_AUTHORIZED = _header(gbs_paths_headers.AUTHORIZATION, gbs_paths_headers.authorization(_SWISSNUM))
_LEASE = _secret_headers(
    {
        gbs_paths_headers.RENEW_SECRET: _SECRETS.lease.renew,
        gbs_paths_headers.CANCEL_SECRET: _SECRETS.lease.cancel,
    }
)
_UPLOAD = _secret_headers({gbs_paths_headers.UPLOAD_SECRET: _SECRETS.upload})
_OTHERS_UPLOAD = _secret_headers({gbs_paths_headers.UPLOAD_SECRET: b"U" * 32})
_VERSION_LINE = b" HTTP/1.1\r\nHost: x\r\n"


def _request(method: str, path: str, headers: bytes = b"", body: bytes = b"") -> bytes:
    length = _header("Content-Length", b"%d" % len(body)) if body else b""
    first = f"{method} {path}".encode("ascii") + _VERSION_LINE
    return first + _AUTHORIZED + headers + length + b"\r\n" + body


def _allocate(numbers: Iterable[int], share_bytes: int, si: bytes = _SI) -> bytes:
    body = gbs_cbor_bodies.pack_allocate(frozenset(numbers), share_bytes)
    return _request("POST", gbs_paths_headers.allocate_path(si), _LEASE + _UPLOAD, body)


def _write(number: int, begin: int, data: bytes, si: bytes = _SI) -> bytes:
    place = _header(
        "Content-Range", gbs_paths_headers.format_content_range(begin, begin + len(data))
    )
    return _request("PATCH", gbs_paths_headers.share_path(si, number), _UPLOAD + place, data)


def _upload(si: bytes, shares: dict[int, bytes]) -> BundledUpload:
    share_bytes = max(map(len, shares.values()))
    return BundledUpload(si, _SECRETS, share_bytes, frozenset(shares), shares)


def _bundle(*uploads: tuple[bytes, dict[int, bytes]]) -> bytes:
    body = gbs_bundles.pack_bundle([_upload(*each) for each in uploads])
    return _request("POST", gbs_paths_headers.BUNDLE_PATH, b"", body)


_WORDS: dict[int, bytes] = dict(
    enumerate(
        (
            _AUTHORIZED,
            _LEASE,
            _UPLOAD,
            _OTHERS_UPLOAD,
            gbs_paths_headers.allocate_path(_SI).encode(),
            gbs_paths_headers.allocate_path(_OTHER_SI).encode(),
            gbs_paths_headers.lease_path(_SI).encode(),
            gbs_paths_headers.VERSION_PATH.encode(),
            _VERSION_LINE,
            b" HTTP/1.0\r\n",
            b"\r\n",
            b"\r\n\r\n",
            b"Content-Length: ",
            b"Content-Type: application/cbor\r\n",
            b"Accept: application/cbor\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"Content-Range: bytes ",
            b"Range: bytes=",
            b"Expect: 100-continue\r\n",
            b"Connection: close\r\n",
            b"Connection: keep-alive\r\n",
            b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
            b"POST ",
            b"PATCH ",
            b"GET ",
            b"HEAD ",
            b"PUT ",
            gbs_cbor_bodies.pack_allocate(frozenset({2, 3}), 10),
            gbs_cbor_bodies.pack_corrupt("it is damaged"),
            b"x" * 3000,
            bytes(20_000),
            b"A: b\r\n" * 100,
            _allocate({2, 3}, 10),
            _allocate({4}, 60_000, _OTHER_SI),
            _allocate(range(250), 1 << 62),
            _write(2, 0, b"0123456789"),
            _write(2, 0, b"01234"),
            _write(2, 5, b"56789"),
            _write(3, 2, b"xx"),
            _write(4, 0, b"y" * 60_000, _OTHER_SI),
            _write(4, 0, b"y" * 10_000, _OTHER_SI),
            _request("GET", gbs_paths_headers.share_path(_SI, 0)),
            _request("GET", gbs_paths_headers.share_path(_SI, 1)),
            _request("GET", gbs_paths_headers.share_path(_SI, 1), b"Range: bytes=5-70000\r\n"),
            _request("GET", gbs_paths_headers.share_path(_SI, 2)),
            _request("GET", gbs_paths_headers.shares_path(_SI)),
            _request("GET", gbs_paths_headers.VERSION_PATH),
            _request("PUT", gbs_paths_headers.abort_path(_SI, 2), _UPLOAD),
            _request("PUT", gbs_paths_headers.lease_path(_SI), _LEASE),
            _request(
                "POST",
                gbs_paths_headers.corrupt_path(_SI, 0),
                b"",
                gbs_cbor_bodies.pack_corrupt("it is damaged"),
            ),
            gbs_paths_headers.BUNDLE_PATH.encode(),
            _bundle((_SI, {2: b"0123456789", 3: b"9876543210"})),
            _bundle((_SI, {0: _SMALL}), (_OTHER_SI, {4: b"y" * 5000})),
            _bundle(*((bytes([n]) * 16, {1: b"z"}) for n in range(100))),
            gbs_bundles.pack_bundle([_upload(_OTHER_SI, {4: b"0123456789"})]),
        ),
        0x80,
    )
)

# The events.


class _Transport:
    """Remembers what is written; ``full`` is the client that does not read."""

    disconnecting = False

    def __init__(self) -> None:
        self.protocol: Any = None
        self.producer: Any = None
        self.written = bytearray()
        self.unread = 0
        self.full = False
        self.paused = False
        self.closing = False
        self.lost = False

    def write(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        assert not self.closing, "written after loseConnection"
        assert not self.lost, "written to nobody"
        self.written += data
        if self.full:
            self.unread += len(data)
            if self.producer is not None:
                self.producer.pauseProducing()

    def stop_reading(self) -> None:
        self.full = True

    def read(self) -> None:
        if self.full:
            self.full = False
            self.unread = 0
            if self.producer is not None:
                self.producer.resumeProducing()

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        assert streaming
        assert self.producer is None
        self.producer = producer

    def unregisterProducer(self) -> None:
        self.producer = None

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False

    def loseConnection(self) -> None:
        assert self.producer is None, "a real transport would not close now"
        self.closing = self.disconnecting = True

    def abortConnection(self) -> None:
        self.lose(ConnectionAborted())

    def lose(self, reason: Exception) -> None:
        if not self.lost:
            self.lost = True
            self.protocol.connectionLost(Failure(reason))

    def getPeer(self) -> Any:
        return None


class _Session:
    """One client and one server, with a store of their own."""

    def __init__(self, root: Path) -> None:
        self.clock = Clock()
        self.store = _store(root)
        durability = GroupCommit(_Inline(), self.clock, "batch", _NoDisk())
        service = GbsService(self.store, durability, _SWISSNUM)
        self.server = GbsSite(service, self.clock)
        self.transport = _Transport()
        connection = self.server.buildProtocol(None)
        assert connection is not None
        self.connection: GbsConnection = connection
        connection._parser.passed_on_bytes = 64  # what is left of short bodies goes by llhttp, too
        self.transport.protocol = connection
        connection.makeConnection(self.transport)
        self.unsent = bytearray()
        self.sent = bytearray()

    def deliver(self) -> None:
        """What the client has sent arrives, as far as the server reads."""
        transport = self.transport
        while self.unsent and not (transport.paused or transport.lost or transport.closing):
            piece = bytes(self.unsent[:_PIECE_BYTES])
            del self.unsent[:_PIECE_BYTES]
            self.sent += piece
            self.connection.dataReceived(piece)
            self.check_bounds()

    def pass_time(self, seconds: float) -> None:
        """Let the server do what it does later."""
        steps = 3 if seconds < 1 else int(seconds // 5)
        self.clock.pump([seconds / steps] * steps)
        self.deliver()

    def check_bounds(self) -> None:
        """Neither what came nor what is to go is held without end."""
        connection = self.connection
        events = sum(len(event) for event in connection._events if isinstance(event, bytes))
        queued = sum(map(len, connection._intake.waiting)) + events
        assert queued <= _QUEUE_BYTES, f"{queued} bytes of requests are held"
        assert len(connection._events) <= _QUEUE_EVENTS, "too much of what came is held"
        assert len(connection._order.unanswered) <= 1000, "too many requests are unanswered"
        assert self.transport.unread <= _UNSENT_BYTES, "it writes to a client that does not read"
        assert connection._order.waiting_bytes >= 0
        assert connection._order.streams in (0, 1)

    def finish(self) -> None:
        """Let all be answered, then let the time run out."""
        transport, connection = self.transport, self.connection
        self.deliver()
        transport.read()
        for _ in range(200):
            self.pass_time(0.006)  # longer than shares wait for company on their way to the disk
            if not (self.unsent or transport.paused or connection._order.unanswered):
                break
        if not (transport.lost or transport.closing):
            assert not transport.paused, "it does not read on"
            assert not self.unsent, "it reads nothing"
            assert not connection._order.unanswered, "it leaves something unanswered"
            _check_answers(bytes(self.sent), bytes(transport.written))
        assert transport.written.startswith(b"HTTP/1.1 ") or not transport.written
        self.pass_time(70)
        assert transport.lost or transport.closing, "a silent client is not turned away"
        transport.lose(ConnectionDone())
        assert not self.server.connections
        self.clock.advance(1)
        assert not self.clock.getDelayedCalls(), "something is left for later"
        with self.store.open_share(_SI, 0) as reader:
            assert reader.read(0, 1000) == _SMALL, "a stored share has changed"


def _lose(session: _Session) -> None:
    session.transport.lose(ConnectionDone())


_EVENTS: dict[int, Callable[[_Session], object]] = dict(
    enumerate(
        (
            _Session.deliver,
            lambda session: session.pass_time(0.003),
            lambda session: session.pass_time(6),
            lambda session: session.pass_time(65),
            lambda session: session.transport.stop_reading(),
            lambda session: session.transport.read(),
            _lose,
            lambda session: session.server.stop(),
            lambda session: session.pass_time(700),
        ),
        0xE0,
    )
)


def run(data: bytes) -> None:
    """Send it to a new server."""
    scratch = "/dev/shm" if os.path.isdir("/dev/shm") else None
    root = Path(tempfile.mkdtemp(prefix="pipegrid-fuzz-", dir=scratch))
    errors = _Errors()
    globalLogPublisher.addObserver(errors)
    files = open_files()
    try:
        session = _Session(root)
        try:
            _play(session, data)
            session.finish()
        finally:
            session.store.close()
    finally:
        globalLogPublisher.removeObserver(errors)
        shutil.rmtree(root)
    errors.raise_first()
    assert not (left := left_open(files)), f"open still: {left[:5]}"


def _play(session: _Session, data: bytes) -> None:
    codes = iter(data)
    for code in codes:
        if code == 0xFF:
            session.unsent += bytes(itertools.islice(codes, 1))
        elif code in _EVENTS:
            session.deliver()
            _EVENTS[code](session)
            session.check_bounds()
        else:
            session.unsent += _WORDS.get(code) or bytes([code])


def _check_answers(sent: bytes, written: bytes) -> None:
    """As many answers as requests, if the connection has stayed open."""
    requests = _Counter()
    requests.count(httptools.HttpRequestParser(requests), sent)
    if b"HEAD" in requests.methods or requests.failed:
        return
    answers = _Counter()
    answers.count(httptools.HttpResponseParser(answers), written)
    assert not answers.failed, "the answers are no HTTP"
    assert answers.complete - answers.interim == requests.complete, (
        f"{requests.complete} requests and {answers.complete} answers"
    )


class _Counter:
    """Counts messages, as httptools finds them."""

    def __init__(self) -> None:
        self.complete = 0
        self.interim = 0
        self.failed = False
        self.methods: set[bytes] = set()
        self._parser: Any = None

    def count(self, parser: Any, data: bytes) -> None:
        self._parser = parser
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.failed = True

    def on_headers_complete(self) -> None:
        if hasattr(self._parser, "get_method"):
            self.methods.add(self._parser.get_method())

    def on_message_complete(self) -> None:
        self.complete += 1
        if hasattr(self._parser, "get_status_code"):
            self.interim += self._parser.get_status_code() < 200


@implementer(ILogObserver)
class _Errors:
    """Keeps what is logged as an error: the server catches what goes wrong in it."""

    def __init__(self) -> None:
        self.events: list[LogEvent] = []

    def __call__(self, event: LogEvent) -> None:
        if event.get("log_level", LogLevel.info) >= LogLevel.error:
            self.events.append(event)

    def raise_first(self) -> None:
        if self.events:
            failure = self.events[0].get("log_failure")
            cause = failure.value if isinstance(failure, Failure) else None
            raise AssertionError(f"the server logged an error: {self.events[0]}") from cause


class _Inline:
    """Workers that work at once."""

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        return execute(function, *args, **kwargs)


class _NoDisk(Disk):
    """Everything is durable already."""

    def sync_data(self, shares: Sequence[Committable]) -> None:
        """Nothing to do."""

    def sync_names(self, directories: Mapping[str, int]) -> None:
        """Nothing to do."""


def _store(root: Path) -> ShareStore:
    """Return a store with a small and a large share."""
    store = ShareStore(
        root,
        clock=lambda: 1_700_000_000.0,
        free_bytes=lambda _: 1 << 20,
        boot_id=lambda: b"b" * 16,
    )
    for number, data in enumerate((_SMALL, _LARGE)):
        store.allocate(_SI, {number}, len(data), _SECRETS)
        upload = store.upload(_SI, number, _SECRETS.upload)
        upload.write(0, [data])
        upload.publish()
    return store


def seeds() -> dict[str, bytes]:
    """Return sessions of all kinds: each whole request, and requests spelt out."""
    words = {word: code for code, word in _WORDS.items()}

    def code(*parts: bytes | int) -> bytes:
        return b"".join(
            bytes([part])
            if isinstance(part, int)
            else bytes([words[part]])
            if part in words
            else part
            for part in parts
        )

    deliver, soon, six_s, minute, stop_reading, read, lose, stop, stuck = range(0xE0, 0xE9)
    whole = [c for c, word in _WORDS.items() if c >= 0xA0]
    made = {f"request-{c:02x}": bytes([c]) for c in whole}
    allocate, other, _, write, part, rest, _, large, some = range(0xA0, 0xA9)
    get, get_large, get_range, get_2, shares, version, abort = range(0xA9, 0xB0)
    si = gbs_paths_headers.allocate_path(_SI).encode()
    line = _VERSION_LINE
    return made | {
        "all": bytes(whole),
        "all-cut": bytes(itertools.chain.from_iterable((c, soon) for c in whole)),
        "put": code(allocate, write, get_2, deliver, soon, get_2),
        "put-parts": code(allocate, part, deliver, rest, get_2),
        "put-large": code(other, large),
        "put-cut-off": code(other, some, deliver, lose),
        "put-aborted": code(allocate, part, abort, part),
        "slow-reader": code(stop_reading, get_large, get_large, deliver, get, read, shares),
        "stuck-reader": code(stop_reading, get_large, get_range, stuck),
        "flood": code(
            stop_reading, get_large, get, deliver, b"POST ", si, line, _AUTHORIZED, b"Content-Length: ",
            b"800000\r\n\r\n", bytes([0x9E] * 40), deliver, version,
        ),
        "many": code(stop_reading, bytes([version] * 300), deliver, read),
        "drained": code(version, get_large, stop, version),
        "idle": code(version, minute, version),
        "dribble": code(b"GET ", six_s, b"/", six_s, line, six_s, _AUTHORIZED, minute),
        "head": code(b"HEAD ", si, b"/0", line, _AUTHORIZED, b"\r\n", get),
        "continue": code(
            b"PATCH ", si, b"/0", line, _AUTHORIZED, _UPLOAD, b"Expect: 100-continue\r\n",
            b"Content-Range: bytes ", b"0-1/*\r\n", b"Content-Length: ", b"2\r\n\r\n", deliver, b"ab",
        ),
        "chunked": code(
            b"POST ", si, b"/0/corrupt", line, _AUTHORIZED, b"Transfer-Encoding: chunked\r\n", b"\r\n",
            b"5\r\n", b"\xff\xa1abcd\r\n", deliver, b"0\r\n\r\n", version,
        ),
        "old": code(b"GET ", gbs_paths_headers.VERSION_PATH.encode(), b" HTTP/1.0\r\n", _AUTHORIZED, b"\r\n"),
        "close": code(b"GET ", si, line, b"Connection: close\r\n", b"\r\n", version),
        "upgrade": code(b"GET ", si, line, b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"\r\n"),
        "long-head": code(b"GET /", bytes([0x9D] * 8), line),
        "many-headers": code(b"GET /", line, bytes([0x9F] * 8), b"\r\n"),
        "large-body": code(b"POST ", si, line, _AUTHORIZED, b"Content-Length: ", b"20000\r\n\r\n", 0x9E),
        "noise": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "no-host": code(b"GET /", b" HTTP/1.1\r\n", _AUTHORIZED, b"\r\n", version),
        "two-hosts": code(b"GET /", line, b"Host: y\r\n", _AUTHORIZED, b"\r\n", version),
        "connect": b"CONNECT x:1 HTTP/1.1\r\n\r\n",
        "two-lengths": code(b"GET /", line, b"Content-Length: ", b"1\r\n", b"Content-Length: ", b"2\r\n\r\n"),
    }  # fmt: skip
