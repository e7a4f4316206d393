"""The driver that moves bytes for the file scheduler with epoll, without a reactor."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property, partial
from itertools import islice

from pipegrid.mirror.archive_file import ArchiveFile
from pipegrid.mirror.connection_scheduler import FetchSchedule, HostSchedule
from pipegrid.mirror.epoll_connection import Connection, Lost
from pipegrid.mirror.epoll_response_head import UnsupportedResponse
from pipegrid.mirror.epoll_socket_cache import SocketCache, securing
from pipegrid.mirror.file_scheduler import FetchJob
from pipegrid.mirror.mirror_urls import RedirectRefused
from pipegrid.mirror.preconnect_mirrors import begin, place_of

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import

if TYPE_CHECKING:
    from typing import Any

    from pipegrid.mirror.epoll_file_store import FileStore
    from pipegrid.mirror.file_scheduler import Failure


# The driver for nearly all files: it fetches them from mirrors that behave as usual, with little overhead.
#
# Mirrors have a hundred thousand files, so the cost of each file matters most. In the usual case there is no
# reactor, no Deferred and no object for each request or header: sockets are read into pages, and responses
# are cut out of these and stored. If a mirror does anything else (a response without a length, a lost
# connection, silence, "not now"), this driver leaves the mirror, and requests the files from other mirrors.
#
# Remaining files wait in the scheduler, for ``mirror_api.Mirror`` and the Twisted driver, which handle
# everything that mirrors do, and use all that this driver has learnt. So this driver may give up at any time:
# that costs time, but loses nothing.

WATCH_S = 0.1
AT_ONCE = 256
ALONE_STALL_S = 5.0


class EpollDriver:
    """
    Fetches the files of the scheduler, with epoll.

    Args:
        new_store: makes the store; its arguments are called for a stored file, for a wrong one, and to wake
            the driver.
        missing: returns which of some files do not exist yet.
        stopped: returns whether the run must end.
        told: called a few times a second.
        preconnected: may have opened connections in advance, and gets back idle connections at the end.
    """

    def __init__(
        self,
        schedule: FetchSchedule,
        new_store: Callable[..., FileStore],
        missing: Callable[[list[ArchiveFile]], list[ArchiveFile]],
        stopped: Callable[[], bool],
        told: Callable[[], None],
        preconnected: SocketCache | None = None,
    ) -> None:
        self._schedule = schedule
        self._plan = schedule.plan
        self._new_store = new_store
        self._missing = missing
        self._stopped = stopped
        self._told = told
        self._preconnected = preconnected
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        self._place_of = cache(place_of)
        self._securing = cache(securing)
        self._watched_s = time.monotonic()
        self._all_read = False

    @cached_property
    def store(self) -> FileStore:
        """
        The store, which is made when the first requests are in flight: importing its modules takes less than
        a round trip.
        """
        wake = partial(os.eventfd_write, self._wake, 1)
        wrong = partial(self._refuse, kind="wrong")
        return self._new_store(self._stored, wrong, wake)

    def run(self, files: Iterable[ArchiveFile]) -> None:
        """
        Fetch missing files, as far as mirrors behave as usual. At the end, the remaining files wait in the
        scheduler, and nothing is in flight.

        Raises:
            BadEntry: an entry is invalid; the files before it that had arrived are stored.
            MirrorError: the destination accepts no more files.
        """
        try:
            self._open_first()
            entries = iter(files)
            while not self._stopped():
                self._read(entries)
                if self._all_read and self._plan.is_idle and not self.store.is_busy:
                    break
                if all(mirror.is_out for mirror in self._schedule.mirrors):
                    if self._all_read and not self.store.is_busy:
                        break
                else:
                    self._fill()
                    if self._is_over():
                        break
                self._turn()
        finally:
            self._close()

    def _is_over(self) -> bool:
        """Return whether this driver can do nothing more: remaining files are for the other driver."""
        return (
            self._all_read
            and not self.store.is_busy
            and not self._schedule.is_outstanding
            and not any(host.may_open for host in self._schedule.hosts)
        )

    def _is_finished(self) -> bool:
        return self._all_read and not self._schedule.waits and not self._schedule.is_outstanding

    def _read(self, entries: Iterator[ArchiveFile]) -> None:
        """Read some more wanted files from the list, and give the missing ones to the scheduler."""
        if self._all_read:
            return
        chunk = list(islice(entries, AT_ONCE))
        if not chunk:
            self._all_read = True
            # If all files have arrived already, no further event would start this work.
            self.store.work(self._is_finished())
        for each in self._missing(chunk):
            self._plan.add(each)

    def _turn(self) -> None:
        """Wait for an event, or only check for one if the list has not been read to its end."""
        events = self._poll.poll(0 if not self._all_read else WATCH_S)
        now_s = time.monotonic()
        for number, event in events:
            if number == self._wake:
                os.eventfd_read(self._wake)
                continue
            connection = self._connections.get(number)
            if connection is not None:
                self._serve(connection, event, now_s)
        # If nothing else will arrive, the last group of files need not wait to become larger.
        self.store.work(not events or self._is_finished())
        later_s = time.monotonic()
        if later_s - now_s > WATCH_S:
            self._schedule.was_away(later_s)
        if later_s - self._watched_s >= WATCH_S:
            self._watched_s = later_s
            self._watch(later_s)
            self._told()

    def _serve(self, connection: Connection, event: int, now_s: float) -> None:
        wanted_to_write = connection.wants_to_write
        try:
            if event & select.EPOLLOUT:
                connection.write()
            if event & ~select.EPOLLOUT:
                connection.read(now_s)
        except Lost as error:
            self._lost(connection, error)
        except UnsupportedResponse as error:
            # This does not count as a failure of the mirror: the Twisted driver may handle the response.
            self._leave(connection.host, str(error))
        else:
            if connection.wants_to_write != wanted_to_write and connection.sock.fileno() >= 0:
                self._poll.modify(connection.sock.fileno(), connection.mask)

    # Requests.

    def _fill(self) -> None:
        """Request waiting files, as far as windows allow."""
        now_s = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.host.is_useless(connection):
                self._drop(connection, "it had two requests at a time", forgiven=True)
        for host in list(self._schedule.hosts):
            if host.can_work:
                host.widen()
                while host.may_open:
                    self._open(host)
        self._request(self._schedule.asks(), now_s)

    def _request(self, asks: Iterable[tuple[Any, FetchJob]], now_s: float) -> None:
        touched: dict[Connection, None] = {}
        for connection, job in asks:
            connection.ask(job, now_s)
            touched[connection] = None
        for connection in touched:
            self._serve(connection, select.EPOLLOUT, now_s)

    def _open_first(self) -> None:
        """Begin to connect before the list is read, since connecting takes a round trip."""
        for mirror in self._schedule.mirrors:
            host = mirror.leads_to
            if host.can_work:
                self._open(host)

    def _open(self, host: HostSchedule) -> None:
        address = host.address
        secure = None
        try:
            begun = None if self._preconnected is None else self._preconnected.take(address)
            sock, count = begun or (begin(self._place_of(*address.place)), 0)
            if address.scheme == "https" and not hasattr(sock, "do_handshake"):
                secure = self._securing(address)
        except OSError as error:
            self._leave(host, error.strerror or str(error))
            return
        connection = Connection(self, host, sock, secure, count)
        connection.last_s = time.monotonic()
        host.opened(connection)
        self._connections[connection.sock.fileno()] = connection
        self._poll.register(connection.sock.fileno(), connection.mask)

    # Events.

    def redirected(self, connection: Connection, job: FetchJob, locations: Sequence[bytes]) -> None:
        if job.is_over:
            connection.host.put_back(job)
            return
        try:
            connection.host.mirror.redirected(job, locations)
        except RedirectRefused as error:
            self.refused(connection, job, str(error), False)

    def refused(self, connection: Connection, job: FetchJob, reason: str, wrong: bool) -> None:
        if not self._refuse(job, connection.mirror, reason, "wrong" if wrong else "refused"):
            raise Lost(reason, ours=True)

    def not_now(self, connection: Connection, job: FetchJob, reason: str) -> None:
        connection.host.mirror.failed(job, "broken", reason)
        self._leave(connection.host, reason)
        raise Lost(reason, ours=True)

    def _refuse(self, job: FetchJob, number: int, reason: str, kind: Failure) -> bool:
        """
        Record that a mirror lacks a file or has a wrong one; return the same as ``Scheduler.failed_at``.
        """
        mirror = self._schedule.mirrors[number]
        if not mirror.failed(job, kind, reason):
            return False
        if mirror.refuses_too_much:
            self._leave(mirror.own, reason)
        return True

    def _stored(self, job: FetchJob, number: int, size: int) -> None:
        self._schedule.mirrors[number].stored(job, size)

    def _lost(self, connection: Connection, error: Lost) -> None:
        host, answered = connection.host, connection.answered
        if error.announced and answered:
            host.spent = min(host.spent, max(1, answered))
        # A host that redirects everything gets no more requests, so its idle connection may end.
        left_alone = not connection.is_outstanding and bool(answered) and host.is_redirected
        forgiven = error.announced or error.ours or left_alone
        self._drop(connection, str(error), forgiven)
        if not forgiven or not answered:
            self._leave(host, str(error))

    def _drop(self, connection: Connection, reason: str, forgiven: bool) -> None:
        if connection not in connection.host.connections:
            return
        number = connection.sock.fileno()
        if self._connections.pop(number, None) is not None:
            self._poll.unregister(number)
        connection.host.lost(connection, connection.close(), reason, forgiven)

    def _leave(self, host: HostSchedule, reason: str, forgiven: bool = True) -> None:
        """Request nothing more from a mirror in this driver, nor from the hosts that it redirects to."""
        mirror = host.mirror
        mirror.is_out = True
        for connection in [
            each for each in self._connections.values() if each.host in mirror.hosts
        ]:
            self._drop(connection, reason, forgiven or connection.host is not host)
        mirror.release()

    # Timers.

    def _watch(self, now_s: float) -> None:
        for connection, reason, excused in self._schedule.tick(now_s):
            if excused:
                self._drop(connection, reason, forgiven=True)
            else:
                self._leave(connection.host, reason, forgiven=False)
        if self._all_read:
            self._request(self._schedule.steals(self._open), now_s)

    def _close(self) -> None:
        """
        Close everything; jobs in flight are put back, and idle connections are kept for the other driver.
        """
        now_s = time.monotonic()
        for mirror in self._schedule.mirrors:
            mirror.note(now_s)
        for connection in list(self._connections.values()):
            host = connection.host
            if self._preconnected is not None and not host.mirror.is_out and connection.can_go_on:
                self._preconnected.give(host.address, connection.sock, connection.count)
            else:
                self._drop(connection, "the driver has stopped", forgiven=True)
        self._schedule.release()
        self.store.close()
        self._poll.close()
        os.close(self._wake)
