"""
The connection to one Foolscap server: made when it is needed, watched while answers are owed, and given up.

Foolscap's errors end here: what comes out of ``call`` is an answer, or an error of the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from foolscap.api import DeadReferenceError, Referenceable, Violation
from foolscap.call import CopiedFailure
from foolscap.tokens import BananaError
from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IDelayedCall, IReactorTime
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

MAX_SHARE_NUMBER = 255

_EXCERPT_CHARACTERS = 160

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
    """Makes connections to one server; ``foolscaptub.TubConnector`` is the real one."""

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
        self._waiting: list[Deferred[Any]] = []
        self._owed = 0
        self._heard_s = 0.0
        self._timer: IDelayedCall | None = None
        self._closed = False
        self._reason: ServerError | None = None  # for which we ended the last connection, if we did

    def __repr__(self) -> str:
        state = "closed" if self._closed else "up" if self._storage is not None else "down"
        return f"<FoolscapLink to {self._server!r} {state}, {self._owed} unanswered>"

    def storage(self) -> Deferred[Any]:
        """Fire with the remote reference to the server; connects if need be, for all who ask at once."""
        if self._closed:
            return fail(
                ServerUnreachable(
                    f"{self._server} was disconnected here; open it again", self._server
                )
            )
        if self._storage is not None:
            return succeed(self._storage)
        waiting: Deferred[Any] = Deferred()
        self._waiting.append(waiting)
        if self._connecting is None:
            self._connecting = self._connector.connect()
            self._connecting.addTimeout(self._connect_timeout_s, self._clock)
            self._connecting.addCallbacks(self._connected, self._failed)
        return waiting

    def call(self, reference: Any, method: str, *arguments: Any) -> Deferred[Any]:
        """Call a method of something at the server; fails with ``ServerError``s only."""
        self._owe()
        answer: Deferred[Any] = reference.callRemote(method, *arguments)
        answer.addBoth(self._answered)
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
        self._storage = storage
        self._reason = None
        storage.notifyOnDisconnect(self._lost, storage)
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.callback(storage)

    def _failed(self, failure: Failure) -> None:
        self._connecting = None
        error = self._connection_error(failure)
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.errback(error)

    def _connection_error(self, failure: Failure) -> ServerError:
        server = self._server
        if isinstance(failure, CopiedFailure):
            return ServerRefused(
                f"{server} does not know the secret in its address; copy its fURL anew", server
            )
        if failure.check(CancelledError):
            return ServerUnreachable(f"{server} was disconnected here", server)
        if "unknown TubID" in str(failure.value):
            return ServerUnreachable(
                f"what answers in the place of {server} is another server, with another key; find"
                " out where it is now, and copy its fURL anew",
                server,
            )
        why = excerpt(str(failure.value)) or type(failure.value).__name__
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
            # A tub has no way to let go of one connection; its broker has. The reason that it is given also
            # goes to calls of Foolscap's own, which know no other kind.
            storage.tracker.broker.shutdown(Failure(ConnectionDone()))

    # Patience.

    def _owe(self) -> None:
        self._owed += 1
        if self._owed == 1:
            self._heard_s = self._clock.seconds()
            if self._timer is None:
                self._timer = self._clock.callLater(self._timeout_s, self._look)

    def _answered(self, result: Any) -> Any:
        self._owed -= 1
        self._heard_s = self._clock.seconds()
        if not self._owed and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return result

    def _look(self) -> None:
        self._timer = None
        left_s = self._heard_s + self._timeout_s - self._clock.seconds()
        if left_s > 0:
            self._timer = self._clock.callLater(left_s, self._look)
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
            text = excerpt(str(error))
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
                f"{server} and we do not agree about {method}: {excerpt(str(error))}", server, True
            )
        if failure.check(BananaError):
            return ServerProtocolError(
                f"{server} was disconnected here: {excerpt(str(error))}; is it a storage server?",
                server,
                True,
            )
        if failure.check(DeadReferenceError, ConnectionDone, ConnectionLost):
            return self._reason or ServerUnreachable(
                f"the connection to {server} was lost; try again", server, may_have_happened=True
            )
        return ServerUnreachable(
            f"{server} did not answer {method}: {excerpt(str(error)) or type(error).__name__}",
            server,
            may_have_happened=True,
        )


def excerpt(text: str) -> str:
    """The beginning of a text from a stranger, fit to be shown: one line, no control characters."""
    text = text[: 4 * _EXCERPT_CHARACTERS]
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= _EXCERPT_CHARACTERS else text[:_EXCERPT_CHARACTERS] + "…"


def check_numbers(server: str, question: str, numbers: Any) -> None:
    """Raise ServerProtocolError unless all are numbers of shares."""
    if not all(0 <= number <= MAX_SHARE_NUMBER for number in numbers):
        raise nonsense(server, question, "numbers that no share can have")


def nonsense(server: str, question: str, what: str) -> ServerProtocolError:
    """Return the error for an answer that no storage server gives."""
    return ServerProtocolError(
        f"{server} answered {question} with {what}; is it a storage server?",
        server,
        may_have_happened=True,
    )
