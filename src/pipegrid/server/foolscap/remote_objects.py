"""
The share store as Foolscap's remote objects: every remote call becomes a call of the store, and errors become
errors for clients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import attrs
from foolscap.api import Referenceable
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    NoSuchShare,
    PipegridError,
    QuotaReached,
    ServerRefused,
    UsageError,
    WrongSecret,
)
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.storage.share_store import ShareStore
from pipegrid.storage.storage_paths import MAX_SHARE_NUMBER, possible_numbers
from pipegrid.storage.uploads.eviction import Client, address_of
from pipegrid.storage.uploads.incoming_share import IncomingShare
from pipegrid.wire.foolscap_interfaces import (
    RIBucketReader,
    RIBucketWriter,
    RIStorageServer,
    pack_version,
)
from pipegrid.wire.storage_messages import LeaseSecrets, ShareChange, SlotSecrets, UploadSecrets

# Clients get a text without paths and causes, which are only logged.

P = ParamSpec("P")
T = TypeVar("T")

log = Logger()

_TELLABLE: dict[type[PipegridError], str] = {
    NoSuchShare: "there is no such share, or no such unfinished upload",
    ConflictingWrite: "other bytes were written there before",
    NoSpace: "no space is left",
    QuotaReached: "the quota of this server is used up",
}


def answers(operation: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a method so that its exceptions become exceptions for clients."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def carry_out(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                raise _fit_for_clients(operation, error) from None

        return carry_out

    return decorate


def answers_later(operation: str) -> Callable[[Callable[P, Any]], Callable[P, Deferred[Any]]]:
    """Decorate a method that returns a Deferred, so that its errors become exceptions for clients."""

    def failed(failure: Failure) -> Failure:
        assert isinstance(failure.value, Exception)
        return Failure(_fit_for_clients(operation, failure.value))

    def decorate(method: Callable[P, Any]) -> Callable[P, Deferred[Any]]:
        @wraps(method)
        def carry_out(*args: P.args, **kwargs: P.kwargs) -> Deferred[Any]:
            return maybeDeferred(method, *args, **kwargs).addErrback(failed)

        return carry_out

    return decorate


def _fit_for_clients(operation: str, error: Exception) -> PipegridError:
    text = _TELLABLE.get(type(error)) if isinstance(error, PipegridError) else None
    if text is not None:
        if isinstance(error, NoSpace):
            log.warn("{operation}: {error}", operation=operation, error=str(error))
        kind: Any = type(error)
        told: PipegridError = kind(text)
        return told
    if isinstance(error, (UsageError, WrongSecret)):
        return error  # clients may see the text, which is only about the request
    if isinstance(error, PipegridError):
        log.error("{operation}: {error}", operation=operation, error=str(error))
    else:
        log.failure("{operation} failed", Failure(error), operation=operation)
    return ServerRefused(f"{operation} failed; the server's operator can see why")


# An upload belongs to the connection that began it. Its secret is created by the server and not sent to any
# client, and when the connection is lost, unclosed shares are dropped. ``close`` makes a share visible, and
# is answered when the share is durable; bytes never written are zeros. A share cannot be closed after one of
# its writes failed, since clients send ``close`` right after their writes, without waiting for their results.
# The exception is a complete share of which bytes were written twice, with a difference: the first ones are
# kept, and the share can be closed. Mutable slots use the same queue as over HTTPS.
#
# Source: how Tahoe-LAFS 1.20 behaves.


Vectors = tuple[list[tuple[int, int, bytes, bytes]], list[tuple[int, bytes]], int | None]
"""The tests (offset, length, operator, specimen), writes (offset, data) and new length of one share."""

UPLOAD_SECRET_BYTES = 32
MAX_READ_BYTES = 64 << 20
"""The most bytes in one answer, which is in memory as a whole; clients usually request a block at a time."""

UNKNOWN = Client("unknown")


@implementer(RIStorageServer)  # type: ignore[misc]
class FoolscapStorage(Referenceable):  # type: ignore[misc]
    """
    The object to which a server's fURL leads.

    Args:
        service: provides the store, the durability and the limit of shares that wait for the disk.
        owner: the number of the named client that the fURL is for; 0 for the server's own fURL.
    """

    def __init__(self, service: GbsService, owner: int = 0) -> None:
        self._service = service
        self._owner = owner
        self._closed = False
        self._batches: set[_Batch] = set()

    @property
    def service(self) -> GbsService:
        """
        The service that carries out calls.

        Raises:
            UsageError: the client was removed.
        """
        if self._closed:
            raise UsageError(
                "this address is not valid any more; ask the server's operator for another"
            )
        return self._service

    @property
    def _store(self) -> ShareStore:
        return self.service.store

    def _lease(self, renew_secret: bytes, cancel_secret: bytes) -> LeaseSecrets:
        return LeaseSecrets(renew_secret, cancel_secret, self._owner)

    def close(self) -> None:
        """Reject all further calls, since the client was removed."""
        self._closed = True
        self.stop()

    def stop(self) -> None:
        """Drop all unfinished uploads, since their connections end."""
        for batch in list(self._batches):
            batch.lost()

    # Remote calls.

    @answers("version")
    def remote_get_version(self) -> dict[bytes, Any]:
        """Return the version: the features and limits of the server."""
        return pack_version(self._store.version(self._owner))

    @answers("allocate")
    def remote_allocate_buckets(
        self,
        storage_index: bytes,
        renew_secret: bytes,
        cancel_secret: bytes,
        sharenums: set[int],
        allocated_size: int,
        canary: Any,
    ) -> tuple[set[int], dict[int, BucketWriter]]:
        """Allocate shares. Those that are not closed when the client's ``canary`` disconnects are dropped."""
        secret = os.urandom(UPLOAD_SECRET_BYTES)
        numbers = possible_numbers(sharenums)
        secrets = UploadSecrets(self._lease(renew_secret, cancel_secret), secret)
        client = client_of(canary)
        try:
            answer = self._store.allocate(storage_index, numbers, allocated_size, secrets, client)
            uploads = {
                number: self._store.upload(storage_index, number, secret, client)
                for number in answer.allocated
            }
        except PipegridError:
            for number in numbers:  # the client gets no writers for the shares begun already
                with suppress(PipegridError):
                    self._store.abort(storage_index, number, secret)
            raise
        batch = _Batch(self._service, self._batches, uploads)
        return set(answer.already_have), batch.begin(canary)

    @answers_later("lease")
    def remote_add_lease(
        self, storage_index: bytes, renew_secret: bytes, cancel_secret: bytes
    ) -> Deferred[None]:
        """Add or renew a lease on every share of the storage index; no error if there are no shares."""

        def add() -> None:
            with suppress(NoSuchShare):
                self._store.add_lease(storage_index, self._lease(renew_secret, cancel_secret))

        return self._service.slots.read(storage_index, add)

    @answers("list")
    def remote_get_buckets(self, storage_index: bytes) -> dict[int, BucketReader]:
        """Return a reader for each complete share."""
        return {
            number: BucketReader(self, storage_index, number)
            for number in self._store.list_shares(storage_index)
        }

    @answers_later("readv")
    def remote_slot_readv(
        self, storage_index: bytes, shares: list[int], readv: list[tuple[int, int]]
    ) -> Deferred[dict[int, list[bytes]]]:
        """
        Return the requested ranges of each given mutable share that exists; of all shares if none is given.
        """
        read = self._store.slots.readv
        data = self._service.slots.read(storage_index, read, storage_index, shares, readv)
        return data.addCallback(_as_lists)

    @answers_later("read-test-write")
    def remote_slot_testv_and_readv_and_writev(
        self,
        storage_index: bytes,
        secrets: tuple[bytes, bytes, bytes],
        tw_vectors: dict[int, Vectors],
        r_vector: list[tuple[int, int]],
    ) -> Deferred[tuple[bool, dict[int, list[bytes]]]]:
        """Read, test and write mutable shares atomically."""
        write_enabler, renew, cancel = secrets
        slots = self._service.slots
        run = slots.write if tw_vectors else slots.read
        return run(
            storage_index,
            self._store.slots.testv_and_readv_and_writev,
            storage_index,
            SlotSecrets(self._lease(renew, cancel), write_enabler),
            {number: _change(vectors) for number, vectors in tw_vectors.items()},
            r_vector,
            slots.durable,
        ).addCallback(lambda result: (result.success, _as_lists(result.data)))

    def remote_advise_corrupt_share(
        self, share_type: bytes, storage_index: bytes, shnum: int, reason: bytes
    ) -> None:
        """Record the client's advisory for the operator, if the share exists."""
        _advise(self.service, storage_index, shnum, reason, share_type == b"mutable")


def client_of(canary: Any) -> Client:
    """
    Return the client on whose connection a reference arrived; ``UNKNOWN`` for an object that is no reference.
    """
    broker = getattr(getattr(canary, "tracker", None), "broker", None)
    if broker is None:
        return UNKNOWN
    peer = getattr(broker.transport, "getPeer", lambda: None)()
    return Client(address_of(str(getattr(peer, "host", "unknown"))), -id(broker))


@attrs.define(eq=False, repr=False)
class _Batch:
    """The uploads of one allocation. If the connection is lost, all unclosed uploads are dropped."""

    service: GbsService
    _batches: set[_Batch]
    _uploads: dict[int, IncomingShare]
    _open: set[BucketWriter] = attrs.field(factory=set)
    _canary: Any = None
    _marker: Any = None

    def begin(self, canary: Any) -> dict[int, BucketWriter]:
        """Return the writers. If the canary disconnects, the unclosed shares are dropped."""
        writers = {number: BucketWriter(self, upload) for number, upload in self._uploads.items()}
        self._open.update(writers.values())
        if writers:
            self._batches.add(self)
            self._canary = canary
            self._marker = canary.notifyOnDisconnect(self.lost)
        return writers

    def ended(self, writer: BucketWriter) -> None:
        """Remove a writer that has ended; after the last writer, stop watching the connection."""
        self._open.discard(writer)
        if not self._open and self in self._batches:
            self._batches.discard(self)
            self._canary.dontNotifyOnDisconnect(self._marker)

    def lost(self) -> None:
        """Drop the shares that are not closed, since the connection is lost."""
        for writer in list(self._open):
            writer.forget()


@implementer(RIBucketWriter)  # type: ignore[misc]
class BucketWriter(Referenceable):  # type: ignore[misc]
    """One share that is being written."""

    def __init__(self, batch: _Batch, upload: IncomingShare) -> None:
        self._batch = batch
        self._service = batch.service
        self._upload = upload
        self._ended = False
        self._broken = False
        self._conflicted = False

    def __repr__(self) -> str:
        return f"<BucketWriter of {self._upload!r}>"

    @answers("write")
    def remote_write(self, offset: int, data: bytes) -> None:
        """
        Write bytes. Bytes that differ from earlier ones at the same place are rejected, and the upload
        continues.
        """
        self._require_open()
        if offset + len(data) > self._upload.share_bytes:
            raise UsageError("these bytes lie outside of the share; write within it")
        try:
            self._upload.write(offset, [data])
        except ConflictingWrite:
            self._conflicted = True
            raise
        except PipegridError:
            self._broken = True
            raise
        self._service.received(self._upload, len(data))

    @answers_later("close")
    def remote_close(self) -> Any:
        """Make the share visible; the answer is sent when the share is durable."""
        self._require_open()
        upload = self._upload
        if self._broken or (self._conflicted and not upload.complete):
            self.forget()
            raise UsageError("a write to this share failed; begin its upload again")
        if not upload.share_bytes:
            raise UsageError("a share without bytes cannot be kept; abort it")
        upload.fill_rest()
        self._end()
        return Deferred.fromCoroutine(_commit(self._service, upload))

    @answers("abort")
    def remote_abort(self) -> None:
        self._require_open()
        self.forget()

    def forget(self) -> None:
        """End the upload, and remove the bytes written of the share."""
        self._end()
        self._upload.discard()

    def _require_open(self) -> None:
        if self._ended or self._upload.gone:
            raise NoSuchShare("this upload was closed, aborted or given up; list the shares")

    def _end(self) -> None:
        self._ended = True
        self._batch.ended(self)


@implementer(RIBucketReader)  # type: ignore[misc]
class BucketReader(Referenceable):  # type: ignore[misc]
    """
    One complete share. The reader keeps no file open: clients keep many readers, and opening a file takes
    little time compared with a remote call.
    """

    def __init__(self, storage: FoolscapStorage, storage_index: bytes, share_number: int) -> None:
        self._storage = storage
        self._storage_index = storage_index
        self._share_number = share_number

    @answers("read")
    def remote_read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from an offset on; fewer, or none, if the range exceeds the share."""
        if length > MAX_READ_BYTES:
            raise UsageError(f"{length} bytes are too many for one answer; read in parts")
        service = self._storage.service
        with service.store.open_share(self._storage_index, self._share_number) as reader:
            data = reader.read(offset, length)
        service.sent_bytes += len(data)
        return data

    def remote_advise_corrupt_share(self, reason: bytes) -> None:
        """Record the client's advisory for the operator."""
        _advise(self._storage.service, self._storage_index, self._share_number, reason)


async def _commit(service: GbsService, upload: IncomingShare) -> None:
    while not service.has_space:
        room: Deferred[None] = Deferred()
        service.call_when_space(partial(room.callback, None))
        await room
    try:
        await service.commit(upload)
    except PipegridError:
        upload.discard()  # no client could resume the upload
        raise


def _change(vectors: Vectors) -> ShareChange:
    tests, writes, new_length = vectors
    if any(operator != b"eq" for _, _, operator, _ in tests):
        raise UsageError("the only test of a share's bytes is 'eq'; send no other")
    return ShareChange(
        tuple((offset, size, specimen) for offset, size, _, specimen in tests),
        tuple(writes),
        new_length,
    )


def _as_lists(data: Mapping[int, tuple[bytes, ...]]) -> dict[int, list[bytes]]:
    return {number: list(pieces) for number, pieces in data.items()}


@answers("complaint")
def _advise(
    service: GbsService, storage_index: bytes, number: int, reason: bytes, mutable: bool = False
) -> None:
    if 0 <= number <= MAX_SHARE_NUMBER:
        with suppress(NoSuchShare):
            text = reason.decode("utf-8", "replace")
            service.note_corrupt(storage_index, number, text, mutable)
