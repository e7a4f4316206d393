"""Clients over Foolscap whose read-test-writes have as many tiny parts as can be, or parts within parts."""

from __future__ import annotations

import itertools
import threading

from misc.attack.foolscap import Peer, call, in_parallel, opened, token, value
from misc.attack.target import Target, from_command_line
from pipegrid.wire.banana_receiver import OPEN

CONNECTIONS = 6
VECTORS = 100_000
_kinds = itertools.cycle(range(3))
_lock = threading.Lock()
_SECRETS = value((b"w" * 32, b"r" * 32, b"c" * 32))


def attack(target: Target) -> None:
    """Send them in three ways."""
    in_parallel(target, CONNECTIONS, send)


def send(target: Target) -> None:
    """Send them in one way, until it is cut."""
    with _lock:
        kind = next(_kinds)
    peer = Peer(target).name()
    with peer.socket as connection:
        connection.settimeout(max(0.1, target.left_s))
        for request in itertools.count(2):
            changes = (_many, _shared, _deep)[kind]()
            arguments = (value(b"v" * 16), _SECRETS, changes, value([]))
            message = call(request, peer.storage, b"slot_testv_and_readv_and_writev", *arguments)
            connection.sendall(message)
            connection.recv(65536)


def _many() -> bytes:
    """Many one-byte writes to each of many shares."""
    writes = opened(b"list", value((0, b"x")) * (VECTORS // 100))
    change = opened(b"tuple", value([]), writes, value(None))
    return opened(b"dict", *(value(number) + change for number in range(100)))


def _shared() -> bytes:
    """The same list of writes for every share."""
    writes = opened(b"list", value((0, b"x")) * 4000)
    first = value(0) + opened(b"tuple", value([]), writes, value(None))
    again = opened(b"tuple", value([]), opened(b"reference", value(5)), value(None))
    return opened(b"dict", first, *(value(number) + again for number in range(1, 256)))


def _deep() -> bytes:
    """Lists in lists."""
    return (token(OPEN, 1) + b"\x04\x82list") * 50_000


if __name__ == "__main__":
    attack(from_command_line(__doc__))
