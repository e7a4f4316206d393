"""
Random histories of two clients with one catalogue, killed at any moment: ``python -m misc.prune_world``.

After each history everything reachable is read, and after a last prune of both clients nothing else is on the
servers (``tests/tree/prune_world.py``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.tree.prune_world import run_history


def main() -> int:
    """Run histories; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=1000, metavar="N")
    parser.add_argument("--first", type=int, default=1, metavar="SEED")
    parser.add_argument("--steps", type=int, default=14, metavar="N")
    options = parser.parse_args()
    began_s = time.monotonic()
    done: Counter[str] = Counter()
    failed = []
    for seed in range(options.first, options.first + options.histories):
        try:
            log = run_history(seed, options.steps)
        except AssertionError as error:
            failed.append(seed)
            print(f"seed {seed}: {error}", flush=True)
            continue
        for line in log:
            _, _, what = line.partition(": ")
            if what:
                done[what.split()[0].rstrip(",") + (" killed" if "killed" in what else "")] += 1
    kinds = ", ".join(f"{count} {what}" for what, count in done.most_common())
    print(
        f"{options.histories} histories in {time.monotonic() - began_s:.0f} s: {len(failed)} failed "
        f"{failed or ''}; {kinds}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
