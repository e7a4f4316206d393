"""A command line run in process, on a grid that does what the test says."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import attrs
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from pipegrid.cli.command_grammar import start
from pipegrid.cli.console import Console
from pipegrid.core.caps import Cap, LitCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import CorruptionError, NotEnoughSharesError, SourceError
from pipegrid.transfer.put.put_many import ManyPuts
from pipegrid.transfer.put.source import size_of
from pipegrid.transfer.results import (
    CheckResult,
    GetResult,
    PutResult,
    RenewResult,
    RepairResult,
    ServerStatus,
)


@attrs.define
class FakeConfig:
    """What commands read of a configuration."""

    params: Params = attrs.field(factory=Params)
    happy: int = 7
    directory: Path = Path("nowhere")


@attrs.define
class FakeGrid:
    """
    A grid whose files live in literal caps of any length.

    Attributes:
        error: what every operation fails with, if anything.
        hold: operations wait until the test fires or cancels the Deferreds in ``held``.
        seen: the operations asked for, with their options.
    """

    error: Exception | None = None
    hold: bool = False
    corrupt: list[CorruptionError] = attrs.field(factory=list)
    created: str | None = None
    warnings: tuple[str, ...] = ()
    introducers: list[Any] = attrs.field(factory=list)
    config: FakeConfig = attrs.field(factory=FakeConfig)
    check_result: CheckResult | None = None
    repair_result: RepairResult | None = None
    renew_result: RenewResult | None = None
    servers: list[ServerStatus] = attrs.field(factory=list)
    held: dict[str, Deferred[None]] = attrs.field(factory=dict)
    seen: list[tuple[Any, dict[str, Any]]] = attrs.field(factory=list)
    cancelled: list[str] = attrs.field(factory=list)
    closed: bool = False
    tracer: Any = None
    wait_for: int = 0
    max_segment_bytes: int | None = None
    limits: Any = None

    def open(
        self,
        reactor: Any,
        directory: Any,
        *,
        tracer: Any = None,
        wait_for: int = 0,
        max_segment_bytes: int | None = None,
        limits: Any = None,
        make: bool = True,
    ) -> Deferred[Any]:
        """Stand in for ``Grid.open``."""
        self.max_segment_bytes = max_segment_bytes
        self.limits = limits
        self.tracer, self.wait_for = tracer, wait_for
        return succeed(self)

    def close(self) -> Deferred[None]:
        """Note it."""
        self.closed = True
        return succeed(None)

    def put_many(
        self,
        sources: Any,
        *,
        progress: Any = None,
        found: Any = None,
        hashing: Any = None,
        ended: Any = None,
        **options: Any,
    ) -> Deferred[list[Any]]:
        """Answer with caps that hold the files, which go as they do on a real grid."""

        def start(number: int, pace: Any) -> Deferred[PutResult]:
            def report(done: int, total: int) -> None:
                pace(done, total)
                if progress is not None:
                    progress(number, done, total)

            self.seen.append((sources[number], {**options, "progress": report}))
            return self._do(str(sources[number]), lambda: self._put(sources[number]))

        sizes = [size_of(source) for source in sources]
        return Deferred.fromCoroutine(ManyPuts(sizes, start, ended).run()).addCallback(lambda _: [])

    def _put(self, source: Any) -> PutResult:
        try:
            data = source.read() if hasattr(source, "read") else Path(source).read_bytes()
        except OSError as error:
            raise SourceError(f"cannot read {source}: {error.strerror}") from error
        return PutResult(LitCap(data), len(data), 0, {0: "alice"}, {1: ["bob"]}, 2, 0.5)

    def get(self, cap: Any, sink: Any, **options: Any) -> Deferred[GetResult]:
        """Write what the cap holds."""
        self.seen.append((cap, options))
        start, length = options["start"], options["length"]

        def write() -> GetResult:
            sink.write(cap.data[start : start + length])
            return GetResult(length, {0: "alice", 2: "bob"}, self.corrupt)

        return self._do(str(cap), write)

    def check(self, cap: Cap, **options: Any) -> Deferred[CheckResult]:
        """Answer with what the test prepared."""
        self.seen.append((cap, options))
        return self._do(str(cap), lambda: cast(CheckResult, self.check_result))

    def repair(self, cap: Cap, **options: Any) -> Deferred[RepairResult]:
        """Answer with what the test prepared."""
        self.seen.append((cap, options))
        return self._do(str(cap), lambda: cast(RepairResult, self.repair_result))

    def renew(self, cap: Cap) -> Deferred[RenewResult]:
        """Answer with what the test prepared."""
        self.seen.append((cap, {}))
        return self._do(str(cap), lambda: cast(RenewResult, self.renew_result))

    def _maintain(
        self, caps: Any, todo: Any, bounds: Any = None, ended: Any = None
    ) -> Deferred[list[Any]]:
        """End the last one first, each with what the test prepared; None stands for a failure."""
        self.seen.append((caps, {"todo": todo, "bounds": bounds}))
        result = self.renew_result if todo.renew else self.repair_result or self.check_result
        for number in reversed(range(len(caps))):
            ended(number, Failure(NotEnoughSharesError("lost", 0, 3)) if result is None else result)
        return succeed([])

    def status(self) -> Deferred[list[ServerStatus]]:
        """Answer with what the test prepared."""
        return self._do("status", lambda: self.servers)

    def _do(self, name: str, act: Callable[[], Any]) -> Deferred[Any]:
        if self.error is not None:
            return fail(self.error)
        ready: Deferred[None] = Deferred(lambda _: self.cancelled.append(name))
        self.held[name] = ready
        if not self.hold:
            ready.callback(None)
        return ready.addCallback(lambda _: act())


class Terminal(io.StringIO):
    """A stderr that somebody watches."""

    def isatty(self) -> bool:
        """Yes."""
        return True


class Run:
    """
    One command line, and what came of it.

    Attributes:
        finished: fires with the exit status.
    """

    def __init__(
        self,
        *arguments: str,
        grid: FakeGrid | None = None,
        stdin: bytes = b"",
        stdout: Any = None,
        stderr: io.StringIO | None = None,
    ) -> None:
        self.grid = FakeGrid() if grid is None else grid
        self.raw = io.BytesIO() if stdout is None else stdout
        self._stderr = io.StringIO() if stderr is None else stderr
        console = Console(io.BytesIO(stdin), self.raw, self._stderr)
        self.finished = start(arguments, console, Clock(), self.grid.open)

    @property
    def stdout(self) -> str:
        """Results so far."""
        return cast(str, self.raw.getvalue().decode("utf-8"))

    @property
    def stderr(self) -> str:
        """Prose so far."""
        return self._stderr.getvalue()

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout."""
        return [json.loads(line) for line in self.stdout.splitlines()]


class BrokenPipe(io.RawIOBase):
    """A stdout whose reader left after some bytes."""

    def __init__(self, room: int = 0) -> None:
        self.room = room

    def writable(self) -> bool:
        """Yes, in principle."""
        return True

    def write(self, data: Any) -> int:
        """Take the bytes while there is room."""
        self.room -= len(data)
        if self.room < 0:
            raise BrokenPipeError
        return len(data)
