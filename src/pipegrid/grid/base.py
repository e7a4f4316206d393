"""
What all operations of a grid share: servers with their windows, workers, memory; beginning and end.

Public methods of grids answer with Deferreds that have started and can be cancelled; ``_start`` keeps them,
and ``close`` ends them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredList, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from pipegrid.arguments import check_kind, check_whole
from pipegrid.core.leases import ClientSecrets
from pipegrid.core.params import MAX_SEGMENT_BYTES, Params, too_many_shares
from pipegrid.errors import NotEnoughSharesError, UsageError
from pipegrid.flow.budget import Budget
from pipegrid.flow.depth import MANY, Appetite
from pipegrid.grid.config import GridConfig
from pipegrid.grid.members import Members, Warnings
from pipegrid.grid.opening import open_grid
from pipegrid.grid.readiness import Readiness
from pipegrid.reactor.ownthread import check_own_thread
from pipegrid.reactor.together import Waiters, as_deferred, begun, tell_deferred, together
from pipegrid.reactor.trace import Tracing
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.get.earlier import Earlier
from pipegrid.transfer.peers import Means, Peer
from pipegrid.transfer.results import ServerStatus
from pipegrid.transfer.settings import DownloadSettings, Limits, UploadSettings, limited

if TYPE_CHECKING:
    from pipegrid.grid.discovery import Discovery
    from pipegrid.grid.introducer import IntroducerStatus
    from pipegrid.grid.mutables import Mutables
    from pipegrid.reactor.ahead import Ahead
    from pipegrid.transfer.put.putter import Putter

# What only one kind of transfer needs is imported when the first of that kind begins.

P = ParamSpec("P")
T = TypeVar("T")
G = TypeVar("G", bound="BaseGrid")

_ONLY_HERE = (
    "only storage directories of this machine are known here: if the cap is from another grid, its servers "
    "are missing, and 'pipegrid init NURL...' joins it"
)

UPLOAD_MEMORY_BYTES = 32 << 20
"""
What all uploads together may hold while they code, beyond the windows: large files go one behind
the other, small ones side by side. With the windows it keeps a client under 64 MiB.
"""


def started(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Deferred[T]]:
    """Have a method begin when it is called, as ``_start`` of its object does it."""
    tell_deferred(method)

    @wraps(method)
    def begin(self: Any, /, *arguments: P.args, **options: P.kwargs) -> Deferred[T]:
        running: Deferred[T] = self._start(method(self, *arguments, **options))
        return running

    return begin


class BaseGrid:
    """
    A storage grid, as configured in one directory.

    Open it with ``Grid.open``; close it when done.

    Attributes:
        config: what the directory says.
        created: what to tell the user if opening has just made an embedded grid, or None.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        config: GridConfig,
        peers: list[Peer],
        workers: CpuWorkers,
        *,
        created: str | None = None,
        upload_settings: UploadSettings | None = None,
        download_settings: DownloadSettings | None = None,
        on_close: Callable[[], Deferred[None]] | None = None,
        members: Members | None = None,
        discovery: Discovery | None = None,
        warnings: Warnings | None = None,
        wait_for: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self.config = config
        self.created = created
        self._warnings = warnings or Warnings(config.warnings)
        self._members = members
        self._discovery = discovery
        self._readiness = Readiness(peers, discovery, reactor, wait_for)
        self._reactor = reactor
        self._peers = peers
        self._workers = workers
        self._means = Means(reactor, workers, peers, ClientSecrets(config.lease_secret))
        limits = self._limits = limits or Limits()
        self._download_settings = limited(download_settings or DownloadSettings(), limits)
        self._on_close = on_close
        self._upload_settings = upload_settings or UploadSettings()
        memory = limits.memory_bytes
        self._upload_memory = Budget(UPLOAD_MEMORY_BYTES if memory is None else memory // 2)
        self._putter: Putter | None = None
        self._mutables: Mutables | None = None
        self._earlier = Earlier()
        self._running: set[Deferred[Any]] = set()
        self._beginning = 0  # how many have not come back from their first steps yet
        self._closed = False
        self._left = False
        self._closing: Waiters[None] = Waiters()

    @classmethod
    @as_deferred
    async def open(
        cls: type[G],
        reactor: IReactorTime,
        directory: str | os.PathLike[str] | None = None,
        *,
        tracer: Tracing | None = None,
        wait_for: int = 0,
        window_bytes: int | None = None,
        max_segment_bytes: int | None = None,
        limits: Limits | None = None,
        ahead: Ahead | None = None,
        make: bool = True,
    ) -> G:
        """
        Open the grid that a directory configures; nothing is waited for.

        Args:
            reactor: the running reactor.
            directory: a client's directory; None for the user's own, where an embedded grid of
                ten storage directories is made if nothing is configured (see ``make``).
            tracer: gets a span for each request and each job of the CPU; closing it is up to you.
            wait_for: how many servers must answer before the first operation begins; by default
                it begins when as many are known as it needs.
            window_bytes: how much may be unacknowledged by each server, always; by default it is
                measured all the time what the way to a server needs.
            max_segment_bytes: files with larger segments are not fetched; by default 16 MiB, or the
                configured segment size if that is more.
            limits: how much of the machine and of its line to take.
            ahead: makes connections to servers already; what is left of them is closed with the grid.
            make: whether a grid may be made; one that is new has nothing of what any cap names.

        Raises (through the Deferred):
            UsageError: the directory is not configured, or says something impossible.
        """
        check_own_thread("a grid")
        check_whole(wait_for, "wait_for", least=0)
        check_kind(limits, (Limits, type(None)), "what a grid may take", "a Limits")
        if max_segment_bytes is not None:
            check_whole(max_segment_bytes, "max_segment_bytes", least=1)
        opened = open_grid(reactor, directory, tracer, window_bytes, limits, ahead, make)
        if max_segment_bytes is None:
            max_segment_bytes = max(MAX_SEGMENT_BYTES, opened.config.params.max_segment_bytes)
        return cls(
            reactor,
            **attrs.asdict(opened, recurse=False),
            wait_for=wait_for,
            limits=limits,
            download_settings=DownloadSettings(max_segment_bytes=max_segment_bytes),
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to tell the user of servers and introducers that were skipped, or are out of reach."""
        return (*self._warnings(), *self._means.shortfall.sentences())

    def _warn_of_shares(self, params: Params) -> None:
        """Warn if a file that was stored has more shares than there are servers."""
        if warning := too_many_shares(params.total_shares, len(self._peers)):
            self._warnings.add(warning)

    @property
    def workers(self) -> CpuWorkers:
        """Threads for what takes long; they end with the grid."""
        return self._workers

    @property
    def clock(self) -> IReactorTime:
        """The reactor, as far as it tells the time."""
        return self._reactor

    @property
    def limits(self) -> Limits:
        """How much of the machine and of its line this grid may take."""
        return self._limits

    def _open_mutables(self) -> Mutables:
        if self._mutables is None:
            from pipegrid.grid.mutables import Mutables

            self._mutables = Mutables(
                self._reactor,
                self.config,
                self._peers,
                self._workers,
                self._readiness,
                self._download_settings.silence_s,
                shortfall=self._means.shortfall,
            )
        return self._mutables

    @property
    def _appetite(self) -> Appetite:
        """How many small files all servers bear, as far as is known."""
        return min((peer.server.appetite for peer in self._peers), default=Appetite.ANY)

    def _expect(self, objects: int) -> None:
        """So many small objects are about to be stored: have the servers prepare if these are many."""
        for peer in self._peers if objects >= MANY else ():
            peer.server.expect(objects)

    @started
    async def status(self) -> list[ServerStatus]:
        """
        Ask every server how it is; those that do not answer say why.

        Of a grid that was opened with ``wait_for``, when so many have answered, or after a minute.
        """
        from pipegrid.grid.status import status_of

        await self._readiness.up_or_late()
        if self._discovery is not None:
            await self._discovery.wait_settled()
        asked = [Deferred.fromCoroutine(status_of(peer, self._reactor)) for peer in self._peers]
        unusable = [] if self._members is None else list(self._members.unusable.values())
        return await together(asked) + unusable

    @property
    def introducers(self) -> list[IntroducerStatus]:
        """How the introducers are, at this moment; none if none are configured."""
        return [] if self._discovery is None else self._discovery.statuses

    def close(self) -> Deferred[None]:
        """
        End all that is running, let go of the servers, and fire when nothing is left.

        Whoever calls it again is told at the same time. Who gives up waiting does not keep it from ending.
        """
        if self._left:
            return succeed(None)
        try:
            check_own_thread("a grid")
        except UsageError as error:
            return fail(error)
        waiting = self._closing.wait()
        if not self._closed:
            self._closed = True
            Deferred.fromCoroutine(self._leave()).addBoth(self._has_left)
        return waiting

    def _has_left(self, result: Failure | None) -> None:
        self._left = True
        if isinstance(result, Failure):
            assert isinstance(result.value, Exception)
            self._closing.fail(result.value)
        else:
            self._closing.fire(None)

    async def _leave(self) -> None:
        for running in list(self._running):
            running.cancel()
        if self._running or self._beginning:
            # What has called us ends in the next turn, while all that it uses is still there.
            await deferLater(self._reactor, 0)
        if self._mutables is not None:
            self._mutables.close()
        if self._discovery is not None:
            self._discovery.stop()
        leaving = [peer.server.disconnect() for peer in self._peers]
        leaving += [] if self._members is None else self._members.leaving
        await DeferredList(leaving, consumeErrors=True)  # one that fails is gone as well
        await self._workers.stop()
        if self._on_close is not None:
            await self._on_close()

    def _check_open(self) -> None:
        check_own_thread("a grid")
        if self._closed:
            raise UsageError("this grid is closed; open it again")

    def _explain(self, error: NotEnoughSharesError) -> None:
        """Say what is missing if a file is probably another grid's: no server has anything of it."""
        if error.found or error.absent or not self._peers:
            return
        hint = (
            _ONLY_HERE
            if self.config.is_on_this_machine
            else "if the cap is from another grid, its servers are missing here"
        )
        if hint not in str(error):  # what one operation told another
            error.args = (f"{error}; {hint}", *error.args[1:])

    def _start(self, work: Coroutine[Any, Any, T]) -> Deferred[T]:
        try:
            self._check_open()
        except UsageError as error:
            work.close()
            return fail(error)
        self._beginning += 1
        running = begun(work, self._reactor)
        self._beginning -= 1
        self._running.add(running)
        if self._closed:  # by what it has called already
            running.cancel()

        def ended(result: Any) -> Any:
            self._running.discard(running)
            if isinstance(result, Failure) and isinstance(result.value, NotEnoughSharesError):
                self._explain(result.value)
            return result

        return running.addBoth(ended)
