"""
Foolscap tubs that only call others: each of a new identity, which need not be known again.

Foolscap keeps at most one connection between two identities. So that two objects of ours do not push each
other out of one server, each has its own; and an identity that is in use elsewhere, such as that of a
Tahoe-LAFS node whose directory is read, would end the other's connections.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from foolscap.api import Tub

KEEPALIVE_S = 60
"""After so much silence the other side is asked whether it is still there."""

_VALID = timedelta(days=3650)


def make_tub(lost_after_s: int) -> Any:
    """
    Return a tub, not started.

    Args:
        lost_after_s: silence after which the other side is taken to be gone; more than ``KEEPALIVE_S``.
    """
    tub = Tub(certData=_make_pem())
    tub.unsafeTracebacks = False
    tub.setOption("accept-gifts", False)
    tub.setOption("keepaliveTimeout", KEEPALIVE_S)
    tub.setOption("disconnectTimeout", lost_after_s)
    tub.setOption("logLocalFailures", False)
    tub.setOption("logRemoteFailures", False)
    return tub


def _make_pem() -> bytes:
    """Return a key and a certificate; on an elliptic curve, since an RSA key takes a tenth of a second."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    # As all tubs call themselves.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "newpb_thingy")])
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
    return certificate.public_bytes(Encoding.PEM) + key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
