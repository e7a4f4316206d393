"""
The quota on a storage directory, and the space that its shares take: how it is counted, kept over restarts,
and counted again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import attrs
from twisted.logger import Logger

from pipegrid.core import base32
from pipegrid.core.text import amount
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.safe_open import is_directory, is_file, read_file
from pipegrid.errors import NoSpace, QuotaReached
from pipegrid.storage.mutable.slot_file import is_mutable_file
from pipegrid.storage.share_file import MAX_SHARE_BYTES, HasRoom
from pipegrid.storage.storage_paths import SHARE_NUMBERS, Paths

# What counts is the length of the files of complete shares, immutable or mutable, with their leases, and the
# full length of unfinished uploads, including bytes that have not arrived. The sum is known without looking
# at the disk: every change that this process makes adds its difference.
#
# A note in the storage directory keeps the sum for complete shares for the next process:
#
# * A note that is written when the server stops is exact. It has a checksum of the times at which the 1024
#   directories of shares have changed. If another program has added or removed storage indexes since then,
#   the shares are counted.
# * While the server runs, the note says that its number is not exact, but an upper limit. The limit is raised
#   in steps of ``STEP_BYTES`` before it is reached. So after ``kill -9`` the next process never accepts more
#   than the quota, although it counts the shares only while it serves clients.
# * After a power cut the note may be an old one. Then, or if there is no note, no new share is accepted until
#   all shares have been counted.
#
# Leases may exceed the quota a little, since existing shares would be removed without them.
#
# Shares are counted again at least every ``RECOUNT_S``. If the quota has refused something since the last
# count, they are counted an hour after that count, so that the space of shares that were removed by hand is
# free again.

NOTE_NAME = "space-usage.json"
MAX_NOTE_BYTES = 1000
STEP_BYTES = 256 << 20
MIN_LEASE_EXCESS_BYTES = 1 << 20
LEASE_EXCESS_PART = 64
"""Between two counts, leases may exceed the quota by 1/64, but at least by ``MIN_LEASE_EXCESS_BYTES``."""

RECOUNT_S = 12 * 3600.0
RECOUNT_FULL_S = 3600.0
NOT_COUNTED = 1 << 62
"""The number of missing bytes returned while the used space is unknown: more than evictions can free."""

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
PREFIXES = tuple(first + second for first in _ALPHABET for second in _ALPHABET)
"""The names of the directories of shares, each from the first ten bits of a storage index."""

_NAME_CHARACTERS = 26  # length of a storage index in base32
_MOST_TRIES = 500
_TRY_AGAIN_S = 0.01
_LONGEST_REST_S = 0.1

T = TypeVar("T")

log = Logger()


@attrs.frozen
class UsageNote:
    """
    What one process records for the next one.

    Attributes:
        bytes: the space that complete shares take; an upper limit unless ``exact``.
        exact: whether the server had stopped when the note was written.
        boot_id: the identifier of the machine's last start, in hexadecimal.
        checksum: see ``checksum_of``; empty unless ``exact``.
        counted_s: when all shares were last counted, in seconds since 1970.
        quota_bytes: the quota, for other programs that read the directory.
    """

    bytes: int
    exact: bool
    boot_id: str
    checksum: str
    counted_s: float
    quota_bytes: int


def read_note(storage: Path) -> UsageNote | None:
    """Return the note in a storage directory; None if it is missing or damaged."""
    try:
        noted = json.loads(read_file(storage / NOTE_NAME, MAX_NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(noted, Mapping):
        return None
    try:
        note = UsageNote(**noted)
    except TypeError:
        return None
    kinds = {"bytes": int, "exact": bool, "boot_id": str, "checksum": str, "quota_bytes": int}
    right = all(type(getattr(note, name)) is kind for name, kind in kinds.items())
    if not right or not isinstance(note.counted_s, int | float):
        return None
    return note if note.bytes >= 0 and note.quota_bytes >= 0 else None


def remove_note(storage: Path) -> None:
    """Remove the note, if any. For a server without a quota, which does not count its changes."""
    with suppress(OSError):
        os.unlink(storage / NOTE_NAME)


def checksum_of(shares: str) -> str:
    """
    Return a checksum of the times at which the directories of shares were last changed, by adding or removing
    a storage index.
    """
    checksum = hashlib.blake2b(digest_size=16)
    for prefix in PREFIXES:
        with suppress(OSError):
            found = os.lstat(f"{shares}/{prefix}")
            checksum.update(f"{prefix} {found.st_ino} {found.st_mtime_ns}\n".encode("ascii"))
    return checksum.hexdigest()


def storage_indexes(shares: str, prefix: str) -> list[str]:
    """
    Return the paths of the directories with this prefix, each with the shares of one storage index.

    Raises:
        OSError: the directories cannot be listed.
    """
    try:
        with os.scandir(f"{shares}/{prefix}") as entries:
            return [
                entry.path
                for entry in entries
                if len(entry.name) == _NAME_CHARACTERS
                and entry.name.startswith(prefix)
                and is_directory(entry)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []


def storage_index_of(directory: str) -> bytes | None:
    """
    Return the storage index whose shares are in a directory; None if the directory's name is not a storage
    index.
    """
    try:
        return base32.decode(os.path.basename(directory))
    except ValueError:
        return None


def share_files(directory: str) -> list[tuple[str, int]]:
    """
    Return path and length of the files of all shares of one storage index.

    Raises:
        OSError: the files cannot be listed.
    """
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name in SHARE_NUMBERS and is_file(entry):
                    with suppress(FileNotFoundError):  # the file was removed meanwhile
                        found.append((entry.path, entry.stat(follow_symlinks=False).st_size))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return found


@attrs.define
class ShareTotal:
    """The number of some shares, and the total length of their files."""

    shares: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Count a share whose file is ``size`` bytes long."""
        self.shares += 1
        self.bytes += size


class StoredSpace:
    """
    The shares in a storage directory, measured without the server's help, even while the server runs.

    Attributes:
        immutable, mutable: complete shares.
        unfinished: unfinished uploads; the present length of their files counts.
    """

    def __init__(self) -> None:
        self.immutable = ShareTotal()
        self.mutable = ShareTotal()
        self.unfinished = ShareTotal()

    @property
    def all(self) -> ShareTotal:
        """The sum of immutable, mutable and unfinished shares."""
        parts = self.immutable, self.mutable, self.unfinished
        return ShareTotal(sum(each.shares for each in parts), sum(each.bytes for each in parts))

    def measure(
        self, storage: Path, seen: Callable[[str], object] = lambda path: None
    ) -> Iterator[None]:
        """
        Count all shares in a storage directory. Yield after each of the 1024 prefixes, so that the caller can
        do other work meanwhile.

        Args:
            seen: called with the path of each file that counts.

        Raises:
            OSError: a part of the directory cannot be listed.
        """
        paths = Paths(storage)
        for prefix in PREFIXES:
            for directory in storage_indexes(paths.shares, prefix):
                for path, size in share_files(directory):
                    (self.mutable if is_mutable_file(path) else self.immutable).add(size)
                    seen(path)
            yield
        for name in os.listdir(paths.incoming) if os.path.isdir(paths.incoming) else ():
            index, _, number = name.partition(".")
            if len(index) == _NAME_CHARACTERS and number in SHARE_NUMBERS:
                self.unfinished.add(file_bytes(f"{paths.incoming}/{name}"))
                seen(f"{paths.incoming}/{name}")


def file_bytes(path: str) -> int:
    """Return the length of a file; 0 if the file does not exist or cannot be examined."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


class SpaceUsage:
    """
    How much of its quota a store uses. Methods may be called from any thread, and do not wait for the disk
    unless stated otherwise.

    A store calls ``reserve`` before it accepts bytes, and ``release`` when these bytes count as allocated or
    used. It calls ``begin`` before a change of the shares of a storage index, ``grew`` with the difference in
    bytes, and ``end`` afterwards.

    Args:
        allocated: returns the full length of the files of unfinished uploads.
        clock: seconds since 1970.
        boot_id: returns 16 bytes that change whenever the machine starts.

    Attributes:
        quota_bytes: the maximum for complete shares and unfinished uploads.
        used_bytes: the space that complete shares take; an upper limit unless ``exact``.
        counted: whether ``used_bytes`` is known at all.
        exact: whether ``used_bytes`` comes from a count of all shares or from an exact note.
    """

    def __init__(
        self,
        storage: Path,
        quota_bytes: int,
        allocated: Callable[[], int],
        clock: Callable[[], float],
        boot_id: Callable[[], bytes],
    ) -> None:
        self.quota_bytes = quota_bytes
        self.used_bytes = 0
        self.counted = self.exact = False
        self._storage = storage
        self._paths = Paths(storage)
        self._allocated = allocated
        self._clock = clock
        self._boot_id = boot_id
        self._reserved_bytes = 0
        self._upto_bytes = -1  # the upper limit in the note
        self._counted_s = 0.0
        self._lease_excess_bytes = (
            0  # length of the leases accepted beyond the quota since the last count
        )
        self._refused = self._opened = self._stopping = False
        self._told: set[str] = set()  # kinds of messages logged since the last count
        self._unnoted = False  # whether writing the note failed
        self._changing: Counter[bytes] = (
            Counter()
        )  # storage indexes with changes in progress, and how many
        self._counting: int | None = None  # during a count: its present prefix
        self._recounted: set[int] = set()  # prefixes counted so far
        self._recounted_bytes = 0
        self._touched: set[bytes] = set()  # changed while their prefix was counted
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<SpaceUsage {self.used_bytes} of {self.quota_bytes} bytes>"

    # What fits.

    def granted_bytes(self) -> int:
        """Return how many bytes count against the quota now."""
        return self.used_bytes + self._reserved_bytes + self._allocated()

    def missing(self, more_bytes: int) -> int:
        """
        Return how many bytes the quota lacks for ``more_bytes``; 0 if it suffices, ``NOT_COUNTED`` while the
        used space is unknown.
        """
        if not self.counted:
            return NOT_COUNTED
        missing = max(0, self.granted_bytes() + more_bytes - self.quota_bytes)
        # A request above the maximum size of a share must not cause an early count.
        self._refused = self._refused or (missing > 0 and more_bytes <= MAX_SHARE_BYTES)
        return missing

    def room_bytes(self, kept_bytes: int) -> int:
        """
        Return how many bytes the quota leaves; 0 while the used space is unknown.

        Args:
            kept_bytes: the full length of the unfinished uploads that cannot be evicted.
        """
        if not self.counted:
            return 0
        return max(0, self.quota_bytes - self.used_bytes - self._reserved_bytes - kept_bytes)

    def reserve(self, more_bytes: int) -> int:
        """
        Reserve space for more bytes and return 0, or return how many bytes the quota lacks.

        If more bytes then count than the upper limit in the note says, a note with a higher limit is written
        to the disk.
        """
        with self._lock:
            missing = self.missing(more_bytes)
            if missing:
                return missing
            self._reserved_bytes += more_bytes
            if self.granted_bytes() > self._upto_bytes:
                self._note(False)
            return 0

    def reserve_excess(self, lease_bytes: int) -> bool:
        """
        Reserve space for a lease beyond the quota, or before the shares are counted. Return whether there is
        space.
        """
        with self._lock:
            if lease_bytes > self._excess_left():
                self._tell(
                    "leases",
                    "the quota of {quota} is used up, and the space beyond it for leases: leases are "
                    "refused, without which shares expire; raise the quota",
                )
                return False
            self._lease_excess_bytes += lease_bytes
            self._reserved_bytes += lease_bytes
            if self.counted and self.granted_bytes() > self._upto_bytes:
                self._note(False)
            return True

    def _excess_left(self) -> int:
        most = max(MIN_LEASE_EXCESS_BYTES, self.quota_bytes // LEASE_EXCESS_PART)
        return max(0, most - self._lease_excess_bytes)

    def tell_refused(self, more_bytes: int) -> None:
        """Log that the quota has refused more bytes, at most once between two counts."""
        if self.counted and more_bytes <= MAX_SHARE_BYTES:
            self._tell(
                "shares",
                "the quota of {quota} leaves no space for {more} more: new shares are refused",
                more=amount(more_bytes),
            )

    def _tell(self, kind: str, line: str, **values: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            log.warn(line, quota=amount(self.quota_bytes), **values)

    def release(self, bytes_: int) -> None:
        """Release reserved bytes, which count as allocated or used by now, or are not needed."""
        with self._lock:
            self._reserved_bytes -= bytes_

    # What changes.

    def begin(self, storage_index: bytes) -> None:
        """Begin a change of the shares of a storage index."""
        with self._lock:
            self._changing[storage_index] += 1

    def grew(self, storage_index: bytes, more_bytes: int) -> None:
        """Count a difference in bytes, which may be negative. Called between ``begin`` and ``end``."""
        with self._lock:
            self.used_bytes += more_bytes
            if self._counting is not None and prefix_number(storage_index) in self._recounted:
                self._recounted_bytes += more_bytes
            if self.used_bytes > self._upto_bytes and self.counted:
                self._note(False)

    def end(self, storage_index: bytes) -> None:
        """Record that a change has ended, so that a running count examines these shares again."""
        with self._lock:
            self._changing[storage_index] -= 1
            if not self._changing[storage_index]:
                del self._changing[storage_index]
            if self._counting == prefix_number(storage_index):
                self._touched.add(storage_index)

    def placing(self, storage_index: bytes, size: int, place: Callable[[], T]) -> T:
        """
        Call ``place``, which makes a complete share visible, and count the ``size`` bytes of its file. Return
        the result of ``place``.
        """
        self.begin(storage_index)
        try:
            result = place()
            self.grew(storage_index, size)
            return result
        finally:
            self.end(storage_index)

    # The note that keeps the used space over restarts.

    def open(self) -> None:
        """Read the note of the last process. Only for the one process that serves the directory."""
        note = read_note(self._storage)
        same_boot = note is not None and note.boot_id == self._boot_id().hex()
        fits = note is not None and note.exact and note.checksum == checksum_of(self._paths.shares)
        with self._lock:
            self._opened = True
            # An exact note whose checksum is wrong is useless: another program may have added any number of
            # shares.
            if note is not None and (fits or (same_boot and not note.exact)):
                self.used_bytes, self._counted_s = note.bytes, note.counted_s
                self.counted, self.exact = True, fits
                self._note(False, durable=True)  # replaces the exact note, even after a power cut
            if self.exact:
                self._warn_of_excess()

    def _warn_of_excess(self) -> None:
        """Log if the shares take more than the quota."""
        if self.used_bytes > self.quota_bytes:
            log.warn(
                "the shares in {storage} take {used}, more than the quota of {quota}: no new ones are "
                "accepted",
                storage=str(self._storage),
                used=amount(self.used_bytes),
                quota=amount(self.quota_bytes),
            )

    def stop(self) -> None:
        """Make a running count end soon, without waiting for its end. Call this before ``close``."""
        self._stopping = True

    def close(self) -> None:
        """Write the note for the next process. Call this after the last change."""
        with self._lock:
            opened, self._opened = self._opened, False
            if opened and self.counted:
                self._note(self.exact and not self._changing, durable=True)

    def _note(self, at_rest: bool, durable: bool = False) -> None:
        """
        Write the note, under the lock. If writing fails, the note is removed, and the next process counts all
        shares first.
        """
        granted = self.granted_bytes()
        if granted > self.quota_bytes:  # from now on only leases are added
            upto = granted + self._excess_left()
        else:
            upto = min(granted + STEP_BYTES, self.quota_bytes)
        note = UsageNote(
            self.used_bytes if at_rest else upto,
            at_rest,
            self._boot_id().hex(),
            checksum_of(self._paths.shares) if at_rest else "",
            self._counted_s,
            self.quota_bytes,
        )
        self._upto_bytes = upto
        text = json.dumps(attrs.asdict(note)).encode("ascii") + b"\n"
        try:
            replace_file(self._storage / NOTE_NAME, text, durable=durable)
        except OSError as error:
            remove_note(self._storage)
            self._upto_bytes = -1  # so that the next change writes the note
            if not self._unnoted:
                log.warn(
                    "cannot note in {storage} how much its shares take ({reason}): if this lasts, they are "
                    "counted at the next start; free some space",
                    storage=str(self._storage),
                    reason=error.strerror or str(error),
                )
            self._unnoted = True
        else:
            self._unnoted = False

    # Counting.

    def is_due(self) -> bool:
        """
        Return whether all shares should be counted, because ``used_bytes`` is unknown or not exact, or the
        last count was long ago.
        """
        if not self.exact:
            return True
        passed = abs(self._clock() - self._counted_s)  # a jump of the clock causes an extra count
        return passed >= (RECOUNT_FULL_S if self._refused else RECOUNT_S)

    def count(self) -> bool:
        """
        Count all shares while they change; return whether the count was finished.

        This may take long, so call it in a worker thread.

        Raises:
            OSError: a directory cannot be listed; the result of the previous count is kept.
        """
        with self._lock:
            self._counting, self._recounted_bytes = 0, 0
        busy: list[int] = []
        try:
            for number in range(len(PREFIXES)):
                began = time.monotonic()
                if self._stopping:
                    return False
                if not self._count_prefix(number):
                    busy.append(number)  # tried again later, so that other prefixes are not delayed
                if self.counted:  # pause, since clients are being served
                    time.sleep(min(_LONGEST_REST_S, time.monotonic() - began))
            bounded = [each for each in busy if not self._count_prefix(each, bound=True)]
            if self._stopping:
                return False
            self._adopt_count(bounded)
        finally:
            with self._lock:
                self._counting = None
                self._recounted.clear()
                self._touched.clear()
        return True

    def _adopt_count(self, bounded: list[int]) -> None:
        """
        Use the result of a count.

        Args:
            bounded: prefixes whose shares did not stop changing, so that only an upper limit is known.
        """
        with self._lock:
            difference = self._recounted_bytes - self.used_bytes
            if self.exact and difference and not bounded:
                log.info(
                    "the shares in {storage} take {used}, {amount} {how} than was known: another program "
                    "has changed them",
                    storage=str(self._storage),
                    used=amount(self._recounted_bytes),
                    amount=amount(abs(difference)),
                    how="less" if difference < 0 else "more",
                )
            self.used_bytes = self._recounted_bytes
            self._counted_s = self._clock()
            self.counted, self._refused = True, False
            self._lease_excess_bytes = 0
            self._told.discard("shares")
            self._told.discard("leases")
            if bounded:
                self.exact = False
                self._tell(
                    "busy",
                    "the shares in {path} keep changing, so the quota of {quota} counts the most space that "
                    "they can take",
                    path=f"{self._paths.shares}/{PREFIXES[bounded[0]]}",
                )
            elif not self.exact:
                self.exact = True
                self._told.discard("busy")
                self._warn_of_excess()
            if self._opened:
                self._note(False)

    def _count_prefix(self, number: int, bound: bool = False) -> bool:
        """
        Count the shares with one prefix. Return False, without counting them, if they do not stop changing or
        ``stop`` was called.

        Args:
            bound: if the shares do not stop changing, count the largest sum that was seen, and return False.
        """
        with self._lock:
            self._counting = number
            self._touched.clear()
        sizes = {
            directory: _bytes_in(directory)
            for directory in storage_indexes(self._paths.shares, PREFIXES[number])
        }
        most = 0
        for _ in range(_MOST_TRIES):
            most = max(most, sum(sizes.values()))
            with self._lock:
                busy = {each for each in self._changing if prefix_number(each) == number}
                again = self._touched | busy
                if not again:
                    self._recounted_bytes += sum(sizes.values())
                    self._recounted.add(number)
                    return True
                self._touched = busy
            for storage_index in again:
                directory = self._paths.directory(storage_index)
                sizes[directory] = _bytes_in(directory)
            if busy:
                time.sleep(_TRY_AGAIN_S)
            if self._stopping:
                return False
        if bound:
            with self._lock:
                self._recounted_bytes += most
                self._recounted.add(number)
        return False


def _bytes_in(directory: str) -> int:
    return sum(size for _, size in share_files(directory))


def prefix_number(storage_index: bytes) -> int:
    """Return the position in ``PREFIXES`` of a storage index's prefix."""
    return storage_index[0] << 2 | storage_index[1] >> 6


_OF_CLIENT = "the quota of this client"


class ClientGrant(Protocol):
    """What a named client's quota allows during a change; see ``client_space.ClientChange``."""

    def has_space(self, more_bytes: int) -> bool:
        """
        Return whether the quota has space for more bytes; if so, they are reserved until the end of the
        change.
        """

    def may_hold(self, is_new: bool) -> bool:
        """Return whether the client's quota allows a lease on all of the shares; see ``ClientChange``."""


@attrs.define(eq=False, repr=False)
class SpaceChange:
    """
    One change of the shares of a storage index, which may make the shares grow; a context manager. If a quota
    prevents the change, ``NoSpace`` raised within it becomes ``QuotaReached``.

    Args:
        usage: None if the server has no quota.
        has_disk_space: takes a number of bytes; returns whether the disk has space for them.
        make_room: evicts unfinished uploads for a number of bytes that the quota lacks; returns whether it is
            enough.
        entered: a context manager that counts the change for named clients; entered and left along with this
            one.
    """

    _usage: SpaceUsage | None
    _storage_index: bytes
    _has_disk_space: HasRoom
    _make_room: HasRoom
    _entered: AbstractContextManager[ClientGrant]
    _client: ClientGrant = attrs.field(init=False)
    _reserved_bytes: int = 0
    _over_quota: str = ""

    def __repr__(self) -> str:
        return f"<SpaceChange of {self._storage_index.hex()}>"

    def __enter__(self) -> SpaceChange:
        self._client = self._entered.__enter__()
        if self._usage is not None:
            self._usage.begin(self._storage_index)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        usage = self._usage
        if usage is not None:
            usage.release(self._reserved_bytes)
            usage.end(self._storage_index)
        self._entered.__exit__(None, None, None)
        if self._over_quota and isinstance(error, NoSpace):
            raise QuotaReached(
                f"{self._over_quota} leaves no space for a change of the shares of "
                f"{base32.encode(self._storage_index)}; use another server"
            ) from error

    @property
    def counts(self) -> bool:
        """Whether ``grew`` has any effect."""
        return self._usage is not None

    def has_space(self, more_bytes: int) -> bool:
        """
        Return whether the shares may grow by more bytes; if so, these are reserved until the change ends.
        """
        if not self._client.has_space(more_bytes):
            self._over_quota = _OF_CLIENT
            return False
        return self._has_server_space(more_bytes)

    def may_hold(self, is_new: bool = True) -> bool:
        """Return whether the client's quota allows a lease on the shares, which then count for the client."""
        if self._client.may_hold(is_new):
            return True
        self._over_quota = _OF_CLIENT
        return False

    def _has_server_space(self, more_bytes: int) -> bool:
        if not self._has_disk_space(more_bytes):
            return False
        usage = self._usage
        if usage is None:
            return True
        missing = usage.reserve(more_bytes)
        if missing and (not self._make_room(missing) or usage.reserve(more_bytes)):
            self._over_quota = f"the quota of {amount(usage.quota_bytes)}"
            usage.tell_refused(more_bytes)
            return False
        self._reserved_bytes += more_bytes
        return True

    def has_lease_space(self, lease_bytes: int) -> bool:
        """
        Return whether a lease may be added. Leases may exceed the server's quota a little.

        Args:
            lease_bytes: 0 if the lease takes the place of another lease that is no longer valid.
        """
        self._over_quota = ""
        if not self.may_hold(lease_bytes > 0):
            return False
        if not lease_bytes or self._has_server_space(lease_bytes):
            return True
        if (
            self._usage is None
            or not self._over_quota
            or not self._usage.reserve_excess(lease_bytes)
        ):
            return False
        self._over_quota = ""
        self._reserved_bytes += lease_bytes
        return True

    def grew(self, more_bytes: int) -> None:
        """Count a difference in bytes, which may be negative."""
        if self._usage is not None and more_bytes:
            self._usage.grew(self._storage_index, more_bytes)
