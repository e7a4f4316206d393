"""The two that are compared, each as its users have it, with one interface."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, BinaryIO, Protocol, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.threads import deferToThreadPool
from twisted.python.threadpool import ThreadPool

from misc.speedtest.peers.contest import PIPEGRID, TAHOE
from misc.speedtest.peers.nodes import Gateway
from misc.speedtest.processes import cpu_s
from pipegrid import Grid
from pipegrid.reactor.deferreds import all_ended
from pipegrid.speedtest.benchmark_clients import Comparing


class Client(Protocol):
    """Stores files and gets them back."""

    name: str

    def warm(self) -> Deferred[Any]:
        """Bring up what idle servers have closed; fires when that is done."""

    def put(self, data: bytes) -> Deferred[str]:
        """Store a file; fires with its cap."""

    def get(self, cap: str, sink: Comparing) -> Deferred[Any]:
        """Fetch a file; fires when all of it is in the sink."""

    def cpu_s(self) -> float:
        """Return the CPU time that it has used so far, without the servers'."""


class PipegridClient:
    """``Grid``, in this process."""

    name = PIPEGRID

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def warm(self) -> Deferred[Any]:
        """Ask all servers how they are: a get may turn to any of them."""
        return self._grid.status()

    def put(self, data: bytes) -> Deferred[str]:
        """Store a file."""
        return self._grid.put(data).addCallback(lambda stored: str(stored.cap))

    def get(self, cap: str, sink: Comparing) -> Deferred[Any]:
        """Fetch a file."""
        return self._grid.get(cap, cast(BinaryIO, sink))

    def cpu_s(self) -> float:
        """Return what this process has used."""
        return time.process_time()


class GatewayClient:
    """A gateway of Tahoe-LAFS, asked over loopback by threads: one request of HTTP for a file."""

    name = TAHOE

    def __init__(self, gateway: Gateway, reactor: Any, at_once: int) -> None:
        self._gateway = gateway
        self._reactor = reactor
        self._threads = ThreadPool(0, at_once, "gateway")
        self._threads.start()

    def close(self) -> None:
        """End the threads; the gateway has ended, or nothing is under way, for it waits for them."""
        self._threads.stop()

    def warm(self) -> Deferred[Any]:
        """There is nothing to do: it asks all servers how they are, every second."""
        return succeed(None)

    def put(self, data: bytes) -> Deferred[str]:
        """Store a file."""
        return deferToThreadPool(self._reactor, self._threads, self._gateway.put, data)

    def get(self, cap: str, sink: Comparing) -> Deferred[Any]:
        """Fetch a file."""
        return deferToThreadPool(
            self._reactor, self._threads, self._gateway.get, cap, lambda data: sink.write(data)
        )

    def cpu_s(self) -> float:
        """Return what the gateway's process has used."""
        return cpu_s(self._gateway.pid)


async def run_all(calls: Sequence[Callable[[], Awaitable[Any]]], at_once: bool) -> list[Any]:
    """
    Make all calls, together or one after the other; returns their results in order.

    If any fails, the first failure is raised when none of them runs any more.
    """
    if at_once:
        return await all_ended([Deferred.fromCoroutine(_wait(call)) for call in calls])
    return [await call() for call in calls]


async def _wait(call: Callable[[], Awaitable[Any]]) -> Any:
    return await call()
