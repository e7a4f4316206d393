"""Which entries of a directory are stored: patterns that exclude, tags, sizes, and lists of paths; pure."""

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
"""Where version control keeps what it can fetch again. ``.git`` is a file in some working copies."""

MAX_LISTED = 1_000_000
MAX_HEADER = 4096
"""Bytes of a tag's header."""


class DirectoryTag(NamedTuple):
    """
    A file by which a directory says that its content need not be stored.

    Attributes:
        name: of the file.
        header: what a regular file of this name must begin with; if it is empty, anything of this name will
            do.
    """

    name: str
    header: bytes = b""


CACHES = DirectoryTag("CACHEDIR.TAG", b"Signature: 8a477f597d28d172789f06886806bc55")
"""Source: Cache Directory Tagging Specification, https://bford.info/cachedir/"""


class TreeSelection:
    """
    Decides for one walk through a directory.

    Paths are relative to the directory, with ``/``, as Python decodes names (bytes that are not text become
    surrogates). Patterns are those of gitignore, in the directory itself: see ``ignore_patterns``. Excluded
    directories are not read, so nothing in them can be included again.

    Args:
        exclude: patterns of what is left out; the last that matches decides.
        only: paths of what is stored, directories with all their content; None: everything.
        tags: of a directory that has one of these, only itself and the tag are stored, as in restic.
        max_file_bytes: larger files are left out; None: none is.

    Attributes:
        excluded: number of entries left out, directories as one each. What ``only`` does not list is not
            counted.

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
        """Selected paths that the walk has not met, and no excluded directory is above: they do not exist."""
        return sorted(path for path in self._unmet if not self._is_below(path, self._shut))

    @property
    def unmatched(self) -> list[str]:
        """Patterns that matched nothing; excluded directories are not searched."""
        patterns = self._patterns
        return [each for number, each in enumerate(self._exclude) if not patterns.has_met(number)]

    def may_take(self, path: str) -> bool:
        """Whether something may be stored, of which only the name is known yet."""
        if self._leaves_out(path, None):
            return False
        return self._wanted is None or self._is_wanted(path, True)

    def takes(self, path: str, is_directory: bool) -> bool:
        """Whether something is stored, or at least entered."""
        self._unmet.discard(path)
        if self._leaves_out(path, is_directory):
            return False
        return self._wanted is None or self._is_wanted(path, is_directory)

    def takes_size(self, size: int) -> bool:
        """Whether a file of this many bytes is stored."""
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
        """Something is left out, for a reason that the walk has found."""
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
    Return the paths of a list for ``--files-from``, relative to the directory; empty lines are ignored.

    Args:
        directory: absolute, normalised.
        lines: paths relative to it, or absolute.

    Raises:
        UsageError: one is not below it.
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
    Return the paths of a list for each of these directories, relative to it; see ``paths_below``.

    Args:
        directories: absolute, normalised, none below another. With several, all paths must be absolute.

    Raises:
        UsageError: a path is not below one, or relative to several.
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
