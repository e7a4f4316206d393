"""
TLS settings of clients and servers: ciphers, limits, contexts, buffer sizes, and self-signed certificates.
"""

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


# In TLS 1.2 only authenticated ciphers with forward secrecy are used: ECDHE with AES-GCM or
# ChaCha20-Poly1305; TLS 1.3 has no others. RSA key exchange is not used, since recorded traffic could be
# decrypted with the server's key; nor is CBC with SHA-1. Every Tahoe-LAFS since 1.14 supports the used
# ciphers, and so does OpenSSL since 1.0.1 (2012).

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def only_forward_secret(context: SSL.Context) -> None:
    """
    Limit the context of a client or server to TLS 1.3, and TLS 1.2 with authenticated ciphers that have
    forward secrecy.
    """
    from OpenSSL import SSL

    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    context.set_cipher_list(CIPHERS.encode())


# In TLS 1.2 either side may ask for another handshake, which is never needed. In TLS 1.3 either side may ask
# for new keys with a message of 27 bytes. For each message OpenSSL derives keys and answers before it reads
# on; forty messages take it a millisecond. GnuTLS sends such a message once in 300 GB; most other libraries
# never do.

MAX_KEY_UPDATES = 32

_DONE = 0x20  # SSL_CB_HANDSHAKE_DONE
_EXIT = 0x02  # SSL_CB_EXIT: a message of the handshake, or after it, has been processed
_MAX_EXITS = 2 * MAX_KEY_UPDATES  # one exit for each request, one for its answer


def bound_handshakes(context: SSL.Context) -> None:
    """
    Make connections of a context end, as after close_notify, when the peer asks for new keys more than
    ``MAX_KEY_UPDATES`` times.
    """
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


# How many bytes TLS processes at a time, with pyOpenSSL and with Python's ``ssl``.

RECORD_BYTES = 2**14
"""The most plaintext bytes in a record."""

BATCH_BYTES = 4 * RECORD_BYTES
"""The most bytes that OpenSSL gets at a time to encrypt or decrypt: it keeps such a buffer per connection."""

DELIVERY_BYTES = 2 * BATCH_BYTES
"""The most bytes that are decrypted before they are copied to a separate buffer."""

GATHERED_BYTES = 2 * BATCH_BYTES
"""Encrypted bytes to collect before sending them: each system call costs time, here and at the receiver."""


# The client's contexts; this part needs no Twisted, so ``preconnect`` can use it.


def client_context(protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """
    Return a client's context for TLS 1.2 and 1.3, which does not check certificates.

    Args:
        protocols: the protocols to offer by ALPN.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # ``client_tls.CheckCertificate`` checks the certificate
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


@cache
def http_context() -> ssl.SSLContext:
    """
    Return the context that all HTTP/1.1 connections share; creating a context takes a third of a millisecond.
    """
    # HTTP/2 is not offered, since a server might select it.
    return client_context(("http/1.1",))


# Self-signed certificates: peers know the server's public key, and check nothing else.


def self_signed_pem(
    key: RSAPrivateKey | EllipticCurvePrivateKey, name: str, valid: timedelta
) -> bytes:
    """
    Return a key and a new certificate for the key, as PEM.

    Args:
        name: the common name of subject and issuer.
        valid: how long the certificate is valid from now on; validity starts a day ago, for clocks that are
            slow.
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
