"""
What is remembered of files and directories that earlier runs have stored, so that they are not sent again.
"""

from __future__ import annotations

import os

import attrs

from pipegrid.core.caps import ChkCap, LitCap
from pipegrid.tree.localwalk import FileMet


@attrs.frozen
class Remembered:
    """
    What is remembered of a file or directory that has not changed.

    Attributes:
        cap: of the file; of a directory: of the file that it is packed in.
        due: it has to be checked before it counts as stored.
    """

    cap: ChkCap | LitCap
    due: bool = False


class Memory:
    """What earlier runs have stored: here nothing. ``file`` is asked in a thread, never twice at a time."""

    def file(self, path: str, found: os.stat_result) -> Remembered | None:
        """Return what is known of a regular file, if it is unchanged."""
        return None

    def directory(self, packed: bytes) -> Remembered | None:
        """Return what is known of a directory of exactly these bytes."""
        return None

    def file_stored(self, met: FileMet, cap: ChkCap | LitCap) -> None:
        """A file was read, and is stored."""

    def directory_stored(self, packed: bytes, cap: ChkCap) -> None:
        """A directory of exactly these bytes is stored, under this cap."""

    def checked(self, cap: ChkCap | LitCap) -> None:
        """What this cap reads was found to be whole."""
