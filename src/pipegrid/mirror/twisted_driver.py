"""The driver that moves bytes for the scheduler on a Twisted reactor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime, IStreamClientEndpoint
from twisted.python.failure import Failure

from pipegrid.disk.commit import Policy
from pipegrid.errors import PipegridError
from pipegrid.http11 import Exchange, Limits, Loss, PipelinedConnection, RequestNotSent, Unanswered
from pipegrid.http11.dialer import quiet
from pipegrid.http11.host_pool import HostStats
from pipegrid.mirror.archive_file import ArchiveFile, kept_first
from pipegrid.mirror.file_sink import LIMITS, ArchiveSink, FileExchange, FileReceiver
from pipegrid.mirror.host_queues import HostQueue, MirrorHosts
from pipegrid.mirror.local_check import MirrorEntry, checked
from pipegrid.mirror.mirror_http import Address, RedirectRefused, head_tail
from pipegrid.mirror.mirror_run import MirrorRun
from pipegrid.mirror.scheduler import (
    MAX_SHOWN,
    FetchJob,
    MirrorStanding,
    ReceiveRate,
    Report,
    Scheduler,
    Tally,
    choose_steal,
    has_stalled,
)
from pipegrid.reactor.workers import CpuWorkers

if TYPE_CHECKING:
    from pipegrid.mirror.scheduler import Failure as FailureKind


# One mirror: its connections, what is asked on them, and how it does.
#
# A ``MirrorSource`` owns its connections (``http11.Owner``) and fills each as far as its window allows, from
# the plan, largest files first. What becomes of a request is told to the plan; a mirror that fails again and
# again rests, longer each time, and is given up in the end.
#
# Anything but 200 with the right length is a refusal, of which no byte is kept.

CONNECTIONS = 4
REST_S = 0.5
MAX_RESTS = 6
"""Half a second, one, two…: a mirror that has not given a byte for half a minute of tries is given up."""


class SourceEvents(Protocol):
    """What a source tells whoever runs it."""

    def arrived(self, source: MirrorSource, errand: FetchJob, size_bytes: int) -> None:
        """A file is there, under its name."""

    def changed(self) -> None:
        """Something was put back, failed or refused: others may have something to do, or all is over."""


class SourceContext(NamedTuple):
    """
    What all sources of one driver use.

    Attributes:
        sink: stores what they give.
        events: is told what happens to them.
        connections: to each mirror at most.
    """

    plan: Scheduler
    sink: ArchiveSink
    clock: IReactorTime
    events: SourceEvents
    connections: int = CONNECTIONS
    limits: Limits = LIMITS


class MirrorSource:
    """
    Args:
        number: of this mirror in the plan.
        connect: makes the endpoint for one more connection.
        queue: what it is asked for, if it is a host that the mirror redirects to.
        own: the mirror itself then.

    Attributes:
        is_paused: the sink takes no more for now.
        last_byte_s: when anything was received, or asked of an idle mirror; by connection.
        asked_bytes: of files, in all.
        pipelined: connections that have had two requests at a time.
        others: the hosts that it redirects to.
    """

    def __init__(
        self,
        context: SourceContext,
        number: int,
        address: Address,
        connect: Callable[[], IStreamClientEndpoint],
        tally: Tally | None = None,
        queue: HostQueue | None = None,
        own: MirrorSource | None = None,
    ) -> None:
        self.number = number
        self.others: list[MirrorSource] = []
        self.queue = queue or MirrorHosts(context.plan, number, address).own
        self._own = own or self
        self._given_up = False
        self.address = address
        self.sink = context.sink
        self.tally = tally or Tally(address.url)
        self.is_paused = False
        self.last_byte_s: dict[PipelinedConnection, float] = {}
        self.pipelined: set[PipelinedConnection] = set()
        self._doubtful: set[PipelinedConnection] = set()  # whose end says nothing of the mirror
        self._plan = self.queue
        self._clock = context.clock
        self._connect = connect
        self._events = context.events
        self._wanted_connections = context.connections
        self._limits = context.limits
        self._name = address.netloc.decode("ascii")
        self._record = HostStats(context.limits)
        self._connections: list[PipelinedConnection] = []
        self._connecting: set[Deferred[Any]] = set()
        self.asked_bytes = 0
        self._rests = 0
        self._resting: IDelayedCall | None = None
        self._busy_since_s: float | None = None
        self._closed = False
        self._head_tail = head_tail(address)

    def __repr__(self) -> str:
        return f"<MirrorSource {self._name}: {self._connections}, {self.tally}>"

    @property
    def connections(self) -> list[PipelinedConnection]:
        """The connections that were made and are not lost: the list itself, not to be changed."""
        return self._connections

    @property
    def all_hosts(self) -> list[MirrorSource]:
        """This, and those that it redirects to."""
        return [self, *self.others]

    @property
    def is_given_up(self) -> bool:
        """Whether it is asked for nothing any more."""
        return self._given_up or (self._own is self and self.tally.given_up is not None)

    @property
    def is_resting(self) -> bool:
        """Whether it is left alone for a moment."""
        return self._resting is not None

    def work(self) -> None:
        """Ask for what waits, as far as the windows allow; make connections for the rest."""
        if self._closed or self.is_given_up or self._resting is not None:
            return
        for connection in list(self._connections):
            self._feed(connection)
        self._connect_more()

    def _connect_more(self) -> None:
        """
        Make the connections that are lacking.

        One that has been asked for as much as the server is known to answer on one is as good as gone:
        another is on its way while that is still coming.
        """
        if self._closed or self.is_given_up or self._resting is not None:
            return
        coming = len(self._connecting) + sum(not each.ready for each in self._connections)
        count = len(self._connections) + len(self._connecting)
        if self._record.quota_is_told:
            count -= sum(each.lane.is_spent for each in self._connections)
        serial = self._plan.is_serial(self.number)
        if serial:
            count -= len(self.pipelined)
        while (
            self._plan.waits
            and count < self._wanted_connections
            and coming < self._wanted_connections
        ):
            if count >= 1 and not serial and self._record.is_serial(self._clock.seconds()):
                break
            if not self._open_connection():
                break
            coming, count = coming + 1, count + 1

    def pause(self, paused: bool) -> None:
        """Stop reading, or go on."""
        self.is_paused = paused
        now_s = self._clock.seconds()
        for connection in list(self._connections):
            self.last_byte_s[connection] = now_s
            for exchange in list(connection.lane.written)[:1]:
                if exchange.response is not None and not exchange.abandoned:
                    exchange.paused = paused
                    connection.pause_changed(exchange)
        if not paused:
            self.work()

    @property
    def owed_bytes(self) -> int:
        """What was asked and has not come, of whichever host."""
        return sum(
            connection.lane.owed_bytes for host in self.all_hosts for connection in host.connections
        )

    def stalled(self, connection: PipelinedConnection, reason: str, others: bool) -> None:
        """
        Take back all that was asked on a connection, and leave the mirror alone for a while.

        If several requests were on it, the mirror is serial from now on. If there are no ``others``, it is
        then asked on at once: perhaps it answers only the first of several.
        """
        pipelined = connection in self.pipelined
        if pipelined:
            self._plan.becomes_serial(self.number)
        if pipelined and not others:
            self._doubtful.add(connection)
        else:
            self._rest(reason)
        connection.abort(reason)

    def under_way(self) -> list[FetchJob]:
        """Return what it was asked for and has not given, in the order in which it will."""
        connections = [each for host in self.all_hosts for each in host.connections]
        asked = [
            exchange.errand
            for lane in (connection.lane for connection in connections)
            for exchange in (*lane.written, *lane.queued)
            if isinstance(exchange, FileExchange) and not exchange.abandoned
        ]
        return asked + [job for queue in self.queue.hosts.queues for job in queue.waiting]

    def duplicate_request(self, errand: FetchJob) -> bool:
        """Ask for what another mirror is slow to give; returns whether it was."""
        serial = self._plan.is_serial(self.number)
        ready = [
            each
            for each in self._connections
            if each.ready
            and each.open
            and not (serial and (each in self.pipelined or len(each.lane)))
        ]
        if not ready or self.is_paused or not self._plan.copy(errand, self.number):
            return False
        self._ask(min(ready, key=lambda each: each.lane.owed_bytes), errand)
        return True

    def forget(self, errand: FetchJob) -> None:
        """It has come from elsewhere."""
        for connection in self._connections:
            for exchange in (*connection.lane.written, *connection.lane.queued):
                if isinstance(exchange, FileExchange) and exchange.errand is errand:
                    self._take_back(exchange)
                    self._plan.put_back(errand, self.number)
                    return
        for other in self.others:
            other.forget(errand)

    def close(self) -> None:
        """End everything now; what is under way is forgotten."""
        self._closed = True
        call, self._resting = self._resting, None
        if call is not None:
            call.cancel()
        for attempt in list(self._connecting):
            attempt.cancel()
        for connection in list(self._connections):
            connection.abort("the mirror is finished")

    # Asking.

    def _feed(self, connection: PipelinedConnection) -> None:
        lane = connection.lane
        if not (connection.ready and connection.open) or self.is_paused:
            return
        if self._resting is not None or self.is_given_up:
            return
        now_s = self._clock.seconds()
        serial = self._plan.is_serial(self.number)
        if serial and connection in self.pipelined:
            if not len(lane):
                connection.close()
            return
        lane.serial = serial or self._record.is_serial(now_s)
        if not lane.written:
            self.last_byte_s[connection] = now_s
        lane.quota = self._record.quota
        while lane.takes_more:
            errand = self._plan.next(self.number)
            if errand is None:
                break
            self._ask(connection, errand)
        self._note_busy(now_s)

    def _ask(self, connection: PipelinedConnection, errand: FetchJob) -> None:
        head = b"GET %s%s" % (self.queue.hosts.request_target(errand), self._head_tail)
        self.asked_bytes += errand.size_bytes
        self._note_company(connection, errand)
        connection.submit(FileExchange(self, errand, head))

    def _note_company(self, connection: PipelinedConnection, errand: FetchJob) -> None:
        bit, lane = 1 << self.number, connection.lane
        if len(lane) and connection not in self.pipelined:
            self.pipelined.add(connection)
            for exchange in (*lane.written, *lane.queued):
                if isinstance(exchange, FileExchange) and not exchange.abandoned:
                    exchange.errand.company |= bit
        if connection in self.pipelined:
            errand.company |= bit

    def _note_busy(self, now_s: float) -> None:
        if self._own is not self:
            self._own._note_busy(now_s)
            return
        owes = any(
            connection.lane.written or connection.lane.queued
            for host in self.all_hosts
            for connection in host.connections
        )
        since_s = self._busy_since_s
        if since_s is not None:
            self.tally.busy_s += now_s - since_s
        self._busy_since_s = now_s if owes else None

    # What exchanges tell.

    def received(self, errand: FetchJob, receiver: FileReceiver) -> None:
        """All of it is here."""
        size = receiver.size_bytes
        self.tally.received_bytes += size
        self._rests = 0

        def ended(wrong: str | None) -> None:
            if wrong is not None:
                self.refused(errand, wrong, "wrong")
            elif self._plan.done(errand, self.number, size):
                self.tally.files += 1
                self._events.arrived(self, errand, size)

        receiver.finish(ended)

    def redirected(self, exchange: FileExchange, locations: Sequence[bytes]) -> None:
        """The file is where these ``Location`` fields lead: it waits for that host."""
        try:
            self.queue.hosts.redirected(exchange.errand, locations)
        except RedirectRefused as error:
            self.refuse(exchange, str(error), "refused")
            return
        self._take_back(exchange)
        self._events.changed()

    def defer(self, exchange: FileExchange, reason: str, busy_s: float | None = None) -> None:
        """It does not give the file now; has it too much to do, and for how long at least?"""
        self._take_back(exchange)
        self._rest(reason, busy_s or 0.0)  # before it could be asked again at once
        self._broken(exchange.errand, reason, busy_s is not None)

    def refuse(self, exchange: FileExchange, reason: str, kind: FailureKind) -> None:
        """What it gives is not what is wanted; the rest of it is not, either."""
        carriers = (each for each in self._connections if each is exchange.connection)
        connection = next(carriers, None)
        believed = self._refused(exchange.errand, reason, kind)
        if not believed and connection is not None:
            self._doubtful.add(connection)
        self._take_back(exchange)
        if not believed and connection is not None:
            connection.abort(reason)
        self._events.changed()

    def _take_back(self, exchange: FileExchange) -> None:
        exchange.let_go()
        exchange.withdraw()

    def refused(self, errand: FetchJob, reason: str, kind: FailureKind = "refused") -> bool:
        """It lacks the file, or has it wrong."""
        believed = self._refused(errand, reason, kind)
        self._events.changed()
        return believed

    def _refused(self, errand: FetchJob, reason: str, kind: FailureKind) -> bool:
        believed = self._plan.failed_at(errand, self.number, kind, reason)
        self.tally.refused += believed
        return believed

    def _broken(self, errand: FetchJob, reason: str, busy: bool = False) -> None:
        self.tally.broken += 1
        self._plan.failed_at(errand, self.number, "busy" if busy else "broken", reason)
        self._events.changed()

    def failed(self, errand: FetchJob, error: PipegridError) -> None:
        """The connection ended before all of it had come."""
        self._broken(errand, str(error))

    # Connections.

    def _open_connection(self) -> bool:
        """Begin to make one; returns whether another may be tried."""
        made: list[PipelinedConnection] = []

        def build() -> PipelinedConnection:
            made.append(PipelinedConnection(self._clock, self._limits, self._name, self))
            return made[-1]

        attempt = self._connect().connect(quiet(build))
        self._connecting.add(attempt)
        attempt.addTimeout(self._limits.connect_timeout_s, self._clock)
        attempt.addBoth(self._connected, attempt, made)
        return self._resting is None and not self.is_given_up

    def _connected(
        self, result: object, attempt: Deferred[Any], made: list[PipelinedConnection]
    ) -> None:
        self._connecting.discard(attempt)
        if self._closed:
            if made:
                made[-1].abort("the mirror is finished")
        elif isinstance(result, Failure):
            if not self._connections:
                self._rest(str(result.value).rstrip(".") or type(result.value).__name__)
        elif made[-1].open:
            connection = made[-1]
            self._connections.append(connection)
            self.tally.connections += 1
            self.last_byte_s[connection] = self._clock.seconds()
            self._feed(connection)

    def _rest(self, reason: str, least_s: float = 0.0) -> None:
        """Leave it alone for a while, longer each time; in the end for ever."""
        if self._resting is not None or self.is_given_up or self._closed:
            return
        self._rests += 1
        if self._rests > MAX_RESTS:
            self.give_up(reason)
            return
        self._plan.rests(self.number)
        pause_s = max(least_s, REST_S * 2 ** (self._rests - 1))
        self._resting = self._clock.callLater(pause_s, self._rested)
        self._events.changed()

    def _rested(self) -> None:
        self._resting = None
        self._plan.rests(self.number, False)
        self.work()

    def give_up(self, reason: str) -> None:
        """Ask it for nothing any more."""
        self._given_up = True
        if self._own is self:
            self.tally.given_up = reason
        for connection in list(self._connections):
            connection.abort(reason)
        self._plan.gave_up(self.number, reason)
        self._events.changed()

    # ``http11.Owner``.

    def has_room(self, connection: PipelinedConnection) -> None:
        self.last_byte_s[connection] = self._clock.seconds()
        self._feed(connection)
        if connection.lane.is_spent:
            self._connect_more()

    def answered(self, connection: PipelinedConnection, exchange: Exchange) -> None:
        lane = connection.lane
        self._record.answered(exchange, self._clock.seconds(), bool(lane.written))
        if self._record.takes_larger_budget:
            lane.measure()
        if lane.is_spent and exchange.response is not None and exchange.response.keep_alive:
            self._record.outlasted(connection.answered)

    def held_up(self, connection: PipelinedConnection) -> None:
        """Its reader is our disk."""

    def gave_back(self, unsent: list[Unanswered]) -> None:
        self._put_back(unsent, broken=0)

    def lost(
        self, connection: PipelinedConnection, loss: Loss, unanswered: list[Unanswered]
    ) -> None:
        now_s = self._clock.seconds()
        self._note_busy(now_s)
        self.last_byte_s.pop(connection, None)
        if connection in self._connections:
            self._connections.remove(connection)
        failed = self._record.lost(loss, connection.answered_behind, now_s)
        if failed or (loss.garbage and connection in self.pipelined):
            self._plan.becomes_serial(self.number)
            self._doubtful.add(connection)
        forgiven = loss.announced or connection in self._doubtful
        self._doubtful.discard(connection)
        self.pipelined.discard(connection)
        # The first is the one whose answer was due; about those behind it nothing is known.
        self._put_back(unanswered, broken=0 if forgiven else 1)
        if self._closed:
            return
        if loss.answered or forgiven:
            self.work()
        else:
            self._rest(loss.reason)

    def _put_back(self, unanswered: list[Unanswered], broken: int) -> None:
        for each in unanswered:
            exchange = each.exchange
            assert isinstance(exchange, FileExchange)
            exchange.let_go()
            if broken and not isinstance(each.error, RequestNotSent):
                broken -= 1
                self._broken(exchange.errand, str(each.error))
            else:
                self._plan.put_back(exchange.errand, self.number)
        if unanswered:
            self._events.changed()


# One bringing up to date on a reactor: what happens at the sources is told to the plan, and they are
# asked on.
#
# A sprint goes first, where that can be; what it leaves is fetched here, with all the patience that mirrors
# need.

LOOKED_AT_ONCE = 256
WATCH_S = 0.25
AHEAD_S = 0.05
"""What a limited rate may be ahead of itself before reading pauses."""


@attrs.frozen
class SyncOptions:
    """
    How it is done.

    Attributes:
        connect: makes of an address what makes endpoints for connections to it.
        limit: bytes a second from all mirrors together; None: no limit.
        sprints: a sprint may go first.
    """

    policy: Policy
    connections: int
    connect: Callable[[Address], Callable[[], Any]]
    limit: float | None
    progress: Callable[[Report], None] | None
    dry_run: bool
    sprints: bool


class TwistedDriver:
    """One bringing up to date."""

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
        self._context = SourceContext(self._plan, self._sink, reactor, self, options.connections)
        self._sources = [
            MirrorSource(
                self._context,
                number,
                address,
                options.connect(address),
                tally=work.report.tallies[number],
            )
            for number, address in enumerate(addresses)
        ]
        for source in self._sources:
            source.queue.hosts.added = partial(self._add_host, source)
        self._paces = [ReceiveRate() for _ in addresses]
        self._all_read = False
        self._closed = False
        self._sink_is_full = False
        self._allowed_until_s = reactor.seconds()
        self._throttled: IDelayedCall | None = None
        self._watcher: IDelayedCall | None = None
        self._ended: Deferred[None] = Deferred()

    def _add_host(self, own: MirrorSource, queue: HostQueue) -> None:
        """A mirror redirects to one more host."""
        host = MirrorSource(
            self._context,
            own.number,
            queue.address,
            self._options.connect(queue.address),
            tally=own.tally,
            queue=queue,
            own=own,
        )
        host.is_paused = own.is_paused
        own.others.append(host)

    @property
    def _hosts(self) -> list[MirrorSource]:
        """The mirrors, and all that they redirect to."""
        return [host for source in self._sources for host in source.all_hosts]

    async def run(self, files: Iterable[MirrorEntry]) -> Report:
        """Bring some files up to date; what that means is told at ``Mirror.sync``."""
        work, options = self._work_done, self._options
        if options.sprints and not work.all_read:
            await self._workers.run(self._sprint, files)
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
        await self._sink.flush()
        await self._workers.run(work.finish)
        return work.sum_up()

    def _sprint(self, files: Iterable[MirrorEntry]) -> bool:
        """In the thread: fetch what can be fetched without ado."""
        options = self._options
        progress = options.progress

        def told(report: Report) -> None:
            self._clock.callFromThread(self._tell, report)

        return self._work_done.sprint(
            files,
            options.policy,
            options.connections,
            lambda: self._closed or self._ended.called,
            None if progress is None else told,
        )

    def _tell(self, report: Report) -> None:
        if self._closed or self._ended.called or self._options.progress is None:
            return
        try:
            self._options.progress(report)
        except Exception as error:  # nobody else would hear of it
            self._broken(error)

    def _look(self, chunk: list[ArchiveFile]) -> list[ArchiveFile]:
        """In the thread: return what is not there."""
        return self._work_done.look.missing(chunk)

    def close(self) -> None:
        """End all that is under way: the timers, and the sources with their connections."""
        self._closed = True
        self._ended.addErrback(lambda _: None)  # whoever wanted to know has been told
        call, self._watcher = self._watcher, None
        if call is not None:
            call.cancel()
        throttled, self._throttled = self._throttled, None
        if throttled is not None:
            throttled.cancel()
        for source in self._hosts:
            source.close()

    # What happens.

    def arrived(self, source: MirrorSource, errand: FetchJob, size_bytes: int) -> None:
        if errand.under_way:
            for other in self._sources:
                if errand.under_way >> other.number & 1:
                    other.forget(errand)
        self._look_finished()

    def changed(self) -> None:
        self._work()
        self._look_finished()

    def _full(self, full: bool) -> None:
        self._sink_is_full = full
        self._pause()

    def _pause(self) -> None:
        paused = self._sink_is_full or self._throttled is not None
        for source in self._hosts:
            if source.is_paused != paused:
                source.pause(paused)

    def _broken(self, error: Exception) -> None:
        if not self._ended.called:
            self._ended.errback(error)

    def _work(self) -> None:
        if not self._closed:
            for source in self._hosts:
                source.work()

    def _look_finished(self) -> None:
        if self._all_read and self._plan.is_idle and not self._ended.called:
            self._ended.callback(None)

    # What is watched.

    def _watch(self) -> None:
        self._watcher = self._clock.callLater(WATCH_S, self._watch)
        now_s = self._clock.seconds()
        able = [s for s in self._sources if not (s.is_resting or s.is_given_up)]
        for source, pace in zip(self._sources, self._paces, strict=True):
            owed = source.owed_bytes
            asked_bytes = sum(host.asked_bytes for host in source.all_hosts)
            pace.note(now_s, asked_bytes - owed, owed > 0 and not source.is_paused)
            if source.is_paused:
                continue
            others = any(other is not source for other in able)
            for host in source.all_hosts:
                self._watch_host(host, now_s, others)
        if not self._plan.waits and self._all_read:
            self._steal()
        if self._options.progress is not None:
            self._tell(self._work_done.sum_up())

    def _watch_host(self, host: MirrorSource, now_s: float, others: bool) -> None:
        for connection in list(host.connections):
            idle_s = now_s - host.last_byte_s.get(connection, now_s)
            pipelined = connection in host.pipelined
            if connection.lane.written and has_stalled(idle_s, others, pipelined):
                host.stalled(connection, f"no byte came for {idle_s:.1f} s", others)

    def _steal(self) -> None:
        move = choose_steal(
            [
                MirrorStanding(
                    source.number,
                    source.owed_bytes,
                    pace.bytes_per_s,
                    not (source.is_resting or source.is_given_up or source.is_paused),
                )
                for source, pace in zip(self._sources, self._paces, strict=True)
            ]
        )
        if move is None:
            return
        thief, left_bytes = self._sources[move.thief], move.size_bytes
        for errand in reversed(self._sources[move.victim].under_way()):
            if left_bytes <= 0:
                break
            if thief.duplicate_request(errand):
                left_bytes -= errand.size_bytes

    def _throttle(self, received_bytes: int) -> None:
        """Do not read on before so many bytes may have come."""
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
