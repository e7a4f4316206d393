"""
Foolscap's part of a storage server's port: a tub with the server's own certificate.

Foolscap, and the tub, are loaded when the first client asks for them: most never do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IAddress, IStreamServerEndpoint
from zope.interface import implementer

from pipegrid.server.gbs.service import GbsService
from pipegrid.server.identity import Identity
from pipegrid.wire.furl import Furl

if TYPE_CHECKING:
    from pipegrid.server.foolscap.service import FoolscapStorage

KEEPALIVE_S = 120
"""After so much silence a client is asked whether it is still there; after twice as much it is not."""


class FoolscapPort:
    """
    Speaks Foolscap on connections that others accept.

    Args:
        service: the storage.
        who: whose certificate and secret it has.
    """

    def __init__(self, service: GbsService, who: Identity) -> None:
        self._service = service
        self._who = who
        self._hints: tuple[str, ...] = (
            "tcp:localhost:1",
        )  # nobody has to connect to us by what the tub thinks
        self._storage: FoolscapStorage | None = None
        self._tub: Any = None
        self._factory: Any = None
        self._stopped = False

    def located(self, hints: Sequence[str]) -> Furl:
        """Take note of where clients find the port, and return the fURL to give to them."""
        self._hints = tuple(hints)
        return self._who.furl(hints)

    def buildProtocol(self, addr: IAddress | None, on_known: Callable[[], None]) -> Any:
        """
        Return what negotiates with a client, or None at the end.

        Args:
            on_known: called when the client has shown the secret.
        """
        if self._stopped:
            return None
        if self._factory is None:
            self._open()
        return _telling(self._factory.buildProtocol(addr), on_known)

    def stop(self) -> Deferred[Any]:
        """Cut all connections, and forget what was not closed; fires when they are gone."""
        self._stopped = True
        if self._storage is not None:
            self._storage.stop()
        tub, self._tub = self._tub, None
        stopped: Deferred[Any] = succeed(None) if tub is None else tub.stopService()
        return stopped

    def _open(self) -> None:
        from foolscap.api import Tub

        from pipegrid.server.foolscap.service import FoolscapStorage
        from pipegrid.wire.negotiation import StrictNegotiation

        tub = Tub(certData=self._who.key_pem + self._who.certificate_pem)
        tub.negotiationClass = StrictNegotiation
        tub.unsafeTracebacks = False  # clients need not know what our stack looks like
        tub.setOption("accept-gifts", False)
        tub.setOption("keepaliveTimeout", KEEPALIVE_S)
        tub.setOption("disconnectTimeout", 2 * KEEPALIVE_S)
        tub.setLocation(*self._hints)
        self._storage = FoolscapStorage(self._service)
        tub.registerReference(self._storage, name=self._who.swissnum)
        accepted_elsewhere = _AcceptedElsewhere()
        tub.listenOn(accepted_elsewhere)
        tub.startService()
        self._tub, self._factory = tub, accepted_elsewhere.factory


def _telling(negotiation: Any, on_known: Callable[[], None]) -> Any:
    """Have what a negotiation leads to tell when its client has named something that is here."""
    switch = negotiation.switchToBanana

    def switch_to_banana(params: Any) -> None:
        negotiation.brokerClass = partial(_telling_broker, negotiation.brokerClass, on_known)
        switch(params)

    negotiation.switchToBanana = switch_to_banana
    return negotiation


def _telling_broker(make: Callable[..., Any], on_known: Callable[[], None], *arguments: Any) -> Any:
    broker = make(*arguments)
    look_up = broker.remote_getReferenceByName

    def look_up_and_tell(name: Any) -> Any:
        found = look_up(name)
        on_known()  # without the secret nothing is found, and an error raised
        return found

    broker.remote_getReferenceByName = look_up_and_tell
    return broker


@implementer(IStreamServerEndpoint)
class _AcceptedElsewhere:
    """An endpoint on which nothing listens: it only keeps the factory, for connections that are there."""

    def __init__(self) -> None:
        self.factory: Any = None

    def listen(self, factory: Any) -> Deferred[Any]:
        """Keep the factory."""
        self.factory = factory
        return succeed(self)

    def getHost(self) -> str:
        """Say where it is; shown by Foolscap only."""
        return "the storage port"

    def stopListening(self) -> Deferred[None]:
        """Nothing listens."""
        return succeed(None)
