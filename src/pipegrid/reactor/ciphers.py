"""
Which of TLS 1.2's ciphers we speak: those with a key of their own for each connection, and authenticated.

That is ECDHE with AES-GCM or ChaCha20-Poly1305; TLS 1.3 has no others. Left out are RSA key exchange (who
gets the server's key can read what was recorded), and CBC with SHA-1. Every Tahoe-LAFS since 1.14 speaks
them, for OpenSSL has since 1.0.1 (2012).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from OpenSSL import SSL

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def only_forward_secret(context: SSL.Context) -> None:
    """Allow a context nothing older than TLS 1.2, and of that only these ciphers, as either side."""
    from OpenSSL import SSL

    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    context.set_cipher_list(CIPHERS.encode())
