"""How our Foolscap connections begin: as Foolscap's do, but with good ciphers only."""

from __future__ import annotations

from typing import Any

from foolscap import crypto
from foolscap.negotiate import Negotiation

from pipegrid.reactor.ciphers import only_forward_secret


class StrictNegotiation(Negotiation):  # type: ignore[misc]
    """Set as a tub's ``negotiationClass``, or as the class of a negotiation that has not begun."""

    def startTLS(self, cert: Any) -> None:
        """Go over to TLS."""
        options = crypto.FoolscapContextFactory(
            privateKey=cert.privateKey.original, certificate=cert.original
        )
        only_forward_secret(options.getContext())
        self.transport.startTLS(options)
