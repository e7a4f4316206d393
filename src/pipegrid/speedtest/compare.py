"""What changed between two builds, beyond noise, by a stated test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from pipegrid.speedtest.results import Run

SLOWER = "slower"
FASTER = "faster"
SAME = "same"
UNJUDGED = "unjudged"


@attrs.frozen(kw_only=True)
class Change:
    """
    One measurement, before and after.

    Attributes:
        name, group, direction: as in the runs.
        before_s, after_s: median seconds of a round.
        ratio: of the medians, after / before; above 1 is slower.
        low, high: 95 % of the bootstrap's ratios lie between.
        margin: the change that the test calls noise, as a ratio (1.1: 10 % either way).
        p: chance of such a change somewhere, were all builds the same; None if there are too few samples.
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


@attrs.frozen(kw_only=True)
class Comparison:
    """
    What the test says.

    Attributes:
        changes: every measurement that both sides have, in the order of the first run.
        warnings: sentences on what makes the comparison weaker.
        missing, added: names of measurements that only the runs before, or after, have.
    """

    changes: tuple[Change, ...]
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    @property
    def slower(self) -> tuple[Change, ...]:
        """What takes longer now."""
        return tuple(each for each in self.changes if each.verdict == SLOWER)

    @property
    def faster(self) -> tuple[Change, ...]:
        """What takes less time now."""
        return tuple(each for each in self.changes if each.verdict == FASTER)

    @property
    def regressed(self) -> bool:
        """Whether anything is slower."""
        return bool(self.slower)

    def as_text(self) -> str:
        """Return some lines for a person."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        raise NotImplementedError


def compare(
    before: Run | Sequence[Run], after: Run | Sequence[Run], anyway: bool = False
) -> Comparison:
    """
    Say what changed beyond noise.

    Args:
        before, after: at least one run each, all with the same parameters and on the same machine.
        anyway: only warn if they are not.

    Raises:
        UsageError: the runs cannot be compared; the sentence says why.
    """
    raise NotImplementedError
