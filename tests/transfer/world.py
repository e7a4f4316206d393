"""
A small grid in virtual time: memory servers behind lines with a round trip, and hooks for every fault.

The servers are ``tests.transport.memory``, which passes the contract; what is added here is the line between:
half a round trip each way, a bandwidth, and what can go wrong on it. Lines live on a clock of their own
that runs beside the engine's, so that tests can tell whose timers are left over. All times are
binary fractions, so sums of round trips are exact.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IConsumer, IPushProducer
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.core.encoding_parameters import Params
from pipegrid.core.hashes import Buffer
from pipegrid.core.placement import permutation_seed, servers_of_happiness
from pipegrid.errors import ConflictingWrite, NoSuchShare, ServerUnreachable, WriteLost
from pipegrid.flow.pipeline import Pipeline
from pipegrid.grid.client_config import GridConfig
from pipegrid.grid.file_grid import Grid
from pipegrid.testing.clock import HeapClock
from pipegrid.testing.grid import InlineWorkers
from pipegrid.transfer.peers import Peer, ring
from pipegrid.transfer.put.ask_first_policy import AskFirst
from pipegrid.transfer.settings import DownloadSettings, UploadSettings
from pipegrid.transport.interface import StoresApart
from pipegrid.wire.storage_messages import (
    Allocation,
    LeaseSecrets,
    ServerIdentity,
    ServerVersion,
    ShareChange,
    SlotResult,
    SlotSecrets,
    UploadSecrets,
    WriteAnswer,
)
from tests.core.simple_encoder import Encoded, encode
from tests.transport.memory import MemoryServer

T = TypeVar("T")

RTT = 0.125
CONVERGENCE = b"world"
CHUNK_BYTES = 1 << 16


@lru_cache(maxsize=16)
def content(size: int, seed: object = "x") -> bytes:
    """Return size bytes that do not compress."""
    return hashlib.shake_128(str(seed).encode()).digest(size)


def identity(number: int) -> ServerIdentity:
    """Return who the server with this number is."""
    name = f"server-{number}"
    return ServerIdentity(name, name, permutation_seed(name), hashlib.sha1(name.encode()).digest())


@lru_cache(maxsize=16)
def _encoded(data: bytes, k: int, n: int, max_segment_bytes: int) -> Encoded:
    return encode(data, k, n, max_segment_bytes, secret=CONVERGENCE)


class Told(list[tuple[int, int]]):
    """Remembers what it is told of progress."""

    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))


class Line(StoresApart):
    """
    A storage server behind a line.

    Attributes:
        rtt_s, bytes_per_s: of the line; the rate, if any, holds for each direction.
        down: calls fail after a round trip, having done nothing.
        silent: operations (``"*"`` for all) that never arrive and are never answered.
        for_others: it is busy with somebody else all the time, and well.
        answers_lost: operations that are carried out, and then fail as if the connection had gone.
        answers_silent: operations that are carried out and never answered.
        late: operation to the seconds by which its answers come later than others.
        lies: share numbers that it claims to have.
        whole_bytes: how long a share may be to be stored whole with its allocation.
        breaks: operation to an error that is not a server's, as of a bug in a transport.
        forget: how many more writes find their unfinished upload forgotten.
        required: what it says that it still needs, whatever that is; None: the truth.
        discards: writes are taken and thrown away; conflicts: they are said to meet other bytes.
        lets_go: writes whose sender allows it are let go of in the next turn.
        release: those that were, and are not answered.
        stream_limit: bytes after which a stream loses its connection.
        chunk_bytes: of a stream, at a time.
        calls: operations that arrived, in order, with the time.
        sent_bytes, delivered_bytes: of writes that arrived, and of reads and streams.
    """

    whole_bytes = 0

    def __init__(self, clock: Clock, number: int, rtt_s: float, bytes_per_s: float | None) -> None:
        self.clock = clock
        self.rtt_s = rtt_s
        self.bytes_per_s = bytes_per_s
        self.memory = MemoryServer(identity(number))
        self.storage = self.memory.storage
        self.down = False
        self.silent: set[str] = set()
        self.for_others = False
        self.answers_lost: set[str] = set()
        self.answers_silent: set[str] = set()
        self.late: dict[str, float] = {}
        self.lies: set[int] = set()
        self.breaks: dict[str, Exception] = {}
        self.forget = 0
        self.required: tuple[tuple[int, int], ...] | None = None
        self.discards = self.conflicts = False
        self.lets_go = False
        self.release: dict[Deferred[Any], None] = {}
        self.vanished: set[Deferred[Any]] = set()
        self.stream_limit: int | None = None
        self.chunk_bytes = CHUNK_BYTES
        self.calls: list[tuple[float, str]] = []
        self.sent_bytes = 0
        self.delivered_bytes = 0
        self._free_at = [0.0, 0.0]

    def __repr__(self) -> str:
        return f"<Line to {self.identity.nickname}>"

    @property
    def identity(self) -> ServerIdentity:
        return self.memory.identity

    @property
    def name(self) -> str:
        return self.identity.nickname

    @property
    def last_activity_s(self) -> float:
        """When it gave a sign of life, to whomever."""
        return self.clock.seconds() if self.for_others else -math.inf

    def count(self, operation: str) -> int:
        """Return how many calls of an operation have arrived."""
        return sum(name == operation for _, name in self.calls)

    def shares(self, storage_index: bytes) -> dict[int, bytes]:
        """Return the complete shares of an index."""
        return {n: data for (si, n), data in self.storage.shares.items() if si == storage_index}

    # The contract.

    def version(self) -> Deferred[ServerVersion]:
        return self._call("version", self.memory.version)

    def allocate(
        self,
        storage_index: bytes,
        share_numbers: AbstractSet[int],
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Deferred[Allocation]:
        def allocate() -> Deferred[Allocation]:
            return self.memory.allocate(storage_index, share_numbers, share_bytes, secrets)

        return self._call("allocate", allocate)

    def write(
        self,
        storage_index: bytes,
        share_number: int,
        offset: int,
        data: Sequence[Buffer],
        upload_secret: bytes,
        *,
        release: Callable[[], None] | None = None,
        again: bool = False,
    ) -> Deferred[WriteAnswer]:
        length = sum(map(len, data))

        def write() -> Deferred[WriteAnswer]:
            self.sent_bytes += length
            if self.forget and (storage_index, share_number) in self.storage.uploads:
                self.forget -= 1
                del self.storage.uploads[storage_index, share_number]
            if self.conflicts:
                return fail(ConflictingWrite(f"{self.name} has other bytes", self.name))
            if self.discards:
                return succeed(WriteAnswer(False, self.required or ((0, 1),)))
            answer = self.memory.write(storage_index, share_number, offset, data, upload_secret)
            return answer.addCallbacks(taken, refused)

        def taken(result: WriteAnswer) -> WriteAnswer:
            if self.required is None or result.complete:
                return result
            return WriteAnswer(False, self.required)

        def refused(failure: Failure) -> WriteAnswer:
            failure.trap(NoSuchShare)
            if not again or (storage_index, share_number) not in self.storage.shares:
                failure.raiseException()
            return WriteAnswer(True)

        answer: Deferred[WriteAnswer] = self._call("write", write, length)
        if release is not None and self.lets_go:
            self.clock.callLater(0, self._release, answer, release)
        return answer

    def _release(self, answer: Deferred[WriteAnswer], release: Callable[[], None]) -> None:
        if not answer.called:
            self.release[answer] = None
            release()

    def lose(self) -> None:
        """The connection is lost, and what was let go of with it: half of it was carried out."""
        gone, self.release = list(self.release), {}
        for number, answer in enumerate(gone):
            if not answer.called:
                if number % 2:
                    self.vanished.add(answer)
                answer.errback(WriteLost(f"the connection to {self.name} was lost", self.name))

    def abort(
        self, storage_index: bytes, share_number: int, upload_secret: bytes
    ) -> Deferred[None]:
        return self._call(
            "abort", lambda: self.memory.abort(storage_index, share_number, upload_secret)
        )

    def list_shares(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        def list_shares() -> Deferred[frozenset[int]]:
            return self.memory.list_shares(storage_index).addCallback(lambda n: n | self.lies)

        return self._call("list_shares", list_shares)

    def read(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        def read() -> Deferred[bytes]:
            return self.memory.read(storage_index, share_number, offset, length).addCallback(got)

        def got(data: bytes) -> bytes:
            self.delivered_bytes += len(data)
            return data

        return self._call("read", read, 0, len)

    def stream(
        self, storage_index: bytes, share_number: int, offset: int, length: int, consumer: IConsumer
    ) -> Deferred[int]:
        done: Deferred[int] = Deferred(lambda _: pump.cancelled())
        pump = Pump(self, consumer, done)

        def read() -> Deferred[bytes]:
            return self.memory.read(storage_index, share_number, offset, length)

        self._call("stream", read).addCallbacks(pump.begin, pump.failed)
        return done

    def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        return self._call("add_lease", lambda: self.memory.add_lease(storage_index, lease))

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        def advise() -> Deferred[None]:
            return self.memory.advise_corrupt_share(storage_index, share_number, reason)

        return self._call("advise_corrupt_share", advise)

    # Slots.

    def read_test_write(
        self,
        storage_index: bytes,
        secrets: SlotSecrets,
        changes: Mapping[int, ShareChange],
        reads: Sequence[tuple[int, int]] = (),
    ) -> Deferred[SlotResult]:
        def read_test_write() -> Deferred[SlotResult]:
            self.sent_bytes += length
            return self.memory.read_test_write(storage_index, secrets, changes, reads)

        length = sum(len(data) for change in changes.values() for _, data in change.writes)
        return self._call(
            "read_test_write", read_test_write, length, lambda result: self._count(result.data)
        )

    def list_slot(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        return self._call("list_slot", lambda: self.memory.list_slot(storage_index))

    def read_slot(
        self,
        storage_index: bytes,
        reads: Sequence[tuple[int, int]],
        expected: AbstractSet[int] = frozenset(),
    ) -> Deferred[dict[int, tuple[bytes, ...]]]:
        return self._call(
            "read_slot", lambda: self.memory.read_slot(storage_index, reads), 0, self._count
        )

    def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        return self._call(
            "read_slot_share",
            lambda: self.memory.read_slot_share(storage_index, share_number, offset, length),
            0,
            len,
        )

    def add_slot_lease(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        return self._call(
            "add_slot_lease", lambda: self.memory.add_slot_lease(storage_index, lease)
        )

    def advise_corrupt_slot_share(
        self, storage_index: bytes, share_number: int, reason: str
    ) -> Deferred[None]:
        return self._call(
            "advise_corrupt_slot_share",
            lambda: self.memory.advise_corrupt_slot_share(storage_index, share_number, reason),
        )

    def _count(self, data: dict[int, tuple[bytes, ...]]) -> int:
        length = sum(len(piece) for pieces in data.values() for piece in pieces)
        self.delivered_bytes += length
        return length

    def disconnect(self) -> Deferred[None]:
        return self.memory.disconnect()

    # The line.

    def lost(self) -> ServerUnreachable:
        """Return what a caller is told when the connection has gone."""
        return ServerUnreachable(f"the connection to {self.name} was lost", self.name, True)

    def transmit(self, direction: int, length: int) -> float:
        """Return how long it takes until so many bytes have passed what was sent before them."""
        now = self.clock.seconds()
        start = max(now, self._free_at[direction])
        end = start + (length / self.bytes_per_s if self.bytes_per_s else 0.0)
        self._free_at[direction] = end
        return end - now

    def _call(
        self,
        operation: str,
        perform: Callable[[], Deferred[T]],
        up_bytes: int = 0,
        down_bytes: Callable[[T], int] = lambda _result: 0,
    ) -> Deferred[T]:
        answer: Deferred[T] = Deferred()
        if {operation, "*"} & self.silent:
            return answer

        def reply(result: T | Failure) -> None:
            if not answer.called:
                answer.callback(result)

        def arrive() -> None:
            if answer in self.vanished:
                return
            self.calls.append((self.clock.seconds(), operation))
            if self.down:
                error = ServerUnreachable(f"{self.name} is down", self.name)
                self.clock.callLater(self.rtt_s / 2, reply, Failure(error))
                return
            if operation in self.breaks:
                self.clock.callLater(self.rtt_s / 2, reply, Failure(self.breaks[operation]))
                return
            perform().addBoth(performed)

        def performed(result: T | Failure) -> None:
            if {operation, "*"} & self.answers_silent:
                return
            if {operation, "*"} & self.answers_lost:
                result = Failure(self.lost())
            length = 0 if isinstance(result, Failure) else down_bytes(result)
            pause = self.transmit(1, length) + self.rtt_s / 2 + self.late.get(operation, 0.0)
            self.clock.callLater(pause, reply, result)

        self.clock.callLater(self.transmit(0, up_bytes) + self.rtt_s / 2, arrive)
        return answer


@implementer(IPushProducer)
class Pump:
    """One stream: hands chunks to a consumer as fast as the line and the consumer allow."""

    def __init__(self, line: Line, consumer: IConsumer, done: Deferred[int]) -> None:
        self._line = line
        self._consumer = consumer
        self._done = done
        self._data = b""
        self._at = 0
        self._paused = False
        self._pumping = False
        self._ended = False
        self._registered = False

    def begin(self, data: bytes) -> None:
        """The answer has begun to arrive."""
        if self._ended:
            return
        self._data = data
        self._registered = True
        self._consumer.registerProducer(self, True)
        self._pump()

    def failed(self, failure: Failure) -> None:
        """There will be no stream."""
        self._end()
        if not self._done.called:
            self._done.errback(failure)

    def cancelled(self) -> None:
        """The reader has had enough."""
        self._end()

    def pauseProducing(self) -> None:
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False
        self._pump()

    def stopProducing(self) -> None:
        self._done.cancel()

    def _pump(self) -> None:
        if self._pumping or not self._flowing():
            return
        self._pumping = True
        if self._line.bytes_per_s:
            length = min(self._line.chunk_bytes, len(self._data) - self._at)
            self._line.clock.callLater(self._line.transmit(1, length), self._timed_chunk)
            return
        while self._flowing():
            self._chunk()
        self._pumping = False

    def _flowing(self) -> bool:
        return not (self._paused or self._ended)

    def _timed_chunk(self) -> None:
        self._pumping = False
        if not self._ended:
            self._chunk()
            self._pump()

    def _chunk(self) -> None:
        limit = self._line.stream_limit
        chunk = self._data[self._at : self._at + self._line.chunk_bytes]
        if limit is not None and self._at + len(chunk) > limit:
            self.failed(Failure(self._line.lost()))
            return
        self._at += len(chunk)
        self._line.delivered_bytes += len(chunk)
        if chunk:
            self._consumer.write(chunk)
        if self._at == len(self._data) and not self._ended:
            self._end()
            self._done.callback(self._at)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            if self._registered:
                self._consumer.unregisterProducer()


class World:
    """
    A grid of lines, and a client on it.

    Attributes:
        clock: the engine's; ``network`` is that of the lines.
    """

    def __init__(
        self,
        servers: int = 10,
        *,
        rtt_s: float = RTT,
        bytes_per_s: float | None = None,
        window_bytes: int = 4 << 20,
        held_bytes: int | None = None,
        params: Params | None = None,
        happy: int = 7,
        upload: UploadSettings | None = None,
        download: DownloadSettings | None = None,
        caches: tuple[Path, ...] = (),
        ask_first: AskFirst = "auto",
    ) -> None:
        self.clock = HeapClock()
        self._caches = caches
        self.network = HeapClock()
        self.params = params or Params()
        self.lines = [Line(self.network, i, rtt_s, bytes_per_s) for i in range(servers)]
        self.peers = [
            Peer(line, Pipeline(window_bytes, held_limit_bytes=held_bytes)) for line in self.lines
        ]
        self._held_bytes = held_bytes
        self.happy = happy
        self._settings = upload, download
        self.ask_first: AskFirst = ask_first
        self.grid = self.client()

    def client(self, lease_secret: bytes = b"s" * 32, wait_for: int = 0) -> Grid:
        """Return another client of the same grid, with windows of its own."""
        config = GridConfig(
            Path(),
            self.params,
            self.happy,
            CONVERGENCE,
            lease_secret,
            None,
            caches=self._caches,
            ask_first=self.ask_first,
        )
        peers = [
            Peer(
                peer.server,
                Pipeline(peer.pipeline.limit_bytes, held_limit_bytes=self._held_bytes),
            )
            for peer in self.peers
        ]
        self.clients_peers = peers
        upload, download = self._settings
        return Grid(
            self.clock,
            config,
            peers,
            InlineWorkers(),
            upload_settings=upload,
            download_settings=download,
            wait_for=wait_for,
        )

    # Time.

    def step(self) -> bool:
        """Go on to the next event; False if there is none."""
        calls = [*self.clock.getDelayedCalls(), *self.network.getDelayedCalls()]
        if not calls:
            return False
        now = max(self.clock.rightNow, min(call.getTime() for call in calls))
        self.clock.rightNow = self.network.rightNow = now
        self.network.advance(0)
        self.clock.advance(0)
        return True

    def run(self, started: Deferred[T], limit_s: float = 1000.0) -> T:
        """Let time pass until it fires; return its result or raise its failure."""
        results: list[Any] = []
        started.addBoth(results.append)
        while not results:
            assert self.clock.seconds() < limit_s, f"not done after {limit_s} s"
            assert self.step(), "nothing will ever happen, and it is not done"
        if isinstance(results[0], Failure):
            results[0].raiseException()
        return results[0]  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Let everything that is on the lines arrive."""
        while self.network.getDelayedCalls():
            self.step()

    def timed(self, started: Deferred[T]) -> tuple[T, float]:
        """Run it; return its result and the seconds that it took."""
        began = self.clock.seconds()
        result = self.run(started)
        return result, self.clock.seconds() - began

    # Files.

    def encoded(self, data: bytes) -> Encoded:
        """Return what the file must look like, from an encoder that shares no code with ours."""
        p = self.params
        return _encoded(data, p.required_shares, p.total_shares, p.max_segment_bytes)

    def ring(self, file: Encoded) -> list[Line]:
        """Return the lines in the order of a file's ring."""
        return [peer.server for peer in ring(file.cap.storage_index, self.peers)]  # type: ignore[misc]

    def plant(self, file: Encoded, placement: dict[int, Line] | None = None) -> Encoded:
        """Store a file where an uploader would, or as told."""
        order = self.ring(file)
        if placement is None:
            placement = {n: order[n % len(order)] for n in range(len(file.shares))}
        for number, line in placement.items():
            line.storage.shares[file.cap.storage_index, number] = file.shares[number]
        return file

    def stored(self, storage_index: bytes) -> dict[int, set[str]]:
        """Return who really holds which shares."""
        found: dict[int, set[str]] = {}
        for line in self.lines:
            for number in line.shares(storage_index):
                found.setdefault(number, set()).add(line.name)
        return found

    def happiness(self, storage_index: bytes) -> int:
        """Return the servers of happiness of what is really stored."""
        return servers_of_happiness(self.stored(storage_index))

    def fetch(self, cap: Any, start: int = 0, length: int | None = None) -> bytes:
        """Get a file, or a range of it."""
        into = BytesIO()
        self.run(self.grid.get(cap, into, start=start, length=length))
        return into.getvalue()
