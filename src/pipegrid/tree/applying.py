"""The edits of one change of a directory, so that many changes at once take it apart only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipegrid.core.mutable.edits import Edit, Unlink, apply_edits, edited
from pipegrid.core.mutable.entries import OpenDirectory, pack_entries
from pipegrid.core.names import composed
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
        return edited(opened, self._edits, self._writekey, self._now(), self._repeated)

    def close(self, opened: OpenDirectory) -> bytes:
        return pack_entries(opened.entries)

    def may_be_stored(self) -> None:
        """See ``StepwiseEdit``: only then a child that is to go may be gone by these edits."""
        self._repeated = True


class TakeOutEdit(NamesEdit):
    """
    Take a child out, if it is still the one that was seen.

    Args:
        read_cap: of that one; None: nothing is known that reads it.
        must_exist: whether it is an error if somebody else has taken it out.

    Attributes:
        kept: another one is there, which stays.
    """

    def __init__(self, name: str, read_cap: object, must_exist: bool, writekey: bytes) -> None:
        super().__init__([Unlink(name, must_exist)], writekey, lambda: 0.0)
        self.kept = False
        self._name = composed(name)
        self._read_cap = read_cap

    def step(self, opened: OpenDirectory) -> OpenDirectory:
        there = opened.entries.get(self._name)
        self.kept = there is not None and there.read_cap != self._read_cap
        return opened if self.kept else super().step(opened)


class ChosenEdit(StepwiseEdit):
    """
    Edits that are chosen by looking at what is there.

    Args:
        choose: from the bytes of the directory to edits.
        writekey, now: see ``NamesEdit``.

    Attributes:
        result: the bytes that it made last.
    """

    def __init__(
        self,
        choose: Callable[[bytes], Sequence[Edit]],
        writekey: bytes,
        now: Callable[[], float],
    ) -> None:
        self.result = b""
        self._choose = choose
        self._writekey = writekey
        self._now = now
        self._repeated = False

    def open(self, content: bytes) -> bytes:
        """See ``StepwiseEdit``: only the bytes are looked at."""
        return content

    def step(self, opened: bytes) -> bytes:
        """See ``StepwiseEdit``; raises as ``core.mutable.edits.apply_edits`` does."""
        edits = self._choose(opened)
        made = apply_edits(opened, edits, self._writekey, self._now(), self._repeated)
        self.result = made
        return opened if made == opened else made

    def close(self, opened: bytes) -> bytes:
        return opened

    def may_be_stored(self) -> None:
        self._repeated = True
