"""The server contract for a storage directory that this process itself uses, without a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, execute, succeed
from twisted.internet.interfaces import IConsumer
from twisted.python.failure import Failure

from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.durability import Committable
from pipegrid.disk.group_commit import Ending, GroupCommit, ThreadRunner
from pipegrid.errors import ServerError, ServerRefused
from pipegrid.storage.mutable.slots import Slots
from pipegrid.storage.share_reader import ShareReader
from pipegrid.storage.share_store import ShareStore
from pipegrid.storage.uploads.incoming_share import IncomingShare
from pipegrid.transport.interface import PausableStream, StoresApart, disconnected, streaming
from pipegrid.transport.operation_order import OrderedCall, Ordering
from pipegrid.wire.storage_messages import (
    Allocation,
    Changes,
    LeaseReleases,
    LeaseSecrets,
    Numbers,
    Pieces,
    Reads,
    ReleaseAnswers,
    Released,
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

# A storage server in this process: the contract implemented on a storage directory.
#
# **Threads.** Operations of at most ``INLINE_BYTES`` run at once, in the reactor's thread: their system calls
# take about 10 µs, and a switch to another thread and back takes 50 to 150 µs. Larger reads and writes, also
# those of streams, and operations that wait for the disk (``disk.group_commit``), run in worker threads.
#
# **Memory.** Nothing is copied: the pieces of a write are written to the disk as they are, and a read is one
# buffer. A stream holds at most two chunks of 256 KiB.
#
# **Cancellation.** A write that is cancelled while a thread carries it out releases its buffers at once.
# Bytes that the thread writes after that are not counted as received: see ``IncomingShare.write``.

T = TypeVar("T")

_NONE: frozenset[int] = frozenset()

FAILED = 500
"""The HTTP status that servers send for a release that failed."""

INLINE_BYTES = 64 * 1024
STREAM_CHUNK_BYTES = 256 * 1024


class LocalServer(StoresApart):
    """
    Implements ``transport.interface.StorageServer`` in this process.

    Args:
        store: can be shared with other servers.
        workers: threads for blocking calls.
        durability: decides what must be durable before a share is acknowledged; can be shared by servers of
            several stores.
        inline_bytes: largest read or write that runs without a thread.
    """

    def __init__(
        self,
        store: ShareStore,
        identity: ServerIdentity,
        workers: ThreadRunner,
        durability: GroupCommit,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        self.store = store
        self.identity = identity
        self._workers = workers
        self._durability = durability
        self._inline_bytes = inline_bytes
        self._ordering = Ordering()
        self._streams: set[PausableStream] = set()

    def __repr__(self) -> str:
        return f"<LocalServer {self.identity.nickname!r} in {str(self.store.root)!r}>"

    def version(self) -> Deferred[ServerVersion]:
        """Return the server's version and limits."""
        return execute(self._named, self.store.version)

    def allocate(
        self, storage_index: bytes, share_numbers: Numbers, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Allocation]:
        """Request space for shares; see ``StorageServer.allocate``."""
        call = self.store.allocate, storage_index, frozenset(share_numbers), share_bytes, secrets
        return self._ask(None, *call, changes=True)

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
        """Write to an unfinished share; see ``StorageServer.write``."""

        def fill(operation: OrderedCall) -> IncomingShare:
            upload = self.store.upload(storage_index, share_number, upload_secret)
            upload.write(offset, data, lambda: operation.wanted)
            if not upload.complete:
                upload.checkpoint()
            return upload

        async def write(operation: OrderedCall) -> WriteAnswer:
            upload = await self._run(sum(map(len, data)), fill, operation)
            if not upload.complete:
                return WriteAnswer(False, upload.required())
            await self._durability.commit(upload)
            return WriteAnswer(True)

        def start(operation: OrderedCall) -> Deferred[WriteAnswer]:
            return Deferred.fromCoroutine(write(operation))

        return self._submit(storage_index, share_number, True, start)

    @property
    def whole_bytes(self) -> int:
        """The largest share that ``store_whole`` writes without a thread."""
        return self._inline_bytes

    def store_whole(
        self, storage_index: bytes, shares: Shares, share_bytes: int, secrets: UploadSecrets
    ) -> Deferred[Stored]:
        """Store whole shares; see ``StorageServer.store_whole``."""
        if share_bytes > self._inline_bytes:
            return super().store_whole(storage_index, shares, share_bytes, secrets)
        call = storage_index, dict(shares), share_bytes, secrets
        return self._submit(storage_index, None, True, lambda one: self._store_now(one, *call))

    def _store_now(
        self,
        operation: OrderedCall,
        storage_index: bytes,
        shares: Shares,
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Deferred[Stored]:
        """
        Write shares in the reactor's thread; fires when each of them is durable or has failed.

        Raises:
            ServerRefused, UsageError: as ``ShareStore.allocate``; nothing was stored.
        """
        complete = self._in_one_move(storage_index, shares, secrets)
        taken = frozenset(share.share_number for share in complete)
        if len(taken) == len(shares):
            return self._commit(complete, Allocation(_NONE, taken), {})
        try:
            others = shares.keys() - taken
            allocation = self.store.allocate(storage_index, others, share_bytes, secrets)
        except BaseException:
            for share in complete:
                share.discard()
            raise
        failed: dict[int, ServerError] = {}
        for number in sorted(others - allocation.already_have):
            try:
                share = self.store.upload(storage_index, number, secrets.upload)
                share.write(0, [shares[number]], lambda: operation.wanted)
                if share.complete:
                    complete.append(share)
                else:
                    share.checkpoint()  # this client had allocated a larger share before
            except ServerError as error:  # noqa: PERF203  it is rare that there are several
                failed[number] = self._of_this(error)
        there = Allocation(allocation.already_have, allocation.allocated | taken)
        return self._commit(complete, there, failed)

    def _in_one_move(
        self, storage_index: bytes, shares: Shares, secrets: UploadSecrets
    ) -> list[IncomingShare]:
        """
        Store shares in a single step each, up to the first that needs several steps; return the stored ones.
        """
        taken: list[IncomingShare] = []
        if not self._durability.syncs_unnamed:
            return taken
        for number, data in shares.items():
            share = self.store.take_whole(storage_index, number, data, secrets)
            if share is None:
                break
            taken.append(share)
        return taken

    def _commit(
        self,
        shares: Sequence[IncomingShare],
        allocation: Allocation,
        failed: dict[int, ServerError],
    ) -> Deferred[Stored]:
        """Make complete shares durable; fires with the allocation and all errors."""
        if not shares:
            return succeed(Stored(allocation, failed))
        done: Deferred[Stored] = Deferred()  # a cancelled call's shares become durable, too
        left = len(shares)

        def ended(share: Committable, outcome: Ending) -> None:
            nonlocal left
            left -= 1
            if outcome is not None:
                assert isinstance(share, IncomingShare)
                failed[share.share_number] = self._of_this(_as_error(outcome))
            if not left and not done.called:
                done.callback(Stored(allocation, failed))

        self._durability.commit_each(shares, ended)
        return done

    def _of_this(self, error: ServerError) -> ServerError:
        error.server = error.server or self.identity.nickname
        return error

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """Abort an unfinished upload; see ``StorageServer.abort``."""
        call = self.store.abort, storage_index, share_number, upload_secret
        return self._ask(share_number, *call, changes=True)

    def list_shares(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Return the numbers of all complete shares of a storage index."""
        return self._ask(None, self.store.list_shares, storage_index)

    def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from a complete share; see ``StorageServer.read``."""
        return self._read(self.store, storage_index, share_number, offset, length)

    def stream(
        self, storage_index: bytes, share_number: int, offset: int, length: int, consumer: IConsumer
    ) -> Deferred[int]:
        """Read a complete share into a consumer; see ``StorageServer.stream``."""
        opening = self._ask(share_number, self.store.open_share, storage_index, share_number)
        return Deferred.fromCoroutine(self._stream(opening, offset, length, consumer))

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the storage index."""
        return self._ask(None, self.store.add_lease, storage_index, lease, changes=True)

    def release_leases(self, request: LeaseReleases) -> Deferred[ReleaseAnswers]:
        """Release many leases; see ``transfer.lease_release``."""
        results: list[Released | int] = []

        async def release() -> ReleaseAnswers:
            for one in request.releases:
                call = self.store.release_lease, one.storage_index, one.cancel_secret, request.since
                try:
                    results.append(await self._ask(None, *call, changes=True))
                except ServerError:
                    results.append(FAILED)
            return ReleaseAnswers(self.store.now, tuple(results))

        return Deferred.fromCoroutine(release())

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str, mutable: bool = False
    ) -> Deferred[None]:
        """Report a corrupt share to the server's operator."""
        advise = partial(self.store.advise_corrupt_share, mutable=mutable)
        advised = self._ask(share_number, advise, storage_index, share_number, reason)
        return advised.addCallback(lambda _: None)

    # Slots.

    def read_test_write(
        self, storage_index: bytes, secrets: SlotSecrets, changes: Changes, reads: Reads = ()
    ) -> Deferred[SlotResult]:
        """Test, read and write a slot; see ``StorageServer.read_test_write``."""
        changes, reads = dict(changes), tuple(reads)
        durable = self._durability.policy != "none"

        def change(_: OrderedCall) -> Deferred[SlotResult]:
            call = self.store.slots.testv_and_readv_and_writev
            run = self._durability.run if changes else partial(self._run, 0)
            return run(call, storage_index, secrets, changes, reads, durable)

        return self._submit(storage_index, None, bool(changes), change)

    def list_slot(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Return the numbers of all mutable shares of a slot."""
        return self._ask(None, self.store.slots.list_shares, storage_index)

    def read_slot(
        self, storage_index: bytes, reads: Reads, expected: Numbers = frozenset()
    ) -> Deferred[SlotData]:
        """Read from every share of a slot."""
        size = sum(length for _, length in reads)
        read = partial(self._run, size, self.store.slots.readv)
        return self._ask(None, read, storage_index, (), tuple(reads))

    def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from one mutable share; see ``StorageServer.read_slot_share``."""
        return self._read(self.store.slots, storage_index, share_number, offset, length)

    add_slot_lease = add_lease  # one method for both kinds of shares

    def advise_corrupt_slot_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Report a corrupt mutable share to the server's operator."""
        return self.advise_corrupt_share(storage_index, share_number, reason, mutable=True)

    def disconnect(self) -> Deferred[None]:
        """
        Fail unanswered operations; unfinished uploads stay, and can be resumed.

        The server object can be used again after this.
        """
        reason = partial(disconnected, self.identity.nickname)
        for stream in list(self._streams):
            stream.give_up(reason())
        gone = self._ordering.give_up_all(reason)
        gone.addCallback(lambda _: self.store.release())
        return gone

    # How calls are carried out.

    def _submit(
        self,
        storage_index: bytes,
        share_number: int | None,
        changes: bool,
        call: Callable[[OrderedCall], Any],
    ) -> Deferred[Any]:
        def named(operation: OrderedCall) -> Any:
            result = self._named(call, operation)
            if isinstance(result, Deferred):
                result.addErrback(lambda failure: self._named(failure.raiseException))
            return result

        return self._ordering.carry_out(storage_index, OrderedCall(share_number, changes, named))

    def _ask(
        self,
        share_number: int | None,
        call: Callable[..., Any],
        storage_index: bytes,
        *args: Any,
        changes: bool = False,
    ) -> Deferred[Any]:
        return self._submit(
            storage_index, share_number, changes, lambda _: call(storage_index, *args)
        )

    def _read(
        self,
        place: ShareStore | Slots,
        storage_index: bytes,
        share_number: int,
        offset: int,
        length: int,
    ) -> Deferred[bytes]:
        def read() -> bytes:
            with place.open_share(storage_index, share_number) as reader:
                return reader.read(offset, length)

        return self._submit(storage_index, share_number, False, lambda _: self._run(length, read))

    def _run(self, size_bytes: int, function: Callable[..., T], *args: Any) -> Deferred[T]:
        if size_bytes <= self._inline_bytes:
            return execute(function, *args)
        return self._workers.run(function, *args)

    def _named(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function; add this server's name to its errors."""
        try:
            return function(*args)
        except ServerError as error:
            self._of_this(error)
            raise
        except OSError as error:
            refusal = disk.disk_error(error, f"use the storage directory {str(self.store.root)!r}")
            refusal.server = self.identity.nickname
            raise refusal from error

    async def _stream(
        self, opening: Deferred[ShareReader], offset: int, length: int, consumer: IConsumer
    ) -> int:
        reader = await opening
        try:
            with streaming(self._streams, consumer) as stream:
                return await self._pump(reader, stream, offset, length, consumer)
        except ServerError as error:
            error.server = error.server or self.identity.nickname
            raise
        finally:
            reader.close()

    async def _pump(
        self,
        reader: ShareReader,
        stream: PausableStream,
        offset: int,
        length: int,
        consumer: IConsumer,
    ) -> int:
        delivered, chunk = 0, b""
        try:
            while delivered < length:
                await stream.flowing()
                chunk_bytes = min(STREAM_CHUNK_BYTES, length - delivered)
                chunk = await stream.unless_stopped(
                    self._run(chunk_bytes, reader.read, offset + delivered, chunk_bytes)
                )
                await stream.flowing()
                if not chunk:
                    break
                consumer.write(chunk)
                delivered += len(chunk)
        finally:
            # A cancelled stream's error refers to this frame, which refers to the error: the cycle must not
            # keep the chunk in memory.
            chunk = b""
        return delivered


def _as_error(outcome: Ending) -> ServerError:
    error = outcome.value if isinstance(outcome, Failure) else outcome
    if isinstance(error, ServerError):
        return error
    return ServerRefused(f"cannot make a share durable: {error}; try again or use another server")
