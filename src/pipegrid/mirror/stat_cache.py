"""
The quick check, which finds unchanged files of a mirror by their status alone; and the records that it uses.
"""

from __future__ import annotations

import marshal
import os
from stat import S_ISDIR
from struct import Struct
from struct import error as StructError

from pipegrid.disk.safe_open import is_directory, open_locked, read_file
from pipegrid.mirror import HIDDEN, MANIFEST

# Records of the status of verified files, so that the status alone shows whether they are unchanged.
#
# A row has the hash, inode number and size of a verified file (``hash_cache``), and the times of the last
# change of its content and of its inode. Any change (other content, another file with that name, another
# attribute) changes at least the inode's time, which no program can set. So a row is as reliable as the
# file's attribute. If a file has no matching row, its attribute is read.
#
# Rows are in no order. A damaged row matches no file, which costs only time. The code is synchronous, for the
# destination's thread.

ROW = Struct("=32sQqqq")
"""Format of a row: first 32 bytes of the hash, inode number, size in bytes, and both times in nanoseconds."""

MAX_ROWS = 500_000
"""Maximum number of rows, some 70 MB in memory. For further files, the extended attribute is read."""

SPARE_BYTES = 64 << 10
"""How many bytes the rows may take beyond the manifest's size: more rows would mostly be of deleted files."""

MAX_SEARCHES = 4
"""After this many searches through all rows, an index of the rows is made."""

GATHERED = 4096
"""How many new rows are written together."""


class Rows:
    """
    The rows of a file.

    Attributes:
        data: the rows, one after the other. Most searches are in this order, and need no index.
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
        """Return the position of a row in ``data``; -1 if the row does not exist."""
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
        """Remove a row, so that ``find`` does not find it any more."""
        at = self._places.pop(row, -1)
        if at >= 0:
            self.data = self.data[:at] + bytes(ROW.size) + self.data[at + ROW.size :]


class StatCache:
    """
    The rows of one mirror.

    Args:
        path: of the file with the rows, which is made when the first rows are written.
        manifest: the path of the list of the last complete run, whose size limits the rows.
    """

    def __init__(self, path: str, manifest: str) -> None:
        self._path = path
        self._manifest = manifest
        self._rows: Rows | None = None
        self._new: list[bytes] = []
        self._rows_left = MAX_ROWS

    @property
    def rows(self) -> Rows:
        """The rows of the file, each as ``row_of`` makes it; read on first use."""
        if self._rows is None:
            self._rows = Rows(self._read())
            self._rows_left -= len(self._rows)
        return self._rows

    def _read(self) -> bytes:
        try:
            data = read_rows(self._path, os.stat(self._manifest).st_size)
            if data is not None:
                return data
            self._start_over()
        except OSError:
            pass  # the file does not exist or cannot be read: there are no rows
        return b""

    def holds(self, digest: bytes, status: os.stat_result) -> bool:
        """Return whether a file with this status is recorded with this hash."""
        return row_of(digest, status) in self.rows

    def add(self, digest: bytes, status: os.stat_result) -> None:
        """
        Record that a file has this hash.

        Args:
            status: of the file, from before it was hashed; if the file was changed since, its status does not
                match this one.
        """
        row = row_of(digest, status)
        if row is None or row in self.rows or self._rows_left <= 0:
            return
        self._rows_left -= 1
        self._new.append(row)
        if len(self._new) >= GATHERED:
            self.keep()

    def withdraw(self, digest: bytes, status: os.stat_result) -> bool:
        """
        Remove the row which says that a file has this hash, since it has another one; return whether the row
        is gone.

        The whole cache file is removed, since other processes may be appending to it. So unchanged files must
        be verified once more.
        """
        row = row_of(digest, status)
        if row is None or row not in self.rows:
            return True
        self.rows.discard(row)
        self._new = [each for each in self._new if each != row]
        try:
            self._start_over()
        except FileNotFoundError:  # another process has removed the file
            return True
        except OSError:
            return False
        return True

    def _start_over(self) -> None:
        os.unlink(self._path)

    def keep(self) -> None:
        """Write new rows; if that fails, the next run reads the attributes."""
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
                | os.O_NONBLOCK  # if the path is a named pipe, do not wait for a reader
                | os.O_CLOEXEC,
                0o644,
            )
        except OSError:
            return
        try:
            os.write(fd, b"".join(new))  # in one write: other processes append, too
        except OSError:
            pass
        finally:
            os.close(fd)

    def forked(self) -> None:
        """Adapt to a fork: this process is the child, and leaves new rows of its parent to the parent."""
        self._new = []


def read_rows(path: str, manifest_bytes: int) -> bytes | None:
    """
    Return the rows of a file; None if the last row is incomplete, or if there are too many rows.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """
    most_bytes = min(manifest_bytes + SPARE_BYTES, MAX_ROWS * ROW.size)
    data = read_file(path, most_bytes + 1)
    return data if len(data) % ROW.size == 0 and len(data) <= most_bytes else None


def row_of(digest: bytes, status: os.stat_result) -> bytes | None:
    """Return the row of a file; None if a number in its status, such as a time, does not fit into a row."""
    try:
        return ROW.pack(
            digest, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )
    except StructError:
        return None


# The quick check: which lines of the manifest name files whose status is the same as when they were verified.
#
# The quick check opens and reads no file. All other files need a closer check: an unknown status does not
# mean that a file is wrong.

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import


MAX_NAMES = 100_000
"""How many names of directories are remembered, some 10 MB; each further directory is checked separately."""

_LEAD_OUT = "/."
"""A path that begins with one of these characters may lead out of the mirror or into ``HIDDEN``."""

MAX_OPEN = 256
"""Maximum number of directories that are kept open."""

_NOWHERE = -1, 0

_MAX_PATH = 1000
"""The maximum length of a directory's path. Files below longer paths need the closer check."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class QuickCheck:
    """
    Checks the files of one mirror, once.

    A file's status is read relative to the parent of its directory, which takes less time than opening the
    directory. Only directories with subdirectories are opened: listing one of them shows for hundreds of
    subdirectories that they are not symbolic links.

    Args:
        root: descriptor of the mirror's directory.
        rows: of all verified files.
    """

    def __init__(self, root: int, rows: Rows) -> None:
        self._root = root
        self._rows = rows
        self._known: dict[str, tuple[int, int, set[str]]] = {}
        self._rows_left = MAX_NAMES
        self._opened: list[int] = []
        self._at = 0

    def close(self) -> None:
        self._known.clear()
        while self._opened:
            os.close(self._opened.pop())

    def look(self, text: bytes) -> tuple[int, int, list[bytes]]:
        """
        Check the files in some lines of the manifest.

        Args:
            text: whole lines, in the format of ``file_list_format``.

        Returns:
            The number of unchanged files, their size in bytes, and the lines of all other files, in order.
        """
        files = size_bytes = 0
        others: list[bytes] = []
        try:
            *lines, rest = text.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            from pipegrid.mirror.file_list_format import lines_in  # few runs need this module

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
                    row = pack(  # the same row as from ``row_of``
                        hash_from(digest),
                        status.st_ino,
                        found,
                        status.st_mtime_ns,
                        status.st_ctime_ns,
                    )
                    if not known.startswith(row, at):  # most rows are in the order of the manifest
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
        Return an open directory's descriptor, relative to which the files of the directory ``path`` are
        checked, and the number of leading characters of their paths that the descriptor replaces.

        ``_NOWHERE`` if the path leads through anything but directories, or has ``..`` or an empty part.

        Raises:
            OSError: the path does not exist.
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
            if self._rows_left <= 0:
                is_one = S_ISDIR(os.stat(path[cut:], dir_fd=start, follow_symlinks=False).st_mode)
                return (start, cut) if is_one else _NOWHERE
            known = self._known[above] = self._list(above, start, cut)
        start, cut, names = known
        return (start, cut) if name in names else _NOWHERE

    def _list(self, path: str, start: int, cut: int) -> tuple[int, int, set[str]]:
        """
        Return a descriptor and a number of characters as ``_start`` does, for files in subdirectories of
        ``path``, and the names of these subdirectories.
        """
        fd = os.open(path[cut:] or ".", _DIRECTORY, dir_fd=start)
        try:
            with os.scandir(fd) as entries:
                names = {each.name for each in entries if is_directory(each)}
            self._rows_left -= 1 + len(names)
            if len(self._opened) < MAX_OPEN:
                self._opened.append(fd)
                fd, start, cut = -1, fd, len(path) + 1 if path else 0
        finally:
            if fd >= 0:
                os.close(fd)
        return start, cut, names


# The quick check of a whole mirror, for ``mirror verify``: whether the mirror is unchanged since it was
# verified.
#
# Importing the modules of ``verify`` takes longer than a quick check of some thousand files. So this check
# runs first, and imports almost nothing. After it, ``verify`` checks the remaining files; without a result,
# ``verify`` checks all files. The quick check changes nothing, and closes what it opened.

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    _Found = tuple[int, int, list[bytes]]

MAX_BYTES = 4 << 20
"""
The maximum size of a manifest for this check, some 30,000 files. For a larger one, a quick check without a
result would cost more than the check saves.
"""

MAX_OTHERS = 2000
"""Maximum number of files without a matching row. If there are more, ``verify`` uses several processes."""

SHARED_BYTES = 128 << 10
"""The size of a manifest from which on a second process saves more time than it costs."""

PIECE_BYTES = 64 << 10
"""How much of the manifest is checked before the process looks again whether it must end."""


class QuickCheckResult:
    """
    The result of the quick check.

    Attributes:
        text: the manifest.
        files, size_bytes: number and total size of the unchanged files.
        others: the lines of all other files, in order.
    """

    __slots__ = ("files", "others", "size_bytes", "text")

    def __init__(self, text: bytes, files: int, size_bytes: int, others: list[bytes]) -> None:
        self.text = text
        self.files = files
        self.size_bytes = size_bytes
        self.others = others


def glimpse(dest: str, shares: bool) -> QuickCheckResult | None:
    """
    Do the quick check of a mirror; return which files are unchanged by their status.

    Args:
        shares: whether a forked process checks half of the files; only if this process has no other threads.

    Returns:
        None if this check does not suffice, for example because another process is writing to the mirror.
    """
    opened: list[int] = []
    try:
        root = os.open(dest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(root)
        hidden = os.open(HIDDEN, _DIRECTORY, dir_fd=root)
        opened.append(hidden)
        # A directory without ``incoming`` is not a mirror, or cannot be used.
        opened.append(os.open("incoming", _DIRECTORY, dir_fd=hidden))
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
        quick_check = QuickCheck(root, Rows(rows))
        try:
            found = _look(quick_check, text, shares)
        finally:
            quick_check.close()
        return None if found is None else QuickCheckResult(text, *found)
    except OSError:
        return None
    finally:
        for fd in opened:
            os.close(fd)


def _look(quick_check: QuickCheck, text: bytes, shares: bool) -> _Found | None:
    middle = text.find(b"\n", len(text) // 2) + 1
    if not shares or len(text) < SHARED_BYTES or not middle:
        return _look_at(quick_check, text, 0, len(text), lambda: False)
    process = ForkedWork(lambda stopped: _look_at(quick_check, text, middle, len(text), stopped))
    try:
        own = _look_at(quick_check, text, 0, middle, lambda: False)
        theirs: _Found | None = None if own is None else process.join()
    finally:
        process.stop()
    if own is None or theirs is None:
        return None
    return own[0] + theirs[0], own[1] + theirs[1], own[2] + theirs[2]


class ForkedWork:
    """
    A forked process that does some work; only if this process has no other threads.

    Args:
        work: called in the forked process with a function that returns whether the parent has ended; its
            result must be suitable for ``marshal``.

    Attributes:
        error: why the process could not be started, so that there is no result; None if it was started.
        pid: of the process.
        result_fd: becomes readable when the process has a result, or has ended.
    """

    def __init__(self, work: Callable[[Callable[[], bool]], Any]) -> None:
        self.error: OSError | None = None
        self.pid = -1
        self._is_done = False
        self.result_fd, theirs = os.pipe()
        parent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError as error:
            self.error = error
        if not self.pid:
            try:
                os.close(self.result_fd)
                found = work(lambda: os.getppid() != parent)
                with open(theirs, "wb") as pipe:
                    marshal.dump(found, pipe)
            finally:
                os._exit(0)
        os.close(theirs)

    def join(self) -> Any:
        """Wait for the result of the process, and return it; None if the process ended without one."""
        with open(self.result_fd, "rb", closefd=False) as pipe:
            data = pipe.read()
        try:
            found = marshal.loads(data)  # written by a fork of this process
        except (EOFError, TypeError, ValueError):
            return None
        self._is_done = True
        return found

    def stop(self) -> None:
        """End the process if it still runs, and close ``result_fd``."""
        os.close(self.result_fd)
        if self.error is not None:
            return
        if not self._is_done:
            from signal import SIGKILL  # this import takes as long as all others here

            os.kill(self.pid, SIGKILL)
        os.waitpid(self.pid, 0)


def _look_at(
    quick_check: QuickCheck, text: bytes, begin: int, end: int, stopped: Callable[[], bool]
) -> _Found | None:
    files = size_bytes = 0
    others: list[bytes] = []
    while begin < end:
        after = text.find(b"\n", begin + PIECE_BYTES, end) + 1 or end
        more, more_bytes, more_others = quick_check.look(text[begin:after])
        files += more
        size_bytes += more_bytes
        others += more_others
        if len(others) > MAX_OTHERS or stopped():
            return None
        begin = after
    return files, size_bytes, others
