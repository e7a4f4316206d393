"""One mirror in a sprint: its connections, how much it may be asked, and how it does."""

from __future__ import annotations

from collections.abc import Callable

from pipegrid.mirror.address import Address, head_tail
from pipegrid.mirror.report import Tally
from pipegrid.mirror.sprint.connection import Connection
from pipegrid.mirror.sprint.dialling import BegunConnections, securing
from pipegrid.mirror.sprint.headstart import begin, place_of
from pipegrid.mirror.watch import GivingRate

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from typing import Any

    from pipegrid.mirror.sprint.connection import SprintRunner

QUOTA = 1000
"""Requests on one connection: nginx closes it after so many."""

FIRST_WINDOW_BYTES = 1 << 20
MAX_WINDOW_BYTES = 16 << 20


class Entrant:
    """
    One mirror, in the sprint.

    Args:
        ahead: has begun to connect, perhaps.

    Attributes:
        connections: its connections.
        is_out: it is asked for nothing any more.
        spent: how many requests a connection is good for.
        window_bytes: how much may be owed on each.
    """

    def __init__(
        self, number: int, address: Address, tally: Tally, ahead: BegunConnections | None = None
    ) -> None:
        self.number = number
        self.address = address
        self.tally = tally
        self.connections: list[Connection] = []
        self.is_out = False
        self.spent = QUOTA
        self.window_bytes = FIRST_WINDOW_BYTES
        self.gone_bytes = 0
        self.doubled_at_bytes = 0
        self.pace = GivingRate()
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
        return Connection(runner, self.number, sock, secure, count)
