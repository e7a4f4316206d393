"""
The responder: a small service for measuring the path to its host, and responder processes for local
measurements.
"""

from __future__ import annotations

import re
import secrets
import socket
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, gatherResults

from pipegrid.errors import UsageError
from pipegrid.reactor.deferreds import as_deferred
from pipegrid.server.identity import from_pem, make_pem
from pipegrid.speedtest.child_processes import ChildProcess, be_child, in_thread, start_child
from pipegrid.speedtest.raw_socket import Buffers, RawStream
from pipegrid.speedtest.responder_client import TOKEN, Responder
from pipegrid.speedtest.responder_protocol import (
    BUSY,
    NO_TIME,
    TLS_HANDSHAKE,
    ByteAllowance,
    ServerSession,
)

#     pipegrid speedtest responder --port 8097 --max-bytes 10GB --max-seconds 3600
#
# The responder accepts and sends bytes, and answers pings, as ``responder_protocol`` defines. It serves
# clients that know the token, up to a number of bytes, for a limited time, and over a few connections, so
# that it cannot be abused as a traffic source. Other clients get ten seconds and at most two lines.

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8097
PROVE_S = 10.0
"""How long a client may take to authenticate."""

IDLE_S = 60.0
"""How long an authenticated client may be idle."""

ACCEPT_AGAIN_S = 1.0

BUSY_RESPONSES = 16
"""How many connections beyond the limit get an answer; further connections are closed without one."""

BACKLOG = 128


def make_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(16)


def _check_token(_settings: object, _attribute: object, token: str) -> None:
    if not re.fullmatch(TOKEN, token):
        raise UsageError(
            "a token is 8 to 64 letters, digits, - or _; leave it out to have one made"
        )


def _at_least_one(_settings: object, attribute: Any, value: float) -> None:
    if value < 1:
        name = attribute.name.replace("_", "-")
        raise UsageError(f"--{name} must be at least 1, not {value:g}")


@attrs.frozen
class ResponderSettings:
    """
    What a responder does for clients with its token.

    Attributes:
        host: the address to listen on.
        max_bytes: the most bytes that the responder receives and sends, all together.
        max_seconds: how long the responder runs.
        max_connections: the most connections at the same time.
    """

    host: str
    port: int
    token: str = attrs.field(repr=False, validator=_check_token)
    max_bytes: int = attrs.field(default=10**10, validator=_at_least_one)
    max_seconds: float = attrs.field(default=3600.0, validator=_at_least_one)
    max_connections: int = attrs.field(default=64, validator=_at_least_one)


@attrs.frozen
class ResponderKey:
    """A key with its certificate, in PEM, and the hash by which clients identify the key."""

    pem: bytes = attrs.field(repr=False)
    spki_hash: bytes


class ResponderService:
    """
    The listening port of a responder, and its connections.

    Args:
        clock: for time limits; None: the reactor.
        key: for TLS; None: a new key.

    Attributes:
        address: the host and port on which it listens.
        spki_hash: the hash by which clients identify its key.
        ended: fires when its time limit has passed.
    """

    def __init__(
        self,
        reactor: Any,
        settings: ResponderSettings,
        clock: Any = None,
        key: ResponderKey | None = None,
    ) -> None:
        self.reactor = reactor
        self.settings = settings
        self.clock = reactor if clock is None else clock
        self.allowance = ByteAllowance(settings.max_bytes)
        self.buffers = Buffers()
        key = make_key() if key is None else key
        self.context, self.spki_hash = make_context(key), key.spki_hash
        self.visitors: set[Visitor] = set()
        self.ended: Deferred[None] = Deferred()
        self._sock = _listen(settings.host, settings.port)
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        reactor.addReader(self)
        self._again: Any = None
        self._end = self.clock.callLater(settings.max_seconds, self._time_is_over)

    def stop(self) -> None:
        """Stop listening, and close every connection."""
        if self._sock.fileno() < 0:
            return
        for call in (self._end, self._again):
            if call is not None and call.active():
                call.cancel()
        self.reactor.removeReader(self)
        self._sock.close()
        for visitor in list(self.visitors):
            visitor.leave(NO_TIME)

    def _time_is_over(self) -> None:
        self.stop()
        self.ended.callback(None)

    # Methods that the reactor calls.

    def fileno(self) -> int:
        return self._sock.fileno()

    def logPrefix(self) -> str:
        return "responder"

    def connectionLost(self, _reason: object) -> None:
        """Do nothing: the reactor has removed the port."""

    def doRead(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return  # the client has already closed it
        except OSError:
            # Without descriptors or memory, accepting fails again at once, so wait before the next attempt.
            self.reactor.removeReader(self)
            self._again = self.clock.callLater(ACCEPT_AGAIN_S, self.reactor.addReader, self)
            return
        over = len(self.visitors) - self.settings.max_connections
        if over >= BUSY_RESPONSES:
            sock.close()
        else:
            self.visitors.add(Visitor(self, sock, busy=over >= 0))


class Visitor:
    """One connection to the service."""

    def __init__(self, service: ResponderService, sock: socket.socket, busy: bool) -> None:
        self._service = service
        self._busy = busy
        self._sock = sock
        self._session = ServerSession(service.settings.token, service.allowance)
        self._stream: RawStream | None = None
        self._patience = service.clock.callLater(PROVE_S, self._gone)
        sock.setblocking(False)
        # The first byte shows whether the client uses TLS.
        service.reactor.addReader(self)

    def leave(self, reason: str) -> None:
        """
        Send the reason, if the client is authenticated and gets no bytes now, and close the connection.
        """
        if self._stream is not None and self._session.proved and not self._session.give_bytes:
            self._session.refuse(reason)
            self._stream.send(self._session.output())
        self._gone()

    # Methods that the reactor calls until the first byte has arrived.

    def fileno(self) -> int:
        return self._sock.fileno()

    def logPrefix(self) -> str:
        return "visitor"

    def connectionLost(self, _reason: object) -> None:
        """Do nothing: the reactor has removed the socket."""

    def doRead(self) -> None:
        """Examine the first byte received."""
        try:
            first = self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if not first:
            self._gone()
            return
        service = self._service
        service.reactor.removeReader(self)
        secure = self._secure if first[0] == TLS_HANDSHAKE else None
        self._stream = RawStream(service.reactor, self._sock, self, service.buffers, secure=secure)
        self._stream.start()

    def _secure(self, sock: socket.socket) -> ssl.SSLSocket:
        return self._service.context.wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False
        )

    # Methods that the stream calls.

    def ready(self) -> None:
        """Do nothing: the client speaks first."""

    def received(self, data: memoryview) -> None:
        if self._busy:
            self._session.refuse(BUSY)
        self._session.receive(data)
        self._progress()
        stream = self._stream
        assert stream is not None
        stream.send(self._session.output())
        if self._session.over:
            stream.finish()
        elif self._session.give_bytes:
            stream.pause(True)
            stream.go_on()

    def bulk_bytes(self) -> int:
        """Return how many bytes to send now."""
        return self._session.give_bytes

    def bulk_sent(self, size_bytes: int) -> None:
        """Count bytes that were sent."""
        self._session.gave(size_bytes)
        self._progress()
        if not self._session.give_bytes and self._stream is not None:
            self._stream.pause(False)

    def lost(self, _error: Exception | None) -> None:
        self._gone()

    def _progress(self) -> None:
        if self._session.proved and self._patience.active():
            self._patience.reset(IDLE_S)

    def _gone(self) -> None:
        if self._patience.active():
            self._patience.cancel()
        if self._stream is not None:
            self._stream.close()
        else:
            self._service.reactor.removeReader(self)
            self._sock.close()
        self._service.visitors.discard(self)


def make_key() -> ResponderKey:
    """Return a new key of the same kind as storage servers have."""
    pem = make_pem()
    return ResponderKey(pem, from_pem(pem, "", "the certificate").spki_hash)


def make_context(key: ResponderKey) -> ssl.SSLContext:
    """Return a TLS context with the settings of storage servers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with tempfile.TemporaryDirectory() as scratch:  # OpenSSL reads the key from a file
        path = Path(scratch) / "key.pem"
        path.touch(0o600)
        path.write_bytes(key.pem)
        context.load_cert_chain(path)
    return context


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen on {host}, port {port}: {reason}; choose another port"
        ) from error
    return sock


@as_deferred
async def responder_main(
    reactor: Any, settings: ResponderSettings, say: Callable[[str], object] = print
) -> None:
    """
    Run a responder until its time limit has passed or the Deferred is cancelled; then fire.

    Args:
        say: called with the address and the token.

    Fails with UsageError: the port cannot be opened.
    """
    service = ResponderService(reactor, settings)
    try:
        host, port = service.address
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        say(str(Responder(host, port, settings.token, service.spki_hash)))
        await service.ended
    except CancelledError:
        pass  # the usual end, like the time limit
    finally:
        service.stop()


# Responder processes next to local servers, for measuring raw TCP.

_NO_LIMIT_BYTES = 10**17
_NO_LIMIT_S = 10.0**6


@attrs.frozen
class RunningResponders:
    """
    Responders in child processes of this machine.

    Attributes:
        responders: their addresses; for use through a proxy, change one by ``attrs.evolve(responder,
            port=…)``.
        children: the processes, in the same order.
    """

    responders: list[Responder]
    children: list[ChildProcess]

    def stop(self) -> Deferred[None]:
        """Stop all responders; fires when their processes have ended."""
        ending = gatherResults([child.stop() for child in self.children], consumeErrors=True)
        return ending.addCallback(lambda _: None)


@as_deferred
async def start_responders(reactor: Any, count: int) -> RunningResponders:
    """Start ``count`` responders, each a process on 127.0.0.1, all with the same new token."""
    token = make_token()
    # All responders share one key: making a key takes longer than the rest of their start.
    key = await in_thread(reactor, make_key)
    job = {"token": token, "pem": key.pem.decode(), "spki_hash": key.spki_hash.hex()}
    starting = [start_child(reactor, "pipegrid.speedtest.responder", job) for _ in range(count)]
    children: list[ChildProcess] = []
    try:
        for each in starting:
            child = await each
            children.append(child)
    except BaseException:
        for each in starting:
            each.addErrback(lambda _: None)
            each.cancel()
        for child in children:
            await child.stop()
        raise
    responders = [Responder(LOOPBACK, int(child.said), token, key.spki_hash) for child in children]
    return RunningResponders(responders, children)


def _child(reactor: Any, job: Any) -> int:
    settings = ResponderSettings(LOOPBACK, 0, job["token"], _NO_LIMIT_BYTES, _NO_LIMIT_S)
    key = ResponderKey(job["pem"].encode(), bytes.fromhex(job["spki_hash"]))
    return ResponderService(reactor, settings, key=key).address[1]


if __name__ == "__main__":
    be_child(_child)
