"""
One wanted file of an archive: its path, size and hash, checked; and paths that are the same file on a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache

from pipegrid.errors import PipegridError
from pipegrid.mirror import HIDDEN as HIDDEN

TYPE_CHECKING = False  # as in ``typing``, which is slow to import

if TYPE_CHECKING:
    import re
    from typing import Any, ClassVar, TypeVar

    V = TypeVar("V", bound="Value")


class Value:
    """
    A named tuple without ``typing``, which takes three milliseconds to load before the first request.

    Two of one class with the same content are equal. ``__slots__`` has the names of the arguments of
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
        """Return a copy with some attributes changed."""
        said = dict(zip(self.__slots__, self._all(), strict=True))
        return type(self)(**{**said, **changed})


# The files that a mirror may have: paths, sizes and hashes. Bad ones are refused before anything is
# requested.
#
# An index is untrusted input. A path that could lead out of the destination, a weak hash and an invalid
# size are refused here, for every kind of index.

# as in ``typing``, which is slow to import


DIGEST_BYTES = {"sha256": 32, "sha384": 48, "sha512": 64}
"""The hashes that prove a file, and their lengths; in the order of preference."""

MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
"""Of one part of a path: the limit of file systems."""

MAX_DEPTH = 32

MAX_SIZE_BYTES = 1 << 44
"""16 TiB: no archive has a larger file, and sums of sizes stay far from any limit."""

MAX_UNTOLD_BYTES = 4 << 30
"""The limit of a file whose size no index gives."""

_PLAIN_PATH = r"(?:[A-Za-z0-9_+~][A-Za-z0-9._+~:=-]*/)*[A-Za-z0-9_+~][A-Za-z0-9._+~:=-]*"
"""Nearly all paths match this; they need no further checks except for their length."""


class BadEntry(PipegridError):
    """An index asks for something that is refused; the text says what and where."""


Skip = Callable[[BadEntry], None]
"""A function that gets the reason for each unusable entry of an index, while the others are used."""


class MirrorError(PipegridError):
    """The mirror could not be brought up to date; its files are as before, or newer."""


class ArchiveFile(Value):
    """
    One file.

    Attributes:
        path: below every mirror's URL and below the destination; parts with ``/`` between them.
        size: bytes; None if the index does not give it; only indexes of RPM repositories may omit it.
        algorithm: of the hash, one of ``DIGEST_BYTES``.
        digest: of the whole file.
        remote: the path on the mirrors, if it differs (such as one named by its hash).
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
    Check one entry of an index.

    Args:
        hashes: by name in lower case; bytes, or hex.

    Raises:
        BadEntry: the path leads out of the directory, the size is invalid, or all hashes are weak.
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
    """Return how many bytes of a file are received at most."""
    return MAX_UNTOLD_BYTES if file.size is None else file.size


def misfit(file: ArchiveFile, length: int) -> str | None:
    """Return a clause that says why a response of some bytes cannot be a file; None if it can."""
    if file.size not in (None, length):
        return f"it has {length} bytes, and {file.size} by the index"
    if length > most_bytes(file):
        return f"it has {length} bytes, more than a file of unknown size may have"
    return None


def wanted_or_why(
    path: str, size: int | None, hashes: Mapping[str, bytes | str]
) -> ArchiveFile | BadEntry:
    """Return one entry of an index as ``wanted`` does, or the reason why it is refused."""
    try:
        return wanted(path, size, hashes)
    except BadEntry as error:
        return error


def check_path(path: str) -> None:
    """
    Refuse a path that may lead out of a directory.

    Raises: BadEntry: it is empty, absolute, too long or deep, has empty parts, ``.``, ``..``, a NUL or
        another control character, a backslash, what UTF-8 cannot encode, begins with a space, or is one of
        a mirror's own.
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
        wrong = "begins with a space"  # a list cannot express it
    elif HIDDEN in map(casefold_path, parts):
        wrong = "is one of the mirror's own"
    if wrong is not None:
        raise BadEntry(f"the path {quoted(path)} {wrong}; the index is not to be trusted")


def simplified(path: str) -> str:
    """
    Return a path of an index in its simplest form: ``pool/a`` for ``/pool//./a``.

    It is below the archive's URL: apt and dnf join the two, and servers take several slashes for one.
    """
    if path[:1] != "/" and "//" not in path and "./" not in path:
        return path
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def casefold_path(path: str) -> str:
    """
    Return a form of a path that is equal for two paths if some file system treats them as the same.

    Some file systems ignore case, the composition of letters, or dots, spaces and invisible characters at
    the end of names.
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
    import re  # most callers do not need it

    return re.compile(_PLAIN_PATH)


def quoted(text: str, limit: int = 120) -> str:
    """Return untrusted text for a message: quoted, escaped, and cut to the limit."""
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
# Two files of an index that would be the same file there cannot both be kept: the second would get the
# first one's name. So the second is reported and not fetched, and the run continues. An existing file may
# also have a name in another case than in the index; it is the same file, and is not deleted as another
# one.

# as in ``typing``, which is slow to import


class PathCollisions:
    """
    Finds files of the indexes that would be the same file in one mirror.

    Args:
        folds: whether the file system treats some names as the same.
    """

    def __init__(self, folds: bool) -> None:
        self._folds = folds
        self._taken: dict[str, ArchiveFile] = {}

    def refusal(self, wanted: ArchiveFile) -> str | None:
        """Return why a file cannot be kept in addition to the files of earlier calls; None if it can."""
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
    Return an iterator of files; of those that are the same file in a mirror, the existing one comes first.

    A published index may name it.

    Args:
        is_there: returns whether a file exists and is right; called for each file in turn.
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
    Return a function that returns whether a path is one of these, in any case if the file system ``folds``.
    """
    if not folds:
        return frozenset(paths).__contains__
    places = frozenset(map(casefold_path, paths))
    return lambda path: casefold_path(path) in places
