"""TLS contexts, ciphers, self-signed certificates."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from OpenSSL import SSL


# Which of TLS 1.2's ciphers we speak: those with a key of their own for each connection, and authenticated.
#
# That is ECDHE with AES-GCM or ChaCha20-Poly1305; TLS 1.3 has no others. Left out are RSA key exchange (who
# gets the server's key can read what was recorded), and CBC with SHA-1. Every Tahoe-LAFS since 1.14 speaks
# them, for OpenSSL has since 1.0.1 (2012).

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def only_forward_secret(context: SSL.Context) -> None:
    """Allow a context nothing older than TLS 1.2, and of that only these ciphers, as either side."""
    from OpenSSL import SSL

    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    context.set_cipher_list(CIPHERS.encode())


# One handshake for a connection, and few requests for new keys after it: of servers, and of Foolscap.
#
# In TLS 1.2 either side may ask for another handshake, which nobody here needs. In TLS 1.3 it may ask for new
# keys: 27 bytes, for each of which OpenSSL derives keys and answers before anything else is read, forty in a
# millisecond. GnuTLS asks by itself, once in 300 GB; most never do.

MAX_KEY_UPDATES = 32

_DONE = 0x20  # SSL_CB_HANDSHAKE_DONE
_EXIT = 0x02  # SSL_CB_EXIT: what there was of a handshake, or of what comes after it, has been dealt with
_MAX_EXITS = 2 * MAX_KEY_UPDATES  # one for the question, and one for the answer


def bound_handshakes(context: SSL.Context) -> None:
    """Have connections of a context end, as after a goodbye, when the other side wants more than that."""
    from OpenSSL import SSL

    context.set_options(getattr(SSL, "OP_NO_RENEGOTIATION", 0))

    def happened(connection: Any, where: int, _: int) -> None:
        exits: int | None = getattr(connection, "pipegrid_exits", None)
        if where == _DONE:
            connection.pipegrid_exits = exits or 0
        elif exits is not None and where & _EXIT:
            connection.pipegrid_exits = exits + 1
            if exits > _MAX_EXITS:
                connection.set_shutdown(SSL.RECEIVED_SHUTDOWN)

    context.set_info_callback(happened)


# How many bytes TLS is given at a time, whichever library does it.

RECORD_BYTES = 2**14
"""No record holds more."""

BATCH_BYTES = 4 * RECORD_BYTES
"""Given to OpenSSL at a time, in either direction: for each connection it keeps as large a buffer."""

DELIVERY_BYTES = 2 * BATCH_BYTES
"""Decrypted before it is copied to a buffer of its own."""

GATHERED_BYTES = 2 * BATCH_BYTES
"""Encrypted before it is sent: each call of the kernel costs, and wakes the receiver, which costs there."""


# What makes the client's side of TLS, without Twisted: see ``ahead``.


def client_context(protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """
    Return what makes the client's side of TLS 1.2 and 1.3, without a look at certificates.

    Args:
        protocols: to offer (ALPN).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # ``client_tls.CheckCertificate`` does it
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


@cache
def http_context() -> ssl.SSLContext:
    """Return the context of all connections that speak HTTP/1.1; each new one would take a third of a ms."""
    # A server that knows HTTP/2 might choose it if we let it.
    return client_context(("http/1.1",))


# Certificates that their own key has signed: who talks to it knows the key, and looks at nothing else.


def self_signed_pem(
    key: RSAPrivateKey | EllipticCurvePrivateKey, name: str, valid: timedelta
) -> bytes:
    """
    Return a key and a new certificate for it, PEM.

    Args:
        name: the common name of subject and issuer.
        valid: for how long from now on; it begins a day ago, for clocks that are late.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + valid)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return key_pem + certificate.public_bytes(Encoding.PEM)
