"""
The grid as an application sees it: open it, put, get, check.

``Grid`` is imported when it is first used: what a command does before that shall not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipegrid.grid.grid import Grid

__all__ = ["Grid"]


def __getattr__(name: str) -> Any:
    if name != "Grid":
        raise AttributeError(f"module 'pipegrid.grid' has no attribute {name!r}")
    from pipegrid.grid.grid import Grid

    return Grid
