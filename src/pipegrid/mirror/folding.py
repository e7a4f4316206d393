"""
Paths that are one file where the mirror is: on file systems that fold cases, or take names for one otherwise.

Two files of an index that are one there cannot both be kept: the second would be given the first one's name.
So the second is not fetched, which is said of it, and all else goes on. And what is there may be called in
other letters than the index calls it; it is the same file, and no deletion takes it for another one.
"""

from __future__ import annotations

from pipegrid.mirror.wanted import place_of, quoted

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pipegrid.mirror.wanted import Wanted


class HeldPlaces:
    """
    What the files of an index become in one mirror.

    Args:
        folds: the file system takes some names for one.
    """

    def __init__(self, folds: bool) -> None:
        self._folds = folds
        self._taken: dict[str, Wanted] = {}

    def refusal(self, wanted: Wanted) -> str | None:
        """Return why a file cannot be kept beside those that were asked about before; None: it can."""
        if not self._folds:
            return None
        other = self._taken.setdefault(place_of(wanted.path), wanted)
        if other.path == wanted.path or other.digest == wanted.digest:
            return None
        return (
            f"where the mirror is, it would be the same file as {quoted(other.path)}, which has other bytes;"
            " mirror to a file system that tells such names apart"
        )


def kept_first(
    files: Iterable[Wanted], folds: bool, is_there: Callable[[Wanted], bool]
) -> Iterator[Wanted]:
    """
    Return an iterator of files; of those that are one in a mirror the one that is there comes first.

    An index that is seen may name it.

    Args:
        is_there: whether a file is there, and right; asked as the files are.
    """
    return _kept_first(files, is_there) if folds else iter(files)


def _kept_first(files: Iterable[Wanted], is_there: Callable[[Wanted], bool]) -> Iterator[Wanted]:
    together: dict[str, list[Wanted]] = {}
    for each in files:
        together.setdefault(place_of(each.path), []).append(each)
    for group in together.values():
        if len(group) > 1:
            group.sort(key=lambda each: not is_there(each))
        yield from group


def holder(paths: Iterable[str], folds: bool) -> Callable[[str], bool]:
    """Return what tells whether a path is one of these, in whatever letters if the file system ``folds``."""
    if not folds:
        return frozenset(paths).__contains__
    places = frozenset(map(place_of, paths))
    return lambda path: place_of(path) in places
