"""Finds the files of shares on a local disk, and identifies their content."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

import attrs

from pipegrid.core import base32, hash_tree, hashes, layout, ueb
from pipegrid.core.caps import ChkCap
from pipegrid.core.hashes import HASH_BYTES
from pipegrid.errors import CorruptionError, UsageError

# What is in a file that should contain a share: the share number, and where its share data begins.
#
# There are two kinds: bare share data, as ``pipegrid encode`` writes it and protocols transfer it, and
# the container of a storage server (12 bytes before the share data, leases after it). Both begin with a
# version of 1 or 2, so the first bytes do not distinguish them. The cap does: at the right offset there
# is the UEB with the cap's hash, at the wrong one there is not.
#
# Source: the format reference, section 6; storage protocols, section 7.1.

_CONTAINER_HEADER_BYTES = 12
_FILE_NAME = re.compile(r"[0-9]{1,3}")


@attrs.define
class ShareFile:
    """
    One share in a file.

    Attributes:
        path: the file.
        share_number: the share's number in the cap's file.
        begin: where in the file the share data begins.
        fd: the open file.
    """

    path: str
    share_number: int
    begin: int
    fd: int = attrs.field(repr=False)

    def read(self, offset: int, length: int) -> bytes:
        """
        Return at most ``length`` bytes of share data from ``offset``: fewer, or none, past its end.

        Raises:
            OSError: the file cannot be read there.
        """
        return _read(self.fd, self.begin + offset, length)

    def close(self) -> None:
        """Close ``fd``; call this once, since the number may refer to another file afterwards."""
        os.close(self.fd)


def open_share(path: str, cap: ChkCap) -> ShareFile:
    """
    Open a share of the file of the cap.

    Raises:
        CorruptionError: the file contains no share of the cap's file, or is too damaged to identify it.
        OSError: it cannot be opened or read.
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
    Return the number of the share whose data begins there, or None if there is no share of the cap's
    file.
    """
    try:
        found = layout.parse_header(_read(fd, begin, layout.MAX_HEADER_BYTES))
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
    named = _number_in_name(path)
    if named is not None and (named in numbers or (not numbers and named < cap.total_shares)):
        return named
    return numbers[0] if numbers else None


def _read_ueb(fd: int, begin: int, found: layout.ShareLayout) -> bytes | None:
    at = begin + found.uri_extension
    if at + ueb.MAX_UEB_BYTES >= 1 << 63:
        return None
    length = int.from_bytes(_read(fd, at, found.ueb_length_bytes), "big")
    if not 0 < length <= ueb.MAX_UEB_BYTES:
        return None
    return _read(fd, at + found.ueb_length_bytes, length)


def _candidates(
    fd: int, begin: int, found: layout.ShareLayout, total_shares: int, root: bytes
) -> Iterator[int]:
    """
    Yield the share numbers whose hash chain leads from this share's own block tree to the root.

    The chain contains two leaves, the share's and its sibling's; its block tree shows which is its own.
    (With k = 1 all shares are equal except for the chain, and so may the two leaves be.)
    """
    length = found.uri_extension - found.share_hashes
    if length > layout.CHAIN_ENTRY_BYTES * hash_tree.chain_entries(256):
        return
    chain = _read(fd, begin + found.share_hashes, length)
    nodes = {
        int.from_bytes(chain[at : at + 2], "big"): chain[at + 2 : at + layout.CHAIN_ENTRY_BYTES]
        for at in range(0, len(chain), layout.CHAIN_ENTRY_BYTES)
    }
    own = _read(fd, begin + found.block_hashes, HASH_BYTES)
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


def _number_in_name(path: str) -> int | None:
    name = os.path.basename(path)
    return int(name) if _FILE_NAME.fullmatch(name) else None


def _read(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset)
    while 0 < len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


# Which of many files may be shares of one file, decided by their paths before any is opened.
#
# A storage server keeps the shares of a file in a directory named after the storage index, so the
# directories of other indexes are skipped. Only directories that can lead to the right one are entered.

MAX_DEPTH = 8
"""Depth below a named directory: a directory of disks of storage servers has five levels."""

MAX_ENTRIES = 1_000_000

_INDEX = re.compile(r"[a-z2-7]{26}")
_PREFIX = re.compile(r"[a-z2-7]{2}")
_NUMBER = re.compile(r"[0-9]{1,3}")


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
        """Yield the shares in a directory: directly in it, as ``encode`` writes them, or anywhere below."""
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
                    if _NUMBER.fullmatch(name)
                )
            deep = directory.count(os.sep) - top.rstrip(os.sep).count(os.sep) >= MAX_DEPTH
            below[:] = [] if deep else sorted(name for name in below if _may_lead(name, index))


def _may_lead(name: str, index: str) -> bool:
    if _INDEX.fullmatch(name):
        return name == index
    # A directory named like the prefix of another index could be a user's directory of disks; but a
    # server has a thousand such prefixes, so it is skipped.
    return name == index[:2] or not _PREFIX.fullmatch(name) or name.isdigit()
