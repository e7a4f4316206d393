"""Made-up runs that have everything a report can show; the figures are those of a grid on a DSL line."""

from __future__ import annotations

import random

import attrs

from pipegrid.speedtest.run_results import (
    COLD_START,
    DIRECTIONS,
    DOWN,
    ENCODING,
    SCENARIO,
    UP,
    WINDOW,
    Baseline,
    Burst,
    EmulatedLink,
    Measurement,
    Parameters,
    RoundTrip,
    Run,
    Timeline,
)

RTT_S = 0.0112
RATES = {UP: 80e3, DOWN: 520e3}
SERVERS = tuple(f"server {number}" for number in range(1, 11))
WINDOWS = (10, 20, 50, 100, 200, 500, 1000, 2000, 4000, 16000)
MIXED = "1000 mixed sizes"

SMALL = (
    ("startup", 1, 3.4, False),
    ("1x 200B", 1, 1.06, False),
    ("10x 200B", 10, 1.04, False),
    ("100x 200B", 100, 1.05, False),
    ("100x 200B at once", 100, 0.12, True),
)
LARGE = (
    ("1MB", 1, 10**6, 0.952),
    ("10MB", 1, 10**7, 0.973),
    ("100MB", 1, 10**8, 0.986),
    (MIXED, 1000, 10**4, 0.81),
)


def sample_run(seed: int = 1, commit: str = "c0ffee1", slowed: float = 1.0) -> Run:
    """Return a run with everything; times of measurements are multiplied by ``slowed``."""
    rng = random.Random(seed)

    def samples(middle: float) -> list[float]:
        return [middle * slowed * rng.uniform(0.985, 1.03) for _ in range(5)]

    measured = []
    for way in DIRECTIONS:
        faster = 1.0 if way == UP else 0.97
        for name, files, trips, at_once in SMALL:
            times = samples(trips * faster * files * RTT_S)
            measured.append(
                Measurement(name, SCENARIO, way, files, 200, 900 * files, times, at_once)
            )
        for name, files, size, share in LARGE:
            wire = files * size * (10 // 3 if way == UP else 1)
            times = samples(wire / RATES[way] / share)
            measured.append(
                Measurement(name, SCENARIO, way, files, size, wire, times, name == MIXED)
            )
        measured += _sweeps(way, samples)
    measured.append(Measurement("pipegrid --version", COLD_START, UP, 1, 0, 0, samples(0.14)))
    return Run(
        when=f"2026-11-{seed % 28 + 1:02d}T10:00:00Z",
        took_s=248.0,
        commit=commit,
        versions={"pipegrid": "0.1.0", "python": "3.11.7", "twisted": "25.5.0"},
        machine={"system": "Linux 6.1", "architecture": "x86_64", "cores": "2", "memory": "4 GB"},
        parameters=Parameters(
            "private grid", "gbs", 10, 3, 7, 10, 5, 7, link=EmulatedLink("dsl", 0.011, 80e3, 520e3)
        ),
        round_trips=tuple(
            RoundTrip(server, [RTT_S * rng.uniform(0.99, 1.02) for _ in range(5)])
            for server in SERVERS
        ),
        baselines=tuple(
            Baseline(
                streams,
                tls,
                way,
                [RATES[way] * share * rng.uniform(0.99, 1.01) for _ in range(3)],
                [RATES[way] * share * rng.uniform(0.99, 1.01) for _ in range(3)],
            )
            for way in DIRECTIONS
            for streams, tls, share in (
                (1, False, 0.99),
                (10, False, 1.0),
                (1, True, 0.97),
                (10, True, 0.98),
            )
        ),
        measurements=tuple(measured),
        timeline=_timeline(rng),
    )


def _sweeps(way: str, samples: object) -> list[Measurement]:
    assert callable(samples)
    wire = 3 * 10**6 if way == UP else 10**6
    found = []
    for kilobytes in WINDOWS:
        share = min(0.97, 0.06 * kilobytes / 10 * (1.6 if way == UP else 1.0))
        times = samples(wire / RATES[way] / share)
        found.append(
            Measurement(
                f"{kilobytes} kB", WINDOW, way, 1, 10**6, wire, times, window_bytes=kilobytes * 1000
            )
        )
    times = samples(wire / RATES[way] / 0.968)
    found.append(Measurement("auto", WINDOW, way, 1, 10**6, wire, times))
    for needed, total in ((1, 1), (1, 3), (3, 10), (7, 10)):
        sent = 10**6 * total // needed if way == UP else 10**6
        times = samples(sent / RATES[way] / 0.95)
        found.append(
            Measurement(
                f"{needed}/{total}",
                ENCODING,
                way,
                1,
                10**6,
                sent,
                times,
                required_shares=needed,
                total_shares=total,
            )
        )
    return found


def _timeline(rng: random.Random) -> Timeline:
    """One small file: everything leaves at once, everything is answered a round trip later."""
    bursts = []
    for index, server in enumerate(SERVERS):
        left = 0.0002 + 0.00006 * index
        bursts += [Burst(server, left, UP, 640), Burst(server, left + 0.0001, UP, 480)]
        back = left + RTT_S * rng.uniform(1.0, 1.03)
        bursts += [Burst(server, back, DOWN, 210), Burst(server, back + 0.0002, DOWN, 90)]
    bursts.sort(key=lambda each: each.at_s)
    return Timeline("1x 200B", RTT_S, bursts[-1].at_s + 0.0001, tuple(bursts))


def sample_history(count: int = 12) -> tuple[Run, ...]:
    """Return earlier runs, oldest first; the oldest third is slower."""
    return tuple(
        attrs.evolve(
            sample_run(100 + number, f"{0xABC000 + 77 * number:07x}", 1.25 if number < 4 else 1.0),
            when=f"2026-{10 + number // 20}-{number % 20 + 1:02d}T10:00:00Z",
        )
        for number in range(count)
    )
