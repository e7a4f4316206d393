"""The driver that moves bytes for the file scheduler on a Twisted reactor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime, IStreamClientEndpoint
from twisted.python.failure import Failure

from pipegrid.disk.durability import Policy
from pipegrid.errors import PipegridError
from pipegrid.http11 import Exchange, Loss, PipelinedConnection, RequestNotSent, Unanswered
from pipegrid.http11.dialer import quiet
from pipegrid.http11.host_pool import HostStats
from pipegrid.http11.response_parser import ResponseHead
from pipegrid.mirror.archive_file import ArchiveFile, kept_first, misfit, most_bytes
from pipegrid.mirror.connection_scheduler import FetchSchedule, HostSchedule, ScheduledConnection
from pipegrid.mirror.epoll_response_head import BUSY, REDIRECTS, judge
from pipegrid.mirror.fetch_run import LOOKED_AT_ONCE, MirrorRun
from pipegrid.mirror.file_scheduler import MAX_SHOWN, FetchJob, Report
from pipegrid.mirror.local_check import MirrorEntry, checked
from pipegrid.mirror.mirror_urls import Address, RedirectRefused
from pipegrid.mirror.twisted_file_store import LIMITS, ArchiveSink, FileReceiver, retry_after_s
from pipegrid.reactor.workers import CpuWorkers

if TYPE_CHECKING:
    from pipegrid.mirror.file_scheduler import Failure as FailureKind


# One host: its connections and the requests on them.
#
# A ``MirrorSource`` owns its connections (``http11.Owner``) and sends requests of the schedule on each, as
# far as its window allows. A response is stored only if its status is 200 and its length is right. Any other
# response is a redirect, a refusal, or a reason to ask again later, and none of its bytes is kept.

CONNECTIONS = 4


class SourceConnection(ScheduledConnection):
    """A connection of ``http11``, in the form that the schedule's decisions need."""

    def __init__(
        self, host: HostSchedule, carrier: PipelinedConnection, stats: HostStats, now_s: float
    ) -> None:
        super().__init__(host, now_s)
        self.carrier = carrier
        self._stats = stats

    @property
    def exchanges(self) -> list[FileExchange]:
        """The requests on the connection that are still wanted."""
        lane = self.carrier.lane
        return [
            each
            for each in (*lane.written, *lane.queued)
            if isinstance(each, FileExchange) and not each.abandoned
        ]

    @property
    def unanswered(self) -> list[FetchJob]:
        return [exchange.job for exchange in self.exchanges]

    @property
    def is_outstanding(self) -> bool:
        return len(self.carrier.lane) > 0

    @property
    def outstanding_bytes(self) -> int:
        return self.carrier.lane.outstanding_bytes

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        return self.carrier.ready

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        return self.carrier.open

    @property
    def is_spent(self) -> bool:
        return self._stats.quota_is_reported and self.carrier.lane.is_spent


class MirrorSource:
    """
    The connections to one host.

    Args:
        driver: notified when a file arrives or fails.
        sink: stores the files.
        host: decides what is requested from the host.
        connect: makes the endpoint for one more connection.
    """

    def __init__(
        self,
        driver: TwistedDriver,
        sink: ArchiveSink,
        clock: IReactorTime,
        host: HostSchedule,
        connect: Callable[[], IStreamClientEndpoint],
    ) -> None:
        self.host = host
        self.sink = sink
        self._schedule = host.mirror.schedule
        self._clock = clock
        self._connect = connect
        self._driver = driver
        self._name = host.address.netloc.decode("ascii")
        self._stats = HostStats(LIMITS)
        self._connections: dict[PipelinedConnection, SourceConnection] = {}
        self._connecting: set[Deferred[Any]] = set()
        self._resting: IDelayedCall | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<MirrorSource {self._name}: {list(self._connections)}>"

    @property
    def is_paused(self) -> bool:
        """Whether reading is paused at present."""
        return self._schedule.is_paused

    def work(self) -> None:
        """Request waiting files, as far as the windows allow; make further connections if they are useful."""
        for connection in list(self._connections.values()):
            self._feed(connection)
        self._connect_more()

    def _connect_more(self) -> None:
        """
        Make the connections that are missing.

        The server may be known to close connections after a number of requests. A connection that has had
        this number counts as closed, so another one is made while its last responses are still arriving.
        """
        host = self.host
        while not self._closed and host.may_open:
            has_one = self._connections or self._connecting
            if has_one and not host.is_serial and self._stats.is_serial(self._clock.seconds()):
                break
            self.open_connection()

    def pause(self, paused: bool) -> None:
        for carrier in list(self._connections):
            for exchange in list(carrier.lane.written)[:1]:
                if exchange.response is not None and not exchange.abandoned:
                    exchange.paused = paused
                    carrier.pause_changed(exchange)
        if not paused:
            self.work()

    def stalled(self, connection: SourceConnection, reason: str, excused: bool) -> None:
        """Abort a stalled connection, and let the host rest unless the connection is ``excused``."""
        connection.excused = excused
        if not excused:
            self._rest(reason)
        connection.carrier.abort(reason)

    def forget(self, job: FetchJob) -> None:
        """Withdraw a request whose file has arrived from another mirror."""
        for connection in self._connections.values():
            for exchange in connection.exchanges:
                if exchange.job is job:
                    self._take_back(exchange)
                    self.host.put_back(job)
                    return

    def close(self) -> None:
        """Abort all connections; requests in flight are dropped."""
        self._closed = True
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        for attempt in list(self._connecting):
            attempt.cancel()
        for carrier in list(self._connections):
            carrier.abort("the mirror is finished")

    # Requests.

    def _feed(self, connection: SourceConnection) -> None:
        host, carrier = self.host, connection.carrier
        lane = carrier.lane
        if not (carrier.ready and carrier.open and host.can_work) or self.is_paused or self._closed:
            return
        if host.is_useless(connection):
            carrier.close()
        if not host.may_ask(connection):
            return
        lane.serial = host.is_serial or self._stats.is_serial(self._clock.seconds())
        lane.quota = self._stats.quota
        while lane.takes_more:
            job = host.next()
            if job is None:
                break
            self.ask(connection, job)

    def ask(self, connection: SourceConnection, job: FetchJob) -> None:
        """Request a file on one of the host's connections."""
        head = self.host.ask(connection, job, self._clock.seconds())
        connection.carrier.submit(FileExchange(self, job, head))

    # Called by ``FileExchange`` objects.

    def received(self, job: FetchJob, receiver: FileReceiver) -> None:
        size = receiver.size_bytes
        self.host.works()

        def ended(wrong: str | None) -> None:
            if wrong is not None:
                self.failed(job, "wrong", wrong)
            elif self.host.mirror.stored(job, size):
                self._driver.arrived(job)

        receiver.finish(ended)

    def redirected(self, exchange: FileExchange, locations: Sequence[bytes]) -> None:
        """Handle a redirect: the file is queued for the host that the ``Location`` fields name."""
        try:
            self.host.mirror.redirected(exchange.job, locations)
        except RedirectRefused as error:
            self.refuse(exchange, str(error), "refused")
            return
        self._take_back(exchange)
        self._driver.changed()

    def defer(self, exchange: FileExchange, reason: str, busy_s: float | None = None) -> None:
        """
        Put back a file that the host does not give now, and let the host rest. ``busy_s``: the host is
        overloaded, and must rest at least that long.
        """
        self._take_back(exchange)
        # The rest begins first: ``failed`` puts the file back, and the host must not get it again at once.
        self._rest(reason, busy_s or 0.0)
        kind: FailureKind = "broken" if busy_s is None else "busy"
        self.host.mirror.failed(exchange.job, kind, reason)
        self._driver.changed()

    def refuse(self, exchange: FileExchange, reason: str, kind: FailureKind) -> None:
        """
        Record that the host lacks the file or has it wrong, and drop the rest of the response. If that is
        uncertain, end the connection.
        """
        carrier = exchange.connection
        believed = self.host.mirror.failed(exchange.job, kind, reason)
        self._take_back(exchange)
        for connection in [] if believed else list(self._connections.values()):
            if connection.carrier is carrier:
                connection.excused = True
                connection.carrier.abort(reason)
        self._driver.changed()

    def _take_back(self, exchange: FileExchange) -> None:
        exchange.release()
        exchange.withdraw()

    def failed(self, job: FetchJob, kind: FailureKind, reason: str) -> None:
        """
        Record that a complete file is wrong, or that the connection ended before the response was complete.
        """
        self.host.mirror.failed(job, kind, reason)
        self._driver.changed()

    # Connections.

    def open_connection(self) -> None:
        """Make one more connection; waiting files are requested on it as soon as it is ready."""
        made: list[PipelinedConnection] = []

        def build() -> PipelinedConnection:
            made.append(PipelinedConnection(self._clock, LIMITS, self._name, self))
            return made[-1]

        self.host.connecting += 1
        attempt = self._connect().connect(quiet(build))
        self._connecting.add(attempt)
        attempt.addTimeout(LIMITS.connect_timeout_s, self._clock)
        attempt.addBoth(self._connected, attempt, made)

    def _connected(
        self, result: object, attempt: Deferred[Any], made: list[PipelinedConnection]
    ) -> None:
        self._connecting.discard(attempt)
        self.host.connecting -= 1
        if self._closed:
            if made:
                made[-1].abort("the mirror is finished")
        elif isinstance(result, Failure):
            if not self._connections:
                self._rest(str(result.value).rstrip(".") or type(result.value).__name__)
        elif made[-1].open:
            carrier = made[-1]
            connection = SourceConnection(self.host, carrier, self._stats, self._clock.seconds())
            self._connections[carrier] = connection
            self.host.opened(connection)
            self._feed(connection)

    def _rest(self, reason: str, least_s: float = 0.0) -> None:
        """Let the host rest, longer each time; after too many rests, give it up."""
        if not self.host.can_work or self._closed:
            return
        pause_s = self.host.rest(least_s)
        if pause_s is None:
            self.give_up(reason)
            return
        self._resting = self._clock.callLater(pause_s, self._rested)
        self._driver.changed()

    def _rested(self) -> None:
        self._resting = None
        self.host.rested()
        self.work()

    def give_up(self, reason: str) -> None:
        """Request nothing more from the host."""
        self.host.given_up = reason
        for carrier in list(self._connections):
            carrier.abort(reason)
        self.host.give_up(reason)
        self._driver.changed()

    # ``http11.Owner``.

    def has_space(self, carrier: PipelinedConnection) -> None:
        connection = self._connections.get(carrier)
        if connection is None:  # the connection is still being made
            return
        connection.last_s = self._clock.seconds()
        self._feed(connection)
        if carrier.lane.is_spent:
            self._connect_more()

    def answered(self, carrier: PipelinedConnection, exchange: Exchange) -> None:
        lane = carrier.lane
        self._stats.answered(exchange, self._clock.seconds(), bool(lane.written))
        if self._stats.takes_larger_budget:
            lane.measure()
        if lane.is_spent and exchange.response is not None and exchange.response.keep_alive:
            self._stats.outlasted(carrier.answered)

    def blocked(self, carrier: PipelinedConnection) -> None:
        """Do nothing: only the disk or the rate limit delays reading."""

    def gave_back(self, unsent: list[Unanswered]) -> None:
        for each in unsent:
            self.host.put_back(self._job_of(each))
        if unsent:
            self._driver.changed()

    def lost(self, carrier: PipelinedConnection, loss: Loss, unanswered: list[Unanswered]) -> None:
        now_s = self._clock.seconds()
        failed = self._stats.lost(loss, carrier.answered_after, now_s)
        connection = self._connections.pop(carrier, None)
        if connection is None:
            connection = SourceConnection(self.host, carrier, self._stats, now_s)
        mirror = self.host.mirror
        if failed or (loss.garbage and connection.pipelined):
            mirror.plan.becomes_serial(mirror.number)
            connection.excused = True
        excused = connection.excused or loss.announced
        jobs = [self._job_of(each) for each in unanswered]
        unsent = bool(unanswered) and isinstance(unanswered[0].error, RequestNotSent)
        reason = str(unanswered[0].error) if unanswered else loss.reason
        self.host.lost(connection, jobs, reason, excused or unsent)
        mirror.note(now_s)
        if unanswered:
            self._driver.changed()
        if self._closed:
            return
        if loss.answered or excused:
            self.work()
        else:
            self._rest(loss.reason)

    def _job_of(self, unanswered: Unanswered) -> FetchJob:
        exchange = unanswered.exchange
        assert isinstance(exchange, FileExchange)
        exchange.release()
        return exchange.job


# One file, requested from one mirror; the response is checked before a byte of it is kept.


class FileExchange(Exchange):
    """The request for one file to one mirror, and its response."""

    __slots__ = ("_receiver", "_source", "job")

    def __init__(self, source: MirrorSource, job: FetchJob, head: bytes) -> None:
        size = job.size_bytes
        Exchange.__init__(self, b"GET", head, idempotent=True, expected_response_bytes=size + 300)
        self._source = source
        self.job = job
        self._receiver: FileReceiver | None = None

    def head_received(self, head: ResponseHead) -> None:
        wanted = self.job.wanted
        if head.status in REDIRECTS:
            places = [value for name, value in head.headers if name == b"location"]
            self._source.redirected(self, places)
        elif head.status != 200:
            transient, why = judge(head.status)
            if not transient:
                self._source.refuse(self, why, "refused")
            else:
                busy = head.status in BUSY
                self._source.defer(self, why, retry_after_s(head.headers) if busy else None)
        elif head.length is not None and (reason := misfit(wanted, head.length)):
            self._source.refuse(self, reason, "wrong")
        else:
            self._receiver = FileReceiver(self._source.sink, wanted)
            self.paused = self._source.is_paused

    def body_received(self, data: bytes) -> None:
        receiver = self._receiver
        assert receiver is not None
        receiver.write(data)
        self._source.host.received_bytes += len(data)
        most = most_bytes(self.job.wanted)
        if receiver.size_bytes > most:
            self._source.refuse(self, f"it has more than the {most} bytes of the index", "wrong")

    def completed(self) -> None:
        receiver = self._receiver
        assert receiver is not None
        size = self.job.wanted.size
        if size is not None and receiver.size_bytes != size:
            receiver.discard()
            reason = f"it has {receiver.size_bytes} bytes of {size}"
            self._source.failed(self.job, "wrong", reason)
        else:
            self._source.received(self.job, receiver)

    def failed(self, error: PipegridError) -> None:
        self.release()
        self._source.failed(self.job, "broken", str(error))

    def release(self) -> None:
        if self._receiver is not None:
            self._receiver.discard()


# One run on a reactor: ``MirrorSource`` objects report events to the scheduler, and send its next requests.
#
# The epoll driver runs first, where possible; this driver fetches the rest, with all the retries and pauses
# that mirrors need.

WATCH_S = 0.25
AHEAD_S = 0.05
"""How many seconds received bytes may be ahead of the rate limit before reading pauses."""


@attrs.frozen
class SyncOptions:
    """
    The options of a run.

    Attributes:
        connect: called with an address; returns a function that makes endpoints for connections to it.
        limit: bytes per second from all mirrors together; None: no limit.
        sprints: whether the epoll driver may run first.
    """

    policy: Policy
    connections: int
    connect: Callable[[Address], Callable[[], Any]]
    limit: float | None
    progress: Callable[[Report], None] | None
    dry_run: bool
    sprints: bool


class TwistedDriver:
    """Fetches the files of one run on a reactor."""

    def __init__(
        self,
        reactor: Any,
        addresses: Sequence[Any],
        work: MirrorRun,
        workers: CpuWorkers,
        options: SyncOptions,
    ) -> None:
        self._clock = reactor
        self._work_done = work
        self._workers = workers
        self._options = options
        self._plan = work.plan
        self._sink = ArchiveSink(
            work.destination,
            workers,
            options.policy,
            self._full,
            self._broken,
            None if options.limit is None else self._throttle,
            work.staged,
        )
        self._schedule = FetchSchedule(
            self._plan, addresses, work.report.tallies, options.connections
        )
        self._sources: dict[HostSchedule, MirrorSource] = {}
        for host in self._schedule.hosts:
            self._add_host(host)
        self._schedule.added = self._add_host
        self._schedule.queued = self._work_soon
        self._soon: IDelayedCall | None = None
        self._all_read = False
        self._closed = False
        self._sink_is_full = False
        self._allowed_until_s = reactor.seconds()
        self._throttled: IDelayedCall | None = None
        self._watcher: IDelayedCall | None = None
        self._ended: Deferred[None] = Deferred()

    def _add_host(self, host: HostSchedule) -> None:
        connect = self._options.connect(host.address)
        self._sources[host] = MirrorSource(self, self._sink, self._clock, host, connect)

    async def run(self, files: Iterable[MirrorEntry]) -> Report:
        """Bring some files up to date; see ``Mirror.sync``."""
        work, options = self._work_done, self._options
        if options.sprints and not work.all_read:
            await self._workers.run(self._run_on_epoll, files)
            if self._ended.called:
                await self._ended
        if work.all_read:
            files = ()
        self._watcher = self._clock.callLater(WATCH_S, self._watch)
        destination = work.destination
        entries = kept_first(checked(files), destination.folds, destination.is_there)
        while chunk := list(islice(entries, LOOKED_AT_ONCE)):
            missing = await self._workers.run(self._look, chunk)
            if options.dry_run:
                work.would_files += len(missing)
                work.would_bytes += sum(each.size or 0 for each in missing)
                space = MAX_SHOWN - len(work.would_paths)
                work.would_paths += [each.path for each in missing[:space]]
                continue
            for each in missing:
                self._plan.add(each)
            self._work()
            if self._ended.called:
                break
        self._all_read = True
        self._work()
        self._look_finished()
        await self._ended
        now_s = self._clock.seconds()
        for mirror in self._schedule.mirrors:
            mirror.note(now_s)
        await self._sink.flush()
        await self._workers.run(work.finish)
        return work.sum_up()

    def _run_on_epoll(self, files: Iterable[MirrorEntry]) -> bool:
        """Fetch what the epoll driver can fetch. Runs in the destination's thread."""
        options = self._options
        progress = None
        if options.progress is not None:
            progress = partial(self._clock.callFromThread, self._report_progress)
        return self._work_done.run_on_epoll(
            files,
            options.policy,
            options.connections,
            lambda: self._closed or self._ended.called,
            progress,
        )

    def _report_progress(self, report: Report) -> None:
        if self._closed or self._ended.called or self._options.progress is None:
            return
        try:
            self._options.progress(report)
        except Exception as error:  # otherwise the error would be lost
            self._broken(error)

    def _look(self, chunk: list[ArchiveFile]) -> list[ArchiveFile]:
        """Return the missing files. Runs in the destination's thread."""
        return self._work_done.look.missing(chunk)

    def close(self) -> None:
        """Stop the timers, and close all sources with their connections."""
        self._closed = True
        self._ended.addErrback(lambda _: None)  # the caller of ``run`` has got the error already
        for call in (self._watcher, self._throttled, self._soon):
            if call is not None:
                call.cancel()
        self._watcher = self._throttled = self._soon = None
        for source in self._sources.values():
            source.close()

    # Events.

    def arrived(self, job: FetchJob) -> None:
        """Withdraw other requests for a file. Sources call this when the file has arrived and is stored."""
        for host, source in list(self._sources.items()):
            if job.in_flight >> host.mirror.number & 1:
                source.forget(job)
        self._look_finished()

    def changed(self) -> None:
        """
        Send requests, or finish if no file is left. Sources call this when a file was put back, failed or
        refused.
        """
        self._work()
        self._look_finished()

    def _full(self, full: bool) -> None:
        self._sink_is_full = full
        self._pause()

    def _pause(self) -> None:
        paused = self._sink_is_full or self._throttled is not None
        if self._schedule.is_paused != paused:
            self._schedule.is_paused = paused
            self._schedule.was_away(self._clock.seconds())
            for source in list(self._sources.values()):
                source.pause(paused)

    def _broken(self, error: Exception) -> None:
        if not self._ended.called:
            self._ended.errback(error)

    def _work(self) -> None:
        if not self._closed:
            for source in list(self._sources.values()):
                source.work()

    def _work_soon(self) -> None:
        """Send requests in a later turn of the reactor, since a file waits for a host that may be idle."""
        if self._soon is None and not self._closed:
            self._soon = self._clock.callLater(0, self._work_now)

    def _work_now(self) -> None:
        self._soon = None
        self._work()

    def _look_finished(self) -> None:
        if self._all_read and self._plan.is_idle and not self._ended.called:
            self._ended.callback(None)

    # Timers.

    def _watch(self) -> None:
        self._watcher = self._clock.callLater(WATCH_S, self._watch)
        for connection, reason, excused in self._schedule.tick(self._clock.seconds()):
            self._sources[connection.host].stalled(connection, reason, excused)
        for connection, job in self._schedule.steals(self._connect) if self._all_read else ():
            self._sources[connection.host].ask(connection, job)
        if self._options.progress is not None:
            self._report_progress(self._work_done.sum_up())

    def _connect(self, host: HostSchedule) -> None:
        self._sources[host].open_connection()

    def _throttle(self, received_bytes: int) -> None:
        """Pause reading until the rate limit allows the received bytes."""
        limit = self._options.limit
        assert limit is not None
        now_s = self._clock.seconds()
        due_s = self._allowed_until_s = max(self._allowed_until_s, now_s) + received_bytes / limit
        if self._throttled is None and due_s - now_s > AHEAD_S:
            self._throttled = self._clock.callLater(due_s - now_s, self._unthrottle)
            self._pause()

    def _unthrottle(self) -> None:
        self._throttled = None
        self._pause()
