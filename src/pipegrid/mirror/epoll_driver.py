"""The driver that moves bytes for the scheduler on epoll, without a reactor."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, islice

from pipegrid.mirror.archive_file import ArchiveFile
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.epoll_connection import Connection, Lost
from pipegrid.mirror.host_queues import HostQueue, MirrorHosts
from pipegrid.mirror.mirror_http import (
    Address,
    RedirectRefused,
    SocketCache,
    UnsupportedResponse,
    head_tail,
    securing,
)
from pipegrid.mirror.preconnect_mirrors import begin, place_of
from pipegrid.mirror.scheduler import (
    FetchJob,
    MirrorStanding,
    ReceiveRate,
    Scheduler,
    Tally,
    choose_steal,
    has_stalled,
)

TYPE_CHECKING = False  # as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from typing import Any

    from pipegrid.disk.commit import Policy
    from pipegrid.mirror.epoll_connection import SprintRunner
    from pipegrid.mirror.file_store import SprintStore
    from pipegrid.mirror.scheduler import Failure


# One mirror in a sprint: its connections, how much it may be asked, and how it does.


QUOTA = 1000
"""Requests on one connection: nginx closes it after so many."""

FIRST_REQUESTS = 256
"""On one connection before its first response: it may redirect all of them."""

FIRST_WINDOW_BYTES = 1 << 20
MAX_WINDOW_BYTES = 16 << 20


class EpollMirror:
    """
    One mirror, in the sprint, or one host that it redirects to.

    Args:
        number: of the mirror in the plan.
        index: of this among the driver's.
        queue: what it is asked for.
        ahead: has begun to connect, perhaps.

    Attributes:
        connections: its connections.
        is_out: it is asked for nothing any more.
        spent: how many requests a connection is good for.
        window_bytes: how much may be owed on each.
    """

    def __init__(
        self,
        number: int,
        address: Address,
        tally: Tally,
        ahead: SocketCache | None = None,
        *,
        queue: HostQueue | None = None,
        index: int | None = None,
    ) -> None:
        self.number = number
        self.index = number if index is None else index
        self.queue = queue or MirrorHosts(Scheduler(1), number, address).own
        self.address = address
        self.tally = tally
        self.connections: list[Connection] = []
        self.is_out = False
        self.spent = QUOTA
        self.window_bytes = FIRST_WINDOW_BYTES
        self.gone_bytes = 0
        self.doubled_at_bytes = 0
        self.pace = ReceiveRate()
        self.busy_since_s: float | None = None
        self.tail = head_tail(address)
        self.refused = 0
        self._ahead = ahead
        self._place: tuple[int, Any] | None = None
        self._secure: Callable[[Any], Any] | None = None

    @property
    def owed_bytes(self) -> int:
        """What was asked and has not come."""
        return sum(connection.owed_bytes for connection in self.connections)

    @property
    def received_bytes(self) -> int:
        """What has come, also of files that are not whole yet."""
        return self.gone_bytes + sum(connection.received_bytes for connection in self.connections)

    def widen(self) -> None:
        """Double the window if as much has come."""
        received = self.received_bytes
        if (
            self.window_bytes < MAX_WINDOW_BYTES
            and received - self.doubled_at_bytes >= self.window_bytes
        ):
            self.doubled_at_bytes = received
            self.window_bytes *= 2

    def connect(self, runner: SprintRunner) -> Connection:
        """
        Begin to connect.

        Raises:
            OSError: that cannot be begun.
        """
        address = self.address
        begun = None if self._ahead is None else self._ahead.take(address)
        if begun is None:
            if self._place is None:
                self._place = place_of(*address.place)
            begun = begin(self._place), 0
        sock, count = begun
        secure = None
        if address.scheme == "https" and not hasattr(sock, "do_handshake"):
            secure = self._secure = self._secure or securing(address)
        return Connection(runner, self.number, sock, secure, count, self.index)


# The way of nearly all files: fetched from mirrors that do what they should, with nothing around it.
#
# What a mirror costs is what each file costs, a hundred thousand times. So as long as all goes well, no
# reactor, no Deferred and no object for each request or header is involved: sockets are read into pages,
# answers are cut out of these and stored. A mirror that does anything else (an answer without a length, a
# lost connection, silence, "not now") has lost its part in the sprint, and others get what it was asked for.
#
# What is left in the end waits in the plan, for ``mirror.Mirror`` and its ``source``: these know all the
# ways of mirrors, and begin where the sprint stopped, with all that it has learnt. So a sprint may give up
# whenever it likes: that costs time, and loses nothing.
#
# **How much is asked.** A mirror that is alone is asked for as much as its connections may carry: requests
# wait in its socket at no cost, and nobody else could have had them. Of several each has a window a
# connection, which doubles whenever as much has come.

# as ``typing`` has it, which is not to be waited for


ALONE_WINDOW_BYTES = 256 << 20
WATCH_S = 0.1
AT_ONCE = 256
ALONE_STALL_S = 5.0
CONNECT_S = 5.0
MAX_REFUSED = 64
"""Files that a mirror may lack before others look after what it does."""

Missing = Callable[[list[ArchiveFile]], list[ArchiveFile]]


class FetchContext:
    """
    What all drivers of one run fetch from, and where they store it.

    Args:
        addresses: of the mirrors, as they are numbered in the plan.
        connections: to each mirror at most; those that will be asked for nothing more do not count.
        missing: returns which of some files are not present yet.
        staged: files are stored where no reader sees them.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        destination: Destination,
        policy: Policy,
        connections: int,
        missing: Missing,
        staged: bool = False,
    ) -> None:
        self.addresses = addresses
        self.destination = destination
        self.policy = policy
        self.connections = connections
        self.missing = missing
        self.staged = staged


class EpollDriver:
    """
    Args:
        tallies: of the mirrors, as they are numbered in the plan.
        stopped: whether all of it is to end.
        told: called a few times a second.
        ahead: has begun to connect to some of them, and is given what is not needed any more.
    """

    def __init__(
        self,
        plan: Scheduler,
        tallies: Sequence[Tally],
        context: FetchContext,
        stopped: Callable[[], bool] = lambda: False,
        told: Callable[[], None] = lambda: None,
        ahead: SocketCache | None = None,
    ) -> None:
        self._plan = plan
        self._most_connections = context.connections
        self._missing = context.missing
        self._stopped = stopped
        self._told = told
        self._ahead = ahead
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        # Those of the mirrors come first, in their order; then those that mirrors redirect to.
        self._mirrors = [
            MirrorHosts(plan, number, address, partial(self._add_host, tally))
            for number, (address, tally) in enumerate(zip(context.addresses, tallies, strict=True))
        ]
        self._entrants: list[EpollMirror] = []
        for hosts, tally in zip(self._mirrors, tallies, strict=True):
            self._add_host(tally, hosts.own)
        self._watched_s = time.monotonic()
        self._all_read = False
        self._to_store = context.destination, context.policy, context.staged

    def _add_host(self, tally: Tally, queue: HostQueue) -> None:
        entrant = EpollMirror(
            queue.hosts.number,
            queue.address,
            tally,
            self._ahead,
            queue=queue,
            index=len(self._entrants),
        )
        entrant.is_out = not queue.is_own and self._entrants[entrant.number].is_out
        if len(self._mirrors) == 1:
            entrant.window_bytes = ALONE_WINDOW_BYTES
        self._entrants.append(entrant)

    def _hosts_of(self, number: int) -> list[EpollMirror]:
        """Return all that are asked in the name of a mirror, itself first."""
        own = self._entrants[number]
        if len(self._entrants) == len(self._mirrors):
            return [own]
        others = self._entrants[len(self._mirrors) :]
        return [own, *(each for each in others if each.number == number)]

    @property
    def _waits(self) -> bool:
        """Whether anything waits to be asked for, of whichever host."""
        return self._plan.waits or any(hosts.queued for hosts in self._mirrors)

    @cached_property
    def store(self) -> SprintStore:
        """Made when the first requests are on their way: there is a round trip to load what it needs."""
        from pipegrid.mirror.file_store import SprintStore

        wake = partial(os.eventfd_write, self._wake, 1)
        return SprintStore(*self._to_store, self._stored, self._wrong, wake)

    def run(self, files: Iterable[ArchiveFile]) -> None:
        """
        Fetch what is missing, as far as all goes well; the rest waits in the plan, in which nothing is
        under way any more.

        Raises:
            BadEntry: an entry is none; what was there before has been looked after, as far as it had come.
            MirrorError: the destination can take nothing any more.
        """
        try:
            self._open_first()
            entries = iter(files)
            while not self._stopped():
                self._read(entries)
                if self._all_read and self._plan.is_idle and not self.store.is_busy:
                    break
                if all(entrant.is_out for entrant in self._entrants):
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
        """Whether nobody here does anything any more: what still waits is for others to fetch."""
        return (
            self._all_read
            and not self.store.is_busy
            and not self._is_owed()
            and not any(self._may_open(entrant) for entrant in self._entrants if not entrant.is_out)
        )

    def _owed_nothing(self) -> bool:
        return self._all_read and not self._waits and not self._is_owed()

    def _is_owed(self) -> bool:
        return any(connection.is_owed for connection in self._connections.values())

    def _read(self, entries: Iterator[ArchiveFile]) -> None:
        """Take some more of what is wanted."""
        if self._all_read:
            return
        chunk = list(islice(entries, AT_ONCE))
        if not chunk:
            self._all_read = True
            self.store.work(self._owed_nothing())  # perhaps all has come: then nothing wakes us
        for each in self._missing(chunk):
            self._plan.add(each)

    def _turn(self) -> None:
        """Wait until something happens, or look whether it has if there is more to do."""
        events = self._poll.poll(0 if not self._all_read else WATCH_S)
        now_s = time.monotonic()
        for number, event in events:
            if number == self._wake:
                os.eventfd_read(self._wake)
                continue
            connection = self._connections.get(number)
            if connection is not None:
                self._serve(connection, event, now_s)
        # When nothing more is to come, the last group has nothing to wait for.
        self.store.work(not events or self._owed_nothing())
        later_s = time.monotonic()
        if later_s - now_s > WATCH_S:  # what we could not read was not the mirrors' silence
            for connection in self._connections.values():
                connection.last_s = later_s
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
        except (
            UnsupportedResponse
        ) as error:  # nothing broke: it does what a sprint does not, and others may
            self._leave(self._entrants[connection.host], str(error))
        else:
            if connection.wants_to_write != wanted_to_write and connection.sock.fileno() >= 0:
                self._poll.modify(connection.sock.fileno(), connection.mask)

    # Asking.

    def _fill(self) -> None:
        """Ask for what waits, as far as windows allow."""
        now_s = time.monotonic()
        touched: dict[Connection, None] = {}
        for entrant in list(self._entrants):
            if not entrant.is_out:
                entrant.widen()
                self._drop_pipelined(entrant)
                while self._may_open(entrant):
                    self._open(entrant)
        going = True
        while going and self._waits:
            going = False
            for entrant in list(self._entrants):
                connection = self._free_connection(entrant)
                errand = None if connection is None else entrant.queue.next(entrant.number)
                if connection is not None and errand is not None:
                    self._ask(entrant, connection, errand, now_s)
                    touched[connection] = None
                    going = True
        for connection in touched:
            self._serve(connection, select.EPOLLOUT, now_s)

    def _ask(
        self, entrant: EpollMirror, connection: Connection, errand: FetchJob, now_s: float
    ) -> None:
        if not connection.asked:
            connection.last_s = max(connection.last_s, now_s)
        own = self._entrants[entrant.number]
        if own.busy_since_s is None:
            own.busy_since_s = now_s
        target = entrant.queue.hosts.request_target(errand)
        connection.ask(errand, b"GET %s%s" % (target, entrant.tail))

    def _free_connection(self, entrant: EpollMirror) -> Connection | None:
        """Return the connection that owes least, if it has room."""
        best: Connection | None = None
        serial = self._plan.is_serial(entrant.number)
        for connection in entrant.connections:
            if serial and (connection.is_owed or connection.pipelined):
                continue
            if (
                connection.count < entrant.spent
                and connection.owed_bytes < entrant.window_bytes
                and (connection.count < FIRST_REQUESTS or connection.answered)
                and (best is None or connection.owed_bytes < best.owed_bytes)
            ):
                best = connection
        return best

    def _may_open(self, entrant: EpollMirror) -> bool:
        serial = self._plan.is_serial(entrant.number)
        usable = sum(
            connection.count < entrant.spent and not (serial and connection.pipelined)
            for connection in entrant.connections
        )
        return (
            not entrant.is_out
            and entrant.queue.waits
            and usable < self._most_connections
            and len(entrant.connections) < 2 * self._most_connections
        )

    def _drop_pipelined(self, entrant: EpollMirror) -> None:
        """Let go of what a serial mirror is asked on no more, when nothing is to come on it."""
        if self._plan.is_serial(entrant.number):
            for connection in list(entrant.connections):
                if connection.pipelined and not connection.is_owed:
                    self._drop(connection, "it had two requests at a time", broken=False)

    def _open_first(self) -> None:
        """Connect before the list is read: that takes a round trip."""
        for hosts in self._mirrors:
            queue = hosts.leads_to
            entrant = next(each for each in self._entrants if each.queue is queue)
            if not entrant.is_out:
                self._open(entrant)

    def _open(self, entrant: EpollMirror) -> None:
        try:
            connection = entrant.connect(self)
        except OSError as error:
            self._leave(entrant, error.strerror or str(error))
            return
        connection.last_s = time.monotonic()
        entrant.connections.append(connection)
        entrant.tally.connections += 1
        self._connections[connection.sock.fileno()] = connection
        self._poll.register(connection.sock.fileno(), connection.mask)

    # What happens.

    def unwanted(self, connection: Connection, errand: FetchJob) -> None:
        self._entrants[connection.host].queue.put_back(errand, connection.mirror)

    def redirected(
        self, connection: Connection, errand: FetchJob, locations: Sequence[bytes]
    ) -> None:
        entrant = self._entrants[connection.host]
        if errand.is_over:
            entrant.queue.put_back(errand, connection.mirror)
            return
        try:
            entrant.queue.hosts.redirected(errand, locations)
        except RedirectRefused as error:
            self.refused(connection, errand, str(error), False)

    def refused(self, connection: Connection, errand: FetchJob, reason: str, wrong: bool) -> None:
        if not self._refuse(errand, connection.mirror, reason, "wrong" if wrong else "refused"):
            raise Lost(reason, ours=True)

    def not_now(self, connection: Connection, errand: FetchJob, reason: str) -> None:
        entrant = self._entrants[connection.host]
        entrant.tally.broken += 1
        entrant.queue.failed_at(errand, connection.mirror, "broken", reason)
        self._leave(entrant, reason)
        raise Lost(reason, ours=True)

    def _wrong(self, errand: FetchJob, mirror: int, reason: str) -> None:
        self._refuse(errand, mirror, reason, "wrong")

    def _refuse(self, errand: FetchJob, mirror: int, reason: str, kind: Failure) -> bool:
        """Note that a mirror does not give what it should; False: that is only a doubt."""
        entrant = self._entrants[mirror]
        if not entrant.queue.failed_at(errand, mirror, kind, reason):
            return False
        entrant.tally.refused += 1
        entrant.refused += 1
        if entrant.refused > max(MAX_REFUSED, entrant.tally.files):
            self._leave(entrant, reason)
        return True

    def _stored(self, errand: FetchJob, mirror: int, size: int) -> None:
        entrant = self._entrants[mirror]
        entrant.tally.received_bytes += size
        if entrant.queue.done(errand, mirror, size):
            entrant.tally.files += 1

    def _lost(self, connection: Connection, error: Lost) -> None:
        entrant = self._entrants[connection.host]
        answered = connection.answered
        if error.announced and answered:
            entrant.spent = min(entrant.spent, max(1, answered))
        # What nothing is asked on, for another host is asked now, may end whenever it likes.
        left_alone = not connection.is_owed and bool(answered) and entrant.queue.is_redirected
        forgiven = error.announced or error.ours or left_alone
        self._drop(connection, str(error), broken=not forgiven)
        if not forgiven or not answered:
            self._leave(entrant, str(error))

    def _drop(self, connection: Connection, reason: str, broken: bool) -> None:
        """Let go of a connection; the first that it owes is the one whose answer was due."""
        entrant = self._entrants[connection.host]
        if connection not in entrant.connections:
            return
        entrant.connections.remove(connection)
        entrant.gone_bytes += connection.received_bytes
        number = connection.sock.fileno()
        if self._connections.pop(number, None) is not None:
            self._poll.unregister(number)
        for errand in connection.close():
            if broken and not errand.is_over:
                broken = False
                entrant.tally.broken += 1
                entrant.queue.failed_at(errand, entrant.number, "broken", reason)
            else:
                entrant.queue.put_back(errand, entrant.number)

    def _leave(self, entrant: EpollMirror, reason: str, broken: bool = False) -> None:
        """This mirror has lost its part in the sprint, with all hosts that it redirects to."""
        for each in self._hosts_of(entrant.number):
            each.is_out = True
            for connection in list(each.connections):
                self._drop(connection, reason, broken and each is entrant)
        entrant.queue.hosts.release()

    # What is watched.

    def _watch(self, now_s: float) -> None:
        going = [entrant for entrant in self._entrants if not entrant.is_out]
        alone = len({each.number for each in going}) == 1
        for entrant in going:
            if entrant.queue.is_own:
                hosts = self._hosts_of(entrant.number)
                owed = sum(each.owed_bytes for each in hosts)
                received = sum(each.received_bytes for each in hosts)
                entrant.pace.note(now_s, received, owed > 0)
                self._note_busy(entrant, now_s, bool(owed))
            for connection in list(entrant.connections):
                idle_s = now_s - connection.last_s
                if not connection.is_owed:
                    continue
                if connection.pipelined and has_stalled(idle_s, not alone, pipelined=True):
                    # Perhaps it answers only the first of several requests. Alone it shows whether it does.
                    self._plan.becomes_serial(entrant.number)
                    if alone:
                        self._drop(connection, f"no byte came for {idle_s:.1f} s", broken=False)
                        continue
                if idle_s > ALONE_STALL_S if alone else has_stalled(idle_s, True):
                    self._leave(entrant, f"no byte came for {idle_s:.1f} s", broken=True)
                    break
        if self._all_read and not self._waits and not alone and going:
            self._steal(now_s)

    def _note_busy(self, entrant: EpollMirror, now_s: float, owes: bool) -> None:
        if entrant.busy_since_s is not None:
            entrant.tally.busy_s += now_s - entrant.busy_since_s
        entrant.busy_since_s = now_s if owes else None

    def _steal(self, now_s: float) -> None:
        """Who has finished takes over from who would finish last; whoever is first has given it."""
        move = choose_steal(
            [
                MirrorStanding(
                    each.number,
                    sum(host.owed_bytes for host in self._hosts_of(each.number)),
                    each.pace.bytes_per_s,
                    not each.is_out,
                )
                for each in self._entrants[: len(self._mirrors)]
            ]
        )
        if move is None:
            return
        thief, left_bytes = self._entrants[move.thief], move.size_bytes
        touched: set[Connection] = set()
        connections = [
            connection
            for connection in thief.connections
            if connection.count < thief.spent
            and not (
                self._plan.is_serial(move.thief) and (connection.pipelined or connection.is_owed)
            )
        ]
        if not connections:
            if len(thief.connections) < 2 * self._most_connections:
                self._open(thief)
            return
        victims = (each.connections for each in self._hosts_of(move.victim))
        for victim in chain.from_iterable(victims):
            for errand in reversed(victim.unanswered):
                if left_bytes <= 0 or not connections:
                    break
                if isinstance(errand, FetchJob) and self._plan.copy(errand, thief.number):
                    connection = min(connections, key=lambda each: each.owed_bytes)
                    self._ask(thief, connection, errand, now_s)
                    touched.add(connection)
                    if self._plan.is_serial(move.thief):
                        connections.remove(connection)
                    left_bytes -= errand.size_bytes
        for connection in touched:
            self._serve(connection, select.EPOLLOUT, now_s)

    def _close(self) -> None:
        """End everything; what is under way waits again, and idle connections are left to others."""
        now_s = time.monotonic()
        for entrant in self._entrants:
            if entrant.queue.is_own:
                self._note_busy(entrant, now_s, False)
            for connection in list(entrant.connections):
                if self._ahead is not None and not entrant.is_out and connection.can_go_on:
                    self._ahead.give(entrant.address, connection.sock, connection.count)
                    continue
                self._drop(connection, "the driver has stopped", broken=False)
        for hosts in self._mirrors:
            hosts.release()
        self.store.close()
        self._poll.close()
        os.close(self._wake)
