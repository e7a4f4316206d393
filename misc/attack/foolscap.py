"""
Foolscap on a raw socket, for attack programs: its negotiation, its tokens, and no manners.

Source: Foolscap 24.9's documentation ("specifications/banana", "pb"); the tokens' names are in
wire.banana_receiver.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA1
from cryptography.x509 import load_pem_x509_certificate

from misc.attack.target import Target
from pipegrid.core import base32
from pipegrid.reactor.tls_settings import self_signed_pem
from pipegrid.wire import server_address
from pipegrid.wire.banana_receiver import CLOSE, INT, NEG, OPEN, PING, STRING

REPLY_S = 5.0
VOCABULARY = b"initial-vocab-table-index: 0 da39\r\n"


def token(kind: int, number: int = 0, body: bytes = b"") -> bytes:
    """Return a token."""
    digits = bytearray()
    while number:
        digits.append(number & 0x7F)
        number >>= 7
    return bytes(digits) + bytes((kind,)) + body


def opened(name: bytes, *parts: bytes) -> bytes:
    """Return a sequence; every one has the same number, which is all that is asked."""
    return token(OPEN, 1) + string(name) + b"".join(parts) + token(CLOSE, 1)


def string(data: bytes) -> bytes:
    """Return a string."""
    return token(STRING, len(data), data)


def value(thing: Any) -> bytes:
    """Return what a value is on the wire."""
    if isinstance(thing, bytes):
        return string(thing)
    if isinstance(thing, int):
        return token(INT, thing) if thing >= 0 else token(NEG, -thing)
    if thing is None:
        return opened(b"none")
    if isinstance(thing, dict):
        return opened(b"dict", *(value(key) + value(one) for key, one in thing.items()))
    names: dict[type, bytes] = {tuple: b"tuple", list: b"list", set: b"set"}
    return opened(names[type(thing)], *map(value, thing))


def call(request: int, target: int, method: bytes, *arguments: bytes) -> bytes:
    """
    Return a call.

    Args:
        request: its number, from 1; 0 wants no answer.
        target: the number of an object, 0 for the tub itself.
        arguments: as they are on the wire.
    """
    given = opened(b"arguments", value(len(arguments)), *arguments)
    return opened(b"call", value(request), value(target), value(method), given)


def ask_name(name: bytes, request: int = 1) -> bytes:
    """Return the question for what has a name."""
    return call(request, 0, b"getReferenceByName", value(name))


PINGS = token(PING) * 65536


class Peer:
    """
    One connection, negotiated.

    Attributes:
        storage: the number of the storage server, once it was named.
    """

    def __init__(self, target: Target, source: str = "") -> None:
        self.storage = 0
        self._target = target
        address = server_address.parse_furl(target.furl)
        self._name = address.swissnum.encode("ascii")
        raw = target.connect(source)
        try:
            raw.settimeout(REPLY_S)
            tub_id = base32.encode(address.tub_id)
            begin(raw, tub_id)
            pem = self_signed_pem(ec.generate_private_key(ec.SECP256R1()), "x", timedelta(days=1))
            self.socket = _with_tls(raw, pem)
        except BaseException:
            raw.close()
            raise
        ours = base32.encode(load_pem_x509_certificate(pem).fingerprint(SHA1()))
        hello = (
            "banana-negotiation-range: 3 3\r\ninitial-vocab-table-range: 0 0\r\n"
            f"last-connection: none 0\r\nmy-incarnation: {os.urandom(8).hex()}\r\nmy-tub-id: {ours}\r\n\r\n"
        )
        self.socket.sendall(hello.encode("ascii"))
        block(self.socket)
        if ours > tub_id:  # then it is for us to decide
            decision = b"banana-decision-version: 3\r\ncurrent-connection: x 1\r\n" + VOCABULARY
            self.socket.sendall(decision + b"\r\n")
        else:
            block(self.socket)

    def name(self) -> Peer:
        """Show the secret; the storage server is object 1 of every connection."""
        self.socket.sendall(ask_name(self._name))
        if b"my-reference" not in self.socket.recv(65536):
            raise ConnectionError("the server does not know its own name")
        self.storage = 1
        return self


def begin(raw: socket.socket, tub_id: str) -> None:
    """Ask for Foolscap, and wait until that is granted."""
    raw.sendall(
        f"GET /id/{tub_id} HTTP/1.1\r\nHost: x\r\nUpgrade: TLS/1.0\r\nConnection: Upgrade\r\n\r\n".encode()
    )
    block(raw)


def block(connection: socket.socket) -> bytes:
    """Return what comes before an empty line."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        piece = connection.recv(1)
        if not piece:
            raise ConnectionError("cut")
        data += piece
    return data


def _with_tls(raw: socket.socket, pem: bytes) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with tempfile.NamedTemporaryFile() as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context.wrap_socket(raw)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """An attack goes on when it is cut, or refused."""
    with contextlib.suppress(OSError):
        yield


def in_parallel(target: Target, connections: int, work: Callable[[Target], None]) -> None:
    """Do something on so many connections at a time, again and again, until the time is over."""

    def go_on() -> None:
        while target.left_s > 0:
            with refused():
                work(target)
            time.sleep(0.02)

    threads = [threading.Thread(target=go_on, daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, target.left_s))


def pour(
    target: Target, connection: socket.socket, data: bytes, total_bytes: int = 1 << 62
) -> None:
    """Send the same again and again, until so much was sent, or the time is over, or it is cut."""
    while total_bytes > 0 and target.left_s > 0:
        connection.sendall(data[:total_bytes])
        total_bytes -= len(data)
