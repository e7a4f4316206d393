"""Reads Linux's table of mounted file systems (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_BYTES = 4 << 20
_TABLE = "/proc/self/mountinfo"


class MountedFileSystem(NamedTuple):
    """
    One line of the table of mounted file systems.

    Attributes:
        path: where the file system is mounted.
        device: its device number, as in ``os.stat_result.st_dev``.
        kind: its type, such as ``ext4`` or ``fuse.sshfs``.
    """

    path: str
    device: int
    kind: str


def mounted_file_systems(table: str = _TABLE) -> Iterator[MountedFileSystem]:
    """
    Yield the mounted file systems; of several at one path, the last one hides the others. Malformed lines are
    skipped.

    Args:
        table: the path of the kernel's list; if it does not exist, as on other systems, nothing is yielded.
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
