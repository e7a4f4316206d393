"""
The note that an unfinished upload keeps beside its file, so that it survives its process.

Beside ``incoming/SI.7`` stands ``SI.7.upload``, which says whose upload it is and what has arrived. The
share alone could not say: it is sparse, and a hole reads as zeros. The note is made by the first
write that is acknowledged *without* completing the share, so small shares, which come whole, never
have one. It never claims more than the file holds, since it is written after the data.

It is believed only if all of this holds:

* its digest is right: a note torn by a crash is no note;
* the machine has not been started anew since (boot id): the kernel keeps what a killed process wrote, but
  the data may never have reached the disk while the note did;
* it names the inode that is there, and that has the full size of its container: a file is emptied
  before any older note is removed, so an orphan never vouches for a stranger.

Source: ours; Tahoe-LAFS has no such file, ignores it, and deletes ``incoming`` when it starts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

import attrs

from pipegrid.core.spans import Range

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


def parse(data: bytes) -> Note:
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
