"""Signatures by gpg, of the release files and ``repomd.xml`` of rebuilt indexes."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from pipegrid.errors import UsageError
from pipegrid.mirror.signatures import (
    TIMEOUT_S,
    NotSigned,
    Stopped,
    check_signature,
    output_of,
    signed_content,
)

# gpg runs without the user's options, without a terminal and without questions, and no longer than
# ``TIMEOUT_S``. A key in a file is imported into a temporary directory, which is removed together with its
# agent. Existing signatures are checked with the public key alone, and kept if they are right.

_ALONE = ("--no-options", "--batch", "--no-tty", "--quiet", "--pinentry-mode", "error")
_CREATED = b"[GNUPG:] SIG_CREATED "


class SigningFailed(UsageError):
    """gpg made no signature; nothing was published."""


class GpgKey:
    """
    A key that gpg signs with; a context manager.

    Args:
        key: a file with a secret key, as gpg exports it; or its name in the user's keyring, best its
            fingerprint. It needs no passphrase, or its agent knows it.
        stopped: whether the run must end; checked while gpg runs.

    Raises:
        SigningFailed: it cannot sign.
    """

    def __init__(self, key: str, stopped: Stopped = lambda: False) -> None:
        self._key = key
        self._stopped = stopped
        self._directory = tempfile.TemporaryDirectory(prefix="pipegrid-")
        self._home: str | None = None
        self._user = key
        self.public = os.path.join(self._directory.name, "public.gpg")

    def __enter__(self) -> GpgKey:
        try:
            if os.path.isfile(self._key):
                self._home = os.path.join(self._directory.name, "home")
                os.mkdir(self._home, 0o700)
                self._gpg("--import", os.path.abspath(self._key))
                self._user = self._only_key()
            fingerprint = _created(self._sign(b"pipegrid", "--detach-sign")[0])
            self._gpg("--output", self.public, "--export", fingerprint)
            if not os.path.exists(self.public):
                raise self._failed("gpg does not give its public key")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove its temporary files, and end the agent of a key in a file."""
        if self._home is not None:
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    ["gpgconf", "--homedir", self._home, "--kill", "all"],
                    capture_output=True,
                    timeout=TIMEOUT_S,
                )
        with suppress(OSError):  # an agent that ends may remove its sockets at the same time
            self._directory.cleanup()

    def inline(self, data: bytes) -> bytes:
        """Return a text together with its signature."""
        return self._sign(data, "--clearsign")[1]

    def detached(self, data: bytes) -> bytes:
        """Return only the signature, as text."""
        return self._sign(data, "--armor", "--detach-sign")[1]

    def has_signed(self, data: bytes, signature: bytes | None) -> bool:
        """Return whether this is a signature of data by this key."""
        with suppress(NotSigned):
            if signature is not None:
                check_signature(data, signature, (self.public,), "it", self._stopped)
                return True
        return False

    def has_signed_inline(self, data: bytes, signed: bytes | None) -> bool:
        """Return whether this is data together with a signature by this key."""
        with suppress(NotSigned):
            if signed is not None:
                return signed_content(signed, (self.public,), "it", self._stopped) == data
        return False

    def _sign(self, data: bytes, *arguments: str) -> tuple[bytes, bytes]:
        """Return gpg's status lines, and its output."""
        paths = [os.path.join(self._directory.name, name) for name in ("data", "signed")]
        with open(paths[0], "wb") as file:
            file.write(data)
        with suppress(FileNotFoundError):
            os.unlink(paths[1])
        said = self._gpg("--output", paths[1], *arguments, *self._as_user(), "--", paths[0])
        if _CREATED not in said:
            raise self._failed(_reason(said))
        try:
            with open(paths[1], "rb") as file:
                return said, file.read()
        except OSError:
            raise self._failed("gpg wrote nothing") from None

    def _as_user(self) -> tuple[str, ...]:
        return ("--digest-algo", "SHA512", "--local-user", self._user)

    def _only_key(self) -> str:
        said = self._gpg("--with-colons", "--list-secret-keys")
        found = [line.split(b":")[9] for line in said.split(b"\n") if line.startswith(b"fpr:")]
        if not found:
            raise self._failed("it has no secret key")
        return found[0].decode("ascii", "replace")

    def _gpg(self, *arguments: str) -> bytes:
        """Run gpg; returns its status lines, or its list."""
        where: Sequence[str] = () if self._home is None else ("--homedir", self._home)
        command = ["gpg", *_ALONE, *where, "--status-fd", "1", *arguments]
        try:
            said, code = output_of(command, self._stopped)
        except (FileNotFoundError, NotADirectoryError):
            raise self._failed("there is no gpg; install it") from None
        except OSError as error:
            raise self._failed(f"gpg could not be started ({error.strerror})") from None
        except subprocess.TimeoutExpired:
            raise self._failed(f"gpg took more than {TIMEOUT_S} s") from None
        if code:
            raise self._failed(_reason(said))
        return said

    def _failed(self, why: str) -> SigningFailed:
        return SigningFailed(
            f"the key {self._key} of --sign-with cannot sign: {why}; nothing was published"
        )


def _created(said: bytes) -> str:
    """Return the fingerprint of the key that has signed, from gpg's status lines."""
    line = next(each for each in said.split(b"\n") if each.startswith(_CREATED))
    return line.split()[-1].decode("ascii", "replace")


_REASONS = (
    (b"INV_SGNR", "gpg has no such secret key, or it has expired or was revoked"),
    (b"NODATA", "it is not a key that gpg exported"),
    (b"IMPORT_PROBLEM", "it is not a key that gpg accepts"),
    (b"PINENTRY_LAUNCHED", "it needs a passphrase"),
    (b"FAILURE sign 67108949", "it needs a passphrase, which gpg-agent does not have"),
    (b"FAILURE sign", "gpg fails"),
)


def _reason(said: bytes) -> str:
    """Return the reason in gpg's status lines, as text."""
    for mark, words in _REASONS:
        if b"[GNUPG:] " + mark in said:
            return words
    return "gpg fails"


def check_key(key: str) -> None:
    """
    Check that a key can sign.

    Raises:
        SigningFailed, MirrorError: it cannot.
    """
    with GpgKey(key):
        pass
