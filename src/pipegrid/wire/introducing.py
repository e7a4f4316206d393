"""
The introducer's protocol, as far as those who listen and those who announce have it in common.

Source: the format reference, storage protocols, section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from foolscap.ipb import DeadReferenceError
from foolscap.tokens import (
    BananaError,
    NegotiationError,
    NoLocationHintsError,
    RemoteNegotiationError,
    Violation,
)
from twisted.internet import error as network
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.text import printable
from pipegrid.wire import remote as _interfaces  # noqa: F401  Foolscap finds them by name
from pipegrid.wire.allowance import Bounds, TooMuch
from pipegrid.wire.announcements import MAX_SERVERS
from pipegrid.wire.furl import Furl
from pipegrid.wire.tub import KEEPALIVE_S

PROTOCOL_KEY = b"http://allmydata.org/tahoe/protocols/introducer/v2"
SERVICE = b"storage"
CONNECT_TIMEOUT_S = 15.0
LOST_AFTER_S = 3 * KEEPALIVE_S
"""Silence after which an introducer is taken to be gone."""

BOUNDS = Bounds(call_cost=MAX_SERVERS * 4096)
"""An introducer tells all it knows in one message; an announcement has 1 to 3 KB, and becomes 1 KB more."""

_NO_INTRODUCER = "what answers there is no introducer"
_MAX_REASON_CHARACTERS = 200

Connect = Callable[[str], "Deferred[Any]"]
"""Given a fURL, fires with a remote reference: a tub's ``getReference``."""


class RemoteFailure(Exception):
    """The other side failed: Foolscap hands that on as texts, which coroutines cannot raise."""


def call(reference: Any, name: str, *arguments: Any) -> Deferred[Any]:
    """Call a remote method; what fails there fails here with ``RemoteFailure``."""
    answer: Deferred[Any] = reference.callRemote(name, *arguments)
    return answer.addErrback(_as_exception)


def _as_exception(failure: Any) -> Any:
    if isinstance(failure.value, BaseException):
        return failure
    raise RemoteFailure(str(failure.value))


async def connect_introducer(connect: Connect, furl: Furl, clock: IReactorTime) -> Any:
    """
    Return a reference to an introducer that speaks the protocol.

    Raises:
        Exception: see ``reason_of``.
    """
    direct = attrs.evolve(furl, hints=furl.tcp_hints)
    connecting = connect(str(direct)).addErrback(_as_exception)
    reference = await connecting.addTimeout(CONNECT_TIMEOUT_S, clock)
    if not hasattr(reference, "callRemote"):
        raise ValueError(_NO_INTRODUCER)
    version = await call(reference, "get_version").addTimeout(CONNECT_TIMEOUT_S, clock)
    if type(version) is not dict:  # an object that names no interface answers what it likes
        raise ValueError(_NO_INTRODUCER)
    if PROTOCOL_KEY not in version:
        raise ValueError("it speaks another version of the introducer's protocol")
    return reference


def until_lost(reference: Any) -> Deferred[None]:
    """Return what fires when the reference's connection is lost."""
    lost: Deferred[None] = Deferred(lambda _: reference.dontNotifyOnDisconnect(marker))

    def notify() -> None:
        if not lost.called:
            lost.callback(None)

    marker = reference.notifyOnDisconnect(notify)
    return lost


def reason_of(error: Exception | None) -> str:
    """Return, for a person, why there is no connection."""
    if error is None or isinstance(error, (DeadReferenceError, network.ConnectionClosed)):
        return "the connection was lost"
    if isinstance(error, (TimeoutError, network.TimeoutError)):
        return f"nobody answered within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, network.DNSLookupError):
        return "its host name is not known"
    if isinstance(error, network.ConnectError):
        return "nobody listens there"
    if isinstance(error, NoLocationHintsError):
        return "none of its addresses can be used"
    if isinstance(error, TooMuch):
        return f"it was cut off, since {_excerpt(str(error))}"
    if isinstance(error, (NegotiationError, RemoteNegotiationError, BananaError)):
        return "whoever answers there does not have its key, or does not speak Foolscap"
    if "unable to find reference for name" in str(error):
        return "the server at that address knows nothing under the fURL's last part"
    if isinstance(error, (Violation, RemoteFailure)):
        return _NO_INTRODUCER
    return _excerpt(str(error)) or type(error).__name__


def _excerpt(text: str) -> str:
    """Return the beginning of what may be a stranger's text: it goes to terminals and logs."""
    return printable((text.splitlines() or [""])[0][:_MAX_REASON_CHARACTERS])
