"""Unchanged files by stat alone."""

from __future__ import annotations

import marshal
import os
from stat import S_ISDIR
from struct import Struct
from struct import error as StructError

from pipegrid.disk.safe_open import is_directory, open_locked, read_file
from pipegrid.mirror import HIDDEN, MANIFEST

# How files looked when they were last known to be right, so that a look alone tells that they still are.
#
# Of a file that was proven (``verified``) a row is kept: its hash, number, size, and the times of the last
# change of its content and of itself. Whatever happens to it then (another content, another file of that
# name, another attribute) changes at least the last of these, which nobody can set. So a row never says
# more than the file's attribute would; and what does not look like any row is asked for its attribute, as
# without.
#
# Rows stand one behind the other, in no order. A damaged one is like no file; nothing is lost with it but
# time. Synchronous, for the thread that has the destination.

ROW = Struct("=32sQqqq")
"""The first 32 bytes of the hash; number, size in bytes, and both times in nanoseconds."""

MAX_ROWS = 500_000
"""Some 70 MB in memory. Of a larger mirror the others are asked for their attributes."""

SPARE_BYTES = 64 << 10
"""Of rows, beyond as many bytes as the manifest has: more would mostly be of files that are gone."""

MAX_SEARCHES = 4
"""Of all rows for one, before an index of them is made."""

GATHERED = 4096
"""New rows that are written together."""


class Rows:
    """
    Those that were read.

    Attributes:
        data: one behind the other. Most are asked for in that order, and found without an index.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._index: dict[bytes, int] | None = None
        self._searches = 0

    def __len__(self) -> int:
        return len(self.data) // ROW.size

    def __contains__(self, row: object) -> bool:
        return row in self._places

    def find(self, row: bytes) -> int:
        """Return where a row begins in ``data``; -1: it is none of these."""
        if self._index is None and self._searches < MAX_SEARCHES:
            self._searches += 1
            at = self.data.find(row)
            if at % ROW.size == 0:
                return at
        return self._places.get(row, -1)

    @property
    def _places(self) -> dict[bytes, int]:
        if self._index is None:
            data, size = self.data, ROW.size
            self._index = {data[at : at + size]: at for at in range(0, len(data), size)}
        return self._index

    def discard(self, row: bytes) -> None:
        """Forget one; none is found in its place."""
        at = self._places.pop(row, -1)
        if at >= 0:
            self.data = self.data[:at] + bytes(ROW.size) + self.data[at + ROW.size :]


class StatCache:
    """
    The rows of one mirror.

    Args:
        path: of the file that holds them, made with the first.
        manifest: path of what the last complete run wanted, whose size bounds this.
    """

    def __init__(self, path: str, manifest: str) -> None:
        self._path = path
        self._manifest = manifest
        self._rows: Rows | None = None
        self._new: list[bytes] = []
        self._room = MAX_ROWS

    @property
    def rows(self) -> Rows:
        """As ``row_of`` makes them; read when they are first asked for."""
        if self._rows is None:
            self._rows = Rows(self._read())
            self._room -= len(self._rows)
        return self._rows

    def _read(self) -> bytes:
        try:
            data = read_rows(self._path, os.stat(self._manifest).st_size)
            if data is not None:
                return data
            self._begin_anew()
        except OSError:
            pass  # there is none yet, or it cannot be read: then it helps nobody
        return b""

    def holds(self, digest: bytes, status: os.stat_result) -> bool:
        """Return whether a file that looks so was known to have this hash."""
        return row_of(digest, status) in self.rows

    def add(self, digest: bytes, status: os.stat_result) -> None:
        """
        A file is known to have this hash.

        Args:
            status: from before that was found out: if it changed meanwhile, it looks otherwise now.
        """
        row = row_of(digest, status)
        if row is None or row in self.rows or self._room <= 0:
            return
        self._room -= 1
        self._new.append(row)
        if len(self._new) >= GATHERED:
            self.keep()

    def withdraw(self, digest: bytes, status: os.stat_result) -> bool:
        """
        A file that looks so does not have this hash, whatever its row says; returns whether none says so now.

        All rows go, since other processes may be adding theirs: what is right is looked at more closely once.
        """
        row = row_of(digest, status)
        if row is None or row not in self.rows:
            return True
        self.rows.discard(row)
        self._new = [each for each in self._new if each != row]
        try:
            self._begin_anew()
        except FileNotFoundError:  # another process was quicker
            return True
        except OSError:
            return False
        return True

    def _begin_anew(self) -> None:
        os.unlink(self._path)

    def keep(self) -> None:
        """Write down what is new; where that cannot be, files are looked at more closely next time."""
        new, self._new = self._new, []
        if not new:
            return
        try:
            fd = os.open(
                self._path,
                os.O_WRONLY
                | os.O_CREAT
                | os.O_APPEND
                | os.O_NOFOLLOW
                | os.O_NONBLOCK  # a named pipe in its place is none
                | os.O_CLOEXEC,
                0o644,
            )
        except OSError:
            return
        try:
            os.write(fd, b"".join(new))  # at once: other processes write theirs
        except OSError:
            pass
        finally:
            os.close(fd)

    def forked(self) -> None:
        """This is another process now: what was new is written by the one that it comes from."""
        self._new = []


def read_rows(path: str, manifest_bytes: int) -> bytes | None:
    """
    Return the rows that a file holds; None: half a row, or too many that are old.

    Raises:
        OSError: there are none yet, or they cannot be read.
    """
    most_bytes = min(manifest_bytes + SPARE_BYTES, MAX_ROWS * ROW.size)
    data = read_file(path, most_bytes + 1)
    return data if len(data) % ROW.size == 0 and len(data) <= most_bytes else None


def row_of(digest: bytes, status: os.stat_result) -> bytes | None:
    """Return what a row says of a file; None: times as no clock shows them."""
    try:
        return ROW.pack(
            digest, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )
    except StructError:
        return None


# A glance at what is there: which lines of the manifest name files that look as they did when they were
# right.
#
# It opens no file and reads none. What does not look so is for others to look at more closely: nothing is
# wrong because a glance did not know it.

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for


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


class QuickCheck:
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
            from pipegrid.mirror.list_format import lines_in  # which few need here

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


# Whether a mirror is just as it was when all of it was found to be right; for who has time for nothing else.
#
# What ``verify`` loads takes longer than a look at some thousand files. So what can be found at a glance is
# found by this, which loads next to nothing. What it does not know is for ``verify`` to find out, which is
# told what was found, or begins anew. It changes nothing, and gives up what it opened.

# as ``typing`` has it, which is not to be waited for
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


class QuickCheckResult:
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


def glimpse(dest: str, shares: bool) -> QuickCheckResult | None:
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
        glance = QuickCheck(root, Rows(rows))
        try:
            found = _look(glance, text, shares)
        finally:
            glance.close()
        return None if found is None else QuickCheckResult(text, *found)
    except OSError:
        return None
    finally:
        for fd in opened:
            os.close(fd)


def _look(glance: QuickCheck, text: bytes, shares: bool) -> _Found | None:
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

    def __init__(self, glance: QuickCheck, text: bytes, begin: int) -> None:
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
    glance: QuickCheck, text: bytes, begin: int, end: int, stopped: Callable[[], bool]
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
