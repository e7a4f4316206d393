"""
Long reads over HTTPS: each has its own connection, whose transport is paused while the consumer is paused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer, IProducer, IPushProducer
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.errors import ServerError, ServerUnreachable
from pipegrid.http11.exchange import RawResponse, ResponseError
from pipegrid.http11.host_pool import HostPool
from pipegrid.transport.gbs.requests import GbsRequests
from pipegrid.transport.gbs.response_outcomes import GbsAnswers

MAX_STALLED_ANSWERS = 3
PROGRESS_BYTES = 64 * 1024


class GbsStreams:
    """
    All streams from one server.

    A server built on Twisted cannot start a response after one that fills its transport. So a long response
    is alone on its connection, and pausing it delays no other response. Connections are kept for later
    streams.

    **Bounded, without deadlock.** At most ``max_streams`` streams have a connection at the same time. A
    client that reads ten shares of one server in parallel pauses the streams that are ahead until the slower
    streams have caught up; if the slower ones had to wait for a connection, that would take forever. So when
    a stream must wait for a connection while another stream is paused, the paused one releases its
    connection: it is *parked*, and requests the missing bytes when it is resumed.

    **After a loss** of its connection, a stream requests only the missing bytes, as long as it makes
    progress: ``MAX_STALLED_ANSWERS`` consecutive responses with less than ``PROGRESS_BYTES`` end the stream.

    Args:
        pool: has more than ``max_streams`` connections, so that short reads find a free one.
    """

    def __init__(
        self, pool: HostPool, requests: GbsRequests, answers: GbsAnswers, max_streams: int
    ) -> None:
        self.pool = pool
        self.requests = requests
        self.answers = answers
        self._max_streams = max_streams
        self._active: dict[
            Stream, None
        ] = {}  # streams that have a connection or are about to get one
        self._waiting: deque[Stream] = deque()

    def __repr__(self) -> str:
        return f"<GbsStreams {len(self._active)} active, {len(self._waiting)} waiting>"

    def enqueue(self, stream: Stream) -> None:
        """Send a stream's request as soon as a connection is free."""
        self._waiting.append(stream)
        self.serve()

    def left(self, stream: Stream) -> None:
        """Release the connection of a stream that has ended or is parked."""
        if stream in self._active:
            del self._active[stream]
        elif stream in self._waiting:
            self._waiting.remove(stream)
        self.serve()

    def serve(self) -> None:
        """Give free connections, or connections of paused streams, to waiting streams."""
        while self._waiting:
            if len(self._active) >= self._max_streams:
                idle = next((each for each in self._active if each.is_paused), None)
                if idle is None:
                    return
                del self._active[idle]
                idle.park()
            stream = self._waiting.popleft()
            self._active[stream] = None
            stream.send()


@implementer(IConsumer, IPushProducer)
class Stream:
    """
    One long read: the consumer of its HTTP responses, and the producer for the caller's consumer.

    ``GbsStreams.enqueue`` starts the stream.

    Args:
        length: at least one byte.
        begun: called when the first response begins.

    Attributes:
        result: fires with the number of bytes delivered.
        is_paused: whether the caller's consumer has paused the stream.
    """

    def __init__(
        self,
        streams: GbsStreams,
        storage_index: bytes,
        share_number: int,
        offset: int,
        length: int,
        consumer: IConsumer,
        begun: Callable[[], None],
    ) -> None:
        self._streams = streams
        self._storage_index = storage_index
        self._share_number = share_number
        self._offset = offset
        self._at = offset
        self._end = offset + length
        self._consumer = consumer
        self._begun = begun
        self._registered = False
        self._call: Deferred[RawResponse] | None = None
        self._producer: IPushProducer | None = None  # the producer of the current response
        self._announced_end = offset
        self._asked_at = offset
        self._stalled_answers = 0
        self._parked = False
        self._error: ServerError | None = None
        self.is_paused = False
        self.result: Deferred[int] = Deferred(lambda _: self._release())

    def __repr__(self) -> str:
        state = "parked" if self._parked else "paused" if self.is_paused else "running"
        return f"<Stream of share {self._share_number} at {self._at} of {self._end}, {state}>"

    # For GbsStreams.

    def send(self) -> None:
        self._asked_at = self._at
        call = self._streams.pool.request(
            self._streams.requests.read(
                self._storage_index,
                self._share_number,
                self._at,
                self._end - self._at,
                self._choose_consumer,
            )
        )
        self._call = call
        call.addCallbacks(self._answered, self._failed, callbackArgs=(call,), errbackArgs=(call,))

    def park(self) -> None:
        """Release the connection; the missing bytes are requested when the stream is resumed."""
        self._parked = True
        self._drop_call()

    # The response.

    def _choose_consumer(self, answer: RawResponse) -> IConsumer | None:
        if answer.status != 206:
            return None
        try:
            self._announced_end = self._streams.answers.range(
                answer, self._share_number, self._at, self._end - self._at
            )
        except ServerError as error:
            self._error = error
        return self

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        assert IPushProducer.providedBy(producer)
        self._producer = producer
        if self._error is not None:
            producer.stopProducing()
        elif not self._registered:
            self._registered = True
            self._begun()
            self._consumer.registerProducer(self, True)
        elif self.is_paused:
            producer.pauseProducing()

    def unregisterProducer(self) -> None:
        """Drop the producer of a response that has ended; ``_answered`` or ``_failed`` gets the outcome."""
        self._producer = None

    def write(self, data: bytes) -> None:
        """Pass bytes of the response on to the caller's consumer."""
        if self._call is None or self._error is not None:
            return
        if len(data) > self._announced_end - self._at:
            self._error = self._streams.answers.too_much(self._announced_end - self._asked_at)
            if self._producer is not None:
                self._producer.stopProducing()
            return
        self._at += len(data)
        self._consumer.write(data)

    def _answered(self, answer: RawResponse, call: Deferred[RawResponse]) -> None:
        if self._call is not call:
            return
        self._call = None
        if answer.status == 206:
            if self._at < self._announced_end:
                self._retry_or_fail(
                    ResponseError("The server sent fewer bytes than it announced; ask another.")
                )
            else:
                self._finish()
            return
        try:
            self._streams.answers.range(
                answer, self._share_number, self._at, self._end - self._at
            )  # status 204: the share ends at this offset
        except ServerError as error:
            self._fail(error)
        else:
            self._finish()

    def _failed(self, failure: Failure, call: Deferred[RawResponse]) -> None:
        if self._call is not call:
            return  # the stream was parked or cancelled
        self._call = None
        error = failure.value
        if self._error is not None:
            self._fail(self._error)
        elif isinstance(error, (ResponseError, ServerUnreachable)) and self._registered:
            self._retry_or_fail(error)
        else:
            self._fail(error)

    def _retry_or_fail(self, error: ServerError) -> None:
        stalled = self._at - self._asked_at < PROGRESS_BYTES
        self._stalled_answers = self._stalled_answers + 1 if stalled else 0
        if self._at >= self._end:
            self._finish()
        elif self._stalled_answers >= MAX_STALLED_ANSWERS:
            self._fail(error)
        elif self.is_paused:
            self._parked = True
            self._streams.left(self)
        else:
            self.send()

    # The end of the stream.

    def _finish(self) -> None:
        if self._at == self._offset and not self._registered:
            self._begun()
        self._release()
        self.result.callback(self._at - self._offset)

    def _fail(self, error: BaseException | None) -> None:
        self._release()
        self.result.errback(error)

    def _release(self) -> None:
        self._drop_call()
        self._streams.left(self)
        if self._registered:
            self._registered = False
            self._consumer.unregisterProducer()

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        self._producer = None
        if call is not None:
            call.addErrback(lambda _: None)
            call.cancel()

    # Methods that the caller's consumer calls.

    def pauseProducing(self) -> None:
        """Pause the stream, since the caller's consumer has enough for now."""
        self.is_paused = True
        if self._producer is not None:
            self._producer.pauseProducing()
        self._streams.serve()  # a waiting stream may need the connection

    def resumeProducing(self) -> None:
        self.is_paused = False
        if self._parked:
            self._parked = False
            if self._registered and self._at >= self._announced_end:
                self._finish()  # all bytes were delivered before the stream was parked
            else:
                self._streams.enqueue(self)
        elif self._producer is not None:
            self._producer.resumeProducing()

    def stopProducing(self) -> None:
        """Stop the stream: it fails as if it had been cancelled."""
        self.result.cancel()
