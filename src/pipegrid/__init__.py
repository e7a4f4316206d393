"""
PipeGrid: put files on erasure-coded, end-to-end encrypted storage grids, at the speed of the wire.

Public names are imported when they are first used, so that ``import pipegrid`` (and with it
``pipegrid --version``) costs nothing; ``typing`` is half of what bare Python takes to start.
"""

from __future__ import annotations

from pipegrid.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pipegrid.core.caps import parse_cap
    from pipegrid.core.mutable.edits import Link, Rename, Unlink
    from pipegrid.core.params import Params
    from pipegrid.errors import (
        CapError,
        CapMismatch,
        ChildExists,
        ConflictingWrite,
        CorruptionError,
        DirectoryError,
        GridError,
        NoSpace,
        NoSuchChild,
        NoSuchShare,
        NotEnoughSharesError,
        Overloaded,
        PipegridError,
        PipelineStopped,
        RollbackError,
        SegmentTooLarge,
        ServerError,
        ServerProtocolError,
        ServerRefused,
        ServerTimeout,
        ServerUnreachable,
        SinkError,
        SourceError,
        UncoordinatedWriteError,
        UnhappyError,
        UsageError,
        WriteLost,
        WrongSecret,
    )
    from pipegrid.flow.autowindow import AutoWindow
    from pipegrid.flow.pipeline import Pipeline
    from pipegrid.http11 import PipelinedAgent
    from pipegrid.mirror.mirror import Mirror
    from pipegrid.tree.directory import Child, Directory
    from pipegrid.tree.facade import Grid

_HOMES = {
    "AutoWindow": "pipegrid.flow.autowindow",
    "Child": "pipegrid.tree.directory",
    "Directory": "pipegrid.tree.directory",
    "Grid": "pipegrid.tree.facade",
    "Link": "pipegrid.core.mutable.edits",
    "Mirror": "pipegrid.mirror.mirror",
    "Params": "pipegrid.core.params",
    "Pipeline": "pipegrid.flow.pipeline",
    "PipelinedAgent": "pipegrid.http11",
    "Rename": "pipegrid.core.mutable.edits",
    "Unlink": "pipegrid.core.mutable.edits",
    "parse_cap": "pipegrid.core.caps",
}

__all__ = [
    "AutoWindow",
    "CapError",
    "CapMismatch",
    "Child",
    "ChildExists",
    "ConflictingWrite",
    "CorruptionError",
    "Directory",
    "DirectoryError",
    "Grid",
    "GridError",
    "Link",
    "Mirror",
    "NoSpace",
    "NoSuchChild",
    "NoSuchShare",
    "NotEnoughSharesError",
    "Overloaded",
    "Params",
    "PipegridError",
    "Pipeline",
    "PipelineStopped",
    "PipelinedAgent",
    "Rename",
    "RollbackError",
    "SegmentTooLarge",
    "ServerError",
    "ServerProtocolError",
    "ServerRefused",
    "ServerTimeout",
    "ServerUnreachable",
    "SinkError",
    "SourceError",
    "UncoordinatedWriteError",
    "UnhappyError",
    "Unlink",
    "UsageError",
    "WriteLost",
    "WrongSecret",
    "__version__",
    "parse_cap",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None and name in __all__:
        home = "pipegrid.errors"
    if home is None:
        raise AttributeError(f"module 'pipegrid' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
