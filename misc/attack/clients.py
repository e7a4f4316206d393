"""Many honest clients at the same moment, each a process."""

from __future__ import annotations

import os
import random
import time

from misc.attack.honest import Client
from misc.attack.target import Target, again_and_again, from_command_line

PROCESSES = 200
PAUSE_S = 5.0


def attack(target: Target) -> None:
    """Fork, and wait for all; fails if one of them was refused anything."""
    children = [os.fork() or _be_client(target, number) for number in range(PROCESSES)]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    failed = sum(status != 0 for status in statuses)
    if failed:
        raise SystemExit(f"{failed} of {PROCESSES} clients were not served")


def _be_client(target: Target, number: int) -> int:
    try:
        rng = random.Random(number)
        time.sleep(min(rng.random() * PAUSE_S, max(0.0, target.left_s)))
        client = Client(target, rng)
        for _ in again_and_again(target, PAUSE_S):
            client.put_and_get()
    except BaseException:
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    attack(from_command_line(__doc__))
