"""
A file that appears under its name only when it is whole.

Until then its bytes are in a temporary file beside it, which goes away if anything fails.
"""

from __future__ import annotations

import io
import os
import stat
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO, cast

from pipegrid.errors import SinkError


class OutputFile:
    """
    A context manager; ``file`` takes the bytes, and leaving it without an error names them.

    Args:
        path: where the file shall be. A device or pipe there is written to directly.
        force: replace an existing file.

    Raises:
        SinkError: the file exists and may not be replaced, or cannot be written.
    """

    def __init__(self, path: str, force: bool = False) -> None:
        self.path = path
        self._force = force
        self._target = os.path.realpath(path)  # a link stays, what it points to is replaced
        self._temporary: str | None = None
        try:
            mode: int | None = os.stat(self._target).st_mode
        except OSError:
            mode = None
        if mode is not None and stat.S_ISDIR(mode):
            raise SinkError(f"cannot write {path}: it is a directory; name a file in it")
        if mode is not None and stat.S_ISREG(mode) and not force:
            raise self._exists()
        try:
            self.file: BinaryIO = self._open(in_place=mode is not None and not stat.S_ISREG(mode))
        except OSError as error:
            raise SinkError(f"cannot write {path}: {error.strerror}") from error

    def _open(self, in_place: bool) -> BinaryIO:
        if in_place:
            return open(self._target, "wb")
        directory, name = os.path.split(self._target)
        temporary = os.path.join(directory, f".{name[:200]}.{os.urandom(6).hex()}.part")
        raw = io.FileIO(temporary, "xb")
        self._temporary = temporary
        raw.name = self.path  # what errors call it
        return cast(BinaryIO, io.BufferedWriter(raw))

    def _exists(self) -> SinkError:
        return SinkError(f"{self.path} exists already; choose another name, or add --force")

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as problem:
            raise SinkError(f"cannot write {self.path}: {problem.strerror}") from problem
        finally:
            with suppress(OSError):
                self.file.close()
            if self._temporary is not None:
                with suppress(OSError):
                    os.unlink(self._temporary)

    def _finish(self) -> None:
        self.file.close()
        if self._temporary is None:
            return
        if not self._force:
            self._name_if_free()
        else:
            os.replace(self._temporary, self._target)
            self._temporary = None

    def _name_if_free(self) -> None:
        """Give the file its name unless somebody else took it meanwhile."""
        assert self._temporary is not None
        try:
            os.link(self._temporary, self._target)
        except FileExistsError:
            raise self._exists() from None
        except OSError:  # a file system without hard links
            if os.path.lexists(self._target):
                raise self._exists() from None
            os.rename(self._temporary, self._target)
