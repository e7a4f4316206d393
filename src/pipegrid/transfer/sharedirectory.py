"""The share files that an encoding writes: all of them appear, or none."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress

from pipegrid.core.encoder import ShareWrite
from pipegrid.errors import SinkError, naming


class ShareDirectory:
    """
    The share files of one encoding: under temporary names until ``publish``, gone without it.

    Raises:
        SinkError: the directory cannot be used.
    """

    def __init__(self, directory: str, total_shares: int, force: bool) -> None:
        self._paths = [os.path.join(directory, str(n)) for n in range(total_shares)]
        suffix = f".{os.urandom(6).hex()}.part"
        self._temporary = [
            os.path.join(directory, f".{number}{suffix}") for number in range(total_shares)
        ]
        self._fds: list[int] = []
        self._directory = directory
        self._force = force

    def __enter__(self) -> ShareDirectory:
        with ExitStack() as undo:
            undo.callback(self._remove)
            try:
                os.makedirs(self._directory, exist_ok=True)
                self._refuse_others()
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                for path in self._temporary:
                    self._fds.append(os.open(path, flags, 0o666))
            except OSError as error:
                raise self._unwritable(error) from error
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _refuse_others(self) -> None:
        if self._force:
            return
        for name in os.listdir(self._directory):
            if name.isdigit():
                text = (
                    f"{self._directory} holds shares already ({name}, for one); choose an empty "
                    "directory, or add force=True"
                )
                raise naming(SinkError(text), "force=True")

    def write(self, write: ShareWrite) -> None:
        """Write a part of one share; SinkError if that fails."""
        offset = write.offset
        try:
            for piece in write.pieces:
                view = memoryview(piece)
                while view:
                    written = os.pwrite(self._fds[write.share_number], view, offset)
                    view = view[written:]
                    offset += written
        except OSError as error:
            raise self._unwritable(error) from error

    def publish(self) -> list[str]:
        """Give all files their names, which are returned."""
        try:
            for temporary, path in zip(self._temporary, self._paths, strict=True):
                os.replace(temporary, path)
        except OSError as error:
            raise self._unwritable(error) from error
        return self._paths

    def _unwritable(self, error: OSError) -> SinkError:
        return SinkError(f"cannot write shares to {self._directory}: {error.strerror}")

    def _remove(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        for path in self._temporary:
            with suppress(OSError):
                os.unlink(path)
