"""
Beginning to connect, which nobody waits for: a mirror is a round trip away, or ten imports.

The first connection to each mirror is begun before the modules are loaded that will use it. What cannot be
begun here is begun again by whoever needs it, who knows what to make of the error.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pipegrid.mirror.address import Address

Place = tuple[int, Any]
"""Family of addresses, and address."""


def can_sprint(addresses: Sequence[Address]) -> bool:
    """Return whether there is a point in trying: no proxies, and a system with what it takes."""
    return (
        hasattr(select, "epoll")
        and hasattr(os, "eventfd")
        and bool(addresses)
        and all(address.proxy is None for address in addresses)
    )


def place_of(address: Address) -> Place:
    """
    Look up where a mirror is.

    Raises:
        OSError: nobody knows.
    """
    host = address.host.encode("ascii")  # text would be looked at for IDNA, with tables for that
    found = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)[0]
    return found[0], found[4]


def begin(place: Place) -> socket.socket:
    """
    Return a socket that connects, and does not block.

    Raises:
        OSError: that cannot be begun.
    """
    sock = socket.socket(place[0], socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.connect(place[1])
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


class BegunConnections:
    """
    Connections to mirrors, begun already; to be closed.

    Args:
        addresses: each asked directly, without a proxy.
        each: how many to each of them.
    """

    def __init__(self, addresses: Sequence[Address], each: int = 1) -> None:
        self._sockets: dict[str, list[socket.socket]] = {}
        for address in addresses:
            sockets = self._sockets[address.url] = []
            with suppress(OSError):
                place = place_of(address)
                while len(sockets) < each:
                    sockets.append(begin(place))

    def take(self, address: Address) -> socket.socket | None:
        """Return one to a mirror, if there is one more."""
        sockets = self._sockets.get(address.url)
        return sockets.pop(0) if sockets else None

    def close(self) -> None:
        """Let go of what nobody took."""
        for sockets in self._sockets.values():
            while sockets:
                sockets.pop().close()
