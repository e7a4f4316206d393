"""
Clients over Foolscap that write 120 MiB at a time, without end: to nobody, to one share, and a byte a
second.
"""

from __future__ import annotations

import itertools
import os
import threading
import time

from misc.attack.foolscap import Peer, call, in_parallel, opened, pour, string, token, value
from misc.attack.target import Target, from_command_line
from pipegrid.wire.banana_receiver import STRING

CONNECTIONS = 9
WRITE_BYTES = 120 << 20
MARK = b"?data?"
_kinds = itertools.cycle(range(3))
_lock = threading.Lock()


def attack(target: Target) -> None:
    """Write in three ways."""
    in_parallel(target, CONNECTIONS, write)


def write(target: Target) -> None:
    """Write in one way, until it is cut."""
    with _lock:
        kind = next(_kinds)
    peer = Peer(target).name()
    with peer.socket as connection:
        connection.settimeout(max(0.1, target.left_s))
        canary = opened(b"my-reference", value(7), value(b""))
        numbers = opened(b"set", value(0))
        given = (
            value(os.urandom(16)),
            value(b"r" * 32),
            value(b"c" * 32),
            numbers,
            value(WRITE_BYTES),
            canary,
        )
        connection.sendall(call(2, peer.storage, b"allocate_buckets", *given))
        connection.recv(65536)
        writer = peer.storage + 1
        for request in itertools.count(3):
            data = call(request, 99 if kind == 0 else writer, b"write", value(0), value(MARK))
            head, _, end = data.partition(string(MARK))
            connection.sendall(head + token(STRING, WRITE_BYTES))
            if kind == 2:
                pour(target, connection, b"x" * (1 << 20), WRITE_BYTES - (1 << 20))
                while target.left_s > 0:
                    connection.sendall(b"x")
                    time.sleep(1.0)
                return
            pour(target, connection, b"x" * (1 << 20), WRITE_BYTES)
            connection.sendall(end)


if __name__ == "__main__":
    attack(from_command_line(__doc__))
