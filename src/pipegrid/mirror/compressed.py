"""
Indexes kept compressed here, by zstandard: a fifth of the room, and quick to read and to patch.

No release file names these bytes, so what proves them is written down when they are made of an index that
was proven: its hash, beside that of the compressed file. The note lies with the mirror's own things; without
it, or if the file has changed, the index is made anew.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from hashlib import sha256

from pipegrid.disk import files as disk
from pipegrid.mirror.destination import STAGED, Destination
from pipegrid.mirror.unpacking import unpacked
from pipegrid.mirror.wanted import HIDDEN, Wanted

ENDING = ".zst"
LEVEL = 6
NOTES = f"{HIDDEN}/compressed"
MAX_NOTES_BYTES = 8 << 20
_NEW = "compressed.new"
_NOTE = re.compile(r"([0-9a-f]{64,128}) ([0-9a-f]{64}) ([0-9]{1,15}) (.+)")


def find(destination: Destination, index: Wanted, staged: bool = True) -> Wanted | None:
    """
    Return what an index is kept as, if it is there and right; None: it is not.

    Args:
        staged: it may also be staged, and what is staged there and is another one goes.
    """
    for line in _notes(destination):
        match = _NOTE.fullmatch(line)
        if match is not None and (match[1], match[4]) == (index.digest.hex(), index.path):
            kept = Wanted(index.path + ENDING, int(match[3]), "sha256", bytes.fromhex(match[2]))
            return kept if destination.is_there(kept, staged=staged) else None
    return None


def is_noted(destination: Destination, path: str) -> bool:
    """Return whether an index of that path was compressed here."""
    return any(line.endswith(f" {path}") for line in _notes(destination))


def _notes(destination: Destination) -> list[str]:
    data = destination.read(NOTES, MAX_NOTES_BYTES) or b""
    return data.decode("utf-8", "replace").splitlines()


def compress(destination: Destination, index: Wanted) -> Wanted:
    """
    Make the compressed form of an index that is staged, and keep it staged instead.

    Raises:
        MirrorError: the disk takes no more.
    """
    import zstandard

    destination.discard(_NEW)
    hasher = sha256()
    size = 0
    try:
        fd = destination.open_own(_NEW)
        try:
            packer = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compressobj()
            for block in unpacked(destination.staged_path(index.path)):
                size = _write(fd, packer.compress(block), size, hasher)
            size = _write(fd, packer.flush(), size, hasher)
            os.fsync(fd)
            kept = Wanted(index.path + ENDING, size, "sha256", hasher.digest())
            destination.note(fd, kept)
        finally:
            os.close(fd)
        destination.publish(_NEW, kept.path, staged=True)
        _note(destination, index, kept)
    except OSError as error:
        raise destination.error(error, "keep an index compressed") from error
    destination.delete(f"{STAGED}/{index.path}")
    return kept


def _write(fd: int, data: bytes, at: int, hasher: object) -> int:
    hasher.update(data)  # type: ignore[attr-defined]
    disk.write_all(fd, data, at)
    return at + len(data)


def _note(destination: Destination, index: Wanted, kept: Wanted) -> None:
    """Keep two lines an index: that of the one that is still to be seen counts until the next is."""
    lines = _notes(destination)
    others = [line for line in lines if not line.endswith(f" {index.path}")]
    last = [line for line in lines if line.endswith(f" {index.path}")][-1:]
    new = f"{index.digest.hex()} {kept.digest.hex()} {kept.size} {index.path}"
    path = destination.where(NOTES)
    text = "\n".join([*others, *(line for line in last if line != new), new]) + "\n"
    with suppress(FileNotFoundError):
        os.unlink(path + ".new")
    with open(path + ".new", "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
