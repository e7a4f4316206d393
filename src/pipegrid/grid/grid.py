"""
Grid: what applications and commands use to store files and get them back.

Public methods answer with Deferreds that have started and can be cancelled; cancelling one lets go
of all that it held. Each idea has a room: ``storing``, ``fetching``, ``keeping``, ``changing``; everything
that they share is made in ``base``. What a transfer does is in ``transfer``.
"""

from __future__ import annotations

from pipegrid.grid.changing import ChangingGrid
from pipegrid.grid.fetching import FetchingGrid
from pipegrid.grid.keeping import KeepingGrid
from pipegrid.grid.storing import StoringGrid


class Grid(StoringGrid, FetchingGrid, KeepingGrid, ChangingGrid):
    """
    A storage grid, as configured in one directory.

    Open it with ``Grid.open``; close it when done.

    Attributes:
        config: what the directory says.
        created: what to tell the user if opening has just made an embedded grid, or None.
    """
