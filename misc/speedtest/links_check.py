"""
What the speed test must show on emulated links, in one command.

    python -m misc.speedtest.links_check [--rounds 5] [--only TEXT] [--output DIR]

Ten private servers, GBS, 3 of 10, each check a run of ``pipegrid.speedtest`` of its own:

* ``round trips``: 100 ms; ``1x 200B`` put and get in at most 1.2 round trips.
* ``dsl``: 11 ms, 80 kB/s up, 520 kB/s down; 1 MB at 95 % of raw TCP or more, counted in bytes of shares.
* ``wan20``: 20 ms, 100 Mbit/s; 100 MB, the same.
* ``window dsl``, ``window colo``, ``window wan``, ``window lfn``: ``auto`` takes at most 5 % longer than the
  best fixed window.

One JSON line for each figure: median and spread of the rounds, the limit, and whether it was kept. The status
is 1 if one was not. It is a measurement: on a machine that does other things besides, it fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from misc import ending
from misc.scratch import scratch_directory
from pipegrid.reactor.process_settings import tune_gc
from pipegrid.speedtest import runner, scenarios
from pipegrid.speedtest.link_proxies import PROFILES
from pipegrid.speedtest.output_formats import of_raw_tcp
from pipegrid.speedtest.run_results import WINDOW, EmulatedLink, Run, spread
from pipegrid.speedtest.scenarios import Scenario
from pipegrid.speedtest.targets import FileTarget, PrivateGrid

MOST_ROUND_TRIPS = 1.2
LEAST_OF_TCP = 0.95
MOST_ABOVE_BEST = 1.05


@attrs.frozen
class Figure:
    """
    Something that was promised, and what was measured.

    Attributes:
        median, low, high: of the rounds.
        limit: of the median.
        kept: whether it was.
    """

    check: str
    name: str
    unit: str
    median: float
    low: float
    high: float
    rounds: int
    limit: float
    kept: bool


@attrs.frozen
class Check:
    """One run, and what is looked at in it."""

    name: str
    link: EmulatedLink
    scenarios: Callable[[FileTarget], Sequence[Scenario]]
    figures: Callable[[str, Run], Iterator[Figure]]
    times: int = 1
    """As many rounds as others have: more where the machine, which is noisy, is the limit."""


def trips(check: str, run: Run) -> Iterator[Figure]:
    """Yield the round trips of a small file: the shortest is the unit, so that all disturbance counts."""
    scale = 1 / min(trip.minimum_s for trip in run.round_trips)
    for each in run.measurements:
        found = spread(each.samples_s)
        median = found.median * scale
        yield Figure(
            check,
            f"{each.name} {each.direction}",
            "round trips",
            round(median, 3),
            round(found.minimum * scale, 3),
            round(found.maximum * scale, 3),
            found.count,
            MOST_ROUND_TRIPS,
            median <= MOST_ROUND_TRIPS,
        )


def throughput(check: str, run: Run) -> Iterator[Figure]:
    """Yield the shares of raw TCP."""
    for each in run.measurements:
        found, share = spread(each.samples_s), of_raw_tcp(run, each) or 0.0
        scale = share * found.median
        yield Figure(
            check,
            f"{each.name} {each.direction}",
            "of raw TCP",
            round(share, 4),
            round(scale / found.maximum, 4),
            round(scale / found.minimum, 4),
            found.count,
            LEAST_OF_TCP,
            share >= LEAST_OF_TCP,
        )


def knee(check: str, run: Run) -> Iterator[Figure]:
    """
    Yield how much longer ``auto`` takes than the best fixed window.

    Which one is the best is found in the odd rounds for the even ones, and the other way round: among eight
    windows that hardly differ, the one that looks best in a round is the luckiest of it.
    """
    swept = [each for each in run.measurements if each.group == WINDOW]
    [auto] = [each for each in swept if not each.window_bytes]
    names, ratios = [], []
    for half in (0, 1):
        fixed = [each for each in swept if each.window_bytes and len(each.samples_s) > 1]
        best = min(fixed, key=lambda each: statistics.median(each.samples_s[1 - half :: 2]))
        names.append(best.name)
        beside = statistics.median(best.samples_s[half::2])
        ratios += [sample / beside for sample in auto.samples_s[half::2]]
    found = spread(ratios)
    yield Figure(
        check,
        f"auto beside {' and '.join(dict.fromkeys(names))}",
        "of the best fixed window's time",
        round(found.median, 4),
        round(found.minimum, 4),
        round(found.maximum, 4),
        found.count,
        MOST_ABOVE_BEST,
        found.median <= MOST_ABOVE_BEST,
    )


def processors_limit(link: EmulatedLink) -> bool:
    """Return whether the line carries more than ten servers and a client on one machine."""
    return link.up_bytes_per_s is None or link.up_bytes_per_s > 10**8


def sweep(target: FileTarget) -> Sequence[Scenario]:
    """Return the window sweep for a target's link; what cannot be the best there is measured twice only."""
    swept = scenarios.window_sweep(scenarios.sweep_bytes(target.link, target.params))
    return [attrs.evolve(each, most_rounds=2) if hopeless(each, target) else each for each in swept]


def hopeless(scenario: Scenario, target: FileTarget) -> bool:
    """Return whether a window, full in every round trip, fills less than half of the line."""
    link, window = target.link, scenario.window_bytes
    if link is None or link.up_bytes_per_s is None or window is None:
        return False
    return 2 * window * target.servers < link.up_bytes_per_s * link.rtt_s


CHECKS = (
    Check("round trips", EmulatedLink("100 ms", 0.1), lambda _: [scenarios.series(1, 200)], trips),
    Check("dsl", PROFILES["dsl"], lambda _: [scenarios.large(10**6)], throughput),
    Check(
        "wan20",
        EmulatedLink("100 Mbit/s, 20 ms", 0.02, 12.5e6, 12.5e6),
        lambda _: [scenarios.large(10**8)],
        throughput,
    ),
    *(
        Check(f"window {name}", link, sweep, knee, 3 if processors_limit(link) else 1)
        for name, link in PROFILES.items()
    ),
)


async def measure(reactor: Any, options: argparse.Namespace) -> bool:
    """Do all checks that are wanted; returns whether all was kept."""
    kept = True
    for check in CHECKS:
        if options.only not in check.name:
            continue
        target = PrivateGrid(reactor, link=check.link, scratch=options.scratch)
        settings = runner.Settings(check.times * options.rounds, options.seed)
        run = await runner.run(reactor, target, check.scenarios, settings, tell)
        if options.output is not None:
            name = check.name.replace(" ", "-")
            (options.output / f"{name}.json").write_text(run.as_json(), "utf-8")
        for figure in check.figures(check.name, run):
            kept = kept and figure.kept
            print(json.dumps({**attrs.asdict(figure), "rtt_ms": rtt_ms(run)}), flush=True)
    return kept


def rtt_ms(run: Run) -> float:
    """Return the shortest round trip, in milliseconds."""
    return round(1000 * min(trip.minimum_s for trip in run.round_trips), 3)


def tell(text: str) -> None:
    """Say how it goes."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and exit with what came of it."""
    parser = argparse.ArgumentParser(description="What the speed test must show.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", metavar="TEXT", help="checks with this in the name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scratch", type=scratch_directory, help="where the servers' directories are made"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write the runs there, as JSON")
    options = parser.parse_args(arguments)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)

    async def run(reactor: Any) -> None:
        tune_gc()  # as the command does
        if not await measure(reactor, options):
            raise SystemExit(1)

    ending.run(run)


if __name__ == "__main__":
    main()
