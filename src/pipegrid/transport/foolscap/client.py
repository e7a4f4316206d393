"""The server contract over Foolscap, including mutable slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredList, fail
from twisted.internet.interfaces import IConsumer, IReactorTime

from pipegrid.errors import ServerError
from pipegrid.reactor.deferreds import all_ended, notify_deferred
from pipegrid.transport.foolscap.link import Connector, FoolscapLink, check_numbers, in_pieces
from pipegrid.transport.foolscap.reader_references import FoolscapReaders
from pipegrid.transport.foolscap.uploads import FoolscapUploads
from pipegrid.transport.interface import (
    StoresApart,
    disconnected,
    fits_reads,
    no_share,
    nonsense,
    nothing_to_lease,
    nothing_to_write,
    why_failed,
)
from pipegrid.transport.operation_order import OrderedCall, Ordering
from pipegrid.wire.foolscap_interfaces import MAX_REASON_BYTES, unpack_version
from pipegrid.wire.storage_messages import (
    Allocation,
    Changes,
    LeaseSecrets,
    Numbers,
    Pieces,
    Reads,
    ServerIdentity,
    ServerVersion,
    ShareChange,
    Shares,
    SlotData,
    SlotResult,
    SlotSecrets,
    Stored,
    UploadSecrets,
    WriteAnswer,
)

# A storage server across the network: the contract over Foolscap.
#
# One connection is used for everything, and a server begins calls in the order in which they were sent. So
# most operations are sent at once; ``_Sent.conflicts`` decides which ones wait:
#
# * A write waits for the response to its allocation, which contains the reference to the remote writer. Then
#   all waiting writes, and the ``close`` after the last one, are sent together: a put takes two round trips
#   (``foolscap.uploads``).
# * A question or an allocation waits for the responses to earlier writes to the same shares: a server may
#   take time to make a share durable, and carry out later calls meanwhile.
#
# ``reader_references`` describes how shares are read.
#
# **Limits of Foolscap.** When a connection ends, the server drops the unfinished uploads of that connection.
# On a new connection, writes to them fail with ``NoSuchShare``, and the upload must begin again.

WHOLE_BYTES = 124 * 1024
"""The largest share for ``store_whole``: a call with such a share is encoded in one piece."""

P = ParamSpec("P")
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class FoolscapSettings:
    """
    Limits and timeouts for one server.

    Attributes:
        connect_timeout_s: maximum time until the server's remote reference is found, including negotiation.
        timeout_s: longest time without activity of the server while a response is outstanding.
        max_indexes: number of storage indexes whose references to shares are kept.
        stream_piece_bytes, stream_pieces: size and number of a stream's pending pieces at the beginning;
            later pieces are larger, and fewer are pending. With the defaults and a round trip of 100 ms, a
            stream transfers 20 MB/s of one share and takes 2 MiB of memory.
    """

    connect_timeout_s: float = 15.0
    timeout_s: float = 60.0
    max_indexes: int = 256
    stream_piece_bytes: int = 256 * 1024
    stream_pieces: int = 8
    close_behind: bool = True


class _Sent(OrderedCall):
    """
    An operation that knows which earlier operations it must wait for.

    Args:
        kind: "allocate", "write" (or abort), "store" (allocation and writes in one operation), or "ask".
        numbers: the numbers of the shares that the operation concerns; None: all shares of the index.
    """

    def __init__(
        self, kind: str, numbers: Numbers | None, call: Callable[[OrderedCall], Any]
    ) -> None:
        super().__init__(None, kind != "ask", call)
        self.kind = kind
        self.numbers = numbers

    def conflicts(self, other: OrderedCall) -> bool:
        """Return whether this operation must wait for the end of ``other``, which was called first."""
        assert isinstance(other, _Sent)
        apart = (
            self.numbers is not None
            and other.numbers is not None
            and self.numbers.isdisjoint(other.numbers)
        )
        if apart or (self.kind == other.kind and self.kind in ("write", "ask")):
            return False
        if "store" in (self.kind, other.kind):
            return True
        if other.kind == "write" or (other.kind, self.kind) == ("allocate", "write"):
            return True
        # The server keeps the order of calls. So if the earlier operation was sent, nothing can overtake it.
        return not other.started


def _question(
    method: Callable[Concatenate[Any, bytes, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, bytes, P], Deferred[T]]:
    """
    Make a method of ``FoolscapServer`` wait for its turn, as a question about all shares of a storage index.
    """
    notify_deferred(method)

    @wraps(method)
    def ask(self: Any, index: bytes, /, *arguments: P.args, **options: P.kwargs) -> Any:
        call = partial(method, self, index, *arguments, **options)
        return self._submit("ask", None, index, call)

    return ask


class FoolscapServer(StoresApart):
    """
    Implements ``transport.interface.StorageServer`` over Foolscap.

    Args:
        identity: the server's identity.
        connector: connects to the server; in production ``link.TubConnector``.
        clock: for all time limits.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        connector: Connector,
        clock: IReactorTime,
        settings: FoolscapSettings | None = None,
    ) -> None:
        settings = settings or FoolscapSettings()
        self.identity = identity
        self._name = identity.nickname
        self._link = FoolscapLink(
            connector, self._name, clock, settings.connect_timeout_s, settings.timeout_s, self._lost
        )
        self._ordering = Ordering()
        self._uploads = FoolscapUploads(self._link, self._name, settings.close_behind)
        bounds = settings.max_indexes, settings.stream_piece_bytes, settings.stream_pieces
        self._readers = FoolscapReaders(self._link, self._name, *bounds)
        self._disconnected = False

    def __repr__(self) -> str:
        return f"<FoolscapServer {self._name!r} {self._link!r}>"

    @property
    def is_connected(self) -> bool:
        """Whether the connection is up, so that calls are sent at once."""
        return self._link.is_up

    @property
    def last_activity_s(self) -> float:
        """
        When the server last responded, or when a call was sent while no other was unanswered, by the clock;
        minus infinity: never.
        """
        return self._link.heard_s

    def version(self) -> Deferred[ServerVersion]:
        """Ask the server for its version and limits."""

        async def ask() -> ServerVersion:
            answer = await self._link.call_storage("get_version")
            try:
                return unpack_version(answer)
            except (ValueError, AttributeError) as error:
                raise nonsense(self._name, "a question for its version", str(error)) from error

        return self._submit("ask", None, b"", ask)

    # Uploads.

    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        """
        Request space; see ``StorageServer.allocate``. Unfinished uploads of the same client are in neither
        set.
        """
        wanted = frozenset(share_numbers)
        allocate = partial(self._allocate, storage_index, wanted, share_bytes, secrets)
        return self._submit("allocate", wanted or None, storage_index, allocate)

    async def _allocate(
        self,
        storage_index: bytes,
        share_numbers: frozenset[int],
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Allocation:
        have, writers = await self._link.call_storage(
            "allocate_buckets",
            storage_index,
            secrets.lease.renew,
            secrets.lease.cancel,
            set(share_numbers),
            share_bytes,
            self._link.canary,
        )
        check_numbers(self._name, "an allocation", have)
        if not share_numbers.issuperset(writers):
            raise nonsense(self._name, "an allocation", "shares that were not asked for")
        self._uploads.began(storage_index, writers, share_bytes, secrets.upload)
        return Allocation(frozenset(have), frozenset(writers))

    @property
    def whole_bytes(self) -> int:
        """
        The largest share for ``store_whole``. Foolscap has no combined call, but ``store_whole`` halves the
        client's CPU time for a small file.
        """
        return WHOLE_BYTES

    def store_whole(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored]:
        """Store whole shares; see ``StorageServer.store_whole``."""

        async def store() -> Stored:
            numbers = frozenset(shares)
            allocation = await self._allocate(storage_index, numbers, share_bytes, secrets)
            written = {
                number: Deferred.fromCoroutine(
                    self._uploads.write(storage_index, number, 0, [data], secrets.upload)
                )
                for number, data in shares.items()
                if number not in allocation.already_have
            }
            outcomes = await DeferredList(written.values(), consumeErrors=True)
            failed = why_failed(zip(written, outcomes, strict=True))
            for number in failed.keys() & allocation.allocated:
                with suppress(ServerError):  # so that a retry does not find the damaged share
                    await self._uploads.abort(storage_index, number, secrets.upload)
            self._readers.forget(storage_index)
            return Stored(allocation, failed)

        return self._submit("store", shares.keys(), storage_index, store)

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

        async def write() -> WriteAnswer:
            result = await self._uploads.write(
                storage_index, share_number, offset, data, upload_secret
            )
            if result.complete:
                self._readers.forget(storage_index)
            return result

        return self._submit("write", {share_number}, storage_index, write)

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """Abort an unfinished upload; see ``StorageServer.abort``."""
        abort = partial(self._uploads.abort, storage_index, share_number, upload_secret)
        return self._submit("write", {share_number}, storage_index, abort)

    # Questions.

    @_question
    async def list_shares(self, storage_index: bytes) -> frozenset[int]:
        """Ask for the numbers of all complete shares of a storage index."""
        return frozenset(await self._readers.ask(storage_index, again=True))

    def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from a complete share; see ``StorageServer.read``."""
        read = partial(self._readers.read, storage_index, share_number, offset, length)
        return self._submit("ask", {share_number}, storage_index, read)

    def stream(
        self, storage_index: bytes, share_number: int, offset: int, length: int, consumer: IConsumer
    ) -> Deferred[int]:
        """Read a complete share into a consumer; see ``StorageServer.stream``."""
        find = partial(self._readers.find, storage_index, share_number)
        opening = self._submit("ask", {share_number}, storage_index, find)
        return Deferred.fromCoroutine(self._readers.stream(opening, find, offset, length, consumer))

    @_question
    async def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> None:
        """Add or renew a lease on every share of the storage index; see ``StorageServer.add_lease``."""
        shares = self._readers.ask(storage_index, again=True)
        await self._lease_found(storage_index, lease, shares, "upload")

    def read_small(self, storage_index: bytes, share_number: int, length: int) -> Deferred[bytes]:
        """Read the beginning of a share; see ``transport.interface.read_small``."""
        return self.read(storage_index, share_number, 0, length)

    @_question
    async def lease_listed(self, storage_index: bytes, lease: LeaseSecrets) -> None:
        """
        Add or renew a lease on every share of the storage index, in one call; see ``transport.surveys``.
        """
        await self._lease(storage_index, lease)

    async def _lease(self, storage_index: bytes, lease: LeaseSecrets) -> None:
        await self._link.call_storage("add_lease", storage_index, lease.renew, lease.cancel)

    async def _lease_found(
        self,
        storage_index: bytes,
        lease: LeaseSecrets,
        listing: Coroutine[Any, Any, Collection[int]],
        first: str,
    ) -> None:
        """
        Add a lease, and list the shares at the same time: the response to ``add_lease`` does not show whether
        there are any.
        """
        added = Deferred.fromCoroutine(self._lease(storage_index, lease))
        _, shares = await all_ended([added, Deferred.fromCoroutine(listing)])
        if not shares:
            raise nothing_to_lease(self._name, first)

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Report a corrupt share to the server's operator; see ``StorageServer.advise_corrupt_share``."""

        async def advise() -> None:
            reader = await self._readers.find(storage_index, share_number)
            await self._link.call(reader, "advise_corrupt_share", _reason_text(reason))

        return self._submit("ask", {share_number}, storage_index, advise)

    # Slots: read-test-write, and reading all shares of a slot in one call. A server carries out calls on one
    # slot in the order in which they were sent. A slot is identified by its storage index only. So this
    # client keeps no references for slots, and when a connection is lost, only pending responses are lost.
    #
    # Source: how Tahoe-LAFS 1.20 behaves.

    @_question
    async def read_test_write(
        self, storage_index: bytes, secrets: SlotSecrets, changes: Changes, reads: Reads = ()
    ) -> SlotResult:
        """
        Test, read and write a slot; see ``StorageServer.read_test_write``. The call is not repeated after a
        lost connection.
        """
        success, data = await self._link.call_storage(
            "slot_testv_and_readv_and_writev",
            storage_index,
            (secrets.write_enabler, secrets.lease.renew, secrets.lease.cancel),
            {number: _vectors(change) for number, change in changes.items()},
            list(reads),
            share_bytes=sum(len(data) for each in changes.values() for _, data in each.writes),
        )
        return SlotResult(bool(success), self._checked(data, reads))

    @_question
    async def list_slot(self, storage_index: bytes) -> frozenset[int]:
        """Ask for the numbers of all mutable shares of a slot."""
        return frozenset(await self._read_slot(storage_index))

    @_question
    async def read_slot(
        self, storage_index: bytes, reads: Reads, expected: Numbers = frozenset()
    ) -> SlotData:
        """Read from every share of a slot, in one call."""
        return await self._read_slot(storage_index, reads)

    async def _read_slot(
        self, storage_index: bytes, reads: Reads = (), numbers: Sequence[int] = ()
    ) -> SlotData:
        """Read from the shares with these numbers; an empty sequence means all shares of the slot."""
        data = await self._link.call_storage(
            "slot_readv",
            storage_index,
            list(numbers),
            list(reads),
            share_bytes=len(numbers) * sum(length for _, length in reads),
        )
        return self._checked(data, reads)

    @_question
    async def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> bytes:
        """
        Read from one mutable share; see ``StorageServer.read_slot_share``. A long read takes several calls.
        """
        reads = [
            Deferred.fromCoroutine(self._read_slot(storage_index, [each], [share_number]))
            for each in in_pieces(offset, length)
        ]
        answers = await all_ended(reads)
        if any(share_number not in data for data in answers):
            raise no_share(self._name, share_number)
        return b"".join(data[share_number][0] for data in answers)

    @_question
    async def add_slot_lease(self, storage_index: bytes, lease: LeaseSecrets) -> None:
        """Add or renew a lease on every share of a slot; see ``StorageServer.add_slot_lease``."""
        shares = self._read_slot(storage_index)
        await self._lease_found(storage_index, lease, shares, "store")

    @_question
    async def advise_corrupt_slot_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> None:
        """
        Report a corrupt mutable share to the server's operator; see
        ``StorageServer.advise_corrupt_slot_share``. The shares are also listed, since the response does not
        show whether the share exists.
        """
        advised = self._link.call_storage(
            "advise_corrupt_share", b"mutable", storage_index, share_number, _reason_text(reason)
        )
        calls = [advised, self._read_slot(storage_index)]
        _, found = await all_ended(list(map(Deferred.fromCoroutine, calls)))
        if share_number not in found:
            raise no_share(self._name, share_number)

    def _checked(self, data: Any, reads: Reads) -> SlotData:
        """
        Return the data after checking that they match the reads: one piece for each read, none longer than
        the read.
        """
        check_numbers(self._name, "a read of mutable shares", data)
        if not fits_reads(data, reads):
            raise nonsense(
                self._name, "a read of mutable shares", "other reads than were asked for"
            )
        return {number: tuple(pieces) for number, pieces in data.items()}

    # Disconnecting.

    def disconnect(self) -> Deferred[None]:
        """Close the connection and fail unanswered requests; fires when it is closed."""
        self._disconnected = True
        reason = partial(disconnected, self._name)
        self._readers.give_up_streams(reason)
        gone = [self._ordering.give_up_all(reason), self._link.close()]
        return DeferredList(gone).addCallback(lambda _: None)

    def _lost(self) -> None:
        self._uploads.lost()
        self._readers.lost()

    def _submit(
        self,
        kind: str,
        numbers: Numbers | None,
        storage_index: bytes,
        call: Callable[[], Coroutine[Any, Any, Any]],
    ) -> Deferred[Any]:
        """Start an operation when those that it must wait for have ended; see ``_Sent``."""
        if self._disconnected:
            return fail(disconnected(self._name))
        sent = _Sent(kind, numbers, lambda _: Deferred.fromCoroutine(call()))
        return self._ordering.carry_out(storage_index, sent)


def _reason_text(reason: str) -> bytes:
    return reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]


def _vectors(change: ShareChange) -> tuple[list[Any], list[Any], int | None]:
    return (
        [(offset, size, b"eq", specimen) for offset, size, specimen in change.tests],
        [(offset, bytes(data)) for offset, data in change.writes],
        change.new_length,
    )
