"""
Beginning to connect, which nobody waits for: a mirror is a round trip away, or ten imports.

The first connections to each mirror are begun before the modules are loaded that will use them, and for most
command lines by ``headstart`` already. What cannot be begun here is begun again by whoever needs it, who
knows what to make of the error.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress

from pipegrid.mirror.address import Address
from pipegrid.mirror.sprint.headstart import HeadStart, begin, place_of

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from _socket import socket
    from typing import Any


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

    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])

    def secure(sock: Any) -> Any:
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
        head_start: has begun some of these, and gives them here.
    """

    def __init__(
        self, addresses: Sequence[Address], each: int = 1, head_start: HeadStart | None = None
    ) -> None:
        self._begun: dict[str, list[tuple[socket, int]]] = {}
        for address in addresses:
            sockets = head_start.take(address.url) if head_start is not None else []
            begun = self._begun[address.url] = [(sock, 0) for sock in sockets]
            with suppress(OSError):
                place = place_of(*address.place) if len(begun) < each else None
                while place is not None and len(begun) < each:
                    begun.append((begin(place), 0))

    def take(self, address: Address) -> tuple[socket, int] | None:
        """Return one to a mirror, and how many files were asked for on it, if there is one more."""
        begun = self._begun.get(address.url)
        while begun:
            sock, count = begun.pop(0)
            if not _has_something(sock):
                return sock, count
            sock.close()
        return None

    def give(self, address: Address, sock: socket, count: int) -> None:
        """Leave one for others, on which so many files were asked for, and came."""
        self._begun[address.url].append((sock, count))

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
