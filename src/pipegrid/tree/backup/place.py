"""
Where a client keeps what its backups have to know: ``backup`` beside its secrets.

    lock             held by the backup that runs
    database.sqlite  which files had which cap
    catalogue.json   the list of runs as it was stored last, and its cap
    catalogue.cap    that cap alone, on one line, for people

The list is there only to be at hand: the grid has it, under that cap.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
from collections.abc import Callable, Sequence

import attrs

from pipegrid.core.caps import DirectoryCap, parse_cap
from pipegrid.core.directory import pack_immutable, unpack_immutable
from pipegrid.disk.private import open_private
from pipegrid.disk.replacing import replace_file
from pipegrid.errors import PipegridError, SinkError, UsageError
from pipegrid.grid.config import GridConfig
from pipegrid.tree.backup.catalogue import CatalogueStore, Run, children_of, runs_of

_MAX_BYTES = 128 << 20


@attrs.frozen
class Listed:
    """The list of runs, and the cap under which the grid has it (None: there is none yet)."""

    runs: tuple[Run, ...] = ()
    cap: DirectoryCap | None = None


class BackupPlace:
    """
    The directory of one client's backups.

    Args:
        config: of the client.

    Raises:
        UsageError: nothing may be written for it.
    """

    def __init__(self, config: GridConfig) -> None:
        if not config.caches:
            raise UsageError(f"{config.directory} has no place for what backups have to remember")
        self.directory = config.caches[0] / "backup"
        self.database = self.directory / "database.sqlite"
        self.cap_file = self.directory / "catalogue.cap"
        self._list_file = self.directory / "catalogue.json"
        self._lock = -1

    def lock(self) -> None:
        """
        Let no other backup of this client run.

        Raises:
            UsageError: one does.
            SinkError: the directory cannot be made.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open_private(str(self.directory / "lock"), os.O_RDWR)
        except OSError as error:
            raise SinkError(f"cannot write in {self.directory}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.unlock()
            raise UsageError(
                f"another backup that remembers in {self.directory} runs already; wait until it has ended"
            ) from None

    def unlock(self) -> None:
        """Let another one run."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def listed(
        self, store: CatalogueStore, say: Callable[[str], None] = lambda sentence: None
    ) -> Listed:
        """
        Return the list, from here or from the grid.

        Raises:
            PipegridError: there is one on the grid, and it cannot be read.
        """
        try:
            return self._read_list()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, PipegridError):
            say(f"{self._list_file} is damaged; the list of backups is fetched from the grid")
        cap = self._read_cap()
        return Listed() if cap is None else Listed(tuple(await store.load(cap)), cap)

    def note(self, runs: Sequence[Run], cap: DirectoryCap) -> None:
        """
        Keep the list that is on the grid now.

        Raises:
            SinkError: it cannot be written.
        """
        packed = base64.b64encode(pack_immutable(children_of(runs))).decode("ascii")
        try:
            document = json.dumps({"cap": str(cap), "packed": packed})
            replace_file(self._list_file, f"{document}\n".encode("ascii"))
            replace_file(self.cap_file, f"{cap}\n".encode("ascii"))
        except OSError as error:
            raise SinkError(
                f"cannot write in {self.directory}: {error.strerror}; the backup is stored, "
                f"and its catalogue is {cap}"
            ) from error

    def _read_list(self) -> Listed:
        with open(self._list_file, encoding="ascii") as file:
            said = json.loads(file.read(_MAX_BYTES))
        if not isinstance(said, dict):
            raise ValueError("no object")
        cap = parse_cap(str(said.get("cap")))
        if not isinstance(cap, DirectoryCap):
            raise ValueError("no directory")
        packed = base64.b64decode(str(said.get("packed")), validate=True)
        return Listed(tuple(runs_of(unpack_immutable(packed))), cap)

    def _read_cap(self) -> DirectoryCap | None:
        try:
            text = self.cap_file.read_text("ascii").strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot read {self.cap_file}: {error}; restore or remove it"
            ) from error
        cap = parse_cap(text)
        if not isinstance(cap, DirectoryCap):
            raise UsageError(
                f"{self.cap_file} does not hold the cap of a catalogue; restore or remove it"
            )
        return cap
