"""
Tracing a grid: every request to a server and every CPU job becomes a span.

Servers and workers are wrapped when a grid is opened, so transfers need no code for tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from twisted.internet.defer import Deferred

from pipegrid.reactor.trace import Tracing
from pipegrid.reactor.workers import BlockingCall, CpuWorkers
from pipegrid.transport.interface import StorageServer, StoresApart
from pipegrid.wire.storage_messages import ServerIdentity

P = ParamSpec("P")
T = TypeVar("T")


def _traced(
    method: Callable[Concatenate[Any, P], Deferred[T]],
    facts: Callable[..., dict[str, object]] = lambda *_, **__: {},
) -> Callable[Concatenate[Any, P], Deferred[T]]:
    """
    Return the traced version of a server's method.

    Args:
        facts: called with the method's arguments; returns the details of the span.
    """
    name = method.__name__

    @wraps(method)
    def request(self: Any, /, *arguments: P.args, **options: P.kwargs) -> Deferred[T]:
        said = facts(
            *arguments, **options
        )  # taken first, since the call passes the bytes to the transport
        call: Deferred[T] = getattr(self._server, name)(*arguments, **options)
        followed: Deferred[T] = self._tracer.follow(call, name, self.identity.nickname, **said)
        return followed

    return request


def _of_share(_index: bytes, share_number: int, *_: object) -> dict[str, object]:
    return {"share": share_number}


def _of_bytes(
    _index: bytes, share_number: int, offset: int, length: int, *_: object
) -> dict[str, object]:
    return {"share": share_number, "offset": offset, "bytes": length}


class TracedServer(StoresApart):
    """A storage server whose requests are recorded as spans, in a row for this server."""

    def __init__(self, server: StorageServer, tracer: Tracing) -> None:
        self._server = server
        self._tracer = tracer

    @property
    def identity(self) -> ServerIdentity:
        return self._server.identity

    version = _traced(StorageServer.version)
    allocate = _traced(
        StorageServer.allocate,
        lambda _, numbers, size, *__: {"shares": sorted(numbers), "bytes": size},
    )
    write: Any = _traced(  # takes more arguments than in ``StoresApart``
        StorageServer.write,
        lambda index, number, offset, data, *_, **__: _of_bytes(
            index, number, offset, sum(map(len, data))
        ),
    )
    abort = _traced(StorageServer.abort, _of_share)
    list_shares = _traced(StorageServer.list_shares)
    read = _traced(StorageServer.read, _of_bytes)
    stream = _traced(StorageServer.stream, _of_bytes)
    add_lease = _traced(StorageServer.add_lease)
    advise_corrupt_share = _traced(StorageServer.advise_corrupt_share, _of_share)
    read_test_write = _traced(
        StorageServer.read_test_write,
        lambda _, __, changes, *___: {
            "shares": sorted(changes),
            "bytes": sum(len(data) for change in changes.values() for _, data in change.writes),
        },
    )
    list_slot = _traced(StorageServer.list_slot)
    read_slot = _traced(
        StorageServer.read_slot, lambda _, __, expected=(): {"shares": sorted(expected)}
    )
    read_slot_share = _traced(StorageServer.read_slot_share, _of_bytes)
    add_slot_lease = _traced(StorageServer.add_slot_lease)
    advise_corrupt_slot_share = _traced(StorageServer.advise_corrupt_slot_share, _of_share)
    disconnect = _traced(StorageServer.disconnect)


class TracedWorkers:
    """
    Workers whose jobs are recorded as spans in the row ``cpu``; each span begins with the wait for a thread
    and ends with the result.
    """

    def __init__(self, workers: CpuWorkers, tracer: Tracing) -> None:
        self._workers = workers
        self._tracer = tracer

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        return self._tracer.follow(
            self._workers.run(function, *args, **kwargs), _name(function), "cpu"
        )

    def run_if_large(
        self, size_bytes: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Run a job, in a thread if it is large, and record its span."""
        span = self._tracer.begin(_name(function), "cpu", bytes=size_bytes)
        job = self._workers.run_if_large(size_bytes, function, *args, **kwargs)

        def ended(result: T) -> T:
            self._tracer.end(span)
            return result

        return job.addBoth(ended)

    def run_blocking(
        self,
        function: Callable[Concatenate[BlockingCall, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Deferred[T]:
        """Run a blocking call without recording a span, since the call waits instead of using the CPU."""
        return self._workers.run_blocking(function, *args, **kwargs)

    def stop(self) -> Deferred[None]:
        return self._workers.stop()


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
