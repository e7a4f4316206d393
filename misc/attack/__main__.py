"""
Attack a storage server in every way there is a program for, and say what an honest client noticed.

    python -m misc.attack [--only NAME]... [--seconds N] [--untimed] [--list]

For each attack a ``pipegrid serve`` process of its own; prints one JSON line each and a table at the end.
Exits with 1 if a bound is broken: 256 MiB of memory above idle, an honest client's median twice as long as
undisturbed, 1 s for the worst, nothing left after. docs/reference-security.md tells the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from misc.attack import ATTACKS, Attack
from misc.attack.measure import Outcome, run
from misc.ending import end_on_sigterm

WHOLE_S = 600.0
"""All of ``make attack``."""
OVERHEAD_S = 11.0
"""Of each attack: the server's start, the undisturbed client, and what settles afterwards."""


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m misc.attack", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [attack.name for attack in ATTACKS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--seconds", type=float, help="for each; by default all take ten minutes")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument(
        "--untimed", action="store_true", help="do not judge times; for machines that are busy"
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and do nothing")
    options = parser.parse_args(arguments)
    chosen = [each for each in ATTACKS if not options.only or each.name in options.only]
    if options.list:
        for attack in chosen:
            print(f"{attack.name}: {attack.sentence} ({attack.who})", file=out)
        return 0
    seconds = options.seconds or default_seconds(len(chosen))
    print(f"seed {options.seed}, {seconds:g} s each", file=out, flush=True)
    outcomes = attack_all(chosen, seconds, options.seed, not options.untimed, out)
    print(table(outcomes), file=out)
    broken = [
        f"{outcome.attack.name}: {sentence}"
        for outcome in outcomes
        for sentence in outcome.broken(not options.untimed)
    ]
    print("\n".join(broken) or "all bounds held", file=out, flush=True)
    return 1 if broken else 0


def attack_all(
    attacks: Sequence[Attack], seconds: float, seed: int, timed: bool, out: TextIO
) -> list[Outcome]:
    """Run attacks one after the other, as long as there is time for the whole; print a line for each."""
    ends = time.monotonic() + max(WHOLE_S, seconds + OVERHEAD_S)
    outcomes = []
    for attack in attacks:
        if time.monotonic() + seconds > ends:
            print(f"no time left for {attack.name}", file=out)
            break
        rng = random.Random(f"{seed} {attack.name}")
        with tempfile.TemporaryDirectory(prefix="pipegrid-attack-") as scratch:
            outcomes.append(run(attack, seconds, Path(scratch), rng))
        print(json.dumps(outcomes[-1].as_json(timed)), file=out, flush=True)
    return outcomes


def default_seconds(attacks: int) -> float:
    """Return how long each of so many attacks may go on."""
    return float(min(40, WHOLE_S / max(1, attacks) - OVERHEAD_S) // 1)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return what happened, for people."""
    lines = [
        "attack                memory MiB        honest client: median      worst   failed   left",
        "                    idle    more    undisturbed    attacked   attacked    tries",
    ]
    for each in outcomes:
        times = each.disturbed
        left = [sentence for wrong, sentence in each.left() if wrong]
        lines.append(
            f"{each.attack.name:18} {each.idle.resident_bytes >> 20:5} {each.more_bytes >> 20:7}"
            f" {each.undisturbed.median_s * 1000:11.1f} ms {times.median_s * 1000:8.1f} ms"
            f" {times.worst_s * 1000:7.0f} ms {len(times.failures):8}   {'; '.join(left) or 'nothing'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
