"""TLS 1.2 with keys of its own for each connection and authenticated ciphers, or none."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

from misc.attack.measure import serve_command
from misc.speedtest.processes import first_line, running
from OpenSSL import SSL
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from pipegrid.reactor.tls_settings import http_context
from pipegrid.server import identity
from pipegrid.wire import server_address
from pipegrid.wire.foolscap_broker import StrictNegotiation, make_tub

GOOD = ("ECDHE-RSA-AES128-GCM-SHA256", "ECDHE-RSA-AES256-GCM-SHA384", "ECDHE-RSA-CHACHA20-POLY1305")
BAD = (
    "AES128-SHA",
    "AES256-SHA256",
    "AES128-GCM-SHA256",
    "ECDHE-RSA-AES128-SHA",
    "DHE-RSA-AES128-SHA",
)


class ServerTests(SynchronousTestCase):
    """``pipegrid serve``."""

    def test_ciphers(self) -> None:
        """Both protocols take the good ones and refuse the others; TLS 1.3 works, TLS 1.1 does not."""
        with running(serve_command(Path(self.mktemp()))) as process:
            address = server_address.parse_nurl(first_line(process))
            tub = server_address.parse_furl(first_line(process)).tub_id
            for begin in (b"", upgrade(tub)):
                for cipher in GOOD:
                    self.assertEqual(handshake(address, begin, cipher), cipher)
                for cipher in BAD:
                    self.assertRaises(OSError, handshake, address, begin, cipher)
                self.assertTrue(handshake(address, begin, "", ssl.TLSVersion.TLSv1_3))
                self.assertRaises(
                    OSError, handshake, address, begin, "ALL:@SECLEVEL=0", ssl.TLSVersion.TLSv1_1
                )


class ClientTests(SynchronousTestCase):
    """What our clients offer."""

    def test_https(self) -> None:
        """Nothing else, no TLS before 1.2, and no second handshake on a connection."""
        context = http_context()
        self.check_offered([str(each["name"]) for each in context.get_ciphers()])
        self.assertEqual(context.minimum_version, ssl.TLSVersion.TLSv1_2)
        self.assertTrue(context.options & ssl.OP_NO_RENEGOTIATION)

    def test_foolscap(self) -> None:
        """Nor over Foolscap, for tubs that call and for those that are called."""
        tub = make_tub(120, DIRECT_CONNECTIONS)
        self.assertTrue(issubclass(tub.negotiationClass, StrictNegotiation))
        negotiation = StrictNegotiation()
        started: list[Any] = []

        class Transport:
            """Is told to start TLS."""

            def startTLS(self, options: Any) -> None:
                """Note it."""
                started.append(options)

        negotiation.transport = Transport()
        negotiation.startTLS(tub.myCertificate)
        self.check(started[0].getContext())

    def test_servers(self) -> None:
        """A server's contexts say the same."""
        who = identity.load_or_create(Path(self.mktemp()))
        self.check(who.contexts().getContext())

    def check(self, context: SSL.Context) -> None:
        """Look what connections of a context offer."""
        self.check_offered(SSL.Connection(context, None).get_cipher_list())

    def check_offered(self, offered: list[str]) -> None:
        """Look at the names of ciphers."""
        old = [name for name in offered if not name.startswith(("TLS_", "ECDHE-"))]
        self.assertEqual(old, [])
        self.assertTrue(set(GOOD) <= set(offered))
        self.assertFalse(set(BAD) & set(offered))


def handshake(
    address: server_address.Nurl,
    begin: bytes,
    ciphers: str,
    version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2,
) -> str:
    """Return which cipher a server agrees to. Raises OSError if it does not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if ciphers:
        context.set_ciphers(ciphers)
    context.minimum_version = context.maximum_version = version
    with connected(address, begin) as raw, context.wrap_socket(raw) as connection:
        found = connection.cipher()
        assert found is not None
        return found[0]


def connected(address: server_address.Nurl, begin: bytes) -> socket.socket:
    """Return a connection to a server on which TLS can begin; ``begin``: see ``upgrade``."""
    raw = socket.create_connection((address.host, address.port), 30)
    if begin:
        raw.sendall(begin)
        said = b""
        while b"\r\n\r\n" not in said:
            said += raw.recv(1)
        assert said.startswith(b"HTTP/1.1 101 "), said
    return raw


def upgrade(tub_id: bytes) -> bytes:
    """Return what is said before TLS on a connection that is to speak Foolscap."""
    from pipegrid.core import base32

    return b"GET /id/%s HTTP/1.1\r\nHost: x\r\nUpgrade: TLS/1.0\r\nConnection: Upgrade\r\n\r\n" % (
        base32.encode(tub_id).encode("ascii")
    )
