"""
Changes of immutable shares on a server over HTTPS: allocations, writes and aborts, in order on one
connection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from twisted.internet.defer import CancelledError, Deferred, fail
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from pipegrid.errors import PipegridError, ServerUnreachable
from pipegrid.http11.dialer import Endpoints
from pipegrid.http11.exchange import RawRequest, RawResponse
from pipegrid.http11.upload_connection import Answered, UploadConnection
from pipegrid.transport.gbs.bundles import GbsBundles, OrdinaryRequests
from pipegrid.transport.gbs.requests import GbsRequests, GbsSettings
from pipegrid.transport.gbs.response_outcomes import GbsAnswers
from pipegrid.transport.interface import disconnected, no_upload, store_by_writes
from pipegrid.wire.gbs_bundles import BundledUpload
from pipegrid.wire.storage_messages import (
    Allocation,
    Numbers,
    Pieces,
    Shares,
    Stored,
    UploadSecrets,
    WriteAnswer,
)

T = TypeVar("T")
R = TypeVar("R")

CROWD_BYTES = 256 << 10
CROWD_BYTES_PER_S = 2.5e6
"""
The maximum of pending bytes of requests for small shares at a server without bundles: ``CROWD_BYTES``, or
``CROWD_BYTES_PER_S`` times the round-trip time if that is more. Such a server processes 100 or 200 of these
requests per second, of about 10 KB each. See ``http11.request_queue``.
"""
BEHIND_BYTES = 64 * 1024
"""
The maximum size of responses to questions on the uploads' connection. A read that follows a change of the
same share uses that connection, or waits for the change if its response is longer. While nothing is changed,
questions may use the connection if their responses together are not longer.
"""
LIST_AGAIN_S = (0.1, 0.4, 1.5)
"""
Pauses before each further query for a share that may be becoming durable: two seconds in total. Making a
group of shares durable takes milliseconds, or half a second on a disk under load.
"""


class PendingQuestions:
    """
    The unanswered questions to one server, which must be cancelled one by one when the client disconnects.

    Changes that take several requests or use Foolscap are tracked like questions. All other changes end when
    their connection ends, or when the operations end that they wait for.

    Attributes:
        disconnected: whether new questions are refused.
    """

    def __init__(self, server: str) -> None:
        self.disconnected = False
        self._server = server
        self._leaving = False
        self._waiting: set[Deferred[Any]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def track(self, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        """
        Ask a question, and track it until its Deferred fires, fails or is cancelled; fail if disconnected.
        """
        if self.disconnected:
            return fail(self.gone())
        waiting = start()
        self._waiting.add(waiting)
        return waiting.addBoth(self._answered, waiting)

    def give_up(self) -> None:
        """Cancel all questions; their callers get the error that ``gone`` returns."""
        self.disconnected = self._leaving = True
        for waiting in list(self._waiting):
            waiting.cancel()
        self._leaving = False

    def gone(self) -> ServerUnreachable:
        """Return the error that all callers get after disconnecting."""
        return disconnected(self._server)

    def _answered(self, result: R, waiting: Deferred[Any]) -> R | Failure:
        self._waiting.discard(waiting)
        if self._leaving and isinstance(result, Failure) and result.check(CancelledError):
            return Failure(self.gone())
        return result


class GbsContext(NamedTuple):
    """
    The objects and settings that all requests to one server share.

    Attributes:
        endpoints: makes an endpoint for each new connection.
        name: the server's name for messages.
        requests: builds requests as bytes.
        answers: interprets responses.
        asked: tracks questions, and changes that take more than one request.
    """

    clock: IReactorTime
    endpoints: Endpoints
    name: str
    settings: GbsSettings
    requests: GbsRequests
    answers: GbsAnswers
    asked: PendingQuestions


class GbsUploads:
    """
    The changes of immutable shares on one server; ``GbsOrder`` has already decided which of them wait.

    Small shares are sent in bundles (``GbsBundles``).

    **Repeated requests.** After a lost connection, requests are sent again. Then "no such upload" may mean
    that the first attempt has completed the share. So the server is asked for its list of shares: if the list
    has the share, the write has completed it. If a server is just making a share durable, it may be missing
    from the list. So the query is repeated a few times before the share counts as missing. The same applies
    to writes whose bytes were released: they fail with ``WriteLost``, and the caller repeats them.

    Args:
        bundle_bytes: the largest bundle that the server's announcement offers, or 0; the server's responses
            may offer bundles, too.

    Attributes:
        connection: the connection for all changes.
        bundles: the small shares.
    """

    def __init__(self, context: GbsContext, bundle_bytes: int) -> None:
        self._clock = context.clock
        self._name = context.name
        self._requests = context.requests
        self._answers = context.answers
        self._track = context.asked.track
        self._questions = 0
        self._question_bytes = 0
        self.connection = UploadConnection(
            context.clock,
            context.endpoints,
            context.name,
            context.settings.limits(1),
            context.settings.time_limit_s,
            crowd_bytes=self._crowd_bytes,
        )
        self.bundles = GbsBundles(
            context.clock,
            context.requests,
            context.answers,
            lambda request: self.connection.request(request),
            OrdinaryRequests(self._allocate, self._write, self._store_apart, self._was_completed),
            bundle_bytes,
        )

    def __repr__(self) -> str:
        return f"<GbsUploads {self.connection}, {self.bundles}>"

    def _crowd_bytes(self) -> float:
        """Return the limit of pending bytes of small requests; infinity if the server supports bundles."""
        if self.bundles.max_bytes:
            return math.inf
        return max(CROWD_BYTES, CROWD_BYTES_PER_S * (self.connection.round_trip_s or 0.0))

    def close(self, reason: Callable[[], PipegridError]) -> Deferred[None]:
        """
        Fail all unanswered requests, each with a separate error from ``reason``; fires when the connection is
        closed.
        """
        self.bundles.give_up(reason)
        return self.connection.close(reason)

    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        """Request space for shares; see ``StorageServer.allocate``."""
        call = storage_index, share_numbers, share_bytes, secrets
        return self.bundles.allocate(*call) or self._allocate(*call)

    def _allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        request = self._requests.allocate(storage_index, share_numbers, share_bytes, secrets)
        return self.upload(
            request, storage_index, lambda answer: self.heard(answer, self._answers.allocation)
        )

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
        release: Callable[[], None] | None,
        again: bool,
    ) -> Deferred[WriteAnswer]:
        """Write to an unfinished share; see ``StorageServer.write``."""
        bundled = None
        if not offset:
            bundled = self.bundles.write(storage_index, share_number, data, upload_secret)
        if bundled is not None:
            return bundled
        return self._write(storage_index, share_number, offset, data, upload_secret, again, release)

    def _write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
        maybe_done: bool = False,
        release: Callable[[], None] | None = None,
    ) -> Deferred[WriteAnswer]:
        request = self._requests.write(
            storage_index, share_number, offset, data, upload_secret, release
        )
        # Computed outside of the callback, which would otherwise keep the data in memory.
        upto = offset + sum(map(len, data))

        def written(answered: Answered) -> WriteAnswer | Deferred[WriteAnswer]:
            answer, repeated = answered
            if (repeated or maybe_done) and answer.status == 404:
                return self._was_completed(storage_index, share_number)
            return self._answers.write_result(answer, share_number, upto)

        return self._send(request, storage_index).addCallback(written)

    def store_whole(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored]:
        """Store whole shares; see ``StorageServer.store_whole``."""
        bundled = self.bundles.store(storage_index, shares, share_bytes, secrets)
        if bundled is not None:
            return bundled
        upload = BundledUpload(storage_index, secrets, share_bytes, frozenset(shares), dict(shares))
        return self._store_apart(upload)

    def _store_apart(self, upload: BundledUpload, maybe_done: bool = False) -> Deferred[Stored]:
        write = partial(self._write, maybe_done=maybe_done)
        stored = self._track(
            lambda: store_by_writes(
                self._allocate,
                write,
                upload.storage_index,
                upload.shares,
                upload.share_bytes,
                upload.secrets,
            )
        )
        self.connection.flush()  # this server begins while shares for others are prepared
        return stored

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """Abort an unfinished upload; see ``StorageServer.abort``."""
        request = self._requests.abort(storage_index, share_number, upload_secret)
        return self._send(request, storage_index).addCallback(
            lambda answered: self._answers.aborted(answered[0], share_number, answered[1])
        )

    def _was_completed(self, storage_index: bytes, share_number: int) -> Deferred[WriteAnswer]:
        """
        Find out whether a share is complete, after a write that may be a repetition got "no such upload".
        """

        async def find_out() -> WriteAnswer:
            for wait_s in (0.0, *LIST_AGAIN_S):
                if wait_s:
                    await deferLater(self._clock, wait_s)
                request = self._requests.list_shares(storage_index)
                if share_number in await self.upload(request, storage_index, self._answers.shares):
                    return WriteAnswer(True)
            raise no_upload(self._name, share_number)

        return self._track(lambda: Deferred.fromCoroutine(find_out()))

    def upload(
        self, request: RawRequest, storage_index: bytes, unpack: Callable[[RawResponse], T]
    ) -> Deferred[T]:
        return self._send(request, storage_index).addCallback(lambda answered: unpack(answered[0]))

    def takes_question(self, request: RawRequest) -> bool:
        """
        Return whether a question can use this connection now: it is up, no change is unanswered, and the
        expected responses have at most ``BEHIND_BYTES`` in total.
        """
        expected_bytes = self._question_bytes + (request.expected_response_bytes or 0)
        return (
            expected_bytes <= BEHIND_BYTES
            and self.connection.is_up
            and self.connection.unanswered == self._questions
        )

    def question(self, request: RawRequest) -> Deferred[RawResponse]:
        """
        Ask on the connection for changes, without repetition; see ``takes_question``.

        Raises (through the Deferred):
            AskElsewhere: the connection was lost.
        """
        expected_bytes = request.expected_response_bytes or 0
        self._questions += 1
        self._question_bytes += expected_bytes

        def ended(result: T) -> T:
            self._questions -= 1
            self._question_bytes -= expected_bytes
            return result

        sent = self.connection.request(request, once=True)
        answer: Deferred[RawResponse] = sent.addCallback(lambda answered: answered[0])
        return answer.addBoth(ended)

    def change(
        self, request: RawRequest, storage_index: bytes, unpack: Callable[[RawResponse, bool], T]
    ) -> Deferred[T]:
        """
        Send a request as ``upload`` does; ``unpack`` also gets whether the request was sent more than once.
        """
        changed = self._send(request, storage_index).addCallback(lambda answered: unpack(*answered))
        self.connection.flush()
        return changed

    def _send(self, request: RawRequest, storage_index: bytes) -> Deferred[Answered]:
        """
        Send a request on the uploads' connection, after all earlier requests for the same storage index.
        """
        self.bundles.flush(storage_index)
        return self.connection.request(request)

    def heard(self, answer: RawResponse, unpack: Callable[[RawResponse], T]) -> T:
        self.bundles.heard(answer)
        return unpack(answer)
