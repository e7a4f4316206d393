"""One pipelined connection of the epoll driver."""

from __future__ import annotations

import errno
import select
from _socket import SO_ERROR, SOL_SOCKET, socket
from collections import deque
from collections.abc import Callable, Sequence

from pipegrid.mirror.archive_file import misfit
from pipegrid.mirror.connection_scheduler import HostSchedule, ScheduledConnection
from pipegrid.mirror.epoll_response_head import (
    LF_ALONE,
    MAX_HEAD_BYTES,
    REDIRECTS,
    USUAL_HEAD,
    Head,
    UnsupportedResponse,
    judge,
    parse_head,
)
from pipegrid.mirror.epoll_socket_cache import PAGE_BYTES, Page
from pipegrid.mirror.file_scheduler import FetchJob

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import
if TYPE_CHECKING:
    from typing import Any, Protocol

    from pipegrid.mirror.epoll_file_store import FileStore, IncomingFile

    class ConnectionEvents(Protocol):
        """The methods of the driver that a connection calls."""

        @property
        def store(self) -> FileStore: ...

        def refused(self, connection: Connection, job: FetchJob, reason: str, wrong: bool) -> None:
            """
            Handle a file that the mirror lacks, or of which it has a wrong version.

            Raises:
                Lost: no further response on this connection can be trusted.
            """

        def redirected(
            self, connection: Connection, job: FetchJob, locations: Sequence[bytes]
        ) -> None:
            """
            Handle a redirect of the file; ``locations`` are the response's ``Location`` fields.

            Raises:
                Lost: as for ``refused``.
            """

        def not_now(self, connection: Connection, job: FetchJob, reason: str) -> None:
            """Handle a response which says that the mirror cannot serve files now."""


SKIPPED_BYTES = 64 << 10
"""The maximum length of an unwanted response that is read, so that the connection can be kept."""

GATHERED_BYTES = 128 << 10
"""Maximum size of a file that is stored when complete; longer files are stored page by page, in a thread."""

_BLOCKED = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS, errno.EINTR})


class Lost(Exception):
    """
    The connection has ended; the text is a clause that says why.

    Attributes:
        announced: the server had announced the end.
        ours: the client has ended the connection; in both cases the end does not count against the mirror.
    """

    def __init__(self, reason: str, announced: bool = False, ours: bool = False) -> None:
        super().__init__(reason)
        self.announced = announced
        self.ours = ours


class Connection(ScheduledConnection):
    """
    A connection that sends pipelined requests and cuts the responses out of the received pages.

    It supports only the usual case: ``HTTP/1.1``, a known length, a connection that stays open. Everything
    else is an ``UnsupportedResponse`` or a refusal, which the Twisted driver handles. If a response were cut
    out wrongly, the hash of its file would not match.

    The bytes are not copied, unless a response spans several pages.

    Args:
        host: the host that the connection leads to.
        sock: not blocking; it may still be connecting.
        secure: starts TLS on a connected socket; None: no TLS, or TLS has already been started.
        count: how many files the connection has delivered before.

    Attributes:
        asked: the jobs of requests without any part of a response, in order.
        outstanding_bytes: of the files of these requests, and the rest of the file that is being received.
    """

    outstanding_bytes = 0

    def __init__(
        self,
        runner: ConnectionEvents,
        host: HostSchedule,
        sock: socket,
        secure: Callable[[Any], Any] | None = None,
        count: int = 0,
    ) -> None:
        super().__init__(host, count=count)
        self.mirror = host.mirror.number
        self.sock: Any = sock
        self.asked: deque[FetchJob] = deque()
        self.wants_to_write = True  # until the socket is known to be connected
        self._runner = runner
        self._secure = secure
        self._tls = secure is not None or hasattr(sock, "do_handshake")
        self._connected = False
        self._out = b""
        self._requests: list[bytes] = []
        self._head = b""  # the received beginning of a response's head
        self._job: FetchJob | None = None  # the job whose body is being received
        self._left = 0  # the bytes of that body that are outstanding
        self._gathered: bytearray | None = None
        self._part: IncomingFile | None = None
        self._closes = False

    @property
    def is_outstanding(self) -> bool:
        """Whether any response is outstanding or incomplete."""
        return self._job is not None or bool(self.asked)

    @property
    def mask(self) -> int:
        """The events of the socket to wait for, for ``epoll``."""
        return select.EPOLLIN | (select.EPOLLOUT if self.wants_to_write else 0)

    @property
    def can_go_on(self) -> bool:
        """
        Whether another driver can use the connection: nothing is outstanding, and no handshake is incomplete.
        """
        return not (self.is_outstanding or self._closes or self._head) and (
            self._connected or not self._tls
        )

    @property
    def unanswered(self) -> list[FetchJob]:
        """The jobs without a complete response; the one whose response is being received is first."""
        receiving = self._job
        return [*([receiving] if receiving not in (None, _NOBODY) else ()), *self.asked]

    def ask(self, job: FetchJob, now_s: float) -> None:
        """Queue the request for one more file; ``write`` sends it."""
        self._requests.append(self.host.ask(self, job, now_s))
        self.asked.append(job)
        self.outstanding_bytes += job.size_bytes
        self.count += 1

    def write(self) -> None:
        """
        Send queued requests, as far as the socket accepts them.

        Raises:
            Lost: the connection has ended, or could not be made.
        """
        try:
            if not self._connected:
                self._connect()
            if self._requests:
                self._out += b"".join(self._requests)
                self._requests.clear()
            while self._out:
                sent = self.sock.send(self._out)
                self._out = self._out[sent:]
            self.wants_to_write = False
        except OSError as error:
            self._look_blocked(error)

    def _connect(self) -> None:
        if not self._tls or self._secure is not None:
            failed = self.sock.getsockopt(SOL_SOCKET, SO_ERROR)
            if failed:
                raise Lost(OSError(failed, "").strerror or str(OSError(failed)))
        if self._secure is not None:
            try:
                self.sock.getpeername()
            except OSError as error:  # the socket is still connecting
                raise BlockingIOError(errno.EINPROGRESS, "") from error
            self.sock, self._secure = self._secure(self.sock), None
        if self._tls:
            self.sock.do_handshake()
        self._connected = True

    def _look_blocked(self, error: OSError) -> None:
        """Raise ``Lost`` for an error, unless it only means that the call would block."""
        name = type(error).__name__  # it may be from ``ssl``, which is imported only if needed
        if name == "SSLWantReadError":
            self.wants_to_write = False
        elif name == "SSLWantWriteError" or error.errno in _BLOCKED:
            self.wants_to_write = True
        else:
            raise Lost((error.strerror or str(error)).rstrip("."))

    def read(self, now_s: float) -> None:
        """
        Receive bytes and process the responses in them.

        Raises:
            Lost: the connection has ended.
            UnsupportedResponse: the server does something that this driver does not support.
        """
        if not self._connected or (self._tls and self._out):
            self.write()
            if not self._connected:
                return
        store = self._runner.store
        more = True
        while more:
            page = store.take_page()
            try:
                size = self._receive(page)
                if size:
                    self.last_s = now_s
                    self._parse(page, size)
            finally:
                store.give_page(page)
            # ``epoll`` does not report bytes that the TLS library has already decrypted.
            more = self._tls and size > 0 and self.sock.fileno() >= 0 and self.sock.pending() > 0

    def _receive(self, page: Page) -> int:
        """Fill a page as far as possible without waiting; return the number of bytes."""
        size = 0
        try:
            while size < PAGE_BYTES:
                got = self.sock.recv_into(page.view[size:] if size else page.data)
                if not got:
                    if size:
                        break  # the next read detects the end again
                    cut = self._job is not None and self._job is not _NOBODY
                    raise Lost("the server closed it", self._closes and not cut)
                size += got
                if not self._tls:  # a TLS socket returns one record for each call
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            try:
                self._look_blocked(error)
            except Lost:
                if not size:
                    raise
        return size

    def _parse(self, page: Page, size: int) -> None:
        at = 0
        while at < size:
            take = self._take_head if self._job is None else self._take_body
            at = take(page, at, size)

    def _take_head(self, page: Page, at: int, size: int) -> int:
        if self._head:
            joined = self._head + bytes(page.view[at : min(size, at + MAX_HEAD_BYTES)])
            end = joined.find(b"\r\n\r\n")
            after = at + end + 4 - len(self._head)
            head = joined[:end] if end >= 0 else joined
        else:
            usual = USUAL_HEAD.match(page.view, at, size)
            if usual is not None and self.asked and not self._closes:
                self._begin(Head(200, int(usual[1]), False))
                return usual.end()
            end = page.data.find(b"\r\n\r\n", at, size)
            after = end + 4
            head = bytes(page.view[at : end if end >= 0 else size])
        if len(head) > MAX_HEAD_BYTES:
            raise UnsupportedResponse("its heads are too long")
        if end < 0:
            if b"\n\n" in head:
                raise UnsupportedResponse(LF_ALONE)
            self._head = head
            return size
        self._head = b""
        if not self.asked or self._closes:
            raise UnsupportedResponse("it sends a response without a request")
        self._begin(parse_head(head))
        return after

    def _begin(self, head: Head) -> None:
        job = self.asked.popleft()
        self.outstanding_bytes -= job.size_bytes
        self._closes = head.closes
        self.answered += 1
        self.host.has_answered = True
        wanted = job.wanted
        runner = self._runner
        if head.status in REDIRECTS:
            runner.redirected(self, job, head.locations)
        elif head.status != 200:
            transient, reason = judge(head.status)
            if transient:
                runner.not_now(self, job, reason)
            else:
                runner.refused(self, job, reason, False)
        elif head.length != wanted.size and (wrong := misfit(wanted, head.length)):
            runner.refused(self, job, wrong, True)
        elif not job.is_over:
            self._job, self._left = job, head.length
            self.outstanding_bytes += head.length
            if not head.length:
                self._store_whole(memoryview(b""))
            return
        else:  # another mirror was faster
            self.host.put_back(job)
        self._skip(head.length)

    def _skip(self, length: int) -> None:
        if length > SKIPPED_BYTES:
            raise Lost("too much of an unwanted response was outstanding", ours=True)
        if length:
            self._job, self._left, self._gathered = _NOBODY, length, None

    def _take_body(self, page: Page, at: int, size: int) -> int:
        end = min(size, at + self._left)
        length = end - at
        self._left -= length
        job = self._job
        if job is _NOBODY:
            if not self._left:
                self._done()
            return end
        self.outstanding_bytes -= length
        self.host.received_bytes += length
        if self._part is not None:
            self._part.add(page, at, end)
            if not self._left:
                part, self._part = self._part, None
                part.end()
                self._done()
        elif self._gathered is not None:
            self._gathered += page.view[at:end]
            if not self._left:
                self._store_whole(memoryview(self._gathered))
        elif not self._left:
            self._store_whole(page.view[at:end])
        elif length + self._left <= GATHERED_BYTES:
            self._gathered = bytearray(page.view[at:end])
        else:
            assert job is not None
            self._part = self._runner.store.begin(job, self.mirror)
            self._part.add(page, at, end)
        return end

    def _store_whole(self, data: memoryview) -> None:
        job = self._job
        assert job is not None
        wrong = self._runner.store.whole(job, self.mirror, data)
        self._job = self._gathered = None
        if wrong is not None:
            self._runner.refused(self, job, wrong, True)
        self._done()

    def _done(self) -> None:
        self._job = self._gathered = None
        if self._closes:
            raise Lost("it closes after its last response", announced=True)

    def close(self) -> list[FetchJob]:
        """Close the connection; return the unanswered jobs, the one whose response was due first."""
        left = self.unanswered
        self.asked.clear()
        self._job = None
        self.outstanding_bytes = 0
        part, self._part = self._part, None
        if part is not None:
            part.drop()
        self.sock.close()
        return left


_NOBODY: Any = object()
