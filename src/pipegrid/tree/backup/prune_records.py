"""Records of objects that this client's backups may have stored but no run lists; ``prune`` releases them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, parse_cap
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.private_files import open_private
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import CapError, SinkError, UsageError
from pipegrid.tree.backup.catalogue import BackupRun

# The candidates for a prune have three sources, all in the state directory of backups:
#
# * ``candidates``: storage indexes, 16 bytes each. A run appends each object before the last byte of a share
#   is sent, and removes the objects that it appended when it has succeeded. If a run is killed, its objects
#   stay in the file, except those that a power cut has removed; their leases end by themselves.
# * ``forgotten``: caps of forgotten runs, one per line, written before the run is removed from the catalogue.
# * the database of stored objects (``backup_database``).
#
# ``catalogues`` has the caps of all catalogues that this client has written. What an earlier catalogue lists
# is not released, since a user may have kept its cap.

INDEX_BYTES = 16
MAX_OBJECTS_BYTES = INDEX_BYTES << 24
"""If ``candidates`` has this size (after years of failed runs without a prune), it gets no more objects."""

MAX_FORGOTTEN_BYTES = 64 << 20
_MAX_CATALOGUES_BYTES = 1 << 20


class SentObjects:
    """
    Appends to the file ``candidates`` the objects that one run sends.

    Args:
        path: the path of ``candidates``.
    """

    def __init__(self, path: Path) -> None:
        self._fd = -1
        with suppress(OSError):  # a full disk must not prevent a backup
            self._fd = open_private(str(path), os.O_RDWR | os.O_APPEND)
            size = os.fstat(self._fd).st_size
            self._begin = size - size % INDEX_BYTES  # a full disk may have left an incomplete index
            os.ftruncate(self._fd, self._begin)
            if size >= MAX_OBJECTS_BYTES:
                self.close()

    def add(self, cap: Cap) -> None:
        """Record an object before it is stored."""
        if self._fd >= 0 and isinstance(cap, ChkCap):
            try:
                os.write(self._fd, cap.storage_index)
            except OSError:
                self.close()

    def succeeded(self) -> None:
        """
        Remove the objects of this run; called when the run is listed and all its objects are in the database.
        """
        if self._fd >= 0:
            with suppress(OSError):
                os.ftruncate(self._fd, self._begin)

    def close(self) -> None:
        """Close the file, which keeps the added objects; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class PruneCandidates:
    """
    Reads and writes the records of one client. The caller holds the lock of the state directory.

    Args:
        directory: the state directory of backups.
    """

    def __init__(self, directory: Path) -> None:
        self.objects_path = directory / "candidates"
        self._forgotten = directory / "forgotten"
        self.catalogues_path = directory / "catalogues"

    def note_forgotten(self, runs: Sequence[BackupRun]) -> None:
        """
        Record runs durably, before they are removed from the catalogue.

        Raises:
            SinkError: the runs cannot be written.
        """
        known = set(self.forgotten())
        caps = [run.cap for run in runs if run.cap not in known]
        if not caps:
            return
        try:
            fd = open_private(str(self._forgotten), os.O_WRONLY | os.O_APPEND)
            try:
                # Begins with a line break, since a crash may have left the last line incomplete.
                os.write(fd, "".join(f"\n{cap}\n" for cap in caps).encode("ascii"))
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._cannot_write(self._forgotten, error) from error

    def forgotten(self) -> list[DirectoryCap]:
        """
        Return the recorded caps of forgotten runs, without duplicates.

        Raises:
            SinkError: the caps cannot be read.
        """
        return [
            cap
            for cap in self._caps(self._forgotten, MAX_FORGOTTEN_BYTES)
            if isinstance(cap, DirectoryCap)
        ]

    def set_forgotten(self, caps: Iterable[DirectoryCap]) -> None:
        """Replace the recorded caps of forgotten runs; raises SinkError if they cannot be written."""
        self._replace(self._forgotten, "".join(f"{cap}\n" for cap in caps).encode("ascii"))

    def indexes(self) -> Iterator[bytes]:
        """
        Yield the recorded storage indexes, which may contain duplicates.

        Raises:
            SinkError: the file cannot be read.
        """
        try:
            with open(self.objects_path, "rb") as file:
                while len(index := file.read(INDEX_BYTES)) == INDEX_BYTES:
                    yield index
        except FileNotFoundError:
            return
        except OSError as error:
            raise SinkError(f"cannot read {self.objects_path}: {error.strerror}") from error

    def set_indexes(self, indexes: Iterable[bytes]) -> None:
        """Replace the recorded storage indexes; raises SinkError if they cannot be written."""
        self._replace(self.objects_path, b"".join(indexes))

    def note_catalogue(self, cap: DirectoryCap) -> None:
        """Record the cap of a catalogue that this client writes; raises OSError."""
        line = f"{cap}\n".encode("ascii")
        try:
            before = read_file(self.catalogues_path, _MAX_CATALOGUES_BYTES)
        except FileNotFoundError:
            before = b""
        if line not in before:
            replace_file(self.catalogues_path, before + line)

    def catalogues(self) -> list[DirectoryCap]:
        """
        Return the caps of all catalogues that this client has written.

        Raises:
            SinkError: the file cannot be read.
            UsageError: a line is not the cap of a directory.
        """
        found: list[DirectoryCap] = []
        for cap in self._caps(self.catalogues_path, _MAX_CATALOGUES_BYTES):
            if not isinstance(cap, DirectoryCap):
                raise UsageError(
                    f"{self.catalogues_path} has a line that is not the cap of a catalogue; correct or "
                    "remove it"
                )
            found.append(cap)
        return found

    def _caps(self, path: Path, most_bytes: int) -> list[Cap | None]:
        """Return the caps in a file without duplicates; None stands for lines that are not caps."""
        try:
            data = read_file(path, most_bytes)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SinkError(f"cannot read {path}: {error.strerror}") from error
        found: dict[Cap | None, None] = {}
        for line in data.decode("ascii", "replace").split("\n"):
            if line.strip():
                try:
                    found[parse_cap(line.strip())] = None
                except CapError:
                    found[None] = None
        return list(found)

    def _replace(self, path: Path, data: bytes) -> None:
        try:
            if data or path.exists():
                replace_file(path, data)
        except OSError as error:
            raise self._cannot_write(path, error) from error

    def _cannot_write(self, path: Path, error: OSError) -> SinkError:
        return SinkError(f"cannot write {path}: {error.strerror}; free some space, and try again")
