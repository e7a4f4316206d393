"""
How often ``speedtest compare`` cries wolf, and how often it misses one: by simulation.

Runs are made up: each measurement has a time, each run a common offset and a smaller one for each
measurement, each round noise with heavy tails (Student's t with three degrees of freedom) and, one time in
thirty, a hiccup of half the time or more. Round trips and raw TCP follow the run's common offset by half, as
they do when something else keeps the machine busy.

    python misc/speedtest/power.py --comparisons 200
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence

import attrs

from pipegrid.speedtest.run_comparison import compare
from pipegrid.speedtest.run_results import (
    DIRECTIONS,
    SCENARIO,
    UP,
    WINDOW,
    Baseline,
    Measurement,
    Parameters,
    RoundTrip,
    Run,
)

MEASUREMENTS = 30


@attrs.frozen
class Machine:
    """
    How a machine's times scatter, as standard deviations of their logarithms.

    Attributes:
        rounds: from round to round of a run.
        runs: from run to run, all measurements together.
    """

    rounds: float
    runs: float


MACHINES = {
    "quiet": Machine(0.03, 0.02),
    "usual": Machine(0.06, 0.05),
    "busy": Machine(0.25, 0.30),
}

EFFECTS = {
    "none": 0.0,
    "all +15 %": 0.15,
    "all +30 %": 0.30,
    "all +100 %": 1.0,
    "one +30 %": 0.30,
    "one +100 %": 1.0,
    "uploads +30 %": 0.30,
}

SIDES = {"1 v 1": (1, 1), "5 v 1": (5, 1)}


def _heavy(rng: random.Random) -> float:
    """Return Student's t with three degrees of freedom, scaled to a deviation of 1."""
    squares = math.fsum(rng.gauss(0, 1) ** 2 for _ in range(3))
    return rng.gauss(0, 1) / math.sqrt(squares / 3) / math.sqrt(3)


def made_up(rng: random.Random, machine: Machine, rounds: int, effect: str = "none") -> Run:
    """Return a run of a machine, slowed by an effect."""
    common = rng.gauss(0, machine.runs)
    path = common / 2
    measurements = []
    for index in range(MEASUREMENTS):
        direction = DIRECTIONS[index % 2]
        own = rng.gauss(0, machine.runs / 3)
        hit = (
            effect.startswith("all")
            or (effect.startswith("one") and index == 7)
            or (effect.startswith("uploads") and direction == UP)
        )
        slowed = math.log1p(EFFECTS[effect]) if hit else 0.0
        samples = []
        for _ in range(rounds):
            noise = machine.rounds * _heavy(rng)
            hiccup = rng.expovariate(1.0) + 0.4 if rng.random() < 1 / 30 else 0.0
            samples.append(0.1 * math.exp(common + own + noise + hiccup + slowed))
        group = SCENARIO if index < 16 else WINDOW
        measurements.append(Measurement(f"m{index}", group, direction, 1, 200, 900, samples))
    trips = [0.01 * math.exp(path + 0.05 * abs(rng.gauss(0, 1))) for _ in range(20)]
    rates = [1e8 * math.exp(-path + 0.03 * rng.gauss(0, 1)) for _ in range(6)]
    return Run(
        when="2026-11-21T10:00:00Z",
        took_s=1.0,
        commit=None,
        versions={},
        machine={},
        parameters=Parameters("private grid", "gbs", 10, 3, 7, 10, rounds, 1),
        round_trips=(RoundTrip("a", trips),),
        baselines=tuple(Baseline(10, True, way, rates[:3], rates[3:]) for way in DIRECTIONS),
        measurements=tuple(measurements),
    )


def flagged(
    rng: random.Random, machine: Machine, sides: tuple[int, int], rounds: int, effect: str
) -> tuple[bool, bool]:
    """Compare made-up runs; return whether anything was called slower, or anything faster."""
    before = [made_up(rng, machine, rounds) for _ in range(sides[0])]
    after = [made_up(rng, machine, rounds, effect) for _ in range(sides[1])]
    result = compare(before, after)
    return result.regressed, bool(result.faster)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one JSON line for each machine, number of runs and effect."""
    parser = argparse.ArgumentParser(description="False alarms and power of speedtest compare.")
    parser.add_argument("--comparisons", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="effects with this in the name")
    options = parser.parse_args(arguments)
    for name, machine in MACHINES.items():
        for title, sides in SIDES.items():
            for effect in EFFECTS:
                if options.only not in effect:
                    continue
                rng = random.Random(f"{options.seed} {name} {title} {effect}")
                results = [
                    flagged(rng, machine, sides, options.rounds, effect)
                    for _ in range(options.comparisons)
                ]
                line = {
                    "machine": name,
                    "runs": title,
                    "rounds": options.rounds,
                    "effect": effect,
                    "slower": sum(each[0] for each in results) / len(results),
                    "faster": sum(each[1] for each in results) / len(results),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
