"""Measuring what transfers cost on a grid in virtual time; used by tests and by ``misc/soak/budgets.py``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from io import BytesIO
from random import Random
from typing import Any

from pipegrid.flow.window import Window
from pipegrid.grid.server_opening import Windows
from tests.simulation.grid_world import Client, GridWorld

FIXED_WINDOWS = (1 << 18, 1 << 20, Windows.shared_by(10).held_bytes)
"""In bytes; the last is what memory allows, which windows that measure keep to as well."""


class Discarded(BytesIO):
    """Takes a file and keeps its hash only."""

    def __init__(self) -> None:
        super().__init__()
        self._hash = hashlib.blake2b()

    def write(self, data: Any) -> int:
        """Take some more."""
        self._hash.update(data)
        return len(data)

    def digest(self) -> bytes:
        """The hash of what was written."""
        return self._hash.digest()

    @staticmethod
    def of(data: bytes) -> bytes:
        """The hash of data."""
        return hashlib.blake2b(data).digest()


def warm_up(world: GridWorld, client: Client) -> None:
    """Have every connection open that a put and a get need, for uploads and for reads."""
    cap = world.run(client.grid.put(Random(0).randbytes(300))).cap
    world.run(client.grid.status())
    world.run(client.grid.read(cap))
    world.clock.advance(1)


def put_seconds(
    bytes_per_s: int, rtt_s: float, size: int, window: Callable[[], int | Window] | None
) -> float:
    """Return how long the second put takes over a line that ten servers share; the first one learns."""
    world = GridWorld(latency_s=rtt_s / 2, shared_bytes_per_s=bytes_per_s)
    try:
        client = world.client(window=window)
        world.timed(lambda: client.grid.put(Random(1).randbytes(size)))
        _, took_s = world.timed(lambda: client.grid.put(Random(2).randbytes(size)))
        left = world.leaks()
        assert not left, left
    finally:
        world.close()
    return took_s


def best_fixed_window(bytes_per_s: int, rtt_s: float, size: int) -> float:
    """Return how long a put takes with the best of some fixed windows."""
    return min(put_seconds(bytes_per_s, rtt_s, size, lambda w=w: w) for w in FIXED_WINDOWS)  # type: ignore[misc]
