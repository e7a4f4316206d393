"""The key of a file, convergent or random, and the note that keeps a random key for a resumed put."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from pipegrid.core import hashes, layout
from pipegrid.core.encoding_parameters import Geometry
from pipegrid.core.hashes import KEY_BYTES, FileSecrets, TaggedHasher, convergent_key_hasher
from pipegrid.disk.safe_open import is_file, names_file, open_locked
from pipegrid.errors import SourceError
from pipegrid.transfer.peers import Peer, TransferContext
from pipegrid.transfer.put.source import Source
from pipegrid.transfer.results import Progress
from pipegrid.wire.storage_messages import LeaseSecrets, UploadSecrets

# Data that is the same for all shares of one file.


class ShareSet(NamedTuple):
    """
    What the shares of a file have in common.

    Attributes:
        storage_index: 16 bytes; names the shares on servers, and determines the order of the ring.
        share_bytes: the length of each share.
        secrets: the file's secrets, from which the secrets for each server derive.
    """

    storage_index: bytes
    share_bytes: int
    secrets: FileSecrets

    def secrets_for(self, peer: Peer) -> UploadSecrets:
        """Return the secrets of this file on this server."""
        derived = self.secrets.for_server(peer.identity.lease_seed)
        return UploadSecrets(LeaseSecrets(derived.renew, derived.cancel), derived.upload)


class ShareTarget(NamedTuple):
    """
    One share and the server to which it is sent.

    Attributes:
        shares: the shares of the file.
        secrets: the file's secrets on this server.
    """

    peer: Peer
    share_number: int
    shares: ShareSet
    secrets: UploadSecrets


# A file and its key; the key determines the content of the shares and the servers that get them.
#
# A convergent key is computed in a first reading of the file. The reading runs in worker threads, in slices,
# so that cancellation takes effect soon and several files share the threads fairly.

_SLICE_BYTES = 8 << 20
_READ_BYTES = 1 << 18  # fits into a core's cache between reading and hashing


class KeyedFile(NamedTuple):
    """
    A file that is put, with its key.

    Attributes:
        source: the plaintext of the file.
        geometry: how the file is cut into segments and shares.
        happy: the servers of happiness that a stored file must reach.
        secret: the secret that, together with the content, determines the key; None: the key is random.
        key: 16 bytes.
        shares: the file's shares.
    """

    source: Source
    geometry: Geometry
    happy: int
    secret: bytes | None
    key: bytes
    shares: ShareSet

    def __repr__(self) -> str:
        return f"<KeyedFile {self.name!r}>"

    @property
    def name(self) -> str:
        return self.source.name

    async def check_unchanged(self, means: TransferContext) -> None:
        """
        Check that the encoded content is the content from which the key was derived.

        Raises:
            SourceError: the source has changed, or cannot be read.
        """
        if self.source.check_unchanged() or self.secret is None:
            return
        # The time stamps do not prove that the source is unchanged, so compare the content.
        if self.key != await _convergent_key(self.source, self.geometry, self.secret, means):
            raise SourceError(
                f"{self.name} changed while it was read; nothing was stored, try again when no "
                f"program writes to it"
            )


async def with_key(
    source: Source,
    geometry: Geometry,
    happy: int,
    secret: bytes | None,
    means: TransferContext,
    hashing: Progress | None = None,
) -> KeyedFile:
    """
    Return the file with its key; equal plaintext, parameters and secret give equal keys.

    Args:
        secret: the secret of a convergent key; None: use a random key, which no other put has.
        hashing: called with the number of bytes that were read, and the total.
    """
    if secret is None:
        key = os.urandom(KEY_BYTES)
    else:
        key = await _convergent_key(source, geometry, secret, means, hashing)
    index = hashes.storage_index(key)
    shares = ShareSet(index, layout.share_bytes(geometry), means.secrets.for_file(index))
    return KeyedFile(source, geometry, happy, secret, key, shares)


async def _convergent_key(
    source: Source,
    geometry: Geometry,
    convergence: bytes,
    means: TransferContext,
    hashing: Progress | None = None,
) -> bytes:
    hasher = convergent_key_hasher(
        convergence, geometry.required_shares, geometry.total_shares, geometry.segment_bytes
    )
    for start in range(0, source.size, _SLICE_BYTES):
        length = min(_SLICE_BYTES, source.size - start)
        if hashing is not None:
            hashing(start, source.size)
        await means.workers.run_if_large(length, _hash_slice, source, hasher, start, length)
    return hasher.digest()[:KEY_BYTES]


def _hash_slice(source: Source, hasher: TaggedHasher, start: int, length: int) -> None:
    for offset in range(start, start + length, _READ_BYTES):
        hasher.update(source.read_at(offset, min(_READ_BYTES, start + length - offset)))


# Notes of the secrets of puts with random keys, so that an interrupted put can be resumed.
#
# A repeated put finds the shares that it has sent only if it uses the same key. A convergent key derives from
# the content; a random key would be lost with its process. So the secret of the key is noted before anything
# is sent, in a file of mode 0600 in the client's own directory, and the next put of the same file uses that
# secret. When a put is done its note is removed.
#
# **Which file is the same.** A note's name is a hash of the file's absolute path, device, inode, size and
# time of last change, and of the encoding parameters. The note contains nothing else about the file.
#
# **The note does not contain the key**, but 32 random bytes in place of the convergence secret: the key
# derives from these *and the content*. So one key never encrypts two contents, even if the file changes
# without a new time stamp. Otherwise anyone who compares the two ciphertexts could learn about both contents.
# The cost is one more reading of the file, the same as for a convergent key.
#
# **What a note reveals.** With the note and the file's content, a reader can derive the file's key and cap,
# and so prove that the file was stored. Without the content the note reveals nothing. The client's own user
# and root can read the note; they can also read the client's secrets, and usually the file. If they guess
# path, size and time, the note's name shows that a put of such a file was begun and not finished. A note is
# removed but not overwritten: the disk may keep its bytes, like the bytes of the file. Servers learn nothing
# from notes: the key is as random as any other.
#
# **Bounds.** Only files of more than one segment have notes: a smaller file is one message to each server, so
# there is nothing to resume. The next put, of any file, removes notes that were not used for a week, since
# servers do not keep unfinished shares longer. If there are more than ``MAX_NOTES``, it removes the oldest
# ones, too.
#
# **Several processes.** A note is locked while its put runs. A put that finds the note locked uses a new key
# and no note: two puts at the same time have two caps. The kernel releases the lock when the process ends. A
# put continues even if its note cannot be written; a damaged note is renamed. Both cases are reported.

MAX_NOTES = 100
MAX_AGE_S = 7 * 24 * 3600.0

SECRET_BYTES = 32
_MAGIC = "pipegrid unfinished put 1"
_MAX_BYTES = 1000
_ASIDE = ".damaged"
_TRIES = 4
"""Maximum attempts to open a note: a put that ends may remove the note while another process opens it."""


class KeyNote:
    """
    The note of a running put; its file is locked until ``keep`` or ``remove``.

    Attributes:
        secret: 32 bytes, used as a convergence secret.
        resumed: whether an earlier put has written the note.
    """

    def __init__(self, file: FileIO, path: str, secret: bytes, resumed: bool) -> None:
        self.secret = secret
        self.resumed = resumed
        self._path = path
        self._file = file

    def __repr__(self) -> str:
        return f"<KeyNote {self._path!r}{' resumed' if self.resumed else ''}>"

    def keep(self) -> None:
        """Close the note and leave it for the next put of the file."""
        self._file.close()

    def remove(self) -> None:
        """Remove the note, since the put is done."""
        with suppress(OSError):
            os.unlink(self._path)
        self._file.close()


class KeyNotes:
    """
    The notes in one directory. All methods block, so call them in a worker thread.

    Args:
        directory: created on demand, accessible to its owner only.
        say: gets a sentence if a note is damaged or cannot be written.
        clock: returns seconds since 1970.
    """

    def __init__(
        self,
        directory: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._say = say
        self._clock = clock

    def take(self, path: str, identity: tuple[int, ...], geometry: Geometry) -> KeyNote | None:
        """
        Return the note of a file: a new note, or that of an interrupted put.

        Args:
            path: absolute path of the file.
            identity: distinguishes the file from earlier and later files at that path.

        Returns:
            None if another put of the same file is running, or the note cannot be written.
        """
        name = _name(path, identity, geometry)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._tidy(name)
            for _ in range(_TRIES):
                found = self._open(str(self._directory / name))
                if found is not None:
                    return found
        except BlockingIOError:
            return None  # another put of the file is running
        except OSError as error:
            self._say(
                f"cannot note the key of {path} in {self._directory}: {error.strerror}; "
                "if this put is interrupted, the next one will send all of it again"
            )
        return None

    def forget_stale(self) -> None:
        """
        Remove notes that are too old, and the oldest if there are too many; create no directory, and report
        no errors.
        """
        with suppress(OSError):
            self._tidy("")

    def _open(self, path: str) -> KeyNote | None:
        """
        Return the note at this path; None if the note was removed during the call, or was damaged and
        renamed.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
        try:
            _lock(file, path)
            if not names_file(path, file.fileno()):
                file.close()
                return None
            os.fchmod(file.fileno(), 0o600)
            data = file.read(_MAX_BYTES)
            try:
                secret = _parse(data) if data else os.urandom(SECRET_BYTES)
            except ValueError:
                os.replace(path, path + _ASIDE)
                file.close()
                self._say(
                    f"{path} is damaged, and is set aside as {path + _ASIDE}: its put starts again from the "
                    "beginning"
                )
                return None
            if data:
                os.utime(path, (self._clock(), self._clock()))
            else:
                file.write(_pack(secret))
        except BaseException:
            file.close()
            raise
        return KeyNote(file, path, secret, bool(data))

    def _tidy(self, wanted: str) -> None:
        """Remove notes that are too old, and the oldest notes if there are too many; keep notes in use."""
        notes = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.name != wanted and is_file(entry):
                        notes.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
        notes.sort(reverse=True)
        too_old = self._clock() - MAX_AGE_S
        for place, (changed, path) in enumerate(notes):
            if changed < too_old or place >= MAX_NOTES - 1:
                with suppress(OSError):
                    _remove_unused(path)


def _name(path: str, identity: tuple[int, ...], geometry: Geometry) -> str:
    encoding = (geometry.required_shares, geometry.total_shares, geometry.segment_bytes)
    identified = repr((os.fsencode(path), identity, encoding)).encode()
    return hashlib.blake2b(identified, digest_size=16, person=b"pipegrid put").hexdigest()


def _lock(file: FileIO, path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # without locks the empty note would never be removed
        with suppress(OSError):
            if not os.fstat(file.fileno()).st_size:
                os.unlink(path)
        raise


def _remove_unused(path: str) -> None:
    fd = open_locked(path, os.O_RDONLY)
    if fd is not None:
        try:
            os.unlink(path)
        finally:
            os.close(fd)


def _digest(secret: bytes) -> str:
    return hashlib.blake2b(secret, digest_size=8, person=b"pipegrid note").hexdigest()


def _pack(secret: bytes) -> bytes:
    return f"{_MAGIC}\n{secret.hex()}\n{_digest(secret)}\n".encode("ascii")


def _parse(data: bytes) -> bytes:
    """
    Return the secret in a note.

    Raises:
        ValueError: the data is not a valid note.
    """
    magic, text, digest, *rest = [*data.decode("ascii").split("\n"), "", "", ""]
    if magic != _MAGIC or rest[:1] != [""]:
        raise ValueError("not a note of an unfinished put")
    secret = bytes.fromhex(text)
    if len(secret) != SECRET_BYTES or digest != _digest(secret):
        raise ValueError("a torn note of an unfinished put")
    return secret
