"""The manifest of a mirror: the files that its last complete run wanted."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from pipegrid.mirror import HIDDEN, MANIFEST, NEW_MANIFEST
from pipegrid.mirror.archive_file import ArchiveFile, MirrorError
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.file_list_format import MAX_LINE_BYTES, lines_of, list_line, read_list

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import
if TYPE_CHECKING:
    from typing import BinaryIO

WORTHWHILE_BYTES = 64 << 10
"""Minimum size of a part of the manifest (500 files): checking fewer is no slower than starting a process."""

PIECE_BYTES = 32 << 10
"""The size of a piece of the manifest: some 250 files."""


def write_manifest(destination: Destination, entries: Iterable[ArchiveFile]) -> None:
    """Record the files of a complete run atomically, in the format of ``file_list_format``."""
    for _ in noting(destination, entries):
        pass
    keep_manifest(destination)


def noting(
    destination: Destination, entries: Iterable[ArchiveFile], further: Iterable[ArchiveFile] = ()
) -> Iterator[ArchiveFile]:
    """
    Yield entries, and write each to the new manifest, which takes effect with ``keep_manifest``.

    Args:
        further: entries that are written before the others, and not yielded.
    """
    with (
        destination.reporting("record its files"),
        open(_new(destination), "wb", opener=_open_own) as file,
    ):
        file.writelines(list_line(each) for each in further)
        for each in entries:
            file.write(list_line(each))
            yield each


def add_to_manifest(destination: Destination, entries: Iterable[ArchiveFile]) -> None:
    """Add entries, perhaps none, to the new manifest of the current run, which is about to publish files."""
    with (
        destination.reporting("record its files"),
        open(_new(destination), "ab", opener=_open_own) as file,
    ):
        file.writelines(list_line(each) for each in entries)


def check_complete(path: str) -> None:
    """
    Check that a mirror has a manifest, without changing anything.

    Raises:
        MirrorError: no run to this directory was complete.
    """
    if not os.path.lexists(os.path.join(path, HIDDEN, MANIFEST)):
        raise _incomplete(os.path.abspath(path))


def keep_manifest(
    destination: Destination, replaced: Mapping[str, ArchiveFile] | None = None
) -> None:
    """
    Make the new manifest the one of the last complete run.

    Args:
        replaced: entries by path that replace those in the new manifest; see ``Entries.replaced``.
    """
    with destination.reporting("record its files"):
        if replaced:
            _replace(_new(destination), replaced)
        with open(_new(destination), "rb") as file:
            os.fsync(file.fileno())
        os.replace(_new(destination), destination.manifest)


def _replace(path: str, replaced: Mapping[str, ArchiveFile]) -> None:
    with open(path, "rb") as old, open(f"{path}.2", "wb", opener=_open_own) as new:
        for each in read_list(lines_of(old), NEW_MANIFEST):
            new.write(list_line(replaced.get(each.path, each)))
    os.replace(f"{path}.2", path)


ManifestPart = tuple[int, int]
"""The positions of the first byte of a part of the manifest, and of the byte after it; both begin a line."""


def parts_of_manifest(destination: Destination, count: int) -> list[ManifestPart]:
    """
    Return at most ``count`` parts of the manifest, of about equal size; each is large enough to be worth a
    process.

    Raises:
        MirrorError: there is no manifest.
    """
    with _open(destination) as file:
        size = os.fstat(file.fileno()).st_size
        count = max(1, min(count, size // WORTHWHILE_BYTES))
        bounds = [0]
        for number in range(1, count):
            file.seek(size * number // count)
            file.readline(MAX_LINE_BYTES + 1)  # the reader of the part refuses a longer line
            bounds.append(min(file.tell(), size))
    return list(zip(bounds, [*bounds[1:], size], strict=True))


def read_manifest(destination: Destination) -> Iterator[ArchiveFile]:
    """
    Yield the files that the last complete run wanted.

    Raises:
        MirrorError: no run was complete.
    """
    with _open(destination) as file:
        yield from read_list(lines_of(file), MANIFEST)


def read_pieces(destination: Destination, part: ManifestPart) -> Iterator[bytes]:
    """
    Yield a part of the manifest in pieces of some hundred whole lines; only a line that is too long is split.
    """
    with _open(destination) as file:
        file.seek(part[0])
        while (left := part[1] - file.tell()) > 0:
            text = file.read(min(left, PIECE_BYTES))
            if not text:
                break
            yield text if text.endswith(b"\n") else text + file.readline(MAX_LINE_BYTES + 1)


def _open(destination: Destination) -> BinaryIO:
    try:
        return open(destination.manifest, "rb")
    except FileNotFoundError:
        raise _incomplete(destination.path) from None


def _new(destination: Destination) -> str:
    return os.path.join(os.path.dirname(destination.manifest), NEW_MANIFEST)


def _open_own(path: str, flags: int) -> int:
    """Open a file of the mirror's own without following links."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _incomplete(path: str) -> MirrorError:
    return MirrorError(f"{path} has no list of its files: no run to it was complete yet")
