"""The grid as an application sees it: open it, put, get, check."""

from pipegrid.grid.grid import Grid

__all__ = ["Grid"]
