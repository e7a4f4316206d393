"""
TLS to the owner of one key: who a storage server is.

It proves that by owning the key whose hash its address names; its certificate carries no other truth. So
nobody's signature but its own is asked for, and neither name nor dates are looked at (they are normally
wrong). The check is part of the handshake: with the wrong key it fails before a byte of any request is
written.

The usual certificate is checked by ``certificates``; ``cryptography`` is imported for others only, and for
those that are refused.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING

from twisted.internet.interfaces import IStreamClientEndpoint

from pipegrid.errors import UsageError
from pipegrid.http11.certificates import Unusual, check_signed_by_itself, read
from pipegrid.http11.errors import WrongServerKey
from pipegrid.reactor.clientcontext import http_context
from pipegrid.reactor.clientendpoint import ClientTLSEndpoint
from pipegrid.reactor.clienttls import CheckCertificate

if TYPE_CHECKING:
    from cryptography import x509

PIN_BYTES = 32


def pin_endpoint(
    endpoint: IStreamClientEndpoint,
    pin: bytes,
    server: str = "the server",
    adopt: Callable[[CheckCertificate, IStreamClientEndpoint], IStreamClientEndpoint] | None = None,
) -> IStreamClientEndpoint:
    """
    Put TLS around an endpoint, for whoever owns one key.

    Args:
        pin: SHA-256 of the DER form of the public key (SubjectPublicKeyInfo), 32 bytes.
        server: name for the error message.
        adopt: puts TLS around it instead, given what checks certificates.

    The connection is lost with ``WrongServerKey`` if the key is another one.
    """
    if len(pin) != PIN_BYTES:
        raise UsageError(f"The pin of {server} has {len(pin)} bytes instead of {PIN_BYTES}.")

    def check(der: bytes) -> WrongServerKey | None:
        return problem_of(der, pin, server)

    if adopt is not None:
        return adopt(check, endpoint)
    return ClientTLSEndpoint(http_context(), check, endpoint)


def public_key_pin(certificate: x509.Certificate) -> bytes:
    """The pin of a certificate's key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return sha256(spki).digest()


def problem_of(der: bytes, pin: bytes, server: str) -> WrongServerKey | None:
    """
    Return why a certificate is not that of a key's owner; None if it is.

    Args:
        der: the certificate.
        pin, server: as ``pin_endpoint`` is given them.
    """
    try:
        certificate = read(der)
        check_signed_by_itself(certificate)
    except Unusual:
        return _second_look(der, pin, server)
    if hmac.compare_digest(sha256(certificate.key).digest(), pin):
        return None
    return _second_look(der, pin, server)


def _second_look(der: bytes, pin: bytes, server: str) -> WrongServerKey | None:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        found = x509.load_der_x509_certificate(der)
        its = public_key_pin(found)
    except Exception as error:  # whatever a library says of what a server may send
        why = str(error) or type(error).__name__
        return _wrong(server, f"The certificate of {server} cannot be understood ({why})")
    if not hmac.compare_digest(its, pin):
        what = f"its key hashes to {_text(its)}, not to {_text(pin)}"
        return _wrong(server, f"{server} is not the server it should be: {what}")
    try:
        found.verify_directly_issued_by(found)
    except (InvalidSignature, ValueError, TypeError):
        return _wrong(server, f"The certificate of {server} is not signed by its own key")
    return None


def _wrong(server: str, what: str) -> WrongServerKey:
    return WrongServerKey(f"{what}; nothing was sent to it, check its address.", server)


def _text(pin: bytes) -> str:
    """As addresses of storage servers write it."""
    return urlsafe_b64encode(pin).decode("ascii").rstrip("=")
