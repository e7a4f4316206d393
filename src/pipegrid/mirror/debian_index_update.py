"""
How indexes of a Debian archive are obtained: which are fetched, staged, patched, compressed and decompressed.
"""

from __future__ import annotations

import bz2
import lzma
import os
import re
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from hashlib import new as new_hash
from os.path import dirname, join
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from pipegrid.disk import file_system_calls as disk
from pipegrid.mirror.archive_file import HIDDEN, ArchiveFile, BadEntry, MirrorError, Skip
from pipegrid.mirror.debian_metadata import MAX_RELEASE_BYTES, PatchStep, read_patch_index
from pipegrid.mirror.decompression import PatchError, unpacked
from pipegrid.mirror.destination import STAGED, Destination, WrongResult
from pipegrid.mirror.epoll_response_head import SmallResponses
from pipegrid.mirror.file_scheduler import Report
from pipegrid.mirror.local_check import MirrorEntry
from pipegrid.mirror.pdiff import MAX_PATCHES, apply_patches

P = ParamSpec("P")
T = TypeVar("T")

# Staging indexes in the archive's own forms, where no client sees them.


class Obtained(NamedTuple):
    """
    The outcome of a request for indexes.

    Attributes:
        size_bytes: how much was fetched.
        lacking: why no mirror gave an index, by the path of each such index.
    """

    size_bytes: int
    lacking: dict[str, str]


class ArchiveMirror(Protocol):
    """
    The part of a mirror that an archive uses: ``mirror_api.Mirror``, or ``BlockingMirror`` without a reactor.

    Attributes:
        destination: the directory that files are stored in.
        urls: of the mirrors.
    """

    @property
    def urls(self) -> Sequence[str]: ...

    @property
    def destination(self) -> Destination: ...

    def is_stopped(self) -> bool:
        """Return whether the run must end."""

    def fetch_small(
        self, number: int, asked: Sequence[tuple[str, int]], /
    ) -> Awaitable[SmallResponses]:
        """
        Fetch files with unknown hashes from one mirror; ``asked`` has the path and the limit in bytes of
        each.
        """

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        """Call a function in the destination's thread."""

    def sync(
        self, files: Iterable[MirrorEntry], *, staged: bool = False, always: bool = False
    ) -> Awaitable[Report]:
        """Fetch the files that do not exist yet; see ``Mirror.sync``."""


async def first_trusted(
    mirror: ArchiveMirror,
    what: str,
    ask: Callable[[int, str, Skip], Awaitable[T]],
    skip: Skip,
) -> T:
    """
    Return what ``ask`` returns for the first mirror for which it raises no error.

    Args:
        what: what is asked for, for errors.
        ask: called with a mirror's number and URL, and with a ``Skip``; raises MirrorError or BadEntry if the
            mirror has nothing that can be trusted.
        skip: called with the reason for each unusable entry in what is returned.

    Raises:
        MirrorError: ``ask`` failed for every mirror.
    """
    reasons: list[str] = []
    for number, url in enumerate(mirror.urls):
        skipped: list[BadEntry] = []
        try:
            found = await ask(number, url, skipped.append)
        except (MirrorError, BadEntry) as error:
            reasons.append(str(error))
            continue
        for reason in skipped:
            skip(reason)
        return found
    raise MirrorError(f"no mirror has {what} that can be trusted: {'; '.join(reasons)}")


async def stage_indexes(
    mirror: ArchiveMirror, files: Sequence[ArchiveFile], staged: bool = True
) -> Obtained:
    """
    Fetch files and stage them; if not ``staged``, publish them.

    Files are fetched by hash if the release file allows it. Files that no mirror has by hash are fetched by
    path, since incomplete mirrors may lack the names by hash.
    """
    if not files:
        return Obtained(0, {})
    report = await mirror.sync(files, staged=staged, always=True)
    size_bytes = report.fetched_bytes
    if report.failed_files and any(file.remote is not None for file in files):
        plain = [file.replaced(remote=None) for file in files]
        report = await mirror.sync(plain, staged=staged, always=True)
        size_bytes += report.fetched_bytes
    if not report.failed_files:
        return Obtained(size_bytes, {})
    return Obtained(size_bytes, await mirror.run(_lacking, mirror, files, report, staged))


def _lacking(
    mirror: ArchiveMirror, files: Sequence[ArchiveFile], report: Report, staged: bool
) -> dict[str, str]:
    reasons = dict(report.failed)
    return {
        file.path: reasons.get(file.path, "no mirror has it")
        for file in files
        if not mirror.destination.is_there(file, staged=staged)
    }


# Indexes that are made and compressed here.

XZ_PRESET = 3
"""Compared with the default, this takes a quarter of the memory, and indexes are a twentieth larger."""

ZSTD_LEVEL = 6


class _Plain:
    """Has the interface of a compressor, but does not compress."""

    def compress(self, data: bytes) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


def _zstandard() -> Any:
    import zstandard

    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compressobj()


_PACKERS: Mapping[str, Callable[[], Any]] = {
    ".xz": lambda: lzma.LZMACompressor(preset=XZ_PRESET),
    ".gz": lambda: zlib.compressobj(6, zlib.DEFLATED, 31),
    ".zst": _zstandard,
    ".bz2": bz2.BZ2Compressor,
    "": _Plain,
}


class PackedIndex:
    """
    One form of a new index.

    Args:
        path: of the index, without an ending.
        ending: decides the compression.
        name: in ``incoming``; None: nothing is written, since only the hashes are wanted.
        algorithms: of the wanted hashes.

    Attributes:
        size: the number of compressed bytes; complete after ``finish``.
    """

    def __init__(
        self,
        destination: Destination,
        path: str,
        ending: str,
        name: str | None,
        algorithms: Iterable[str],
    ) -> None:
        self.path = path + ending
        self.name = name
        self.size = 0
        self._packer = _PACKERS[ending]()
        self._hashers = {algorithm: new_hash(algorithm) for algorithm in algorithms}
        self._fd = -1
        if name is not None:
            destination.discard(name)
            self._fd = destination.open_own(name)

    def write(self, data: bytes) -> None:
        """Compress and write bytes of the index; the compressor may keep some until ``finish``."""
        self._add(self._packer.compress(data))

    def finish(self, destination: Destination) -> None:
        """Complete the file and record it as right."""
        self._add(self._packer.flush())
        if self._fd >= 0:
            os.fsync(self._fd)
            destination.note(self._fd, self.file)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _add(self, data: bytes) -> None:
        if not data:
            return
        for hasher in self._hashers.values():
            hasher.update(data)
        if self._fd >= 0:
            disk.write_all(self._fd, data, self.size)
        self.size += len(data)

    def digests(self) -> Iterator[tuple[str, bytes]]:
        """Yield pairs of an algorithm and the hash of the compressed bytes."""
        for algorithm, hasher in self._hashers.items():
            yield algorithm, hasher.digest()

    @property
    def file(self) -> ArchiveFile:
        """The path, size and first hash of the written file."""
        algorithm, digest = next(self.digests())
        return ArchiveFile(self.path, self.size, algorithm, digest)

    def stage(self, destination: Destination) -> None:
        """Stage the written file, unless the existing one has the same content."""
        if self.name is None:
            return
        destination.delete(f"{STAGED}/{self.path}")
        if destination.is_there(self.file):
            destination.discard(self.name)
            return
        with destination.reporting("hold a new index"):
            destination.publish(self.name, self.path, staged=True)


# Indexes that are kept compressed by zstandard: a fifth of the space, and fast to read and to patch.
#
# No release file has the hashes of the compressed bytes. So when a verified index is compressed, the hashes
# of the index and of the compressed file are recorded in the mirror's ``HIDDEN``. Without a record, or if the
# compressed file has changed, the index is obtained again.

ENDING = ".zst"
NOTES = f"{HIDDEN}/compressed"
MAX_NOTES_BYTES = 8 << 20
_NEW = "compressed.new"
_NOTE = re.compile(r"([0-9a-f]{64,128}) ([0-9a-f]{64}) ([0-9]{1,15}) (.+)")


def find(destination: Destination, index: ArchiveFile, staged: bool = True) -> ArchiveFile | None:
    """
    Return the compressed file of an index, if it exists and is right; else None.

    Args:
        staged: a staged file counts, too; one with other content is removed.
    """
    for line in _notes(destination):
        match = _NOTE.fullmatch(line)
        if match is not None and (match[1], match[4]) == (index.digest.hex(), index.path):
            kept = ArchiveFile(
                index.path + ENDING, int(match[3]), "sha256", bytes.fromhex(match[2])
            )
            return kept if destination.is_there(kept, staged=staged) else None
    return None


def is_noted(destination: Destination, path: str) -> bool:
    """Return whether an index with this path was compressed here."""
    return any(line.endswith(f" {path}") for line in _notes(destination))


def _notes(destination: Destination) -> list[str]:
    data = destination.read(NOTES, MAX_NOTES_BYTES) or b""
    return data.decode("utf-8", "replace").splitlines()


def compress(destination: Destination, index: ArchiveFile) -> ArchiveFile:
    """
    Compress a staged index, and stage the result in its place.

    Raises:
        MirrorError: the disk is full.
    """
    with destination.reporting("keep an index compressed"):
        with closing(PackedIndex(destination, index.path, ENDING, _NEW, ("sha256",))) as output:
            for block in unpacked(destination.staged_path(index.path)):
                output.write(block)
            output.finish(destination)
        destination.publish(_NEW, output.path, staged=True)
        _note(destination, index, output.file)
    destination.delete(f"{STAGED}/{index.path}")
    return output.file


def _note(destination: Destination, index: ArchiveFile, kept: ArchiveFile) -> None:
    """
    Record a compressed index. The line of its previous version is kept, since that version stays published
    until the new one is.
    """
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


# Staged indexes: as the archive packs them, or unpacked and brought up to date by patches.
#
# **Why two forms.** A release file has the hash of each packed form, and compressing an index again gives
# other bytes. So packed indexes must be fetched packed, and patches save nothing. The release file also has
# the hash of the unpacked index: if that form is kept, patches suffice; they apply to the published index, so
# no other copy is needed. An index compressed here takes less space, for programs that read it; no release
# file names this form, so apt does not use it.
#
# **Verification.** Each patch is verified by its hash before it is decompressed. The result is verified by
# the hash in the release file, which proves the index, the patches, and their order. If there is no chain of
# patches, if the patches have more bytes than the packed index, or if anything is wrong, the packed index is
# fetched.


class Unpacked(NamedTuple):
    """
    An index that is wanted unpacked.

    Attributes:
        target: the unpacked file.
        packed: the forms in which the index can be fetched, the best first.
        patches: the ``Index`` file that lists the index's patches; None if there is none.
        have: the path of an older version in the destination, and the size and hash of its unpacked form;
            None if there is none.
        compressed: whether the index is kept compressed.
    """

    target: ArchiveFile
    packed: tuple[ArchiveFile, ...]
    patches: ArchiveFile | None
    have: tuple[str, ArchiveFile] | None
    compressed: bool = False


_BY_HASH = {"sha256": "SHA256", "sha512": "SHA512"}


def by_hash(path: str, algorithm: str, digest: bytes) -> str | None:
    """Return the name by hash of an index; None for an algorithm without such names."""
    kind = _BY_HASH.get(algorithm)
    return None if kind is None else join(dirname(path), "by-hash", kind, digest.hex())


async def update(
    mirror: ArchiveMirror, wants: Sequence[Unpacked], patches_are_kept: bool = False
) -> tuple[int, int]:
    """
    Stage indexes unpacked, or compressed by zstandard if ``compressed``.

    Args:
        patches_are_kept: whether the patches are published too; each is published as soon as it arrives.

    Returns:
        How many bytes of patches, lists of patches, and packed indexes were fetched; and how many indexes
            were brought up to date by patches.

    Raises:
        MirrorError: an index cannot be fetched in any form.
    """
    missing = await mirror.run(_missing, mirror, wants)
    able = [want for want in missing if _may_pay(want)]
    lists = [want.patches for want in able if want.patches is not None]
    got = await stage_indexes(mirror, lists)
    fetched_bytes = got.size_bytes
    chains = await mirror.run(_choose, mirror, able)
    patches = [step.packed for _, chain in chains for step in chain if step.packed is not None]
    got = await stage_indexes(mirror, patches, staged=not patches_are_kept)
    fetched_bytes += got.size_bytes
    patched = 0
    for want, chain in chains:
        patched += await mirror.run(_apply, mirror, want, chain)
    missing = await mirror.run(_missing, mirror, missing)
    for attempt in range(max((len(want.packed) for want in missing), default=0)):
        forms = [want.packed[attempt] for want in missing if attempt < len(want.packed)]
        got = await stage_indexes(mirror, forms)
        fetched_bytes += got.size_bytes
        for want in missing:
            if attempt < len(want.packed) and want.packed[attempt].path not in got.lacking:
                await mirror.run(_unpack, mirror, want, want.packed[attempt])
        missing = await mirror.run(_missing, mirror, missing)
    if missing:
        raise MirrorError(
            f"the index {missing[0].target.path} could not be fetched in any form; the old one stays"
        )
    return fetched_bytes, patched


def _missing(mirror: ArchiveMirror, wants: Sequence[Unpacked]) -> list[Unpacked]:
    return [want for want in wants if kept_as(mirror, want) is None]


def kept_as(mirror: ArchiveMirror, want: Unpacked) -> ArchiveFile | None:
    """
    Return the file that an index is kept as, staged or published; None if it does not exist. Runs in the
    destination's thread.
    """
    destination = mirror.destination
    if want.compressed:
        return find(destination, want.target)
    return want.target if destination.is_there(want.target, staged=True) else None


def _made(mirror: ArchiveMirror, want: Unpacked) -> None:
    if want.compressed:
        compress(mirror.destination, want.target)


def _full_bytes(want: Unpacked) -> int:
    return (want.packed[0].size if want.packed else want.target.size) or 0


def _may_pay(want: Unpacked) -> bool:
    """Return whether it may be worth fetching the list of an index's patches."""
    patches = want.patches
    if want.have is None or patches is None or patches.size is None:
        return False
    return patches.size < min(_full_bytes(want), MAX_RELEASE_BYTES)


def _choose(
    mirror: ArchiveMirror, wants: Sequence[Unpacked]
) -> list[tuple[Unpacked, tuple[PatchStep, ...]]]:
    """Return the indexes that can be patched, with their patches. Runs in the destination's thread."""
    chosen = []
    for want in wants:
        assert want.patches is not None
        assert want.have is not None
        path = want.patches.path
        data = mirror.destination.read(f"{STAGED}/{path}", MAX_RELEASE_BYTES)
        if data is None:
            data = mirror.destination.read(path, MAX_RELEASE_BYTES)
        try:
            index = read_patch_index(data or b"", dirname(path), path)
        except BadEntry:
            continue
        chain = index.chain(want.have[1].digest)
        if not chain or len(chain) > MAX_PATCHES or index.current != want.target.digest:
            continue
        cost = sum(step.packed.size or 0 for step in chain if step.packed is not None)
        if all(step.packed is not None for step in chain) and cost < _full_bytes(want):
            chosen.append((want, chain))
    return chosen


def _apply(mirror: ArchiveMirror, want: Unpacked, chain: Sequence[PatchStep]) -> bool:
    """Patch one index; return whether the result is right. Runs in the destination's thread."""
    assert want.have is not None
    destination = mirror.destination
    index = f"{destination.path}/{want.have[0]}"
    patches = [
        destination.staged_path(step.packed.path) for step in chain if step.packed is not None
    ]
    try:
        destination.make(
            want.target, lambda fd: apply_patches(index, patches, fd, want.target.size).digest
        )
    except (PatchError, FileNotFoundError, WrongResult):
        return False
    _made(mirror, want)
    return True


def _unpack(mirror: ArchiveMirror, want: Unpacked, form: ArchiveFile) -> None:
    """
    Decompress a fetched form of an index, unless it is the unpacked index itself. Runs in the destination's
    thread.
    """
    if form.path != want.target.path:
        packed = mirror.destination.staged_path(form.path)
        mirror.destination.make(
            want.target, lambda fd: apply_patches(packed, (), fd, want.target.size).digest
        )
    _made(mirror, want)
