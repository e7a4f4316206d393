"""
What durability costs: the policies of a storage server beside a floor that pays nothing for it.

    python -m misc.speedtest.durability [--rounds 5] [--scratch DIR] [--json FILE] [--chart FILE.svg] [--tiny]

One ``pipegrid serve`` on a disk of this machine for each policy, one after the other in each round (A B C D,
A B C D), files of one share each, over TLS on loopback:

======================  ==============================================================================
``none``                acknowledged after its rename
``batch``, ``strict``   durable before they are acknowledged, in groups or one by one
``strict, no fsync``    ``strict`` with a library preloaded (libeatmydata) that makes all of ``fsync``,
                        ``fdatasync``, ``sync`` and ``syncfs`` do nothing: the same program without its disk.
                        What ``strict`` takes beyond it is what the disk takes. Left out, with a word, if
                        the library is not installed
======================  ==============================================================================

Three loads: small files one after the other (what a single caller waits for), many small ones at once (what
groups are for), and one large file. Data is random and fresh in every round; the first round does not count;
some of the files are fetched and compared. Mean and standard deviation over the rounds, and the mean of the
quotients with ``none`` in the same round. Times are this disk's: compare within a table.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import gatherResults

from misc import ending
from misc.scratch import scratch_directory
from misc.speedtest.oneserver import one_server
from pipegrid import Grid

PRELOAD = "eatmydata"
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@attrs.frozen
class Policy:
    """A column of the matrix: a policy of the server's, perhaps with the calls to the disk made void."""

    name: str
    durability: str
    void: bool = False


NONE = Policy("none", "none")
POLICIES = (
    NONE,
    Policy("batch", "batch"),
    Policy("strict", "strict"),
    Policy("strict, no fsync", "strict", void=True),
)


@attrs.frozen
class Load:
    """So many files of one size, one after the other or all at once."""

    name: str
    files: int
    file_bytes: int
    at_once: bool


LOADS = (
    Load("50x 200B, one by one", 50, 200, False),
    Load("500x 200B at once", 500, 200, True),
    Load("1x 64MB", 1, 64 * 10**6, False),
)
TINY = (
    Load("2x 200B, one by one", 2, 200, False),
    Load("3x 200B at once", 3, 200, True),
    Load("1x 100kB", 1, 10**5, False),
)


@attrs.frozen
class Cell:
    """
    What one load took under one policy.

    Attributes:
        samples_s: seconds for all files, one sample a round.
        ratios: to ``none`` in the same round.
    """

    load: str
    policy: str
    samples_s: tuple[float, ...]
    ratios: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return samples, and what sums them up."""
        return {
            **attrs.asdict(self),
            "mean_s": statistics.fmean(self.samples_s),
            "deviation_s": deviation(self.samples_s),
            "mean_ratio": statistics.fmean(self.ratios),
            "ratio_deviation": deviation(self.ratios),
        }


def deviation(samples: Sequence[float]) -> float:
    """Return the standard deviation; 0 of a single sample."""
    return statistics.stdev(samples) if len(samples) > 1 else 0.0


def cells(times: dict[tuple[str, str], list[float]]) -> list[Cell]:
    """Return the matrix of what was measured; (load, policy) to one time a round, ``none`` among them."""
    return [
        Cell(
            load,
            policy,
            tuple(samples),
            tuple(s / base for s, base in zip(samples, times[load, NONE.name], strict=True)),
        )
        for (load, policy), samples in times.items()
    ]


def table(matrix: Sequence[Cell]) -> str:
    """Return the matrix as Markdown."""
    lines = ["| load | policy | seconds | times `none` |", "|---|---|---|---|"]
    for cell in matrix:
        what = cell.as_dict()
        lines.append(
            f"| {cell.load} | {cell.policy} | {what['mean_s']:.3f} ± {what['deviation_s']:.3f}"
            f" | {what['mean_ratio']:.2f} ± {what['ratio_deviation']:.2f} |"
        )
    return "\n".join(lines)


def draw(matrix: Sequence[Cell], path: Path) -> None:
    """Draw the matrix: one panel for each load, a bar for each policy, standard deviations as whiskers."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    loads = list(dict.fromkeys(cell.load for cell in matrix))
    figure = Figure(figsize=(8, 1.2 + 1.5 * len(loads)), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(len(loads), 1, squeeze=False)[:, 0]
    for panel, load in zip(panels, loads, strict=True):
        row = [cell for cell in matrix if cell.load == load]
        what = [cell.as_dict() for cell in row]
        bars = panel.barh(
            [cell.policy for cell in row],
            [each["mean_s"] for each in what],
            xerr=[each["deviation_s"] for each in what],
            color=["#0072b2", "#009e73", "#d55e00", "#999999"][: len(row)],  # told apart by all
            capsize=3,
        )
        labels = [f"{each['mean_ratio']:.2f} × none" for each in what]
        panel.bar_label(bars, labels=labels, padding=6, fontsize="small")
        panel.set_title(load, loc="left", fontsize="medium")
        panel.invert_yaxis()
        panel.margins(x=0.2)
        panel.set_xlim(left=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds (mean and standard deviation)")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "durability"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


class Bench:
    """Servers, clients, and the rounds on them."""

    def __init__(self, loads: Sequence[Load], rng: random.Random) -> None:
        self._loads = loads
        self._rng = rng
        self.times: dict[tuple[str, str], list[float]] = {}

    async def round(self, grids: dict[str, Grid], counts: bool) -> None:
        """Measure every load under every policy, once."""
        for load in self._loads:
            samples = self.times
            for policy, grid in grids.items():
                took_s = await self._measure(grid, load)
                if counts:
                    samples.setdefault((load.name, policy), []).append(took_s)

    async def _measure(self, grid: Grid, load: Load) -> float:
        files = [self._rng.randbytes(load.file_bytes) for _ in range(load.files)]
        os.sync()  # what the last one has left to the kernel is not this one's to pay
        began = time.perf_counter()
        if load.at_once:
            stored = list(await gatherResults([grid.put(file) for file in files]))
        else:
            stored = [await grid.put(file) for file in files]
        took_s = time.perf_counter() - began
        for file, result in list(zip(files, stored, strict=True))[:: max(1, load.files // 5)]:
            if await grid.read(result.cap) != file:
                raise AssertionError("wrong bytes came back")
        return took_s


def find_preload() -> Path | None:
    """Return the library that makes ``fsync`` do nothing, or None if it is not installed."""
    name = ctypes.util.find_library(PRELOAD)
    if name is None:
        return None
    maps = Path("/proc/self/maps")
    ctypes.CDLL(
        name
    )  # loaded, it says where it is; here it changes nothing, since it came too late
    found = [line.split()[-1] for line in maps.read_text().splitlines() if f"lib{PRELOAD}" in line]
    return Path(found[0]) if found else None


def file_system(path: Path) -> str:
    """Return the type of the file system that a directory is on."""
    path = path.resolve()
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, this_kind, *_ = line.split()
        if path.is_relative_to(where) and len(where) >= len(best):
            best, kind = where, this_kind
    if kind == "unknown":  # in a root of its own, where the mount that holds it is not listed
        asked = ["stat", "--file-system", "--format=%T", str(path)]
        kind = subprocess.run(asked, capture_output=True, text=True).stdout.strip() or kind
    return kind


async def measure(
    reactor: Any,
    policies: Sequence[Policy],
    loads: Sequence[Load],
    rounds: int,
    rng: random.Random,
    scratch: Path,
) -> list[Cell]:
    """Return the matrix."""
    bench = Bench(loads, rng)
    grids: dict[str, Grid] = {}
    with ExitStack() as stack:
        try:
            for number, policy in enumerate(policies):
                directory = scratch / str(number)
                prefix = ["env", f"LD_PRELOAD={find_preload()}"] if policy.void else []
                client, process = stack.enter_context(
                    one_server(directory, directory / "storage", policy.durability, prefix)
                )
                if policy.void and f"lib{PRELOAD}" not in _maps(process.pid):
                    raise AssertionError(f"lib{PRELOAD} was not preloaded, so the floor is none")
                grids[policy.name] = await Grid.open(reactor, client)
            for turn in range(rounds + 1):
                await bench.round(grids, counts=turn > 0)
        finally:
            for grid in grids.values():
                await grid.close()
    return cells(bench.times)


def _maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="What durability costs a storage server.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument(
        "--scratch", type=scratch_directory, help="a directory on the disk to be measured"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw it there")
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    policies: Sequence[Policy] = POLICIES
    if find_preload() is None:
        print(f"lib{PRELOAD} is not installed, so the floor is left out", file=sys.stderr)
        policies = [policy for policy in POLICIES if not policy.void]

    async def run(reactor: Any) -> None:
        with tempfile.TemporaryDirectory(
            prefix="pipegrid-durability-", dir=options.scratch
        ) as name:
            kind = file_system(Path(name))
            if kind in MEMORY_FILE_SYSTEMS:
                print(
                    f"{name} is on {kind}, where nothing is durable; give --scratch on a disk",
                    file=sys.stderr,
                )
            loads = TINY if options.tiny else LOADS
            rng = random.Random(options.seed)
            matrix = await measure(reactor, policies, loads, options.rounds, rng, Path(name))
        print(f"{options.rounds} rounds, seed {options.seed}, {kind}, {os.cpu_count()} cores\n")
        print(table(matrix), flush=True)
        if options.json is not None:
            document = {
                "rounds": options.rounds,
                "seed": options.seed,
                "file_system": kind,
                "kernel": platform.release(),
                "python": platform.python_version(),
                "cores": os.cpu_count(),
                "cells": [cell.as_dict() for cell in matrix],
            }
            options.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        if options.chart is not None:
            draw(matrix, options.chart)

    ending.run(run)


if __name__ == "__main__":
    main()
