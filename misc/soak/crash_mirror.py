"""
Does a power cut ever leave anything wrong under a name in a mirror?

Each round makes a fresh ext4 in an image and mounts it; ``pipegrid mirror list`` begins to mirror an archive
there, from a real web server. At a random moment the file system is cut off, as ``crash`` does it: what the
journal has not committed is dropped. The command is killed, the image mounted again. Then, under ``batch``
and ``strict``:

* every file that has its name holds what the list says, byte for byte, whatever its attribute claims;
* the same command, run again, completes, and everything is right.

Under ``none`` files *must* be wrong: else the cut cuts nothing.

Needs root, for mounting, and nginx.

    python -m misc.soak.crash_mirror [--rounds N] [--seed S] [--durability batch|strict|none]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import attrs

from misc import ending
from misc.command import environment
from misc.scratch import scratch_directory
from misc.soak.crash import POLICIES, PROMISING, Image, Unable, workplace
from misc.speedtest.mirror.archive import Archive, Package, Shape, make_archive, wrong
from misc.speedtest.mirror.webserver import WebServer
from misc.speedtest.processes import ROOT

ARCHIVE = Shape("crash", 3_000, 150_000_000, 1.75)
LATEST_S = 1.2
"""From the first file that has its name to the cut; a whole mirror takes some two seconds."""

MORE_ROUNDS = 9
"""Beside those asked for, where none has shown anything: what had its name was not on the disk yet."""

PATIENCE_S = 120.0
COMMAND = ("-m", "pipegrid.cli", "mirror", "list", "--durability")


@attrs.define
class Outcome:
    """
    What was left, in a round or in many.

    Attributes:
        named: files that had their names after the cut.
        wrong: of these, those that were not what the list says.
        unfinished: rounds in which the same command did not complete, or left anything wrong.
        whole: rounds that were over before the cut.
    """

    named: int = 0
    wrong: int = 0
    unfinished: int = 0
    whole: int = 0

    def __add__(self, other: Outcome) -> Outcome:
        both = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return Outcome(*(mine + theirs for mine, theirs in both))


@contextlib.contextmanager
def mirroring(
    url: str, archive: Archive, place: Path, policy: str
) -> Iterator[subprocess.Popen[str]]:
    """Mirror the archive, in a process of its own."""
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    process = subprocess.Popen(
        (sys.executable, *COMMAND, policy, str(archive.list_path), str(place), "--from", url),
        env=environment() | {"PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def named(archive: Archive, place: Path) -> list[Package]:
    """Return what has its name."""
    return [each for each in archive.packages if (place / each.path).exists()]


def play(image: Image, url: str, archive: Archive, policy: str, rng: random.Random) -> Outcome:
    """Do one round."""
    outcome = Outcome()
    image.make(rng.choice((1, 5)))
    place = image.root / "mirror"
    with mirroring(url, archive, place, policy) as process:
        until_s = time.monotonic() + PATIENCE_S
        while not any(place.glob("pool/*/*/*/*.deb")) and time.monotonic() < until_s:
            if process.poll() is not None:
                break
            time.sleep(0.005)
        time.sleep(rng.uniform(0, LATEST_S))
        outcome.whole += process.poll() is not None
        image.cut()
    image.mount_again()
    there = named(archive, place)
    outcome.named = len(there)
    outcome.wrong = len(wrong(there, place))
    with mirroring(url, archive, place, policy) as process:
        _, told = process.communicate(timeout=PATIENCE_S)
        if process.returncode or wrong(archive.packages, place):
            print(f"{policy}: {told.strip()[-500:]}", file=sys.stderr)
            outcome.unfinished += 1
    image.unmount()
    return outcome


def verdict(totals: dict[str, Outcome]) -> list[str]:
    """Return what is wrong: a sentence for each policy that broke its promise, or proves nothing."""
    found = []
    for policy, outcome in totals.items():
        if policy in PROMISING:
            if outcome.wrong:
                found.append(f"{policy}: {outcome.wrong} files had their names and were wrong")
            if outcome.unfinished:
                found.append(f"{policy}: {outcome.unfinished} times the rerun did not mend it")
            if not outcome.named:
                found.append(f"{policy}: nothing had its name, so nothing is proved")
        elif not outcome.wrong:
            found.append(f"{policy}: nothing was wrong, so this test cannot tell")
    return found


def run(scratch: Path, options: argparse.Namespace, out: TextIO) -> int:
    """Play all rounds, the policies in turns; returns the exit status."""
    rng = random.Random(options.seed)
    print(f"crash_mirror: {options.rounds} rounds each, seed {options.seed}", file=out)
    shape = attrs.evolve(ARCHIVE, files=options.files, size_bytes=options.files * 50_000)
    archive = make_archive(scratch / "archive", shape, rng)
    totals = {policy: Outcome() for policy in dict.fromkeys(options.durability or POLICIES)}
    with Image(scratch) as image, WebServer(archive.root, scratch / "nginx") as server:
        url = f"http://{server.address}/"
        for _ in range(options.rounds):
            for policy in totals:
                totals[policy] += play(image, url, archive, policy, rng)
        for policy in (each for each in totals if each in PROMISING):
            for _ in range(MORE_ROUNDS):
                if not totals[policy].named:  # names that were seen were in memory alone
                    totals[policy] += play(image, url, archive, policy, rng)
    print(
        "| policy | named at the cut | of these wrong | reruns that did not mend it | over before |",
        file=out,
    )
    print("|---|---|---|---|---|", file=out)
    for policy, outcome in totals.items():
        print(f"| {policy} | {' | '.join(map(str, attrs.astuple(outcome)))} |", file=out)
    sentences = verdict(totals)
    for sentence in sentences:
        print(sentence, file=out)
    return 1 if sentences else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: returns 0 if all promises held, 1 if not, 2 if it cannot be tried."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--rounds", type=int, default=10, help="cuts for each policy [10]")
    parser.add_argument("--files", type=int, default=ARCHIVE.files, help="of the archive [3000]")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--durability", action="append", choices=POLICIES, default=None)
    parser.add_argument("--scratch", type=scratch_directory, help="where the image is made")
    options = parser.parse_args(arguments)
    ending.end_on_sigterm()
    try:
        with workplace(options.scratch) as place:
            return run(place, options, sys.stdout)
    except Unable as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
