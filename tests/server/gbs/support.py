"""A GBS server in memory: real store, real connections, a transport that only remembers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import httptools
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from pipegrid.disk.durability import Policy
from pipegrid.disk.group_commit import GroupCommit, ThreadRunner
from pipegrid.server.gbs.http_connection import GbsConnection, GbsSite
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.testing.grid import InlineWorkers
from pipegrid.wire import gbs_cbor_bodies, gbs_paths_headers
from pipegrid.wire.storage_messages import UploadSecrets
from tests.storage.support import SECRETS, SI, StoreTestCase

SWISSNUM = "yergyyx6ik6krfzxcgaic6oyibvvo6t2"
AUTHORIZATION = b"Authorization: " + gbs_paths_headers.authorization(SWISSNUM)


def one_turn(clock: Clock) -> None:
    """Call what is due now, and not what that has called later: one turn of a real reactor."""
    now_s = clock.seconds()
    due: list[Any] = [each for each in clock.getDelayedCalls() if each.getTime() <= now_s]
    for call in due:
        if call.active():
            clock.calls.remove(call)
            call.called = 1
            call.func(*call.args, **call.kw)


class MemoryTransport:
    """
    Remembers what is written. With ``room`` bytes of room it pauses its producer, like a client that does not
    read; ``read`` makes room again.
    """

    def __init__(self, room: int | None = None) -> None:
        self.protocol: Any = None
        self.producer: Any = None
        self.written = bytearray()
        self.unread = 0
        self.room = room
        self.paused = False
        self.closing = False
        self.aborted = False
        self.lost = False

    def write(self, data: bytes) -> None:
        """Take all of it, as transports do."""
        assert isinstance(data, bytes)
        assert not self.closing, "written after loseConnection"
        self.written += data
        self.unread += len(data)
        if self.room is not None and self.unread > self.room and self.producer:
            self.producer.pauseProducing()

    def read(self) -> None:
        """The client reads everything."""
        self.unread = 0
        if self.producer:
            self.producer.resumeProducing()

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """One at a time."""
        assert streaming
        assert self.producer is None
        self.producer = producer

    def unregisterProducer(self) -> None:
        """Forget it."""
        self.producer = None

    def pauseProducing(self) -> None:
        """Nothing is to be delivered."""
        self.paused = True

    def resumeProducing(self) -> None:
        """All may be delivered."""
        self.paused = False

    def loseConnection(self) -> None:
        """The end, when all is written."""
        assert self.producer is None
        self.closing = True

    def abortConnection(self) -> None:
        """The end."""
        self.aborted = True
        self.lose(ConnectionAborted())

    def lose(self, reason: Exception | None = None) -> None:
        """Tell the protocol."""
        if not self.lost:
            self.lost = True
            self.protocol.connectionLost(Failure(reason or ConnectionDone()))

    def getPeer(self) -> Any:
        """Return nobody in particular."""
        return None


@attrs.frozen
class Reply:
    """One parsed answer; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Replies:
    """What httptools calls while it parses answers."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.parser: Any = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body = b""

    def on_message_begin(self) -> None:
        self._headers, self._body = {}, b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self.replies.append(Reply(self.parser.get_status_code(), self._headers, self._body))


def parse_replies(data: bytes | bytearray) -> list[Reply]:
    """Return all complete answers (none of them to HEAD)."""
    replies = _Replies()
    if data:
        replies.parser.feed_data(bytes(data))
    return replies.replies


def head(method: str, path: str, *lines: bytes, body: bytes | None = None) -> bytes:
    """Return an authorised request's head."""
    all_lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: x", AUTHORIZATION, *lines]
    if body is not None:
        all_lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(all_lines) + b"\r\n\r\n"


def secret_headers(secrets: dict[str, bytes]) -> list[bytes]:
    """Return header lines."""
    return [b"X-Tahoe-Authorization: " + line for line in gbs_paths_headers.secret_lines(secrets)]


def lease_headers(secrets: UploadSecrets = SECRETS) -> list[bytes]:
    """Return the headers of an add-lease request."""
    lease = {
        gbs_paths_headers.RENEW_SECRET: secrets.lease.renew,
        gbs_paths_headers.CANCEL_SECRET: secrets.lease.cancel,
    }
    return secret_headers(lease)


def upload_header(secrets: UploadSecrets = SECRETS) -> list[bytes]:
    """Return the header with the upload secret."""
    return secret_headers({gbs_paths_headers.UPLOAD_SECRET: secrets.upload})


def allocate(
    numbers: Iterable[int], share_bytes: int, secrets: UploadSecrets = SECRETS, si: bytes = SI
) -> bytes:
    """Return a request."""
    body = gbs_cbor_bodies.pack_allocate(frozenset(numbers), share_bytes)
    headers = [*lease_headers(secrets), *upload_header(secrets)]
    return head("POST", gbs_paths_headers.allocate_path(si), *headers, body=body) + body


def write(
    number: int,
    offset: int,
    data: bytes,
    secrets: UploadSecrets = SECRETS,
    si: bytes = SI,
    end: int | None = None,
) -> bytes:
    """Return a request; ``end`` if the range shall not fit the body."""
    content_range = gbs_paths_headers.format_content_range(
        offset, offset + len(data) if end is None else end
    )
    headers = [*upload_header(secrets), b"Content-Range: " + content_range]
    return head("PATCH", gbs_paths_headers.share_path(si, number), *headers, body=data) + data


def read(number: int, begin: int | None = None, end: int = 0, si: bytes = SI) -> bytes:
    """Return a request, for the whole share unless a range is given."""
    wanted = [] if begin is None else [b"Range: " + gbs_paths_headers.format_range(begin, end)]
    return head("GET", gbs_paths_headers.share_path(si, number), *wanted)


def list_shares(si: bytes = SI) -> bytes:
    """Return a request."""
    return head("GET", gbs_paths_headers.shares_path(si))


VERSION = head("GET", gbs_paths_headers.VERSION_PATH)


class ServerTestCase(StoreTestCase):
    """A test with a server on a scratch directory."""

    policy: Policy = "batch"

    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        self.workers: ThreadRunner = InlineWorkers()
        self.restart()

    def restart(self, **options: Any) -> None:
        """Make a new server for the store that is there."""
        self.durability = GroupCommit(self.workers, self.clock, self.policy)
        self.service = GbsService(self.store, self.durability, SWISSNUM)
        self.server = GbsSite(self.service, self.clock, **options)

    def connect(self, room: int | None = None) -> tuple[GbsConnection, MemoryTransport]:
        """Return a new connection and its transport."""
        connection = self.server.buildProtocol(None)
        assert connection is not None
        transport = MemoryTransport(room)
        transport.protocol = connection
        connection.makeConnection(transport)
        return connection, transport

    def settle(self) -> None:
        """Let groups gather, become durable, and be answered."""
        for _ in range(10):
            self.clock.advance(0.001)
            for connection in self.server.connections:
                connection._check_invariants()

    def ask(self, *requests: bytes) -> list[Reply]:
        """Send requests on a connection of their own, all at once; returns the answers."""
        connection, transport = self.connect()
        connection.dataReceived(b"".join(requests))
        self.settle()
        replies = parse_replies(transport.written)
        transport.lose()
        return replies

    def statuses(self, *requests: bytes) -> list[int]:
        """Return only the answers' statuses."""
        return [reply.status for reply in self.ask(*requests)]
