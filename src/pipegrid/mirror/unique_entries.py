"""
The entries of indexes: each path is fetched once, and unusable entries are skipped and counted. Also the
outcome of a run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from pipegrid.mirror.archive_file import DIGEST_BYTES, ArchiveFile, BadEntry, quoted
from pipegrid.mirror.debian_index_update import ArchiveMirror
from pipegrid.mirror.file_scheduler import MAX_SHOWN, Report

MAX_DISPUTED = 10_000
"""How many paths with several hashes are recorded; of further such paths only the first entry counts."""

MAX_ALTERNATIVES = 8
"""How many further entries with another hash are recorded for one path."""

MAX_REMEMBERED = 100_000
"""How many reasons are remembered, so that each counts once: several indexes name the same package."""

_KINDS = {length: algorithm for algorithm, length in DIGEST_BYTES.items()}


class Entries:
    """
    The entries of one run.

    If a path is named with several hashes, the entry whose file mirrors have is used.

    Attributes:
        skipped_files: number of unusable entries; ``skipped``: the reasons of the first of them.
        replaced: by path, an entry to use instead of the first entry with this path, since mirrors have
            another file, or since the index gives no size.
    """

    def __init__(self) -> None:
        self.skipped_files = 0
        self.skipped: list[str] = []
        self.replaced: dict[str, ArchiveFile] = {}
        self._reported: set[int] = set()
        self._seen: dict[str, bytes] = {}
        self._disputed: dict[str, list[ArchiveFile]] = {}
        self._unsized: list[ArchiveFile] = []
        self._decided: set[str] = set()

    def skip(self, reason: BadEntry) -> None:
        """Count an unusable entry; entries with the same reason count once."""
        text = str(reason)
        key = hash(text)
        if key in self._reported:
            return
        if len(self._reported) < MAX_REMEMBERED:
            self._reported.add(key)
        self.skipped_files += 1
        if len(self.skipped) < MAX_SHOWN:
            self.skipped.append(text)

    def once(self, files: Iterable[ArchiveFile]) -> Iterator[ArchiveFile]:
        """Yield the first entry of each path; ``settle`` tries the other entries."""
        seen = self._seen
        for each in files:
            known = seen.get(each.path)
            if known is None:
                seen[each.path] = each.digest
                if each.size is None:
                    self._unsized.append(each)
                yield each
            elif known != each.digest:
                self._dispute(each)

    def _dispute(self, other: ArchiveFile) -> None:
        others = self._disputed.get(other.path)
        if others is None:
            if len(self._disputed) >= MAX_DISPUTED:
                self.skip(named_twice(other.path))
                return
            others = self._disputed[other.path] = []
        if len(others) < MAX_ALTERNATIVES and all(each.digest != other.digest for each in others):
            others.append(other)

    async def settle(self, mirror: ArchiveMirror, report: Report) -> None:
        """
        For each path with several hashes, fetch the entry whose file mirrors have, and count the other
        entries as skipped.

        Args:
            report: of the run, in which the first entry of each path was fetched, or failed.
        """
        await mirror.run(self._measure, mirror)
        left = list(self._disputed)
        for number in range(MAX_ALTERNATIVES + 1):
            left = await mirror.run(self._undecided, mirror, left)
            tries = [self._disputed[p][number] for p in left if number < len(self._disputed[p])]
            if not tries:
                return
            found = await mirror.sync(tries)
            report.fetched_files += found.fetched_files
            report.fetched_bytes += found.fetched_bytes
            report.fetched += found.fetched[: MAX_SHOWN - len(report.fetched)]
            report.present_files += found.present_files
            for each in await mirror.run(list, filter(mirror.destination.is_there, tries)):
                self.replaced[each.path] = each
                self._decided.add(each.path)
                report.withdraw(each.path)

    def _measure(self, mirror: ArchiveMirror) -> None:
        """Record the sizes of fetched files whose index gives no size. Runs in the destination's thread."""
        for each in self._unsized:
            with suppress(OSError):
                size = os.lstat(mirror.destination.where(each.path)).st_size
                self.replaced[each.path] = each.replaced(size=size)

    def _undecided(self, mirror: ArchiveMirror, paths: Sequence[str]) -> list[str]:
        """
        Return the paths for which no right file exists; for all others, count the entries that do not match
        as skipped. Runs in the destination's thread.
        """
        destination = mirror.destination
        left = []
        for path in paths:
            first = self._seen[path]
            kind = _KINDS[len(first)]
            is_there = destination.is_there(ArchiveFile(path, None, kind, first))
            if not is_there and path not in self._decided:
                left.append(path)
            elif not is_there or not all(map(destination.is_there, self._disputed[path])):
                self.skip(named_twice(path))
        return left


def named_twice(path: str) -> BadEntry:
    """Return the error for a skipped entry: another entry has the same path and another hash."""
    return BadEntry(
        f"{quoted(path)} is named twice, with different hashes; the entry that does not fit was skipped"
    )


class ArchiveOutcome:
    """
    The outcome of a run that mirrors an archive.

    Attributes:
        report: of the packages.
        entries: the entries of the indexes, with the skipped ones.
        is_published: whether the new indexes were published.
        is_new: whether the signed files, which name the indexes, differ from the previous ones.
        spares_others: whether files are kept only because filters of earlier runs select them.
        index_bytes: how much was fetched for indexes and their patches.
        removed: paths that were deleted, or in a dry run would be.
        unmatched: options and patterns of filters that match nothing.
        lacking: indexes, further forms of indexes, and files of ``also`` that no mirror has.
    """

    def __init__(self) -> None:
        self.report = Report()
        self.entries = Entries()
        self.is_published = self.is_new = self.spares_others = False
        self.index_bytes = 0
        self.removed: list[str] = []
        self.unmatched: list[tuple[str, str]] = []
        self.lacking: list[str] = []
