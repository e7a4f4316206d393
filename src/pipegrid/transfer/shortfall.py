"""
What was written to fewer servers than wanted: counted, to be said once for all writes of a run.

Such a write has succeeded. But the loss of fewer servers than usual is enough to lose what was written, until
a repair has spread it; whoever wrote it should know.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipegrid.core.text import counted
from pipegrid.transfer.failure_messages import said_once

MOST_SERVERS = 1000
"""Of so many servers reasons are kept."""


class Shortfall:
    """
    The writes of one client that reached fewer servers than wanted.

    Attributes:
        writes: how many.
    """

    def __init__(self) -> None:
        self.writes = 0
        self._least = (0, 0)
        self._reasons: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Shortfall: {self.writes} writes>"

    def note(self, reached: int, wanted: int, reasons: Mapping[str, str]) -> None:
        """
        Count a write if it reached too few servers.

        Args:
            reached: servers of happiness.
            wanted: as many as there are, or shares if these are fewer.
            reasons: nickname of a server to what kept it from taking shares.
        """
        if reached >= wanted:
            return
        if not self.writes or reached < self._least[0]:
            self._least = reached, wanted
        self.writes += 1
        for name, why in reasons.items():
            if len(self._reasons) < MOST_SERVERS:
                self._reasons[name] = why

    def sentences(self) -> tuple[str, ...]:
        """Return what is to be said: one sentence, or none."""
        if not self.writes:
            return ()
        reached, wanted = self._least
        least = "" if self.writes == 1 else "at least "
        why = said_once(self._reasons)
        text = f"{counted(self.writes, 'write')} reached fewer servers than wanted"
        return (
            f"{text} ({least}{reached} of {wanted}){f': {why}' if why else ''}; "
            "run 'pipegrid check --repair' when more servers take shares",
        )
