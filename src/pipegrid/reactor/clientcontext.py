"""
What makes the client's side of TLS, without Twisted: see ``ahead``.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from functools import cache

from pipegrid.reactor.ciphers import CIPHERS


def client_context(protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """
    Return what makes the client's side of TLS 1.2 and 1.3, without a look at certificates.

    Args:
        protocols: to offer (ALPN).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # ``clienttls.CheckCertificate`` does it
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
