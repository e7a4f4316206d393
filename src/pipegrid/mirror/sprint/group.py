"""Files of a sprint that become durable, and get their names, together."""

from __future__ import annotations

import os
from contextlib import suppress

from pipegrid.mirror.destination import Destination
from pipegrid.mirror.plan import Errand
from pipegrid.mirror.wanted import BadEntry


class Group:
    """
    Files that become durable together; a ``disk.commit.Committable``.

    Args:
        keeps_open: all files stay open until they are durable, for ``sync``; else only the first, on which
            the whole file system is synced, and which therefore must hear of all errors since.

    Attributes:
        files: errand, mirror, name in ``incoming`` and size of each.
        refused: number of each that could not get its name, and why, as a sentence.
    """

    share_bytes = 0
    opened = 0
    resumed = False
    gone = False

    def __init__(self, destination: Destination, staged: bool, keeps_open: bool) -> None:
        self._destination = destination
        self._staged = staged
        self._keeps_open = keeps_open
        self._open: list[int] = []
        self._named = False
        self.files: list[tuple[Errand, int, str, int]] = []
        self.size_bytes = 0
        self.refused: dict[int, str] = {}

    def add(self, errand: Errand, mirror: int, fd: int, name: str, size: int) -> None:
        """Add a file that is written; its descriptor is the group's from now on."""
        self.files.append((errand, mirror, name, size))
        self.size_bytes += size
        if self._keeps_open or not self._open:
            self._open.append(fd)
        else:
            os.close(fd)

    @property
    def device(self) -> int:
        return self._destination.device

    @property
    def descriptor(self) -> int:
        return self._open[0]  # the first that was opened

    def sync(self) -> None:
        for fd in self._open:
            os.fsync(fd)

    def publish(self) -> tuple[str, ...]:
        changed: dict[str, None] = {}
        for number, (errand, _, name, _) in enumerate(self.files):
            directory = self._name(number, name, errand.wanted.path)
            if directory is not None:
                changed[directory] = None
        self._named = True
        self.close()
        return tuple(changed)

    def _name(self, number: int, name: str, path: str) -> str | None:
        try:
            return self._destination.publish(name, path, self._staged)
        except BadEntry as error:
            self._destination.discard(name)
            self.refused[number] = str(error)
        except OSError as error:
            raise self._destination.error(error, "hold the files") from error
        return None

    def close(self) -> None:
        """Let go of the descriptors."""
        open_, self._open = self._open, []
        for fd in open_:
            os.close(fd)

    def discard(self) -> None:
        """Remove what has no name yet."""
        if not self._named:
            for _, _, name, _ in self.files:
                with suppress(OSError):
                    self._destination.discard(name)
        self.close()
