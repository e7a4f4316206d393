"""The share files that an encoding writes: none of them appears before all are on the disk."""

from __future__ import annotations

import os
from contextlib import ExitStack

from pipegrid.core.encoder import ShareWrite
from pipegrid.disk.partfile import PartFile
from pipegrid.errors import SinkError, naming


class ShareDirectory:
    """
    The share files of one encoding: under hidden names until ``publish``, gone without it.

    A process that is killed leaves the hidden names, each beside its share; the next one uses them.

    Raises:
        SinkError: the directory cannot be used.
    """

    def __init__(self, directory: str, total_shares: int, force: bool) -> None:
        self._paths = [os.path.join(directory, str(n)) for n in range(total_shares)]
        self._parts: list[PartFile] = []
        self._directory = directory
        self._force = force

    def __enter__(self) -> ShareDirectory:
        with ExitStack() as undo:
            undo.callback(self._leave)
            try:
                os.makedirs(self._directory, exist_ok=True)
                self._refuse_others()
            except OSError as error:
                raise self._unwritable(error) from error
            for path in self._paths:
                self._parts.append(PartFile(path, self._force, resume=False, follow=False))
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

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
                    written = os.pwrite(self._parts[write.share_number].fileno(), view, offset)
                    view = view[written:]
                    offset += written
        except OSError as error:
            raise self._unwritable(error) from error

    def publish(self) -> list[str]:
        """Give all files their names, which are returned."""
        try:
            for part in self._parts:
                part.sync()
        except OSError as error:
            raise self._unwritable(error) from error
        for part in self._parts:
            part.publish()
        return self._paths

    def _unwritable(self, error: OSError) -> SinkError:
        return SinkError(f"cannot write shares to {self._directory}: {error.strerror}")

    def _leave(self) -> None:
        for part in self._parts:
            part.leave()
