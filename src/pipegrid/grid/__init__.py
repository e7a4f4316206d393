"""
The grid as an application sees it: open it, put, get, check.

``Grid`` is imported when it is first used, so that commands do not wait for that import before they need a
grid.
"""

from __future__ import annotations

TYPE_CHECKING = False  # copied from ``typing``, which is slow to import
if TYPE_CHECKING:
    from typing import Any

    from pipegrid.grid.file_grid import Grid

__all__ = ["Grid"]


def __getattr__(name: str) -> Any:
    if name != "Grid":
        raise AttributeError(f"module 'pipegrid.grid' has no attribute {name!r}")
    from pipegrid.grid.file_grid import Grid

    return Grid
