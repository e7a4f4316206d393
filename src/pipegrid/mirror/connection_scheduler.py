"""
Decisions about requests to hosts: which file is requested on which connection; windows, stalls, takeovers,
and pauses of failing hosts. Without input or output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pipegrid.mirror.archive_file import Value
from pipegrid.mirror.epoll_response_head import REDIRECTS
from pipegrid.mirror.file_scheduler import FetchJob, Scheduler
from pipegrid.mirror.mirror_urls import (
    Address,
    FileRoute,
    RedirectRefused,
    head_tail,
    own_route,
    target_of,
)

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import
if TYPE_CHECKING:
    from typing import Any

    from pipegrid.mirror.file_scheduler import Failure, Tally

# The file scheduler knows files and mirrors; this module knows the hosts and connections of the mirrors.
# Drivers report events, get decisions, and only move bytes.
#
# **Hosts.** A mirror may redirect to other hosts. Each mirror has its own connections to each host. The file
# scheduler knows only mirrors: there, a redirected job stays in flight at the mirror, while the job waits in
# the queue of the other host.
#
# **Windows.** A window limits the outstanding bytes of a connection. With a single mirror, it is large
# (``ALONE_WINDOW_BYTES``): waiting requests cost nothing, since no other mirror could serve the files. With
# several mirrors, the window of a host's connections is small at first, and doubles when that many bytes have
# arrived from the host. Few files are requested from a host that has not answered yet, since it may redirect
# all requests. (Connections of ``http11`` have windows of their own.)
#
# **Stalls.** If a connection with outstanding responses receives nothing for a second, and another mirror can
# work, the connection ends and its requests are made again; a single mirror gets more time. No connection
# stalls while the driver pauses reading. If a stalled connection had several requests at a time, the mirror
# is serial from then on (one request at a time), since it may answer only the first of several. In this case
# a single mirror is asked again without a rest.
#
# **Takeovers.** When no file is waiting, an idle mirror takes over requests from the mirror that would finish
# last: as many as let both finish at the same time. These files are requested twice; the first response
# counts.
#
# **Rests.** After a failure, a host gets no requests for half a second; after further failures for one
# second, two seconds and so on. If it serves no file between ``MAX_RESTS`` rests, half a minute in total, its
# next failure gives it up. A driver that handles only the usual case has no rests, and leaves the mirror to
# the other driver.

QUOTA = 1000
"""The maximum number of requests on one connection: nginx closes it after that many."""

FIRST_REQUESTS = 512
"""Maximum requests on one connection to a host that has not answered yet: it may redirect all of them."""

FIRST_WINDOW_BYTES = 1 << 20
MAX_WINDOW_BYTES = 16 << 20
ALONE_WINDOW_BYTES = 256 << 20

MAX_REFUSED = 64
"""The epoll driver leaves a mirror that lacks more files than this number, and more than it has served."""

STALL_S = 1.0
LONE_STALL_S = 15.0
PIPELINED_STALL_S = 3.0
"""Time limit of a single mirror on a connection that had pipelined requests, which may cause the stall."""

WORTH_STEALING_S = 0.5
"""Requests that would be answered within this time are not taken over."""

_LEAST_STOLEN_BYTES = 64 << 10
"""The minimum that is taken over, so that a mirror that sends nothing loses requests, too."""

RATE_MEMORY_S = 2.0

REST_S = 0.5
MAX_RESTS = 6

MAX_HOSTS = 32
"""The maximum number of hosts that one mirror may redirect to."""

MAX_QUEUED = 1024
"""While this many of a mirror's jobs wait for hosts, the mirror gets no more files from the scheduler."""


def has_stalled(
    idle_s: float, others: bool, pipelined: bool = False, lone_stall_s: float = LONE_STALL_S
) -> bool:
    """
    Return whether a connection with outstanding responses has received nothing for too long.

    Args:
        idle_s: the time since the last received byte.
        others: whether another mirror can fetch the connection's files.
        pipelined: whether the connection has had several requests at a time.
        lone_stall_s: the time limit if neither ``others`` nor ``pipelined``.
    """
    return idle_s > (STALL_S if others else PIPELINED_STALL_S if pipelined else lone_stall_s)


class ReceiveRate:
    """The recent speed of one mirror."""

    __slots__ = ("_at_s", "_received_bytes", "bytes_per_s")

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._received_bytes = 0
        self._at_s: float | None = None

    def note(self, now_s: float, received_bytes: int, is_outstanding: bool) -> None:
        """
        Record how many bytes have been received in total. Time without outstanding responses does not count.
        """
        if self._at_s is not None and now_s > self._at_s:
            elapsed_s = now_s - self._at_s
            rate = (received_bytes - self._received_bytes) / elapsed_s
            if is_outstanding or rate > 0:
                weight = min(1.0, elapsed_s / RATE_MEMORY_S) if self.bytes_per_s else 1.0
                self.bytes_per_s += weight * (rate - self.bytes_per_s)
        self._at_s, self._received_bytes = now_s, received_bytes


class MirrorRating(Value):
    """
    The load and speed of one mirror.

    Attributes:
        mirror: its number.
        outstanding_bytes: bytes that were requested and have not arrived.
        bytes_per_s: recent speed; 0.0 if unknown.
        can_work: the mirror is neither resting nor given up.
    """

    __slots__ = ("bytes_per_s", "can_work", "mirror", "outstanding_bytes")

    def __init__(
        self, mirror: int, outstanding_bytes: int, bytes_per_s: float, can_work: bool
    ) -> None:
        self.mirror = mirror
        self.outstanding_bytes = outstanding_bytes
        self.bytes_per_s = bytes_per_s
        self.can_work = can_work

    @property
    def left_s(self) -> float:
        """The time until the mirror would have sent all outstanding bytes."""
        if not self.outstanding_bytes:
            return 0.0
        return self.outstanding_bytes / self.bytes_per_s if self.bytes_per_s else float("inf")


def choose_steal(standings: Sequence[MirrorRating]) -> tuple[int, int, int] | None:
    """
    Return the mirror that takes over requests, the mirror that loses them, and about how many bytes.

    To be called when no file is waiting. The last requests of the losing mirror are taken over. None: nothing
    should be taken over.
    """
    able = [one for one in standings if one.can_work]
    idle = [one for one in able if not one.outstanding_bytes]
    late = max(standings, key=lambda one: one.left_s, default=None)
    if not idle or late is None or late.left_s < WORTH_STEALING_S:
        return None
    thief = max(idle, key=lambda one: one.bytes_per_s)
    rates = thief.bytes_per_s + late.bytes_per_s
    share = thief.bytes_per_s / rates if rates else 0.5
    size_bytes = max(_LEAST_STOLEN_BYTES, int(late.outstanding_bytes * share))
    return thief.mirror, late.mirror, size_bytes


class ScheduledConnection:
    """
    One connection, as far as decisions depend on it; the drivers' subclasses send and receive.

    Args:
        count: how many files were requested and received on the connection before this object was made.

    Attributes:
        last_s: the time of the last received bytes, or of a request that was made while nothing was
            outstanding.
        count: how many files were requested; ``answered``: how many responses arrived.
        pipelined: whether the connection has had two requests at a time.
        excused: whether the connection ends for a reason that is not the mirror's fault.
        is_outstanding: whether a response is outstanding; ``outstanding_bytes``: how many bytes are
            outstanding.
        is_ready: whether the connection is writable, or will be soon; ``is_open``: whether it has not ended.
        is_spent: whether the connection accepts no more requests.
    """

    is_ready = is_open = True

    def __init__(self, host: HostSchedule, now_s: float = 0.0, count: int = 0) -> None:
        self.host = host
        self.last_s = now_s
        self.count = self.answered = count
        self.pipelined = self.excused = False
        host.has_answered |= count > 0

    @property
    def is_outstanding(self) -> bool:
        raise NotImplementedError

    @property
    def outstanding_bytes(self) -> int:
        raise NotImplementedError

    @property
    def unanswered(self) -> list[FetchJob]:
        """The jobs whose requests have no complete response, in the order of the requests."""
        raise NotImplementedError

    @property
    def is_spent(self) -> bool:
        return self.count >= self.host.spent


class FetchSchedule:
    """
    The decisions for all mirrors of one driver.

    Args:
        tallies: of the mirrors, in the order of ``addresses``.
        connections: the most connections to each host; connections that accept no more requests do not count.
        lone_stall_s: how long a single mirror may send nothing before it counts as stalled.

    Attributes:
        mirrors: in the order of their numbers.
        hosts: first the hosts of the mirrors, in the same order; then hosts that mirrors redirect to.
        is_paused: the driver reads nothing at present, so no connection stalls.
        added: called with each host that a mirror redirects to for the first time.
        queued: called when a job is queued for a host, which may be idle.
    """

    def __init__(
        self,
        plan: Scheduler,
        addresses: Sequence[Address],
        tallies: Sequence[Tally],
        connections: int,
        lone_stall_s: float = LONE_STALL_S,
    ) -> None:
        self.plan = plan
        self.most_connections = connections
        self.is_paused = False
        self.added: Callable[[HostSchedule], None] = lambda host: None
        self.queued: Callable[[], None] = lambda: None
        self.window_bytes = FIRST_WINDOW_BYTES if len(addresses) > 1 else ALONE_WINDOW_BYTES
        self._lone_stall_s = lone_stall_s
        self.hosts: list[HostSchedule] = []
        self.mirrors = [
            MirrorSchedule(self, number, address, tally)
            for number, (address, tally) in enumerate(zip(addresses, tallies, strict=True))
        ]

    @property
    def waits(self) -> bool:
        """Whether any file still has to be requested from a host."""
        return self.plan.waits or any(mirror.queued for mirror in self.mirrors)

    @property
    def is_outstanding(self) -> bool:
        """Whether any response is outstanding."""
        return any(connection.is_outstanding for connection in self.connections)

    @property
    def connections(self) -> Iterator[ScheduledConnection]:
        """The connections that have not ended, to all hosts."""
        for host in self.hosts:
            yield from host.connections

    def asks(self) -> Iterator[tuple[ScheduledConnection, FetchJob]]:
        """
        Yield pairs of a connection and the job to request on it, while windows allow; the caller must send
        each request before it asks for the next pair.
        """
        going = True
        hosts = self.hosts
        while going and self.waits:
            going = False
            for host in hosts if len(hosts) == 1 else list(hosts):
                connection = host.free_connection()
                if connection is not None and (job := host.next()) is not None:
                    yield connection, job
                    going = True

    def was_away(self, now_s: float) -> None:
        """Ignore the silence of all connections until now, since nothing was read."""
        for connection in self.connections:
            connection.last_s = now_s

    def tick(self, now_s: float) -> list[tuple[Any, str, bool]]:
        """
        Return the stalled connections, which the driver must end; to be called a few times a second.

        Returns:
            each connection with the reason, and whether its host is excused; a host that is not excused must
                rest, or is left to another driver.
        """
        able = {mirror.number for mirror in self.mirrors if mirror.own.can_work}
        stalled: list[tuple[Any, str, bool]] = []
        for mirror in self.mirrors:
            mirror.note(now_s)
            others = bool(able - {mirror.number})
            for connection in mirror.connections if not self.is_paused else ():
                idle_s = now_s - connection.last_s
                pipelined = connection.pipelined
                if not connection.is_outstanding or not has_stalled(
                    idle_s, others, pipelined, self._lone_stall_s
                ):
                    continue
                if pipelined:
                    self.plan.becomes_serial(mirror.number)
                reason = f"no byte came for {idle_s:.1f} s"
                stalled.append((connection, reason, pipelined and not others))
        return stalled

    def steals(self, connect: Callable[[HostSchedule], object]) -> list[tuple[Any, FetchJob]]:
        """
        Return pairs of a connection and a job to request on it a second time, since an idle mirror takes it
        over.

        To be called when no more files are waiting.

        Args:
            connect: called with the idle mirror's host if it has no usable connection; makes a connection,
                which a later call uses.
        """
        if self.is_paused or self.waits:
            return []
        steal = choose_steal([mirror.standing for mirror in self.mirrors])
        if steal is None:
            return []
        number, victim, left_bytes = steal
        thief = self.mirrors[number].own
        loads = {
            each: each.outstanding_bytes
            for each in thief.connections
            if each.is_ready and each.is_open and not each.is_spent and thief.may_ask(each)
        }
        if not loads:
            if thief.has_space:
                connect(thief)
            return []
        moves = []
        for job in reversed(self.mirrors[victim].in_flight):
            if left_bytes <= 0 or not loads:
                break
            if self.plan.copy(job, number):
                connection = min(loads, key=lambda each: loads[each])
                moves.append((connection, job))
                left_bytes -= job.size_bytes
                loads[connection] += job.size_bytes
                if thief.is_serial:
                    del loads[connection]
        return moves

    def release(self) -> None:
        """Put all jobs that wait for hosts back into the scheduler."""
        for mirror in self.mirrors:
            mirror.release()


class MirrorSchedule:
    """
    One mirror, with its own host and the hosts that it redirects to.

    Attributes:
        bit: stands for the mirror in bit sets of jobs.
        hosts: the mirror's own host first.
        queued: how many jobs wait for one of the hosts.
        is_out: whether the driver requests nothing more from the mirror.
    """

    def __init__(
        self, schedule: FetchSchedule, number: int, address: Address, tally: Tally
    ) -> None:
        self.schedule = schedule
        self.plan = schedule.plan
        self.number = number
        self.bit = 1 << number
        self.address = address
        self.tally = tally
        self.access = address.access
        self.routes: dict[FetchJob, FileRoute] = {}
        self.queued = 0
        self.is_out = False
        self._refused = 0
        self._rate = ReceiveRate()
        self._busy_since_s: float | None = None
        self.hosts: list[HostSchedule] = []
        self._by_key: dict[tuple[str, bytes], HostSchedule] = {}
        self.own = self._add(address)

    def _add(self, address: Address) -> HostSchedule:
        host = self._by_key[_key(address)] = HostSchedule(self, address)
        self.hosts.append(host)
        self.schedule.hosts.append(host)
        return host

    @property
    def connections(self) -> Iterator[ScheduledConnection]:
        """The connections to all hosts of the mirror."""
        for host in self.hosts:
            yield from host.connections

    @property
    def in_flight(self) -> list[FetchJob]:
        """
        The jobs that were requested from the mirror, by connection and in order; then those that wait for its
        hosts.
        """
        jobs = [job for connection in self.connections for job in connection.unanswered]
        return jobs + [job for host in self.hosts for job in host.waiting]

    @property
    def standing(self) -> MirrorRating:
        """The mirror's load and speed, which decide which mirror takes over requests from which."""
        outstanding_bytes = sum(connection.outstanding_bytes for connection in self.connections)
        return MirrorRating(
            self.number, outstanding_bytes, self._rate.bytes_per_s, self.own.can_work
        )

    @property
    def refuses_too_much(self) -> bool:
        """Whether the mirror has refused more files than ``MAX_REFUSED`` allows."""
        return self._refused > max(MAX_REFUSED, self.tally.files)

    def note(self, now_s: float) -> None:
        """Update the mirror's speed, and the time in which responses were outstanding."""
        is_outstanding = any(connection.is_outstanding for connection in self.connections)
        received_bytes = sum(host.received_bytes for host in self.hosts)
        self._rate.note(now_s, received_bytes, is_outstanding and not self.schedule.is_paused)
        if self._busy_since_s is not None:
            self.tally.busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if is_outstanding else None

    def begins(self, now_s: float) -> None:
        """
        Record that responses are outstanding since ``now_s``: the time until the next ``note`` counts as
        busy.
        """
        if self._busy_since_s is None:
            self._busy_since_s = now_s

    @property
    def leads_to(self) -> HostSchedule:
        """The host that is expected to serve most of the mirror's files."""
        table = self.access.redirects
        if table is None:
            return self.own
        route = table.route_of(self.address.base_url)
        return self.own if route is None else self._host_of(route) or self.own

    def host_for(self, job: FetchJob) -> HostSchedule:
        """Return the host that is expected to serve a file."""
        table = self.access.redirects
        if table is None:
            return self.own
        own = own_route(self.address, job.wanted.remote or job.wanted.path)
        route = table.route_of(own.url)
        host = None if route is None else self._host_of(route)
        if route is None or host is None:
            return self.own
        self.routes[job] = route
        return host

    def redirected(self, job: FetchJob, locations: Sequence[bytes]) -> None:
        """
        Queue a redirected job for the host that the redirect leads to.

        Raises:
            RedirectRefused: this redirect is not followed.
        """
        from pipegrid.mirror.redirects import table_of  # few runs need this module

        table = table_of(self.access)
        here = self.routes.get(job) or own_route(self.address, job.wanted.remote or job.wanted.path)
        route = table.follow(here, locations)
        host = self._host_of(route)
        if host is None:
            raise RedirectRefused(f"it redirects to more than {MAX_HOSTS} hosts")
        if host.given_up is not None:
            raise RedirectRefused(f"it redirects to {route.address.origin}: {host.given_up}")
        self.routes[job] = route
        host.put(job)

    def _host_of(self, route: FileRoute) -> HostSchedule | None:
        """
        Return the host of a route; None if the mirror has too many hosts, or if a learnt rule leads to a host
        that was given up.
        """
        if _key(route.address) == _key(self.address):  # the keys include the credentials
            return self.own
        host = self._by_key.get(_key(route.address))
        if host is None:
            if len(self.hosts) > MAX_HOSTS:
                return None
            host = self._add(route.address)
            self.schedule.added(host)
            self.schedule.queued()
        return None if route.rule is not None and host.given_up is not None else host

    def stored(self, job: FetchJob, size_bytes: int) -> bool:
        """Record that a file has arrived and is right; return False if another mirror was faster."""
        self.tally.received_bytes += size_bytes
        table = self.access.redirects
        if table is not None:
            route = self.routes.pop(job, None) or own_route(
                self.address, job.wanted.remote or job.wanted.path
            )
            if route.rule is None:
                table.served(route.url)
        first = self.plan.done(job, self.number, size_bytes)
        self.tally.files += first
        return first

    def failed(self, job: FetchJob, kind: Failure, reason: str) -> bool:
        """
        Record that a file could not be fetched. If a learnt redirect was wrong, no mirror is blamed. Returns
        the same as ``failed_at``.
        """
        if kind in ("broken", "busy"):
            self.tally.broken += 1
        route = self.routes.pop(job, None)
        if route is not None:
            table = self.access.redirects
            learnt = table is not None and route.rule is not None
            if table and learnt and not job.is_over and kind in ("refused", "wrong"):
                table.forget(route.rule or "")
                self.plan.put_back(job, self.number)
                return True
            reason = f"redirected to {route.address.origin}, {reason}"
        believed = self.plan.failed_at(job, self.number, kind, reason)
        if believed and kind in ("refused", "wrong"):
            self.tally.refused += 1
            self._refused += 1
        return believed

    def release(self) -> None:
        """Put all jobs that wait for a host of this mirror back into the scheduler."""
        for host in self.hosts:
            for job in host.take_all():
                self.routes.pop(job, None)
                self.plan.put_back(job, self.number)


def _key(address: Address) -> tuple[str, bytes]:
    return address.origin, address.headers


class HostSchedule:
    """
    One host that serves a mirror's files.

    Attributes:
        given_up: why nothing more is requested from the host; None if it is still used.
        is_resting: whether the host gets no requests for a while, after a failure.
        connecting: how many connections are being made.
        has_answered: whether any response has arrived.
        spent: how many requests a connection accepts.
        window_bytes: a connection with at least this many outstanding bytes gets no further request.
        received_bytes: in total, including incomplete files.
    """

    def __init__(self, mirror: MirrorSchedule, address: Address) -> None:
        self.mirror = mirror
        self.address = address
        self.given_up: str | None = None
        self.is_resting = self.has_answered = False
        self.connections: list[ScheduledConnection] = []
        self.connecting = 0
        self.spent = QUOTA
        self.window_bytes = mirror.schedule.window_bytes
        self.received_bytes = 0
        self._doubled_at_bytes = 0
        self._rests = 0
        self._plan = mirror.plan
        self._tail = head_tail(address)
        self._waiting: deque[FetchJob] = deque()

    def __repr__(self) -> str:
        return f"<HostSchedule {self.address.origin}: {len(self.connections)} connections>"

    @property
    def is_own(self) -> bool:
        """Whether the host is the mirror itself."""
        return self is self.mirror.own

    @property
    def is_redirected(self) -> bool:
        """Whether most of the mirror's files are expected from another host."""
        return self.mirror.leads_to is not self

    @property
    def is_serial(self) -> bool:
        """
        Whether each connection gets one request at a time; connections that have had two at a time are not
        used.
        """
        return self._plan.is_serial(self.mirror.number)

    @property
    def can_work(self) -> bool:
        """Whether files may be requested from the host now."""
        return not (self.is_resting or self.mirror.is_out or self.given_up is not None)

    # Its queue.

    @property
    def waiting(self) -> list[FetchJob]:
        """The jobs in the host's queue that are still wanted."""
        return [job for job in self._waiting if not job.is_over]

    @property
    def waits(self) -> bool:
        """Whether there is anything to request from this host."""
        if self._waiting:
            return True
        return self._plan.waits and self.mirror.leads_to is self

    def put(self, job: FetchJob) -> None:
        """Queue one more job for this host."""
        self._waiting.append(job)
        self.mirror.queued += 1
        self.mirror.schedule.queued()

    def take_all(self) -> list[FetchJob]:
        """Remove all jobs from the host's queue, and return them."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self.mirror.queued -= len(waiting)
        return waiting

    def next(self) -> FetchJob | None:
        """Return the next job to request from this host; None if there is none at present."""
        mirror = self.mirror
        while self._waiting:
            job = self._waiting.popleft()
            mirror.queued -= 1
            if not job.is_over:
                return job
            self.put_back(job)
        while mirror.queued < MAX_QUEUED:
            found = self._plan.next(mirror.number)
            if found is None:
                break
            host = mirror.host_for(found)
            if host is self:
                return found
            host.put(found)
        return None

    def put_back(self, job: FetchJob) -> None:
        """
        Put back a job whose request the host has not processed: if the host got it by a redirect, into the
        host's queue, otherwise into the scheduler.
        """
        mirror = self.mirror
        if job in mirror.routes and not job.is_over and self.given_up is None:
            self._waiting.appendleft(job)
            mirror.queued += 1
            return
        mirror.routes.pop(job, None)
        self._plan.put_back(job, mirror.number)

    # Its connections.

    def may_ask(self, connection: ScheduledConnection) -> bool:
        """Return whether one more request may be sent on a connection; a serial mirror gets one at a time."""
        return not (connection.pipelined or connection.is_outstanding) or not self.is_serial

    def is_useless(self, connection: ScheduledConnection) -> bool:
        """
        Return whether a connection is idle and gets no more requests, since a serial mirror's connection has
        had two at a time.
        """
        return connection.pipelined and not connection.is_outstanding and self.is_serial

    @property
    def has_space(self) -> bool:
        """Whether one more connection to the host is allowed."""
        most, serial = self.mirror.schedule.most_connections, self.is_serial
        usable = coming = self.connecting
        for connection in self.connections:
            coming += not connection.is_ready
            usable += not (connection.is_spent or (serial and connection.pipelined))
        count = len(self.connections) + self.connecting
        return self.can_work and usable < most and coming < most and count < 2 * most

    @property
    def may_open(self) -> bool:
        """Whether one more connection to the host is allowed and useful."""
        return self.can_work and self.waits and self.has_space

    def free_connection(self) -> ScheduledConnection | None:
        """Return the connection with the fewest outstanding bytes, if its window allows one more request."""
        best, least_bytes = None, self.window_bytes
        most = self.spent if self.has_answered else min(self.spent, FIRST_REQUESTS)
        serial = self._plan.is_serial(self.mirror.number)
        for connection in self.connections:
            outstanding_bytes = connection.outstanding_bytes
            if outstanding_bytes < least_bytes and connection.count < most:
                if serial and (connection.pipelined or connection.is_outstanding):
                    continue
                best, least_bytes = connection, outstanding_bytes
        return best

    def widen(self) -> None:
        """Double the window if that many bytes have arrived since it was last doubled."""
        received = self.received_bytes
        if (
            self.window_bytes < MAX_WINDOW_BYTES
            and received - self._doubled_at_bytes >= self.window_bytes
        ):
            self._doubled_at_bytes = received
            self.window_bytes *= 2

    def ask(self, connection: ScheduledConnection, job: FetchJob, now_s: float) -> bytes:
        """Return the request for a file, to be sent on a connection."""
        mirror = self.mirror
        # For most requests, the first of these conditions is false, and needs only one attribute.
        if not connection.outstanding_bytes and not connection.is_outstanding:
            connection.last_s = max(connection.last_s, now_s)
            mirror.begins(now_s)
        elif not connection.pipelined:
            connection.pipelined = True
            for each in connection.unanswered:
                each.company |= mirror.bit
        if connection.pipelined:
            job.company |= mirror.bit
        route = mirror.routes.get(job) if mirror.routes else None
        if route is not None:
            return b"GET %s%s" % (route.target, self._tail)
        wanted = job.wanted
        return b"GET %s%s" % (target_of(mirror.address, wanted.remote or wanted.path), self._tail)

    def opened(self, connection: ScheduledConnection) -> None:
        """Add a connection that is being made, or was made."""
        self.connections.append(connection)
        self.mirror.tally.connections += 1

    def lost(
        self,
        connection: ScheduledConnection,
        unanswered: Sequence[FetchJob],
        reason: str,
        forgiven: bool,
    ) -> None:
        """
        Remove a connection that has ended, and handle its unanswered requests.

        Args:
            unanswered: the first job is the one whose response was due; it counts as failed. The rest are
                requested again.
            forgiven: whether the end was not the host's fault, so that no job counts as failed.
        """
        if connection in self.connections:
            self.connections.remove(connection)
        for job in unanswered:
            if forgiven or job.is_over:
                self.put_back(job)
            else:
                forgiven = True
                self.mirror.failed(job, "broken", reason)

    # Rests.

    def rest(self, least_s: float = 0.0) -> float | None:
        """
        Let the host rest; return for how many seconds: at least ``least_s``, and longer each time. None: the
        host must be given up.
        """
        self._rests += 1
        if self._rests > MAX_RESTS:
            return None
        self.is_resting = True
        if self.is_own:
            self._plan.rests(self.mirror.number)
        return max(least_s, REST_S * 2.0 ** (self._rests - 1))

    def rested(self) -> None:
        self.is_resting = False
        if self.is_own:
            self._plan.rests(self.mirror.number, False)

    def works(self) -> None:
        """Record that the host serves files, so its next rest is short again."""
        self._rests = 0

    def give_up(self, reason: str) -> None:
        """Request nothing more from the host, whose connections must have ended already."""
        self.given_up = reason
        mirror = self.mirror
        table = mirror.access.redirects
        if table is not None and not self.is_own:
            table.forget_host(self.address)
        for job in self.take_all():
            mirror.failed(job, "broken", reason)
        if self.is_own:
            mirror.tally.given_up = reason
            self._plan.gave_up(mirror.number, reason)


class SmallRoutes:
    """
    Decides where one mirror's small files are requested.

    Files that belong together use one route, even if the mirror would redirect each file to a different host.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._access = address.access

    def first(self, path: str) -> FileRoute:
        """Return where a file is requested first."""
        own = own_route(self._address, path)
        table = self._access.redirects
        learnt = None if table is None else table.route_of(own.url)
        return learnt or own

    def after(
        self, path: str, route: FileRoute, status: int, locations: Sequence[bytes]
    ) -> FileRoute | str:
        """
        Return where a file is requested next; a sentence about the response if the mirror does not give the
        file.

        Args:
            route: where the file was requested.
            status: of the response, other than 200; ``locations``: the response's ``Location`` fields.
        """
        if status in REDIRECTS:
            from pipegrid.mirror.redirects import table_of  # few runs need this module

            table = table_of(self._access)
            try:
                learnt = None if route.hops else table.route_of(route.url)
                found = table.follow(route, locations)
            except RedirectRefused as error:
                return f"{self._address.url}: {error}, for {path}"
            return found if learnt is None else learnt.replaced(hops=1)
        known = self._access.redirects
        # A host that was only expected to have the file lacks it: the learnt rule was wrong.
        if known is not None and route.rule is not None:
            known.forget(route.rule)
            return own_route(self._address, path)
        return f"{route.address.url} answers {status} for {path}"

    def served(self, route: FileRoute) -> None:
        """Record that a host has served a file without a redirect."""
        table = self._access.redirects
        if table is not None and route.rule is None:
            table.served(route.url)
