"""TLS with a pinned public key, and a fast reader for the usual certificates."""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from twisted.internet.interfaces import IStreamClientEndpoint

from pipegrid.errors import UsageError
from pipegrid.http11.exchange import WrongServerKey
from pipegrid.reactor.client_tls import CheckCertificate, ClientTLSEndpoint
from pipegrid.reactor.tls_settings import http_context

if TYPE_CHECKING:
    from cryptography import x509


# The usual certificate of a storage server, read without a library.
#
# Such a certificate is in DER, as X.509 requires, has an RSA key, and is signed by that key with SHA-2, as
# Tahoe-LAFS and PipeGrid make them. ``cryptography`` reads all others (``UnusualCertificate``): importing its
# X.509 module and checking the certificates of ten servers takes 29 ms of CPU time, and this reader takes 2.6
# ms. The difference is 6 to 8 % of a ``get`` of a small file. ``misc.fuzz`` compares both readers.
#
# **Why it is safe to read a certificate twice**, here and in OpenSSL, which uses its key for the handshake:
# DER has only one encoding for each value. This reader accepts lengths only in their shortest form, each
# element must end where its container ends, and the fields must have the order and tags of RFC 5280. So no
# two readers can find the key in two places.
#
# Source: RFC 5280, section 4.1; RFC 8017, sections 8.2.2 and A.2.4; X.690, section 10.1.

_SEQUENCE, _INTEGER, _BIT_STRING, _VERSION = 0x30, 0x02, 0x03, 0xA0
_RSA = bytes.fromhex("300d06092a864886f70d0101010500")
_SIGNED_WITH = {
    bytes.fromhex("300d06092a864886f70d01010b0500"): "sha256",
    bytes.fromhex("300d06092a864886f70d01010c0500"): "sha384",
    bytes.fromhex("300d06092a864886f70d01010d0500"): "sha512",
}
_DIGEST_INFO = {
    "sha256": bytes.fromhex("3031300d060960864801650304020105000420"),
    "sha384": bytes.fromhex("3041300d060960864801650304020205000430"),
    "sha512": bytes.fromhex("3051300d060960864801650304020305000440"),
}
_KEY_BYTES = range(2048 // 8, 8192 // 8 + 1)  # checking a signature by the largest key takes 3 ms
_LARGEST_EXPONENT = 1 << 32


class UnusualCertificate(ValueError):
    """The certificate is not of the usual kind; the text says why."""


class Certificate(NamedTuple):
    """
    The parts of a certificate.

    Attributes:
        signed: the bytes that are signed.
        algorithm: the signature algorithm, which must be the same in both fields.
        key: the SubjectPublicKeyInfo, DER.
        signature: the signature, big-endian.
        own_issuer: whether issuer and subject are the same name.
    """

    signed: bytes
    algorithm: bytes
    key: bytes
    signature: bytes
    own_issuer: bool


def read(der: bytes) -> Certificate:
    """
    Return the parts of a certificate.

    Raises:
        UnusualCertificate: the certificate is not encoded as usual.
    """
    whole = _Elements(der)
    outer = whole.inside(_SEQUENCE)
    whole.end()
    signed = outer.element(_SEQUENCE)
    algorithm = outer.element(_SEQUENCE)
    signature = _bits(outer)
    outer.end()
    fields = _Elements(signed).inside(_SEQUENCE)
    if fields.tag() == _VERSION:
        version = fields.inside(_VERSION)
        version.element(_INTEGER)
        version.end()
    fields.element(_INTEGER)
    if fields.element(_SEQUENCE) != algorithm:
        raise UnusualCertificate("its two signature algorithms differ")
    issuer = fields.element(_SEQUENCE)
    fields.element(_SEQUENCE)
    subject = fields.element(_SEQUENCE)
    key = fields.element(_SEQUENCE)
    return Certificate(signed, algorithm, key, signature, issuer == subject)


def check_signed_by_itself(certificate: Certificate) -> None:
    """
    Check that the certificate is signed by its own key, with RSA and SHA-2.

    Raises:
        UnusualCertificate: it is not signed in this way.
    """
    name = _SIGNED_WITH.get(certificate.algorithm)
    if name is None or not certificate.own_issuer:
        raise UnusualCertificate("it is not signed with RSA and SHA-2 by its own subject")
    modulus, exponent = _rsa_key(certificate.key)
    size = (modulus.bit_length() + 7) // 8
    signature = int.from_bytes(certificate.signature, "big")
    if (
        size not in _KEY_BYTES
        or not modulus & 1
        or not 3 <= exponent < _LARGEST_EXPONENT
        or not exponent & 1
        or len(certificate.signature) != size
        or signature >= modulus
    ):
        raise UnusualCertificate("its key or its signature is of an unusual size")
    digest = _DIGEST_INFO[name] + hashlib.new(name, certificate.signed).digest()
    padding = b"\xff" * (size - len(digest) - 3)
    if (
        pow(signature, exponent, modulus).to_bytes(size, "big")
        != b"\0\1" + padding + b"\0" + digest
    ):
        raise UnusualCertificate("its signature is not that of its key")


def _rsa_key(key: bytes) -> tuple[int, int]:
    """
    Return modulus and exponent of a SubjectPublicKeyInfo. Raises UnusualCertificate if it is not an RSA key.
    """
    info = _Elements(key).inside(_SEQUENCE)
    if info.element(_SEQUENCE) != _RSA:
        raise UnusualCertificate("its key is not an RSA key")
    numbers = _Elements(_bits(info))
    info.end()
    pair = numbers.inside(_SEQUENCE)
    numbers.end()
    modulus, exponent = pair.number(), pair.number()
    pair.end()
    return modulus, exponent


def _bits(elements: _Elements) -> bytes:
    """Return the next element's bits, which must be whole bytes."""
    inner = elements.content(_BIT_STRING)
    if inner[:1] != b"\0":
        raise UnusualCertificate("it has bits that are not whole bytes")
    return inner[1:]


class _Elements:
    """Reads DER elements, one after another."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def tag(self) -> int:
        """Return the tag of the next element without reading the element; -1 if there is none."""
        return self._data[self._at] if self._at < len(self._data) else -1

    def element(self, tag: int) -> bytes:
        """Return the bytes of the next element, with its tag and length."""
        return self._take(tag)[0]

    def content(self, tag: int) -> bytes:
        """Return the content of the next element."""
        return self._take(tag)[1]

    def inside(self, tag: int) -> _Elements:
        """Return a reader of the elements inside the next element."""
        return _Elements(self.content(tag))

    def number(self) -> int:
        """Return the value of the next element, which must be an integer of at least 0."""
        data = self.content(_INTEGER)
        if not data or data[0] & 0x80 or (data[0] == 0 and len(data) > 1 and not data[1] & 0x80):
            raise UnusualCertificate("it has a number that is not in its shortest form")
        return int.from_bytes(data, "big")

    def end(self) -> None:
        """Check that no bytes are left."""
        if self._at != len(self._data):
            raise UnusualCertificate("there are bytes after its end")

    def _take(self, tag: int) -> tuple[bytes, bytes]:
        data, start = self._data, self._at
        if self.tag() != tag or start + 2 > len(data):
            raise UnusualCertificate("its fields are not in the usual order")
        size, at = data[start + 1], start + 2
        if size & 0x80:
            digits = data[at : at + (size & 0x7F)]
            size, at = int.from_bytes(digits, "big"), at + len(digits)
            # A length must be in its shortest form, and not longer than a certificate may be.
            if not 1 <= len(digits) <= 3 or not digits[0] or size < 0x80:
                raise UnusualCertificate("it has a length that is not in its shortest form")
        self._at = at + size
        if self._at > len(data):
            raise UnusualCertificate("it is incomplete")
        return data[start : self._at], data[at : self._at]


# TLS to a storage server with a pinned key.
#
# The server proves its identity by owning the key whose hash is in its address; nothing else in its
# certificate matters. So only the certificate's own signature is checked. Names and dates are not checked,
# since they are usually wrong. The check is part of the handshake: with the wrong key the handshake fails
# before a byte of any request is written.
#
# ``cryptography`` is imported only for unusual certificates, and for certificates that are refused.

PIN_BYTES = 32


def pin_endpoint(
    endpoint: IStreamClientEndpoint,
    pin: bytes,
    server: str = "the server",
    adopt: Callable[[CheckCertificate, IStreamClientEndpoint], IStreamClientEndpoint] | None = None,
) -> IStreamClientEndpoint:
    """
    Wrap an endpoint in TLS to the owner of one key.

    Args:
        pin: SHA-256 of the DER form of the public key (SubjectPublicKeyInfo), 32 bytes.
        server: the server's name for errors.
        adopt: wraps the endpoint in place of this function; its first argument is the function that checks
            certificates.

    The connection is lost with ``WrongServerKey`` if the server has another key.
    """
    if len(pin) != PIN_BYTES:
        raise UsageError(f"The pin of {server} has {len(pin)} bytes instead of {PIN_BYTES}.")

    def check(der: bytes) -> WrongServerKey | None:
        return problem_of(der, pin, server)

    if adopt is not None:
        return adopt(check, endpoint)
    return ClientTLSEndpoint(http_context(), check, endpoint)


def public_key_pin(certificate: x509.Certificate) -> bytes:
    """Return the pin of a certificate's key."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return sha256(spki).digest()


def problem_of(der: bytes, pin: bytes, server: str) -> WrongServerKey | None:
    """
    Return the error for a certificate that does not have the pinned key, or is not signed by its own key;
    otherwise None.

    Args:
        der: the certificate.
        pin, server: as for ``pin_endpoint``.
    """
    with suppress(UnusualCertificate):
        certificate = read(der)
        check_signed_by_itself(certificate)
        if hmac.compare_digest(sha256(certificate.key).digest(), pin):
            return None
    return _second_look(der, pin, server)


def _second_look(der: bytes, pin: bytes, server: str) -> WrongServerKey | None:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    try:
        found = x509.load_der_x509_certificate(der)
        its = public_key_pin(found)
    except Exception as error:  # any error, since the bytes come from a server
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
    """Return a pin as the text that addresses of storage servers contain."""
    return urlsafe_b64encode(pin).decode("ascii").rstrip("=")
