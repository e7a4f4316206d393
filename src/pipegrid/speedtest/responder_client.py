"""The client's end of a connection to a responder: it connects, authenticates, pings, sends and receives."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import socket
import ssl
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from pipegrid.errors import PipegridError, UsageError
from pipegrid.speedtest.child_processes import in_thread
from pipegrid.speedtest.raw_socket import Buffers, RawStream
from pipegrid.speedtest.responder_protocol import HELLO, LineReader, nonce_of, proof, refusal_of

ANSWER_S = 15.0
"""The time limit for the answer to a line, and for a pause within a transfer."""

TOKEN = r"[0-9A-Za-z_-]{8,64}"
_RESPONDER = re.compile(
    rf"({TOKEN})@(\[[0-9A-Fa-f:.]+\]|[^\s:@#\[\]]+):([0-9]{{1,5}})(?:#([0-9A-Za-z_-]{{43}}))?"
)


class ResponderError(PipegridError):
    """
    The path could not be measured, for example since the other end violates the protocol; the text says why.
    """


@attrs.frozen
class Responder:
    """
    The address of a responder, and its secret.

    Attributes:
        token: the shared secret.
        spki_hash: SHA-256 of its public key, for TLS; None: any server that knows the token is trusted.
    """

    host: str
    port: int
    token: str = attrs.field(repr=False)
    spki_hash: bytes | None = None

    @property
    def address(self) -> str:
        """``host:port``, for people and URLs: an IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        """Return the text that ``parse_responder`` parses, including the token."""
        key = ""
        if self.spki_hash is not None:
            key = "#" + urlsafe_b64encode(self.spki_hash).decode().rstrip("=")
        return f"{self.token}@{self.address}{key}"


def parse_responder(text: str) -> Responder:
    """
    Parse ``TOKEN@HOST:PORT#KEY``, as a responder prints it; ``#KEY`` is optional.

    Raises:
        UsageError: the text is malformed.
    """
    match = _RESPONDER.fullmatch(text.strip())
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise UsageError(
            "this is not the address of a responder; give TOKEN@HOST:PORT#KEY as the responder printed it"
        )
    key = urlsafe_b64decode(match[4] + "=") if match[4] else None
    return Responder(match[2].strip("[]"), int(match[3]), match[1], key)


class Probe:
    """
    One connection to a responder, with one request at a time.

    Create one with ``await Probe.connect(…)``, and close it at the end.
    """

    def __init__(self, reactor: Any, responder: Responder, clock: Any = None) -> None:
        self._reactor = reactor
        self._clock = reactor if clock is None else clock
        self._responder = responder
        self._lines = LineReader()
        self._stream: RawStream | None = None
        self._waiting: Deferred[Any] | None = None
        self._deadline: Any = None
        self._send_bytes = 0
        self._expected_bytes = 0
        self._known = False
        self._error: Exception | None = None

    @classmethod
    async def connect(
        cls,
        reactor: Any,
        responder: Responder,
        *,
        tls: bool = False,
        buffers: Buffers | None = None,
        clock: Any = None,
    ) -> Probe:
        """
        Return a connection that the responder has accepted.

        Args:
            clock: for time limits; None: the reactor.

        Raises:
            ResponderError: the responder is unreachable, has another key, or rejects the client; or the
                server is no responder.
        """
        probe = cls(reactor, responder, clock)
        try:
            await probe._connect(tls, buffers or Buffers())
            answer = await probe._ask(HELLO)
            nonce = nonce_of(answer)
            if nonce is None:
                raise probe._error_for(answer)
            probe._known = True
            await probe._expect(b"PROOF " + proof(responder.token, nonce), b"READY")
        except BaseException:
            probe.close()
            raise
        return probe

    def close(self) -> None:
        """Close the connection; the Deferreds of pending operations never fire."""
        if self._stream is not None:
            self._stream.close()
        self._done_waiting()
        self._waiting = None

    async def ping(self) -> float:
        """Return how many seconds a round trip of a few bytes takes."""
        word = secrets.token_hex(4).encode()
        began = time.perf_counter()
        await self._expect(b"PING " + word, b"PONG " + word)
        return time.perf_counter() - began

    async def prepare_send(self, size_bytes: int) -> None:
        """Announce that this many bytes will be sent."""
        await self._expect(b"TAKE %d" % size_bytes, b"GO")
        self._send_bytes = size_bytes

    async def send(self) -> float:
        """
        Send the announced bytes; fires when the responder has confirmed the last byte, with the time of
        ``time.perf_counter``.
        """
        expected = b"TAKEN %d" % self._send_bytes
        assert self._stream is not None
        waiting = self._wait()
        self._stream.go_on()
        line: bytes = await waiting
        moment = time.perf_counter()
        self._check(line, expected)
        return moment

    async def receive(self, size_bytes: int) -> float:
        """Request bytes; fires when the last byte has arrived, with the time of ``time.perf_counter``."""
        assert self._stream is not None
        go = self._wait()
        self._expected_bytes = size_bytes
        self._stream.send(b"GIVE %d\n" % size_bytes)
        line = await go
        if line is not None:
            self._expected_bytes = 0
            self._check(line, b"GO")
        return time.perf_counter()

    # Lines.

    async def _ask(self, line: bytes) -> bytes:
        assert self._stream is not None
        waiting = self._wait()
        self._stream.send(line + b"\n")
        answer: bytes = await waiting
        return answer

    async def _expect(self, line: bytes, expected: bytes) -> None:
        self._check(await self._ask(line), expected)

    def _check(self, answer: bytes, expected: bytes) -> None:
        if answer != expected:
            raise self._error_for(answer)

    def _error_for(self, answer: bytes) -> ResponderError:
        reason = refusal_of(answer)
        if reason is None:
            return self._no_responder()
        return ResponderError(f"the responder at {self._responder.address} {reason}")

    def _no_responder(self) -> ResponderError:
        return ResponderError(
            f"what answers at {self._responder.address} is not a responder of this speed test; check host and"
            " port, or start one there with: pipegrid speedtest responder"
        )

    def _wait(self) -> Deferred[Any]:
        assert self._waiting is None, "one request at a time"
        waiting: Deferred[Any] = Deferred(lambda _: self.close())
        self._waiting = waiting
        if self._error is not None:
            self._finish_waiting(self._error)
        else:
            self._deadline = self._clock.callLater(ANSWER_S, self._silent)
        return waiting

    def _progress(self) -> None:
        if self._deadline is not None and self._deadline.active():
            self._deadline.reset(ANSWER_S)

    def _silent(self) -> None:
        error = ResponderError(
            f"{self._responder.address} has sent nothing for {ANSWER_S:g} s; check that it is"
            " a responder, and that no firewall is in between"
        )
        self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._error = error
        if self._stream is not None:
            self._stream.close()
        self._finish_waiting(error)

    def _finish_waiting(self, outcome: Any) -> None:
        self._done_waiting()
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.called:
            (waiting.errback if isinstance(outcome, Exception) else waiting.callback)(outcome)

    def _done_waiting(self) -> None:
        if self._deadline is not None and self._deadline.active():
            self._deadline.cancel()
        self._deadline = None

    # Methods that the stream calls.

    def ready(self) -> None:
        self._finish_waiting(None)

    def received(self, data: memoryview) -> None:
        while len(data):
            if self._expected_bytes and self._giving:
                size = min(self._expected_bytes, len(data))
                self._expected_bytes -= size
                data = data[size:]
                self._progress()
                if not self._expected_bytes:
                    self._giving = False
                    self._finish_waiting(None)
                continue
            line, data = self._lines.next(data)
            if line is None:
                continue
            if self._expected_bytes and line == b"GO":
                self._giving = True
            elif self._waiting is None:
                self._give_up(self._error_for(line))  # an answer without a request
                return
            else:
                self._finish_waiting(line)

    _giving = False

    def bulk_bytes(self) -> int:
        """Return how many bytes must still be sent; 0 without a pending request."""
        return self._send_bytes if self._waiting is not None else 0

    def bulk_sent(self, size_bytes: int) -> None:
        """Count bytes that were sent."""
        self._send_bytes -= size_bytes
        self._progress()

    def lost(self, error: Exception | None) -> None:
        if isinstance(error, ssl.SSLError):
            text = (
                f"TLS with {self._responder.address} failed ({error.reason or error}); check that a"
                " responder listens there"
            )
        elif self._known:
            reason = "" if error is None else f" ({_reason(error)})"
            text = f"the responder at {self._responder.address} has closed the connection{reason}"
        elif error is not None:
            text = (
                f"no responder could be reached at {self._responder.address} ({_reason(error)}); start one"
                " there with: pipegrid speedtest responder"
            )
        else:
            text = str(self._no_responder())
        self._give_up(ResponderError(text))

    # Connecting.

    async def _connect(self, tls: bool, buffers: Buffers) -> None:
        host, port = self._responder.host, self._responder.port
        try:
            found = await in_thread(
                self._reactor, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except OSError as error:
            raise ResponderError(
                f"the name {host} is not known ({error.strerror or error}); check its spelling"
            ) from error
        failure: ResponderError | None = None
        for family, kind, protocol, _, address in found:
            self._error = None
            try:
                await self._connect_to(family, kind, protocol, address, tls, buffers)
            except ResponderError as error:
                failure = failure or error
            else:
                break
        else:
            assert failure is not None
            raise failure
        self._check_key()

    async def _connect_to(
        self, family: int, kind: int, protocol: int, address: Any, tls: bool, buffers: Buffers
    ) -> None:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        sock.connect_ex(address)  # the stream reads an error from the socket later
        self._stream = RawStream(
            self._reactor,
            sock,
            self,
            buffers,
            connecting=True,
            secure=_client_tls if tls else None,
        )
        waiting = self._wait()
        self._stream.start()
        await waiting

    def _check_key(self) -> None:
        assert self._stream is not None
        wanted, tls = self._responder.spki_hash, self._stream.tls
        if wanted is None or tls is None:
            return
        if not hmac.compare_digest(spki_hash(tls.getpeercert(True) or b""), wanted):
            raise ResponderError(
                f"what answers at {self._responder.address} has another key than the responder that"
                " was named; check the address, or copy what it printed again"
            )


def spki_hash(certificate_der: bytes) -> bytes:
    """Return the SHA-256 of a certificate's public key, as in addresses of storage servers."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = x509.load_der_x509_certificate(certificate_der).public_key()
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).digest()


def _client_tls(sock: socket.socket) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the key or the token is checked instead of the name
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context.wrap_socket(sock, do_handshake_on_connect=False)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
