"""
A storage server across the network: the contract over HTTPS, as servers really behave.

Which connection carries what:

=============================  ===================================================================
allocate, write, abort         one connection, in order, none waiting for another (``replaying``)
read-test-writes               the same one; those that only read take the pool
lists, short reads, leases,    a pool of a few (``http11.pool``), each with at most 60 KB of answers
complaints, the version        outstanding, or one long answer behind such
streams                        the same pool, each the last on its connection, which is paused with its
                               consumer; ``streams`` sees to it that others are left
=============================  ===================================================================

So the first burst of a get, a list and the predicted share behind it, goes out on one connection.

Between connections the contract's order is kept by ``order``; ``requests`` and ``answers`` know the
protocol, ``http11`` knows HTTP. Connections are made when they are first needed, and close when they idle.

**Repeated requests.** After a loss, uploads are sent again. Then "no such upload" may mean that the
first attempt was the one that completed the share, so the server is asked for its list: if the share is in
it the write has completed it. Servers that are just making a share durable may not list it
yet, so the question is repeated a few times before the answer is believed. The same goes for writes whose
bytes were let go of: they fail with ``WriteLost``, and it is the caller who repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredList, fail
from twisted.internet.interfaces import IConsumer, IReactorTime, IStreamClientEndpoint
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from pipegrid.core.hashes import Buffer
from pipegrid.errors import NoSuchShare, ServerError, ServerUnreachable, UsageError
from pipegrid.http11.errors import ResponseError
from pipegrid.http11.limits import Limits
from pipegrid.http11.pinned import pin_endpoint
from pipegrid.http11.pool import HostPool
from pipegrid.http11.raw import RawRequest, RawResponse
from pipegrid.http11.replaying import Answered, UploadConnection
from pipegrid.reactor.clientcontext import http_context
from pipegrid.reactor.connecting import endpoint_for
from pipegrid.reactor.together import together
from pipegrid.transport.apart import store_apart
from pipegrid.transport.gbs.answers import GbsAnswers
from pipegrid.transport.gbs.bundles import MAX_SHARE_BYTES, GbsBundles, OrdinaryRequests
from pipegrid.transport.gbs.order import GbsOrder
from pipegrid.transport.gbs.requests import GbsRequests
from pipegrid.transport.gbs.streams import GbsStreams
from pipegrid.transport.interface import disconnected
from pipegrid.wire.gbs_bundles import BundledUpload
from pipegrid.wire.messages import (
    Allocation,
    LeaseSecrets,
    ServerIdentity,
    ServerVersion,
    ShareChange,
    SlotResult,
    SlotSecrets,
    Stored,
    UploadSecrets,
    WriteResult,
)
from pipegrid.wire.nurl import Nurl

if TYPE_CHECKING:
    from pipegrid.reactor.ahead import Ahead
    from pipegrid.transport.surveys import Question, Surveyed
    from pipegrid.transport.throttled import Throttle

T = TypeVar("T")
R = TypeVar("R")

BEHIND_BYTES = 64 * 1024
"""Up to here a read may stand behind a change on the uploads' connection; a longer one waits for it."""
LIST_AGAIN_S = (0.1, 0.4, 1.5)
"""
How long to wait before each further look for a share that may be becoming durable: two seconds in all,
where a group of shares takes milliseconds, and a disk under load half a second.
"""
NO_SURVEYS = (404, 405)
"""What a server says to a survey that knows none."""
CUT_OFF_ATTEMPTS = 3
"""A short answer that was cut off (or is nonsense, who knows) is asked for so many times."""


@attrs.frozen(kw_only=True)
class GbsSettings:
    """
    Bounds and patience towards one server.

    Attributes:
        connect_timeout_s: until a connection can be used, TLS included.
        timeout_s: silence of the server, while it owes an answer and nobody paused it.
        patience_s: how long uploads that were begun wait for a lost server to come back. A server's
            restart takes a few seconds; a put has its own patience and does not wait without need.
        max_read_connections: beside those that streams take. One does nearly always; others are
            opened when a burst asks for more than one may owe.
        max_streams: at the same time, each with a connection.
        max_waiting: requests that may wait for the uploads' connection, and for the others;
            more fail at once.
        max_upload_bytes_in_flight: written and unanswered. It is the callers' windows that
            should decide, so this is more than any of them; the rest waits here, unsent.
    """

    connect_timeout_s: float = 15.0
    timeout_s: float = 60.0
    patience_s: float = 20.0
    max_read_connections: int = 4
    max_streams: int = 6
    max_waiting: int = 10_000
    max_upload_bytes_in_flight: int = 128 << 20

    def limits(self, max_connections: int) -> Limits:
        """Return the same for ``http11``."""
        return Limits(
            max_connections=max_connections,
            # Bytes are what servers bound, and we with them: of requests there may be many.
            max_requests_in_flight=1000,
            max_request_bytes_in_flight=self.max_upload_bytes_in_flight,
            max_waiting=self.max_waiting,
            # Tahoe-LAFS's servers are built on Twisted: what is owed must fit into their transport.
            max_response_budget_bytes=0,
            timeout_s=self.timeout_s,
            connect_timeout_s=self.connect_timeout_s,
            close_timeout_s=1.0,
        )


class GbsServer:
    """
    Implements ``transport.interface.StorageServer`` over HTTPS.

    Args:
        identity: who it is.
        nurl: where it is; its secret goes with every request.
        endpoints: makes the endpoint for one more connection, with TLS to the owner of the NURL's
            key and nobody else; ``endpoints_for`` is the real one.
        clock: for all patience.
        bundle_bytes: of the longest bundle that it was said to take, if it was; its answers tell, too.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        nurl: Nurl,
        endpoints: Callable[[], IStreamClientEndpoint],
        clock: IReactorTime,
        settings: GbsSettings | None = None,
        bundle_bytes: int = 0,
    ) -> None:
        settings = settings or GbsSettings()
        name = identity.nickname
        self.nurl = nurl
        self._identity = identity
        self._clock = clock
        self._requests = GbsRequests(nurl, settings.timeout_s)
        self._answers = GbsAnswers(name)
        self._order = GbsOrder()
        self._bundles = GbsBundles(
            clock,
            self._requests,
            self._answers,
            lambda request: self._uploads.request(request),
            OrdinaryRequests(self._allocate, self._write, self._store_apart, self._was_completed),
            bundle_bytes,
        )
        self._uploads = UploadConnection(
            clock, endpoints, name, settings.limits(1), settings.patience_s
        )
        connections = settings.max_read_connections + settings.max_streams
        self._reads = HostPool(clock, endpoints, name, settings.limits(connections))
        self._streams = GbsStreams(self._reads, self._requests, self._answers, settings.max_streams)
        self._asked: set[Deferred[Any]] = set()  # questions; changes stand with their connection
        self._disconnected = self._leaving = False
        self._takes_surveys = True  # unless it says no
        self._asked_version = False

    def __repr__(self) -> str:
        return (
            f"<GbsServer {self._identity.nickname!r} at {self.nurl.host}:{self.nurl.port},"
            f" {len(self._asked)} questions, {self._uploads}>"
        )

    @property
    def identity(self) -> ServerIdentity:
        """Who this is."""
        return self._identity

    @property
    def round_trip_s(self) -> float | None:
        """The shortest round trip that the connection for uploads has seen; None if it has seen none."""
        return self._uploads.round_trip_s

    def version(self) -> Deferred[ServerVersion]:
        """Ask what the server says of itself."""
        return self._track(
            lambda: self._question(self._requests.version()).addCallback(
                self._heard, self._answers.version
            )
        )

    # Uploads.

    def allocate(
        self,
        storage_index: bytes,
        share_numbers: AbstractSet[int],
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Deferred[Allocation]:
        """
        Ask for room; see the contract.

        A repeated request may find the shares allocated by its first attempt, and then a Tahoe server
        mentions them in neither set, as it does those of others: writes show whose they are.
        """
        call = storage_index, share_numbers, share_bytes, secrets
        if self._disconnected:
            return fail(self._gone())
        return self._bundles.allocate(*call) or self._allocate(*call)

    def _allocate(
        self,
        storage_index: bytes,
        share_numbers: AbstractSet[int],
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Deferred[Allocation]:
        request = self._requests.allocate(storage_index, share_numbers, share_bytes, secrets)
        return self._upload(request, lambda answer: self._heard(answer, self._answers.allocation))

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Sequence[Buffer],
        upload_secret: bytes,
        *,
        let_go: Callable[[], None] | None = None,
        again: bool = False,
    ) -> Deferred[WriteResult]:
        """Write to an unfinished share; see the contract. At least one byte."""
        if not any(map(len, data)):
            return fail(UsageError("a write must have at least one byte; write what there is"))

        def start() -> Deferred[WriteResult]:
            bundled = None
            if not offset:
                bundled = self._bundles.write(storage_index, share_number, data, upload_secret)
            if bundled is not None:
                return bundled
            return self._write(
                storage_index, share_number, offset, data, upload_secret, again, let_go
            )

        return self._change(storage_index, share_number, start)

    def _write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Sequence[Buffer],
        upload_secret: bytes,
        maybe_done: bool = False,
        let_go: Callable[[], None] | None = None,
    ) -> Deferred[WriteResult]:
        request = self._requests.write(
            storage_index, share_number, offset, data, upload_secret, let_go
        )
        upto = offset + sum(map(len, data))  # what waits for the answer must not hold the data

        def written(answered: Answered) -> WriteResult | Deferred[WriteResult]:
            answer, repeated = answered
            if (repeated or maybe_done) and answer.status == 404:
                return self._was_completed(storage_index, share_number)
            return self._answers.write_result(answer, share_number, upto)

        return self._send(request).addCallback(written)

    @property
    def whole_bytes(self) -> int:
        """As long as goes in a bundle, if the server takes any."""
        return MAX_SHARE_BYTES if self._bundles.max_bytes else 0

    def store_whole(
        self,
        storage_index: bytes,
        shares: Mapping[int, bytes],
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Deferred[Stored]:
        """Store whole shares; see the contract."""

        def start() -> Deferred[Stored]:
            bundled = self._bundles.store(storage_index, shares, share_bytes, secrets)
            if bundled is not None:
                return bundled
            upload = BundledUpload(
                storage_index, secrets, share_bytes, frozenset(shares), dict(shares)
            )
            return self._store_apart(upload)

        return self._change(storage_index, None, start)

    def _store_apart(self, upload: BundledUpload, maybe_done: bool = False) -> Deferred[Stored]:
        def write(
            index: bytes, number: int, offset: int, data: Sequence[Buffer], secret: bytes
        ) -> Deferred[WriteResult]:
            return self._write(index, number, offset, data, secret, maybe_done)

        return self._track(
            lambda: store_apart(
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

        def start() -> Deferred[None]:
            return self._send(request).addCallback(
                lambda answered: self._answers.aborted(answered[0], share_number, answered[1])
            )

        return self._change(storage_index, share_number, start)

    def _was_completed(self, storage_index: bytes, share_number: int) -> Deferred[WriteResult]:
        """Find out what "no such upload" means for a write that may have been carried out before."""

        async def find_out() -> WriteResult:
            for wait_s in (0.0, *LIST_AGAIN_S):
                if wait_s:
                    await deferLater(self._clock, wait_s)
                request = self._requests.list_shares(storage_index)
                if share_number in await self._upload(request, self._answers.shares):
                    return WriteResult(True)
            raise self._answers.no_upload(share_number)

        return self._track(lambda: Deferred.fromCoroutine(find_out()))

    def _change(
        self, storage_index: bytes, number: int | None, start: Callable[[], Deferred[T]]
    ) -> Deferred[T]:
        """Send a change when its turn has come; ``disconnect`` finds it where it stands then."""
        if self._disconnected:
            return fail(self._gone())
        return self._order.change(storage_index, number, start)

    def _upload(self, request: RawRequest, unpack: Callable[[RawResponse], T]) -> Deferred[T]:
        return self._send(request).addCallback(lambda answered: unpack(answered[0]))

    def _send(self, request: RawRequest) -> Deferred[Answered]:
        """Send a request on the uploads' connection, behind all that came before it."""
        self._bundles.flush()
        return self._uploads.request(request)

    def _heard(self, answer: RawResponse, unpack: Callable[[RawResponse], T]) -> T:
        self._bundles.heard(answer)
        return unpack(answer)

    # Questions.

    def list_shares(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all complete shares."""
        request = self._requests.list_shares(storage_index)
        return self._ask(storage_index, None, request, self._answers.shares)

    def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from a complete share; see the contract."""
        # A range cannot be empty: to learn whether the share is there a byte has to be asked for.
        wanted = max(1, length)
        request = self._requests.read(storage_index, share_number, offset, wanted)

        def unpack(answer: RawResponse) -> bytes:
            return self._answers.data(answer, share_number, offset, wanted)[:length]

        if length <= BEHIND_BYTES:
            return self._ask(storage_index, share_number, request, unpack)

        def start(_: Callable[[], None]) -> Deferred[bytes]:
            return self._question(request).addCallback(unpack)

        return self._track(lambda: self._order.ask_apart(storage_index, share_number, start))

    def stream(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        length: int,
        consumer: IConsumer,
    ) -> Deferred[int]:
        """Read a complete share into a consumer; see the contract."""
        if length <= 0:
            return self.read(storage_index, share_number, offset, 0).addCallback(len)

        def start(begun: Callable[[], None]) -> Deferred[int]:
            return self._streams.stream(
                storage_index, share_number, offset, length, consumer, begun
            )

        return self._track(lambda: self._order.ask_apart(storage_index, share_number, start))

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the index."""
        request = self._requests.add_lease(storage_index, lease)
        return self._ask(storage_index, None, request, self._answers.lease_added)

    @property
    def is_known_to_take_surveys(self) -> bool:
        """Whether surveys are tried: it takes bundles, and has not refused one yet."""
        return self._bundles.max_bytes > 0 and self._takes_surveys

    def survey(
        self, questions: Sequence[Question]
    ) -> Deferred[list[Surveyed | ServerError] | None] | None:
        """
        Ask about many files in one message, if the server takes surveys; see ``transport.surveys``.

        One that has not said what it takes is asked for that, once, for the next time.
        """
        if not self.is_known_to_take_surveys:
            if not self._asked_version and self._takes_surveys:
                self._asked_version = True
                self.version().addErrback(lambda failure: failure.trap(ServerError, CancelledError))
            return None

        def unpack(answer: RawResponse) -> list[Surveyed | ServerError] | None:
            if answer.status in NO_SURVEYS:
                self._takes_surveys = False
                return None
            return self._answers.survey(answer, questions)

        return self._track(
            lambda: self._question(self._requests.survey(questions)).addCallback(unpack)
        )

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Tell the operator that a share looked corrupt."""
        request = self._requests.advise_corrupt_share(storage_index, share_number, reason)
        return self._ask(
            storage_index,
            share_number,
            request,
            lambda answer: self._answers.advised(answer, share_number),
        )

    def _ask(
        self,
        storage_index: bytes,
        number: int | None,
        request: RawRequest,
        unpack: Callable[[RawResponse], T],
    ) -> Deferred[T]:
        return self._track(
            lambda: self._order.ask(
                storage_index,
                number,
                lambda: self._question(request).addCallback(unpack),
                lambda: self._upload(request, unpack),
            )
        )

    def _question(
        self, request: RawRequest, attempts: int = CUT_OFF_ATTEMPTS
    ) -> Deferred[RawResponse]:
        """Send a request by the pool, which repeats what had no answer, and again if one was cut off."""

        def again(failure: Failure) -> Any:
            # Not ``trap``, which raises: each get cancels a question, and frames would keep all of it.
            return (
                self._question(request, attempts - 1) if failure.check(ResponseError) else failure
            )

        answer: Deferred[Any] = self._reads.request(request)
        return answer.addErrback(again) if attempts > 1 else answer

    # Slots.

    def read_test_write(
        self,
        storage_index: bytes,
        secrets: SlotSecrets,
        changes: Mapping[int, ShareChange],
        reads: Sequence[tuple[int, int]] = (),
    ) -> Deferred[SlotResult]:
        """Test, read and write a slot; sent again after a loss, for what that means see the contract."""
        request = self._requests.read_test_write(storage_index, secrets, changes, reads)
        limit_bytes = self._requests.slot_answer_bytes(reads)

        def unpack(answer: RawResponse) -> SlotResult:
            return self._answers.slot_result(answer, reads, limit_bytes)

        if not changes:
            return self._ask(storage_index, None, request, unpack)
        return self._change(storage_index, None, lambda: self._upload(request, unpack))

    def list_slot(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all mutable shares."""
        request = self._requests.list_shares(storage_index, mutable=True)
        return self._ask(storage_index, None, request, self._answers.shares)

    def read_slot(
        self,
        storage_index: bytes,
        reads: Sequence[tuple[int, int]],
        expected: AbstractSet[int] = frozenset(),
    ) -> Deferred[dict[int, tuple[bytes, ...]]]:
        """Read from every share of a slot; see the contract."""
        return Deferred.fromCoroutine(self._read_slot(storage_index, reads, expected))

    async def _read_slot(
        self,
        storage_index: bytes,
        reads: Sequence[tuple[int, int]],
        expected: AbstractSet[int],
    ) -> dict[int, tuple[bytes, ...]]:
        found: dict[int, tuple[bytes, ...]] = {}

        async def read(number: int) -> None:
            try:
                found[number] = tuple(
                    await together(
                        [self.read_slot_share(storage_index, number, *each) for each in reads]
                    )
                )
            except NoSuchShare:
                return

        async def list_shares() -> frozenset[int]:
            return await self.list_slot(storage_index)

        listing = Deferred.fromCoroutine(list_shares())
        guesses = [Deferred.fromCoroutine(read(number)) for number in sorted(expected)]
        waiting: list[Deferred[Any]] = [listing, *guesses]
        numbers = (await together(waiting))[0]
        others = sorted(numbers - expected)
        await together([Deferred.fromCoroutine(read(number)) for number in others])
        return found

    def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from one mutable share; see the contract."""
        wanted = max(1, length)
        request = self._requests.read(storage_index, share_number, offset, wanted, mutable=True)

        def unpack(answer: RawResponse) -> bytes:
            return self._answers.data(answer, share_number, offset, wanted)[:length]

        return self._ask(storage_index, share_number, request, unpack)

    def add_slot_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of a slot; one request is for both kinds of shares."""
        return self.add_lease(storage_index, lease)

    def advise_corrupt_slot_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Tell the operator that a mutable share looked corrupt."""
        request = self._requests.advise_corrupt_share(
            storage_index, share_number, reason, mutable=True
        )
        return self._ask(
            storage_index,
            share_number,
            request,
            lambda answer: self._answers.advised(answer, share_number),
        )

    # The end.

    def disconnect(self) -> Deferred[None]:
        """Give up connections and unanswered requests; fires when all are gone."""
        self._disconnected = self._leaving = True
        for waiting in list(self._asked):
            waiting.cancel()
        self._leaving = False
        self._order.give_up(self._gone)
        self._bundles.give_up(self._gone)
        gone = [self._uploads.close(self._gone), self._reads.close()]
        return DeferredList(gone).addCallback(lambda _: None)

    def _track(self, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        """Know a question for ``disconnect`` until it has fired, been cancelled or failed."""
        if self._disconnected:
            return fail(self._gone())
        waiting = start()
        self._asked.add(waiting)
        return waiting.addBoth(self._answered, waiting)

    def _answered(self, result: R, waiting: Deferred[Any]) -> R | Failure:
        self._asked.discard(waiting)
        if self._leaving and isinstance(result, Failure) and result.check(CancelledError):
            return Failure(self._gone())
        return result

    def _gone(self) -> ServerUnreachable:
        return disconnected(self._identity.nickname)


def endpoints_for(
    reactor: Any,
    nurl: Nurl,
    server: str,
    throttle: Throttle | None = None,
    ahead: Ahead | None = None,
) -> Callable[[], IStreamClientEndpoint]:
    """
    Return what makes endpoints to the owner of a NURL's key: TCP, and TLS pinned to that key.

    Args:
        ahead: has connections that may be made already; they are not used where there is a throttle.

    Raises:
        UsageError: the way leads through Tor.
    """
    if nurl.tor:
        raise UsageError(f"{server} is reached through Tor only, which is not supported yet")

    adopt = None
    if ahead is not None and throttle is None:
        from pipegrid.reactor.adopting import AdoptingEndpoint

        adopt = partial(AdoptingEndpoint, reactor, ahead, (nurl.host, nurl.port), http_context())

    def make() -> IStreamClientEndpoint:
        endpoint = endpoint_for(reactor, nurl.host, nurl.port)
        if throttle is not None:
            endpoint = throttle.endpoint(endpoint)
        return pin_endpoint(endpoint, nurl.spki_hash, server, adopt)

    return make
