"""
restic over 100 ms: to a gateway whose ten servers are behind the link, and to ``rclone serve restic`` behind
the same link, in turns (A B A B).

    python -m misc.speedtest.restic [--rtt-ms MS] [--rounds N] [--files N] [--bytes N]

Each round has a new tree of random files, and new repositories. Three commands of restic are measured, each
from the start of its process to its end: the first backup, the same again without changes, and a restore,
whose files are compared. restic runs on this side of the link, as does the gateway, whose connections to the
servers are up; rclone runs on the other side.

One JSON line for each command: both medians and spreads, and the ratio, which is how many times as long as to
rclone it takes. The status is 1 if a ratio is above what is promised.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import attrs

from misc.command import command, compile_package, environment
from misc.ending import end_on_sigterm
from misc.speedtest.processes import LOOPBACK, Servers, first_line, running

FIRST, AGAIN, RESTORE = "first backup", "repeated backup", "restore"
TARGETS = {FIRST: 1.5, AGAIN: 1.2, RESTORE: 1.2}
"""How many times as long as to rclone, at most."""

GATEWAY, RCLONE = "gateway", "rclone"
START_S = 30.0


class Failed(Exception):
    """A command failed, or restored other bytes; there is nothing to measure."""


@attrs.frozen
class Place:
    """
    Where repositories are.

    Attributes:
        url: of the REST protocol, without the name of a repository.
        cache: restic's cache directory.
    """

    name: str
    url: str
    cache: Path

    def run(self, repository: str, *arguments: str) -> float:
        """
        Run restic; returns how many seconds it took.

        Raises:
            Failed: its status is not 0.
        """
        began = time.perf_counter()
        self.output(repository, *arguments)
        return time.perf_counter() - began

    def output(self, repository: str, *arguments: str) -> str:
        """Run restic; returns what it printed, and raises as ``run``."""
        done = subprocess.run(
            ["restic", *arguments], env=self.environment(repository), capture_output=True, text=True
        )
        if done.returncode:
            raise Failed(f"restic {' '.join(arguments)} ({self.name}): {done.stdout}{done.stderr}")
        return done.stdout

    def environment(self, repository: str) -> dict[str, str]:
        """Return the environment of restic."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.cache),
            "RESTIC_CACHE_DIR": str(self.cache),
            "RESTIC_REPOSITORY": f"rest:{self.url}{repository}/",
            "RESTIC_PASSWORD": "secret",
        }


def make_tree(directory: Path, files: int, size: int, rng: random.Random) -> None:
    """Make files of random sizes and bytes, a hundred in each directory."""
    weights = [rng.expovariate(1.0) for _ in range(files)]
    total = sum(weights)
    for number, weight in enumerate(weights):
        file = directory / f"d{number // 100}" / f"f{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(rng.randbytes(int(size * weight / total)))


def check_same(tree: Path, restored: Path) -> None:
    """
    Compare two trees.

    Raises:
        Failed: they differ.
    """
    names = sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file())
    same, *_ = filecmp.cmpfiles(tree, restored, names, shallow=False)
    if same != names:
        raise Failed(f"{len(names) - len(same)} of {len(names)} files were restored otherwise")


def measure(
    places: Sequence[Place], scratch: Path, options: argparse.Namespace, rng: random.Random
) -> dict[tuple[str, str], list[float]]:
    """Return seconds by place and command; a first round does not count."""
    found: dict[tuple[str, str], list[float]] = {
        (place.name, step): [] for place in places for step in TARGETS
    }
    for number in range(options.rounds + 1):
        tree = scratch / f"tree{number}"
        make_tree(tree, options.files, options.bytes, rng)
        for place in places if number % 2 else reversed(places):
            repository, target = f"r{number}", scratch / f"restored{number}"
            place.run(repository, "init")
            took = {
                FIRST: place.run(repository, "backup", str(tree)),
                AGAIN: place.run(repository, "backup", str(tree)),
                RESTORE: place.run(repository, "restore", "latest", "--target", str(target)),
            }
            check_same(tree, target / tree.relative_to("/"))
            shutil.rmtree(target)
            print(
                f"round {number}, {place.name}: "
                + ", ".join(f"{step} {took_s:.2f} s" for step, took_s in took.items()),
                file=sys.stderr,
            )
            if number:
                for step, took_s in took.items():
                    found[place.name, step].append(took_s)
        shutil.rmtree(tree)
    return found


@attrs.frozen
class Gateway:
    """A gateway that runs: its address, and its process."""

    url: str
    pid: int


@contextmanager
def gateway_at(client: Path) -> Iterator[Gateway]:
    """Run a gateway."""
    line = command(client, "gateway", "--no-auth", "--port", f"tcp:0:interface={LOOPBACK}")
    with running(line) as process:
        yield Gateway(first_line(process), process.pid)


@contextmanager
def rclone_at(directory: Path, rtt_s: float) -> Iterator[str]:
    """Run rclone behind a link; yields its address on this side."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
    directory.mkdir()
    serve = ["rclone", "serve", "restic", "--addr", f"{LOOPBACK}:{port}", str(directory)]
    process = subprocess.Popen(
        serve, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(port)
        relay = ["-m", "pipegrid.speedtest.child_processes", "--relay", str(rtt_s)]
        with running([sys.executable, *relay, f"{LOOPBACK}:{port}"]) as link:
            near, _echo = json.loads(first_line(link))
            yield f"http://{LOOPBACK}:{near}/"
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int) -> None:
    until = time.monotonic() + START_S
    with socket.socket() as trying:
        while trying.connect_ex((LOOPBACK, port)):
            if time.monotonic() > until:
                raise Failed("rclone did not start")
            time.sleep(0.05)


def ratio_fields(
    ours: Sequence[float], theirs: Sequence[float], target: float | None
) -> dict[str, object]:
    """
    Return how two programs compare: the ratio of their medians, and the extremes of single rounds.

    Args:
        ours, theirs: seconds, of the same rounds.
        target: the largest ratio that is right; None: any.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ours) / statistics.median(theirs)
    return {
        "rounds": len(ratios),
        "ratio": round(ratio, 2),
        "low": round(min(ratios), 2),
        "high": round(max(ratios), 2),
        "target": target,
        "met": target is None or ratio <= target,
    }


def report(
    found: dict[tuple[str, str], list[float]], step: str, rtt_ms: float
) -> dict[str, object]:
    """Return what is printed of one command."""
    ours, theirs = found[GATEWAY, step], found[RCLONE, step]
    return {
        "scenario": f"restic, {step}",
        "rtt_ms": rtt_ms,
        **ratio_fields(ours, theirs, TARGETS[step]),
        **{
            name: {
                "median_s": round(statistics.median(each), 3),
                "spread_s": [round(min(each), 3), round(max(each), 3)],
            }
            for name, each in ((GATEWAY, ours), (RCLONE, theirs))
        },
    }


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--rtt-ms", type=float, default=100.0, help="[100]")
    parser.add_argument("--rounds", type=int, default=5, help="[5]")
    parser.add_argument("--files", type=int, default=2000, help="[2000]")
    parser.add_argument("--bytes", type=int, default=50_000_000, help="[50000000]")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    compile_package()
    rtt_s = options.rtt_ms / 1000
    try:
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            servers = stack.enter_context(Servers(10, rtt_s=rtt_s))
            gateway = stack.enter_context(gateway_at(servers.client))
            rclone = stack.enter_context(rclone_at(scratch / "rclone", rtt_s))
            places = [
                Place(GATEWAY, f"{gateway.url}restic/", scratch / "cache-gateway"),
                Place(RCLONE, rclone, scratch / "cache-rclone"),
            ]
            found = measure(places, scratch, options, random.Random(seed))
    except Failed as error:
        print(f"restic: {error}", file=sys.stderr)
        return 1
    lines = [report(found, step, options.rtt_ms) for step in TARGETS]
    for line in lines:
        print(json.dumps({**line, "seed": seed}), file=out)
    return 0 if all(line["met"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
