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
protocol, ``uploads`` what changes shares, ``http11`` HTTP. Connections are made when they are first needed,
and close when they idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredList, fail
from twisted.internet.interfaces import IConsumer, IReactorTime

from pipegrid.errors import ServerError
from pipegrid.flow.depth import Appetite
from pipegrid.http11.dialer import Endpoints
from pipegrid.http11.pool import HostPool
from pipegrid.http11.raw import RawRequest, RawResponse
from pipegrid.transport.gbs.answers import GbsAnswers
from pipegrid.transport.gbs.bundles import MAX_SHARE_BYTES
from pipegrid.transport.gbs.foolscapbeside import FoolscapBeside, StoresBeside
from pipegrid.transport.gbs.openquestions import OpenQuestions, until_whole
from pipegrid.transport.gbs.order import GbsOrder
from pipegrid.transport.gbs.requests import GbsRequests
from pipegrid.transport.gbs.settings import GbsSettings
from pipegrid.transport.gbs.slotreads import read_slot
from pipegrid.transport.gbs.streams import GbsStreams
from pipegrid.transport.gbs.surveys import GbsSurveys
from pipegrid.transport.gbs.uploads import GbsUploads
from pipegrid.transport.interface import nothing_to_write
from pipegrid.wire.messages import (
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
from pipegrid.wire.nurl import Nurl

if TYPE_CHECKING:
    from pipegrid.transport.surveys import Question, Surveyed

T = TypeVar("T")

BEHIND_BYTES = 64 * 1024
"""Up to here a read may stand behind a change on the uploads' connection; a longer one waits for it."""


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
        open_beside: makes a server that speaks Foolscap with it, if it does; see ``foolscapbeside``.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        nurl: Nurl,
        endpoints: Endpoints,
        clock: IReactorTime,
        settings: GbsSettings | None = None,
        bundle_bytes: int = 0,
        open_beside: Callable[[], StoresBeside] | None = None,
    ) -> None:
        settings = settings or GbsSettings()
        name = identity.nickname
        self.nurl = nurl
        self.identity = identity
        self._clock = clock
        self._requests = GbsRequests(nurl, settings.timeout_s)
        self._answers = GbsAnswers(name)
        self._order = GbsOrder()
        self._asked = OpenQuestions(name)
        talk = self._requests, self._answers
        self._uploads = GbsUploads(
            clock, endpoints, name, settings, *talk, self._asked.track, bundle_bytes
        )
        limits = settings.limits(settings.max_read_connections + settings.max_streams)
        self._reads = HostPool(clock, endpoints, name, limits)
        self._streams = GbsStreams(self._reads, *talk, settings.max_streams)
        self._surveys = GbsSurveys(*talk)
        self._beside = None if open_beside is None else FoolscapBeside(clock, open_beside)

    def __repr__(self) -> str:
        return (
            f"<GbsServer {self.identity.nickname!r} at {self.nurl.host}:{self.nurl.port},"
            f" {len(self._asked)} questions, {self._uploads}>"
        )

    @property
    def round_trip_s(self) -> float | None:
        """The shortest round trip that the connection for uploads has seen; None if it has seen none."""
        return self._uploads.round_trip_s

    @property
    def last_sign_s(self) -> float:
        """When bytes last came from it or went to it, by the clock."""
        beside_s = -math.inf if self._beside is None else self._beside.last_sign_s
        return max(self._uploads.last_sign_s, self._reads.last_sign_s, beside_s)

    def version(self) -> Deferred[ServerVersion]:
        """Ask what the server says of itself."""
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
        Ask for room; see the contract.

        A repeated request may find the shares allocated by its first attempt, and then a Tahoe server
        mentions them in neither set, as it does those of others: writes show whose they are.
        """
        if self._asked.disconnected:
            return fail(self._asked.gone())
        allocation = self._uploads.allocate(storage_index, share_numbers, share_bytes, secrets)
        beside = None if self.takes_bundles else self._beside
        return (
            allocation if beside is None else beside.watch(allocation, lambda: self.takes_bundles)
        )

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Pieces,
        upload_secret: bytes,
        *,
        let_go: Callable[[], None] | None = None,
        again: bool = False,
    ) -> Deferred[WriteAnswer]:
        """Write to an unfinished share; see the contract. At least one byte."""
        if not any(map(len, data)):
            return fail(nothing_to_write())
        call = storage_index, share_number, offset, data, upload_secret, let_go, again
        return self._change(storage_index, share_number, lambda: self._uploads.write(*call))

    @property
    def whole_bytes(self) -> int:
        """As long as goes in a bundle, if the server takes any, or over Foolscap, if that is better now."""
        if self.takes_bundles:
            return MAX_SHARE_BYTES
        return 0 if self._beside is None else self._beside.whole_bytes

    @property
    def appetite(self) -> Appetite:
        """Any number, if they go in bundles; few, while another way is being made."""
        if self.takes_bundles:
            return Appetite.ANY
        return Appetite.COUNTED if self._beside is None else self._beside.appetite

    def expect(self, objects: int) -> None:
        """Many small objects will be stored; see the contract."""
        if self._beside is not None and not self.takes_bundles:
            self._beside.expect(objects)

    @property
    def takes_bundles(self) -> bool:
        """Whether its answers, or its announcement, have said so."""
        return self._uploads.bundle_bytes > 0

    def store_whole(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored]:
        """Store whole shares; see the contract."""
        call = storage_index, shares, share_bytes, secrets
        beside = self._beside
        if beside is None or self.takes_bundles or beside.whole_bytes < share_bytes:
            return self._change(storage_index, None, partial(self._uploads.store_whole, *call))
        store = partial(beside.store, self._uploads.store_whole, *call)
        return self._asked.track(lambda: beside.count(self._order.alone(storage_index, store)))

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """Forget an unfinished upload; see the contract."""
        abort = partial(self._uploads.abort, storage_index, share_number, upload_secret)
        return self._change(storage_index, share_number, abort)

    def _change(
        self, storage_index: bytes, number: int | None, start: Callable[[], Deferred[T]]
    ) -> Deferred[T]:
        """Send a change when its turn has come; ``disconnect`` finds it where it stands then."""
        if self._asked.disconnected:
            return fail(self._asked.gone())
        return self._order.change(storage_index, number, start)

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
        """Return a request for at least one byte, and what makes of its answer those that are wanted."""
        wanted = max(1, length)

        def unpack(answer: RawResponse) -> bytes:
            return self._answers.data(answer, share_number, offset, wanted)[:length]

        request = self._requests.read(storage_index, share_number, offset, wanted, mutable=mutable)
        return request, unpack

    def stream(
        self, storage_index: bytes, share_number: int, offset: int, length: int, consumer: IConsumer
    ) -> Deferred[int]:
        """Read a complete share into a consumer; see the contract."""
        if length <= 0:
            return self.read(storage_index, share_number, offset, 0).addCallback(len)

        def start(begun: Callable[[], None]) -> Deferred[int]:
            return self._streams.stream(
                storage_index, share_number, offset, length, consumer, begun
            )

        return self._asked.track(lambda: self._order.ask_apart(storage_index, share_number, start))

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the index."""
        request = self._requests.add_lease(storage_index, lease)
        return self._ask(storage_index, None, request, self._answers.lease_added)

    def lease_listed(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease where there are shares; see ``transport.surveys``."""
        beside = self._beside
        if beside is None or self.takes_bundles:
            return self.add_lease(storage_index, lease)
        return self._asked.track(lambda: beside.lease(self.add_lease, storage_index, lease))

    @property
    def is_known_to_take_surveys(self) -> bool:
        """Whether surveys are tried: it takes bundles, and has not refused one yet."""
        return self._uploads.bundle_bytes > 0 and self._surveys.taken

    def survey(
        self, questions: Sequence[Question]
    ) -> Deferred[list[Surveyed | ServerError] | None] | None:
        """
        Ask about many files in one message, if the server takes surveys; see ``transport.surveys``.

        One that has not said what it takes is asked for that, once, for the next time.
        """
        if not self.is_known_to_take_surveys:
            if self._surveys.may_offer():
                self.version().addErrback(lambda failure: failure.trap(ServerError, CancelledError))
            return None
        return self._asked.track(lambda: self._surveys.ask(self._question, questions))

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Tell the operator that a share looked corrupt."""
        request = self._requests.advise_corrupt_share(storage_index, share_number, reason)
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
                lambda: self._uploads.upload(request, unpack),
            )
        )

    def _question(self, request: RawRequest) -> Deferred[RawResponse]:
        """Send a request by the pool, which repeats what had no answer, and again if one was cut off."""
        return until_whole(partial(self._reads.request, request))

    # Slots.

    def read_test_write(
        self, storage_index: bytes, secrets: SlotSecrets, changes: Changes, reads: Reads = ()
    ) -> Deferred[SlotResult]:
        """Test, read and write a slot; sent again after a loss, for what that means see the contract."""
        request = self._requests.read_test_write(storage_index, secrets, changes, reads)
        limit_bytes = self._requests.slot_answer_bytes(reads)

        def unpack(answer: RawResponse, repeated: bool = False) -> SlotResult:
            found = self._answers.slot_result(answer, reads, limit_bytes)
            return attrs.evolve(found, repeated=True) if repeated else found

        if not changes:
            return self._ask(storage_index, None, request, unpack)
        return self._change(storage_index, None, lambda: self._uploads.change(request, unpack))

    def list_slot(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all mutable shares."""
        request = self._requests.list_shares(storage_index, mutable=True)
        return self._ask(storage_index, None, request, self._answers.shares)

    def read_slot(
        self, storage_index: bytes, reads: Reads, expected: Numbers = frozenset()
    ) -> Deferred[SlotData]:
        """Read from every share of a slot; see the contract."""
        return Deferred.fromCoroutine(read_slot(self, storage_index, reads, expected))

    def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from one mutable share; see the contract."""
        request, unpack = self._read(storage_index, share_number, offset, length, mutable=True)
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
        unpack = partial(self._answers.advised, share_number=share_number)
        return self._ask(storage_index, share_number, request, unpack)

    # The end.

    def disconnect(self) -> Deferred[None]:
        """Give up connections and unanswered requests; fires when all are gone."""
        self._asked.give_up()
        self._order.give_up(self._asked.gone)
        beside = [] if self._beside is None else [self._beside.disconnect()]
        gone = [self._uploads.close(self._asked.gone), self._reads.close(), *beside]
        return DeferredList(gone).addCallback(lambda _: None)
