"""What a client's Foolscap connection is before both sides have agreed on what they speak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipegrid.server.foolscap.broker import ServerBroker
from pipegrid.wire.negotiation import BoundedNegotiation


class ServerNegotiation(BoundedNegotiation):
    """
    What comes before.

    Attributes:
        make_broker: called with what Foolscap gives a broker, makes one.
    """

    make_broker: Callable[..., ServerBroker]

    def switchToBanana(self, params: dict[str, Any]) -> None:
        """Go over to a broker of ``make_broker``: both sides have agreed on ``params``."""
        self.brokerClass = self.make_broker
        super().switchToBanana(params)
