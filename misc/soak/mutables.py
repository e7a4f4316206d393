"""
Random faults under writers of one mutable file or directory, in virtual time: real servers, real clients.

    python misc/soak/mutables.py --runs 10000 --seed S      runs S, S + 1, … and prints a summary
    python misc/soak/mutables.py --one SEED                 replays one, with its plan

What is promised, and so checked, is said in ``tests/simulation/mutable_schedules.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # as a file, it stands outside of the packages that it needs
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "src")]

from tests.simulation.mutable_schedules import Schedule, perform
from twisted.logger import globalLogBeginner

RUNS = 500


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description="Random faults under writers of a mutable file.")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--one", type=int, metavar="SEED", help="replay one")
    options = parser.parse_args(arguments)
    # Until somebody listens Twisted keeps what is logged, and with it programs that were killed long ago.
    globalLogBeginner.beginLoggingTo([], discardBuffer=True, redirectStandardIO=False)
    if options.one is not None:
        schedule = Schedule.random(options.one)
        print(schedule)
        print(perform(schedule))
        return 0
    return run_many(options.seed, options.runs)


def run_many(seed: int, runs: int) -> int:
    """Run many; print what became of them."""
    print(f"mutables: {runs} schedules from seed {seed}")
    acknowledged = failed = reads = repairs = returned = broken = 0
    longest = (0.0, seed)
    began_s = time.perf_counter()
    for number in range(seed, seed + runs):
        try:
            outcome = perform(Schedule.random(number))
        except Exception:
            broken += 1
            print(f"FAILED --one {number}: {traceback.format_exc(limit=-2)}", flush=True)
            continue
        acknowledged += outcome.acknowledged
        failed += outcome.failed
        reads += outcome.reads
        repairs += outcome.repairs
        returned += outcome.returned
        longest = max(longest, (outcome.virtual_s, number))
    took_s = time.perf_counter() - began_s
    print(
        f"{acknowledged} changes acknowledged, {failed} failed; {reads} reads and {repairs} repairs "
        f"in the middle of it; {returned} removed children came back; {broken} broken promises; "
        f"{runs / took_s * 60:.0f} schedules a minute; the longest (seed {longest[1]}) took "
        f"{longest[0]:.0f} s of virtual time"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
