"""
A glance at what is there: which lines of the manifest name files that look as they did when they were right.

It opens no file and reads none. What does not look so is for others to look at more closely: nothing is
wrong because a glance did not know it.
"""

from __future__ import annotations

import os
from collections.abc import Set
from struct import error as StructError

from pipegrid.errors import PipegridError
from pipegrid.mirror.directories import Directories
from pipegrid.mirror.lists import lines_in
from pipegrid.mirror.seen import ROW

_ODD = (b"/.", b" .", b"//", b" /")
"""No plain line has that: parts of a path that are empty, or begin with a dot as those do that lead out."""


def glance(text: bytes, directories: Directories, rows: Set[bytes]) -> tuple[int, int, list[bytes]]:
    """
    Look at the files that some lines name.

    Args:
        text: whole lines, in the form of ``lists``.
        rows: of ``seen``, all of regular files.

    Returns:
        How many files are as they were, and their bytes; and the other lines, in order.
    """
    files = size_bytes = 0
    others: list[bytes] = []
    lines = lines_in(text)
    if any(odd in text for odd in _ODD):
        return 0, 0, lines
    last, directory = None, None
    look, pack, hash_from = os.stat, ROW.pack, bytes.fromhex
    for line in lines:
        try:
            digest, size, path = line.decode("utf-8")[:-1].split(" ", 2)
            above, _, name = path.rpartition("/")
            if above != last:
                last, directory = above, directories.directory(above, False)
            if directory is not None:
                status = look(name, dir_fd=directory, follow_symlinks=False)
                found = status.st_size
                row = pack(  # as ``row_of``
                    hash_from(digest), status.st_ino, found, status.st_mtime_ns, status.st_ctime_ns
                )
                if row in rows and found == int(size):
                    files += 1
                    size_bytes += found
                    continue
        except (ValueError, OSError, PipegridError, StructError):
            last = None
        others.append(line)
    return files, size_bytes, others
