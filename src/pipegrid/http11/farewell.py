"""
Letting a transport go: politely while that is quick, else at once; and telling when it is gone.

Politely, what was written still arrives and TLS says its last word. A server that keeps the connection all
the same is not waited for longer than ``patience_s``.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from pipegrid.reactor.together import Waiters


class Farewell:
    """The end of one connection's transport: ``say`` asks for it, ``gone`` says that it has come."""

    def __init__(self, clock: IReactorTime, patience_s: float) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._call: IDelayedCall | None = None
        self._waiting: Waiters[None] = Waiters()
        self._gone = False

    def when_gone(self) -> Deferred[None]:
        """Fires once the transport is gone, however it ended."""
        return succeed(None) if self._gone else self._waiting.wait()

    def say(self, transport: Any, politely: bool) -> None:
        """Let it go; ``gone`` follows."""
        if politely:
            self._call = self._clock.callLater(self._patience_s, self._abort, transport)
            transport.loseConnection()
        else:
            self._abort(transport)

    def gone(self) -> None:
        """The transport is gone, as its connection was told: fire every ``when_gone``."""
        self._gone = True
        call, self._call = self._call, None
        if call is not None and call.active():
            call.cancel()
        self._waiting.fire(None)

    def _abort(self, transport: Any) -> None:
        getattr(transport, "abortConnection", transport.loseConnection)()
