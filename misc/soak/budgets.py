"""
What transfers cost where it takes long to find out: a gigabyte, and windows on links of all kinds.

    python misc/soak/budgets.py [--bytes N]

In virtual time, with real servers, whose disks need about five thirds of the size; the file itself lies
beside them.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

if __name__ == "__main__":  # as a file, it stands outside of the packages that it needs
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "src")]

from tests.simulation.grid_budgets import Discarded, best_fixed_window, put_seconds, warm_up
from tests.simulation.grid_world import GridWorld

from pipegrid.core.encoding_parameters import Params

BYTES = 1_000_000_000
MBIT = 125_000
RTT_S = 0.1
PARAMS = Params(3, 5)
WINDOW_BYTES = 10_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 if a budget was missed."""
    parser = argparse.ArgumentParser(description="Budgets of large transfers in virtual time.")
    parser.add_argument("--bytes", type=int, default=BYTES)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    missed = [*large_file(options.bytes, options.seed), *windows()]
    for each in missed:
        print("MISSED", each)
    return 1 if missed else 0


def large_file(size: int, seed: int) -> list[str]:
    """Put and get a large file over 100 Mbit/s at 100 ms; return what was missed."""
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="pipegrid-budgets-") as directory:
        source = Path(directory, "source")
        digest = make_file(source, size, seed)
        world = GridWorld(
            5, latency_s=RTT_S / 2, shared_bytes_per_s=100 * MBIT, root=Path(directory)
        )
        client = world.client(params=PARAMS, happy=5)
        warm_up(world, client)
        # All that is imported and made once has been by now.
        world.run(client.grid.put(Random(seed).randbytes(20_000_000)))
        before = peak_bytes()
        result, put_s = world.timed(lambda: client.grid.put(source))
        sink = Discarded()
        _, get_s = world.timed(lambda: client.grid.get(result.cap, sink))
        grown = peak_bytes() - before
        least_put_s = RTT_S + size * 5 / 3 / (100 * MBIT)
        least_get_s = RTT_S + size / (100 * MBIT)
        print(
            f"{size} bytes: put {put_s:.2f} s ({put_s / least_put_s:.4f} of the least), get"
            f" {get_s:.2f} s ({get_s / least_get_s:.4f}), memory grew by {grown / 1e6:.0f} MB"
        )
        if sink.digest() != digest:
            missed.append("the file that came back is another")
        if put_s > 1.03 * least_put_s or get_s > 1.03 * least_get_s:
            missed.append("within 3 % of a round trip and the bytes")
        if grown > 32 << 20:
            missed.append("memory that does not grow with the file")
        missed += world.leaks()
        world.close()
    return missed


def windows() -> list[str]:
    """Compare windows that measure with the best of fixed ones; return where they are 5 % slower."""
    missed: list[str] = []
    for megabits in (1, 10, 100, 1000, 10_000):
        for rtt_s in (0.0001, 0.001, 0.01, 0.1, 0.3):
            rate = megabits * MBIT
            size = min(WINDOW_BYTES, max(1_000_000, rate))
            auto_s = put_seconds(rate, rtt_s, size, None)
            ratio = auto_s / best_fixed_window(rate, rtt_s, size)
            print(f"{megabits:6} Mbit/s {rtt_s * 1000:6.1f} ms: auto takes {ratio:.4f} of the best")
            if ratio > 1.05:
                missed.append(f"a window at {megabits} Mbit/s and {rtt_s * 1000:g} ms: {ratio:.4f}")
    return missed


def make_file(path: Path, size: int, seed: int) -> bytes:
    """Write a file that does not compress; return its hash."""
    random, hashed = Random(seed), hashlib.blake2b()
    with open(path, "wb") as file:
        for at in range(0, size, 1 << 20):
            piece = random.randbytes(min(1 << 20, size - at))
            hashed.update(piece)
            file.write(piece)
    return hashed.digest()


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
