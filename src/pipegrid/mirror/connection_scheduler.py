"""Host scheduler (pure): which host is asked on which connection; windows, stalls, stealing and rests."""

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

TYPE_CHECKING = False  # as in ``typing``, which is slow to import
if TYPE_CHECKING:
    from typing import Any

    from pipegrid.mirror.file_scheduler import Failure, Tally

# The scheduler knows files and mirrors; this module knows the hosts and connections of mirrors. Drivers
# report events and get decisions; they only move bytes.
#
# **Hosts.** A mirror may redirect to other hosts. Each has connections of its own, on behalf of the mirror.
# The scheduler knows only the mirror: a redirected job stays in flight there, and waits in the queue of its
# host.
#
# **Windows.** From a single mirror as much is requested as its connections may carry: requests wait in its
# socket at no cost, since no other mirror could serve them. Of several mirrors, each connection has a
# window, which doubles when that much has arrived. From a host that has not answered yet little is
# requested, since it may redirect everything. (Connections of ``http11`` have windows of their own.)
#
# **Stalls.** A connection with outstanding responses that has received nothing for a second loses its
# requests, if there is another mirror; otherwise after a longer time. While the disk delays reading no
# connection stalls. If several requests were on it, the mirror is serial from then on: perhaps it answers
# only the first of several, so a single mirror is asked again at once.
#
# **The end.** When no file is waiting, a mirror that has finished takes over requests from the one that
# would finish last, as many as make both finish at the same time. They are requested twice; the first
# response counts.
#
# **Rests.** A host that fails repeatedly is not asked for half a second, then one, two..., and given up
# after half a minute. A driver that handles only the usual case leaves it to the other driver instead.

QUOTA = 1000
"""Requests on one connection: nginx closes it after that many."""

FIRST_REQUESTS = 256
"""On one connection to a host that has not answered yet: it may redirect all of them."""

FIRST_WINDOW_BYTES = 1 << 20
MAX_WINDOW_BYTES = 16 << 20
ALONE_WINDOW_BYTES = 256 << 20

MAX_REFUSED = 64
"""Files that a mirror may lack, in addition to as many as it gives, before the epoll driver leaves it."""

STALL_S = 1.0
LONE_STALL_S = 15.0
PIPELINED_STALL_S = 3.0
"""For a connection that has had several requests at a time, which may be the reason for its silence."""

WORTH_STEALING_S = 0.5
"""Requests that would be answered within this time are not taken over."""

_LEAST_STOLEN_BYTES = 64 << 10
"""So much at the least is taken over, so that a mirror that sends nothing is relieved."""

RATE_MEMORY_S = 2.0

REST_S = 0.5
MAX_RESTS = 6

MAX_HOSTS = 32
"""That one mirror redirects to."""

MAX_QUEUED = 1024
"""Jobs that wait for hosts, before more is requested from the mirror."""


def has_stalled(
    idle_s: float, others: bool, pipelined: bool = False, lone_stall_s: float = LONE_STALL_S
) -> bool:
    """
    Return whether a connection with outstanding responses was silent for too long.

    Args:
        others: whether another mirror can do its work.
        pipelined: whether it has had several requests at a time.
        lone_stall_s: the time limit if neither applies.
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
        """Record the bytes received in total. Time without outstanding responses does not count."""
        if self._at_s is not None and now_s > self._at_s:
            elapsed_s = now_s - self._at_s
            rate = (received_bytes - self._received_bytes) / elapsed_s
            if is_outstanding or rate > 0:
                weight = min(1.0, elapsed_s / RATE_MEMORY_S) if self.bytes_per_s else 1.0
                self.bytes_per_s += weight * (rate - self.bytes_per_s)
        self._at_s, self._received_bytes = now_s, received_bytes


class MirrorRating(Value):
    """
    The state of one mirror.

    Attributes:
        mirror: its number.
        outstanding_bytes: requested and outstanding.
        bytes_per_s: recent speed; 0.0 if unknown.
        can_work: neither resting nor given up.
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
        """The time until it would finish."""
        if not self.outstanding_bytes:
            return 0.0
        return self.outstanding_bytes / self.bytes_per_s if self.bytes_per_s else float("inf")


def choose_steal(standings: Sequence[MirrorRating]) -> tuple[int, int, int] | None:
    """
    Return which mirror should take over from which, and about how many bytes, once nothing waits.

    They are from the end of the other mirror's requests. None: no one should take over.
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
    One connection, as far as decisions need it; drivers add the bytes.

    Args:
        count: files that were requested on it, and received, before.

    Attributes:
        last_s: the time of the last received bytes, or of a request while nothing was outstanding.
        count: how many files were requested on it; ``answered``: how many responses arrived.
        pipelined: whether it has had two requests at a time.
        excused: whether it ends for a reason that is not the mirror's fault.
        is_outstanding: whether a response is outstanding; ``outstanding_bytes``: the bytes outstanding.
        is_ready: whether it can be written to, or soon; ``is_open``: whether it has not ended.
        is_spent: whether no more can be requested on it.
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
        """Requests without a complete response, in order."""
        raise NotImplementedError

    @property
    def is_spent(self) -> bool:
        return self.count >= self.host.spent


class FetchSchedule:
    """
    The decisions for all mirrors of one driver.

    Args:
        tallies: of the mirrors, in the same order.
        connections: to each host at most; those without further requests do not count.
        lone_stall_s: silence after which a single mirror has stalled.

    Attributes:
        mirrors: in the order of their numbers.
        hosts: those of the mirrors first, in the same order; then those that mirrors redirect to.
        is_paused: nothing is read at present, so silence means nothing.
        added: called with each further host.
        queued: called when a job waits for a host that may be idle.
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
        """Whether any job waits for a request, from any host."""
        return self.plan.waits or any(mirror.queued for mirror in self.mirrors)

    @property
    def is_outstanding(self) -> bool:
        """Whether any response is outstanding."""
        return any(connection.is_outstanding for connection in self.connections)

    @property
    def connections(self) -> Iterator[ScheduledConnection]:
        """The connections to any host that are not lost."""
        for host in self.hosts:
            yield from host.connections

    def asks(self) -> Iterator[tuple[ScheduledConnection, FetchJob]]:
        """Yield what to request and where, while windows allow; send each request at once."""
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
        """Ignore the silence until now, in which nothing was read."""
        for connection in self.connections:
            connection.last_s = now_s

    def tick(self, now_s: float) -> list[tuple[Any, str, bool]]:
        """
        Return the stalled connections, which the driver must end; to be called a few times a second.

        Returns:
            each with the reason, and whether it is excused; else the host must rest, or be left.
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
        Return what to request a second time and where, since idle mirrors take it over.

        To be called when no more files are wanted.

        Args:
            connect: called with a host without a usable connection; makes one for a later call.
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
        """Return all jobs that wait for hosts to the scheduler."""
        for mirror in self.mirrors:
            mirror.release()


class MirrorSchedule:
    """
    One mirror, with its own host and those that it redirects to.

    Attributes:
        bit: of the mirror in the attributes of jobs.
        hosts: its own first.
        queued: jobs that wait for them.
        is_out: whether its driver requests nothing from it any more.
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
        """The connections of all its hosts."""
        for host in self.hosts:
            yield from host.connections

    @property
    def in_flight(self) -> list[FetchJob]:
        """Its outstanding requests, in the expected order of the responses."""
        jobs = [job for connection in self.connections for job in connection.unanswered]
        return jobs + [job for host in self.hosts for job in host.waiting]

    @property
    def standing(self) -> MirrorRating:
        """Its state, which decides which mirror takes over from which."""
        outstanding_bytes = sum(connection.outstanding_bytes for connection in self.connections)
        return MirrorRating(
            self.number, outstanding_bytes, self._rate.bytes_per_s, self.own.can_work
        )

    @property
    def refuses_too_much(self) -> bool:
        """Whether it lacks more files than a mirror should."""
        return self._refused > max(MAX_REFUSED, self.tally.files)

    def note(self, now_s: float) -> None:
        """Measure its speed, and count the time with outstanding responses."""
        is_outstanding = any(connection.is_outstanding for connection in self.connections)
        received_bytes = sum(host.received_bytes for host in self.hosts)
        self._rate.note(now_s, received_bytes, is_outstanding and not self.schedule.is_paused)
        if self._busy_since_s is not None:
            self.tally.busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if is_outstanding else None

    def begins(self, now_s: float) -> None:
        """A first response is outstanding since then: the time until ``note`` counts as busy."""
        if self._busy_since_s is None:
            self._busy_since_s = now_s

    @property
    def leads_to(self) -> HostSchedule:
        """The host that is expected to have the mirror's files."""
        table = self.access.redirects
        if table is None:
            return self.own
        route = table.route_of(self.address.base_url)
        return self.own if route is None else self._host_of(route) or self.own

    def host_for(self, job: FetchJob) -> HostSchedule:
        """Return the host that is expected to have a file."""
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
        A host redirects a file: the job waits for the other host.

        Raises:
            RedirectRefused: that redirect is not followed.
        """
        from pipegrid.mirror.redirects import table_of  # few runs need it

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
        """Return the host of a route; None if there are too many, or the host has been given up."""
        if _key(route.address) == _key(self.address):  # other paths may have other credentials
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
        """A file has arrived and is right; False if another mirror was faster."""
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
        A file could not be fetched. If a learnt redirect was wrong, that counts against no mirror. Returns as
        ``failed_at``.
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
        """Return all jobs that wait for a host to the scheduler."""
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
        given_up: why nothing is requested from it any more; None if it may be.
        is_resting: whether it is not asked for a while.
        connecting: how many connections are being made.
        has_answered: whether any response has arrived.
        spent: how many requests a connection accepts.
        window_bytes: how much may be outstanding on each.
        received_bytes: in all, including incomplete files.
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
        """Whether the host is expected to redirect all requests."""
        return self.mirror.leads_to is not self

    @property
    def is_serial(self) -> bool:
        """Whether requests are sent one at a time, on connections that never had two."""
        return self._plan.is_serial(self.mirror.number)

    @property
    def can_work(self) -> bool:
        """Whether it may be asked for anything now."""
        return not (self.is_resting or self.mirror.is_out or self.given_up is not None)

    # Its queue.

    @property
    def waiting(self) -> list[FetchJob]:
        """Jobs in its queue that are still wanted."""
        return [job for job in self._waiting if not job.is_over]

    @property
    def waits(self) -> bool:
        """Whether there is anything to request from this host."""
        if self._waiting:
            return True
        return self._plan.waits and self.mirror.leads_to is self

    def put(self, job: FetchJob) -> None:
        """Queue one more file for this host."""
        self._waiting.append(job)
        self.mirror.queued += 1
        self.mirror.schedule.queued()

    def take_all(self) -> list[FetchJob]:
        """Remove all jobs from its queue, and return them."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self.mirror.queued -= len(waiting)
        return waiting

    def next(self) -> FetchJob | None:
        """Return what to request from this host now; None for nothing."""
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
        """Return a job whose request the host has not processed."""
        mirror = self.mirror
        if job in mirror.routes and not job.is_over and self.given_up is None:
            self._waiting.appendleft(job)
            mirror.queued += 1
            return
        mirror.routes.pop(job, None)
        self._plan.put_back(job, mirror.number)

    # Its connections.

    def may_ask(self, connection: ScheduledConnection) -> bool:
        """Return whether pipelining allows one more request on a connection."""
        return not (connection.pipelined or connection.is_outstanding) or not self.is_serial

    def is_useless(self, connection: ScheduledConnection) -> bool:
        """Return whether nothing more is requested on a connection, and nothing outstanding."""
        return connection.pipelined and not connection.is_outstanding and self.is_serial

    @property
    def has_space(self) -> bool:
        """Whether there may be one more connection."""
        most, serial = self.mirror.schedule.most_connections, self.is_serial
        usable = coming = self.connecting
        for connection in self.connections:
            coming += not connection.is_ready
            usable += not (connection.is_spent or (serial and connection.pipelined))
        count = len(self.connections) + self.connecting
        return self.can_work and usable < most and coming < most and count < 2 * most

    @property
    def may_open(self) -> bool:
        """Whether one more connection should be made."""
        return self.can_work and self.waits and self.has_space

    def free_connection(self) -> ScheduledConnection | None:
        """Return the connection with the least outstanding, if its window allows more."""
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
        """Double the window if that much has arrived."""
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
        # For most connections this is the whole check, at the cost of one attribute.
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
        """One more connection is being made, or was made."""
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
        A connection has ended.

        Args:
            unanswered: the first is the one whose response was due; nothing is known about the others.
            forgiven: whether that is not the host's fault.
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
        """Let it rest; return for how many seconds, longer each time. None: it must be given up."""
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
        """It serves files: the next rest is short."""
        self._rests = 0

    def give_up(self, reason: str) -> None:
        """Request nothing from it any more; its connections must have ended already."""
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
    Where one mirror's small files are requested.

    Files that belong together use one route, even if the mirror redirects each to another host.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._access = address.access

    def first(self, path: str) -> FileRoute:
        """Return the first route for a file."""
        own = own_route(self._address, path)
        table = self._access.redirects
        learnt = None if table is None else table.route_of(own.url)
        return learnt or own

    def after(
        self, path: str, route: FileRoute, status: int, locations: Sequence[bytes]
    ) -> FileRoute | str:
        """
        Return where a file is requested next, or a sentence about the mirror's response.

        Args:
            route: where it was requested.
            status: of the response, other than 200; ``locations``: its ``Location`` fields.
        """
        if status in REDIRECTS:
            from pipegrid.mirror.redirects import table_of  # few runs need it

            table = table_of(self._access)
            try:
                learnt = None if route.hops else table.route_of(route.url)
                found = table.follow(route, locations)
            except RedirectRefused as error:
                return f"{self._address.url}: {error}, for {path}"
            return found if learnt is None else learnt.replaced(hops=1)
        known = self._access.redirects
        if known is not None and route.rule is not None:  # the host was expected to have it
            known.forget(route.rule)
            return own_route(self._address, path)
        return f"{route.address.url} answers {status} for {path}"

    def served(self, route: FileRoute) -> None:
        """A host has served a file itself."""
        table = self._access.redirects
        if table is not None and route.rule is None:
            table.served(route.url)
