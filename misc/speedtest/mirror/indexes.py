"""
``mirror debian`` when little has changed: indexes by patches, and whole, over a line that carries 10 MB/s.
"""

from __future__ import annotations

import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path

from tests.mirror.archive import BINARY, Archive

from misc.command import environment
from misc.speedtest.mirror.bench import Bench
from misc.speedtest.mirror.runs import Run, ratio, run, summed_up
from misc.speedtest.mirror.tools import Call

COUNT = 3000
FILLER_BYTES = 6000
TINY_COUNT = 30
CHANGED = 20
BYTES_PER_S = 10_000_000


def index_update(bench: Bench, rtt_ms: float = 20.0) -> None:
    """Twenty packages more and twenty less, each round."""
    made = Archive(
        count=TINY_COUNT if bench.tiny else COUNT,
        filler=FILLER_BYTES,
        patches=True,
        now=datetime.now(timezone.utc),
    )
    place = bench.place()
    root = place / "root"
    found: dict[str, list[Run]] = {"unpacked": [], "packed": []}
    shape = ("--bytes-per-s", str(BYTES_PER_S))
    with bench.server(root) as server, bench.behind_link([server], rtt_ms, *shape) as addresses:
        for number in range(bench.rounds + 1):
            if number:
                debs = sorted(path for path in made.pool if path.endswith(".deb"))
                for path in bench.rng.sample(debs, CHANGED):
                    made.drop(path)
                    made.add()
                made.publish()
            _write(root, made)
            for kept, runs in found.items():
                taken = run(_call(place / kept, addresses[0], kept), place / "log")
                if number:
                    runs.append(taken)
    packed = len(made.files[f"dists/sid/{BINARY}.xz"])
    shutil.rmtree(place)
    bench.tell(
        f"index update: Packages of {packed / 1e6:.1f} MB packed, {CHANGED} of"
        f" {COUNT} packages changed, {rtt_ms:g} ms, {BYTES_PER_S / 1e6:g} MB/s",
        by_patches=summed_up(found["unpacked"]),
        whole=summed_up(found["packed"]),
        index_bytes=[each.report.get("index_bytes") for each in found["unpacked"]],
        times_as_fast=round(ratio(found["packed"], found["unpacked"]), 2),
        target=5.0,
    )


def _write(root: Path, made: Archive) -> None:
    for path, data in made.files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or path.startswith("dists/"):
            file.write_bytes(data)


def _call(dest: Path, address: str, kept: str) -> Call:
    command = [sys.executable, "-m", "pipegrid.cli", "--json", "mirror", "debian", str(dest)]
    command += ["--from", f"http://{address}/", "--suite", "sid", "--component", "main"]
    command += ["--allow-unsigned", "--indexes", kept]
    return Call(command, dest, environment())
