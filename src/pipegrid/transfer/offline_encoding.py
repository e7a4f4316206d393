"""Encode and decode files without a grid; search a local disk for the shares of a file, and identify them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import BinaryIO

import attrs

from pipegrid.argument_checks import check_callable, check_kind, shown
from pipegrid.core import base32, hash_tree, hashes, layout, ueb
from pipegrid.core.caps import ChkCap, LitCap, is_literal_size
from pipegrid.core.decoder import Decoder
from pipegrid.core.encoder import Encoder, ShareWrite
from pipegrid.core.encoding_parameters import MAX_SEGMENT_BYTES, Geometry, Params
from pipegrid.core.hashes import HASH_BYTES, KEY_BYTES, Buffer
from pipegrid.core.text import counted
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import (
    CorruptionError,
    NotEnoughSharesError,
    SinkError,
    SourceError,
    UsageError,
    naming,
)
from pipegrid.transfer.get.sink import open_sink
from pipegrid.transfer.put.source import Source, SourceLike, open_source, read_fully
from pipegrid.transfer.results import Progress

# Identifying a file that should contain a share: the share number, and where the share data begins.
#
# There are two kinds of such files: bare share data, as ``pipegrid encode`` writes it and protocols transfer
# it; and the container of a storage server (12 bytes, then the share data, then leases). Both kinds begin
# with a version of 1 or 2, so their first bytes do not distinguish them. The cap distinguishes them: only
# with the right offset of the share data is a UEB found whose hash is in the cap.
#
# Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.

_CONTAINER_HEADER_BYTES = 12
_FILE_NAME = re.compile(r"[0-9]{1,3}")


@attrs.define
class ShareFile:
    """
    One share in a local file.

    Attributes:
        path: the local file.
        share_number: which share of the cap's file it is.
        begin: offset in the local file at which the share data begins.
        fd: descriptor of the open local file.
    """

    path: str
    share_number: int
    begin: int
    fd: int = attrs.field(repr=False)

    def read(self, offset: int, length: int) -> bytes:
        """
        Return ``length`` bytes of share data from ``offset`` on; fewer, or none, at the end of the file.

        Raises:
            OSError: the file cannot be read there.
        """
        return read_fully(self.fd, self.begin + offset, length)

    def close(self) -> None:
        """
        Close ``fd``; call this only once, since the descriptor's number may refer to another file afterwards.
        """
        os.close(self.fd)


def open_share(path: str, cap: ChkCap) -> ShareFile:
    """
    Open a local file that contains a share of the cap's file.

    Raises:
        CorruptionError: the local file contains no share of the cap's file, or is too damaged to identify.
        OSError: the local file cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for begin in (0, _CONTAINER_HEADER_BYTES):
            number = _identify(fd, begin, cap, path)
            if number is not None:
                return ShareFile(path, number, begin, fd)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    raise CorruptionError(f"{path} is not a share of this file, or is damaged", server=path)


def _identify(fd: int, begin: int, cap: ChkCap, path: str) -> int | None:
    """
    Return the number of the share whose data begins at ``begin``, or None if no share of the cap's file
    begins there.
    """
    try:
        found = layout.parse_header(read_fully(fd, begin, layout.MAX_HEADER_BYTES))
    except ValueError:
        return None
    record = _read_ueb(fd, begin, found)
    if record is None or hashes.UEB.hash(record) != cap.ueb_hash:
        return None
    try:
        root = ueb.parse(record).share_root_hash
    except ValueError:  # the uploader made an invalid UEB
        return None
    numbers = list(_candidates(fd, begin, found, cap.total_shares, root))
    name = os.path.basename(path)
    named = int(name) if _FILE_NAME.fullmatch(name) else None
    if named is not None and (named in numbers or (not numbers and named < cap.total_shares)):
        return named
    return numbers[0] if numbers else None


def _read_ueb(fd: int, begin: int, found: layout.ShareLayout) -> bytes | None:
    at = begin + found.uri_extension
    if at + ueb.MAX_UEB_BYTES >= 1 << 63:
        return None
    length = int.from_bytes(read_fully(fd, at, found.ueb_length_bytes), "big")
    if not 0 < length <= ueb.MAX_UEB_BYTES:
        return None
    return read_fully(fd, at + found.ueb_length_bytes, length)


def _candidates(
    fd: int, begin: int, found: layout.ShareLayout, total_shares: int, root: bytes
) -> Iterator[int]:
    """
    Yield the share numbers for which the hash chain leads from this share's own block tree to the root.

    The chain contains two leaves, one of this share and one of its sibling; this share's block tree shows
    which leaf is its own. (With k = 1 all shares are equal except for the chain, so the two leaves may be
    equal, too.)
    """
    length = found.uri_extension - found.share_hashes
    if length > layout.CHAIN_ENTRY_BYTES * hash_tree.chain_entries(256):
        return
    chain = read_fully(fd, begin + found.share_hashes, length)
    nodes = {
        int.from_bytes(chain[at : at + 2], "big"): chain[at + 2 : at + layout.CHAIN_ENTRY_BYTES]
        for at in range(0, len(chain), layout.CHAIN_ENTRY_BYTES)
    }
    own = read_fully(fd, begin + found.block_hashes, HASH_BYTES)
    for number in range(total_shares):
        leaf = hash_tree.leaf_node(total_shares, number)
        if nodes.get(leaf) == own and _leads_to(nodes, leaf, root):
            yield number


def _leads_to(nodes: dict[int, bytes], leaf: int, root: bytes) -> bool:
    number, value = leaf, nodes[leaf]
    while number:
        sibling = nodes.get(number + 1 if number & 1 else number - 1)
        if sibling is None:
            return False
        pair = (value, sibling) if number & 1 else (sibling, value)
        number, value = (number - 1) // 2, hashes.MERKLE_NODE.hash_pair(*pair)
    return value == root


# Which of many files may be shares of one file, decided by their paths before any of them is opened.
#
# A storage server keeps the shares of a file in a directory named after the storage index, so the directories
# of other storage indexes are skipped. Only directories that can lead to the right one are entered.

MAX_DEPTH = 8
"""Maximum search depth below a directory; a directory with several storage servers' disks has five levels."""

MAX_ENTRIES = 1_000_000

_INDEX = re.compile(r"[a-z2-7]{26}")
_PREFIX = re.compile(r"[a-z2-7]{2}")


@attrs.define
class ShareFinder:
    """
    Searches files and directories for the shares of one file.

    Args:
        storage_index: 16 bytes.

    Attributes:
        others: number of given files that are in directories of other storage indexes.
    """

    storage_index: bytes
    others: int = 0
    _seen: int = 0

    def among(self, paths: Sequence[str]) -> list[str]:
        """
        Return the files that may be shares.

        Args:
            paths: files that may be shares, and directories to search.

        Raises:
            UsageError: the directories are too large to search.
        """
        index = base32.encode(self.storage_index)
        found: list[str] = []
        for path in paths:
            if os.path.isdir(path):
                found += self._below(path, index)
            elif self._is_of_another(path, index):
                self.others += 1
            else:
                found.append(path)
        return list(dict.fromkeys(found))

    @staticmethod
    def _is_of_another(path: str, index: str) -> bool:
        home = os.path.basename(os.path.dirname(os.path.abspath(path)))
        return home != index and _INDEX.fullmatch(home) is not None

    def _below(self, top: str, index: str) -> Iterator[str]:
        """
        Yield the files in a directory that may be shares: files directly in it, as ``encode`` writes them,
        and files in the storage index's directory anywhere below.
        """
        own = os.path.basename(os.path.abspath(top))
        for directory, below, names in os.walk(top):
            self._seen += len(below) + len(names)
            if self._seen > MAX_ENTRIES:
                raise UsageError(
                    f"{top} holds more than {MAX_ENTRIES} files and directories on the way to shares; "
                    "name the storage directories themselves"
                )
            at_top = directory == top
            home = own if at_top else os.path.basename(directory)
            if home == index or (at_top and not _INDEX.fullmatch(home)):
                yield from (
                    os.path.join(directory, name)
                    for name in sorted(names)
                    if _FILE_NAME.fullmatch(name)
                )
            deep = directory.count(os.sep) - top.rstrip(os.sep).count(os.sep) >= MAX_DEPTH
            below[:] = [] if deep else sorted(name for name in below if _may_lead(name, index))


def _may_lead(name: str, index: str) -> bool:
    if _INDEX.fullmatch(name):
        return name == index
    # A directory named like the prefix of another index could be a user's directory of disks. But a server
    # has a thousand directories with such names, so all of them are skipped.
    return name == index[:2] or not _PREFIX.fullmatch(name) or name.isdigit()


# The share files that an encoding writes: no file appears under its final name before all files are on disk.


class ShareDirectory:
    """
    The share files of one encoding. They have hidden names until ``publish``; leaving the context without
    ``publish`` removes them.

    If the process is killed, the files with hidden names remain, each next to the place of its share; the
    next encoding into the directory replaces them.

    Raises:
        SinkError: the directory cannot be used.
    """

    def __init__(self, directory: str, total_shares: int, force: bool) -> None:
        self._paths = [os.path.join(directory, str(n)) for n in range(total_shares)]
        self._parts: list[PartFile] = []
        self._directory = directory
        self._force = force

    def __enter__(self) -> ShareDirectory:
        with ExitStack() as undo:
            undo.push(self)
            try:
                os.makedirs(self._directory, exist_ok=True)
                self._refuse_others()
            except OSError as error:
                raise self._unwritable(error) from error
            for path in self._paths:
                self._parts.append(PartFile(path, self._force, resume=False, follow=False))
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            part.leave()

    def _refuse_others(self) -> None:
        if self._force:
            return
        for name in os.listdir(self._directory):
            if name.isdigit():
                text = (
                    f"{self._directory} holds shares already ({name}, for one); choose an empty "
                    "directory, or add force=True"
                )
                raise naming(SinkError(text), "force=True")

    def write(self, write: ShareWrite) -> None:
        """Write a part of one share. Raises SinkError if the part cannot be written."""
        offset = write.offset
        try:
            for piece in write.pieces:
                view = memoryview(piece)
                while view:
                    written = os.pwrite(self._parts[write.share_number].fileno(), view, offset)
                    view = view[written:]
                    offset += written
        except OSError as error:
            raise self._unwritable(error) from error

    def publish(self) -> list[str]:
        """Give all files their final names, and return the paths."""
        try:
            for part in self._parts:
                part.sync()
        except OSError as error:
            raise self._unwritable(error) from error
        for part in self._parts:
            part.publish()
        return self._paths

    def _unwritable(self, error: OSError) -> SinkError:
        return SinkError(f"cannot write shares to {self._directory}: {error.strerror}")


# Encoding a file into n share files without a grid, and restoring it from any k of them.
#
# All functions block, waiting for the disk and using the CPU, and hold a few segments in memory, whatever the
# size of the file. An output file appears under its name only when it is complete.

_READ_BYTES = 1 << 18
_AHEAD_BYTES = 1 << 20  # bytes of each share to read at a time; at least one block


@attrs.frozen
class EncodeResult:
    """
    One encoded file.

    Attributes:
        cap: the read cap of the file.
        size: number of plaintext bytes.
        share_bytes: length of each share; 0 for a literal cap.
        paths: the share files, in share-number order.
    """

    cap: ChkCap | LitCap
    size: int
    share_bytes: int
    paths: list[str]


def encode_file(
    source: SourceLike,
    directory: str,
    params: Params,
    convergence: bytes | None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> EncodeResult:
    """
    Encode a file into ``directory/0`` to ``directory/n-1``, in the share format of the storage protocols.

    A file of up to 55 bytes becomes a literal cap, and gets no share files.

    Args:
        directory: created if it is missing; it must contain no shares, unless ``force`` permits replacing
            them.
        convergence: the secret that, together with the content, determines the key; None: a random key.
        progress: called with plaintext bytes encoded, and the total.

    Raises:
        SourceError: the file cannot be read, or changed while it was encoded.
        SinkError: the share files cannot be written, or would replace existing ones.
    """
    check_kind(params, Params, "how a file is encoded", "a Params")
    check_kind(convergence, (bytes, type(None)), "a convergence secret", "bytes", secret=True)
    check_kind(directory, (str, os.PathLike), "where share files go", "a path")
    check_callable(progress, "progress")
    opened = open_source(source)
    try:
        if is_literal_size(opened.size):
            data = bytes(opened.read_at(0, opened.size))
            return EncodeResult(LitCap(data), len(data), 0, [])
        return _encode(opened, directory, params, convergence, force, progress)
    finally:
        opened.close()


def _encode(
    source: Source,
    directory: str,
    params: Params,
    convergence: bytes | None,
    force: bool,
    progress: Progress | None,
) -> EncodeResult:
    geometry = params.geometry(source.size)
    with ShareDirectory(directory, geometry.total_shares, force) as shares:
        key = os.urandom(KEY_BYTES)
        if convergence is not None:
            hasher = _key_hasher(convergence, geometry)
            for offset in range(0, source.size, _READ_BYTES):
                hasher.update(source.read_at(offset, min(_READ_BYTES, source.size - offset)))
            key = hasher.digest()[:KEY_BYTES]
        encoder = Encoder(geometry, key)
        again = _key_hasher(convergence or b"", geometry)
        for index in range(geometry.num_segments):
            start = index * geometry.segment_bytes
            plaintext = source.read_at(start, geometry.segment_length(index))
            if convergence is not None:
                again.update(plaintext)
            for write in encoder.add(encoder.code(encoder.encrypt(plaintext))):
                shares.write(write)
            if progress is not None:
                progress(start + len(plaintext), geometry.size)
        source.check_unchanged()
        if convergence is not None and again.digest()[:KEY_BYTES] != key:
            raise SourceError(
                f"{source.name} changed while it was read; no share was written, try again when no"
                f" program writes to it"
            )
        encoder.finish(frozenset())
        for number in range(geometry.total_shares):
            shares.write(encoder.trailer(number))
        return EncodeResult(encoder.cap, geometry.size, encoder.share_bytes, shares.publish())


def _key_hasher(convergence: bytes, geometry: Geometry) -> hashes.TaggedHasher:
    return hashes.convergent_key_hasher(
        convergence, geometry.required_shares, geometry.total_shares, geometry.segment_bytes
    )


@attrs.frozen
class DecodeResult:
    """
    One restored file.

    Attributes:
        size: number of plaintext bytes.
        shares_used: maps a share number to its share file; empty for a literal cap.
        problems: share files that could not be used, and damage that did not prevent the restoration.
    """

    size: int
    shares_used: dict[int, str]
    problems: list[CorruptionError]


def decode_file(
    cap: ChkCap | LitCap,
    paths: Sequence[str],
    sink: BinaryIO | PartFile,
    *,
    progress: Progress | None = None,
    max_segment_bytes: int = MAX_SEGMENT_BYTES,
) -> DecodeResult:
    """
    Restore a file from any k of its share files.

    The shares may be bare or in a storage server's containers, and have any names. Damaged shares and shares
    of other files may be among them.

    Args:
        sink: gets the verified plaintext, in order.
        progress: called with plaintext bytes restored, and the total.
        max_segment_bytes: a file with larger segments is not restored, since segments are held in memory.

    Raises:
        SegmentTooLarge: the file has segments larger than ``max_segment_bytes``.
        NotEnoughSharesError: fewer than k good shares were given.
        CorruptionError: the file was encoded wrongly, so that no share can help.
        SinkError: the plaintext cannot be written.
    """
    check_kind(cap, (ChkCap, LitCap), "what a file is restored by", "its read cap, parsed")
    if not isinstance(paths, Sequence) or isinstance(paths, (str, bytes)):
        raise UsageError(f"a file is restored from a list of paths, not {shown(paths)}")
    check_callable(progress, "progress")
    output = open_sink(sink, lambda: None)
    if isinstance(cap, LitCap):
        output.write([cap.data])
        output.finish()
        return DecodeResult(cap.size, {}, [])
    restoration = _Restoration(cap, paths, max_segment_bytes)
    try:
        done = 0
        for pieces in restoration.run():
            output.write(pieces)
            done += sum(map(len, pieces))
            if progress is not None:
                progress(done, cap.size)
        output.finish()
        return DecodeResult(done, restoration.used(), restoration.problems())
    finally:
        restoration.close()


class _Restoration:
    """A decoder, and the share files that it reads."""

    def __init__(self, cap: ChkCap, paths: Sequence[str], max_segment_bytes: int) -> None:
        self._cap = cap
        self._decoder = Decoder(cap, max_segment_bytes=max_segment_bytes)
        self._reading: dict[int, ShareFile] = {}
        self._unreadable: list[CorruptionError] = []
        self._open: list[ShareFile] = []
        for path in paths:
            self._open_share(path)
        # Low numbers first: the first k shares contain the segments unencoded.
        self._spare = sorted(self._open, key=lambda share: share.share_number)

    def _open_share(self, path: str) -> None:
        try:
            self._open.append(open_share(path, self._cap))
        except CorruptionError as error:
            self._unreadable.append(error)
        except OSError as error:
            self._cannot_read(path, None, error)

    def run(self) -> Iterator[list[Buffer]]:
        """Yield the plaintext in order."""
        decoder = self._decoder
        while not decoder.done:
            while decoder.lacking:
                self._add_share()
            progressed = self._read_wanted()
            while (job := decoder.next_job()) is not None:
                progressed = True
                pieces = decoder.finish(job.run())
                if pieces:
                    yield pieces
            assert progressed or decoder.lacking or decoder.done, "the decoder wants nothing"

    def _read_wanted(self) -> bool:
        """Read the bytes that the decoder wants; return whether there were any."""
        asked = False
        for number in self._decoder.shares_in_use:
            for span in self._decoder.wanted(number, _AHEAD_BYTES):
                asked = True
                self._read(self._reading[number], span.offset, span.length)
        return asked

    def _read(self, share: ShareFile, offset: int, length: int) -> None:
        try:
            data = share.read(offset, length)
        except OSError as error:
            self._cannot_read(share.path, share.share_number, error)
            self._decoder.drop_share(share.share_number)
            return
        self._decoder.received(share.share_number, offset, data)
        if len(data) < length:
            self._decoder.ended(share.share_number, offset + len(data))

    def _add_share(self) -> None:
        for share in self._spare:
            if share.share_number not in self._decoder.shares_in_use:
                self._spare.remove(share)
                self._reading[share.share_number] = share
                self._decoder.add_share(share.share_number)
                return
        # Damaged shares can still be used, since each good block is proven by itself.
        if not self._decoder.use_damaged_shares():
            self._give_up()

    def _give_up(self) -> None:
        found, needed = len(self._decoder.shares_in_use), self._cap.required_shares
        problems = self.problems()
        blame = f" ({problems[0]})" if problems else ""
        raise NotEnoughSharesError(
            f"only {counted(found, 'good share was', 'good shares were')} given, and any {needed} "
            f"restore the file{blame}; "
            "find more of them",
            found,
            needed,
        )

    def _cannot_read(self, path: str, number: int | None, error: OSError) -> None:
        text = f"cannot read {path}: {error.strerror}"
        self._unreadable.append(CorruptionError(text, number, None, path))

    def used(self) -> dict[int, str]:
        """Return a dict from the share numbers that were used to the paths of their files."""
        return {number: self._reading[number].path for number in self._decoder.shares_in_use}

    def problems(self) -> list[CorruptionError]:
        """Return the problems of the given files; each error has the file's path in place of a server."""
        found = list(self._unreadable)
        for error in self._decoder.corrupt:
            share = self._reading.get(-1 if error.share_number is None else error.share_number)
            path = share.path if share else ""
            text = f"{path}: {error}" if path else str(error)
            found.append(CorruptionError(text, error.share_number, error.offset, path))
        return found

    def close(self) -> None:
        for share in self._open:
            share.close()
