"""
A check for files that already exist: recorded as right, hashed now, or left by an interrupted run.

The check is synchronous, for the destination's thread.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping

from pipegrid.errors import UsageError
from pipegrid.mirror.archive_file import (
    ArchiveFile,
    BadEntry,
    MirrorError,
    PathCollisions,
    quoted,
    wanted,
)
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.file_scheduler import Report

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import
if TYPE_CHECKING:
    from random import Random

_NOT_GIVEN_BACK = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""Errors with which disks and file systems report that written data is lost."""

MirrorEntry = ArchiveFile | tuple[str, int | None, Mapping[str, bytes | str]]
"""A wanted file; in a tuple: path, size in bytes (None if unknown), and hashes by algorithm."""


class VerifyPolicy:
    """
    Decides which files are hashed again although they are recorded as right.

    Args:
        paranoid: hash all files again.
        sample: hash this share of the files again, 0.0 to 1.0.
        drawn: the generator that draws the sample; None: a new one.
    """

    def __init__(
        self, paranoid: bool = False, sample: float = 0.0, drawn: Random | None = None
    ) -> None:
        self._paranoid = paranoid
        self._sample = sample
        if sample > 0 and drawn is None:
            from random import Random  # few callers need this module

            drawn = Random()
        self._drawn = drawn

    @property
    def is_none(self) -> bool:
        """Whether no recorded file is hashed again."""
        return not self._paranoid and self._drawn is None

    def next(self) -> bool:
        """Return whether to hash the next file even if it is recorded as right."""
        if self._paranoid or self._drawn is None:
            return self._paranoid
        return self._drawn.random() < self._sample


def checked(files: Iterable[MirrorEntry]) -> Iterator[ArchiveFile]:
    """
    Yield the file of each entry, checked; a repeated path is yielded once.

    Raises:
        BadEntry: an entry is invalid, or repeats a path with another hash.
        UsageError: an entry has the wrong type.
    """
    seen: dict[str, bytes] = {}
    for entry in files:
        each = entry if isinstance(entry, ArchiveFile) else _given(entry)
        known = seen.get(each.path)
        if known is None:
            seen[each.path] = each.digest
            yield each
        elif known != each.digest:
            raise BadEntry(
                f"{quoted(each.path)} is named twice, with different hashes; the index is wrong"
            )


def _given(entry: tuple[str, int | None, Mapping[str, bytes | str]]) -> ArchiveFile:
    """Check an entry of a caller's own list, and return its file."""
    if isinstance(entry, (tuple, list)) and len(entry) == 3:
        path, size, hashes = entry
        sized = size is None or (isinstance(size, int) and not isinstance(size, bool))
        if isinstance(path, str) and sized and isinstance(hashes, Mapping):
            return wanted(path, size, hashes)
    from pipegrid.argument_checks import shown  # this module imports ``typing``

    raise UsageError(
        "a file of a mirror is a path as text, a size in bytes and a dict of hashes by name, "
        f"not {shown(entry)}"
    )


class LocalCheck:
    """
    Finds the missing files, and counts the wanted and the existing ones.

    Args:
        staged: a staged file counts as existing, too.
        takes_up: whether complete files of an interrupted run are published; otherwise they count as missing.
    """

    def __init__(
        self,
        destination: Destination,
        report: Report,
        verify_policy: VerifyPolicy,
        staged: bool = False,
        takes_up: bool = True,
    ) -> None:
        self._destination = destination
        self._report = report
        self._verify_policy = verify_policy
        self._staged = staged
        self._takes_up = takes_up
        self._places = PathCollisions(destination.folds)
        self._leftovers = destination.leftovers()

    def missing(self, chunk: list[ArchiveFile]) -> list[ArchiveFile]:
        """Return the files of ``chunk`` that are missing or wrong, and that the mirror can keep."""
        verify_policy, leftovers = self._verify_policy, self._leftovers
        report = self._report
        missing = []
        named: dict[str, None] = {}
        for each in chunk:
            size = each.size or 0
            report.wanted_files += 1
            report.wanted_bytes += size
            why = self._places.refusal(each)
            if why is not None:
                report.fail(each.path, why)
                continue
            there = self._is_there(each, verify_policy.next())
            if not there and leftovers and self._takes_up:
                left = leftovers.pop(each.digest, None)
                there = left is not None and self._take_up(left, each)
                if there and not self._staged:
                    named[each.path.rpartition("/")[0]] = None
            if there:
                report.present_files += 1
                report.present_bytes += size
            else:
                missing.append(each)
        # The names of files that were taken up must be durable before indexes that name these files are
        # published.
        self._destination.sync_names(named)
        return missing

    def _is_there(self, each: ArchiveFile, rehash: bool) -> bool:
        try:
            return self._destination.is_there(each, rehash, self._staged)
        except MirrorError as error:
            why = error.__cause__
            if isinstance(why, OSError) and why.errno in _NOT_GIVEN_BACK:
                return False  # the file is fetched again, and replaces this one
            raise

    def _take_up(self, name: str, each: ArchiveFile) -> bool:
        destination = self._destination
        with destination.reporting("hold the files"):
            try:
                return destination.take_up(name, each, self._staged)
            except OSError as error:
                if error.errno not in _NOT_GIVEN_BACK:
                    raise
                destination.discard(name)
                return False

    def drop_leftovers(self) -> None:
        """Remove the files of an interrupted run that were not used."""
        for name in self._leftovers.values():
            self._destination.discard(name)
        self._leftovers.clear()
