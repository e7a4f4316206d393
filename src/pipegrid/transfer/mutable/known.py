"""
What is remembered of mutable files: the newest version seen, where its shares are, and the key to write it.

With it a writer who knows the version needs one round trip, and an older version that is offered later is
known to be older (rollback). Nothing of it is believed by anybody else: a server tests the checkstring.

A file for each mutable file, in a directory beside the client's other caches, mode 0600: JSON of one or two
kilobytes, with a hash of it. The private key in it is encrypted with the write key, as in every share, so
that whoever reads it without a cap learns storage indexes and sequence numbers, which servers know as well.
At most ``MAX_FILES`` are kept; beyond, those not used for longest are removed. A file that is damaged, or
gone, costs a round trip, and the memory of the newest version.

**Several processes** replace each other's files whole; a lower sequence number never replaces a higher one,
but for a race of microseconds, and then only the hint is lost. A process that runs for long reads a file
again when another one has replaced it, for which it looks at its time before each use: an older version than
any of them has seen is older for all.
"""

from __future__ import annotations

import binascii
import hashlib
import json
import os
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import attrs

from pipegrid.core import base32
from pipegrid.core.mutable.keys import SigningKey
from pipegrid.core.mutable.versions import MAX_SEQUENCE_NUMBER, Version, parse_version
from pipegrid.disk.reading import is_file, read_file
from pipegrid.disk.replacing import replace_file

MAX_FILES = 10_000
MAX_IN_MEMORY = 1000
MAX_BEGUN = 8
"""Versions of one file that were begun, and not heard to be stored: so many are told from others'."""
MAX_CONTENT_BYTES = 1 << 20
"""Of one file whose content is kept in memory, so that a change of it need not read it again."""
MAX_CONTENTS_BYTES = 32 << 20
_MAX_FILE_BYTES = 64 << 10
_MAX_COPIES = 1024
_MAX_SERVERS = 256
_FORMAT = 1

_Stamp = tuple[int, int, int]
"""Inode, time and size of a file that is remembered."""


@attrs.define(eq=False)
class Known:
    """
    What is remembered of one file.

    Attributes:
        sequence_number, root_hash: of the newest version that was read or written.
        version: the one that all shares in ``copies`` have; None if that is not known.
        copies: share numbers by server id: where they were last.
        encrypted_key: the private key as shares hold it, b"" if it was not seen.
        signing_key: the same, opened; in this process only.
        content: of ``version``; in this process only.
        begun: versions that were begun and not heard to be stored, since the write failed or was given up:
            who meets one of them has not met anybody else; in this process only.
        begun_number: the highest sequence number of any that was begun, also by a process that was killed.
        contended_s: when other writers were last met, by the clock of the process; None: never.
    """

    sequence_number: int = 0
    root_hash: bytes = b""
    version: Version | None = None
    copies: dict[str, tuple[int, ...]] = attrs.field(factory=dict)
    encrypted_key: bytes = attrs.field(default=b"", repr=False)
    signing_key: SigningKey | None = attrs.field(default=None, repr=False)
    content: bytes | None = attrs.field(default=None, repr=False)
    begun: tuple[Version, ...] = attrs.field(default=(), repr=False)
    begun_number: int = 0
    contended_s: float | None = None

    @property
    def newest(self) -> tuple[int, bytes]:
        """Sequence number and root hash: what an older version is compared with."""
        return self.sequence_number, self.root_hash

    def saw(self, version: Version) -> None:
        """A version was read, or written by all the rules."""
        self.sequence_number, self.root_hash = max(
            self.newest, (version.sequence_number, version.root_hash)
        )

    def begin(self, version: Version) -> None:
        """A version is going to be written."""
        self.begun = (*self.begun, version)[-MAX_BEGUN:]
        self.begun_number = max(self.begun_number, version.sequence_number)

    def stored(self, version: Version) -> None:
        """A version was written by all the rules, above whatever was seen of those begun before."""
        self.saw(version)
        self.begun = tuple(
            each
            for each in self.begun
            if each.sequence_number >= version.sequence_number and each != version
        )
        self.begun_number = 0

    @property
    def is_doubtful(self) -> bool:
        """Whether something was begun that may be in the place of ``version``."""
        return self.version is not None and self.begun_number > self.version.sequence_number

    def learn(self, stored: Known) -> None:
        """Another process has written this down: what is newer in it counts here, too."""
        self.begun_number = max(self.begun_number, stored.begun_number)
        if stored.newest > self.newest:
            self.sequence_number, self.root_hash = stored.newest
            self.version, self.content = stored.version, None
            self.copies = stored.copies or self.copies
            self.encrypted_key = stored.encrypted_key or self.encrypted_key

    def forget_version(self) -> None:
        """What is there is known no more, only where to look for it, and the newest that was seen."""
        self.version = None
        self.content = None


class KnownFiles:
    """
    What is remembered of all files.

    Args:
        directory: where it is kept; None: for this process only.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._files: OrderedDict[bytes, Known] = OrderedDict()
        self._stamps: dict[bytes, _Stamp] = {}
        self._writes = 0

    def of(self, storage_index: bytes) -> Known:
        """Return what is remembered of a file; nothing, perhaps."""
        known = self._files.get(storage_index)
        stamp = self._stamp(storage_index)  # before it is read: what comes later is read next time
        if known is None:
            known = self._files[storage_index] = self._load(storage_index)
            if known.sequence_number and self._directory is not None:
                with suppress(OSError):
                    os.utime(self._path(storage_index))  # it is in use, though it may never change
            while len(self._files) > MAX_IN_MEMORY:
                self._stamps.pop(self._files.popitem(last=False)[0], None)
        elif stamp is not None and stamp != self._stamps.get(storage_index):
            known.learn(self._load(storage_index))
        if stamp is not None:
            self._stamps[storage_index] = stamp
        self._files.move_to_end(storage_index)
        return known

    def begin(self, storage_index: bytes, known: Known, version: Version) -> None:
        """A version is going to be written: write that down before, for who is killed meanwhile."""
        known.begin(version)
        self.save(storage_index, known)

    def save(self, storage_index: bytes, known: Known) -> None:
        """Write down what has changed; whatever goes wrong, it is remembered in this process."""
        self._bound_contents()
        if self._directory is None:
            return
        with suppress(OSError):
            stored = self._load(storage_index)
            if stored.newest > known.newest:
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
        """Return what a file is known by, as long as nobody replaces it; None: there is none."""
        if self._directory is None:
            return None
        try:
            found = os.stat(self._path(storage_index))
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _load(self, storage_index: bytes) -> Known:
        if self._directory is None:
            return Known()
        try:
            return unpack(read_file(self._path(storage_index), _MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return Known()

    def _remove_old(self) -> None:
        """Remove the files that were not used for longest, if there are too many."""
        assert self._directory is not None
        with os.scandir(self._directory) as entries:
            files = [entry.path for entry in entries if is_file(entry)]
        if len(files) <= MAX_FILES:
            return
        by_age = sorted(files, key=lambda path: os.stat(path).st_mtime)
        for path in by_age[: len(files) - MAX_FILES]:
            with suppress(OSError):
                os.unlink(path)


def pack(known: Known) -> bytes:
    """Return the file's content; where the shares are is left out of it if that is too much."""
    copies = {server: list(numbers) for server, numbers in known.copies.items()}
    version = "" if known.version is None else known.version.signed_prefix.hex()
    if sum(map(len, copies.values())) > _MAX_COPIES or len(copies) > _MAX_SERVERS:
        copies, version = {}, ""  # servers may claim to have any number of shares
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


def unpack(data: bytes) -> Known:
    """
    Return what a file says.

    Raises:
        ValueError: it is damaged.
    """
    document = json.loads(data)
    if not isinstance(document, Mapping) or document.get("format") != _FORMAT:
        raise ValueError("not what is remembered of a mutable file")
    content = {name: value for name, value in document.items() if name != "hash"}
    if document.get("hash", "") not in ("", _hash(content)):
        raise ValueError("its bytes have changed")  # a wrong number would be a rollback
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
    return Known(number, root_hash, version, held, key, begun_number=begun)


def _hash(document: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(document).encode("ascii")).hexdigest()[:32]


def _sequence_number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SEQUENCE_NUMBER:
        raise ValueError("no sequence number")
    return value


def _bytes_from_hex(document: Mapping[str, object], name: str) -> bytes:
    return bytes.fromhex(str(document.get(name, "")))
