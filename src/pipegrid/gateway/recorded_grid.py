"""The grid of a gateway, which records its transfers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, MutableCap, as_cap
from pipegrid.errors import PipegridError
from pipegrid.gateway.transfer_records import TransferKind, TransferRecord, TransferRecords, joined
from pipegrid.transfer.get.sink import SinkLike
from pipegrid.transfer.mutable.publish import CreateResult, WriteResult
from pipegrid.transfer.put.source import SourceLike, size_of
from pipegrid.transfer.results import GetResult, Progress, PutResult
from pipegrid.tree.tree_grid import Grid

# Operations on directories use the same methods, so they are recorded as well: a listing is a retrieve, a
# change is a publish. Reading a literal cap is not a transfer.


class RecordedGrid(Grid):
    """
    A grid whose transfers are recorded.

    Attributes:
        records: its transfers.
    """

    records: TransferRecords

    @classmethod
    def of(cls, grid: Grid) -> RecordedGrid:
        """Return an open grid with records; both share one connection, and are closed together."""
        recorded = cls.__new__(cls)
        recorded.__dict__ = grid.__dict__
        recorded.records = TransferRecords(grid.clock, time.time)
        return recorded

    def keep_keys(self, count: int) -> None:
        """Have keys of new directories ready; see ``SigningKeys.keep``."""
        self._open_mutables().files.keys.keep(count, self.clock)

    def put(
        self, source: SourceLike, *, progress: Progress | None = None, **options: Any
    ) -> Deferred[PutResult]:
        """Store one file; see ``Grid.put``."""

        def start(record: TransferRecord) -> Deferred[PutResult]:
            record.size = size_of(source)
            report = joined(progress, record)
            return super(RecordedGrid, self).put(source, progress=report, **options)

        return self.records.follow("upload", start, _note_put)

    def put_many(
        self,
        sources: Any,
        *,
        ended: Callable[[int, PutResult | Failure], None] | None = None,
        **options: Any,
    ) -> Deferred[list[PutResult | Failure]]:
        """Store many files; each is recorded when it has ended. See ``Grid.put_many``."""
        storing = super().put_many(sources, ended=ended, **options)
        return storing.addCallback(self._note_many)

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
            return super(RecordedGrid, self).get(cap, sink, progress=report, **options)

        if _is_literal(cap):
            return super().get(cap, sink, progress=progress, **options)
        return self.records.follow(_read_kind(cap), start, _note_get, cap)

    def read(self, cap: str | Cap, *place: Any, **options: Any) -> Deferred[bytes]:
        """Fetch a file into memory; see ``Grid.read``."""
        reading = partial(super().read, cap, *place, **options)
        if _is_literal(cap):
            return reading()
        return self.records.follow(_read_kind(cap), lambda record: reading(), _note_bytes, cap)

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
    try:
        parsed = as_cap(cap)
    except PipegridError:
        return None  # the transfer fails with it
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
