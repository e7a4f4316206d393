"""The server contract over several routes to one server, such as NURLs with different keys and a fURL."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, DeferredList, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import (
    ServerError,
    ServerProtocolError,
    ServerTimeout,
    ServerUnreachable,
    WriteLost,
    WrongSwissnum,
)
from pipegrid.flow.concurrency_limits import SmallFileCapacity
from pipegrid.reactor.deferreds import Timer
from pipegrid.transport.interface import StorageServer, disconnected, expect_small_reads
from pipegrid.wire.storage_messages import LeaseSecrets, ServerIdentity

if TYPE_CHECKING:
    from pipegrid.transport.surveys import Question, Surveyed
    from pipegrid.wire.storage_messages import LeaseReleases, ReleaseAnswers

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

STAGGER_S = 0.25
"""Delay between the starts of two routes, as RFC 8305 recommends for addresses."""

TLS_S = 0.2
"""Additional time for the TLS handshake after TCP connects; with ``STAGGER_S``, less than half a second."""

LATE_S = 0.05
MOST_LATE = 4
"""Maximum number of times that a timer is set again after firing more than ``LATE_S`` late."""


class Route(NamedTuple):
    """
    One way to reach a server.

    Attributes:
        protocol, address: for display.
        open: creates a server object; called again after the route has lost a race. Its argument is a
            function that the server object calls with False when a connection of the route is established,
            and with True when the connection is usable, if the route can report these events.
    """

    protocol: str
    address: str
    open: Callable[[Callable[[bool], None]], StorageServer]


class _Call:
    """
    An operation that may have to be sent over another route.

    Attributes:
        route: the route over which the operation is sent now; None: it is not sent yet, or its caller has
            cancelled it.
    """

    __slots__ = ("asked", "is_gone", "name", "options", "positional", "result", "route")

    def __init__(
        self,
        name: str,
        positional: tuple[Any, ...],
        options: dict[str, Any],
        cancelled: Callable[[_Call], None],
    ) -> None:
        self.name = name
        self.positional = positional
        self.options = options
        self.route: Route | None = None
        self.asked: Deferred[Any] | None = None
        self.is_gone = False  # the write's bytes were released, so it cannot be repeated
        self.result: Deferred[Any] = Deferred(lambda _: cancelled(self))
        if (release := options.get("release")) is not None:
            options["release"] = partial(self._release, release)

    def _release(self, release: Callable[[], None]) -> None:
        self.is_gone, self.positional = True, ()
        release()


def _forwarded(
    method: Callable[Concatenate[Any, P], Deferred[T]],
) -> Callable[Concatenate[Any, P], Deferred[T]]:
    """Return a method of ``FailoverServer`` that calls ``method`` of the chosen route's server object."""
    name = method.__name__

    @wraps(method)
    def call(self: Any, /, *arguments: P.args, **options: P.kwargs) -> Deferred[T]:
        answer: Deferred[T] = self._call(name, arguments, options)
        return answer

    return call


class FailoverServer:
    """
    Implements ``transport.interface.StorageServer`` over the best of several routes.

    The first route is the preferred one, and all operations are sent over it from the start, before the
    routes are compared. If the preferred route is not usable after ``STAGGER_S``, or fails, the next route is
    asked for the server's version. Each further route is asked ``STAGGER_S`` after the previous one, or at
    once when one fails (RFC 8305). The preferred route is **chosen** if it is usable before another route
    answers; otherwise the first route that answers is. Operations that were sent over the preferred route
    without effect are sent again over the chosen one, in the order of the calls.

    * **No operation is carried out twice.** The preferred route loses only if it is not usable yet, so that
      no operation was sent, or if the server refuses the swissnum, which it checks first.
    * **A busy client is not a slow server.** If the timer itself is late, or TCP is connected but the TLS
      handshake is not over, the route gets more time: loading Foolscap takes longer than a handshake.
    * **After the choice.** A chosen route stays until an operation on it fails for lack of a connection.
      After that, the next call that finds no operation unanswered starts a new race.

    ``http11.dialer`` decides which addresses of one route are tried, and when.

    Args:
        routes: at least one; the preferred one first.
        chosen: called with a route each time that the route is chosen.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        routes: Sequence[Route],
        clock: IReactorTime,
        chosen: Callable[[Route], None] = lambda route: None,
    ) -> None:
        self.identity = identity
        self._clock = clock
        self._routes = list(routes)
        self._on_chosen = chosen
        self._servers: dict[Route, StorageServer] = {}
        self._chosen: Route | None = None
        self._unanswered = 0  # number of unanswered calls on the chosen route
        self._is_suspect = False
        self._calls: dict[_Call, None] = {}  # unanswered calls, while no route is chosen
        self._racing: list[Route] = []  # routes that were started and have not failed
        self._untried: list[Route] = []
        self._is_usable = False  # whether the preferred route may have sent something
        self._error: Failure | None = None  # the preferred route's, else the first failed route's
        self._timer = Timer(clock, self._time_is_over)
        self._due_s = 0.0
        self._late = 0
        self._is_connected = False
        self._leaving: set[Deferred[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<FailoverServer {self._current!r}, {len(self._calls)} calls undecided>"

    # The contract.

    version = _forwarded(StorageServer.version)
    allocate = _forwarded(StorageServer.allocate)
    write = _forwarded(StorageServer.write)
    store_whole = _forwarded(StorageServer.store_whole)
    abort = _forwarded(StorageServer.abort)
    list_shares = _forwarded(StorageServer.list_shares)
    read = _forwarded(StorageServer.read)
    stream = _forwarded(StorageServer.stream)
    add_lease = _forwarded(StorageServer.add_lease)
    advise_corrupt_share = _forwarded(StorageServer.advise_corrupt_share)
    read_test_write = _forwarded(StorageServer.read_test_write)
    list_slot = _forwarded(StorageServer.list_slot)
    read_slot = _forwarded(StorageServer.read_slot)
    read_slot_share = _forwarded(StorageServer.read_slot_share)
    add_slot_lease = _forwarded(StorageServer.add_slot_lease)
    advise_corrupt_slot_share = _forwarded(StorageServer.advise_corrupt_slot_share)

    @property
    def whole_bytes(self) -> int:
        return self._current.whole_bytes

    @property
    def small_file_capacity(self) -> SmallFileCapacity:
        return self._current.small_file_capacity

    def expect(self, objects: int) -> None:
        """Prepare for many small objects; see ``StorageServer.expect``."""
        self._current.expect(objects)

    # Members that only the servers of some protocols have.

    @property
    def last_activity_s(self) -> float:
        """When bytes last came from the server or were sent to it, by the clock."""
        activity_s = [
            getattr(each, "last_activity_s", -math.inf) for each in self._servers.values()
        ]
        return max(activity_s, default=-math.inf)

    @property
    def round_trip_s(self) -> float | None:
        """The shortest round trip measured by uploads; None if no round trip was measured."""
        round_trip_s: float | None = getattr(self._current, "round_trip_s", None)
        return round_trip_s

    @property
    def is_known_to_take_surveys(self) -> bool:
        """Whether the current route's server is known to support surveys; see ``transport.surveys``."""
        return bool(getattr(self._current, "is_known_to_take_surveys", False))

    def survey(
        self, questions: Sequence[Question]
    ) -> Deferred[list[Surveyed | ServerError] | None] | None:
        """Ask about many files in one request, if the server supports surveys; see ``transport.surveys``."""
        server: Any = self._current
        if not hasattr(server, "survey"):
            return None
        if server.is_known_to_take_surveys:
            return self._call("survey", (questions,), {})
        if self._chosen is not None:
            server.survey(
                questions
            )  # result unused: no survey is sent, but the server may be asked for its version
        return None

    def read_small(self, storage_index: bytes, share_number: int, length: int) -> Deferred[bytes]:
        """Read the beginning of a small share; see ``transport.interface.read_small``."""
        return self._call("read_small", (storage_index, share_number, length), {})

    def expect_small_reads(self) -> Deferred[None]:
        """Prepare for many small reads; see ``transport.interface.expect_small_reads``."""
        if self._chosen is not None:
            return expect_small_reads(self._current)
        # Ask for the version even if the route would have nothing to prepare: the answer shows that the route
        # works.
        return self.version().addCallback(lambda _: None)

    def lease_listed(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of a storage index; see ``transport.surveys``."""
        return self._call("lease_listed", (storage_index, lease), {})

    def release_leases(self, request: LeaseReleases) -> Deferred[ReleaseAnswers | None]:
        """Release many leases; see ``transfer.lease_release``."""
        return self._call("release_leases", (request,), {})

    def disconnect(self) -> Deferred[None]:
        """Close all connections and fail unanswered requests; fires when the connections are closed."""
        self._closed = True
        self._fail_calls(lambda: Failure(disconnected(self.identity.nickname)))
        gone = [*self._leaving, *(server.disconnect() for server in self._servers.values())]
        return DeferredList(gone).addCallback(lambda _: None)

    # Calls.

    @property
    def _current(self) -> StorageServer:
        """The server object of the chosen route, or of the preferred route if none is chosen."""
        return self._server(self._chosen or self._routes[0])

    def _server(self, route: Route) -> StorageServer:
        if route not in self._servers:
            self._servers[route] = route.open(partial(self._connected, route))
        return self._servers[route]

    def _call(
        self, name: str, positional: tuple[Any, ...], options: dict[str, Any]
    ) -> Deferred[Any]:
        if self._closed:
            return fail(disconnected(self.identity.nickname))
        if self._is_suspect and not self._unanswered:
            self._chosen, self._is_suspect = None, False
            self._drop(list(self._servers))
        if self._chosen is not None:
            self._unanswered += 1
            return _ask(self._server(self._chosen), name, positional, options).addBoth(self._note)
        call = _Call(name, positional, options, self._cancelled)
        self._calls[call] = None
        if not self._racing:
            self._begin()
        elif self._routes[0] in self._racing:
            self._ask_over(self._routes[0], call)
        return call.result

    def _note(self, result: R) -> R:
        """
        Record whether a call on the chosen route succeeded: this decides whether the next call may start a
        new race.
        """
        self._unanswered -= 1
        if not isinstance(result, Failure):
            self._is_suspect = False
        elif result.check(ServerUnreachable, ServerTimeout):
            self._is_suspect = True
        return result

    def _ask_over(self, route: Route, call: _Call) -> None:
        call.route = route
        asked = _ask(self._server(route), call.name, call.positional, call.options)
        call.asked = asked
        asked.addBoth(self._ended, call, route)

    def _ended(self, result: Any, call: _Call, route: Route) -> None:
        if call.route is not route:
            return  # the call was sent over another route meanwhile, or cancelled
        if self._chosen is not route:
            if self._is_of_route(result):
                self._failed(route, result)
                return
            self._choose(route)
        call.route = call.asked = None
        call.result.callback(self._note(result))

    def _is_of_route(self, result: Any) -> bool:
        """
        Return whether the result shows that the route cannot be used; otherwise the result is the answer to
        the call.
        """
        if not isinstance(result, Failure):
            return False
        if result.check(WrongSwissnum):
            return True
        error = result.value
        unusable = isinstance(error, (ServerUnreachable, ServerTimeout, ServerProtocolError))
        return unusable and not self._is_usable and not getattr(error, "may_have_happened", False)

    def _cancelled(self, call: _Call) -> None:
        self._calls.pop(call, None)
        if call.route is not None and call.route is self._chosen:
            self._unanswered -= 1
        asked, call.asked, call.route = call.asked, None, None
        if asked is not None:
            asked.cancel()
        if not self._calls and self._racing:
            self._end_race(
                self._routes[0]
            )  # the preferred route continues to connect, for the next call

    # The race between routes.

    def _begin(self) -> None:
        self._untried = list(self._routes)
        self._is_connected = False
        self._error = None
        self._late = 0
        self._try_next()

    def _try_next(self) -> None:
        """Start the next route, and set the timer for the route after it."""
        route = self._untried.pop(0)
        self._racing.append(route)
        if self._untried and not self._is_usable:
            self._wait(STAGGER_S)
        if route is self._routes[0]:
            for call in list(self._calls):
                if route in self._racing:
                    self._ask_over(route, call)
            return
        try:
            probe = self._server(route).version()
        except Exception:  # the route's address is invalid
            self._failed(route, Failure())
            return
        probe.addCallbacks(lambda _: self._won(route), lambda why: self._failed(route, why))

    def _wait(self, delay_s: float) -> None:
        self._timer.stop()
        self._due_s = self._clock.seconds() + delay_s
        self._timer.set(delay_s)

    def _time_is_over(self) -> None:
        if self._clock.seconds() - self._due_s > LATE_S and self._late < MOST_LATE:
            self._late += 1
            self._wait(STAGGER_S)
        elif self._is_connected and len(self._racing) == 1:
            self._is_connected = False
            self._wait(TLS_S)
        elif self._untried:
            self._try_next()

    def _connected(self, route: Route, usable: bool) -> None:
        """
        Record that a route is connected, or usable. Only the preferred route counts; once it is usable, no
        other is needed.
        """
        if route is not self._routes[0] or self._chosen is not None:
            return
        self._is_connected = True
        if usable:
            self._is_usable = True
            self._timer.stop()
            if route in self._racing:
                losers = [each for each in self._racing if each is not route]
                self._racing = [route]
                self._drop(losers)

    def _won(self, route: Route) -> None:
        """
        Choose a route that has responded before the preferred one was usable, and send the calls over it.
        """
        if route not in self._racing:
            return
        calls = list(self._calls)
        for call in calls:
            call.route = call.asked = None
        self._choose(route)
        for call in calls:
            if call.is_gone:
                call.result.errback(_lost(self.identity.nickname))
            elif not call.result.called:
                self._unanswered += 1
                self._ask_over(route, call)

    def _choose(self, route: Route) -> None:
        self._chosen = route
        self._is_suspect = False
        self._unanswered = sum(call.route is route for call in self._calls)
        self._calls = {}
        self._end_race(route)
        self._on_chosen(route)

    def _failed(self, route: Route, failure: Failure) -> None:
        """Record that a route cannot be used, and start the next one; fail the calls if no route is left."""
        if route not in self._racing:
            return
        self._racing.remove(route)
        if route is self._routes[0]:
            for call in self._calls:
                call.route = call.asked = None
        if self._error is None or route is self._routes[0]:
            self._error = failure
        self._drop([route])
        if self._untried:
            self._try_next()
        elif not self._racing:
            error = self._error
            self._fail_calls(lambda: error)

    def _end_race(self, kept: Route) -> None:
        self._timer.stop()
        losers = [each for each in self._racing if each is not kept]
        self._racing, self._untried = [], []
        self._drop(losers)

    def _drop(self, routes: Sequence[Route]) -> None:
        """Disconnect routes that no call needs."""
        for route in routes:
            if route is self._routes[0]:
                self._is_usable = False
            server = self._servers.pop(route, None)
            if server is not None:
                leaving = server.disconnect()
                self._leaving.add(leaving)
                leaving.addBoth(self._left, leaving)

    def _left(self, _: object, leaving: Deferred[None]) -> None:
        self._leaving.discard(leaving)

    def _fail_calls(self, error: Callable[[], Failure]) -> None:
        self._timer.stop()
        self._racing, self._untried = [], []
        calls, self._calls = list(self._calls), {}
        for call in calls:
            call.route = call.asked = None
        for call in calls:
            if not call.result.called:
                call.result.errback(error())


def _ask(
    server: StorageServer, name: str, positional: tuple[Any, ...], options: dict[str, Any]
) -> Deferred[Any]:
    method = getattr(server, name, None)
    # Some routes' servers do not support PipeGrid's own requests. Then the answer is None.
    if method is None:
        return succeed(None)
    asked: Deferred[Any] | None = method(*positional, **options)
    return succeed(None) if asked is None else asked


def _lost(server: str) -> WriteLost:
    return WriteLost(
        f"{server} was not reached where a write was sent; the bytes have to be made again", server
    )
