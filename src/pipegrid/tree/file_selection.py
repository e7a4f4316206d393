"""
Which entries of a directory are stored, by exclude patterns, tags, sizes, and lists of paths. This module
does no input or output.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pipegrid.core.text import printable
from pipegrid.errors import UsageError
from pipegrid.tree.ignore_patterns import IgnorePatterns

VCS = (
    "CVS/",
    "RCS/",
    "SCCS/",
    ".git",
    ".svn/",
    ".arch-ids/",
    "{arch}/",
    ".bzr/",
    ".hg/",
    ".jj/",
    "_darcs/",
)
"""Directories of version control, which can be fetched again. ``.git`` is a file in some working copies."""

MAX_LISTED = 1_000_000
MAX_HEADER = 4096
"""Maximum bytes of a tag's header."""


class DirectoryTag(NamedTuple):
    """
    A file whose presence says that the content of its directory need not be stored.

    Attributes:
        name: the name of the file.
        header: the bytes with which the file must begin; if empty, anything with this name counts.
    """

    name: str
    header: bytes = b""


CACHES = DirectoryTag("CACHEDIR.TAG", b"Signature: 8a477f597d28d172789f06886806bc55")
"""Source: Cache Directory Tagging Specification, https://bford.info/cachedir/"""


class TreeSelection:
    """
    Decides which entries one walk through a directory stores.

    Paths are relative to the directory, with ``/``, and decoded as Python decodes names (bytes that are not
    text become surrogates). Patterns have the syntax of a ``.gitignore`` in the directory: see
    ``ignore_patterns``. Excluded directories are not read, so no pattern can include anything in them.

    Args:
        exclude: patterns of entries to leave out; the last matching pattern decides.
        only: paths of entries to store, directories with all their content; None: store everything.
        tags: if a directory contains one of these, only the directory and the tag are stored, as in restic.
        max_file_bytes: larger files are left out; None: no limit.

    Attributes:
        excluded: number of entries left out; an excluded directory counts as one. Entries not listed in
            ``only`` are not counted.

    Raises:
        UsageError: a pattern or path is malformed, or there are too many.
    """

    def __init__(
        self,
        exclude: Sequence[str] = (),
        only: Iterable[str] | None = None,
        *,
        tags: Sequence[DirectoryTag] = (),
        max_file_bytes: int | None = None,
    ) -> None:
        if "" in exclude:
            raise UsageError("a pattern is empty; perhaps a variable is not set")
        self._exclude = exclude
        self._patterns = IgnorePatterns([os.fsencode(pattern) for pattern in exclude])
        self.tags = tuple(tags)
        self.max_file_bytes = max_file_bytes
        self.excluded = 0
        self._wanted: set[str] | None = None
        self._above: set[str] = set()
        self._unmet: set[str] = set()
        self._shut: set[str] = set()
        if only is not None:
            self._wanted = set(_checked(only))
            self._unmet = self._wanted - {""}
            for path in self._wanted:
                parts = path.split("/")
                self._above.update("/".join(parts[:n]) for n in range(1, len(parts)))

    @property
    def unmet(self) -> list[str]:
        """
        Paths of ``only`` that do not exist: the walk has not met them, and they are not in an excluded
        directory.
        """
        return sorted(path for path in self._unmet if not self._is_below(path, self._shut))

    @property
    def unmatched(self) -> list[str]:
        """Patterns that matched nothing; entries in excluded directories are not compared."""
        patterns = self._patterns
        return [each for number, each in enumerate(self._exclude) if not patterns.has_met(number)]

    def may_take(self, path: str) -> bool:
        """Return whether an entry may be stored, as far as its name alone decides."""
        if self._leaves_out(path, None):
            return False
        return self._wanted is None or self._is_wanted(path, True)

    def takes(self, path: str, is_directory: bool) -> bool:
        """Return whether an entry is stored, or is a directory that is entered."""
        self._unmet.discard(path)
        if self._leaves_out(path, is_directory):
            return False
        return self._wanted is None or self._is_wanted(path, is_directory)

    def takes_size(self, size: int) -> bool:
        """Return whether a file of this many bytes is stored; otherwise, count it as excluded."""
        if self.max_file_bytes is None or size <= self.max_file_bytes:
            return True
        self.excluded += 1
        return False

    def _leaves_out(self, path: str, is_directory: bool | None) -> bool:
        if not self._patterns.leaves_out(os.fsencode(path), is_directory):
            return False
        self.leave_out(path)
        return True

    def leave_out(self, path: str) -> None:
        """Record that an entry is left out, because of a tag or a pattern."""
        if self._wanted is None or self._is_wanted(path, True):
            self.excluded += 1
        self._unmet.discard(path)
        if path in self._above:
            self._shut.add(path)

    def _is_wanted(self, path: str, is_directory: bool) -> bool:
        assert self._wanted is not None
        if path in self._wanted or "" in self._wanted:
            return True
        if is_directory and path in self._above:
            return True
        return self._is_below(path, self._wanted)

    def _is_below(self, path: str, directories: Collection[str]) -> bool:
        end = path.rfind("/")
        while end > 0:
            if path[:end] in directories:
                return True
            end = path.rfind("/", 0, end)
        return False


def directory_tag(text: str) -> DirectoryTag:
    """
    Return the tag for ``NAME`` or ``NAME:HEADER``.

    Raises:
        UsageError: the name is not that of a file, or the header is too long.
    """
    name, _, header = text.partition(":")
    begins = os.fsencode(header)
    if name in ("", ".", "..") or "/" in name or len(begins) > MAX_HEADER:
        raise UsageError(
            f"'{printable(text[:50])}' is neither the name of a file in a directory, nor NAME:HEADER with at "
            f"most {MAX_HEADER} bytes that the file begins with"
        )
    return DirectoryTag(name, begins)


def paths_below(directory: str, lines: Iterable[str]) -> list[str]:
    """
    Return the paths of a list for ``--files-from``, relative to a directory; empty lines are ignored.

    Args:
        directory: an absolute, normalized path.
        lines: absolute paths, or paths relative to the directory.

    Raises:
        UsageError: a path is not below the directory.
    """
    found = []
    for path in filter(None, lines):
        if path.startswith("/"):
            inside = directory.rstrip("/") + "/"
            if not (path + "/").startswith(inside):
                raise UsageError(f"{path!r} is not below {directory}; list only paths that are")
            path = path[len(inside) :]
        found.append(path)
        if len(found) > MAX_LISTED:
            raise UsageError(f"the list has more than {MAX_LISTED} paths; list directories instead")
    return found


def paths_below_each(directories: Sequence[str], lines: Sequence[str]) -> dict[str, list[str]]:
    """
    Return, for each of these directories, the paths of a list that are below it; see ``paths_below``.

    Args:
        directories: absolute, normalized paths, none below another. With several, all paths of the list must
            be absolute.

    Raises:
        UsageError: a path is not below any of the directories, or is relative though there are several.
    """
    if len(directories) == 1:
        return {directories[0]: paths_below(directories[0], lines)}
    if len(lines) > MAX_LISTED:
        raise UsageError(f"the list has more than {MAX_LISTED} paths; list directories instead")
    found: dict[str, list[str]] = {each: [] for each in directories}
    for line in filter(None, lines):
        if not line.startswith("/"):
            raise UsageError(
                f"{line!r} is relative, and there are several directories; list absolute paths"
            )
        above = next(
            (each for each in directories if f"{line}/".startswith(each.rstrip("/") + "/")), None
        )
        if above is None:
            raise UsageError(
                f"{line!r} is not below any of the directories; list only paths that are"
            )
        found[above] += paths_below(above, [line])
    return found


def _checked(only: Iterable[str]) -> Iterable[str]:
    for path in only:
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts or path.startswith("/"):
            raise UsageError(
                f"{path!r} is not a path below the directory; list only paths that are"
            )
        yield "/".join(parts)
