"""Speaks Foolscap on a server's port, with a tub that has the server's certificate and objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from foolscap import eventual
from foolscap.api import Tub
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IAddress, IStreamServerEndpoint
from zope.interface import implementer

from pipegrid.server.foolscap.broker import (
    Governor,
    MessageLimits,
    ServerBroker,
    ServerNegotiation,
)
from pipegrid.server.identity import Identity
from pipegrid.wire.server_address import Furl

KEEPALIVE_S = 120
"""A client that is silent for this time gets a PING; after twice this time its connection is closed."""

MAX_REMEMBERED = 4096
"""The most tubs whose connections are counted; Foolscap tells old from new connections by the counts."""


class ServedObject(Protocol):
    """A Foolscap object, a ``Referenceable``, to which a fURL leads."""

    def stop(self) -> None:
        """Drop all state of connections, since the connections end."""


class ClientObject(ServedObject, Protocol):
    """The served object of one named client; the operator can remove the client."""

    def close(self) -> None:
        """Reject all further calls, since the client was removed."""


class FoolscapPort:
    """
    Speaks Foolscap on connections that the listener accepts.

    All modules are imported, and the tub is created, before the first client connects, since the program's
    files may be replaced by those of another version while the server runs.

    Args:
        who: the server's certificate and secret.
        served: the object that clients reach with the secret.
        limits: limits for messages.
        others: returns a number that grows with the requests of other protocols.
        note_hostile: called with the address of a rejected client and the reason.
        more: further objects, by the secrets with which clients reach them.
    """

    def __init__(
        self,
        who: Identity,
        served: ServedObject,
        *,
        limits: MessageLimits,
        others: Callable[[], int] = lambda: 0,
        note_hostile: Callable[[str, str], None] = lambda peer, reason: None,
        more: Mapping[str, ServedObject] | None = None,
    ) -> None:
        self._objects = {who.swissnum: served, **(more or {})}
        self._clients: dict[str, ClientObject] = {}
        self._note_hostile = note_hostile
        self._limits = limits
        self._others = others
        self._who = who
        self._tub: Any = None
        self._factory: Any = None
        self._make_broker: Any = None
        self._stopped = False

    def located(self, hints: Sequence[str]) -> Furl:
        """Start with the given addresses, and return the fURL for clients."""
        tub = Tub(certData=self._who.key_pem + self._who.certificate_pem)
        tub.unsafeTracebacks = False  # clients must not see tracebacks
        tub.setOption("accept-gifts", False)
        tub.setOption("keepaliveTimeout", KEEPALIVE_S)
        tub.setOption("disconnectTimeout", 2 * KEEPALIVE_S)
        tub.setLocation(*hints)
        tub.negotiationClass = ServerNegotiation
        tub.master_table, tub.slave_table = _Recent(), _Recent()
        governor = Governor(eventual.reactor, self._others)
        self._make_broker = partial(ServerBroker, limits=self._limits, governor=governor)
        for name, served in {**self._objects, **self._clients}.items():
            tub.registerReference(served, name=name)
        accepted_elsewhere = _AcceptedElsewhere()
        tub.listenOn(accepted_elsewhere)
        tub.startService()
        self._tub, self._factory = tub, accepted_elsewhere.factory
        return self._who.furl(hints)

    def buildProtocol(
        self, addr: IAddress | None, on_known: Callable[[], None] = lambda: None
    ) -> Any:
        """
        Return a negotiation; None before ``located`` or after ``stop`` is called.

        Args:
            on_known: called when the client has shown the secret.
        """
        if self._stopped or self._factory is None:
            return None
        negotiation = self._factory.buildProtocol(addr)
        peer = str(getattr(addr, "host", addr))
        negotiation.make_broker = partial(
            self._make_broker, refused=partial(self._note_hostile, peer), known=on_known
        )
        return negotiation

    def set_clients(self, clients: Mapping[str, ClientObject]) -> None:
        """
        Serve the given objects, by the secrets of named clients; close the objects of clients that are not
        given.
        """
        for secret in self._clients.keys() - clients.keys():
            gone = self._clients.pop(secret)
            gone.close()
            if self._tub is not None:
                self._tub.unregisterReference(gone)
        for secret in clients.keys() - self._clients.keys():
            self._clients[secret] = clients[secret]
            if self._tub is not None:
                self._tub.registerReference(clients[secret], name=secret)

    def stop(self) -> Deferred[Any]:
        """Stop the served objects, and close all connections; fires when the connections are closed."""
        self._stopped = True
        for each in (*self._objects.values(), *self._clients.values()):
            each.stop()
        tub, self._tub = self._tub, None
        stopped: Deferred[Any] = succeed(None) if tub is None else tub.stopService()
        return stopped


class _Recent(dict[str, Any]):
    """Foolscap's record of the tubs that ever connected, limited to the most recent ones."""

    def __setitem__(self, tub_id: str, value: Any) -> None:
        self.pop(tub_id, None)
        super().__setitem__(tub_id, value)
        if len(self) > MAX_REMEMBERED:
            del self[next(iter(self))]


@implementer(IStreamServerEndpoint)
class _AcceptedElsewhere:
    """
    An endpoint that does not listen. It only keeps the factory, which serves the connections that the
    listener accepts.
    """

    def __init__(self) -> None:
        self.factory: Any = None

    def listen(self, factory: Any) -> Deferred[Any]:
        self.factory = factory
        return succeed(self)

    def getHost(self) -> str:
        """Return a name for Foolscap's log."""
        return "the server's port"

    def stopListening(self) -> Deferred[None]:
        return succeed(None)
