"""Mutable files on a small grid in virtual time: the lines of ``world``, and clients of them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import deferLater

from pipegrid.core.caps import MutableCap
from pipegrid.core.hashes import ClientSecrets
from pipegrid.core.mutable import keys
from pipegrid.core.mutable.keys import SigningKey
from pipegrid.core.mutable.versions import Format
from pipegrid.errors import NoSpace, ServerUnreachable
from pipegrid.flow.pipeline import Pipeline
from pipegrid.testing.clock import HeapClock
from pipegrid.testing.grid import InlineWorkers
from pipegrid.transfer.mutable.mutable_files import MutableFiles
from pipegrid.transfer.mutable.version_cache import VersionCache
from pipegrid.transfer.peers import Peer, TransferContext
from pipegrid.transfer.settings import MutableSettings
from pipegrid.wire.storage_messages import ShareChange, SlotResult, SlotSecrets
from tests.transfer.world import RTT, Line
from tests.transport.memory import MemoryServer

AnyLine = TypeVar("AnyLine", bound=Line)


@cache
def key(number: int = 0) -> SigningKey:
    """Return a key pair; each is made once in a run, since that is what takes long."""
    return keys.generate()


class KeysAtOnce:
    """Stands in for ``SigningKeys``: gives keys of ``key``, one behind the other, to all of a world."""

    def __init__(self) -> None:
        self.taken = 0

    def prepare(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def take(self) -> Deferred[SigningKey]:
        """Give the next."""
        self.taken += 1
        return succeed(key(self.taken - 1))


class Moody(Line):
    """
    A line on which only some calls get through.

    Attributes:
        looks, writes: whether such calls do; a look gets no answer, and a write fails.
    """

    looks = writes = True

    def read_test_write(
        self,
        storage_index: bytes,
        secrets: SlotSecrets,
        changes: Mapping[int, ShareChange],
        reads: Sequence[tuple[int, int]] = (),
    ) -> Deferred[SlotResult]:
        """Let it through, or not."""
        if not changes and not self.looks:
            return Deferred()
        if changes and not self.writes:
            return deferLater(self.clock, RTT, self.die)
        return super().read_test_write(storage_index, secrets, changes, reads)

    def die(self) -> SlotResult:
        """What becomes of a write that does not get through."""
        raise ServerUnreachable(f"{self.identity.nickname} was killed")


class Full(Moody):
    """A line to a server whose disk is full."""

    writes = False

    def die(self) -> SlotResult:
        """What becomes of a write."""
        name = self.identity.nickname
        raise NoSpace(f"{name} has no space; use another server", name)


class MutableWorld:
    """
    Servers, and as many clients as are asked for.
    """

    def __init__(
        self,
        servers: int = 10,
        k: int = 3,
        n: int = 10,
        *,
        bytes_per_s: float | None = None,
        **settings: Any,
    ) -> None:
        self.clock = HeapClock()
        self.lines = [Line(self.clock, number, RTT, bytes_per_s) for number in range(servers)]
        self.usual = (k, n)
        self.settings = MutableSettings(**settings)
        self.keys: Any = KeysAtOnce()
        self.clients = 0

    def client(
        self, known: VersionCache | Path | None = None, lines: list[Line] | None = None
    ) -> MutableFiles:
        """Return a client that knows nothing yet, or what was known before."""
        self.clients += 1
        peers = [Peer(line, Pipeline(1 << 20, self.clock)) for line in (lines or self.lines)]
        workers: Any = InlineWorkers()
        secrets = ClientSecrets(bytes([self.clients % 256]) * 32)
        files = MutableFiles(
            TransferContext(self.clock, workers, peers, secrets),
            usual=self.usual,
            settings=self.settings,
            known=known if isinstance(known, VersionCache) else VersionCache(known),
            random=Random(self.clients).random,
        )
        files.keys = self.keys
        return files

    def far_lines(self, random: Random) -> list[Line]:
        """Return lines of a client's own to the servers, each as long as it happens to be."""
        return [
            self.line_of(number, RTT * random.uniform(0.5, 2.0))
            for number, _ in enumerate(self.lines)
        ]

    def line_of(self, number: int, round_trip_s: float) -> Line:
        """Return another line to a server."""
        return self.special_line(Line, number, round_trip_s)

    def special_line(
        self, kind: Callable[..., AnyLine], number: int, round_trip_s: float = RTT
    ) -> AnyLine:
        """Return a line of some kind to a server."""
        line = self.lines[number]
        other = kind(self.clock, number, round_trip_s, None)
        other.memory = MemoryServer(line.identity, line.storage)
        other.storage = line.storage
        return other

    def begin(self, work: Coroutine[Any, Any, Any] | Deferred[Any]) -> list[Any]:
        """Start something; the list gets its outcome."""
        outcome: list[Any] = []
        running = work if isinstance(work, Deferred) else Deferred.fromCoroutine(work)
        running.addBoth(outcome.append)
        return outcome

    def run(self, work: Coroutine[Any, Any, Any] | Deferred[Any], limit_s: float = 600.0) -> Any:
        """Let time pass until it has ended; return its result or raise its error."""
        outcome = self.begin(work)
        self.run_until(lambda: bool(outcome), limit_s)
        result = outcome[0]
        if hasattr(result, "raiseException"):
            result.raiseException()
        return result

    def run_until(self, is_done: Any, limit_s: float = 600.0) -> None:
        """Let time pass until something is so."""
        end_s = self.clock.seconds() + limit_s
        while not is_done():
            calls = self.clock.getDelayedCalls()
            assert calls, "nothing more will happen"
            next_s = min(call.getTime() for call in calls)
            assert next_s <= end_s, f"not done in {limit_s} s"
            self.clock.advance(max(0.0, next_s - self.clock.seconds()))

    def round_trips(self, work: Coroutine[Any, Any, Any] | Deferred[Any]) -> tuple[float, Any]:
        """Return how many round trips something takes, and its result."""
        began_s = self.clock.seconds()
        result = self.run(work)
        return (self.clock.seconds() - began_s) / RTT, result

    def create(self, content: bytes = b"first", format: Format = Format.SDMF) -> MutableCap:
        """Store a file, by a client that is then gone."""
        cap: MutableCap = self.run(self.client().create(content, format)).cap
        return cap

    def read(self, cap: MutableCap, files: MutableFiles | None = None, **options: Any) -> bytes:
        """Return the content, as somebody sees it who knows nothing."""
        pieces: list[Any] = []
        self.run((files or self.client()).read(cap, pieces.extend, **options))
        return b"".join(pieces)

    def versions(self, cap: MutableCap) -> dict[int, set[int]]:
        """Return the share numbers of each sequence number that servers really have."""
        found: dict[int, set[int]] = {}
        for line in self.lines:
            for number, share in line.storage.slots.get(cap.storage_index, {}).items():
                found.setdefault(int.from_bytes(share[1:9], "big"), set()).add(number)
        return found

    def leftovers(self) -> list[Any]:
        """Return timers that nobody needs."""
        return list(self.clock.getDelayedCalls())
