"""
What changes immutable shares on a server over HTTPS: allocations, writes, aborts, in order on one connection.

Small shares go in bundles (``bundles``).

**Repeated requests.** After a loss, uploads are sent again. Then "no such upload" may mean that the first
attempt was the one that completed the share, so the server is asked for its list: if the share is in it the
write has completed it. Servers that are just making a share durable may not list it yet, so the question is
repeated a few times before the answer is believed. The same goes for writes whose bytes were let go of: they
fail with ``WriteLost``, and it is the caller who repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from pipegrid.errors import PipegridError
from pipegrid.http11.dialer import Endpoints
from pipegrid.http11.exchange import RawRequest, RawResponse
from pipegrid.http11.upload_connection import Answered, UploadConnection
from pipegrid.transport.gbs.answers import GbsAnswers
from pipegrid.transport.gbs.bundles import GbsBundles, OrdinaryRequests
from pipegrid.transport.gbs.requests import GbsRequests, GbsSettings
from pipegrid.transport.interface import no_upload, store_by_writes
from pipegrid.wire.gbs_bundles import BundledUpload
from pipegrid.wire.messages import (
    Allocation,
    Numbers,
    Pieces,
    Shares,
    Stored,
    UploadSecrets,
    WriteAnswer,
)

T = TypeVar("T")

CROWD_BYTES = 256 << 10
CROWD_BYTES_PER_S = 2.5e6
"""
Of requests of small shares that a server without bundles has before it, and for each second of the round
trip: such a server takes a hundred or two of them a second, of some ten kilobytes. See
``http11.request_queue``.
"""
LIST_AGAIN_S = (0.1, 0.4, 1.5)
"""
How long to wait before each further look for a share that may be becoming durable: two seconds in all,
where a group of shares takes milliseconds, and a disk under load half a second.
"""


class Track(Protocol):
    """Who knows of what has to be cancelled one by one when the server is disconnected."""

    def __call__(self, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        """Begin it, and know of it until it has ended."""


@attrs.frozen(eq=False)
class GbsContext:
    """
    What all requests to one server share.

    Attributes:
        endpoints: makes the endpoint for one more connection.
        name: what a person calls the server.
        requests: as bytes.
        answers: to results.
    """

    clock: IReactorTime
    endpoints: Endpoints
    name: str
    settings: GbsSettings
    requests: GbsRequests
    answers: GbsAnswers


class GbsUploads:
    """
    Of one server. What has to wait for what is decided before (``order``).

    Args:
        track: for what takes more than one request.
        bundle_bytes: of the longest bundle that it was said to take, if it was; its answers tell, too.
    """

    def __init__(
        self,
        context: GbsContext,
        track: Track,
        bundle_bytes: int,
    ) -> None:
        clock, name = context.clock, context.name
        requests, answers = context.requests, context.answers
        self._clock = clock
        self._name = name
        self._requests = requests
        self._answers = answers
        self._track = track
        self._connection = UploadConnection(
            clock,
            context.endpoints,
            name,
            context.settings.limits(1),
            context.settings.patience_s,
            crowd_bytes=self._crowd_bytes,
        )
        self._bundles = GbsBundles(
            clock,
            requests,
            answers,
            lambda request: self._connection.request(request),
            OrdinaryRequests(self._allocate, self._write, self._store_apart, self._was_completed),
            bundle_bytes,
        )

    def __repr__(self) -> str:
        return f"<GbsUploads {self._connection}, {self._bundles}>"

    @property
    def round_trip_s(self) -> float | None:
        """The shortest round trip that the connection has seen; None if it has seen none."""
        return self._connection.round_trip_s

    @property
    def last_activity_s(self) -> float:
        """When the connection's bytes last came or went, by the clock."""
        return self._connection.last_activity_s

    @property
    def bundle_bytes(self) -> int:
        """Of a bundle that the server takes; 0 if it has not said that it takes any."""
        return self._bundles.max_bytes

    def _crowd_bytes(self) -> float:
        """Return how much of many small requests it may have before it: all, if it takes them in bundles."""
        if self.bundle_bytes:
            return math.inf
        return max(CROWD_BYTES, CROWD_BYTES_PER_S * (self.round_trip_s or 0.0))

    def close(self, reason: Callable[[], PipegridError]) -> Deferred[None]:
        """Fail all that is unanswered, each with an error of its own; fires when the connection is gone."""
        self._bundles.give_up(reason)
        return self._connection.close(reason)

    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        """Ask for room; see the contract."""
        call = storage_index, share_numbers, share_bytes, secrets
        return self._bundles.allocate(*call) or self._allocate(*call)

    def _allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        request = self._requests.allocate(storage_index, share_numbers, share_bytes, secrets)
        return self.upload(request, lambda answer: self.heard(answer, self._answers.allocation))

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
        let_go: Callable[[], None] | None,
        again: bool,
    ) -> Deferred[WriteAnswer]:
        """Write to an unfinished share; see the contract."""
        bundled = None
        if not offset:
            bundled = self._bundles.write(storage_index, share_number, data, upload_secret)
        if bundled is not None:
            return bundled
        return self._write(storage_index, share_number, offset, data, upload_secret, again, let_go)

    def _write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
        maybe_done: bool = False,
        let_go: Callable[[], None] | None = None,
    ) -> Deferred[WriteAnswer]:
        request = self._requests.write(
            storage_index, share_number, offset, data, upload_secret, let_go
        )
        upto = offset + sum(map(len, data))  # what waits for the answer must not hold the data

        def written(answered: Answered) -> WriteAnswer | Deferred[WriteAnswer]:
            answer, repeated = answered
            if (repeated or maybe_done) and answer.status == 404:
                return self._was_completed(storage_index, share_number)
            return self._answers.write_result(answer, share_number, upto)

        return self._send(request).addCallback(written)

    def store_whole(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored]:
        """Store whole shares; see the contract."""
        bundled = self._bundles.store(storage_index, shares, share_bytes, secrets)
        if bundled is not None:
            return bundled
        upload = BundledUpload(storage_index, secrets, share_bytes, frozenset(shares), dict(shares))
        return self._store_apart(upload)

    def _store_apart(self, upload: BundledUpload, maybe_done: bool = False) -> Deferred[Stored]:
        write = partial(self._write, maybe_done=maybe_done)
        return self._track(
            lambda: store_by_writes(
                self._allocate,
                write,
                upload.storage_index,
                upload.shares,
                upload.share_bytes,
                upload.secrets,
            )
        )

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """Forget an unfinished upload; see the contract."""
        request = self._requests.abort(storage_index, share_number, upload_secret)
        return self._send(request).addCallback(
            lambda answered: self._answers.aborted(answered[0], share_number, answered[1])
        )

    def _was_completed(self, storage_index: bytes, share_number: int) -> Deferred[WriteAnswer]:
        """Find out what "no such upload" means for a write that may have been carried out before."""

        async def find_out() -> WriteAnswer:
            for wait_s in (0.0, *LIST_AGAIN_S):
                if wait_s:
                    await deferLater(self._clock, wait_s)
                request = self._requests.list_shares(storage_index)
                if share_number in await self.upload(request, self._answers.shares):
                    return WriteAnswer(True)
            raise no_upload(self._name, share_number)

        return self._track(lambda: Deferred.fromCoroutine(find_out()))

    def upload(self, request: RawRequest, unpack: Callable[[RawResponse], T]) -> Deferred[T]:
        return self._send(request).addCallback(lambda answered: unpack(answered[0]))

    def change(self, request: RawRequest, unpack: Callable[[RawResponse, bool], T]) -> Deferred[T]:
        """Send a request as ``upload`` does; ``unpack`` is told whether it was sent more than once."""
        return self._send(request).addCallback(lambda answered: unpack(*answered))

    def _send(self, request: RawRequest) -> Deferred[Answered]:
        """Send a request on the uploads' connection, behind all that came before it."""
        self._bundles.flush()
        return self._connection.request(request)

    def heard(self, answer: RawResponse, unpack: Callable[[RawResponse], T]) -> T:
        self._bundles.heard(answer)
        return unpack(answer)
