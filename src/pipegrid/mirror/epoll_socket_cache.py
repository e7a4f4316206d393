"""
Sockets of the epoll driver: opened in advance, with TLS, kept for later; and the pages that they are read
into.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress

from pipegrid.mirror.mirror_urls import Address
from pipegrid.mirror.preconnect_mirrors import EarlySockets, begin, place_of

TYPE_CHECKING = False  # as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from _socket import socket
    from typing import Any


# Connecting in advance: a mirror is a round trip away, or ten imports.
#
# The first connections to each mirror are begun before the modules that use them are loaded, and for most
# command lines already by ``preconnect_mirrors``. What fails here is begun again by the driver that needs
# it, which reports the error.


def can_use_epoll(addresses: Sequence[Address]) -> bool:
    """Return whether the epoll driver can be tried: no proxies, and a system that supports it."""
    return (
        hasattr(select, "epoll")
        and hasattr(os, "eventfd")
        and bool(addresses)
        and all(address.proxy is None for address in addresses)
    )


def securing(address: Address) -> Callable[[Any], Any]:
    """Return a function that starts TLS on a connected socket."""
    import ssl  # few runs need it

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


# Memory that sockets are read into, and from which responses are cut out.

PAGE_BYTES = 256 << 10
"""
The size of one read. Bytes that are hashed and written right after it are still in the processor's cache.
"""


class Page:
    """
    A page of memory to read into.

    Attributes:
        users: jobs of the thread that still need the page, and one more while it is being parsed.
    """

    __slots__ = ("data", "users", "view")

    def __init__(self) -> None:
        self.data = bytearray(PAGE_BYTES)
        self.view = memoryview(self.data)
        self.users = 0


class SocketCache:
    """
    Connections to mirrors that are being made, or that other code left unused; to be closed.

    Args:
        addresses: each connected directly, without a proxy.
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
        """Return a connection to a mirror, and how many files were requested on it; None without one."""
        begun = self._begun.get(address.origin)
        while begun:
            sock, count = begun.pop(0)
            if not _has_something(sock):
                return sock, count
            sock.close()
        return None

    def give(self, address: Address, sock: socket, count: int) -> None:
        """Keep a connection for others, on which that many files were requested and received."""
        self._begun.setdefault(address.origin, []).append((sock, count))

    def close(self) -> None:
        for begun in self._begun.values():
            while begun:
                begun.pop()[0].close()


def _has_something(sock: socket) -> bool:
    """
    Return whether a server has sent something without a request: nearly always the end of the connection.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
