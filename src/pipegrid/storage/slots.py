"""
Mutable shares of a storage directory: reading, and the atomic read-test-write.

**Atomic** is meant twice. Others that use the slot, be they threads or processes, come before or after, never
between: the slot is locked. And a crash leaves each share as it was or as it was to be:

==================================  ==================================================================
a share that is new, or at most     is written anew beside its slot, synced, and renamed over the
4 MiB long                          old one
a longer one                        is changed in place, and synced; copying gigabytes to change one
                                    segment would be worse
a deleted one                       is unlinked
==================================  ==================================================================

All new files are there, and synced, before the first is renamed, so that a full or failing disk changes
nothing at all. Several shares are renamed one after the other: a crash in between leaves some of them new, as
does the loss of one of several servers. A client that finds two versions takes the newest that it can put
together, and repairs.

What a crash may leave of a long share: killing the process, a container that can be read, with all its
leases, and some of the writes in the order in which they were given (see ``mutable_containers``); a power
cut, any of the writes, and if the container was growing, perhaps not the leases beyond the fourth. The
reader finds out by the share's hashes. Tahoe-LAFS changes all shares in place, and syncs none.

What was acknowledged is on the disk, unless the policy is ``none``.

Source: the format reference, storage protocols, sections 7.2, 7.3 and 8.3.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from pipegrid.core import base32
from pipegrid.errors import (
    NoSpace,
    NoSuchShare,
    ServerRefused,
    UsageError,
    WrongSecret,
)
from pipegrid.storage import disk, slotfiles
from pipegrid.storage import mutable_containers as containers
from pipegrid.storage.commit import Disk
from pipegrid.storage.paths import SHARE_NUMBERS, check_number
from pipegrid.storage.reader import ShareReader
from pipegrid.storage.slotfiles import SlotFile
from pipegrid.wire.gbs import MAX_MUTABLE_SHARE_BYTES
from pipegrid.wire.messages import LeaseSecrets, ShareChange, SlotResult, SlotSecrets

COPY_LIMIT_BYTES = 4 << 20
"""Up to here a container is written anew, in some milliseconds; beyond, it is changed in place."""
MAX_READ_BYTES = 256 << 20
"""Of one answer, which is held in memory."""
MAX_VECTORS = 4096
"""Reads in a vector, or tests of a share; clients send one or two, and 30 at most over HTTP."""
COPY_SUFFIX = ".slot"

Reads = Sequence[tuple[int, int]]


class Slots:
    """
    The mutable side of a ``ShareStore``, which has one as ``store.slots``.

    All methods block on the disk. Call them through ``SlotQueue``, which keeps the order and the
    reactor's thread free.

    Args:
        directory_of: where the shares of a storage index lie; raises UsageError if that is none.
        incoming: where new files are made, on the same file system.
        clock: seconds since 1970.
        room_bytes: room for more, or None if unknown.
        read_only: make no new shares. Those that there are may be changed, and deleted.

    Attributes:
        node_id: 20 bytes, the server's tub id, noted in every container and lease.
    """

    def __init__(
        self,
        directory_of: Callable[[bytes], str],
        incoming: str,
        clock: Callable[[], float],
        room_bytes: Callable[[], int | None],
        read_only: bool,
        node_id: bytes,
    ) -> None:
        self.node_id = node_id
        self._directory_of = directory_of
        self._incoming = incoming
        self._clock = clock
        self._room_bytes = room_bytes
        self._read_only = read_only
        self._disk = Disk()

    def __repr__(self) -> str:
        return f"<Slots of {base32.encode(self.node_id)}>"

    # Reading and changing.

    def testv_and_readv_and_writev(
        self,
        storage_index: bytes,
        secrets: SlotSecrets,
        tw_vectors: Mapping[int, ShareChange],
        r_vector: Reads,
        durable: bool = True,
    ) -> SlotResult:
        """
        Test, read and write the shares of a slot, atomically.

        Args:
            r_vector: ``(offset, size)``, read from every share that there is, before anything is written.
            durable: sync what was written before returning.

        Raises:
            WrongSecret: the write enabler is not that of every share there. The text ends with
                ``The write enabler was recorded by nodeid '<base32>'.``
            UsageError: a share number or a vector that cannot be, or a write enabler that is not 32 bytes
                long where a share would be made.
            NoSpace: it would not fit; nothing was changed.
            ServerRefused: the disk failed, a container is damaged, or the answer would be too large.
        """
        _check_reads(r_vector)
        for number, change in tw_vectors.items():
            check_number(number)
            _check_change(change)
        with self._locked(storage_index, create=bool(tw_vectors)) as directory:
            if directory is None:
                return SlotResult(True, {})
            try:
                with _opened(directory, os.O_RDWR) as shares:
                    _check_write_enabler(shares, secrets.write_enabler)
                    success = all(
                        _passes(shares.get(number), change) for number, change in tw_vectors.items()
                    )
                    data = _read(shares, r_vector)
                    if success and tw_vectors:
                        change_slot = _SlotChange(self, storage_index, directory, shares, secrets)
                        change_slot.carry_out(tw_vectors, durable)
            finally:
                disk.remove_empty(directory)
            return SlotResult(success, data)

    def readv(
        self, storage_index: bytes, share_numbers: Collection[int], r_vector: Reads
    ) -> dict[int, tuple[bytes, ...]]:
        """
        Read from shares of a slot; no share numbers means all. Shares that are not there are left out.

        Raises:
            UsageError, ServerRefused: as above.
        """
        _check_reads(r_vector)
        with self._locked(storage_index, create=False) as directory:
            if directory is None:
                return {}
            wanted = frozenset(share_numbers) or None
            with _opened(directory, os.O_RDONLY, wanted) as shares:
                return _read(shares, r_vector)

    def list_shares(self, storage_index: bytes) -> frozenset[int]:
        """Return the numbers of the mutable shares."""
        directory = self._directory_of(storage_index)
        return frozenset(
            number
            for number in _numbers_in(directory)
            if slotfiles.is_mutable(f"{directory}/{number}")
        )

    def open_share(self, storage_index: bytes, share_number: int) -> ShareReader:
        """
        Open a share for reading. A long one may be changed while it is read.

        Raises:
            NoSuchShare: there is none.
            ServerRefused: there is one, but it is damaged.
        """
        check_number(share_number)
        share = slotfiles.open_file(f"{self._directory_of(storage_index)}/{share_number:d}")
        if share is None:
            raise NoSuchShare(
                f"there is no mutable share {share_number} of {base32.encode(storage_index)} here; "
                "use another server's"
            )
        name = f"the share {share.path!r}"
        return ShareReader(share.fd, share.data_bytes, name, containers.DATA_OFFSET)

    def add_lease(self, storage_index: bytes, secrets: LeaseSecrets) -> bool:
        """
        Add or renew a lease on all mutable shares; returns whether there are any.

        Raises:
            ServerRefused: the disk failed, or a container is damaged.
        """
        if not self.list_shares(storage_index):  # immutable ones need no lock
            return False
        with self._locked(storage_index, create=False) as directory:
            if directory is None:
                return False
            with _opened(directory, os.O_RDWR) as shares:
                for share in shares.values():
                    fresh = self._fresh_lease(share, secrets)
                    with _reported(f"renew the lease of {share.path!r}", share.path):
                        slotfiles.renew(share, fresh)
                return bool(shares)

    @contextmanager
    def _locked(self, storage_index: bytes, create: bool) -> Iterator[str | None]:
        """Hold the lock of a slot; gives its directory, or None if there is none."""
        directory = self._directory_of(storage_index)
        try:
            lock = slotfiles.lock_slot(directory, create)
        except OSError as error:
            raise disk.disk_error(error, f"lock the shares in {directory!r}") from error
        if lock is None:
            yield None
            return
        try:
            yield directory
        finally:
            os.close(lock)

    def _fresh_lease(
        self, share: SlotFile | None, secrets: LeaseSecrets
    ) -> containers.MutableLease:
        version = containers.WRITTEN_VERSION if share is None else share.header.version
        return containers.make_lease(version, secrets, self.node_id, self._clock())


class _SlotChange:
    """One read-test-write that has passed its tests; the slot is locked."""

    def __init__(
        self,
        slots: Slots,
        storage_index: bytes,
        directory: str,
        shares: dict[int, SlotFile],
        secrets: SlotSecrets,
    ) -> None:
        self._slots = slots
        self._name = base32.encode(storage_index)
        self._directory = directory
        self._shares = shares
        self._secrets = secrets
        self._copies: dict[int, tuple[int, str]] = {}
        self._in_place: list[int] = []

    def carry_out(self, changes: Mapping[int, ShareChange], durable: bool) -> None:
        """Change everything, or raise; see the module's text for what stands then."""
        deleted = sorted(n for n, each in changes.items() if each.new_length == 0)
        written = {n: changes[n] for n in sorted(changes) if n not in deleted}
        self._check_room(written)
        try:
            with _reported(f"write to the slot {self._name}", self._directory):
                for number, change in written.items():
                    if self._is_copied(number, change):
                        self._make_copy(number, change)
                if durable:
                    for fd, _ in self._copies.values():
                        os.fsync(fd)
                for number, (_, path) in self._copies.items():
                    os.rename(path, f"{self._directory}/{number:d}")
                for number, change in written.items():
                    if number not in self._copies:
                        self._change_in_place(number, change, durable)
                for number in deleted:
                    if number in self._shares:
                        disk.remove(f"{self._directory}/{number:d}")
                if durable:
                    self._sync_names()
        finally:
            for fd, path in self._copies.values():
                os.close(fd)
                with suppress(OSError):
                    disk.remove(path)

    def _check_room(self, changes: Mapping[int, ShareChange]) -> None:
        """Count what the files grow by; what copies take until they are renamed shows when they are made."""
        more = 0
        for number, change in changes.items():
            share = self._shares.get(number)
            if share is None:
                self._check_new(number)
                header = containers.MutableHeader(2, b"", b"", 0, containers.DATA_OFFSET)
                more += containers.EMPTY_BYTES
            else:
                header = share.header
            growth = containers.measure(header, change.writes, change.new_length)
            more += growth.extra_offset - header.extra_offset
        if not more:
            return
        room = self._slots._room_bytes()
        if room is not None and room < more:
            raise NoSpace(
                f"there is no room for {more} more bytes in the slot {self._name}; "
                "use another server"
            )

    def _check_new(self, number: int) -> None:
        if self._slots._read_only:
            raise NoSpace(
                f"this server takes no new shares, so not share {number} of {self._name}; "
                "use another server"
            )
        if len(self._secrets.write_enabler) != containers.WRITE_ENABLER_BYTES:
            raise UsageError("a write enabler is 32 bytes long; derive it from the write cap")
        if os.path.lexists(f"{self._directory}/{number:d}"):
            raise ServerRefused(
                f"share {number} of {self._name} is immutable; use another storage index"
            )

    def _is_copied(self, number: int, change: ShareChange) -> bool:
        share = self._shares.get(number)
        if share is None:
            return True
        length = change.new_length
        cuts = length is not None and length < share.header.data_bytes
        return (bool(change.writes) or cuts) and share.file_bytes <= COPY_LIMIT_BYTES

    def _make_copy(self, number: int, change: ShareChange) -> None:
        path = f"{self._slots._incoming}/{self._name}.{number:d}{COPY_SUFFIX}"
        fd = _open_new(path)
        self._copies[number] = fd, path
        share = self._shares.get(number)
        if share is None:
            content = containers.pack_empty(self._slots.node_id, self._secrets.write_enabler)
            header = containers.parse_header(content)
        else:
            content = slotfiles.read_all(share.fd, 0, share.file_bytes)
            header = share.header
        disk.write_all(fd, content, 0)
        fresh = self._slots._fresh_lease(share, self._secrets.lease)
        copy = SlotFile(fd, path, header, len(content))
        slotfiles.change_file(copy, change.writes, change.new_length, fresh)

    def _change_in_place(self, number: int, change: ShareChange, durable: bool) -> None:
        share = self._shares[number]
        fresh = self._slots._fresh_lease(share, self._secrets.lease)
        slotfiles.change_file(share, change.writes, change.new_length, fresh)
        if durable:
            os.fsync(share.fd)

    def _sync_names(self) -> None:
        """The slot's directory, and those above, which may be as new as it is."""
        outer = os.path.dirname(self._directory)
        top = () if self._shares else (outer, os.path.dirname(outer))
        self._slots._disk.sync_directories((self._directory, *top))


@contextmanager
def _reported(what: str, path: str) -> Iterator[None]:
    """Turn errors of the disk and of containers into ours."""
    try:
        yield
    except OSError as error:
        raise disk.disk_error(error, what) from error
    except ValueError as error:
        raise slotfiles.damaged(path, error) from error


@contextmanager
def _opened(
    directory: str, flags: int, wanted: frozenset[int] | None = None
) -> Iterator[dict[int, SlotFile]]:
    """Open the mutable shares in a directory, or those that are wanted."""
    shares: dict[int, SlotFile] = {}
    with ExitStack() as stack:
        for number in sorted(_numbers_in(directory)):
            if wanted is None or number in wanted:
                share = slotfiles.open_file(f"{directory}/{number}", flags)
                if share is not None:
                    stack.callback(share.close)
                    shares[number] = share
        yield shares


def _numbers_in(directory: str) -> list[int]:
    try:
        with os.scandir(directory) as entries:
            return [
                SHARE_NUMBERS[entry.name]
                for entry in entries
                if entry.name in SHARE_NUMBERS and entry.is_file(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk.disk_error(error, f"list the shares in {directory!r}") from error


def _open_new(path: str) -> int:
    """Make a file, or empty one that somebody left who was killed; the slot is locked."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags, 0o666)


def _check_write_enabler(shares: Mapping[int, SlotFile], write_enabler: bytes) -> None:
    for share in shares.values():
        header = share.header
        if not hmac.compare_digest(header.write_enabler, write_enabler):
            raise WrongSecret(
                "these shares are written with another write enabler. The write enabler was "
                f"recorded by nodeid '{base32.encode(header.node_id)}'."
            )


def _passes(share: SlotFile | None, change: ShareChange) -> bool:
    if share is None:
        return not any(specimen for _, _, specimen in change.tests)
    with _reported(f"read the share {share.path!r}", share.path):
        return all(share.equals(*test) for test in change.tests)


def _read(shares: Mapping[int, SlotFile], reads: Reads) -> dict[int, tuple[bytes, ...]]:
    total = sum(share.cut(*each) for share in shares.values() for each in reads)
    if total > MAX_READ_BYTES:
        raise ServerRefused(
            f"an answer of {total} bytes is too large, {MAX_READ_BYTES} are allowed; read in parts"
        )
    data = {}
    for number, share in shares.items():
        with _reported(f"read the share {share.path!r}", share.path):
            data[number] = tuple(share.read(*each) for each in reads)
    return data


def _check_reads(reads: Reads) -> None:
    if len(reads) > MAX_VECTORS:
        raise UsageError(f"{len(reads)} reads at once, where {MAX_VECTORS} are allowed; ask twice")
    for offset, size in reads:
        if offset < 0 or size < 0:
            raise UsageError(f"a read of {size} bytes at {offset}; both must be 0 or more")


def _check_change(change: ShareChange) -> None:
    if len(change.tests) > MAX_VECTORS:
        raise UsageError(f"{len(change.tests)} tests, where {MAX_VECTORS} are allowed; send fewer")
    for offset, size, _ in change.tests:
        if offset < 0 or size < 0:
            raise UsageError(f"a test of {size} bytes at {offset}; both must be 0 or more")
    for offset, data in change.writes:
        if offset < 0 or offset + len(data) > MAX_MUTABLE_SHARE_BYTES:
            raise UsageError(
                f"a write of {len(data)} bytes at {offset}; a mutable share has at most "
                f"{MAX_MUTABLE_SHARE_BYTES}"
            )
    if change.new_length is not None and change.new_length < 0:
        raise UsageError(f"a share cannot be {change.new_length} bytes long; give 0 or more")
