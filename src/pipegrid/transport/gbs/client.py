"""The client of a storage server over HTTPS (GBS), with several connections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredList, fail, succeed
from twisted.internet.interfaces import IConsumer, IReactorTime, IStreamClientEndpoint
from twisted.python.failure import Failure

from pipegrid.errors import NoSuchShare, ServerError
from pipegrid.flow.concurrency_limits import SmallFileCapacity
from pipegrid.http11.dialer import Alternatives, Endpoints
from pipegrid.http11.exchange import RawRequest, RawResponse, ResponseError
from pipegrid.http11.host_pool import HostPool
from pipegrid.http11.pinned_key import pin_endpoint
from pipegrid.http11.upload_connection import AskElsewhere
from pipegrid.reactor.client_tls import PreconnectedEndpoint
from pipegrid.reactor.connection_policy import (
    ConnectionPolicy,
    DirectWay,
    RefusedConnection,
    RefusedWay,
)
from pipegrid.reactor.deferreds import as_deferred, gather
from pipegrid.reactor.tcp_socks5_endpoints import endpoint_through
from pipegrid.reactor.tls_settings import http_context
from pipegrid.transport.gbs.bundles import (
    MAX_SHARE_BYTES,
    MAX_SMALL_READ_BYTES,
    NOT_TAKEN,
    OUTSTANDING_BYTES,
    GbsReadBundles,
)
from pipegrid.transport.gbs.foolscap_offload import FoolscapOffload, OffloadServer
from pipegrid.transport.gbs.read_streams import GbsStreams, Stream
from pipegrid.transport.gbs.requests import GbsRequests, GbsSettings
from pipegrid.transport.gbs.response_outcomes import GbsAnswers
from pipegrid.transport.gbs.uploads import BEHIND_BYTES, GbsContext, GbsUploads, PendingQuestions
from pipegrid.transport.interface import nothing_to_write
from pipegrid.transport.operation_order import GbsOrder
from pipegrid.wire import gbs_bundles
from pipegrid.wire.server_address import Nurl
from pipegrid.wire.storage_messages import (
    Allocation,
    Changes,
    LeaseSecrets,
    Numbers,
    Pieces,
    Reads,
    ServerIdentity,
    ServerVersion,
    Shares,
    SlotData,
    SlotResult,
    SlotSecrets,
    Stored,
    UploadSecrets,
    WriteAnswer,
)

if TYPE_CHECKING:
    from pipegrid.reactor.preconnect import Preconnector
    from pipegrid.transport.surveys import Question, Surveyed
    from pipegrid.transport.throttle import Throttle
    from pipegrid.wire.storage_messages import LeaseReleases, ReleaseAnswers


T = TypeVar("T")

CUT_OFF_ATTEMPTS = 3
"""The maximum number of attempts for a short response that is interrupted or invalid."""


def until_whole(
    ask: Callable[[], Deferred[RawResponse]], attempts: int = CUT_OFF_ATTEMPTS
) -> Deferred[RawResponse]:
    """
    Send a request, and send it again while the response is interrupted or invalid: at most ``attempts``
    requests in total.
    """

    def again(failure: Failure) -> Any:
        # ``trap`` would raise: each get cancels a question, and the frames of the raised error would keep the
        # get's data in memory.
        return until_whole(ask, attempts - 1) if failure.check(ResponseError) else failure

    answer: Deferred[Any] = ask()
    return answer.addErrback(again) if attempts > 1 else answer


# A storage server across the network: the contract over HTTPS, for all servers that implement GBS.
#
# Requests, and the connections on which they are sent:
#
# =============================  ===================================================================
# allocate, write, abort         the uploads' connection, in order, without waiting for responses
# read-test-writes               the uploads' connection; those that only read use the pool
# lists, short reads, leases,    the pool of a few connections (``http11.host_pool``). A connection has at
# advisories, the version        most 60 KB of outstanding responses (480 KiB if the server supports read
#                                bundles), or one long response after short ones
# streams                        the pool. A stream is the last response on its connection, which is
#                                paused with the consumer; ``GbsStreams`` keeps other connections free
# requests for the pool while    the uploads' connection, if it is up, has no change to send, and the
# the pool connects              expected responses together are short
# =============================  ===================================================================
#
# So the first requests of a get, for a list and for the expected share, are sent on one connection.
#
# ``operation_order`` keeps the contract's order between connections. ``requests`` and ``response_outcomes``
# implement the protocol, ``uploads`` the changes of shares, ``http11`` HTTP. Connections are established when
# first needed, and closed when idle.


class GbsServer:
    """
    Implements ``transport.interface.StorageServer`` over HTTPS.

    Args:
        identity: the server's identity.
        nurl: the server's address; its secret is sent with every request.
        endpoints: makes an endpoint for each new connection, with TLS to the owner of the NURL's key only; in
            production ``endpoints_for``.
        clock: for all time limits.
        bundle_bytes: the largest bundle that the server's announcement offers, or 0; the server's responses
            may offer bundles, too.
        open_beside: creates a server object that uses Foolscap, see ``FoolscapOffload``; None: only HTTPS is
            used.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        nurl: Nurl,
        endpoints: Endpoints,
        clock: IReactorTime,
        settings: GbsSettings | None = None,
        bundle_bytes: int = 0,
        open_beside: Callable[[], OffloadServer] | None = None,
    ) -> None:
        settings = settings or GbsSettings()
        name = identity.nickname
        self.nurl = nurl
        self.identity = identity
        self._requests = GbsRequests(nurl, settings.timeout_s)
        self._answers = GbsAnswers(name)
        self._order = GbsOrder()
        self._asked = PendingQuestions(name)
        talk = self._requests, self._answers
        context = GbsContext(clock, endpoints, name, settings, *talk, self._asked)
        self._uploads = GbsUploads(context, bundle_bytes)
        limits = settings.limits(settings.max_read_connections + settings.max_streams)
        self._reads = HostPool(clock, endpoints, name, limits)
        self._streams = GbsStreams(self._reads, *talk, settings.max_streams)
        self._takes_surveys = True  # False once the server has refused a survey
        self._asked_what_it_takes = False
        self._read_bundles = GbsReadBundles(
            clock,
            *talk,
            self._ask_read_bundle,
            lambda index, number, length: self.read(index, number, 0, length),
            lambda: gbs_bundles.read_limit_bytes(self._uploads.bundles.max_bytes),
        )
        self._beside = None if open_beside is None else FoolscapOffload(clock, open_beside)

    def __repr__(self) -> str:
        return (
            f"<GbsServer {self.identity.nickname!r} at {self.nurl.host}:{self.nurl.port},"
            f" {len(self._asked)} questions, {self._uploads}>"
        )

    @property
    def round_trip_s(self) -> float | None:
        """The shortest round trip measured on the uploads' connection; None if no round trip was measured."""
        return self._uploads.connection.round_trip_s

    @property
    def last_activity_s(self) -> float:
        """When bytes last came from the server or were sent to it, by the clock."""
        beside_s = -math.inf if self._beside is None else self._beside.last_activity_s
        return max(self._uploads.connection.last_activity_s, self._reads.last_activity_s, beside_s)

    def version(self) -> Deferred[ServerVersion]:
        """Ask the server for its version and limits."""
        return self._asked.track(
            lambda: self._question(self._requests.version()).addCallback(
                self._uploads.heard, self._answers.version
            )
        )

    # Uploads.

    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        """
        Request space; see ``StorageServer.allocate``.

        A repeated request may find the shares already allocated by its first attempt. Then a Tahoe-LAFS
        server lists them in neither set, like shares that other clients upload. Whether a share belongs to
        this client shows when it is written.
        """
        if self._asked.disconnected:
            return fail(self._asked.gone())
        call = storage_index, share_numbers, share_bytes, secrets
        return self._watched(self._uploads.allocate(*call))

    def _watched(self, upload: Deferred[T]) -> Deferred[T]:
        """
        Count an upload over HTTPS if the server has Foolscap and no bundles; later uploads may use Foolscap.
        """
        if self._beside is None or self.takes_bundles:
            return upload
        return self._beside.watch(upload, lambda: self.takes_bundles)

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
        *,
        release: Callable[[], None] | None = None,
        again: bool = False,
    ) -> Deferred[WriteAnswer]:
        """Write at least one byte to an unfinished share; see ``StorageServer.write``."""
        if not any(map(len, data)):
            return fail(nothing_to_write())
        call = storage_index, share_number, offset, data, upload_secret, release, again
        return self._change(storage_index, share_number, lambda: self._uploads.write(*call))

    @property
    def whole_bytes(self) -> int:
        """
        The largest share for ``store_whole``. A server without bundles gets separate requests, sent at the
        same time.
        """
        return MAX_SHARE_BYTES

    @property
    def small_file_capacity(self) -> SmallFileCapacity:
        """
        ``ANY`` if the server supports bundles; otherwise the capacity of ``FoolscapOffload``, or ``COUNTED``
        if Foolscap is not used.
        """
        if self.takes_bundles:
            return SmallFileCapacity.ANY
        return (
            SmallFileCapacity.COUNTED if self._beside is None else self._beside.small_file_capacity
        )

    def expect(self, objects: int) -> None:
        """Prepare for many small objects; see ``StorageServer.expect``."""
        if self._beside is not None and not self.takes_bundles:
            self._beside.expect(objects)

    @property
    def bundle_bytes(self) -> int:
        """The longest bundle that the server is known to accept, in bytes; 0: none."""
        return self._uploads.bundles.max_bytes

    @property
    def takes_bundles(self) -> bool:
        """Whether the server's responses or its announcement have offered bundles."""
        return self._uploads.bundles.max_bytes > 0

    def store_whole(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored]:
        """Store whole shares; see ``StorageServer.store_whole``."""
        call = storage_index, shares, share_bytes, secrets
        beside = self._beside
        if beside is not None and not self.takes_bundles and beside.whole_bytes >= share_bytes:
            store = partial(beside.store, self._uploads.store_whole, *call)
            return self._asked.track(lambda: beside.count(self._order.alone(storage_index, store)))
        store = partial(self._uploads.store_whole, *call)
        return self._watched(self._change(storage_index, None, store))

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """Abort an unfinished upload; see ``StorageServer.abort``."""
        abort = partial(self._uploads.abort, storage_index, share_number, upload_secret)
        return self._change(storage_index, share_number, abort)

    def _change(
        self, storage_index: bytes, number: int | None, start: Callable[[], Deferred[T]]
    ) -> Deferred[T]:
        """
        Send a change after the operations that it must wait for; ``disconnect`` fails a change that waits.
        """
        if self._asked.disconnected:
            return fail(self._asked.gone())
        return self._order.change(storage_index, number, start)

    # Questions.

    def list_shares(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all complete shares of a storage index."""
        request = self._requests.list_shares(storage_index)
        return self._ask(storage_index, None, request, self._shares)

    def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from a complete share; see ``StorageServer.read``."""
        # A range cannot be empty, so at least one byte is requested to find out whether the share exists.
        request, unpack = self._read(storage_index, share_number, offset, length)
        if length <= BEHIND_BYTES:
            return self._ask(storage_index, share_number, request, unpack)

        def start(_: Callable[[], None]) -> Deferred[bytes]:
            return self._question(request).addCallback(unpack)

        return self._asked.track(lambda: self._order.ask_apart(storage_index, share_number, start))

    def _read(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        length: int,
        mutable: bool = False,
    ) -> tuple[RawRequest, Callable[[RawResponse], bytes]]:
        """
        Return a request for at least one byte, and a function that extracts the wanted bytes from the
        response.
        """
        wanted = max(1, length)

        def unpack(answer: RawResponse) -> bytes:
            return self._answers.data(answer, share_number, offset, wanted)[:length]

        request = self._requests.read(storage_index, share_number, offset, wanted, mutable=mutable)
        return request, unpack

    def read_small(self, storage_index: bytes, share_number: int, length: int) -> Deferred[bytes]:
        """
        Read the beginning of a small share; see ``transport.interface.read_small``. If the server supports
        read bundles, one request combines several reads.
        """
        if self._asked.disconnected:
            return fail(self._asked.gone())
        if not (self.takes_bundles and self._read_bundles.taken):
            self._ask_what_it_takes()
            return self.read(storage_index, share_number, 0, length)
        if length > MAX_SMALL_READ_BYTES:
            return self.read(storage_index, share_number, 0, length)
        return self._read_bundles.read(storage_index, share_number, length)

    def expect_small_reads(self) -> Deferred[None]:
        """
        Ask for the version, once: the response shows whether the server supports bundles. See
        ``transport.interface.expect_small_reads``.
        """
        if self.takes_bundles or self._asked_what_it_takes or not self._takes_surveys:
            return succeed(None)
        self._asked_what_it_takes = True
        return self.version().addCallback(lambda _: None)

    def _ask_what_it_takes(self) -> None:
        self.expect_small_reads().addErrback(
            lambda failure: failure.trap(ServerError, CancelledError)
        )

    def stream(
        self, storage_index: bytes, share_number: int, offset: int, length: int, consumer: IConsumer
    ) -> Deferred[int]:
        """Read a complete share into a consumer; see ``StorageServer.stream``."""
        if length <= 0:
            return self.read(storage_index, share_number, offset, 0).addCallback(len)

        def start(begun: Callable[[], None]) -> Deferred[int]:
            asked = storage_index, share_number, offset, length
            stream = Stream(self._streams, *asked, consumer, begun)
            self._streams.enqueue(stream)
            return stream.result

        return self._asked.track(lambda: self._order.ask_apart(storage_index, share_number, start))

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the storage index."""
        request = self._requests.add_lease(storage_index, lease)
        return self._ask(storage_index, None, request, self._answers.lease_added)

    def lease_listed(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the storage index; see ``transport.surveys``."""
        beside = self._beside
        if beside is None or self.takes_bundles:
            return self.add_lease(storage_index, lease)
        return self._asked.track(lambda: beside.lease(self.add_lease, storage_index, lease))

    @property
    def is_known_to_take_surveys(self) -> bool:
        """Whether surveys are sent: the server supports bundles, and has refused no survey yet."""
        return self.takes_bundles and self._takes_surveys

    def survey(
        self, questions: Sequence[Question]
    ) -> Deferred[list[Surveyed | ServerError] | None] | None:
        """
        Ask about many files in one request, if the server supports surveys; see ``transport.surveys``.

        If the server is not known to support surveys, this returns None. The first such call asks the server
        for its version; later calls use the response.
        """
        if not self.is_known_to_take_surveys:
            self._ask_what_it_takes()
            return None

        def unpack(answer: RawResponse) -> list[Surveyed | ServerError] | None:
            if answer.status in NOT_TAKEN:
                self._takes_surveys = False
                return None
            return self._answers.survey(answer, questions)

        return self._asked.track(
            lambda: self._question(self._requests.survey(questions)).addCallback(unpack)
        )

    def release_leases(self, request: LeaseReleases) -> Deferred[ReleaseAnswers | None]:
        """Release many leases in one request; see ``transfer.lease_release``."""

        def unpack(answer: RawResponse) -> ReleaseAnswers | None:
            if answer.status in NOT_TAKEN:
                return None
            return self._answers.released(answer, len(request.releases))

        return self._ask_unordered(self._requests.release_leases(request)).addCallback(unpack)

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str, mutable: bool = False
    ) -> Deferred[None]:
        """Report a corrupt share to the server's operator."""
        request = self._requests.advise_corrupt_share(
            storage_index, share_number, reason, mutable=mutable
        )
        unpack = partial(self._answers.advised, share_number=share_number)
        return self._ask(storage_index, share_number, request, unpack)

    def _ask(
        self,
        storage_index: bytes,
        number: int | None,
        request: RawRequest,
        unpack: Callable[[RawResponse], T],
    ) -> Deferred[T]:
        return self._asked.track(
            lambda: self._order.ask(
                storage_index,
                number,
                lambda: self._question(request).addCallback(unpack),
                lambda: self._uploads.upload(request, storage_index, unpack),
            )
        )

    def _shares(self, answer: RawResponse) -> frozenset[int]:
        return self._uploads.heard(answer, self._answers.shares)

    def _ask_read_bundle(self, request: RawRequest) -> Deferred[RawResponse]:
        self._reads.raise_budget(OUTSTANDING_BYTES)
        return self._ask_unordered(request)

    def _ask_unordered(self, request: RawRequest) -> Deferred[RawResponse]:
        return self._asked.track(lambda: self._question(request))

    def _question(self, request: RawRequest) -> Deferred[RawResponse]:
        """
        Send a question on a connection of the pool; send it again if the connection is lost or the response
        is interrupted.

        While the pool connects, which takes two round trips, short questions are sent on the uploads'
        connection, if that connection is up and has no change to send. If the uploads' connection is lost,
        the pool sends these questions again.
        """

        def again(failure: Failure) -> Any:
            return self._reads.request(request) if failure.check(AskElsewhere) else failure

        def send() -> Deferred[RawResponse]:
            if self._reads.is_connected or not self._uploads.takes_question(request):
                return self._reads.request(request)
            self._reads.connect()  # so that later questions have a connection
            return self._uploads.question(request).addErrback(again)

        return until_whole(send)

    # Slots.

    def read_test_write(
        self, storage_index: bytes, secrets: SlotSecrets, changes: Changes, reads: Reads = ()
    ) -> Deferred[SlotResult]:
        """
        Test, read and write a slot; see ``StorageServer.read_test_write``. The request is sent again after a
        lost connection.
        """
        request = self._requests.read_test_write(storage_index, secrets, changes, reads)
        limit_bytes = self._requests.slot_answer_bytes(reads)

        def unpack(answer: RawResponse, repeated: bool = False) -> SlotResult:
            found = self._answers.slot_result(answer, reads, limit_bytes)
            return attrs.evolve(found, repeated=True) if repeated else found

        if not changes:
            return self._ask(storage_index, None, request, unpack)
        change = partial(self._uploads.change, request, storage_index, unpack)
        return self._change(storage_index, None, change)

    def list_slot(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all mutable shares of a slot."""
        request = self._requests.list_shares(storage_index, mutable=True)
        return self._ask(storage_index, None, request, self._shares)

    @as_deferred
    async def read_slot(
        self, storage_index: bytes, reads: Reads, expected: Numbers = frozenset()
    ) -> SlotData:
        """
        Read from every share of a slot; see ``StorageServer.read_slot``. Each range of each share is a
        separate request.
        """
        found: SlotData = {}

        async def read(number: int) -> None:
            parts = [self.read_slot_share(storage_index, number, *each) for each in reads]
            with suppress(NoSuchShare):
                found[number] = tuple(await gather(parts))

        requests: list[Deferred[Any]] = [self.list_slot(storage_index)]
        requests += [Deferred.fromCoroutine(read(number)) for number in sorted(expected)]
        numbers = (await gather(requests))[0]
        others = sorted(numbers - expected)
        await gather([Deferred.fromCoroutine(read(number)) for number in others])
        return found

    def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from one mutable share; see ``StorageServer.read_slot_share``."""
        request, unpack = self._read(storage_index, share_number, offset, length, mutable=True)
        return self._ask(storage_index, share_number, request, unpack)

    add_slot_lease = add_lease  # one request for both kinds of shares

    def advise_corrupt_slot_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Report a corrupt mutable share to the server's operator."""
        return self.advise_corrupt_share(storage_index, share_number, reason, mutable=True)

    # Disconnecting.

    def disconnect(self) -> Deferred[None]:
        """Close all connections and fail unanswered requests; fires when the connections are closed."""
        self._asked.give_up()
        self._order.give_up(self._asked.gone)
        self._read_bundles.give_up(self._asked.gone)
        beside = [] if self._beside is None else [self._beside.disconnect()]
        gone = [self._uploads.close(self._asked.gone), self._reads.close(), *beside]
        return DeferredList(gone).addCallback(lambda _: None)


# Endpoints for a server over HTTPS: TCP, and TLS to the owner of its NURL's key only.


def endpoints_for_all(
    reactor: Any,
    nurls: Sequence[Nurl],
    server: str,
    policy: ConnectionPolicy,
    throttle: Throttle | None = None,
    ahead: Preconnector | None = None,
    told: Callable[[bool], None] = lambda usable: None,
) -> Callable[[], IStreamClientEndpoint]:
    """
    Return a function that returns endpoints for a server with several NURLs. All NURLs are tried: first in
    the order of the list, later the one that worked last before the others.

    Args:
        told: called when a connection is established, and when it is usable; see ``Alternatives``.
    """
    return Alternatives(
        [endpoints_for(reactor, each, server, policy, throttle, ahead) for each in nurls], told
    )


def endpoints_for(
    reactor: Any,
    nurl: Nurl,
    server: str,
    policy: ConnectionPolicy,
    throttle: Throttle | None = None,
    ahead: Preconnector | None = None,
) -> Callable[[], IStreamClientEndpoint]:
    """
    Return a function that returns endpoints for the owner of a NURL's key: TCP, and TLS pinned to that key.

    Args:
        policy: decides how the NURL's host is connected to.
        throttle: limits the rate; None: no limit.
        ahead: provides connections that may already be established; not used with a throttle or a proxy.

    Raises:
        RefusedConnection: the policy permits no connection to the NURL's host.
    """
    place = nurl.place
    way = policy.way_to(place.host, place.through_tor)
    if isinstance(way, RefusedWay):
        raise RefusedConnection(f"no connection to {server} is made: {way.reason}")
    adopt = None
    if ahead is not None and throttle is None and isinstance(way, DirectWay):
        adopt = partial(
            PreconnectedEndpoint, reactor, ahead, (nurl.host, nurl.port), http_context()
        )

    def make() -> IStreamClientEndpoint:
        endpoint = endpoint_through(policy, reactor, *place)
        if throttle is not None:
            endpoint = throttle.endpoint(endpoint)
        return pin_endpoint(endpoint, nurl.spki_hash, server, adopt)

    return make
