"""The newest known version of each mutable file, cached on disk."""

from __future__ import annotations

import binascii
import hashlib
import json
import os
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pipegrid.core import base32
from pipegrid.core.caps import MutableCap
from pipegrid.core.mutable.encoder import EncodedVersion, encode
from pipegrid.core.mutable.keys import SigningKey, open_signing_key
from pipegrid.core.mutable.versions import (
    MAX_SEQUENCE_NUMBER,
    Format,
    MutableGeometry,
    Version,
    parse_version,
)
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.safe_open import is_file, read_file
from pipegrid.errors import CorruptionError, UnhappyError
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.mutable.publish import PublishOutcome, check_happy
from pipegrid.transfer.mutable.servermap import HEAD_BYTES, Hints, ServerMap
from pipegrid.transfer.mutable.slot_client import Slot
from pipegrid.transfer.peers import Peer, server_ids

# What is cached of a mutable file: the newest version seen, the servers of its shares, and the key to write
# it.
#
# With a cached version a writer needs one round trip, and an older version that servers offer later is
# recognized as older (rollback). Nothing else depends on the cache, since a server tests the checkstring.
#
# Each mutable file has one cache file, in a directory next to the client's other caches, with mode 0600: JSON
# of one or two kilobytes, which includes a hash of its content. The private key in the JSON is encrypted with
# the write key, as in every share, so a reader without a cap learns storage indexes and sequence numbers,
# which servers know as well. At most ``MAX_FILES`` cache files are kept; if there are more, the least
# recently used are removed. If a cache file is damaged or missing, the next write costs one more round trip,
# and the newest version seen is not known.
#
# **Several processes** replace each other's cache files as a whole. A lower sequence number never replaces a
# higher one, except in a race of microseconds, and then only a hint is lost. Before each use a process checks
# the time stamp of the cache file, and reads the file again if another process has replaced it: so every
# process detects a rollback below a version that any of the processes has seen.

MAX_FILES = 10_000
MAX_IN_MEMORY = 1000
MAX_BEGUN = 8
"""Maximum number of a file's begun, unconfirmed versions that are distinguished from other clients' ones."""
MAX_CONTENT_BYTES = 8 << 20
"""Largest content kept in memory, to save reading it before a change: a directory with 25,000 children."""
MAX_CONTENTS_BYTES = 32 << 20
_MAX_FILE_BYTES = 64 << 10
_MAX_COPIES = 1024
_MAX_SERVERS = 256
_FORMAT = 1

_Stamp = tuple[int, int, int]
"""Inode, time of last change and size of a cache file."""


class CachedVersion:
    """
    What is cached of one mutable file.

    Attributes:
        sequence_number, root_hash: the newest version that was read or written.
        version: the version of all shares in ``copies``; None if it is not known.
        copies: maps a server id to the share numbers that the server had last.
        encrypted_key: the private key as in shares; b"" if it was not seen.
        signing_key: the decrypted private key; in this process only.
        content: the content of ``version``; in this process only.
        begun: versions whose write was begun and not confirmed, because it failed or was cancelled. A writer
            that finds such a version has no conflict with another client. In this process only.
        begun_number: the highest sequence number of any write that was begun since the last successful one,
            even by a process that was killed; 0: none.
        contended_s: time of the last conflict with other writers, by the clock of the process; None: no
            conflict yet.
    """

    def __init__(
        self,
        sequence_number: int = 0,
        root_hash: bytes = b"",
        version: Version | None = None,
        copies: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        encrypted_key: bytes = b"",
        begun_number: int = 0,
    ) -> None:
        self.sequence_number = sequence_number
        self.root_hash = root_hash
        self.version = version
        self.copies = dict(copies)
        self.encrypted_key = encrypted_key
        self.signing_key: SigningKey | None = None
        self.content: bytes | None = None
        self.begun: tuple[Version, ...] = ()
        self.begun_number = begun_number
        self.contended_s: float | None = None

    @property
    def newest(self) -> tuple[int, bytes]:
        """Sequence number and root hash of the newest version seen; used to detect a rollback."""
        return self.sequence_number, self.root_hash

    def holders(self, peers: Iterable[Peer]) -> Hints:
        """Return those of these servers that had shares, each with its share numbers."""
        by_id = {peer.identity.server_id: peer for peer in peers}
        held = self.copies.items()
        return {by_id[server]: numbers for server, numbers in held if server in by_id}

    def saw(self, version: Version) -> None:
        """Record a version that was read, or was written to enough servers."""
        self.sequence_number, self.root_hash = max(
            self.newest, (version.sequence_number, version.root_hash)
        )

    def begin(self, version: Version) -> None:
        """Record that a version is about to be written."""
        self.begun = (*self.begun, version)[-MAX_BEGUN:]
        self.begun_number = max(self.begun_number, version.sequence_number)

    def stored(self, version: Version) -> None:
        """
        Record a version that was written to enough servers; earlier writes are no longer uncertain, unless
        their number is at least as high.
        """
        self.saw(version)
        self.begun = tuple(
            each
            for each in self.begun
            if each.sequence_number >= version.sequence_number and each != version
        )
        self.begun_number = 0

    @property
    def is_uncertain(self) -> bool:
        """Whether a write was begun that may have replaced ``version``."""
        return self.version is not None and self.begun_number > self.version.sequence_number

    def learn(self, stored: CachedVersion) -> None:
        """Adopt newer values that another process has stored."""
        self.begun_number = max(self.begun_number, stored.begun_number)
        if stored.newest > self.newest:
            self.sequence_number, self.root_hash = stored.newest
            self.version, self.content = stored.version, None
            self.copies = stored.copies or self.copies
            self.encrypted_key = stored.encrypted_key or self.encrypted_key

    def forget_version(self) -> None:
        """Forget the current version; keep the servers of its shares and the newest version seen."""
        self.version = None
        self.content = None


class VersionCache:
    """
    The cached versions of all mutable files.

    Args:
        directory: the directory of the cache files; None: cache in this process only.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._files: OrderedDict[bytes, CachedVersion] = OrderedDict()
        self._stamps: dict[bytes, _Stamp] = {}
        self._writes = 0

    def of(self, storage_index: bytes) -> CachedVersion:
        """Return what is cached of a file; empty if nothing is."""
        known = self._files.get(storage_index)
        # take the stamp before reading, so that a change during the read is noticed next time
        stamp = self._stamp(storage_index)
        if known is None:
            known = self._files[storage_index] = self._load(storage_index)
            if known.sequence_number and self._directory is not None:
                with suppress(OSError):
                    # mark the cache file as recently used, even if its content never changes
                    os.utime(self._path(storage_index))
            while len(self._files) > MAX_IN_MEMORY:
                self._stamps.pop(self._files.popitem(last=False)[0], None)
        elif stamp is not None and stamp != self._stamps.get(storage_index):
            known.learn(self._load(storage_index))
        if stamp is not None:
            self._stamps[storage_index] = stamp
        self._files.move_to_end(storage_index)
        return known

    def begin(self, storage_index: bytes, known: CachedVersion, version: Version) -> None:
        """
        Record that a version is about to be written; also on disk, in case the process is killed during the
        write.
        """
        known.begin(version)
        self.save(storage_index, known)

    def save(self, storage_index: bytes, known: CachedVersion) -> None:
        """
        Write the cached version to disk; errors are ignored, since the version is still cached in this
        process.
        """
        self._bound_contents()
        if self._directory is None:
            return
        with suppress(OSError):
            if self._load(storage_index).newest > known.newest:
                return
            path = self._path(storage_index)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, pack(known), durable=False)
            self._writes += 1
            if self._writes % 100 == 1:
                self._remove_old()

    def _bound_contents(self) -> None:
        total = 0
        for known in reversed(self._files.values()):
            if known.content is not None:
                total += len(known.content)
                if len(known.content) > MAX_CONTENT_BYTES or total > MAX_CONTENTS_BYTES:
                    known.content = None

    def _path(self, storage_index: bytes) -> Path:
        assert self._directory is not None
        return self._directory / f"{base32.encode(storage_index)}.json"

    def _stamp(self, storage_index: bytes) -> _Stamp | None:
        """
        Return the stamp of a cache file, which changes when a process replaces the file; None: the file does
        not exist.
        """
        if self._directory is None:
            return None
        try:
            found = os.stat(self._path(storage_index))
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _load(self, storage_index: bytes) -> CachedVersion:
        if self._directory is None:
            return CachedVersion()
        try:
            return unpack(read_file(self._path(storage_index), _MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return CachedVersion()

    def _remove_old(self) -> None:
        """Remove the least recently used cache files if there are more than ``MAX_FILES``."""
        assert self._directory is not None
        with os.scandir(self._directory) as entries:
            files = [entry.path for entry in entries if is_file(entry)]
        if len(files) <= MAX_FILES:
            return
        by_age = sorted(files, key=lambda path: os.stat(path).st_mtime)
        for path in by_age[: len(files) - MAX_FILES]:
            with suppress(OSError):
                os.unlink(path)


def pack(known: CachedVersion) -> bytes:
    """Return the content of a cache file; if there are too many shares, leave out which servers have them."""
    copies = {server: list(numbers) for server, numbers in known.copies.items()}
    version = "" if known.version is None else known.version.signed_prefix.hex()
    if sum(map(len, copies.values())) > _MAX_COPIES or len(copies) > _MAX_SERVERS:
        copies, version = {}, ""  # a server may claim any number of shares
    document = {
        "format": _FORMAT,
        "sequence-number": known.sequence_number,
        "root-hash": known.root_hash.hex(),
        "version": version,
        "copies": copies,
        "encrypted-key": b64encode(known.encrypted_key).decode("ascii"),
        "begun": known.begun_number,
    }
    return json.dumps(document | {"hash": _hash(document)}).encode("ascii")


def unpack(data: bytes) -> CachedVersion:
    """
    Return the cached version that the content of a cache file describes.

    Raises:
        ValueError: the content is damaged.
    """
    document = json.loads(data)
    if not isinstance(document, Mapping) or document.get("format") != _FORMAT:
        raise ValueError("not what is remembered of a mutable file")
    content = {name: value for name, value in document.items() if name != "hash"}
    if document.get("hash", "") not in ("", _hash(content)):
        raise ValueError(
            "its bytes have changed"
        )  # a sequence number too high would look like a rollback
    number = _sequence_number(document.get("sequence-number"))
    begun = _sequence_number(document.get("begun", 0))
    copies = document.get("copies")
    if not isinstance(copies, dict):
        raise ValueError("no servers")
    prefix = _bytes_from_hex(document, "version")
    version = parse_version(prefix) if prefix else None
    root_hash = _bytes_from_hex(document, "root-hash")
    held = {
        server: tuple(n for n in numbers if type(n) is int and 0 <= n < 255)
        for server, numbers in copies.items()
        if isinstance(numbers, list)
    }
    if len(root_hash) not in (0, 32) or sum(map(len, held.values())) > _MAX_COPIES:
        raise ValueError("a root hash of another length, or too many shares")
    try:
        key = b64decode(str(document.get("encrypted-key", "")), validate=True)
    except binascii.Error:
        key = b""
    return CachedVersion(number, root_hash, version, held, key, begun_number=begun)


def _hash(document: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(document).encode("ascii")).hexdigest()[:32]


def _sequence_number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SEQUENCE_NUMBER:
        raise ValueError("no sequence number")
    return value


def _bytes_from_hex(document: Mapping[str, object], name: str) -> bytes:
    return bytes.fromhex(str(document.get(name, "")))


# The base of a change of a mutable file; caching bases and written versions.


class Base(NamedTuple):
    """
    The version from which the next version is made.

    Attributes:
        content: the content of ``version``; None: not known, since the change replaces it.
        heads: maps each server to the first bytes of its shares.
        highest: the highest sequence number seen.
        is_warm: whether the base comes from the cache, without a query.
    """

    version: Version
    content: bytes | None
    heads: dict[Peer, dict[int, bytes]]
    highest: int
    is_warm: bool = False
    is_own: bool = False  # whether the content contains the change already

    def __repr__(self) -> str:  # the content of a directory is secret
        return f"<Base {self.version.name}>"


def remember_read(
    files: VersionCache, storage_index: bytes, found: ServerMap, version: Version
) -> None:
    """
    Cache a version that was read.

    Call this only if content of the version was read. If its shares exist but cannot be read, the previous
    version counts; if the unreadable version were cached, the previous version would look like a rollback.
    """
    known = files.of(storage_index)
    if (version.sequence_number, version.root_hash) <= known.newest:
        return
    known.saw(version)
    if known.version != version:
        known.forget_version()
        holders = found.holders(version).items()
        known.copies = _by_server({n: [copy.peer for copy in copies] for n, copies in holders})
    files.save(storage_index, known)


def _by_server(placed: Mapping[int, Iterable[Peer]]) -> dict[str, tuple[int, ...]]:
    copies: dict[str, list[int]] = {}
    for number, peers in placed.items():
        for server in server_ids(peers):
            copies.setdefault(server, []).append(number)
    return {server: tuple(sorted(numbers)) for server, numbers in copies.items()}


def remember_base(files: VersionCache, slot: Slot, base: Base) -> None:
    """Cache the base of a change, if no other version was found and all its shares are known."""
    known = files.of(slot.storage_index)
    head = base.version.signed_prefix[:HEAD_BYTES]
    heads = [(number, each) for shares in base.heads.values() for number, each in shares.items()]
    numbers = {number for number, each in heads if each[:HEAD_BYTES] == head}
    if len(numbers) < base.version.total_shares or any(e[:HEAD_BYTES] != head for _, e in heads):
        return
    if slot.wrong_enabler:  # shares with another write enabler stay; each change must find them
        return
    known.saw(base.version)
    known.begun_number = 0
    known.version = base.version
    known.content = base.content
    known.copies = {
        peer.identity.server_id: tuple(sorted(shares))
        for peer, shares in base.heads.items()
        if shares
    }
    if known.signing_key is not None:
        known.encrypted_key = known.signing_key.encrypted
    files.save(slot.storage_index, known)


def remember(
    files: VersionCache,
    slot: Slot,
    encoded: EncodedVersion,
    content: bytes | None,
    outcome: PublishOutcome,
    heads: Mapping[Peer, Mapping[int, bytes]],
) -> None:
    """
    Cache a version that was written; if some shares were not written, or old shares remain, cache only its
    number and servers, so that the next change queries.

    Raises:
        UnhappyError: the written version reached too few servers; it is not cached.
    """
    known = files.of(slot.storage_index)
    version = encoded.version
    try:
        check_happy(slot, version, outcome)
    except UnhappyError:
        known.forget_version()
        raise
    known.stored(version)
    stale = any(
        head[:HEAD_BYTES] != version.signed_prefix[:HEAD_BYTES]
        and peer not in outcome.placed.get(number, ())
        for peer, shares in heads.items()
        for number, head in shares.items()
    )
    known.version = version
    known.content = content
    known.copies = _by_server(outcome.placed)
    if stale or len(outcome.placed) < version.total_shares:
        known.forget_version()
    if known.signing_key is not None:
        known.encrypted_key = known.signing_key.encrypted
    files.save(slot.storage_index, known)


# Content that a caller has stored, checked against the cached version.
#
# The newest version of a file is cached on disk (``VersionCache``), but not its content, which a caller may
# store. With both, a change needs one round trip. The caller's content is not trusted: when it is encoded
# again with the version's salt, the result must have the version's root hash.


async def recall(files: VersionCache, cap: MutableCap, content: bytes, workers: CpuWorkers) -> bool:
    """
    Use ``content`` as the content of the newest version seen, if it matches; return whether that version's
    content is known now.

    This works for SDMF only, where the version contains its salt; the salts of MDMF are on the servers.

    Args:
        cap: a write cap.
        content: what the caller expects the content to be.
    """
    known = files.of(cap.storage_index)
    version = known.version
    if known.content is not None:
        return True
    if version is None or version.format is not Format.SDMF or len(content) > MAX_CONTENT_BYTES:
        return False
    if version.size != len(content) or version.sequence_number < known.sequence_number:
        return False
    if known.signing_key is None:
        try:
            known.signing_key = open_signing_key(known.encrypted_key, cap, 0)
        except CorruptionError:
            return False
    geometry = MutableGeometry(
        version.format, version.size, version.required_shares, version.total_shares
    )
    encoded = await workers.run_if_large(
        6 * len(content),
        encode,
        content,
        geometry,
        version.sequence_number,
        known.signing_key,
        [version.salt],
        frozenset(),
    )
    if encoded.version != version or known.version != version:
        return False
    known.content = content
    return True
