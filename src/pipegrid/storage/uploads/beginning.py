"""
The file that an unfinished upload begins in, or goes on with: see ``table`` for who may.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable

import attrs

from pipegrid.core import base32
from pipegrid.disk import files as disk
from pipegrid.errors import NoSuchShare, WrongSecret
from pipegrid.storage import containers
from pipegrid.storage.paths import ShareKey
from pipegrid.storage.uploads import files as incoming
from pipegrid.storage.uploads import note as sidecar

ONE_CALL_BYTES = 4096
"""
The file of so small a share stays empty until its first write, which as a rule is its only one: header, data
and lease go with one call.
"""


@attrs.frozen
class BegunFile:
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
    note: sidecar.Note | None
    lease: bytes | None = None


def begin(
    path: str,
    final_path: str,
    share_bytes: int,
    secret_hash: bytes,
    boot_id: bytes,
    make_lease: Callable[[], bytes],
    new_index: bool,
) -> BegunFile | None:
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
        fd = incoming.create(path)
        new = fd is not None
        if fd is None:
            fd = incoming.open_new(path)
            if fd is None:
                return None
        if not (new and new_index) and os.path.lexists(final_path):
            # Another process finished it after we listed the shares. (Where there were none at all, the
            # directory is expected to be missing when this one is finished, and that is looked at.)
            incoming.give_up(path, fd)
            return None
        note = None if new else incoming.read_note(path, fd, boot_id)
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
                disk.remove(path + sidecar.SUFFIX)
            lease = make_lease()
            if not small:
                disk.write_all(fd, containers.pack_header(share_bytes, 1), 0)
                disk.write_all(fd, lease, containers.HEADER_BYTES + share_bytes)
                lease = None
    except OSError:
        if fd is not None:
            incoming.give_up(path, fd)
        raise
    return BegunFile(fd, path, final_path, note, lease)


def take_up(
    path: str, key: ShareKey, secret_hash: bytes, boot_id: bytes
) -> tuple[int, sidecar.Note]:
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
    note = incoming.read_note(path, fd, boot_id)
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
