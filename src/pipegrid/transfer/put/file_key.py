"""Convergent or random key; note of a random key."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

import attrs

from pipegrid.core import hashes, layout
from pipegrid.core.encoding_parameters import Geometry
from pipegrid.core.hashes import KEY_BYTES, TaggedHasher, convergent_key_hasher
from pipegrid.core.lease_secrets import FileSecrets
from pipegrid.disk.safe_open import is_file, names_file, open_locked
from pipegrid.errors import SourceError
from pipegrid.transfer.peers import Peer, TransferContext, upload_secrets
from pipegrid.transfer.put.source import Source
from pipegrid.transfer.results import Progress
from pipegrid.wire.messages import UploadSecrets

# The shares of one file as all servers know them, whichever share it is and wherever it goes.


@attrs.frozen(eq=False)
class ShareSet:
    """
    What the shares of a file have in common.

    Attributes:
        storage_index: 16 bytes; names them on servers, and decides the ring.
        share_bytes: the length of each.
        secrets: from which those for each server derive.
    """

    storage_index: bytes
    share_bytes: int
    secrets: FileSecrets = attrs.field(repr=False)

    def secrets_for(self, peer: Peer) -> UploadSecrets:
        """Return the secrets of this file on this server."""
        return upload_secrets(self.secrets, peer.identity)


@attrs.frozen(eq=False)
class ShareTarget:
    """
    One share and the server that it is sent to.

    Attributes:
        shares: those of the file.
        secrets: of the file on this server.
    """

    peer: Peer
    share_number: int
    shares: ShareSet
    secrets: UploadSecrets = attrs.field(repr=False)


# A file and its key: with both it is decided what its shares are, and where they go.
#
# To make the key of the content is the first pass over a file. It runs in a worker, in slices, so that
# cancellation takes effect soon and several files share the workers fairly.

_SLICE_BYTES = 8 << 20
_READ_BYTES = 1 << 18  # stays in a core's cache between reading and hashing


@attrs.frozen(eq=False)
class KeyedFile:
    """
    One file that is put, once its key is known.

    Attributes:
        source: its plaintext.
        geometry: how it is cut.
        happy: servers of happiness without which it does not count as stored.
        secret: what the key is made of beside the content; None: the key comes of nothing.
        key: 16 bytes.
        shares: what it becomes.
    """

    source: Source
    geometry: Geometry
    happy: int
    secret: bytes | None = attrs.field(repr=False)
    key: bytes = attrs.field(repr=False)
    shares: ShareSet

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.source.name

    async def check_unchanged(self, means: TransferContext) -> None:
        """
        Make sure that what was coded is what the key was made of.

        Raises:
            SourceError: the source has changed, or cannot be read.
        """
        if self.source.check_unchanged() or self.secret is None:
            return
        # The time stamps cannot tell; the content can.
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
    Return the file with the key that equal plaintext, parameters and secret always give.

    Args:
        secret: None: with a key that no one else will ever have, nor ever converge with.
        hashing: called with the bytes that were read, and with all that there are.
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


# Noting the secrets of puts with random keys, so that one that was cut off can go on.
#
# A put that is run again finds what it had sent only if it makes the same key. A convergent key comes from
# the content; a random one would be lost with its process. So its secret is noted, before anything is sent,
# in a file of mode 0600 in the client's own directory, and the next put of the same file takes it up. When a
# put is done its note is removed.
#
# **Which file is the same.** A note's name is a hash of the file's absolute path, device, inode, size and
# time of last change, and of the encoding parameters. There is nothing else of these in it.
#
# **What is noted is not the key**, but 32 random bytes that take the place of the convergence secret: the
# key is made of them *and of the content*. So one key never enciphers two contents, whatever became of the
# file and its time stamps meanwhile, which with a key alone would lay both open to whoever compares their
# ciphertexts. It costs one reading of the file, as every put with a convergent key does.
#
# **What a note reveals, and to whom.** Whoever reads it while it is there can, with the file's content, make
# its key and cap, and so prove that it was stored. Without the content it gives nothing. It can be read by
# the client's own user and by root, who can read the client's secrets, and mostly the file, as well. Its
# name tells them, if they guess path, size and time, that a put of such a file was begun and not ended. It
# is removed and not overwritten: a disk may keep it, as it may the file. Servers see nothing of it: the key
# is as random as any.
#
# **Bounds.** Files of more than one segment have notes: a smaller one is one message to each server, and
# there is nothing to go on with. A note that nobody has taken up for a week is removed by the next put of
# whatever kind, since servers keep nothing longer; and of more than ``MAX_NOTES`` the oldest.
#
# **Several processes.** A note is locked while its put runs. Whoever finds it locked has a fresh key and no
# note: two puts at the same time are two, with two caps. The kernel drops the lock with the process. A note
# that cannot be made stops no put; one that cannot be understood is set aside. A sentence says so.

MAX_NOTES = 100
MAX_AGE_S = 7 * 24 * 3600.0

SECRET_BYTES = 32
_MAGIC = "pipegrid unfinished put 1"
_MAX_BYTES = 1000
_ASIDE = ".damaged"
_TRIES = 4
"""A note may be removed, by the put that ends just now, while another process opens it."""


class KeyNote:
    """
    The note of one put that runs; its file is locked until it is let go of.

    Attributes:
        secret: 32 bytes, to be used as a convergence secret.
        resumed: whether an earlier put noted it.
    """

    def __init__(self, file: FileIO, path: str, secret: bytes, resumed: bool) -> None:
        self.secret = secret
        self.resumed = resumed
        self._path = path
        self._file = file

    def __repr__(self) -> str:
        return f"<KeyNote {self._path!r}{' resumed' if self.resumed else ''}>"

    def keep(self) -> None:
        """Leave it for the next put of the file."""
        self._file.close()

    def remove(self) -> None:
        """The put is done: nobody needs it any more."""
        with suppress(OSError):
            os.unlink(self._path)
        self._file.close()


class KeyNotes:
    """
    The notes in one directory. All methods block and are meant for a worker thread.

    Args:
        directory: is made when it is needed, for its owner only.
        say: told in a sentence if something is wrong with a note, or with making one.
        clock: seconds since 1970.
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
        Return the note of a file, a new one or that of a put that was cut off.

        Args:
            path: of the file, absolute.
            identity: what tells it from others that had or will have that path.

        Returns:
            None if there can be none: another put of the same file is running, or the directory cannot be
            written.
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
            return None  # another put of it is running
        except OSError as error:
            self._say(
                f"cannot note the key of {path} in {self._directory}: {error.strerror}; "
                "if this put is interrupted, the next one will send all of it again"
            )
        return None

    def forget_old(self) -> None:
        """Remove what nobody will go on with; nothing is made, and nothing said."""
        with suppress(OSError):
            self._tidy("")

    def _open(self, path: str) -> KeyNote | None:
        """Return the note of that name; None: it was just removed, or set aside."""
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
        """Remove notes that are too old, or too many; those in use stay."""
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
    told = repr((os.fsencode(path), identity, encoding)).encode()
    return hashlib.blake2b(told, digest_size=16, person=b"pipegrid put").hexdigest()


def _lock(file: FileIO, path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # of no use where there are no locks, without which nobody would tidy it away
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
        ValueError: it is none.
    """
    magic, text, digest, *rest = [*data.decode("ascii").split("\n"), "", "", ""]
    if magic != _MAGIC or rest[:1] != [""]:
        raise ValueError("not a note of an unfinished put")
    secret = bytes.fromhex(text)
    if len(secret) != SECRET_BYTES or digest != _digest(secret):
        raise ValueError("a torn note of an unfinished put")
    return secret
