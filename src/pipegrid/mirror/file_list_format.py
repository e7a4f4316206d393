"""The format of ``mirror list``: one wanted file per line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from io import BytesIO

from pipegrid.core.text import decode_text
from pipegrid.errors import UsageError
from pipegrid.mirror.archive_file import MAX_NAME_BYTES, ArchiveFile, BadEntry, quoted, wanted

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import

if TYPE_CHECKING:
    import re
    from typing import IO

#     hash in hex, spaces, size in bytes, spaces, path
#
# The path is last, relative to each URL and to the destination, and may have spaces. Empty lines, and lines
# that begin with ``#``, are skipped. The hash is SHA-256, SHA-384 or SHA-512, depending on its length.

MAX_LINE_BYTES = 4096
_PLAIN_LINE = (
    rb"([0-9A-Fa-f]{64})[ \t]+([0-9]{1,12})[ \t]+"
    rb"((?:[A-Za-z0-9_+~][A-Za-z0-9._+~:=-]*/){0,30}[A-Za-z0-9_+~][A-Za-z0-9._+~:=-]*)\r?\n?"
)
"""Matches nearly all lines; of the path of such a line, only the length must be checked."""

_LINE = r"([0-9A-Fa-f]{64,128})[ \t]+([0-9]{1,16})[ \t]+(\S.*)"


def read_list(lines: Iterable[bytes], name: str) -> Iterator[ArchiveFile]:
    """
    Yield the files in a list.

    Args:
        lines: each has at most ``MAX_LINE_BYTES``, with or without its line end.
        name: of the list, for errors.

    Raises:
        BadEntry: a line is invalid, or has a refused path.
    """
    plain_line, any_line = _patterns()
    for number, line in enumerate(lines, 1):
        plain = plain_line.fullmatch(line)
        if plain is not None and len(plain[3]) <= MAX_NAME_BYTES:
            digest = bytes.fromhex(plain[1].decode("ascii"))
            yield ArchiveFile(plain[3].decode("ascii"), int(plain[2]), "sha256", digest)
            continue
        if len(line) > MAX_LINE_BYTES:
            raise BadEntry(f"{name}, line {number}: it is longer than {MAX_LINE_BYTES} bytes")
        try:
            text = decode_text(line, name, first_line=number).removesuffix("\n")
        except UsageError as error:
            why = str(error).removeprefix(f"{name}:{number}: ")
            raise BadEntry(f"{name}, line {number}: {why}") from None
        if not text.strip() or text[0] == "#":
            continue
        match = any_line.fullmatch(text)
        if match is None:
            raise BadEntry(
                f"{name}, line {number}: {quoted(text)} is not SHA-256, size and path; give a file a line"
            )
        try:
            algorithm = f"sha{4 * len(match[1])}"
            yield wanted(match[3], int(match[2]), {algorithm: match[1]})
        except BadEntry as error:
            raise BadEntry(f"{name}, line {number}: {error}") from None


@lru_cache(maxsize=1)
def _patterns() -> tuple[re.Pattern[bytes], re.Pattern[str]]:
    import re  # not always needed; takes four milliseconds

    return re.compile(_PLAIN_LINE), re.compile(_LINE)


def list_line(entry: ArchiveFile) -> bytes:
    """Return the line of a file whose size is known."""
    return b"%s %d %s\n" % (
        entry.digest.hex().encode("ascii"),
        entry.size or 0,
        entry.path.encode("utf-8"),
    )


def lines_of(file: IO[bytes]) -> Iterator[bytes]:
    """
    Yield the lines of an open file; a line that is too long is split, and its first part is too long as well.
    """
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line


def lines_in(text: bytes) -> list[bytes]:
    """Return the lines of a text, each with its line end; the last line may have none."""
    return BytesIO(text).readlines()  # splitlines would also split at a carriage return
