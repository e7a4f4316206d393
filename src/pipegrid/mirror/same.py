"""
Whether a mirror is just as it was when all of it was found to be right; for who has time for nothing else.

What ``verify`` loads takes longer than a look at some thousand files. So what can be found at a glance is
found by this, which loads next to nothing; it answers "yes", or nothing at all: then all is done once more,
as it should be, by ``verify``. It changes nothing, and gives up what it opened.
"""

from __future__ import annotations

import os

from pipegrid.disk.locks import open_locked
from pipegrid.disk.reading import read_file
from pipegrid.mirror import HIDDEN, MANIFEST
from pipegrid.mirror.glance import Glance
from pipegrid.mirror.seen import ROW, Rows, read_rows

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BYTES = 4 << 20
"""Of a manifest, some 30,000 files. To look twice at more would cost more than is won."""

SHARED_BYTES = 128 << 10
"""From so many on a second process is worth to be begun."""

PIECE_BYTES = 64 << 10
"""Between two looks at whether there is something else."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def look_if_same(dest: str, shares: bool) -> tuple[int, int] | None:
    """
    Return how many files a mirror has, and their bytes, if all of them look as they did when they were right.

    Args:
        shares: a process forked for that looks at half of it; only where this one has no other threads.

    Returns:
        None: something else is to be found out, be it only that another process mirrors to it.
    """
    opened: list[int] = []
    try:
        root = os.open(dest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(root)
        hidden = os.open(HIDDEN, _DIRECTORY, dir_fd=root)
        opened.append(hidden)
        opened.append(
            os.open("incoming", _DIRECTORY, dir_fd=hidden)
        )  # of a mirror, and can be used
        lock = open_locked(f"{dest}/{HIDDEN}/lock", os.O_RDWR)
        if lock is None:
            return None
        opened.append(lock)
        text = read_file(f"{dest}/{HIDDEN}/{MANIFEST}", MAX_BYTES + 1)
        rows = read_rows(f"{dest}/{HIDDEN}/seen", len(text))
        if len(text) > MAX_BYTES or not rows or text.count(b"\n") * ROW.size > len(rows):
            return None
        glance = Glance(root, Rows(rows))
        try:
            return _look(glance, text, shares)
        finally:
            glance.close()
    except OSError:
        return None
    finally:
        for fd in opened:
            os.close(fd)


def _look(glance: Glance, text: bytes, shares: bool) -> tuple[int, int] | None:
    middle = text.find(b"\n", len(text) // 2) + 1
    if not shares or len(text) < SHARED_BYTES or not middle:
        return _look_at(glance, text, 0, len(text), lambda: False)
    helper = _Helper(glance, text, middle)
    try:
        own = _look_at(glance, text, 0, middle, lambda: False)
        theirs = None if own is None else helper.join()
    finally:
        helper.stop()
    if own is None or theirs is None:
        return None
    return own[0] + theirs[0], own[1] + theirs[1]


class _Helper:
    """A process that looks at the end of a manifest; raises ``OSError`` if there can be none."""

    def __init__(self, glance: Glance, text: bytes, begin: int) -> None:
        self._is_done = False
        self._told, told = os.pipe()
        parent = os.getpid()
        try:
            self._pid = os.fork()
            if not self._pid:
                try:
                    found = _look_at(glance, text, begin, len(text), lambda: os.getppid() != parent)
                    if found is not None:
                        os.write(told, b"%d %d" % found)
                finally:
                    os._exit(0)
        except OSError:
            os.close(self._told)
            raise
        finally:
            os.close(told)

    def join(self) -> tuple[int, int] | None:
        """Return what it has found; None: not all of it is the same."""
        said = os.read(self._told, 100)  # a line so short comes at once
        if not said:
            return None
        self._is_done = True
        files, size_bytes = said.split()
        return int(files), int(size_bytes)

    def stop(self) -> None:
        """Have it end, if it has not."""
        os.close(self._told)
        if not self._is_done:
            from signal import SIGKILL  # which takes as long to load as all else here

            os.kill(self._pid, SIGKILL)
        os.waitpid(self._pid, 0)


def _look_at(
    glance: Glance, text: bytes, begin: int, end: int, stopped: Callable[[], bool]
) -> tuple[int, int] | None:
    files = size_bytes = 0
    while begin < end:
        behind = text.find(b"\n", begin + PIECE_BYTES, end) + 1 or end
        more, more_bytes, others = glance.look(text[begin:behind])
        if others or stopped():
            return None
        files += more
        size_bytes += more_bytes
        begin = behind
    return files, size_bytes
