"""
What is compared, what is promised, and how a comparison is summed up. No process, no clock.

A *ratio* is how many times longer Tahoe-LAFS's gateway took: its median over PipeGrid's, in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from misc.speedtest.peers.nodes import FOOLSCAP, HTTPS

PUT = "put"
GET = "get"
DIRECTIONS = (PUT, GET)
PIPEGRID = "pipegrid"
TAHOE = "tahoe"


@attrs.frozen
class Scenario:
    """So many files of one size, at once or one after the other."""

    name: str
    size: int
    count: int = 1
    at_once: bool = False


ONE = Scenario("1 x 200 B", 200)
SERIES = Scenario("100 x 200 B in series", 200, 100)
AT_ONCE = Scenario("100 x 200 B at once", 200, 100, at_once=True)
MEGABYTE = Scenario("1 MB", 10**6)
TEN_MEGABYTES = Scenario("10 MB", 10**7)
HUNDRED_MEGABYTES = Scenario("100 MB", 10**8)
SCENARIOS = (ONE, SERIES, AT_ONCE, MEGABYTE, TEN_MEGABYTES, HUNDRED_MEGABYTES)
TINY = (Scenario("3 x 200 B in series", 200, 3), Scenario("3 x 300 kB at once", 300_000, 3, True))

TARGETS: Mapping[tuple[float, str, str, str], float] = {
    (100.0, HTTPS, ONE.name, PUT): 3.0,
    (100.0, HTTPS, ONE.name, GET): 2.0,
    (100.0, HTTPS, AT_ONCE.name, PUT): 5.0,
    (100.0, HTTPS, AT_ONCE.name, GET): 10.0,
    (100.0, HTTPS, HUNDRED_MEGABYTES.name, PUT): 5.0,
    (100.0, HTTPS, HUNDRED_MEGABYTES.name, GET): 20.0,
    (0.0, HTTPS, HUNDRED_MEGABYTES.name, PUT): 2.5,
    (0.0, HTTPS, HUNDRED_MEGABYTES.name, GET): 4.0,
    (0.0, FOOLSCAP, HUNDRED_MEGABYTES.name, PUT): 2.0,
    (0.0, FOOLSCAP, HUNDRED_MEGABYTES.name, GET): 2.0,
    # Of mutable files and directories (``operations``).
    (100.0, HTTPS, "200 B", "create"): 1.5,
    (100.0, HTTPS, "a child", "link"): 4.0,
    (100.0, HTTPS, "200 B into a directory", "put"): 4.0,
    (100.0, HTTPS, "a child", "rename"): 6.0,
    (100.0, HTTPS, "200 B", "overwrite"): 1.8,
    (100.0, HTTPS, "200 B, warm", "overwrite"): 3.0,
    (100.0, HTTPS, "a directory", "list"): 2.0,
    (100.0, HTTPS, "10 MB of MDMF", "get"): 15.0,
}
"""The least ratio, by round trip (ms), protocol of the gateway, scenario and direction."""


@attrs.define
class Samples:
    """
    What one of the two took for one direction of a scenario, one value a round.

    Attributes:
        failed: rounds that it did not complete, and that were repeated.
    """

    seconds: list[float] = attrs.Factory(list)
    client_cpu_s: list[float] = attrs.Factory(list)
    servers_cpu_s: list[float] = attrs.Factory(list)
    failed: int = 0

    def extend(self, more: Samples) -> None:
        """Take over the rounds of others."""
        self.seconds += more.seconds
        self.client_cpu_s += more.client_cpu_s
        self.servers_cpu_s += more.servers_cpu_s

    def as_json(self) -> dict[str, Any]:
        """Return median and spread, and what they cost."""
        return {
            "median_s": round(statistics.median(self.seconds), 4),
            "spread_s": [round(min(self.seconds), 4), round(max(self.seconds), 4)],
            "client_cpu_s": round(statistics.median(self.client_cpu_s), 3),
            "servers_cpu_s": round(statistics.median(self.servers_cpu_s), 3),
            **({"failed": self.failed} if self.failed else {}),
        }


@attrs.frozen
class Comparison:
    """
    One direction of one scenario, measured with both.

    Attributes:
        rtt_ms: that the link adds; 0 is loopback as it is.
        against: the protocol of Tahoe-LAFS's gateway.
        protocol: PipeGrid's.
    """

    rtt_ms: float
    protocol: str
    against: str
    scenario: Scenario
    direction: str
    pipegrid: Samples
    tahoe: Samples

    @property
    def ratio(self) -> float:
        """How many times longer Tahoe-LAFS's gateway took."""
        return statistics.median(self.tahoe.seconds) / statistics.median(self.pipegrid.seconds)

    @property
    def target(self) -> float | None:
        """The least ratio that is promised; None if nothing is."""
        key = (self.rtt_ms, self.against, self.scenario.name, self.direction)
        return TARGETS.get(key)

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None without one."""
        return None if self.target is None else self.ratio >= self.target

    def as_json(self) -> dict[str, Any]:
        """Return all of it."""
        pairs = zip(self.tahoe.seconds, self.pipegrid.seconds, strict=True)
        ratios = [tahoe_s / pipegrid_s for tahoe_s, pipegrid_s in pairs]
        return {
            "scenario": f"{self.direction} {self.scenario.name}",
            "rtt_ms": self.rtt_ms,
            "protocol": self.protocol,
            "against": self.against,
            "rounds": len(ratios),
            "ratio": round(self.ratio, 2),
            "ratio_spread": [round(min(ratios), 2), round(max(ratios), 2)],
            "target": self.target,
            "met": self.met,
            PIPEGRID: self.pipegrid.as_json(),
            TAHOE: self.tahoe.as_json(),
        }


def table(comparisons: Sequence[Comparison]) -> str:
    """Return a table for people."""
    rows = [("RTT", "what", "PipeGrid", "Tahoe", "over", "times", "target", "")]
    for each in comparisons:
        verdict = {None: "", True: "met", False: "NOT MET"}[each.met]
        rows.append(
            (
                f"{each.rtt_ms:g} ms",
                f"{each.direction} {each.scenario.name}",
                f"{statistics.median(each.pipegrid.seconds):.3f} s",
                f"{statistics.median(each.tahoe.seconds):.3f} s",
                each.against,
                f"{each.ratio:.1f}",
                "" if each.target is None else f"{each.target:g}",
                verdict,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
