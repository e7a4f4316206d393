"""Sockets of the epoll driver: opened in advance, secured, kept for later; pages that they are read into."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress

from pipegrid.mirror.mirror_address import Address
from pipegrid.mirror.preconnect_mirrors import EarlySockets, begin, place_of

TYPE_CHECKING = False  # as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from _socket import socket
    from typing import Any


# Beginning to connect, which nobody waits for: a mirror is a round trip away, or ten imports.
#
# The first connections to each mirror are begun before the modules are loaded that will use them, and for
# most command lines by ``preconnect_mirrors`` already. What cannot be begun here is begun again by the driver
# that needs it, which reports the error.


def can_sprint(addresses: Sequence[Address]) -> bool:
    """Return whether there is a point in trying: no proxies, and a system with what it takes."""
    return (
        hasattr(select, "epoll")
        and hasattr(os, "eventfd")
        and bool(addresses)
        and all(address.proxy is None for address in addresses)
    )


def securing(address: Address) -> Callable[[Any], Any]:
    """Return what makes TLS of a socket that is connected, and has not shaken hands yet."""
    import ssl  # which few need here

    if address.access.tls is not None:
        context = address.access.tls.context(address.host, address.port)
    else:
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])

    def secure(sock: Any) -> Any:
        return context.wrap_socket(
            sock, server_hostname=address.host, do_handshake_on_connect=False
        )

    return secure


# Memory that sockets are read into, and from which answers are cut out.

PAGE_BYTES = 256 << 10
"""Received at a time. What is hashed, and written, right after that is still in the processor's cache."""


class Page:
    """
    Memory that is read into.

    Attributes:
        users: jobs of the thread that still need what is in it, and one more while it is being parsed.
    """

    __slots__ = ("data", "users", "view")

    def __init__(self) -> None:
        self.data = bytearray(PAGE_BYTES)
        self.view = memoryview(self.data)
        self.users = 0


class SocketCache:
    """
    Connections to mirrors, begun already, or left by who has no use for them any more; to be closed.

    Args:
        addresses: each asked directly, without a proxy.
        each: how many to each of them.
        head_start: has begun some of these, and gives them here.
    """

    def __init__(
        self, addresses: Sequence[Address], each: int = 1, head_start: EarlySockets | None = None
    ) -> None:
        self._begun: dict[str, list[tuple[socket, int]]] = {}
        for address in addresses:
            sockets = head_start.take(address.url) if head_start is not None else []
            begun = self._begun.setdefault(address.origin, [])
            begun += [(sock, 0) for sock in sockets]
            with suppress(OSError):
                place = place_of(*address.place) if len(begun) < each else None
                while place is not None and len(begun) < each:
                    begun.append((begin(place), 0))

    def take(self, address: Address) -> tuple[socket, int] | None:
        """Return one to a mirror, and how many files were asked for on it, if there is one more."""
        begun = self._begun.get(address.origin)
        while begun:
            sock, count = begun.pop(0)
            if not _has_something(sock):
                return sock, count
            sock.close()
        return None

    def give(self, address: Address, sock: socket, count: int) -> None:
        """Leave one for others, on which so many files were asked for, and came."""
        self._begun.setdefault(address.origin, []).append((sock, count))

    def close(self) -> None:
        """Let go of what nobody took."""
        for begun in self._begun.values():
            while begun:
                begun.pop()[0].close()


def _has_something(sock: socket) -> bool:
    """Whether a server said something unasked: nearly always that it has ended the connection."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
