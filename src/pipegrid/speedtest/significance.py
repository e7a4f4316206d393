"""
Which of many measurements lie farther apart than relabelling of their rounds explains.

The question: two builds were measured, each in some rounds. Is a measurement longer in the second build by
more than a margin, or would labels dealt at random among the same rounds often look like that *somewhere*?

The test is a permutation test of the maximum (Westfall and Young, "Resampling-Based Multiple Testing", 1993):
the statistic of each measurement is compared with the greatest that any measurement reaches under each
relabelling. So its p is already that of the whole family: with no effect at all, the chance that anything
falls below alpha is at most alpha, however many measurements there are and however they hang together, and
whatever distribution the noise has. Correcting exact rank tests of five rounds against five could never
show anything: their least p is 1/252 on one side, and Holm would multiply it by the number of measurements;
here it stays 1/252 for the family, because how far apart the samples are counts, not only their order.

The statistic is Student's t with a constant added to its denominator, the typical noise of all measurements
(as in SAM: Tusher, Tibshirani and Chu, PNAS 98, 2001): among dozens of measurements some have five samples
that agree by chance, and their t would drown the rest.

Pure: numbers in, numbers out; the random relabellings have a fixed seed, so the same runs always give the
same answer.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence

import attrs

RELABELLINGS = 1000
"""Drawn where there are more; the least p is then 1/1001, a tenth of the level that is used."""

_SEED = 5


@attrs.frozen
class PairedSamples:
    """
    Samples of one measurement; at least one each, on a scale where noise adds (logarithms of seconds).

    Attributes:
        before, after: of both builds.
        margin: how much greater ``after`` may be and still count as the same; not negative.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]
    margin: float


def least_p(before: int, after: int) -> float:
    """Return the least p that so many samples can give."""
    return max(1 / math.comb(before + after, after), 1 / (RELABELLINGS + 1))


def greater(pairs: Sequence[PairedSamples]) -> list[float]:
    """
    Test for each pair whether ``after`` is greater than ``before`` by more than the margin.

    Returns:
        For each pair the share of relabellings under which some measurement is as far apart as this one is.
        Where no pair differs by more than its margin, some p is at most alpha in at most that share of
        comparisons.
    """
    if not pairs:
        return []
    prepared = [_Prepared.of(pair) for pair in pairs]
    counts = [(len(pair.before), len(pair.after)) for pair in pairs]
    observed: list[float] = []
    reached = [0] * len(pairs)
    total = 0
    # The first labels are the true ones, so that every p is above zero.
    for labels in _relabellings(counts):
        values = _statistics(prepared, [labels[each] for each in counts])
        if not observed:
            observed = values
        greatest = max(values) + 1e-9  # equal up to rounding is equal
        total += 1
        for index, value in enumerate(observed):
            reached[index] += greatest >= value
    return [count / total for count in reached]


def _relabellings(
    counts: Sequence[tuple[int, int]],
) -> Iterator[dict[tuple[int, int], tuple[int, ...]]]:
    """
    Yield, for each pair of sample counts, which samples are called ``after``; the true labels first.

    Measurements with equal counts share the labels: their rounds were measured together, and what hangs
    together stays together.
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


@attrs.frozen
class _Prepared:
    """A pair with the margin taken off, centred; what no relabelling changes is computed once."""

    values: tuple[float, ...]
    squares: float

    @classmethod
    def of(cls, pair: PairedSamples) -> _Prepared:
        values = pair.before + tuple(value - pair.margin for value in pair.after)
        middle = statistics.fmean(values)
        centred = tuple(value - middle for value in values)
        return cls(centred, math.fsum(value * value for value in centred))


def _statistics(prepared: Sequence[_Prepared], labels: Sequence[tuple[int, ...]]) -> list[float]:
    """Return the moderated t of each measurement under these labels."""
    differences: list[float] = []
    errors: list[float] = []
    for each, chosen in zip(prepared, labels, strict=True):
        count = len(each.values)
        after = len(chosen)
        before = count - after
        # Centred, so one side's sum tells both means.
        total = sum([each.values[index] for index in chosen])
        difference = total * (1 / after + 1 / before)
        within = max(each.squares - difference * difference * after * before / count, 0.0)
        differences.append(difference)
        errors.append(math.sqrt(within / max(count - 2, 1) * (1 / after + 1 / before)))
    typical = statistics.median(errors)
    return [
        difference / (error + typical + 1e-12)
        for difference, error in zip(differences, errors, strict=True)
    ]
