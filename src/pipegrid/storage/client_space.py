"""
Quotas of named clients: how much each client keeps in a storage directory, by the leases on shares.

Each lease record has a number for its owner, which other servers set to 0 or 1. A lease that is made at the
address of a named client gets the client's number. So the share files themselves record whose shares they
are, in the format of Tahoe-LAFS, and there is no other record that a crash could make wrong. The full length
of a share, without the leases of other clients, counts for every client that has a lease on the share. So a
client pays for what it asks to keep, even if another client stored it first, and never for what other clients
do.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager

import attrs
from twisted.logger import Logger

from pipegrid.core.text import amount
from pipegrid.errors import ServerRefused
from pipegrid.storage import share_file
from pipegrid.storage.mutable import slot_file
from pipegrid.storage.space_quota import (
    NOT_COUNTED,
    PREFIXES,
    RECOUNT_FULL_S,
    RECOUNT_S,
    prefix_number,
    share_files,
    storage_index_of,
    storage_indexes,
)
from pipegrid.storage.storage_paths import Paths

# All shares are counted when a server with named clients starts, and again as often as for the quota of the
# whole server. A client's shares are not accepted before its existing shares are counted. Between two counts
# each change of a share adds a difference: the share's leases are read before and after the change. Changes
# of one storage index follow one another (``serial``); its lock is taken before the locks of files. The count
# reads the shares of a storage index under the same lock, so it sees each change either completely or not at
# all.
#
# On a server that removes shares with expired leases, a lease that had expired at the last count does not
# count. On other servers an expired lease counts until it is released, since it keeps its share.

MAX_CLIENTS = 64
FIRST_NUMBER = 1 << 16
"""The lowest number of a named client. Lower numbers are common in leases that belong to no named client."""

_LONGEST_REST_S = 0.1

log = Logger()


@attrs.frozen
class ClientQuota:
    """
    A named client.

    Attributes:
        number: the owner in the client's leases, at least ``FIRST_NUMBER``. It is never used again for
            another client.
        quota_bytes: 0 if the client has no quota.
    """

    number: int
    name: str
    quota_bytes: int


@attrs.frozen
class StoredShare:
    """
    The lengths and leases of a share's file; all are zero or empty if the file does not exist.

    Attributes:
        file_bytes: the length of the file if it had one lease.
        lease_bytes: the length of each further lease.
        leases: owner and expiry of each valid lease of a named client.
    """

    file_bytes: int = 0
    lease_bytes: int = 0
    leases: tuple[tuple[int, int], ...] = ()

    def charges(self, since: float) -> dict[int, int]:
        """
        Return how many bytes of the share count for each client, by the client's number.

        Args:
            since: seconds since 1970; leases that expire earlier do not count.
        """
        found: dict[int, int] = {}
        for owner, expires in self.leases:
            if expires >= since:
                found[owner] = (
                    found.get(owner, self.file_bytes - self.lease_bytes) + self.lease_bytes
                )
        return found


def read_share(path: str) -> StoredShare:
    """
    Return lengths and leases of a share's file; an empty ``StoredShare`` if the file is damaged or missing.
    """
    try:
        share = slot_file.open_file(path)
        if share is None:
            begin, records = share_file.read_leases(path)
            kind, size = share_file.RECORDS, begin + share_file.LEASE_BYTES
        else:
            with closing(share):
                records = share.leases(share.extra())
            size = share.header.extra_offset + slot_file.COUNT_BYTES
            kind = slot_file.RECORDS
    except (OSError, ValueError, ServerRefused):
        return StoredShare()
    return StoredShare(size, kind.record_bytes, kind.owned(records, FIRST_NUMBER))


class ClientUsage:
    """
    How much of its quota each named client uses. Methods may be called from any thread.

    Args:
        paths: the storage directory.
        allocated: takes a client's number; returns the full length of the files of its unfinished uploads.
        clock: seconds since 1970.

    Attributes:
        expired_before: returns a time; leases that expired before it do not count. 0: all leases count.
    """

    def __init__(
        self, paths: Paths, allocated: Callable[[int], int], clock: Callable[[], float]
    ) -> None:
        self.expired_before: Callable[[], float] = lambda: 0.0
        self._paths = paths
        self._allocated = allocated
        self._clock = clock
        self._clients: Mapping[int, ClientQuota] = {}
        self._counted: set[int] = set()  # the numbers of clients whose shares are counted
        self._counted_s = 0.0
        self.counted_since = 0.0
        """Seconds since 1970; leases that had expired earlier do not count."""
        self._used: Counter[int] = Counter()
        self._reserved: Counter[int] = Counter()
        self._refused = self._stopping = False
        self._told: set[int] = set()
        # During a count of all shares: the space that each client uses, without leases that had expired when
        # the count began; the number of the prefix that is being counted; the storage indexes with this
        # prefix that are counted; and those that changed before they were counted.
        self._recounted: Counter[int] | None = None
        self._recounted_since = 0.0
        self._prefix = 0
        self._done: set[bytes] = set()
        self._late: set[bytes] = set()
        # The lock of each storage index that is in use, and the lock's number of users.
        self._serial: dict[bytes, tuple[threading.RLock, int]] = {}
        self._lock = threading.Lock()  # held only for moments

    def __repr__(self) -> str:
        return f"<ClientUsage of {len(self._clients)} clients>"

    # The list of clients.

    @property
    def active(self) -> bool:
        """Whether there are any named clients."""
        return bool(self._clients)

    def set_clients(self, clients: Collection[ClientQuota]) -> None:
        """Use these clients from now on. The shares of new clients must be counted (``is_due``)."""
        with self._lock:
            self._clients = {each.number: each for each in clients}
            self._counted &= self._clients.keys()
            self._told.clear()

    def report(self) -> Iterator[tuple[ClientQuota, int | None, int]]:
        """
        Yield each client, how many bytes its shares take (None if they are not counted yet), and how many
        bytes its unfinished uploads and running changes have reserved.
        """
        for number, client in list(self._clients.items()):
            used = self._used[number] if number in self._counted else None
            yield client, used, self._allocated(number) + self._reserved[number]

    # What fits.

    def missing(self, number: int, more_bytes: int) -> int:
        """
        Return how many bytes a client's quota lacks for ``more_bytes``. 0 if the quota suffices, or there is
        none; ``NOT_COUNTED`` while the client's shares are not counted.
        """
        client = self._clients.get(number)
        if client is None:
            return NOT_COUNTED if number else 0  # the client was removed meanwhile
        if not client.quota_bytes:
            return 0
        if number not in self._counted:
            return NOT_COUNTED
        missing = max(0, self._granted(number) + more_bytes - client.quota_bytes)
        self._refused = self._refused or missing > 0
        return missing

    def left_bytes(self, number: int) -> int | None:
        """
        Return how many bytes a client's quota leaves; None if there is no quota, 0 while its shares are not
        counted.
        """
        client = self._clients.get(number)
        if client is None or not client.quota_bytes:
            return 0 if number and client is None else None
        if number not in self._counted:
            return 0
        return max(0, client.quota_bytes - self._granted(number))

    def _granted(self, number: int) -> int:
        """Return what counts against a client's quota, in bytes."""
        return self._used[number] + self._reserved[number] + self._allocated(number)

    def reserve(self, number: int, more_bytes: int) -> int:
        """Reserve space for more bytes and return 0, or return how many bytes the client's quota lacks."""
        with self._lock:
            missing = self.missing(number, more_bytes)
            if not missing:
                self._reserved[number] += more_bytes
            return missing

    def hold(self, number: int, bytes_: int) -> None:
        """
        Add to the reserved bytes without a check of the quota, which has granted them before. A negative
        number releases reserved bytes.
        """
        with self._lock:
            self._reserved[number] += bytes_
            if not self._reserved[number]:
                del self._reserved[number]

    def tell_refused(self, number: int) -> None:
        """Log that a client's quota has refused something, at most once between two counts."""
        client = self._clients.get(number)
        if client is not None and number in self._counted and number not in self._told:
            self._told.add(number)
            log.warn(
                "the quota of {quota} of the client {name} is used up: its new shares are refused",
                quota=amount(client.quota_bytes),
                name=client.name,
            )

    # What changes.

    @contextmanager
    def serial(self, storage_index: bytes) -> Iterator[None]:
        """Hold the lock of a storage index, so that its shares are changed one after the other."""
        with self._lock:
            lock, users = self._serial.get(storage_index) or (threading.RLock(), 0)
            self._serial[storage_index] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                users = self._serial[storage_index][1] - 1
                if users:
                    self._serial[storage_index] = lock, users
                else:
                    del self._serial[storage_index]

    @contextmanager
    def changing(
        self, storage_index: bytes, paths: Collection[str], number: int = 0
    ) -> Iterator[ClientChange]:
        """
        Count a change of share files of one storage index by one client. Changes must not be nested.

        Args:
            number: the client's number; 0 if it is no named client.
        """
        if not self.active:
            yield ClientChange(self, number, {})
            return
        with self.serial(storage_index):
            before = {path: read_share(path) for path in paths}
            change = ClientChange(self, number, before)
            try:
                yield change
            finally:
                after = [read_share(path) for path in paths]
                self._changed(storage_index, before.values(), after)
                change.release()

    def _changed(
        self, storage_index: bytes, before: Collection[StoredShare], after: Collection[StoredShare]
    ) -> None:
        with self._lock:
            self._add(self._used, before, -1, self.counted_since)
            self._add(self._used, after, 1, self.counted_since)
            if self._recounted is None:
                return
            prefix = prefix_number(storage_index)
            if prefix < self._prefix or storage_index in self._done:
                self._add(self._recounted, before, -1, self._recounted_since)
                self._add(self._recounted, after, 1, self._recounted_since)
            elif prefix == self._prefix:
                self._late.add(storage_index)

    def _add(
        self, total: Counter[int], shares: Collection[StoredShare], sign: int, since: float
    ) -> None:
        for share in shares:
            for owner, size in share.charges(since).items() if share.leases else ():
                if owner in self._clients:
                    total[owner] += sign * size

    # Counting.

    def is_due(self) -> bool:
        """
        Return whether all shares should be counted, because those of a client never were, or the last count
        was long ago.
        """
        if not self._clients:
            return False
        passed = abs(self._clock() - self._counted_s)  # a jump of the clock causes an extra count
        too_long = passed >= (RECOUNT_FULL_S if self._refused else RECOUNT_S)
        return too_long or not self._clients.keys() <= self._counted

    def stop(self) -> None:
        """Make a running count end soon, without waiting for its end."""
        self._stopping = True

    def count(self) -> bool:
        """
        Count all shares while they change; return False if ``stop`` ended the count.

        This may take long, so call it in a worker thread.

        Raises:
            OSError: a directory cannot be listed; the results of the previous count are kept.
        """
        with self._lock:
            numbers = set(self._clients)
            self._recounted_since = self.expired_before()
            self._recounted, self._prefix = Counter(), 0
        try:
            for number in range(len(PREFIXES)):
                began = time.monotonic()
                if not self._count_prefix(number):
                    return False
                if self._counted:  # pause, since clients are being served
                    time.sleep(min(_LONGEST_REST_S, time.monotonic() - began))
            with self._lock:
                self._used, self.counted_since = self._recounted, self._recounted_since
                self._counted = numbers & self._clients.keys()
                self._counted_s, self._refused = self._clock(), False
                self._told.clear()
        finally:
            with self._lock:
                self._recounted = None
                self._done.clear()
                self._late.clear()
        return True

    def _count_prefix(self, number: int) -> bool:
        found = storage_indexes(self._paths.shares, PREFIXES[number])
        todo = {each for each in map(storage_index_of, found) if each is not None}
        while not self._stopping:
            for storage_index in todo:
                self._count_one(storage_index)
            with self._lock:
                todo = self._late - self._done
                self._late.clear()
                if not todo:
                    self._prefix = number + 1
                    self._done.clear()
                    return True
        return False

    def _count_one(self, storage_index: bytes) -> None:
        with self.serial(storage_index):
            paths = share_files(self._paths.directory(storage_index))
            shares = [read_share(path) for path, _ in paths]
            with self._lock:
                if storage_index not in self._done and self._recounted is not None:
                    self._add(self._recounted, shares, 1, self._recounted_since)
                    self._done.add(storage_index)


class ClientChange:
    """
    A change by one client, from ``ClientUsage.changing``.

    Args:
        before: the shares that the change may affect, by the paths of their files.
    """

    def __init__(self, usage: ClientUsage, number: int, before: Mapping[str, StoredShare]) -> None:
        self._usage = usage
        self._number = number
        self._before = before
        self._reserved_bytes = 0
        self._holds = not number

    def has_space(self, more_bytes: int) -> bool:
        """
        Return whether the client's quota has space for more bytes; if so, they are reserved until the end of
        the change.
        """
        if not self._number:
            return True
        if self._usage.reserve(self._number, more_bytes):
            self._usage.tell_refused(self._number)
            return False
        self._reserved_bytes += more_bytes
        return True

    def may_hold(self, is_new: bool) -> bool:
        """
        Return whether the client's quota allows a lease on each share, since a share with a client's lease
        counts for the client.

        Args:
            is_new: the lease is added to the others. Otherwise an existing lease that has ended becomes valid
                again, which counts only if the client has no other valid lease.
        """
        if not self._holds:
            since = self._usage.counted_since
            more_bytes = sum(
                each.lease_bytes * is_new
                if self._number in each.charges(since)
                else each.file_bytes
                for each in self._before.values()
            )
            self._holds = not more_bytes or self.has_space(more_bytes)
        return self._holds

    def release(self) -> None:
        """Release the reserved bytes, which are counted as used by now, or not needed."""
        if self._reserved_bytes:
            self._usage.hold(self._number, -self._reserved_bytes)
            self._reserved_bytes = 0
