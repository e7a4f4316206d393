"""
Which of many files may be shares of one file: told by where they are, before any is opened.

A storage server keeps the shares of a file in a directory called by its storage index, so that what is in the
directory of another index is not looked at. Of directories only those are entered that can lead there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

import attrs

from pipegrid.core import base32
from pipegrid.errors import UsageError

MAX_DEPTH = 8
"""Directories below one that was named: a disk of disks of storage servers has five."""

MAX_ENTRIES = 1_000_000

_INDEX = re.compile(r"[a-z2-7]{26}")
_PREFIX = re.compile(r"[a-z2-7]{2}")
_NUMBER = re.compile(r"[0-9]{1,3}")


@attrs.define
class ShareFinder:
    """
    Looks for the shares of one file.

    Args:
        storage_index: 16 bytes.

    Attributes:
        others: so many of the files given are in directories of other storage indexes.
    """

    storage_index: bytes
    others: int = 0
    _seen: int = 0

    def among(self, paths: Sequence[str]) -> list[str]:
        """
        Return the files that may be shares, of what may be files, and directories to search.

        Raises:
            UsageError: the directories are too large to search.
        """
        index = base32.encode(self.storage_index)
        found: list[str] = []
        for path in paths:
            if os.path.isdir(path):
                found += self._below(path, index)
            elif self._is_of_another(path, index):
                self.others += 1
            else:
                found.append(path)
        return list(dict.fromkeys(found))

    @staticmethod
    def _is_of_another(path: str, index: str) -> bool:
        home = os.path.basename(os.path.dirname(os.path.abspath(path)))
        return home != index and _INDEX.fullmatch(home) is not None

    def _below(self, top: str, index: str) -> Iterator[str]:
        """Yield the shares in a directory: in it itself, as ``encode`` makes them, or anywhere below."""
        own = os.path.basename(os.path.abspath(top))
        for directory, below, names in os.walk(top):
            self._seen += len(below) + len(names)
            if self._seen > MAX_ENTRIES:
                raise UsageError(
                    f"{top} holds more than {MAX_ENTRIES} files and directories on the way to shares; "
                    "name the storage directories themselves"
                )
            at_top = directory == top
            home = own if at_top else os.path.basename(directory)
            if home == index or (at_top and not _INDEX.fullmatch(home)):
                yield from (
                    os.path.join(directory, name)
                    for name in sorted(names)
                    if _NUMBER.fullmatch(name)
                )
            deep = directory.count(os.sep) - top.rstrip(os.sep).count(os.sep) >= MAX_DEPTH
            below[:] = [] if deep else sorted(name for name in below if _may_lead(name, index))


def _may_lead(name: str, index: str) -> bool:
    if _INDEX.fullmatch(name):
        return name == index
    # What is called like the beginning of another index may still be somebody's directory of disks, but
    # among a server's thousand it is not.
    return name == index[:2] or not _PREFIX.fullmatch(name) or name.isdigit()
