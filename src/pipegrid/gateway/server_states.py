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

# Servers are queried when a client asks, at most every ``FRESH_S``. Recent states are returned at once; for
# older ones the servers get ``ANSWER_S`` to respond, so an unreachable server delays a client by no more than
# that.

FRESH_S = 10.0
STALE_S = 30.0
ANSWER_S = 2.0
"""How long a client waits for servers that have not responded recently."""

log = Logger()


@attrs.define
class ServerState:
    """
    One server.

    Attributes:
        status: its last response, or why there is none; None: not queried yet.
        heard_s: when it last responded, in seconds since 1970; None: never.
    """

    identity: ServerIdentity
    status: ServerStatus | None = None
    heard_s: float | None = None

    @property
    def is_connected(self) -> bool:
        """Whether it responded to the last query."""
        return self.status is not None and self.status.reachable

    @property
    def connection_text(self) -> str:
        """How it is reached, or why not; clients count texts that begin with "Connected"."""
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
    The states of the servers of a grid.

    Args:
        now: seconds since 1970.
    """

    def __init__(self, grid: Grid, clock: IReactorTime, now: Callable[[], float]) -> None:
        self._grid = grid
        self._clock = clock
        self._now = now
        self._states: dict[str, ServerState] = {}
        self._asked_s = float("-inf")
        self._asking: Deferred[None] | None = None

    def latest(self) -> list[ServerState]:
        """Return the known states, without a query; servers in the order of their names."""
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
        """Return the states, after a short wait for servers that have not responded recently."""
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
        """Cancel the queries that servers have not answered."""
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
