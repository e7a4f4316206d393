"""
Beginning to connect, which nobody waits for: a mirror is a round trip away, or ten imports.

The first connection to each mirror is begun before the modules are loaded that will use it. What cannot be
begun here is begun again by whoever needs it, who knows what to make of the error.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Sequence
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


def securing(address: Address) -> Callable[[socket.socket], Any]:
    """Return what makes TLS of a socket that is connected, and has not shaken hands yet."""
    import ssl  # which few need here

    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])

    def secure(sock: socket.socket) -> Any:
        return context.wrap_socket(
            sock, server_hostname=address.host, do_handshake_on_connect=False
        )

    return secure


class BegunConnections:
    """
    Connections to mirrors, begun already, or left by who has no use for them any more; to be closed.

    Args:
        addresses: each asked directly, without a proxy.
        each: how many to each of them.
    """

    def __init__(self, addresses: Sequence[Address], each: int = 1) -> None:
        self._begun: dict[str, list[tuple[socket.socket, int]]] = {}
        for address in addresses:
            begun = self._begun[address.url] = []
            with suppress(OSError):
                place = place_of(address)
                while len(begun) < each:
                    begun.append((begin(place), 0))

    def take(self, address: Address) -> tuple[socket.socket, int] | None:
        """Return one to a mirror, and how many files were asked for on it, if there is one more."""
        begun = self._begun.get(address.url)
        while begun:
            sock, count = begun.pop(0)
            if not _has_something(sock):
                return sock, count
            sock.close()
        return None

    def give(self, address: Address, sock: socket.socket, count: int) -> None:
        """Leave one for others, on which so many files were asked for, and came."""
        self._begun[address.url].append((sock, count))

    def close(self) -> None:
        """Let go of what nobody took."""
        for begun in self._begun.values():
            while begun:
                begun.pop()[0].close()


def _has_something(sock: socket.socket) -> bool:
    """Whether a server said something unasked: nearly always that it has ended the connection."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
