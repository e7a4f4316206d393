"""
Asks Tor's control port for the address of Tor's SOCKS port. The library ``txtorcon`` speaks the protocol.

The process that listens on the control port may not be Tor: while Tor does not run, any user of this machine
can listen on its TCP port. So that process gets no secret before it has proved that it knows Tor's cookie,
and the length of its answers is limited.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from twisted.internet.defer import CancelledError, Deferred

from pipegrid.errors import UsageError
from pipegrid.reactor.connection_policy import ProxyAddress, parse_proxy_address
from pipegrid.reactor.tcp_socks5_endpoints import ProxyError, proxy_endpoint

CONTROL_S = 30.0
"""How long Tor may take to answer on its control port."""

_MAX_RECEIVED_BYTES = 1 << 20
_COOKIE_BYTES = 32
_MAX_REASON = 160
_KEY = re.compile(r"ED25519-V3:[A-Za-z0-9+/=]*")

MISSING_LIBRARY = (
    "Tor's control port needs the library txtorcon; install it with 'pip install pipegrid[tor]'"
)


CONTROL_ADDRESSES = (
    ProxyAddress("", 0, "/run/tor/control"),
    ProxyAddress("127.0.0.1", 9051),
    ProxyAddress("127.0.0.1", 9151),
)
"""Where to look for Tor's control port if no address is configured, as in Tahoe-LAFS."""


class ControlPortError(ProxyError):
    """
    A control port cannot be used.

    Attributes:
        address: the address of the control port.
        reason: a clause for the error message.
    """

    def __init__(self, address: ProxyAddress, reason: str) -> None:
        super().__init__(
            f"Tor's control port at {address} cannot be used ({reason}); is Tor running, and may this user "
            "read its cookie?"
        )
        self.address = address
        self.reason = reason


async def connect_first(reactor: Any, addresses: Sequence[ProxyAddress]) -> Any:
    """
    Connect to the first usable control port of a list; return txtorcon's protocol.

    Raises:
        UsageError: the library is not installed.
        ProxyError: no control port can be used; the text says for each why not.
    """
    failures: list[ControlPortError] = []
    for address in addresses:
        try:
            return await connect_control(reactor, address)
        except ControlPortError as error:  # noqa: PERF203  there is another one
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    shown = ", ".join(f"{each.address} ({each.reason})" for each in failures)
    raise ProxyError(
        f"Tor's control port was not found at {shown or 'any address'}; start Tor with ControlPort 9051 and "
        "CookieAuthentication 1, or say where it is"
    )


async def connect_control(reactor: Any, address: ProxyAddress) -> Any:
    """
    Connect to Tor's control port and authenticate; return txtorcon's protocol.

    Raises:
        UsageError: the library is not installed.
        ControlPortError: Tor is not reached at the address, or does not accept this user.
    """
    factory = _control_factory(is_proven=bool(address.path))
    protocol: Any = None
    try:
        connecting: Deferred[Any] = proxy_endpoint(reactor, address).connect(factory)
        protocol = await connecting.addTimeout(CONTROL_S, reactor)
        ready: Deferred[Any] = protocol.post_bootstrap
        return await ready.addTimeout(CONTROL_S, reactor)
    except BaseException as error:
        if protocol is not None:
            protocol.transport.abortConnection()
        if isinstance(error, CancelledError) or not isinstance(error, Exception):
            raise
        raise ControlPortError(address, reason_of(error)) from None


def _control_factory(is_proven: bool) -> Any:
    """
    Return a factory of txtorcon's protocol that limits what is received.

    Args:
        is_proven: whether the address itself proves that Tor listens at it, such as a socket in Tor's
            directory. Otherwise Tor must prove that it knows its cookie.

    Raises:
        UsageError: the library is not installed.
    """
    try:
        import txtorcon
    except ImportError:
        raise UsageError(MISSING_LIBRARY) from None

    class BoundedControl(txtorcon.TorControlProtocol):  # type: ignore[misc]
        received_bytes = 0

        def dataReceived(self, data: bytes) -> None:
            self.received_bytes += len(data)
            if self.received_bytes > _MAX_RECEIVED_BYTES:
                self.transport.abortConnection()
                return
            try:
                super().dataReceived(data)
            except Exception:  # txtorcon's error for a malformed answer
                self.transport.abortConnection()

        def protocolinfo(self) -> Any:
            answer: Any = super().protocolinfo()
            return answer if is_proven else answer.addCallback(checked_methods)

        def _read_cookie(self, cookiefile: str) -> None:
            super()._read_cookie(_open_cookie(cookiefile))  # the library closes the file

    class BoundedControlFactory(txtorcon.TorProtocolFactory):  # type: ignore[misc]
        def buildProtocol(self, addr: Any) -> BoundedControl:
            protocol = BoundedControl()
            protocol.factory = self
            return protocol

    return BoundedControlFactory()


def checked_methods(answer: str) -> str:
    """
    Return Tor's answer that lists its authentication methods, if a method makes Tor prove that it knows its
    cookie.

    Raises:
        ConnectionError: no listed method does.
    """
    methods = re.findall(r"METHODS=([A-Z,]*)", answer)
    if len(methods) != 1 or "SAFECOOKIE" not in methods[0].split(","):
        raise ConnectionError("it does not offer SAFECOOKIE: set CookieAuthentication 1 in torrc")
    return answer


def _open_cookie(path: str) -> int:
    """
    Open the file that the other end names as its cookie.

    Raises:
        OSError: the file cannot be opened, or does not have the size of a cookie.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != _COOKIE_BYTES:
        os.close(fd)
        raise OSError(f"it is not a file of {_COOKIE_BYTES} bytes")
    return fd


def reason_of(error: Exception) -> str:
    """Return the first line of an error's text, shortened, and without the key of an onion service."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    text = _KEY.sub("(key)", text.partition(" while running:")[0])
    text = text.rstrip(".")
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON].rpartition(' ')[0]} …"


class TorControl:
    """
    Asks a control port once where Tor's SOCKS port is.

    Args:
        address: of the control port.
    """

    def __init__(self, address: ProxyAddress) -> None:
        self._address = address
        self._found: tuple[ProxyAddress, ...] = ()

    async def socks_addresses(self, reactor: Any) -> tuple[ProxyAddress, ...]:
        """
        Return the addresses of Tor's SOCKS ports.

        Raises:
            UsageError: the library is not installed.
            ProxyError: Tor is not reached, or has no SOCKS port.
        """
        if not self._found:
            protocol = await connect_control(reactor, self._address)
            try:
                asked: Deferred[Any] = protocol.get_info("net/listeners/socks")
                answer = await asked.addTimeout(CONTROL_S, reactor)
            except CancelledError:
                raise
            except Exception as error:
                raise ProxyError(
                    f"Tor's control port at {self._address} does not tell where Tor listens "
                    f"({reason_of(error)}); set [tor] socks.port"
                ) from None
            finally:
                protocol.transport.abortConnection()
            self._found = listeners_in(str(answer.get("net/listeners/socks", "")))
            if not self._found:
                raise ProxyError(f"the Tor with control port {self._address} has no SOCKS port")
        return self._found


def listeners_in(text: str) -> tuple[ProxyAddress, ...]:
    """
    Return the first eight usable addresses from Tor's answer, which quotes addresses and separates them by
    spaces.
    """
    found = []
    for word in text.split():
        with suppress(ValueError):  # skip addresses of a kind that is not used here
            found.append(parse_proxy_address(word.strip('"')))
    return tuple(found[:8])
