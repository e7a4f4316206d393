"""The states of a gateway's servers, for clients that poll every few seconds."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.reactor.deferreds import timeout_or
from pipegrid.transfer.results import ServerStatus
from pipegrid.tree.tree_grid import Grid
from pipegrid.wire.storage_messages import ServerIdentity

# Servers are queried when a client asks for their states, at most every ``FRESH_S``. States that are less
# than ``STALE_S`` old are returned at once. If they are older, the client waits up to ``ANSWER_S`` for
# responses, so an unreachable server delays the client by at most this time.

FRESH_S = 10.0
STALE_S = 30.0
ANSWER_S = 2.0
"""How long a client waits for the responses of servers if the known states are old."""

log = Logger()


@attrs.define
class ServerState:
    """
    The state of one server.

    Attributes:
        status: the server's last response, or why it did not respond; None: not queried yet.
        heard_s: when the server last responded, in seconds since 1970; None: never.
    """

    identity: ServerIdentity
    status: ServerStatus | None = None
    heard_s: float | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the server responded to the last query."""
        return self.status is not None and self.status.reachable

    @property
    def connection_text(self) -> str:
        """How the server is connected, or why not; clients count texts that begin with "Connected"."""
        status = self.status
        if status is None:
            return "Trying to connect"
        if not status.reachable:
            return f"Not reachable: {status.reason}"
        if status.protocol in ("local", "memory"):
            return "Connected to a storage directory of this machine"
        to = f"to {status.address} " if status.address else ""
        return f"Connected {to}via {status.protocol}"


class ServerStates:
    """
    The states of a grid's servers.

    Args:
        now: returns the time in seconds since 1970.
    """

    def __init__(self, grid: Grid, clock: IReactorTime, now: Callable[[], float]) -> None:
        self._grid = grid
        self._clock = clock
        self._now = now
        self._states: dict[str, ServerState] = {}
        self._asked_s = float("-inf")
        self._asking: Deferred[None] | None = None

    def latest(self) -> list[ServerState]:
        """Return the known states without a query, sorted by the servers' names."""
        known = {identity.server_id for identity in self._grid.servers}
        for identity in self._grid.servers:
            self._states.setdefault(identity.server_id, ServerState(identity))
        states = [
            state
            for server_id, state in self._states.items()
            if server_id in known or state.status is not None
        ]
        return sorted(states, key=lambda state: (state.identity.nickname, state.identity.server_id))

    async def current(self) -> list[ServerState]:
        """Return the states; if they are old, wait up to ``ANSWER_S`` for responses of the servers."""
        age_s = self._clock.seconds() - self._asked_s
        if age_s >= STALE_S:
            self._states.clear()
        if age_s >= FRESH_S:
            self._ask()
        if self._asking is not None and age_s >= STALE_S:
            waiting: Deferred[None] = Deferred()
            self._asking.addBoth(lambda _: None if waiting.called else waiting.callback(None))
            await timeout_or(waiting, ANSWER_S, self._clock)
        return self.latest()

    def close(self) -> None:
        """Cancel the running queries of servers."""
        if self._asking is not None:
            self._asking.cancel()

    def _ask(self) -> None:
        if self._asking is not None:
            return
        self._asked_s = self._clock.seconds()
        asking = self._asking = self._grid.ask_servers(self._told)
        asking.addErrback(_not_asked)
        asking.addBoth(self._ended)

    def _ended(self, _result: object) -> None:
        self._asking = None

    def _told(self, status: ServerStatus) -> None:
        identity = ServerIdentity(status.server_id, status.nickname, b"", b"")
        state = self._states.setdefault(status.server_id, ServerState(identity))
        state.status = status
        if status.reachable:
            state.heard_s = self._now()


def _not_asked(failure: Failure) -> None:
    if not failure.check(CancelledError):
        log.failure("servers could not be asked how they are", failure)
