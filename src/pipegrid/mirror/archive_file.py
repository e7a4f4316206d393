"""
A wanted file of an archive with its checked path, size and hash; and a check for paths that a file system
treats as the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache

from pipegrid.errors import PipegridError
from pipegrid.mirror import HIDDEN as HIDDEN

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import

if TYPE_CHECKING:
    import re
    from typing import Any, ClassVar, TypeVar

    V = TypeVar("V", bound="Value")


class Value:
    """
    A replacement for named tuples. It needs no import of ``typing``, which would take three milliseconds
    before the first request.

    Two objects of one class with the same content are equal. ``__slots__`` has the names of the arguments of
    ``__init__``.
    """

    __slots__: ClassVar[tuple[str, ...]] = ()

    def _all(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in self.__slots__])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        said = zip(self.__slots__, self._all(), strict=True)
        return f"{type(self).__name__}({', '.join(f'{name}={each!r}' for name, each in said)})"

    def replaced(self: V, **changed: Any) -> V:
        """Return a copy in which some attributes have other values."""
        said = dict(zip(self.__slots__, self._all(), strict=True))
        return type(self)(**{**said, **changed})


# The files that a mirror may have: paths, sizes and hashes. Invalid entries are refused before anything is
# requested.
#
# An index is untrusted input. For every kind of index, this module refuses a path that could lead out of the
# destination, a weak hash, and an invalid size.


DIGEST_BYTES = {"sha256": 32, "sha384": 48, "sha512": 64}
"""The accepted hash algorithms, the preferred one first, and the lengths of their hashes in bytes."""

MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
"""The maximum length of one part of a path, which is the limit of file systems."""

MAX_DEPTH = 32

MAX_SIZE_BYTES = 1 << 44
"""The maximum size of a file, 16 TiB: no archive has a larger one."""

MAX_UNTOLD_BYTES = 4 << 30
"""The maximum size of a file if the index does not give its size."""

_PLAIN_PATH = r"(?:[A-Za-z0-9_+~][A-Za-z0-9._+~:=-]*/)*[A-Za-z0-9_+~][A-Za-z0-9._+~:=-]*"
"""Nearly all paths match this pattern; only the length and depth of such a path must be checked."""


class BadEntry(PipegridError):
    """An entry of an index is refused; the text says why."""


Skip = Callable[[BadEntry], None]
"""A function that gets the reason for each unusable entry of an index; the usable entries are still used."""


class MirrorError(PipegridError):
    """The mirror could not be brought up to date; each of its files is unchanged or newer."""


class ArchiveFile(Value):
    """
    One file that an index names.

    Attributes:
        path: relative to every mirror's URL and to the destination; parts are separated by ``/``.
        size: in bytes; None if unknown (of all indexes, only those of RPM repositories may omit sizes).
        algorithm: of the hash, one of ``DIGEST_BYTES``.
        digest: the hash of the whole file.
        remote: the path on the mirrors if it differs from ``path`` (such as a name that is the hash).
    """

    __slots__ = ("algorithm", "digest", "path", "remote", "size")

    def __init__(
        self, path: str, size: int | None, algorithm: str, digest: bytes, remote: str | None = None
    ) -> None:
        self.path = path
        self.size = size
        self.algorithm = algorithm
        self.digest = digest
        self.remote = remote


def wanted(path: str, size: int | None, hashes: Mapping[str, bytes | str]) -> ArchiveFile:
    """
    Check one entry of an index, and return its file.

    Args:
        hashes: as bytes or hex, by the algorithm's name in lower case.

    Raises:
        BadEntry: ``check_path`` refuses the path, the size is invalid, or there is no valid hash of
            ``DIGEST_BYTES``.
    """
    check_path(path)
    if size is not None and not 0 <= size <= MAX_SIZE_BYTES:
        raise BadEntry(f"{quoted(path)} has a size of {size} bytes, which no file has")
    for algorithm, length in DIGEST_BYTES.items():
        value = hashes.get(algorithm)
        if value is None:
            continue
        digest = _from_hex(value) if isinstance(value, str) else value
        if digest is None or len(digest) != length:
            raise BadEntry(f"the {algorithm} of {quoted(path)} is not one: {quoted(str(value))}")
        return ArchiveFile(path, size, algorithm, digest)
    if not hashes:
        raise BadEntry(f"{quoted(path)} has no hash, so it cannot be verified")
    weak = ", ".join(sorted(quoted(name) for name in hashes))
    raise BadEntry(
        f"{quoted(path)} has only weaker hashes ({weak}); SHA-256 or better is needed, ask the archive for it"
    )


def most_bytes(file: ArchiveFile) -> int:
    """Return the maximum number of bytes that a response with a file may have."""
    return MAX_UNTOLD_BYTES if file.size is None else file.size


def misfit(file: ArchiveFile, length: int) -> str | None:
    """Return a clause that says why a response of ``length`` bytes cannot be this file; None if it can."""
    if file.size not in (None, length):
        return f"it has {length} bytes, and {file.size} by the index"
    if length > most_bytes(file):
        return f"it has {length} bytes, more than a file of unknown size may have"
    return None


def wanted_or_why(
    path: str, size: int | None, hashes: Mapping[str, bytes | str]
) -> ArchiveFile | BadEntry:
    """Return the file of one entry of an index as ``wanted`` does, or the reason why the entry is refused."""
    try:
        return wanted(path, size, hashes)
    except BadEntry as error:
        return error


def check_path(path: str) -> None:
    """
    Refuse a path that may lead out of a directory.

    Raises:
        BadEntry: the path is empty, absolute, too long or too deep; begins with a space; is one of the
            mirror's own paths; or contains an empty part, ``.``, ``..``, a control character such as NUL, a
            backslash, or characters that UTF-8 cannot encode.
    """
    plain = len(path) <= MAX_NAME_BYTES and path.count("/") < MAX_DEPTH
    if plain and _plain_path().fullmatch(path):
        return
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        raise BadEntry(f"the path {quoted(path)} is not text") from None
    parts = path.split("/")
    wrong = None
    if not path:
        wrong = "is empty"
    elif path[0] == "/":
        wrong = "is absolute"
    elif len(encoded) > MAX_PATH_BYTES or any(
        len(part.encode("utf-8")) > MAX_NAME_BYTES for part in parts
    ):
        wrong = "is too long"
    elif len(parts) > MAX_DEPTH:
        wrong = "is too deep"
    elif ".." in parts:
        wrong = "leads out of the mirror"
    elif "" in parts or "." in parts:
        wrong = "has an empty part"
    elif "\\" in path or any(ord(char) < 32 or ord(char) == 127 for char in path):
        wrong = "has a character that no archive uses"
    elif path[0].isspace():
        wrong = "begins with a space"  # a file list cannot express such a path
    elif HIDDEN in map(casefold_path, parts):
        wrong = "is one of the mirror's own"
    if wrong is not None:
        raise BadEntry(f"the path {quoted(path)} {wrong}; the index is not to be trusted")


def simplified(path: str) -> str:
    """
    Return a path of an index in its simplest form: ``pool/a`` for ``/pool//./a``.

    The result is relative to the archive's URL: apt and dnf join the URL and the path, and servers treat
    several slashes as one.
    """
    if path[:1] != "/" and "//" not in path and "./" not in path:
        return path
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def casefold_path(path: str) -> str:
    """
    Return a form of a path; it is the same for two paths that some file system treats as the same.

    Some file systems ignore case, the composition of letters, or dots, spaces and invisible characters at the
    end of names.
    """
    return "/".join(map(_place_of_name, path.split("/")))


@lru_cache(maxsize=1024)
def _place_of_name(name: str) -> str:
    if not name.isascii():
        import unicodedata

        composed = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
        name = "".join(each for each in composed if unicodedata.category(each) != "Cf")
    return name.lower().rstrip(". ")


@lru_cache(maxsize=1)
def _plain_path() -> re.Pattern[str]:
    import re  # most callers do not need this module

    return re.compile(_PLAIN_PATH)


def quoted(text: str, limit: int = 120) -> str:
    """Return untrusted text for a message: quoted, escaped, and shortened to the limit."""
    if len(text) > limit:
        text = text[:limit] + "..."  # in ASCII, since other characters would be escaped
    return ascii(text)


def _from_hex(value: str) -> bytes | None:
    if len(value) > 2 * max(DIGEST_BYTES.values()) or not value.isascii() or not value.isalnum():
        return None
    try:
        return bytes.fromhex(value)
    except ValueError:
        return None


# Paths that are the same file on the mirror's file system, for instance because it ignores case.
#
# If two files of an index would be the same file, only the first can be kept: storing the second would
# replace the first. So the second is reported and not fetched, and the run continues. An existing file whose
# name differs from the index only in case is the same file, so it is not deleted as unwanted.


class PathCollisions:
    """
    Finds files of the indexes that would be the same file in one mirror.

    Args:
        folds: whether the file system treats some different names as the same.
    """

    def __init__(self, folds: bool) -> None:
        self._folds = folds
        self._taken: dict[str, ArchiveFile] = {}

    def refusal(self, wanted: ArchiveFile) -> str | None:
        """Return why a file cannot be kept together with the files of earlier calls; None if it can."""
        if not self._folds:
            return None
        other = self._taken.setdefault(casefold_path(wanted.path), wanted)
        if other.path == wanted.path or other.digest == wanted.digest:
            return None
        return (
            f"where the mirror is, it would be the same file as {quoted(other.path)}, which has other bytes;"
            " mirror to a file system that tells such names apart"
        )


def kept_first(
    files: Iterable[ArchiveFile], folds: bool, is_there: Callable[[ArchiveFile], bool]
) -> Iterator[ArchiveFile]:
    """
    Return an iterator of files; among files that would be the same file in a mirror, an existing one is
    first.

    So the existing file is kept, since a published index may name it.

    Args:
        is_there: returns whether a file exists and is right; called only for files that are the same in the
            mirror.
    """
    return _kept_first(files, is_there) if folds else iter(files)


def _kept_first(
    files: Iterable[ArchiveFile], is_there: Callable[[ArchiveFile], bool]
) -> Iterator[ArchiveFile]:
    together: dict[str, list[ArchiveFile]] = {}
    for each in files:
        together.setdefault(casefold_path(each.path), []).append(each)
    for group in together.values():
        if len(group) > 1:
            group.sort(key=lambda each: not is_there(each))
        yield from group


def holder(paths: Iterable[str], folds: bool) -> Callable[[str], bool]:
    """
    Return a function that tests whether a path is one of ``paths``, ignoring case if the file system
    ``folds``.
    """
    if not folds:
        return frozenset(paths).__contains__
    places = frozenset(map(casefold_path, paths))
    return lambda path: casefold_path(path) in places
