"""The files of unfinished uploads: creating and resuming them, notes of what has arrived, and publishing."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial

import attrs

from pipegrid.core import base32
from pipegrid.core.spans import Range
from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.atomic_write import give_name
from pipegrid.disk.private_files import PRIVATE_DIRECTORY, PRIVATE_FILE, make_private
from pipegrid.errors import NoSuchShare, WrongSecret
from pipegrid.storage import share_file
from pipegrid.storage.storage_paths import SHARE_NUMBERS, ShareKey

# A note, ``SI.7.upload`` next to ``incoming/SI.7``, records whose upload this is and which ranges have
# arrived, so that the upload survives its process. The upload's file alone is not enough: it is sparse, and a
# hole reads as zeros. The note is written after the first write that does not complete the share, so small
# shares never have one. It is written after the data, so it never claims more than the file holds.
#
# A note is used only if
#
# * its digest is right: a note may be incomplete after a crash;
# * the machine has not been started again since (boot id): the kernel keeps what a killed process wrote,
#   but after a power cut the disk may have the note without the data;
# * it names the inode of the file, and the file has the full size of its container: a file is emptied
#   before an older note is removed, so an orphaned note never applies to another file.
#
# Tahoe-LAFS has no such notes; it ignores them, and empties ``incoming`` when it starts.

SUFFIX = ".upload"
MAX_NOTED_RANGES = 240
"""
The maximum number of ranges in a note, so that it fits in one page, which one write fills. Bytes in further
ranges would only have to be sent again.
"""

_MAGIC = b"pipegrid upload 1\n"
_DIGEST_BYTES = 16
_FIXED = struct.Struct(">16s32sQQL")
_RANGE = struct.Struct(">QQ")


@lru_cache(maxsize=4)  # called twice per share: at its start and its write
def hash_secret(upload_secret: bytes) -> bytes:
    """Return the 32 bytes that are stored for an upload secret."""
    return hashlib.blake2b(upload_secret, digest_size=32, person=b"pipegrid upload").digest()


@attrs.frozen
class Note:
    """
    The state of an upload that a process records for the next one.

    Attributes:
        boot_id: 16 bytes that identify the machine's last start.
        secret_hash: 32 bytes, the hash of the upload secret.
        inode: the inode number of the upload's file.
        share_bytes: the length of the whole share data.
        ranges: the half-open ranges that have arrived.
    """

    boot_id: bytes
    secret_hash: bytes = attrs.field(repr=False)
    inode: int
    share_bytes: int
    ranges: Sequence[Range]

    def pack(self) -> bytes:
        """Return the content of the note's file, at most 4096 bytes."""
        noted = self.ranges[:MAX_NOTED_RANGES]
        fixed = (self.boot_id, self.secret_hash, self.inode, self.share_bytes, len(noted))
        body = _FIXED.pack(*fixed) + b"".join(_RANGE.pack(*pair) for pair in noted)
        return _MAGIC + _digest(body) + body


def parse_note(data: bytes) -> Note:
    """
    Parse a note. Bytes after it, which an older and longer note left, are ignored.

    Raises:
        ValueError: this is not a note, or an incomplete one.
    """
    begin = len(_MAGIC) + _DIGEST_BYTES
    if not data.startswith(_MAGIC) or len(data) < begin + _FIXED.size:
        raise ValueError("no note of an unfinished upload")
    boot_id, secret_hash, inode, share_bytes, count = _FIXED.unpack_from(data, begin)
    end = begin + _FIXED.size + count * _RANGE.size
    if data[len(_MAGIC) : begin] != _digest(data[begin:end]):
        raise ValueError("a torn note of an unfinished upload")
    ranges = tuple(_RANGE.iter_unpack(data[begin + _FIXED.size : end]))
    return Note(boot_id, secret_hash, inode, share_bytes, ranges)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


# Other processes may create, lock, rename and remove files of the same names at any time.

_NOTED = re.compile(r"([a-z2-7]{26})\.([0-9]+)" + re.escape(SUFFIX))


def open_new(path: str) -> int | None:
    """Open and lock a file in ``incoming``, or create it; None if another process has the lock."""
    flags = os.O_RDWR | os.O_CREAT
    return _in_directory(path, lambda: disk.open_locked(path, flags, mode=PRIVATE_FILE))


def create(path: str) -> int | None:
    """Create and lock a file in ``incoming``; None if the file exists."""
    try:
        return disk.create_locked(path, PRIVATE_FILE)
    except FileNotFoundError:
        return _in_directory(path, lambda: disk.create_locked(path, PRIVATE_FILE))


def open_empty(path: str, final_path: str) -> int | None:
    """
    Open and lock an empty file in ``incoming``. None if another process has the lock or has written to it, or
    the share is complete.
    """
    fd = open_new(path)
    if fd is not None and (os.fstat(fd).st_size or os.path.lexists(final_path)):
        os.close(fd)
        fd = None
    return fd


def _in_directory(path: str, call: Callable[[], int | None]) -> int | None:
    """Call ``call`` and return its result; create the directory of ``path`` if it is missing."""
    for _ in range(8):  # a starting Tahoe-LAFS server may remove the directory
        with suppress(FileNotFoundError):
            return call()
        make_private(os.path.dirname(path))
    raise FileNotFoundError(errno.ENOENT, "the directory vanishes", path)


def give_up(path: str, fd: int) -> None:
    """
    Remove a file that was just created, and close it. If the file cannot be removed, housekeeping removes it
    later.
    """
    with suppress(OSError):
        disk.remove(path)
    os.close(fd)


def remove_own(path: str, fd: int) -> None:
    """Remove an unfinished upload and its note, if ``path`` is still the name of the open file."""
    if disk.names_file(path, fd):
        disk.remove(path + SUFFIX)
        disk.remove(path)


def resume(
    incoming_path: str, boot_id: bytes, secret_hash: bytes | None = None
) -> tuple[int, Note] | None:
    """
    Resume an upload that no process has open.

    Args:
        secret_hash: the hash of the upload's secret; None to resume an upload with any secret.

    Returns:
        the locked file and its note. None if there is no file or no valid note, if the upload has another
            secret, or if another process has the lock.
    """
    try:
        fd = disk.open_locked(incoming_path, os.O_RDWR)
    except FileNotFoundError:
        return None
    if fd is None:
        return None
    try:
        note = read_note(incoming_path, fd, boot_id)
    except BaseException:
        os.close(fd)
        raise
    if note is None or secret_hash not in (None, note.secret_hash):
        os.close(fd)
        return None
    return fd, note


def write_note(incoming_path: str, note: Note) -> None:
    """Record in a note, next to the upload's file, what has arrived."""
    fd = os.open(
        incoming_path + SUFFIX,
        os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
        PRIVATE_FILE,
    )
    try:
        disk.write_all(fd, note.pack(), 0)
    finally:
        os.close(fd)


def read_note(incoming_path: str, fd: int, boot_id: bytes) -> Note | None:
    """Return the note about a file whose lock is held, or None if there is no valid note."""
    try:
        note_fd = os.open(
            incoming_path + SUFFIX,
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
        )
    except OSError:
        return None
    try:
        note = parse_note(os.read(note_fd, 4096))
    except (OSError, ValueError):
        return None
    finally:
        os.close(note_fd)
    status = os.fstat(fd)
    whole = share_file.container_bytes(note.share_bytes)
    if (note.boot_id, note.inode, whole) != (boot_id, status.st_ino, status.st_size):
        return None
    return note


def noted(directory: str) -> Iterator[tuple[bytes, int]]:
    """
    Yield storage index and share number of all unfinished uploads with a note. Nothing if the directory does
    not exist.
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        match = _NOTED.fullmatch(name)
        if match is not None and match[2] in SHARE_NUMBERS:
            with suppress(ValueError):  # some texts of 26 characters encode no 16 bytes
                yield base32.decode(match[1]), SHARE_NUMBERS[match[2]]


def rename(incoming: str, final: str, new_index: bool) -> tuple[str, ...]:
    """
    Rename a complete share to its final path; create directories if they are missing.

    Args:
        new_index: the directory of the storage index is expected to be missing.

    Returns:
        the directories that changed.

    Raises:
        FileExistsError: the share exists already.
    """
    return _place(final, new_index, partial(os.rename, incoming, final))


def name(fd: int, final: str, new_index: bool) -> tuple[str, ...]:
    """
    Give an unnamed complete share its final path, just as ``rename`` does for a share in ``incoming``.

    Raises:
        FileExistsError: the share exists already.
    """
    return _place(final, new_index, partial(give_name, fd, final))


def _place(final: str, new_index: bool, move: Callable[[], object]) -> tuple[str, ...]:
    inner = final.rpartition("/")[0]  # ``Paths`` uses this separator
    outer = inner.rpartition("/")[0]
    if not new_index:
        # another process may have stored the share, since it does not see unnamed files
        if os.path.lexists(final):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final)
        if _finds_directory(move):
            return (inner,)
    # The garbage collector of another process may remove the new directory while it is still empty.
    for _ in range(8):
        try:
            os.mkdir(inner, PRIVATE_DIRECTORY)
        except FileExistsError:
            if os.path.lexists(final):
                raise
        except FileNotFoundError:
            _make_both(outer, inner)
        if _finds_directory(move):
            break
    else:
        raise FileNotFoundError(errno.ENOENT, "the directory vanishes", inner)
    return inner, outer, outer.rpartition("/")[0]


def _make_both(outer: str, inner: str) -> None:
    """Create two directories without checking first: usually exactly these two are missing."""
    try:
        with suppress(FileExistsError):
            os.mkdir(outer, PRIVATE_DIRECTORY)
        with suppress(FileExistsError):
            os.mkdir(inner, PRIVATE_DIRECTORY)
    except FileNotFoundError:
        make_private(inner)


def _finds_directory(move: Callable[[], object]) -> bool:
    """Call ``move``, and return whether its directory existed."""
    try:
        move()
    except FileNotFoundError:
        return False
    return True


ONE_CALL_BYTES = 4096
"""
The file of a share up to this size stays empty until its first write, which is usually the only one: then
header, data and lease are written with one call.
"""


@attrs.frozen
class OpenedUpload:
    """
    A file that is locked and may be written.

    Attributes:
        path, final_path: its present path, and the path of the complete share.
        note: the note of what had arrived, if the upload was resumed.
        lease: the lease to write with the first bytes; None if the file contains its lease already.
    """

    fd: int
    path: str
    final_path: str
    note: Note | None
    lease: bytes | None = None


def begin(
    path: str,
    final_path: str,
    share_bytes: int,
    secret_hash: bytes,
    boot_id: bytes,
    make_lease: Callable[[], bytes],
    new_index: bool,
) -> OpenedUpload | None:
    """
    Open the file of a new or resumed upload. None if another process has it open, or the share is complete.

    Args:
        path: the path in ``incoming``.
        final_path: the path of the complete share.
        new_index: there was no directory for shares of this storage index.

    Raises:
        OSError: the disk failed.
    """
    fd, lease = None, None
    try:
        fd = create(path)
        new = fd is not None
        if fd is None:
            fd = open_new(path)
            if fd is None:
                return None
        if not (new and new_index) and os.path.lexists(final_path):
            # Another process finished the share after this one had listed the shares. (If the storage index
            # had no directory then, this is not checked here: publishing notices that the directory exists.)
            give_up(path, fd)
            return None
        note = None if new else read_note(path, fd, boot_id)
        if (
            note is None
            or not hmac.compare_digest(note.secret_hash, secret_hash)
            or note.share_bytes != share_bytes
        ):
            note = None
            small = share_bytes <= ONE_CALL_BYTES
            if not new:
                os.ftruncate(fd, 0)
            if not (new and small):
                disk.remove(path + SUFFIX)
            lease = make_lease()
            if not small:
                disk.write_all(fd, share_file.pack_header(share_bytes, 1), 0)
                disk.write_all(fd, lease, share_file.HEADER_BYTES + share_bytes)
                lease = None
    except OSError:
        if fd is not None:
            give_up(path, fd)
        raise
    return OpenedUpload(fd, path, final_path, note, lease)


def take_up(path: str, key: ShareKey, secret_hash: bytes, boot_id: bytes) -> tuple[int, Note]:
    """
    Open the file of an upload that this process or an earlier one has closed. Return the file and its note.

    Raises:
        NoSuchShare: the upload does not exist, or has no valid note.
        WrongSecret: the upload has another secret, or another process is writing it.
        ServerRefused: the disk failed.
    """
    try:
        fd = disk.open_locked(path, os.O_RDWR)
    except FileNotFoundError:
        raise no_such_upload(*key) from None
    except OSError as error:
        raise disk.disk_error(error, f"resume the upload in {path!r}") from error
    if fd is None:
        raise wrong_secret(*key, "by another process")
    note = read_note(path, fd, boot_id)
    if note is None:
        os.close(fd)
        raise no_such_upload(*key)
    if not hmac.compare_digest(note.secret_hash, secret_hash):
        os.close(fd)
        raise wrong_secret(*key, "under another secret")
    return fd, note


def no_such_upload(storage_index: bytes, share_number: int) -> NoSuchShare:
    """Return the error for an upload that does not exist."""
    return NoSuchShare(
        f"there is no unfinished upload of share {share_number} of {base32.encode(storage_index)}: "
        "it was never begun, or finished, aborted or given up; list the shares to see which"
    )


def wrong_secret(storage_index: bytes, share_number: int, how: str) -> WrongSecret:
    """
    Return the error for an upload that another client has. ``how`` completes the words "is being uploaded".
    """
    return WrongSecret(
        f"share {share_number} of {base32.encode(storage_index)} is being uploaded {how}; "
        "wait until that is finished or given up"
    )
