"""The edits of one change of a directory, so that many changes at once take it apart only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipegrid.core.mutable.edits import Edit, edited
from pipegrid.core.mutable.entries import OpenDirectory, pack_entries
from pipegrid.transfer.mutable.joining import StepwiseEdit


class NamesEdit(StepwiseEdit):
    """
    Edits that take effect together, or not at all.

    Args:
        writekey: 16 bytes, the directory's own.
        now: seconds since 1970, for the times of links.
    """

    def __init__(self, edits: Sequence[Edit], writekey: bytes, now: Callable[[], float]) -> None:
        self._edits = edits
        self._writekey = writekey
        self._now = now
        self._repeated = False

    def open(self, content: bytes) -> OpenDirectory:
        """See ``StepwiseEdit``; raises DirectoryError if this is no content of a directory."""
        return OpenDirectory.of(content)

    def step(self, opened: OpenDirectory) -> OpenDirectory:
        """See ``StepwiseEdit``; raises as ``core.mutable.edits.apply_edits`` does."""
        made = edited(opened, self._edits, self._writekey, self._now(), self._repeated)
        self._repeated = True  # where it failed nothing was written
        return made

    def close(self, opened: OpenDirectory) -> bytes:
        return pack_entries(opened.entries)
