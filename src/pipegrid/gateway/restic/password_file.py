"""
Users and passwords of restic's clients: a ``.htpasswd`` file, as rest-server reads it.

Each line is ``USER:HASH``, with a hash of bcrypt (``htpasswd -B``) or ``{SHA}`` (``htpasswd -s``).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import bcrypt
from twisted.internet.defer import DeferredSemaphore
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.text import decode_text, printable
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError
from pipegrid.reactor.workers import CpuWorkers

MAX_FILE_BYTES = 1 << 20
MAX_USERS = 10_000
MAX_CREDENTIALS_BYTES = 2000
"""Maximum size of the header ``Authorization``, which is in base64."""

LOOK_S = 1.0
"""The file is checked for changes at most once in this time."""

KNOWN_S = 60.0
"""A correct password is remembered this long, since bcrypt takes a tenth of a second to hash it again."""

MAX_KNOWN = 1000
AT_ONCE = 1
MAX_WAITING = 50
"""Maximum number of passwords that wait to be hashed; further ones are refused."""

_BCRYPT = (b"$2a$", b"$2b$", b"$2y$")
_BCRYPT_BYTES = 72
"""Number of bytes of a password that bcrypt uses; it ignores the rest."""

_MAX_COST = 16
"""Maximum cost of a bcrypt hash: above this, checking one password takes over 5 seconds and delays others."""

_SHA = b"{SHA}"
_OTHER_SIGNS = "@._-"
_DUMMY = b"$2b$05$fGPaBpO4r37ovJvIBO4wQetsIgFq6P.RoThODE5t8sSKIrMKiOM4C"
"""A hash that belongs to no password; used for unknown users."""


class TooManyPasswords(Exception):
    """Too many passwords are waiting to be hashed."""


class PasswordFile:
    """
    The users in a password file.

    Args:
        path: the file, which is read again when it has changed; if that fails, no password is accepted.
        workers: threads that hash passwords.
        say: called with a sentence for each unusable line, and if the file cannot be read.

    Raises:
        UsageError: the file cannot be read.
    """

    def __init__(
        self, path: Path, workers: CpuWorkers, clock: IReactorTime, say: Callable[[str], object]
    ) -> None:
        self._path = path
        self._workers = workers
        self._clock = clock
        self._say = say
        self._looked_s = clock.seconds()
        self._gate = DeferredSemaphore(AT_ONCE)
        self._waiting = 0
        self._known: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._salt = os.urandom(16)
        self._hashes = self._load()

    def names_user(self, authorization: str | None) -> bool:
        """
        Return whether an ``Authorization`` header names a user of the file; does not check the password.
        """
        given = parse_credentials(authorization)
        return given is not None and given[0] in self._hashes

    async def user_of(self, authorization: str | None) -> str | None:
        """
        Return the user whom an ``Authorization`` header names; None if user or password is missing or wrong.

        Raises:
            TooManyPasswords: too many other passwords are being checked.
        """
        given = parse_credentials(authorization)
        if given is None:
            return None
        self._look()
        user, password = given
        digest = hmac.digest(self._salt, user.encode() + b"\0" + password, "sha256")
        now = self._clock.seconds()
        known = self._known.get(user)
        if known is not None and now < known[1] and hmac.compare_digest(known[0], digest):
            return user
        hashes = self._hashes
        if not await self._is_right(hashes.get(user), password):
            return None
        if self._hashes is not hashes:  # the file was changed meanwhile
            return await self.user_of(authorization)
        self._known[user] = digest, now + KNOWN_S
        self._known.move_to_end(user)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return user

    async def _is_right(self, stored: bytes | None, password: bytes) -> bool:
        if stored is not None and stored.startswith(_SHA):
            return is_right(stored, password)
        if self._waiting >= MAX_WAITING:
            raise TooManyPasswords
        self._waiting += 1
        try:
            async with self._gate:
                right = await self._workers.run(is_right, stored or self._like_others(), password)
        finally:
            self._waiting -= 1
        return right and stored is not None

    def _like_others(self) -> bytes:
        """Return a hash to check for an unknown user, so that the check takes as long as for a known user."""
        return next((each for each in self._hashes.values() if each[:4] in _BCRYPT), _DUMMY)

    def _look(self) -> None:
        now = self._clock.seconds()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        if self._stamp() == self._seen:
            return
        try:
            self._hashes = self._load()
        except UsageError as error:
            # While the file cannot be read, no password is accepted.
            self._hashes = {}
            self._say(str(error))
        self._known.clear()

    def _load(self) -> dict[str, bytes]:
        self._seen = self._stamp()
        try:
            data = read_file(self._path, MAX_FILE_BYTES + 1)
        except OSError as error:
            raise UsageError(
                f"cannot read the passwords in {self._path}: {error.strerror}; make the file with "
                "'htpasswd -B -c FILE USER'"
            ) from error
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(
                f"{self._path} has more than {MAX_FILE_BYTES} bytes; remove lines that are not needed"
            )
        hashes, problems = parse_users(decode_text(data, str(self._path)))
        for line, why in problems:
            self._say(f"{self._path}:{line}: {why}")
        return hashes

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def parse_users(text: str) -> tuple[dict[str, bytes], list[tuple[int, str]]]:
    """Return the hash of each user, and the number and the problem of each unusable line."""
    hashes: dict[str, bytes] = {}
    problems: list[tuple[int, str]] = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        user, _, rest = line.partition(":")
        stored = rest.partition(":")[0].encode()
        shown = printable(user[:40])
        if not is_user(user):
            why = f"'{shown}' is ignored: a user has letters, digits, '@', '.', '_' and '-'"
        elif not stored.startswith((_SHA, *_BCRYPT)):
            why = f"the hash of '{shown}' is of another kind; make it with 'htpasswd -B'"
        elif stored.startswith(_BCRYPT) and stored[4:6].isdigit() and int(stored[4:6]) > _MAX_COST:
            why = f"the hash of '{shown}' has a cost of more than {_MAX_COST}; make another"
        elif len(hashes) >= MAX_USERS:
            problems.append((number, f"there are more than {MAX_USERS} users; the rest is ignored"))
            break
        else:
            hashes[user] = stored
            continue
        problems.append((number, why))
    return hashes, problems


def is_user(name: str) -> bool:
    """Return whether this is a valid name for a user."""
    return 0 < len(name) <= 100 and all(each.isalnum() or each in _OTHER_SIGNS for each in name)


def parse_credentials(header: str | None) -> tuple[str, bytes] | None:
    """Return user and password from an ``Authorization`` header; None if it does not contain them."""
    if header is None or len(header) > MAX_CREDENTIALS_BYTES:
        return None
    scheme, _, encoded = header.strip().partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, found, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        name = user.decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return (name, password) if found and is_user(name) else None


def is_right(stored: bytes, password: bytes) -> bool:
    """Return whether a password has this hash."""
    if stored.startswith(_SHA):
        digest = base64.b64encode(hashlib.sha1(password, usedforsecurity=False).digest())
        return hmac.compare_digest(stored.removeprefix(_SHA), digest)
    if b"\0" in password:
        return False
    try:
        return bool(bcrypt.checkpw(password[:_BCRYPT_BYTES], stored))
    except ValueError:  # this is not a hash
        return False
