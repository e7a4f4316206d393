"""
The mutable shares of a storage directory: reading them, and the atomic read-test-write.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager

import attrs

from pipegrid.core import base32
from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.durability import Disk
from pipegrid.errors import (
    NoSpace,
    NoSuchShare,
    Overloaded,
    QuotaReached,
    ServerRefused,
    UsageError,
    WrongSecret,
)
from pipegrid.storage.mutable import slot_file
from pipegrid.storage.mutable.slot_change import SlotChange
from pipegrid.storage.mutable.slot_file import SlotFile
from pipegrid.storage.share_file import NEVER_S, HasRoom
from pipegrid.storage.share_reader import ShareReader, list_numbers
from pipegrid.storage.space_quota import SpaceChange, file_bytes
from pipegrid.storage.storage_paths import check_number
from pipegrid.wire.gbs_cbor_bodies import MAX_MUTABLE_SHARE_BYTES
from pipegrid.wire.storage_messages import (
    MAX_CALL_VECTORS,
    LeaseSecrets,
    Reads,
    Released,
    ShareChange,
    SlotResult,
    SlotSecrets,
)

MAX_READ_BYTES = 64 << 20
"""Maximum number of bytes in one response, which is held in memory, even if a read vector repeats a range."""
MAX_READS = 4096
"""The maximum number of reads in one vector; clients send one or two for each share."""


@attrs.define(eq=False, repr=False)
class Slots:
    """
    The mutable shares of a ``ShareStore``, available as ``store.slots``.

    All methods block on the disk. Call them through ``SlotQueue``, which keeps the order and runs them
    outside the reactor thread. Changes are atomic in two senses. The slot is locked, so other threads and
    processes see the state before or after a change. And a crash leaves each share of at most 4 MiB in its
    old or its new state (``SlotChange``).

    Args:
        directory_of: returns the directory with the shares of a storage index.
        incoming: the directory in which new files are created, on the same file system.
        clock: seconds since 1970.
        has_space: takes a number of bytes; returns whether that many more fit on the disk.
        change: takes a storage index, paths of share files, and the number of a named client. Returns a
            ``SpaceChange``, which counts the change of these files and limits their growth.
        serial: returns a context manager, which is entered for everything that is done with the shares of a
            storage index.
        read_only: create no new shares. Existing shares may be changed and deleted.

    Attributes:
        node_id: 20 bytes, stored in every container and lease; the server sets it to its tub id.
        incoming, has_space, read_only: see the arguments.
        disk: syncs directories.
    """

    _directory_of: Callable[[bytes], str]
    incoming: str
    _clock: Callable[[], float]
    has_space: HasRoom
    _change: Callable[[bytes, Collection[str], int], SpaceChange]
    _serial: Callable[[bytes], AbstractContextManager[None]]
    read_only: bool
    node_id: bytes = bytes(slot_file.NODE_ID_BYTES)
    disk: Disk = attrs.field(factory=Disk)

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
        may_read: Callable[[int], bool] = lambda _: True,
    ) -> SlotResult:
        """
        Test, read and write the shares of a slot, atomically.

        Args:
            r_vector: ``(offset, size)`` pairs, which are read from every existing share before anything is
                written.
            durable: sync what was written before returning.
            may_read: takes a number of bytes; returns whether that many may be read into memory.

        Raises:
            WrongSecret: an existing share has another write enabler. The text ends with ``The write enabler
                was recorded by nodeid '<base32>'.``
            UsageError: an impossible share number or vector, or a new share with a write enabler that is not
                32 bytes long.
            NoSpace: the change would not fit; nothing was changed.
            Overloaded: other reads use too much memory now; nothing was changed.
            ServerRefused: the disk failed, a container is damaged, or the response would be too large.
        """
        _check_reads(r_vector)
        for number, change in tw_vectors.items():
            check_number(number)
            _check_change(change)
        vectors = sum(len(each.tests) + len(each.writes) for each in tw_vectors.values())
        if vectors > MAX_CALL_VECTORS:
            raise UsageError(
                f"{vectors} tests and writes at once, where {MAX_CALL_VECTORS} are allowed; send fewer"
            )
        with self._locked(storage_index, create=bool(tw_vectors)) as directory:
            if directory is None:
                return SlotResult(True, {})
            try:
                with _opened(directory, os.O_RDWR) as shares:
                    _check_write_enabler(shares, secrets.write_enabler)
                    success = all(
                        _passes(shares.get(number), change) for number, change in tw_vectors.items()
                    )
                    data = _read(shares, r_vector, may_read)
                    if success and tw_vectors:
                        call = storage_index, directory, shares, secrets
                        self._carry_out(*call, tw_vectors, durable)
            finally:
                disk.remove_empty(directory)
            return SlotResult(success, data)

    def _carry_out(
        self,
        storage_index: bytes,
        directory: str,
        shares: dict[int, SlotFile],
        secrets: SlotSecrets,
        changes: Mapping[int, ShareChange],
        durable: bool,
    ) -> None:
        """Carry out a change, and count by how much the shares grow, even if the change fails midway."""
        before = sum(shares[number].file_bytes for number in changes if number in shares)
        paths = [f"{directory}/{number:d}" for number in changes]
        with self._change(storage_index, paths, secrets.lease.owner) as space:
            name = base32.encode(storage_index)
            change = SlotChange(self, name, directory, shares, secrets, space.has_space)
            try:
                if secrets.lease.owner:
                    kept = (
                        n for n, each in changes.items() if n in shares and each.new_length != 0
                    )
                    self._check_holder([shares[number] for number in kept], secrets.lease, space)
                change.carry_out(changes, durable)
            finally:
                if space.counts:
                    # An immutable share may have the same number. It does not change, so it does not count.
                    after = sum(
                        file_bytes(each) for each in paths if slot_file.is_mutable_file(each)
                    )
                    space.grew(after - before)

    def readv(
        self, storage_index: bytes, share_numbers: Collection[int], r_vector: Reads
    ) -> dict[int, tuple[bytes, ...]]:
        """
        Read from shares of a slot. An empty ``share_numbers`` means all shares. Missing shares are left out.

        Raises:
            UsageError, ServerRefused: as ``testv_and_readv_and_writev``.
        """
        _check_reads(r_vector)
        with self._locked(storage_index, create=False) as directory:
            if directory is None:
                return {}
            wanted = frozenset(share_numbers) or None
            with _opened(directory, os.O_RDONLY, wanted) as shares:
                return _read(shares, r_vector)

    def list_shares(self, storage_index: bytes) -> frozenset[int]:
        """Return the numbers of the mutable shares of a storage index."""
        directory = self._directory_of(storage_index)
        return list_numbers(directory, slot_file.is_mutable_file) or frozenset()

    def open_share(self, storage_index: bytes, share_number: int) -> ShareReader:
        """
        Open a share for reading. A long share may be changed while it is read.

        Raises:
            NoSuchShare: the share does not exist.
            ServerRefused: the share is damaged.
        """
        check_number(share_number)
        share = slot_file.open_file(f"{self._directory_of(storage_index)}/{share_number:d}")
        if share is None:
            raise NoSuchShare(
                f"there is no mutable share {share_number} of {base32.encode(storage_index)} here; "
                "use another server's"
            )
        name = f"the share {share.path!r}"
        return ShareReader(share.fd, share.data_bytes, name, slot_file.DATA_OFFSET)

    def add_lease(self, storage_index: bytes, secrets: LeaseSecrets) -> bool:
        """
        Add or renew a lease on all mutable shares of a storage index. Return whether there are any.

        Raises:
            NoSpace: there is no space for one more lease, on the disk or on a share.
            ServerRefused: the disk failed, or a container is damaged.
        """
        if not self.list_shares(storage_index):  # a slot without mutable shares needs no lock
            return False
        found = False
        failed: ServerRefused | None = None
        with self._locked(storage_index, create=False) as directory:
            for number in sorted(list_numbers(directory) or ()) if directory is not None else ():
                try:
                    found |= self._renew(storage_index, f"{directory}/{number}", secrets)
                except QuotaReached as error:  # noqa: PERF203
                    failed = failed or error  # a renewal may need no space
                except NoSpace:
                    raise  # ends the call, as in ``ShareStore.add_lease``
                except ServerRefused as error:  # the other leases would expire
                    failed = failed or error
        if failed is not None:
            raise failed
        return found

    def _renew(self, storage_index: bytes, path: str, secrets: LeaseSecrets) -> bool:
        share = slot_file.open_file(path, os.O_RDWR)
        if share is None:
            return False
        with (
            closing(share),
            self._change(storage_index, (path,), secrets.owner) as space,
            slot_file.reported(f"renew the lease of {path!r}", path),
        ):
            try:
                if secrets.owner:
                    self._check_holder([share], secrets, space)
                slot_file.renew(share, self.fresh_lease(share, secrets), space.has_lease_space)
            finally:
                if space.counts:
                    space.grew(os.fstat(share.fd).st_size - share.file_bytes)
        return True

    def release_lease(self, storage_index: bytes, cancel_secret: bytes, since: int) -> Released:
        """
        Release the leases with a cancel secret on all mutable shares, and remove shares that have no lease
        left. Return what was released.

        Args:
            since: see ``share_file.release_lease``.

        Raises:
            ServerRefused: the disk failed, or a container is damaged.
        """
        done = Released()
        if not self.list_shares(storage_index):  # a slot without mutable shares needs no lock
            return done
        with self._locked(storage_index, create=False) as directory:
            for number in sorted(list_numbers(directory) or ()) if directory is not None else ():
                path = f"{directory}/{number}"
                share = slot_file.open_file(path, os.O_RDWR)
                if share is None:
                    continue
                with (
                    closing(share),
                    self._change(storage_index, (path,), 0) as space,
                    slot_file.reported(f"release the lease of {path!r}", path),
                ):
                    one = slot_file.release(share, cancel_secret, since)
                    space.grew(-one.freed_bytes)
                done = done.plus(one)
            if directory is not None:
                disk.remove_empty(directory)
        return done

    def _check_holder(
        self, shares: Sequence[SlotFile], lease: LeaseSecrets, space: SpaceChange
    ) -> None:
        """
        Raise NoSpace if a share would get a lease of a named client whose quota has no space for the share.
        """
        for share in shares:
            with slot_file.reported(f"read the leases of {share.path!r}", share.path):
                until = slot_file.held_until(share, self.fresh_lease(share, lease))
            is_new, now = until is None, min(self._clock(), NEVER_S)
            if (until is None or until < now) and not space.may_hold(is_new):
                raise NoSpace(
                    f"there is no space for the share {share.path!r} in the client's quota"
                )

    def fresh_lease(self, share: SlotFile | None, secrets: LeaseSecrets) -> slot_file.MutableLease:
        """
        Return a lease that starts now, to be added to a share, or to renew the share's lease with the same
        secrets. ``share`` is None if it does not exist yet.
        """
        version = slot_file.WRITTEN_VERSION if share is None else share.header.version
        return slot_file.make_lease(version, secrets, self.node_id, self._clock())

    @contextmanager
    def _locked(self, storage_index: bytes, create: bool) -> Iterator[str | None]:
        """Hold the lock of a slot. Yield the slot's directory, or None if the directory does not exist."""
        directory = self._directory_of(storage_index)
        with self._serial(storage_index):
            try:
                lock = slot_file.lock_slot(directory, create)
            except OSError as error:
                raise disk.disk_error(error, f"lock the shares in {directory!r}") from error
            if lock is None:
                yield None
                return
            try:
                yield directory
            finally:
                os.close(lock)


@contextmanager
def _opened(
    directory: str, flags: int, wanted: frozenset[int] | None = None
) -> Iterator[dict[int, SlotFile]]:
    """Open the mutable shares in a directory; with ``wanted``, only those with these numbers."""
    shares: dict[int, SlotFile] = {}
    with ExitStack() as stack:
        for number in sorted(list_numbers(directory) or ()):
            if wanted is None or number in wanted:
                share = slot_file.open_file(f"{directory}/{number}", flags)
                if share is not None:
                    stack.callback(share.close)
                    shares[number] = share
        yield shares


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
    with slot_file.reported(f"read the share {share.path!r}", share.path):
        return all(share.equals(*test) for test in change.tests)


def _read(
    shares: Mapping[int, SlotFile], reads: Reads, may_read: Callable[[int], bool] = lambda _: True
) -> dict[int, tuple[bytes, ...]]:
    total = sum(share.cut(*each) for share in shares.values() for each in reads)
    if total > MAX_READ_BYTES:
        raise ServerRefused(
            f"an answer of {total} bytes is too large, {MAX_READ_BYTES} are allowed; read in parts"
        )
    if not may_read(total):
        raise Overloaded("other clients are reading too much at the moment; try again later")
    data = {}
    for number, share in shares.items():
        with slot_file.reported(f"read the share {share.path!r}", share.path):
            data[number] = tuple(share.read(*each) for each in reads)
    return data


def _check_reads(reads: Reads) -> None:
    if len(reads) > MAX_READS:
        raise UsageError(
            f"{len(reads)} reads at once, where {MAX_READS} are allowed; send several requests"
        )
    for offset, size in reads:
        if offset < 0 or size < 0:
            raise UsageError(f"a read of {size} bytes at {offset}; both must be 0 or more")


def _check_change(change: ShareChange) -> None:
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
