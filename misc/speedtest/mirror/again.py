"""What comes after the clone: little has changed, nothing has; and what durability and memory cost."""

from __future__ import annotations

import hashlib
import shutil
import statistics
import sys
import time
from pathlib import Path

from misc.speedtest.mirror.archive import Archive, Package
from misc.speedtest.mirror.bench import Bench
from misc.speedtest.mirror.runs import Run, ratio, run, summed_up
from misc.speedtest.mirror.tools import Call, Task, pipegrid

CHANGED = 307
LONG_LIST = 300_000


def incremental(bench: Bench, archive: Archive, rtt_ms: float = 20.0) -> None:
    """307 files have changed: the whole list over a full mirror, and just these into an empty one."""
    whole: list[Run] = []
    these: list[Run] = []
    count = min(CHANGED, len(archive.packages) // 4)
    with bench.mirrors(archive, rtt_ms) as (urls, _):
        place = bench.place()
        call = pipegrid(Task(urls, archive.packages, archive.list_path, place))
        bench.measured(call, place, archive.packages)
        for _ in range(bench.rounds):
            changed = archive.change(count, bench.rng)
            whole.append(bench.measured(call, place, archive.packages))
            assert whole[-1].report["fetched"] == count, whole[-1].output
            part = bench.place()
            listed = archive.write_list(part / "list.txt", changed)
            these.append(bench.measured(pipegrid(Task(urls, changed, listed, part)), part, changed))
            shutil.rmtree(part)
        shutil.rmtree(place)
    wanted = statistics.median(each.seconds for each in these) * 1.1 + 0.5
    bench.tell(
        f"{count} of {len(archive.packages)} files changed, {rtt_ms:g} ms",
        incremental=summed_up(whole),
        just_these=summed_up(these),
        target_s=round(wanted, 3),
    )


def verify_again(bench: Bench, archive: Archive) -> None:
    """``mirror verify`` of what is known to be good, and ``--paranoid``, which hashes it."""
    with bench.mirrors(archive, 0) as (urls, _):
        place = bench.place()
        call = pipegrid(Task(urls, archive.packages, archive.list_path, place))
        bench.measured(call, place, archive.packages)
    command = [sys.executable, "-m", "pipegrid.cli", "--json", "mirror", "verify", str(call.tree)]
    known: list[Run] = []
    hashed: list[Run] = []
    for _ in range(bench.rounds):
        known.append(run(Call(command, call.tree, call.environment), place / "log"))
        paranoid = Call([*command, "--paranoid"], call.tree, call.environment)
        hashed.append(run(paranoid, place / "log"))
    shutil.rmtree(place)
    bench.tell(
        f"verify {len(archive.packages)} files, {archive.size_bytes / 1e6:.0f} MB",
        known=summed_up(known),
        hashed=summed_up(hashed),
        times_as_fast=round(ratio(hashed, known), 2),
        target=10.0,
    )


def durability(bench: Bench, archive: Archive, disk: Path, rtt_ms: float = 20.0) -> None:
    """``batch`` against ``none``, on a real disk if there is one."""
    found: dict[str, list[Run]] = {"none": [], "batch": []}
    with bench.mirrors(archive, rtt_ms) as (urls, _):
        for _ in range(bench.rounds):
            for policy, runs in found.items():
                place = disk / f"pipegrid-mirror-{policy}"
                place.mkdir()
                try:
                    task = Task(urls, archive.packages, archive.list_path, place)
                    call = pipegrid(task, "--durability", policy)
                    runs.append(bench.measured(call, place, archive.packages))
                finally:
                    shutil.rmtree(place)
    bench.tell(
        f"durability of {len(archive.packages)} files, {rtt_ms:g} ms",
        **{policy: summed_up(runs) for policy, runs in found.items()},
        times_as_long=round(ratio(found["batch"], found["none"]), 2),
        target=1.1,
    )


def memory(bench: Bench, archive: Archive) -> None:
    """The peak of a clone, and of a list of 300,000 files, of which nearly all are there."""
    with bench.mirrors(archive, 0) as (urls, _):
        place = bench.place()
        call = pipegrid(Task(urls, archive.packages, archive.list_path, place))
        found = bench.measured(call, place, archive.packages, watched=True)
        shutil.rmtree(place)
    bench.tell(
        f"memory: clone of {len(archive.packages)} files",
        peak_mib=round(found.peak_bytes / 2**20, 1),
        target_mib=96,
    )
    count = 1000 if bench.tiny else LONG_LIST
    long = bench.place()
    packages = _tiny_files(long / "root", count)
    archive = Archive(long / "root", packages)
    listed = archive.write_list(long / "list.txt")
    with bench.mirrors(archive, 0) as (urls, _):
        place = bench.place()
        call = pipegrid(Task(urls, packages, listed, place))
        found = bench.measured(call, place, packages, watched=True)
        shutil.rmtree(place)
    shutil.rmtree(long)
    bench.tell(
        f"memory: list of {count} files",
        peak_mib=round(found.peak_bytes / 2**20, 1),
        seconds=round(found.seconds, 1),
        target_mib=192,
    )


def _tiny_files(root: Path, count: int) -> list[Package]:
    packages = []
    began = time.monotonic_ns()
    for number in range(count):
        path = f"pool/{number // 1000:03}/file-with-a-usual-name_{number:06}_amd64.deb"
        data = b"%d %d" % (began, number)
        place = root / path
        if number % 1000 == 0:
            place.parent.mkdir(parents=True)
        place.write_bytes(data)
        packages.append(Package(str(number), path, len(data), hashlib.sha256(data).hexdigest(), ""))
    return packages
