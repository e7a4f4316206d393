"""
What changed between two builds, beyond noise, by a stated test.

A measurement has changed if it did so

* by more than 10 %, than twice what one round of it differs from the next (standard deviation), and than
  runs of one side differ among themselves, where a side has several;
* both in seconds and beside the ceiling of its own run: round trips and raw TCP were measured in the same
  run, and when they got slower, that much is the path's fault and not the build's;
* and farther than relabelling of the rounds explains: a permutation test of the maximum over all
  measurements (`significance`), at 1 % for the whole comparison, "slower" and "faster" each.

What that finds and what it misses was simulated: docs/explanation-speedtest-compare.md. This module is pure.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence

import attrs

from pipegrid.errors import UsageError
from pipegrid.speedtest.comparison import (
    FASTER,
    LEAST_CHANGE,
    LEVEL,
    SAME,
    SLOWER,
    UNJUDGED,
    Comparison,
    FigureChange,
    title,
)
from pipegrid.speedtest.results import EmulatedLink, Measurement, Parameters, Run
from pipegrid.speedtest.significance import PairedSamples, greater, least_p

ROUNDS_TO_RUNS = 2.0
"""
A single run does not tell how far the next will be from it; its rounds do in part, since a machine that is
busy now and then is so in more runs and fewer. On a shared machine of two cores the medians of eight runs of
five rounds scattered once to twice as far as the rounds.
"""

BUSY = 0.15
"""Rounds that scatter by more say that the machine did other things; then single runs tell little."""

_RESAMPLES = 200
_SEED = 5

_Key = tuple[str, str, str]
"""Group, direction and name of a measurement."""


def compare(
    before: Run | Sequence[Run], after: Run | Sequence[Run], anyway: bool = False
) -> Comparison:
    """
    Say what changed beyond noise.

    Args:
        before, after: at least one run each, all with the same parameters and on the same machine; more runs
            of a side tell how far runs differ that should not.
        anyway: only warn if they are not.

    Raises:
        UsageError: the runs cannot be compared; the sentence says why.
    """
    olds = [before] if isinstance(before, Run) else list(before)
    news = [after] if isinstance(after, Run) else list(after)
    if not olds or not news:
        raise UsageError(
            "a comparison needs a run before and a run after; give at least one of each"
        )
    warnings = _differences([*olds, *news])
    if warnings and not anyway:
        raise UsageError(
            f"these runs cannot be compared: {warnings[0]}; measure both in the same way and place,"
            " or compare them anyway"
        )
    sides = (_Side.of(olds), _Side.of(news))
    keys = [key for key in sides[0].samples if key in sides[1].samples]
    if not keys:
        raise UsageError("the runs have no measurement in common; measure the same scenarios twice")
    changes = _judge(keys, *sides)
    unjudged = sum(each.verdict == UNJUDGED for each in changes)
    if unjudged:
        warnings.append(
            f"measurements with too few rounds to be judged: {unjudged}; five before and five after are"
            " enough"
        )
    scatter = statistics.median(max(side.scatter(key) for side in sides) for key in keys)
    if scatter > BUSY and len(olds) < 5:
        warnings.append(
            f"rounds scatter by {scatter:.0%}: the machine was busy; measure again when it is not, or give"
            " five runs before"
        )
    path = max((abs(sides[1].path(key, sides[0])) for key in keys), default=0.0)
    if path > math.log(1.5):
        warnings.append(
            f"the path itself (round trips, raw TCP) differs by up to {math.exp(path):.1f} times, so smaller"
            " changes of the build cannot be seen"
        )
    return Comparison(
        changes=tuple(changes),
        warnings=tuple(warnings),
        missing=tuple(title(key) for key in sides[0].samples if key not in sides[1].samples),
        added=tuple(title(key) for key in sides[1].samples if key not in sides[0].samples),
    )


def _differences(runs: Sequence[Run]) -> list[str]:
    """Return a clause for everything that should be equal in all runs and is not."""
    ignored = {"seed", "rounds"}
    found = []
    for field in attrs.fields(Parameters):
        values = {_named(getattr(run.parameters, field.name)) for run in runs}
        if field.name not in ignored and len(values) > 1:
            found.append(f"{field.name} differs ({' and '.join(sorted(values))})")
    # Keys that only some have say nothing: later versions may write more.
    shared = set.intersection(*(set(run.machine) for run in runs))
    for name in sorted(shared):
        values = {run.machine[name] for run in runs}
        if len(values) > 1:
            found.append(f"the machine's {name} differs ({' and '.join(sorted(values))})")
    return found


def _named(value: object) -> str:
    """Return a parameter as a person calls it."""
    if isinstance(value, EmulatedLink):
        rates = [value.up_bytes_per_s, value.down_bytes_per_s]
        carries = [f"{rate / 1000:g} kB/s" for rate in rates if rate is not None]
        return " ".join([value.name, f"{value.rtt_s * 1000:g} ms", *carries])
    return "none" if value is None else str(value)


@attrs.frozen
class _Side:
    """
    The runs of one build.

    Attributes:
        samples: of each measurement, logarithms of seconds, one tuple a run.
        floors: of each measurement, logarithm of the seconds that its run's path needs at the least, or None.
    """

    samples: Mapping[_Key, list[tuple[float, ...]]]
    floors: Mapping[_Key, float | None]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> _Side:
        samples: dict[_Key, list[tuple[float, ...]]] = {}
        floors: dict[_Key, list[float]] = {}
        for run in runs:
            for each in run.measurements:
                key = (each.group, each.direction, each.name)
                samples.setdefault(key, []).append(
                    tuple(math.log(max(sample, 1e-9)) for sample in each.samples_s)
                )
                floor = _floor_s(run, each)
                if floor:
                    floors.setdefault(key, []).append(math.log(floor))
        middle = {key: statistics.median(floors[key]) if key in floors else None for key in samples}
        return cls(samples, middle)

    def pooled(self, key: _Key) -> tuple[float, ...]:
        """Return all samples of a measurement, each run's hiccups drawn in."""
        return tuple(value for run in self.samples[key] for value in _tamed(run))

    def scatter(self, key: _Key) -> float:
        """Return the standard deviation of a round, in this side's typical run; 0 if that is not known."""
        runs = [statistics.stdev(_tamed(run)) for run in self.samples[key] if len(run) > 1]
        return statistics.median(runs) if runs else 0.0

    def reach(self, key: _Key) -> float:
        """Return how far a run of this side lies from the middle of them; 0 for a single run."""
        middles = [statistics.median(run) for run in self.samples[key]]
        centre = statistics.median(middles)
        return max(abs(middle - centre) for middle in middles)

    def path(self, key: _Key, other: _Side) -> float:
        """Return how much slower this side's path is than another's, as a logarithm; 0 if not known."""
        mine, theirs = self.floors[key], other.floors[key]
        return 0.0 if mine is None or theirs is None else mine - theirs


def _floor_s(run: Run, measured: Measurement) -> float | None:
    """Return what a round costs on this run's path at the least: round trips, and bytes over raw TCP."""
    floor_s = 0.0
    if run.round_trips:
        trips = [sample for each in run.round_trips for sample in each.samples_s]
        floor_s += statistics.median(trips) * (1 if measured.at_once else measured.files)
    if measured.wire_bytes:
        servers = run.parameters.servers
        for streams, tls in ((servers, True), (servers, False), (1, True), (1, False)):
            rate = run.baseline(measured.direction, streams, tls)
            if rate:
                floor_s += measured.wire_bytes / rate
                break
    return floor_s or None


def _tamed(values: tuple[float, ...]) -> tuple[float, ...]:
    """
    Draw what lies far out nearer to a run's middle, to three robust deviations.

    A round in which the machine did something else for a second is a slow round, not the measure of all
    noise. The margin bounds it from below, so that samples that agree by chance are left alone.
    """
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    reach = max(3 * deviation, math.log1p(LEAST_CHANGE))
    return tuple(min(max(value, middle - reach), middle + reach) for value in values)


def _judge(keys: Sequence[_Key], old: _Side, new: _Side) -> list[FigureChange]:
    """Test all measurements together, in both directions."""
    scatter = {key: max(old.scatter(key), new.scatter(key)) for key in keys}
    # Five rounds may agree by chance where the machine was restless.
    typical = statistics.median(scatter.values()) / 2
    noise = {
        key: max(
            math.log1p(LEAST_CHANGE),
            ROUNDS_TO_RUNS * max(scatter[key], typical),
            old.reach(key),
            new.reach(key),
        )
        for key in keys
    }
    # A path that got slower excuses a slower build, and cannot make one look faster.
    slower = {key: noise[key] + max(new.path(key, old), 0.0) for key in keys}
    faster = {key: noise[key] + max(old.path(key, new), 0.0) for key in keys}
    before = {key: old.pooled(key) for key in keys}
    after = {key: new.pooled(key) for key in keys}
    judged = [key for key in keys if least_p(len(before[key]), len(after[key])) <= LEVEL]
    up = greater([PairedSamples(before[key], after[key], slower[key]) for key in judged])
    down = greater([PairedSamples(after[key], before[key], faster[key]) for key in judged])
    p_slower = dict(zip(judged, up, strict=True))
    p_faster = dict(zip(judged, down, strict=True))
    rng = random.Random(_SEED)
    changes = []
    for key in keys:
        middles = [_middle(side.samples[key]) for side in (old, new)]
        log_ratio = middles[1] - middles[0]
        rises = log_ratio > 0
        margin = slower[key] if rises else faster[key]
        p = (p_slower if rises else p_faster).get(key)
        if p is None:
            verdict = UNJUDGED
        elif p <= LEVEL and abs(log_ratio) > margin:
            verdict = SLOWER if rises else FASTER
        else:
            verdict = SAME
        low, high = _interval(old.samples[key], new.samples[key], rng)
        group, direction, name = key
        changes.append(
            FigureChange(
                name=name,
                group=group,
                direction=direction,
                before_s=math.exp(middles[0]),
                after_s=math.exp(middles[1]),
                ratio=math.exp(log_ratio),
                low=math.exp(low),
                high=math.exp(high),
                margin=math.exp(margin),
                p=p,
                verdict=verdict,
            )
        )
    return changes


def _middle(runs: Iterable[Sequence[float]]) -> float:
    """Return the middle of a side: the median over its runs of their medians."""
    return statistics.median(statistics.median(run) for run in runs)


def _interval(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], rng: random.Random
) -> tuple[float, float]:
    """Return where 95 % of bootstrapped differences lie; runs are drawn first, then rounds of each."""

    def draw(runs: Sequence[Sequence[float]]) -> float:
        chosen = rng.choices(runs, k=len(runs))
        return _middle([rng.choices(run, k=len(run)) for run in chosen])

    differences = sorted(draw(after) - draw(before) for _ in range(_RESAMPLES))
    tail = round(0.025 * _RESAMPLES)
    return differences[tail], differences[-tail - 1]
