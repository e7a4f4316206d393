"""
Compares two builds for regressions: a permutation test finds the measurements that changed beyond noise.
Pure.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from pipegrid.errors import UsageError
from pipegrid.speedtest.run_results import SCENARIO, EmulatedLink, Measurement, Parameters, Run

# The result of a comparison, and its text.

SLOWER = "slower"
FASTER = "faster"
SAME = "same"
UNJUDGED = "unjudged"

LEVEL = 0.01
"""The highest chance that equal builds show some slower measurement; the same applies to faster ones."""

LEAST_CHANGE = 0.1
"""
Changes smaller than this ratio count as noise: all measurements of a run may differ by that much from those
of another run of the same build, because of other work of the machine. A single run per side does not show
such differences.
"""


@attrs.frozen(kw_only=True)
class FigureChange:
    """
    One measurement, before and after.

    Attributes:
        name, group, direction: as in the runs.
        before_s, after_s: median seconds of a round.
        ratio: after_s / before_s; above 1 is slower.
        low, high: the interval of 95 % of bootstrapped ratios.
        margin: the ratio, above 1, up to which the test calls a change in this direction noise.
        p: the probability that at least one measurement changes this much if the builds are equal; None if
            there are too few samples.
        verdict: ``slower``, ``faster``, ``same``, or ``unjudged`` for too few samples.
    """

    name: str
    group: str
    direction: str
    before_s: float
    after_s: float
    ratio: float
    low: float
    high: float
    margin: float
    p: float | None
    verdict: str

    @property
    def percent(self) -> str:
        """The change and its interval, as text: ``+31 % (+25 to +38)``."""
        low, high = _percent(self.low), _percent(self.high)
        return f"{_percent(self.ratio)} % ({low} to {high})"


@attrs.frozen(kw_only=True)
class Comparison:
    """
    The result of the comparison.

    Attributes:
        changes: every measurement that both sides have, in the order of the first run.
        warnings: sentences about what makes the comparison less reliable.
        missing, added: names of measurements that only the runs before, or only the runs after, have.
    """

    changes: tuple[FigureChange, ...]
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    def having(self, verdict: str) -> tuple[FigureChange, ...]:
        """Return the changes with a given verdict."""
        return tuple(each for each in self.changes if each.verdict == verdict)

    @property
    def slower(self) -> tuple[FigureChange, ...]:
        """The measurements that take longer now, beyond noise."""
        return self.having(SLOWER)

    @property
    def faster(self) -> tuple[FigureChange, ...]:
        """The measurements that take less time now, beyond noise."""
        return self.having(FASTER)

    @property
    def regressed(self) -> bool:
        """Whether any measurement takes longer now, beyond noise."""
        return bool(self.slower)

    @property
    def summary(self) -> str:
        """One sentence for people: how many measurements became slower, or faster, beyond noise."""
        judged = len(self.changes) - len(self.having(UNJUDGED))
        if not judged:
            return "Nothing could be judged: there are too few rounds."
        if not self.slower and not self.faster:
            return f"No change beyond noise in {judged} measurements."
        said = [
            f"{len(changes)} {verdict}"
            for verdict, changes in ((SLOWER, self.slower), (FASTER, self.faster))
            if changes
        ]
        return f"Of {judged} measurements {' and '.join(said)}, beyond noise."

    def as_text(self, everything: bool = False) -> str:
        """
        Return the comparison as lines for people.

        Args:
            everything: include measurements that did not change.
        """
        shown = [each for each in self.changes if everything or each.verdict in (SLOWER, FASTER)]
        lines = [self.summary]
        if shown:
            lines += ["", *_table(shown)]
        lines += [""] if self.warnings or self.missing or self.added else []
        lines += [f"Note: {each}" for each in self.warnings]
        if self.missing:
            lines.append(f"Only before: {', '.join(self.missing)}.")
        if self.added:
            lines.append(f"Only after: {', '.join(self.added)}.")
        lines += [
            "",
            f"A change is one of more than {LEAST_CHANGE:.0%}, in seconds and relative to the run's own "
            "ceiling,"
            " that relabelling of the rounds (maximum over all measurements) explains in at most"
            f" {LEVEL:.0%}.",
        ]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as values that JSON can represent."""
        return {
            "regressed": self.regressed,
            "summary": self.summary,
            "level": LEVEL,
            "least_change": LEAST_CHANGE,
            **attrs.asdict(self),
        }


def title(key: tuple[str, str, str]) -> str:
    """Return a name for a measurement, made from group, direction and name."""
    group, direction, name = key
    return f"{name} {direction}" if group == SCENARIO else f"{group} {name} {direction}"


def _percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{change:+.0f}" if abs(change) >= 10 else f"{change:+.1f}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _table(changes: Sequence[FigureChange]) -> list[str]:
    """Return a table with a header and a line for each change."""
    rows = [("", "before", "after", "change (95 %)", "p", "")]
    rows += [
        (
            title((each.group, each.direction, each.name)),
            _seconds(each.before_s),
            _seconds(each.after_s),
            each.percent,
            "" if each.p is None else f"{each.p:.3f}",
            each.verdict,
        )
        for each in changes
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return [
        (f"{row[0]:<{widths[0]}}  " + "  ".join(f"{row[i]:>{widths[i]}}" for i in range(1, 5)))
        + f"  {row[5]}".rstrip()
        for row in rows
    ]


# The question: two builds were measured, each in some rounds. Is a measurement longer in the second build by
# more than a margin, or would randomly labelled rounds often look like that for *some* measurement?
#
# The test is a permutation test of the maximum (Westfall and Young, "Resampling-Based Multiple Testing",
# 1993). It compares the statistic of each measurement with the greatest statistic of any measurement under
# each relabelling. So its p already holds for all measurements together: without any effect, the probability
# that any p falls below alpha is at most alpha, for any number of measurements, any dependence between them,
# and any distribution of the noise. Corrected exact rank tests could never show anything with five rounds per
# side: their smallest p is 1/252 on one side, and Holm's correction would multiply it by the number of
# measurements. Here it stays 1/252 for all measurements together, because distances count, and not only their
# order.
#
# The statistic is Student's t with a constant added to its denominator: the typical noise of all measurements
# (as in SAM: Tusher, Tibshirani and Chu, PNAS 98, 2001). Among dozens of measurements some have five samples
# that agree by chance, and their large t would hide the other measurements. The random relabellings have a
# fixed seed, so equal runs give equal results.

RELABELLINGS = 1000
"""How many relabellings are drawn at random if more exist; the smallest p is 1/1001, a tenth of ``LEVEL``."""

_SEED = 5


@attrs.frozen
class PairedSamples:
    """
    Samples of one measurement, at least one for each build, on a scale where noise adds (logarithms of
    seconds).

    Attributes:
        before, after: the samples of the two builds.
        margin: how much greater ``after`` may be and still count as the same; not negative.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]
    margin: float


def least_p(before: int, after: int) -> float:
    """Return the smallest p that this many samples can give."""
    return max(1 / math.comb(before + after, after), 1 / (RELABELLINGS + 1))


def greater(pairs: Sequence[PairedSamples]) -> list[float]:
    """
    Test for each pair whether ``after`` is greater than ``before`` by more than the margin.

    Returns:
        p for each pair: the share of labellings under which at least one measurement differs as much as this
            pair does; the true labelling is included. If no pair differs by more than its margin, the
            probability that any p is at most alpha is at most alpha.
    """
    if not pairs:
        return []
    prepared = [_prepared(pair) for pair in pairs]
    counts = [(len(pair.before), len(pair.after)) for pair in pairs]
    observed: list[float] = []
    reached = [0] * len(pairs)
    total = 0
    # The first labelling is the true one, so every p is above zero.
    for labels in _relabellings(counts):
        values = _statistics(prepared, [labels[each] for each in counts])
        if not observed:
            observed = values
        greatest = max(values) + 1e-9  # count values as equal if only rounding differs
        total += 1
        for index, value in enumerate(observed):
            reached[index] += greatest >= value
    return [count / total for count in reached]


def _relabellings(
    counts: Sequence[tuple[int, int]],
) -> Iterator[dict[tuple[int, int], tuple[int, ...]]]:
    """
    Yield relabellings: for each pair of sample counts, which samples are called ``after``. The true labelling
    comes first.

    Measurements with equal counts share the labels: their rounds were measured together, so dependent rounds
    stay together.
    """
    kinds = sorted(set(counts))
    if len(kinds) == 1 and math.comb(sum(kinds[0]), kinds[0][1]) <= RELABELLINGS:
        [(before, after)] = kinds
        everything = range(before + after)
        true = tuple(everything)[before:]
        yield {kinds[0]: true}
        for chosen in itertools.combinations(everything, after):
            if chosen != true:
                yield {kinds[0]: chosen}
        return
    rng = random.Random(_SEED)
    yield {(before, after): tuple(range(before, before + after)) for before, after in kinds}
    for _ in range(RELABELLINGS):
        yield {
            (before, after): tuple(rng.sample(range(before + after), after))
            for before, after in kinds
        }


def _prepared(pair: PairedSamples) -> tuple[tuple[float, ...], float]:
    """
    Return the samples of a pair, centred and with the margin subtracted from ``after``; and the sum of their
    squares, which no relabelling changes.
    """
    values = pair.before + tuple(value - pair.margin for value in pair.after)
    middle = statistics.fmean(values)
    centred = tuple(value - middle for value in values)
    return centred, math.fsum(value * value for value in centred)


def _statistics(
    prepared: Sequence[tuple[tuple[float, ...], float]], labels: Sequence[tuple[int, ...]]
) -> list[float]:
    """Return the moderated t of each measurement under these labels."""
    differences: list[float] = []
    errors: list[float] = []
    for (values, squares), chosen in zip(prepared, labels, strict=True):
        count = len(values)
        after = len(chosen)
        before = count - after
        # The values are centred, so the sum of one side determines the means of both sides.
        total = sum([values[index] for index in chosen])
        difference = total * (1 / after + 1 / before)
        within = max(squares - difference * difference * after * before / count, 0.0)
        differences.append(difference)
        errors.append(math.sqrt(within / max(count - 2, 1) * (1 / after + 1 / before)))
    typical = statistics.median(errors)
    return [
        difference / (error + typical + 1e-12)
        for difference, error in zip(differences, errors, strict=True)
    ]


# A measurement counts as changed if all of this is true:
#
# * it changed by more than 10 %, by more than twice the standard deviation of its rounds, and by more than
#   the runs of one side differ among themselves, if a side has several runs;
# * it changed both in seconds and compared with the ceiling of its own run: round trips and raw TCP were
#   measured in the same run, and if they became slower, the path explains that part of the change;
# * relabelling of the rounds does not explain the change: the permutation test above rejects it, at 1 % for
#   the whole comparison, for "slower" and for "faster" each.
#
# docs/explanation-speedtest-compare.md has simulations of what these rules find and miss.

ROUNDS_TO_RUNS = 2.0
"""
The assumed ratio of the variation between runs to that between rounds. A single run does not show how much
the next run will differ. Its rounds show a part of that, since other work of the machine affects several
runs. On a shared machine of two cores the medians of eight runs of five rounds varied one to two times as
much as the rounds.
"""

BUSY = 0.15
"""If rounds vary by more than this, the machine had other work, and single runs are unreliable."""

_RESAMPLES = 200


_Key = tuple[str, str, str]
"""Group, direction and name of a measurement."""


def compare(
    before: Run | Sequence[Run], after: Run | Sequence[Run], anyway: bool = False
) -> Comparison:
    """
    Return what changed beyond noise.

    Args:
        before, after: at least one run each, all with the same parameters and on the same machine; several
            runs of one side show how much equal runs differ.
        anyway: only warn if the runs are not comparable.

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
            f"the path itself (round trips, raw TCP) differs by a factor of up to {math.exp(path):.1f}, so "
            "smaller changes of the build cannot be seen"
        )
    return Comparison(
        changes=tuple(changes),
        warnings=tuple(warnings),
        missing=tuple(title(key) for key in sides[0].samples if key not in sides[1].samples),
        added=tuple(title(key) for key in sides[1].samples if key not in sides[0].samples),
    )


def _differences(runs: Sequence[Run]) -> list[str]:
    """Return a clause for each property that should be equal in all runs but differs."""
    ignored = {"seed", "rounds"}
    found = []
    for field in attrs.fields(Parameters):
        values = {_named(getattr(run.parameters, field.name)) for run in runs}
        if field.name not in ignored and len(values) > 1:
            found.append(f"{field.name} differs ({' and '.join(sorted(values))})")
    # Keys that only some runs have are ignored, since later versions may write more keys.
    shared = set.intersection(*(set(run.machine) for run in runs))
    for name in sorted(shared):
        values = {run.machine[name] for run in runs}
        if len(values) > 1:
            found.append(f"the machine's {name} differs ({' and '.join(sorted(values))})")
    return found


def _named(value: object) -> str:
    """Return a parameter as text for people."""
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
        samples: for each measurement, the logarithms of seconds, one tuple per run.
        floors: for each measurement, the logarithm of the least seconds that the path of its run allows, or
            None.
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
        """Return all samples of a measurement, with the outliers of each run moved nearer to its middle."""
        return tuple(value for run in self.samples[key] for value in _tamed(run))

    def scatter(self, key: _Key) -> float:
        """Return the standard deviation of rounds in a typical run of this side; 0 if unknown."""
        runs = [statistics.stdev(_tamed(run)) for run in self.samples[key] if len(run) > 1]
        return statistics.median(runs) if runs else 0.0

    def reach(self, key: _Key) -> float:
        """
        Return the largest distance of a run's median from the median of this side's runs; 0 for a single run.
        """
        middles = [statistics.median(run) for run in self.samples[key]]
        centre = statistics.median(middles)
        return max(abs(middle - centre) for middle in middles)

    def path(self, key: _Key, other: _Side) -> float:
        """Return how much slower this side's path is than the other side's, as a logarithm; 0 if unknown."""
        mine, theirs = self.floors[key], other.floors[key]
        return 0.0 if mine is None or theirs is None else mine - theirs


def _floor_s(run: Run, measured: Measurement) -> float | None:
    """
    Return the least time that a round could take on this run's path: round trips, plus share bytes at the
    rate of raw TCP; None if neither was measured.
    """
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
    Move outliers to at most three robust standard deviations from a run's middle.

    A round in which the machine did other work for a second is only one slow round; it must not determine the
    noise. Samples within ``LEAST_CHANGE`` of the middle never move, so samples that agree by chance are not
    changed.
    """
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    reach = max(3 * deviation, math.log1p(LEAST_CHANGE))
    return tuple(min(max(value, middle - reach), middle + reach) for value in values)


def _judge(keys: Sequence[_Key], old: _Side, new: _Side) -> list[FigureChange]:
    """Test all measurements together, in both directions."""
    scatter = {key: max(old.scatter(key), new.scatter(key)) for key in keys}
    # A lower bound for the noise: on a busy machine, five rounds may agree by chance.
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
    # A slower path explains a slower build; it must not make a build look faster.
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
    """Return the middle of a side: the median of the medians of its runs."""
    return statistics.median(statistics.median(run) for run in runs)


def _interval(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], rng: random.Random
) -> tuple[float, float]:
    """
    Return the interval of 95 % of bootstrapped differences; each bootstrap draws runs, then rounds of each
    run.
    """

    def draw(runs: Sequence[Sequence[float]]) -> float:
        chosen = rng.choices(runs, k=len(runs))
        return _middle([rng.choices(run, k=len(run)) for run in chosen])

    differences = sorted(draw(after) - draw(before) for _ in range(_RESAMPLES))
    tail = round(0.025 * _RESAMPLES)
    return differences[tail], differences[-tail - 1]
