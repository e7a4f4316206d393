"""One handshake on a connection, and few requests for new keys; with real processes."""

from __future__ import annotations

import socket
from pathlib import Path

from misc.attack.key_updates import shake_hands
from misc.attack.measure import serve_command
from misc.speedtest.processes import first_line, running
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.reactor.tls_settings import MAX_KEY_UPDATES
from pipegrid.wire import server_address
from tests.reactor.test_ciphers import connected, upgrade

UPDATE_BYTES = 27
END_BYTES = 5 + 2 + 1 + 16
"""Of TLS's goodbye: a record's head, an alert, its type, and what proves it."""


class KeyUpdateTests(SynchronousTestCase):
    """``pipegrid serve``."""

    def test_few(self) -> None:
        """A few are answered, in either protocol; who wants more has a connection that ends."""
        with running(serve_command(Path(self.mktemp()))) as process:
            address = server_address.parse_nurl(first_line(process))
            tub = server_address.parse_furl(first_line(process)).tub_id
            for begin in (b"", upgrade(tub)):
                with connected(address, begin) as connection:
                    updates = shake_hands(connection)
                    _read(connection, 1000)  # tickets, and what Foolscap says first
                    connection.sendall(b"".join(updates.record() for _ in range(MAX_KEY_UPDATES)))
                    wanted = (MAX_KEY_UPDATES - 1) * UPDATE_BYTES  # the last answer waits for more
                    self.assertEqual(len(_read(connection, wanted)), wanted, begin)
                    connection.sendall(b"".join(updates.record() for _ in range(1000)))
                    rest = _read(connection, 10**6)
                    self.assertLessEqual(len(rest), 2 * UPDATE_BYTES + END_BYTES, begin)


def _read(connection: socket.socket, most_bytes: int) -> bytes:
    """Return what comes until it is so much, nothing comes for a while, or the connection ends."""
    found = b""
    connection.settimeout(0.3)
    try:
        while len(found) < most_bytes and (data := connection.recv(most_bytes - len(found))):
            found += data
    except (TimeoutError, ConnectionResetError):
        pass
    return found
