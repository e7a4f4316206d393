"""
Patches to an index: ``pipegrid pdiff`` and APT's own method ``rred``, on the same large file.

APT is spoken to as it speaks to its methods, so that it verifies as it does in earnest: a hash for each patch
and one for the result. ``rred -t``, which verifies nothing, is printed beside it.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import shutil
import sys
from pathlib import Path

from misc.command import environment
from misc.speedtest.mirror.archive import sha256_of
from misc.speedtest.mirror.bench import Bench
from misc.speedtest.mirror.runs import Run, RunFailed, ratio, run, summed_up
from misc.speedtest.mirror.tools import Call

RRED = Path("/usr/lib/apt/methods/rred")
PATCHES = 8
INDEX_BYTES = 430_000_000
TINY_BYTES = 300_000
EDITS = 500
"""Of a patch: about 75 KB."""


def patches(bench: Bench) -> None:
    """One patch, and eight."""
    size = TINY_BYTES if bench.tiny else INDEX_BYTES
    edits = 10 if bench.tiny else EDITS
    place = bench.place()
    index, made, results = make_index(place, size, PATCHES, edits, bench.rng)
    ours: dict[int, list[Run]] = {1: [], PATCHES: []}
    theirs: dict[int, list[Run]] = {1: [], PATCHES: []}
    unverified: dict[int, list[Run]] = {1: [], PATCHES: []}
    for _ in range(bench.rounds):
        for count in ours:
            wanted = results[count - 1]
            ours[count].append(_pdiff(place, index, made[:count], wanted))
            if RRED.exists():
                theirs[count].append(_method(place, index, made[:count], wanted))
                output = place / "output"
                command = [str(RRED), "-t", str(index), str(output), *map(str, made[:count])]
                unverified[count].append(run(Call(command, output), place / "log"))
                _check(output, wanted)
    for count in ours:
        peers = {}
        if theirs[count]:
            peers = {
                "rred": summed_up(theirs[count]),
                "rred_unverified": summed_up(unverified[count]),
                "wall_to_rred": round(ratio(ours[count], theirs[count]), 2),
                "target": 0.8,
            }
        bench.tell(
            f"pdiff: {count} patches of {made[0].stat().st_size / 1e3:.0f} KB,"
            f" index of {size / 1e6:.0f} MB",
            pipegrid=summed_up(ours[count]),
            to_one_patch=round(ratio(ours[count], ours[1]), 2),
            **peers,
        )
    shutil.rmtree(place)


def make_index(
    place: Path, size_bytes: int, count: int, edits: int, rng: random.Random
) -> tuple[Path, list[Path], list[str]]:
    """Write an index and patches that follow each other; returns them, and the hash after each."""
    lines = []
    written = 0
    while written < size_bytes:
        line = _line(rng, written)
        lines.append(line)
        written += len(line)
    index = place / "Contents-amd64"
    index.write_bytes(b"".join(lines))
    made, results = [], []
    for number in range(count):
        path = place / f"patch-{number}"
        path.write_bytes(_patch(lines, edits, rng))
        made.append(path)
        hasher = hashlib.sha256()
        for start in range(0, len(lines), 100_000):
            hasher.update(b"".join(lines[start : start + 100_000]))
        results.append(hasher.hexdigest())
    return index, made, results


def _line(rng: random.Random, number: int) -> bytes:
    return b"usr/share/doc/package-%x/file-%x        section/package-%d\n" % (
        rng.getrandbits(28),
        rng.getrandbits(40),
        number,
    )


def _patch(lines: list[bytes], edits: int, rng: random.Random) -> bytes:
    """Change the lines, and return the ed script, as ``diff --ed`` writes it: the last edit first."""
    commands = []
    spots = sorted(rng.sample(range(len(lines) // 8), min(edits, len(lines) // 16)), reverse=True)
    for spot in spots:
        at = spot * 8  # none touches another
        kind = rng.randrange(3)
        new = [_line(rng, at) for _ in range(rng.randint(1, 5))]
        if kind == 0:
            commands += [b"%da\n" % (at + 1), *new, b".\n"]
            lines[at + 1 : at + 1] = new
        elif kind == 1:
            commands += [b"%d,%dc\n" % (at + 1, at + 2), *new, b".\n"]
            lines[at : at + 2] = new
        else:
            commands.append(b"%dd\n" % (at + 1))
            del lines[at]
    return b"".join(commands)


def _pdiff(place: Path, index: Path, made: list[Path], wanted: str) -> Run:
    output = place / "output"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pipegrid.cli", "pdiff", str(index), *map(str, made)]
    taken = run(
        Call([*command, "-o", str(output), "--sha256", wanted], output, environment()),
        place / "log",
        watched=True,
    )
    _check(output, wanted)
    return taken


def _method(place: Path, index: Path, made: list[Path], wanted: str) -> Run:
    """Have APT's method patch, with the hashes of patches and result."""
    base = place / "method"
    output = place / "output"
    output.unlink(missing_ok=True)
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    os.link(index, base / "Index")
    message = [
        "600 URI Acquire",
        f"URI: rred:{base}/Index",
        f"Filename: {output}",
        f"Expected-SHA256: {wanted}",
    ]
    for number, path in enumerate(made):
        data = path.read_bytes()
        packed = base / f"Index.ed.{number:03}.gz"
        packed.write_bytes(gzip.compress(data))
        message.append(f"Patch-{number}-SHA256-Hash: {hashlib.sha256(data).hexdigest()}")
        message.append(f"Patch-{number}-Checksum-FileSize-Hash: {len(data)}")
    request = place / "request"
    request.write_text("\n".join(message) + "\n\n", "utf-8")
    taken = run(Call([str(RRED)], output), place / "log", stdin=request)
    if "201 URI Done" not in taken.output:
        raise RunFailed(f"rred said: {taken.output}")
    _check(output, wanted)
    return taken


def _check(path: Path, wanted: str) -> None:
    if sha256_of(path) != wanted:
        raise RunFailed(f"{path} is not what the patches make")
