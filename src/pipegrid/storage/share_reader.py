"""Reader of complete shares, which are files in a storage directory."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.safe_open import is_file
from pipegrid.errors import ServerRefused
from pipegrid.storage import share_file
from pipegrid.storage.mutable import slot_file as mutable_containers
from pipegrid.storage.share_file import data_bytes, open_container
from pipegrid.storage.storage_paths import SHARE_NUMBERS


class ShareReader:
    """
    An open complete share; a context manager. The data of an immutable share never changes.

    The share may be closed while another thread reads. Then the file is closed when that read ends, so that
    the descriptor never belongs to another file during the read.
    """

    def __init__(
        self, fd: int, share_bytes: int, name: str, data_offset: int = share_file.HEADER_BYTES
    ) -> None:
        self._fd = fd
        self._data_offset = data_offset
        self.share_bytes = share_bytes
        self._name = name
        self._closing = False
        self._lock = threading.Lock()

    def __enter__(self) -> ShareReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, offset: int, length: int) -> bytes:
        """Return at most length bytes; fewer, or none, if the share ends before."""
        length = min(length, self.share_bytes - offset)
        if length <= 0 or offset < 0:
            return b""
        try:
            with self._lock:
                return disk.read_all(self._fd, length, self._data_offset + offset)
        except OSError as error:
            raise disk.disk_error(error, f"read {self._name}") from error
        finally:
            if self._closing:
                self._close()

    def read_exactly(self, offset: int, length: int) -> bytes:
        """
        Return exactly length bytes, which must lie within the share.

        Raises:
            ServerRefused: the file has become shorter, or the disk failed.
        """
        data = self.read(offset, length)
        if len(data) < length:
            raise ServerRefused(f"{self._name} ends before its end; check the disk")
        return data

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._closing = True
        self._close()

    def _close(self) -> None:
        # If a read holds the lock, the read closes the file when it ends.
        if self._lock.acquire(blocking=False):
            fd, self._fd = self._fd, -1
            self._lock.release()
            if fd >= 0:
                os.close(fd)


def open_reader(path: str) -> ShareReader | None:
    """
    Open an immutable share, or return None if the share does not exist or is mutable.

    Raises:
        ServerRefused: the share is damaged, or the disk failed.
    """
    return open_container(path, os.O_RDONLY, mutable_containers.MAGIC_BYTES, _reader_of)


def holds_share(path: str) -> bool:
    """
    Return whether a file can be read and begins as an immutable share does.

    Raises:
        OSError: the file cannot be opened because too many files are open.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return False
    try:
        start = os.pread(fd, mutable_containers.MAGIC_BYTES, 0)
        if mutable_containers.is_mutable(start):
            return False
        share_file.parse_header(start)
    except (OSError, ValueError):
        return False
    else:
        return True
    finally:
        os.close(fd)


def _reader_of(path: str, fd: int, start: bytes) -> ShareReader | None:
    if mutable_containers.is_mutable(start):
        return None
    header = share_file.parse_header(start)
    length = data_bytes(fd, header, os.fstat(fd).st_size)
    return ShareReader(fd, length, f"the share {path!r}")


def list_numbers(
    directory: str, counts: Callable[[str], bool] = lambda path: True
) -> frozenset[int] | None:
    """
    Return the numbers of the complete shares in a directory; None if the directory does not exist.

    Args:
        counts: takes the path of a file; returns whether to include it.

    Raises:
        ServerRefused: the disk failed.
    """
    try:
        with os.scandir(directory) as entries:
            return frozenset(
                SHARE_NUMBERS[entry.name]
                for entry in entries
                if entry.name in SHARE_NUMBERS and is_file(entry) and counts(entry.path)
            )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk.disk_error(error, f"list the shares in {directory!r}") from error
