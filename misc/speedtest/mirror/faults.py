"""Four mirrors, one of which is not what it should be: how much longer it takes, and what is asked twice."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from misc.speedtest.mirror.archive import Archive
from misc.speedtest.mirror.bench import Bench
from misc.speedtest.mirror.runs import Run
from misc.speedtest.mirror.tools import Task, pipegrid
from misc.speedtest.mirror.webserver import Behaviour, WebServer, damaged

MIRRORS = 4
AFTER_S = 0.6
"""When a mirror dies or stalls: the start-up of the client is over, the work is not."""

DAMAGED_SHARE = 0.02
SLOW_BYTES_PER_S = 20_000 // 4
"""Of each of the four connections."""

TINY = ("2 % of the files garbled on one", "one dies")
Disturbance = Callable[[WebServer], None]


def faults(bench: Bench, archive: Archive, rtt_ms: float = 20.0) -> None:
    """Measure each fault in turns with the undisturbed time."""
    rounds = bench.rounds
    paths = [each.path for each in archive.packages]
    few = bench.rng.sample(paths, max(1, int(len(paths) * DAMAGED_SHARE)))
    kinds: dict[str, tuple[dict[str, list[str]] | None, Behaviour | None, Disturbance | None]] = {
        "2 % of the files missing on one": ({"missing": few}, None, None),
        "2 % of the files cut short on one": ({"cut": few}, None, None),
        "2 % of the files garbled on one": ({"garbled": few}, None, None),
        "one answers 503 to every tenth": (None, Behaviour(busy_percent=10), None),
        "one sends 20 KB/s": (None, Behaviour(bytes_per_s=SLOW_BYTES_PER_S), None),
        "one dies": (None, None, lambda server: _after(server.kill)),
        "one stalls": (None, None, lambda server: _after(server.stall)),
    }
    if bench.tiny:
        kinds = {name: kinds[name] for name in TINY}
    for name, (damage, behaviour, disturbance) in kinds.items():
        disturbed: list[Run] = []
        undisturbed: list[Run] = []
        for _ in range(rounds):
            undisturbed.append(_fetch(bench, archive, rtt_ms, None, None, None))
            disturbed.append(_fetch(bench, archive, rtt_ms, damage, behaviour, disturbance))
        calm, stormy = (
            statistics.median(run.seconds for run in runs) for runs in (undisturbed, disturbed)
        )
        bench.tell(
            f"{MIRRORS} mirrors, {rtt_ms:g} ms: {name}",
            disturbed_s=round(stormy, 3),
            undisturbed_s=round(calm, 3),
            longer_s=round(stormy - calm, 3),
            target_s=3.0,
            damaged=len(few) if damage else 0,
            retries=[run.report["retries"] for run in disturbed],
        )


def _fetch(
    bench: Bench,
    archive: Archive,
    rtt_ms: float,
    damage: dict[str, list[str]] | None,
    behaviour: Behaviour | None,
    disturbance: Disturbance | None,
) -> Run:
    with ExitStack() as stack:
        root = archive.root
        if damage is not None:
            root = stack.enter_context(_damaged(bench, archive, damage))
        servers = [stack.enter_context(bench.server(root, behaviour))]
        servers += [stack.enter_context(bench.server(archive.root)) for _ in range(MIRRORS - 1)]
        addresses = stack.enter_context(bench.behind_link(servers, rtt_ms))
        place = bench.place()
        stack.callback(shutil.rmtree, place)
        urls = [f"http://{address}/" for address in addresses]
        call = pipegrid(Task(urls, archive.packages, archive.list_path, place))
        meanwhile = None if disturbance is None else lambda: disturbance(servers[0])
        return bench.measured(call, place, archive.packages, meanwhile=meanwhile)


@contextmanager
def _damaged(bench: Bench, archive: Archive, damage: dict[str, list[str]]) -> Iterator[Path]:
    place = bench.place()
    lists: dict[str, list[str]] = {"missing": [], "garbled": [], "cut": []} | damage
    try:
        yield damaged(archive.root, place / "tree", **lists)
    finally:
        shutil.rmtree(place)


def _after(what: Callable[[], None]) -> None:
    time.sleep(AFTER_S)
    what()
