"""Files in `incoming`: create, resume, note, publish."""

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
from pipegrid.disk import files as disk
from pipegrid.disk.atomic_write import give_name
from pipegrid.disk.private_output import PRIVATE_DIRECTORY, PRIVATE_FILE, make_private
from pipegrid.errors import NoSuchShare, WrongSecret
from pipegrid.storage import share_file
from pipegrid.storage.storage_paths import SHARE_NUMBERS, ShareKey

# The note that an unfinished upload keeps beside its file, so that it survives its process.
#
# Beside ``incoming/SI.7`` stands ``SI.7.upload``, which says whose upload it is and what has arrived. The
# share alone could not say: it is sparse, and a hole reads as zeros. The note is made by the first
# write that is acknowledged *without* completing the share, so small shares, which come whole, never
# have one. It never claims more than the file holds, since it is written after the data.
#
# It is believed only if all of this holds:
#
# * its digest is right: a note torn by a crash is no note;
# * the machine has not been started anew since (boot id): the kernel keeps what a killed process wrote, but
#   the data may never have reached the disk while the note did;
# * it names the inode that is there, and that has the full size of its container: a file is emptied
#   before any older note is removed, so an orphan never vouches for a stranger.
#
# Source: ours; Tahoe-LAFS has no such file, ignores it, and deletes ``incoming`` when it starts.

SUFFIX = ".upload"
MAX_NOTED_RANGES = 240
"""The rest would only have to be sent again; and so a note fits in one page, which one write fills."""

_MAGIC = b"pipegrid upload 1\n"
_DIGEST_BYTES = 16
_FIXED = struct.Struct(">16s32sQQL")
_RANGE = struct.Struct(">QQ")


@lru_cache(maxsize=4)  # asked for each share of an upload, when it is begun and when it is written
def hash_secret(upload_secret: bytes) -> bytes:
    """Return the 32 bytes by which an upload secret is remembered."""
    return hashlib.blake2b(upload_secret, digest_size=32, person=b"pipegrid upload").digest()


@attrs.frozen
class Note:
    """
    What a process may leave to the next one.

    Attributes:
        boot_id: 16 bytes, of the machine's last start.
        secret_hash: 32 bytes, of the upload secret.
        inode: of the file that this is about.
        share_bytes: length of the whole share data.
        ranges: what has arrived, half-open.
    """

    boot_id: bytes
    secret_hash: bytes = attrs.field(repr=False)
    inode: int
    share_bytes: int
    ranges: Sequence[Range]

    def pack(self) -> bytes:
        """Return the content of the file, at most 4096 bytes."""
        noted = self.ranges[:MAX_NOTED_RANGES]
        fixed = (self.boot_id, self.secret_hash, self.inode, self.share_bytes, len(noted))
        body = _FIXED.pack(*fixed) + b"".join(_RANGE.pack(*pair) for pair in noted)
        return _MAGIC + _digest(body) + body


def parse_note(data: bytes) -> Note:
    """
    Return the note in ``data``; what may follow it, of an older and longer one, is ignored.

    Raises:
        ValueError: it is no note, or a torn one.
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


# The files of unfinished uploads: made, taken up again, given up, and moved to where complete shares are.
#
# What they mean is in ``table`` and ``upload``, how they are filled in ``writer``; here are the races
# with other processes, each of which may make, lock, rename and remove the same names.

_NOTED = re.compile(r"([a-z2-7]{26})\.([0-9]+)" + re.escape(SUFFIX))


def open_new(path: str) -> int | None:
    """Open, or make, and lock a file in ``incoming``; None if somebody else has the lock."""
    flags = os.O_RDWR | os.O_CREAT
    return _in_directory(path, lambda: disk.open_locked(path, flags, mode=PRIVATE_FILE))


def create(path: str) -> int | None:
    """Make and lock a file in ``incoming``; None if there is one."""
    try:
        return disk.create_locked(path, PRIVATE_FILE)
    except FileNotFoundError:
        return _in_directory(path, lambda: disk.create_locked(path, PRIVATE_FILE))


def open_empty(path: str, final_path: str) -> int | None:
    """Open and lock a file in ``incoming`` that is empty; None: another process has it, or had it."""
    fd = open_new(path)
    if fd is not None and (os.fstat(fd).st_size or os.path.lexists(final_path)):
        os.close(fd)
        fd = None
    return fd


def _in_directory(path: str, call: Callable[[], int | None]) -> int | None:
    """Call, having made the directory if it turns out to be missing."""
    for _ in range(8):  # a Tahoe-LAFS server that starts may remove the directory
        with suppress(FileNotFoundError):
            return call()
        make_private(os.path.dirname(path))
    raise FileNotFoundError(errno.ENOENT, "the directory vanishes", path)


def give_up(path: str, fd: int) -> None:
    """Remove a file that was just made, and close it; what cannot be removed is left to housekeeping."""
    with suppress(OSError):
        disk.remove(path)
    os.close(fd)


def remove_own(path: str, fd: int) -> None:
    """Remove an unfinished upload and its note, if its file is still the one that is open."""
    if disk.names_file(path, fd):
        disk.remove(path + SUFFIX)
        disk.remove(path)


def resume(
    incoming_path: str, boot_id: bytes, secret_hash: bytes | None = None
) -> tuple[int, Note] | None:
    """
    Take up an upload that no process has open.

    Args:
        secret_hash: of the upload that it has to be of; None: of any.

    Returns:
        the locked file and what its note says, or None if there is nothing to take up: no file, no
        note to believe, or somebody else has the lock.
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
    """Note what has arrived of an unfinished upload beside its file."""
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
    """Return the note about a file whose lock is held, or None if there is none to believe."""
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
    """Yield storage index and number of all unfinished uploads with a note; none if there is no directory."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        match = _NOTED.fullmatch(name)
        if match is not None and match[2] in SHARE_NUMBERS:
            with suppress(ValueError):  # 26 characters that are no 16 bytes
                yield base32.decode(match[1]), SHARE_NUMBERS[match[2]]


def rename(incoming: str, final: str, new_index: bool) -> tuple[str, ...]:
    """
    Move a complete share to its place, making directories only when they turn out to be missing.

    Args:
        new_index: expect no directory to be there.

    Returns:
        the directories that changed.

    Raises:
        FileExistsError: the share itself is there now.
    """
    return _place(final, new_index, partial(_moved, incoming, final))


def name(fd: int, final: str, new_index: bool) -> tuple[str, ...]:
    """
    Give a complete share that has no name its place, as ``rename`` does with one in ``incoming``.

    Raises:
        FileExistsError: the share is there now.
    """
    return _place(final, new_index, partial(_named, fd, final))


def _place(final: str, new_index: bool, move: Callable[[], bool]) -> tuple[str, ...]:
    inner = final.rpartition("/")[0]  # as ``Paths`` makes them
    outer = inner.rpartition("/")[0]
    if not new_index:
        if os.path.lexists(final):  # of what has no name nobody knows before (see ``whole``)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final)
        if move():
            return (inner,)
    for _ in range(8):  # a collector of garbage may remove the directory before our file is in it
        try:
            os.mkdir(inner, PRIVATE_DIRECTORY)
        except FileExistsError:
            if os.path.lexists(final):
                raise
        except FileNotFoundError:
            _make_both(outer, inner)
        if move():
            break
    else:
        raise FileNotFoundError(errno.ENOENT, "the directory vanishes", inner)
    return inner, outer, outer.rpartition("/")[0]


def _make_both(outer: str, inner: str) -> None:
    """Make two directories, without looking around: as a rule it is just these that lack."""
    try:
        with suppress(FileExistsError):
            os.mkdir(outer, PRIVATE_DIRECTORY)
        with suppress(FileExistsError):
            os.mkdir(inner, PRIVATE_DIRECTORY)
    except FileNotFoundError:
        make_private(inner)


def _moved(incoming: str, final: str) -> bool:
    try:
        os.rename(incoming, final)
    except FileNotFoundError:
        return False
    return True


def _named(fd: int, final: str) -> bool:
    try:
        give_name(fd, final)
    except FileNotFoundError:
        return False
    return True


# The file that an unfinished upload begins in, or goes on with: see ``table`` for who may.

ONE_CALL_BYTES = 4096
"""
The file of so small a share stays empty until its first write, which as a rule is its only one: header, data
and lease go with one call.
"""


@attrs.frozen
class OpenedUpload:
    """
    A file that may be written to, and is locked.

    Attributes:
        path, final_path: where it is, and where the complete share will be.
        note: of what had arrived, if it is gone on with.
        lease: to be written with the first bytes; None: it is in the file.
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
    Open the file of an upload that begins, or goes on with what had arrived; None if it may not.

    Args:
        path: in ``incoming``; ``final_path`` is where the complete share will be.
        new_index: there was no directory for shares of this index.

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
            # Another process finished it after we listed the shares. (Where there were none at all, the
            # directory is expected to be missing when this one is finished, and that is looked at.)
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
    Open the file of an upload that an earlier process, or this one, has closed; returns what it had noted.

    Raises:
        NoSuchShare: there is none, or nothing can be said of it.
        WrongSecret: somebody else has it.
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
    """Return the error for an upload that is not there."""
    return NoSuchShare(
        f"there is no unfinished upload of share {share_number} of {base32.encode(storage_index)}: "
        "it was never begun, or finished, aborted or given up; list the shares to see which"
    )


def wrong_secret(storage_index: bytes, share_number: int, how: str) -> WrongSecret:
    """Return the error for an upload that somebody else has; ``how`` says who."""
    return WrongSecret(
        f"share {share_number} of {base32.encode(storage_index)} is being uploaded {how}; "
        "wait until that is finished or given up"
    )
