"""
``ShareStore``: the shares, free space and advisories of one storage directory.

Source: the format reference, storage protocols, sections 7 and 8.
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
    The free space below one directory, queried only as often as needed.

    Args:
        path: of the directory that holds shares.
        clock: seconds since 1970.
        free: returns the free space on the disk of a path, or None if unknown.
    """

    _path: str
    _clock: Callable[[], float]
    _free: Callable[[str], int | None]
    _plenty_at: int = -1  # the second of the last query
    _plenty_bytes: int = 0  # its result

    def free_bytes(self) -> int | None:
        """
        Return the free bytes now, or None if unknown.

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
        Return how much space is missing; 0 if none, or unknown.

        ``promised`` is called only if it matters, since it examines every upload.

        Args:
            wanted: bytes to store, and those that must stay free.
            allocated: lengths of unfinished uploads, however much of them has arrived.
            promised: returns how much of them is still to arrive.
            fresh: ask the disk in any case; otherwise at most once a second if there is enough space.
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


# Advisories are kept for the operator, one file each, as Tahoe-LAFS's servers do. At most 1000 of at most
# 32768 bytes are kept, so that they do not fill the disk.

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
        self._full_minute: int | None = None  # the minute in which there were too many

    def keep(self, storage_index: bytes, share_number: int, reason: str, mutable: bool) -> bool:
        """
        Write an advisory, unless there are too many already; returns whether it was written.

        When there are too many, they are counted again once a minute.

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
            # It may be shown in a terminal.
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
    """Create a file; if the disk is full, remove it."""
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
#     shares/incoming/<storage index>.<share number>                   unfinished ones
#     corruption-advisories/<time>--<storage index>-<share number>     advisories
#
# Files with other names and symbolic links are ignored. ``incoming`` is one flat directory, unlike that of
# Tahoe-LAFS, which empties its own when it starts. A directory for each unfinished upload, created and
# removed, would cost more than all the rest: ext4 does not reuse an inode that was freed in the last
# seconds, and every new file searches past those.

KEEP_UNFINISHED_S = 7 * 86400.0
WORTHLESS_AFTER_S = 30 * 60.0
"""For uploads without a note of what has arrived, which cannot be resumed, such as those of Tahoe-LAFS."""
DEFAULT_EXPIRY = Expiry()


@attrs.frozen
class StoreSettings:
    """
    What a store accepts, and how much of it.

    Attributes:
        reserved_bytes: space on the disk that shares must leave free.
        quota_bytes: for the files of complete shares and unfinished uploads; None: no quota. A store with a
            quota accepts nothing before ``usage`` is opened.
        read_only: accept no shares. Leases are renewed nevertheless.
        max_open_uploads: files that are kept open; further unfinished uploads are closed, the longest
            unused first, and opened again for their next write. Complete ones that wait to become durable
            stay open and are not counted: the caller limits them.
        max_uploads: unfinished uploads at a time; beyond that some are evicted, or an allocation is
            rejected.
        keep_unfinished_s: an unfinished upload is given up this long after its last write, unless it was
            evicted before.
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
    Several threads may use a store, and several processes a directory, each with its own store. Creating
    the object does not access the disk; directories are created when needed.

    Args:
        root: the storage directory.
        clock: seconds since 1970, for abandoned uploads; and for leases, unless ``date`` is given.
        free_bytes: returns the space on the disk of a path, or None if unknown.
        boot_id: 16 bytes that change whenever the machine starts.

    Attributes:
        slots: mutable shares; the rest of the store is about immutable ones, unless stated otherwise.
        usage: how much of the quota is used; None: there is no quota.
        clients: how much named clients use of theirs.

    Raises, in all methods:
        UsageError: a storage index that is not 16 bytes, or a number that is not 0 to 255.
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
        Return the space for more shares, or None if unknown; 0 if read-only.

        Args:
            owner: the number of a named client; 0: another's.

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
        # A share of exactly this size must fit.
        left = max(0, self.usage.room_bytes(file_bytes) - share_file.container_bytes(0))
        return left if free is None else min(free, left)

    def quota_refuses(self, share_bytes: int, owner: int = 0) -> bool:
        """Return whether the quota, or that of a named client, has no space for a share."""
        if self.read_only:
            return False
        usage, size = self.usage, share_file.container_bytes(share_bytes)
        refuses = usage is not None and usage.missing(size) > 0
        return refuses or self.clients.missing(owner, size) > 0

    def _change(self, storage_index: bytes, paths: Collection[str], owner: int = 0) -> SpaceChange:
        """Return what counts a change of share files of a storage index; used with ``with``."""
        client = self.clients.changing(storage_index, paths, owner)
        return SpaceChange(self.usage, storage_index, self._fits, self._make_room, client)

    def _make_room(self, missing_bytes: int) -> bool:
        """Evict uploads for what mutable shares and leases lack; return whether that suffices."""
        return self._unfinished.make_space(NOBODY, UploadDemand(0, 0, 0, missing_bytes))

    def _missing_bytes(self, more_bytes: int, fresh: bool = False) -> int:
        """Return how much space is missing for more bytes; see ``FreeSpace.missing_bytes``."""
        wanted, there = self.reserved_bytes + more_bytes, self._unfinished
        promised = there.remaining_bytes
        return self._room.missing_bytes(wanted, there.allocated_bytes, promised, fresh)

    def _fits(self, more_bytes: int) -> bool:
        """
        Return whether the disk has space for more bytes of mutable shares and leases, after evicting uploads
        if necessary.
        """
        missing = self._missing_bytes(more_bytes, fresh=True)
        return not missing or self._make_room(missing)

    def version(self, owner: int = 0) -> ServerVersion:
        """Return what the server reports about itself, to a named client or (0) others."""
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
        Allocate space for shares of exactly ``share_bytes`` bytes; renew the leases of all existing ones.

        Shares that are rejected, for lack of space or because another client is uploading them, are in
        neither set.

        Args:
            client: the uploader; this process itself is limited only by the disk.
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
        Like ``allocate``, in steps of one share each: creating its file takes a tenth of a millisecond or
        more.

        Shares that others finish between the steps are not allocated.
        """
        for number in share_numbers:
            check_number(number)
        if share_bytes < 0:
            raise UsageError(f"a share cannot be {share_bytes} bytes long; allocate 0 or more")
        with self._unfinished.allocate_lock:
            # A file that is not readable as a share must not count, or its client would have a share less.
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
                new_index = False  # as far as is known
            call = storage_index, number, share_bytes, secrets, new_index, client
            with self._unfinished.allocate_lock:
                if self._unfinished.allocate(*call):
                    allocated.add(number)
        return Allocation(have, frozenset(allocated))

    def _leased(self, storage_index: bytes, number: int, secrets: UploadSecrets) -> bool:
        """Renew the lease on an existing share; return whether the share still exists."""
        # A lease that cannot be renewed (a disk mounted read-only, no space) does not hide the share.
        with suppress(OSError, ValueError, NoSpace):
            try:
                return self._renew(storage_index, number, share_file.OWNER_ALLOCATE, secrets.lease)
            except QuotaReached:
                # A named client must not take another's share for its own, and depend on that lease.
                return not secrets.lease.owner
        return True

    def take_whole(
        self, storage_index: bytes, share_number: int, data: bytes, secrets: UploadSecrets
    ) -> IncomingShare | None:
        """
        Store a new share in one call instead of ``allocate`` and a write; the upload is then complete.

        None if that is not possible; nothing has been done then.
        """
        if self.read_only or not data:
            return None
        with self._unfinished.allocate_lock:
            return self._unfinished.take_whole(storage_index, share_number, data, secrets)

    def upload(
        self, storage_index: bytes, share_number: int, upload_secret: bytes, client: Client = NOBODY
    ) -> IncomingShare:
        """
        Return an unfinished upload to write to, from this process or left by a dead one.

        Args:
            client: the writer.

        Raises:
            NoSuchShare: it does not exist.
            WrongSecret: it has another secret, or another process is writing it.
        """
        return self._unfinished.upload(storage_index, share_number, upload_secret, client)

    def abort(self, storage_index: bytes, share_number: int, upload_secret: bytes) -> None:
        """
        Remove an unfinished upload.

        Raises:
            NoSuchShare: it does not exist, or all of its bytes have arrived.
            WrongSecret: see ``upload``.
        """
        self._unfinished.abort(storage_index, share_number, upload_secret)

    # Reading.

    def list_shares(self, storage_index: bytes) -> frozenset[int]:
        """
        Return the numbers of all complete immutable shares.

        Damaged ones are included, so that a verifier can report them; for ``allocate`` a file that is empty
        after a power cut, or that this process may not read, does not count. It is not replaced.
        """
        return self._list_shares(storage_index, _is_immutable) or frozenset()

    def _list_shares(
        self, storage_index: bytes, counts: Callable[[str], bool]
    ) -> frozenset[int] | None:
        """The same; None if their directory does not exist. See ``list_numbers``."""
        directory = self._paths.directory(storage_index)
        # Usually it does not exist, and the exception of scandir takes longer.
        return list_numbers(directory, counts) if os.access(directory, os.F_OK) else None

    def open_share(self, storage_index: bytes, share_number: int) -> ShareReader:
        """
        Open a complete share for reading.

        Raises:
            NoSuchShare: it does not exist.
            ServerRefused: it is damaged.
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
        Add or renew a lease on every share of the storage index, of either kind.

        A damaged share, or a lease that the quota refuses, does not prevent leases on the others, which would
        expire otherwise; its error is raised after all others have their lease. A share with the maximum of
        leases ends it at once: otherwise a client that fills shares with leases would make each further
        request read all of them.

        Raises:
            NoSuchShare: the storage index has no shares.
            NoSpace: there is no space for one more lease, on the disk or on a share.
        """
        found = False
        failed: ServerRefused | None = None
        try:
            found = self.slots.add_lease(storage_index, secrets)
        except ServerRefused as error:
            # As with a share that has the maximum of leases.
            if isinstance(error, NoSpace) and not isinstance(error, QuotaReached):
                raise
            failed = error
        there = self._list_shares(storage_index, _is_immutable)
        for number in sorted(there or ()):
            path = self._paths.final(storage_index, number)
            try:
                found |= self._renew(storage_index, number, share_file.OWNER_ADD_LEASE, secrets)
            except QuotaReached as error:
                failed = failed or error  # others may have this lease, and need no space
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
        Release the leases with a cancel secret on all shares of the storage index, of either kind; remove
        shares that have no lease then, and count their space as free.

        The operator's setting for expired leases does not matter: the last client with a lease has given the
        share up. A share that never had a lease, or whose other leases may be lost, stays.

        Args:
            cancel_secret: 32 bytes.
            since: seconds since 1970. Leases that were made or renewed at this time or later stay.

        Raises:
            ServerRefused: the disk failed, or a share is damaged; other shares' leases are released.
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
        """The time by which leases are made and renewed, in seconds since 1970."""
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
        Keep a client's advisory for the operator, up to a limit; returns whether it was kept.

        Raises:
            NoSuchShare: the share does not exist.
        """
        place = self.slots if mutable else self
        place.open_share(storage_index, share_number).close()
        return self._advisories.keep(storage_index, share_number, reason, mutable)

    # Housekeeping.

    def adopt_leftovers(self) -> int:
        """
        Count what earlier processes left unfinished as promised space; returns the number of uploads.

        For a process that serves the directory alone, before it starts.
        """
        return self._unfinished.adopt_leftovers()

    def expire_uploads(self) -> int:
        """
        Give up uploads that were not written for ``keep_unfinished_s``, also those of dead processes.

        Returns:
            how many were given up. Call it every few minutes.
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
        Remove shares whose leases have all expired by ``now`` (or the clock); returns how many.

        Only called if the operator wants it. It may take long; call it in a thread.
        """
        call = self._paths.shares, expiry, now or self._clock()
        return garbage_collector.remove_expired(*call, self._gone, self._removing)

    def _removing(self, directory: str, path: str) -> AbstractContextManager[object]:
        """Return what counts the removal of a share for named clients."""
        index = storage_index_of(directory)
        return nullcontext() if index is None else self.clients.changing(index, (path,))

    def _gone(self, directory: str, size: int) -> None:
        """Count a share that was removed."""
        storage_index = storage_index_of(directory)
        if self.usage is not None and storage_index is not None:
            self.usage.begin(storage_index)
            self.usage.grew(storage_index, -size)
            self.usage.end(storage_index)

    def count_usage(self) -> int:
        """
        Count the space that all shares take, if that is due; returns 0, since it logs a difference itself.

        Call it every few minutes, in the worker thread that also collects garbage: it may take long.
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
        """Count nothing: another process serves the directory, and its changes are not known here."""
        self.usage = self._unfinished.usage = None
        self.clients.set_clients(())

    def release(self) -> None:
        """Close the files of unfinished uploads, so that other processes may resume them."""
        self._unfinished.release()

    def stop_counting(self) -> None:
        """End ``count_usage`` soon, before ``close``."""
        self.clients.stop()
        if self.usage is not None:
            self.usage.stop()

    def close(self) -> None:
        """Release everything; the next process that opens the directory may resume the uploads."""
        self._unfinished.close()
        if self.usage is not None:
            self.usage.close()


def _is_immutable(path: str) -> bool:
    """Return whether a file with a share's name is anything but a mutable share."""
    return not slotfiles.is_mutable_file(path)
