"""
How far the upload of a tree has come, and what came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from pipegrid.core.caps import DirectoryCap


@attrs.define
class TreeCounts:
    """
    How far a tree has come.

    Attributes:
        files, directories, links: met so far, without those that were left out.
        bytes: of those files.
        sent_files, sent_directories, sent_bytes: that were not known, and are stored now. What lives in its
            cap is not sent.
        checked: known objects that were looked for on the grid, and were found whole or stored again.
        left_out: files, directories and whatever else is not in the tree, or only in part.
    """

    files: int = 0
    directories: int = 0
    links: int = 0
    bytes: int = 0
    sent_files: int = 0
    sent_directories: int = 0
    sent_bytes: int = 0
    checked: int = 0
    left_out: int = 0


@attrs.frozen
class TreeResult:
    """
    A stored tree.

    Attributes:
        cap: of its root; all that is below it is stored.
        metadata: of its root, which no entry has.
        counts: what is in it, what was sent, how much was left out.
        elapsed_s: from the start until all was stored.
    """

    cap: DirectoryCap
    metadata: dict[str, Any]
    counts: TreeCounts
    elapsed_s: float


@attrs.frozen
class TreeReports:
    """
    What the caller of a tree's put is told.

    Attributes:
        left_out: called with a path (from the root; the root is ``.``) and a sentence.
        progress: called when something is stored.
    """

    left_out: Callable[[str, str], None] = lambda path, why: None
    progress: Callable[[TreeCounts], None] = lambda counts: None
