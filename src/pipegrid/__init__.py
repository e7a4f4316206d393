"""
PipeGrid stores files on erasure-coded, end-to-end encrypted storage grids.

Public names are imported when they are first used, so that ``import pipegrid`` and ``pipegrid --version``
start fast; ``typing`` alone takes half as long as bare Python.
"""

from __future__ import annotations

import sys

if sys.argv[:1] == ["-m"]:  # with "-m", Ctrl-C during the imports would print a traceback
    import _signal  # type: ignore[import-not-found]
    import posix

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda *_: posix._exit(130))

from pipegrid.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pipegrid.core.caps import Cap, ChkCap, LitCap, parse_cap
    from pipegrid.core.encoding_parameters import Params
    from pipegrid.core.mutable.directory_content_edits import Link, Rename, Unlink
    from pipegrid.errors import (
        AccessProhibited,
        CannotReach,
        CapError,
        CapMismatch,
        ChildExists,
        ConflictingWrite,
        CorruptionError,
        DirectoryError,
        GridError,
        InvitationError,
        NoSpace,
        NoSuchChild,
        NoSuchShare,
        NotEnoughSharesError,
        Overloaded,
        PipegridError,
        PipelineStopped,
        QuotaReached,
        RemoteCallError,
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
        WrongSwissnum,
    )
    from pipegrid.flow.pipeline import Pipeline
    from pipegrid.flow.window import AutoWindow
    from pipegrid.grid.client_creation import create_local
    from pipegrid.http11 import PipelinedAgent
    from pipegrid.mirror.mirror_api import Mirror
    from pipegrid.transfer.mutable.publish import CreateResult, WriteResult
    from pipegrid.transfer.results import (
        CheckResult,
        GetResult,
        PutResult,
        RenewResult,
        RepairResult,
    )
    from pipegrid.tree.directory import Child, Directory
    from pipegrid.tree.tree_grid import Grid

_HOMES = {
    "AutoWindow": "pipegrid.flow.window",
    "Cap": "pipegrid.core.caps",
    "CheckResult": "pipegrid.transfer.results",
    "Child": "pipegrid.tree.directory",
    "ChkCap": "pipegrid.core.caps",
    "CreateResult": "pipegrid.transfer.mutable.publish",
    "Directory": "pipegrid.tree.directory",
    "GetResult": "pipegrid.transfer.results",
    "Grid": "pipegrid.tree.tree_grid",
    "Link": "pipegrid.core.mutable.directory_content_edits",
    "LitCap": "pipegrid.core.caps",
    "Mirror": "pipegrid.mirror.mirror_api",
    "Params": "pipegrid.core.encoding_parameters",
    "Pipeline": "pipegrid.flow.pipeline",
    "PipelinedAgent": "pipegrid.http11",
    "PutResult": "pipegrid.transfer.results",
    "Rename": "pipegrid.core.mutable.directory_content_edits",
    "RenewResult": "pipegrid.transfer.results",
    "RepairResult": "pipegrid.transfer.results",
    "Unlink": "pipegrid.core.mutable.directory_content_edits",
    "WriteResult": "pipegrid.transfer.mutable.publish",
    "create_local": "pipegrid.grid.client_creation",
    "parse_cap": "pipegrid.core.caps",
}

__all__ = [
    "AccessProhibited",
    "AutoWindow",
    "CannotReach",
    "Cap",
    "CapError",
    "CapMismatch",
    "CheckResult",
    "Child",
    "ChildExists",
    "ChkCap",
    "ConflictingWrite",
    "CorruptionError",
    "CreateResult",
    "Directory",
    "DirectoryError",
    "GetResult",
    "Grid",
    "GridError",
    "InvitationError",
    "Link",
    "LitCap",
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
    "PutResult",
    "QuotaReached",
    "RemoteCallError",
    "Rename",
    "RenewResult",
    "RepairResult",
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
    "WriteResult",
    "WrongSecret",
    "WrongSwissnum",
    "__version__",
    "create_local",
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
