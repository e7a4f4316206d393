"""Files of a sprint that become durable, and get their names, together."""

from __future__ import annotations

import os
from contextlib import suppress

from pipegrid.mirror.destination import Destination
from pipegrid.mirror.plan import Errand
from pipegrid.mirror.wanted import BadEntry


class Group:
    """Files that become durable together; a ``disk.commit.Committable``."""

    share_bytes = 0
    opened = 0
    resumed = False
    gone = False

    def __init__(self, destination: Destination, staged: bool) -> None:
        self._destination = destination
        self._staged = staged
        self.files: list[tuple[Errand, int, int, str, int]] = []
        self.size_bytes = 0
        self.refused: dict[int, str] = {}

    @property
    def device(self) -> int:
        return self._destination.device

    @property
    def descriptor(self) -> int:
        return self.files[0][2]  # the first that was opened

    def sync(self) -> None:
        for _, _, fd, _, _ in self.files:
            os.fsync(fd)

    def publish(self) -> tuple[str, ...]:
        changed: dict[str, None] = {}
        for number, (errand, _, _, name, _) in enumerate(self.files):
            directory = self._name(number, name, errand.wanted.path)
            if directory is not None:
                changed[directory] = None
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
        for number, (errand, mirror, fd, name, size) in enumerate(self.files):
            if fd >= 0:
                os.close(fd)
                self.files[number] = (errand, mirror, -1, name, size)

    def discard(self) -> None:
        """Remove what has no name yet."""
        for _, _, fd, name, _ in self.files:
            if fd >= 0:
                with suppress(OSError):
                    self._destination.discard(name)
        self.close()
