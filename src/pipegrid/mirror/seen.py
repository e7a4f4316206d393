"""
How files looked when they were last known to be right, so that a look alone tells that they still are.

Of a file that was proven (``verified``) a row is kept: its hash, number, size, and the times of the last
change of its content and of itself. Whatever happens to it then (another content, another file of that name,
another attribute) changes at least the last of these, which nobody can set. So a row never says more than the
file's attribute would; and what does not look like any row is asked for its attribute, as without.

Rows stand one behind the other, in no order. A damaged one is like no file; nothing is lost with it but time.
Synchronous, for the thread that has the destination.
"""

from __future__ import annotations

import os
from struct import Struct
from struct import error as StructError

from pipegrid.disk.reading import read_file

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


class Seen:
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
