"""
Random faults on a whole grid in virtual time: real servers, real clients, and everything that goes wrong.

    python misc/soak/faults.py --runs 10000 --seed S      runs S, S + 1, … and prints a table
    python misc/soak/faults.py --one SEED                 replays one, with its plan and its timeline
    python misc/soak/faults.py --one SEED --shrink        and strikes out what it does not need to fail

What is promised, and so checked, is said in ``tests/simulation/fault_schedules.py``.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # as a file, it stands outside of the packages that it needs
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "src")]

from tests.simulation.fault_schedules import Outcome, Performance, Schedule, history, perform
from twisted.logger import globalLogBeginner

RUNS = 2000
SHOWN_FAILURES = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description="Random faults on a grid in virtual time.")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--one", type=int, metavar="SEED", help="replay one")
    parser.add_argument("--shrink", action="store_true", help="of --one: strike out faults")
    parser.add_argument("--entries", type=int, default=200, help="of --one: how long a timeline")
    options = parser.parse_args(arguments)
    # Until somebody listens Twisted keeps what is logged, and with it programs that were killed long ago.
    globalLogBeginner.beginLoggingTo([], discardBuffer=True, redirectStandardIO=False)
    if options.one is not None:
        return replay(Schedule.random(options.one), options.shrink, options.entries)
    return run_many(options.seed, options.runs)


def run_many(seed: int, runs: int) -> int:
    """Run many; print what became of them."""
    print(f"faults: {runs} schedules from seed {seed}")
    outcomes: Counter[tuple[str, str]] = Counter()
    failed: list[tuple[int, str]] = []
    began_s = time.perf_counter()
    longest = (0.0, seed)
    for number in range(seed, seed + runs):
        outcome = attempt(Schedule.random(number))
        if isinstance(outcome, Outcome):
            outcomes[outcome.put, outcome.get] += 1
            longest = max(longest, (outcome.virtual_s, number))
        else:
            failed.append((number, f"{type(outcome).__name__}: {outcome}"))
            print(f"FAILED {number}: {_first_line(outcome)}", flush=True)
    took_s = time.perf_counter() - began_s
    print(f"{'put':16} {'get':10} {'times':>7}")
    for (put, get), count in sorted(outcomes.items()):
        print(f"{put:16} {get:10} {count:7}")
    print(f"{'broken promises':27} {len(failed):7}")
    print(
        f"{runs / took_s * 60:.0f} schedules a minute; the longest (seed {longest[1]}) took"
        f" {longest[0]:.0f} s of virtual time"
    )
    for number, reason in failed[:SHOWN_FAILURES]:
        print(f"\n--one {number}\n{reason[:2000]}")
    return 1 if failed else 0


def attempt(schedule: Schedule) -> Outcome | Exception:
    """Return what became of it, or why it failed."""
    try:
        return perform(schedule)
    except Exception as error:
        gc.collect()  # what it left must not be found in the next one
        return error


def replay(schedule: Schedule, shrinking: bool, entries: int) -> int:
    """Run one; print its plan, its timeline and what became of it."""
    if shrinking:
        schedule = shrink(schedule)
    print(schedule)

    def tell(performance: Performance) -> None:
        print(history(performance, entries))

    try:
        print(perform(schedule, tell))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def shrink(schedule: Schedule) -> Schedule:
    """Strike out faults for as long as it still fails."""
    for shorter in schedule.shorter():
        if isinstance(attempt(shorter), Exception):
            return shrink(shorter)
    return schedule


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


if __name__ == "__main__":
    sys.exit(main())
