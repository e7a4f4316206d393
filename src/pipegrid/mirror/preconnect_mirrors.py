"""
Connections to mirrors, opened in advance, before anything else is imported.

Python needs some twenty milliseconds until it runs the first line of the program, and as long again for the
modules that use mirrors; a round trip takes as long. So if a command line is simple, this module, which
imports almost nothing, connects to its mirrors at once, and ``epoll_socket_cache.SocketCache`` uses the
connections. An unusual URL or an unknown host is skipped here, and reported later.
"""

from __future__ import annotations

import _socket  # ``socket`` makes enums, which takes three milliseconds
import errno
import os

from pipegrid.mirror import HIDDEN

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

LONG_LIST_BYTES = 32 << 10
"""The size from which on a list of files is long: some hundred files."""


def connections_for(file: str, dest: str, most: int) -> int:
    """
    Return how many connections to open before it is known which files of a list are missing.

    The maximum for a long list and a new mirror, which needs all files; one in other cases; none without a
    list.
    """
    try:
        is_long = os.stat(file).st_size >= LONG_LIST_BYTES
    except OSError:
        return 0
    return most if is_long and not os.path.lexists(os.path.join(dest, HIDDEN)) else 1


def place_of(host: bytes, port: int) -> tuple[int, Any]:
    """
    Look up a host; return its address family and address.

    Raises:
        OSError: the host is unknown.
    """
    found = _socket.getaddrinfo(host, port, 0, _socket.SOCK_STREAM)[0]
    return found[0], found[4]


def begin(place: tuple[int, Any]) -> _socket.socket:
    """
    Return a socket that does not block and has begun to connect.

    Raises:
        OSError: the socket cannot connect.
    """
    sock = _socket.socket(place[0], _socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        failed = sock.connect_ex(place[1])
        if failed not in (0, errno.EINPROGRESS):
            raise OSError(failed, os.strerror(failed))
        sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def is_overlay_host(host: str) -> bool:
    """
    Return whether only Tor or I2P know a host; the same as ``connection_policy.is_overlay_name``, with fewer
    imports.
    """
    return host.lower().rstrip(".").endswith((".onion", ".i2p"))


def plain_url(url: str) -> tuple[str, str, int, str] | None:
    """Return scheme, host, port and path of a URL without unusual characters; None for any other URL."""
    scheme, _, rest = url.partition("://")
    netloc, _, path = rest.partition("/")
    host, colon, port = netloc.partition(":")
    letters = host.replace("-", "a").replace(".", "a") + path.translate(_IN_PATHS)
    if scheme not in ("http", "https") or not host or not (letters.isascii() and letters.isalnum()):
        return None
    if is_overlay_host(host):
        return None
    if not colon:
        return scheme, host.lower(), 443 if scheme == "https" else 80, path
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        return None
    return scheme, host.lower(), int(port), path


_IN_PATHS = dict.fromkeys(map(ord, "/-._~+"), "a")


class EarlySockets:
    """
    Connections that are being made to mirrors; the owner must close the object.

    Args:
        urls: the mirrors' URLs as given by the user.
        each: how many connections to make to each mirror.
    """

    def __init__(self, urls: Iterable[str], each: int) -> None:
        self._begun: dict[str, list[_socket.socket]] = {}
        for url in urls:
            plain = plain_url(url)
            if plain is None or url in self._begun:
                continue
            begun = self._begun[url] = []
            try:
                if each:
                    place = place_of(plain[1].encode("ascii"), plain[2])
                while len(begun) < each:
                    begun.append(begin(place))
            except OSError:  # a later attempt reports the error
                pass

    def take(self, url: str) -> list[_socket.socket]:
        """Return the connections that were begun to a mirror, perhaps none; the caller must close them."""
        return self._begun.pop(url, [])

    def close(self) -> None:
        while self._begun:
            for sock in self._begun.popitem()[1]:
                sock.close()
