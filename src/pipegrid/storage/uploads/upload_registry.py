"""
The registry of unfinished uploads of a storage directory: their owners, limits, open files and promised
space.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial

from twisted.logger import Logger

from pipegrid.disk import file_system_calls as disk
from pipegrid.errors import NoSpace, QuotaReached
from pipegrid.storage import share_file
from pipegrid.storage.client_space import FIRST_NUMBER, ClientUsage
from pipegrid.storage.space_quota import SpaceUsage
from pipegrid.storage.storage_paths import Paths, ShareKey, check_key
from pipegrid.storage.uploads import eviction, incoming_files
from pipegrid.storage.uploads.eviction import LEFT_BEHIND, NOBODY, Client, Eviction, UploadDemand
from pipegrid.storage.uploads.incoming_files import OpenedUpload
from pipegrid.storage.uploads.incoming_share import IncomingShare, WholeShares
from pipegrid.wire.storage_messages import LeaseSecrets, UploadSecrets


class OpenFiles:
    """
    Limits how many uploads have their files open. The file that is unused for longest is closed first.

    The files of complete uploads stay open until they are published; the caller limits how many wait for
    that.

    Args:
        most: the maximum number of open files.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # The upload that is unused for longest comes first.
        self._uploads: OrderedDict[ShareKey, IncomingShare] = OrderedDict()
        self._lock = threading.Lock()  # held only for moments

    def used(self, upload: IncomingShare) -> None:
        """
        Record that an upload's file is open and in use. The files of other uploads may be closed for it.
        """
        key = (upload.storage_index, upload.share_number)
        if upload.complete:
            self.discard(key)
            return
        with self._lock:
            self._uploads[key] = upload
            self._uploads.move_to_end(key)
            excess = len(self._uploads) - self._most
            if excess <= 0:
                return
            candidates = list(self._uploads.items())
        for key, other in candidates:
            if excess > 0 and other is not upload and other.suspend():
                excess -= 1
                with self._lock:
                    if not other.is_open:
                        self._uploads.pop(key, None)

    def discard(self, key: ShareKey) -> None:
        """Remove an upload that has ended, or whose file must stay open."""
        with self._lock:
            self._uploads.pop(key, None)

    def clear(self) -> None:
        """Remove all uploads, without closing their files."""
        with self._lock:
            self._uploads.clear()


# An unfinished upload belongs to the client that knows its secret, and survives connections and processes. A
# process that writes to an upload holds the lock of its file. If a share number has a file in ``incoming``,
# ``allocate`` decides as follows:
#
# * locked by this store, same secret: allocated; the upload continues;
# * locked by this store, another secret: rejected; but after 30 minutes without a write, as if it were
#   unlocked;
# * locked by another process: rejected;
# * unlocked (its process is dead), same secret, valid note: allocated; the upload is resumed;
# * unlocked, otherwise: the file is emptied, and the share allocated.
#
# So leftovers never block a client. On the other hand, after a restart the first client that allocates under
# another secret replaces an unfinished upload. The writer of that upload then gets ``NoSuchShare`` or
# ``WrongSecret`` and may allocate again, as after any restart of a Tahoe-LAFS server. A process that serves a
# directory alone counts leftovers when it starts (``adopt_leftovers``). Bytes that are still to arrive for
# this store's uploads count as used space; those for uploads of other processes are unknown.

log = Logger()

MANY_UPLOADS = 256
_CONTAINER_BYTES = share_file.container_bytes(0)


class UnfinishedUploads:
    """
    The unfinished uploads of a ``ShareStore``.

    Args:
        paths: the paths of the files.
        clock: seconds since 1970, for the age of uploads.
        date: returns the start date of new leases, in seconds since 1970.
        missing_bytes: takes a number of bytes; returns how much space is missing to promise that many more.
        max_open: how many uploads may have their files open.
        max_uploads: how many uploads there may be; see ``StoreSettings``.
        boot_id: see ``ShareStore``.
        clients: the quotas of named clients.
        usage: the server's quota, which uploads count against with the full length of their files; None for
            no quota.

    Attributes:
        clients, usage: see the arguments.
        allocated_bytes: the length of all shares that are being uploaded, including bytes that have arrived.
        client_bytes: for each named client's number, the full length of the files of its uploads.
        allocate_lock: held by callers of ``allocate``, from before they list the complete shares.
    """

    def __init__(
        self,
        paths: Paths,
        clock: Callable[[], float],
        date: Callable[[], float],
        missing_bytes: Callable[[int], int],
        max_open: int,
        max_uploads: int,
        boot_id: Callable[[], bytes],
        clients: ClientUsage,
        usage: SpaceUsage | None = None,
    ) -> None:
        self.clients = clients
        self.client_bytes: Counter[int] = Counter()
        self.usage = usage
        self._paths = paths
        self._clock, self._date = clock, date
        self._missing_bytes = missing_bytes
        self._max_uploads = max_uploads
        self._read_boot_id = boot_id
        self._uploads: dict[ShareKey, IncomingShare] = {}
        self.allocated_bytes = 0
        self._promised_bytes = 0
        # The second in which the results of ``kept`` were computed, and the results.
        self._kept = (-1, (0, 0))
        self._full_minute = -1  # in minutes since 1970: when a full disk was last reported
        self._given_up = 0  # evictions since the last report
        self._eviction: Eviction[IncomingShare] = Eviction()
        self._open = OpenFiles(max_open)
        self._whole = WholeShares(paths, clock, self)
        self._table_lock = threading.Lock()  # for the counts; held only for moments
        self.allocate_lock = threading.Lock()  # taken before other locks

    def __len__(self) -> int:
        return len(self._uploads)

    def __repr__(self) -> str:
        return f"<UnfinishedUploads in {self._paths.incoming!r}, {len(self)} of them>"

    def remaining_bytes(self) -> int:
        """Return how many bytes of disk space all uploads still need."""
        return self._promised_bytes

    @property
    def file_bytes(self) -> int:
        """The total full length of the files of all unfinished uploads."""
        return self.allocated_bytes + len(self._uploads) * _CONTAINER_BYTES

    def kept(self) -> tuple[int, int]:
        """
        Return what the uploads that cannot be evicted need: how many bytes are still to arrive, and the full
        length of their files. If there are many uploads, this is computed only once a second.
        """
        now = self._clock()
        second, kept = self._kept
        if second == int(now) and len(self._uploads) > MANY_UPLOADS:
            return kept
        with self._table_lock:
            those = [
                upload
                for upload in self._uploads.values()
                if upload.client == NOBODY or eviction.is_being_written(upload, now)
            ]
            kept = (
                sum(upload.remaining_bytes for upload in those),
                sum(share_file.container_bytes(upload.share_bytes) for upload in those),
            )
        self._kept = (int(now), kept)
        return kept

    def make_space(self, client: Client, asked: UploadDemand) -> bool:
        """
        Evict uploads for a demand; return whether the demand can be met, at least for one upload.

        A client that was rejected is rejected again for the rest of the second, since choosing among
        thousands of uploads takes time.
        """
        with self._table_lock:
            chosen = self._eviction.choose(self._uploads.values(), client, asked, self._clock())
        if not chosen:
            return False
        for upload in chosen:
            upload.discard()
        self._given_up += len(chosen)
        return True

    def allocate(
        self,
        storage_index: bytes,
        number: int,
        share_bytes: int,
        secrets: UploadSecrets,
        new_index: bool,
        client: Client = NOBODY,
    ) -> bool:
        """
        Begin an upload, or resume it; return whether this is allowed. A comment in this module lists the
        cases.

        Args:
            new_index: there was no directory for shares of this storage index.
            client: the uploader. Uploads of other clients may be evicted for it.
        """
        key = (storage_index, number)
        secret_hash = incoming_files.hash_secret(secrets.upload)
        upload = self._uploads.get(key)
        if upload is not None:
            if not self._yields(upload, secret_hash, share_bytes):
                same = hmac.compare_digest(upload.secret_hash, secret_hash)
                if not same or upload.share_bytes != share_bytes:
                    return False
                self._hand_over(upload, client)
                return True
            upload.discard()
        owner = secrets.lease.owner
        if not (
            self._has_client_space(share_bytes, owner) and self._has_space(share_bytes, client)
        ):
            return False
        call = key, share_bytes, secrets, secret_hash, new_index, client
        if self.usage is None and not owner:
            return self._begin(*call)
        with self._reserved(share_bytes, owner) as fits:
            return fits and self._begin(*call)

    def _begin(
        self,
        key: ShareKey,
        share_bytes: int,
        secrets: UploadSecrets,
        secret_hash: bytes,
        new_index: bool,
        client: Client,
    ) -> bool:
        """Begin an upload for which there is space, or resume it; return whether this is allowed."""
        path = self._paths.unfinished(*key)
        try:
            begun = incoming_files.begin(
                path,
                self._paths.final(*key),
                share_bytes,
                secret_hash,
                self._boot_id,
                partial(self._make_lease, secrets.lease),
                new_index,
            )
        except OSError as error:
            refusal = disk.disk_error(error, f"begin an upload in {path!r}")
            if isinstance(refusal, NoSpace):
                self._tell_full(refusal)
                return False
            raise refusal from error
        if begun is None:
            return False
        upload = self._adopt(key, share_bytes, secret_hash, begun, client)
        upload.new_index = new_index
        return True

    def take_whole(
        self, storage_index: bytes, number: int, data: bytes, secrets: UploadSecrets
    ) -> IncomingShare | None:
        """
        Store a share that arrived as a whole with its allocation. None if the share has to be uploaded in
        steps.
        """
        key = (storage_index, number)
        full = len(self._uploads) >= self._max_uploads or self._missing_bytes(len(data))
        if key in self._uploads or full:
            return None
        owner = secrets.lease.owner
        if self.usage is None and not owner:
            return self._store_whole(key, data, secrets)
        with self._reserved(len(data), owner) as fits:
            return self._store_whole(key, data, secrets) if fits else None

    def _store_whole(
        self, key: ShareKey, data: bytes, secrets: UploadSecrets
    ) -> IncomingShare | None:
        share = self._whole.make(
            key, data, secrets.upload, partial(self._make_lease, secrets.lease)
        )
        if share is not None:
            share.owner = secrets.lease.owner
            with self._table_lock:
                self._uploads[key] = share
                self._count(share, 1)
        return share

    def _count(self, upload: IncomingShare, sign: int) -> None:
        """
        Add the length of an upload to the counts (sign 1), or subtract it (-1). The caller holds
        ``_table_lock``.
        """
        self.allocated_bytes += sign * upload.share_bytes
        if upload.owner:
            size = upload.share_bytes + _CONTAINER_BYTES
            self.client_bytes[upload.owner] += sign * size
            if not self.client_bytes[upload.owner]:
                del self.client_bytes[upload.owner]

    @contextmanager
    def _reserved(self, share_bytes: int, owner: int = 0) -> Iterator[bool]:
        """
        Reserve space in the quotas for an upload, until the upload is in the table. Yield whether the quotas
        allow it.

        Args:
            owner: the number of a named client, whose own quota is then used, too; 0 for other clients.
        """
        usage, size = self.usage, share_file.container_bytes(share_bytes)
        with ExitStack() as reserved:
            if owner:
                if self.clients.reserve(owner, size):
                    yield False
                    return
                reserved.callback(self.clients.hold, owner, -size)
            if usage is not None:
                if usage.reserve(size):
                    yield False
                    return
                reserved.callback(usage.release, size)
            yield True

    def _tell_full(self, refusal: NoSpace) -> None:
        """
        Log, at most once a minute, that a file could not be created for lack of space, although the disk
        reports free space. A file system's own quota may be used up, for example.
        """
        minute = int(self._clock() // 60)
        if minute != self._full_minute:
            self._full_minute = minute
            log.warn("{error}", error=str(refusal))

    def _yields(self, upload: IncomingShare, secret_hash: bytes, share_bytes: int) -> bool:
        """
        Return whether a new upload replaces an existing upload of the same share.

        It does if the existing upload is stale and has another secret; or if an earlier process left it, and
        its secret or length is another one.
        """
        if upload.left_behind:
            mine = hmac.compare_digest(upload.secret_hash, secret_hash)
            return not mine or upload.share_bytes != share_bytes
        if hmac.compare_digest(upload.secret_hash, secret_hash):
            return False
        return eviction.is_stale(upload, self._clock())

    def _has_client_space(self, share_bytes: int, owner: int) -> bool:
        """
        Return whether a named client's quota has space for one more upload. If necessary, give up idle
        uploads of this client.
        """
        if not owner:
            return True
        missing_bytes = self.clients.missing(owner, share_file.container_bytes(share_bytes))
        if not missing_bytes:
            return True
        too_old = self._clock() - eviction.WRITTEN_S
        with self._table_lock:
            idle = [
                each
                for each in self._uploads.values()
                if each.owner == owner and not each.complete and each.last_write <= too_old
            ]
        idle.sort(key=lambda each: each.last_write)
        if sum(each.share_bytes + _CONTAINER_BYTES for each in idle) >= missing_bytes:
            for each in idle:
                each.discard()
                missing_bytes -= each.share_bytes + _CONTAINER_BYTES
                self._given_up += 1
                if missing_bytes <= 0:
                    return True
        self.clients.tell_refused(owner)
        return False

    def _has_space(self, share_bytes: int, client: Client) -> bool:
        """Return whether one more upload may begin. If necessary, evict other uploads."""
        if share_bytes > share_file.MAX_SHARE_BYTES:
            return False
        missing_bytes, over = self._missing_bytes(share_bytes), 0
        if self.usage is not None:
            over = self.usage.missing(share_file.container_bytes(share_bytes))
            missing_bytes = max(missing_bytes, over)
        missing_uploads = max(0, len(self._uploads) + 1 - self._max_uploads)
        if not missing_bytes and not missing_uploads:
            return True
        demand = UploadDemand(1, share_bytes, missing_uploads, missing_bytes)
        has_space = self.make_space(client, demand)
        if over and not has_space and self.usage is not None:
            self.usage.tell_refused(share_bytes)
        return has_space

    def upload(
        self, storage_index: bytes, share_number: int, upload_secret: bytes, client: Client = NOBODY
    ) -> IncomingShare:
        """Return an upload to write to; see ``ShareStore.upload``."""
        upload = self._find(storage_index, share_number, upload_secret, takes_space=True)
        if upload.left_behind or (client is not NOBODY and client not in (upload.client, NOBODY)):
            self._hand_over(upload, client)
        return upload

    def _find(
        self, storage_index: bytes, share_number: int, upload_secret: bytes, takes_space: bool
    ) -> IncomingShare:
        """
        Return an upload of this store, or one that another process has left.

        Args:
            takes_space: whether an upload that another process has left must fit into the quota.
        """
        key = check_key(storage_index, share_number)
        secret_hash = incoming_files.hash_secret(upload_secret)
        with self._table_lock:
            upload = self._uploads.get(key)
        if upload is None:
            with self.allocate_lock:
                upload = self._uploads.get(key) or self._take_up(key, secret_hash, takes_space)
        if not hmac.compare_digest(upload.secret_hash, secret_hash):
            raise incoming_files.wrong_secret(
                upload.storage_index, share_number, "under another secret"
            )
        return upload

    def _hand_over(self, upload: IncomingShare, client: Client) -> None:
        """Make an upload belong to another client from now on."""
        with self._table_lock:
            self._eviction.hand_over(upload, client)

    def abort(self, storage_index: bytes, share_number: int, upload_secret: bytes) -> None:
        """Remove an upload and its file. Arguments and errors are those of ``ShareStore.abort``."""
        upload = self._find(storage_index, share_number, upload_secret, takes_space=False)
        if upload.complete:
            raise incoming_files.no_such_upload(storage_index, share_number)
        upload.discard()

    def expire(self, too_old: float) -> int:
        """
        Give up uploads of this store that were last written before ``too_old``; return how many were given
        up.
        """
        given_up, self._given_up = self._given_up, 0
        if given_up:
            log.info("gave up {count} unfinished uploads to free space", count=given_up)
        with self._table_lock:
            self._eviction.clear()  # built again when space is short, which is cheap at this rate
            idle = [upload for upload in self._uploads.values() if upload.last_write <= too_old]
        for upload in idle:
            upload.discard()
        return len(idle)

    def adopt_leftovers(self) -> int:
        """
        Count the uploads that earlier processes left with a note; return how many there are.

        For a process that serves the directory alone. The files stay closed, so that other processes may
        resume the uploads, and the time of the last write is kept. Uploads beyond the limit are not counted;
        housekeeping removes them.
        """
        names = incoming_files.noted(self._paths.incoming)
        return sum(
            self._adopt_leftover(*key) for key in names if len(self._uploads) < self._max_uploads
        )

    def _adopt_leftover(self, storage_index: bytes, number: int) -> bool:
        key = (storage_index, number)
        path = self._paths.unfinished(*key)
        with self.allocate_lock:
            if key in self._uploads:
                return False
            try:
                resumed = incoming_files.resume(path, self._boot_id)
                if resumed is None:
                    return False
                fd, note = resumed
                written = os.fstat(fd).st_mtime
            except OSError:
                return False
            if sum(end - begin for begin, end in note.ranges) >= note.share_bytes:
                os.close(fd)  # complete, so no space is promised to it
                return False
            begun = OpenedUpload(fd, path, self._paths.final(*key), note)
            upload = self._adopt(key, note.share_bytes, note.secret_hash, begun, LEFT_BEHIND)
            upload.left_behind = True
            upload.last_write = min(written, upload.last_write)
            upload.suspend()
        return True

    def release(self) -> None:
        """Close the files of all uploads, so that other processes may resume the uploads."""
        with self._table_lock:
            open_ones = list(self._uploads.values())
        for upload in open_ones:
            upload.suspend()

    def close(self) -> None:
        """Close all uploads, and leave notes for processes that resume them."""
        with self._table_lock:
            open_ones = list(self._uploads.values())
            self._uploads.clear()
            self.allocated_bytes = self._promised_bytes = 0
            self.client_bytes.clear()
            self._open.clear()
            self._eviction.clear()
        for upload in open_ones:
            upload.close()

    # Parts of ``allocate`` and ``upload``, whose caller holds allocate_lock. Then the methods of
    # ``UploadKeeper``, whose caller need not hold it.

    def _make_lease(self, lease: LeaseSecrets) -> bytes:
        version, now = share_file.WRITTEN_VERSION, self._date()
        return share_file.pack_lease(version, share_file.OWNER_ALLOCATE, lease, now)

    def _take_up(self, key: ShareKey, secret_hash: bytes, takes_space: bool) -> IncomingShare:
        path = self._paths.unfinished(*key)
        fd, note = incoming_files.take_up(path, key, secret_hash, self._boot_id)
        begun = OpenedUpload(fd, path, self._paths.final(*key), note)
        owner = _owner_of(begun, note.share_bytes)
        reserved = self._reserved(note.share_bytes, owner) if takes_space else nullcontext(True)
        with reserved as fits:
            if fits:
                return self._adopt(key, note.share_bytes, secret_hash, begun, NOBODY)
        os.close(fd)
        raise QuotaReached("the quota leaves no space for this upload; use another server")

    def _adopt(
        self,
        key: ShareKey,
        share_bytes: int,
        secret_hash: bytes,
        begun: OpenedUpload,
        client: Client,
    ) -> IncomingShare:
        upload = IncomingShare(
            key, share_bytes, secret_hash, begun, self._boot_id, self._clock, self
        )
        upload.client = client
        upload.owner = _owner_of(begun, share_bytes)
        with self._table_lock:
            self._uploads[key] = upload
            self._count(upload, 1)
            self._eviction.add(upload)
        self.used(upload)
        return upload

    def used(self, upload: IncomingShare) -> None:
        """Update the count of bytes that are still to arrive, and limit the number of open files."""
        with self._table_lock:
            remaining = upload.remaining_bytes
            self._promised_bytes += remaining - upload.promised_bytes
            upload.promised_bytes = remaining
        self._open.used(upload)

    def forget(self, upload: IncomingShare) -> None:
        """Remove an upload that has ended from the table and the counts."""
        with self._table_lock:
            key = (upload.storage_index, upload.share_number)
            if self._uploads.get(key) is not upload:
                return
            del self._uploads[key]
            self._count(upload, -1)
            self._promised_bytes -= upload.promised_bytes
            self._eviction.remove(upload)
        self._open.discard(key)

    @cached_property
    def _boot_id(self) -> bytes:
        return self._read_boot_id()


def _owner_of(begun: OpenedUpload, share_bytes: int) -> int:
    """Return the number of the named client that began an upload, from the upload's lease; 0 if none did."""
    lease = begun.lease
    if lease is None:
        try:
            lease = os.pread(begun.fd, 4, share_file.HEADER_BYTES + share_bytes)
        except OSError:
            return 0
    owner = int.from_bytes(lease[:4], "big")
    return owner if owner >= FIRST_NUMBER else 0
