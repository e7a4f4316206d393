"""
A glance at what is there: which lines of the manifest name files that look as they did when they were right.

It opens no file and reads none. What does not look so is for others to look at more closely: nothing is
wrong because a glance did not know it.
"""

from __future__ import annotations

import os
from stat import S_ISDIR
from struct import error as StructError

from pipegrid.disk.reading import is_directory
from pipegrid.mirror.seen import ROW

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from pipegrid.mirror.seen import Rows

MAX_NAMES = 100_000
"""Of directories, some 10 MB; beyond these each is asked for by itself."""

_LEAD_OUT = "/."
"""What a path does not begin with that stays in a mirror, and out of ``HIDDEN``."""

MAX_OPEN = 256
"""Of directories."""

_NOWHERE = -1, 0

_MAX_PATH = 1000
"""Of a directory's path. A longer one is refused by whoever looks more closely."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Glance:
    """
    Looks at the files of one mirror, once.

    A file is looked at over its directory, which takes less than to open that. What is opened are directories
    of directories: each tells of hundreds at once that they are no symbolic links.

    Args:
        root: descriptor of the mirror's directory.
        rows: all of regular files.
    """

    def __init__(self, root: int, rows: Rows) -> None:
        self._root = root
        self._rows = rows
        self._known: dict[str, tuple[int, int, set[str]]] = {}
        self._room = MAX_NAMES
        self._opened: list[int] = []
        self._at = 0

    def close(self) -> None:
        """Let go of what it opened."""
        self._known.clear()
        while self._opened:
            os.close(self._opened.pop())

    def look(self, text: bytes) -> tuple[int, int, list[bytes]]:
        """
        Look at the files that some lines name.

        Args:
            text: whole lines, in the form of ``lists``.

        Returns:
            How many files are as they were, and their bytes; and the other lines, in order.
        """
        files = size_bytes = 0
        others: list[bytes] = []
        try:
            *lines, rest = text.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            from pipegrid.mirror.lists import lines_in  # which few need here

            return 0, 0, lines_in(text)
        last, start, cut = None, -1, 0
        rows, at = self._rows, self._at
        look, pack, hash_from, known = os.stat, ROW.pack, bytes.fromhex, rows.data
        for line in lines:
            try:
                digest, size, path = line.split(" ", 2)
                above, _, _ = path.rpartition("/")
                if above != last or not above:
                    last = above
                    start, cut = self._start(above) if path[0] not in _LEAD_OUT else _NOWHERE
                if start >= 0:
                    status = look(path[cut:], dir_fd=start, follow_symlinks=False)
                    found = status.st_size
                    row = pack(  # as ``row_of``
                        hash_from(digest),
                        status.st_ino,
                        found,
                        status.st_mtime_ns,
                        status.st_ctime_ns,
                    )
                    if not known.startswith(row, at):  # most stand in the order of the manifest
                        at = rows.find(row)
                    if at >= 0 and found == int(size):
                        at += ROW.size
                        files += 1
                        size_bytes += found
                        continue
                    at = 0
            except (ValueError, IndexError, OSError, StructError):
                last = None
            others.append(line.encode("utf-8") + b"\n")
        self._at = at
        if rest:
            others.append(rest.encode("utf-8"))
        return files, size_bytes, others

    def _start(self, path: str) -> tuple[int, int]:
        """
        Return from where a directory's files are looked at, and how many letters of its path lead there.

        It is nowhere if the path leads not only over directories, as none does with ``..`` or an empty part.

        Raises:
            OSError: the path leads nowhere at all.
        """
        if not path:
            return self._root, 0
        if len(path) > _MAX_PATH:
            return _NOWHERE
        above, _, name = path.rpartition("/")
        known = self._known.get(above)
        if known is None:
            start, cut = self._start(above)
            if start < 0:
                return _NOWHERE
            if self._room <= 0:
                is_one = S_ISDIR(os.stat(path[cut:], dir_fd=start, follow_symlinks=False).st_mode)
                return (start, cut) if is_one else _NOWHERE
            known = self._known[above] = self._list(above, start, cut)
        start, cut, names = known
        return (start, cut) if name in names else _NOWHERE

    def _list(self, path: str, start: int, cut: int) -> tuple[int, int, set[str]]:
        """Return from where to look at what is in a directory, and the names of the directories in it."""
        fd = os.open(path[cut:] or ".", _DIRECTORY, dir_fd=start)
        try:
            with os.scandir(fd) as entries:
                names = {each.name for each in entries if is_directory(each)}
            self._room -= 1 + len(names)
            if len(self._opened) < MAX_OPEN:
                self._opened.append(fd)
                fd, start, cut = -1, fd, len(path) + 1 if path else 0
        finally:
            if fd >= 0:
                os.close(fd)
        return start, cut, names
