"""
What files cost on ten real storage servers: round trips for small ones, a share of TLS's own rate for large.

    python -m misc.speedtest.grid [--rtt-ms 100] [--rounds 5] [--large-rounds 3] [--only TEXT] [--nice 10]

Ten ``pipegrid serve`` processes on loopback, over TLS, with durability ``batch``; ``Grid`` in this process.

**Small files** go through a relay that adds the round trip. A figure is the time until all files of a round
are stored (or fetched), in round trips; connections are up. The ceiling is 1. The unit is what one byte takes
to an echo behind the same link and back, measured between the rounds: its minimum, so that whatever disturbs
this machine counts against the files. Eleven processes share the processors here, where each server has its
own on a grid, and the client has its; so the servers stand back behind the client (``nice``). With
``--nice 0`` they all compete, and the client waits for its turn, with something to send, while they work.

**Large files** go without relay, in turns (A B A B) with plain TLS streams to as many processes that move
as many bytes (``tlsrate``). The figure is the quotient of both rates, counted in bytes of shares on the wire:
size * n/k for a put, size for a get, whatever the race to begin it wastes.

Data is random and fresh in each round, and compared when it comes back. The first round of each scenario
does not count. The garbage collector is tuned as the ``pipegrid`` command tunes its own. One JSON line for
each scenario: median and spread over the rounds, CPU time of both sides.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import attrs
from twisted.internet.defer import Deferred, gatherResults

from misc import ending
from misc.scratch import scratch_directory
from misc.speedtest import processes
from misc.speedtest.processes import Servers
from misc.speedtest.tlsrate import TlsStreams
from pipegrid import Grid
from pipegrid.core import erasure
from pipegrid.reactor.process_settings import tune_gc
from pipegrid.speedtest.benchmark_clients import Comparing

PINGS = 5


@attrs.frozen
class Scenario:
    """
    So many files of one size, stored at once and then fetched at once.

    Attributes:
        target: what is promised of a put, in round trips or as a share of TLS's rate.
    """

    name: str
    size: int
    count: int
    target: float


SMALL = (
    Scenario("1 x 200 B", 200, 1, 1.0),
    Scenario("100 x 200 B", 200, 100, 3.0),
    Scenario("1 x 1 MB", 10**6, 1, 1.0),
)
LARGE = (Scenario("1 x 100 MB", 10**8, 1, 0.3),)
TINY = Scenario("1 x 2 MB", 2 * 10**6, 1, 0.0)


@attrs.define
class Figures:
    """What was measured of one direction of a scenario, one value a round."""

    seconds: list[float] = attrs.Factory(list)
    tls_seconds: list[float] = attrs.Factory(list)
    client_cpu_s: list[float] = attrs.Factory(list)
    servers_cpu_s: list[float] = attrs.Factory(list)
    wire_bytes: int = 0


class Bench:
    """One grid, and the rounds on it."""

    def __init__(self, grid: Grid, servers: Servers, rng: random.Random) -> None:
        self._grid = grid
        self._servers = servers
        self._rng = rng
        self.rtts_s: list[float] = []

    async def round(self, scenario: Scenario, put: Figures, get: Figures) -> None:
        """Store fresh files, fetch them, and note what both took."""
        files = [self._rng.randbytes(scenario.size) for _ in range(scenario.count)]
        self._ping()
        gc.collect()
        stored = await self._timed(put, lambda: [self._grid.put(file) for file in files])
        put.wire_bytes = sum(each.share_bytes * len(each.shares_placed) for each in stored)
        required = self._grid.config.params.required_shares
        get.wire_bytes = sum(each.share_bytes * required for each in stored)
        self._ping()
        sinks = [Comparing(file) for file in files]
        gc.collect()
        await self._timed(
            get,
            lambda: [
                self._grid.get(each.cap, cast(BinaryIO, sink))
                for each, sink in zip(stored, sinks, strict=True)
            ],
        )
        for sink in sinks:
            sink.check()

    async def _timed(self, figures: Figures, start: Callable[[], list[Deferred[Any]]]) -> list[Any]:
        client_s, servers_s = time.process_time(), self._servers.cpu_s()
        began = time.perf_counter()
        results = await gatherResults(start(), consumeErrors=True)
        figures.seconds.append(time.perf_counter() - began)
        figures.client_cpu_s.append(time.process_time() - client_s)
        figures.servers_cpu_s.append(self._servers.cpu_s() - servers_s)
        return list(results)

    def _ping(self) -> None:
        if self._servers.echo_port is not None:
            self.rtts_s += processes.ping_s(self._servers.echo_port, PINGS)


async def measure_small(
    reactor: Any, scenarios: Sequence[Scenario], options: argparse.Namespace, rng: random.Random
) -> list[dict[str, Any]]:
    """Return the results in round trips."""
    results: list[dict[str, Any]] = []
    with start_servers(options, options.rtt_ms / 1000) as servers:
        grid = await Grid.open(reactor, servers.client)
        try:
            # So that all connections are up, whichever servers a file is on.
            await Bench(grid, servers, rng).round(SMALL[1], Figures(), Figures())
            for scenario in scenarios:
                bench = Bench(grid, servers, rng)
                await bench.round(scenario, Figures(), Figures())
                put, get = Figures(), Figures()
                for _ in range(options.rounds):
                    await bench.round(scenario, put, get)
                for direction, figures in (("put", put), ("get", get)):
                    rtt_s = min(bench.rtts_s)
                    trips = [seconds / rtt_s for seconds in figures.seconds]
                    results.append(
                        {
                            "scenario": f"{direction} {scenario.name}",
                            "unit": "round trips",
                            **median_and_spread(trips),
                            "ceiling": 1.0,
                            "target": scenario.target,
                            "per_file": round(statistics.median(trips) / scenario.count, 4),
                            "rtt_ms": round(1000 * rtt_s, 2),
                            "average_rtt_ms": round(1000 * statistics.mean(bench.rtts_s), 2),
                            "nice": options.nice,
                            **costs(figures),
                        }
                    )
        finally:
            await grid.close()
    return results


async def measure_large(
    reactor: Any, scenarios: Sequence[Scenario], options: argparse.Namespace, rng: random.Random
) -> list[dict[str, Any]]:
    """Return the results as shares of TLS's rate."""
    results: list[dict[str, Any]] = []
    with start_servers(options, None) as servers, TlsStreams(options.servers) as streams:
        grid = await Grid.open(reactor, servers.client)
        try:
            for scenario in scenarios:
                bench = Bench(grid, servers, rng)
                put, get = Figures(), Figures()
                await bench.round(scenario, Figures(), Figures())
                for _ in range(options.large_rounds):
                    await bench.round(scenario, put, get)
                    put.tls_seconds.append(streams.write(put.wire_bytes))
                    get.tls_seconds.append(streams.read(get.wire_bytes))
                for direction, figures in (("put", put), ("get", get)):
                    shares = [
                        tls_s / seconds
                        for tls_s, seconds in zip(figures.tls_seconds, figures.seconds, strict=True)
                    ]
                    wire_mb = figures.wire_bytes / 1e6
                    results.append(
                        {
                            "scenario": f"{direction} {scenario.name}",
                            "unit": "of the TLS rate",
                            **median_and_spread(shares),
                            "target": scenario.target,
                            "wire_mb_per_s": round(wire_mb / statistics.median(figures.seconds), 1),
                            "tls_mb_per_s": round(
                                wire_mb / statistics.median(figures.tls_seconds), 1
                            ),
                            **costs(figures),
                        }
                    )
        finally:
            await grid.close()
        for result in results:
            result["servers_peak_mib"] = servers.peak_bytes() >> 20
    return results


def start_servers(options: argparse.Namespace, rtt_s: float | None) -> Servers:
    """Return servers as the options want them, to be entered."""
    return Servers(
        options.servers,
        rtt_s=rtt_s,
        durability=options.durability,
        scratch=options.scratch,
        profile=options.profile,
        yielding=0 if rtt_s is None else options.nice,
    )


def median_and_spread(values: Sequence[float]) -> dict[str, Any]:
    """Return what sums up the rounds."""
    return {
        "median": round(statistics.median(values), 3),
        "spread": [round(min(values), 3), round(max(values), 3)],
        "rounds": len(values),
    }


def costs(figures: Figures) -> dict[str, Any]:
    """Return what a round took, in seconds."""
    return {
        "median_s": round(statistics.median(figures.seconds), 4),
        "client_cpu_s": round(statistics.median(figures.client_cpu_s), 3),
        "servers_cpu_s": round(statistics.median(figures.servers_cpu_s), 3),
    }


def environment(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return what a figure depends on besides."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True
    )
    return {
        "servers": options.servers,
        "durability": options.durability,
        "client_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "seed": seed,
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "erasure": erasure.library(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="What files cost on ten real storage servers.")
    parser.add_argument("--rtt-ms", type=float, default=100.0, help="for the small files")
    parser.add_argument("--servers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large-rounds", type=int, default=3)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="scenarios with this in the name"
    )
    parser.add_argument("--durability", default="batch")
    parser.add_argument(
        "--nice", type=int, default=10, help="of the servers of small files, 0 to 19"
    )
    parser.add_argument(
        "--scratch", type=scratch_directory, help="where the servers' directories are made"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write profiles there")
    options = parser.parse_args(arguments)
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    small: Sequence[Scenario] = SMALL
    large: Sequence[Scenario] = LARGE
    if options.tiny:
        options.rtt_ms, options.rounds, options.large_rounds, options.servers = 5.0, 1, 1, 3
        large = (TINY,)

    async def run(reactor: Any) -> None:
        rng = random.Random(seed)
        for measure, scenarios in ((measure_small, small), (measure_large, large)):
            chosen = [each for each in scenarios if options.only in each.name]
            if chosen:
                tune_gc()  # as the command does
                for result in await measure(reactor, chosen, options, rng):
                    print(json.dumps({**result, **environment(options, seed)}), flush=True)

    if options.profile:
        import cProfile

        options.profile.mkdir(parents=True, exist_ok=True)
        profile = cProfile.Profile()
        profile.enable()
        try:
            ending.run(run)
        finally:
            profile.disable()
            profile.dump_stats(options.profile / "client")
    else:
        ending.run(run)


if __name__ == "__main__":
    main()
