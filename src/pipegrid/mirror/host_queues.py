"""The hosts that are asked in the name of one mirror, and a queue for each of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pipegrid.mirror.mirror_http import Address, FileRoute, RedirectRefused, own_route, target_of

TYPE_CHECKING = False  # as in ``typing``, which is slow to import
if TYPE_CHECKING:
    from pipegrid.mirror.scheduler import Failure, FetchJob, Scheduler

# A mirror may redirect to other hosts. Each is asked on connections of its own, in the name of the mirror, of
# which alone the scheduler knows: a job that is redirected is in flight there all the time, and waits in the
# queue of its host.

MAX_HOSTS = 32
"""That one mirror redirects to."""

MAX_QUEUED = 1024
"""Jobs that wait for hosts, before the mirror is asked for more."""


class MirrorHosts:
    """
    The hosts that are asked in the name of one mirror: its own, and those that it redirects to.

    Args:
        plan: where the mirror has this ``number``.
        added: called with the queue of a host that is new.
    """

    def __init__(
        self,
        plan: Scheduler,
        number: int,
        address: Address,
        added: Callable[[HostQueue], None] = lambda queue: None,
    ) -> None:
        self.plan = plan
        self.number = number
        self.address = address
        self.access = address.access
        self.routes: dict[FetchJob, FileRoute] = {}
        self.queued = 0
        self.added = added
        self.own = HostQueue(self, address)
        self._queues: dict[tuple[str, bytes], HostQueue] = {_key(address): self.own}

    @property
    def queues(self) -> list[HostQueue]:
        """Those of all hosts, its own first."""
        return list(self._queues.values())

    @property
    def leads_to(self) -> HostQueue:
        """That of the host which is expected to have what the mirror has."""
        table = self.access.redirects
        if table is None:
            return self.own
        route = table.route_of(self.address.base_url)
        return self.own if route is None else self._queue_of(route) or self.own

    def request_target(self, job: FetchJob) -> bytes:
        """Return what stands in the request line for a file."""
        if self.routes:
            route = self.routes.get(job)
            if route is not None:
                return route.target
        return target_of(self.address, job.wanted.remote or job.wanted.path)

    def queue_for(self, job: FetchJob) -> HostQueue:
        """Return the queue of the host which is expected to have a file."""
        table = self.access.redirects
        if table is None:
            return self.own
        own = own_route(self.address, job.wanted.remote or job.wanted.path)
        route = table.route_of(own.url)
        queue = None if route is None else self._queue_of(route)
        if route is None or queue is None:
            return self.own
        self.routes[job] = route
        return queue

    def redirected(self, job: FetchJob, locations: Sequence[bytes]) -> None:
        """
        A host redirects to where a file is: it waits there.

        Raises:
            RedirectRefused: that is not followed.
        """
        from pipegrid.mirror.redirects import table_of  # which few need

        table = table_of(self.access)
        here = self.routes.get(job)
        if here is None:
            here = own_route(self.address, job.wanted.remote or job.wanted.path)
        route = table.follow(here, locations)
        queue = self._queue_of(route)
        if queue is None:
            raise RedirectRefused(f"it redirects to more than {MAX_HOSTS} hosts")
        if queue.given_up is not None:
            raise RedirectRefused(f"it redirects to {route.address.origin}: {queue.given_up}")
        self.routes[job] = route
        queue.put(job)

    def _queue_of(self, route: FileRoute) -> HostQueue | None:
        """Return that of a host; None: there are too many, or it is expected to give nothing."""
        if route.address.origin == self.address.origin:
            return self.own
        queue = self._queues.get(_key(route.address))
        if queue is None:
            if len(self._queues) > MAX_HOSTS:
                return None
            queue = self._queues[_key(route.address)] = HostQueue(self, route.address)
            self.added(queue)
        return None if route.rule is not None and queue.given_up is not None else queue

    def release(self) -> None:
        """Put back all that waits for a host."""
        for queue in self._queues.values():
            for job in queue.take_all():
                self.routes.pop(job, None)
                self.plan.put_back(job, self.number)


def _key(address: Address) -> tuple[str, bytes]:
    return address.origin, address.headers


class HostQueue:
    """
    What one host is asked for in the name of a mirror; with the scheduler's methods, for whoever asks it.

    Attributes:
        given_up: why it is asked for nothing any more; None: it may be.
    """

    def __init__(self, hosts: MirrorHosts, address: Address) -> None:
        self.hosts = hosts
        self.address = address
        self.given_up: str | None = None
        self._plan = hosts.plan
        self._waiting: deque[FetchJob] = deque()

    @property
    def is_own(self) -> bool:
        """Whether the host is the mirror itself."""
        return self is self.hosts.own

    @property
    def is_redirected(self) -> bool:
        """Whether the host is expected to redirect whatever it is asked for."""
        return self.hosts.leads_to is not self

    @property
    def waiting_bytes(self) -> int:
        """Of the files that wait here."""
        return sum(job.size_bytes for job in self._waiting)

    @property
    def waiting(self) -> list[FetchJob]:
        """What waits here, and is wanted still."""
        return [job for job in self._waiting if not job.is_over]

    @property
    def waits(self) -> bool:
        """Whether there is anything to ask this host for."""
        if self._waiting:
            return True
        return self._plan.waits and self.hosts.leads_to is self

    def put(self, job: FetchJob) -> None:
        """One more file is to be asked for here."""
        self._waiting.append(job)
        self.hosts.queued += 1

    def take_all(self) -> list[FetchJob]:
        """Return what waits here; it does no more."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self.hosts.queued -= len(waiting)
        return waiting

    def next(self, mirror: int) -> FetchJob | None:
        """Return what to ask this host for now; as ``Scheduler.next``."""
        hosts = self.hosts
        while self._waiting:
            job = self._waiting.popleft()
            hosts.queued -= 1
            if not job.is_over:
                return job
            self.put_back(job, mirror)
        while hosts.queued < MAX_QUEUED:
            found = self._plan.next(mirror)
            if found is None:
                break
            queue = hosts.queue_for(found)
            if queue is self:
                return found
            queue.put(found)
        return None

    # As of the scheduler.

    def is_serial(self, mirror: int) -> bool:
        """Whether requests go out one at a time."""
        return self._plan.is_serial(mirror)

    def becomes_serial(self, mirror: int) -> None:
        """A host of this mirror cannot pipeline."""
        self._plan.becomes_serial(mirror)

    def copy(self, job: FetchJob, mirror: int) -> bool:
        """Whether it may be asked for, too."""
        return self._plan.copy(job, mirror)

    def done(self, job: FetchJob, mirror: int, size_bytes: int) -> bool:
        """A file has come and is right; False: another mirror was quicker."""
        hosts = self.hosts
        table = hosts.access.redirects
        if table is not None:
            route = hosts.routes.pop(job, None)
            if route is None:
                route = own_route(hosts.address, job.wanted.remote or job.wanted.path)
            if route.rule is None:
                table.served(route.url)
        return self._plan.done(job, mirror, size_bytes)

    def put_back(self, job: FetchJob, mirror: int) -> None:
        """The host never looked at the request."""
        if job in self.hosts.routes and not job.is_over and self.given_up is None:
            self._waiting.appendleft(job)
            self.hosts.queued += 1
            return
        self.hosts.routes.pop(job, None)
        self._plan.put_back(job, mirror)

    def failed_at(self, job: FetchJob, mirror: int, kind: Failure, reason: str) -> bool:
        """The host could not give a file; what was learnt wrongly counts against nobody."""
        hosts = self.hosts
        route = hosts.routes.pop(job, None)
        if route is not None:
            table = hosts.access.redirects
            learnt = table is not None and route.rule is not None
            if table and learnt and not job.is_over and kind in ("refused", "wrong"):
                table.forget(route.rule or "")
                self._plan.put_back(job, mirror)
                return True
            reason = f"redirected to {route.address.origin}, {reason}"
        return self._plan.failed_at(job, mirror, kind, reason)

    def rests(self, mirror: int, resting: bool = True) -> None:
        """The host is left alone for a while, or no longer."""
        if self.is_own:
            self._plan.rests(mirror, resting)

    def gave_up(self, mirror: int, reason: str) -> None:
        """The host is asked for nothing any more."""
        self.given_up = reason
        table = self.hosts.access.redirects
        if table is not None and not self.is_own:
            table.forget_host(self.address)
        for job in self.take_all():
            self.failed_at(job, mirror, "broken", reason)
        if self.is_own:
            self._plan.gave_up(mirror, reason)


class SmallRoutes:
    """
    Where one mirror's small files are asked for.

    Files that belong together go one way, even if the mirror redirects each to another host.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._access = address.access

    def first(self, path: str) -> FileRoute:
        """Return where a file is asked for first."""
        own = own_route(self._address, path)
        table = self._access.redirects
        learnt = None if table is None else table.route_of(own.url)
        return learnt or own

    def redirected(self, route: FileRoute, locations: Sequence[bytes]) -> FileRoute:
        """
        Return where a file is asked for that was redirected.

        Raises:
            RedirectRefused: nowhere.
        """
        from pipegrid.mirror.redirects import table_of  # which few need

        table = table_of(self._access)
        learnt = None if route.hops else table.route_of(route.url)
        found = table.follow(route, locations)
        return found if learnt is None else learnt.replaced(hops=1)

    def refused(self, path: str, route: FileRoute) -> FileRoute | None:
        """Return where else a file is asked for that a host does not have; None: nowhere."""
        table = self._access.redirects
        if table is None or route.rule is None:
            return None
        table.forget(route.rule)
        return own_route(self._address, path)

    def served(self, route: FileRoute) -> None:
        """A file has come by a route: where it was asked for, its host serves it itself."""
        table = self._access.redirects
        if table is not None and route.rule is None:
            table.served(route.url)
