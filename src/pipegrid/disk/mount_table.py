"""The file systems that are mounted, as Linux lists them (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_BYTES = 4 << 20
_TABLE = "/proc/self/mountinfo"


class MountedFileSystem(NamedTuple):
    """
    One line of the table.

    Attributes:
        path: where it is mounted.
        device: its number, as in ``os.stat_result.st_dev``.
        kind: such as ``ext4`` or ``fuse.sshfs``.
    """

    path: str
    device: int
    kind: str


def mounted_file_systems(table: str = _TABLE) -> Iterator[MountedFileSystem]:
    """
    Yield what is mounted; of several at one path the last one hides the others. Lines that cannot be
    understood are left out.

    Args:
        table: the kernel's list; without it, as on other systems, there is nothing.
    """
    try:
        with open(table, "rb") as file:
            lines = file.read(MAX_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(b" - ")
        fields = before.split(b" ")
        if len(fields) < 5:
            continue
        major, _, minor = fields[2].partition(b":")
        if major.isdigit() and minor.isdigit():
            device = os.makedev(int(major), int(minor))
            kind = os.fsdecode(after.partition(b" ")[0])
            yield MountedFileSystem(os.fsdecode(_unescaped(fields[4])), device, kind)


def _unescaped(word: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8) & 255]), word)
