"""
The trees that are stored: files of 200 B to 1 MB, fifty kilobytes each on average, ten in a directory.

Sizes lie evenly on one curve for any number of files, so that a tree of a tenth of the files is a tenth of
the tree.
"""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

SMALLEST = 200
LARGEST = 1_000_000
AVERAGE = 50_000
FILES_PER_DIRECTORY = 10


def sizes(count: int) -> list[int]:
    """Return the sizes of so many files, ascending."""
    bend = _bend()
    return [_size((number + 0.5) / count, bend) for number in range(count)]


def _size(place: float, bend: float) -> int:
    return round(SMALLEST * math.exp(math.log(LARGEST / SMALLEST) * place**bend))


def _bend() -> float:
    """Return how far most files have to be small, so that the average is right."""
    low, high = 1.0, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        average = sum(_size((number + 0.5) / 1000, middle) for number in range(1000)) / 1000
        low, high = (middle, high) if average > AVERAGE else (low, middle)
    return low


def make_tree(root: Path, count: int, rng: random.Random) -> int:
    """Make a directory with so many random files, ten in a directory; returns their bytes."""
    root.mkdir(parents=True)
    chosen = sizes(count)
    rng.shuffle(chosen)
    for number, size in enumerate(chosen):
        directory = root / f"d{number // FILES_PER_DIRECTORY:03}"
        directory.mkdir(exist_ok=True)
        (directory / f"f{number:04}").write_bytes(rng.randbytes(size))
    return sum(chosen)


def make_deep(root: Path, depth: int, rng: random.Random) -> None:
    """Make so many directories within one another, with a file in each."""
    at = root
    for level in range(depth):
        at.mkdir(parents=True)
        (at / f"file{level}").write_bytes(rng.randbytes(1000))
        at /= "deeper"


def change(root: Path, count: int, rng: random.Random) -> None:
    """Replace so many files, no two in one directory unless there are fewer."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    step = max(1, len(files) // count)
    for path in files[::step][:count]:
        path.write_bytes(rng.randbytes(path.stat().st_size))


def compare(one: Path, other: Path) -> None:
    """
    Compare names and bytes of two trees.

    Raises:
        RuntimeError: they differ.
    """
    names = [
        sorted(path.relative_to(each) for path in each.rglob("*") if not path.is_dir())
        for each in (one, other)
    ]
    if names[0] != names[1]:
        odd = sorted(map(str, set(names[0]) ^ set(names[1])))
        raise RuntimeError(f"{one} and {other} have different files, such as {odd[0]}")
    for name in names[0]:
        if (one / name).read_bytes() != (other / name).read_bytes():
            raise RuntimeError(f"{os.fspath(name)} differs in {one} and {other}")
