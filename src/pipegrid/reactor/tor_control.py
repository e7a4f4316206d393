"""Tor's control port: where its SOCKS port is. The library ``txtorcon`` speaks the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.errors import UsageError
from pipegrid.reactor.connection_policy import ProxyAddress, parse_proxy_address
from pipegrid.reactor.socks5 import ProxyError, proxy_endpoint

CONTROL_S = 30.0
"""How long Tor may take to answer on its control port."""

MISSING_LIBRARY = (
    "Tor's control port needs the library txtorcon; install it with 'pip install pipegrid[tor]'"
)


CONTROL_ADDRESSES = (
    ProxyAddress("", 0, "/run/tor/control"),
    ProxyAddress("127.0.0.1", 9051),
    ProxyAddress("127.0.0.1", 9151),
)
"""Where the control port of Tor is if none is given, as in Tahoe-LAFS."""


async def connect_first(reactor: Any, addresses: Sequence[ProxyAddress]) -> Any:
    """
    Connect to the first of some control ports that can be used; returns txtorcon's protocol.

    Raises:
        UsageError: the library is not installed.
        ProxyError: none can be used; the text says why the last one cannot.
    """
    failure = ProxyError("no control port of Tor is known")
    for address in addresses:
        try:
            return await connect_control(reactor, address)
        except ProxyError as error:  # noqa: PERF203  there is another one
            failure = error
    raise failure


async def connect_control(reactor: Any, address: ProxyAddress) -> Any:
    """
    Connect to Tor's control port and authenticate; returns txtorcon's protocol.

    Raises:
        UsageError: the library is not installed.
        ProxyError: Tor is not reached there, or does not accept this user.
    """
    try:
        import txtorcon
    except ImportError:
        raise UsageError(MISSING_LIBRARY) from None
    connecting: Deferred[Any] = txtorcon.build_tor_connection(
        proxy_endpoint(reactor, address), build_state=False
    )
    try:
        return await connecting.addTimeout(CONTROL_S, reactor)
    except Exception as error:
        raise ProxyError(
            f"Tor's control port at {address} cannot be used ({reason_of(error)}); is Tor running, and may "
            "this user read its cookie?"
        ) from None


def reason_of(error: Exception) -> str:
    """Return the first line of an error's text, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")[:160]


class TorControl:
    """
    Finds out on a control port where Tor's SOCKS port is, once.

    Args:
        address: of the control port.
    """

    def __init__(self, address: ProxyAddress) -> None:
        self._address = address
        self._found: tuple[ProxyAddress, ...] = ()

    async def socks_addresses(self, reactor: Any) -> tuple[ProxyAddress, ...]:
        """
        Return where Tor's SOCKS ports are.

        Raises:
            UsageError: the library is not installed.
            ProxyError: Tor is not reached, or has no SOCKS port.
        """
        if not self._found:
            protocol = await connect_control(reactor, self._address)
            try:
                asked: Deferred[Any] = protocol.get_info("net/listeners/socks")
                answer = await asked.addTimeout(CONTROL_S, reactor)
            finally:
                protocol.transport.loseConnection()
            self._found = listeners_in(str(answer.get("net/listeners/socks", "")))
            if not self._found:
                raise ProxyError(f"the Tor with control port {self._address} has no SOCKS port")
        return self._found


def listeners_in(text: str) -> tuple[ProxyAddress, ...]:
    """Return the addresses in Tor's answer: quoted, separated by spaces; others are left out."""
    found = []
    for word in text.split():
        try:
            found.append(parse_proxy_address(word.strip('"')))
        except ValueError:  # noqa: PERF203  of a kind that is not used here
            continue
    return tuple(found[:8])
