"""
Sockets of the epoll driver, opened in advance or kept for later, also with TLS; and the pages of memory that
they are read into.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress

from pipegrid.mirror.mirror_urls import Address
from pipegrid.mirror.preconnect_mirrors import EarlySockets, begin, place_of

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import

if TYPE_CHECKING:
    from _socket import socket
    from typing import Any


# Connecting in advance: a mirror is a round trip away, and ten imports take as long.
#
# The first connections to each mirror are begun before the modules that use them are imported; for most
# command lines, ``preconnect_mirrors`` has begun them even earlier. If a connection fails here, the driver
# that needs it makes another one and reports the error.


def can_use_epoll(addresses: Sequence[Address]) -> bool:
    """Return whether the epoll driver can be used: there are no proxies, and the system supports it."""
    return (
        hasattr(select, "epoll")
        and hasattr(os, "eventfd")
        and bool(addresses)
        and all(address.proxy is None for address in addresses)
    )


def securing(address: Address) -> Callable[[Any], Any]:
    """Return a function that starts TLS on a connected socket."""
    import ssl  # few runs need this module

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


# Memory that sockets are read into and that responses are cut out of.

PAGE_BYTES = 256 << 10
"""Size of a page and a read. Bytes hashed and written after a read are still in the processor's cache."""


class Page:
    """
    A page of memory to read into.

    Attributes:
        users: the number of jobs in the worker thread that still need the page, plus one while it is being
            parsed.
    """

    __slots__ = ("data", "users", "view")

    def __init__(self) -> None:
        self.data = bytearray(PAGE_BYTES)
        self.view = memoryview(self.data)
        self.users = 0


class SocketCache:
    """
    Connections to mirrors that are being made, or that other code has left unused. The owner must close the
    cache.

    Args:
        addresses: of the mirrors; each is connected to directly, without a proxy.
        each: how many connections to make to each address.
        head_start: has begun some of these connections already.
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
        """
        Return a connection to a mirror, and how many files were requested on it before; None if there is no
        usable one.
        """
        begun = self._begun.get(address.origin)
        while begun:
            sock, count = begun.pop(0)
            if not _has_something(sock):
                return sock, count
            sock.close()
        return None

    def give(self, address: Address, sock: socket, count: int) -> None:
        """Keep an idle connection for later; ``count`` files were requested and received on it."""
        self._begun.setdefault(address.origin, []).append((sock, count))

    def close(self) -> None:
        for begun in self._begun.values():
            while begun:
                begun.pop()[0].close()


def _has_something(sock: socket) -> bool:
    """
    Return whether a socket can be read, although nothing was requested: the server has nearly always closed
    the connection.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
