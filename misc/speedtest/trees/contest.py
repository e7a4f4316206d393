"""
What is measured, what is promised of it, and how it is summed up. No process, no clock.

A peer that is slow may be measured on a slice of the tree: what a tree without files takes counts once, the
rest is scaled by the number of files, which flatters it if anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import attrs

from misc.speedtest.trees.sides import Took


@attrs.frozen
class Task:
    """
    One line of the table.

    Attributes:
        times: how many times as long Tahoe-LAFS has to take, on its own servers.
        trips, beside_s: how long it may take: round trips, and seconds beside; on servers of ours.
        scales: with the number of files.
    """

    key: str
    name: str
    times: float | None = None
    trips: float | None = None
    beside_s: float = 0.0
    scales: bool = True


START_S = 1.0
"""For start, connections and end of a command; what is promised of a run begins when it is connected."""

FIRST = Task("first", "backup, first run", 20.0)
SAME = Task("same", "backup, nothing changed", None, 1.0, START_S, scales=False)
TEN = Task("ten", "backup, 10 files changed", None, 2.0, START_S, scales=False)
PUT = Task("put", "put -r", 15.0)
GET = Task("get", "get -r", 15.0)
CHECK = Task("check", "check -r", 10.0)
LEASE = Task("lease", "check -r --add-lease", 10.0)
MEND = Task("mend", "check -r --repair, one server emptied", 10.0)
REPAIR = Task("repair", "repair -r, one server emptied", 10.0)
DEEP_PUT = Task("deep-put", "put -r, depth 20", None, 2.0, START_S)
DEEP_GET = Task("deep-get", "get -r, depth 20", None, 22.0, START_S)
LIST = Task("list", "ls of 10,000 entries, beyond get of their bytes", None, 1.0)
TASKS = (FIRST, SAME, TEN, PUT, GET, CHECK, LEASE, MEND, REPAIR, DEEP_PUT, DEEP_GET, LIST)


@attrs.define
class Measured:
    """
    One task on servers of one kind.

    Attributes:
        ours, peer: what each took, one a round.
        beyond: of ours, what it is counted beyond, one a round; empty: beyond nothing.
        constant_s: what the peer takes without files.
        scale: by how many times the peer's slice is smaller.
    """

    task: Task
    servers: str
    rtt_s: float
    cores: int
    ours: list[Took] = attrs.Factory(list)
    peer: list[Took] = attrs.Factory(list)
    beyond: list[Took] = attrs.Factory(list)
    constant_s: float = 0.0
    scale: float = 1.0

    @property
    def ours_s(self) -> list[float]:
        """What counts of each round."""
        if self.beyond:
            return [a.seconds - b.seconds for a, b in zip(self.ours, self.beyond, strict=True)]
        return [each.seconds for each in self.ours]

    @property
    def peer_s(self) -> list[float]:
        """What the peer would have taken for all of the tree, each round."""
        scale = self.scale if self.task.scales else 1.0
        constant_s = min([self.constant_s, *(each.seconds for each in self.peer)])
        return [constant_s + (each.seconds - constant_s) * scale for each in self.peer]

    @property
    def times(self) -> float | None:
        """How many times as long the peer took; None without one."""
        if not self.peer or not self.ours:
            return None
        return statistics.median(self.peer_s) / statistics.median(self.ours_s)

    @property
    def ideal_s(self) -> float:
        """A round trip, and all processor time spread over the cores; never less than the command's own."""
        own_s = statistics.median(each.cpu_s for each in self.ours)
        all_s = own_s + statistics.median(each.others_cpu_s for each in self.ours)
        return self.rtt_s + max(own_s, all_s / self.cores)

    @property
    def limit_s(self) -> float | None:
        """How long it may take; None: nothing is promised."""
        if self.task.trips is None:
            return None
        return self.task.trips * self.rtt_s + self.task.beside_s

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None: there is none for these servers."""
        if self.task.times is not None:
            return None if self.times is None else self.times >= self.task.times
        if self.limit_s is None or not self.ours:
            return None
        return statistics.median(self.ours_s) <= self.limit_s

    def as_json(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            "task": self.task.key,
            "servers": self.servers,
            "rtt_ms": 1000 * self.rtt_s,
            "rounds": len(self.ours),
            "pipegrid_s": _spread(self.ours_s),
            "client_cpu_s": _middle([each.cpu_s for each in self.ours]),
            "others_cpu_s": _middle([each.others_cpu_s for each in self.ours]),
            "ideal_s": round(self.ideal_s, 3),
            "limit_s": self.limit_s,
            "tahoe_s": _spread(self.peer_s) if self.peer else None,
            "tahoe_measured_s": _spread([each.seconds for each in self.peer])
            if self.peer
            else None,
            "tahoe_without_files_s": round(self.constant_s, 2),
            "tahoe_slice": round(1 / self.scale, 4),
            "times": None if self.times is None else round(self.times, 2),
            "target": self.task.times,
            "met": self.met,
        }


def _middle(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def _spread(values: Sequence[float]) -> list[float]:
    return [round(each, 3) for each in (statistics.median(values), min(values), max(values))]


def table(found: Sequence[Measured]) -> str:
    """Return a table for people."""
    rows = [("servers", "what", "PipeGrid", "ideal", "Tahoe", "times", "target", "")]
    for each in found:
        promised = f"{each.task.times:g} times" if each.task.times and each.peer else ""
        if each.limit_s is not None:
            promised = f"{each.limit_s:.2f} s"
        middle, least, most = _spread(each.ours_s)
        scaled = "~" if each.scale != 1 and each.task.scales else ""
        rows.append(
            (
                each.servers,
                each.task.name,
                f"{middle:.2f} s ({least:.2f} to {most:.2f})",
                f"{each.ideal_s:.2f} s",
                f"{scaled}{statistics.median(each.peer_s):.1f} s" if each.peer else "",
                "" if each.times is None else f"{each.times:.1f}",
                promised,
                {None: "", True: "met", False: "NOT MET"}[each.met],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    scales = {each.scale for each in found if each.peer and each.scale != 1}
    if scales:
        part = 1 / max(scales)
        lines.append(
            f"~ measured on {part:.0%} of the files, and scaled; what a tree without files takes counts "
            "once. Lines of what changes little with the number of files are not scaled."
        )
    return "\n".join(lines)
