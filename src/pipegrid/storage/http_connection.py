"""
One client's connection to the GBS server: requests in, answers out, both in order, all of it bounded.

**Order.** Requests are begun in the order in which they came, each after the one before has been *carried
out*, and answered in that order. There is one thing that is not waited for: a share's becoming durable. While
that is pending, later requests are begun, so that many shares of one connection become durable together;
but not a request for the same storage index, which might see that the share is not there yet. Only writing
(or aborting) *another* share of that index goes on: nothing about it depends on the first.

**Back-pressure.** A request is not begun, and then nothing more is read, while

* the transport is full, that is, the client does not read its answers;
* a long answer is being streamed, or waits for its turn: one open share per connection;
* 128 requests are unanswered, or 256 KiB of answers wait behind one that is not ready;
* the server has too many shares waiting to become durable.

httptools cannot be stopped in the middle of what it was fed. So it is fed 16 KiB at most, or as much of a
body as is sure to come, and what it finds behind a request that must wait is queued (``_events``); what it
was not fed waits as it is (``_unparsed``), at most what the transport had read already.

The connection is its transport's producer for as long as it lives. Registering one for each answer is what
goes wrong elsewhere, when a long answer begins while the transport is full.

**Time.** ``tick`` is called every few seconds, and closes what has been silent for 60 s without being owed an
answer, heads and small bodies that dribble in for longer than that, and clients that for ten minutes
took nothing of what they asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import httptools
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.flow.tls import move_much
from pipegrid.storage import http_answers as answers
from pipegrid.storage.http_answers import Answer, Stream
from pipegrid.storage.http_bundles import Bundle
from pipegrid.storage.http_parser import RequestParser
from pipegrid.storage.http_requests import Request
from pipegrid.storage.paths import Key
from pipegrid.wire.gbs_bundles import MAX_SHARES
from pipegrid.wire.gbs_http import Resource

if TYPE_CHECKING:
    from pipegrid.storage.http_bodies import Receiver
    from pipegrid.storage.http_service import GbsService
    from pipegrid.storage.server import GbsServer

MAX_UNANSWERED = 128
MAX_WAITING_ANSWER_BYTES = 256 * 1024
FEED_BYTES = 16384
RECEIVE_BYTES = 64 * 1024
"""Read from the socket at a time; a thousand clients that take no answers may each have as much waiting."""
BULK_RECEIVE_BYTES = 128 * 1024
"""
The same in the middle of a long body, which goes to the disk as it comes. With 512 KiB, which leaves the
processor's cache between two steps, a megabyte cost half as much time again.
"""

IDLE_TIMEOUT_S = 60.0
HEAD_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 60.0  # of bodies that are messages; share data only has to keep coming
STUCK_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 30.0

log = Logger()

_END = b""  # among the events: the request's body is complete


@attrs.define(eq=False)
class _Slot:
    """The place of one answer in the order of answers."""

    with_body: bool = True
    connection: bytes = b""
    last: bool = False
    shares: Sequence[Key] = ()
    data: bytes | None = None
    stream: Stream | None = None


@attrs.frozen
class _Broken:
    """Among the events: what follows is not HTTP, or too much of it."""

    answer: Answer
    reason: str


@implementer(IPushProducer)
class GbsConnection(Protocol):
    """See above. The reactor's thread only."""

    def __init__(self, server: GbsServer, service: GbsService, now_s: float) -> None:
        self._server = server
        self._service = service
        # What comes in.
        self._parser = RequestParser(self)
        self._unparsed: deque[bytes] = deque()
        self._events: deque[Request | bytes | _Broken] = deque()
        self._paused_reading = False
        self._reads_bulk = False
        # What is being carried out.
        self._request: Request | None = None
        self._receiver: Receiver | None = None
        self._body_left = 0  # that has been announced
        self._working = False
        self._waits_for_room = False
        # What goes out.
        self._slots: deque[_Slot] = deque()
        self._waiting_bytes = 0
        self._streams = 0
        self._committing: dict[bytes, list[int]] = {}
        self._can_write = True
        self._draining = False
        self._closing_since_s: float | None = None
        self._lost = False
        # When what happened last.
        self._heard_s = now_s
        self._began_s = now_s
        self._moved_s = now_s

    def __repr__(self) -> str:
        state = "closing" if self._closing_since_s is not None else "open"
        return (
            f"<GbsConnection {state}, {len(self._slots)} unanswered, {len(self._events)} queued, "
            f"{'' if self._can_write else 'not '}writable>"
        )

    # Twisted's side.

    def connectionMade(self) -> None:
        """Become the transport's producer for good."""
        transport = self._transport
        if hasattr(transport, "setTcpNoDelay"):
            transport.setTcpNoDelay(True)
        move_much(transport, RECEIVE_BYTES)
        transport.registerProducer(self, True)
        self._server.connected(self)

    def dataReceived(self, data: bytes) -> None:
        """Take bytes in any split."""
        self._heard_s = self._server.seconds()
        if self._closing_since_s is not None or self._parser.broken:
            return
        in_body = self._receiver is not None and not (self._unparsed or self._events or self._slots)
        if in_body and not self._working and len(data) <= self._feed_bytes:
            # In the middle of a body there is nothing to consider, and most bytes come there.
            self._feed(data)
            if self._receiver is not None and not (self._events or self._slots):
                return
            data = b""
        if data:
            self._unparsed.append(data)
        self._work()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Keep what was received; forget what was not answered."""
        self._lost = True
        if self._closing_since_s is None:
            self._closing_since_s = self._server.seconds()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.abandon()
        for slot in self._slots:
            if slot.stream is not None:
                slot.stream.close()
        self._slots.clear()
        self._events.clear()
        self._unparsed.clear()
        self._server.disconnected(self)

    def pauseProducing(self) -> None:
        """The transport is full."""
        self._can_write = False
        self._moved_s = self._server.seconds()

    def resumeProducing(self) -> None:
        """The transport has room."""
        self._can_write = True
        self._moved_s = self._server.seconds()
        self._work()

    def stopProducing(self) -> None:
        """The connection is lost; ``connectionLost`` follows."""

    # The server's side.

    def tick(self, now_s: float) -> None:
        """Close the connection if its time is up."""
        if self._closing_since_s is not None:
            if now_s - self._closing_since_s > CLOSE_TIMEOUT_S and not self._lost:
                self._transport.abortConnection()
        elif not self._can_write:
            if now_s - self._moved_s > STUCK_TIMEOUT_S:
                self._give_up("it takes nothing of what it asked for", now=True)
        elif self._parser.in_head and not self._events:
            if now_s - self._began_s > HEAD_TIMEOUT_S:
                self._give_up("its request does not get on")
        elif self._slots or self._events:
            pass  # we owe it an answer
        elif self._receiver is not None and self._body_is_message():
            if now_s - self._began_s > BODY_TIMEOUT_S:
                self._give_up("its request does not get on")
        elif now_s - self._heard_s > IDLE_TIMEOUT_S:
            self._give_up("")

    def drain(self) -> None:
        """Answer what has been begun, then close."""
        self._draining = True
        if not self._slots and self._receiver is None:
            self._close()

    def abort(self) -> None:
        """Close it now."""
        if not self._lost:
            self._transport.abortConnection()

    def send_ready(self) -> None:
        """Send the answers that have become ready since; the server calls it once for many."""
        self._work()

    # The parser's side.

    def request_began(self) -> None:
        """Its head may take so long, from now on."""
        self._began_s = self._heard_s

    def head_found(self, request: Request) -> None:
        """Begin with it, or let it wait."""
        if self._events or not self._may_begin(request):
            self._events.append(request)
        else:
            self._begin(request)

    def body_found(self, data: bytes) -> None:
        """Part of a body."""
        if self._events:
            self._events.append(data)
        else:
            self._receive(data)

    def end_found(self) -> None:
        """The request is complete."""
        if self._events or not self._may_end():
            self._events.append(_END)
        else:
            self._end()

    def nonsense_found(self, answer: Answer, reason: str) -> None:
        """Answer what came before, then this, then close."""
        self._unparsed.clear()
        self._events.append(_Broken(answer, reason))

    # One request.

    def _may_begin(self, request: Request) -> bool:
        if not self._can_write or self._streams or len(self._slots) >= MAX_UNANSWERED:
            return False
        if self._waiting_bytes >= MAX_WAITING_ANSWER_BYTES:
            return False
        target = request.target
        if target is None:
            return True
        if target.resource is Resource.SHARE and not self._service.has_room:
            self._wait_for_room()
            return False
        pending = self._committing.get(target.storage_index)
        if pending is None:
            return True
        changes = request.method == b"PATCH" or target.resource is Resource.ABORT
        return changes and target.share_number not in pending

    def _begin(self, request: Request) -> None:
        if self._closing_since_s is not None or self._draining:
            return
        self._request = request
        self._receiver = self._service.begin(request)
        self._body_left = request.content_length or 0
        if (self._body_left > RECEIVE_BYTES) != self._reads_bulk:
            self._reads_bulk = not self._reads_bulk
            move_much(self._transport, BULK_RECEIVE_BYTES if self._reads_bulk else RECEIVE_BYTES)
        if request.expects_continue:
            self._slots.append(_Slot(data=answers.CONTINUE))
            self._waiting_bytes += len(answers.CONTINUE)

    def _receive(self, data: bytes) -> None:
        if self._receiver is not None:
            self._body_left -= len(data)
            self._receiver.write(data)

    def _may_end(self) -> bool:
        """Whether a request whose body is complete may be carried out; only bundles ever wait then."""
        receiver = self._receiver
        if not isinstance(receiver, Bundle) or receiver.may_finish(self._committing):
            return True
        if not self._service.has_room_for(MAX_SHARES):
            self._wait_for_room()
        return False

    def _end(self) -> None:
        request, self._request = self._request, None
        receiver, self._receiver = self._receiver, None
        if request is None or receiver is None:
            return
        slot = _Slot(request.method != b"HEAD")
        if not request.keep_alive:
            slot.connection, slot.last = b"Connection: close\r\n", True
        elif request.http10:
            slot.connection = b"Connection: keep-alive\r\n"
        self._slots.append(slot)
        outcome = receiver.finish()
        if isinstance(outcome, Deferred):
            slot.shares = receiver.shares
            for storage_index, number in slot.shares:
                self._committing.setdefault(storage_index, []).append(number)
            outcome.addCallback(self._committed, slot)
        else:
            self._fill(slot, outcome)
        if slot.last:
            self._draining = True

    def _fill(self, slot: _Slot, answer: Answer) -> None:
        slot.data = answer.render(slot.with_body, slot.connection)
        self._waiting_bytes += len(slot.data)
        if answer.stream is not None:
            if slot.with_body:
                slot.stream = answer.stream
                self._streams += 1
            else:
                answer.stream.close()

    def _committed(self, answer: Answer, slot: _Slot) -> None:
        for storage_index, number in slot.shares:
            pending = self._committing[storage_index]
            pending.remove(number)
            if not pending:
                del self._committing[storage_index]
        if not self._lost:
            self._fill(slot, answer)
            if not self._working:
                self._server.has_ready(self)

    # Keeping it all moving.

    def _work(self) -> None:
        """Do whatever can be done now: send, begin, parse; and read only if nothing is left to do."""
        if self._working or self._lost:
            return
        self._working = True
        try:
            while True:
                self._send()
                if self._closing_since_s is not None:
                    return
                if self._handle_events():
                    continue
                if self._events or not self._unparsed:
                    break
                self._feed(self._next_piece())
            self._read_on(not self._events)
        except Exception:
            self._fail()
        finally:
            self._working = False

    def _handle_events(self) -> bool:
        """Handle queued events until one must wait; returns whether any was handled."""
        events = self._events
        handled = False
        while events:
            event = events[0]
            if isinstance(event, Request):
                if not self._may_begin(event):
                    break
                self._begin(event)
            elif isinstance(event, _Broken):
                self._refuse(event)
            elif event:
                self._receive(event)
            elif self._may_end():
                self._end()
            else:
                break
            if events:
                events.popleft()
            handled = True
        return handled

    def _fail(self) -> None:
        log.failure("a connection failed within the server")
        self._transport.abortConnection()

    def _next_piece(self) -> bytes:
        data, limit = self._unparsed.popleft(), self._feed_bytes
        if len(data) > limit:
            self._unparsed.appendleft(data[limit:])
            data = data[:limit]
        return data

    @property
    def _feed_bytes(self) -> int:
        """How much the parser may have at once: a body, however long, is one event."""
        return max(FEED_BYTES, self._body_left) if self._receiver is not None else FEED_BYTES

    def _feed(self, data: bytes) -> None:
        """Let the parser have data, at most ``_feed_bytes``; what it finds is handled, or queued."""
        try:
            self._parser.feed(data)
        except httptools.HttpParserCallbackError:
            self._fail()

    def _refuse(self, broken: _Broken) -> None:
        if self._draining:
            return  # behind the last request of a connection anything may follow
        self._server.note_hostile(self._peer(), broken.reason)
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.abandon()
        self._request = None
        slot = _Slot(connection=b"Connection: close\r\n", last=True)
        self._slots.append(slot)
        self._fill(slot, broken.answer)
        self._draining = True

    def _send(self) -> None:
        """Send what is ready, in order, as far as the transport takes it."""
        slots = self._slots
        out: list[bytes] = []
        last = False
        while slots and slots[0].data is not None and not last:
            slot = slots[0]
            if slot.stream is not None:
                self._write(out, slot)
                if not self._can_write or self._closing_since_s is not None:
                    return
                if not self._pump(slot.stream):
                    return
                slot.stream.close()
                self._streams -= 1
            else:
                assert slot.data is not None
                out.append(slot.data)
                self._waiting_bytes -= len(slot.data)
            last = slot.last
            slots.popleft()
        if out:
            self._transport.write(b"".join(out))
        if last or (self._draining and not slots and self._receiver is None):
            self._close()

    def _write(self, out: list[bytes], slot: _Slot) -> None:
        """Write what stands before a stream, and its head, once."""
        if slot.data:
            out.append(slot.data)
            self._waiting_bytes -= len(slot.data)
            slot.data = b""
        if out:
            self._transport.write(b"".join(out))
            out.clear()

    def _pump(self, stream: Stream) -> bool:
        """Send from a stream until the transport is full; returns whether the stream is at its end."""
        while self._can_write:
            try:
                data = stream.read()
            except Exception:
                log.failure("a share could not be read while it was sent")
                self._transport.abortConnection()  # the length has been announced
                return False
            if not data:
                return True
            self._transport.write(data)
        return False

    def _read_on(self, wanted: bool) -> None:
        if wanted == self._paused_reading:
            self._paused_reading = not wanted
            if wanted:
                self._transport.resumeProducing()
            else:
                self._transport.pauseProducing()

    def _wait_for_room(self) -> None:
        if not self._waits_for_room:
            self._waits_for_room = True
            self._service.call_when_room(self._room)

    def _room(self) -> None:
        self._waits_for_room = False
        if not self._lost:
            self._server.has_ready(self)

    # The end.

    def _give_up(self, reason: str, now: bool = False) -> None:
        if reason:
            self._server.note_hostile(self._peer(), reason)
        if now:
            self._transport.abortConnection()
        else:
            self._close()

    def _close(self) -> None:
        if self._closing_since_s is not None:
            return
        self._closing_since_s = self._server.seconds()
        self._events.clear()
        self._unparsed.clear()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.abandon()
        self._read_on(True)  # TLS has a last word to hear
        self._transport.unregisterProducer()
        self._transport.loseConnection()

    def _body_is_message(self) -> bool:
        return self._request is not None and self._request.method != b"PATCH"

    def _peer(self) -> str:
        return str(getattr(self._transport.getPeer(), "host", "somebody"))

    @property
    def _transport(self) -> Any:
        return self.transport
