"""Cloning an archive into an empty directory: all tools, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from misc.speedtest.mirror.archive import Archive
from misc.speedtest.mirror.bench import Bench
from misc.speedtest.mirror.runs import Run, RunFailed, ratio, summed_up
from misc.speedtest.mirror.tools import DCS, PIPEGRID, SHARED, TOOLS, Tool

SLOW_ROUNDS = 2
"""Of tools that take half a minute."""

CPU_PEER = "curl"


def clone(
    bench: Bench,
    archive: Archive,
    rtt_ms: float,
    *,
    tools: Sequence[Tool] = TOOLS,
    tls: bool = False,
    slow: bool = False,
    shape: Sequence[str] = (),
    target: float | None = None,
) -> None:
    """
    Compare all tools that are installed; the first round does not count.

    Args:
        slow: only with those that ask for one file after the other, and take minutes.
        shape: of the link besides its round trip (``relay``).
        target: how many times as long the best of the others should take.
    """
    if bench.beside is not None:
        tools = [tool for tool in TOOLS if tool.name == PIPEGRID] + [bench.beside]
    chosen = [
        tool
        for tool in tools
        if tool.is_there
        and (tool.https or not tls)
        and (tool.port is None or rtt_ms)  # there is a relay that can be there, too
        and (tool.slow == slow or tool.name == PIPEGRID or tool == bench.beside)
    ]
    found: dict[str, list[Run]] = {tool.name: [] for tool in chosen}
    failed: dict[str, str] = {}
    ports = [("--also-at", str(tool.port)) for tool in chosen if tool.port is not None]
    link = (*shape, *(word for option in ports for word in option))
    with bench.mirrors(archive, rtt_ms, tls=tls, shape=link) as (urls, authority):
        for number in range(bench.rounds + (not bench.tiny)):
            for tool in chosen:
                if tool.name in failed or (tool.slow and len(found[tool.name]) >= SLOW_ROUNDS):
                    continue
                try:
                    taken = bench.fetch(tool, urls, archive, authority)
                except RunFailed as error:
                    if tool.name == PIPEGRID:
                        raise
                    failed[tool.name] = str(error)
                    continue
                if number or bench.tiny or tool.slow:
                    found[tool.name].append(taken)
    ours = found.pop(PIPEGRID)
    others = {name: runs for name, runs in found.items() if runs and name not in failed}
    strangers = [name for name in others if name not in (SHARED, DCS)]
    best = min(strangers, key=lambda name: statistics.median(r.seconds for r in others[name]))
    bench.tell(
        f"clone of {len(archive.packages)} files, {archive.size_bytes / 1e6:.0f} MB,"
        f" {rtt_ms:g} ms{', TLS' if tls else ''}{' '.join(('', *shape))}",
        pipegrid=summed_up(ours),
        **{name: summed_up(runs) for name, runs in others.items()},
        # Two round trips, and what one core hashes: nobody who verifies can be quicker.
        ceiling_s=round(2 * rtt_ms / 1000 + hashing_s(archive.size_bytes), 3),
        best=best,
        times_as_fast={name: round(ratio(runs, ours), 2) for name, runs in others.items()},
        target=target,
        cpu_to_curl=_cpu_ratio(ours, others.get(CPU_PEER)),
        missing=[tool.name for tool in tools if not tool.is_there],
        failed=failed,
    )


def hashing_s(size_bytes: int) -> float:
    """Return how long one core takes to hash as many bytes."""
    import hashlib
    import time

    data = bytes(1 << 20)
    began = time.perf_counter()
    for _ in range(16):
        hashlib.sha256(data).digest()
    return (time.perf_counter() - began) / 16 / (1 << 20) * size_bytes


def _cpu_ratio(ours: Sequence[Run], others: Sequence[Run] | None) -> float | None:
    if not others:
        return None
    mine, theirs = (statistics.median(run.cpu_s for run in runs) for runs in (ours, others))
    return round(mine / theirs, 2)
