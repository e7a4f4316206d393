"""OpenPGP signatures of release files and repositories: gpgv verifies them, and gpg makes them."""

from __future__ import annotations

import binascii
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from signal import SIGKILL
from typing import NamedTuple

from pipegrid.errors import UsageError
from pipegrid.mirror.archive_file import MirrorError

# What a signature file may contain: only OpenPGP's signature packets (RFC 4880), as text or bytes; and where
# the signature is in a signed text.
#
# gpgv accepts any packets, decompresses them before it checks the key, and has been attacked with nested
# messages: a kilobyte of untrusted input kept gpgv busy without a limit.
#
# All of this is read before the signature is checked. So it is read line by line, and each line only once:
# the time is linear in the number of bytes, and few of these are kept.

MESSAGE = b"-----BEGIN PGP SIGNED MESSAGE-----"
_BEGIN = b"-----BEGIN PGP SIGNATURE-----"
_END = b"-----END PGP SIGNATURE-----"

_HEADER = re.compile(rb"[^\n:]+:[^\n]*")
_BODY = re.compile(rb"[A-Za-z0-9+/]+")
_LAST = re.compile(rb"[A-Za-z0-9+/]+={1,2}")
_CHECKSUM = re.compile(rb"=[A-Za-z0-9+/]{4}")

_SIGNATURE = 2
_LENGTH_BYTES = {0: 1, 1: 2, 2: 4}
"""Number of length bytes in the old packet format, by the kind of length; the fourth kind has no length."""


def signed_parts(data: bytes) -> tuple[bytes, bytes] | None:
    """
    Return the text and the signature of a file in which a signature follows its text.

    Lines of the text that begin with a dash are still escaped. None: the file is not of this kind, or
    contains anything before, between or after the two parts.
    """
    line, at = _line(data, 0)
    if line != MESSAGE:
        return None
    while line:
        line, at = _line(data, at)
        if line and not line.startswith(b"Hash: "):
            return None
        if at > len(data):
            return None
    start, search = at, at - 1
    while (dash := data.find(b"\n-", search)) >= 0:
        line, after = _line(data, dash + 1)
        if line == _BEGIN:
            break
        # An escaped empty line is ``- ``; ``_line`` strips its space.
        if not line.startswith(b"- ") and line != b"-":
            return None
        search = after - 1
    else:
        return None
    end = data.find(b"\n-", after - 1)
    if end < 0:
        return None
    line, after_end = _line(data, end + 1)
    if line != _END or not _is_blank(data, after_end):
        return None
    return data[start : dash + 1], data[dash + 1 : after_end]


def _line(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the line that begins at ``at``, without spaces at its end, and the position of the next line."""
    end = data.find(b"\n", at)
    if end < 0:
        end = len(data)
    return data[at:end].rstrip(), end + 1


def _is_blank(data: bytes, at: int) -> bool:
    return all(line.isspace() for line in BytesIO(data[at:]))


def unescaped(text: bytes) -> bytes:
    """Return the text of ``signed_parts`` with its original lines, in which no dash is escaped."""
    return text.removeprefix(b"- ").replace(b"\n- ", b"\n")


def signature_packets(data: bytes) -> bytes | None:
    """Return the packets of one or more signatures; None if the data contains anything else."""
    is_text = data[:1] < b"\x80"  # the first byte of a packet is at least 0x80
    packets = _dearmored(data) if is_text else data
    return packets if packets and _are_signatures(packets) else None


def _dearmored(text: bytes) -> bytes | None:
    """Return the packets of signatures in text form, in order; None if the text contains anything else."""
    packets = bytearray()
    lines = BytesIO(text)
    for raw in lines:
        line = raw.strip() if not packets else raw.rstrip()
        if not line:
            continue
        block = _block(lines) if line == _BEGIN else None
        if block is None:
            return None
        packets += block
    return bytes(packets)


def _block(lines: BytesIO) -> bytes | None:
    """
    Return the packets of one signature in text form, reading up to its last line; None if the lines are not a
    signature.
    """
    for raw in lines:
        line = raw.rstrip()
        if not line:
            break
        if _HEADER.fullmatch(line) is None:
            return None
    body = bytearray()
    is_last = False
    for raw in lines:
        line = raw.rstrip()
        if line == _END:
            break
        if body and _CHECKSUM.fullmatch(line) is not None:
            line = lines.readline().rstrip()
            if line != _END:
                return None
            break
        if is_last or (_BODY.fullmatch(line) is None and _LAST.fullmatch(line) is None):
            return None
        is_last = line.endswith(b"=")
        body += line
    else:
        return None
    try:
        return binascii.a2b_base64(body) if body else None
    except binascii.Error:
        return None


def _are_signatures(data: bytes) -> bool:
    at = 0
    try:
        while at < len(data):
            kind, begin, length = _packet(data, at)
            if kind != _SIGNATURE or length is None:
                return False
            at = begin + length
    except IndexError:
        return False
    return at == len(data)


def _packet(data: bytes, at: int) -> tuple[int, int, int | None]:
    """
    Return a packet's kind (-1: this is no packet), the position of its body, and the length of the body, None
    if unknown.

    Raises:
        IndexError: the packet's head is incomplete.
    """
    head, first = data[at], data[at + 1]
    if not head & 0x80:
        return -1, at, None
    if not head & 0x40:  # the old packet format
        count = _LENGTH_BYTES.get(head & 3)
        if count is None:
            return head >> 2 & 15, at + 1, None
        return head >> 2 & 15, at + 1 + count, int.from_bytes(data[at + 1 : at + 1 + count], "big")
    if first < 192:
        return head & 63, at + 2, first
    if first < 224:
        return head & 63, at + 3, (first - 192 << 8) + data[at + 2] + 192
    if first < 255:  # the body consists of parts
        return head & 63, at + 2, None
    return head & 63, at + 6, int.from_bytes(data[at + 2 : at + 6], "big")


# Checks of who signed an index: gpgv decides, with the keys of a keyring, and only the text that gpgv reports
# as signed is read.
#
# A file that includes its signature (``InRelease``) may contain more than the signed text, so gpgv's output
# is read instead of the file. If the signature is in a separate file (``Release``, ``Release.gpg``), the data
# that was passed to gpgv is read.

TIMEOUT_S = 60
LOOK_S = 0.2
"""How often to check, while gpgv or gpg runs, whether the run must end."""

Stopped = Callable[[], bool]
MAX_KEYRING_BYTES = 16 << 20
MAX_SIGNATURE_BYTES = 1 << 20

_WEAK = ["--weak-digest", "SHA1", "--weak-digest", "RIPEMD160"]
"""Hashes that are too weak for signatures, in addition to MD5, which gpgv refuses by itself."""

_ARMOR = b"-----BEGIN PGP PUBLIC KEY BLOCK-----"

NOT_SIGNED = "not signed by a key of the keyring"


class Keys(NamedTuple):
    """
    The trusted keys.

    Attributes:
        keyrings: paths of keyrings for gpgv.
        allow_unsigned: accept any index, without checking signatures.
    """

    keyrings: tuple[str, ...] = ()
    allow_unsigned: bool = False


class NotSigned(MirrorError):
    """An index is not signed by a trusted key, and was not used."""


def signed_content(
    signed: bytes, keyrings: Sequence[str], name: str, stopped: Stopped = lambda: False
) -> bytes:
    """
    Return the signed text of a file that includes its signature.

    Args:
        keyrings: paths of keyrings, in binary or text form.
        name: of the file, for errors.
        stopped: returns whether the run must end; checked while gpgv runs.

    Raises:
        NotSigned: the signature is missing, bad, or of an unknown key.
        MirrorError: gpgv or a keyring is missing, or the run must end.
    """
    import tempfile

    if not keyrings:
        raise _no_keyring(name)
    parts = signed_parts(signed)
    if parts is None:
        if MESSAGE not in signed:
            # gpgv would accept packets, and decompress them before it checks the key: a few hundred bytes of
            # untrusted input could become gigabytes on the disk.
            raise NotSigned(f"{name} is {NOT_SIGNED} (it is not signed at all)")
        # The file would be published unchanged, and clients may read more of it than the signed text.
        raise NotSigned(
            f"{name} is not signed as a whole: other text precedes or follows the signed one"
        )
    if signature_packets(parts[1]) is None:
        raise _no_signature(name)
    with tempfile.TemporaryDirectory(prefix="pipegrid-") as directory:
        path = _write(directory, "signed", signed)
        output = os.path.join(directory, "content")
        _gpgv(directory, ["--output", output, path], keyrings, name, stopped)
        try:
            with open(output, "rb") as file:
                return file.read()
        except FileNotFoundError:
            raise NotSigned(f"{name} is not signed; nothing of it was used") from None


def check_signature(
    content: bytes,
    signature: bytes,
    keyrings: Sequence[str],
    name: str,
    stopped: Stopped = lambda: False,
) -> None:
    """Check a signature in a separate file; raises the same errors as ``signed_content``."""
    import tempfile

    if not keyrings:
        raise _no_keyring(name)
    packets = signature_packets(signature)
    if packets is None:
        raise _no_signature(name)
    with tempfile.TemporaryDirectory(prefix="pipegrid-") as directory:
        paths = [_write(directory, "signature", packets), _write(directory, "content", content)]
        _gpgv(directory, paths, keyrings, name, stopped)


def _write(directory: str, name: str, data: bytes) -> str:
    path = os.path.join(directory, name)
    with open(path, "xb") as file:
        file.write(data)
    return path


def _gpgv(
    directory: str, arguments: list[str], keyrings: Sequence[str], name: str, stopped: Stopped
) -> None:
    """Check a signature with gpgv; ``directory`` is for temporary files."""
    import subprocess

    options = []
    for number, keyring in enumerate(keyrings):
        options += ["--keyring", _usable(keyring, os.path.join(directory, f"{number}.gpg"))]
    try:
        said, _ = output_of(
            ["gpgv", "--homedir", directory, "--status-fd", "1", *_WEAK, *options, *arguments],
            stopped,
        )
    except (FileNotFoundError, NotADirectoryError):  # the second error: PATH contains a file
        raise MirrorError(
            f"{name} cannot be checked, since there is no gpgv; install it, or give --allow-unsigned"
        ) from None
    except OSError as error:  # there are no more processes, or too little memory
        raise MirrorError(
            f"{name} cannot be checked, since gpgv could not be started ({error.strerror}); end other "
            "programs, or see 'ulimit -u'"
        ) from error
    except subprocess.TimeoutExpired:
        raise NotSigned(f"{name} could not be checked: gpgv took more than {TIMEOUT_S} s") from None
    reason = refusal(said)
    if reason is not None:
        raise NotSigned(f"{name} is {NOT_SIGNED} ({reason})")


def output_of(command: list[str], stopped: Stopped) -> tuple[bytes, int]:
    """
    Run a program, and check repeatedly whether the run must end; return the program's output and exit status.

    Raises:
        OSError, subprocess.TimeoutExpired: the program cannot be started, or takes more than ``TIMEOUT_S``.
        MirrorError: the run must end.
    """
    import subprocess
    import time

    until_s = time.monotonic() + TIMEOUT_S
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as running:
        try:
            while True:
                try:
                    return running.communicate(timeout=LOOK_S)[0], running.returncode
                except subprocess.TimeoutExpired:
                    if time.monotonic() > until_s:
                        raise
                if stopped():
                    raise MirrorError("stopped while a signature was checked; run it again")
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, SIGKILL)
            raise


def _no_signature(name: str) -> NotSigned:
    return NotSigned(f"{name} is {NOT_SIGNED} (its signature is not one)")


def _no_keyring(name: str) -> MirrorError:
    return MirrorError(f"{name} cannot be checked: give --keyring, or --allow-unsigned")


def _usable(keyring: str, copy: str) -> str:
    """
    Return the path of a keyring that gpgv can read; a keyring in text form is converted and written to
    ``copy``.
    """
    try:
        with open(keyring, "rb") as file:
            data = file.read(MAX_KEYRING_BYTES + 1)
    except OSError as error:
        raise MirrorError(
            f"the keyring {keyring} cannot be read ({os.strerror(error.errno or 0)}); give the archive's own"
        ) from None
    if len(data) > MAX_KEYRING_BYTES:
        raise MirrorError(f"the keyring {keyring} is larger than any; give the archive's own")
    if _ARMOR not in data:
        return os.path.abspath(keyring)
    try:
        keys = b"".join(map(_trust_dearmored, data.split(_ARMOR)[1:]))
    except ValueError:
        raise MirrorError(f"the keyring {keyring} is damaged; give the archive's own") from None
    with open(copy, "xb") as file:
        file.write(keys)
    return copy


def _trust_dearmored(block: bytes) -> bytes:
    """Return the bytes of a key block in text form (RFC 4880, 6.2), given without its first line."""
    body, end, _ = block.replace(b"\r", b"").partition(b"-----END PGP PUBLIC KEY BLOCK-----")
    lines = body.split(b"\n\n", 1)[-1].split(b"\n")
    if not end:
        raise ValueError("it has no end")
    return binascii.a2b_base64(b"".join(line for line in lines if line[:1] != b"="))


def refusal(status: bytes) -> str | None:
    """
    Return why gpgv's status lines do not prove a signature, as text; None if they prove it.

    One good signature suffices, since archives sign with several keys, and keyrings may have only some of
    these. The exit status is less exact: it is 0 for expired keys, and 2 if one of the keys is unknown.
    """
    said = {line.split(b" ")[1] for line in status.split(b"\n") if line.startswith(_STATUS)}
    if b"GOODSIG" in said and b"VALIDSIG" in said and b"BADSIG" not in said:
        return None
    reasons = (words for keyword, words in _REASONS if keyword in said)
    return next(reasons, "gpgv does not accept it")


_STATUS = b"[GNUPG:] "
_REASONS = (
    (b"BADSIG", "the signature does not fit it: it was changed, or is damaged"),
    (b"EXPKEYSIG", "the key has expired"),
    (b"REVKEYSIG", "the key was revoked"),
    (b"EXPSIG", "the signature has expired"),
    (b"NO_PUBKEY", "it is signed by another key"),
    (b"NODATA", "it is not signed at all"),
)


# gpg runs without the user's options, without a terminal and without questions, for at most ``TIMEOUT_S``. A
# key in a file is imported into a temporary directory; afterwards the directory is removed and its agent is
# ended. Existing signatures are checked with the public key alone, and kept if they are valid.

_ALONE = ("--no-options", "--batch", "--no-tty", "--quiet", "--pinentry-mode", "error")
_CREATED = b"[GNUPG:] SIG_CREATED "


class SigningFailed(UsageError):
    """gpg made no signature; no index was published."""


class GpgKey:
    """
    A key with which gpg signs; a context manager.

    Args:
        key: a file with a secret key, as gpg exports it; or the name of a key in the user's keyring,
            preferably its fingerprint. The key must need no passphrase, or gpg's agent must know the
            passphrase.
        stopped: returns whether the run must end; checked while gpg runs.

    Raises:
        SigningFailed: gpg cannot sign with the key.
    """

    def __init__(self, key: str, stopped: Stopped = lambda: False) -> None:
        import tempfile

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary files; if the key is from a file, end gpg's agent for it."""
        import subprocess

        if self._home is not None:
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    ["gpgconf", "--homedir", self._home, "--kill", "all"],
                    capture_output=True,
                    timeout=TIMEOUT_S,
                )
        with suppress(OSError):  # an ending agent may remove its sockets at the same time
            self._directory.cleanup()

    def inline(self, data: bytes) -> bytes:
        """Return a text that includes its signature."""
        return self._sign(data, "--clearsign")[1]

    def detached(self, data: bytes) -> bytes:
        """Return only the signature of data, in text form."""
        return self._sign(data, "--armor", "--detach-sign")[1]

    def has_signed(self, data: bytes, signature: bytes) -> bool:
        """Return whether ``signature`` is a signature of ``data`` by this key."""
        with suppress(NotSigned):
            check_signature(data, signature, (self.public,), "it", self._stopped)
            return True
        return False

    def has_signed_inline(self, data: bytes, signed: bytes) -> bool:
        """Return whether ``signed`` contains ``data`` and a signature of it by this key."""
        with suppress(NotSigned):
            return signed_content(signed, (self.public,), "it", self._stopped) == data
        return False

    def _sign(self, data: bytes, *arguments: str) -> tuple[bytes, bytes]:
        """Sign data; return gpg's status lines and its output."""
        paths = [os.path.join(self._directory.name, name) for name in ("data", "signed")]
        with open(paths[0], "wb") as file:
            file.write(data)
        with suppress(FileNotFoundError):
            os.unlink(paths[1])
        by = ("--digest-algo", "SHA512", "--local-user", self._user)
        said = self._gpg("--output", paths[1], *arguments, *by, "--", paths[0])
        if _CREATED not in said:
            raise self._failed(_reason(said))
        try:
            with open(paths[1], "rb") as file:
                return said, file.read()
        except OSError:
            raise self._failed("gpg wrote nothing") from None

    def _only_key(self) -> str:
        said = self._gpg("--with-colons", "--list-secret-keys")
        found = [line.split(b":")[9] for line in said.split(b"\n") if line.startswith(b"fpr:")]
        if not found:
            raise self._failed("it has no secret key")
        return found[0].decode("ascii", "replace")

    def _gpg(self, *arguments: str) -> bytes:
        """Run gpg; return its standard output, which has the status lines."""
        import subprocess

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
    """Return the fingerprint of the key that made a signature, from gpg's status lines."""
    line = next(each for each in said.split(b"\n") if each.startswith(_CREATED))
    return line.split()[-1].decode("ascii", "replace")


_FAILURES = (
    (b"INV_SGNR", "gpg has no such secret key, or it has expired or was revoked"),
    (b"NODATA", "it is not a key that gpg exported"),
    (b"IMPORT_PROBLEM", "it is not a key that gpg accepts"),
    (b"PINENTRY_LAUNCHED", "it needs a passphrase"),
    (b"FAILURE sign 67108949", "it needs a passphrase, which gpg-agent does not have"),
    (b"FAILURE sign", "gpg fails"),
)


def _reason(said: bytes) -> str:
    """Return why gpg failed, as text, from its status lines."""
    reasons = (words for mark, words in _FAILURES if _STATUS + mark in said)
    return next(reasons, "gpg fails")


def check_key(key: str) -> None:
    """
    Check that gpg can sign with a key.

    Raises:
        SigningFailed, MirrorError: gpg cannot sign with it.
    """
    with GpgKey(key):
        pass
