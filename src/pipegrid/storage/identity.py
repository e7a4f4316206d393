"""
Who a storage server is: a key and a self-signed certificate, and the secret that opens it.

They lie where Tahoe-LAFS keeps them, so that a node's directory can change hands unnoticed:

    private/node.pem              key and certificate
    private/storage.swissnum      the secret (ours)
    private/storage.furl          the secret is its last part (Tahoe-LAFS, if the other is missing)

The certificate's dates and names mean nothing: clients know the hash of its key.

Source: the format reference, storage protocols, sections 1.1, 1.2 and 2.1.
"""

from __future__ import annotations

import hashlib
import os
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from pipegrid.core import base32
from pipegrid.errors import UsageError
from pipegrid.wire import nurl
from pipegrid.wire.furl import Furl
from pipegrid.wire.nurl import Nurl

if TYPE_CHECKING:
    from twisted.internet.ssl import CertificateOptions

_SWISSNUM_BYTES = 20
_KEY_BITS = 2048  # RSA, as Foolscap wants it
_VALID = timedelta(days=36500)
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.S)
_KEY = re.compile(rb"-----BEGIN ([A-Z ]*)PRIVATE KEY-----.*?-----END \1PRIVATE KEY-----", re.S)


@attrs.frozen
class Identity:
    """
    A server's key, certificate and secret.

    Attributes:
        key_pem, certificate_pem: PEM.
        spki_hash: 32 bytes, by which clients know the certificate.
        tub_id: 20 bytes, by which Foolscap's clients do.
        swissnum: the secret.
    """

    key_pem: bytes = attrs.field(repr=False)
    certificate_pem: bytes
    spki_hash: bytes
    tub_id: bytes
    swissnum: str = attrs.field(repr=False)

    def nurl(self, host: str, port: int) -> Nurl:
        """Return the address to give to clients."""
        return Nurl(self.spki_hash, host, port, self.swissnum)

    def furl(self, host: str, port: int) -> Furl:
        """Return the address to give to clients that speak Foolscap."""
        name = f"[{host}]" if ":" in host else host
        return Furl(self.tub_id, (f"tcp:{name}:{port}",), self.swissnum)

    def contexts(self) -> CertificateOptions:
        """Return what Twisted wants for serving TLS 1.2 and 1.3 with this certificate."""
        from OpenSSL import SSL, crypto
        from twisted.internet import ssl

        options: Any = ssl.CertificateOptions(
            privateKey=crypto.load_privatekey(crypto.FILETYPE_PEM, self.key_pem),
            certificate=crypto.load_certificate(crypto.FILETYPE_PEM, self.certificate_pem),
            raiseMinimumTo=ssl.TLSVersion.TLSv1_2,
            acceptableProtocols=[b"http/1.1"],
        )
        # A thousand idle connections need not hold 32 KiB of buffers each.
        options.getContext().set_mode(SSL.MODE_RELEASE_BUFFERS)
        return options  # type: ignore[no-any-return]


def load_or_create(directory: Path) -> Identity:
    """
    Return the identity in a node's directory; what is missing is made, for good.

    Raises:
        UsageError: files are there that hold something else, or the directory cannot be used.
    """
    private = directory / "private"
    try:
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        pem = _read_or_make(private / "node.pem", make_pem)
        swissnum = _read_swissnum(private)
    except OSError as error:
        raise UsageError(
            f"cannot use {error.filename or private}: {error.strerror}; "
            "choose another directory with -d"
        ) from error
    return from_pem(pem, swissnum, str(private / "node.pem"))


def from_pem(pem: bytes, swissnum: str, name: str) -> Identity:
    """
    Return the identity made of a key and a certificate, in any order.

    Raises:
        UsageError: there is not one of each.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key, certificate_pem = _KEY.search(pem), _CERTIFICATE.search(pem)
    if key is None or certificate_pem is None:
        raise UsageError(
            f"{name} does not hold a private key and a certificate; restore it, or remove it for "
            "a new identity"
        )
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem[0] + b"\n")
    except ValueError as error:
        raise UsageError(f"the certificate in {name} is damaged ({error}); restore it") from error
    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return Identity(
        key[0] + b"\n",
        certificate_pem[0] + b"\n",
        hashlib.sha256(spki).digest(),
        hashlib.sha1(certificate.public_bytes(Encoding.DER)).digest(),
        swissnum,
    )


def make_pem() -> bytes:
    """Return a new key and its certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )
    from cryptography.x509.oid import NameOID

    key = rsa.generate_private_key(65537, _KEY_BITS)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pipegrid storage")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return key_pem + certificate.public_bytes(Encoding.PEM)


def _read_swissnum(private: Path) -> str:
    furl = private / "storage.furl"
    own = private / "storage.swissnum"
    if furl.exists() and not own.exists():
        name, text = furl, furl.read_text("ascii", "replace").strip().rpartition("/")[2]
    else:
        name = own
        data = _read_or_make(
            own, lambda: base32.encode(os.urandom(_SWISSNUM_BYTES)).encode() + b"\n"
        )
        text = data.decode("ascii", "replace").strip()
    if not nurl.is_swissnum(text):
        raise UsageError(f"{name} does not hold a swissnum; restore it, or remove it for a new one")
    return text


def _read_or_make(path: Path, make: Any) -> bytes:
    """Return a file's content; if it is missing, make it, whole or not at all."""
    if not path.exists():
        new = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(make())
                file.flush()
                os.fsync(file.fileno())
            os.link(new, path)
        except FileExistsError:
            pass  # somebody made it at the same moment: theirs stands
        finally:
            os.unlink(new)
    return path.read_bytes()
