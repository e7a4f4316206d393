"""Running and ended transfers of a gateway, for status pages and metrics; and the grid that records them."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, MutableCap, as_cap
from pipegrid.errors import PipegridError
from pipegrid.transfer.get.sink import SinkLike
from pipegrid.transfer.mutable.publish import CreateResult, WriteResult
from pipegrid.transfer.put.source import SourceLike, size_of
from pipegrid.transfer.results import GetResult, Progress, PutResult
from pipegrid.tree.tree_grid import Grid
from pipegrid.wire.storage_messages import ServerIdentity

# All transfers of a gateway, of every protocol, go through one ``RecordedGrid``, which records them here. Of
# ended transfers, the newest of each kind are kept: as many as Tahoe-LAFS keeps.

TransferKind = Literal["upload", "download", "publish", "retrieve"]
TransferState = Literal["running", "finished", "failed", "cancelled"]

T = TypeVar("T")

KEPT: dict[TransferKind, int] = {"upload": 10, "download": 10, "publish": 20, "retrieve": 40}
"""How many ended transfers of each kind are kept."""

MAX_SAMPLES = 240
"""Maximum number of progress samples per transfer; when it is reached, every second sample is dropped."""

BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the histogram of durations, in seconds."""


# The traffic of a transfer: which bytes passed to or from which server, and when. It contains neither caps
# nor names.

MAX_BURSTS = 600
"""Maximum number of bursts per transfer; beyond it, neighbouring bursts are joined until half are left."""

MAX_SERVERS = 64
"""Number of servers per transfer whose bursts are recorded separately; all others are recorded as one."""

OTHERS = "other servers"
"""The name under which bytes of servers beyond ``MAX_SERVERS`` are recorded."""

JOINED_S = 0.0005
"""Bytes to or from a server within this time are one burst; doubled each time there are too many bursts."""


class TrafficBurst(NamedTuple):
    """Bytes that passed between the client and a server; times are in seconds since the transfer began."""

    began_s: float
    ended_s: float
    size_bytes: int


class ServerTraffic(NamedTuple):
    """
    The bursts of one server, in the order of time; no burst overlaps another.

    Attributes:
        nickname: the server's own name for itself.
    """

    server_id: str
    nickname: str
    bursts: list[TrafficBurst]

    @property
    def size_bytes(self) -> int:
        """The total size of all bursts."""
        return sum(burst.size_bytes for burst in self.bursts)


def joined_bursts(bursts: Iterable[TrafficBurst], within_s: float) -> list[TrafficBurst]:
    """Return bursts of one server; neighbours are joined if the result is not longer than ``within_s``."""
    found: list[TrafficBurst] = []
    for burst in bursts:
        if found and burst.ended_s - found[-1].began_s <= within_s:
            began_s, _, size_bytes = found[-1]
            found[-1] = TrafficBurst(began_s, burst.ended_s, size_bytes + burst.size_bytes)
        else:
            found.append(burst)
    return found


class TransferTraffic:
    """The bursts of one transfer; their number is at most ``MAX_BURSTS``."""

    __slots__ = ("_bursts", "_joined_s", "_servers")

    def __init__(self) -> None:
        self._servers: dict[str, ServerTraffic] = {}
        self._bursts = 0
        self._joined_s = JOINED_S

    @property
    def servers(self) -> list[ServerTraffic]:
        """The servers, in the order in which their first bytes were acknowledged or arrived."""
        return list(self._servers.values())

    def note(self, server: ServerIdentity, began_s: float, ended_s: float, size_bytes: int) -> None:
        """
        Record bytes that passed; calls for the same server come in the order of ``ended_s``.

        A message may be sent before the previous one is acknowledged. Its burst then begins when the previous
        burst ends.
        """
        bursts = self._bursts_of(server)
        if bursts:
            last = bursts[-1]
            began_s = max(began_s, last.ended_s)
            ended_s = max(began_s, ended_s)
            if ended_s - last.began_s <= self._joined_s:
                bursts[-1] = TrafficBurst(last.began_s, ended_s, last.size_bytes + size_bytes)
                return
        bursts.append(TrafficBurst(began_s, max(began_s, ended_s), size_bytes))
        self._bursts += 1
        if self._bursts > MAX_BURSTS:
            self._join()

    def _bursts_of(self, server: ServerIdentity) -> list[TrafficBurst]:
        server_id, nickname = server.server_id, server.nickname
        if server_id not in self._servers and len(self._servers) >= MAX_SERVERS:
            server_id, nickname = "", OTHERS
        found = self._servers.get(server_id)
        if found is None:
            found = self._servers[server_id] = ServerTraffic(server_id, nickname, [])
        return found.bursts

    def _join(self) -> None:
        while self._bursts > MAX_BURSTS // 2:
            self._joined_s *= 2
            for server in self._servers.values():
                server.bursts[:] = joined_bursts(server.bursts, self._joined_s)
            self._bursts = sum(len(server.bursts) for server in self._servers.values())


@attrs.define(eq=False)
class TransferRecord:
    """
    One transfer.

    Attributes:
        number: unique in the process.
        cap: the object's cap; None until it is known.
        size: size of the plaintext in bytes; None until it is known.
        done, total: the last progress report; see ``transfer.results.Progress``.
        started_s, ended_s: seconds since 1970; ``ended_s`` is None until the end.
        problem: why the transfer failed; empty if it did not.
        took_s: duration; None: the transfer is running, or its beginning was not recorded.
        samples: at most ``MAX_SAMPLES`` pairs: seconds since the beginning, and the fraction done by then.
        servers: for each share number, the server that the share was written to or read from, if known.
        traffic: which bytes passed to or from which server, and when; empty for mutable files.
    """

    number: int
    kind: TransferKind
    started_s: float
    cap: Cap | None = attrs.field(default=None, repr=False)
    size: int | None = None
    done: int = 0
    total: int = 0
    state: TransferState = "running"
    ended_s: float | None = None
    problem: str = ""
    took_s: float | None = None
    samples: list[tuple[float, float]] = attrs.field(factory=list, repr=False)
    servers: dict[int, str] = attrs.field(factory=dict, repr=False)
    traffic: TransferTraffic = attrs.field(factory=TransferTraffic, repr=False)
    clock: IReactorTime | None = attrs.field(default=None, repr=False)
    began_s: float = 0.0
    _spacing_s: float = 0.0

    @property
    def fraction(self) -> float:
        """The fraction of the transfer that is done, from 0 to 1."""
        if self.state == "finished":
            return 1.0
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def age_s(self) -> float | None:
        """Duration, until now if the transfer is running; None if its beginning was not recorded."""
        if self.took_s is not None or self.clock is None:
            return self.took_s
        return max(0.0, self.clock.seconds() - self.began_s)

    def note_traffic(
        self, server: ServerIdentity, began_s: float, ended_s: float, size_bytes: int
    ) -> None:
        """
        Record bytes that passed between the client and a server; ``began_s`` and ``ended_s`` are the clock's
        times.
        """
        began_s, ended_s = began_s - self.began_s, ended_s - self.began_s
        self.traffic.note(server, max(0.0, began_s), ended_s, size_bytes)

    def progress(self, done: int, total: int) -> None:
        """Record the current progress with the current time."""
        self.done, self.total = done, total
        if self.clock is not None and total:
            self.sample(max(0.0, self.clock.seconds() - self.began_s), min(1.0, done / total))

    def sample(self, at_s: float, done: float) -> None:
        """Record the fraction that was done ``at_s`` seconds after the beginning."""
        if self.samples and self.samples[-1] == (at_s, done):
            return
        if len(self.samples) > 1 and at_s - self.samples[-2][0] < self._spacing_s:
            self.samples.pop()
        self.samples.append((at_s, done))
        if len(self.samples) >= MAX_SAMPLES:
            self.samples = self.samples[::2]
            self._spacing_s = 2 * at_s / MAX_SAMPLES


class TransferRecords:
    """
    The transfers of one process.

    Args:
        now: returns the time in seconds since 1970.

    Attributes:
        active: running transfers, the oldest first.
        ended: number of ended transfers, by kind and state.
        bytes: plaintext of successful transfers in bytes, by kind.
        durations: number of successful transfers by kind and index in ``BOUNDS_S``; the index after the last
            is for longer ones.
        seconds: total duration of successful transfers, by kind.
    """

    def __init__(self, clock: IReactorTime, now: Callable[[], float]) -> None:
        self.active: dict[TransferRecord, None] = {}
        self.ended: Counter[tuple[TransferKind, TransferState]] = Counter()
        self.bytes: Counter[TransferKind] = Counter()
        self.durations: Counter[tuple[TransferKind, int]] = Counter()
        self.seconds: defaultdict[TransferKind, float] = defaultdict(float)
        self._recent = {kind: deque[TransferRecord](maxlen=most) for kind, most in KEPT.items()}
        self._clock = clock
        self._now = now
        self._last = 0

    @property
    def recent(self) -> list[TransferRecord]:
        """The ended transfers that are kept, the newest first."""
        found = [record for records in self._recent.values() for record in records]
        return sorted(found, key=lambda record: record.ended_s or 0.0, reverse=True)

    def find(self, kind: str, number: int) -> TransferRecord | None:
        """Return a running transfer or an ended one that is kept; None if there is no such transfer."""
        records = (*self.active, *self.recent)
        return next((one for one in records if (one.kind, one.number) == (kind, number)), None)

    def follow(
        self,
        kind: TransferKind,
        start: Callable[[TransferRecord], Deferred[T]],
        ended: Callable[[TransferRecord, T], None] = lambda record, result: None,
        cap: str | Cap | None = None,
    ) -> Deferred[T]:
        """
        Start a transfer and record it.

        Args:
            start: starts the transfer; the result of its Deferred is returned.
            ended: completes the record, given the result of the transfer.
        """
        self._last += 1
        began_s = self._clock.seconds()
        record = TransferRecord(
            self._last, kind, self._now(), _known(cap), clock=self._clock, began_s=began_s
        )
        self.active[record] = None

        def over(result: Any) -> Any:
            del self.active[record]
            record.took_s = max(0.0, self._clock.seconds() - began_s)
            self._end(record, result, ended)
            if record.state == "finished":
                record.sample(record.took_s, 1.0)  # the last progress report may be older
                self._note_duration(kind, record.took_s)
            return result

        return start(record).addBoth(over)

    def note_ended(
        self, kind: TransferKind, outcome: T | Failure, ended: Callable[[TransferRecord, T], None]
    ) -> None:
        """Record a transfer whose beginning was not recorded, after it has ended; see ``follow``."""
        self._last += 1
        self._end(TransferRecord(self._last, kind, self._now()), outcome, ended)

    def _end(
        self, record: TransferRecord, outcome: Any, ended: Callable[[TransferRecord, Any], None]
    ) -> None:
        record.ended_s = self._now()
        if isinstance(outcome, Failure):
            cancelled = outcome.check(CancelledError) is not None
            record.state = "cancelled" if cancelled else "failed"
            record.problem = "" if cancelled else str(outcome.value)[:500]
        else:
            record.state = "finished"
            ended(record, outcome)
            self.bytes[record.kind] += record.size or 0
        self.ended[record.kind, record.state] += 1
        self._recent[record.kind].append(record)

    def _note_duration(self, kind: TransferKind, took_s: float) -> None:
        place = sum(bound_s < took_s for bound_s in BOUNDS_S)
        self.durations[kind, place] += 1
        self.seconds[kind] += took_s


def _known(cap: str | Cap | None) -> Cap | None:
    try:
        return None if cap is None else as_cap(cap)
    except PipegridError:
        return None  # the caller reports the failure


def joined(progress: Progress | None, record: TransferRecord) -> Progress:
    """Return a progress callback that updates a record and calls ``progress``."""
    if progress is None:
        return record.progress

    def report(done: int, total: int) -> None:
        record.progress(done, total)
        progress(done, total)

    return report


# Operations on directories use the same methods, so they are recorded, too: the listing of a mutable
# directory as a retrieve, its change as a publish. Reading a literal cap is not a transfer.


class RecordedGrid(Grid):
    """
    A grid whose transfers are recorded.

    Attributes:
        records: the transfers of the grid.
    """

    records: TransferRecords

    @classmethod
    def of(cls, grid: Grid) -> RecordedGrid:
        """
        Return an open grid as a recorded one; both are the same connection, and closing one closes the other.
        """
        recorded = cls.__new__(cls)
        recorded.__dict__ = grid.__dict__
        recorded.records = TransferRecords(grid.clock, time.time)
        return recorded

    def keep_keys(self, count: int) -> None:
        """Generate keys for new directories in advance; see ``SigningKeys.keep``."""
        self._open_mutables().files.keys.keep(count, self.clock)

    def put(
        self, source: SourceLike, *, progress: Progress | None = None, **options: Any
    ) -> Deferred[PutResult]:
        """Store one file; see ``Grid.put``."""

        def start(record: TransferRecord) -> Deferred[PutResult]:
            record.size = size_of(source)
            report = joined(progress, record)
            options.setdefault("traffic", record.note_traffic)
            return super(RecordedGrid, self).put(source, progress=report, **options)

        return self.records.follow("upload", start, _note_put)

    def put_many(self, sources: Any, **options: Any) -> Deferred[list[PutResult | Failure]]:
        """Store many files, which are recorded when all have ended; see ``Grid.put_many``."""
        return super().put_many(sources, **options).addCallback(self._note_many)

    def _note_many(self, outcomes: list[PutResult | Failure]) -> list[PutResult | Failure]:
        for outcome in outcomes:
            self.records.note_ended("upload", outcome, _note_put)
        return outcomes

    def get(
        self,
        cap: str | Cap,
        sink: SinkLike | str | os.PathLike[str],
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> Deferred[GetResult]:
        """Fetch a file; see ``Grid.get``."""

        def start(record: TransferRecord) -> Deferred[GetResult]:
            report = joined(progress, record)
            file = _file_of(cap)
            record.size = file.size if isinstance(file, ChkCap) else None
            options.setdefault("traffic", record.note_traffic)
            return super(RecordedGrid, self).get(cap, sink, progress=report, **options)

        if _is_literal(cap):
            return super().get(cap, sink, progress=progress, **options)
        return self.records.follow(_read_kind(cap), start, _note_get, cap)

    def read(self, cap: str | Cap, *place: Any, **options: Any) -> Deferred[bytes]:
        """Fetch a file into memory; see ``Grid.read``."""

        def start(record: TransferRecord) -> Deferred[bytes]:
            options.setdefault("traffic", record.note_traffic)
            return super(RecordedGrid, self).read(cap, *place, **options)

        if _is_literal(cap):
            return super().read(cap, *place, **options)
        return self.records.follow(_read_kind(cap), start, _note_bytes, cap)

    def create_mutable(self, *content: Any, **options: Any) -> Deferred[CreateResult]:
        """Store a mutable file; see ``Grid.create_mutable``."""
        creating = partial(super().create_mutable, *content, **options)
        return self.records.follow("publish", lambda record: creating(), _note_create)

    def overwrite(self, cap: str | Cap, source: SourceLike) -> Deferred[WriteResult]:
        """Replace the content of a mutable file; see ``Grid.overwrite``."""
        return self._record_write(cap, partial(super().overwrite, cap, source))

    def update(self, cap: str | Cap, offset: int, data: bytes) -> Deferred[WriteResult]:
        """Write into a mutable file; see ``Grid.update``."""
        return self._record_write(cap, partial(super().update, cap, offset, data))

    def modify(self, cap: str | Cap, *edit: Any, **options: Any) -> Deferred[WriteResult]:
        """Change the content of a mutable file; see ``Grid.modify``."""
        return self._record_write(cap, partial(super().modify, cap, *edit, **options))

    def _record_write(
        self, cap: str | Cap, write: Callable[[], Deferred[WriteResult]]
    ) -> Deferred[WriteResult]:
        return self.records.follow("publish", lambda record: write(), _note_write, cap)


def _file_of(cap: str | Cap) -> Cap | None:
    parsed = _known(cap)
    return parsed.file if isinstance(parsed, DirectoryCap) else parsed


def _is_literal(cap: str | Cap) -> bool:
    return isinstance(_file_of(cap), LitCap)


def _read_kind(cap: str | Cap) -> TransferKind:
    return "retrieve" if isinstance(_file_of(cap), MutableCap) else "download"


def _note_put(record: TransferRecord, result: PutResult) -> None:
    record.size = result.size
    record.cap = result.cap if isinstance(result.cap, ChkCap) else None
    record.servers = dict(result.shares_placed)


def _note_get(record: TransferRecord, result: GetResult) -> None:
    record.size = result.size
    record.servers = dict(result.shares_used)


def _note_bytes(record: TransferRecord, result: bytes) -> None:
    record.size = len(result)


def _note_create(record: TransferRecord, result: CreateResult) -> None:
    record.cap, record.size = result.cap, result.written.version.size


def _note_write(record: TransferRecord, result: WriteResult) -> None:
    record.size = result.version.size
