"""
What a mirror is to hold: paths, sizes, hashes; and which of them are refused before anything is asked.

An index is written by strangers. A path that could lead out of the destination, a hash that proves
nothing and a size that is none are refused here, once, for every kind of index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from pipegrid.errors import PipegridError
from pipegrid.mirror import HIDDEN as HIDDEN
from pipegrid.mirror.value import Value

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    import re

DIGEST_BYTES = {"sha256": 32, "sha384": 48, "sha512": 64}
"""The hashes that prove a file, and their lengths; in the order in which they are preferred."""

MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
"""Of a part of a path: what file systems hold."""

MAX_DEPTH = 32

MAX_SIZE_BYTES = 1 << 44
"""16 TiB: no archive has a larger file, and sums of sizes stay far from any limit."""

MAX_UNTOLD_BYTES = 4 << 30
"""Of a file whose size no index tells."""

_PLAIN_PATH = r"(?:[A-Za-z0-9_+~][A-Za-z0-9._+~:=-]*/)*[A-Za-z0-9_+~][A-Za-z0-9._+~:=-]*"
"""What nearly all paths are; they need no closer look, unless they are long."""


class BadEntry(PipegridError):
    """An index asks for something that is not done; the text says what and where."""


Skip = Callable[[BadEntry], None]
"""What is called with the reason for each entry of an index that cannot be used, while the others are."""


class MirrorError(PipegridError):
    """The mirror could not be brought up to date; what is there is still what it was, or better."""


class Wanted(Value):
    """
    One file.

    Attributes:
        path: below every mirror's URL and below the destination; parts with ``/`` between them.
        size: bytes; None if the index does not say, which only those of RPM repositories may.
        algorithm: of the hash, one of ``DIGEST_BYTES``.
        digest: of the whole file.
        remote: where mirrors have it, if that is another path (below one named by its hash, for one).
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


def wanted(path: str, size: int | None, hashes: Mapping[str, bytes | str]) -> Wanted:
    """
    Check one entry of an index.

    Args:
        hashes: by name in lower case; bytes, or hex.

    Raises:
        BadEntry: the path is not one below the destination, the size none, or no hash proves anything.
    """
    check_path(path)
    if size is not None and not 0 <= size <= MAX_SIZE_BYTES:
        raise BadEntry(f"{quoted(path)} is said to have {size} bytes, which no file has")
    for algorithm, length in DIGEST_BYTES.items():
        value = hashes.get(algorithm)
        if value is None:
            continue
        digest = _from_hex(value) if isinstance(value, str) else value
        if digest is None or len(digest) != length:
            raise BadEntry(f"the {algorithm} of {quoted(path)} is not one: {quoted(str(value))}")
        return Wanted(path, size, algorithm, digest)
    if not hashes:
        raise BadEntry(f"{quoted(path)} has no hash, so nobody could tell whether it is right")
    weak = ", ".join(sorted(quoted(name) for name in hashes))
    raise BadEntry(
        f"{quoted(path)} has only weaker hashes ({weak}); SHA-256 or better is needed, ask the archive for it"
    )


def most_bytes(file: Wanted) -> int:
    """Return how many bytes of a file are received at most."""
    return MAX_UNTOLD_BYTES if file.size is None else file.size


def wanted_or_why(
    path: str, size: int | None, hashes: Mapping[str, bytes | str]
) -> Wanted | BadEntry:
    """Return one entry of an index as ``wanted`` does, or why it cannot be one."""
    try:
        return wanted(path, size, hashes)
    except BadEntry as error:
        return error


def check_path(path: str) -> None:
    """
    Refuse a path that is not plainly one below a directory.

    Raises: BadEntry: it is empty, absolute, too long or deep, has empty parts, ``.``, ``..``, a NUL or
        another control character, a backslash, what UTF-8 cannot encode, begins with a blank, or is one of
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
        wrong = "begins with a blank"  # which no list can say
    elif HIDDEN in map(place_of, parts):
        wrong = "is one of the mirror's own"
    if wrong is not None:
        raise BadEntry(f"the path {quoted(path)} {wrong}; the index is not to be trusted")


def simplified(path: str) -> str:
    """Return a path without parts that lead nowhere; all servers take ``pool//./a`` for ``pool/a``."""
    if "//" not in path and "./" not in path:
        return path
    absolute = "/" if path.startswith("/") else ""
    return absolute + "/".join(part for part in path.split("/") if part not in ("", "."))


def place_of(path: str) -> str:
    """
    Return a path so that two are equal if some file system takes them for one.

    There are some that do not tell upper case from lower, letters from the same composed in another way, or
    names from such with dots, blanks or characters that nobody sees behind them.
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
    import re  # which not all who look need

    return re.compile(_PLAIN_PATH)


def quoted(text: str, limit: int = 120) -> str:
    """Return text of strangers as it may stand in a sentence: quoted, escaped, bounded."""
    if len(text) > limit:
        text = text[:limit] + "..."  # in ASCII, or it would be escaped as well
    return ascii(text)


def _from_hex(value: str) -> bytes | None:
    if len(value) > 2 * max(DIGEST_BYTES.values()) or not value.isascii() or not value.isalnum():
        return None
    try:
        return bytes.fromhex(value)
    except ValueError:
        return None
