"""
A head start: connections to mirrors that are begun before anything else is loaded.

Python needs some twenty milliseconds until it can run a line of ours, and as much again for the modules
that will talk to mirrors; a mirror is as far away. So of a command line that is plainly right the mirrors
are taken at once, by a module that imports next to nothing, and what it begins here is taken up by
``mirror_sockets.SocketCache``. A URL that is not plain, or a host that nobody knows, is left to those who
know what to say of it.
"""

from __future__ import annotations

import _socket  # ``socket`` has names for people around it, which take three milliseconds
import errno
import os

from pipegrid.mirror import HIDDEN

TYPE_CHECKING = False  # as ``typing`` has it, which would take longer than all of this
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

LONG_LIST_BYTES = 32 << 10
"""Some hundred files."""


def connections_for(file: str, dest: str, most: int) -> int:
    """
    Return how many connections a list of files is worth before anybody has looked what is missing.

    To a mirror that is begun there is as much to ask for as connections carry; if there is a list at all.
    """
    try:
        is_long = os.stat(file).st_size >= LONG_LIST_BYTES
    except OSError:
        return 0
    return most if is_long and not os.path.lexists(os.path.join(dest, HIDDEN)) else 1


def place_of(host: bytes, port: int) -> tuple[int, Any]:
    """
    Look up where a host is: family of addresses, and address.

    Raises:
        OSError: nobody knows.
    """
    found = _socket.getaddrinfo(host, port, 0, _socket.SOCK_STREAM)[0]
    return found[0], found[4]


def begin(place: tuple[int, Any]) -> _socket.socket:
    """
    Return a socket that connects, and does not block.

    Raises:
        OSError: that cannot be begun.
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


def plain_url(url: str) -> tuple[str, str, int, str] | None:
    """Return scheme, host, port and path of a URL of letters, digits and dots; None: look more closely."""
    scheme, _, rest = url.partition("://")
    netloc, _, path = rest.partition("/")
    host, colon, port = netloc.partition(":")
    letters = host.replace("-", "a").replace(".", "a") + path.translate(_IN_PATHS)
    if scheme not in ("http", "https") or not host or not (letters.isascii() and letters.isalnum()):
        return None
    if not colon:
        return scheme, host.lower(), 443 if scheme == "https" else 80, path
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        return None
    return scheme, host.lower(), int(port), path


_IN_PATHS = dict.fromkeys(map(ord, "/-._~+"), "a")


class EarlySockets:
    """
    Connections that are being made to mirrors; to be closed.

    Args:
        urls: of the mirrors, as they were given.
        each: how many to each of them.
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
            except OSError:  # whoever needs it tries again, and knows what to make of the error
                pass

    def take(self, url: str) -> list[_socket.socket]:
        """Return those to a mirror, none if that could not be begun; they are the caller's then."""
        return self._begun.pop(url, [])

    def close(self) -> None:
        """Let go of what nobody took."""
        while self._begun:
            for sock in self._begun.popitem()[1]:
                sock.close()
