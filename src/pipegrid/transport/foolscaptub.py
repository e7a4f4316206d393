"""
Connections to Foolscap servers over TCP: a tub for each, with a certificate that lives as long as it does.

Foolscap keeps at most one connection between two certificates. So that two of our objects do not push each
other out of one server, each has its own; making one costs a millisecond, with elliptic curves.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Any

from foolscap.api import Tub
from twisted.internet.defer import Deferred, fail, succeed

from pipegrid.errors import UsageError
from pipegrid.wire.furl import Furl

# Also without "tcp:", as it was of old.
_TCP = re.compile(r"(tcp:)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}\Z")

KEEPALIVE_S = 60
"""After so much silence the server is asked whether it is still there; after twice as much it is not."""


class TubConnector:
    """
    Implements ``foolscaplink.Connector``.

    Raises:
        UsageError: the fURL leads nowhere over TCP.
    """

    def __init__(self, furl: Furl) -> None:
        hints = tuple(hint for hint in furl.hints if _TCP.match(hint))
        if not hints:
            raise UsageError(
                "the fURL names no TCP port to connect to, which is all that works yet"
            )
        self._furl = str(Furl(furl.tub_id, hints, furl.swissnum))
        self._tub: Any = None
        self._closed = False

    def connect(self) -> Deferred[Any]:
        """Connect, unless there is a connection, and ask for the storage server."""
        if self._closed:
            return fail(UsageError("this connector was closed; make another"))
        if self._tub is None:
            self._tub = make_tub()
            self._tub.startService()
        found: Deferred[Any] = self._tub.getReference(self._furl)
        return found.addCallback(_hurry)

    def close(self) -> Deferred[Any]:
        """Close the tub."""
        self._closed = True
        tub, self._tub = self._tub, None
        closed: Deferred[Any] = succeed(None) if tub is None else tub.stopService()
        return closed


def make_tub() -> Any:
    """Return a tub, not started, that only connects."""
    tub = Tub(certData=_make_pem())
    tub.unsafeTracebacks = False
    tub.setOption("accept-gifts", False)
    tub.setOption("keepaliveTimeout", KEEPALIVE_S)
    tub.setOption("disconnectTimeout", 2 * KEEPALIVE_S)
    return tub


def _hurry(storage: Any) -> Any:
    """Let no message wait for the acknowledgement of the one before."""
    storage.tracker.broker.transport.setTcpNoDelay(True)
    return storage


def _make_pem() -> bytes:
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
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pipegrid client")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return key_pem + certificate.public_bytes(Encoding.PEM)
