"""File systems of a test's own, in a file; only root can mount them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase


def mount_ramfs(case: SynchronousTestCase, place: Path) -> None:
    """Mount a file system in memory, which has no extended attributes, until the test's end."""
    if os.geteuid():
        raise SkipTest("only root can mount a file system")
    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "ramfs", "ramfs", str(place)], capture_output=True, check=False, text=True
    )
    if done.returncode:
        raise SkipTest(f"mount: {done.stderr.strip()}")
    case.addCleanup(subprocess.run, ["umount", "-l", str(place)], check=False)


def mounted_ext4(
    case: SynchronousTestCase, kib: int, *, block: int = 4096, without: str = ""
) -> Path:
    """
    Return where a new ext4 is mounted until the test's end.

    Args:
        kib: its size.
        block: size of its blocks, in bytes.
        without: features that it lacks, as ``mkfs.ext4`` calls them.
    """
    if os.geteuid():
        raise SkipTest("only root can mount a file system")
    top = Path(case.mktemp()).resolve()
    place = top / "mounted"
    place.mkdir(parents=True)
    image = top / "image"
    with open(image, "wb") as file:
        file.truncate(kib << 10)
    features = "^has_journal" + "".join(f",^{each}" for each in without.split())
    make = ["mkfs.ext4", "-q", "-F", "-b", str(block), "-m", "0", "-O", features, str(image)]
    for command in (make, ["mount", "-o", "loop", str(image), str(place)]):
        try:
            done = subprocess.run(command, capture_output=True, check=False, text=True)
        except OSError as error:
            raise SkipTest(f"{command[0]}: {error.strerror}") from error
        if done.returncode:
            raise SkipTest(f"{command[0]}: {done.stderr.strip()}")
    case.addCleanup(subprocess.run, ["umount", "-l", str(place)], check=False)
    return place


def fill(place: Path, free_bytes: int) -> None:
    """Fill a file system until only so much of it is free, about."""
    with open(place / "filling", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - free_bytes))
