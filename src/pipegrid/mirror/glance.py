"""
A glance at what is there: which lines of the manifest name files that look as they did when they were right.

It opens no file and reads none. What does not look so is for others to look at more closely: nothing is
wrong because a glance did not know it.
"""

from __future__ import annotations

import os
from collections.abc import Container
from stat import S_ISREG

from pipegrid.errors import PipegridError
from pipegrid.mirror.directories import Directories
from pipegrid.mirror.lists import lines_in
from pipegrid.mirror.seen import row_of

_ODD = (b"/.", b" .", b"//", b" /")
"""No plain line has that: parts of a path that are empty, or begin with a dot as those do that lead out."""


def glance(
    text: bytes, directories: Directories, rows: Container[bytes | None]
) -> tuple[int, int, list[bytes]]:
    """
    Look at the files that some lines name.

    Args:
        text: whole lines, in the form of ``lists``.
        rows: of ``seen``.

    Returns:
        How many files are as they were, and their bytes; and the other lines, in order.
    """
    files = size_bytes = 0
    others: list[bytes] = []
    lines = lines_in(text)
    if any(odd in text for odd in _ODD):
        return 0, 0, lines
    last, directory = None, None
    look, open_directory = os.stat, directories.directory
    for line in lines:
        try:
            digest, size, path = line.decode("utf-8")[:-1].split(" ", 2)
            above, _, name = path.rpartition("/")
            if above != last:
                last, directory = above, open_directory(above, False)
            if directory is not None:
                status = look(name, dir_fd=directory, follow_symlinks=False)
                if (
                    row_of(bytes.fromhex(digest), status) in rows
                    and status.st_size == int(size)
                    and S_ISREG(status.st_mode)
                ):
                    files += 1
                    size_bytes += status.st_size
                    continue
        except (ValueError, OSError, PipegridError):
            last = None
        others.append(line)
    return files, size_bytes, others
