"""
TLS to the owner of one key: who a storage server is.

It proves that by owning the key whose hash its address names; its certificate carries no other truth. So
nobody's signature but its own is asked for, and neither name nor dates are looked at (they are normally
wrong). The check is part of the handshake: with the wrong key it fails before a byte of any request is
written.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from OpenSSL import SSL
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator, IStreamClientEndpoint
from twisted.protocols.tls import TLSMemoryBIOProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.errors import UsageError
from pipegrid.http11.errors import WrongServerKey
from pipegrid.reactor.ciphers import only_forward_secret
from pipegrid.reactor.tls import BatchingTLSEndpoint, write_whole

ALPN = [b"http/1.1"]  # a server that knows HTTP/2 might choose it if we let it
PIN_BYTES = 32


def pin_endpoint(
    endpoint: IStreamClientEndpoint, pin: bytes, server: str = "the server"
) -> IStreamClientEndpoint:
    """
    Put TLS around an endpoint, for whoever owns one key.

    Args:
        pin: SHA-256 of the DER form of the public key (SubjectPublicKeyInfo), 32 bytes.
        server: name for the error message.

    The connection is lost with ``WrongServerKey`` if the key is another one.
    """
    return BatchingTLSEndpoint(_PinnedConnectionCreator(pin, server), endpoint)


def public_key_pin(certificate: x509.Certificate) -> bytes:
    """The pin of a certificate's key."""
    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return sha256(spki).digest()


@implementer(IOpenSSLClientConnectionCreator)
class _PinnedConnectionCreator:
    """Makes the client side of TLS connections to one key."""

    def __init__(self, pin: bytes, server: str) -> None:
        if len(pin) != PIN_BYTES:
            raise UsageError(f"The pin of {server} has {len(pin)} bytes instead of {PIN_BYTES}.")
        self._pin = pin
        self._server = server
        context = self._context = SSL.Context(SSL.TLS_METHOD)
        only_forward_secret(context)
        context.set_alpn_protos(ALPN)
        write_whole(context)
        context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, self._verify)

    def clientConnectionForTLS(self, tlsProtocol: TLSMemoryBIOProtocol) -> SSL.Connection:
        connection = SSL.Connection(self._context, None)
        connection.set_connect_state()
        connection.set_app_data(tlsProtocol)
        return connection

    def _verify(
        self, connection: SSL.Connection, certificate: Any, problem: int, depth: int, fine: int
    ) -> bool:
        """Called for each thing OpenSSL notices about each certificate of the chain."""
        if depth:
            return True  # a chain above the server's own certificate says nothing about its key
        found = certificate.to_cryptography()
        pin = public_key_pin(found)
        if not hmac.compare_digest(pin, self._pin):
            sentence = (
                f"{self._server} is not the server it should be: its key hashes to {_text(pin)},"
                f" not to {_text(self._pin)}; nothing was sent to it, check its address."
            )
        else:
            try:
                found.verify_directly_issued_by(found)
            except (InvalidSignature, ValueError, TypeError):
                sentence = (
                    f"The certificate of {self._server} is not signed by its own key;"
                    " nothing was sent to it, check its address."
                )
            else:
                return True
        # An exception raised here would not survive Twisted's TLS; this reaches connectionLost.
        tls: TLSMemoryBIOProtocol = connection.get_app_data()
        tls.failVerification(Failure(WrongServerKey(sentence, self._server)))
        return False


def _text(pin: bytes) -> str:
    """As addresses of storage servers write it."""
    return urlsafe_b64encode(pin).decode("ascii").rstrip("=")
