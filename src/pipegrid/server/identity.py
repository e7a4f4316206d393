"""
The identity of a server: a key and a self-signed certificate, and the secret that clients need.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from twisted.logger import Logger

from pipegrid.core import base32
from pipegrid.core.text import decode_text
from pipegrid.disk.atomic_write import create_file, remove_stale_link, replace_file
from pipegrid.disk.file_system_calls import FULL
from pipegrid.disk.private_files import make_directory
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError, naming
from pipegrid.reactor.bulk_tls import write_whole
from pipegrid.reactor.tls_settings import bound_handshakes, only_forward_secret, self_signed_pem
from pipegrid.wire import announcements, server_address
from pipegrid.wire.server_address import Furl, Nurl

if TYPE_CHECKING:
    from twisted.internet.ssl import CertificateOptions

FURL_NAME = "storage.furl"
INTRODUCER_FURL_NAME = "introducer.furl"
MEMBERS_FURL_NAME = "members.furl"
"""File with the fURL of the introducer that a storage server runs for members invited from its directory."""
_SWISSNUM_BYTES = 20
_MAX_FURL_BYTES = 1 << 20
_KEY_BITS = 2048  # RSA, since Foolscap requires it
_VALID = timedelta(days=36500)
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.S)
_KEY = re.compile(rb"-----BEGIN ([A-Z ]*)PRIVATE KEY-----.*?-----END \1PRIVATE KEY-----", re.S)


log = Logger()


@attrs.frozen
class Identity:
    """
    A server's key, certificate and secret.

    Its files are those of Tahoe-LAFS, so that either program can use a node's directory:

        private/node.pem              key and certificate
        private/storage.furl          tub id, hints, and the secret as its last part
        private/storage.swissnum      the secret (PipeGrid's own file; created if there is no fURL yet)

    An introducer has ``private/introducer.furl`` instead of the last two files.

    If the files contradict each other, the server does not start, since clients may know either of two
    identities. Dates and names in the certificate are ignored: clients know the hash of its key.

    Attributes:
        key_pem, certificate_pem: the key and the certificate as PEM.
        spki_hash: 32 bytes that identify the server's key to GBS clients.
        tub_id: 20 bytes that identify the server's certificate to Foolscap clients.
        swissnum: the secret.
    """

    key_pem: bytes = attrs.field(repr=False)
    certificate_pem: bytes
    spki_hash: bytes
    tub_id: bytes
    swissnum: str = attrs.field(repr=False)

    def nurl(self, host: str, port: int) -> Nurl:
        """Return the server's address at a host and port, for clients that use HTTPS."""
        return Nurl(self.spki_hash, host, port, self.swissnum)

    def nurls(self, hints: Sequence[str]) -> list[str]:
        """Return the server's addresses for clients that use HTTPS, one for each hint of a supported kind."""
        found = []
        for hint in hints:
            how, _, place = hint.partition(":")
            host, _, port = place.rpartition(":")
            if how in ("tcp", "tor"):
                host = host.removeprefix("[").removesuffix("]")
                found.append(str(attrs.evolve(self.nurl(host, int(port)), tor=how == "tor")))
        return found

    def furl(self, hints: Sequence[str], secret: str = "") -> Furl:
        """
        Return the server's address for clients that use Foolscap.

        Args:
            secret: the secret of another object at the same port; by default the server's own.
        """
        return Furl(self.tub_id, tuple(hints), secret or self.swissnum)

    def contexts(self) -> CertificateOptions:
        """Return Twisted's options for serving TLS 1.2 and 1.3 with this certificate."""
        from OpenSSL import SSL, crypto
        from twisted.internet import ssl

        options: Any = ssl.CertificateOptions(
            privateKey=crypto.load_privatekey(crypto.FILETYPE_PEM, self.key_pem),
            certificate=crypto.load_certificate(crypto.FILETYPE_PEM, self.certificate_pem),
            raiseMinimumTo=ssl.TLSVersion.TLSv1_2,
            acceptableProtocols=[b"http/1.1"],
        )
        # This mode saves 32 KiB of buffers for each idle connection.
        options.getContext().set_mode(SSL.MODE_RELEASE_BUFFERS)
        only_forward_secret(options.getContext())
        bound_handshakes(options.getContext())
        write_whole(options.getContext())
        return options  # type: ignore[no-any-return]


def load_or_create(directory: Path, furl_name: str = FURL_NAME) -> Identity:
    """
    Return the identity in a node's directory; missing parts are created and stored.

    Args:
        furl_name: the name of the file with the fURL: a storage server's, or an introducer's.

    Raises:
        UsageError: a file does not have the expected content, or the directory cannot be used.
    """
    private = directory / "private"
    key = private / "node.pem"
    try:
        make_directory(private, 0o700)
        known = load_furl(directory, furl_name)
        if known is not None and not key.exists():
            raise UsageError(
                f"{key} is missing, but clients know this server by it, as {private / furl_name} shows; "
                "restore it, or remove both for a new identity"
            )
        pem = _read_or_make(key, make_pem)
        if furl_name == FURL_NAME:
            swissnum = _read_swissnum(private, known)
        else:  # without a stored fURL, no client knows a secret
            swissnum = new_swissnum() if known is None else known.swissnum
        who = from_pem(pem, swissnum, str(key))
        _check_key(who, str(key))
    except OSError as error:
        raise unusable(error, private) from error
    if known is not None and known.tub_id != who.tub_id:
        raise UsageError(
            f"{private / furl_name} is that of another key than {key}; restore the right one, or remove "
            "the former for a new address"
        )
    return who


def load_furl(directory: Path, furl_name: str = FURL_NAME) -> Furl | None:
    """
    Return the fURL of a node's directory, which clients know; None if it does not exist yet.

    Raises:
        UsageError: the file has no valid fURL.
    """
    path = directory / "private" / furl_name
    try:
        text = decode_text(read_file(path, _MAX_FURL_BYTES), str(path)).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unusable(error, path) from error
    try:
        return server_address.parse_furl(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error}; restore it") from None


def keep_furl(directory: Path, address: Furl, furl_name: str = FURL_NAME) -> None:
    """
    Store the server's fURL if it has changed. If the disk is full, keep the previous one and log a warning.

    Raises:
        UsageError: the fURL cannot be stored, and there is no previous one or the disk is not full.
    """
    path = directory / "private" / furl_name
    known = load_furl(directory, furl_name)
    if known == address:
        return
    try:
        replace_file(path, f"{address}\n".encode("ascii"))
    except OSError as error:
        if known is not None and error.errno in FULL:  # key and secret did not change
            log.warn(
                "{path} still names the previous address of the server: {reason}",
                path=str(path),
                reason=error.strerror,
            )
            return
        raise unusable(error, path) from error


def announced_as(directory: Path) -> tuple[str, bytes] | None:
    """
    Return the id and the permutation seed of the server in a directory; None if it was never announced.

    Raises:
        UsageError: a file is damaged or cannot be read.
    """
    seed, key = directory / "permutation-seed", directory / "private" / "node.privkey"
    try:
        texts = [read_file(path, 4096).decode("ascii", "replace").strip() for path in (seed, key)]
        return announcements.parse_signing_key(texts[1]).server_id, base32.decode(texts[0])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unusable(error, directory) from error
    except ValueError:
        raise UsageError(f"{seed} or {key} is damaged; restore it") from None


def unusable(error: OSError, path: Path) -> UsageError:
    """Return the error for a server's directory that cannot be used."""
    text = f"cannot use {error.filename or path}: {error.strerror}; "
    if error.errno in FULL:  # in another directory it would be another server
        return UsageError(f"{text}free some space")
    text += "choose another directory"
    return naming(UsageError(text), "another directory")


def from_pem(pem: bytes, swissnum: str, name: str) -> Identity:
    """
    Return the identity from a text with a key and a certificate, in any order. The key is not checked.

    Raises:
        UsageError: the key or the certificate is missing, or the certificate cannot be read.
    """
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key, certificate_pem = _KEY.search(pem), _CERTIFICATE.search(pem)
    if key is None or certificate_pem is None:
        raise UsageError(
            f"{name} does not hold a private key and a certificate; restore it, or remove it for "
            "a new identity"
        )
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem[0] + b"\n")
        spki = certificate.public_key().public_bytes(
            Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        )
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"the certificate in {name} is damaged ({error}); restore it") from error
    return Identity(
        key[0] + b"\n",
        certificate_pem[0] + b"\n",
        hashlib.sha256(spki).digest(),
        hashlib.sha1(certificate.public_bytes(Encoding.DER)).digest(),
        swissnum,
    )


def _check_key(who: Identity, name: str) -> None:
    """
    Check that a key belongs to its certificate. Without this check, OpenSSL would report less, and would ask
    for passwords on a terminal.

    Raises:
        UsageError: the key belongs to another certificate, or cannot be read.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_private_key,
    )

    try:
        public = load_pem_private_key(who.key_pem, None).public_key()
        spki = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except TypeError as error:
        raise UsageError(
            f"the key in {name} is encrypted, and no password can be given; decrypt it"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"the key in {name} is damaged; restore it") from error
    if hashlib.sha256(spki).digest() != who.spki_hash:
        raise UsageError(f"key and certificate in {name} do not belong together; restore it")


def make_pem() -> bytes:
    """Return a new key and its certificate."""
    from cryptography.hazmat.primitives.asymmetric import rsa

    return self_signed_pem(rsa.generate_private_key(65537, _KEY_BITS), "pipegrid storage", _VALID)


def new_swissnum() -> str:
    """Return a new secret for an address."""
    return base32.encode(os.urandom(_SWISSNUM_BYTES))


def _read_swissnum(private: Path, known: Furl | None) -> str:
    own = private / "storage.swissnum"
    if known is None or own.exists():
        data = _read_or_make(own, lambda: new_swissnum().encode() + b"\n")
        name, text = own, data.decode("ascii", "replace").strip()
    else:
        name, text = private / FURL_NAME, known.swissnum
    if not server_address.is_swissnum(text):
        raise UsageError(f"{name} does not hold a swissnum; restore it, or remove it for a new one")
    if known is not None and known.swissnum != text:
        raise UsageError(
            f"{own} and {private / FURL_NAME} hold different secrets; remove the one that clients do "
            "not know"
        )
    return text


def _read_or_make(path: Path, make: Any) -> bytes:
    """Return a file's content; if it is missing, create it atomically."""
    remove_stale_link(str(path))  # a killed process may have left a hidden name
    if not path.exists():
        create_file(path, make())
    return read_file(path)
