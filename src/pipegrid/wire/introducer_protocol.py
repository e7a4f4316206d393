"""
The introducer protocol: remote interfaces, connecting to an introducer, and reconnecting after a loss.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foolscap.api import Any as FoolscapAny
from foolscap.api import DictOf, Referenceable, RemoteInterface, SetOf
from foolscap.ipb import DeadReferenceError
from foolscap.tokens import (
    BananaError,
    NegotiationError,
    NoLocationHintsError,
    RemoteNegotiationError,
    Violation,
)
from twisted.internet import error as network
from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from pipegrid.core.text import printable
from pipegrid.errors import RemoteCallError
from pipegrid.wire.announcements import MAX_SERVERS
from pipegrid.wire.banana_receiver import Bounds, LimitExceeded
from pipegrid.wire.foolscap_broker import KEEPALIVE_S
from pipegrid.wire.gbs_cbor_bodies import PROTOCOL as STORAGE_PROTOCOL
from pipegrid.wire.server_address import Furl

# mypy: ignore-errors
# ruff: noqa: B008
# Foolscap declares methods without self, and types of arguments as their defaults.


class RIIntroducerSubscriberClient(RemoteInterface):
    """The client's object that receives announcements from the introducer."""

    __remote_name__ = "RIIntroducerSubscriberClient_v2.tahoe.allmydata.com"

    # One malformed announcement must not make the other announcements fail, so the receiver checks each
    # announcement separately.
    def announce_v2(announcements=SetOf(FoolscapAny())):
        """Receive announcements: first all known ones, then each new one."""


class RIIntroducer(RemoteInterface):
    """An introducer: servers publish their announcements, clients subscribe to them."""

    __remote_name__ = "RIIntroducerPublisherAndSubscriberService_v2.tahoe.allmydata.com"

    def get_version():
        """Return which versions of the protocol are supported."""
        return DictOf(bytes, FoolscapAny())

    def publish_v2(announcement=FoolscapAny(), canary=Referenceable):
        """Send a signed announcement to all subscribers of its service."""

    def subscribe_v2(
        subscriber=RIIntroducerSubscriberClient,
        service_name=bytes,
        subscriber_info=DictOf(bytes, FoolscapAny()),
    ):
        """Subscribe to the announcements of all servers of a service."""


PROTOCOL_KEY = b"http://allmydata.org/tahoe/protocols/introducer/v2"
SERVICE = b"storage"
CONNECT_TIMEOUT_S = 15.0
LOST_AFTER_S = 3 * KEEPALIVE_S
"""The silence after which the connection to an introducer counts as lost."""

BOUNDS = Bounds(call_cost=MAX_SERVERS * 4096)
"""An introducer sends all announcements in one message; each has 1 to 3 KB, and takes 1 KB more in memory."""

_NO_INTRODUCER = "the server there is not an introducer"
_MAX_REASON_CHARACTERS = 200


class AnnouncementNotAccepted(RemoteCallError):
    """An introducer has rejected an announcement. The text is the introducer's reason."""


Connect = Callable[[str], "Deferred[Any]"]
"""A function that connects to a fURL and fires with a remote reference: a tub's ``getReference``."""


def call(reference: Any, name: str, *arguments: Any) -> Deferred[Any]:
    """
    Call a remote method; if the call fails at the other end, which reports a text, raise ``RemoteCallError``.
    """
    answer: Deferred[Any] = reference.callRemote(name, *arguments)
    return answer.addErrback(_as_exception)


def _as_exception(failure: Any) -> Any:
    if isinstance(failure.value, BaseException):
        return failure
    raise RemoteCallError(str(failure.value))


async def connect_introducer(connect: Connect, furl: Furl, clock: IReactorTime) -> Any:
    """
    Return a reference to an introducer that supports the protocol.

    Raises:
        Exception: any error of connecting; ``reason_of`` explains it.
    """
    connecting = connect(str(furl)).addErrback(_as_exception)
    reference = await connecting.addTimeout(CONNECT_TIMEOUT_S, clock)
    if not hasattr(reference, "callRemote"):
        raise ValueError(_NO_INTRODUCER)
    version = await call(reference, "get_version").addTimeout(CONNECT_TIMEOUT_S, clock)
    if type(version) is not dict:  # an object that declares no interface may return anything
        raise ValueError(_NO_INTRODUCER)
    if PROTOCOL_KEY not in version and STORAGE_PROTOCOL in version:
        raise ValueError("it is a storage server; give the fURL of an introducer")
    if PROTOCOL_KEY not in version:
        raise ValueError("it speaks another version of the introducer's protocol")
    return reference


def until_lost(reference: Any) -> Deferred[None]:
    """Return a Deferred that fires when the reference's connection is lost."""
    lost: Deferred[None] = Deferred(lambda _: reference.dontNotifyOnDisconnect(marker))

    def notify() -> None:
        if not lost.called:
            lost.callback(None)

    marker = reference.notifyOnDisconnect(notify)
    return lost


def reason_of(error: Exception | None) -> str:
    """Return the reason why the connection failed, as a text for people."""
    if error is None or isinstance(error, (DeadReferenceError, network.ConnectionClosed)):
        return "the connection was lost"
    if isinstance(error, (TimeoutError, network.TimeoutError)):
        return f"no answer came within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, network.DNSLookupError):
        return "its host name is not known"
    if isinstance(error, network.ConnectError):
        return "no server listens there"
    if isinstance(error, NoLocationHintsError):
        return "none of its addresses can be used"
    if isinstance(error, LimitExceeded):
        return f"the connection was closed, since {_excerpt(str(error))}"
    if isinstance(error, (NegotiationError, RemoteNegotiationError, BananaError)):
        return "the server there does not have its key, or does not speak Foolscap"
    if "unable to find reference for name" in str(error):
        return "the server at that address knows nothing under the fURL's last part"
    if isinstance(error, AnnouncementNotAccepted):
        return _excerpt(str(error)) or "it does not say why"
    if isinstance(error, (Violation, RemoteCallError)):
        return _NO_INTRODUCER
    return _excerpt(str(error)) or type(error).__name__


def _excerpt(text: str) -> str:
    """Return the beginning of untrusted text, safe for terminals and logs."""
    return printable((text.splitlines() or [""])[0][:_MAX_REASON_CHARACTERS])


FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 300.0
_GOOD_S = 60.0
"""After a connection that lasted at least this long, the first pause is used again."""


class Reconnecting:
    """
    Keeps one connection until it is stopped; reconnects after pauses that grow.

    Args:
        clock: for the pauses.
        use: connects and uses the connection; fires or fails when the connection is lost, or could not be
            made.
        lost: called after each loss with the error of ``use``, or None if ``use`` ended without an error.
        spread: returns a factor for each pause, so that many clients do not reconnect at the same time.
    """

    def __init__(
        self,
        clock: IReactorTime,
        use: Callable[[], Deferred[None]],
        lost: Callable[[Exception | None], None],
        spread: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._clock = clock
        self._use = use
        self._lost = lost
        self._spread = spread
        self._running: Deferred[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Connect for the first time."""
        if self._running is None:
            self._running = Deferred.fromCoroutine(self._run())
            self._running.addErrback(lambda failure: failure.trap(CancelledError))

    def stop(self) -> None:
        """Close the connection, and make no further connection."""
        self._stopped = True
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began = self._clock.seconds()
            reason: Exception | None = None
            try:
                await self._use()
            except CancelledError:
                raise
            except Exception as error:
                reason = error
            self._lost(reason)
            if self._stopped:  # by ``lost``
                return
            if self._clock.seconds() - began >= _GOOD_S:
                pause_s = FIRST_PAUSE_S
            await deferLater(self._clock, pause_s * self._spread())
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
