"""
Whether a mirror is just as it was when all of it was found to be right; for who has time for nothing else.

What ``verify`` loads takes longer than a look at some thousand files. So what can be found at a glance is
found by this, which loads next to nothing. What it does not know is for ``verify`` to find out, which is
told what was found, or begins anew. It changes nothing, and gives up what it opened.
"""

from __future__ import annotations

import marshal
import os

from pipegrid.disk.locks import open_locked
from pipegrid.disk.reading import read_file
from pipegrid.mirror import HIDDEN, MANIFEST
from pipegrid.mirror.glance import Glance
from pipegrid.mirror.seen import ROW, Rows, read_rows

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from collections.abc import Callable

    _Found = tuple[int, int, list[bytes]]

MAX_BYTES = 4 << 20
"""Of a manifest, some 30,000 files. To begin anew with more would cost more than is won."""

MAX_OTHERS = 2000
"""Files of a part that are not as they were. More are shared among processes."""

SHARED_BYTES = 128 << 10
"""From so many on a second process is worth to be begun."""

PIECE_BYTES = 64 << 10
"""Between two looks at whether there is something else."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Glimpse:
    """
    What was found at a glance.

    Attributes:
        text: the manifest.
        files, size_bytes: of what looks as it did when it was right.
        others: lines of what does not, in order.
    """

    __slots__ = ("files", "others", "size_bytes", "text")

    def __init__(self, text: bytes, files: int, size_bytes: int, others: list[bytes]) -> None:
        self.text = text
        self.files = files
        self.size_bytes = size_bytes
        self.others = others


def glimpse(dest: str, shares: bool) -> Glimpse | None:
    """
    Return which files of a mirror look as they did when they were right.

    Args:
        shares: a process forked for that looks at half of them; only where this one has no other threads.

    Returns:
        None: more is to be found out than that, be it only that another process mirrors to it.
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
        if len(text) > MAX_BYTES or not rows:
            return None
        if text.count(b"\n") > len(rows) // ROW.size + MAX_OTHERS:
            return None
        glance = Glance(root, Rows(rows))
        try:
            found = _look(glance, text, shares)
        finally:
            glance.close()
        return None if found is None else Glimpse(text, *found)
    except OSError:
        return None
    finally:
        for fd in opened:
            os.close(fd)


def _look(glance: Glance, text: bytes, shares: bool) -> _Found | None:
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
    return own[0] + theirs[0], own[1] + theirs[1], own[2] + theirs[2]


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
                    with open(told, "wb") as pipe:
                        marshal.dump(found, pipe)
                finally:
                    os._exit(0)
        except OSError:
            os.close(self._told)
            raise
        finally:
            os.close(told)

    def join(self) -> _Found | None:
        """Return what it has found; None: nothing, or it says nothing."""
        with open(self._told, "rb", closefd=False) as pipe:
            data = pipe.read()
        try:
            found: _Found | None = marshal.loads(data)  # written by a copy of this very process
        except (EOFError, TypeError, ValueError):
            return None
        self._is_done = True
        return found

    def stop(self) -> None:
        """Have it end, if it has not."""
        os.close(self._told)
        if not self._is_done:
            from signal import SIGKILL  # which takes as long to load as all else here

            os.kill(self._pid, SIGKILL)
        os.waitpid(self._pid, 0)


def _look_at(
    glance: Glance, text: bytes, begin: int, end: int, stopped: Callable[[], bool]
) -> _Found | None:
    files = size_bytes = 0
    others: list[bytes] = []
    while begin < end:
        behind = text.find(b"\n", begin + PIECE_BYTES, end) + 1 or end
        more, more_bytes, more_others = glance.look(text[begin:behind])
        files += more
        size_bytes += more_bytes
        others += more_others
        if len(others) > MAX_OTHERS or stopped():
            return None
        begin = behind
    return files, size_bytes, others
