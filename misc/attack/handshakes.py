"""Handshakes of Foolscap and TLS, each with some bytes changed, as fast as they go; none is ever finished."""

from __future__ import annotations

import contextlib
import random
import ssl

from misc.attack.foolscap import VOCABULARY, begin, in_parallel
from misc.attack.target import Target, context, from_command_line
from pipegrid.core import base32
from pipegrid.wire import server_address

THREADS = 8
REPLY_S = 2.0
HELLO = (
    b"banana-negotiation-range: 3 3\r\ninitial-vocab-table-range: 0 0\r\nlast-connection: none 0\r\n"
    b"my-incarnation: 0123456789abcdef\r\nmy-tub-id: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n\r\n"
)
DECISION = b"banana-decision-version: 3\r\ncurrent-connection: x 1\r\n" + VOCABULARY + b"\r\n"


def attack(target: Target) -> None:
    """Do it from several addresses at once."""
    in_parallel(target, THREADS, send)


def send(target: Target) -> None:
    """Begin one connection, with something wrong in one of its steps."""
    rng = random.Random()
    with target.connect(f"127.0.2.{rng.randrange(1, 9)}") as connection:
        connection.settimeout(REPLY_S)
        step = rng.randrange(5)
        if step == 0:  # TLS itself, for HTTPS
            connection.sendall(mutated(rng, client_hello()))
            connection.recv(4096)
            return
        tub_id = base32.encode(server_address.parse_furl(target.furl).tub_id)
        if step == 1:
            connection.sendall(
                mutated(rng, f"GET /id/{tub_id} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            )
            connection.recv(4096)
            return
        begin(connection, tub_id)
        if step == 2:  # TLS behind Foolscap's words
            connection.sendall(mutated(rng, client_hello()))
            connection.recv(4096)
            return
        with context().wrap_socket(connection) as encrypted:
            encrypted.sendall(mutated(rng, HELLO) if step == 3 else HELLO)
            encrypted.recv(4096)
            if step == 4:
                encrypted.sendall(mutated(rng, DECISION))
                encrypted.recv(4096)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Change, leave out or repeat some bytes."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed))
        kind = rng.randrange(4)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            del changed[at : at + rng.randrange(1, 9)]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randrange(1, 99))
        else:
            changed[at:at] = changed[at : at + 64]
        changed = changed or bytearray(b"x")
    return bytes(changed)


def client_hello() -> bytes:
    """Return the first words of TLS."""
    written = ssl.MemoryBIO()
    tls = context().wrap_bio(ssl.MemoryBIO(), written)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return written.read()


if __name__ == "__main__":
    attack(from_command_line(__doc__))
