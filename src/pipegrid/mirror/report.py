"""What has become of a mirroring, in all and of each mirror; also while it goes on."""

from __future__ import annotations

from collections.abc import Sequence

MAX_SHOWN = 20
"""Reasons that are kept for people; the others are counted."""


class Tally:
    """
    What one mirror has done.

    Attributes:
        busy_s: during which it owed something.
        broken: requests that broke on their way; ``refused``: that it lacked or had wrong.
        given_up: why it is asked for nothing any more; None: it may be.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.files = self.received_bytes = self.refused = self.broken = self.connections = 0
        self.busy_s = 0.0
        self.given_up: str | None = None

    @property
    def bytes_per_s(self) -> float:
        """Bytes received a second, of the time in which it owed something; 0.0 if there was none."""
        return self.received_bytes / self.busy_s if self.busy_s else 0.0


class Report:
    """
    What has become of a mirroring; also while it goes on.

    Attributes:
        wanted_files, wanted_bytes: what the list or index names, as far as it has been read.
        present_files: what was there and right.
        fetched_files, fetched_bytes: what was not.
        failed: path and reason of what no mirror could give.
        failed_files: how many those are.
        unnoted_files: what was found of so many by hashing could not be written down.
        retries: how often a file was asked of another mirror, or again.
        tallies: of each mirror, in the order given.
        elapsed_s: until now.
    """

    def __init__(self, tallies: Sequence[Tally] = ()) -> None:
        self.wanted_files = self.wanted_bytes = 0
        self.present_files = self.present_bytes = 0
        self.fetched_files = self.fetched_bytes = 0
        self.failed_files = self.unnoted_files = self.retries = 0
        self.failed: list[tuple[str, str]] = []
        self.tallies = tallies
        self.elapsed_s = 0.0

    def fail(self, path: str, why: str) -> None:
        """One more file that could not be had, or is wrong."""
        self.failed_files += 1
        if len(self.failed) < MAX_SHOWN:
            self.failed.append((path, why))

    def withdraw(self, path: str) -> None:
        """A file that had failed is there after all."""
        self.failed_files -= 1
        self.failed = [each for each in self.failed if each[0] != path]

    @property
    def is_stopped(self) -> bool:
        """Whether no mirror is left that could be asked for more."""
        return all(tally.given_up is not None for tally in self.tallies)

    @property
    def ranking(self) -> list[Tally]:
        """The mirrors, the one that delivered fastest first."""
        return sorted(self.tallies, key=lambda tally: -tally.bytes_per_s)
