"""
What comparing two builds gave, and how it reads.

The test itself is in `compare`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from pipegrid.speedtest.results import SCENARIO

SLOWER = "slower"
FASTER = "faster"
SAME = "same"
UNJUDGED = "unjudged"

LEVEL = 0.01
"""Share of comparisons of equal builds in which anything may be called slower; the same for faster."""

LEAST_CHANGE = 0.1
"""
Smaller changes are not told from noise: that much may two runs of one build differ as a whole, because of
what else the machine did in those minutes. A single run a side holds no trace of it.
"""


@attrs.frozen(kw_only=True)
class FigureChange:
    """
    One measurement, before and after.

    Attributes:
        name, group, direction: as in the runs.
        before_s, after_s: median seconds of a round.
        ratio: of the medians, after / before; above 1 is slower.
        low, high: 95 % of bootstrapped ratios lie between.
        margin: the ratio that the test calls noise in the direction of the change, above 1.
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

    @property
    def percent(self) -> str:
        """The change and its interval, as ``+31 % (+25 to +38)``."""
        low, high = _percent(self.low), _percent(self.high)
        return f"{_percent(self.ratio)} % ({low} to {high})"


@attrs.frozen(kw_only=True)
class Comparison:
    """
    What the test says.

    Attributes:
        changes: every measurement that both sides have, in the order of the first run.
        warnings: sentences on what makes the comparison weaker.
        missing, added: names of measurements that only the runs before, or after, have.
    """

    changes: tuple[FigureChange, ...]
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    def having(self, verdict: str) -> tuple[FigureChange, ...]:
        """Return the changes with this verdict."""
        return tuple(each for each in self.changes if each.verdict == verdict)

    @property
    def slower(self) -> tuple[FigureChange, ...]:
        """The measurements that take longer now, beyond noise."""
        return self.having(SLOWER)

    @property
    def faster(self) -> tuple[FigureChange, ...]:
        """What takes less time now."""
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
        Return lines for a person.

        Args:
            everything: also what did not change.
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
            f"A change is one of more than {LEAST_CHANGE:.0%}, in seconds and beside the run's own ceiling,"
            " that relabelling of the rounds (maximum over all measurements) explains in at most"
            f" {LEVEL:.0%}.",
        ]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {
            "regressed": self.regressed,
            "summary": self.summary,
            "level": LEVEL,
            "least_change": LEAST_CHANGE,
            **attrs.asdict(self),
        }


def title(key: tuple[str, str, str]) -> str:
    """Return what a measurement is called, by group, direction and name."""
    group, direction, name = key
    return f"{name} {direction}" if group == SCENARIO else f"{group} {name} {direction}"


def _percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{change:+.0f}" if abs(change) >= 10 else f"{change:+.1f}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _table(changes: Sequence[FigureChange]) -> list[str]:
    """Return a line for each change, with a head, in columns."""
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
