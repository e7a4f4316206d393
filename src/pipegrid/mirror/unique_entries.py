"""The entries of indexes, each path once; unusable ones are skipped and counted. And the outcome of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from pipegrid.mirror.archive_file import DIGEST_BYTES, ArchiveFile, BadEntry, quoted
from pipegrid.mirror.debian_index_update import ArchiveMirror
from pipegrid.mirror.file_scheduler import MAX_SHOWN, Report

MAX_DISPUTED = 10_000
"""Paths with several hashes; of further ones only the first entry counts."""

MAX_ALTERNATIVES = 8
"""Of one path."""

MAX_REMEMBERED = 100_000
"""Reasons that are remembered: several indexes name the same package."""

_KINDS = {length: algorithm for algorithm, length in DIGEST_BYTES.items()}


class Entries:
    """
    The entries of one run.

    A path may be named with several hashes; the entry that mirrors have is used.

    Attributes:
        skipped_files: unusable entries; ``skipped`` are the reasons of the first of them.
        replaced: of paths with several hashes, the entry that mirrors have, if it is not the first.
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
        """Count an unusable entry; the same reason counts once."""
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
        """Yield each path once, by its first entry; ``settle`` tries the others."""
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
        Fetch the entry that mirrors have for each path with several hashes, and report the others.

        Args:
            report: of the run, in which the first entry of each is fetched, or failed.
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
        """Record the sizes of files whose index gives none. In the thread."""
        for each in self._unsized:
            with suppress(OSError):
                size = os.lstat(mirror.destination.where(each.path)).st_size
                self.replaced[each.path] = each.replaced(size=size)

    def _undecided(self, mirror: ArchiveMirror, paths: Sequence[str]) -> list[str]:
        """Return the paths without a right file; report the conflicts of the others. In the thread."""
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
    """Return the error for a skipped entry whose path another entry has as well."""
    return BadEntry(
        f"{quoted(path)} is named twice, with different hashes; the entry that does not fit was skipped"
    )


class ArchiveOutcome:
    """
    The outcome of a run that mirrors an archive.

    Attributes:
        report: of the packages.
        entries: of the indexes, with the unusable ones.
        is_published: whether the new indexes were published.
        is_new: whether the signed files, which name the indexes, differ from the previous ones.
        spares_others: whether files are kept that filters of earlier runs select.
        index_bytes: fetched for indexes and their patches.
        removed: paths that were deleted, or would be.
        unmatched: options and patterns of filters that match nothing.
        lacking: indexes, their further forms, and files of ``also``, that no mirror has.
    """

    def __init__(self) -> None:
        self.report = Report()
        self.entries = Entries()
        self.is_published = self.is_new = self.spares_others = False
        self.index_bytes = 0
        self.removed: list[str] = []
        self.unmatched: list[tuple[str, str]] = []
        self.lacking: list[str] = []
