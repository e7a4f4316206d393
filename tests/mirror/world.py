"""Mirrors in virtual time: web servers that keep files, and lose, garble, delay and refuse them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.web.client import URI
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from pipegrid.mirror.file_scheduler import Report
from pipegrid.mirror.local_check import MirrorEntry
from pipegrid.mirror.mirror_api import Mirror
from pipegrid.testing.clock import HeapClock
from pipegrid.testing.grid import InlineWorkers
from pipegrid.testing.network import SimulatedNetwork, leaks, run

CLIENT = "client"
Handler = Callable[[str], bytes | None]


@attrs.define
class Host:
    """
    One mirror.

    Attributes:
        files: what it holds.
        answer: returns other bytes to send for a path instead; None: the usual ones. b"": nothing, ever.
        bytes_per_s: it sends no faster; None: as fast as the line.
        closes_after: answers on a connection before it says that it closes.
        breaks_after: bytes sent on a connection before it is reset.
        requests: how often each path was asked for.
    """

    files: Mapping[str, bytes]
    answer: Handler = lambda path: None
    bytes_per_s: float | None = None
    closes_after: int | None = None
    breaks_after: int | None = None
    requests: Counter[str] = attrs.Factory(Counter)
    connections: int = 0


def ok(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """An answer of known length, of a server that can pipeline."""
    lines = b"".join(line + b"\r\n" for line in (b"Server: nginx", *headers))
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status, lines, len(body), body)


def as_written(path: Path) -> tuple[int, ...]:
    """What the file system says of a file, but for when it was last read, which a look at it may change."""
    found = path.stat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class HostProtocol(Protocol):
    """One connection to a mirror."""

    def __init__(self, host: Host, call_later: Callable[..., Any]) -> None:
        self._host = host
        self._call_later = call_later
        self._rest = b""
        self._waiting: deque[str] = deque()
        self._answered = 0
        self._sent = 0
        self._full = False
        self._later: Any = None
        self._silent = self._ended = False

    def connectionMade(self) -> None:
        self._host.connections += 1
        self.transport.registerProducer(self, True)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        *heads, self._rest = (self._rest + data).split(b"\r\n\r\n")
        for head in heads:
            path = unquote(head.split(b" ")[1].decode("ascii")).removeprefix("/archive/")
            self._host.requests[path] += 1
            self._waiting.append(path)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and not (self._full or self._later or self._silent or self._ended):
            path = self._waiting.popleft()
            special = self._host.answer(path)
            if special == b"":
                self._silent = True
                return
            body = self._host.files.get(path)
            self._answered += 1
            last = self._answered == self._host.closes_after
            close = (b"Connection: close",) if last else ()
            answer = (
                special
                if special is not None
                else ok(b"gone", *close, status=b"404 Not Found")
                if body is None
                else ok(body, *close)
            )
            self._send(answer)
            if last and not self._ended:
                self._ended = True
                self.transport.unregisterProducer()  # type: ignore[union-attr]
                self.transport.loseConnection()  # type: ignore[union-attr]

    def _send(self, data: bytes) -> None:
        host, transport = self._host, self.transport
        assert transport is not None
        if host.breaks_after is not None and self._sent + len(data) > host.breaks_after:
            transport.write(data[: host.breaks_after - self._sent])
            self._ended = True
            transport.abortConnection()  # type: ignore[attr-defined]
            return
        self._sent += len(data)
        if host.bytes_per_s is None:
            transport.write(data)
            return
        size = max(1, int(host.bytes_per_s / 10))
        transport.write(data[:size])
        self._later = self._call_later(0.1, self._send_more, data[size:])

    def _send_more(self, data: bytes) -> None:
        self._later = None
        if data:
            self._sent -= len(data)
            self._send(data)
        else:
            self._go_on()

    def connectionLost(self, reason: Any = None) -> None:
        self._ended = True
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def pauseProducing(self) -> None:
        self._full = True

    def resumeProducing(self) -> None:
        self._full = False
        self._go_on()

    def stopProducing(self) -> None:
        self._ended = True


@implementer(IAgentEndpointFactory)
class ToHosts:
    """Connects by the names in URLs."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        return self._network.endpoint(CLIENT, uri.host.decode("ascii"), uri.port)


class MirrorWorld:
    """
    Mirrors, and a directory to keep up to date from them.

    Attributes:
        files: of the archive, by path.
        hosts: by name; ``m0`` and so on.
    """

    def __init__(
        self,
        directory: str,
        files: Mapping[str, bytes],
        hosts: int = 1,
        latency_s: float = 0.01,
        **options: Any,
    ) -> None:
        self.clock = HeapClock()
        self.network = SimulatedNetwork(self.clock, latency_s=latency_s, **options)
        self.directory = Path(directory)
        self.files = dict(files)
        self.hosts: list[Host] = []
        self._ports = []
        for number in range(hosts):
            host = Host(self.files)
            self.hosts.append(host)
            server = self.network.host(f"m{number}")
            build = partial(HostProtocol, host, server.clock.callLater)
            factory = Factory.forProtocol(build)
            self._ports.append(server.listen(80, factory))

    def entries(self) -> list[MirrorEntry]:
        """What an index would say."""
        return [
            (path, len(data), {"sha256": sha256(data).digest()})
            for path, data in self.files.items()
        ]

    def mirror(self, *, mirrors: Sequence[int] | None = None, **options: Any) -> Mirror:
        """
        Open the directory for bringing it up to date; to be closed by ``sync``.

        Args:
            mirrors: the numbers of the hosts that are; None: all of them.
        """
        return Mirror(
            self.network.host(CLIENT).clock,
            [f"http://m{number}/archive" for number in mirrors or range(len(self.hosts))],
            str(self.directory),
            endpoints=ToHosts(self.network),
            workers=InlineWorkers(),
            **{"durability": "none", **options},
        )

    def sync(self, entries: list[MirrorEntry] | None = None, **options: Any) -> Report:
        """Bring it up to date; nothing may be left afterwards."""
        mirror = self.mirror(**options)
        try:
            report = run(
                self.clock,
                mirror.sync(self.entries() if entries is None else entries),
                limit_s=3600,
                network=self.network,
            )
        finally:
            closed: Deferred[None] = mirror.close()
            run(self.clock, closed, network=self.network)
        self.clock.advance(10)
        left = leaks(self.clock, self.network)
        assert not left, left
        return report

    def found(self) -> dict[str, bytes]:
        """What is in the directory, our own things apart."""
        return {
            str(path.relative_to(self.directory)): path.read_bytes()
            for path in self.directory.rglob("*")
            if path.is_file() and ".pipegrid-mirror" not in path.parts
        }

    def asked(self) -> int:
        """How many requests the mirrors have got."""
        return sum(sum(host.requests.values()) for host in self.hosts)
