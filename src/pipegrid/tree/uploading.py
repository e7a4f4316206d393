"""
The upload of a directory of this machine to a grid, put together from its parts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pipegrid.grid.grid import Grid
from pipegrid.tree.localwalk import LocalWalk, own_directories
from pipegrid.tree.memory import Memory
from pipegrid.tree.selection import TreeSelection
from pipegrid.tree.store import GridFiles
from pipegrid.tree.upload import TreeUpload
from pipegrid.tree.uploaded import TreeReports

NOTES_NAME = "unfinished-trees"
"""Where a client notes what was stored of trees, below what it remembers; see ``unfinished``."""


def tree_upload(
    grid: Grid,
    path: str | os.PathLike[str],
    selection: TreeSelection | None = None,
    one_file_system: bool = False,
    reports: TreeReports | None = None,
    options: Mapping[str, Any] | None = None,
    memory: Memory | None = None,
) -> TreeUpload:
    """Return the upload of a directory with all that is in it; ``options`` are those of ``Grid.put``."""
    root = os.fspath(path)
    local = grid.config.local
    walk = LocalWalk(
        root,
        selection=selection or TreeSelection(),
        one_file_system=one_file_system,
        without=own_directories(
            *([] if local is None else [local.directory]),
            *(cache / NOTES_NAME for cache in grid.config.caches[:1]),
        ),
        know=(memory or Memory()).file,
    )
    store = GridFiles(grid, **(options or {}))
    means = grid.workers, grid.clock
    return TreeUpload(*means, walk, store, root, reports, memory, grid.limits)
