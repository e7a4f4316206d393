"""
Any bytes as a server's certificate: what our reader takes, ``cryptography`` reads in the same way.

The first byte says whether the rest is the certificate, or changes to one, which is signed when they are
made: no fuzzer finds a signature.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from misc.fuzz.choices import Choices
from pipegrid.http11.pinned_key import (
    UnusualCertificate,
    check_signed_by_itself,
    problem_of,
    public_key_pin,
    read,
)
from pipegrid.server.identity import make_pem

MAX_EDITS = 8

_PEM = make_pem()
_KEY = load_pem_private_key(_PEM, None)
_USUAL = x509.load_pem_x509_certificate(_PEM)
_PIN = public_key_pin(_USUAL)
_ALGORITHM = bytes.fromhex("300d06092a864886f70d01010b0500")
"""RSA with SHA-256, as certificates name it."""


def run(data: bytes) -> None:
    """Read a certificate, and let ``cryptography`` read it, too."""
    choices = Choices(data)
    der = _edited(choices) if choices.flag() else choices.rest()
    try:
        ours = read(der)
        check_signed_by_itself(ours)
    except UnusualCertificate as error:
        assert str(error), "a refusal that says nothing"
        problem_of(der, _PIN, "the server")  # ``cryptography`` decides
        return
    try:
        theirs = x509.load_der_x509_certificate(der)
        key = theirs.public_key()
    except ValueError:  # it looks at more than keys and signatures
        return
    assert theirs.tbs_certificate_bytes == ours.signed, "another part is signed"
    assert theirs.signature == ours.signature, "another signature is read"
    assert public_key_pin(theirs) == sha256(ours.key).digest(), "another key is read"
    assert isinstance(key, rsa.RSAPublicKey)
    algorithm = theirs.signature_hash_algorithm
    assert isinstance(algorithm, hashes.HashAlgorithm)
    try:
        key.verify(ours.signature, ours.signed, padding.PKCS1v15(), algorithm)
    except InvalidSignature:
        raise AssertionError("a signature is taken that is none") from None


def _edited(choices: Choices) -> bytes:
    """Return the usual certificate with changes, signed by its key."""
    body = bytearray(_USUAL.tbs_certificate_bytes)
    for _ in range(choices.below(MAX_EDITS)):
        at, put, removed = (
            choices.below(len(body)),
            choices.take(choices.below(4)),
            choices.below(4),
        )
        body[at : at + removed] = put
    with suppress(IndexError):
        if choices.flag():  # its length fits what was put into it
            body[2:4] = (len(body) - 4).to_bytes(2, "big")
    assert isinstance(_KEY, rsa.RSAPrivateKey)
    signature = _KEY.sign(bytes(body), padding.PKCS1v15(), hashes.SHA256())
    bits = b"\0" + signature
    inside = bytes(body) + _ALGORITHM + b"\x03\x82" + len(bits).to_bytes(2, "big") + bits
    return b"\x30\x82" + len(inside).to_bytes(2, "big") + inside


def seeds() -> dict[str, bytes]:
    """Return a certificate that another program made, and changes of all kinds."""
    return {
        "whole": b"\0" + _USUAL.public_bytes(Encoding.DER),
        "signed": b"\1",
        "version": bytes((1, 1, 0, 8, 1, 0, 1, 0)),
        "longer": bytes((1, 1, 0, 60, 2, 0x30, 0x80, 0, 1)),
        "shorter": bytes((1, 1, 0, 40, 0, 2, 1)),
        "short": b"\0\x30\x82\x01\x00\x30",
    }
