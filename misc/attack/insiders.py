"""What attack programs of those who know the secret have in common: lines, and requests with any body."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Mapping, Sequence

from misc.attack.target import Target, refused_or_cut
from pipegrid.core import base32
from pipegrid.wire import gbs_paths_headers

ANSWER = b"HTTP/1.1 "
PATIENCE_S = 20.0


def line_of(secrets: Mapping[str, bytes]) -> list[bytes]:
    """Return the header lines with secrets."""
    lines = gbs_paths_headers.secret_lines(dict(secrets))
    return [b"X-Tahoe-Authorization: " + line for line in lines]


def lease(number: int) -> dict[str, bytes]:
    """Return the lease secrets of one of many clients."""
    return {
        gbs_paths_headers.RENEW_SECRET: b"%032d" % number,
        gbs_paths_headers.CANCEL_SECRET: b"%032d" % (number + 1),
    }


def slot_path(index: bytes) -> str:
    """Return where a slot is changed."""
    return f"/storage/v1/mutable/{base32.encode(index)}/read-test-write"


def writer(number: int = 0) -> list[bytes]:
    """Return the header lines of a read-test-write."""
    return line_of({**lease(number), gbs_paths_headers.WRITE_ENABLER: b"w" * 32})


@contextlib.contextmanager
def lines(target: Target, count: int) -> Iterator[Line]:
    """Keep some connections, which are made anew when the server cuts them."""
    line = Line(target, count)
    try:
        yield line
    finally:
        line.close()


class Line:
    """Some connections to the server, used in turn."""

    def __init__(self, target: Target, count: int) -> None:
        self._target = target
        self._connections: list[ssl.SSLSocket | None] = [None] * count
        self._turn = 0

    def send(self, requests: Sequence[bytes]) -> bytes:
        """Send requests at once on the next connection, and receive as many answers; returns those."""
        self._turn = (self._turn + 1) % len(self._connections)
        received = b""
        with refused_or_cut():
            connection = self._connections[self._turn]
            if connection is None:
                connection = self._target.connect_tls()
                connection.settimeout(PATIENCE_S)
            self._connections[self._turn] = None  # unless all goes well
            connection.sendall(b"".join(requests))
            answers = 0
            while answers < len(requests):
                data = connection.recv(1 << 16)
                if not data:
                    connection.close()
                    return received
                answers += data.count(ANSWER)
                received = (received + data)[-(1 << 16) :]
            self._connections[self._turn] = connection
        return received

    def close(self) -> None:
        """Close them."""
        for connection in self._connections:
            if connection is not None:
                connection.close()
