"""
The connection to one Foolscap server: made when it is needed, watched while answers are owed, and given up.

Foolscap's errors end here: what comes out of ``call`` is an answer, or an error of the contract.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from foolscap.api import DeadReferenceError, Referenceable, Violation
from foolscap.call import CopiedFailure
from foolscap.tokens import BananaError
from twisted.internet.defer import CancelledError, Deferred, TimeoutError, fail, succeed
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    NoSuchShare,
    ServerError,
    ServerProtocolError,
    ServerRefused,
    ServerTimeout,
    ServerUnreachable,
    WrongSecret,
)
from pipegrid.reactor.alarm import Alarm
from pipegrid.reactor.together import Waiters
from pipegrid.transport.interface import disconnected
from pipegrid.transport.sentences import excerpt, nonsense, wrong_swissnum
from pipegrid.wire.allowance import TooMuch
from pipegrid.wire.calling import call_remote
from pipegrid.wire.foolscap import RIStorageServer

MAX_SHARE_NUMBER = 255

READ_PIECE_BYTES = 16 << 20
"""Longer reads are several calls: a message is in memory as a whole, at both ends."""

SLOWEST_BYTES_PER_S = 2000
"""
Of a line that is still waited for, as over HTTPS: the answer to a message of megabytes comes when all of it
has arrived, or comes as a whole itself; until then nothing is heard.
"""

_excerpt = partial(excerpt, characters=160)

# By the last part of an exception's name: that of our own servers, and those of Tahoe-LAFS 1.20.0.
_MEANINGS: dict[str, type[ServerRefused]] = {
    "NoSuchShare": NoSuchShare,
    "ConflictingWrite": ConflictingWrite,
    "ConflictingWriteError": ConflictingWrite,
    "NoSpace": NoSpace,
    "WrongSecret": WrongSecret,
    "BadWriteEnablerError": WrongSecret,
}


class Connector(Protocol):
    """Makes connections to one server; ``tub.TubConnector`` is the real one."""

    def connect(self) -> Deferred[Any]:
        """Fire with a remote reference to the storage server, over a connection that may be new."""

    def close(self) -> Deferred[Any]:
        """Cut the connection, and give up connecting; fires when all is gone."""


class FoolscapLink:
    """
    One server's connection, over all its lives.

    Args:
        server: what a person calls it.
        on_lost: called whenever a connection is lost: what referred to the server is worthless then.

    Attributes:
        canary: what shows the server that we are still there.
        heard_s: when it last answered, or began to owe, by the clock.
    """

    def __init__(
        self,
        connector: Connector,
        server: str,
        clock: IReactorTime,
        connect_timeout_s: float,
        timeout_s: float,
        on_lost: Callable[[], None],
    ) -> None:
        self.canary = Referenceable()
        self._connector = connector
        self._server = server
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._storage: Any = None
        self._connecting: Deferred[Any] | None = None
        self._waiting: Waiters[Any] = Waiters()
        self._owed = self._owed_bytes = 0
        self.heard_s = -math.inf
        self._timer = Alarm(clock, self._look)
        self._closed = False
        self._reason: ServerError | None = None  # for which we ended the last connection, if we did

    def __repr__(self) -> str:
        state = "closed" if self._closed else "up" if self._storage is not None else "down"
        return f"<FoolscapLink to {self._server!r} {state}, {self._owed} unanswered>"

    @property
    def is_up(self) -> bool:
        """Whether there is a connection."""
        return self._storage is not None

    def storage(self) -> Deferred[Any]:
        """Fire with the remote reference to the server; connects if need be, for all who ask at once."""
        if self._closed:
            return fail(disconnected(self._server))
        if self._storage is not None:
            return succeed(self._storage)
        waiting = self._waiting.wait()
        if self._connecting is None:
            self._connecting = self._connector.connect()
            self._connecting.addTimeout(self._connect_timeout_s, self._clock)
            self._connecting.addCallbacks(self._connected, self._failed)
        return waiting

    def call(
        self, reference: Any, method: str, *arguments: Any, share_bytes: int = 0
    ) -> Deferred[Any]:
        """
        Call a method of something at the server; fails with ``ServerError``s only.

        Args:
            share_bytes: of share data in it, or in its answer, if these may be many: it may take longer by
                what they need.
        """
        self._owe(share_bytes)
        answer = call_remote(reference, method, *arguments)
        answer.addBoth(self._answered, share_bytes)
        return answer.addErrback(self._explained, method)

    def close(self) -> Deferred[Any]:
        """Give up the connection for good; fires when it is gone. What is unanswered fails."""
        self._closed = True
        self._drop(ServerUnreachable(f"{self._server} was disconnected here", self._server, True))
        connecting = self._connecting
        if connecting is not None:
            connecting.cancel()
        return self._connector.close()

    # Connecting.

    def _connected(self, storage: Any) -> None:
        self._connecting = None
        # Foolscap holds answers to what is declared only where the other end names the interface itself.
        tracker = getattr(storage, "tracker", None)  # what was asked for may be a number, or a list
        if tracker is None or tracker.interface is not RIStorageServer:
            self._waiting.fail(_no_storage(self._server))
            if tracker is not None:
                _end_connection(storage)
            return
        self._storage = storage
        self._reason = None
        storage.notifyOnDisconnect(self._lost, storage)
        self._waiting.fire(storage)

    def _failed(self, failure: Failure) -> None:
        self._connecting = None
        self._waiting.fail(self._connection_error(failure))

    def _connection_error(self, failure: Failure) -> ServerError:
        server = self._server
        if isinstance(failure, CopiedFailure):
            return wrong_swissnum(server, "fURL")
        if failure.check(CancelledError):
            return ServerUnreachable(f"{server} was disconnected here", server)
        if "unknown TubID" in str(failure.value):
            return ServerUnreachable(
                f"what answers in the place of {server} is another server, with another key; find"
                " out where it is now, and copy its fURL anew",
                server,
            )
        why = _excerpt(str(failure.value)).removesuffix(".") or type(failure.value).__name__
        if failure.check(TimeoutError):  # which says how it came about, to nobody's use
            why = f"it was not usable after {self._connect_timeout_s:g} s"
        elif failure.check(BananaError) and not failure.check(TooMuch):
            why = "what answers there does not speak Foolscap"  # Python's words have its classes
        return ServerUnreachable(
            f"cannot connect to {server} over Foolscap: {why}; is it running, and is this its fURL?",
            server,
        )

    def _lost(self, storage: Any) -> None:
        if self._storage is storage:
            self._storage = None
            self._on_lost()

    def _drop(self, error: ServerError) -> None:
        """End this connection: all that is unanswered fails with the error."""
        storage = self._storage
        if storage is not None:
            self._reason = error
            self._lost(storage)
            _end_connection(storage)

    # Patience.

    def _owe(self, share_bytes: int) -> None:
        self._owed += 1
        self._owed_bytes += share_bytes
        if self._owed == 1:
            self.heard_s = self._clock.seconds()
            self._timer.set(self._timeout_s)

    def _answered(self, result: Any, share_bytes: int) -> Any:
        self._owed -= 1
        self._owed_bytes -= share_bytes
        self.heard_s = self._clock.seconds()
        if not self._owed:
            self._timer.stop()
        return result

    def _look(self) -> None:
        patience_s = self._timeout_s + self._owed_bytes / SLOWEST_BYTES_PER_S
        left_s = self.heard_s + patience_s - self._clock.seconds()
        if left_s > 0:
            self._timer.set(left_s)
            return
        self._drop(
            ServerTimeout(
                f"{self._server} has not answered for {self._timeout_s:g} s; try again later",
                self._server,
                may_have_happened=True,
            )
        )

    # Errors.

    def _explained(self, failure: Failure, method: str) -> Failure:
        return Failure(self._explain(failure, method))

    def _explain(self, failure: Failure, method: str) -> Exception:
        server = self._server
        error: Any = failure.value
        if isinstance(failure, CopiedFailure):
            names = [name.rpartition(".")[2] for name in failure.parents]
            text = _excerpt(str(error))
            for name in names:
                if name in _MEANINGS:
                    return _MEANINGS[name](f"{server} refused {method}: {text}", server)
            return ServerRefused(
                f"{server} failed at {method}: {text}; its operator can see why", server, True
            )
        if isinstance(error, (ServerError, CancelledError)):
            return error
        if failure.check(Violation):
            return ServerProtocolError(
                f"{server} and we do not agree about {method}: {_excerpt(str(error))}", server, True
            )
        if failure.check(BananaError):
            return ServerProtocolError(
                f"{server} was disconnected here: {_excerpt(str(error))}; is it a storage server?",
                server,
                True,
            )
        if failure.check(DeadReferenceError, ConnectionDone, ConnectionLost):
            return self._reason or ServerUnreachable(
                f"the connection to {server} was lost; try again", server, may_have_happened=True
            )
        return ServerUnreachable(
            f"{server} did not answer {method}: {_excerpt(str(error)) or type(error).__name__}",
            server,
            may_have_happened=True,
        )


def _no_storage(server: str) -> ServerProtocolError:
    return ServerProtocolError(
        f"what answers in the place of {server} does not say that it stores shares; copy the fURL of a"
        " storage server",
        server,
    )


def _end_connection(storage: Any) -> None:
    # A tub has no way to let go of one connection; its broker has. The reason that it is given also goes to
    # calls of Foolscap's own, which know no other kind.
    storage.tracker.broker.shutdown(Failure(ConnectionDone()))


def check_numbers(server: str, question: str, numbers: Any) -> None:
    """Raise ServerProtocolError unless all are numbers of shares."""
    if not all(0 <= number <= MAX_SHARE_NUMBER for number in numbers):
        raise nonsense(server, question, "numbers that no share can have")


def in_pieces(offset: int, length: int) -> list[tuple[int, int]]:
    """Return what is to be read as the pieces that are asked for, (offset, length); at least one."""
    ends = range(offset, offset + max(1, length), READ_PIECE_BYTES)
    return [(at, min(READ_PIECE_BYTES, offset + length - at)) for at in ends]
