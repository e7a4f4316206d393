"""Which entries of a directory are stored: patterns that exclude, and lists of paths; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pipegrid.core.text import printable
from pipegrid.errors import UsageError, naming

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

MAX_PATTERNS = 10_000
MAX_PATTERN = 4096
MAX_LISTED = 1_000_000
MAX_TRIALS = 20_000_000
"""
Comparisons spent on finding patterns that match nothing; beyond them, unmatched patterns are not reported.
"""


class TreeSelection:
    """
    Decides for one walk through a directory.

    Paths are relative to the directory, with ``/``, as Python decodes names (bytes that are not text become
    surrogates). In a pattern ``*`` and ``?`` match any characters but ``/``, ``[a-z]`` one of a set, ``**``
    any number of directories. A pattern without ``/`` matches a name at any level (as in ``tahoe backup``);
    one with ``/`` matches a path from the directory down, and may begin with ``./``; one that ends in ``/``
    matches directories only. Case matters. Excluded directories are not read. A pattern that begins with
    ``!``, which cancels others in git, is refused, since it would not save what it names.

    Args:
        exclude: patterns of what is left out.
        only: paths of what is stored, directories with all their content; None: everything.

    Raises:
        UsageError: a pattern or path is malformed, or there are too many.
    """

    def __init__(self, exclude: Sequence[str] = (), only: Iterable[str] | None = None) -> None:
        if len(exclude) > MAX_PATTERNS:
            raise UsageError(f"there are more than {MAX_PATTERNS} patterns; give fewer")
        names: list[str] = []
        paths: list[str] = []
        self._unmatched: dict[str, tuple[bool, str | re.Pattern[str]]] = {}
        self._trials = MAX_TRIALS
        directory_names: list[str] = []
        directory_paths: list[str] = []
        for pattern in exclude:
            bare = pattern.rstrip("/")
            if not bare or len(pattern) > MAX_PATTERN:
                text = f"{pattern[:50]!r} is not a pattern of names; see TreeSelection"
                raise naming(UsageError(text), "TreeSelection")
            if pattern.startswith("!"):
                raise UsageError(
                    f"'{printable(pattern[:50])}' does not cancel other patterns, as it would in git; "
                    "write '\\!' for a name that begins so"
                )
            of_path = "/" in bare
            regex = _regex(bare[2:] if bare.startswith("./") else bare.removeprefix("/"))
            if pattern.endswith("/"):
                (directory_paths if of_path else directory_names).append(regex)
            else:
                (paths if of_path else names).append(regex)
            self._unmatched.setdefault(pattern, (of_path, regex))
        self._names, self._paths = _any(names), _any(paths)
        self._directory_names = _any(names + directory_names)
        self._directory_paths = _any(paths + directory_paths)
        self._wanted: set[str] | None = None
        self._above: set[str] = set()
        self._unmet: set[str] = set()
        if only is not None:
            self._wanted = set(_checked(only))
            self._unmet = self._wanted - {""}
            for path in self._wanted:
                parts = path.split("/")
                self._above.update("/".join(parts[:n]) for n in range(1, len(parts)))

    @property
    def unmet(self) -> list[str]:
        """Selected paths that the walk has not met: they do not exist."""
        return sorted(self._unmet)

    @property
    def unmatched(self) -> list[str]:
        """Patterns that matched nothing; excluded directories are not searched."""
        return list(self._unmatched)

    def may_take(self, path: str) -> bool:
        """Whether something may be stored, of which only the name is known yet."""
        if self._leaves_out(path, self._names, self._paths):
            return False
        return self._wanted is None or self._is_wanted(path, True)

    def takes(self, path: str, is_directory: bool) -> bool:
        """Whether something is stored, or at least entered."""
        names = self._directory_names if is_directory else self._names
        paths = self._directory_paths if is_directory else self._paths
        self._unmet.discard(path)
        if self._leaves_out(path, names, paths):
            return False
        return self._wanted is None or self._is_wanted(path, is_directory)

    def _leaves_out(
        self, path: str, names: re.Pattern[str] | None, paths: re.Pattern[str] | None
    ) -> bool:
        name = path.rpartition("/")[2]
        if not ((names and names.fullmatch(name)) or (paths and paths.fullmatch(path))):
            return False
        self._unmet.discard(path)
        if self._unmatched:
            self._note_matches(path, name)
        return True

    def _note_matches(self, path: str, name: str) -> None:
        """Record which patterns exclude something: it may be more than one."""
        self._trials -= len(self._unmatched)
        if self._trials < 0:
            self._unmatched.clear()
            return
        for pattern, (of_path, regex) in list(self._unmatched.items()):
            if isinstance(regex, str):
                regex = re.compile(regex, re.DOTALL)
                self._unmatched[pattern] = of_path, regex
            if regex.fullmatch(path if of_path else name):
                del self._unmatched[pattern]

    def _is_wanted(self, path: str, is_directory: bool) -> bool:
        assert self._wanted is not None
        if path in self._wanted or "" in self._wanted:
            return True
        if is_directory and path in self._above:
            return True
        end = path.rfind("/")
        while end > 0:
            if path[:end] in self._wanted:
                return True
            end = path.rfind("/", 0, end)
        return False


def patterns_of(text: str) -> list[tuple[int, str]]:
    """
    Return the patterns of a file for ``--exclude-from``, each with its line number.

    One pattern a line; empty lines and those that begin with ``#`` are ignored.
    """
    lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


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
    for line in lines:
        if not line:
            continue
        path = line
        if path.startswith("/"):
            inside = directory.rstrip("/") + "/"
            if not (path + "/").startswith(inside):
                raise UsageError(f"{line!r} is not below {directory}; list only paths that are")
            path = path[len(inside) :]
        found.append(path)
        if len(found) > MAX_LISTED:
            raise UsageError(f"the list has more than {MAX_LISTED} paths; list directories instead")
    return found


def _checked(only: Iterable[str]) -> Iterable[str]:
    for path in only:
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts or path.startswith("/"):
            raise UsageError(
                f"{path!r} is not a path below the directory; list only paths that are"
            )
        yield "/".join(parts)


def _any(regexes: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{each})" for each in regexes), re.DOTALL) if regexes else None


def _regex(pattern: str) -> str:
    out = []
    position = 0
    while position < len(pattern):
        if pattern.startswith("**/", position):
            out.append("(?:.*/)?")
            position += 3
            continue
        if pattern.startswith("**", position):
            out.append(".*")
            position += 2
            continue
        char = pattern[position]
        position += 1
        if char == "*":
            out.append("[^/]*")
        elif char == "?":
            out.append("[^/]")
        elif char == "[":
            some, position = _some(pattern, position)
            out.append(some)
        elif char == "\\" and position < len(pattern):
            out.append(re.escape(pattern[position]))
            position += 1
        else:
            out.append(re.escape(char))
    return "".join(out)


def _some(pattern: str, start: int) -> tuple[str, int]:
    """Return a pattern's ``[...]`` as a regular expression, and where the pattern continues."""
    inner = start + (pattern[start : start + 1] in ("!", "^"))
    end = pattern.find("]", inner + 1)
    if end < 0:
        return re.escape("["), start  # as in shells
    ranges = []
    chars = pattern[inner:end]
    position = 0
    while position < len(chars):
        first = chars[position]
        if chars[position + 1 : position + 2] == "-" and position + 2 < len(chars):
            last = chars[position + 2]
            if first <= last:
                ranges.append(f"{re.escape(first)}-{re.escape(last)}")
            position += 3
        else:
            ranges.append(re.escape(first))
            position += 1
    if not ranges:
        return "(?!)", end + 1
    return f"(?!/)[{'^' if inner > start else ''}{''.join(ranges)}]", end + 1
