"""
A large file on a mounted grid behind a link of 100 ms, and the same through ``pipegrid get``, in turns.

The file is read in sequence by ``dd``, then at random, then at random again with no server running. What must
hold:

* all bytes are right;
* the mount reads in sequence at 0.7 of the speed of ``get`` at least (medians);
* what was read once needs no server, even after the kernel has forgotten it.

    python -m misc.soak.mount [--megabytes 1000] [--rounds 3] [--rtt-ms 100] [--scratch DIR] [--seed S]

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
from pipegrid.mount import mount_point

LEAST_RATIO = 0.7
RANDOM_READS = 200
RANDOM_BYTES = 100_000
MEGABYTE = 10**6
START_S = 60.0


@contextmanager
def mounted(client: Path, point: Path, cache: Path) -> Iterator[None]:
    """Mount this client's backups as long as the context lasts."""
    options = ("--cache-dir", str(cache), "--cache-size", "4GiB")
    with running(command(client, "-q", "mount", *options, str(point))) as process:
        until_s = time.monotonic() + START_S
        while mount_point.mounted_type(str(point)) is None:
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit("mount: it did not start")
            time.sleep(0.05)
        try:
            yield
        finally:
            mount_point.unmount(str(point)) or mount_point.unmount(str(point), lazy=True)
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
    run = [*command(servers.client, "-q", "backup", str(tree))]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    get_s, mount_s = [], []
    get = command(servers.client, "-q", "restore", "large", "-f", "-o", str(target))
    for number in range(options.rounds):
        began_s = time.monotonic()
        subprocess.run(get, check=True, stdout=subprocess.DEVNULL)
        get_s.append(time.monotonic() - began_s)
        (target / "large").unlink()
        with mounted(servers.client, point, root / f"cache{number}"):
            mount_s.append(read_all(point / "tree/latest/large"))
    with mounted(servers.client, point, root / "cache"):
        path = point / "tree/latest/large"
        wrong, random_s = wrong_reads(path, source, options.seed)
        differs = subprocess.run(["cmp", str(path), str(source)], check=False).returncode
        stack.close()  # no server runs any more
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
        "random_ms": round(1000 * random_s / RANDOM_READS, 1),
        "again_ms": round(1000 * again_s / RANDOM_READS, 1),
        "wrong": wrong + again + differs,
        "good": ratio >= LEAST_RATIO and not (wrong or again or differs),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--megabytes", type=int, default=1000, help="[1000]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
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
