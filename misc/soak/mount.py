"""
A large file on a mounted grid behind a link of 100 ms, and the same through ``pipegrid get``, in turns.

The mount is killed, ``--kills`` times, while a program reads. Then the file is read in sequence by ``dd``,
then at random, then at random again with no server running. What must hold:

* all bytes are right;
* the mount reads in sequence at 0.7 of the speed of ``get`` at least (medians; without the start of ``get``,
  which is how long it takes for an empty file);
* what was read once needs no server, even after the kernel has forgotten it;
* a killed mount leaves a mount point that the next mount frees, and no file in its cache.

    python -m misc.soak.mount [--megabytes 1000] [--rounds 3] [--kills 50] [--rtt-ms 100] [--scratch DIR]
        [--seed S]

``--scratch`` needs space for 8 times the file; root or a user who may mount. Prints one JSON line; the exit
status is 1 if something is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from misc.command import command
from misc.ending import end_on_sigterm
from misc.speedtest.processes import Servers, running
from pipegrid.mount import mount_point_checks

LEAST_RATIO = 0.7
RANDOM_READS = 200
RANDOM_BYTES = 100_000
MEGABYTE = 10**6
START_S = 60.0


def is_mounted(point: Path) -> bool:
    """Return whether a tree can be used there, which is not what a killed mount has left."""
    try:
        os.statvfs(point)  # the kernel may remember what ``stat`` shows
    except OSError:
        return False
    return mount_point_checks.mounted_type(str(point)) is not None


@contextmanager
def mounted(client: Path, point: Path, cache: Path) -> Iterator[subprocess.Popen[str]]:
    """Mount this client's backups as long as the context lasts."""
    options = ("--cache-dir", str(cache), "--cache-size", "4GiB")
    with running(command(client, "-q", "mount", *options, str(point))) as process:
        until_s = time.monotonic() + START_S
        while not is_mounted(point):
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit("mount: it did not start")
            time.sleep(0.05)
        try:
            yield process
        finally:
            if process.poll() is None:  # after ``kill -9`` the next mount frees the mount point
                mount_point_checks.unmount(str(point)) or mount_point_checks.unmount(
                    str(point), lazy=True
                )
            process.wait(START_S)


def forget(path: Path) -> None:
    """Make the kernel forget a file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(path: Path) -> float:
    """Read a file in sequence; returns the seconds that it took."""
    forget(path)
    began_s = time.monotonic()
    subprocess.run(
        ["dd", f"if={path}", "of=/dev/null", "bs=1M"], check=True, stderr=subprocess.DEVNULL
    )
    return time.monotonic() - began_s


def wrong_reads(path: Path, source: Path, seed: int) -> tuple[int, float]:
    """Read at random; returns how many ranges are not those of the source, and the seconds for all."""
    rng, size, wrong = random.Random(seed), source.stat().st_size, 0
    forget(path)
    began_s = time.monotonic()
    with path.open("rb", 0) as file, source.open("rb", 0) as other:
        for _ in range(RANDOM_READS):
            at = rng.randrange(size)
            try:
                wrong += os.pread(file.fileno(), RANDOM_BYTES, at) != os.pread(
                    other.fileno(), RANDOM_BYTES, at
                )
            except OSError:
                wrong += 1
    return wrong, time.monotonic() - began_s


def get(client: Path, name: str, target: Path) -> float:
    """Fetch a file of the last run with ``pipegrid get``; returns the seconds that it took."""
    began_s = time.monotonic()
    run = command(client, "-q", "get", f"tree@latest:{name}", "-f", "-o", str(target))
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began_s


def kill(client: Path, point: Path, root: Path, source: Path, rng: random.Random) -> bool:
    """Kill a mount while a program reads; returns whether bytes were wrong, or its cache is left."""
    cache, path = root / "killed", point / "tree/latest/large"
    at = rng.randrange(source.stat().st_size)
    with mounted(client, point, cache) as process:
        with path.open("rb", 0) as file, source.open("rb", 0) as other:
            wrong = os.pread(file.fileno(), RANDOM_BYTES, at) != os.pread(
                other.fileno(), RANDOM_BYTES, at
            )
        with subprocess.Popen(
            ["cat", path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as reader:
            time.sleep(rng.random() / 2)
            process.kill()
            process.wait(START_S)
            reader.wait(START_S)
        left = mount_point_checks.mounted_type(str(point)) is None or bool(os.listdir(cache))
        return wrong or left


def measure(root: Path, options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Store the file, read it in every way; returns what was found."""
    tree, point, target = root / "tree", root / "point", root / "fetched"
    for each in (tree, point):
        each.mkdir()
    source = tree / "large"
    rng = random.Random(options.seed)
    with source.open("wb") as file:
        for _ in range(options.megabytes):
            file.write(rng.randbytes(MEGABYTE))
    servers = stack.enter_context(Servers(10, rtt_s=options.rtt_ms / 1000, scratch=root))
    (tree / "empty").touch()
    run = [*command(servers.client, "-q", "backup", str(tree))]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    rng = random.Random(options.seed)
    bad_kills = sum(kill(servers.client, point, root, source, rng) for _ in range(options.kills))
    get_s, mount_s = [], []
    for number in range(options.rounds):
        start_s = get(servers.client, "empty", target)
        get_s.append(get(servers.client, "large", target) - start_s)
        with mounted(servers.client, point, root / f"cache{number}"):
            mount_s.append(read_all(point / "tree/latest/large"))
    with mounted(servers.client, point, root / "cache"):
        path = point / "tree/latest/large"
        wrong, random_s = wrong_reads(path, source, options.seed)
        differs = subprocess.run(["cmp", str(path), str(source)], check=False).returncode
        # The client's directory stays: it has the list of backups.
        for process in servers.processes:
            process.terminate()
        for process in servers.processes:
            process.wait(START_S)
        again, again_s = wrong_reads(path, source, options.seed)
    ratio = statistics.median(get_s) / statistics.median(mount_s)
    return {
        "scenario": "mount",
        "megabytes": options.megabytes,
        "rtt_ms": options.rtt_ms,
        "seed": options.seed,
        "get_s": [round(each, 2) for each in get_s],
        "mount_s": [round(each, 2) for each in mount_s],
        "ratio": round(ratio, 2),
        "kills": options.kills,
        "bad_kills": bad_kills,
        "random_ms": round(1000 * random_s / RANDOM_READS, 1),
        "again_ms": round(1000 * again_s / RANDOM_READS, 1),
        "wrong": wrong + again + differs,
        "good": ratio >= LEAST_RATIO and not (wrong or again or differs or bad_kills),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--megabytes", type=int, default=1000, help="[1000]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    parser.add_argument("--kills", type=int, default=50, help="[50]")
    parser.add_argument("--rtt-ms", type=float, default=100.0, help="[100]")
    parser.add_argument("--scratch", type=Path, help="[the usual place for temporary files]")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.randrange(1 << 32)
    end_on_sigterm()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch, ExitStack() as stack:
        found = measure(Path(os.path.realpath(scratch)), options, stack)
    print(json.dumps(found))
    return 0 if found["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
