"""
The accounts file, in Tahoe-LAFS's format. A line has a name, a password or public key, and a directory's cap.

    # name   password            cap of the account's directory
    alice    correct-horse       URI:DIR2:...
    # name   public key          cap
    bob      ssh-ed25519 AAAA... URI:DIR2-RO:...
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from pathlib import Path

import attrs
from twisted.conch.ssh.keys import BadKeyError, Key
from twisted.logger import Logger

from pipegrid.core.caps import DirectoryCap, as_cap
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import CapError, UsageError
from pipegrid.tree.directory_reading import kind_of

_KEY_STARTS = ("ssh-", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-")
_MOST_FILE_BYTES = 1 << 20
MOST_LINES = 10_000


@attrs.frozen
class Account:
    """
    One account: a line of the file.

    Attributes:
        key: public key as SSH sends it; None: the account has a password.
        password_hash: the result of the function ``password_hash``; empty: the account has a key.
    """

    name: str
    cap: DirectoryCap = attrs.field(repr=False)
    key: bytes | None = None
    password_hash: bytes = attrs.field(default=b"", repr=False)


def parse_accounts(text: str, salt: bytes) -> Iterator[Account]:
    """
    Yield the accounts of a file.

    Args:
        salt: key of the passwords' hashes.

    Raises:
        UsageError: a line is malformed; the message contains the line's number, but no secret.
    """
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        raise UsageError(f"it has {len(lines)} lines, and at most {MOST_LINES} are allowed")
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line and not line.startswith("#"):
            try:
                yield _parse_line(line, salt)
            except UsageError as error:
                raise UsageError(f"line {number}: {error}") from None


def _parse_line(line: str, salt: bytes) -> Account:
    words = line.split()
    if len(words) < 3:
        raise UsageError("a line has a name, a password or a public key, and a directory's cap")
    name, proof = words[:2]
    try:
        cap = as_cap(words[-1])
    except CapError as error:
        raise UsageError(f"the last word is not a cap ({error})") from None
    if not isinstance(cap, DirectoryCap) or kind_of(cap) != "directory":
        raise UsageError("the cap is not that of a directory that it can read")
    if not proof.startswith(_KEY_STARTS):
        if len(words) > 3:
            raise UsageError("a password has no spaces, and nothing follows the cap")
        return Account(name, cap, None, password_hash(proof.encode("utf-8"), salt))
    try:
        key = Key.fromString(" ".join(words[1:-1]).encode("utf-8"), type="public_openssh")
    except (BadKeyError, ValueError, TypeError, IndexError, KeyError):
        raise UsageError(
            f"the public key, which begins with '{proof[:30]}', is damaged or of an unknown kind; "
            "copy it from the .pub file"
        ) from None
    return Account(name, cap, key.blob())


def password_hash(password: bytes, salt: bytes) -> bytes:
    """Return a hash of a password; comparing hashes takes the same time for all passwords."""
    return hmac.new(salt, password, hashlib.sha256).digest()


class Accounts:
    """
    The accounts of a file, which is read again when it has changed.

    If the changed file cannot be used, the previous accounts stay.

    Raises:
        UsageError: at the start, the file cannot be read, or a line is malformed.
    """

    _log = Logger()

    def __init__(self, path: Path) -> None:
        self._path = path
        self._salt = secrets.token_bytes(16)
        self._seen = self._signature()
        self._accounts = self._read()

    def _signature(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> list[Account]:
        try:
            data = read_file(self._path, _MOST_FILE_BYTES + 1)
        except OSError as error:
            raise UsageError(
                f"cannot read the accounts of SFTP in {self._path} ({error.strerror}); write a line "
                "'NAME PASSWORD CAP' or 'NAME PUBLIC-KEY CAP' for each"
            ) from error
        if len(data) > _MOST_FILE_BYTES:
            raise UsageError(f"{self._path} has more than {_MOST_FILE_BYTES} bytes")
        try:
            return list(parse_accounts(data.decode("utf-8-sig"), self._salt))
        except (UnicodeDecodeError, UsageError) as error:
            why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            raise UsageError(f"cannot use the accounts of SFTP in {self._path}: {why}") from None

    def _current(self) -> list[Account]:
        seen = self._signature()
        if seen != self._seen:
            self._seen = seen
            try:
                self._accounts = self._read()
            except UsageError as error:
                self._log.warn("{error}; the accounts stay as they were", error=str(error))
        return self._accounts

    def with_password(self, name: str, password: bytes) -> Account | None:
        """
        Return the account with this name and password; None if there is none.

        The time that this takes does not show whether the name or the password is wrong.
        """
        given = password_hash(password, self._salt)
        found = None
        for account in self._current():
            equal = hmac.compare_digest(account.password_hash or self._salt * 2, given)
            if equal and account.name == name and account.key is None:
                found = account
        return found

    def with_key(self, name: str, key: bytes) -> Account | None:
        """
        Return the account with this name and public key, or None; the caller must verify the client's
        signature.
        """
        matching = (each for each in self._current() if (each.name, each.key) == (name, key))
        return next(matching, None)

    @property
    def have_passwords(self) -> bool:
        """Whether any account has a password."""
        return any(account.key is None for account in self._current())
