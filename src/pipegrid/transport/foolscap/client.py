"""The server contract over Foolscap, including mutable slots."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
from twisted.internet.defer import Deferred, DeferredList, fail
from twisted.internet.interfaces import IConsumer, IReactorTime

from pipegrid.errors import ServerError
from pipegrid.reactor.deferreds import all_ended
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

# Slots of mutable shares over Foolscap: read-test-write, and reading all shares of a slot in one call.
#
# A slot is identified by its storage index only, so nothing is kept here, and a lost connection loses
# only pending responses.
#
# Source: the format reference, storage protocols, section 2.3.

_Data = SlotData


class FoolscapSlots:
    """
    The slots of one server.

    Args:
        server: the server's name for messages.
    """

    def __init__(self, link: FoolscapLink, server: str) -> None:
        self._link = link
        self._server = server

    async def read_test_write(
        self, storage_index: bytes, secrets: SlotSecrets, changes: Changes, reads: Reads
    ) -> SlotResult:
        storage = await self._link.storage()
        success, data = await self._link.call(
            storage,
            "slot_testv_and_readv_and_writev",
            storage_index,
            (secrets.write_enabler, secrets.lease.renew, secrets.lease.cancel),
            {number: _vectors(change) for number, change in changes.items()},
            list(reads),
            share_bytes=sum(len(data) for each in changes.values() for _, data in each.writes),
        )
        return SlotResult(bool(success), self._checked(data, reads))

    async def read(self, storage_index: bytes, numbers: Sequence[int], reads: Reads) -> _Data:
        """Read from shares; without numbers from all of them."""
        storage = await self._link.storage()
        data = await self._link.call(
            storage,
            "slot_readv",
            storage_index,
            list(numbers),
            list(reads),
            share_bytes=len(numbers) * sum(length for _, length in reads),
        )
        return self._checked(data, reads)

    async def read_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> bytes:
        """
        Return bytes of one share, in as many calls as its length needs; raises NoSuchShare if it does not
        exist.
        """
        reads = [
            self.read(storage_index, [share_number], [each]) for each in in_pieces(offset, length)
        ]
        answers = await all_ended(list(map(Deferred.fromCoroutine, reads)))
        if any(share_number not in data for data in answers):
            raise no_share(self._server, share_number)
        found = [data[share_number][0] for data in answers]
        return found[0] if len(found) == 1 else b"".join(found)

    async def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> None:
        """
        Add or renew a lease. Foolscap does not report whether there were shares, so they are listed, too.
        """
        storage = await self._link.storage()
        added = self._link.call(storage, "add_lease", storage_index, lease.renew, lease.cancel)
        shares = Deferred.fromCoroutine(self.read(storage_index, (), ()))
        _, found = await all_ended([added, shares])
        if not found:
            raise nothing_to_lease(self._server, "store")

    async def advise_corrupt(self, storage_index: bytes, share_number: int, reason: str) -> None:
        """Send an advisory for a share; the shares are listed, too, to find out whether it exists."""
        storage = await self._link.storage()
        text = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]
        advised = self._link.call(
            storage, "advise_corrupt_share", b"mutable", storage_index, share_number, text
        )
        shares = Deferred.fromCoroutine(self.read(storage_index, (), ()))
        _, found = await all_ended([advised, shares])
        if share_number not in found:
            raise no_share(self._server, share_number)

    def _checked(self, data: Any, reads: Reads) -> _Data:
        """Return the data if they match the reads: one piece for each read, none too long."""
        check_numbers(self._server, "a read of mutable shares", data)
        if not fits_reads(data, reads):
            raise nonsense(
                self._server, "a read of mutable shares", "other reads than were asked for"
            )
        return {number: tuple(pieces) for number, pieces in data.items()}


def _vectors(change: ShareChange) -> tuple[list[Any], list[Any], int | None]:
    return (
        [(offset, size, b"eq", specimen) for offset, size, specimen in change.tests],
        [(offset, bytes(data)) for offset, data in change.writes],
        change.new_length,
    )


# A storage server across the network: the contract over Foolscap.
#
# One connection is used for everything, and a server begins calls in the order in which they were sent.
# So most operations are sent at once; ``_Sent.conflicts`` decides which wait:
#
# * A write waits for the response to its allocation, which contains the reference to write to. All held
#   writes, and the ``close`` after the last, then are sent together: a put is two round trips
#   (``foolscap.uploads``).
# * A question or an allocation waits for the responses to earlier writes to the same shares, since a
#   server may take time to make a share durable, and carry out later calls meanwhile.
#
# ``reader_references`` describes how shares are read.
#
# **Limits of Foolscap.** An unfinished upload ends on the server with its connection: on a new one writes
# fail with ``NoSuchShare``, and the upload must begin again.

WHOLE_BYTES = 124 * 1024
"""The largest shares that are encoded whole, and fit in one call that is serialized at once."""

Task = Callable[..., Coroutine[Any, Any, Any]]
"""
An operation that runs in its turn; its first argument is the storage index, which determines the order.
"""


@attrs.frozen(kw_only=True)
class FoolscapSettings:
    """
    Limits and timeouts for one server.

    Attributes:
        connect_timeout_s: until the server is found, including negotiation.
        timeout_s: longest time without activity of the server while a response is outstanding.
        max_indexes: number of storage indexes whose references to shares are kept.
        stream_piece_bytes, stream_pieces: a stream begins with this many pending pieces of this size;
        later they are larger and fewer. At 100 ms that transfers 20 MB/s per share, and takes 2 MiB of
        memory.
    """

    connect_timeout_s: float = 15.0
    timeout_s: float = 60.0
    max_indexes: int = 256
    stream_piece_bytes: int = 256 * 1024
    stream_pieces: int = 8
    close_behind: bool = True


class _Sent(OrderedCall):
    """
    An operation, and which earlier operations it must wait for.

    Args:
        kind: "allocate", "write" (or abort), "store" (both in one), or "ask".
        numbers: the shares that it concerns; None: all.
    """

    def __init__(
        self, kind: str, numbers: Numbers | None, call: Callable[[OrderedCall], Any]
    ) -> None:
        super().__init__(None, kind != "ask", call)
        self.kind = kind
        self.numbers = numbers

    def conflicts(self, other: OrderedCall) -> bool:
        """Return whether this operation must wait for the end of the other, which came first."""
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
        # The server keeps the order of sent calls; only an operation that was not sent yet can be
        # overtaken.
        return not other.started


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
        self._slots = FoolscapSlots(self._link, self._name)
        self._disconnected = False

    def __repr__(self) -> str:
        return f"<FoolscapServer {self._name!r} {self._link!r}>"

    @property
    def is_connected(self) -> bool:
        """Whether the connection is up, so that a call is sent at once."""
        return self._link.is_up

    @property
    def last_activity_s(self) -> float:
        """When the server last responded, by the clock."""
        return self._link.heard_s

    def version(self) -> Deferred[ServerVersion]:
        """Ask the server for its version and limits."""

        async def ask(_: bytes) -> ServerVersion:
            answer = await self._link.call(await self._link.storage(), "get_version")
            try:
                return unpack_version(answer)
            except (ValueError, AttributeError) as error:
                raise nonsense(self._name, "a question for its version", str(error)) from error

        return self._ask(None, ask, b"")

    # Uploads.

    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        """Request space; see the contract. The client's own unfinished uploads are in neither set."""
        wanted = frozenset(share_numbers)
        allocate = partial(
            self._allocate, share_numbers=wanted, share_bytes=share_bytes, secrets=secrets
        )
        return self._submit("allocate", wanted or None, allocate, storage_index)

    async def _allocate(
        self,
        storage_index: bytes,
        share_numbers: frozenset[int],
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Allocation:
        storage = await self._link.storage()
        have, writers = await self._link.call(
            storage,
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
        The largest share to store whole: there is no combined call, but it halves the client's cost of a
        small file.
        """
        return WHOLE_BYTES

    def store_whole(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored]:
        """Store whole shares; see the contract."""

        async def store(storage_index: bytes) -> Stored:
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
                with suppress(ServerError):  # a retry must not find the damaged share
                    await self._uploads.abort(storage_index, number, secrets.upload)
            self._readers.forget(storage_index)
            return Stored(allocation, failed)

        return self._submit("store", shares.keys(), store, storage_index)

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
        """Write to an unfinished share; see the contract. At least one byte."""
        if not any(map(len, data)):
            return fail(nothing_to_write())

        async def write(storage_index: bytes) -> WriteAnswer:
            result = await self._uploads.write(
                storage_index, share_number, offset, data, upload_secret
            )
            if result.complete:
                self._readers.forget(storage_index)
            return result

        return self._submit("write", {share_number}, write, storage_index)

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """Abort an unfinished upload; see the contract."""
        abort = self._uploads.abort
        return self._submit(
            "write", {share_number}, abort, storage_index, share_number, upload_secret
        )

    # Questions.

    def list_shares(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all complete shares."""

        return self._ask(None, self._readers.ask, storage_index, True).addCallback(frozenset)

    def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from a complete share; see the contract."""
        read = self._readers.read
        return self._ask({share_number}, read, storage_index, share_number, offset, length)

    def stream(
        self, storage_index: bytes, share_number: int, offset: int, length: int, consumer: IConsumer
    ) -> Deferred[int]:
        """Read a complete share into a consumer; see the contract."""
        find = partial(self._readers.find, storage_index, share_number)
        opening = self._ask({share_number}, self._readers.find, storage_index, share_number)
        return Deferred.fromCoroutine(self._readers.stream(opening, find, offset, length, consumer))

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the index; see the contract."""

        async def add(storage_index: bytes) -> None:
            added = Deferred.fromCoroutine(self._lease(storage_index, lease))
            # Foolscap does not report whether there were shares, so they are listed, too.
            shares = self._readers.ask(storage_index, again=True)
            _, readers = await all_ended([added, Deferred.fromCoroutine(shares)])
            if not readers:
                raise nothing_to_lease(self._name)

        return self._ask(None, add, storage_index)

    def read_small(self, storage_index: bytes, share_number: int, length: int) -> Deferred[bytes]:
        """Read the beginning of a share; see ``transport.interface.read_small``."""
        return self.read(storage_index, share_number, 0, length)

    def lease_listed(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease where there are shares, in one call; see ``transport.surveys``."""
        return self._ask(None, self._lease, storage_index, lease)

    async def _lease(self, storage_index: bytes, lease: LeaseSecrets) -> None:
        storage = await self._link.storage()
        await self._link.call(storage, "add_lease", storage_index, lease.renew, lease.cancel)

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Report a corrupt share to the server's operator; see the contract."""

        async def advise(storage_index: bytes) -> None:
            reader = await self._readers.find(storage_index, share_number)
            text = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]
            await self._link.call(reader, "advise_corrupt_share", text)

        return self._ask({share_number}, advise, storage_index)

    # Slots. A server carries out calls on one slot in the order in which they were sent.

    def read_test_write(
        self, storage_index: bytes, secrets: SlotSecrets, changes: Changes, reads: Reads = ()
    ) -> Deferred[SlotResult]:
        """Test, read and write a slot; see the contract. It is not sent again after a lost connection."""
        call = self._slots.read_test_write
        return self._ask(None, call, storage_index, secrets, changes, reads)

    def list_slot(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all mutable shares."""

        return self._ask(None, self._slots.read, storage_index, (), ()).addCallback(frozenset)

    def read_slot(
        self, storage_index: bytes, reads: Reads, expected: Numbers = frozenset()
    ) -> Deferred[SlotData]:
        """Read from every share of a slot, in one call."""
        return self._ask(None, self._slots.read, storage_index, (), reads)

    def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from one mutable share; see the contract."""
        read = self._slots.read_share
        return self._ask(None, read, storage_index, share_number, offset, length)

    def add_slot_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of a slot; see the contract."""
        return self._ask(None, self._slots.add_lease, storage_index, lease)

    def advise_corrupt_slot_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Report a corrupt mutable share to the server's operator; see the contract."""
        return self._ask(None, self._slots.advise_corrupt, storage_index, share_number, reason)

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

    # Submitting operations.

    def _ask(
        self, numbers: Numbers | None, call: Task, storage_index: bytes, *arguments: Any
    ) -> Deferred[Any]:
        return self._submit("ask", numbers, call, storage_index, *arguments)

    def _submit(
        self, kind: str, numbers: Numbers | None, call: Task, storage_index: bytes, *arguments: Any
    ) -> Deferred[Any]:
        if self._disconnected:
            return fail(disconnected(self._name))

        def start(_: OrderedCall) -> Deferred[Any]:
            return Deferred.fromCoroutine(call(storage_index, *arguments))

        return self._ordering.carry_out(storage_index, _Sent(kind, numbers, start))
