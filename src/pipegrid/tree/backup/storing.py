"""
Storing a directory beside what is remembered of earlier runs, or finding out what that would take.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from pipegrid.grid.grid import Grid
from pipegrid.tree.backup.database import Database
from pipegrid.tree.backup.place import BackupPlace
from pipegrid.tree.localwalk import LocalWalk, own_directories
from pipegrid.tree.selection import TreeSelection
from pipegrid.tree.store import StoresFiles
from pipegrid.tree.upload import TreeUpload
from pipegrid.tree.uploaded import TreeReports, TreeResult


class SelectsFiles(Protocol):
    """What of a directory is stored."""

    @property
    def selection(self) -> Callable[[], TreeSelection]:
        """Makes a selection for one walk."""

    @property
    def one_file_system(self) -> bool:
        """Leave out what is mounted."""


class Storing:
    """
    One directory of one client.

    Args:
        say: told, in a sentence, what the user should know.
        now: seconds since 1970.
        reports: told of what is met.
        read_only: nothing is recorded, and no file is read.

    Attributes:
        root: its absolute path.

    Raises:
        UsageError, SinkError: what is remembered cannot be used.
    """

    def __init__(
        self,
        grid: Grid,
        place: BackupPlace,
        directory: str,
        *,
        say: Callable[[str], None],
        now: Callable[[], float],
        reports: TreeReports | None = None,
        read_only: bool = False,
    ) -> None:
        params = grid.config.params
        numbers = (params.required_shares, params.total_shares, params.max_segment_bytes)
        self.root = os.path.realpath(directory)
        self._grid = grid
        self._place = place
        self._directory = directory
        self._now = now
        self._reports = reports
        self._read_only = read_only
        self.database = Database(
            place.database,
            repr(numbers).encode() + grid.config.convergence,
            self.root,
            now=now,
            say=say,
            read_only=read_only,
        )

    async def store(self, files: SelectsFiles, store: StoresFiles) -> TreeResult:
        """
        Give the store what is not remembered.

        Raises:
            SourceError: the directory cannot be read.
            GridError: the store takes nothing.
        """
        local = self._grid.config.local
        own = [*self._place.own, *([] if local is None else [local.directory])]
        walk = LocalWalk(
            self._directory,
            without=own_directories(*own),
            selection=files.selection(),
            one_file_system=files.one_file_system,
            know=self.database.file,
            read=not self._read_only,
            now_ns=lambda: int(self._now() * 1e9),
        )
        upload = TreeUpload(
            self._grid.workers,
            self._grid.clock,
            walk,
            store,
            self._directory,
            self._reports,
            self.database,
            self._grid.limits,
        )
        return await upload.run()
