"""
Foolscap tubs that only call others: each of a new identity, which need not be known again.

Foolscap keeps at most one connection between two identities. So that two objects of ours do not push each
other out of one server, each has its own; and an identity that is in use elsewhere, such as that of a
Tahoe-LAFS node whose directory is read, would end the other's connections.
"""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial
from typing import Any

from foolscap import eventual
from foolscap.api import Tub
from twisted.internet.abstract import FileDescriptor
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.reactor.sockets import unsent_bytes
from pipegrid.reactor.together import Waiters
from pipegrid.wire.allowance import Bounds
from pipegrid.wire.broker import BoundedBroker
from pipegrid.wire.certificates import self_signed_pem
from pipegrid.wire.negotiation import BoundedNegotiation

KEEPALIVE_S = 60
"""After so much silence the other side is asked whether it is still there."""

PONGS_APART_S = 1.0
GOODBYE_S = 1.0
"""So long a stopped tub waits for the kernel to take what was written."""

MAX_UNREAD = 1000
"""Answers to the other side in a row that it has left unread; one that gives references back has few."""
MAX_UNSENT_BYTES = 16 << 20
"""Of which so many wait by then; a window of what we send ourselves is far smaller."""

_VALID = timedelta(days=3650)


class CallersBroker(BoundedBroker):
    """
    The connection of somebody who calls, and is seldom called himself.

    What the other side has to be answered waits in memory until it reads: a flood of questions must not fill
    that.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ponged_s = -math.inf
        self._unread = 0

    def sendPONG(self, number: int) -> None:
        """Show that we are there, once in a while: of many who ask at once, one answer says as much."""
        now_s = self.seconds()
        if now_s - self._ponged_s >= PONGS_APART_S:
            self._ponged_s = now_s
            super().sendPONG(number)
            self._answered()

    def call_ended(self, delivery: Any) -> None:
        """A call of the other side was carried out, and answered."""
        super().call_ended(delivery)
        self._answered()

    def callFailed(self, f: Any, reqID: int, delivery: Any = None) -> None:
        """Tell the other side that a call failed."""
        super().callFailed(f, reqID, delivery)
        if delivery is None:  # it was no call even; else that was counted as its end
            self._answered()

    def connectionLost(self, why: Failure) -> None:
        """All is over, and its tub may be waiting for that."""
        super().connectionLost(why)
        if self.tub is not None:
            self.tub.forget(self.transport)

    def _answered(self) -> None:
        unsent = unsent_bytes(self.transport)
        self._unread = self._unread + 1 if unsent else 0
        if self._unread > MAX_UNREAD and unsent > MAX_UNSENT_BYTES:
            self.refuse("it asks again and again, and reads none of the answers")


class CallersNegotiation(BoundedNegotiation):
    """One whose tub knows of its connection until that is gone."""

    def connectionMade(self) -> None:
        if self.tub is not None:  # it is the side that connects
            self.tub.open_transports.add(self.transport)
        super().connectionMade()

    def connectionLost(self, reason: Failure) -> None:
        super().connectionLost(reason)
        if self.tub is not None:
            self.tub.forget(self.transport)


class CallersTub(Tub):  # type: ignore[misc]
    """
    A tub that leaves the reactor clean: it has stopped when no connection is left, and nothing to be done.

    Foolscap's waits neither for connections that were ended before, nor for those whose negotiation goes on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.open_transports: set[Any] = set()
        self._all_gone: Waiters[None] = Waiters()

    def forget(self, transport: Any) -> None:
        """Take note that a connection is gone, and tell who waits for the last."""
        self.open_transports.discard(transport)
        if not self.open_transports:
            self._all_gone.fire(None)

    def stopService(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._stop(super().stopService()))

    async def _stop(self, stopped: Deferred[Any]) -> None:
        if self.open_transports:
            gone = self._all_gone.wait()
            cut = eventual.reactor.callLater(GOODBYE_S, self._cut)
            for transport in list(self.open_transports):
                # What was written goes out, TLS's goodbye included; that of the other side is not waited for.
                if isinstance(transport, FileDescriptor):
                    FileDescriptor.loseConnection(transport)
                else:
                    transport.loseConnection()
            await gone
            if cut.active():
                cut.cancel()
        await stopped
        await eventual.fireEventually()
        await eventual.flushEventualQueue()

    def _cut(self) -> None:
        for transport in list(self.open_transports):
            transport.abortConnection()


def make_tub(lost_after_s: int, bounds: Bounds | None = None) -> Any:
    """
    Return a tub, not started.

    Args:
        lost_after_s: silence after which the other side is taken to be gone; more than ``KEEPALIVE_S``.
        bounds: on what it may send.
    """
    tub = CallersTub(certData=_make_pem())
    tub.negotiationClass = CallersNegotiation
    tub.brokerClass = partial(CallersBroker, bounds=bounds)
    tub.unsafeTracebacks = False
    tub.setOption("accept-gifts", False)
    tub.setOption("keepaliveTimeout", KEEPALIVE_S)
    tub.setOption("disconnectTimeout", lost_after_s)
    tub.setOption("logLocalFailures", False)
    tub.setOption("logRemoteFailures", False)
    return tub


def _make_pem() -> bytes:
    """Return a key and a certificate; on an elliptic curve, since an RSA key takes a tenth of a second."""
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    return self_signed_pem(key, "newpb_thingy", _VALID)  # as all tubs call themselves
