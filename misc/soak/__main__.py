"""
All soak tests, one after the other: random, bounded, and repeatable by the seed that is printed.

    python -m misc.soak [--seed S]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from misc.soak import (
    budgets,
    faults,
    kill_get,
    kill_publish,
    kill_put,
    kill_tree,
    mutables,
    resume,
    twins,
)

SOAKS: tuple[Callable[[Sequence[str]], int], ...] = (
    kill_put.main,
    resume.main,
    kill_get.main,
    kill_tree.main,
    faults.main,
    mutables.main,
    kill_publish.main,
    twins.main,
    budgets.main,
)
"""Each takes ``--seed`` and returns an exit status."""


def main() -> int:
    """Run them all; returns 1 if any failed."""
    parser = argparse.ArgumentParser(description="Run all soak tests.")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    seed = parser.parse_args().seed
    return max([soak(["--seed", str(seed)]) for soak in SOAKS])


if __name__ == "__main__":
    sys.exit(main())
