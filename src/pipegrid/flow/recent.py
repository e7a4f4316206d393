"""The largest value of the last so many rounds, told without keeping every value."""

from __future__ import annotations

from collections import deque


class RecentMaximum:
    """The largest of the values noted in the last so many rounds; expires only when noting."""

    def __init__(self, rounds: int) -> None:
        assert rounds > 0
        self._rounds = rounds
        self._entries: deque[tuple[int, float]] = deque()  # falling values, rising rounds

    def note(self, round_number: int, value: float) -> None:
        """A value of a round, which is none before the last."""
        entries = self._entries
        while entries and entries[-1][1] <= value:
            entries.pop()
        # One entry a round is enough, so the deque stays as short as the memory is.
        if not entries or entries[-1][0] < round_number:
            entries.append((round_number, value))
        while entries[0][0] <= round_number - self._rounds:
            entries.popleft()

    @property
    def value(self) -> float:
        """The largest; 0.0 if there was none."""
        return self._entries[0][1] if self._entries else 0.0

    def clear(self) -> None:
        """Forget all values, as if nothing had been noted yet."""
        self._entries.clear()
