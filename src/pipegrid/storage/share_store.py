"""
``ShareStore``: the shares, free space and advisories of one storage directory.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import attrs
from twisted.logger import Logger

from pipegrid.core import base32, clamped_dates
from pipegrid.core.text import harmless
from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.private_files import PRIVATE_FILE, make_private
from pipegrid.errors import NoSpace, NoSuchShare, QuotaReached, ServerRefused, UsageError
from pipegrid.storage import garbage_collector, share_file
from pipegrid.storage.client_space import ClientUsage
from pipegrid.storage.mutable import slot_file as slotfiles
from pipegrid.storage.mutable.slots import Slots
from pipegrid.storage.share_file import Expiry
from pipegrid.storage.share_reader import ShareReader, holds_share, list_numbers, open_reader
from pipegrid.storage.space_quota import SpaceChange, SpaceUsage, storage_index_of
from pipegrid.storage.storage_paths import Paths, check_key, check_number
from pipegrid.storage.uploads.eviction import NOBODY, Client, UploadDemand
from pipegrid.storage.uploads.incoming_share import IncomingShare
from pipegrid.storage.uploads.upload_registry import UnfinishedUploads
from pipegrid.version import __version__
from pipegrid.wire.storage_messages import (
    Allocation,
    LeaseSecrets,
    Released,
    ServerVersion,
    UploadSecrets,
)

_PLENTY_BYTES = 1 << 30

log = Logger()


@attrs.define(eq=False, repr=False)
class FreeSpace:
    """
    The free space on the disk of one directory; the disk is queried only as often as needed.

    Args:
        path: the directory that holds shares.
        clock: seconds since 1970.
        free: takes a path; returns the free space on its disk in bytes, or None if unknown.
    """

    _path: str
    _clock: Callable[[], float]
    _free: Callable[[str], int | None]
    _plenty_at: int = -1  # the second of the last query
    _plenty_bytes: int = 0  # its result

    def free_bytes(self) -> int | None:
        """
        Return how many bytes are free now, or None if unknown.

        Raises:
            ServerRefused: the storage directory is not a directory.
        """
        try:
            return self._free(self._path)
        except OSError as error:
            what = f"use the storage directory {os.path.dirname(self._path)!r}"
            raise disk.disk_error(error, what) from error

    def missing_bytes(
        self, wanted: int, allocated: int, promised: Callable[[], int], fresh: bool = False
    ) -> int:
        """
        Return how many bytes of space are missing; 0 if none are, or if the free space is unknown.

        Args:
            wanted: the bytes to store, plus the bytes that must stay free.
            allocated: the total length of unfinished uploads, including bytes that have arrived.
            promised: returns how many bytes of unfinished uploads are still to arrive; called only if the
                space may be short.
            fresh: query the disk in any case. Otherwise it is queried at most once a second while there is
                enough space.
        """
        needed = wanted + allocated
        second = int(self._clock())
        if not fresh and second == self._plenty_at and self._plenty_bytes > needed + _PLENTY_BYTES:
            return 0
        free = self.free_bytes()
        self._plenty_at, self._plenty_bytes = second, free or 0
        if free is None or free >= needed:
            return 0
        return max(0, wanted + promised() - free)


# Advisories are kept for the operator, one file each, as Tahoe-LAFS's servers do. At most 1000 advisories of
# at most 32768 bytes each are kept, so that they do not fill the disk.

MAX_ADVISORIES = 1000
MAX_REASON_BYTES = 32768


class Advisories:
    """
    The advisories in one directory, which is created if it is missing.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, directory: str, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._clock = clock
        self._full_minute: int | None = None  # the last minute with too many advisories

    def keep(self, storage_index: bytes, share_number: int, reason: str, mutable: bool) -> bool:
        """
        Write an advisory, unless there are too many already. Return whether it was written.

        While there are too many, they are counted again only once a minute.

        Raises:
            ServerRefused: the disk failed.
        """
        now = self._clock()
        minute = int(now // 60)
        if minute == self._full_minute:
            return False
        kind = "mutable" if mutable else "immutable"
        index = base32.encode(storage_index)
        when = clamped_dates.utc(now)
        path = f"{self._directory}/{when:%Y-%m-%dT%H%M%S.%f}--{index}-{share_number}"
        try:
            make_private(self._directory)
            if len(os.listdir(self._directory)) >= MAX_ADVISORIES:
                self._full_minute = minute
                return False
            # The operator may show the file in a terminal, so control characters are escaped.
            safe = harmless(reason[:MAX_REASON_BYTES]).encode("utf-8", "replace")
            text = safe[:MAX_REASON_BYTES].decode("utf-8", "ignore")
            with suppress(FileExistsError):
                _make(
                    path,
                    f"time: {when:%Y-%m-%dT%H:%M:%S}Z\nshare type: {kind}\n"
                    f"storage index: {index}\nshare number: {share_number}\n\n{text}\n",
                )
        except OSError as error:
            raise disk.disk_error(error, f"keep an advisory in {self._directory!r}") from error
        return True


def _make(path: str, text: str) -> None:
    """Create a file with this text; if the disk is full, remove the file again."""
    with open(path, "x", encoding="utf-8", opener=_open_private) as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            os.unlink(path)
            raise


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)


#     shares/<2 characters>/<storage index>/<share number>             complete shares
#     shares/incoming/<storage index>.<share number>                   unfinished uploads
#     corruption-advisories/<time>--<storage index>-<share number>     advisories
#
# Files with other names and symbolic links are ignored. ``incoming`` is one flat directory, unlike that of
# Tahoe-LAFS, which empties its ``incoming`` when it starts. Creating and removing a directory for each
# unfinished upload would cost more than all other work: ext4 does not reuse an inode that was freed in the
# last seconds, and creating a file searches past all such inodes.

KEEP_UNFINISHED_S = 7 * 86400.0
WORTHLESS_AFTER_S = 30 * 60.0
"""
How long an upload without a note is kept after its last write. It cannot be resumed, since nothing records
which bytes have arrived. Uploads of Tahoe-LAFS are of this kind.
"""
DEFAULT_EXPIRY = Expiry()


@attrs.frozen
class StoreSettings:
    """
    What a store accepts, and how much of it.

    Attributes:
        reserved_bytes: the space on the disk that shares must leave free.
        quota_bytes: the maximum for the files of complete shares and unfinished uploads; None for no quota. A
            store with a quota accepts nothing before ``usage`` is opened.
        read_only: accept no new shares. Leases are renewed and existing mutable shares are changed
            nevertheless.
        max_open_uploads: how many unfinished uploads may have their files open. The files of further uploads
            are closed, the longest unused first, and opened again for their next write. Complete uploads that
            wait to become durable stay open and are not counted: the caller limits them.
        max_uploads: the maximum number of unfinished uploads. Beyond it some are evicted, or an allocation is
            rejected.
        keep_unfinished_s: an unfinished upload is given up this many seconds after its last write, unless it
            was evicted before.
    """

    reserved_bytes: int = 0
    quota_bytes: int | None = None
    read_only: bool = False
    max_open_uploads: int = 64
    max_uploads: int = 4096
    keep_unfinished_s: float = KEEP_UNFINISHED_S


class ShareStore:
    """
    Shares, leases and unfinished uploads of one storage directory, in the on-disk format of Tahoe-LAFS.

    Methods block on the disk and on nothing else: call them from a thread, or directly where they are fast.
    Several threads may use a store. Several processes may use a directory, each with its own store. Creating
    the object does not access the disk; directories are created when needed.

    Args:
        root: the storage directory.
        clock: seconds since 1970, for abandoned uploads; and for leases, unless ``date`` is given.
        free_bytes: takes a path; returns the space on its disk, or None if unknown.
        boot_id: returns 16 bytes that change whenever the machine starts.

    Attributes:
        slots: the mutable shares; everything else in the store is for immutable shares, unless stated
            otherwise.
        usage: how much of the quota is used; None if there is no quota.
        clients: how much of its own quota each named client uses.

    Raises, in all methods:
        UsageError: a storage index is not 16 bytes long, or a share number is not 0 to 255.
        ServerRefused: the disk failed.
    """

    def __init__(
        self,
        root: Path,
        settings: StoreSettings | None = None,
        *,
        clock: Callable[[], float],
        date: Callable[[], float] | None = None,
        free_bytes: Callable[[str], int | None] = disk.free_bytes,
        boot_id: Callable[[], bytes] = disk.read_boot_id,
    ) -> None:
        settings = settings or StoreSettings()
        self.root = root
        self.reserved_bytes = settings.reserved_bytes
        self.read_only = settings.read_only
        self.keep_unfinished_s = settings.keep_unfinished_s
        self._paths = Paths(root)
        self._clock, self._date = clock, date or clock
        self._room = FreeSpace(self._paths.shares, clock, free_bytes)
        self._advisories = Advisories(self._paths.advisories, clock)
        self.clients = ClientUsage(
            self._paths, lambda number: self._unfinished.client_bytes[number], clock
        )
        self.usage: SpaceUsage | None = None
        if settings.quota_bytes is not None:
            self.usage = SpaceUsage(
                root, settings.quota_bytes, lambda: self._unfinished.file_bytes, clock, boot_id
            )
        self._unfinished = UnfinishedUploads(
            self._paths,
            clock,
            self._date,
            self._missing_bytes,
            settings.max_open_uploads,
            settings.max_uploads,
            boot_id,
            self.clients,
            self.usage,
        )
        self.slots = Slots(
            self._paths.directory,
            self._paths.incoming,
            self._date,
            self._fits,
            self._change,
            self.clients.serial,
            settings.read_only,
        )

    def __repr__(self) -> str:
        return f"<ShareStore {str(self.root)!r}, {len(self._unfinished)} unfinished uploads>"

    @property
    def upload_count(self) -> int:
        """The number of unfinished uploads of this store."""
        return len(self._unfinished)

    # Space.

    def available_bytes(self, owner: int = 0) -> int | None:
        """
        Return how many bytes of further shares fit, or None if unknown; 0 if the store is read-only.

        Args:
            owner: the number of a named client; 0 for other clients.

        Raises:
            ServerRefused: the storage directory is not a directory.
        """
        if self.read_only:
            return 0
        rooms = self._available_bytes(), self.clients.left_bytes(owner)
        return min((each for each in rooms if each is not None), default=None)

    def _available_bytes(self) -> int | None:
        (remaining_bytes, file_bytes), free = self._unfinished.kept(), self._room.free_bytes()
        if free is not None:
            free = max(0, free - self.reserved_bytes - remaining_bytes)
        if self.usage is None:
            return free
        # The container is subtracted, so that a share of exactly the returned size fits.
        left = max(0, self.usage.room_bytes(file_bytes) - share_file.container_bytes(0))
        return left if free is None else min(free, left)

    def quota_refuses(self, share_bytes: int, owner: int = 0) -> bool:
        """
        Return whether a quota, of the server or of a named client, has no space for a share. False if the
        store is read-only.
        """
        if self.read_only:
            return False
        usage, size = self.usage, share_file.container_bytes(share_bytes)
        refuses = usage is not None and usage.missing(size) > 0
        return refuses or self.clients.missing(owner, size) > 0

    def _change(self, storage_index: bytes, paths: Collection[str], owner: int = 0) -> SpaceChange:
        """Return a context manager that counts a change of share files of a storage index."""
        client = self.clients.changing(storage_index, paths, owner)
        return SpaceChange(self.usage, storage_index, self._fits, self._make_room, client)

    def _make_room(self, missing_bytes: int) -> bool:
        """
        Evict uploads to free the space that mutable shares and leases lack; return whether it is enough.
        """
        return self._unfinished.make_space(NOBODY, UploadDemand(0, 0, 0, missing_bytes))

    def _missing_bytes(self, more_bytes: int, fresh: bool = False) -> int:
        """Return how much space is missing for more bytes; see ``FreeSpace.missing_bytes``."""
        wanted, there = self.reserved_bytes + more_bytes, self._unfinished
        promised = there.remaining_bytes
        return self._room.missing_bytes(wanted, there.allocated_bytes, promised, fresh)

    def _fits(self, more_bytes: int) -> bool:
        """
        Return whether the disk has space for more bytes of mutable shares and leases. Evict uploads if
        necessary.
        """
        missing = self._missing_bytes(more_bytes, fresh=True)
        return not missing or self._make_room(missing)

    def version(self, owner: int = 0) -> ServerVersion:
        """
        Return what the server reports about itself to a named client (``owner``), or to other clients (0).
        """
        room = self.available_bytes(owner)
        if not disk.is_writable(self._paths.shares):
            room = 0
        most = share_file.MAX_SHARE_BYTES
        largest = most if room is None else min(room, most)
        return ServerVersion(largest, room, f"pipegrid/{__version__}")

    # Writing.

    def allocate(
        self,
        storage_index: bytes,
        share_numbers: AbstractSet[int],
        share_bytes: int,
        secrets: UploadSecrets,
        client: Client = NOBODY,
    ) -> Allocation:
        """
        Allocate space for shares of exactly ``share_bytes`` bytes. Renew the leases of all shares that exist
        already.

        Shares that are rejected, for lack of space or because another client is uploading them, are in
        neither set of the result.

        Args:
            client: the uploader. By default this process itself, which is limited only by the disk.
        """
        steps = self.allocate_in_steps(storage_index, share_numbers, share_bytes, secrets, client)
        while True:
            try:
                next(steps)
            except StopIteration as done:  # noqa: PERF203
                allocation: Allocation = done.value
                return allocation

    def allocate_in_steps(
        self,
        storage_index: bytes,
        share_numbers: AbstractSet[int],
        share_bytes: int,
        secrets: UploadSecrets,
        client: Client = NOBODY,
    ) -> Generator[None, None, Allocation]:
        """
        Do the same as ``allocate``, in steps of one share each: creating the file of a share takes a tenth of
        a millisecond or more.

        Shares that other clients finish between the steps are not allocated.
        """
        for number in share_numbers:
            check_number(number)
        if share_bytes < 0:
            raise UsageError(f"a share cannot be {share_bytes} bytes long; allocate 0 or more")
        with self._unfinished.allocate_lock:
            # A file that is not readable as a share must not count as existing, or the uploader would have
            # one share too few.
            there = self._list_shares(storage_index, holds_share)
            have = frozenset(
                number for number in there or () if self._leased(storage_index, number, secrets)
            )
        wanted = [] if self.read_only else sorted(share_numbers - have)
        allocated: set[int] = set()
        new_index = there is None
        for number in wanted:
            if number != wanted[0]:
                yield
                new_index = False  # only a hint: the directory may still be missing
            call = storage_index, number, share_bytes, secrets, new_index, client
            with self._unfinished.allocate_lock:
                if self._unfinished.allocate(*call):
                    allocated.add(number)
        return Allocation(have, frozenset(allocated))

    def _leased(self, storage_index: bytes, number: int, secrets: UploadSecrets) -> bool:
        """
        Renew the lease on an existing share. Return whether the share counts as existing for the client.
        """
        # A share counts even if its lease cannot be renewed (disk mounted read-only, no space).
        with suppress(OSError, ValueError, NoSpace):
            try:
                return self._renew(storage_index, number, share_file.OWNER_ALLOCATE, secrets.lease)
            except QuotaReached:
                # Without its own lease, a named client must not rely on another client's share, which exists
                # only as long as that client's lease.
                return not secrets.lease.owner
        return True

    def take_whole(
        self, storage_index: bytes, share_number: int, data: bytes, secrets: UploadSecrets
    ) -> IncomingShare | None:
        """
        Store a new share in one call instead of ``allocate`` and a write; the upload is then complete.

        Return None if this is not possible; then nothing has been changed.
        """
        if self.read_only or not data:
            return None
        with self._unfinished.allocate_lock:
            return self._unfinished.take_whole(storage_index, share_number, data, secrets)

    def upload(
        self, storage_index: bytes, share_number: int, upload_secret: bytes, client: Client = NOBODY
    ) -> IncomingShare:
        """
        Return an unfinished upload to write to. It may belong to this process, or have been left by a dead
        one.

        Args:
            client: the client that writes.

        Raises:
            NoSuchShare: the upload does not exist.
            WrongSecret: the upload has another secret, or another process is writing it.
            QuotaReached: an earlier process left the upload, and a quota has no space for it now.
        """
        return self._unfinished.upload(storage_index, share_number, upload_secret, client)

    def abort(self, storage_index: bytes, share_number: int, upload_secret: bytes) -> None:
        """
        Remove an unfinished upload.

        Raises:
            NoSuchShare: the upload does not exist, or all of its bytes have arrived.
            WrongSecret: see ``upload``.
        """
        self._unfinished.abort(storage_index, share_number, upload_secret)

    # Reading.

    def list_shares(self, storage_index: bytes) -> frozenset[int]:
        """
        Return the numbers of all complete immutable shares.

        Damaged shares are included, so that a verifier can report them. In ``allocate``, a file that is empty
        after a power cut, or that this process cannot read, does not count as a share; it is not replaced
        either.
        """
        return self._list_shares(storage_index, _is_immutable) or frozenset()

    def _list_shares(
        self, storage_index: bytes, counts: Callable[[str], bool]
    ) -> frozenset[int] | None:
        """
        Return the numbers of the shares that count, or None if their directory does not exist; see
        ``list_numbers``.
        """
        directory = self._paths.directory(storage_index)
        # Usually the directory does not exist. The exception of scandir would take longer than this check.
        return list_numbers(directory, counts) if os.access(directory, os.F_OK) else None

    def open_share(self, storage_index: bytes, share_number: int) -> ShareReader:
        """
        Open a complete share for reading.

        Raises:
            NoSuchShare: the share does not exist.
            ServerRefused: the share is damaged.
        """
        reader = open_reader(self._paths.final(*check_key(storage_index, share_number)))
        if reader is None:
            raise NoSuchShare(
                f"there is no share {share_number} of {base32.encode(storage_index)} here; "
                "use another server's"
            )
        return reader

    # Leases and advisories.

    def add_lease(self, storage_index: bytes, secrets: LeaseSecrets) -> None:
        """
        Add or renew a lease on every share of the storage index, immutable or mutable.

        If a share is damaged, or a quota refuses a lease, the other shares still get their leases, without
        which they would expire; the error is raised afterwards. But a share with the maximum number of leases
        ends the call at once: otherwise a client that fills shares with leases would make each further
        request read all these leases.

        Raises:
            NoSuchShare: the storage index has no shares.
            NoSpace: there is no space for one more lease, on the disk or on a share.
        """
        found = False
        failed: ServerRefused | None = None
        try:
            found = self.slots.add_lease(storage_index, secrets)
        except ServerRefused as error:
            # A share with the maximum number of leases ends the call.
            if isinstance(error, NoSpace) and not isinstance(error, QuotaReached):
                raise
            failed = error
        there = self._list_shares(storage_index, _is_immutable)
        for number in sorted(there or ()):
            path = self._paths.final(storage_index, number)
            try:
                found |= self._renew(storage_index, number, share_file.OWNER_ADD_LEASE, secrets)
            except QuotaReached as error:
                failed = failed or error  # a renewal may need no space
            except OSError as error:
                failed = failed or disk.disk_error(error, f"renew the lease of {path!r}")
            except ValueError as error:
                what = f"cannot renew the lease of {path!r}: {error}; use another server's share"
                failed = failed or ServerRefused(what)
        if failed is not None:
            raise failed
        if not found:
            raise NoSuchShare(
                f"there are no shares of {base32.encode(storage_index)}; upload them first"
            )

    def release_lease(self, storage_index: bytes, cancel_secret: bytes, since: int) -> Released:
        """
        Release the leases with a cancel secret on all shares of the storage index, immutable or mutable.
        Remove shares that have no lease left, and count their space as free.

        Shares are removed even if the operator's settings keep shares with expired leases, since the last
        client with a lease has given the share up. A share that never had a lease, or whose other leases may
        be lost, is kept.

        Args:
            cancel_secret: 32 bytes.
            since: seconds since 1970. On a share with such a lease that was made or renewed at this time or
                later, nothing is released.

        Raises:
            ServerRefused: the disk failed, or a share is damaged; leases on the other shares are released
                nevertheless.
        """
        failed: ServerRefused | None = None
        done = Released()
        try:
            done = self.slots.release_lease(storage_index, cancel_secret, since)
        except ServerRefused as error:
            failed = error
        directory = self._paths.directory(storage_index)
        for number in sorted(self._list_shares(storage_index, _is_immutable) or ()):
            path = self._paths.final(storage_index, number)
            try:
                with self._change(storage_index, (path,)) as space:
                    one = share_file.release_lease(path, cancel_secret, since)
                    space.grew(-one.freed_bytes)
                done = done.plus(one)
            except OSError as error:
                failed = failed or disk.disk_error(error, f"release the lease of {path!r}")
            except ValueError as error:
                what = f"cannot release the lease of {path!r}: {error}; remove that share"
                failed = failed or ServerRefused(what)
        if done.freed_bytes:
            disk.remove_empty(directory)
        if failed is not None:
            raise failed
        return done

    @property
    def now(self) -> int:
        """The start date of leases that are made or renewed at this moment, in seconds since 1970."""
        return int(self._date())

    def _renew(self, storage_index: bytes, number: int, owner: int, secrets: LeaseSecrets) -> bool:
        path = self._paths.final(storage_index, number)
        with self._change(storage_index, (path,), secrets.owner) as space:
            now, fits = self._date(), space.has_lease_space
            return share_file.renew_lease(path, owner, secrets, now, fits, space.grew)

    def advise_corrupt_share(
        self, storage_index: bytes, share_number: int, reason: str, mutable: bool = False
    ) -> bool:
        """
        Keep a client's advisory for the operator, unless there are too many. Return whether it was kept.

        Raises:
            NoSuchShare: the share does not exist.
        """
        place = self.slots if mutable else self
        place.open_share(storage_index, share_number).close()
        return self._advisories.keep(storage_index, share_number, reason, mutable)

    # Housekeeping.

    def adopt_leftovers(self) -> int:
        """
        Count the bytes that unfinished uploads of earlier processes still need as promised space; return the
        number of these uploads.

        For a process that serves the directory alone. Call this before it starts to serve.
        """
        return self._unfinished.adopt_leftovers()

    def expire_uploads(self) -> int:
        """
        Give up uploads that were not written for ``keep_unfinished_s``, including those of dead processes.
        Call this every few minutes.

        Returns:
            how many uploads were given up.
        """
        now = self._clock()
        too_old = now - self.keep_unfinished_s
        given_up = self._unfinished.expire(too_old)
        worthless = max(too_old, now - WORTHLESS_AFTER_S)
        return given_up + garbage_collector.remove_abandoned(
            self._paths.incoming, too_old, worthless
        )

    def collect_garbage(self, expiry: Expiry = DEFAULT_EXPIRY, now: float | None = None) -> int:
        """
        Remove shares whose leases have all expired by ``now`` (by default, by the clock); return how many
        were removed.

        Call this only if the operator wants expired shares to be removed. It may take long, so call it in a
        thread.
        """
        call = self._paths.shares, expiry, now or self._clock()
        return garbage_collector.remove_expired(*call, self._gone, self._removing)

    def _removing(self, directory: str, path: str) -> AbstractContextManager[object]:
        """Return a context manager that counts the removal of a share for named clients."""
        index = storage_index_of(directory)
        return nullcontext() if index is None else self.clients.changing(index, (path,))

    def _gone(self, directory: str, size: int) -> None:
        """Count the removal of a share whose file was ``size`` bytes long."""
        storage_index = storage_index_of(directory)
        if self.usage is not None and storage_index is not None:
            self.usage.begin(storage_index)
            self.usage.grew(storage_index, -size)
            self.usage.end(storage_index)

    def count_usage(self) -> int:
        """
        Count the space that all shares take, if a count is due. Always return 0; a difference is logged here.

        This may take long. Call it every few minutes, in the worker thread that also collects garbage.
        """
        usage = self.usage
        try:
            if usage is not None and usage.is_due():
                usage.count()
            if self.clients.is_due():
                self.clients.count()
        except OSError as error:
            log.error(
                "cannot count the shares in {storage} for the quota ({reason}): make {path} readable",
                storage=str(self.root),
                reason=error.strerror or str(error),
                path=error.filename or str(self.root),
            )
        return 0

    def ignore_quota(self) -> None:
        """
        Stop applying quotas, because another process serves the directory and this one does not know of its
        changes.
        """
        self.usage = self._unfinished.usage = None
        self.clients.set_clients(())

    def release(self) -> None:
        """Close the files of unfinished uploads, so that other processes may resume them."""
        self._unfinished.release()

    def stop_counting(self) -> None:
        """Make ``count_usage`` end soon, before ``close``."""
        self.clients.stop()
        if self.usage is not None:
            self.usage.stop()

    def close(self) -> None:
        """Release everything. The next process that opens the directory may resume the uploads."""
        self._unfinished.close()
        if self.usage is not None:
            self.usage.close()


def _is_immutable(path: str) -> bool:
    """Return whether a file with a share's name is not a mutable share."""
    return not slotfiles.is_mutable_file(path)
