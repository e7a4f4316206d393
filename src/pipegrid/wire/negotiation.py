"""How our Foolscap connections begin: as Foolscap's do, but with good ciphers only, and within bounds."""

from __future__ import annotations

from typing import Any

from foolscap import crypto, eventual
from foolscap.negotiate import Negotiation
from foolscap.tokens import NegotiationError
from twisted.internet.interfaces import IDelayedCall
from twisted.python.failure import Failure

from pipegrid.reactor.ciphers import only_forward_secret
from pipegrid.reactor.handshakes import bound_handshakes

NEGOTIATION_S = 30
NEGOTIATION_BYTES = 4096
"""Foolscap's own bound on what is negotiated."""
GRACE_S = 5.0
"""Whoever failed is told why, and cut off after that."""


class StrictNegotiation(Negotiation):  # type: ignore[misc]
    """Set as a tub's ``negotiationClass``, or as the class of a negotiation that has not begun."""

    def startTLS(self, cert: Any) -> None:
        """Begin TLS with ``cert``, with forward-secret ciphers only, and a bound on handshakes."""
        options = crypto.FoolscapContextFactory(
            privateKey=cert.privateKey.original, certificate=cert.original
        )
        only_forward_secret(options.getContext())
        bound_handshakes(options.getContext())
        self.transport.startTLS(options)


class BoundedNegotiation(StrictNegotiation):
    """
    What comes before: ``NEGOTIATION_BYTES`` at most, in ``NEGOTIATION_S``; none of it goes to Foolscap's
    log.
    """

    SERVER_TIMEOUT = NEGOTIATION_S
    _aborting: IDelayedCall | None = None
    failureReason: Failure | None

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Foolscap keeps its last messages, with all that strangers sent."""

    def dataReceived(self, chunk: bytes) -> None:
        """Take what arrived, unless it has failed already."""
        if not self._has_failed():
            super().dataReceived(chunk)
            if self._has_failed():
                self._end()

    def negotiationFailed(self) -> None:
        """It has failed, perhaps in code of Foolscap's that took apart what a stranger said."""
        why = self.failureReason
        if why is not None and why.check(
            LookupError, ValueError, TypeError, AttributeError, AssertionError
        ):
            self.failureReason = Failure(NegotiationError("what it said first makes no sense"))
        super().negotiationFailed()

    def negotiationTimedOut(self) -> None:
        super().negotiationTimedOut()
        self._end()

    def connectionLost(self, reason: Failure) -> None:
        """It failed, or somebody hung up."""
        if self._aborting is not None:
            self._aborting.cancel()
            self._aborting = None
        super().connectionLost(reason)

    def _has_failed(self) -> bool:
        return self.failureReason is not None

    def _end(self) -> None:
        # What it failed for is being sent; who does not take it, or goes on, is cut off.
        self.buffer = b""
        transport: Any = self.transport
        if self._aborting is None and transport.connected:
            transport.pauseProducing()
            self._aborting = eventual.reactor.callLater(GRACE_S, self._abort)

    def _abort(self) -> None:
        self._aborting = None
        transport: Any = self.transport
        transport.abortConnection()
