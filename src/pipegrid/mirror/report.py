"""What has become of a mirroring, in all and of each mirror; also while it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_SHOWN = 20
"""Reasons that are kept for people; the others are counted."""


@dataclass(slots=True)
class Tally:
    """
    What one mirror has done.

    Attributes:
        busy_s: during which it owed something.
        broken: requests that broke on their way; ``refused``: that it lacked or had wrong.
    """

    url: str
    files: int = 0
    received_bytes: int = 0
    busy_s: float = 0.0
    refused: int = 0
    broken: int = 0
    connections: int = 0
    given_up: str | None = None

    @property
    def bytes_per_s(self) -> float:
        """While it owed something."""
        return self.received_bytes / self.busy_s if self.busy_s else 0.0


@dataclass(slots=True)
class Report:
    """
    What has become of a mirroring; also while it goes on.

    Attributes:
        wanted_files, wanted_bytes: what the list or index names, as far as it has been read.
        present_files: what was there and right.
        fetched_files, fetched_bytes: what was not.
        failed: path and reason of what no mirror could give.
        failed_files: how many those are.
        retries: how often a file was asked of another mirror, or again.
        tallies: of each mirror, in the order given.
        elapsed_s: until now.
    """

    wanted_files: int = 0
    wanted_bytes: int = 0
    present_files: int = 0
    present_bytes: int = 0
    fetched_files: int = 0
    fetched_bytes: int = 0
    failed_files: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    retries: int = 0
    tallies: list[Tally] = field(default_factory=list)
    elapsed_s: float = 0.0

    def fail(self, path: str, why: str) -> None:
        """One more file that could not be had, or is wrong."""
        self.failed_files += 1
        if len(self.failed) < MAX_SHOWN:
            self.failed.append((path, why))

    @property
    def ranking(self) -> list[Tally]:
        """The mirrors, the one that delivered fastest first."""
        return sorted(self.tallies, key=lambda tally: -tally.bytes_per_s)
