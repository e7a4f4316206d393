"""
Where the time of a grid goes: every request to a server, and every job of the CPU, as a span.

Servers and workers are wrapped as they are handed out, so that transfers need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer

from pipegrid.core.hashes import Buffer
from pipegrid.reactor.trace import Tracing
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transport.apart import StoresApart
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.messages import (
    Allocation,
    LeaseSecrets,
    ServerIdentity,
    ServerVersion,
    ShareChange,
    SlotResult,
    SlotSecrets,
    UploadSecrets,
    WriteResult,
)

P = ParamSpec("P")
T = TypeVar("T")


class TracedServer(StoresApart):
    """A storage server whose requests leave spans in a row of its own."""

    def __init__(self, server: StorageServer, tracer: Tracing) -> None:
        self._server = server
        self._tracer = tracer

    @property
    def identity(self) -> ServerIdentity:
        """Who this is."""
        return self._server.identity

    def _follow(self, request: Deferred[T], name: str, **facts: object) -> Deferred[T]:
        return self._tracer.follow(request, name, self.identity.nickname, **facts)

    def version(self) -> Deferred[ServerVersion]:
        """Trace ``version``."""
        return self._follow(self._server.version(), "version")

    def allocate(
        self,
        storage_index: bytes,
        share_numbers: AbstractSet[int],
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Deferred[Allocation]:
        """Trace ``allocate``."""
        request = self._server.allocate(storage_index, share_numbers, share_bytes, secrets)
        return self._follow(request, "allocate", shares=sorted(share_numbers), bytes=share_bytes)

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
        """Trace ``write``."""
        size = sum(map(len, data))
        request = self._server.write(
            storage_index, share_number, offset, data, upload_secret, let_go=let_go, again=again
        )
        return self._follow(request, "write", share=share_number, offset=offset, bytes=size)

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        """Trace ``abort``."""
        request = self._server.abort(storage_index, share_number, upload_secret)
        return self._follow(request, "abort", share=share_number)

    def list_shares(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Trace ``list_shares``."""
        return self._follow(self._server.list_shares(storage_index), "list_shares")

    def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Trace ``read``."""
        request = self._server.read(storage_index, share_number, offset, length)
        return self._follow(request, "read", share=share_number, offset=offset, bytes=length)

    def stream(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        length: int,
        consumer: IConsumer,
    ) -> Deferred[int]:
        """Trace ``stream``."""
        request = self._server.stream(storage_index, share_number, offset, length, consumer)
        return self._follow(request, "stream", share=share_number, offset=offset, bytes=length)

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Trace ``add_lease``."""
        return self._follow(self._server.add_lease(storage_index, lease), "add_lease")

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Trace ``advise_corrupt_share``."""
        request = self._server.advise_corrupt_share(storage_index, share_number, reason)
        return self._follow(request, "advise_corrupt_share", share=share_number)

    def read_test_write(
        self,
        storage_index: bytes,
        secrets: SlotSecrets,
        changes: Mapping[int, ShareChange],
        reads: Sequence[tuple[int, int]] = (),
    ) -> Deferred[SlotResult]:
        """Trace ``read_test_write``."""
        size = sum(len(data) for change in changes.values() for _, data in change.writes)
        request = self._server.read_test_write(storage_index, secrets, changes, reads)
        return self._follow(request, "read_test_write", shares=sorted(changes), bytes=size)

    def list_slot(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Trace ``list_slot``."""
        return self._follow(self._server.list_slot(storage_index), "list_slot")

    def read_slot(
        self,
        storage_index: bytes,
        reads: Sequence[tuple[int, int]],
        expected: AbstractSet[int] = frozenset(),
    ) -> Deferred[dict[int, tuple[bytes, ...]]]:
        """Trace ``read_slot``."""
        request = self._server.read_slot(storage_index, reads, expected)
        return self._follow(request, "read_slot", shares=sorted(expected))

    def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Trace ``read_slot_share``."""
        request = self._server.read_slot_share(storage_index, share_number, offset, length)
        return self._follow(
            request, "read_slot_share", share=share_number, offset=offset, bytes=length
        )

    def add_slot_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Trace ``add_slot_lease``."""
        return self._follow(self._server.add_slot_lease(storage_index, lease), "add_slot_lease")

    def advise_corrupt_slot_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        """Trace ``advise_corrupt_slot_share``."""
        request = self._server.advise_corrupt_slot_share(storage_index, share_number, reason)
        return self._follow(request, "advise_corrupt_slot_share", share=share_number)

    def disconnect(self) -> Deferred[None]:
        """Trace ``disconnect``."""
        return self._follow(self._server.disconnect(), "disconnect")


class TracedWorkers:
    """Workers whose jobs leave spans in the row ``cpu``, from the wait for a thread to the result."""

    def __init__(self, workers: CpuWorkers, tracer: Tracing) -> None:
        self._workers = workers
        self._tracer = tracer

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Trace a job."""
        return self._tracer.follow(
            self._workers.run(function, *args, **kwargs), _name(function), "cpu"
        )

    def run_if_large(
        self, size_bytes: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Trace a job, wherever it runs."""
        span = self._tracer.begin(_name(function), "cpu", bytes=size_bytes)
        job = self._workers.run_if_large(size_bytes, function, *args, **kwargs)

        def ended(result: T) -> T:
            self._tracer.end(span)
            return result

        return job.addBoth(ended)

    def stop(self) -> Deferred[None]:
        """Stop the workers."""
        return self._workers.stop()


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
